"""AWQ's layout, against a packer written from its description, and the way from a checkpoint's settings to a served model."""

from __future__ import annotations

import pytest
import torch
from oarlock_awq import recognises
from oarlock_awq.reader import Awq, unpack

SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def packed(values: torch.Tensor) -> torch.Tensor:
    """[rows, columns] of 0 .. 15: half byte j of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[j] of its eight."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= values[:, column::8].long() << (4 * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def test_unpacking_is_the_inverse_of_packing() -> None:
    values = torch.randint(0, 16, (5, 48), dtype=torch.uint8)
    assert torch.equal(unpack(packed(values)), values)


def test_a_word_of_known_columns() -> None:
    assert unpack(torch.tensor([[0x75316420]], dtype=torch.int32)).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_weights_are_codes_less_zeros_times_scales() -> None:
    q, z = torch.randint(0, 16, (64, 24)), torch.randint(0, 16, (2, 24))
    scales = torch.rand(2, 24).half()
    found = Awq(SETTINGS).linear("model.layers.0.mlp.up_proj", False)
    assert found is not None
    tensors = {"qweight": packed(q), "qzeros": packed(z), "scales": scales}
    assert {name: (s.shape, s.dtype or scales.dtype) for name, s in found.tensors(24, 64).items()} == {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}
    common = found.read(tensors, 24, 64)
    got = (common.codes.float() - common.zeros.float().repeat_interleave(32, 1)) * common.scales.repeat_interleave(32, 1)
    want = (q.float() - z.float().repeat_interleave(32, 0)) * scales.float().repeat_interleave(32, 0)
    assert torch.equal(got, want.t())


def test_heads_and_modules_that_are_named_stay_plain() -> None:
    method = Awq({**SETTINGS, "modules_to_not_convert": ["mlp.gate"]})
    assert method.linear("lm_head", True) is None
    assert method.linear("model.layers.3.mlp.gate", False) is None
    assert method.linear("model.layers.3.mlp.down_proj", False) is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [({"bits": 8}, "bits is 8"), ({"group_size": 0}, "group_size is 0"), ({"version": "gemv"}, "version is 'gemv'"), ({"zero_point": False}, "zero_point False")],
)
def test_other_settings_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Awq({**SETTINGS, **change})


def test_sizes_that_do_not_fit_are_refused() -> None:
    found = Awq(SETTINGS).linear("a", False)
    assert found is not None
    with pytest.raises(ValueError, match="groups of 32; this linear has 24 outputs and 40 inputs"):
        found.tensors(24, 40)


def test_settings_of_older_tools_are_recognised() -> None:
    assert recognises(SETTINGS) and recognises({"w_bit": 4, "q_group_size": 128})
    assert not recognises({"quant_method": "gptq", "bits": 4})
