"""Which method reads a quantised checkpoint. Integers and words only; the readers themselves are in `runtime.quantization`.

Owns: core's own methods, the choice among them and plugins', and what is said of checkpoints that nobody reads.
Reads: `backend_api`, `errors`, `plugins`.
Never: imports a reader or torch; opens a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pluggy

from oarlock.backend_api import QuantizationMethod
from oarlock.config.sections import ModelConfig
from oarlock.errors import PIP, ConfigError, ModelError, PluginError
from oarlock.model_summary import ModelSummary
from oarlock.plugins import collect_named

# Names that users bring along; those that no method here answers to are refused.
KNOWN = ("aqlm", "awq", "bitsandbytes", "compressed-tensors", "deepspeedfp", "fp8", "gptq", "gptq_marlin", "gptq_marlin_24", "marlin", "squeezellm")
_REMEDY = f"take an unquantised checkpoint or a .gguf file of the model, or install a plugin that reads it, as {PIP} ./plugins/awq does for awq"

_AT_LOAD = "oarlock.runtime.quantization.at_load:AtLoad"


def name_of(settings: dict[str, Any]) -> str:
    """What a checkpoint's settings call its method, or what they look like; for methods to recognise theirs, and for messages."""
    layout = settings.get("checkpoint_format") or settings.get("format")
    if layout in ("marlin", "marlin_24") or settings.get("is_marlin_format"):
        return "gptq_marlin_24" if layout == "marlin_24" else "marlin"  # weights in a kernel's own order
    given = settings.get("quant_method") or settings.get("quantization")
    if isinstance(given, str):
        return given.lower()
    if "w_bit" in settings or ("zero_point" in settings and "version" in settings):
        return "awq"
    if "wbits" in settings:
        return "squeezellm"
    if "bits" in settings and ("desc_act" in settings or "sym" in settings):
        return "gptq"
    if "config_groups" in settings or "format" in settings:
        return "compressed-tensors"
    return f"{settings.get('bits', 'unknown')} bits a weight"


OWN = (
    QuantizationMethod(
        "gptq", "oarlock.runtime.quantization.gptq:Gptq", lambda settings: name_of(settings) in ("gptq", "gptqmodel", "auto-gptq"), aliases=("gptq_marlin",)
    ),
    QuantizationMethod(
        "compressed-tensors",
        "oarlock.runtime.quantization.compressed_tensors:CompressedTensors",
        lambda settings: name_of(settings) == "compressed-tensors",
        aliases=("compressed_tensors",),
    ),
    QuantizationMethod("int8", _AT_LOAD, lambda settings: False, aliases=("int8_per_channel_weight_only",), of_plain=True),
    QuantizationMethod("int4", _AT_LOAD, lambda settings: False, of_plain=True),
)


def methods(manager: pluggy.PluginManager) -> list[tuple[str, QuantizationMethod]]:
    """(who brings it, method): core's own, then plugins'.

    Raises:
        PluginError: a plugin yields something else.
    """
    found = collect_named(manager, "quantization")
    wrong = next(((plugin, record) for plugin, record in found if not isinstance(record, QuantizationMethod)), None)
    if wrong is not None:
        raise PluginError(f"plugin {wrong[0]}: its hook quantization yielded {type(wrong[1]).__name__} instead of QuantizationMethod")
    return [*(("oarlock itself", method) for method in OWN), *found]


def choose_method(model: ModelConfig, summary: ModelSummary, offered: Sequence[tuple[str, QuantizationMethod]]) -> QuantizationMethod | None:
    """The method for a checkpoint: the one that --quantization names and the checkpoint agrees with, else the one that recognises it.

    None: the checkpoint is not quantised, and nothing asks for that.

    Raises:
        ConfigError: --quantization names what is unknown or not read here, or what the checkpoint is not.
        ModelError: the checkpoint is quantised in a way that nobody reads.
        PluginError: two methods of equal priority recognise it.
    """
    asked, settings = model.quantization, summary.quantization_config
    if asked is not None:
        _check_name(asked, offered)
    if not settings:
        if asked is None:
            return None
        makers = [method for _, method in offered if method.of_plain and asked in (method.name, *method.aliases)]
        if makers and not summary.is_gguf_quantised:
            return makers[0]
        what = "a GGUF file, which says itself how it is quantised" if summary.is_gguf else "not quantised: its config.json has no quantization_config"
        raise ConfigError(f"--quantization {asked}: {summary.path} is {what}; leave the flag out", "quantization")
    if not isinstance(settings, dict):
        raise ModelError(f"{summary.path}: quantization_config is {settings!r:.80}; an object of settings is needed")
    fit = [(owner, method) for owner, method in offered if method.recognises(settings)]
    if asked is not None:
        named = [(owner, method) for owner, method in fit if asked in (method.name, *method.aliases)]
        if fit and not named:
            raise ConfigError(
                f"--quantization {asked}: {summary.path} is quantised with {fit[0][1].name} by its own settings; leave the flag out", "quantization"
            )
        fit = named
    if not fit:
        flag = f"--quantization {asked}: " if asked is not None else ""
        raise ModelError(f"{flag}{summary.path} is quantised ({name_of(settings)}), which this version does not read; {_REMEDY}")
    fit.sort(key=lambda entry: -entry[1].priority)
    if len(fit) > 1 and fit[0][1].priority == fit[1][1].priority:
        raise PluginError(f"{summary.path} is recognised by {fit[0][1].name} of {fit[0][0]} and {fit[1][1].name} of {fit[1][0]}; uninstall one")
    return fit[0][1]


def settings_for(method: QuantizationMethod, summary: ModelSummary) -> dict[str, Any]:
    """What a method's factory is given: the checkpoint's settings, or the method's own name where those are none."""
    return {"quant_method": method.name} if method.of_plain else summary.quantization_config or {}


def alias_note(model: ModelConfig, method: QuantizationMethod | None) -> str:
    """What to tell a user who named a kernel and gets a method; "" else."""
    if method is None or model.quantization in (None, method.name):
        return ""
    return f"--quantization {model.quantization}: read as {method.name}; which kernel computes with it is the device's choice (oarlock doctor)"


def _check_name(asked: str, offered: Sequence[tuple[str, QuantizationMethod]]) -> None:
    names = [name for _, method in offered for name in (method.name, *method.aliases)]
    if asked in names:
        return
    if asked in KNOWN:
        raise ConfigError(f"--quantization {asked}: this version of Oarlock does not read it; {_REMEDY}", "quantization")
    raise ConfigError(f"--quantization {asked} is no quantization method; choose from {', '.join(sorted(names))}, or leave it out", "quantization")
