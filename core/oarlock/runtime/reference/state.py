"""References of the ops by which programs read their packed inputs and update their state.

Owns: as_float, index_update.
Reads: nothing of ours.
Never: computes with the numbers it moves.
"""

from __future__ import annotations

import torch


def as_float(bits: torch.Tensor) -> torch.Tensor:
    """The float32 numbers whose bits an int32 tensor holds, of the same shape."""
    return bits.view(torch.float32)


def index_update(tensor: torch.Tensor, index: tuple[torch.Tensor, ...], value: torch.Tensor) -> torch.Tensor:
    """`tensor` with `tensor[index] = value`: a new tensor. Duplicate indices only ever address the null row."""
    return tensor.index_put(index, value)


def index_update_in_place(tensor: torch.Tensor, index: tuple[torch.Tensor, ...], value: torch.Tensor) -> torch.Tensor:
    """The in-place binding of `index_update`, for devices that update their state in place."""
    return tensor.index_put_(index, value)
