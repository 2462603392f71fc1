"""The file of --quantization-param-path: read whole, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oarlock.config.resolve import from_kwargs
from oarlock.errors import ConfigError
from oarlock.kv_scales import read_scales

GOOD: dict[str, Any] = {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": 2}, "1": {"0": 1.0, "1": 0.25}}}}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one value replaced; None removes it."""
    found = json.loads(json.dumps(GOOD))
    *parents, last = path.split("/")
    at = found
    for part in parents:
        at = at[part]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return found


def read(tmp_path: Path, content: Any, model_type: str | None = "llama") -> tuple[tuple[float, ...], ...]:
    (tmp_path / "scales.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return read_scales(str(tmp_path / "scales.json"), model_type, 2, 2)


def test_every_rank_gets_its_layers(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD) == ((0.5, 2.0), (1.0, 0.25))
    assert read(tmp_path, changed("model_type", None), "anything") == ((0.5, 2.0), (1.0, 0.25))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold an object with kv_cache"),
        (changed("kv_cache", None), "must hold an object with kv_cache"),
        (changed("kv_cache/scaling_factor", [1]), "must hold an object with kv_cache"),
        (changed("model_type", "opt"), "is for model_type 'opt', the model is 'llama'"),
        (changed("kv_cache/dtype", "float8_e5m2"), "kv_cache.dtype 'float8_e5m2'; float8_e4m3fn"),
        (changed("kv_cache/scaling_factor/1", None), "the ranks 0; --tensor-parallel-size 2 needs 0, 1"),
        (changed("kv_cache/scaling_factor/2", {}), "the ranks 0, 1, 2; --tensor-parallel-size 2 needs 0, 1"),
        (changed("kv_cache/scaling_factor/1/1", None), "has 1 layers for rank 1; the model has 2, 0 to 1, and 1 is missing"),
        (changed("kv_cache/scaling_factor/0/2", 1.0), "has 3 layers for rank 0; the model has 2"),
        (changed("kv_cache/scaling_factor/0", 1.0), "has 1.0 for rank 0"),
        (changed("kv_cache/scaling_factor/0/0", "1"), "the scale '1' for layer 0 of rank 0"),
        (changed("kv_cache/scaling_factor/0/0", 0), "the scale 0 for layer 0 of rank 0; a number above 0"),
        (changed("kv_cache/scaling_factor/0/0", float("inf")), "the scale inf"),
        (changed("kv_cache/scaling_factor/0/0", True), "the scale True"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content)
    text = str(caught.value)
    assert text.startswith(f"--quantization-param-path {tmp_path}/scales.json: ") and words in text and "\n" not in text


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read: No such file"):
        read_scales(str(tmp_path / "nowhere.json"), "llama", 2, 1)


@pytest.mark.parametrize("dtype", ["auto", "fp8_e5m2"])
def test_scales_need_a_cache_that_takes_them(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization_param_path holds scales for an fp8_e4m3 KV cache, but kv_cache_dtype is {dtype}; set it to fp8"):
        from_kwargs("m", quantization_param_path="s.json", kv_cache_dtype=dtype)


def test_fp8_is_e4m3() -> None:
    cache = from_kwargs("m", kv_cache_dtype="fp8", quantization_param_path="s.json").engine.cache
    assert (cache.kv_cache_dtype, cache.kv_scales_path) == ("fp8_e4m3", "s.json")
