"""`oarlock new-backend NAME`: write a backend that works, to begin from.

Owns: which names are allowed; the names in what is written.
Reads: `backend_template.txt` (made from the package of the device `template`), `plugins`, `hints`.
Never: writes over a file; installs anything.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from oarlock.config.parser import Parser
from oarlock.errors import ConfigError
from oarlock.hints import load_hints
from oarlock.plugins import discover

BUNDLE = Path(__file__).with_name("backend_template.txt")
MAX_NAME = 32
_FILE = re.compile(r"^==== (both|complete|minimal) (\S+)\n", re.MULTILINE)
_NAMES = re.compile(r"oarlock-template-backend|Template|template")


def main(argv: Sequence[str]) -> int:
    """Write the folder and say what to type next."""
    arguments = _parser().parse_args(argv)
    name, parent = arguments.name, Path(arguments.dir)
    check_name(name)
    if not parent.is_dir():
        raise ConfigError(f"--dir {parent}: there is no such folder")
    folder = parent / f"oarlock-{name}"
    files = render(name, minimal=arguments.minimal)
    try:
        folder.mkdir()
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"{folder} exists already; nothing was written. Give another name, or another --dir") from None
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from error
    print(f"made {folder}:")
    print("\n".join(f"  {path}" for path in files))
    print(f"\nnext:\n  pip install -e {folder}{'/' if folder.parts[:1] == folder.parts else ''}\n  oarlock devices\n  oarlock conformance --device {name} --quick")
    return 0


def render(name: str, *, minimal: bool = False) -> dict[str, str]:
    """Path -> text of a backend for a device of this name."""
    wanted = ("both", "minimal" if minimal else "complete")
    pieces = _FILE.split(BUNDLE.read_text(encoding="utf-8"))[1:]
    new = {"oarlock-template-backend": f"oarlock-{name}", "Template": name.capitalize(), "template": name}
    files = {path: text for kind, path, text in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=True) if kind in wanted}
    return {_renamed(path, new): _renamed(text, new) for path, text in files.items()}


def _renamed(text: str, new: dict[str, str]) -> str:
    return _NAMES.sub(lambda found: new[found.group()], text)


def check_name(name: str) -> None:
    """Raises ConfigError for a name that is no name for a device, or taken."""
    if not re.fullmatch(r"[a-z][a-z0-9]*", name) or len(name) > MAX_NAME:
        raise ConfigError(f"{name!r} is no name for a device: take a lower-case letter, then lower-case letters and digits, {MAX_NAME} at most")
    if name == "auto":
        raise ConfigError("auto is no name for a device: --device auto chooses one")
    package, distribution = f"oarlock_{name}", f"oarlock-{name}"
    for plugin in discover().plugins:
        if any(name in (spec.name, *spec.aliases) for spec in plugin.devices) or plugin.distribution == distribution:
            raise ConfigError(f"{name} is taken by {plugin.distribution} {plugin.version}; give another name, or uninstall it first")
    for hint in load_hints():
        if name in (hint.device, *hint.aliases):
            raise ConfigError(f"{name} is the name of {hint.label}, for which {hint.package} is kept; give another name")
    if importlib.util.find_spec(package) is not None or _is_installed(distribution):
        raise ConfigError(f"{name} is taken: {distribution} is installed already; give another name, or uninstall it first")


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _parser() -> Parser:
    parser = Parser(prog="oarlock new-backend", description="Write a backend that works: a package for a device of your own, computing on the CPU.")
    parser.add_argument("name", metavar="NAME", help="the device: lower-case letters and digits; the package is called oarlock-NAME")
    parser.add_argument("--dir", default=".", metavar="DIR", help="make the folder oarlock-NAME in this one (default: here)")
    parser.add_argument("--minimal", action="store_true", help="only what is required: a device; core's references compute everything")
    return parser
