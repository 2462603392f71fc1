"""A device of host tensors that declares `triton`: what the kernels of this package serve, in the interpreter.

Owns: the device `interpreted`; `installed(folder)`, which makes it discoverable to another process.
Never: is taken by `--device auto`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from oarlock.backend_api import Capabilities, Claims, DeviceSpec, ProbeResult, hookimpl
from oarlock.backend_api.runtime import Device
from oarlock_triton_kernels import interpreter

DTYPES = ("float32", "bfloat16", "float16")
BLOCK_SIZES = (16, 8, 32, 12)
KV_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2")


@hookimpl
def devices() -> list[DeviceSpec]:
    """By name only."""
    claims = Claims(DTYPES, BLOCK_SIZES, host_is_device=True, default_swap_bytes=1 << 20)
    probe = ProbeResult("available", "host tensors, kernels interpreted", claims=claims)
    return [DeviceSpec("interpreted", lambda: probe, "interpreted_device:Interpreted", "interpreted", priority=-30)]


class Interpreted(Device):
    """Eager, in place, exact shapes."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            dtypes=DTYPES, kv_dtypes=KV_DTYPES, block_sizes=BLOCK_SIZES, host_is_device=True, default_swap_bytes=1 << 20, triton=True
        )  # fmt: skip

    def activate(self) -> None:
        """Raises RuntimeError where kernels would be compiled."""
        interpreter.put_right()

    def memory_info(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30


def installed(folder: Path) -> None:
    """Metadata of a distribution in `folder`, which the caller puts on PYTHONPATH beside this file's."""
    made = folder / "interpreted-0.1.0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: interpreted\nVersion: 0.1.0\n", encoding="utf-8")
    (made / "entry_points.txt").write_text("[oarlock.devices]\ninterpreted = interpreted_device\n", encoding="utf-8")
