"""`GraphRunner`: turns a pure program into something callable for one key.

Owns: the protocol and core's eager runner.
Reads: nothing else of ours.
Never: knows what a program computes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from oarlock.backend_api.runtime.device import CheckedOverrides, Device

# (weights, written state, read state, packed int32 inputs, device inputs) -> (written state, outputs)
PureProgram = Callable[[Any, dict[str, Any], dict[str, Any], torch.Tensor, dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]


class GraphRunner(CheckedOverrides, abc.ABC):
    """One instance per worker."""

    _extension_base: ClassVar[bool] = True

    def __init__(self, device: Device) -> None:
        self.device = device

    @abc.abstractmethod
    def compile(self, fn: PureProgram, example: tuple[Any, ...], tag: str) -> PureProgram:
        """Make `fn` callable for the shapes of `example`.

        `example` is a full argument tuple with the shapes and dtypes that every later call has. State in argument 1 may be
        donated: the caller rebinds it to what is returned. `tag` is unique per program and key, for caches and messages.
        """

    def refuses_unwarmed(self) -> bool:
        """Whether a key that warm-up did not compile is an error (compiled devices) or compiled on demand (eager)."""
        return False

    def kept_in(self) -> str:
        """The folder in which compiled programs outlive the process, so that the next start finds them; "": they do not."""
        return ""

    def retire(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        """Called after a program ran: `old` written state is dead unless `new` holds the same tensors."""


class EagerRunner(GraphRunner):
    """Runs programs as they are."""

    def compile(self, fn: PureProgram, example: tuple[Any, ...], tag: str) -> PureProgram:
        return fn
