"""`tests/gpu/run.sh`: installs the packages of this tree beside each other, sees whether there is a GPU, and runs one mode within its time.

Owns: arguments, installation, exit codes.
Reads: `gpu_results`; the modes in processes of their own.
Never: imports torch; asks a package index; says that something ran which did not.

Exit codes: 0 done; 1 something failed, or is missing; 2 wrong arguments; 3 no GPU can be used here; 4 the tool is unavailable; 5 cut by the time
limit: the same command goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_results import ROOT, Results, line, read, source_hash

MODES = ("kit", "kernels", "serve", "sanitize")  # in order of worth
PACKAGES = (".", "backends/cuda", "plugins/triton_kernels", "plugins/flashinfer")
NEEDED = ("torch", "numpy", "pluggy", "safetensors")
HTTP = ("fastapi", "uvicorn", "pydantic", "msgspec", "zmq", "prometheus_client")
DONE, FAILED, NO_GPU, UNAVAILABLE, CUT = 0, 1, 3, 4, 5


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description="Measure on a GPU what can only be measured there.")
    parser.add_argument("mode", choices=(*MODES, "all", "report"))
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="a folder of wheels of what is missing, the HTTP parts among them; no index is asked")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-results", metavar="DIR", help="where figures and the installed packages go (default gpu-results)")
    parser.add_argument("--minutes", type=float, default=7.5, help="limit of one mode (default 7.5)")
    parser.add_argument("--device", default="cuda", help="cuda; another one tries out the scripts themselves")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: whether the scripts run, no figures of worth")
    parser.add_argument("--installed", action="store_true", help="take the packages that are installed, install none")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = arguments(argv)
    if options.mode == "report":
        return report(options.out)
    if options.child:
        return child(options)
    environment = dict(os.environ)
    if options.device == "cuda" and (problem := no_gpu(options.wheels)):
        print(f"nothing was run, for there is no GPU that can be used here: {problem}", file=sys.stderr)
        return NO_GPU
    if not options.installed:
        environment["PYTHONPATH"] = joined(install(options.out, options.wheels))
    missing = absent(NEEDED, environment)
    if missing:
        print(f"not installed: {', '.join(missing)}; carry wheels of them here and name their folder: --wheels DIR", file=sys.stderr)
        return FAILED
    codes = [run_mode(mode, options, environment) for mode in (MODES if options.mode == "all" else (options.mode,))]
    return next((code for code in codes if code), DONE)


# ---------------------------------------------------------------- installation
def install(out: Path, wheels: Path | None) -> Path:
    """The folder that holds our packages with their entry points, and what `wheels` has; made anew when a source has changed.

    Raises:
        SystemExit: pip could not.
    """
    target = out / "packages"
    stamp, key = target / ".stamp", f"{source_hash()} {sorted(p.name for p in wheels.glob('*.whl')) if wheels else ''}"
    if stamp.is_file() and stamp.read_text() == key:
        return target
    target.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--upgrade", "--target", str(target)]
    found = sorted(map(str, wheels.glob("*.whl"))) if wheels else []
    if found:  # first: what builds ours may be among them
        _pip([*pip, *found], dict(os.environ))
    with tempfile.TemporaryDirectory() as scratch:
        for folder in (name for name in PACKAGES if (ROOT / name / "pyproject.toml").is_file()):
            configuration = Path(scratch) / "setup.cfg"  # nothing is left beside the sources
            work = Path(scratch) / folder.replace("/", "-").replace(".", "oarlock")
            configuration.write_text(f"[build]\nbuild_base = {work}\n[egg_info]\negg_base = {scratch}\n")
            _pip([*pip, "--no-build-isolation", str(ROOT / folder)], {**os.environ, "DIST_EXTRA_CONFIG": str(configuration), "PYTHONPATH": joined(target)})
    stamp.write_text(key)
    return target


def _pip(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def absent(names: tuple[str, ...], environment: dict[str, str]) -> list[str]:
    """Modules that cannot be found."""
    code = f"import importlib.util; print(*(n for n in {names!r} if importlib.util.find_spec(n) is None))"
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout.split()


def no_gpu(wheels: Path | None) -> str:
    """Why there is none, by the probe of the cuda package as it lies in this tree; "": there is one.

    Raises:
        SystemExit: it could not be asked; that says nothing of the GPU.
    """
    code = (
        "from oarlock_cuda.plugin import probe; found = probe()\n"
        "print('' if found.status == 'available' else f'{found.reason} ({found.status}); {found.remedy}')"
    )
    carried = wheels.glob("pluggy-*.whl") if wheels else ()  # a wheel of Python alone is imported as it is
    environment = {**os.environ, "PYTHONPATH": joined(ROOT / "core", ROOT / "backends/cuda", *carried)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the GPU cannot be asked for: {done.stderr.strip().splitlines()[-1]}; what is missing can be carried as wheels: --wheels DIR")
    return done.stdout.strip()


def joined(*folders: Path) -> str:
    """A PYTHONPATH that begins with these."""
    return os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH", ""))))


# ---------------------------------------------------------------- a mode
def run_mode(mode: str, options: argparse.Namespace, environment: dict[str, str]) -> int:
    """In a process of its own, killed at the limit: its figures are kept as they are made."""
    print(f"{mode}: at most {options.minutes:g} minutes", flush=True)
    command = [sys.executable, str(Path(__file__)), mode, "--child", "--out", str(options.out), "--device", options.device, *(["--tiny"] if options.tiny else [])]
    if not absent(HTTP, environment):
        environment = {**environment, "OARLOCK_GPU_SERVER": "1"}
    # A group of its own: what it starts (a server, the kit) is ended with it.
    child_process = subprocess.Popen(command, env={**environment, "OARLOCK_GPU_STARTED": str(time.time())}, start_new_session=True)
    try:
        code = child_process.wait(options.minutes * 60)
    except subprocess.TimeoutExpired:
        os.killpg(child_process.pid, 9)
        child_process.wait()
        print(f"{mode}: cut after {options.minutes:g} minutes; the same command goes on where it ended", flush=True)
        return CUT
    return code


def child(options: argparse.Namespace) -> int:
    """One mode, with our packages in the path."""
    has_server = bool(os.environ.get("OARLOCK_GPU_SERVER")) and not options.tiny
    results = Results(options.out / f"{options.mode}.json", facts(options))
    if options.mode == "kit":
        import gpu_kit

        good: bool | None = gpu_kit.run(results, options.device, has_server, options.tiny)
    elif options.mode == "kernels":
        import gpu_kernels
        from oarlock.conformance.subject import Subject

        good = gpu_kernels.run(results, Subject.named(options.device), options.tiny)
    elif options.mode == "serve":
        import gpu_serve

        good = gpu_serve.run(results, options.device, options.tiny, has_server)
    else:
        import gpu_sanitize

        good = gpu_sanitize.run(results, options.device)
    results.finish()
    return UNAVAILABLE if good is None else DONE if good else FAILED


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """Where figures come from."""
    import importlib.metadata

    from oarlock.plugins import select_device

    versions = {}
    for name in ("torch", "triton", "flashinfer-python"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "mode": options.mode, "device": options.device, "device_text": select_device(options.device).probe.reason, "sizes": "tiny" if options.tiny else "full",
        "python": sys.version.split()[0], "versions": versions, "commit": git.stdout.strip(), "command": f"tests/gpu/run.sh {options.mode}",
    }  # fmt: skip


# ---------------------------------------------------------------- report
def report(out: Path) -> int:
    """Every file of figures as a table; 1 where there is none."""
    found = [(mode, data) for mode in MODES if (data := read(out / f"{mode}.json")) is not None]
    for mode, data in found:
        state = data.get("verdict") or data.get("reason") or ("finished" if data["finished"] else "not finished: the same command goes on")
        print(f"{mode}: {data['device_text']}, torch {data['versions']['torch']}, {data['date']}, sources {data['sources']}, {data['sizes']} sizes: {state}")
        for name, figure in data["figures"].items():
            print(line(name, figure))
        print(json.dumps(data.get("counts", {})) if data.get("counts") else "", end="")
    if not found:
        print(f"no figures in {out}", file=sys.stderr)
    return DONE if found else FAILED


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    raise SystemExit(main(sys.argv[1:]))
