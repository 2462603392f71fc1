"""`oarlock plan` says what a worker plans when it starts, and refuses what a start would refuse, in the same words."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
from oarlock import LLM
from oarlock.cli import main, plan, plan_worker
from oarlock.errors import OarlockError

OPTIONS = ("--device", "cpu", "--max-num-seqs", "8", "--max-model-len", "256")
KEYWORDS = {"device": "cpu", "max_num_seqs": 8, "max_model_len": 256, "skip_tokenizer_init": True}
MEASURED = ("available",)  # what others on this machine use changes from one moment to the next


@pytest.fixture
def asked(monkeypatch):
    """What workers answered. They plan in this process, which has torch already; one test starts the child."""
    answers = []

    def run(command, *, input, **_):
        answers.append(plan_worker.plan(input))
        return SimpleNamespace(returncode=0, stdout=json.dumps(answers[-1]))

    monkeypatch.setattr(plan, "subprocess", SimpleNamespace(run=run, PIPE=None))
    return answers


def test_plan_asks_a_process_of_its_own(checkpoint, capsys):
    assert main.main(["plan", str(checkpoint("llama").path), *OPTIONS]) == 0
    assert "KV cache" in capsys.readouterr().out


@pytest.mark.parametrize("extra", [(), ("--dtype", "float32"), ("--num-blocks-override", "40"), ("--max-model-len", "auto", "--kv-cache-memory", "64KiB"), ("--quantization", "int4")])
def test_plan_is_the_plan_of_a_start(checkpoint, extra, asked, capsys):
    path = str(checkpoint("llama").path)
    assert main.main(["plan", path, *OPTIONS[: 4 if "auto" in extra else None], *extra]) == 0
    assert "KV cache" in capsys.readouterr().out
    keywords = KEYWORDS | {name.lstrip("-").replace("-", "_"): value for name, value in zip(extra[::2], extra[1::2], strict=True)}
    with LLM(path, **keywords) as llm:
        started = llm._engine.info
    rows = {what: (size, note) for what, size, note in started.memory_plan}
    for what, size, note in asked[0]["rows"]:
        assert what in MEASURED or rows[what] == (size, note), what
    assert (asked[0]["dtype"], asked[0]["max_model_len"]) == (started.dtype, started.max_model_len)


def test_a_model_quantised_at_load_is_planned_in_its_fewer_bytes(checkpoint, asked, capsys):
    for extra in ((), ("-q", "int8"), ("-q", "int4"), ("-q", "int4", "-tp", "2")):
        assert main.main(["plan", str(checkpoint("llama").path), *OPTIONS, "--dtype", "float32", *extra]) == 0
    plain, int8, int4, half = (next(size for what, size, _ in answer["rows"] if what == "weights") for answer in asked)
    assert plain * 0.75 > int8 > int4 > half > int4 / 2


def test_each_of_two_workers_holds_about_half(checkpoint, asked, capsys):
    for size in ("1", "2"):
        assert main.main(["plan", str(checkpoint("llama").path), *OPTIONS, "-tp", size, "--dtype", "float32"]) == 0
    one, two = ({what: size for what, size, _ in answer["rows"]} for answer in asked)
    assert one["weights"] / 2 <= two["weights"] < one["weights"] * 0.75 and two["KV cache"] < one["KV cache"]


@pytest.mark.parametrize(
    ("config", "extra"),
    [({"architectures": ["NoSuchForCausalLM"]}, ()), ({}, ("--kv-cache-memory", "1KiB")), ({}, ("--block-size", "7"))],
)
def test_plan_refuses_what_a_start_refuses_in_the_same_words(checkpoint, tmp_path, config, extra, asked, capsys):
    folder = shutil.copytree(checkpoint("llama").path, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **config}))
    keywords = KEYWORDS | {name.lstrip("-").replace("-", "_"): value for name, value in zip(extra[::2], extra[1::2], strict=True)}
    with pytest.raises(OarlockError) as caught:
        LLM(str(folder), **keywords)
    assert main.main(["plan", str(folder), *OPTIONS, *extra]) != 0
    assert capsys.readouterr().err.splitlines()[-1] == f"oarlock plan: error: {caught.value}"


def test_a_device_with_an_executor_of_its_own_says_who_plans(checkpoint, capsys):
    assert main.main(["plan", str(checkpoint("llama").path), "--device", "null"]) == 2
    assert "oarlock serve prints it" in capsys.readouterr().err
