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


@pytest.mark.parametrize("name", ["a/b/c", "absent folder"])
def test_what_is_neither_a_path_nor_a_hub_name_never_asks_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder, and not a hub name"):
        resolve_model(ModelConfig(name))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("./modle", "; did you mean model?"),
        ("modle.gguf", "; did you mean model.gguf?"),
        ("model/smoll/x.gguf", "; model/smoll does not exist"),
        ("model/smol/y.gguf", "; did you mean model/smol/x.gguf?"),
        ("./nothing-like-it", ""),
        ("/no/such/folder", "; /no does not exist"),
        ("elsewhere.gguf", ""),
        ("other\\folder", ""),
    ],
)
def test_a_mistyped_path_is_called_one_and_never_asks_the_hub(name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model/smol").mkdir(parents=True)
    (tmp_path / "model/smol/x.gguf").touch()
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    if name.startswith("model/smoll"):
        name = f"./{name}"
    with pytest.raises(ModelError) as caught:
        resolve_model(ModelConfig(name))
    assert str(caught.value) == f"model {name}: no such file or folder{hint}"


def test_a_revision_of_a_local_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--revision dev has no meaning") as caught:
        resolve_model(ModelConfig(str(tmp_path), revision="dev"))
    assert caught.value.option == "--revision"
    with pytest.raises(ConfigError, match="--tokenizer-revision"):
        resolve_tokenizer(ModelConfig("m", tokenizer=str(tmp_path), tokenizer_revision="dev"), "m")
