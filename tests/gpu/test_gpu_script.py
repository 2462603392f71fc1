"""The scripts that measure on a GPU, as far as they run without one: arguments, formulas, going on after a cut, and every mode at tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import gpu_figures
import gpu_kit
import gpu_results
import gpu_run
import gpu_sanitize

FACTS = {"mode": "kernels", "device": "cpu", "device_text": "a processor", "sizes": "tiny"}


# A machine whose Python has torch, numpy, pluggy and safetensors, and nothing else that core asks for.
BARE = """
import importlib.util, sys
GONE = ("msgspec", "zmq", "pydantic", "fastapi", "starlette", "uvicorn", "tokenizers", "transformers", "huggingface_hub", "prometheus_client", "rich", "tqdm", "httpx")
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in GONE else find_spec(name, package)
"""


def script(*arguments: str, bare: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    if bare is not None:
        bare.mkdir()
        (bare / "sitecustomize.py").write_text(BARE)
        environment["PYTHONPATH"] = str(bare)
    return subprocess.run([str(HERE / "run.sh"), *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False)


def has_gpu() -> bool:
    return not gpu_run.no_gpu(None)


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
@pytest.mark.parametrize("mode", [*gpu_run.MODES, "all"])
def test_without_a_gpu_nothing_is_run_and_that_is_said(tmp_path, mode):
    done = script(mode, "--out", str(tmp_path / "out"))
    assert done.returncode == gpu_run.NO_GPU and not (tmp_path / "out").exists()
    assert "nothing was run, for there is no GPU that can be used here: " in done.stderr and "no NVIDIA GPU" in done.stderr


def test_a_mode_that_is_none_is_refused():
    done = script("benchmark")
    assert done.returncode == 2 and "invalid choice: 'benchmark'" in done.stderr


# ---------------------------------------------------------------- every mode, tiny
@pytest.mark.parametrize(
    ("mode", "figures", "unavailable"),
    [
        ("kernels", {"copy bandwidth", "matrix rate", "decode attention, 2 x 48", "rotary, 8 tokens", "int4 linear, 1 x 128 -> 64", "fp8 linear, 1 x 128 -> 64", "linear_w8a8 by descriptors, 256 x 128 -> 64"}, 3),
        ("serve", {"start to first token", "decode, batch 1", "prefill, 2048 tokens"}, 4),
    ],
)
def test_a_mode_runs_to_its_end_without_an_http_stack(tmp_path, mode, figures, unavailable):
    done = script(mode, "--device", "cpu", "--tiny", "--installed", "--out", str(tmp_path), bare=tmp_path / "bare")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / f"{mode}.json").read_text())
    found = data["figures"]
    assert data["finished"] and data["sizes"] == "tiny" and data["versions"]["torch"] and figures <= set(found)
    assert all(f.get("status") == "unavailable" or f["value"] > 0 for f in found.values())
    assert sum(f.get("status") == "unavailable" for f in found.values()) == unavailable
    shown = script("report", "--out", str(tmp_path))
    assert shown.returncode == 0 and "tiny sizes: finished" in shown.stdout and all(name in shown.stdout for name in figures)


def test_the_kit_is_run_in_parts_and_goes_on_where_it_was_cut(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(gpu_kit, "_part", lambda device, part, beside: asked.append(part[1:]) or {"value": 3, "unit": "cases", "bad": 0, "counts": {"pass": 3}})
    results = gpu_results.Results(tmp_path / "kit.json", FACTS)
    results.put("level 0 and 1", {"value": 30, "unit": "cases", "bad": 0})
    assert gpu_kit.run(gpu_results.Results(tmp_path / "kit.json", FACTS), "cpu", False, False)
    assert ("0-1", "") not in asked and len(asked) == len(gpu_kit.parts(False)) - 1
    monkeypatch.setattr(gpu_kit, "_part", lambda *_: {"value": 3, "unit": "cases", "bad": 1, "counts": {"fail": 1}})
    bad = gpu_results.Results(tmp_path / "other.json", FACTS)
    assert not gpu_kit.run(bad, "cpu", True, False) and "bad" in bad.data["verdict"]


def test_a_part_of_the_kit_runs(tmp_path):
    found = gpu_kit._part("cpu", ("0", "0", r"api_version|capabilities"), tmp_path / "kit.json")
    assert found["value"] == 2 and found["counts"] == {"pass": 2} and found["bad"] == 0 and not list(tmp_path.iterdir())


def test_the_parts_of_the_kit_are_all_of_it():
    from oarlock.conformance import kit
    from oarlock.errors import ConfigError

    for level in ("2", "3", "4"):
        every = [case.id for case in kit.select(kit.Choice(kit.parse_levels(level)))]
        found: list[str] = []
        for _, of, pattern in gpu_kit.parts(False):
            if of == level:
                try:
                    found += [case.id for case in kit.select(kit.Choice(kit.parse_levels(level), pattern=pattern))]
                except ConfigError as nothing:
                    assert "no case matches" in str(nothing)
        assert sorted(found) == sorted(every) and len(set(found)) == len(found)


def test_a_mode_is_cut_at_its_limit_and_so_is_what_it_started(tmp_path):
    done = script("serve", "--device", "cpu", "--tiny", "--installed", "--out", str(tmp_path), "--minutes", "0.01")
    assert done.returncode == gpu_run.CUT and "goes on where it ended" in done.stdout


def test_sanitize_says_why_it_cannot_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_sanitize, "find", lambda: "")
    results = gpu_results.Results(tmp_path / "sanitize.json", FACTS)
    assert gpu_sanitize.run(results, "cuda") is None and "compute-sanitizer is neither in PATH" in capsys.readouterr().out
    results.finish()
    assert json.loads((tmp_path / "sanitize.json").read_text())["status"] == "unavailable"


@pytest.mark.parametrize(
    ("said", "value"),
    [("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", 0), ("========= Invalid read\n========= ERROR SUMMARY: 3 errors\n", 3), ("========= RACECHECK SUMMARY: 2 hazards displayed\n", 2)],
)
def test_what_the_sanitizer_said(said, value):
    found = gpu_sanitize.summary(said, 0)
    assert found["value"] == value and bool(found["said"]) == bool(value)


def test_a_sanitizer_without_a_summary_proves_nothing():
    with pytest.raises(RuntimeError, match="no summary"):
        gpu_sanitize.summary("Target application terminated before first instrumented API call", 1)
    with pytest.raises(RuntimeError, match="did not all pass .exit 2.*no case matches"):
        gpu_sanitize.summary("oarlock: no case matches\n========= ERROR SUMMARY: 0 errors\n", 2)


@pytest.mark.parametrize(("name", "level", "pattern"), gpu_sanitize.CASES)
def test_what_is_sanitised_are_cases(name, level, pattern):
    from oarlock.conformance import kit

    found = {case.id.partition("[")[0] for case in kit.select(kit.Choice(kit.parse_levels(level), pattern=pattern))}
    assert len(found) == {"attention": 1, "layers": 6, "sampling": 4}[name], found


def test_what_is_sanitised_runs_without_graphs(tmp_path):
    check = gpu_sanitize.EAGER.replace("raise SystemExit(main())", "print(subject.Subject.named('sim-eager').graph)\nraise SystemExit(main())")
    ran = subprocess.run([sys.executable, "-c", check, "conformance", "--device", "cpu", "--level", "0", "-k", "api_version"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "EagerRunner" in ran.stdout, ran.stdout + ran.stderr


def test_a_gpu_that_cannot_be_asked_for_is_not_one_that_is_missing(monkeypatch, tmp_path):
    package = tmp_path / "core/oarlock_cuda"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import no_such_module")
    monkeypatch.setattr(gpu_run, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="the GPU cannot be asked for: ModuleNotFoundError.*--wheels DIR"):
        gpu_run.no_gpu(tmp_path)


# ---------------------------------------------------------------- installation
def test_packages_are_installed_beside_each_other_with_their_entry_points(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_run, "PACKAGES", ("backends/cuda", "plugins/not_there"))
    target = gpu_run.install(tmp_path, None)
    code = "from importlib.metadata import entry_points; print([e.value for e in entry_points(group='oarlock.devices') if e.name == 'cuda'], __import__('oarlock_cuda').__file__)"
    ran = subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(target)}, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == f"['oarlock_cuda.plugin'] {target}/oarlock_cuda/__init__.py"
    assert not list((gpu_run.ROOT / "backends/cuda").glob("*.egg-info")) and not (gpu_run.ROOT / "backends/cuda/build").exists()
    monkeypatch.setattr(gpu_run, "_pip", lambda *_: pytest.fail("installed again though nothing changed"))
    assert gpu_run.install(tmp_path, None) == target
    monkeypatch.setattr(gpu_run, "source_hash", lambda: "another")
    with pytest.raises(pytest.fail.Exception):
        gpu_run.install(tmp_path, None)


def test_what_is_not_installed_is_named(monkeypatch):
    assert gpu_run.absent(("json", "no_such_module"), dict(os.environ)) == ["no_such_module"]


# ---------------------------------------------------------------- figures
def test_shares_and_targets():
    assert gpu_figures.bandwidth_share(4e9, 0.002, 4e12) == 0.5
    met = gpu_figures.judged("decode attention", 12.0, "us", 0.86, served_by="triton")
    assert met["met"] and met["target"] == 0.85 and met["of"] == "the copy bandwidth" and met["served_by"] == "triton"
    assert not gpu_figures.judged("decode attention", 12.0, "us", 0.84)["met"]
    assert gpu_figures.judged("start to first token", 19.0, "s")["met"] and not gpu_figures.judged("start to first token", 21.0, "s")["met"]
    assert gpu_figures.judged("outside kernels", 0.02, "of a step")["met"]
    assert "MISSED" in gpu_results.line("x", gpu_figures.judged("int4 linear", 3.0, "us", 0.5))
    assert set(gpu_figures.TARGETS) >= {"decode attention", "prefill attention", "elementwise", "int4 linear", "fp8 linear"}


def test_bytes_and_flops():
    assert gpu_figures.decode_attention_bytes(2, 10, 4, 2, 8, 2) == 2 * (2 * 2 * 10 * 2 * 8 + 2 * 2 * 4 * 8)
    assert gpu_figures.causal_attention_flops(3, 2, 8) == 4 * 2 * 8 * 6
    read, multiplied = gpu_figures.llama_weights(4096, 32, 14336, 128256, 32, 8, 128)
    assert multiplied == 32 * (4096 * 128 * 48 + 4096 * 4096 + 3 * 4096 * 14336) and read - multiplied == 128256 * 4096
    assert abs(read * 2 - 15.01e9) < 0.02e9  # Llama-3-8B without its embedding, in bfloat16
    assert gpu_figures.prefill_flops(2, 10, 1, 1, 1) == 2 * 2 * 10 + 4 * 3
    assert gpu_figures.per_step(1.0, 3.0, 10, 110) == 0.02


@pytest.mark.parametrize(
    ("intervals", "share"), [([(0, 10)], 0.0), ([(0, 4), (6, 10)], 0.2), ([(6, 10), (0, 4), (3, 7)], 0.0), ([(0, 10), (2, 3), (18, 20)], 0.4), ([(5, 5)], 0.0)]
)
def test_time_without_a_kernel(intervals, share):
    assert gpu_figures.outside(intervals) == pytest.approx(share)


def test_no_kernel_at_all_is_no_figure():
    with pytest.raises(ValueError, match="no kernel"):
        gpu_figures.outside([])


# ---------------------------------------------------------------- going on
def test_a_run_goes_on_where_it_ended_and_failed_figures_are_tried_again(tmp_path):
    made: list[str] = []

    def figure(name: str, fails: bool = False) -> Any:
        def make() -> dict[str, Any]:
            made.append(name)
            if fails:
                raise RuntimeError("broken")
            return gpu_figures.plain(1.0, "s")

        return make

    path = tmp_path / "kernels.json"
    first = gpu_results.Results(path, FACTS)
    assert first.measure("a", figure("a")) and not first.measure("b", figure("b", fails=True))
    assert json.loads(path.read_text())["figures"]["b"]["error"] == "RuntimeError: broken"
    again = gpu_results.Results(path, FACTS)
    assert again.measure("a", figure("a")) and again.measure("b", figure("b")) and made == ["a", "b", "b"]
    again.finish()
    assert json.loads(path.read_text())["finished"]


def test_figures_of_other_sources_or_sizes_are_begun_anew_and_the_old_are_kept(tmp_path, monkeypatch):
    path = tmp_path / "kernels.json"
    gpu_results.Results(path, FACTS).put("a", gpu_figures.plain(1.0, "s"))
    assert not gpu_results.Results(path, {**FACTS, "sizes": "full"}).has("a")
    assert len(list(tmp_path.glob("kernels.*.json"))) == 1
    gpu_results.Results(path, FACTS).put("a", gpu_figures.plain(1.0, "s"))
    monkeypatch.setattr(gpu_results, "source_hash", lambda: "another")
    assert not gpu_results.Results(path, FACTS).has("a")
    path.write_text("{ cut off")
    assert not gpu_results.Results(path, FACTS).has("a")


def test_the_hash_is_of_what_runs(tmp_path):
    (tmp_path / "core").mkdir()
    before = gpu_results.source_hash(tmp_path)
    (tmp_path / "core/notes.md").touch()
    assert gpu_results.source_hash(tmp_path) == before
    (tmp_path / "core/a.py").touch()
    assert gpu_results.source_hash(tmp_path) != before
