"""Builds the kernels where there is a C++ compiler and torch; installs without them elsewhere.

The kernels are one shared library on torch's stable ABI: a wheel serves every Python >= 3.11 and torch >= 2.10. Each instruction
set is a file compiled with its own flags; the best one that the processor has is chosen at run time.
OARLOCK_CPU_KERNELS=0 leaves them out, =1 makes their absence an error. A library is kept in the user's cache folder under a hash of
all it is made of, and an equal one is not compiled again.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

AVX512 = ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
SOURCES = {
    "csrc/dispatch.cpp": [],
    "csrc/pool.cpp": [],
    "csrc/ops_linear.cpp": [],
    "csrc/ops_layers.cpp": [],
    "csrc/ops_codes.cpp": [],
    "csrc/ops_moe.cpp": [],
    "csrc/ops_stack.cpp": [],
    "csrc/ops_attention.cpp": [],
    "csrc/ops_sampling.cpp": [],
    "csrc/isa_generic.cpp": [],
}
if platform.machine() in ("x86_64", "AMD64"):
    SOURCES |= {
        "csrc/isa_amx.cpp": [*AVX512, "-mamx-tile", "-mamx-bf16"],
        "csrc/isa_vnni.cpp": AVX512,  # names one set more itself
        "csrc/isa_fp16.cpp": AVX512,  # too, where the compiler knows it
        "csrc/isa_avx512.cpp": AVX512,
        "csrc/isa_avx2.cpp": ["-mavx2", "-mfma"],
    }
# No contraction: a fused multiply-add stands where the kernels ask for one, so that one text gives the same bits everywhere.
FLAGS = ["-std=c++20", "-O3", "-g0", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]
WANTED = os.environ.get("OARLOCK_CPU_KERNELS", "")
MAX_KEPT = 8  # libraries in the cache folder; the oldest go


def torch_folder() -> Path | None:
    """torch's folder, without importing it."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def _copy(library: Path, to: Path) -> None:
    """Put a library in place at once, so that a process that has the old one loaded keeps it."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as scratch:
        os.replace(shutil.copy(library, scratch), to)


class BuildKernels(build_ext):
    """Compiles SOURCES, several at once, each with its own flags."""

    def build_extension(self, ext: Extension) -> None:
        missing = self._missing()
        if missing:
            if WANTED == "1":
                raise SystemExit(f"oarlock-cpu: {missing}, and OARLOCK_CPU_KERNELS=1 asks for the kernels")
            self._forget(ext)
            print(f"oarlock-cpu: {missing}; installing without kernels: plain torch serves", file=sys.stderr)
            return
        target, kept = Path(self.get_ext_fullpath(ext.name)), self._kept()
        target.parent.mkdir(parents=True, exist_ok=True)
        if kept.is_file():
            print(f"oarlock-cpu: nothing to compile, taking {kept}", file=sys.stderr)
            _copy(kept, target)
            return
        self._compile(target)
        try:
            _copy(target, kept)
            for old in sorted(kept.parent.glob("*.so"), key=lambda path: path.stat().st_mtime)[:-MAX_KEPT]:
                old.unlink(missing_ok=True)
        except OSError as error:
            print(f"oarlock-cpu: not kept for the next build: {error}", file=sys.stderr)

    def _kept(self) -> Path:
        """Where the library is kept: named by the hash of its sources and headers, this file with its flags, the compiler and torch."""
        compiler = [getattr(self.compiler, name, None) for name in ("compiler_cxx", "compiler_so_cxx", "compiler_so", "linker_so_cxx", "linker_so")]
        version = subprocess.run([*(compiler[0] or ["c++"]), "--version"], capture_output=True, check=False).stdout
        made_of = hashlib.sha256(repr((compiler, version, metadata.version("torch"), platform.machine(), platform.libc_ver())).encode())
        for path in (Path("setup.py"), *sorted(path for path in Path("csrc").rglob("*") if path.is_file())):
            made_of.update(f"\n{path} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        return (cache if cache.is_absolute() else Path("build").absolute()) / "oarlock" / "cpu_kernels" / f"{made_of.hexdigest()}.so"

    def _compile(self, target: Path) -> None:
        folder = torch_folder()
        include = ["-I", str(folder / "include"), "-I", "csrc"]
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)

        def compile_one(item: tuple[str, list[str]]) -> list[str]:
            return self.compiler.compile([item[0]], output_dir=self.build_temp, extra_postargs=[*FLAGS, *DEFINES, *include, *item[1]])

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = [o for made in threads.map(compile_one, SOURCES.items()) for o in made]
        # torch's libraries are in the process before this one is loaded: no run path is needed.
        libraries = ["-L", str(folder / "lib"), "-ltorch_cpu", "-lc10", "-lpthread"]
        self.compiler.link_shared_object(objects, str(target), extra_postargs=libraries, target_lang="c++")

    def _forget(self, ext: Extension) -> None:
        """Remove what an earlier build left, which setuptools would install; beside the sources only where kernels are not wanted."""
        name = self.get_ext_filename(ext.name)
        for path in (self.get_ext_fullpath(ext.name), Path(self.build_lib, name), *([name] if WANTED == "0" else [])):
            Path(path).unlink(missing_ok=True)

    def get_outputs(self) -> list[str]:
        """Only what was built: without a compiler there is nothing to install."""
        return [path for path in super().get_outputs() if Path(path).exists()]

    def copy_extensions_to_source(self) -> None:
        if all(Path(self.get_ext_fullpath(e.name)).exists() or Path(self.build_lib, self.get_ext_filename(e.name)).exists() for e in self.extensions):
            super().copy_extensions_to_source()

    def _missing(self) -> str:
        """What keeps the kernels from being built; "" when nothing does."""
        if WANTED == "0":
            return "OARLOCK_CPU_KERNELS=0"
        if torch_folder() is None:
            return "torch is not installed where this package is built (pip install --no-build-isolation after torch)"
        compiler = (getattr(self.compiler, "compiler_cxx", None) or ["c++"])[0]
        if shutil.which(compiler) is None:
            return f"there is no C++ compiler {compiler!r} (install g++)"
        with tempfile.TemporaryDirectory() as scratch:
            probe = Path(scratch, "probe.cpp")
            probe.write_text("#include <atomic>\nint main() { std::atomic<int> a{0}; a.notify_all(); }\n")
            try:
                self.compiler.compile([str(probe)], output_dir=scratch, extra_postargs=["-std=c++20"])
            except CompileError as error:
                return f"the C++ compiler {compiler!r} does not compile C++20: {error}"
        return ""


setup(
    ext_modules=[Extension("oarlock_cpu._C", list(SOURCES), py_limited_api=True)],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
