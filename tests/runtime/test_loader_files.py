"""Checkpoints in folders: every load format, prefixes, and what a broken file says."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oarlock.config.sections import ModelConfig
from oarlock.errors import ConfigError, ModelError, WeightMismatch
from oarlock.model_summary import load_summary
from oarlock.runtime.loader import Checkpoint, open_checkpoint, progress
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 64,
}
TENSORS = {
    "model.embed_tokens.weight": torch.randn(16, 8),
    "model.norm.weight": torch.randn(8).bfloat16(),
    "model.layers.0.mlp.up_proj.weight": torch.randn(4, 8).half(),
    "model.layers.0.g_idx": torch.arange(8, dtype=torch.int32),
    "lm_head.weight": torch.randn(16, 8),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def opened(folder: Path, load_format: str = "auto", changes: dict[str, Any] | None = None, **config: Any) -> Checkpoint:
    if changes:
        (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    config_ = ModelConfig(str(folder), load_format=load_format, **config)
    return open_checkpoint(load_summary(config_), config_)


def check(checkpoint: Checkpoint, expected: dict[str, torch.Tensor] = TENSORS) -> None:
    assert checkpoint.names() == set(expected)
    for name, tensor in expected.items():
        got = checkpoint.get(name)
        assert checkpoint.shape(name) == tuple(tensor.shape) and got.dtype == tensor.dtype and torch.equal(got, tensor), name
        cast = checkpoint.get(name, torch.float16)
        assert cast.dtype == (torch.float16 if tensor.is_floating_point() else tensor.dtype), name
    with pytest.raises(WeightMismatch, match="no tensor absent"):
        checkpoint.get("absent")
    with pytest.raises(WeightMismatch, match="no tensor absent"):
        checkpoint.shape("absent")
    checkpoint.close()


def save_sharded(folder: Path) -> dict[str, str]:
    names = sorted(TENSORS)
    index = {}
    for number, part in enumerate((names[:2], names[2:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: TENSORS[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return index


# ---------------------------------------------------------------- formats
def test_one_safetensors_file(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    check(opened(folder))
    check(opened(folder, "safetensors"))


def test_sharded_safetensors_and_no_duplicates_beside_them(folder: Path) -> None:
    save_sharded(folder)
    save_file(TENSORS, folder / "consolidated.safetensors")
    check(opened(folder))


def test_torch_files_of_both_suffixes_and_both_encodings(folder: Path) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin")
    torch.save({"lr": torch.ones(1)}, folder / "optimizer.pt")
    torch.save({"args": torch.ones(1)}, folder / "training_args.bin")
    check(opened(folder))
    with pytest.raises(ModelError, match=r"--load-format pt: no file matches \*\.pt"):
        opened(folder, "pt")
    torch.save({"state_dict": TENSORS}, folder / "model.pt", _use_new_zipfile_serialization=False)
    check(opened(folder, "pt"))


def test_auto_prefers_safetensors_then_bin_then_pt(folder: Path) -> None:
    for suffix, value in (("pt", 1.0), ("bin", 2.0)):
        torch.save({"model.norm.weight": torch.full((2,), value)}, folder / f"model.{suffix}")
    assert opened(folder).get("model.norm.weight")[0] == 2.0
    save_file({"model.norm.weight": torch.full((2,), 3.0)}, folder / "model.safetensors")
    assert opened(folder).get("model.norm.weight")[0] == 3.0
    (folder / "model.safetensors").unlink()
    (folder / "model.bin").unlink()
    assert opened(folder).get("model.norm.weight")[0] == 1.0


def test_npcache_is_written_once_and_read_afterwards(folder: Path) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin")
    check(opened(folder, "npcache"))
    names = json.loads((folder / "np" / "weight_names.json").read_text())
    assert names["dtypes"]["model.norm.weight"] == "bfloat16"
    stored = np.load(folder / "np" / "model.embed_tokens.weight")
    np.testing.assert_array_equal(stored, TENSORS["model.embed_tokens.weight"].numpy())
    np.save((folder / "np" / "model.embed_tokens.weight").open("wb"), stored * 0)
    assert opened(folder, "npcache").get("model.embed_tokens.weight").abs().sum() == 0, "the second load reads the cache"
    os.utime(folder / "pytorch_model.bin", (1, 1))
    check(opened(folder, "npcache"))


def test_npcache_is_made_by_one_of_several_that_start_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin")
    writes = []
    from oarlock.runtime.loader.torch_files import NumpyCacheCheckpoint

    original = NumpyCacheCheckpoint._write
    monkeypatch.setattr(NumpyCacheCheckpoint, "_write", lambda self, *args: writes.append(1) or original(self, *args))
    threads = [threading.Thread(target=opened, args=(folder, "npcache")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writes == [1]


def test_npcache_says_what_it_cannot_do(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"--load-format npcache: no file matches \*\.bin"):
        opened(folder, "npcache")
    torch.save({"../evil": torch.ones(1)}, folder / "a.bin")
    with pytest.raises(ModelError, match=r"'\.\./evil' cannot be a file name"):
        opened(folder, "npcache")
    (folder / "np").rename(folder / "old")
    (folder / "np").write_text("a file in the way")
    with pytest.raises(ModelError, match="npcache cannot write"):
        opened(folder, "npcache")


def test_dummy_weights_are_small_seeded_and_need_no_files(folder: Path) -> None:
    checkpoint = opened(folder, "dummy", seed=3)
    assert checkpoint.is_dummy and checkpoint.names() == set()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        tensor = checkpoint.get_shaped("a", (64, 64), dtype)
        # The nearest numbers that an 8-bit float has are 0 and 2 ** -9.
        limit = 2**-9 if dtype == torch.float8_e4m3fn else 1.004e-3
        assert tensor.dtype == dtype and tensor.float().abs().max() <= limit, dtype
        assert dtype == torch.float8_e4m3fn or tensor.float().std() > 4e-4
    same = opened(folder, "dummy", seed=3).get_shaped("a", (64, 64), torch.float32)
    assert torch.equal(same, checkpoint.get_shaped("a", (64, 64), torch.float32))
    assert not torch.equal(same, checkpoint.get_shaped("b", (64, 64), torch.float32))
    assert not torch.equal(same, opened(folder, "dummy", seed=4).get_shaped("a", (64, 64), torch.float32))
    large = checkpoint.get_shaped("c", (2048, 1500), torch.bfloat16)
    assert large.float().std() > 4e-4 and not torch.equal(large[0], large[1]) and large[0].unique().numel() > 100
    rows = large[:, :8].float()
    assert rows.unique(dim=0).shape[0] == 2048  # what is repeated begins in every row elsewhere
    with pytest.raises(WeightMismatch, match="does not know the shape of a"):
        checkpoint.get("a")


def test_other_load_formats_are_refused(folder: Path) -> None:
    for kind, words in (("tensorizer", "is not supported; auto, safetensors"), ("gguf", r"needs a \.gguf file")):
        with pytest.raises(ConfigError, match=words) as caught:
            opened(folder, kind)
        assert caught.value.option == "--load-format"


# ---------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (
            ["embed_tokens.weight", "layers.0.x", "lm_head.weight"],
            {"model.embed_tokens.weight": 0, "model.layers.0.x": 1, "lm_head.weight": 2},
        ),
        (["decoder.embed_tokens.weight", "decoder.layers.0.x"], {"model.decoder.embed_tokens.weight": 0, "model.decoder.layers.0.x": 1}),
        (["wte.weight", "h.0.x"], {"transformer.wte.weight": 0, "transformer.h.0.x": 1}),
        (
            ["language_model.model.layers.0.x", "language_model.lm_head.weight", "vision_tower.y"],
            {"model.layers.0.x": 0, "lm_head.weight": 1},
        ),
        (["model.language_model.layers.0.x", "model.vision_tower.y", "lm_head.weight"], {"model.layers.0.x": 0, "lm_head.weight": 2}),
        (["model.layers.0.x", "lm_head.weight"], {"model.layers.0.x": 0, "lm_head.weight": 1}),
    ],
)
def test_prefixes_are_set_right(folder: Path, stored: list[str], expected: dict[str, int]) -> None:
    save_file({name: torch.full((2,), float(at)) for at, name in enumerate(stored)}, folder / "model.safetensors")
    checkpoint = opened(folder)
    assert {name: int(checkpoint.get(name)[0]) for name in checkpoint.names()} == expected


def test_a_head_that_repeats_tied_embeddings_is_left_out(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")
    assert "lm_head.weight" not in opened(folder, changes={"tie_word_embeddings": True}).names()


# ---------------------------------------------------------------- faults
def test_a_truncated_file_names_file_and_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file(TENSORS, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(WeightMismatch, match=r"model\.safetensors is truncated: tensor \S+ ends at byte \d+, the file at \d+"):
        opened(folder)
    for size in (0, 4, 8, 40):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
            opened(folder)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(ModelError, match="Git LFS"):
        opened(folder)


def test_missing_shards_and_tensors_are_named(folder: Path) -> None:
    index = save_sharded(folder)
    (folder / index["model.norm.weight"]).unlink()
    with pytest.raises(WeightMismatch, match=r"tensor \S+ is in model-0000\d-of-00002\.safetensors, but that file is missing"):
        opened(folder)
    index = save_sharded(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index | {"model.absent": index["lm_head.weight"]}}))
    with pytest.raises(WeightMismatch, match=r"tensor model\.absent is in model-00001-of-00002\.safetensors, but it is not there"):
        opened(folder)
    with pytest.raises(ModelError, match="no weights for --load-format auto"):
        (folder / "empty").mkdir()
        (folder / "empty" / "config.json").write_text(json.dumps(CONFIG))
        opened(folder / "empty")


def test_a_tensor_in_two_files_is_named(folder: Path) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        save_file({"model.norm.weight": torch.ones(2)}, folder / file)
    with pytest.raises(WeightMismatch, match=r"model\.norm\.weight is in both a\.safetensors and b\.safetensors"):
        opened(folder)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(os.environ["EVIL_MARK"])),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_code_is_never_executed(folder: Path, tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "executed"
    monkeypatch.setenv("EVIL_MARK", str(mark))
    torch.save({"model.norm.weight": torch.ones(1), "evil": Evil()}, folder / "m.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ModelError, match=r"m\.bin cannot be read as tensors alone.*does not execute"):
        opened(folder)
    (folder / "m.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ModelError, match=r"m\.bin"):
        opened(folder)
    assert not mark.exists()


def test_broken_torch_files_are_named(folder: Path) -> None:
    torch.save(TENSORS, folder / "m.bin")
    whole = (folder / "m.bin").read_bytes()
    for data in (whole[: len(whole) // 2], b"", b"garbage"):
        (folder / "m.bin").write_bytes(data)
        with pytest.raises(ModelError, match=r"m\.bin"):
            opened(folder)
    torch.save(torch.ones(3), folder / "m.bin")
    with pytest.raises(ModelError, match="does not hold a state dict"):
        opened(folder)


# ---------------------------------------------------------------- progress
def test_progress_shows_a_bar_on_a_terminal_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(progress([1, 2, 3])) == [1, 2, 3]
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(progress(iter([1, 2, 3]), "reading")) == [1, 2, 3]
    captured = capsys.readouterr()
    assert "reading" in captured.err and captured.out == ""
