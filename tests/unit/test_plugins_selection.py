"""--device auto and --device NAME over combinations of fake probes; every message by its words."""

from __future__ import annotations

from itertools import product

import pytest
from oarlock.errors import ApiVersionMismatch, BackendNotFound, BackendUnavailable, PluginError
from oarlock.plugins import DEVICE_GROUP, select_device
from plugin_fakes import (
    HOST,
    Dist,
    Entry,
    available,
    broken,
    catalogue,
    device,
    driver_problem,
    feature,
    hint,
    module,
    no_hardware,
    nothing,
    raising,
    unsupported,
)

PROCESSOR = device("host", priority=0)
SIMULATOR = device("simulator", priority=-10)


# ---------------------------------------------------------------- auto
def test_the_best_available_wins() -> None:
    chosen = select_device("auto", catalogue(PROCESSOR, device("slow", priority=5), device("fast", priority=20), SIMULATOR))
    assert (chosen.spec.name, chosen.distribution, chosen.notes) == ("fast", "oarlock-fast", ())


def test_an_absent_accelerator_leaves_the_processor() -> None:
    assert select_device("auto", catalogue(PROCESSOR, device("fast", no_hardware), SIMULATOR)).spec.name == "host"


def test_two_accelerators_of_equal_priority_ask_for_a_choice() -> None:
    with pytest.raises(PluginError) as caught:
        select_device("auto", catalogue(PROCESSOR, device("one"), device("two")))
    for word in ("several devices", "one (oarlock-one)", "two (oarlock-two)", "--device one or --device two"):
        assert word in str(caught.value)


def test_one_device_from_two_packages_names_both() -> None:
    with pytest.raises(PluginError, match="device one is provided by oarlock-one and stranger-one; uninstall all but one"):
        select_device("auto", catalogue(device("one"), device("one", package="stranger-one")))


@pytest.mark.parametrize("probe", [driver_problem, unsupported])
def test_never_the_processor_when_a_probe_saw_hardware(probe: object) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        select_device("auto", catalogue(PROCESSOR, device("fast", probe)))  # type: ignore[arg-type]
    result = probe()  # type: ignore[operator]
    text = str(caught.value)
    assert result.reason in text and result.remedy.capitalize() in text
    assert "oarlock-fast 1.2.3" in text and text.endswith("--device host")


def test_never_the_processor_when_hardware_is_here_and_its_package_is_missing() -> None:
    known = hint("fast", present=True, install="pip install ./backends/fast")
    with pytest.raises(BackendUnavailable) as caught:
        select_device("auto", catalogue(PROCESSOR, hints=(HOST, known)))
    for word in ("found a fast chip (/dev/fast0)", "package oarlock-fast is not installed", "pip install ./backends/fast", "--device host"):
        assert word in str(caught.value)


def test_without_a_backend_in_this_version_no_command_is_printed() -> None:
    with pytest.raises(BackendUnavailable) as caught:
        select_device("auto", catalogue(PROCESSOR, hints=(HOST, hint("fast", present=True))))
    assert "this version of Oarlock has no fast backend yet" in str(caught.value)
    assert "pip" not in str(caught.value) and str(caught.value).endswith("--device host")


@pytest.mark.parametrize("entry", [broken("fast"), broken("other-name", "oarlock-fast"), device("fast", raising)])
def test_a_package_that_cannot_tell_is_judged_by_the_hint(entry: Entry) -> None:
    with pytest.raises(BackendUnavailable, match="a fast chip .* but oarlock-fast 1.2.3 cannot use it"):
        select_device("auto", catalogue(PROCESSOR, entry, hints=(HOST, hint("fast", present=True))))
    chosen = select_device("auto", catalogue(PROCESSOR, entry, hints=(HOST, hint("fast", present=False))))
    assert chosen.spec.name == "host"
    assert len(chosen.notes) == 1 and "oarlock-fast" in chosen.notes[0]


def test_a_probe_that_finds_nothing_outweighs_a_hint() -> None:
    hints = (HOST, hint("fast", present=True, install="pip install ./backends/fast"))
    assert select_device("auto", catalogue(PROCESSOR, device("fast", no_hardware), hints=hints)).spec.name == "host"


def test_an_unusable_accelerator_beside_a_usable_one_is_noted() -> None:
    chosen = select_device("auto", catalogue(device("slow", priority=5), device("fast", driver_problem, priority=20)))
    assert chosen.spec.name == "slow"
    assert len(chosen.notes) == 1 and chosen.notes[0].startswith("not used: fast") and "driver" in chosen.notes[0]


def test_without_the_processors_package_insisting_names_its_install() -> None:
    with pytest.raises(BackendUnavailable, match=r"--device host \(after pip install ./backends/host\)"):
        select_device("auto", catalogue(device("fast", driver_problem)))


def test_nothing_installed_says_how_to_begin() -> None:
    with pytest.raises(BackendNotFound, match="no device package is installed. Install the one .*: pip install ./backends/host"):
        select_device("auto", catalogue())


def test_a_simulator_is_never_chosen_by_itself() -> None:
    with pytest.raises(BackendNotFound) as caught:
        select_device("auto", catalogue(SIMULATOR, device("fast", no_hardware)))
    for word in ("simulator (available", "fast (no_hardware: there is none)", "--device simulator", "pip install ./backends/host"):
        assert word in str(caught.value)


PROBES = {"available": available, "none": no_hardware, "driver": driver_problem, "old": unsupported, "raises": raising}


@pytest.mark.parametrize(("first", "second", "seen"), list(product(PROBES, PROBES, (False, True))))
def test_auto_over_all_pairs_of_probes(first: str, second: str, seen: bool) -> None:
    """Either the better usable accelerator, or an error when hardware was seen, or the processor."""
    hints = (HOST, hint("third", present=seen, install="pip install ./backends/third"))
    found = catalogue(PROCESSOR, SIMULATOR, device("first", PROBES[first], 20), device("second", PROBES[second], 10), hints=hints)
    if "available" in (first, second):
        assert select_device("auto", found).spec.name == ("first" if first == "available" else "second")
    elif seen or {"driver", "old"} & {first, second}:
        with pytest.raises(BackendUnavailable, match="--device host$"):
            select_device("auto", found)
    else:
        assert select_device("auto", found).spec.name == "host"


# ---------------------------------------------------------------- by name
@pytest.mark.parametrize("name", ["fast", "FAST", "quick"])
def test_a_device_is_found_by_name_and_alias(name: str) -> None:
    assert select_device(name, catalogue(PROCESSOR, device("fast", aliases=("quick",)))).spec.name == "fast"


def test_a_name_outweighs_an_alias() -> None:
    found = catalogue(device("fast"), device("other", aliases=("fast",)))
    assert select_device("fast", found).spec.name == "fast"


def test_insisting_on_the_processor_works_whatever_else_is_here() -> None:
    found = catalogue(PROCESSOR, device("fast", driver_problem), hints=(HOST, hint("third", present=True)))
    assert select_device("host", found).spec.name == "host"


def test_a_simulator_can_be_named() -> None:
    assert select_device("simulator", catalogue(SIMULATOR)).spec.name == "simulator"


@pytest.mark.parametrize("probe", [no_hardware, driver_problem, unsupported, raising])
def test_a_named_device_that_cannot_be_used_says_why(probe: object) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        select_device("fast", catalogue(PROCESSOR, device("fast", probe)))  # type: ignore[arg-type]
    text = str(caught.value)
    assert text.startswith("--device fast: oarlock-fast 1.2.3 is installed, but ")
    assert {no_hardware: "there is none", driver_problem: "Install the driver", unsupported: "Use a newer one", raising: "libfoo.so"}[probe] in text  # type: ignore[index]


@pytest.mark.parametrize(("name", "present"), list(product(["fast", "fast-alias"], [False, True])))
def test_a_known_device_whose_package_can_be_had_gets_the_command(name: str, present: bool) -> None:
    known = hint("fast", present=present, install="pip install ./backends/fast")
    with pytest.raises(BackendNotFound) as caught:
        select_device(name, catalogue(PROCESSOR, hints=(HOST, known)))
    text = str(caught.value)
    assert text.startswith(f"--device {name}: oarlock-fast is not installed") and text.endswith("pip install ./backends/fast")
    assert ("found a fast chip (/dev/fast0)" in text) is present


def test_a_known_device_without_a_backend_gets_no_command() -> None:
    with pytest.raises(BackendNotFound) as caught:
        select_device("fast", catalogue(PROCESSOR, hints=(HOST, hint("fast", present=True))))
    text = str(caught.value)
    assert "this version of Oarlock has no fast backend yet; found a fast chip" in text and "pip" not in text
    assert text.endswith("To run on the processor instead, say so: --device host")


def test_an_unknown_device_lists_what_is_installed_and_why_it_is_refused() -> None:
    with pytest.raises(BackendNotFound) as caught:
        select_device("fsat", catalogue(PROCESSOR, device("fast", driver_problem)))
    for word in ("--device fsat", "did you mean fast?", "host (available: a fine one)", "fast (driver_problem: the chip is here"):
        assert word in str(caught.value)
    with pytest.raises(BackendNotFound, match="No device package is installed"):
        select_device("none-such", catalogue())


def test_a_word_that_several_devices_answer_to_names_them() -> None:
    hints = (HOST, hint("one", words=("gpu",)), hint("two", words=("gpu", "card")))
    for name, near in (("gpu", "one or two"), ("card", "two"), ("twoo", "two"), ("two:0", "two")):
        with pytest.raises(BackendNotFound, match=f"--device {name}: there is no device of this name; did you mean {near}\\?"):
            select_device(name, catalogue(PROCESSOR, hints=hints))


def test_what_core_registers_for_its_own_tests_is_usable_and_never_offered() -> None:
    found = catalogue(PROCESSOR, device("null", priority=-100, package="oarlock"))
    assert select_device("null", found).spec.name == "null"
    for name in ("nul", "none-such"):
        with pytest.raises(BackendNotFound) as caught:
            select_device(name, found)
        assert "null" not in str(caught.value)
    with pytest.raises(BackendNotFound) as caught:
        select_device("auto", catalogue(device("null", priority=-100, package="oarlock")))
    assert "null" not in str(caught.value)


def test_a_broken_package_that_was_asked_for_is_fatal() -> None:
    for entry in (broken("fast"), broken("other", "oarlock-fast")):
        with pytest.raises(PluginError, match="oarlock-fast 1.2.3 is installed, but its package is broken: ImportError: No module named"):
            select_device("fast", catalogue(PROCESSOR, entry, hints=(HOST, hint("fast", present=False))))
    assert select_device("host", catalogue(PROCESSOR, broken("fast"))).spec.name == "host"


def test_two_packages_for_a_named_device_is_an_error() -> None:
    with pytest.raises(PluginError, match="--device fast is provided by oarlock-fast 1.2.3 and stranger 1.2.3"):
        select_device("fast", catalogue(device("fast"), device("fast", package="stranger")))


@pytest.mark.parametrize(("version", "side"), [((2, 0), "upgrade oarlock"), ((1, 99), "upgrade oarlock"), ((0, 9), "upgrade oarlock-fast")])
def test_another_api_version_says_which_side_to_upgrade(version: tuple[int, int], side: str) -> None:
    found = catalogue(PROCESSOR, device("fast", api_version=version))
    with pytest.raises(ApiVersionMismatch, match=rf"backend API {version[0]}\.{version[1]}, .*; {side}$"):
        select_device("fast", found)
    assert select_device("auto", found).spec.name == "host"


def test_modules_of_several_devices_and_features_are_told_apart() -> None:
    first, second = device("first"), device("second", priority=5)
    both = Entry("both", DEVICE_GROUP, Dist("oarlock-both"), lambda: module(devices=lambda: [*first.load().devices(), *second.load().devices()]))
    found = catalogue(both, feature("extra", lambda: module(extensions=nothing)))
    assert [row.device for row in found.rows()] == ["first", "second"]
    assert select_device("second", found).distribution == "oarlock-both"
