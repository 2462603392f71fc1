"""Layers in one call against the same layers op by op: the same bits, in every family that it serves and both dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oarlock.conformance.driver import SamplingParams
from oarlock.conformance.quantised_models import KINDS
from oarlock.conformance.runner_level import Bench
from oarlock.conformance.subject import Subject
from oarlock.conformance.tiny_models import MODELS, QUANTISED, VOCAB, TinyModel

pytestmark = pytest.mark.kernels
_LLAMA, _GEMMA3 = MODELS["dense"], MODELS["hybrid"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-biases": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "qwen2": {**_LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "smollm3": {**_LLAMA, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 0]},
    "gemma2": {**_GEMMA3, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 30.0, "final_logit_softcapping": 20.0},
    "gemma3": _GEMMA3,
    "moe": MODELS["moe"],
    "quantized-gptq": _LLAMA,  # int4 in scattered groups: not ours
    "gptq-4": _LLAMA,
    "gptq-4-zeros": _LLAMA,
    "packed-8": _LLAMA,
}
OURS = {"moe": 0, "quantized-gptq": 0}  # layers in one call; the others: all
EVERYTHING = SamplingParams(temperature=0.0, max_tokens=64, prompt_logprobs=VOCAB, logprobs=VOCAB)


@pytest.fixture(scope="module")
def subject():
    made = Subject.named("cpu")
    yield made
    made.close()


def answers(bench: Bench) -> list[Any]:
    """Log-probabilities and tokens of chunks, a mixed batch and decodes, past the window of a windowed model."""
    driver, found = bench.driver, []
    a, b, c = (driver.add(bench.prompt(n, n), EVERYTHING) for n in (37, 5, 21))
    for plan in ({a: 20}, {a: 17, b: 5}, {a: 1, b: 1, c: 21}, *({a: 1, b: 1, c: 1},) * 9):
        out = driver.step(plan)
        found.append((out.token_ids, out.logprobs, out.prompt_logprobs))
    driver.end(a, b, c)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stack_gives_the_bits_of_its_ops(subject, family, dtype, tmp_path, monkeypatch):
    from oarlock_cpu import stack

    if family in KINDS:
        monkeypatch.setitem(QUANTISED, family, family)
    tiny, layers, calls = TinyModel(family, tmp_path / family, FAMILIES[family]), [], []
    lay_out, serve = stack._lay_out, stack._layers

    def counted(numbers, *arguments):
        layers.extend(numbers)
        return lay_out(numbers, *arguments)

    def called(*arguments):
        calls.append(1)
        return serve(*arguments)

    monkeypatch.setattr(stack, "_lay_out", counted)
    monkeypatch.setattr(stack, "_layers", called)
    together = Bench(subject, tiny, dtype)
    try:
        got = answers(together)
    finally:
        together.worker.close()
    count = FAMILIES[family]["num_hidden_layers"]
    assert sorted(layers) == list(range(OURS.get(family, count)))
    assert bool(calls) == bool(layers)
    monkeypatch.setattr(stack, "_is_served", lambda plan, w: False)
    apart = Bench(subject, tiny, dtype)
    try:
        assert got == answers(apart)
    finally:
        apart.worker.close()


def test_a_stack_with_an_op_of_another_package_is_walked(subject, monkeypatch):
    from oarlock_cpu import codes, stack
    from oarlock_cpu import ops as own

    class Others:
        def __getattr__(self, name: str) -> Any:
            return (lambda *_: None) if name == "rotary" else codes.linear if name.startswith("linear_int") else getattr(own, name)

    monkeypatch.setattr(stack, "_is_served", lambda plan, w: True)
    walked = []

    def layer(w, x, residual, cache, step):
        walked.append(w)
        return x, residual, cache

    serve = stack.decoder_stack(Others(), (layer, layer), (None, None), (0, 1))
    serve(["w0", "w1"], torch.zeros(1, 4), [(), ()], None)
    assert walked == ["w0", "w1"]


def test_what_does_not_fit_is_refused_before_anything_is_computed():
    call = torch.ops.oarlock_cpu.decoder_layers.default
    x, positions = torch.zeros(2, 32), torch.zeros(2, dtype=torch.int32)
    shapes, numbers = [1, 1, 16, 0, 0, -1, 0, 0, 8, 0, 0b10001, 0, 0, 0, 0], [1.0] * 7
    with pytest.raises(RuntimeError, match="as many layers"):
        call(x, None, [], shapes[:-1], numbers, [], positions, [], [], [])
    with pytest.raises(RuntimeError, match="as many layers"):
        call(x, None, [], shapes, numbers, [], positions, [], [], [])
    with pytest.raises(RuntimeError, match="as many layers"):
        call(x, None, [x], [], [], [], positions, [], [], [])
    with pytest.raises(RuntimeError, match="a position for each token"):
        call(x, None, [], [], [], [], positions[:1], [], [], [])
    with pytest.raises(RuntimeError, match="no heads"):
        call(x, None, [], [0] * len(shapes), numbers, [], positions, [], [], [])
    with pytest.raises(RuntimeError, match="do not fit step_shapes"):
        call(x, None, [], [], [], [], positions, [], [], [2])
