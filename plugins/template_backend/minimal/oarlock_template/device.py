"""The heavy module, imported in a worker: the one class that a device must bring."""

from pathlib import Path

import torch
from oarlock.backend_api import Capabilities
from oarlock.backend_api.runtime import Device

from oarlock_template import BLOCK_SIZES, DTYPES


class TemplateDevice(Device):
    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")  # a real one: torch.device("template", self.index)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=DTYPES, block_sizes=BLOCK_SIZES, host_is_device=True, default_swap_bytes=0)

    def activate(self) -> None:
        """Make the device current in this process; called once, before anything is allocated."""

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes. Not needed where torch.accelerator knows them: that is the default."""
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return kib["MemAvailable"] << 10, kib["MemTotal"] << 10
