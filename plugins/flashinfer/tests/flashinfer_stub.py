"""A stand-in for FlashInfer on host tensors: the two entries that the plugin calls, with the parameters of FlashInfer's documentation.

Owns: what they compute, in plain torch; what of their arguments the documentation asks for.
Never: pretends to be FlashInfer to anything but these tests.

Parameters as documented for flashinfer-python 0.6: decode.trtllm_batch_decode_with_kv_cache, prefill.BatchPrefillWithPagedKVCacheWrapper.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch

CALLS: list[str] = []


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window_left: int) -> torch.Tensor:
    """query [q, heads, dim] are the last of [context, kv_heads, dim]."""
    q, context = query.shape[0], keys.shape[0]
    keys, values = (t.repeat_interleave(query.shape[1] // t.shape[1], 1).double() for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double() * scale, keys)
    at = torch.arange(context - q, context)[:, None]
    key = torch.arange(context)
    seen = key <= at
    if window_left >= 0:
        seen &= key >= at - window_left
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values.masked_fill(~seen.any(0)[:, None, None], 0)).to(query.dtype)


def _gathered(cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """[num_pages, kv_heads, page_size, dim] -> [length, kv_heads, dim]"""
    return cache[pages.long()].transpose(1, 2).flatten(0, 1)[:length]


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: Any, workspace_buffer: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int,
    bmm1_scale: Any = 1.0, bmm2_scale: Any = 1.0, window_left: int = -1, out: Any = None, out_dtype: Any = None, o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None, sinks: Any = None, kv_layout: str = "HND", enable_pdl: bool | None = None, backend: str = "auto",
    q_len_per_req: int | None = 1, o_scale: float | None = 1.0, mask: Any = None, max_q_len: int | None = None, cum_seq_lens_q: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
) -> torch.Tensor:  # fmt: skip
    CALLS.append("decode")
    assert kv_layout == "HND" and isinstance(kv_cache, tuple) and len(kv_cache) == 2 and workspace_buffer.dtype == torch.uint8
    assert query.is_contiguous() and block_tables.is_contiguous() and block_tables.shape[0] == seq_lens.shape[0] == query.shape[0]
    assert bmm2_scale == 1.0 and max_seq_len >= int(seq_lens.max()) > 0 and int(seq_lens.min()) > 0
    rows = []
    for row, length in enumerate(seq_lens.tolist()):
        keys, values = (_gathered(cache, block_tables[row], length) for cache in kv_cache)
        rows.append(_attend(query[row : row + 1], keys, values, bmm1_scale, window_left))
    return torch.cat(rows)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False, qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None, paged_kv_indices_buf: Any = None, paged_kv_last_page_len_buf: Any = None, custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None, backend: str = "auto", jit_args: Any = None,
    ) -> None:  # fmt: skip
        assert kv_layout == "HND" and float_workspace_buffer.dtype == torch.uint8

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor, paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None, custom_mask: Any = None,
        packed_custom_mask: Any = None, causal: bool = False, pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None, window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None, non_blocking: bool = True,
    ) -> None:  # fmt: skip
        CALLS.append("plan")
        assert causal and all(t.dtype == torch.int32 for t in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len))
        assert len(paged_kv_indices) == paged_kv_indptr[-1] and int(paged_kv_last_page_len.min()) >= 1 and int(paged_kv_last_page_len.max()) <= page_size
        self.rows = []
        for row in range(len(qo_indptr) - 1):
            pages = paged_kv_indices[paged_kv_indptr[row] : paged_kv_indptr[row + 1]]
            length = max(len(pages) - 1, 0) * page_size + (int(paged_kv_last_page_len[row]) if len(pages) else 0)
            self.rows.append((int(qo_indptr[row]), int(qo_indptr[row + 1]), pages, length))
        self.shape, self.scale, self.window_left, self.dtypes = (num_qo_heads, head_dim_qk), sm_scale, window_left, (q_data_type, kv_data_type)

    def run(self, q: torch.Tensor, paged_kv_cache: Any, *args: Any, out: Any = None, lse: Any = None, return_lse: bool = False) -> torch.Tensor:
        CALLS.append("run")
        assert q.shape[1:] == self.shape and q.dtype == self.dtypes[0] and paged_kv_cache[0].dtype == self.dtypes[1] and q.is_contiguous()
        for begin, end, pages, length in self.rows:
            if end > begin and length:
                keys, values = (_gathered(cache, pages, length) for cache in paged_kv_cache)
                out[begin:end] = _attend(q[begin:end], keys, values, self.scale, self.window_left)
        return out


def put_in_place(monkeypatch: Any) -> None:
    """`import flashinfer` finds this."""
    package, decode, prefill = (ModuleType(name) for name in ("flashinfer", "flashinfer.decode", "flashinfer.prefill"))
    package.__path__ = []  # type: ignore[attr-defined]
    package.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None, is_package=True)
    decode.trtllm_batch_decode_with_kv_cache = trtllm_batch_decode_with_kv_cache  # type: ignore[attr-defined]
    prefill.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    for module in (package, decode, prefill):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "oarlock_flashinfer.paged", raising=False)
