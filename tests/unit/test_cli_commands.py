"""The command line: commands are found lazily, errors are one line, the tables say what is known."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import oarlock
import pytest
from oarlock.cli import devices, doctor, main, plan
from oarlock.cli.main import COMMANDS
from oarlock.cli.main import available as commands
from oarlock.errors import PIP, BackendUnavailable, ConfigError
from oarlock.hints import Hint
from plugin_fakes import HOST, broken, catalogue, device, driver_problem, hint, no_hardware


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for the server; collects what it was given."""
    got: list[Any] = []
    fake = types.ModuleType("oarlock.server.app")
    fake.run_server = lambda resolved: got.append(resolved) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "oarlock.server.app", fake)
    return got


def test_help_lists_the_commands_that_exist_and_only_those(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "not-written", ("oarlock.cli.not_written:main", "nothing"))
    assert main.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in ("serve", "devices", "doctor", "plan"))
    assert "not-written" not in listed
    assert main.main(["not-written"]) == 2


def test_every_listed_command_can_be_run_for_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in commands():
        with pytest.raises(SystemExit) as ended:
            main.main([name, "--help"])
        assert ended.value.code == 0, name
        assert "usage: oarlock" in capsys.readouterr().out


def test_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    assert "usage: oarlock" in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"oarlock {oarlock.__version__}\n"


@pytest.mark.parametrize(("argv", "words"), [(["srve"], ["unknown command srve", "did you mean serve?"]), (["--port"], ["unknown option --port"])])
def test_an_unknown_command_suggests_one(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(argv) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words) and text.count("\n") == 1


def test_a_command_of_a_plugin_that_is_not_here_names_it() -> None:
    assert main._unknown("run-batch").endswith(f"the plugin oarlock-batches brings it, and is not installed (from a checkout: {PIP} ./plugins/batches)")


def test_a_wrong_flag_is_one_line_and_exit_code_2(served: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["serve", "m", "--max-modl-len", "100"]) == 2
    assert capsys.readouterr().err == "oarlock serve: error: unknown option --max-modl-len; did you mean --max-model-len?\n"
    assert served == []


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["chat", "--temprature", "1"], "unknown option --temprature; did you mean --temperature?"),
        (["complete", "hi", "--max_tokns=3"], "unknown option --max-tokns; did you mean --max-tokens?"),
        (["complete", "hi", "--zzzzzzzz"], "unknown option --zzzzzzzz; oarlock complete --help lists them all"),
        (["chat", "--port", "1"], "--port is an option of oarlock serve, not of oarlock chat"),
        (["bench", "serve", "--num-promts", "3"], "unknown option --num-promts; did you mean --num-prompts?"),
        (["bench", "serve", "--max-model-len", "3"], "--max-model-len is an option of oarlock serve, not of oarlock bench serve"),
        (["bench", "throughput", "--input-lne", "3"], "unknown option --input-lne; did you mean --input-len?"),
        (["devices", "--jsn"], "unknown option --jsn; did you mean --json?"),
        (["doctor", "cpu"], "unexpected argument 'cpu'; oarlock doctor --help says what it takes"),
        (["bench"], "KIND is missing; oarlock bench --help says what it takes"),
        (["conformance"], "--device is missing; oarlock conformance --help says what it takes"),
        (["conformance", "--device", "cpu", "--quik"], "unknown option --quik; did you mean --quick?"),
    ],
)
def test_every_command_says_what_a_wrong_flag_may_have_meant(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(argv) == 2
    name = " ".join(argv[:2])
    assert capsys.readouterr().err in {f"oarlock {name}: error: {text}\n", f"oarlock {argv[0]}: error: {text}\n"}


def test_what_is_said_when_no_server_answers_fits_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--url", "http://127.0.0.1:9"]
    assert main.main(["bench", "serve", *where]) == 1
    text = capsys.readouterr().err
    assert "no server answers at http://127.0.0.1:9" in text and "`oarlock serve MODEL`" in text and "bench throughput" in text and "load here" not in text
    assert main.main(["complete", "hi", *where]) == 1
    assert "`oarlock serve MODEL`, name another with --url, or load a model here with --model MODEL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("a b c"), 2), (BackendUnavailable("a b c"), 1), (KeyboardInterrupt(), 130)]
)
def test_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise error

    monkeypatch.delenv("OARLOCK_TRACEBACK", raising=False)
    assert main.run(fail, "prog") == code
    assert capsys.readouterr().err == ("" if code == 130 else "prog: error: a b c\n")
    if code != 130:
        monkeypatch.setenv("OARLOCK_TRACEBACK", "1")
        with pytest.raises(type(error)):
            main.run(fail, "prog")


def test_serve_hands_the_resolved_configuration_to_the_server(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OARLOCK_API_KEY", "secret")
    assert main.main(["serve", "m", "--max_num_seqs", "8", "--port", "0"]) == 0
    (resolved,) = served
    assert (resolved.engine.model.model, resolved.engine.scheduler.max_num_seqs, resolved.server.port) == ("m", 8, 0)
    assert resolved.server.api_keys == ("secret",)


def test_the_older_module_takes_the_same_flags() -> None:
    command = [sys.executable, "-m", "oarlock.entrypoints.openai.api_server"]
    ran = subprocess.run([*command, "--model", "m", "--enable-lora"], capture_output=True, text=True, timeout=30, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("python -m oarlock.entrypoints.openai.api_server: error: --enable-lora: ") and ran.stderr.count("\n") == 1


# ---------------------------------------------------------------- devices, doctor
def table(found: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, str]]]:
    monkeypatch.setattr(devices, "discover", lambda: found)
    code = devices.main(["--json"])
    return code, json.loads(capsys.readouterr().out)


def test_devices_shows_installed_broken_and_missing_ones(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hints = (HOST, hint("here", present=True, install="pip install ./backends/here"), hint("gone", present=False))
    found = catalogue(device("host", priority=0), device("fast", driver_problem), broken("bad"), hints=hints)
    code, rows = table(found, monkeypatch, capsys)
    assert code == 0
    by_name = {row["device"]: row for row in rows}
    assert by_name["host"] | {"package": "oarlock-host", "version": "1.2.3", "API": "1.0", "status": "available"} == by_name["host"]
    assert (by_name["fast"]["status"], by_name["fast"]["remedy"]) == ("driver_problem", "install the driver")
    assert by_name["bad"]["status"] == "error" and "missing_part" in by_name["bad"]["reason"]
    assert by_name["here"]["remedy"] == "pip install ./backends/here" and "/dev/here0" in by_name["here"]["reason"]
    assert by_name["gone"]["remedy"] == "" and "no such backend yet" in by_name["gone"]["reason"]


def test_devices_leaves_out_what_only_tests_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    simulated = Hint("sim", "a simulation", "oarlock-sim", install="pip install ./plugins/sim", source="plugins/sim", is_simulated=True)
    found = catalogue(device("host", priority=0), device("null", priority=-100, package="oarlock"), hints=(HOST, simulated))
    assert [row["device"] for row in table(found, monkeypatch, capsys)[1]] == ["host"]


def test_the_help_names_no_command_of_cores_own_tests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == 0
    assert "null" not in capsys.readouterr().out
    assert main.main(["null-tokens", "5,6", "--vocab-size", "10", "--max-tokens", "2"]) == 0


def test_devices_fails_when_none_is_available(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert table(catalogue(device("fast", no_hardware)), monkeypatch, capsys)[0] == 1


def test_the_table_wraps_its_last_columns_and_loses_no_word() -> None:
    long = "many words " * 12
    text = devices.table(devices.COLUMNS, [("d", "p", "1", "1.0", "error", long, long)], width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("many") == 24


def test_doctor_reports_plugins_and_the_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = catalogue(device("host", priority=0), broken("bad"))
    report = {
        "text": "a machine", "torch": "0", "threads": 3, "memory": "1 of 2", "capabilities": {"dtypes": ["float32"], "fast_dtypes": [], "collectives": []},
        "ops": [("rms_norm", "reference", "quick: no bfloat16")], "parts": [], "idle": ["oarlock-fast:kernels"],
    }  # fmt: skip
    monkeypatch.setattr(doctor, "discover", lambda: found)
    monkeypatch.setattr(doctor, "inspect", lambda name, threads: (report, ""))
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    for word in ("Broken: bad", "Traceback", "Device host", "3 threads", "float32", "rms_norm  reference   rejected: quick: no bfloat16", "host memory", "Nothing for this device: oarlock-fast:kernels"):
        assert word in text
    assert "fast_dtypes          all of dtypes\n" in text and "collectives          none\n" in text


def test_doctor_says_why_a_device_could_not_be_examined(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "discover", lambda: catalogue(device("host", priority=0, torch_install="pip install torch")))
    monkeypatch.setattr(doctor, "inspect", lambda name, threads: (None, "it fell over"))
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "examination failed: it fell over" in text and "pip install torch" in text
    assert doctor.main(["--device", "none-such"]) == 1
    assert "--device none-such: there is no device of this name" in capsys.readouterr().out


def test_the_examination_survives_a_child_that_dies() -> None:
    report, problem = doctor.inspect("none-such")
    assert report is None and "none-such" in problem and "exit status 1" in problem


# ---------------------------------------------------------------- plan; tests/runtime/test_cli_plan.py has a real worker plan
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder, and one device to plan for."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50, "max_position_embeddings": 256, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("oarlock.engine.launch.installed", lambda: catalogue(device("fast", environment=(("OARLOCK_TEST_A", "1"),))))
    return tmp_path


def answering(monkeypatch: pytest.MonkeyPatch, code: int = 0, **answer: Any) -> list[dict[str, Any]]:
    """Stands in for the child that plans; collects what it was given."""
    asked: list[dict[str, Any]] = []

    def run(command: list[str], *, input: str, env: dict[str, str], **_: Any) -> Any:
        asked.append({**json.loads(input), "env": env})
        return types.SimpleNamespace(returncode=code, stdout=f"chatter\n{json.dumps(answer)}\n" if answer else "")

    monkeypatch.setattr(plan.subprocess, "run", run)
    return asked


def test_plan_prints_what_the_worker_plans(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = answering(monkeypatch, dtype="bfloat16", device_text="a fast one", max_model_len=128, table="memory plan\n  weights 1 MiB")
    assert main.main(["plan", str(folder), "-tp", "2", "--max-model-len", "auto"]) == 0
    text = capsys.readouterr().out
    for words in ("LlamaForCausalLM, 2 layers, bfloat16, context 128 (the checkpoint allows 256)", "fast: a fast one", "2, each as below", "weights 1 MiB"):
        assert words in text
    (given,) = asked
    assert given["config"]["parallel"]["tensor_parallel_size"] == 2 and given["env"]["OARLOCK_TEST_A"] == "1" and given["device"] == "fast"


def test_plan_refuses_in_the_words_of_the_worker(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answering(monkeypatch, error="ConfigError", message="it does not fit")
    assert main.main(["plan", str(folder)]) == 2
    assert capsys.readouterr().err == "oarlock plan: error: it does not fit\n"
    answering(monkeypatch, error="UnsupportedArchitecture", message="no such model")
    assert main.main(["plan", str(folder)]) == 1
    assert capsys.readouterr().err == "oarlock plan: error: no such model\n"
    answering(monkeypatch, error="UnsupportedByBackend", message="--block-size 7: fast takes 16")
    assert main.main(["plan", str(folder)]) == 2
    answering(monkeypatch, code=-9)
    assert main.main(["plan", str(folder)]) == 1
    assert "signal 9" in capsys.readouterr().err
