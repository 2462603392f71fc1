"""Real models on real prompts: 64 greedy tokens in float32 are those of transformers. Runs under --full, where the model is on disk.

A model's folder is made with `python tools/make_models.py`; one that is missing, or too large for this machine, is a counted skip.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import NEAR_TIE, NEAR_TIES, NEW_TOKENS
from equivalence import Engine
from oarlock.memory_plan import available_host_bytes
from real_prompts import PROMPTS

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

MODELS = Path("~/.cache/oarlock-models").expanduser()
NAMES = ("smollm2", "gemma3", "qwen")
BATCH: dict[str, Any] = {"max_num_seqs": 20, "max_model_len": 1024}
HOSTILE: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_in_flight": 2, "block_size": 16, "max_model_len": 1024}
Reference = tuple[list[list[int]], list[list[int]], list[list[float]]]  # prompts, tokens, gaps between the two best logits


def folder_of(name: str) -> Path:
    """The model's folder; skips where it cannot be used."""
    folder = MODELS / f"{name}-hf"
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pytest.skip(f"{name}: no checkpoint in ~/.cache/oarlock-models/{name}-hf")
    stored = sum(f.stat().st_size for f in files)
    needed = 2 * stored + (1 << 30)  # float32 from 16 bits, one model at a time, and what a step takes
    if needed > available_host_bytes():
        pytest.skip(f"{name}: float32 needs {needed / 2**30:.1f} GiB, {available_host_bytes() / 2**30:.1f} GiB are available")
    return folder


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Reference]:
    """transformers' own greedy tokens, with its own cache; the model is dropped before ours is loaded."""
    known: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in known:
            import transformers

            transformers.logging.disable_progress_bar()
            folder = folder_of(name)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            found = [continue_greedily(model, prompt) for prompt in prompts]
            known[name] = prompts, [tokens for tokens, _ in found], [gaps for _, gaps in found]
        return known[name]

    return get


@torch.no_grad()
def continue_greedily(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The best token each time, whatever it is (an end of text does not end it)."""
    tokens, gaps, cache, ids = [], [], None, torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        out = model(ids, past_key_values=cache, use_cache=True)
        best = out.logits[0, -1].float().topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        cache, ids = out.past_key_values, best.indices[:1][None]
    return tokens, gaps


def check(name: str, reference: Reference, got: list[list[int]], what: str) -> None:
    """The reference's tokens, up to the first near-tie of each prompt."""
    for prompt, want, gaps, tokens in zip(*reference, got, strict=True):
        assert len(tokens) == NEW_TOKENS
        parted = next((at for at in range(NEW_TOKENS) if tokens[at] != want[at]), None)
        if parted is not None:
            place = f"{name} {what}, prompt of {len(prompt)}, token {parted}: got {tokens[parted]}, reference {want[parted]}, gap {gaps[parted]:.2e}"
            assert gaps[parted] < NEAR_TIE, f"{place}\n got {tokens}\nwant {want}"
            NEAR_TIES.append(place)


@pytest.mark.parametrize("device", ["cpu", "sim-eager"])
@pytest.mark.parametrize("name", NAMES)
def test_twenty_prompts_at_once(reference, record_property, name, device):
    record_property("case", f"{name} (real)|{device}|20 prompts at once")
    if device != "cpu" and name == "qwen":
        pytest.skip("qwen: does not fit the simulated device's 2 GiB in float32")
    folder, known = folder_of(name), reference(name)
    assert max(map(len, known[0])) > 512, "no prompt is longer than Gemma's window"
    # Plain torch attention pads every chunk of a step to the longest one; a smaller step keeps that within the simulated memory.
    engine = Engine(folder, device, **BATCH, **({} if device == "cpu" else {"max_num_batched_tokens": 256}))
    try:
        check(name, known, engine.greedy(known[0], waves=(7,)), f"20 prompts at once on {device}")
        engine.require("mixed", what="20 prompts at once")
    finally:
        engine.close()


@pytest.mark.parametrize("name", NAMES)
def test_twenty_prompts_in_a_hostile_run(reference, record_property, name):
    """Chunks of 16 beside decode rows, prefixes in the cache, two steps in flight, and blocks for little more than the longest prompt."""
    record_property("case", f"{name} (real)|cpu|hostile")
    folder, known = folder_of(name), reference(name)
    longest = max(map(len, known[0])) + NEW_TOKENS
    probe = Engine(folder, "cpu", **HOSTILE)
    needed, groups = probe.core.scheduler._manager.blocks_at_once(longest, 1), len(probe.info.kv_groups)
    probe.close()
    engine = Engine(folder, "cpu", num_blocks_override=needed + 2 * groups, **HOSTILE)
    try:
        order = sorted(range(len(known[0])), key=lambda n: -len(known[0][n]))  # the long ones first: they stay, later ones lose their blocks
        got = engine.greedy([known[0][n] for n in order])
        check(name, known, [tokens for _, tokens in sorted(zip(order, got, strict=True))], "hostile on cpu")
        engine.require("prefix_hits", "chunks", "mixed", "overlapped", "preemptions", what="hostile")
    finally:
        engine.close()


