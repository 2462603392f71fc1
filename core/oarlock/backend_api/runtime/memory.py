"""`MemoryProfiler`: what a device says of its memory while core runs the largest steps, so that the plan is measured.

Owns: the protocol.
Reads: `device`.
Never: runs a step (core does); plans.
"""

from __future__ import annotations

import abc
from typing import ClassVar

from oarlock.backend_api.runtime.device import CheckedOverrides, Device


class MemoryProfiler(CheckedOverrides, abc.ABC):
    """One instance per worker. Core's default, where there is none, is a formula for the temporaries of a step and nothing for programs."""

    _extension_base: ClassVar[bool] = True

    def __init__(self, device: Device) -> None:
        self.device = device

    @abc.abstractmethod
    def taken(self) -> int:
        """Bytes of the device that anybody has taken: other processes, libraries, and what the allocator keeps for its next use."""

    @abc.abstractmethod
    def restart(self) -> None:
        """Begin anew to look for the peak."""

    @abc.abstractmethod
    def peak(self) -> int:
        """The most bytes that this process' allocator had taken since `restart`."""

    def release(self) -> None:
        """Give back to the device what the allocator keeps for its next use. Nothing to do where it keeps nothing."""
