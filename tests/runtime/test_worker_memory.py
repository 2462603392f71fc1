"""A worker's memory: planned and said before anything is read, and what a device that is full says."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oarlock import LLM, SamplingParams
from oarlock.errors import ConfigError, OutOfDeviceMemory, WeightMismatch
from oarlock.runtime.loader.names import Renamed
from oarlock.runtime.weights import WeightLoader
from oarlock.runtime.worker import Worker
from oarlock_cpu import native
from running import run


def test_a_full_device_names_itself_what_did_not_fit_and_the_remedies():
    worker = SimpleNamespace(device=SimpleNamespace(describe=lambda: "a toy of 2 MiB"))
    with pytest.raises(OutOfDeviceMemory) as caught, Worker._naming_memory(worker, "a KV cache of 9 blocks"):  # type: ignore[arg-type]
        raise torch.OutOfMemoryError("4096 bytes wanted")
    for words in ("a toy of 2 MiB", "a KV cache of 9 blocks", "4096 bytes wanted", "--device-memory-utilization", "--max-num-seqs"):
        assert words in str(caught.value)


def test_other_faults_of_a_start_stay_what_they_are():
    worker = SimpleNamespace(device=SimpleNamespace(describe=lambda: "a toy"))
    with pytest.raises(ZeroDivisionError), Worker._naming_memory(worker, "the weights"):  # type: ignore[arg-type]
        raise ZeroDivisionError


def test_memory_is_planned_and_said_before_a_tensor_is_read(checkpoint, monkeypatch, caplog):
    tiny = checkpoint("llama")
    said_before_read = []
    read = WeightLoader._read

    def watched(self, *args):
        said_before_read.append("memory plan" in caplog.text)
        return read(self, *args)

    monkeypatch.setattr(WeightLoader, "_read", watched)
    with caplog.at_level(logging.INFO, "oarlock"):
        run(tiny, tiny.prompts(3), new_tokens=2)
    assert said_before_read and all(said_before_read)
    assert caplog.text.count("memory plan") == 1


def test_on_a_terminal_a_bar_shows_how_far_loading_is(checkpoint, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown)
    tiny = checkpoint("llama")
    assert run(tiny, tiny.prompts(3), new_tokens=2)
    assert "loading weights" in shown.getvalue() and "tensor" in shown.getvalue()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what is mapped is read from /proc")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_packed_model_leaves_its_files(checkpoint, family):
    """Embeddings and norms were views of them once, and kept whole files in memory."""
    if native.problem():
        pytest.skip(native.problem())
    tiny = checkpoint(family)

    def mapped() -> set[str]:
        return {line for line in Path("/proc/self/maps").read_text().splitlines() if str(tiny.path) in line}

    before = mapped()  # by the model that other tests compare with
    with LLM(str(tiny.path), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=64) as llm:
        assert llm.generate(prompt_token_ids=[[1, 2, 3]], sampling_params=SamplingParams(max_tokens=2, detokenize=False), use_tqdm=False)
        assert not mapped() - before


START = """
import sys
from oarlock import LLM
llm = LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, max_model_len=64)
print([name for name in ("sympy", "torch._dynamo", "torch._inductor", "transformers") if name in sys.modules])
"""


def test_a_start_imports_no_compiler(checkpoint):
    """torch's functions of meta tensors do, a second each time: sizes are known without them."""
    done = subprocess.run([sys.executable, "-c", START, str(checkpoint("qwen3-moe").path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize("family", ["llama", "phi3-longrope", "gemma3", "opt"])
def test_bytes_of_tables_are_known_without_them(checkpoint, monkeypatch, family):
    seen = []
    load = Worker._load

    def watched(self, *arguments):
        load(self, *arguments)
        seen.append((self._table_bytes(), sum(table.nbytes for table in self.weights["rope"].values())))

    monkeypatch.setattr(Worker, "_load", watched)
    run(checkpoint(family), [[1, 2]], new_tokens=1)
    assert seen[0][0] == seen[0][1]


def test_plan_that_cannot_be_is_refused_before_a_tensor_is_read(checkpoint, monkeypatch):
    def never(self, *args):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(WeightLoader, "_read", never)
    with pytest.raises(ConfigError, match="--max-model-len 256 needs .* is the largest that fits"):
        run(checkpoint("llama"), [[1, 2]], kv_cache_memory="64KiB")


def test_leftover_tensor_is_refused_before_one_is_read(checkpoint, monkeypatch):
    monkeypatch.setattr(WeightLoader, "_read", lambda self, *args: pytest.fail("a weight was read"))
    monkeypatch.setattr(Renamed, "names", lambda self, names=Renamed.names: {*names(self), "left.over"})
    with pytest.raises(WeightMismatch, match=r"belong nowhere.*left\.over"):
        run(checkpoint("llama"), [[1, 2]])


def test_weights_that_take_more_than_their_shapes_say_leave_less_to_the_cache():
    """Packing pads them, say. A second plan, from what the device measures."""
    worker = Worker.__new__(Worker)
    plans: list[dict[str, int]] = []
    worker.rank, worker.plan = 0, SimpleNamespace(rows=[("weights", 100, "")])
    worker._plan = lambda free, total, weights: plans.append(weights) or worker.plan
    for host, left, expected in ((False, 900, []), (False, 850, [150]), (True, 850, [])):
        plans.clear()
        worker.device = SimpleNamespace(memory_info=lambda left=left: (left, 2000), capabilities=SimpleNamespace(host_is_device=host))
        Worker._check_plan(worker, 1000, 2000)
        assert [sum(p.values()) for p in plans] == expected
