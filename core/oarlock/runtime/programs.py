"""The programs of a step, as pure functions over explicit weights, state and one packed int32 input buffer.

Owns: what each program reads, writes, takes and computes.
Reads: the model's callables, the op registry's bound callables.
Never: touches a device, a request or the host's view of the batch; contains a step whose shape depends on data.

`fn(key, weights, state, inputs) -> (written state, outputs)`. Only what `writes` names is donated and returned; the
runner rebinds it. Host inputs of a program travel as one int32 buffer whose offsets follow from the key; floats travel
as their bits.

    state    kv       list of cache tuples, one per physical tensor; or one for all, where the model's layers are joined
             last     [max_num_seqs + 1] int32: each row's last token; the final row is the null row
             history  [max_num_seqs + 1, history width] int32: tokens of rows that need penalties
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from oarlock.backend_api.runtime import Ops
from oarlock.runtime.layers.decoder import StepContext
from oarlock.shapes import StepKey

State = dict[str, Any]
Inputs = dict[str, torch.Tensor]
Result = tuple[State, dict[str, Any]]  # (written state, outputs)


@dataclass(frozen=True, slots=True)
class Key:
    """The static shape of one program. A program looks only at its own axes."""

    tokens: int = 0
    rows: int = 0
    blocks: int = 0
    max_q: int = 1
    decode_rows: int = 0
    picks: int = 0  # positions of `select` and `pool`, rows of `logprobs`
    top: int = 0  # entries of `logprobs`
    bias: int = 0  # (token, bias) pairs a row; 0: none
    mask: int = 0  # 1: an allowed-token bitmask a row
    history: int = 0  # width of the history that penalties read; 0: no penalties
    copies: int = 0  # blocks of block_copy, gather_blocks, scatter_blocks


def step_axes(step: StepKey) -> dict[str, int]:
    """The axes of `forward` for a step of this shape."""
    return {name: getattr(step, name) for name in StepKey.__slots__}


Layout = Callable[[Key], dict[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """One program. `inputs(key)` gives the packed buffer's layout; names in `floats` are float32 bits."""

    name: str
    axes: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    inputs: Layout
    fn: Callable[[Key, Any, State, Inputs], Result]
    floats: frozenset[str] = frozenset()

    def key(self, **axes: int) -> Key:
        """A key with only this program's axes set."""
        return Key(**{name: value for name, value in axes.items() if name in self.axes})

    def pack(self, key: Key, host: dict[str, Any]) -> np.ndarray:
        """All host inputs as one int32 array."""
        layout = self.inputs(key)
        packed = np.empty(sum(prod(shape) for shape in layout.values()), np.int32)
        at = 0
        for name, shape in layout.items():
            count = prod(shape)
            value = np.asarray(host[name], np.float32 if name in self.floats else np.int32)
            packed[at : at + count] = value.reshape(-1).view(np.int32)
            at += count
        return packed

    def pure(self, key: Key, ops: Ops) -> Callable[..., tuple[State, dict[str, Any]]]:
        """The function that a graph runner compiles."""
        layout = self.inputs(key)

        def program(weights: Any, written: State, read: State, packed: torch.Tensor, device_inputs: Inputs) -> tuple[State, dict[str, Any]]:
            named: Inputs = dict(device_inputs)
            at = 0
            for name, shape in layout.items():
                count = prod(shape)
                part = packed[at : at + count].reshape(shape)
                named[name] = ops.as_float(part) if name in self.floats else part
                at += count
            return self.fn(key, weights, {**written, **read}, named)

        return program


_ROW_INTS = ("rows", "top_k", "seed", "choice", "position", "prompt_len", "total_len")
_ROW_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


class ModelPrograms:
    """Every program of one model. `model` offers forward, head and the attention objects of its KV groups."""

    def __init__(self, model: Any, ops: Ops, null_row: int) -> None:
        self.model, self.ops, self.null_row = model, ops, null_row
        self.num_groups = len(model.groups)

    def specs(self) -> dict[str, ProgramSpec]:
        """The programs by name."""
        step_axes = ("tokens", "rows", "blocks", "max_q", "decode_rows")
        floats = frozenset((*_ROW_FLOATS, "bias_values"))
        picked: Layout = lambda k: {"index": (k.picks,), "targets": (k.picks,)}
        copied: Layout = lambda k: {"source": (k.copies,), "destination": (k.copies,)}
        ids: Layout = lambda k: {"ids": (k.copies,)}
        history: Layout = lambda k: {"rows": (k.rows,), "tokens": (k.rows, k.history)}
        specs = (
            ProgramSpec("forward", step_axes, ("last",), ("kv",), self._forward_inputs, self.forward),
            ProgramSpec("select", ("tokens", "picks"), (), (), lambda k: {"index": (k.picks,)}, self.select),
            ProgramSpec("pool", ("picks",), (), (), lambda k: {"targets": (k.picks,)}, self.pool),
            ProgramSpec("head", ("rows",), (), (), lambda k: {}, self.head),
            ProgramSpec("greedy", ("rows",), (), ("last",), lambda k: {"rows": (k.rows,)}, self.greedy),
            # `history` is read and written only when the key has a history axis.
            ProgramSpec("sample", ("rows", "bias", "mask", "history"), (), ("last", "history"), self._sample_inputs, self.sample, floats),
            ProgramSpec("logprobs", ("rows", "picks", "top"), (), (), picked, self.logprobs),
            ProgramSpec("load_history", ("rows", "history"), (), ("history",), history, self.load_history),
            ProgramSpec("block_copy", ("copies",), (), ("kv",), copied, self.block_copy),
            ProgramSpec("gather_blocks", ("copies",), ("kv",), (), ids, self.gather_blocks),
            ProgramSpec("scatter_blocks", ("copies",), (), ("kv",), ids, self.scatter_blocks),
        )
        return {spec.name: spec for spec in specs}

    # ------------------------------------------------------------ layouts of the packed inputs
    def _forward_inputs(self, k: Key) -> dict[str, tuple[int, ...]]:
        return {
            "tokens": (k.tokens,),
            "source": (k.tokens,),
            "positions": (k.tokens,),
            "slots": (self.num_groups, k.tokens),
            "block_tables": (self.num_groups, k.rows, k.blocks),
            "seq_lens": (k.rows,),
            "query_start_loc": (k.rows + 1,),
        }

    def _sample_inputs(self, k: Key) -> dict[str, tuple[int, ...]]:
        layout: dict[str, tuple[int, ...]] = {name: (k.rows,) for name in _ROW_INTS + _ROW_FLOATS}
        if k.bias:
            layout |= {"bias_ids": (k.rows, k.bias), "bias_values": (k.rows, k.bias)}
        if k.mask:
            layout["mask"] = (k.rows, (self.model.vocab_size + 31) // 32)
        return layout

    # ------------------------------------------------------------ hidden states and logits
    def forward(self, key: Key, weights: Any, state: State, i: Inputs) -> Result:
        """Tokens to hidden states; writes KV. A token whose source is a row comes from that row's device-resident last token."""
        ids = torch.where(i["source"] < self.null_row, state["last"][i["source"]], i["tokens"])
        step = _step_context(self.model, key, weights, i, self.num_groups)
        hidden, kv = self.model.forward(weights, ids, state["kv"], step)
        if key.rows == key.decode_rows:
            return {"kv": kv}, {"hidden": hidden, "all": hidden}  # token i is row i
        last_token = (i["query_start_loc"][1:] - 1).clamp(min=0)
        return {"kv": kv}, {"hidden": hidden[last_token], "all": hidden}

    def select(self, key: Key, weights: Any, state: State, i: Inputs) -> Result:
        """Hidden states of chosen tokens."""
        return {}, {"hidden": i["all"][i["index"]]}

    def head(self, key: Key, weights: Any, state: State, i: Inputs) -> Result:
        """Hidden states to logits."""
        return {}, {"logits": self.model.head(weights, i["hidden"])}

    def pool(self, key: Key, weights: Any, state: State, i: Inputs) -> Result:
        """Hidden states of chosen tokens to sums: row `n` of the result adds up those whose target is `n`; -1 is padding, which may be NaN."""
        vectors, targets = self.model.pool(weights, i["hidden"]), i["targets"]
        vectors = torch.where(targets[:, None] >= 0, vectors, torch.zeros_like(vectors))
        belongs = targets[None, :] == torch.arange(key.picks, dtype=targets.dtype, device=targets.device)[:, None]
        return {}, {"pooled": belongs.float() @ vectors}

    # ------------------------------------------------------------ tokens
    def greedy(self, key: Key, weights: Any, state: State, i: Inputs) -> Result:
        """The best token of each row."""
        tokens = self.model.comm.broadcast(self.ops.greedy(i["logits"]))  # one rank samples
        return {"last": self.ops.index_update(state["last"], (i["rows"],), tokens.clamp(min=0))}, {"tokens": tokens}

    def sample(self, key: Key, weights: Any, state: State, i: Inputs) -> Result:
        """Penalties, bias, mask, then a draw; which of the first three, the key says."""
        ops, logits = self.ops, i["logits"]
        if key.history:
            history = state["history"][i["rows"], : key.history]
            penalties = (i["presence"], i["frequency"], i["repetition"])
            logits = ops.apply_penalties(logits, history, i["prompt_len"], i["total_len"], *penalties)
        if key.bias:
            logits = ops.apply_bias(logits, i["bias_ids"], i["bias_values"])
        if key.mask:
            logits = ops.apply_mask(logits, i["mask"])
        tokens = ops.sample(logits, i["temperature"], i["top_p"], i["top_k"], i["min_p"], i["seed"], i["choice"], i["position"])
        tokens = self.model.comm.broadcast(tokens)
        kept = tokens.clamp(min=0)
        written: State = {"last": ops.index_update(state["last"], (i["rows"],), kept)}
        if key.history:
            at = i["total_len"].clamp(max=state["history"].shape[1] - 1)
            written["history"] = ops.index_update(state["history"], (i["rows"], at), kept)
        return written, {"tokens": tokens}

    def logprobs(self, key: Key, weights: Any, state: State, i: Inputs) -> Result:
        """Raw log-probabilities of chosen rows: of a given token, or of the one just sampled where none is given."""
        targets = torch.where(i["targets"] >= 0, i["targets"], i["sampled"][i["index"]]).clamp(min=0)
        names = ("logprob", "rank", "top_ids", "top_logprobs")
        return {}, dict(zip(names, self.ops.logprobs(i["logits"][i["index"]], targets, key.top), strict=True))

    def load_history(self, key: Key, weights: Any, state: State, i: Inputs) -> Result:
        """A row's known tokens, for penalties."""
        return {"history": self.ops.index_update(state["history"], (i["rows"],), i["tokens"])}, {}

    # ------------------------------------------------------------ whole blocks: inside the device, to and from the host tier
    def block_copy(self, key: Key, weights: Any, state: State, i: Inputs) -> Result:
        """Copy-on-write."""
        copy = self.model.attentions[0].copy_blocks
        source, destination = (self._in_every_layer(i[name], state["kv"]) for name in ("source", "destination"))
        return {"kv": [copy(cache, source, destination) for cache in state["kv"]]}, {}

    def gather_blocks(self, key: Key, weights: Any, state: State, i: Inputs) -> Result:
        """Blocks to be read by the host: one entry for each layer tensor, joined or not."""
        ids = self._in_every_layer(i["ids"], state["kv"])
        found = [[t.index_select(0, ids).split(key.copies) for t in cache] for cache in state["kv"]]
        # Tuples, as scatter_blocks is given them while serving: to a compiler a list is another argument, and warm-up hands these on.
        return {}, {"blocks": [blocks for cache in found for blocks in zip(*cache, strict=True)]}

    def scatter_blocks(self, key: Key, weights: Any, state: State, i: Inputs) -> Result:
        """Blocks that came from the host, as `gather_blocks` gave them."""
        blocks: Any = i["blocks"]
        put, at = self.ops.index_update, (self._in_every_layer(i["ids"], state["kv"]),)
        if self.model.joined:
            blocks = [[torch.cat(parts) for parts in zip(*blocks, strict=True)]]
        pairs = zip(state["kv"], blocks, strict=True)
        return {"kv": [tuple(put(t, at, new) for t, new in zip(cache, news, strict=True)) for cache, news in pairs]}, {}

    def _in_every_layer(self, ids: torch.Tensor, kv: list[Any]) -> torch.Tensor:
        """Block ids of each tensor of the state: the same, or those of all layers, one layer after another, where they are joined."""
        if not self.model.joined:
            return ids
        layers = max(len(group.layers) for group in self.model.groups)
        first = torch.arange(layers, dtype=ids.dtype, device=ids.device) * (kv[0][0].shape[0] // layers)
        return (first[:, None] + ids).reshape(-1)


def _step_context(model: Any, key: Key, weights: Any, i: Inputs, num_groups: int) -> StepContext:
    """Attention metadata of each KV group and region, made once a step."""
    dr, seq_lens, starts = key.decode_rows, i["seq_lens"], i["query_start_loc"]
    regions: list[list[tuple[int, int, Any]]] = []
    for group in range(num_groups):
        tables, attention, found = i["block_tables"][group], model.attentions[group], []
        if dr:
            found.append((0, dr, attention.metadata(tables[:dr], seq_lens[:dr], starts[: dr + 1], 1, dr)))
        if key.rows > dr:
            meta = attention.metadata(tables[dr:], seq_lens[dr:], starts[dr:] - dr, key.max_q, key.tokens - dr)
            found.append((dr, key.tokens, meta))
        regions.append(found)
    valid = i["slots"][0] >= model.block_size  # padding writes to the null block
    return StepContext(i["positions"], list(i["slots"].unbind(0)), regions, valid, weights["rope"])
