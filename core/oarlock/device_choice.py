"""The rules by which one device is chosen, and the words when none can be.

Owns: `choose` and every message about a device that cannot be used.
Reads: `backend_api` records, `hints`.
Never: probes (the rows it gets are probed), falls back to the host's processor when an accelerator was seen.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from oarlock.backend_api import DeviceSpec, ProbeResult
from oarlock.errors import ApiVersionMismatch, BackendNotFound, BackendUnavailable, PluginError
from oarlock.hints import Hint

OWN_DISTRIBUTION = "oarlock"  # what core itself registers is for its own tests


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One installed device with its probe's answer; a line of `oarlock devices`."""

    device: str
    distribution: str
    version: str
    api_version: tuple[int, int]
    probe: ProbeResult
    priority: int
    spec: DeviceSpec | None  # None: its package is broken
    probe_ms: float = 0.0
    wrong_api: bool = False

    @classmethod
    def of_broken(cls, name: str, distribution: str, version: str, error: str) -> DeviceRow:
        """The row of a package whose light module could not be used; `name` is its entry point's."""
        result = ProbeResult("error", f"its package is broken: {error}", "oarlock doctor shows the traceback")
        return cls(name, distribution, version, (0, 0), result, 0, None)

    def answers_to(self, name: str) -> bool:
        return name == self.device or (self.spec is not None and name in self.spec.aliases)

    @property
    def is_internal(self) -> bool:
        """Usable by its name, and told to nobody who looks for a device."""
        return self.distribution == OWN_DISTRIBUTION


@dataclass(frozen=True, slots=True)
class Selection:
    """The device of this run."""

    spec: DeviceSpec
    probe: ProbeResult
    distribution: str
    notes: tuple[str, ...] = ()  # to be logged: what else was seen and is not used


def choose(name: str, rows: Sequence[DeviceRow], hints: Sequence[Hint]) -> Selection:
    """Apply the rules. Raises as `plugins.select_device` says."""
    wanted = name.strip().lower()
    return _choose_auto(rows, hints) if wanted in ("", "auto") else _choose_named(wanted, rows, hints)


# ---------------------------------------------------------------- --device NAME
def _choose_named(name: str, rows: Sequence[DeviceRow], hints: Sequence[Hint]) -> Selection:
    hint = next((h for h in hints if name == h.device or name in h.aliases), None)
    found = [row for row in rows if row.device == name] or [row for row in rows if row.answers_to(name)]
    if not found and hint is not None:
        found = [row for row in rows if row.answers_to(hint.device) or (row.spec is None and row.distribution == hint.package)]
    if not found:
        raise BackendNotFound(_not_installed(name, rows, hints, hint) if hint else _unknown(name, rows, hints))
    if len(found) > 1:
        who = " and ".join(sorted({f"{row.distribution} {row.version}" for row in found}))
        raise PluginError(f"--device {name} is provided by {who}; uninstall all but one")
    row = found[0]
    if row.spec is None:
        raise PluginError(f"--device {name}: {row.distribution} {row.version} is installed, but {row.probe.reason}; {row.probe.remedy}")
    _require_available(name, row)
    return Selection(row.spec, row.probe, row.distribution)


def _require_available(name: str, row: DeviceRow) -> None:
    if row.probe.status == "available":
        return
    if row.wrong_api:
        raise ApiVersionMismatch(f"--device {name}: {row.probe.reason}; {row.probe.remedy}")
    raise BackendUnavailable(
        f"--device {name}: {row.distribution} {row.version} is installed, but {row.probe.reason}{_then(row.probe.remedy)}"
    )


def _not_installed(name: str, rows: Sequence[DeviceRow], hints: Sequence[Hint], hint: Hint) -> str:
    found = f"; found {hint.label} ({hint.evidence})" if hint.is_present else ""
    if hint.install:
        return f"--device {name}: {hint.package} is not installed{found}. Install it: {hint.install}"
    if hint.source:
        return f"--device {name}: {hint.package} is not installed{found}; it lies in the source of Oarlock, in the folder {hint.source}"
    other = "" if hint.is_host else _insist(rows, hints)
    return f"--device {name}: this version of Oarlock has no {hint.device} backend yet{found}. {other or _installed(rows)}"


def _unknown(name: str, rows: Sequence[DeviceRow], hints: Sequence[Hint]) -> str:
    shown = [row for row in rows if not row.is_internal]
    near = [h.device for h in hints if name in h.words]
    if not near:
        known = {row.device for row in shown if row.spec is not None} | {h.device for h in hints}
        near = difflib.get_close_matches(name, sorted(known), n=3)
    return f"--device {name}: there is no device of this name{f'; did you mean {_or(near)}?' if near else '.'} {_installed(shown)}"


def _or(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _insist(rows: Sequence[DeviceRow], hints: Sequence[Hint]) -> str:
    """How to run on the machine's own processor; "" where no package could."""
    hosts = sorted(row.device for row in rows if row.spec is not None and row.priority == 0 and row.probe.status == "available")
    host = hosts[0] if hosts else next((h.device for h in hints if h.is_host), "")
    if not host:
        return ""
    how = f"To run on the processor instead, say so: --device {host}"
    if not hosts and not any(row.answers_to(host) for row in rows):
        install = next((h.install for h in hints if h.is_host and h.install), "")
        how += f" (after {install})" if install else " (its package is not installed)"
    return how


def _installed(rows: Sequence[DeviceRow]) -> str:
    shown = [row for row in rows if not row.is_internal]
    if not shown:
        return "No device package is installed."
    return "Installed: " + "; ".join(f"{row.device} ({row.probe.status}: {row.probe.reason})" for row in shown)


def _then(remedy: str) -> str:
    return f". {remedy[0].upper()}{remedy[1:]}" if remedy else ""


# ---------------------------------------------------------------- --device auto
def _choose_auto(rows: Sequence[DeviceRow], hints: Sequence[Hint]) -> Selection:
    usable = [row for row in rows if row.spec is not None and row.probe.status == "available"]
    accelerators = [row for row in usable if row.priority > 0]
    unusable = _seen_but_unusable(rows, hints)
    if accelerators:
        best = max(row.priority for row in accelerators)
        top = [row for row in accelerators if row.priority == best]
        if len(top) > 1:
            raise PluginError(_tie(top))
        return _selection(top[0], tuple(f"not used: {text}" for text, _ in unusable) + _errors(rows))
    hosts = sorted((row for row in usable if row.priority == 0), key=lambda row: row.device)
    if unusable:
        found = "; ".join(f"{text}{_then(remedy)}" for text, remedy in unusable)
        raise BackendUnavailable(f"found {found}. {_insist(rows, hints)}".rstrip(". "))
    if len(hosts) > 1:
        raise PluginError(_tie(hosts))
    if not hosts:
        raise BackendNotFound(_nothing(rows, hints))
    return _selection(hosts[0], _errors(rows))


def _selection(row: DeviceRow, notes: tuple[str, ...]) -> Selection:
    assert row.spec is not None  # usable rows have one
    return Selection(row.spec, row.probe, row.distribution, notes)


def _tie(rows: Sequence[DeviceRow]) -> str:
    if len({row.device for row in rows}) == 1:
        return f"device {rows[0].device} is provided by {' and '.join(sorted(row.distribution for row in rows))}; uninstall all but one"
    names = sorted({row.device for row in rows})
    found = "; ".join(f"{row.device} ({row.distribution}): {row.probe.reason}" for row in rows)
    return f"several devices are here and none is preferred: {found}. Choose one: {' or '.join(f'--device {n}' for n in names)}"


def _seen_but_unusable(rows: Sequence[DeviceRow], hints: Sequence[Hint]) -> list[tuple[str, str]]:
    """Accelerators that are here and cannot be used, as (what was found and what is missing, remedy).

    A probe that says driver_problem or unsupported has seen hardware. A package that is missing or broken, or whose
    probe failed, cannot tell: then the hint's presence test does.
    """
    seen: list[tuple[str, str]] = []
    for row in rows:
        if row.spec is not None and row.priority > 0 and row.probe.status in ("driver_problem", "unsupported"):
            seen.append((f"{row.device} ({row.distribution} {row.version}): {row.probe.reason}", row.probe.remedy))
    for hint in hints:
        if not hint.is_present or hint.is_host:
            continue
        what = f"{hint.label} ({hint.evidence})"
        own = [row for row in rows if row.answers_to(hint.device) or row.distribution == hint.package]
        if not own:
            missing = f"its package {hint.package} is not installed" if hint.install else f"this version of Oarlock has no {hint.device} backend yet"
            seen.append((f"{what}, but {missing}", f"install it: {hint.install}" if hint.install else ""))
        elif all(row.probe.status == "error" for row in own):
            row = own[0]
            seen.append((f"{what}, but {row.distribution} {row.version} cannot use it: {row.probe.reason}", row.probe.remedy))
    return seen


def _nothing(rows: Sequence[DeviceRow], hints: Sequence[Hint]) -> str:
    host = next((h for h in hints if h.is_host), None)
    advice = f" Install the one for this machine's processor: {host.install}" if host and host.install else ""
    rows = [row for row in rows if not row.is_internal]
    if not rows:
        return f"no device package is installed.{advice}"
    named = [row.device for row in rows if row.spec is not None and row.probe.status == "available"]
    insist = f" Only chosen by name: {', '.join(f'--device {n}' for n in named)}." if named else ""
    return f"no device can be used here. {_installed(rows)}.{insist}{'' if any(r.priority == 0 and r.spec for r in rows) else advice}"


def _errors(rows: Sequence[DeviceRow]) -> tuple[str, ...]:
    return tuple(f"{row.device} ({row.distribution}): {row.probe.reason}; {row.probe.remedy}" for row in rows if row.probe.status == "error")
