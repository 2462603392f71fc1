"""`NativeModel`: a ModelSpec bound to ops, attention objects and a rank. And the protocol that every model keeps.

Owns: embedding, the walk over layers, the head, the layout of the weight tree.
Reads: `layers`, `kv_spec`, `backend_api.runtime`.
Never: owns a weight or a cache (both are arguments); knows a checkpoint's file format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from oarlock.backend_api.runtime import Attention, AttentionParams, Communicator, Ops
from oarlock.kv_spec import KVGroup, KVSpec, make_groups
from oarlock.runtime.layers.decoder import StepContext, apply_linear, apply_norm, make_plan
from oarlock.runtime.layers.rope import rope_table
from oarlock.runtime.layers.spec import AttentionSpec, ModelSpec
from oarlock.runtime.layers.stack import is_uniform, make_decoder_stack
from oarlock.runtime.quantization.kv_cache import Scales

Tree = dict[str, Any]
MakeAttention = Callable[[AttentionParams, str], Attention]


class Model(Protocol):
    """What programs need of a model."""

    attentions: list[Attention]  # one per KV group
    comm: Communicator
    groups: tuple[KVGroup, ...]
    kv_specs: tuple[KVSpec, ...]  # one per layer, this rank's heads
    block_size: int
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    role: str  # generate, embed, classify: `pooling_params.role_of`
    joined: bool  # the caches of all layers are one: layer n's block b is block n * num_blocks + b

    def tables(self, length: int) -> dict[str, torch.Tensor]:
        """What is computed from the config alone, for contexts of up to `length` tokens; on the host. Becomes weights["rope"]."""

    def table_bytes(self, length: int) -> int:
        """Bytes of `tables(length)`, without computing them."""

    def forward(self, weights: Tree, ids: torch.Tensor, kv: list[Any], step: StepContext) -> tuple[torch.Tensor, list[Any]]:
        """Token ids [num_tokens] to hidden [num_tokens, hidden_size]; returns the caches to use from now on."""

    def head(self, weights: Tree, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [num_rows, hidden_size] to logits [num_rows, vocab_size], float32. Not of a model whose `role` is not "generate"."""

    def pool(self, weights: Tree, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [num_rows, hidden_size] to what vectors are made of, float32: transformers' last_hidden_state, or a classifier's logits."""


def heads_per_rank(spec: AttentionSpec, size: int) -> tuple[int, int]:
    """Query and KV heads of one rank; KV heads are replicated when there are fewer than ranks. See `indivisible_heads`."""
    return spec.num_heads // size, max(1, spec.num_kv_heads // size)


def indivisible_heads(spec: AttentionSpec, size: int) -> str | None:
    """Why the heads cannot be divided over so many ranks, or None."""
    if spec.num_heads % size:
        return f"does not divide the model's {spec.num_heads} attention heads"
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        return f"fits neither into nor around the model's {spec.num_kv_heads} KV heads"
    return None


class NativeModel:
    """A decoder-only model described by a ModelSpec."""

    def __init__(
        self, spec: ModelSpec, ops: Ops, comm: Communicator, make_attention: MakeAttention, block_size: int, dtype: torch.dtype, kv_scales: Scales = (),
        role: str = "generate",
    ) -> None:  # fmt: skip
        self.role = role
        self.spec, self.ops, self.comm, self.block_size, self.dtype = spec, ops, comm, block_size, dtype
        self.vocab_size, self.hidden_size = spec.vocab_size, spec.hidden_size
        # Rounded to the model's dtype first, as families that scale their embedding do.
        self.embed_scale = None if spec.embed_scale is None else float(torch.tensor(spec.embed_scale, dtype=dtype))
        self.kv_specs = tuple(_kv_spec(layer.attention, comm.size) for layer in spec.layers)
        self.groups = make_groups(self.kv_specs)
        self.attentions: list[Attention] = []
        home: dict[int, tuple[int, int]] = {}  # layer -> (group, physical tensor)
        for group in self.groups:
            self.attentions.append(make_attention(_params(spec.layers[group.layers[0]].attention, comm.size), group.kind))
            home |= {layer: (group.group_id, at) for at, layer in enumerate(group.layers)}
        self.home = [home[layer] for layer in range(len(spec.layers))]
        plans = tuple(
            make_plan(layer, _params(layer.attention, comm.size), self.attentions[group], group, comm, scales)
            for layer, (group, _), scales in zip(spec.layers, self.home, kv_scales or ((1.0, 1.0),) * len(spec.layers), strict=True)
        )
        packs = "decoder_stack" in ops.prepare
        self.joined = packs and is_uniform(plans, self.groups)
        make_stack = ops.decoder_stack if self.joined or not packs else make_decoder_stack
        self.stack = make_stack(ops, tuple(ops.decoder_layer(ops, plan) for plan in plans), plans, tuple(at for _, at in self.home))

    def tables(self, length: int) -> dict[str, torch.Tensor]:
        return {name: rope_table(spec, length) for name, spec in self.spec.rope.items()}

    def table_bytes(self, length: int) -> int:
        return length * sum(rope_table(spec, 1).nbytes for spec in self.spec.rope.values())  # a row for each position

    def forward(self, weights: Tree, ids: torch.Tensor, kv: list[Any], step: StepContext) -> tuple[torch.Tensor, list[Any]]:
        x = self.embed(weights, ids, step.positions)
        x, residual, kv = self.stack(weights["layers"], x, kv, step)
        return (x if residual is None else (x + residual).to(self.dtype)), kv

    def embed(self, weights: Tree, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token embedding, scaled, projected and given learned positions as the family wants."""
        spec = self.spec
        x = self.ops.embedding(ids, weights["embed"]["weight"]).to(self.dtype)
        if spec.embed_scale is not None:
            x = x * self.embed_scale
        if "project_in" in weights:
            x = apply_linear(self.ops, x, weights["project_in"])
        if spec.learned_positions:
            x = x + self.ops.embedding(positions + spec.position_offset, weights["positions"]["weight"])
        return x

    def head(self, weights: Tree, hidden: torch.Tensor) -> torch.Tensor:
        spec, x, head = self.spec, self._last_hidden(weights, hidden), weights["lm_head"]
        # A quantised head's sums stay float32, too: they are those of a float32 linear.
        logits = self.ops.lm_head(x, head["weight"], head.get("bias")) if "weight" in head else apply_linear(self.ops, x.float(), head)
        if self.comm.size > 1 and logits.shape[-1] != spec.vocab_size:
            logits = self.comm.all_gather(logits)
        if spec.logit_softcap is not None:
            logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
        return logits


    def pool(self, weights: Tree, hidden: torch.Tensor) -> torch.Tensor:
        x = self._last_hidden(weights, hidden)
        return (apply_linear(self.ops, x, weights["score"]) if self.role == "classify" else x).float()

    def _last_hidden(self, weights: Tree, hidden: torch.Tensor) -> torch.Tensor:
        x = apply_norm(self.ops, self.spec.norm, hidden, weights["final_norm"]) if self.spec.final_norm else hidden
        return apply_linear(self.ops, x, weights["project_out"]) if "project_out" in weights else x


def _params(spec: AttentionSpec, size: int) -> AttentionParams:
    heads, kv_heads = heads_per_rank(spec, size)
    return AttentionParams(heads, kv_heads, spec.head_dim, spec.scale, spec.window, spec.softcap)


def _kv_spec(spec: AttentionSpec, size: int) -> KVSpec:
    _, kv_heads = heads_per_rank(spec, size)
    return KVSpec("window" if spec.window else "full", kv_heads, spec.head_dim, spec.window)
