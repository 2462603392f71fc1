"""`python -m oarlock.entrypoints.openai.api_server --model M`: the same server as `oarlock serve`, by its older address.

Owns: nothing.
Reads: `cli`.
Never: differs from `oarlock serve` in flags or behaviour.
"""

from __future__ import annotations

import sys

from oarlock.cli.main import run
from oarlock.cli.serve import main

PROG = "python -m oarlock.entrypoints.openai.api_server"

if __name__ == "__main__":
    sys.exit(run(lambda: main(sys.argv[1:], PROG), PROG))
