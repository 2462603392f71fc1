"""What an engine says of itself after the handshake, with an executor that only answers that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kv_checking_worker import FULL
from oarlock.backend_api.capabilities import Capabilities
from oarlock.config.sections import EngineConfig, ModelConfig, SchedulerConfig
from oarlock.engine.core import EngineCore
from oarlock.errors import ConfigError
from oarlock.executor.base import Executor
from oarlock.messages import Abort, WorkerReady
from oarlock.shapes import BIAS_BUCKET, BucketTable
from toy_frontend import SUMMARY

READY = WorkerReady(Capabilities(), FULL, 4, 9, 5, 64, "float32", "a toy", BucketTable(), ())
BUCKETS = BucketTable((8,), (2,), (16,), (16,), (16,), (16,))


class Answers(Executor):
    """Ranks that answer `load` with the given records."""

    def __init__(self, *ready: WorkerReady) -> None:
        super().__init__(EngineConfig(ModelConfig("m"), scheduler=SchedulerConfig(max_num_seqs=8)), SUMMARY, "toy", "toy:Toy")
        self.ready = list(ready)
        self.started: tuple[int, int, int] | None = None

    def load(self) -> list[WorkerReady]:
        return self.ready

    def start(self, num_blocks: int, num_host_blocks: int, max_model_len: int) -> tuple[float, int]:
        self.started = (num_blocks, num_host_blocks, max_model_len)
        return 0.0, 0

    def execute(self, out):
        raise NotImplementedError

    def canary(self) -> None:
        raise NotImplementedError

    def shutdown(self) -> None:
        """Nothing runs."""


def core(*ready: WorkerReady) -> EngineCore:
    executor = Answers(*ready)
    return EngineCore(executor.config, SUMMARY, executor)


def test_smallest_rank_counts():
    made = core(READY, replace(READY, num_blocks=6, num_host_blocks=2))
    assert made.executor.started == (6, 2, 64)
    assert (made.info.num_blocks, made.info.num_host_blocks) == (5, 2)


@pytest.mark.parametrize("name", ["dtype", "block_size", "buckets", "kv_groups", "op_table", "capabilities"])
def test_ranks_that_differ_are_refused_by_name(name):
    other = {
        "dtype": "bfloat16",
        "block_size": 8,
        "buckets": BUCKETS,
        "kv_groups": (),
        "op_table": (("a", "b", ""),),
        "capabilities": Capabilities(pinned_memory=True),
    }
    with pytest.raises(ConfigError, match=f"rank 1 differs from rank 0 in {name}"):
        core(READY, replace(READY, **{name: other[name]}))


def test_ranks_whose_memory_gives_other_contexts_agree_on_the_shortest():
    """Buckets follow the context, so only those of the ranks that have the agreed one are compared."""
    long, short = replace(READY, buckets=replace(BUCKETS, blocks=(16, 32))), replace(READY, buckets=BUCKETS, max_model_len=48)
    for ranks in ((long, short, long), (short, long), (long, short, short)):
        made = core(*ranks)
        assert made.executor.started == (9, 5, 48) and made.info.max_model_len == 48
        assert made.scheduler._policy.table == BUCKETS
    with pytest.raises(ConfigError, match="rank 2 differs from rank 1 in buckets"):
        core(long, short, replace(short, buckets=long.buckets))


def test_longest_request_is_the_schedulers():
    """8 usable blocks of 4 tokens, and the last token's KV is not needed."""
    assert core(READY).info.max_prompt_tokens == 33
    assert core(replace(READY, num_blocks=100)).info.max_prompt_tokens == 64


def test_biases_are_bounded_where_shapes_are():
    assert core(READY).info.max_logit_bias == 0
    assert core(replace(READY, buckets=BUCKETS)).info.max_logit_bias == BIAS_BUCKET


def test_an_abort_is_told_of_by_one_more_step():
    """A stop string ends a request without an output: whoever watches the counters must hear of it all the same."""
    made = core(READY)
    assert not made.has_work()
    made.abort(Abort("gone", "stop"))
    assert made.has_work()
    assert made.step().outputs == () and not made.has_work()
