"""What a device can do, declared before core decides anything. Frozen; the defaults are the cautious ones.

Owns: `Capabilities`, `Claims`.
Reads: nothing.
Never: probes; holds a device name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Declared by a device object in the worker and sent to the engine in `WorkerReady`."""

    execution: Literal["eager", "capture", "compiled"] = "eager"
    dynamic_shapes: bool = True  # False: every step is padded to `BucketTable` entries
    dtypes: tuple[str, ...] = ("float32",)  # preferred first; "float32", "bfloat16", "float16"
    fast_dtypes: tuple[str, ...] = ()  # those that `--dtype auto` may keep from a checkpoint; () means all of dtypes
    gguf_dtype: str | None = None  # what `--dtype auto` takes for a GGUF file of quantised blocks, which has no dtype; None: as for others
    kv_dtypes: tuple[str, ...] = ("auto",)
    block_sizes: tuple[int, ...] = (16, 8, 32)  # preferred first
    pinned_memory: bool = False
    host_is_device: bool = False  # the device's memory is the host's: no swap tier by default, a smaller share of memory
    kv_update: Literal["in_place", "functional"] = "in_place"
    collectives: tuple[str, ...] = ()  # torch.distributed backends; () means one device only
    batch_invariant: tuple[str, ...] = ()  # dtypes in which a row's bits do not depend on the batch's shape
    default_swap_bytes: int = 4 << 30
    triton: bool = False  # Triton is installed with a driver for this device: its tensors may be given to Triton kernels


@dataclass(frozen=True, slots=True)
class Claims:
    """Upper bounds that a probe may state so that the front end can plan and refuse early. A false claim is an error that names it."""

    dtypes: tuple[str, ...] = ()
    block_sizes: tuple[int, ...] = ()
    memory_bytes: int | None = None  # of one device
    host_is_device: bool = False
    default_swap_bytes: int = 4 << 30
    num_devices: int | None = None  # for the ranks of one model, one each
