"""`NeuronRunner`: the graph runner on the compile seam, with a cache on disk.

Owns: the flat form of a program, and which of its inputs and outputs are one.
Reads: `oarlock.backend_api`, `compiler`, `cache`, `trace`.
Never: calls the vendor; compiles while serving.

Every start traces every program (seconds) and compiles only what the cache does not hold (minutes): the key is made of the traced
program itself, so a changed model, shape or source never meets a program of another.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from oarlock.backend_api.runtime import Device, GraphRunner, PureProgram
from torch.utils import _pytree as pytree

from oarlock_neuron import host
from oarlock_neuron.cache import Cache, default_folder, key_of, source_hash
from oarlock_neuron.compiler import Compiled, Compiler, NeuronCompiler, StrictCompiler
from oarlock_neuron.trace import trace

log = logging.getLogger("oarlock.neuron")
SOURCE = Path(__file__).parent


class NeuronRunner(GraphRunner):
    """Programs are flattened; written state comes first among the outputs, in the order of its inputs."""

    def __init__(self, device: Device, compiler: Compiler | None = None) -> None:
        super().__init__(device)
        self.compiler = compiler or (StrictCompiler() if host.is_simulated() else NeuronCompiler())
        self.cache = Cache(Path(device.options.get("neuron_cache_dir") or default_folder()).expanduser())
        self.loads = 0
        self._source = source_hash(SOURCE)

    def compile(self, fn: PureProgram, example: tuple[Any, ...], tag: str) -> PureProgram:
        """Raises trace.Unsuitable for a program that cannot be compiled for static shapes."""
        flat = _Flat(fn, example)
        compiled = self._compile(flat, pytree.tree_leaves(example), tag)
        compiled.artifact = b""  # it is on disk, or nowhere: megabytes for each program

        def run(*args: Any) -> Any:
            leaves, spec = pytree.tree_flatten(args)
            if spec != flat.spec:
                raise RuntimeError(f"program {tag} was compiled for other arguments than it is called with: {flat.difference(args)}")
            return flat.results(args[1], compiled(*leaves))

        return run

    def _compile(self, flat: _Flat, leaves: list[Any], tag: str) -> Compiled:
        traced = trace(flat, leaves, flat.aliases, tag)
        program = tag.partition("-")[0]
        key = key_of((program, traced.text, str(flat.aliases), self.compiler.version(), self._source))
        artifact = self.cache.read(key)
        if artifact is not None:
            try:
                found = self.compiler.load(artifact, traced, leaves, aliases=flat.aliases, tag=tag)
                self.loads += 1
                return found
            except Exception as error:  # noqa: BLE001  whatever is wrong with it, it can be made anew
                log.warning("the kept program %s cannot be used (%s); it is compiled again", tag, error)
        started = time.monotonic()
        made = self.compiler.compile(traced, leaves, aliases=flat.aliases, tag=tag)
        log.info("compiled %s in %.1f s", tag, time.monotonic() - started)
        self.cache.write(key, made.artifact)
        return made

    def refuses_unwarmed(self) -> bool:
        return True

    def kept_in(self) -> str:
        return str(self.cache.folder)


class _Flat:
    """A pure program over flat tuples: (leaves of all arguments) -> (leaves of written state, then leaves of outputs). Keeps no tensor."""

    def __init__(self, fn: PureProgram, example: tuple[Any, ...]) -> None:
        self._fn = fn
        self.spec, self._paths = pytree.tree_structure(example), _paths(example)
        before, self.count = len(pytree.tree_leaves(example[0])), len(pytree.tree_leaves(example[1]))
        self.aliases = {before + n: n for n in range(self.count)}
        self._out: Any = None  # how outputs are put together; known once traced
        self._written: tuple[str, ...] = ()  # names of the state that was returned

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        args = pytree.tree_unflatten(list(leaves), self.spec)
        new, outputs = self._fn(*args)
        unknown = set(new) - set(args[1])
        if unknown:
            raise ValueError(f"the program returns state {sorted(unknown)} that it was not given to write")
        self._written = tuple(new)
        state = pytree.tree_leaves({name: new.get(name, old) for name, old in args[1].items()})
        flat, self._out = pytree.tree_flatten(outputs)
        if len(state) != self.count:
            raise ValueError(f"the program returns {len(state)} tensors of state, it was given {self.count}")
        return (*state, *flat)

    def difference(self, args: tuple[Any, ...]) -> str:
        """Where the tree of `args` is not that of the example."""
        got = _paths(args)
        new, gone = [path for path in got if path not in self._paths], [path for path in self._paths if path not in got]
        return f"{new[:1] or 'nothing'} is new, {gone[:1] or 'nothing'} is missing" if new or gone else "a list stands where a tuple was, or the reverse"

    def results(self, written: dict[str, Any], outputs: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(written state, outputs) from the flat outputs. The state is where it was."""
        return {name: written[name] for name in self._written}, pytree.tree_unflatten(list(outputs[self.count :]), self._out)


def _paths(tree: Any) -> list[str]:
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
