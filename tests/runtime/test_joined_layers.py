"""A stack that takes all layers at once: packed weights, one cache for all layers, the same answers; blocks move in every layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from oarlock.backend_api import OpImpl
from oarlock.backend_api.runtime import IdentityCommunicator, bind_ops
from oarlock.conformance.tiny_models import TinyModel
from oarlock.runtime.layers.decoder import StepContext
from oarlock.runtime.layers.rope import rope_table
from oarlock.runtime.models import build_model
from oarlock.runtime.programs import Key, ModelPrograms
from oarlock.runtime.reference import FunctionalReferenceAttention

BLOCK, BLOCKS = 8, 7


def pack(layers):
    return {path: {name: torch.stack([w[path][name] for w in layers]) for name in tree} for path, tree in layers[0].items()}


def joined_stack(ops, layers, plans, tensors):
    """One layer's program over all layers: each finds its weights and its part of the cache by its number."""

    def stack(packed, x, kv, step):
        (cache,), residual = kv, None
        for n, plan in enumerate(plans):
            first = n * (cache[0].shape[0] // len(plans))
            regions = [[(lo, hi, replace(m, index=m.index + first * BLOCK * plan.params.num_kv_heads)) for lo, hi, m in g] for g in step.regions]
            here = replace(step, slots=[s + first * BLOCK for s in step.slots], regions=regions)
            w = {path: {name: t[n] for name, t in tree.items()} for path, tree in packed.items()}
            x, residual, cache = layers[0](w, x, residual, cache, here)
        return x, residual, [cache]

    return stack


def built(tiny, joined):
    impls = [OpImpl("decoder_stack", "joined", f"{__name__}:joined_stack", prepare=f"{__name__}:pack")] if joined else []
    ops = bind_ops(impls, "float32")
    make = lambda params, _: FunctionalReferenceAttention(BLOCK, torch.float32, params)
    model, _ = build_model(tiny.summary, ops, IdentityCommunicator(0, 1), make, BLOCK, torch.float32)
    return model, ModelPrograms(model, ops, 4).specs()


def run(spec, key, weights, state, host, device_inputs=None):
    packed = torch.from_numpy(spec.pack(key, host))
    return spec.fn(key, weights, state, {**unpacked(spec, key, packed), **(device_inputs or {})})


def unpacked(spec, key, packed):
    found, at = {}, 0
    for name, shape in spec.inputs(key).items():
        count = int(np.prod(shape))
        found[name] = packed[at : at + count].reshape(shape)
        at += count
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return TinyModel("dense", tmp_path_factory.mktemp("dense"))


def weights_of(tiny, joined):
    single = lambda tree: {k: single(v) if isinstance(v, dict) else v.float() for k, v in tree.items()}
    layers = [single(w) for w in tiny.weights["layers"]]
    rest = {name: single(tree) for name, tree in tiny.weights.items() if name != "layers"}
    return {**rest, "layers": pack(layers) if joined else layers}


@torch.no_grad()
def test_a_joined_stack_gives_the_same_hidden_states_and_caches(tiny):
    found = []
    for joined in (False, True):
        model, specs = built(tiny, joined)
        assert model.joined is joined
        layers = len(model.home)
        shapes = model.attentions[0].kv_layout(BLOCKS * (layers if joined else 1))
        state = {"kv": [tuple(torch.zeros(s) for s in shapes) for _ in range(1 if joined else layers)], "last": torch.zeros(5, dtype=torch.int32)}
        key = Key(tokens=13, rows=1, blocks=2, max_q=13)
        slots = np.array([[[3, 5][p // BLOCK] * BLOCK + p % BLOCK for p in range(13)]])
        host = {"tokens": np.arange(13), "source": np.full(13, 4), "positions": np.arange(13), "slots": slots, "block_tables": [[[3, 5]]]}
        new, out = run(specs["forward"], key, weights_of(tiny, joined), state, {**host, "seq_lens": [13], "query_start_loc": [0, 13]})
        moved, _ = run(specs["block_copy"], Key(copies=2), {}, new, {"source": [3, 0], "destination": [6, 0]})
        _, got = run(specs["gather_blocks"], Key(copies=2), {}, moved, {"ids": [6, 5]})
        assert len(got["blocks"]) == layers
        back, _ = run(specs["scatter_blocks"], Key(copies=2), {}, moved, {"ids": [1, 2]}, {"blocks": [tuple(b) for b in got["blocks"]]})
        caches = [torch.cat([cache[n] for cache in back["kv"]]) for n in (0, 1)]
        found.append((out["all"], *caches))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert float(found[0][1].view(-1, BLOCKS, BLOCK, 2, 16)[1, 1].abs().sum()) > 0  # block 3 went to 6, and by the host to 1, in the last layer too


def test_layers_that_differ_are_walked(tmp_path):
    tiny = TinyModel("hybrid", tmp_path)
    model, _ = built(tiny, True)
    assert not model.joined


def test_hidden_states_are_the_references(tiny):
    """So that the two above cannot be equally wrong."""
    model, _ = built(tiny, False)
    tokens = tuple(range(13))
    table, count = torch.tensor([[1, 2]], dtype=torch.int32), len(tokens)
    ends, starts = torch.tensor([count], dtype=torch.int32), torch.tensor([0, count], dtype=torch.int32)
    positions = torch.arange(count, dtype=torch.int32)
    regions = [[(0, count, model.attentions[0].metadata(table, ends, starts, count, count))]]
    rope = {name: rope_table(spec, 64) for name, spec in model.spec.rope.items()}
    step = StepContext(positions, [positions + BLOCK], regions, torch.ones(count, dtype=torch.bool), rope)
    cache = [tuple(torch.zeros(s) for s in model.attentions[0].kv_layout(3)) for _ in model.home]
    weights = weights_of(tiny, False)
    with torch.no_grad():
        hidden, _ = model.forward(weights, torch.tensor(tokens), cache, step)
        got = model.head(weights, hidden).double().log_softmax(-1)
    assert torch.allclose(got, tiny.logprobs(tokens), atol=1e-4)
