"""Compiles the launches of a chapter for chips that are described, not here, and reads what came out.

    python tests/kernel_compile.py [--quick] [--chips sm_90,gfx942] [--only NAME] [--json FILE]

Owns: the chips' descriptions and limits, the driver that stands for them, `Compiled`.
Reads: `oarlock_triton_kernels.registry`, the launches, Triton's compiler with ptxas and cuobjdump of its own.
Never: runs a kernel. Not to be imported where TRITON_INTERPRET is set: kernels are not compiled there.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from oarlock_triton_kernels import registry
from oarlock_triton_kernels.launches import CHIPS, Launch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

PACKAGE = "oarlock_triton_kernels"
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
MATRIX_UNITS = re.compile(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma|v_s?mfma_\w+|dpas(?=<)")


@dataclass(frozen=True, slots=True)
class Chip:
    """What a driver would say of it."""

    target: GPUTarget
    units: int  # multiprocessors, compute units
    shared_bytes: int  # that one program may use


CHIP = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 108, 166_912),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), 132, 232_448),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 148, 232_448),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 304, 65_536),
    # By name only, and by a Triton that knows the target: tools/compile_for_xpu.sh.
    "max1550": Chip(GPUTarget("xpu", {
        "name": "Intel(R) Data Center GPU Max 1550", "platform_name": "Intel(R) oneAPI Unified Runtime over Level-Zero",
        "vendor": "Intel(R) Corporation", "version": "12.60.7", "gpu_eu_count": 512, "gpu_subslice_count": 64, "max_work_group_size": 1024,
        "max_num_sub_groups": 64, "sub_group_sizes": [16, 32], "has_fp64": True, "has_bfloat16_conversions": True,
        "has_subgroup_matrix_multiply_accumulate": True, "has_subgroup_matrix_multiply_accumulate_tensor_float32": True,
        "has_subgroup_2d_block_io": True,
    }, 32), 64, 131_072),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel of one launch for one chip."""

    chapter: str  # the kernel whose chapter holds the launch
    kernel: str
    model: str
    text: str
    chip: str
    registers: int
    spilled: int  # bytes stored (sm), registers (gfx)
    shared: int  # bytes
    warps: int
    products: str  # the matrix instruction that it uses; "": none
    copies: str  # "tma" where it copies tiles by descriptors
    divided: bool  # warps have work of their own
    seconds: float = dataclasses.field(default=0.0, compare=False)


class DescribedDriver:
    """What Triton's launcher asks of a driver before it launches."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        properties = {"max_shared_mem": chip.shared_bytes, "multiprocessor_count": chip.units, "warpSize": chip.target.warp_size, "max_num_regs": 65536}
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self) -> GPUTarget:
        return self._chip.target

    def get_current_device(self) -> Any:
        return str(self._chip.target.arch)  # compiled kernels are kept by device

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def compile_launch(chapter: registry.Chapter, launch: Launch, chip_name: str) -> list[Compiled]:
    """Everything that one call launches, in order, each kernel once.

    Raises:
        RuntimeError: Triton is in interpreter mode. Whatever the compiler raises.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted in this process, not compiled")
    chip, found = CHIP[chip_name], {}
    run = JITFunction.run

    def warm(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        started = time.perf_counter()
        made = run(self, *args, grid=grid, warmup=True, **options)
        key = (self.fn.__name__, made.hash)
        if key not in found:
            found[key] = (made, time.perf_counter() - started)
        return made

    driver.set_active(DescribedDriver(chip))
    with mock.patch.object(JITFunction, "run", warm):
        launch.call()
    of = chapter.kernel.partition(":")[2]
    return [
        Compiled(of, name, launch.model, launch.text, chip_name, *_used(made, chip_name), made.metadata.shared, made.metadata.num_warps, _products(made),
                 "tma" if "cp.async.bulk.tensor" in made.asm.get("ptx", "") else "", "ttg.warp_specialize" in made.asm["ttgir"], seconds)
        for (name, _), (made, seconds) in found.items()
    ]


def _used(made: Any, chip_name: str) -> tuple[int, int]:
    """(registers of a thread, spilled). SPIR-V has none before a driver compiles it."""
    if "spv" in made.asm:
        return 0, 0
    if "amdgcn" in made.asm:
        counts = {key: int(re.search(rf"\.{key}:\s+(\d+)", made.asm["amdgcn"])[1]) for key in ("vgpr_count", "agpr_count", "vgpr_spill_count")}
        return counts["vgpr_count"], counts["vgpr_spill_count"]  # AGPRs are part of the count
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert match is not None, said
    return int(match[1]), _spilled(made.asm["ptx"]) if int(match[2]) else 0


def _spilled(ptx: str) -> int:
    """Bytes that the assembler stores for want of registers; a stack has other uses, too."""
    target = re.search(r"^\.target (sm_(\d+)\w*)", ptx, re.MULTILINE)
    assert target is not None
    tool = TOOLS / ("ptxas-blackwell" if int(target[2]) >= 100 else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "-v", "-lineinfo", f"--gpu-name={target[1]}", file.name, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))


def _products(made: Any) -> str:
    text = made.asm.get("amdgcn") or made.asm.get("ptx") or made.asm["ttgir"]
    return ", ".join(sorted(set(MATRIX_UNITS.findall(text))))


def launches(quick: bool = False, only: str = "", chips: tuple[str, ...] = CHIPS) -> Iterator[tuple[registry.Chapter, Launch, str]]:
    """Every launch of every chapter for every chip that it is for."""
    for chapter in registry.CHAPTERS:
        if chapter.has_copies and not set(chips) & set(CHIPS):
            continue
        module, _, name = chapter.launches.partition(":")
        for launch in getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)():
            if only in f"{chapter.kernel} {launch.model} {launch.text}" and (launch.quick or not quick):
                yield from ((chapter, launch, chip) for chip in chips if chip in launch.chips or (chip not in CHIPS and not chapter.has_copies))


def sample() -> Iterator[tuple[registry.Chapter, Launch, str]]:
    """One launch for each chip, each of another kernel that multiplies matrices: enough to show that what the page says is what is compiled."""
    first: dict[str, tuple[registry.Chapter, Launch]] = {}
    for chapter, launch, _ in launches(quick=True):
        if chapter.has_products:
            first.setdefault(chapter.kernel, (chapter, launch))
    found = list(first.values())
    yield from ((*found[at % len(found)], chip) for at, chip in enumerate(CHIPS))


def problems(chapter: registry.Chapter, launch: Launch, made: list[Compiled]) -> list[str]:
    """What is wrong with the kernels of one launch; [] when nothing is."""
    found, of = [], chapter.kernel.partition(":")[2]
    if of not in {one.kernel for one in made}:
        found.append(f"{launch.model}, {launch.text}: {of} was not launched, but {', '.join(one.kernel for one in made) or 'nothing'}")
    for one in made:
        where = f"{one.kernel} for {launch.model}, {launch.text}, on {one.chip}"
        if one.shared > CHIP[one.chip].shared_bytes:
            found.append(f"{where}: {one.shared} bytes of shared memory, the chip has {CHIP[one.chip].shared_bytes}")
        if one.spilled and not launch.spills:
            found.append(f"{where}: spills {one.spilled}")
        if one.kernel == of and chapter.has_products and not one.products and not launch.no_products:
            found.append(f"{where}: no matrix instruction")
        if one.kernel == of and chapter.has_copies and not one.copies:
            found.append(f"{where}: no copy by a descriptor")
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="some launches of each kernel")
    parser.add_argument("--sample", action="store_true", help="one launch for each chip")
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--only", default="", help="part of a kernel's, model's or launch's name")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    rows, wrong = [], []
    for chapter, launch, chip in sample() if args.sample else launches(args.quick, args.only, tuple(args.chips.split(","))):
        started = time.perf_counter()
        made = compile_launch(chapter, launch, chip)
        wrong += problems(chapter, launch, made)
        rows += made
        for one in made:
            print(
                f"{one.chip:7} {one.kernel:32} {one.model:14} {one.text:36} registers {one.registers:3} spilled {one.spilled:4} "
                f"shared {one.shared:6} warps {one.warps} {one.products or '-'} {one.seconds:.1f} s of {time.perf_counter() - started:.1f}",
                flush=True,
            )
    if args.json:
        Path(args.json).write_text(json.dumps({"rows": [dataclasses.asdict(row) for row in rows], "problems": wrong}), encoding="utf-8")
    print("\n".join(wrong), file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
