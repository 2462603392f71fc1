"""Which method reads a quantised checkpoint, and what is said when none does."""

from __future__ import annotations

from typing import Any

import pytest
from oarlock.backend_api import QuantizationMethod
from oarlock.config.sections import ModelConfig
from oarlock.errors import ConfigError, ModelError, OarlockError, PluginError
from oarlock.model_summary import ModelSummary
from oarlock.quantization import OWN, alias_note, choose_method, name_of, settings_for

CORE = [("oarlock itself", method) for method in OWN]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}


def chosen(settings: dict[str, Any] | None, flag: str | None = None, offered: Any = CORE, **summary: Any) -> str | None:
    found = choose_method(ModelConfig("m", quantization=flag), ModelSummary("m", "A", quantization_config=settings, **summary), offered)
    return found.name if found is not None else None


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (GPTQ, "gptq"),
        ({"bits": 4, "group_size": 128, "desc_act": True}, "gptq"),  # quantize_config.json of older tools
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, "gptq"),
        ({"bits": 4, "group_size": 128, "sym": True, "format": "gptq"}, "gptq"),
        ({"bits": 4, "group_size": 128, "sym": True, "format": "marlin"}, "marlin"),
        ({"quant_method": "GPTQ", "bits": 8}, "gptq"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ({**GPTQ, "is_marlin_format": True}, "marlin"),
        ({**GPTQ, "checkpoint_format": "marlin_24"}, "gptq_marlin_24"),
        (PACKED, "compressed-tensors"),
        ({"format": "int-quantized", "config_groups": {}}, "compressed-tensors"),  # compression_config of older tools
        ({"w_bit": 4, "q_group_size": 128, "zero_point": True}, "awq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"wbits": 4}, "squeezellm"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        ({"bits": 6, "rounding": "nearest"}, "6 bits a weight"),
    ],
)
def test_settings_are_known_by_their_name_or_their_keys(settings: dict[str, Any], name: str) -> None:
    assert name_of(settings) == name


def test_the_checkpoint_says_which_method_reads_it() -> None:
    assert chosen(None) is None
    assert chosen(GPTQ) == "gptq"
    assert chosen(PACKED) == "compressed-tensors"
    assert chosen(GPTQ, "gptq") == "gptq"


def test_gptq_marlin_is_a_kernel_for_gptq_checkpoints() -> None:
    assert chosen(GPTQ, "gptq_marlin") == "gptq"
    gptq = OWN[0]
    assert alias_note(ModelConfig("m", quantization="gptq_marlin"), gptq).startswith("--quantization gptq_marlin: read as gptq")
    assert not alias_note(ModelConfig("m", quantization="gptq"), gptq) and not alias_note(ModelConfig("m"), gptq)


@pytest.mark.parametrize(
    ("settings", "flag", "error", "words"),
    [
        (GPTQ, "compressed-tensors", ConfigError, ["--quantization compressed-tensors", "gptq", "leave the flag out"]),
        (PACKED, "gptq_marlin", ConfigError, ["--quantization gptq_marlin", "quantised with compressed-tensors"]),
        (None, "gptq", ConfigError, ["--quantization gptq", "not quantised", "leave the flag out"]),
        (GPTQ, "qptq", ConfigError, ["--quantization qptq is no quantization method", "compressed-tensors, compressed_tensors, gptq, gptq_marlin"]),
        ({"quant_method": "awq", "bits": 4}, None, ModelError, ["m is quantised (awq)", "does not read", ".gguf"]),
        ({"quant_method": "awq", "bits": 4}, "gptq", ModelError, ["--quantization gptq", "quantised (awq)"]),
        ({**GPTQ, "is_marlin_format": True}, None, ModelError, ["quantised (marlin)"]),
        (["gptq"], None, ModelError, ["m: quantization_config is ['gptq']"]),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(settings: Any, flag: str | None, error: type[OarlockError], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        chosen(settings, flag)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["aqlm", "awq", "bitsandbytes", "deepspeedfp", "fp8", "gptq_marlin_24", "marlin", "squeezellm"])
def test_names_whose_readers_come_later_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen({"quant_method": name}, name)
    text = str(caught.value)
    assert text.startswith(f"--quantization {name}: this version of Oarlock does not read it; take an unquantised checkpoint") and "\n" not in text


@pytest.mark.parametrize(("flag", "name"), [("int8", "int8"), ("int4", "int4"), ("int8_per_channel_weight_only", "int8")])
def test_a_plain_checkpoint_is_quantised_where_the_flag_asks_for_it(flag: str, name: str) -> None:
    assert chosen(None, flag) == name
    assert chosen(None, flag, is_gguf=True) == name  # of 16-bit numbers
    with pytest.raises(ConfigError, match=f"--quantization {flag}: m is quantised with gptq by its own settings; leave the flag out"):
        chosen(GPTQ, flag)
    with pytest.raises(ModelError, match=rf"--quantization {flag}: m is quantised \(awq\), which this version does not read"):
        chosen({"quant_method": "awq"}, flag)
    with pytest.raises(ConfigError, match=f"--quantization {flag}: m is a GGUF file, which says itself how it is quantised"):
        chosen(None, flag, is_gguf=True, is_gguf_quantised=True)
    assert [settings_for(method, ModelSummary("m", "A")) for method in OWN if method.name == name] == [{"quant_method": name}]


def test_a_gguf_file_needs_no_flag() -> None:
    with pytest.raises(ConfigError, match="--quantization gptq: m is a GGUF file"):
        chosen(None, "gptq", is_gguf=True)


def plugin(name: str, *, like: str, priority: int = 0) -> tuple[str, QuantizationMethod]:
    return f"oarlock-{name}", QuantizationMethod(name, f"pkg_{name}:Reader", lambda settings: name_of(settings) == like, priority)


def test_a_plugin_reads_what_core_does_not_and_may_take_precedence() -> None:
    offered = [*CORE, plugin("awq", like="awq")]
    assert chosen({"quant_method": "awq"}, offered=offered) == "awq"
    assert chosen({"quant_method": "awq"}, "awq", offered=offered) == "awq"
    better = [*CORE, plugin("better", like="gptq", priority=1)]
    assert chosen(GPTQ, offered=better) == "better"
    assert chosen(GPTQ, "gptq", offered=better) == "gptq"
    with pytest.raises(ConfigError, match="--quantization awq: m is quantised with gptq"):
        chosen(GPTQ, "awq", offered=offered)


def test_two_readers_of_equal_priority_are_an_error_that_names_both() -> None:
    with pytest.raises(PluginError, match="gptq of oarlock itself and other of oarlock-other"):
        chosen(GPTQ, offered=[*CORE, plugin("other", like="gptq")])
