"""The entry point: where FlashInfer's attention is taken instead of a device's own. Light: no torch.

Owns: the record of the attention, and when it can serve.
Reads: `oarlock.backend_api`, whether the package flashinfer is installed.
Never: imports flashinfer or torch at discovery.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

from oarlock.backend_api import AttentionSpec, Support, hookimpl

PRIORITY = 20  # above the 10 that a device's own attention and the Triton kernels have
PACKAGE = "flashinfer"
INSTALL = "pip install flashinfer-python"
DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)  # pages of the decode kernels
OLDEST = (9, 0)  # the decode that takes block tables as they are: XQA from Hopper on, trtllm-gen on Blackwell


def supports(
    chip: tuple[int, int], *, dtype: str, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int, softcap: float | None, **_: Any
) -> Support:
    """Every reason why it cannot serve these layers on a GPU of this compute capability."""
    reasons = []
    if importlib.util.find_spec(PACKAGE) is None:
        reasons.append(f"the package {PACKAGE} is not installed ({INSTALL})")
    if chip < OLDEST:
        reasons.append(f"it needs compute capability {OLDEST[0]}.{OLDEST[1]}, this GPU has {chip[0]}.{chip[1]}")
    if dtype not in DTYPES:
        reasons.append(f"computes in {' and '.join(DTYPES)}, not in {dtype}")
    if head_dim not in HEAD_DIMS:
        reasons.append(f"serves heads of {', '.join(map(str, HEAD_DIMS))}, not of {head_dim}")
    if block_size not in BLOCK_SIZES:
        reasons.append(f"serves blocks of {', '.join(map(str, BLOCK_SIZES))} tokens, not of {block_size}")
    if num_heads // num_kv_heads > 16:
        reasons.append(f"serves at most 16 query heads for each of the cache, not {num_heads // num_kv_heads}")
    if softcap is not None:
        reasons.append("its decode has no soft cap")
    return Support(not reasons, tuple(reasons))


def capability(device: Any) -> tuple[int, int] | None:
    """Compute capability of an NVIDIA GPU, (9, 0); None: the device is none. Tests put another."""
    if device.torch_device.type != "cuda":
        return None
    import torch  # a worker has it already

    major, minor = torch.cuda.get_device_capability(device.torch_device)
    return int(major), int(minor)


@hookimpl
def attention(device: Any) -> list[AttentionSpec]:
    """On NVIDIA GPUs; what else the plugin cannot serve, `oarlock doctor` says with its reasons."""
    chip = capability(device)
    if chip is None:
        return []
    return [AttentionSpec(name="flashinfer", factory="oarlock_flashinfer.paged:FlashInferAttention", priority=PRIORITY, supports=partial(supports, chip))]
