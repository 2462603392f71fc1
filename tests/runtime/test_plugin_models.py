"""A model family from outside: served by what a plugin registers, made with the public records alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from oarlock import LLM, SamplingParams, extensions
from oarlock.backend_api import Extension, hookimpl
from oarlock.errors import PluginError
from oarlock.plugins import PLUGIN_GROUP, Catalogue, discover, installed
from tiny_model import make_tiny_model

# Llama's layers, described once more by somebody who may import nothing but the plugin surface.
FAMILY = '''
from oarlock.backend_api.runtime.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec, WeightSpec

def model_spec(summary):
    norm = NormSpec("rms", 1e-5)
    attention = AttentionSpec(summary.num_heads, summary.num_kv_heads, summary.head_dim, summary.head_dim**-0.5)
    layer = LayerSpec(attention, MlpSpec("gated", "silu"), norm)
    rope = {"default": RopeSpec(summary.head_dim, 10000.0)}
    return ModelSpec(summary.hidden_size, summary.vocab_size, (layer,) * summary.num_layers, norm, rope)

def weight_specs(summary, spec):
    h, d, i, v = summary.hidden_size, summary.head_dim, summary.intermediate_size, summary.vocab_size
    q, kv = summary.num_heads, summary.num_kv_heads
    found = [
        WeightSpec(("embed", "weight"), ("model.embed_tokens.weight",), ((v, h),), kind="embedding"),
        WeightSpec(("final_norm", "weight"), ("model.norm.weight",), ((h,),), kind="norm"),
        WeightSpec(("lm_head", "weight"), ("lm_head.weight",), ((v, h),), "vocab", kind="lm_head"),
    ]
    for n in range(summary.num_layers):
        at, p = ("layers", n), f"model.layers.{n}."
        qkv = tuple(f"{p}self_attn.{x}_proj.weight" for x in "qkv")
        found += [
            WeightSpec((*at, "qkv", "weight"), qkv, ((q * d, h), (kv * d, h), (kv * d, h)), "column", heads=(q, kv, kv), kind="linear"),
            WeightSpec((*at, "o", "weight"), (p + "self_attn.o_proj.weight",), ((h, q * d),), "row", kind="linear"),
            WeightSpec((*at, "gate_up", "weight"), (p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight"), ((i, h), (i, h)), "column", kind="linear"),
            WeightSpec((*at, "down", "weight"), (p + "mlp.down_proj.weight",), ((h, i),), "row", kind="linear"),
            WeightSpec((*at, "attention_norm", "weight"), (p + "input_layernorm.weight",), ((h,),), kind="norm"),
            WeightSpec((*at, "mlp_norm", "weight"), (p + "post_attention_layernorm.weight",), ((h,),), kind="norm"),
        ]
    return found
'''
PROMPTS = [[5, 6, 7, 8], list(range(3, 60))]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


class Dist:
    name, version = "oarlock-stranger", "1.0"


class Entry:
    """An entry point of a plugin that registers families."""

    name, group, dist = "stranger", PLUGIN_GROUP, Dist

    def __init__(self, *parts: Extension) -> None:
        self.extensions = hookimpl(lambda: list(parts))

    def load(self) -> Entry:
        return self


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def strange(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same weights under an architecture that core does not know, and an importable family for it."""
    folder = tmp_path / "strange"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((llama / "config.json").read_text()) | {"architectures": ["StrangerForCausalLM"]}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "stranger_family.py").write_text(FAMILY)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    sys.modules.pop("stranger_family", None)


def register(monkeypatch: pytest.MonkeyPatch, *parts: Extension) -> None:
    own = installed()
    stranger = discover([Entry(*parts)], ()).plugins
    assert not stranger[0].error, stranger[0].detail
    monkeypatch.setattr(extensions, "installed", lambda: Catalogue((*own.plugins, *stranger), own.hints))


def answers(model: Path) -> list[list[int]]:
    llm = LLM(str(model), device="cpu", dtype="float32", kv_cache_memory="32MiB", max_num_seqs=4)
    try:
        return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    finally:
        llm.close()


def test_a_plugins_family_serves_its_architecture(llama, strange, monkeypatch):
    register(monkeypatch, Extension("model", "StrangerForCausalLM", "stranger_family"))
    assert "stranger_family" not in sys.modules  # imported when it is used
    found = answers(strange)
    assert "stranger_family" in sys.modules
    assert found == answers(llama)


def test_a_family_of_core_is_replaced_by_a_higher_priority_only(llama, strange, monkeypatch):
    register(monkeypatch, Extension("model", "LlamaForCausalLM", "stranger_family"))
    with pytest.raises(PluginError, match="model LlamaForCausalLM comes from .* with equal priority 0"):
        answers(llama)
    register(monkeypatch, Extension("model", "LlamaForCausalLM", "stranger_family", priority=1))
    answers(llama)
    assert "stranger_family" in sys.modules
