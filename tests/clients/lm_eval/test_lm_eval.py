"""lm-eval's `local-completions` on a data set made here, against the same tasks on transformers by lm-eval's own `hf`: float32, equal scores."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import NAME, oarlock

HERE = Path(__file__).parent
PYTHON = Path(os.environ["OARLOCK"]).with_name("python")  # has torch and transformers
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Norway": "Oslo", "Greece": "Athens",
    "Russia": "Moscow", "China": "Beijing", "Portugal": "Lisbon", "Austria": "Vienna", "Ireland": "Dublin",
}  # fmt: skip
TEXTS = (
    "The sea was calm that morning, and the boats lay still in the harbour. A gull cried once and flew away over the grey roofs.",
    "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n    return a * b\n",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain the pressure is lower, so it boils at a lower temperature.",
    "Der Fluss war über die Ufer getreten, und das Dorf stand unter Wasser.",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144",
    "Ünïcödé: naïve café, 北京, Москва, 🙂🙃",
)


def documents() -> dict[str, list[dict[str, Any]]]:
    """The data set, by file."""
    names = list(CAPITALS.values())
    choice = [
        {"question": f"The capital of {country} is", "choices": [f" {names[(at + shift) % len(names)]}" for shift in (3, 0, 5, 8)], "answer": 1}
        for at, country in enumerate(CAPITALS)
    ]
    choice += [
        {"question": f"{a} + {b} =", "choices": [f" {a + b + 1}", f" {a + b}", f" {a * b + 2}", " a number of some size"], "answer": 1}
        for a in range(2, 6) for b in range(3, 7)
    ]  # fmt: skip
    shown = "Q: What is the capital of Germany?\nA: Berlin\n\nQ: What is the capital of Poland?\nA: Warsaw\n\n"
    generate = [{"question": f"{shown}Q: What is the capital of {country}?\nA:", "answer": capital} for country, capital in CAPITALS.items()]
    return {"choice": choice, "text": [{"text": text} for text in TEXTS], "generate": generate}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tasks' files, with their data beside them."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, docs in documents().items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        (folder / f"{name}.yaml").write_text((HERE / "tasks" / f"{name}.yaml").read_text().replace("FOLDER", str(folder)))
    return folder


@pytest.fixture(scope="module")
def model() -> str:
    """The folder of the small chat model, as transformers reads it."""
    made = subprocess.run([PYTHON, HERE.parents[2] / "tools" / "make_models.py", "smollm2"], capture_output=True, text=True, check=True)
    os.environ["MODEL"] = made.stdout.split()[-1]  # the server's too, and the report's
    return os.environ["MODEL"]


def evaluate(python: str | Path, tasks: Path, model: str, arguments: str, *packages: str) -> dict[str, Any]:
    """Scores and samples. Nothing is asked of a hub."""
    out = tasks / f"{model}.json"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONPATH", None)
    command = [str(python), str(HERE / "evaluate.py"), str(tasks), str(out), model, arguments, *packages]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def transformers_own(tasks: Path, model: str) -> dict[str, Any]:
    return evaluate(PYTHON, tasks, "hf", f"pretrained={model},dtype=float32,device=cpu", site.getsitepackages()[0])


@pytest.fixture(scope="module")
def server(model: str) -> Any:
    with oarlock("--dtype", "float32") as url:
        yield url


def flat(resps: Any) -> list[Any]:
    """The innermost entries of lm-eval's nested lists: a text, a log-likelihood, or (log-likelihood, greedy)."""
    if isinstance(resps, list) and not (len(resps) == 2 and isinstance(resps[1], bool)):
        return [entry for part in resps for entry in flat(part)]
    return [resps]


@pytest.mark.parametrize("more", ["num_concurrent=1", "num_concurrent=8", "num_concurrent=1,tokenized_requests=False"], ids=["alone", "side_by_side", "texts"])
def test_scores_are_those_of_transformers(server: str, tasks: Path, model: str, transformers_own: dict[str, Any], more: str, record_property: Any) -> None:
    arguments = f"model={NAME},base_url={server}/v1/completions,tokenizer={model},tokenizer_backend=huggingface,max_length=2048,{more}"
    found = evaluate(sys.executable, tasks, "local-completions", arguments)
    for task, resps in transformers_own["samples"].items():
        for theirs, ours in zip(flat(resps), flat(found["samples"][task]), strict=True):
            if isinstance(theirs, str):
                assert ours == theirs
            elif isinstance(theirs, list):
                assert ours[0] == pytest.approx(theirs[0], abs=2e-3) and ours[1] == theirs[1]
            else:
                assert ours == pytest.approx(theirs, abs=5e-3)
    for task, scores in transformers_own["scores"].items():
        if task == "local_text":
            assert found["scores"][task] == pytest.approx(scores, rel=1e-4)
        else:
            assert found["scores"][task] == scores
    for task, scores in found["scores"].items():
        for name, value in scores.items():
            record_property(f"{task} {name.partition(',')[0]}", f"{value:.5g}")
    assert 0.3 < transformers_own["scores"]["local_choice"]["acc,none"] <= 1, "the tasks tell nothing apart"
