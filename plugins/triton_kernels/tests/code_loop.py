"""Counts what the inner loop of a quantised linear costs on a described chip: instructions of a thread for each code that it makes a number of.

    python tests/code_loop.py int4 int8 fp8

Reads: the compiled code, by nvdisasm of Triton's own.
Never: runs a kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any
from unittest import mock

import kernel_compile
from oarlock_triton_kernels.launches import linear
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CHIP, ROWS, OUTS, WIDTH = "sm_90", 1, 4096, 4096


def compiled(scheme: str) -> tuple[Any, dict[str, Any]]:
    """(compiled kernel, options) of a linear for one row."""
    found, run = [], JITFunction.run

    def warm(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.append((run(self, *args, grid=grid, warmup=True, **options), options))
        return found[-1][0]

    driver.set_active(kernel_compile.DescribedDriver(kernel_compile.CHIP[CHIP]))
    with mock.patch.object(JITFunction, "run", warm):
        linear._multiplied(scheme, 128, False, ROWS, OUTS, WIDTH)
    return found[0]


def loop_of(cubin: bytes) -> list[str]:
    """Instructions of the longest loop that multiplies matrices."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([kernel_compile.TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
    labels, lines, loops = {}, [], []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            lines.append(instruction[1])
    for at, line in enumerate(lines):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if target and labels.get(target[1], at) < at:
            loops.append(lines[labels[target[1]] : at + 1])
    return max((loop for loop in loops if any("GMMA" in line for line in loop)), key=len)


def main() -> None:
    costs = {}
    for scheme in sys.argv[1:]:
        made, options = compiled(scheme)
        loop = loop_of(made.asm["cubin"])
        codes = options["BN"] * options["STEP"] // (32 * options["num_warps"])
        # A product whose left factor lies in registers has no second descriptor: R, a descriptor, sums.
        from_registers = all(re.search(r"GMMA\S* R\d+, R\d+, gdesc", line) for line in loop if "GMMA" in line)
        costs[scheme] = {"instructions": len(loop) / codes, "from_registers": from_registers, "stores": sum(line.split()[0].startswith("STS") for line in loop)}
    print(json.dumps(costs))


if __name__ == "__main__":
    main()
