"""`oarlock serve MODEL`: from the command line to the configuration, then to the server.

Owns: nothing that lives on.
Reads: `config`, `server.app`.
Never: loads a model (the engine process does).
"""

from __future__ import annotations

from collections.abc import Sequence

from oarlock.config.parser import make_parser, parse, with_environment
from oarlock.config.resolve import Resolved, resolve


def configure(argv: Sequence[str], prog: str) -> Resolved:
    """The whole configuration from arguments and environment.

    Raises:
        ConfigError: one line naming flag, value, reason and remedy.
    """
    parser = make_parser(prog)
    return resolve(with_environment(parse(parser, argv)), origin="cli")


def main(argv: Sequence[str], prog: str = "oarlock serve") -> int:
    """Serve until the process is told to stop. Returns its exit code."""
    resolved = configure(argv, prog)
    from oarlock.server.app import run_server  # FastAPI and friends: not before the arguments are right

    return run_server(resolved) or 0
