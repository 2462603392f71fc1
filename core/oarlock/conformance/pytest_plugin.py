"""The kit under pytest: `pytest --pyargs oarlock.conformance --oarlock-device NAME`.

Owns: the options, the markers level0 … level5, one test for each case.
Reads: `kit`, only when a device was named.
Never: does anything, or imports torch, in a run that does not ask for it.
"""

from __future__ import annotations

from typing import Any

import pytest

from oarlock.conformance import LEVELS


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("oarlock", "Oarlock's conformance kit")
    group.addoption("--oarlock-device", metavar="NAME", help="the device to test")
    group.addoption("--oarlock-level", metavar="LEVELS", default="", help="levels by number or name, with commas and ranges; all by default")
    group.addoption("--oarlock-full", action="store_true", help="every case, not only the quick ones")
    group.addoption("--oarlock-timeout", type=float, metavar="SECONDS", help="limit for one case, compiling included; 300 by default")


def pytest_configure(config: pytest.Config) -> None:
    for number, name in enumerate(LEVELS):
        config.addinivalue_line("markers", f"level{number}: conformance level {number}, {name}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "oarlock_case" not in metafunc.fixturenames:
        return
    config = metafunc.config
    if not config.getoption("--oarlock-device"):
        reason = pytest.mark.skip(reason="name the device to test: --oarlock-device NAME")
        metafunc.parametrize("oarlock_case", [pytest.param(None, marks=reason)], ids=["no device"])
        return
    subject = _subject(config)
    from oarlock.conformance import kit

    text = config.getoption("--oarlock-level")
    levels = kit.parse_levels(text) if text else kit.Choice().levels
    cases = kit.select(kit.Choice(levels, full=config.getoption("--oarlock-full")), subject)
    marked = [pytest.param(case, id=case.id, marks=getattr(pytest.mark, f"level{case.level}")) for case in cases]
    metafunc.parametrize("oarlock_case", marked)


def _subject(config: pytest.Config) -> Any:
    """The device under test with what core would choose for it, made once a run.

    Raises:
        pytest.UsageError: it is not available, or cannot be made.
    """
    if not hasattr(config, "_oarlock_subject"):
        from oarlock.errors import PluginError
        from oarlock.plugins import apply_environment, select_device

        try:
            selection = select_device(config.getoption("--oarlock-device"))
        except PluginError as error:
            raise pytest.UsageError(str(error)) from None
        apply_environment(selection.spec)  # before torch is imported
        from oarlock.conformance.subject import Subject

        try:
            config._oarlock_subject = Subject.open(selection)  # type: ignore[attr-defined]
        except Exception as error:
            raise pytest.UsageError(f"device {selection.spec.name} cannot be opened: {type(error).__name__}: {error}") from error
        config.add_cleanup(config._oarlock_subject.close)  # type: ignore[attr-defined]
    return config._oarlock_subject  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def oarlock_subject(request: pytest.FixtureRequest) -> Any:
    """The device under test."""
    return _subject(request.config)
