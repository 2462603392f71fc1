"""Discovery, validation, hooks in a worker, and what hints.toml sees on a machine."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from oarlock.backend_api import DeviceSpec, ProbeResult
from oarlock.errors import PIP, PluginError
from oarlock.hints import install_command, load_hints
from oarlock.plugins import DEVICE_GROUP, PLUGIN_GROUP, apply_environment, collect, discover, hook_calls, select_device, worker_plugins
from plugin_fakes import HOST, Dist, Entry, available, broken, catalogue, device, feature, module, nothing, raising


def entry(load: Any, group: str = DEVICE_GROUP) -> Entry:
    return Entry("odd", group, Dist("oarlock-odd"), load)


def spec(**changes: Any) -> DeviceSpec:
    return DeviceSpec(**{"name": "odd", "probe": available, "factory": "odd.device:Odd", "distribution": "oarlock-odd", **changes})


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (broken("x").load, ["ImportError", "missing_part"]),
        (lambda: module(devices=nothing), ["yields no DeviceSpec"]),
        (lambda: module(), ["yields no DeviceSpec"]),
        (lambda: module(devices=lambda: spec()), ["returned DeviceSpec; a list is needed"]),
        (lambda: module(devices=lambda: ["odd"]), ["yielded str instead of DeviceSpec"]),
        (lambda: module(devices=lambda: [spec(name="auto")]), ["'auto' is no name"]),
        (lambda: module(devices=lambda: [spec(name="Odd")]), ["lower case"]),
        (lambda: module(devices=lambda: [spec(factory="odd")]), ["factory"]),
        (lambda: module(devices=lambda: 1 / 0), ["its hook devices raised ZeroDivisionError"]),
        (lambda: module(devices=lambda: [spec()], devicez=nothing), ["devicez"]),
        (lambda: module(devices=lambda colour: [spec()]), ["colour"]),
    ],
)
def test_a_broken_plugin_is_recorded_with_its_traceback_and_ends_nothing(load: Any, words: list[str]) -> None:
    found = catalogue(device("host", priority=0), entry(load))
    (bad,) = found.broken()
    assert bad.distribution == "oarlock-odd" and "Traceback" in bad.detail and "\n" not in bad.error
    for word in words:
        assert word in bad.detail
    assert select_device("auto", found).spec.name == "host"


@pytest.mark.parametrize("path", ["attention.py", "attention/__init__.py"])
def test_a_file_that_would_hide_a_hook_is_refused(tmp_path: Path, path: str) -> None:
    """Once imported, a package's module is an attribute of the package: a second worker would find no hook, and no error."""
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text("")
    made = module(devices=lambda: [spec()], attention=nothing)
    made.__path__ = [str(tmp_path)]  # type: ignore[attr-defined]
    (bad,) = catalogue(entry(lambda: made)).broken()
    assert "attention.py" in bad.error or "attention/__init__.py" in bad.error
    assert "hides the hook attention()" in bad.error and "another name" in bad.error
    made = module(devices=lambda: [spec()])  # no such hook: the file is the package's own affair
    made.__path__ = [str(tmp_path)]  # type: ignore[attr-defined]
    assert not catalogue(entry(lambda: made)).broken()


def test_a_feature_plugin_of_another_api_is_recorded() -> None:
    made = module(extensions=nothing)
    made.OARLOCK_API = (9, 0)  # type: ignore[attr-defined]
    (bad,) = catalogue(feature("extra", lambda: made)).broken()
    assert "upgrade oarlock" in bad.error


@pytest.mark.parametrize(("probe", "reason"), [(raising, "OSError: libfoo.so"), (lambda: "yes", "answered str instead of ProbeResult")])
def test_a_bad_probe_is_a_row_and_never_raises(probe: Any, reason: str) -> None:
    (row,) = catalogue(device("odd", probe)).rows()
    assert row.probe.status == "error" and reason in row.probe.reason


def test_probes_are_timed() -> None:
    def slow() -> ProbeResult:
        time.sleep(0.02)
        return available()

    (row,) = catalogue(device("odd", slow)).rows()
    assert row.probe_ms >= 20


def test_a_probe_runs_only_when_rows_are_asked_for() -> None:
    calls: list[int] = []
    found = catalogue(device("odd", lambda: calls.append(1) or available()))  # type: ignore[func-returns-value]
    assert calls == []
    found.rows()
    assert calls == [1]


def test_a_worker_registers_the_chosen_device_and_the_features_only() -> None:
    def answers(name: str) -> Any:
        return lambda device: [f"{name} for {device}"]

    def of(name: str) -> Entry:
        only = DeviceSpec(name, available, "m:D", f"oarlock-{name}")
        return Entry(name, DEVICE_GROUP, Dist(f"oarlock-{name}"), lambda: module(devices=lambda: [only], attention=answers(name)))

    extra = feature("extra", lambda: module(attention=answers("extra")))
    found = catalogue(of("first"), of("second"), extra, feature("bad", broken("bad").load))
    manager = worker_plugins("first", found)
    assert sorted(collect(manager, "attention", device="it")) == ["extra for it", "first for it"]
    assert collect(manager, "kernels", device="it") == []


def test_a_worker_needs_exactly_one_provider() -> None:
    with pytest.raises(PluginError, match="device other is provided by no installed package"):
        worker_plugins("other", catalogue(device("host")))
    with pytest.raises(PluginError, match="provided by oarlock-host, twin"):
        worker_plugins("host", catalogue(device("host"), device("host", package="twin")))


@pytest.mark.parametrize(("answer", "word"), [(lambda device: 1 / 0, "raised ZeroDivisionError"), (lambda device: "x", "returned str")])
def test_a_failing_hook_names_its_plugin(answer: Any, word: str) -> None:
    manager = worker_plugins("host", catalogue(device("host"), feature("extra", lambda: module(kernels=answer))))
    with pytest.raises(PluginError, match=f"plugin oarlock-extra:extra: its hook kernels {word}"):
        collect(manager, "kernels", device=None)


def test_hook_calls_are_counted() -> None:
    manager = worker_plugins("host", catalogue(device("host")))
    before = hook_calls()
    collect(manager, "kernels", device=None)
    assert hook_calls() == before + 1
    select_device("host", catalogue(device("host"))).spec.probe()
    assert hook_calls() == before + 4  # discovery asked for devices, options and extensions; choosing and probing ask nothing


def test_a_devices_environment_is_set_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OARLOCK_TEST_A", "mine")
    monkeypatch.setenv("OARLOCK_TEST_B", "x")
    monkeypatch.delenv("OARLOCK_TEST_B")
    apply_environment(spec(environment=(("OARLOCK_TEST_A", "theirs"), ("OARLOCK_TEST_B", "theirs"))))
    import os

    assert (os.environ["OARLOCK_TEST_A"], os.environ["OARLOCK_TEST_B"]) == ("mine", "theirs")


def test_variables_that_come_too_late_for_torch_are_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (spec,) = discover([device("fast", environment=(("OARLOCK_TEST_A", "1"), ("OARLOCK_TEST_B", "2")))], ()).plugins[0].devices
    monkeypatch.setenv("OARLOCK_TEST_B", "kept")
    monkeypatch.setenv("OARLOCK_TEST_A", "")
    monkeypatch.delenv("OARLOCK_TEST_A")
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    apply_environment(spec)
    (line,) = caplog.messages
    assert "torch was imported before OARLOCK_TEST_A=1 could be set" in line and "OARLOCK_TEST_B" not in line
    apply_environment(spec)  # it is set now, and saying it again would help nobody
    assert len(caplog.messages) == 1
    monkeypatch.delenv("OARLOCK_TEST_A")
    monkeypatch.delitem(sys.modules, "torch")
    apply_environment(spec)
    assert len(caplog.messages) == 1


def test_the_installed_entry_points_are_read() -> None:
    found = discover()
    assert all(p.group in (DEVICE_GROUP, PLUGIN_GROUP) for p in found.plugins)
    assert found.hints


# ---------------------------------------------------------------- hints.toml
def pci(root: Path, address: str, vendor: str, chip: str, kind: str) -> None:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    for name, value in (("vendor", vendor), ("device", chip), ("class", kind)):
        (folder / name).write_text(value + "\n")


def present(root: Path, checkout: Path | None = None) -> dict[str, str]:
    return {h.device: h.evidence for h in load_hints(root, checkout) if h.is_present}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (("0x10de", "0x2330", "0x030200"), {"cuda": "PCI 0000:01:00.0"}),
        (("0x10de", "0x22a3", "0x068000"), {}),  # a switch of the same vendor
        (("0x8086", "0x0bd5", "0x038000"), {"xpu": "PCI 0000:01:00.0"}),
        (("0x8086", "0x56a0", "0x030000"), {"xpu": "PCI 0000:01:00.0"}),
        (("0x8086", "0x46a6", "0x030000"), {}),  # graphics inside a processor
        (("0x8086", "0x1572", "0x020000"), {}),  # a network card
        (("0x1d0f", "0x7164", "0x088000"), {"neuron": "PCI 0000:01:00.0"}),
        (("0x1d0f", "0xec20", "0x020000"), {}),  # a network card
        (("0x1ae0", "0x006f", "0x120000"), {"tpu": "PCI 0000:01:00.0"}),
        (("0x1ae0", "0x0042", "0x020000"), {}),  # a network card
    ],
)
def test_hardware_is_known_by_its_pci_function(tmp_path: Path, function: tuple[str, str, str], expected: dict[str, str]) -> None:
    pci(tmp_path, "0000:01:00.0", *function)
    assert present(tmp_path) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [("dev/nvidia0", "cuda"), ("dev/neuron0", "neuron"), ("dev/accel0", "tpu"), ("usr/lib/wsl/lib/libcuda.so.1", "cuda"), ("dev/nvidiactl", None)],
)
def test_hardware_is_known_by_its_files(tmp_path: Path, path: str, expected: str | None) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).touch()
    assert present(tmp_path) == ({expected: f"/{path}"} if expected else {})


def test_a_bare_machine_has_nothing(tmp_path: Path) -> None:
    assert present(tmp_path) == {}


def test_the_command_is_printed_only_where_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("backends/fast", "", tmp_path) == ""
    assert install_command("backends/fast", "pip install 'oarlock[fast]'", tmp_path) == "pip install 'oarlock[fast]'"
    (tmp_path / "backends/fast").mkdir(parents=True)
    assert install_command("backends/fast", "", tmp_path) == ""  # a folder without a package
    (tmp_path / "backends/fast/pyproject.toml").touch()
    assert install_command("backends/fast", "", tmp_path) == f"{PIP} {tmp_path}/backends/fast"
    monkeypatch.chdir(tmp_path)
    assert install_command("backends/fast", "", tmp_path) == f"{PIP} ./backends/fast"


@pytest.mark.parametrize("name", ["cuda", "xpu", "neuron", "tpu"])
@pytest.mark.parametrize("in_checkout", [False, True])
def test_the_known_devices_get_the_right_words_with_nothing_installed(tmp_path: Path, name: str, in_checkout: bool) -> None:
    if in_checkout:
        (tmp_path / "backends" / name).mkdir(parents=True)
        (tmp_path / "backends" / name / "pyproject.toml").touch()
    found = discover([device("host", priority=0)], load_hints(tmp_path, tmp_path))
    with pytest.raises(PluginError) as caught:
        select_device(name, found)
    text = str(caught.value)
    if in_checkout:
        assert text == f"--device {name}: oarlock-{name} is not installed. Install it: {PIP} {tmp_path}/backends/{name}"
    elif next(h.source for h in found.hints if h.device == name):
        assert text.endswith(f"is not installed; it lies in the source of Oarlock, in the folder backends/{name}") and "pip" not in text
    else:
        assert f"this version of Oarlock has no {name} backend yet" in text and "pip" not in text
        assert text.endswith("To run on the processor instead, say so: --device host")


@pytest.mark.parametrize(("name", "source"), [("cpu", "backends/cpu"), ("sim-eager", "plugins/sim"), ("sim-static", "plugins/sim"), ("template", "plugins/template_backend")])
def test_a_device_that_lies_in_the_source_is_never_called_not_yet_built(tmp_path: Path, name: str, source: str) -> None:
    def message() -> str:
        with pytest.raises(PluginError) as caught:
            select_device(name, discover([], load_hints(tmp_path, tmp_path)))
        return str(caught.value)

    assert message().endswith(f"is not installed; it lies in the source of Oarlock, in the folder {source}") and "pip" not in message()
    (tmp_path / source).mkdir(parents=True)
    (tmp_path / source / "pyproject.toml").touch()
    assert message().endswith(f"is not installed. Install it: {PIP} {tmp_path}/{source}")


def test_the_host_hint_of_the_fakes_matches_the_real_one(tmp_path: Path) -> None:
    (real,) = [h for h in load_hints(tmp_path, tmp_path) if h.is_host]
    assert (real.label, real.is_present) == (HOST.label, False)


@pytest.mark.parametrize("wanted", ["2.0", (1,), [1, 0], (1, "0"), None, 1])
def test_an_api_version_of_another_type_is_a_problem_in_words(wanted):
    from oarlock.plugins import api_problem

    assert "tuple of two whole numbers" in api_problem("oarlock-x", wanted)
