"""Decoder-only models that have no file here: transformers' own modelling code, with its attention replaced by the paged one.

Owns: the attention function registered with transformers, and the model made around its code.
Reads: `model_summary`, `layers`, `models.base`, `models.transformers_config`, `backend_api.runtime`; transformers, when such a model is asked for.
Never: keeps a weight (they are arguments); uses transformers' cache.

A model is probed on the meta device before anything is read: each layer must call its attention function exactly once and
ask nothing of it that the paged attention does not do. What is refused says why.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call

from oarlock.backend_api.runtime import Attention, AttentionParams, Communicator
from oarlock.errors import ConfigError
from oarlock.kv_spec import KVSpec, make_groups
from oarlock.model_summary import ModelSummary
from oarlock.runtime.layers.decoder import StepContext, attend_and_keep, make_plan
from oarlock.runtime.layers.spec import AttentionSpec, WeightSpec
from oarlock.runtime.models.base import MakeAttention, Tree
from oarlock.runtime.models.transformers_config import Refused, bare_model, weight_specs
from oarlock.runtime.quantization.kv_cache import Scales

NAME = "oarlock_paged"  # in transformers' table of attention functions
# Arguments of an attention function that say nothing about which scores there are, or that the masks of paging imply.
_HARMLESS = frozenset((
    "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "is_causal", "max_length_k", "max_length_q", "output_attentions",
    "output_hidden_states", "past_key_values", "position_embeddings", "position_ids", "return_dict", "target_dtype", "use_cache",
))  # fmt: skip
_RUNNING = threading.local()  # .attend: what the registered function does on this thread

# (layer, query, key, value [1, heads, num_tokens, head_dim], scale, window, softcap) -> [1, num_tokens, heads, head_dim]
Attend = Callable[..., torch.Tensor]


def paged_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, **more: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention interface. What it does depends on whether the model is probed or run."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _RUNNING.attend(module, query, key, value, scale, sliding_window, softcap, attention_mask, more), None


def build_from_transformers(
    summary: ModelSummary, comm: Communicator, make_attention: MakeAttention, block_size: int, dtype: torch.dtype, remote_code: bool,
    kv_scales: Scales = (),
) -> tuple[TransformersModel, list[WeightSpec]]:
    """The model, and where its weights come from.

    Raises:
        Refused: transformers has no such class, or its attention cannot be replaced; the message says which.
        ConfigError: more ranks than one.
    """
    causal = bare_model(summary, dtype, NAME, paged_attention, remote_code)
    if comm.size > 1:
        raise ConfigError(
            f"--tensor-parallel-size {comm.size}: {summary.architecture} is served by transformers' own code, which is not divided over ranks; use 1",
            "tensor_parallel_size",
        )
    specs, constants = weight_specs(causal)
    return TransformersModel(summary, causal, constants, comm, make_attention, block_size, dtype, kv_scales), specs


@dataclass(slots=True)
class _Run:
    """One forward: the caches as they are replaced, layer by layer."""

    model: TransformersModel
    step: StepContext
    kv: list[Any]

    def attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
        plan, (_, tensor) = self.model.plans[module.layer_idx], self.model.home[module.layer_idx]
        q, k, v = (x[0].transpose(0, 1).to(self.model.dtype).contiguous() for x in (query, key, value))
        out, self.kv[tensor] = attend_and_keep(plan, q, k, v, self.kv[tensor], self.step)
        return out[None].to(query.dtype)


class TransformersModel:
    """Keeps `models.base.Model`. Weights: {"parameters": tensors by transformers' names, "rope": what its code computes from the config}."""

    joined, role = False, "generate"

    def __init__(
        self,
        summary: ModelSummary,
        causal: Any,
        constants: dict[str, torch.Tensor],
        comm: Communicator,
        make_attention: MakeAttention,
        block_size: int,
        dtype: torch.dtype,
        kv_scales: Scales,
    ) -> None:
        self.constants = constants
        self.comm, self.block_size, self.dtype = comm, block_size, dtype
        self.base, self.head_only = causal.base_model, _head_only(causal)
        names = {id(tensor): name for name, tensor in reversed(_tensors(causal))}  # tied ones go by their first name
        self._of_base = [(name, names[id(tensor)]) for name, tensor in _tensors(self.base)]
        self._of_head = [(name, names[id(tensor)]) for name, tensor in _tensors(self.head_only)]
        layers, self.hidden_size, self.vocab_size = _probe(self, causal, summary)
        if self.vocab_size != summary.vocab_size:
            raise Refused(f"its head gives {self.vocab_size} logits, config.json says {summary.vocab_size}")
        params = [AttentionParams(a.num_heads, a.num_kv_heads, a.head_dim, a.scale, a.window, a.softcap) for a in layers]
        self.kv_specs = tuple(KVSpec("window" if a.window else "full", a.num_kv_heads, a.head_dim, a.window) for a in layers)
        try:
            self.groups = make_groups(self.kv_specs)
        except ValueError as error:
            raise Refused(str(error)) from None
        self.attentions: list[Attention] = [make_attention(params[g.layers[0]], g.kind) for g in self.groups]
        home = {layer: (g.group_id, at) for g in self.groups for at, layer in enumerate(g.layers)}
        self.home = [home[layer] for layer in range(len(layers))]
        self.plans = [
            make_plan(a, p, self.attentions[group], group, comm, scales)
            for a, p, (group, _), scales in zip(layers, params, self.home, kv_scales or ((1.0, 1.0),) * len(layers), strict=True)
        ]

    def tables(self, length: int) -> dict[str, torch.Tensor]:
        return dict(self.constants)

    def table_bytes(self, length: int) -> int:
        return sum(table.nbytes for table in self.constants.values())

    def forward(self, weights: Tree, ids: torch.Tensor, kv: list[Any], step: StepContext) -> tuple[torch.Tensor, list[Any]]:
        """Token ids [num_tokens] to hidden [num_tokens, hidden_size], after the final norm."""
        run = _Run(self, step, list(kv))
        return self._call_base(weights, ids, step.positions, run.attend)[0], run.kv

    def head(self, weights: Tree, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [num_rows, hidden_size] to logits [num_rows, vocab_size], float32."""
        out = functional_call(self.head_only, self._named(weights, self._of_head), (), {"inputs_embeds": hidden[None], "use_cache": False})
        return out.logits[0].float()

    def pool(self, weights: Tree, hidden: torch.Tensor) -> torch.Tensor:
        """The same [num_rows, hidden_size], float32: the final norm is done."""
        return hidden.float()

    def _call_base(self, weights: Tree, ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        inputs = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False}
        _RUNNING.attend = attend
        try:
            return functional_call(self.base, self._named(weights, self._of_base), (), inputs).last_hidden_state
        finally:
            del _RUNNING.attend

    @staticmethod
    def _named(weights: Tree, names: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
        parameters, constants = weights["parameters"], weights["rope"]
        return {own: parameters[name] if name in parameters else constants[name] for own, name in names}


class _Given(torch.nn.Module):
    """Stands where the layers were: the hidden state is the one given."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Returned:
        return _Returned(inputs_embeds)


class _Returned:
    """What layers return: a hidden state. Whatever else a class looks for (caches, router logits) is None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, at: Any) -> Any:
        return (self.last_hidden_state,)[at]

    def __getattr__(self, name: str) -> None:
        return None


def _head_only(causal: Any) -> Any:
    """The same model without its layers: what its class does after them, scaling of logits included."""
    if causal.base_model is causal:
        raise Refused("its class does not part the layers from the head")
    head = copy.copy(causal)
    head._modules = {**causal._modules, causal.base_model_prefix: _Given()}
    return head


def _tensors(module: Any) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name, tied ones under each of their names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _probe(model: TransformersModel, causal: Any, summary: ModelSummary) -> tuple[list[AttentionSpec], int, int]:
    """(attention of each layer, hidden size, width of the logits), from a forward of two tokens on the meta device.

    Raises:
        Refused: the attention cannot be replaced.
    """
    if "position_ids" not in inspect.signature(model.base.forward).parameters:
        raise Refused("its code takes no position_ids")
    found: dict[int, AttentionSpec] = {}

    def attend(module: Any, query: Any, key: Any, value: Any, scale: float, window: int | None, softcap: float | None, mask: Any, more: Any) -> Any:
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in found:
            raise Refused("its layers do not call the attention function exactly once each, or do not say which layer they are")
        odd = [name for name, given in more.items() if given is not None and name not in _HARMLESS]
        if mask is not None or odd or more.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            asked = "a mask of its own" if mask is not None else ", ".join(odd) or "attention that is not causal"
            raise Refused(f"its attention needs {asked}, which the paged attention does not offer")
        if key.shape[-1] != query.shape[-1] or value.shape != key.shape:
            raise Refused(f"its keys and values differ in size ({key.shape[-1]} and {value.shape[-1]} numbers a head)")
        limit = window if window is not None and window < summary.max_model_len else None  # a window that no context leaves
        found[layer] = AttentionSpec(query.shape[1], key.shape[1], query.shape[-1], float(scale), None, window=limit, softcap=softcap)
        return query.transpose(1, 2)

    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in _tensors(causal)}
    two = torch.zeros(2, dtype=torch.int32, device="meta")
    weights = {"parameters": meta, "rope": {}}
    try:
        hidden = model._call_base(weights, two, two, attend)
        logits = model.head(weights, hidden[0])
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"a trial run of its code failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    if sorted(found) != list(range(summary.num_layers)):
        raise Refused(f"only {len(found)} of its {summary.num_layers} layers call a replaceable attention function")
    layers = [found[layer] for layer in range(summary.num_layers)]
    window = min((w for w in summary.layer_windows if w is not None), default=summary.max_model_len)
    if window < summary.max_model_len and not any(layer.window for layer in layers):
        raise Refused(
            f"its code does not tell its attention of the window of {window} tokens that config.json has; "
            f"it can be served with --max-model-len {window}, where the window does not matter"
        )
    return layers, hidden.shape[-1], logits.shape[-1]
