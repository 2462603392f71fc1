"""Turn what the user calls a model into a local path.

Owns: hub names and which files are fetched for them.
Reads: `config`, `errors`; the environment through huggingface_hub (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HOME).
Never: touches the network for a path that exists; fetches code unless `trust_remote_code` is set.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from oarlock.config.sections import ModelConfig
from oarlock.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/([\w./-]+\.gguf)")
_SETTINGS = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_WEIGHTS = {"auto": ["*.safetensors", "*.bin", "*.pt"], "safetensors": ["*.safetensors"], "pt": ["*.pt"], "npcache": ["*.bin"]}
# Other copies of the weights, and what training left behind.
_NEVER = [
    "*/*.safetensors",
    "*/*.bin",
    "*/*.pt",
    "*/[!c]*.json",  # but the config.json of the folders that modules.json names
    "consolidated*",
    "optimizer*",
    "training_args.bin",
    "rng_state*",
    "scheduler.pt",
]


def resolve_model(config: ModelConfig) -> str:
    """A folder or a .gguf file: the path itself where it exists, else what the hub has under this name.

    A hub name may end with the name of a .gguf file, org/name/file.gguf. Files that an earlier call fetched are not
    fetched again; a cut connection is taken up where it stopped.

    Raises:
        ModelError: neither a path nor a hub name; not found, gated, or not reachable.
        ConfigError: `--revision` with a local path.
    """
    local = _local(config.model, config.revision, "--revision")
    if local is not None:
        return local
    file = _HUB_FILE.fullmatch(config.model)
    if file and not Path(file[1]).exists():
        return _fetch_file(file[1], file[2], config)
    return _fetch(config.model, config.revision, config, _WEIGHTS.get(config.load_format, []), "model")


def resolve_tokenizer(config: ModelConfig, model_path: str) -> str:
    """Where the tokenizer's files are: `--tokenizer`, else the model. Its revision falls back to the model's.

    Raises:
        ModelError, ConfigError: as `resolve_model`, for the tokenizer.
    """
    revision = config.tokenizer_revision
    if config.tokenizer is None and (revision is None or revision == config.revision):
        return model_path
    name = config.tokenizer or config.model
    local = _local(name, revision, "--tokenizer-revision")
    if local is not None:
        return local
    return _fetch(name, revision or config.revision, config, [], "tokenizer")


def _local(name: str, revision: str | None, option: str) -> str | None:
    path = Path(name).expanduser()
    if not path.exists():
        return None
    if revision is not None:
        raise ConfigError(f"{option} {revision} has no meaning for {name}, which is a local path; leave it out", option=option)
    ggufs = sorted(path.glob("*.gguf")) if path.is_dir() and not (path / "config.json").exists() else []
    if len(ggufs) > 1:
        raise ModelError(f"{path} holds {len(ggufs)} .gguf files; name one of them: {', '.join(file.name for file in ggufs)}")
    return str(ggufs[0] if ggufs else path)


def _is_path(name: str) -> bool:
    """Whether it can only have been meant as a path of this machine."""
    return name.startswith((".", "/", "~")) or name.endswith((".gguf", "/")) or "\\" in name


def _near(name: str) -> str:
    """What lies beside a path that does not exist and is spelt nearly like it; else the part of the path that is missing."""
    path = Path(name).expanduser()
    missing = next((part for part in reversed(path.parents) if not part.exists()), None)
    if missing is not None:
        return f"; {missing} does not exist"
    try:
        beside = {entry.name for entry in path.parent.iterdir()}
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, sorted(beside), n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _fetch(name: str, revision: str | None, config: ModelConfig, weights: list[str], what: str) -> str:
    """The snapshot folder of a hub repository, with its settings and the first kind of weights that it has."""
    if _is_path(name):
        raise ModelError(f"{what} {name}: no such file or folder{_near(name)}")
    if not _HUB_NAME.fullmatch(name):
        raise ModelError(f"{what} {name}: no such file or folder, and not a hub name (org/name) either")
    from huggingface_hub import HfApi, constants, snapshot_download

    files: list[str] | None = None
    if not constants.HF_HUB_OFFLINE:
        try:
            files = [entry.rfilename for entry in HfApi().model_info(name, revision=revision).siblings or []]
        except Exception as error:  # noqa: BLE001  sorted out below
            problem = _problem(error, name, revision, what)
            if problem is not None:
                raise problem from None
            logger.warning("the hub %s cannot be reached (%s); using what was fetched before", constants.ENDPOINT, type(error).__name__)
    if files is not None and weights:
        weights = [pattern for pattern in weights if any(_wanted(file, pattern) for file in files)][:1]
        if not weights:
            raise _without_weights(name, files, config.load_format)
    settings = [*_SETTINGS, *(["*.py"] if config.trust_remote_code else [])]

    def snapshot(patterns: list[str]) -> str:
        return snapshot_download(
            name, revision=revision, cache_dir=config.download_dir, allow_patterns=[*settings, *patterns],
            ignore_patterns=_NEVER, local_files_only=files is None,
        )  # fmt: skip

    if files is not None:
        return _guarded(lambda: snapshot(weights), name, revision, what)
    return _from_cache(snapshot, weights, name, revision, what)


def _from_cache(snapshot: Callable[[list[str]], str], weights: list[str], name: str, revision: str | None, what: str) -> str:
    """Offline: which kind of weights there is shows only in the cache itself."""
    for pattern in weights or [""]:
        try:
            folder = snapshot([pattern] if pattern else [])
        except FileNotFoundError:
            continue
        if not pattern or any(Path(folder).glob(pattern)):
            return folder
    at = f" at revision {revision}" if revision else ""
    text = f"{what} {name}{at} was not fetched before, or not completely, and the hub is not to be used or cannot be reached"
    raise ModelError(f"{text}; unset HF_HUB_OFFLINE, check the network and HF_ENDPOINT, or give a local folder or .gguf file")


def _fetch_file(name: str, file: str, config: ModelConfig) -> str:
    from huggingface_hub import hf_hub_download

    return _guarded(
        lambda: hf_hub_download(name, file, revision=config.revision, cache_dir=config.download_dir), name, config.revision, "model"
    )


def _guarded(call: Callable[[], str], name: str, revision: str | None, what: str) -> str:
    """Run a download; its failure as one sentence."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001  the hub's client raises what its HTTP library raises
        problem = _problem(error, name, revision, what)
        raise problem or ModelError(
            f"{what} {name} could not be fetched: {_first_line(error)}; run the same command again, files that are complete are kept"
        ) from None


def _problem(error: Exception, name: str, revision: str | None, what: str) -> ModelError | None:
    """What the hub answered, in words. None when it did not answer."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return ModelError(f"{what} {name} is gated: accept its terms at {hub}/{name} and set HF_TOKEN to a token of that account")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"{what} {name} has no revision {revision}; see {hub}/{name}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(f"{what} {name}: no such file or folder, and {hub} has no such model, or a private one (then set HF_TOKEN)")
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, FileNotFoundError):
        return ModelError(f"{what} {name} has no such file: {_first_line(error)}")
    if isinstance(error, errors.HfHubHTTPError):
        status: Any = getattr(error.response, "status_code", None)
        if status in (401, 403):
            return ModelError(f"{hub} refuses {what} {name} (HTTP {status}); is HF_TOKEN valid and allowed to read it?")
    return None


def _without_weights(name: str, files: list[str], load_format: str) -> ModelError:
    ggufs = [file for file in files if file.endswith(".gguf")]
    if ggufs:
        return ModelError(f"{name} holds GGUF files; name one of them: {', '.join(f'{name}/{file}' for file in ggufs[:20])}")
    return ModelError(f"{name} has no weights for --load-format {load_format}")


def _wanted(file: str, pattern: str) -> bool:
    return fnmatch(file, pattern) and not any(fnmatch(file, never) for never in _NEVER)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
