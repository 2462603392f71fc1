"""A report as markdown and as JUnit XML.

Owns: the form of both.
Reads: `report`.
Never: decides what passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from xml.etree import ElementTree

from oarlock.conformance import LEVELS
from oarlock.conformance.cases import Result
from oarlock.conformance.report import LEGEND, STATES, Report


def to_markdown(report: Report) -> str:
    """The table's content, for a page or a comment."""
    first, *more = report.verdict_lines()
    lines = [f"# Conformance of {report.device}", "", f"**{first}**", *(f"- {text}" for text in more), ""]
    facts = {
        "package": f"{report.distribution} {report.version}, API {report.api}",
        "core": f"{report.core}, API {report.core_api}",
        "torch": report.torch,
        "device": report.device_text,
        "run": f"{report.mode}, {report.date}, {report.seconds:.0f} s",
        "command": f"`{report.command}`",
        "commit": report.commit,
        "sources": ", ".join(f"{name} {digest}" for name, digest in report.hashes.items()),
    }
    lines += [f"- {name}: {value}" for name, value in facts.items() if value]
    lines += ["", *_table(["level", *STATES, "time", "closest to its limit"], report.level_lines())]
    if report.served:
        lines += ["", *_table(["op", *report.dtypes, "served by"], report.op_lines()), "", LEGEND]
    found = [f"- `{r.id}` {r.status}: {r.detail}" + (f" (and {n} more with the same words)" if n else "") for r, n in report.failures()]
    return "\n".join([*lines, *(["", "## Failures", "", *found] if found else []), *(f"- {text}" for text in report.remarks())])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in cells]


def to_junit(report: Report) -> str:
    """A suite for each level; unsupported and expected failures are skipped, with their reason."""
    root = ElementTree.Element("testsuites", name=f"oarlock conformance {report.device}")
    for level, name in enumerate(LEVELS):
        here = [r for r in report.results if r.level == level]
        if not here:
            continue
        counts = {"tests": len(here), "failures": sum(r.status in ("fail", "xpass") for r in here)}
        counts |= {
            "errors": sum(r.status in ("error", "timeout") for r in here),
            "skipped": sum(r.status in ("unsupported", "xfail") for r in here),
        }
        suite = ElementTree.SubElement(root, "testsuite", {"name": f"level {level} {name}", **{k: str(v) for k, v in counts.items()}})
        facts = {
            "verdict": report.verdict(),
            "command": report.command,
            "commit": report.commit,
            **{f"sources.{k}": v for k, v in report.hashes.items()},
        }
        properties = ElementTree.SubElement(suite, "properties")
        for key, value in facts.items():
            ElementTree.SubElement(properties, "property", name=key, value=value)
        for result in here:
            _junit_case(suite, name, result)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _junit_case(suite: ElementTree.Element, level: str, result: Result) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=level, name=result.id, time=f"{result.seconds:.3f}")
    tag = {"fail": "failure", "xpass": "failure", "error": "error", "timeout": "error", "unsupported": "skipped", "xfail": "skipped"}.get(
        result.status
    )
    if tag is not None:
        what = ElementTree.SubElement(case, tag, type=result.status, message=_clean(result.detail))
        what.text = _clean(result.trace) or None


def _clean(text: str) -> str:
    """Without what XML cannot hold."""
    return "".join(c for c in text if c in "\t\n\r" or c >= " ")


FORMATS: dict[str, Callable[[Report], str]] = {"table": Report.to_table, "json": Report.to_json, "md": to_markdown, "junit": to_junit}
