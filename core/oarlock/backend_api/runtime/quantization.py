"""How the linears of a quantised checkpoint lie in it: what a quantization method gives to core's loader.

Owns: the common form of a quantised weight, and the two classes that a method implements.
Reads: nothing of ours but the checked base.
Never: opens a file; knows a rank, a fused projection or a device. Core shards, joins, packs and places.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from oarlock.backend_api.runtime.device import CheckedOverrides

Scheme = Literal["int4", "int8", "w8a8", "fp8", "w8a8_fp8", "codebook"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor under a linear's prefix. Its shape is checked, and is what --load-format dummy makes."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None  # None: any floating point dtype
    optional: bool = False  # absent from the checkpoint: absent from what `read` is given
    is_index: bool = False  # --load-format dummy fills it with zeros, not with random numbers


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The common form of one linear: weight[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g], g the group of column k.

    With offsets: codes[n, k] * scales[n, g] + offsets[n, g]. With a codebook: codebook[n, codes[n, k]] * scales[n, g].
    """

    codes: torch.Tensor  # [out, in]: uint8 of 0 .. 15 (int4), int8 (int8, w8a8), float8_e4m3fn (fp8, w8a8_fp8), uint8 (codebook)
    scales: torch.Tensor  # [out, groups] float32
    zeros: torch.Tensor | None = None  # [out, groups] int16; None: 8 for int4, else 0. Only int4 and int8 have zeros
    groups: torch.Tensor | None = None  # [in] int32: the group of each column; None: equal runs of columns in order
    input_scale: torch.Tensor | None = None  # [1] float32: static scale of the activations; None with w8a8 or w8a8_fp8: one for each token
    codebook: torch.Tensor | None = None  # [out, entries] float32
    offsets: torch.Tensor | None = None  # [out, groups] float32, in place of zeros; only int4 and int8 have them


class LinearFormat(CheckedOverrides, abc.ABC):
    """How linears of one kind are stored. One object serves any number of linears."""

    _extension_base: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def scheme(self) -> Scheme:
        """What the common form is packed into."""

    @abc.abstractmethod
    def tensors(self, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        """Name under the linear's prefix ("qweight") -> what must be there.

        Raises:
            ValueError: no linear of this size can be stored so; the message says what can.
        """

    @abc.abstractmethod
    def read(self, tensors: dict[str, torch.Tensor], out_size: int, in_size: int) -> QuantizedWeight:
        """The common form. Also called with meta tensors, to learn sizes: may not look at a value."""

    def check(self, tensors: dict[str, torch.Tensor], out_size: int, in_size: int) -> None:
        """Look at the values of real tensors before they are read.

        Raises:
            ValueError: they contradict the checkpoint's settings.
        """


class Quantization(CheckedOverrides, abc.ABC):
    """A checkpoint's quantization. Made once in each worker by a QuantizationMethod's factory, with the checkpoint's settings."""

    _extension_base: ClassVar[bool] = True
    of_plain: ClassVar[bool] = False  # as its method's: formats name the tensor "weight", and `read` quantises it

    def __init__(self, settings: dict[str, Any]) -> None:
        """`settings` is config.json's quantization_config, or what stands in its place.

        Raises:
            ValueError: settings that this method does not read; the message names them.
        """
        self.settings = settings

    @abc.abstractmethod
    def linear(self, prefix: str, is_head: bool) -> LinearFormat | None:
        """How the linear whose tensors begin with `prefix` + "." is stored; None: it is not quantised.

        `prefix` is as transformers names the module, "model.layers.0.self_attn.q_proj"; `is_head`: it is the output head.

        Raises:
            ValueError: it is stored in a way that this method does not read.
        """
