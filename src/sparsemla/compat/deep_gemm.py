"""DeepGEMM's indexer interface: ``import sparsemla.compat.deep_gemm as deep_gemm``.

Arguments, defaults and layouts are those of DeepGEMM's functions for the scores of the lightning
indexer. Head counts, page sizes, query tokens of a request and devices are not limited as theirs
are. What they leave unwritten, columns outside a row's keys, is -inf here whether ``clean_logits``
is set or not. FP4 queries and keys are not served.
"""

import dataclasses
from typing import cast

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.checks import FLOATS, INTEGERS, Checker
from sparsemla.compat._cache import cache_of
from sparsemla.formats import INDEX_FP8, e4m3_format
from sparsemla.ops import indexer_scores, indexer_scores_paged

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
]

MAX_WORKSPACE_BYTES = 256 << 20
"""Bound on what exists beside a compressed result at any time; one row takes what it needs."""


def get_num_sms() -> int:
    """Multiprocessors of the current GPU; 1 without one.

    Source: DeepGEMM ``get_num_sms``.
    """
    if not torch.cuda.is_available():
        return 1
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Scores of contiguous keys, each query row over its own range: :func:`indexer_scores`.

    ``out[m, n] = kv[1][n] * sum_h weights[m, h] * relu(<q[m, h], kv[0][n]>)`` for
    ``cu_seq_len_k_start[m] <= n < cu_seq_len_k_end[m]``, -inf elsewhere. With ``max_seqlen_k`` the
    result is compressed: its column j is the key ``cu_seq_len_k_start[m] + j``.

    Args:
        q: float8_e4m3fn ``[seq_len, num_heads, head_dim]``.
        kv: float8_e4m3fn ``[seq_len_kv, head_dim]`` and its scales, float32 ``[seq_len_kv]``.
        weights: float32, bfloat16 or float16 ``[seq_len, num_heads]``.
        cu_seq_len_k_start: int32 ``[seq_len]``, first key of each row.
        cu_seq_len_k_end: int32 ``[seq_len]``, one past its last key.
        clean_logits: not looked at: columns outside a row's keys are always -inf.
        max_seqlen_k: columns of a compressed result; 0 for a full one.

    Returns:
        float32 ``[seq_len, seq_len_kv]``, or ``[seq_len, max_seqlen_k]``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepGEMM ``fp8_mqa_logits``.

    >>> q, keys = torch.ones(1, 4, 32), torch.ones(3, 32)
    >>> q, keys = q.to(torch.float8_e4m3fn), keys.to(torch.float8_e4m3fn)
    >>> start, end = torch.tensor([1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    >>> fp8_mqa_logits(q, (keys, torch.arange(3.0)), torch.ones(1, 4), start, end)
    tensor([[-inf, 128., 256.]])
    >>> fp8_mqa_logits(q, (keys, torch.arange(3.0)), torch.ones(1, 4), start, end, False, 2)
    tensor([[128., 256.]])
    """
    check = Checker("fp8_mqa_logits")
    keys = _pair(check, "kv", kv)
    return _mqa_logits(check, q, keys, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k)


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """:func:`fp8_mqa_logits` with ``q`` as a pair, whose second is None, and a dtype of the result.

    Args:
        q: float8_e4m3fn ``[seq_len, num_heads, head_dim]``, and None.
        kv: as in :func:`fp8_mqa_logits`, as are the arguments that follow.
        logits_dtype: float32 or bfloat16.

    Raises:
        TypeError, ValueError: as :func:`fp8_mqa_logits`; and FP4 queries.

    Source: DeepGEMM ``fp8_fp4_mqa_logits``.
    """
    check = Checker("fp8_fp4_mqa_logits")
    _logits_dtype(check, logits_dtype)
    queries, keys = _fp8_queries(check, q), _pair(check, "kv", kv)
    bounds = cu_seq_len_k_start, cu_seq_len_k_end
    return _mqa_logits(check, queries, keys, weights, *bounds, max_seqlen_k, logits_dtype)


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """The schedule that :func:`fp8_paged_mqa_logits` asks for and does not look at: zeros.

    It has DeepGEMM's shape and dtype, for callers that keep it in a buffer.

    Args:
        context_lens: on whose device the result is.
        block_kv: not looked at.
        num_sms: rows of the result, less one.
        indices: not looked at.

    Returns:
        int32 ``[num_sms + 1, 2]``.

    Source: DeepGEMM ``get_paged_mqa_logits_metadata``.

    >>> get_paged_mqa_logits_metadata(torch.tensor([[100]], dtype=torch.int32), 64, 132).shape
    torch.Size([133, 2])
    """
    check = Checker("get_paged_mqa_logits_metadata")
    check.kind("context_lens", context_lens, Tensor)
    check.positive("num_sms", num_sms)
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: object,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """Scores of the paged keys of each request: :func:`indexer_scores_paged`.

    Row ``b * next_n + j`` of the result has the scores of the keys of request ``b`` that the
    request's token ``j`` sees, by position, and -inf behind them.

    Args:
        q: float8_e4m3fn ``[batch_size, next_n, num_heads, head_dim]``.
        kv_cache: uint8 ``[num_blocks, block_kv, 1, head_dim + 4]``: in each page the e4m3 values of
            its rows, then their float32 scales; any page size.
        weights: float32, bfloat16 or float16 ``[batch_size * next_n, num_heads]``.
        context_lens: int32 ``[batch_size, next_n]``, keys that each token sees; or
            ``[batch_size]``, keys of each request, of which token ``j`` sees
            ``context_lens[b] - next_n + 1 + j``.
        block_table: int32 ``[batch_size, W]``.
        schedule_meta: not looked at.
        max_context_len: columns of the result; longer rows are cut.
        clean_logits: not looked at: columns behind a row's keys are always -inf.
        indices: not looked at: tells rows of one request, which ``block_table`` does too.

    Returns:
        float32 ``[batch_size * next_n, max_context_len]``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepGEMM ``fp8_paged_mqa_logits``.

    >>> q = torch.randn(2, 3, 64, 128).to(torch.float8_e4m3fn)
    >>> kv_cache = torch.zeros(4, 64, 1, 132, dtype=torch.uint8)
    >>> lens = torch.tensor([[98, 99, 100], [5, 6, 7]], dtype=torch.int32)
    >>> table = torch.tensor([[0, 2], [3, 1]], dtype=torch.int32)
    >>> schedule = get_paged_mqa_logits_metadata(lens, 64, get_num_sms())
    >>> fp8_paged_mqa_logits(q, kv_cache, torch.ones(6, 64), lens, table, schedule, 128).shape
    torch.Size([6, 128])
    """
    check = Checker("fp8_paged_mqa_logits")
    return _paged_mqa_logits(
        check, q, kv_cache, weights, context_lens, block_table, max_context_len
    )


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: object,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """:func:`fp8_paged_mqa_logits` with ``q`` as a pair and a dtype of the result.

    Args:
        q: float8_e4m3fn ``[batch_size, next_n, num_heads, head_dim]``, and None.
        kv_cache: as in :func:`fp8_paged_mqa_logits`, as are the other arguments.
        logits_dtype: float32 or bfloat16.

    Raises:
        TypeError, ValueError: as :func:`fp8_paged_mqa_logits`; and FP4 queries.

    Source: DeepGEMM ``fp8_fp4_paged_mqa_logits``.
    """
    check = Checker("fp8_fp4_paged_mqa_logits")
    _logits_dtype(check, logits_dtype)
    queries = _fp8_queries(check, q)
    lengths = context_lens, block_table, max_context_len
    return _paged_mqa_logits(check, queries, kv_cache, weights, *lengths).to(logits_dtype)


def _pair(check: Checker, name: str, value: object) -> tuple[Tensor, Tensor]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{check.op}: {name} must be a pair, got {type(value).__name__}")
    return value[0], value[1]


def _fp8_queries(check: Checker, q: object) -> Tensor:
    queries, scales = _pair(check, "q", q)
    if scales is not None:
        raise ValueError(
            f"{check.op}: q must be a float8_e4m3fn tensor and None, got scales: FP4 is not served"
        )
    return queries


def _logits_dtype(check: Checker, dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"{check.op}: logits_dtype must be float32 or bfloat16, got {dtype}")


def _mqa_logits(
    check: Checker,
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    max_seqlen_k: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    keys, scales = kv
    check.tensor("q", q, "seq_len num_heads head_dim", torch.float8_e4m3fn)
    check.tensor("kv[0]", keys, "seq_len_kv head_dim", torch.float8_e4m3fn)
    check.tensor("kv[1]", scales, "seq_len_kv", torch.float32)
    check.tensor("weights", weights, "seq_len num_heads", FLOATS)
    starts = check.tensor("cu_seq_len_k_start", starts, "seq_len", INTEGERS)
    ends = check.tensor("cu_seq_len_k_end", ends, "seq_len", INTEGERS)
    if isinstance(max_seqlen_k, int) and max_seqlen_k == 0:
        return indexer_scores(q, weights, keys, scales, starts, ends).to(dtype)
    check.positive("max_seqlen_k", max_seqlen_k)
    return _compressed(q, weights, keys, scales, starts, ends, max_seqlen_k, dtype)


def _compressed(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    scales: Tensor,
    starts: Tensor,
    ends: Tensor,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    """Scores with each row moved to its first key, from some full rows at a time."""
    num_rows, num_keys = q.shape[0], keys.shape[0]
    out = torch.empty(num_rows, width, dtype=dtype, device=q.device)
    columns = torch.arange(width, device=q.device)
    # At least one more column, -inf, is what columns behind the last key are taken from; so many
    # that every row is aligned as the first one is.
    full_width = (num_keys // 64 + 1) * 64
    row_bytes = 4 * full_width + (8 + 4) * width  # and sources, and what is taken from them
    at_once = max(1, MAX_WORKSPACE_BYTES // row_bytes)
    shape = min(at_once, num_rows), full_width
    full = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    for first in range(0, num_rows, at_once):
        rows = slice(first, min(first + at_once, num_rows))
        part = full[: rows.stop - first]
        bounds = starts[rows], ends[rows]
        indexer_scores(q[rows], weights[rows], keys, scales, *bounds, out=part[:, :num_keys])
        sources = starts[rows, None].clamp_min(0) + columns
        out[rows] = part.gather(1, sources.clamp_max_(num_keys))
    return out


def _paged_mqa_logits(
    check: Checker,
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
) -> Tensor:
    check.tensor("q", q, "batch_size next_n num_heads head_dim", torch.float8_e4m3fn)
    batch_size, next_n, _, head_dim = q.shape
    check.bind("batch_size*next_n", batch_size * next_n)
    check.bind("head_dim+4", head_dim + 4)
    check.tensor("kv_cache", kv_cache, "num_blocks block_kv 1 head_dim+4", torch.uint8)
    check.tensor("weights", weights, "batch_size*next_n num_heads", FLOATS)
    per_row = isinstance(context_lens, Tensor) and context_lens.dim() == 2
    shape = "batch_size next_n" if per_row else "batch_size"
    context_lens = check.tensor("context_lens", context_lens, shape, INTEGERS)
    block_table = check.tensor("block_table", block_table, "batch_size W", INTEGERS)
    check.positive("max_context_len", max_context_len)
    out = indexer_scores_paged(
        q,
        weights.unflatten(0, (batch_size, next_n)),
        _index_cache(check, kv_cache[:, :, 0], head_dim),
        block_table,
        context_lens,
        max_seq_len=max_context_len,
    )
    return out.flatten(0, 1)


def _index_cache(check: Checker, pages: Tensor, head_dim: int) -> PagedCache:
    """Pages of keys with their scales behind them."""
    if head_dim == INDEX_FP8.head_dim:
        return cache_of(check, "kv_cache", pages, INDEX_FP8)
    # No name stands for this format: its fields do as values and scales of their own.
    format = dataclasses.replace(
        INDEX_FP8, head_dim=head_dim, value_dim=head_dim, fp8_dim=head_dim, scale_block=head_dim
    )
    fields = cache_of(check, "kv_cache", pages, format).fields()
    keys, scales = cast(Tensor, fields.fp8), fields.scales
    return PagedCache(keys, e4m3_format(head_dim, head_dim, head_dim), scales)
