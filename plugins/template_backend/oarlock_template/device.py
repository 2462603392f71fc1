"""The heavy module, imported in a worker: the one class that a device must bring.

Owns: the device object and its buckets.
Reads: `oarlock.backend_api`.
Never: knows a model; chooses an implementation (core does).
"""

from __future__ import annotations

from pathlib import Path

import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Device, few_buckets

from oarlock_template import BLOCK_SIZES, DTYPES

CHUNK_TOKENS = 64  # prompt tokens in one step


class TemplateDevice(Device):
    """Computes on CPU tensors. `options["template_compile"]`: fixed shapes and a graph runner."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")  # a real one: torch.device("template", self.index)

    @property
    def capabilities(self) -> Capabilities:
        compiled = bool(self.options.get("template_compile"))
        return Capabilities(
            execution="compiled" if compiled else "eager",
            dynamic_shapes=not compiled,
            dtypes=DTYPES,
            block_sizes=BLOCK_SIZES,
            host_is_device=True,
            collectives=("gloo",),
            default_swap_bytes=0,
        )

    def activate(self) -> None:
        """Make the device current in this process; called once, before anything is allocated."""

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the host. Not needed where torch.accelerator knows them: that is the default."""
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return kib["MemAvailable"] << 10, kib["MemTotal"] << 10

    def buckets(self, max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> dict[str, tuple[int, ...]]:
        """As few as do: one shape for prompts, one or two for what decodes, two widths of the block table."""
        if not self.options.get("template_compile"):
            return {}
        return few_buckets(max_num_seqs, max_num_batched_tokens, max_blocks, decode_rows=(8,), chunk_tokens=(CHUNK_TOKENS,))

    def describe(self) -> str:
        return f"CPU tensors in place of a chip, torch {torch.__version__}"
