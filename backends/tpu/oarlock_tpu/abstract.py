"""`AbstractTpu`: a described machine. Tensors are shapes, programs are compiled for its chips by libtpu, and nothing runs.

Owns: the device and the runner of a check of compilation, and what the compiler said of each program.
Reads: `device`, `runner`, `chips`, `vendor`.
Never: answers `--device`; computes a number.

Used by tools and tests to compile every program of a large model for chips that are not here, through the worker's own start.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from dataclasses import dataclass
from typing import Any

import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import PureProgram

from oarlock_tpu import chips, plugin, vendor
from oarlock_tpu.device import TpuDevice
from oarlock_tpu.runner import Flat, XlaRunner
from oarlock_tpu.vendor import jax

log = logging.getLogger("oarlock.tpu")
# What a program may take of one device of JAX, as the compiler's own refusals state it; a tpu7x chip is two devices.
MEMORY_GIB = {"v5e": 15.75, "v6e": 31.25, "tpu7x": 94.75}


def described(topology: str) -> Any:
    """The devices of a machine that libtpu knows by name. Raises what libtpu raises for one that it does not."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


class AbstractTpu(TpuDevice):
    """Options: "tpu_topology" ("v5e:2x2"), "tpu_chips"."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            execution="compiled", dynamic_shapes=False, dtypes=plugin.DTYPES, block_sizes=plugin.BLOCK_SIZES, kv_update="functional", default_swap_bytes=0
        )

    def activate(self) -> None:
        self._simulated = False
        self._topology = self.options["tpu_topology"]
        self._chips = chips.Chips(tuple(described(self._topology)[: self.options.get("tpu_chips", 1)]), interpret=False)
        chips.use(self._chips)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return _AllReserved()

    def synchronise(self) -> None:
        """Nothing runs."""

    def memory_info(self) -> tuple[int, int]:
        size = int(MEMORY_GIB[self._topology.partition(":")[0]] * 2**30) * self._chips.count
        return size, size

    def verify(self) -> None:
        """Nothing can be computed."""

    def describe(self) -> str:
        return f"{self._topology}, {self._chips.count} of its devices, described only: programs are compiled and do not run"

    def _put(self, tensor: torch.Tensor, sharding: Any) -> torch.Tensor:
        dtype = vendor.jax_dtype(tensor.dtype)
        return vendor.wrap(jax.ShapeDtypeStruct(tuple(tensor.shape), dtype, sharding=sharding))


class _AllReserved(vendor.Context):
    reserved = (torch.empty, torch.zeros)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler said of one program. Bytes and FLOP are one device's."""

    seconds: float  # to trace, lower and compile
    cpu_seconds: float  # the same in processor time, which other users of the machine do not stretch
    argument_bytes: int
    donated_bytes: int  # of these, reused for results
    temporary_bytes: int
    code_bytes: int
    flops: float
    cache_copies: int | None  # instructions that copy a whole cache tensor; None: this jaxlib cannot print what libtpu compiled
    all_reduces: int
    kernels: int  # calls of Pallas kernels
    has_wide_numbers: bool  # 64-bit numbers, which the chips emulate

    @property
    def peak_bytes(self) -> int:
        """While it runs: arguments, results that reuse none of them, and temporaries."""
        return self.argument_bytes + self.temporary_bytes + self.code_bytes


class AbstractRunner(XlaRunner):
    """Compiles, and answers calls with the shapes of the results."""

    def compile(self, fn: PureProgram, example: tuple[Any, ...], tag: str) -> PureProgram:
        clocks = time.monotonic(), time.process_time()
        flat = Flat(fn, example)
        lowered = self._lowered(flat, example, lowering_platforms=("tpu",))
        # WORKAROUND(jaxlib 0.10.2 cannot print such copies of libtpu 0.0.52; remove when it can): copies stay on the main core.
        compiled = lowered.compile(compiler_options={"xla_tpu_enable_offloading_copy_to_sparsecore": False})
        report = _report(compiled, example, self._chips.count, (time.monotonic() - clocks[0], time.process_time() - clocks[1]))
        log.info("%s compiled in %.1f s", tag, report.seconds)
        return AbstractProgram(flat, lowered.out_info, report)


class AbstractProgram:
    """Stands where the worker keeps a program."""

    def __init__(self, flat: Flat, results: Any, report: Compiled) -> None:
        self._flat, self._results, self.report = flat, results, report

    def __call__(self, *args: Any) -> Any:
        state, outputs = ([vendor.wrap(jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in part] for part in self._results)
        return self._flat.results(state, outputs)


def _report(compiled: Any, example: tuple[Any, ...], devices: int, seconds: tuple[float, float]) -> Compiled:
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis() or {}, _text(compiled)
    caches = vendor.to_jax(jax.tree.leaves((example[1].get("kv", ()), example[2].get("kv", ()))))
    copies = None if text is None else count_copies(text, [(*cache.shape[:2], cache.shape[2] // devices) for cache in caches])
    text = text or ""
    return Compiled(
        *seconds, memory.argument_size_in_bytes, memory.alias_size_in_bytes, memory.temp_size_in_bytes, memory.generated_code_size_in_bytes,
        cost.get("flops", 0.0), copies, len(re.findall(r" all-reduce(?:-start)?\(", text)), text.count("tpu_custom_call"),
        bool(re.search(r"\b[sf]64\[", text)),
    )  # fmt: skip


def _text(compiled: Any) -> str | None:
    """The compiled program. WORKAROUND(jaxlib 0.10.2 cannot read some instructions of libtpu 0.0.52; remove when it can)."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        log.warning("a compiled program cannot be printed: %s", error)
        return None


def count_copies(text: str, caches: list[tuple[int, ...]]) -> int:
    """Instructions of a compiled program that copy a tensor of a cache's shape, [blocks, block size, lanes] or its rows of slots."""
    shapes = {",".join(map(str, shape)) for s in caches for shape in (s, (s[0] * s[1], s[2]))}
    return sum(len(re.findall(rf"= \w+\[{re.escape(shape)}\]\S* copy(?:-start)?\(", text)) for shape in shapes)
