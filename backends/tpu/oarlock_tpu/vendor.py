"""torchax and JAX as this package needs them: the repairs of one torchax, conversions of tensors, and nothing else of torchax elsewhere.

Owns: every workaround for torchax 0.0.13 and the settings of JAX.
Reads: torchax, jax.
Never: knows a program or a model.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from oarlock_tpu import host

# Before jax is imported. Without a TPU, its library would wait for one, and ask the network which machine this is.
for _name, _value in host.environment():
    os.environ.setdefault(_name, _value)

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout


class _Gone:
    """Stands for an operator overload that this torch no longer has; never called, only a key of torchax's tables."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<no overload {self._name} in torch {torch.__version__}>"


def _import_torchax() -> Any:
    """WORKAROUND(torchax 0.0.13 names the overloads with dimension names, which torch 2.13 removed; remove when it imports by itself)."""
    packet = torch._ops.OpOverloadPacket
    original = packet.__getattr__

    def lenient(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if "name" in name.lower():
                return _Gone(f"{self}.{name}")
            raise

    packet.__getattr__ = lenient  # type: ignore[method-assign]
    try:
        import torchax
        import torchax.interop
        import torchax.tensor

        torchax.default_env()  # loads its tables
    finally:
        packet.__getattr__ = original  # type: ignore[method-assign]
    return torchax


torchax = _import_torchax()
Tensor = torchax.tensor.Tensor
env = torchax.default_env()
env.config.force_materialize_views = True  # WORKAROUND(torchax 0.0.13 cannot index a view by a tensor)
env.config.treat_cuda_as_jax_device = False


def _promote_types(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    with torch._C.DisableTorchFunction(), torch.utils._mode_utils.no_dispatch():
        return torch.promote_types(first, second)


# WORKAROUND(torchax 0.0.13 looks for a lowering of what takes no tensor)
env.override_op_definition(torch.promote_types, _promote_types)


def _sort(x: torch.Tensor, *args: Any, dim: int = -1, descending: bool = False, stable: bool | None = True) -> Any:
    """PERF: one sort of values and places. torchax sorts twice, and a TPU's compiler takes 15 s for each sort of a vocabulary."""
    if args:  # sort.default(x, dim, descending)
        dim, descending = (*args, descending)[:2]

    def sort(values: Any) -> Any:
        key = values if not descending else -values if jnp.issubdtype(values.dtype, jnp.floating) else ~values
        places = jax.lax.broadcasted_iota(jnp.int32, values.shape, dim % values.ndim)
        _, found, places = jax.lax.sort((key, values, places), dimension=dim % values.ndim, is_stable=True, num_keys=1)
        return found, places

    return call(sort, x)


env.override_op_definition(torch.ops.aten.sort, _sort)
# float32 means float32: by default a TPU multiplies it as bfloat16.
jax.config.update("jax_default_matmul_precision", "highest")
# torch's int64 becomes int32 where values fit; the programs ask for no wider ones.
warnings.filterwarnings("ignore", message="Explicitly requested dtype.*int64", module="torchax|jax")
warnings.filterwarnings("ignore", message=".*requested in .* is not available.*")
DEVICE = torch.device("jax", 0)


# ---------------------------------------------------------------- tensors
def to_numpy(host_tensor: torch.Tensor) -> np.ndarray:
    """A host tensor as numpy, bits unchanged; bfloat16 and float8 by ml_dtypes.

    Raises:
        ValueError: 64-bit integers that 32 bits do not hold.
    """
    with torch._C.DisableTorchFunction(), torch.utils._mode_utils.no_dispatch():
        t = host_tensor.detach().contiguous()
        if t.dtype == torch.int64:
            if t.numel() and (int(t.max()) > 2**31 - 1 or int(t.min()) < -(2**31)):
                raise ValueError("a tensor of 64-bit integers holds values that 32 bits do not; the chip has no wider ones")
            t = t.to(torch.int32)
        if t.dtype == torch.float64:
            raise ValueError("the chip has no float64; give float32")
        wanted = torchax.ops.mappings.t2j_dtype(t.dtype)
        if t.dtype in torchax.ops.mappings.NUMPY_UNSUPPORTED_DTYPES:
            t = t.view(torch.int16 if t.element_size() == 2 else torch.uint8)
        found = t.numpy()
        return found if found.dtype == wanted else found.view(wanted)


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """The reverse; the tensor owns its memory."""
    array = np.array(array, order="C")
    with torch._C.DisableTorchFunction(), torch.utils._mode_utils.no_dispatch():
        wanted = torchax.ops.mappings.j2t_dtype(array.dtype)
        if wanted in torchax.ops.mappings.NUMPY_UNSUPPORTED_DTYPES:
            return torch.from_numpy(array.view(np.int16 if array.itemsize == 2 else np.uint8)).view(wanted)
        return torch.from_numpy(array)


def jax_dtype(dtype: torch.dtype) -> Any:
    """Raises RuntimeError for a dtype that JAX does not have."""
    return torchax.ops.mappings.t2j_dtype(torch.int32 if dtype == torch.int64 else dtype)


def wrap(array: Any) -> torch.Tensor:
    """A JAX array as a tensor."""
    return Tensor(array, env)


def unwrap(tensor: Any) -> Any:
    return tensor.jax()


def to_jax(tree: Any) -> Any:
    """Tensors of a tree as JAX arrays: no copy."""
    return env.t2j_iso(tree)


def to_torch(tree: Any) -> Any:
    return env.j2t_iso(tree)


def call(function: Callable[..., Any], *args: Any) -> Any:
    """A JAX function on tensors."""
    return to_torch(function(*to_jax(args)))


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Torch code inside computes with JAX, whatever it calls."""
    with env, torch.no_grad():
        yield


class Context(torch.overrides.TorchFunctionMode):
    """Sends to torchax what concerns its tensors, and nothing else.

    torchax's own modes take every call, and some that readers of files make fail in them. `reserved`: constructors whose tensors are
    only reserved, a shape without memory, until a program is given them: uninitialised ones, so that they are made where they belong.
    """

    reserved: tuple[Any, ...] = (torch.empty,)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        is_ours = device is not None and torch.device(device).type == DEVICE.type
        if is_ours and func in self.reserved:
            shape = args[0] if isinstance(args[0], (tuple, list, torch.Size)) else args
            dtype = jax_dtype(kwargs.get("dtype") or torch.get_default_dtype())
            return wrap(jax.ShapeDtypeStruct(tuple(shape), dtype))
        if is_ours or any(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves((args, kwargs))):
            with env:
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def zeros(shape: Any, sharding: Any) -> Any:
    """An array in the place of a reserved one."""
    return jax.jit(lambda: jnp.zeros(shape.shape, shape.dtype), out_shardings=sharding)()


def seed(value: int) -> None:
    env.manual_seed(value)


__all__ = ["DEVICE", "Context", "Format", "Layout", "Tensor", "call", "env", "from_numpy", "jax", "jax_dtype", "jnp", "seed", "to_jax", "to_numpy", "to_torch", "tracing", "unwrap", "wrap", "zeros"]
