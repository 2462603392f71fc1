"""What transformers knows of a model: its class, its config, its modules without weights, and how its checkpoints name them.

Owns: the way from a ModelSummary to a transformers module on the meta device, and to a list of weights.
Reads: `model_summary`, `rope_config`, `layers.spec`; transformers, when such a model is asked for.
Never: runs code that comes with a checkpoint, unless it is told to; reads a weight; computes.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from oarlock.model_summary import ModelSummary
from oarlock.rope_config import normalise_rope
from oarlock.runtime.layers.spec import WeightSpec

_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")


class Refused(Exception):
    """Why transformers' code for a model cannot be used. Becomes an UnsupportedArchitecture that also says what is supported."""


def bare_model(summary: ModelSummary, dtype: torch.dtype, attention_name: str, attention: Callable[..., Any], remote_code: bool) -> Any:
    """The module, its parameters on the meta device, its tables on the host, its attention replaced.

    `remote_code`: where transformers has no class of that name, the checkpoint's own Python code may be run.

    Raises:
        Refused: transformers is missing, has no such class, or its class keeps its attention to itself.
    """
    try:
        import transformers
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        raise Refused("the transformers package, whose code could serve it, is not installed (pip install transformers)") from None
    name = summary.architecture
    cls = getattr(transformers, name, None)
    if cls is None or name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        own = "AutoModelForCausalLM" in (summary.hf_config.get("auto_map") or {})
        if not (own and remote_code):
            hint = "; its auto_map points to Python code of the checkpoint, which runs only with --trust-remote-code" if own else ""
            raise Refused(f"transformers {transformers.__version__} has no decoder-only class of that name{hint}")
        cls = _class_of_checkpoint(summary)
    if not getattr(cls, "_supports_attention_backend", False):
        raise Refused(f"transformers {transformers.__version__} does not let its attention be replaced")
    config = _config(summary, cls)
    ALL_ATTENTION_FUNCTIONS.register(attention_name, attention)
    if cls._can_set_experts_implementation():
        config._experts_implementation = "batched_mm"  # the one without shapes that depend on data
    try:
        with _parameters_on_meta():
            model = cls._from_config(config, dtype=dtype, attn_implementation=attention_name)
            model.tie_weights()
    except (ValueError, TypeError, AttributeError, KeyError, NotImplementedError, ImportError) as error:
        raise Refused(f"its code in transformers {transformers.__version__} does not accept the config: {error}") from error
    _fix_rope(model, summary)
    return model.eval()


def _class_of_checkpoint(summary: ModelSummary) -> Any:
    """Imports the checkpoint's own code. Only after --trust-remote-code."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    try:
        return get_class_from_dynamic_module(summary.hf_config["auto_map"]["AutoModelForCausalLM"], summary.path, local_files_only=True)
    except Exception as error:
        raise Refused(f"the checkpoint's own code cannot be imported: {type(error).__name__}: {error}") from error


def _config(summary: ModelSummary, cls: Any) -> Any:
    """config.json as transformers reads it, with the values that flags changed."""
    raw = json.loads((Path(summary.path) / "config.json").read_text(encoding="utf-8"))
    if "text_config" in raw:
        raise Refused("it is the text part of a composite checkpoint")
    before, after = normalise_rope(raw), summary.hf_config
    changed = {key: value for key, value in after.items() if key not in before or before[key] != value}
    if any(key in changed for key in _ROPE_KEYS):
        raw.pop("rope_parameters", None)
        changed |= {key: after[key] for key in _ROPE_KEYS if after.get(key) is not None}
    return cls.config_class.from_dict({**raw, **changed})


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside take no memory for parameters; buffers, which are computed, stay real."""
    register = torch.nn.Module.register_parameter

    def on_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = torch.nn.Parameter(param.detach().to("meta"), requires_grad=False)
        register(self, name, param)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _fix_rope(model: Any, summary: ModelSummary) -> None:
    """Rotary factors that change with a text's length are fixed at the served context, so that cached keys stay valid."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if not kinds & {"dynamic", "longrope"}:
            continue
        if isinstance(kind, dict):
            raise Refused("its rotary factors change with length and differ between layers")
        frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS[kind](module.config, "cpu", seq_len=summary.max_model_len)
        module.inv_freq.copy_(frequencies)
        module.rope_type = "default"


def weight_specs(model: Any) -> tuple[list[WeightSpec], dict[str, torch.Tensor]]:
    """Parameters from the checkpoint, under the names that it has for them; and tables that were computed from the config, by name.

    Raises:
        Refused: the checkpoint keeps them in a form that is not read here.
    """
    found, constants, saved = [], {}, model.state_dict(keep_vars=True)
    changes = _Conversions(model)
    for name, tensor in model.named_parameters():
        found.append(changes.spec(name, tensor))
    for name, tensor in model.named_buffers():
        if name in saved and tensor.is_floating_point():
            found.append(changes.spec(name, tensor))
        else:
            constants[name] = tensor
    return found, constants


class _Conversions:
    """transformers renames and stacks the tensors of some checkpoints; here backwards, from its name to the checkpoint's."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

        self.renamed: list[tuple[re.Pattern[str], str]] = []  # in the module -> in the checkpoint
        self.stacked: dict[str, list[str]] = {}  # in the module -> in the checkpoint, * for the expert
        for change in get_model_conversion_mapping(model, add_legacy=False):
            targets, sources = [_literal(p) for p in change.target_patterns], [_literal(p) for p in change.source_patterns]
            if not isinstance(change, WeightConverter):
                start = "^" if change.source_patterns[0].startswith("^") else ""
                self.renamed.append((re.compile(start + re.escape(targets[0])), sources[0]))
                continue
            steps = [(type(step), step.dim) for step in change.operations if isinstance(step, MergeModulelist | Concatenate)]
            usual = [(MergeModulelist, 0), (Concatenate, 1)][: len(change.operations)]
            if steps != usual or len(targets) != 1 or not all("*" in s for s in sources) or (len(sources) > 1) != (len(steps) > 1):
                raise Refused("its checkpoints are kept in a form that only transformers' own loader reads")
            self.stacked[targets[0]] = sources

    def spec(self, name: str, tensor: torch.Tensor) -> WeightSpec:
        """Where one tensor of the module comes from."""
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        at = ("parameters", name)
        for target, sources in self.stacked.items():
            if target in name:
                every = tuple(self._old(name.replace(target, s.replace("*", str(e)))) for e in range(shape[0]) for s in sources)
                each = (shape[1] // len(sources), *shape[2:])
                return WeightSpec(at, every, (each,) * len(every), stack=True, stack_parts=len(sources), dtype=dtype)
        return WeightSpec(at, (self._old(name),), (shape,), dtype=dtype)

    def _old(self, name: str) -> str:
        for new, old in reversed(self.renamed):
            name = new.sub(lambda _, old=old: old, name)
        return name


def _literal(pattern: str) -> str:
    """The text that a pattern stands for, where it is plain text, at the start of a name or anywhere; * for a number stays."""
    pattern = pattern.removeprefix("^")
    plain = re.sub(r"\\(.)", r"\1", pattern)
    if re.search(r"[\^$+?()\[\]{}|]", plain) or re.search(r"\\[A-Za-z0-9]", pattern):
        raise Refused("its checkpoints are named in a way that only transformers' own loader reads")
    return plain
