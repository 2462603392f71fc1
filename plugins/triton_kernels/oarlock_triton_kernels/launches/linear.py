"""Launches of the linear kernels at the shapes of real models.

Owns: those launches.
Reads: `linear_codes`, `linear_w8a8`, `codes`.
Never: computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType

import torch

from oarlock_triton_kernels import codes, linear_codes, linear_w8a8
from oarlock_triton_kernels.cache import kind_of
from oarlock_triton_kernels.launches import GEMMA, LLAMA, MODELS, QWEN, Launch, Model, meta

ROWS = (1, 32, 2048)


def weight(kind: str, outs: int, width: int, run: int, *outer: int, zeros: bool = False) -> codes.PackedCodes:
    """A packed weight without memory, of int4, int8 or fp8 as the chip reads it; `outer` experts."""
    stored = {"int4": torch.int32, "int8": torch.int8, "fp8": torch.uint8}[kind]
    form = {"int4": codes.INT4, "int8": codes.INT8, "fp8": kind_of(torch.float8_e4m3fn)}[kind]
    runs = width // run if run else 1
    return codes.PackedCodes(
        form, meta(*outer, outs, width // 8 if kind == "int4" else width, dtype=stored), meta(*outer, runs, outs, dtype=torch.float16),
        meta(*outer, runs, outs, dtype=torch.int16) if zeros else None, None, 8 if kind == "int4" else 0, run, None, width,
        meta(codes.COUNTERS, dtype=torch.int32),
    )  # fmt: skip


def shapes(model: Model) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's linears; of a model of experts those of its attention."""
    found = {"qkv": ((model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden), "o": (model.hidden, model.heads * model.head_dim)}
    if not model.experts:
        found |= {"gate_up": (2 * model.intermediate, model.hidden), "down": (model.hidden, model.intermediate)}
    return found


def _multiplied(kind: str, run: int, zeros: bool, rows: int, outs: int, width: int) -> torch.Tensor:
    return linear_codes.linear(meta(rows, width), weight(kind, outs, width, run, zeros=zeros))


def ends(model: Model) -> dict[str, tuple[int, int]]:
    """The first and the last of a layer's linears: the code of a scheme is the same for those between."""
    found = list(shapes(model).items())
    return dict((found[0], found[-1]))


def _each(kind: str, run: int, quick: Model, zeros: bool = False) -> Iterator[Launch]:
    for model in MODELS:
        for name, (outs, width) in (shapes if kind == "int4" and not zeros else ends)(model).items():
            for rows in ROWS:
                call = partial(_multiplied, kind, run, zeros, rows, outs, width)
                text = f"{kind}, {name}, {rows} rows" + (", zeros" if zeros else "")
                yield Launch(model.name, text, call, quick=model is quick and name in ("down", "o") and rows != 32)


def weight_only() -> Iterator[Launch]:
    """int4 in groups of 128, as gptq and awq have them, without zeros and with; int8 with a scale an output; fp8 in blocks of 128; heads."""
    yield from _each("int4", 128, LLAMA)
    yield from _each("int4", 128, GEMMA, zeros=True)
    yield from _each("int8", 0, QWEN)
    yield from _each("fp8", 128, QWEN)
    for model in MODELS:
        for rows in (1, 64):
            call = partial(linear_codes.lm_head, meta(rows, model.hidden), meta(model.vocab, model.hidden))
            yield Launch(model.name, f"head, {rows} rows", call, quick=model is LLAMA)


def both_rounded(module: ModuleType, kind: str, run: int, rows: int, outs: int, width: int) -> torch.Tensor:
    """A linear of 8 bits by `linear_w8a8`, or by another module that has its functions."""
    return getattr(module, f"linear_{kind}")(meta(rows, width), linear_w8a8.Packed8(weight(kind, outs, width, run), None))


EIGHT_BITS = (("int8", 0, "outputs"), ("fp8", 128, "blocks"), ("fp8", 0, "outputs"))


def eight_bits() -> Iterator[Launch]:
    """int8 with a scale an output, fp8 in blocks of 128 and with a scale an output; the activations' scales are of each token."""
    for kind, run, scales in EIGHT_BITS:
        for model in MODELS:
            for name, (outs, width) in ends(model).items():
                for rows in ROWS:
                    call = partial(both_rounded, linear_w8a8, kind, run, rows, outs, width)
                    yield Launch(model.name, f"{kind}, scales of {scales}, {name}, {rows} rows", call, quick=model is QWEN and name == "o" and rows != 32)
