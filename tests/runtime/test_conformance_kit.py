"""The kit's own machinery: ids, states, selection, exit codes, reports, the command and the pytest plugin."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from conformance_subjects import make_subject
from oarlock.backend_api import ConformanceProfile, Support
from oarlock.cli import conformance as command
from oarlock.conformance import LEVELS, attention_level, contract_level, device_level, kit
from oarlock.conformance.cases import Case, CheckFailed, Measure, Result, run_case
from oarlock.conformance.metrics import compare, measure, same_bits
from oarlock.conformance.pairwise import pairwise
from oarlock.conformance.provenance import SOURCES, commit, package_folder, source_hash
from oarlock.conformance.report import Report
from oarlock.conformance.report_files import FORMATS
from oarlock.errors import ApiVersionMismatch, BackendUnavailable, ConfigError
from oarlock.plugins import select_device

EVERYTHING = kit.select(kit.Choice(full=True))


def test_case_ids_are_unique_and_every_level_has_cases():
    ids = [case.id for case in EVERYTHING]
    assert len(ids) == len(set(ids))
    assert {case.level for case in EVERYTHING} == set(range(len(LEVELS)))
    quick = kit.select(kit.Choice())
    assert 450 < len(quick) < len(ids) and {c.id for c in quick} < set(ids)


def test_seeds_follow_from_ids_alone():
    case = Case("rms_norm[float32,tokens=16,hidden=64]", 2, lambda _: None)
    assert case.seed == 1946966489
    assert len({c.seed for c in EVERYTHING}) > len(EVERYTHING) - 3


# ---- states


def passing(_):
    return Measure(1e-9, 1e-6, 0.0)


def failing(_):
    raise CheckFailed("wrong", Measure(1.0, 1e-6, 2.0))


def raising(_):
    raise RuntimeError("no such kernel")


def hanging(_):
    while True:
        with contextlib.suppress(Exception):  # as code does that wants to go on
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("run", "expected", "status", "is_bad"),
    [
        (passing, None, "pass", False),
        (failing, None, "fail", True),
        (raising, None, "error", True),
        (failing, "known", "xfail", False),
        (raising, "known", "xfail", False),
        (passing, "known", "xpass", True),
        (hanging, None, "timeout", True),
        (hanging, "known", "xfail", False),
    ],
)
def test_states(run, expected, status, is_bad):
    result = run_case(Case("x", 2, run), None, expected, limit_s=0.1)
    assert (result.status, result.is_bad) == (status, is_bad)
    if status == "error":
        assert "no such kernel" in result.detail and "raising" in result.trace
    if status == "timeout":
        assert "hanging" in result.trace and "ring" not in result.trace, "where it hung, not the alarm"
    if status == "fail":
        assert result.measure == Measure(1.0, 1e-6, 2.0)


def test_unsupported_is_asked_before_running_and_keeps_expectations_out():
    case = Case("x", 2, raising, supports=lambda _: Support(False, ("no float16",)))
    for expected in (None, "known"):
        result = run_case(case, None, expected)
        assert (result.status, result.detail) == ("unsupported", "no float16")


def test_an_exception_in_supports_is_an_error():
    assert run_case(Case("x", 2, passing, supports=raising), None, None).status == "error"


def test_profiles_expect_failures_by_pattern_and_loosen_limits():
    expected, loosened = (("rotary[bfloat16,*]", "table in bf16"),), (("rotary", "bfloat16", 1e-3, "why"), ("linear", "float32", 1e-9, "x"))
    subject = make_subject(profile=ConformanceProfile(device="under-test", expected_failures=expected, tolerances=loosened))
    assert kit.expected_failure("rotary[bfloat16,tokens=1]", subject) == "table in bf16"
    assert kit.expected_failure("rotary[float32,tokens=1]", subject) is None
    assert subject.limit("rotary", "bfloat16", 2e-5) == 1e-3
    assert subject.limit("rotary", "float32", 1e-7) == 1e-7
    assert subject.limit("linear", "float32", 1e-6) == 1e-6, "a profile may only loosen"


def own_cases():
    return [Case("mine[1]", 2, passing, op="rms_norm")]


def test_a_profile_adds_cases_and_gives_reasons():
    subject = make_subject(profile=ConformanceProfile(device="under-test", extra_cases=(f"{__name__}:own_cases",)))
    assert [c.id for c in kit.select(kit.Choice(pattern="mine"), subject)] == ["mine[1]"]
    for silent in ({"tolerances": (("rotary", "float32", 1e-3, " "),)}, {"expected_failures": (("rotary*", ""),)}):
        with pytest.raises(CheckFailed, match="rotary.* has no reason"):
            contract_level._reasons(ConformanceProfile(device="d", **silent))


# ---- metrics


def test_nmse_and_places_of_non_finite_numbers():
    want = torch.tensor([1.0, -2.0, float("inf"), 3.0])
    found = measure(want + torch.tensor([0.0, 1e-3, 0.0, 0.0]), want, 1e-6, "x")
    assert found.nmse == pytest.approx(1e-6 / 14, rel=1e-3) and found.max_abs == pytest.approx(1e-3, rel=1e-3)
    for wrong in ([1.0, -2.0, 5.0, 3.0], [1.0, -2.0, float("-inf"), 3.0], [1.0, -2.0, float("nan"), 3.0], [1.0, float("nan"), float("inf"), 3.0]):
        with pytest.raises(CheckFailed):
            measure(torch.tensor(wrong), want, 1e9, "x")
    with pytest.raises(CheckFailed, match="nmse"):
        measure(want + 1, want, 1e-6, "x")


def test_one_wrong_number_among_many_right_ones_is_seen():
    want = torch.linspace(-1, 1, 100_000)
    got = want.clone()
    got[17] += 0.5
    assert float((got - want).pow(2).mean() / want.pow(2).mean()) < 1e-4
    with pytest.raises(CheckFailed, match="max abs 0.5 >"):
        measure(got, want, 1e-4, "x")
    got[17] = want[17] + 0.02
    assert measure(got, want, 1e-4, "x").max_abs_limit == pytest.approx(0.03)


def test_a_limit_of_zero_means_equal():
    x = torch.tensor([1.0, 2.0])
    assert measure(x, x, 0.0, "x").nmse == 0
    with pytest.raises(CheckFailed):
        measure(torch.nextafter(x, x + 1), x, 0.0, "x")


def test_integers_must_be_the_references_or_the_oracles():
    ref, oracle = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    for right in (ref, oracle):
        compare([right], [ref], [oracle], 0.0)
    with pytest.raises(CheckFailed, match="1 of 3 integers differ, first at 1: 7 instead of 2"):
        compare([torch.tensor([1, 7, 4])], [ref], [oracle], 0.0)


@pytest.mark.parametrize("got", [torch.zeros(2, dtype=torch.float64), torch.zeros(3), torch.zeros(1, 2)])
def test_shape_and_dtype_must_be_the_references(got):
    with pytest.raises(CheckFailed, match="instead of"):
        compare([got], [torch.zeros(2)], [torch.zeros(2).double()], 1.0)


def test_bits_tell_zeros_apart_and_nan_equal():
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([0]))


# ---- choosing


@pytest.mark.parametrize(
    ("text", "levels"), [("2", (2,)), ("0-3", (0, 1, 2, 3)), ("ops,attention", (2, 3)), ("device-ops", (1, 2)), ("4,0", (0, 4))]
)
def test_levels_by_number_name_and_range(text, levels):
    assert kit.parse_levels(text) == levels


@pytest.mark.parametrize("text", ["6", "speed", "3-1", "", "1-", "-1"])
def test_unknown_levels_are_refused_with_the_list(text):
    if text == "1-":  # an open end means the level itself
        assert kit.parse_levels(text) == (1,)
        return
    with pytest.raises(ConfigError, match="5 serve"):
        kit.parse_levels(text)


def test_selection_by_op_and_expression():
    chosen = kit.select(kit.Choice(ops=("rms_norm", "linear"), pattern=r"bfloat16.*tokens=7"))
    assert {c.op for c in chosen} == {"rms_norm", "linear"} and all("bfloat16" in c.id for c in chosen)
    for choice, words in (
        (kit.Choice(ops=("softmax2",)), "softmax2 is no op"),
        (kit.Choice(pattern="("), "no regular expression"),
        (kit.Choice(pattern="nothing-has-this"), "no case matches"),
    ):
        with pytest.raises(ConfigError, match=words):
            kit.select(choice)


def test_exit_codes():
    def code(*results):
        return kit.exit_code([Result("x", level, status) for level, status in results])

    assert code((0, "pass"), (2, "unsupported"), (3, "xfail")) == 0
    assert code((0, "pass"), (2, "fail")) == 1
    assert code((3, "error")) == 1 and code((2, "xpass")) == 1
    assert code((0, "fail"), (2, "fail")) == 3


# ---- report


def a_report(*results: Result, levels=LEVELS, filtered=False) -> Report:
    made = Report("d", "p", "1", "1.0", "0", "1.0", "2", "3", "m", list(levels), "quick", filtered, device_text="a device")
    made.results, made.served = list(results), {"rms_norm": {"float32": "mine", "bfloat16": "reference"}}
    return made


RAN = [  # one case of each level, of two dtypes
    Result("contract[a]", 0, "pass"), Result("device[b]", 1, "pass"),
    *(Result(f"linear[{d}]", 2, "pass", dtype=d, op="linear") for d in ("float32", "bfloat16")),
    Result("greedy[x]", 2, "pass", dtype="float32", op="greedy"),
    *(Result(f"attention[{d}]", 3, "pass", dtype=d, op="paged_attention") for d in ("float32", "bfloat16")),
    *(Result(f"runner[{d},dense,whole]", 4, "pass", dtype=d, family="dense") for d in ("float32", "bfloat16")),
    Result("serve[starts]", 5, "pass"),
]  # fmt: skip
GOOD = [Result("a", 3, "pass", dtype="float32", op="paged_attention"), Result("b", 2, "pass", op="rms_norm", dtype="float32", measure=Measure(5e-10, 1e-9, 1e-4))]


def verdict_with(*worse: str, status: str = "fail", levels=LEVELS) -> list[str]:
    """The verdict of RAN where some cases ended otherwise."""
    results = [replace(r, status=status, detail="off") if r.id in worse else r for r in RAN if LEVELS[r.level] in levels]
    made = a_report(*results, levels=levels)
    made.served_dtype = "float32"
    return made.verdict_lines()


def test_the_verdict_says_no_more_than_was_run():
    assert verdict_with() == ["SERVES dense in float32. CORRECT dense in bfloat16"]
    assert verdict_with(levels=LEVELS[:5]) == ["CORRECT dense in float32, bfloat16"]
    assert "needs a run of levels 0 to 4" in a_report(*GOOD, levels=LEVELS[:3]).verdict()
    assert "needs a run of levels 0 to 4" in a_report(*RAN, filtered=True).verdict()
    assert verdict_with("serve[starts]", status="unsupported") == ["CORRECT dense in float32, bfloat16"]
    assert verdict_with("linear[bfloat16]", status="xfail") == ["SERVES dense in float32. CORRECT dense in bfloat16; but for linear[bfloat16], which are expected to fail"]


@pytest.mark.parametrize(
    ("worse", "lines"),
    [
        ("serve[starts]", ["CORRECT dense in float32, bfloat16", "level 5 serve contradicts SERVES: 1 of 1 cases, the first serve[starts]; so for dense in float32, dense in bfloat16"]),
        ("attention[bfloat16]", ["SERVES dense in float32. RUNS dense in bfloat16", "level 3 attention contradicts CORRECT: 1 of 1 cases, the first attention[bfloat16]; so for dense in bfloat16"]),
        ("runner[bfloat16,dense,whole]", ["SERVES dense in float32", "level 4 runner contradicts RUNS: no model gave the right log-probabilities for a whole prompt; so for dense in bfloat16"]),
        ("greedy[x]", ["NOTHING HOLDS: no model family reached RUNS", "level 2 ops contradicts RUNS: 1 of 2 cases, the first greedy[x]; so for dense in float32, dense in bfloat16"]),
        ("device[b]", ["NOTHING HOLDS: no model family reached RUNS", "level 1 device contradicts RUNS: 1 of 1 cases, the first device[b]; so for dense in float32, dense in bfloat16"]),
    ],
)  # fmt: skip
def test_the_verdict_names_the_level_that_contradicts(worse, lines):
    first, *rest = verdict_with(worse)
    assert first == "NOT CONFORMING: 1 of 10 cases"
    assert rest[0] == lines[0]
    assert rest[1:] == lines[1:]


def test_the_table_shows_failures_and_who_served():
    bad = Result("rms_norm[bfloat16,x]", 2, "fail", "nmse 3 > 2", op="rms_norm", dtype="bfloat16")
    text = a_report(*GOOD, bad, Result("linear[float16]", 2, "unsupported", "no", op="linear", dtype="float16")).to_table()
    assert "FAIL   rms_norm[bfloat16,x]: nmse 3 > 2" in text and "NOT CONFORMING" in text
    line = next(x for x in text.splitlines() if x.startswith("rms_norm"))
    assert line.split() == ["rms_norm", "ok", "FAIL", "mine,", "reference"]
    assert "b at 50%, nmse 5.0e-10 of 1e-09" in text


def test_what_the_reference_serves_and_what_is_partly_declared_have_their_own_words():
    part = Result("rms_norm[bfloat16,x]", 2, "unsupported", op="rms_norm", dtype="bfloat16")
    passed = replace(part, id="rms_norm[bfloat16,y]", status="pass")
    for results, word in (([passed], "ref"), ([part, passed], "part"), ([part], "-")):
        line = next(x for x in a_report(*GOOD, *results).to_table().splitlines() if x.startswith("rms_norm"))
        assert line.split()[:3] == ["rms_norm", "ok", word]


def test_failures_with_the_same_words_are_shown_once():
    many = [Result(f"runner[{n}]", 4, "error", "RuntimeError: no kernel", op="x") for n in range(9)]
    text = a_report(*many, Result("runner[other]", 4, "fail", "off")).to_table()
    assert text.count("no kernel") == 1 and "and 8 more with the same words" in text and "runner[other]: off" in text


def test_markdown_and_junit_hold_every_failure():
    made = a_report(*RAN, Result("serve[x|y]", 5, "timeout", "not done\x1b after 3 s"), Result("serve[z]", 5, "unsupported", "no server"))
    made.commit, made.command, made.hashes = "abc", "oarlock conformance --device d", {"package": "1", "kit": "2"}
    text = FORMATS["md"](made)
    assert "`serve[x|y]` timeout: not done" in text and "- commit: abc" in text and "package 1, kit 2" in text
    suites = ElementTree.fromstring(FORMATS["junit"](made))
    serve = next(s for s in suites if s.get("name") == "level 5 serve")
    assert (serve.get("tests"), serve.get("errors"), serve.get("skipped")) == ("3", "1", "1")
    assert serve.find("testcase/error").get("message") == "not done after 3 s"
    assert sum(len(s.findall("testcase")) for s in suites) == len(made.results)

def test_the_json_holds_everything():
    data = json.loads(a_report(*GOOD).to_json())
    assert data["format"] == 2 and data["verdict"].startswith("every chosen case passed") and data["served"]["rms_norm"]["float32"] == "mine"
    assert [r["id"] for r in data["results"]] == ["a", "b"] and data["results"][1]["measure"]["nmse"] == 5e-10
    assert data["counts"] == {"ops": {"pass": 1}, "attention": {"pass": 1}}


# ---- pairs


@pytest.mark.parametrize(("dtypes", "sizes"), [(("float32", "float16", "bfloat16"), (16, 8, 32, 64, 128)), (("float32",), (12,)), (("bfloat16", "float32"), (16, 8))])
def test_quick_attention_holds_every_pair_in_at_most_sixty_cases(dtypes, sizes):
    rows = [(s.__name__, d, (x.heads, x.kv_heads), x.head_dim, x.block_size, x.window, x.softcap) for s, d, x in attention_level._pairwise(dtypes, sizes)]
    held = {(a, b, row[a], row[b]) for row in rows for a, b in combinations(range(7), 2)}
    values = [{row[n] for row in rows} for n in range(7)]
    every = {(a, b, x, y) for a, b in combinations(range(7), 2) for x in values[a] for y in values[b]}
    assert every - held == {(0, 5, "window", None)} and len(values[0]) == 10  # the window scenario needs one
    quick = [c for c in attention_level.cases(dtypes, sizes) if c.quick and c.dtype in dtypes]
    alone = len(attention_level._ALONE) + len(attention_level._QUICK_FP8) * len(attention_level._KV_DTYPES)
    assert len(quick) == len({c.id for c in quick}) == len(rows) + alone <= 60


def test_pairs_that_are_not_allowed_are_left_out_alone():
    rows = list(pairwise(("ab", "cd", "ef"), lambda row: row[0] != "a" or row[2] != "f"))
    held = {(a, b, r[a], r[b]) for r in rows for a, b in combinations(range(3), 2)}
    assert len(held) == 11 and (0, 2, "a", "f") not in held


# ---- where a report comes from


def test_the_source_hash_follows_names_and_contents_of_sources_alone(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "a.py").write_text("1")
    first = source_hash(tmp_path)
    (tmp_path / "tests" / "test_a.py").write_text("x")
    (tmp_path / "README.md").write_text("x")
    assert source_hash(tmp_path) == first and len(first) == 16
    (tmp_path / "a.py").write_text("2")
    second = source_hash(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, source_hash(tmp_path)}) == 3
    assert source_hash(None) == "" and commit([tmp_path]) == ""


def test_every_file_of_the_cpu_kernels_counts_as_a_source():
    kernels = Path(__file__).parents[2] / "backends" / "cpu" / "csrc"
    assert {path.suffix for path in kernels.iterdir()} <= set(SOURCES)


def test_the_hash_of_a_package_in_a_checkout_covers_its_project():
    assert (package_folder("oarlock_sim.static:X") / "pyproject.toml").exists()
    assert package_folder("no_such_package:X") is None


# ---- the run, the command, the plugin


def test_a_level_that_leaves_the_next_nothing_to_stand_on_ends_the_run(monkeypatch, capsys):
    monkeypatch.setattr(kit, "select", lambda choice, subject=None: [c for c in EVERYTHING if c.level == 1 or c.op == "greedy"])
    monkeypatch.setattr(device_level, "_same", lambda *_: failing(None))
    assert command.main(["--device", "sim-static"]) == 1
    out = capsys.readouterr().out
    assert "stopped after level 1 device: device[copies,float32] failed" in out and "2 ops" not in out
    assert command.main(["--device", "sim-static", "--keep-going"]) == 1
    assert "2 ops" in capsys.readouterr().out


def test_a_case_that_cannot_be_interrupted_ends_the_run_with_its_report(monkeypatch, capsys):
    stuck = Case("device[stuck]", 1, lambda _: time.sleep(0.5))
    monkeypatch.setattr(kit, "select", lambda choice, subject=None: [stuck])
    monkeypatch.setattr(kit, "GRACE_S", 0.0)
    monkeypatch.setattr(kit, "run_case", lambda case, subject, expected, limit_s: run_case(case, subject, expected))  # as if no signal came through
    found = []
    kit.run(select_device("sim-static"), kit.Choice(case_limit_s=0.1), on_stuck=lambda report: found.append(report.to_table()))
    assert "TIMEOUT device[stuck]: not done after 0.1 s, and cannot be interrupted" in found[0] and "the cases after it were not run" in found[0]


def test_a_device_that_cannot_be_made_is_a_contract_problem(monkeypatch):
    def refuse(selection):
        raise RuntimeError("driver too old")

    monkeypatch.setattr(kit.Subject, "open", refuse)
    report = kit.run(select_device("sim-static"), kit.Choice(levels=(1,)))
    assert [(r.id, r.status, r.detail) for r in report.results] == [("contract[opens]", "error", "RuntimeError: driver too old")]
    assert kit.exit_code(report.results) == 3


def test_command_runs_levels_and_writes_json(tmp_path, capsys):
    file = tmp_path / "report.json"
    assert command.main(["--device", "sim-static", "--level", "device", "--format", "json", "--out", str(file)]) == 0
    assert "levels device" in capsys.readouterr().out
    data = json.loads(file.read_text())
    assert data["device"] == "sim-static" and data["filtered"] is False and all(r["level"] == 1 for r in data["results"])


def test_command_runs_chosen_ops(capsys):
    assert command.main(["--device", "sim-static", "--level", "2", "--ops", "greedy", "-k", "ties"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("oarlock conformance  sim-static") and "2 ops" in out


def test_command_says_what_is_not_available(capsys, monkeypatch):
    assert command.main(["--device", "no-such-device"]) == 2
    assert "no-such-device" in capsys.readouterr().err
    for error, code in ((BackendUnavailable("no driver"), 2), (ApiVersionMismatch("upgrade oarlock"), 3)):

        def refuse(name, error=error):
            raise error

        monkeypatch.setattr(command, "select_device", refuse)
        assert command.main(["--device", "cpu"]) == code
        assert str(error) in capsys.readouterr().err


def test_failures_give_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(device_level, "_same", lambda *_: failing(None))
    assert command.main(["--device", "sim-static", "--level", "1"]) == 1
    assert "FAIL   device[copies,float32]: wrong" in capsys.readouterr().out


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    plugin = ["-p", "no:cacheprovider", "--rootdir", str(os.path.dirname(__file__)), "-c", os.devnull]
    command = [sys.executable, "-m", "pytest", *plugin, "--pyargs", "oarlock.conformance", "-q", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_plugin_makes_a_test_of_each_case():
    done = run_pytest("--oarlock-device", "sim-static", "--oarlock-level", "1", "-rs")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = sum(1 for c in EVERYTHING if c.level == 1)
    assert f"{passed - 4} passed, 4 skipped" in done.stdout and "the device declares float32, bfloat16" in done.stdout


def test_the_plugin_knows_markers_and_says_when_no_device_was_named():
    done = run_pytest("--oarlock-device", "sim-static", "-m", "level1", "-k", "verify")
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "1 skipped" in run_pytest().stdout
    done = run_pytest("--oarlock-device", "no-such-device")
    assert done.returncode != 0 and "no-such-device" in done.stdout + done.stderr
