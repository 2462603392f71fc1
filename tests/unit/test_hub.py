"""Local paths, and names that can be no model. Fetching is tested in tests/runtime/test_loader_hub.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from oarlock.config.sections import ModelConfig
from oarlock.errors import ConfigError, ModelError
from oarlock.hub import resolve_model, resolve_tokenizer


def test_local_paths_are_taken_as_they_are_and_no_client_is_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys\nfrom oarlock.hub import resolve_model, resolve_tokenizer\nfrom oarlock.config.sections import ModelConfig\n"
        f"c = ModelConfig({str(tmp_path)!r})\nassert resolve_model(c) == resolve_tokenizer(c, resolve_model(c)) == {str(tmp_path)!r}\n"
        "assert not {'huggingface_hub', 'httpx', 'requests', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_folder_with_one_gguf_file_means_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve_model(ModelConfig(str(tmp_path))) == str(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 \.gguf files; name one of them: a\.gguf, b\.gguf"):
        resolve_model(ModelConfig(str(tmp_path)))


@pytest.mark.parametrize("name", ["./absent", "/no/such/folder", "a/b/c", "absent folder"])
def test_a_path_that_is_missing_never_asks_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder, and not a hub name"):
        resolve_model(ModelConfig(name))


def test_a_revision_of_a_local_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--revision dev has no meaning") as caught:
        resolve_model(ModelConfig(str(tmp_path), revision="dev"))
    assert caught.value.option == "--revision"
    with pytest.raises(ConfigError, match="--tokenizer-revision"):
        resolve_tokenizer(ModelConfig("m", tokenizer=str(tmp_path), tokenizer_revision="dev"), "m")
