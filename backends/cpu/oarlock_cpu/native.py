"""Loads the compiled kernels, or says why there are none.

Owns: the one attempt to load them in this process.
Reads: this package's folder.
Never: raises; everything works without kernels, on core's references.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

LIBRARY = Path(__file__).parent / "_C.abi3.so"
# An editable install lies beside its setup.py; any other came from a checkout, whose place is not known here.
SOURCE = Path(__file__).parents[1]
TARGET = f"-e {SOURCE}" if (SOURCE / "setup.py").is_file() else "./backends/cpu (in a checkout of Oarlock)"
REMEDY = f"with torch and a C++20 compiler there, run: pip install --no-build-isolation --no-deps --force-reinstall {TARGET}"


@functools.cache
def problem() -> str:
    """Why the kernels cannot be used, with the remedy; "" when they can. Loads them on the first call."""
    if not LIBRARY.exists():
        return f"no compiled extension ({LIBRARY.name} was not built); {REMEDY}"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"the compiled extension does not load into torch {torch.__version__}: {error}; {REMEDY}"
    return ""


def isa() -> str:
    """The instruction set whose kernels are in use."""
    return torch.ops.oarlock_cpu.get_isa()
