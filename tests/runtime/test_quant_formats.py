"""The readers against files that the public quantizer packages packed, and what they say of files that do not fit.

`quantised_fixtures` were made by tools/make_quantised_fixtures.py with gptqmodel and compressed-tensors: their packing, and
their own reading of it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import oarlock.runtime.reference  # noqa: F401  registers core's ops
import pytest
import torch
from oarlock.backend_api.runtime import Quantization
from oarlock.conformance.quantised_models import KINDS, packed_words, quantise
from oarlock.errors import WeightMismatch
from oarlock.runtime.layers.spec import WeightSpec
from oarlock.runtime.quantization.compressed_tensors import CompressedTensors
from oarlock.runtime.quantization.gptq import Gptq
from oarlock.runtime.quantization.packing import unpack_words
from oarlock.runtime.quantization.schemes import DEQUANTISE
from oarlock.runtime.weights import WeightLoader
from test_models_sharding import Host

FIXTURES = Path(__file__).with_name("quantised_fixtures")
READERS: dict[str, type[Quantization]] = {"gptq": Gptq, "compressed-tensors": CompressedTensors}


@cache
def fixtures(package: str) -> dict[str, dict[str, Any]]:
    """case -> settings, plain, tensors."""
    found: dict[str, dict[str, Any]] = {}
    with np.load(FIXTURES / f"{package}.npz") as file:
        for name in file:
            case, _, part = name.partition("/")
            value = json.loads(str(file[name])) if part == "settings" else torch.from_numpy(file[name])
            if part.endswith("#fp8"):
                part, value = part.removesuffix("#fp8"), value.view(torch.float8_e4m3fn)
            found.setdefault(case, {})[part] = value
    return found


CASES = [(package, case) for package in ("gptqmodel", "compressed-tensors") for case in fixtures(package)]


class Files:
    """Tensors as a checkpoint."""

    is_dummy = False

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> set[str]:
        return set(self.tensors)

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.tensors[name]

    get_shaped = get


def loaded(settings: dict[str, Any], tensors: dict[str, torch.Tensor], spec: WeightSpec, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """The tree of one weight."""
    reader = READERS[settings["quant_method"]](settings)
    loader = WeightLoader(Files(tensors), Host(), torch.float32, rank, size, {}, reader)  # type: ignore[arg-type]
    measured, tree = loader.measure([spec]), loader.load([spec])
    assert sum(measured.values()) == loader.bytes
    return tree


def meaning(node: dict[str, Any], columns: int) -> torch.Tensor:
    """The weight that a node of the tree stands for."""
    ((scheme, weight),) = node.items()
    return DEQUANTISE[scheme](weight, columns, torch.float32)


def linear(*names: str, out: int = 32, width: int = 64, **more: Any) -> WeightSpec:
    return WeightSpec(("a", "weight"), tuple(f"{name}.weight" for name in names), ((out, width),) * len(names), kind="linear", **more)


def tensors_of(fixture: dict[str, Any], name: str = "q") -> dict[str, torch.Tensor]:
    return {f"{name}.{part}": value for part, value in fixture.items() if part not in ("settings", "plain")}


# ---------------------------------------------------------------- right values come from outside
@pytest.mark.parametrize(("package", "case"), CASES)
def test_weights_are_what_the_package_reads_back(package: str, case: str) -> None:
    fixture = fixtures(package)[case]
    tree = loaded(fixture["settings"], tensors_of(fixture), linear("q"))
    torch.testing.assert_close(meaning(tree["a"], 64), fixture["plain"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("package", "case"), CASES)
@pytest.mark.parametrize("shard", ["column", "row"])
def test_two_ranks_hold_the_halves(package: str, case: str, shard: Any) -> None:
    fixture = fixtures(package)[case]
    parts = [loaded(fixture["settings"], tensors_of(fixture), linear("q", shard=shard), rank, 2)["a"] for rank in range(2)]
    width = 64 if shard == "column" else 32
    whole = torch.cat([meaning(part, width) for part in parts], 0 if shard == "column" else 1)
    torch.testing.assert_close(whole, fixture["plain"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("package", "case"), CASES)
def test_fused_linears_lie_one_below_the_other(package: str, case: str) -> None:
    fixture = fixtures(package)[case]
    tree = loaded(fixture["settings"], tensors_of(fixture, "q") | tensors_of(fixture, "k"), linear("q", "k", shard="column"), 1, 2)
    half = fixture["plain"][16:]
    torch.testing.assert_close(meaning(tree["a"], 64), torch.cat((half, half)), rtol=1e-6, atol=1e-7)


def test_four_ranks_hold_quarters_of_a_group() -> None:
    """Groups of 32 columns on ranks of 16: each rank names the group of each of its columns."""
    for fixture in (fixtures("gptqmodel")["4-asym"], fixtures("compressed-tensors")["w8a16"]):
        parts = [loaded(fixture["settings"], tensors_of(fixture), linear("q", shard="row"), rank, 4)["a"] for rank in range(4)]
        torch.testing.assert_close(torch.cat([meaning(part, 16) for part in parts], 1), fixture["plain"], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 31, 32, 70])
def test_unpacking_is_the_inverse_of_packing(bits: int, count: int) -> None:
    values = torch.randint(0, 2**bits, (5, count), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unpack_words(packed_words(values, bits), bits, count).long(), values)


# ---------------------------------------------------------------- what does not fit is said by name
def made(kind: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    found = quantise(kind, {"q.weight": torch.randn(32, 64, generator=torch.Generator().manual_seed(1))})
    return found.settings, found.tensors


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("gptq-4", {"q.qzeros": None}, ["the checkpoint lacks q.qzeros"]),
        ("gptq-4", {"q.scales": torch.ones(3, 32)}, ["q.scales has shape [3, 32]", "call for [4, 32]"]),
        ("gptq-4", {"q.qweight": torch.zeros(8, 32)}, ["q.qweight holds torch.float32", "torch.int32"]),
        ("gptq-4", {"q.scales": torch.ones(4, 32, dtype=torch.int32)}, ["q.scales holds torch.int32", "a floating point tensor"]),
        ("gptq-4", {"q.qzeros": torch.zeros(4, 4, dtype=torch.int32)}, ["q: ", '"sym": true', "zeros other than 7", '"gptq_v2"']),
        ("gptq-4", {"q.g_idx": torch.arange(64, dtype=torch.int32) % 4}, ["q: g_idx scatters the groups", '"desc_act": false']),
        ("gptq-4-order", {"q.g_idx": torch.full((64,), 9, dtype=torch.int32)}, ["q: g_idx holds groups outside 0 .. 3"]),
        ("gptq-4-order", {"q.g_idx": None}, ["lacks q.g_idx"]),
        ("gptq-4", {"q.bias": torch.ones(32)}, ["1 tensors of the checkpoint belong nowhere", "q.bias"]),
        ("gptq-4", {"q.surprise": torch.ones(1)}, ["belong nowhere", "q.surprise"]),
        ("packed-4", {"q.weight_shape": torch.tensor([64, 32])}, ["q: weight_shape says [64, 32], config.json calls for [32, 64]"]),
        ("w8a8-static", {"q.input_scale": None}, ["lacks q.input_scale"]),
        ("fp8", {"q.weight_scale": torch.ones(1)}, ["q.weight_scale has shape [1]", "call for [32, 1]"]),
        ("fp8", {"q.weight": torch.zeros(32, 64)}, ["q.weight holds torch.float32", "torch.float8_e4m3fn"]),
    ],
)
def test_a_tensor_that_is_missing_or_wrong_is_named(kind: str, change: dict[str, Any], words: list[str]) -> None:
    settings, tensors = made(kind)
    tensors = {name: value for name, value in {**tensors, **change}.items() if value is not None}
    with pytest.raises(WeightMismatch) as caught:
        loaded(settings, tensors, linear("q"))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_settings_without_a_quantised_tensor_are_refused() -> None:
    settings, _ = made("gptq-4")
    with pytest.raises(WeightMismatch, match="say that q and others are quantised, but every linear of the checkpoint is a plain tensor"):
        loaded(settings, {"q.weight": torch.zeros(32, 64)}, linear("q"))


def test_a_bias_of_zeros_that_the_model_has_not_is_left_out() -> None:
    settings, tensors = made("gptq-4")
    assert set(loaded(settings, {**tensors, "q.bias": torch.zeros(32)}, linear("q"))["a"]) == {"int4"}


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        ("gptq-4", linear("q", width=72), "its 72 inputs are no multiple of the group size 16"),
        ("gptq-3", linear("q", out=40), "gptq packs 3-bit weights by 32; its 64 inputs and 40 outputs"),
        ("packed-4", linear("q", width=72), "its 72 inputs are no multiple of the group size 16"),
        ("fp8-block", linear("q", width=72), "its 72 inputs are no multiple of the block size 16"),
    ],
)
def test_a_size_that_groups_do_not_divide_is_named(kind: str, spec: WeightSpec, words: str) -> None:
    settings, tensors = made(kind)
    with pytest.raises(WeightMismatch, match=f"q: .*{words}"):
        loaded(settings, tensors, spec)


def test_parts_of_one_linear_must_be_alike() -> None:
    settings, tensors = made("gptq-4-order")
    other = {name.replace("q.", "k.", 1): value for name, value in tensors.items()}
    assert loaded(settings, {**tensors, **other}, linear("q", "k"))
    with pytest.raises(WeightMismatch, match=r"q\.weight \+ k\.weight are computed as one, but order their columns differently"):
        loaded(settings, {**tensors, **other, "k.g_idx": other["k.g_idx"].flip(0)}, linear("q", "k"))
    with pytest.raises(WeightMismatch, match=r"q\.weight \+ k\.weight are computed as one, but are stored as int4 and plain"):
        loaded(settings, {**tensors, "k.weight": torch.zeros(32, 64)}, linear("q", "k"))


def test_static_scales_of_fused_parts_become_the_largest() -> None:
    settings, tensors = made("w8a8-static")
    other = {name.replace("q.", "k.", 1): value for name, value in tensors.items()} | {"k.input_scale": torch.tensor(0.5)}
    tree = loaded(settings, {**tensors, **other}, linear("q", "k"))
    assert tree["a"]["w8a8"]["input_scale"].tolist() == [0.5] and tree["a"]["w8a8"]["scales"].shape == (64, 1)


# ---------------------------------------------------------------- settings
@pytest.mark.parametrize(
    ("reader", "settings", "words"),
    [
        (Gptq, {"bits": 5}, "bits is 5; gptq is read with 2, 3, 4, 8"),
        (Gptq, {"bits": 4, "group_size": 0}, "group_size is 0"),
        (Gptq, {"bits": 4, "checkpoint_format": "bitblas"}, "checkpoint_format 'bitblas' is not read; gptq and gptq_v2 are"),
        (CompressedTensors, {**KINDS["packed-4"], "format": "nvfp4-pack-quantized"}, "4-bit int weights as nvfp4-pack-quantized; pack-quantized"),
        (CompressedTensors, {**KINDS["packed-4"], "format": "marlin-24"}, "as marlin-24"),
        (CompressedTensors, {**KINDS["int8"], "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (CompressedTensors, {**KINDS["int8"], "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        (CompressedTensors, {"config_groups": [1]}, "config_groups is \\[1\\]"),
    ],
)
def test_settings_that_are_not_read_are_refused(reader: type[Quantization], settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        reader(settings)


@pytest.mark.parametrize(
    ("kind", "part", "change", "words"),
    [
        ("w8a8", "input_activations", {"symmetric": False}, "8-bit asymmetric int activations"),
        ("w8a8", "input_activations", {"num_bits": 4}, "4-bit int activations"),
        ("w8a8", "input_activations", {"strategy": "tensor"}, "dynamic activations by tensor"),
        ("w8a8", "input_activations", {"dynamic": False}, "static activations by token"),
        ("w8a8", "weights", {"strategy": "group", "group_size": 16}, "a scale for each tensor or channel"),
        ("fp8-dynamic", "input_activations", {"type": "int"}, "8-bit int activations beside 8-bit float weights"),
        ("fp8-block", "input_activations", {"group_size": 32}, "not the weights' blocks"),
        ("packed-4", "weights", {"strategy": "tensor_group"}, "scales weights by tensor_group"),
        ("packed-4", "weights", {"num_bits": 3}, "3-bit int weights as pack-quantized"),
        ("packed-4", "weights", {"group_size": None}, "group_size None"),
        ("fp8", "weights", {"symmetric": False}, "zero points with float weights"),
        ("fp8", "weights", {"actorder": "group"}, "actorder 'group' with float weights"),
    ],
)
def test_groups_that_are_not_read_are_refused(kind: str, part: str, change: dict[str, Any], words: str) -> None:
    settings = json.loads(json.dumps(KINDS[kind]))
    settings["config_groups"]["group_0"][part].update(change)
    with pytest.raises(ValueError, match=f"config group group_0 .*{words}"):
        CompressedTensors(settings)


def test_targets_by_name_come_before_those_by_class() -> None:
    settings = json.loads(json.dumps(KINDS["packed-4"]))
    groups = settings["config_groups"]
    groups["eight"] = json.loads(json.dumps(KINDS["packed-8"]["config_groups"]["group_0"])) | {"targets": ["re:.*down_proj$", "model.layers.1.mlp.up_proj"]}
    settings["ignore"] = ["lm_head", "re:.*layers[.]3[.].*", "language_model.model.layers.0.mlp.up_proj"]
    method = CompressedTensors(settings)

    def scheme(prefix: str) -> str | None:
        found = method.linear(prefix, prefix == "lm_head")
        return found.scheme if found is not None else None

    assert scheme("model.layers.2.mlp.up_proj") == "int4"
    assert scheme("model.layers.2.mlp.down_proj") == "int8"
    assert scheme("model.layers.1.mlp.up_proj") == "int8"
    assert scheme("model.layers.3.mlp.down_proj") is None
    assert scheme("model.layers.0.mlp.up_proj") is None  # named within a composite
    assert scheme("lm_head") is None


def test_gptq_leaves_out_and_overrides_modules() -> None:
    rules = {"-:.*o_proj": {}, r"+:.*\.0\..*": {"bits": 8}, r".*\.1\..*": {"group_size": 32}}
    method = Gptq({"bits": 4, "group_size": 16, "dynamic": rules})
    assert method.linear("model.layers.0.self_attn.o_proj", False) is None
    assert method.linear("model.layers.0.mlp.up_proj", False).scheme == "int8"
    assert method.linear("model.layers.1.mlp.up_proj", False).tensors(32, 64)["scales"].shape == (2, 32)
    assert method.linear("model.layers.2.mlp.up_proj", False).tensors(32, 64)["scales"].shape == (4, 32)
    assert method.linear("lm_head", True) is None
    assert Gptq({"bits": 4, "lm_head": True}).linear("lm_head", True) is not None
    only = Gptq({"bits": 4, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert only.linear("model.layers.0.mlp.up_proj", False) is not None and only.linear("model.layers.0.mlp.down_proj", False) is None


def test_a_quantised_head_is_dequantised_when_it_is_loaded() -> None:
    settings, tensors = made("gptq-4-zeros")
    plain = quantise("gptq-4-zeros", {"q.weight": torch.randn(32, 64, generator=torch.Generator().manual_seed(1))}).plain["q.weight"]
    spec = WeightSpec(("lm_head", "weight"), ("lm_head.weight",), ((32, 64),), "vocab", kind="lm_head")
    tree = loaded({**settings, "lm_head": True}, {name.replace("q.", "lm_head.", 1): value for name, value in tensors.items()}, spec, 1, 2)
    torch.testing.assert_close(tree["lm_head"]["weight"], plain[16:])


def test_a_device_packs_a_scheme_once() -> None:
    settings, tensors = made("gptq-4")
    packed: list[set[str]] = []
    prepare = {"linear_int4": lambda weight: packed.append(set(weight)) or "packed", "linear": lambda weight: pytest.fail("not a plain weight")}
    loader = WeightLoader(Files(tensors), Host(), torch.float32, 0, 1, prepare, Gptq(settings))  # type: ignore[arg-type]
    assert loader.load([linear("q")]) == {"a": {"int4": "packed"}} and packed == [{"codes", "scales"}]


@pytest.mark.parametrize("pattern", ["(((", "a{99999999999}", "*"])
def test_what_is_no_regular_expression_is_said_before_a_layer_is_made(pattern: str) -> None:
    settings = json.loads(json.dumps(KINDS["packed-8"]))
    with pytest.raises(ValueError, match="ignore has .* no regular expression"):
        CompressedTensors({**settings, "ignore": ["re:" + pattern]})
    settings["config_groups"]["group_0"]["targets"] = ["re:" + pattern]
    with pytest.raises(ValueError, match="targets has .* no regular expression"):
        CompressedTensors(settings)
    with pytest.raises(ValueError, match="dynamic has .* no regular expression"):
        Gptq({"bits": 4, "dynamic": {"-:" + pattern: {}}})


@pytest.mark.parametrize("pattern", ["(a+)+$", "(?:(?:x|a*)b?)*c", "(.*)*", "((a{2,})b)+", "x" * 5000])
def test_a_pattern_that_may_match_for_ever_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="dynamic has .* may take for ever"):
        Gptq({"bits": 4, "dynamic": {"-:" + pattern: {}}})


@pytest.mark.parametrize("pattern", [r".*\.(?:1[0-9]|[2-9])\..*(?:up|down)_proj", r"model\.layers\.\d+\..*", "(?:ab){2,3}x+"])
def test_usual_patterns_are_taken(pattern: str) -> None:
    Gptq({"bits": 4, "dynamic": {"-:" + pattern: {}}})
