"""Tensors of the simulated accelerator: CPU memory that torch believes to be on a device of its own.

Owns: the torch device "sim" (PrivateUse1, registered at import), `SimTensor`, the dispatch mode, the memory account.
Reads: `counters`.
Never: knows a model; makes a mixture of host and device tensors work.

Every operation on a `SimTensor` runs on the CPU tensor inside it. What real accelerators refuse is refused (host and
device tensors in one operation, `numpy()`), and what costs time there is counted (copies, reads that make the host wait).
"""

from __future__ import annotations

import threading
from typing import Any, Self

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from oarlock_sim import NUM_DEVICES
from oarlock_sim.counters import COUNT

DEVICE_TYPE = "sim"

# Operations whose result the host needs before it can go on: their output's size, or the value itself.
_SYNCS = frozenset(
    (
        "_local_scalar_dense",
        "_unique",
        "_unique2",
        "bincount",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "unique",
        "unique_consecutive",
        "unique_dim",
    )
)
_COPIES = frozenset(("_to_copy", "copy_"))


class _DeviceModule:
    """What torch asks of `torch.sim`."""

    _index = 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return self._index

    def set_device(self, index: int) -> None:
        self._index = index

    def device_count(self) -> int:
        return NUM_DEVICES

    def synchronize(self, *_: Any) -> None:
        COUNT["synchronise"] += 1

    def manual_seed_all(self, seed: int) -> None:
        """Nothing to seed: random numbers come from the CPU generator."""

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def _is_in_bad_fork(self) -> bool:
        return False


device_module = _DeviceModule()
backend_registration._setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=device_module)


class MemoryAccount:
    """Bytes held by live `SimTensor`s, each storage counted once; refuses what exceeds the simulated size.

    One account a process: ranks are processes.
    """

    def __init__(self) -> None:
        self.total_bytes = 2 << 30
        self.used_bytes = 0
        self.peak_bytes = 0
        self._holders: dict[int, int] = {}  # storage -> number of tensors that view it
        self._lock = threading.Lock()

    def hold(self, storage: torch.UntypedStorage) -> _Lease:
        """Count a storage for as long as the returned lease lives.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key not in self._holders:
                if self.used_bytes + size > self.total_bytes:
                    raise torch.OutOfMemoryError(
                        f"sim device out of memory: {size} bytes wanted, {self.total_bytes - self.used_bytes} of {self.total_bytes} free"
                    )
                self.used_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            self._holders[key] = self._holders.get(key, 0) + 1
        return _Lease(self, key, size)

    def _release(self, key: int, size: int) -> None:
        with self._lock:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.used_bytes -= size


class _Lease:
    """Held by one tensor; gives its share of the storage back when the tensor dies."""

    __slots__ = ("_account", "_key", "_size")

    def __init__(self, account: MemoryAccount, key: int, size: int) -> None:
        self._account, self._key, self._size = account, key, size

    def __del__(self) -> None:
        self._account._release(self._key, self._size)


MEMORY = MemoryAccount()


class SimTensor(torch.Tensor):
    """A tensor on `sim`; `_inner` is the CPU tensor that holds its values. Views share the inner storage."""

    _inner: torch.Tensor
    _lease: _Lease

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int = 0) -> Self:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(DEVICE_TYPE, index),
        )

    def __init__(self, inner: torch.Tensor, index: int = 0) -> None:
        self._inner = inner
        self._lease = MEMORY.hold(inner.untyped_storage())

    def __repr__(self) -> str:
        return f"SimTensor({self._inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _run(func, args, kwargs or {})


class SimMode(TorchDispatchMode):
    """Makes factory calls with a `sim` device work, and lets copies from the host be seen."""

    def __enter__(self) -> Self:
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(..., device=) asks C++ for an allocator we lack
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifted)
        super().__exit__(*exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _run(func, args, kwargs or {})


class _Call:
    """One operation's tensors, gathered while its arguments are unwrapped."""

    __slots__ = ("host", "sims")

    def __init__(self) -> None:
        self.sims: list[SimTensor] = []
        self.host: list[torch.Tensor] = []

    def unwrap(self, value: Any) -> Any:
        if isinstance(value, SimTensor):
            self.sims.append(value)
            return value._inner
        if isinstance(value, torch.Tensor):
            self.host.append(value)
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.unwrap, value))
        return value

    def wrap(self, value: Any, index: int) -> Any:
        if isinstance(value, torch.Tensor):
            for sim in self.sims:
                if sim._inner is value:  # written in place: the same tensor comes back
                    if sim.shape != value.shape or sim.stride() != value.stride():
                        raise RuntimeError("an operation changed a sim tensor's shape in place, which this device does not do")
                    return sim
            return SimTensor(value, index)
        if isinstance(value, (list, tuple)):
            return type(value)(self.wrap(v, index) for v in value)
        return value


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation on the tensors inside, after the checks and counts."""
    name = func.overloadpacket.__name__
    call = _Call()
    plain_args = tuple(map(call.unwrap, args))
    plain_kwargs = {key: call.unwrap(value) for key, value in kwargs.items()}
    wanted = kwargs.get("device")
    target = torch.device(wanted) if wanted is not None else None
    if target is None:
        on_sim, index = bool(call.sims), call.sims[0].device.index if call.sims else 0
    else:
        on_sim, index = target.type == DEVICE_TYPE, target.index if target.index is not None else device_module.current_device()
        plain_kwargs["device"] = torch.device("cpu") if on_sim else target
    if not on_sim and not call.sims:
        return func(*plain_args, **plain_kwargs)
    if plain_kwargs.get("pin_memory"):
        plain_kwargs["pin_memory"] = False
    COUNT["ops"] += 1
    if name in _COPIES:
        return _copy(func, name, call, plain_args, plain_kwargs, on_sim, index)
    _check_and_count(func, name, call, args, kwargs)
    result = func(*plain_args, **plain_kwargs)
    return call.wrap(result, index) if on_sim else result


def _check_and_count(func: Any, name: str, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse mixtures and count what makes the host wait."""
    mixed = [t for t in call.host if t.dim() > 0]
    if call.sims and mixed:
        raise RuntimeError(
            f"{func} got tensors on {call.sims[0].device} and on the host (shape {tuple(mixed[0].shape)}, {mixed[0].dtype}); "
            "copy with .to(device) first"
        )
    if len({t.device for t in call.sims}) > 1:
        raise RuntimeError(f"{func} got tensors on {sorted({str(t.device) for t in call.sims})}; copy to one device first")
    if name in _SYNCS or _boolean_index(name, args) or _unsized_repeat(name, args, kwargs):
        COUNT["sync"] += 1
        COUNT["sync:" + name] += 1


def _boolean_index(name: str, args: tuple[Any, ...]) -> bool:
    """Indexing by a mask has an output whose size only the device knows."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _unsized_repeat(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`repeat_interleave` by a tensor, when the caller did not say how long the result is."""
    return name == "repeat_interleave" and kwargs.get("output_size") is None


def _copy(func: Any, name: str, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any], on_sim: bool, index: int) -> Any:
    """`_to_copy` and `copy_`: the two operations that may cross between host and device."""
    if name == "copy_":
        destination = call.sims[0] if args[0] is call.sims[0]._inner else None
        from_sim = len(call.sims) == (2 if destination is not None else 1)
        source, to_sim = args[1], destination is not None
    else:
        destination, from_sim = None, bool(call.sims)
        source, to_sim = args[0], on_sim
    if from_sim and not to_sim:
        COUNT["d2h"] += 1
    elif to_sim and not from_sim:
        COUNT["h2d"] += 1
        if source.dtype == torch.int64:
            COUNT["h2d_int64"] += 1
    result = func(*args, **kwargs)
    if name == "copy_":
        return destination if destination is not None else result
    return SimTensor(result, index) if to_sim else result
