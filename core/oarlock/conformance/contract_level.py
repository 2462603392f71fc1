"""Level 0: the package keeps the plugin contract. Needs no working device beyond making the object.

Owns: checks of records, signatures, imports and capabilities.
Reads: `plugins`, `subject`.
Never: computes on the device.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from oarlock.backend_api import Capabilities, ProbeResult, specs
from oarlock.backend_api.runtime import Attention, Communicator, Device, GraphRunner, MemoryProfiler, registry
from oarlock.backend_api.runtime.ops import resolve
from oarlock.conformance.cases import Case, CheckFailed
from oarlock.conformance.subject import Subject
from oarlock.plugins import DEVICE_GROUP, PROBE_LIMIT_MS, api_problem, collect, discover
from oarlock.shapes import BucketTable

LEVEL = 0
IMPORT_LIMIT_MS = 100.0
TRIES = 3  # the best of these counts: a busy machine must not fail a fast module
_DTYPES = ("float32", "bfloat16", "float16")
_BASES = {"attention": Attention, "graph_runner": GraphRunner, "communicator": Communicator, "memory_profiler": MemoryProfiler}
_RECORDS = {"kernels": specs.OpImpl, "attention": specs.AttentionSpec, "graph_runner": specs.GraphRunnerSpec}
_RECORDS |= {"communicator": specs.CommunicatorSpec, "memory_profiler": specs.MemoryProfilerSpec, "conformance": specs.ConformanceProfile, "extensions": specs.Extension}

_LIGHT = """
import json, sys, time
import oarlock.plugins
from importlib import metadata
entry = next(e for e in metadata.entry_points(group={group!r}) if e.name == {name!r})
started = time.perf_counter()
module = entry.load()
loaded = time.perf_counter()
spec = next(s for s in module.devices() if s.name == {device!r})
result = spec.probe()
print(json.dumps([(loaded - started) * 1e3, (time.perf_counter() - loaded) * 1e3, "torch" in sys.modules, type(result).__name__, result.status]))
"""


def cases() -> Iterator[Case]:
    checks: tuple[Callable[[Subject], None], ...] = (
        api_version, names, light_module, public_imports, factory, describes_itself, capabilities, claims, buckets, hook_records, kernel_signatures,
    )  # fmt: skip
    for check in checks:
        yield Case(f"contract[{check.__name__}]", LEVEL, check, is_vital=check in (api_version, factory, capabilities, buckets, hook_records, kernel_signatures))


def api_version(subject: Subject) -> None:
    problem = api_problem(subject.spec.distribution, subject.spec.api_version)
    if problem:
        raise CheckFailed(problem)


def names(subject: Subject) -> None:
    """A name or alias belongs to one device of one package; one package has one implementation of a name for an op."""
    owners: dict[str, list[str]] = {}
    for plugin in discover().plugins:
        for spec in plugin.devices:
            for name in (spec.name, *spec.aliases):
                owners.setdefault(name, []).append(plugin.distribution)
    mine = {name: owners.get(name, []) for name in (subject.spec.name, *subject.spec.aliases)}
    twice = {name: found for name, found in mine.items() if len(found) > 1}
    if twice:
        raise CheckFailed(f"names provided twice: {twice}")
    seen = [(record.op, record.name) for record in collect(subject.plugins, "kernels", device=subject.device)]
    again = sorted({pair for pair in seen if seen.count(pair) > 1})
    if again:
        raise CheckFailed(f"kernels() yields two implementations of one name: {again}")


def light_module(subject: Subject) -> None:
    """In a fresh interpreter: importing the entry point and probing is fast, answers a ProbeResult, and loads no torch."""
    found = next((p for p in discover().plugins if any(s.name == subject.spec.name for s in p.devices)), None)
    if found is None or found.group != DEVICE_GROUP:
        raise CheckFailed(f"device {subject.spec.name} is yielded by no entry point of {DEVICE_GROUP}")
    script = _LIGHT.format(group=DEVICE_GROUP, name=found.name, device=subject.spec.name)
    answers = []
    for _ in range(TRIES):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise CheckFailed(f"importing and probing failed: {done.stderr.strip().splitlines()[-1:]}")
        answers.append(json.loads(done.stdout))
    import_ms, probe_ms = (min(answer[n] for answer in answers) for n in (0, 1))
    _, _, has_torch, kind, status = answers[0]
    if has_torch:
        raise CheckFailed("the light module, or its probe, imports torch")
    if kind != ProbeResult.__name__ or status not in get_args(specs.ProbeStatus):
        raise CheckFailed(f"the probe answered {kind} {status!r}; a ProbeResult with status {', '.join(get_args(specs.ProbeStatus))} is needed")
    if import_ms > IMPORT_LIMIT_MS:
        raise CheckFailed(f"importing the light module takes {import_ms:.0f} ms; the limit is {IMPORT_LIMIT_MS:.0f}")
    if probe_ms > PROBE_LIMIT_MS:
        raise CheckFailed(f"the probe takes {probe_ms:.0f} ms; the limit is {PROBE_LIMIT_MS:.0f}")


def public_imports(subject: Subject) -> None:
    """The package imports nothing of Oarlock but `oarlock.backend_api` (its tests also `oarlock.conformance`)."""
    package = subject.spec.factory.partition(".")[0].partition(":")[0]
    if package == "oarlock":
        return  # a device of core's own tests
    found = importlib.util.find_spec(package)
    folders = [Path(p) for p in (found.submodule_search_locations or ())] if found else []
    private = []
    for path in (p for folder in folders for p in sorted(folder.rglob("*.py"))):
        allowed = ("oarlock.backend_api", "oarlock.conformance") if "tests" in path.parts else ("oarlock.backend_api",)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _imported(node):
                if name.split(".")[0] == "oarlock" and not name.startswith(allowed):
                    private.append(f"{path.name}:{getattr(node, 'lineno', 0)} {name}")
    if private:
        raise CheckFailed(f"private imports: {'; '.join(private)}; a plugin imports only oarlock.backend_api")


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module] if node.module != "oarlock" else [f"oarlock.{alias.name}" for alias in node.names]
    return []


def factory(subject: Subject) -> None:
    made = resolve(subject.spec.factory)
    if not (isinstance(made, type) and issubclass(made, Device)):
        raise CheckFailed(f"{subject.spec.factory} is no subclass of oarlock.backend_api.runtime.Device")
    if list(inspect.signature(made.__init__).parameters)[1:3] != ["index", "options"]:
        raise CheckFailed(f"{subject.spec.factory} is made with (index, options); it takes {inspect.signature(made.__init__)}")


def describes_itself(subject: Subject) -> None:
    text = subject.device.describe()
    if not isinstance(text, str) or not text.strip() or "\n" in text:
        raise CheckFailed(f"describe() must be one line of text, got {text!r}")


def capabilities(subject: Subject) -> None:
    """Every field has its declared type, and lists what core knows."""
    caps = subject.device.capabilities
    if not isinstance(caps, Capabilities):
        raise CheckFailed(f"capabilities is a {type(caps).__name__}")
    if caps != subject.device.capabilities:
        raise CheckFailed("capabilities changes from call to call; it is constant for the life of the object")
    problems = []
    if not caps.dtypes or set(caps.dtypes) - set(_DTYPES):
        problems.append(f"dtypes {caps.dtypes} must be some of {_DTYPES}, preferred first")
    if set(caps.fast_dtypes) - set(caps.dtypes):
        problems.append(f"fast_dtypes {caps.fast_dtypes} must be among dtypes {caps.dtypes}")
    if caps.gguf_dtype not in (None, *caps.dtypes):
        problems.append(f"gguf_dtype {caps.gguf_dtype} must be among dtypes {caps.dtypes}")
    if set(caps.batch_invariant) - set(caps.dtypes):
        problems.append(f"batch_invariant {caps.batch_invariant} must be among dtypes {caps.dtypes}")
    if not caps.block_sizes or any(not isinstance(n, int) or n < 1 for n in caps.block_sizes):
        problems.append(f"block_sizes {caps.block_sizes} must be positive numbers, preferred first")
    if "auto" not in caps.kv_dtypes:
        problems.append(f"kv_dtypes {caps.kv_dtypes} must hold 'auto'")
    hints = get_type_hints(Capabilities)
    for field in fields(caps):
        value, choices = getattr(caps, field.name), get_args(hints[field.name])
        if choices and all(isinstance(c, str) for c in choices) and value not in choices:
            problems.append(f"{field.name} is {value!r}; it must be one of {choices}")
        elif hints[field.name] is bool and not isinstance(value, bool):
            problems.append(f"{field.name} is {value!r}; it must be a bool")
    if caps.default_swap_bytes < 0:
        problems.append(f"default_swap_bytes is {caps.default_swap_bytes}; it must not be negative")
    if problems:
        raise CheckFailed("; ".join(problems))


def claims(subject: Subject) -> None:
    """What the probe claimed is an upper bound of what the device can do."""
    claimed, caps = subject.selection.probe.claims, subject.device.capabilities
    if claimed is None:
        return
    for name in ("dtypes", "block_sizes"):
        bound, have = getattr(claimed, name), getattr(caps, name)
        if bound and set(have) - set(bound):
            raise CheckFailed(f"the probe claims {name} {bound}, but the device has {have}; claims are upper bounds")
    if claimed.host_is_device != caps.host_is_device:
        raise CheckFailed(f"the probe claims host_is_device={claimed.host_is_device}, the device says {caps.host_is_device}")


def buckets(subject: Subject) -> None:
    """Buckets are given where shapes are not dynamic, are well formed, and hold the largest step that was asked for."""
    for seqs, tokens, blocks in ((1, 16, 1), (8, 256, 12), (64, 2048, 128)):
        found = subject.device.buckets(seqs, tokens, blocks)
        again = subject.device.buckets(seqs, tokens, blocks)
        if found != again:
            raise CheckFailed(f"buckets({seqs}, {tokens}, {blocks}) gives {found}, and {again} when asked again; the same arguments must give the same")
        table = BucketTable(**found)
        if table.is_exact and not subject.device.capabilities.dynamic_shapes:
            raise CheckFailed(f"dynamic_shapes is False, but buckets({seqs}, {tokens}, {blocks}) gives {'only those of decodes' if found else 'none'}")
        if found and table.blocks[-1] < blocks:
            raise CheckFailed(f"buckets({seqs}, {tokens}, {blocks}): the widest block table has {table.blocks[-1]} blocks")
        if not table.is_exact and table.out_rows[-1] < table.decode_rows[-1] + table.chunk_rows[-1]:
            raise CheckFailed(f"buckets({seqs}, {tokens}, {blocks}): out_rows ends below decode_rows + chunk_rows")


def hook_records(subject: Subject) -> None:
    """Every hook yields records of its type whose import strings lead to the right class."""
    for hook, kind in _RECORDS.items():
        given = {} if hook in ("conformance", "extensions") else {"device": subject.device}
        for record in collect(subject.plugins, hook, **given):
            if not isinstance(record, kind):
                raise CheckFailed(f"{hook}() yields {type(record).__name__} instead of {kind.__name__}")
            if isinstance(record, specs.ConformanceProfile):
                _reasons(record)
            if hook in _BASES and not issubclass(resolve(record.factory), _BASES[hook]):
                raise CheckFailed(f"{hook}(): {record.factory} is no subclass of {_BASES[hook].__name__}")


def _reasons(profile: specs.ConformanceProfile) -> None:
    """What a profile loosens or expects to fail, it explains."""
    silent = [f"{op} {dtype}" for op, dtype, _, reason in profile.tolerances if not reason.strip()]
    silent += [pattern for pattern, reason in profile.expected_failures if not reason.strip()]
    if silent:
        raise CheckFailed(f"conformance(): {', '.join(silent)} has no reason; a limit is loosened, or a failure expected, only with one")


def kernel_signatures(subject: Subject) -> None:
    """An implementation takes the parameters of its op's reference, in order; it is made for an op that exists."""
    ops = registry()
    for record in collect(subject.plugins, "kernels", device=subject.device):
        if record.op not in ops:
            raise CheckFailed(f"{record.name} implements {record.op}, which is no op; ops are {', '.join(sorted(ops))}")
        made: Any = resolve(record.factory)
        if record.prepare is not None and not callable(resolve(record.prepare)):
            raise CheckFailed(f"{record.name}: {record.prepare} is not callable")
        try:
            got = inspect.signature(made)
        except ValueError:
            continue  # a builtin: its parameters are seen when it is called
        if any(p.kind is p.VAR_POSITIONAL for p in got.parameters.values()):
            continue  # a wrapper, likewise
        want = inspect.signature(ops[record.op].reference)
        if list(got.parameters) != list(want.parameters):
            raise CheckFailed(f"{record.factory}{got} must take the parameters of {record.op}{want}")
