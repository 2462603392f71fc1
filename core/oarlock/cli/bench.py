"""`oarlock bench serve|throughput|latency`: measure a running server, or a model loaded here.

Owns: the list of benchmarks.
Reads: `cli.bench_serve`, `cli.bench_offline`.
Never: decides whether a figure is good.
"""

from __future__ import annotations

from collections.abc import Sequence

from oarlock.errors import ConfigError

USAGE = """\
usage: oarlock bench KIND [arguments]

  serve        load on any server with the OpenAI API: time to first token, time per token, throughput
  throughput   a list of prompts through a model loaded here: tokens and requests a second
  latency      batches of prompts through a model loaded here: time of a batch, of its first token, of each further one

oarlock bench KIND --help says more."""


def main(argv: Sequence[str]) -> int:
    """Run one benchmark. Its exit code: 0 when every request was answered."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    kind, rest = argv[0], argv[1:]
    if kind == "serve":
        from oarlock.cli.bench_serve import main as run
    elif kind == "throughput":
        from oarlock.cli.bench_offline import throughput as run
    elif kind == "latency":
        from oarlock.cli.bench_offline import latency as run
    else:
        raise ConfigError(f"{kind}: there is no such benchmark; choose serve, throughput or latency")
    return run(rest)
