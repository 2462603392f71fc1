"""A model cut over 2 and 4 ranks gives the logits of the whole one, for every family; what cannot be cut is refused by name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import oarlock.runtime.reference  # noqa: F401  registers core's ops
import pytest
import torch
from checkpoints import FAMILIES, Tiny
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Communicator, Device, IdentityCommunicator, bind_ops
from oarlock.backend_api.runtime.ops import resolve
from oarlock.config.resolve import from_kwargs
from oarlock.errors import ConfigError
from oarlock.model_summary import load_summary
from oarlock.quantization import OWN, choose_method, settings_for
from oarlock.runtime.layers.decoder import StepContext
from oarlock.runtime.loader import open_checkpoint
from oarlock.runtime.models import build_model
from oarlock.runtime.reference.attention import ReferenceAttention
from oarlock.runtime.weights import WeightLoader

BLOCK = 16
TOKENS = 40


class Host(Device):
    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def activate(self) -> None:
        pass


class Board:
    """Where the threads that play the ranks meet."""

    def __init__(self, size: int) -> None:
        self.barrier, self.given = threading.Barrier(size, timeout=30), [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.given[rank] = tensor
        self.barrier.wait()
        every = list(self.given)
        self.barrier.wait()
        return every


class Threads(Communicator):
    def __init__(self, rank: int, size: int, board: Board) -> None:
        super().__init__(rank, size)
        self.board = board

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.board.exchange(self.rank, tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.board.exchange(self.rank, tensor), -1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.board.exchange(self.rank, tensor)[0]


def logits(tiny: Tiny, comm: Communicator, loaded: dict[str, int] | None = None) -> torch.Tensor:
    """Of every position of one prompt, on one rank. `loaded` receives the numbers kept by each weight."""
    return logits_of(tiny.path, tiny.prompts(TOKENS)[0], comm, loaded)


@torch.no_grad()
def logits_of(path: Path, prompt: list[int], comm: Communicator, loaded: dict[str, int] | None = None, quantization: str | None = None) -> torch.Tensor:
    """The same, of TOKENS given tokens."""
    config = from_kwargs(str(path), device="cpu", dtype="float32", max_model_len=64, quantization=quantization).engine.model
    summary, ops = load_summary(config), bind_ops([], "float32")
    model, specs = build_model(summary, ops, comm, lambda params, kind: ReferenceAttention(BLOCK, torch.float32, params), BLOCK, torch.float32)
    method = choose_method(config, summary, [("core", own) for own in OWN])
    reader = resolve(method.factory)(settings_for(method, summary)) if method is not None else None
    with open_checkpoint(summary, config) as source:
        loader = WeightLoader(source, Host(), torch.float32, comm.rank, comm.size, {}, reader)
        measured = loader.measure(specs)
        weights = loader.load(specs)
    assert sum(measured.values()) == loader.bytes, "the plan is made from other sizes than those that are loaded"
    weights.setdefault("lm_head", weights["embed"])
    weights["rope"] = model.tables(64)
    if loaded is not None:
        loaded |= {name: t.numel() for name, t in flat(weights["layers"][0]).items()}
    tables, positions = torch.tensor([[1, 2, 3]], dtype=torch.int32), torch.arange(TOKENS, dtype=torch.int32)
    lens, starts = torch.tensor([TOKENS], dtype=torch.int32), torch.tensor([0, TOKENS], dtype=torch.int32)
    regions = [[(0, TOKENS, a.metadata(tables, lens, starts, TOKENS, TOKENS))] for a in model.attentions]
    step = StepContext(positions, [BLOCK + positions] * len(model.groups), regions, torch.ones(TOKENS, dtype=torch.bool), weights["rope"])
    # Groups share block ids only because each layer of this test has a cache of its own.
    model.home = [(group, layer) for layer, (group, _) in enumerate(model.home)]
    kv = [tuple(torch.zeros(shape) for shape in model.attentions[0].kv_layout(4)) for _ in model.home]
    hidden, _ = model.forward(weights, torch.tensor(prompt, dtype=torch.int32), kv, step)
    return model.head(weights, hidden)


def flat(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, dict):
        return {name: t for key, part in tree.items() for name, t in flat(part, f"{path}.{key}").items()}
    return {path: tree}


def over(size: int, tiny: Tiny) -> list[torch.Tensor]:
    """The logits of each rank."""
    return ranks(size, lambda comm: logits(tiny, comm))


def ranks(size: int, compute: Callable[[Communicator], torch.Tensor]) -> list[torch.Tensor]:
    """What each rank computes."""
    board = Board(size)

    def rank(at: int) -> torch.Tensor:
        try:
            return compute(Threads(at, size, board))
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_over_ranks_are_those_of_one(checkpoint, name):
    """4 ranks are twice as many as the KV heads of most: each head is then on two of them."""
    tiny = checkpoint(name)
    whole = logits(tiny, IdentityCommunicator(0, 1))
    for size in (2, 4):
        for found in over(size, tiny):
            assert (found - whole).abs().max() < 1e-3 * whole.std()


def test_a_vocabulary_that_cannot_be_cut_stays_whole(tmp_path):
    base = FAMILIES["llama"]
    tiny = Tiny.make("odd", tmp_path, replace(base, values={**base.values, "vocab_size": 321}))
    whole = logits(tiny, IdentityCommunicator(0, 1))
    for found in over(2, tiny):
        assert (found - whole).abs().max() < 1e-3 * whole.std()


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "gpt2", "mixtral"])
def test_each_rank_holds_its_part_only(checkpoint, name):
    whole: dict[str, int] = {}
    logits(checkpoint(name), IdentityCommunicator(0, 1), whole)
    part: dict[str, int] = {}
    board = Board(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda at: logits(checkpoint(name), Threads(at, 2, board), part if at == 0 else None), range(2)))
    assert part.keys() == whole.keys()
    for weight, numbers in whole.items():
        kept_whole = "norm" in weight or "router" in weight or weight in (".o.bias", ".down.bias")
        assert part[weight] == (numbers if kept_whole else numbers // 2), weight


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({}, 3, r"--tensor-parallel-size 3 does not divide the model's 4 attention heads; sizes that work: 1, 2, 4$"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, r"--tensor-parallel-size 4 fits neither into nor around the model's 3 KV heads; sizes that work: 1, 3, 6, 12$"),
        ({"intermediate_size": 97}, 2, r"--tensor-parallel-size 2 does not divide model.layers.0.mlp.gate_proj.weight, which has 97 .*; sizes that work: 1$"),
    ],
    ids=["heads", "kv heads", "intermediate size"],
)
def test_what_cannot_be_cut_is_refused(checkpoint, tmp_path, change, size, message):

    config = json.loads((checkpoint("llama").path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    summary = load_summary(from_kwargs(str(tmp_path), device="cpu", load_format="dummy").engine.model)
    with pytest.raises(ConfigError, match=message):
        build_model(summary, bind_ops([], "float32"), Threads(0, size, Board(size)), lambda params, kind: None, BLOCK, torch.float32)
