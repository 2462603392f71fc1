"""Write the reference tables of docs/backends.md from the source of `oarlock.backend_api` and the op registry.

    python tools/gen_backend_doc.py [--check]

A table stands between `<!-- NAME -->` and `<!-- end -->`; the text around them is written by hand.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import textwrap
import tokenize
from pathlib import Path
from typing import Any

import oarlock.runtime.worker  # noqa: F401  registers every op, as a worker does
from oarlock import backend_api
from oarlock.backend_api import Hooks, runtime
from oarlock.backend_api.runtime import registry
from oarlock.runtime.quantization import schemes

TARGET = Path(__file__).resolve().parents[1] / "docs" / "backends.md"
SECTION = re.compile(r"<!-- (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def render(page: str) -> str:
    """The page with every table made anew."""
    return SECTION.sub(lambda found: f"<!-- {found[1]} -->\n{section(found[1]).strip()}\n<!-- end -->", page)


def section(name: str) -> str:
    """The hook table, the op table, the ops' references, quantised weights, a record's fields, or a class's members."""
    if name in ("hooks", "ops", "references", "quantised"):
        return {"hooks": hooks, "ops": ops, "references": references, "quantised": quantised}[name]()
    value = getattr(backend_api, name, None) or getattr(runtime, name)
    return fields(value) if hasattr(value, "__dataclass_fields__") else members(value)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def hooks() -> str:
    lines = ["| hook | yields | when | |", "|---|---|---|---|"]
    for name, hook in vars(Hooks).items():
        if name.startswith("_"):
            continue
        what, _, rest = (inspect.getdoc(hook) or "").partition("\n\nWhen:")
        signature = inspect.signature(hook)
        arguments = ", ".join(list(signature.parameters)[1:])
        record = str(signature.return_annotation).removeprefix("list[").removesuffix("]").removeprefix("specs.")
        lines.append(f"| `{name}({arguments})` | `{record}` | {cell(rest.partition('Example:')[0])} | {cell(what)} |")
    return "\n".join(lines)


def ops() -> str:
    lines = ["| op | arguments | may write | what it means, by its reference |", "|---|---|---|---|"]
    for name, op in sorted(registry().items()):
        parameters = ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in inspect.signature(op.reference).parameters.values())
        version = f" (version {op.version})" if op.version != 1 else ""
        lines.append(f"| `{name}`{version} | `{parameters}` | {', '.join(op.mutates)} | {cell((inspect.getdoc(op.reference) or '').partition(chr(10) * 2)[0])} |")
    return "\n".join(lines)


def references() -> str:
    """Signature and whole docstring of each op."""
    out: list[str] = []
    for name, op in sorted(registry().items()):
        parameters = ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in inspect.signature(op.reference).parameters.values())
        out += [f"def {name}({parameters}):", *_docstring(inspect.getdoc(op.reference), 4), ""]
    return "```python\n" + "\n".join(line.rstrip() for line in out).strip() + "\n```"


def quantised() -> str:
    """How the weights of quantised linears lie in memory."""
    return "```\n" + (inspect.getdoc(schemes) or "").partition("Never:")[2].partition("\n\n")[2].strip() + "\n```"


def fields(record: Any) -> str:
    """Name, type, default and comment of each field."""
    source = textwrap.dedent(inspect.getsource(record))
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    lines = ["| field | type | default | |", "|---|---|---|---|"]
    for node in tree.body:
        if isinstance(node, ast.AnnAssign):
            default = f"`{cell(ast.unparse(node.value))}`" if node.value else "required"
            lines.append(f"| `{ast.unparse(node.target)}` | `{cell(ast.unparse(node.annotation))}` | {default} | {cell(comments.get(node.end_lineno or 0, ''))} |")
    return "\n".join(lines)


def members(base: Any) -> str:
    """Signatures and docstrings; what must be written is abstract."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
    assert isinstance(tree, ast.ClassDef)
    out = [f"class {tree.name}:"]
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        text = ast.get_docstring(node)
        if node.name.startswith("_") and node.name != "__init__":
            continue
        marks = [ast.unparse(mark).removeprefix("abc.") for mark in node.decorator_list]
        out += ["", *(f"    @{mark}" for mark in marks), f"    def {node.name}({ast.unparse(node.args)}){_returns(node)}:"]
        out += _docstring(text, 8)
    return "```python\n" + "\n".join(line.rstrip() for line in out) + "\n```"


def _docstring(text: str | None, indent: int) -> list[str]:
    quoted = f'"""{text}\n"""' if text and "\n" in text else f'"""{text}"""' if text else "..."
    return textwrap.indent(quoted, " " * indent).splitlines()


def _returns(node: ast.FunctionDef) -> str:
    return f" -> {ast.unparse(node.returns)}" if node.returns else ""


if __name__ == "__main__":
    page = TARGET.read_text(encoding="utf-8")
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(render(page), encoding="utf-8")
    elif page != render(page):
        sys.exit(f"{TARGET.relative_to(TARGET.parents[1])} is stale: run python tools/gen_backend_doc.py")
