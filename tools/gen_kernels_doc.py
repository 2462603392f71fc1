"""Write docs/kernels.md: a chapter a kernel of plugins/triton_kernels, from its docstring, with what it compiles to for described chips.

    python tools/gen_kernels_doc.py [--check]

Every launch is compiled for every chip: some minutes the first time, then Triton's cache has most of it. `--check` compiles nothing: it
says whether the page was made of the sources as they are.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
ROOT = Path(__file__).resolve().parents[1]
PLUGIN, TARGET = ROOT / "plugins/triton_kernels", ROOT / "docs/kernels.md"
sys.path.insert(0, str(PLUGIN / "tests"))

import kernel_compile
from oarlock_triton_kernels import registry
from oarlock_triton_kernels.launches import CHIPS

ARGUMENT = re.compile(r"^(\w+(?:, \w+)*):\s+(.*)")
NOTES = re.compile(r"^(Reference|Cost|Bound): ")
INTRODUCTION = """# Kernels

The Triton kernels of `plugins/triton_kernels`, a chapter each: what a program of the grid does, what its arguments are, what it costs, which
limit binds it on a large chip, and what it compiles to. They serve every device that declares `triton`; which op is served by what, `oarlock
doctor` says for a device. This page is made by `python tools/gen_kernels_doc.py` from the docstrings and from Triton's own compiler;
**nothing in it was measured on hardware**.

{contents}

## How to read it

A chapter opens with the grid and what one program computes. Then come its arguments: shape, dtype and strides of each pointer (one dimension of
stride 1 is said, not passed), and what its compile-time sizes are. Letters are those of the legend at the head of the file; K is always the
inputs of a linear, KV the heads of keys and values. Three notes end it: the **reference** in plain torch that it must equal, in float64, over the
conformance kit's cases; the **cost** in operations and bytes; and the limit that **binds**, by arithmetic: the matrix units, memory, or the
latency of what waits for each other.

Its table says what it compiles to. A line is one call of a launcher with the sizes of a real model, or several whose code takes the same; a cell
is what one chip's program takes: **registers** of a thread · **shared** memory in bytes · **warps** · the matrix instruction, if it has one · `tma`
where it copies by descriptors · `divided` where copies and products have warps of their own. Two entries are two launches. Bold is what spills,
with the reason at the end of this page. Calls are compiled through the launcher's own specialisation, with a driver that describes the chip:

| chip | units | shared memory of a program |
|---|---|---|
{chips}

## What all of them keep

- Sums are in float32 and rounded once; int8 products are summed in int32, exactly. The number of rows chooses a tile, never a definition.
- Nothing is chosen by timing, and no value of a tensor is read on the host: a run repeats, and a CUDA graph may record every launch.
- Offsets into what grows with the cache, the tokens or the vocabulary are of 64 bits.
- Where several programs share one result, their parts are added up in order, by the last of them or by a launch of its own.
- What is padding is not read where it may hold anything, and its result is 0 or not written.
"""


def stamp() -> str:
    """Of everything that the page depends on: kernels, launches, the harness, Triton."""
    found = hashlib.sha256(f"triton {kernel_compile.triton.__version__}".encode())
    for path in sorted([*PLUGIN.glob("oarlock_triton_kernels/**/*.py"), PLUGIN / "tests/kernel_compile.py", Path(__file__)]):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def is_current() -> bool:
    """Whether the page was made of the sources as they are."""
    return TARGET.is_file() and TARGET.read_text(encoding="utf-8").rstrip().endswith(f"<!-- made of {stamp()} -->")


def kernel_of(chapter: registry.Chapter) -> tuple[Any, Any]:
    """(module, kernel)."""
    name, _, kernel = chapter.kernel.partition(":")
    module = importlib.import_module(f"oarlock_triton_kernels.{name}")
    return module, getattr(module, kernel)


def text_of(doc: str) -> list[str]:
    """A kernel's docstring as markdown: the grid, paragraphs, a list of arguments, and the notes at its end."""
    grid, *paragraphs = [part.splitlines() for part in inspect.cleandoc(doc).split("\n\n")]
    head = " ".join(grid)
    out = [re.sub(r"^Grid: (.*?\))\. ", r"**Grid `\1`.** ", head), ""]
    for lines in paragraphs:
        items: list[str] = []
        for line in lines:
            if (found := ARGUMENT.match(line)) and not NOTES.match(line):
                items.append(f"- `{found[1]}` {found[2]}")
            elif found := NOTES.match(line):
                items.append(f"- **{found[1]}:** {line[found.end() :]}")
            elif items:
                items[-1] += " " + line.strip()
            else:
                items.append(line.strip())
        is_list = items[0].startswith("- ")
        out += [*items, ""] if is_list else [" ".join(items), ""]
    return out


def table_of(rows: list[kernel_compile.Compiled]) -> list[str]:
    """A line for each call, a column for each chip."""
    out = [f"| model | call | {' | '.join(CHIPS)} |", "|---" * (2 + len(CHIPS)) + "|"]
    cells: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        product = re.sub(r"^(v_)?(s?w?g?mma|mfma|tcgen05).*", r"\2", row.products)
        more = (product, row.copies, "divided" if row.divided else "")
        cell = " · ".join((str(row.registers), str(row.shared), str(row.warps), *filter(None, more)))
        cells.setdefault((row.model, row.text), {}).setdefault(row.chip, []).append(f"**{cell} · spills {row.spilled}**" if row.spilled else cell)
    calls: dict[tuple[str, str], list[str]] = {}  # of one model whose code takes the same
    for (model, text), of in cells.items():
        calls.setdefault((model, " | ".join("<br>".join(of.get(chip, ["–"])) for chip in CHIPS)), []).append(text)
    models: dict[tuple[str, str], list[str]] = {}
    for (model, taken), texts in calls.items():
        models.setdefault(("; ".join(texts), taken), []).append(model)
    return [*out, *(f"| {', '.join(names)} | {texts} | {taken} |" for (texts, taken), names in models.items()), ""]


def render() -> str:
    """The page.

    Raises:
        SystemExit: a launch breaks a limit; the page must not say so quietly.
    """
    chips = "\n".join(f"| {name} | {chip.units} | {chip.shared_bytes} bytes |" for name, chip in kernel_compile.CHIP.items())
    out, wrong, spills = [INTRODUCTION.format(chips=chips, contents=_contents())], [], []
    for _, group in groupby(registry.CHAPTERS, key=lambda chapter: chapter.kernel.partition(":")[0]):
        chapters = list(group)
        module, _ = kernel_of(chapters[0])
        out += [f"## {chapters[0].kernel.partition(':')[0]}", "", *_summary(module), ""]
        for chapter in chapters:
            rows = []
            for _, launch, chip in kernel_compile.launches(only=chapter.kernel, chips=CHIPS):
                made = kernel_compile.compile_launch(chapter, launch, chip)
                wrong += kernel_compile.problems(chapter, launch, made)
                rows += [one for one in made if one.kernel == one.chapter]
                spills += [f"- {one.kernel}, {one.model}, {one.text}, {one.chip}: {launch.spills}" for one in made if one.spilled and one.kernel == one.chapter]
            name = chapter.kernel.partition(":")[2]
            text = text_of(kernel_of(chapter)[1].fn.__doc__)
            out += [f"### {name.removesuffix('_kernel')}", "", *text[:2], f"Serves {', '.join(chapter.serves)}.", "", *text[2:], *table_of(rows)]
            print(f"{name}: {len(rows)} rows", file=sys.stderr, flush=True)
    if wrong:
        sys.exit("\n".join(wrong))
    out += ["## What spills, and why", "", *(spills or ["Nothing."]), "", f"<!-- made of {stamp()} -->"]
    return "\n".join(out) + "\n"


def _contents() -> str:
    """A line for each kernel file, with its chapters."""
    out = []
    for name, group in groupby(registry.CHAPTERS, key=lambda chapter: chapter.kernel.partition(":")[0]):
        chapters = [chapter.kernel.partition(":")[2].removesuffix("_kernel") for chapter in group]
        first = inspect.cleandoc(importlib.import_module(f"oarlock_triton_kernels.{name}").__doc__ or "").partition("\n")[0]
        out.append(f"- [{name}](#{name}): {first} {', '.join(f'[{chapter}](#{chapter})' for chapter in chapters)}")
    return "\n".join(out)


def _summary(module: Any) -> list[str]:
    """A kernel file's docstring without what is for its editors."""
    parts = inspect.cleandoc(module.__doc__).split("\n\n")
    kept = [part for part in parts if not part.startswith(("Owns:", "Never:"))]
    return ["\n\n".join(f"```\n{part}\n```" if part.startswith("    ") else part for part in kept)]


def main() -> int:
    if "--check" in sys.argv[1:]:
        if not is_current():
            print(f"{TARGET.name} is not of these sources; run python tools/gen_kernels_doc.py", file=sys.stderr)
        return not is_current()
    TARGET.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
