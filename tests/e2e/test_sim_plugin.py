"""The simulated devices' options, changes and checks in whole engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oarlock_sim
import pytest
from oarlock import LLM, SamplingParams
from oarlock.cli.main import main
from oarlock.errors import ConfigError, UnsupportedByBackend
from tiny_model import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [[5, 6, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def start(device: str, **options: Any) -> LLM:
        probe = next((d.probe() for d in oarlock_sim.devices() if d.name == device), None)
        if probe is not None and probe.status != "available":
            pytest.skip(f"{device}: {probe.reason}")
        llm = LLM(str(folder), device=device, dtype="float32", max_model_len=64, **options)
        made.append(llm)
        return llm

    yield start
    for llm in made:
        llm.close()


def test_the_memory_option_reaches_the_device(make):
    llm = make("sim-eager", sim_memory=0.25, num_blocks_override=20)
    assert "256 MiB" in llm._engine.info.device_text
    assert {what: note for what, _, note in llm._engine.info.memory_plan}["available"] == "of 256.0 MiB"


def test_the_batch_is_lowered_for_the_whole_engine_and_not_when_typed(make, caplog):
    llm = make("sim-static")
    assert llm._engine.info.max_num_seqs == llm.config.scheduler.max_num_seqs == oarlock_sim.FEW_SEQS
    assert "--max-num-seqs is now 16 (was 256), because sim-static" in caplog.text
    assert make("sim-static", max_num_seqs=20)._engine.info.max_num_seqs == 20


def test_a_model_without_room_is_refused_before_it_is_loaded(make):
    with pytest.raises(UnsupportedByBackend, match=r"its weights take at least .* GiB, --sim-memory is 1e-05; give --sim-memory .* \(oarlock-sim:sim\)"):
        make("sim-eager", sim_memory=0.00001)


def test_the_option_does_nothing_elsewhere_and_is_refused_there(make):
    with pytest.raises(ConfigError, match="--sim-memory is of oarlock-sim and does nothing on cpu; leave it out, or take --device sim-eager or --device sim-static"):
        make("cpu", sim_memory=1)


def test_the_report_counts_the_steps_of_this_process(make, capsys):
    llm = make("sim-eager", sim_report=True, max_num_seqs=4)
    llm.generate(PROMPT, GREEDY, use_tqdm=False)
    llm.close()
    lines = capsys.readouterr().err.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("sim: "))
    assert lines[first] == "sim: 6 steps"
    counts = {line.split()[0]: float(line.split()[-1]) for line in lines[first + 2 :] if line.startswith("  ")}
    assert counts["d2h"] == 1.0 and not any(key.startswith("sync") for key in counts)


def test_two_ranks_answer_as_one_over_the_packages_communicator(make):
    llm = make("sim-eager", tensor_parallel_size=2, max_num_seqs=2)
    found = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    llm.close()
    assert found == make("sim-eager", max_num_seqs=2).generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_a_wrong_value_is_one_line(capsys, folder):
    assert main(["serve", str(folder), "--device", "sim-eager", "--sim-memory", "much"]) == 2
    assert capsys.readouterr().err == "oarlock serve: error: --sim-memory much: must be a number\n"
