"""`oarlock bench serve|throughput|latency`: measure a running server, or a model loaded here.

Owns: the list of benchmarks.
Reads: `cli.bench_serve`, `cli.bench_offline`.
Never: decides whether a figure is good.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from oarlock.config.parser import Parser

KINDS = {
    "serve": "oarlock.cli.bench_serve:main",
    "throughput": "oarlock.cli.bench_offline:throughput",
    "latency": "oarlock.cli.bench_offline:latency",
}
TEXT = """\
serve        load on any server with the OpenAI API: time to first token, time per token, throughput
throughput   a list of prompts through a model loaded here: tokens and requests a second
latency      batches of prompts through a model loaded here: time of a batch, of its first token, of each further one"""


def main(argv: Sequence[str]) -> int:
    """Run one benchmark. Its exit code: 0 when every request was answered."""
    parser = Parser(
        prog="oarlock bench", usage="oarlock bench KIND [arguments]", description=TEXT, epilog="oarlock bench KIND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("kind", metavar="KIND", choices=tuple(KINDS), help=", ".join(KINDS))
    module, _, function = KINDS[parser.parse_args(argv[:1]).kind].partition(":")
    code: int = getattr(importlib.import_module(module), function)(argv[1:])
    return code
