"""The device under test, with the implementations that core would choose for it.

Owns: `Subject`: the device, its ops, attention and graph runner; guarded uploads.
Reads: `plugins`, `runtime.choice`.
Never: chooses otherwise than the worker does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch.utils import _pytree as pytree

import oarlock.runtime.reference  # noqa: F401  registers core's ops
from oarlock.backend_api import ConformanceProfile, DeviceSpec
from oarlock.backend_api.runtime import Attention, AttentionParams, Device, EagerRunner, GraphRunner, Ops
from oarlock.backend_api.runtime.ops import resolve
from oarlock.conformance.cases import CheckFailed
from oarlock.conformance.metrics import same_bits
from oarlock.device_choice import Selection
from oarlock.plugins import collect, select_device, worker_plugins
from oarlock.runtime.choice import choose_attention, choose_graph_runner, choose_ops

GUARD = 256  # elements before and after each guarded tensor; keeps any alignment up to 256 bytes
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Closes(Protocol):
    def close(self) -> None: ...


Part = TypeVar("Part", bound=Closes)


@dataclass
class Guarded:
    """A tensor on the device inside a larger one whose ends must stay as they were."""

    name: str
    tensor: torch.Tensor  # on the device
    whole: torch.Tensor  # on the device
    sent: torch.Tensor  # what `whole` was, on the host

    def check(self, subject: Subject, may_change: bool) -> None:
        """Raises CheckFailed when the ends, or the inside unless it may change, are not what was sent."""
        now = subject.download(self.whole)
        ends = [slice(0, GUARD), slice(len(now) - GUARD, None)]
        if not all(same_bits(now[part], self.sent[part]) for part in ends):
            raise CheckFailed(f"memory beside argument {self.name} was written")
        if not may_change and not same_bits(now, self.sent):
            raise CheckFailed(f"argument {self.name} was changed; the op's definition does not say that it may be")


@dataclass
class Subject:
    """Made once a run, after the device was selected. `upload`, `run` and `download` are the only ways to the device."""

    spec: DeviceSpec
    selection: Selection
    plugins: Any  # the worker's plugin manager
    device: Device
    profile: ConformanceProfile
    graph: GraphRunner
    bound: dict[str, Ops] = field(default_factory=dict)
    _programs: dict[str, Callable[..., Any]] = field(default_factory=dict)
    _parts: dict[type, Any] = field(default_factory=dict)
    attention_served: dict[str, str] = field(default_factory=dict)  # dtype -> implementation over a cache of it, for the report

    @classmethod
    def open(cls, selection: Selection) -> Subject:
        """Make and activate the device, as a worker does.

        Raises:
            PluginError: the package is broken or ambiguous. Whatever the device raises.
        """
        spec = selection.spec
        plugins = worker_plugins(spec.name)
        device = resolve(spec.factory)(0, {})
        device.activate()
        profiles = [p for p in collect(plugins, "conformance") if p.device == spec.name]
        profile = profiles[0] if profiles else ConformanceProfile(device=spec.name)
        graph = choose_graph_runner(collect(plugins, "graph_runner", device=device), device)
        return cls(spec, selection, plugins, device, profile, graph)

    @classmethod
    def named(cls, device: str) -> Subject:
        """The device that `--device` chooses. Raises as `open`, and ConfigError where it is not there."""
        return cls.open(select_device(device))

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """As a worker runs its programs."""
        with self.device.context(), torch.no_grad():
            yield

    def part(self, kind: type[Part]) -> Part:
        """What a level keeps between its cases, made when first asked for; `close` closes it."""
        if kind not in self._parts:
            self._parts[kind] = kind()
        found: Part = self._parts[kind]
        return found

    def close(self) -> None:
        for kept in self._parts.values():
            kept.close()
        self._parts.clear()

    # ------------------------------------------------------------ what core would choose
    @property
    def dtypes(self) -> tuple[str, ...]:
        return self.device.capabilities.dtypes

    def ops(self, dtype: str) -> Ops:
        if dtype not in self.bound:
            self.bound[dtype] = choose_ops(collect(self.plugins, "kernels", device=self.device), self.device, dtype)
        return self.bound[dtype]

    def attention(self, params: AttentionParams, dtype: str, block_size: int, kv_dtype: str = "auto") -> Attention:
        kind = "full" if params.window is None else "window"
        records = collect(self.plugins, "attention", device=self.device)
        made, name, _ = choose_attention(records, self.device, params, kind, dtype, block_size, kv_dtype)
        if kv_dtype == "auto":
            self.attention_served[dtype] = name
        return made

    def limit(self, op: str, dtype: str, default: float) -> float:
        """The op's own limit, or the profile's looser one."""
        loosened = [limit for name, of, limit, _ in self.profile.tolerances if (name, of) == (op, dtype)]
        return max([default, *loosened])

    # ------------------------------------------------------------ computing
    @property
    def runner(self) -> GraphRunner:
        """What core gives a program to; where it captures none but a model's decodes, that runs it as it is."""
        caps = self.device.capabilities
        return EagerRunner(self.device) if caps.execution == "capture" and caps.dynamic_shapes else self.graph

    def run(
        self, tag: str, fn: Callable[..., Any], *, weights: Any = None, written: dict[str, Any] | None = None,
        packed: torch.Tensor | None = None, inputs: dict[str, Any] | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
        """Run a pure program as core would, compiled once per tag. Returns (new state, outputs)."""
        if packed is None:
            packed = self.upload(torch.zeros(1, dtype=torch.int32))
        args = (weights if weights is not None else {}, written or {}, {}, packed, inputs or {})
        if tag not in self._programs:
            # Compiling may spoil the state of its example (capture runs it, donation eats it): give it a state of its own.
            scratch = pytree.tree_map_only(torch.Tensor, lambda t: self.upload(self.download(t).clone()), args[1])
            with self.session():
                self._programs[tag] = self.runner.compile(fn, (args[0], scratch, *args[2:]), tag)
        with self.session():
            new, out = self._programs[tag](*args)
            self.graph.retire(args[1], new)
        return new, out

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        with self.session():
            return self.device.to_device(host)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.session():
            return self.device.to_host(tensor)

    def guarded(self, name: str, host: torch.Tensor) -> Guarded:
        """Upload a tensor between two guards, as a contiguous view, or with its strides where the device updates in place."""
        sentinel = torch.full((GUARD,), 77, dtype=torch.int32).to(host.dtype)
        strided = not host.is_contiguous() and self.device.capabilities.kv_update == "in_place"
        if strided:
            size = sum((n - 1) * stride for n, stride in zip(host.shape, host.stride(), strict=True)) + 1 if host.numel() else 0
            inside = torch.zeros(size, dtype=host.dtype)
            inside.as_strided(host.shape, host.stride()).copy_(host)
        else:
            inside = host.reshape(-1)
        sent = torch.cat((sentinel, inside, sentinel))
        whole = self.upload(sent.clone())
        with self.session():
            if strided:
                return Guarded(name, whole.as_strided(host.shape, host.stride(), GUARD), whole, sent)
            return Guarded(name, whole[GUARD : GUARD + len(inside)].view(host.shape), whole, sent)

    def fences(self, results: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(device, host) tensors on both sides of a freed hole of each result's size, where an allocator is likely to put it."""
        found = []
        for result in results:
            sentinel = torch.full((max(result.numel(), 1),), 77, dtype=torch.int32).to(result.dtype)
            places = [self.upload(sentinel.clone()) for _ in range(3)]
            found += [(places[0], sentinel), (places[2], sentinel)]
        return found
