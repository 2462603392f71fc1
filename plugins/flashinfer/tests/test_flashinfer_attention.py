"""When FlashInfer serves and why not; its attention under the kit over a stand-in. Never on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oarlock.backend_api.runtime import AttentionParams
from oarlock.conformance import kit
from oarlock.conformance.subject import Subject

import oarlock_flashinfer

sys.path.insert(0, str(Path(__file__).parent))  # `import flashinfer_stub`

import flashinfer_stub

ASKED = {"kind": "full", "dtype": "bfloat16", "head_dim": 128, "num_heads": 32, "num_kv_heads": 8, "block_size": 16, "window": None, "softcap": None}


@pytest.fixture
def stand_in(monkeypatch):
    flashinfer_stub.CALLS.clear()
    flashinfer_stub.put_in_place(monkeypatch)
    monkeypatch.setattr(oarlock_flashinfer, "capability", lambda device: (9, 0))
    yield flashinfer_stub
    sys.modules.pop("oarlock_flashinfer.paged", None)


def reasons(chip: tuple[int, int] = (9, 0), **asked: Any) -> str:
    found = oarlock_flashinfer.supports(chip, **{**ASKED, **asked})
    assert found.ok == (not found.reasons)
    return "; ".join(found.reasons)


def test_without_the_package_the_reason_is_how_to_install_it(monkeypatch):
    monkeypatch.setattr(oarlock_flashinfer.importlib.util, "find_spec", lambda name: None)
    assert reasons() == "the package flashinfer is not installed (pip install flashinfer-python)"


@pytest.mark.parametrize(
    ("chip", "asked", "words"),
    [
        ((9, 0), {}, ""),
        ((10, 0), {"window": 512, "head_dim": 256, "dtype": "float16", "block_size": 64}, ""),
        ((8, 0), {}, "needs compute capability 9.0, this GPU has 8.0"),
        ((9, 0), {"dtype": "float32"}, "computes in bfloat16 and float16, not in float32"),
        ((9, 0), {"head_dim": 80}, "serves heads of 64, 128, 256, not of 80"),
        ((9, 0), {"block_size": 8}, "serves blocks of 16, 32, 64, 128 tokens, not of 8"),
        ((9, 0), {"num_kv_heads": 1}, "at most 16 query heads for each of the cache, not 32"),
        ((9, 0), {"softcap": 30.0}, "no soft cap"),
    ],
)
def test_what_it_serves(stand_in, chip, asked, words):
    assert words in reasons(chip, **asked) and bool(words) == bool(reasons(chip, **asked))


def test_it_is_offered_on_nvidia_gpus_alone_and_above_their_own(monkeypatch):
    assert oarlock_flashinfer.attention(SimpleNamespace(torch_device=torch.device("cpu"))) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    (spec,) = oarlock_flashinfer.attention(SimpleNamespace(torch_device=torch.device("cuda", 0)))
    assert spec.priority > 10 and spec.kv_dtypes == ("auto",)


def test_the_kit_over_the_stand_in(stand_in):
    """On the host's tensors, where the plugin is told that they are a GPU's: its attention outranks the processor's own."""
    served = r"\[bfloat16,\w+,heads=(4/2,dim=(64|128)|16/2,dim=64)(,block=(32|128))?(,window=(1|5|24))?\]"
    report = kit.run(Subject.named("cpu").selection, kit.Choice(kit.parse_levels("3"), pattern=served, full=True))
    bad = [(r.id, r.detail) for r in report.results if r.status in ("fail", "error")]
    assert not bad and sum(r.status == "pass" for r in report.results) >= 60
    assert min(stand_in.CALLS.count(call) for call in ("decode", "plan", "run")) >= 60


def test_a_layer_of_another_scale_and_padded_rows(stand_in):
    from oarlock_flashinfer.paged import FlashInferAttention

    made = FlashInferAttention(16, torch.float32, AttentionParams(2, 1, 64, 0.125))
    cache = tuple(torch.randn(shape) for shape in made.kv_layout(4))
    tables, query = torch.tensor([[1, 2], [0, 0]], dtype=torch.int32), torch.randn(2, 2, 64)
    decodes = made.metadata(tables, torch.tensor([20, 0], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32), 1, 2)
    out = made.attend(query, cache, decodes, made.params)
    assert bool(out[1].eq(0).all()) and bool(out[0].ne(0).any())
    chunks = made.metadata(tables, torch.tensor([20, 0], dtype=torch.int32), torch.tensor([0, 1, 1], dtype=torch.int32), 2, 2)
    once = made.attend(query, cache, chunks, made.params)
    assert torch.allclose(once[0], out[0], atol=1e-5) and bool(once[1].eq(0).all())
    doubled = made.attend(query, cache, chunks, AttentionParams(2, 1, 64, 0.25))
    assert torch.allclose(doubled[0], made.attend(query, cache, decodes, AttentionParams(2, 1, 64, 0.25))[0], atol=1e-5)
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        made.attend(query, cache, decodes, AttentionParams(2, 1, 64, 0.125, alibi_slopes=torch.ones(2)))
    copied = made.copy_blocks(cache, torch.tensor([1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32))
    assert copied[0] is cache[0] and torch.equal(cache[1][3], cache[1][1])


def test_a_warm_up_without_tokens_is_planned_as_a_step_with_some(stand_in):
    from oarlock_flashinfer.paged import FlashInferAttention

    made = FlashInferAttention(16, torch.float32, AttentionParams(2, 1, 64, 0.125))
    tables, lens, starts = (torch.zeros(shape, dtype=torch.int32) for shape in ((2, 2), (2,), (3,)))
    chunks = made.metadata(tables, lens, starts, 40, 41)
    assert [row[:2] for row in chunks.wrapper.rows] == [(0, 32), (32, 32)] and chunks.wrapper.rows[0][3] == 32
    assert not lens.any() and not starts.any()  # what it was given is as it was
    cache = tuple(torch.zeros(shape) for shape in made.kv_layout(1))
    assert made.attend(torch.zeros(41, 2, 64), cache, chunks, made.params).shape == (41, 2, 64)
