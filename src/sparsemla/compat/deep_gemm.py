"""DeepGEMM's indexer interface: ``import sparsemla.compat.deep_gemm as deep_gemm``.

The functions for scores of the lightning indexer, with DeepGEMM's arguments, defaults and layouts.
Any head count, page size, number of query tokens and device is supported. Columns outside a row's
keys are always -inf; DeepGEMM leaves them unwritten unless ``clean_logits`` is set. FP4 queries and
keys are not supported.

Lengths, bounds and tables may be int32, int64 or uint32.
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
"""Limit of the temporary memory for a compressed result; a single row may exceed it."""


def get_num_sms() -> int:
    """Number of SMs of the current GPU, 1 without a GPU.

    Source: DeepGEMM ``get_num_sms``.

    >>> get_num_sms() >= 1
    True
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
    """Indexer scores of contiguous keys, with a range of keys per query row.

    Calls :func:`sparsemla.indexer_scores`.

    ``out[m, n] = kv[1][n] * sum_h weights[m, h] * relu(<q[m, h], kv[0][n]>)`` for
    ``cu_seq_len_k_start[m] <= n < cu_seq_len_k_end[m]``, and -inf for other n. With
    ``max_seqlen_k`` the result is compressed: column j is the key ``cu_seq_len_k_start[m] + j``.

    Args:
        q: float8_e4m3fn ``[seq_len, num_heads, head_dim]``.
        kv: keys, float8_e4m3fn ``[seq_len_kv, head_dim]``, and scales, float32 ``[seq_len_kv]``.
        weights: head weights, float32, bfloat16 or float16 ``[seq_len, num_heads]``.
        cu_seq_len_k_start: ``[seq_len]``, first key of each row.
        cu_seq_len_k_end: ``[seq_len]``, one past the last key of each row.
        clean_logits: ignored.
        max_seqlen_k: columns of a compressed result; 0 for the full result.

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
    check = Checker("fp8_mqa_logits", instead="selected_scores")
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
    """:func:`fp8_mqa_logits` with a pair for ``q`` and a choice of the result's dtype.

    Args:
        q: a pair: float8_e4m3fn ``[seq_len, num_heads, head_dim]``, and None for the FP4 scales.
        kv: as in :func:`fp8_mqa_logits`, like all other arguments.
        logits_dtype: dtype of the result, float32 or bfloat16.

    Raises:
        TypeError, ValueError: as in :func:`fp8_mqa_logits`, or FP4 queries.

    Source: DeepGEMM ``fp8_fp4_mqa_logits``.

    >>> q, keys = torch.ones(1, 4, 32), torch.ones(3, 32)
    >>> q, keys = q.to(torch.float8_e4m3fn), keys.to(torch.float8_e4m3fn)
    >>> start, end = torch.tensor([1]), torch.tensor([3])
    >>> fp8_fp4_mqa_logits((q, None), (keys, torch.arange(3.0)), torch.ones(1, 4), start, end)
    tensor([[-inf, 128., 256.]])
    """
    check = Checker("fp8_fp4_mqa_logits", instead="selected_scores")
    _logits_dtype(check, logits_dtype)
    queries, keys = _fp8_queries(check, q), _pair(check, "kv", kv)
    bounds = cu_seq_len_k_start, cu_seq_len_k_end
    return _mqa_logits(check, queries, keys, weights, *bounds, max_seqlen_k, logits_dtype)


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """A placeholder schedule for :func:`fp8_paged_mqa_logits`, which ignores it.

    It has DeepGEMM's shape and dtype, for callers that copy it to a buffer.

    Args:
        context_lens: any tensor on the device of the result.
        block_kv: ignored.
        num_sms: one less than the rows of the result.
        indices: ignored.

    Returns:
        int32 zeros ``[num_sms + 1, 2]``.

    Raises:
        TypeError: context_lens is not a tensor, or num_sms is not an integer.
        ValueError: num_sms is below 1.

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
    """Indexer scores of the paged keys of each request.

    Calls :func:`sparsemla.indexer_scores_paged`. Row ``b * next_n + j`` has the scores of query
    token ``j`` of request ``b``: column n is the score of the key at position n, and -inf from the
    first key that the token must not see. The formula is in :func:`fp8_mqa_logits`.

    Args:
        q: float8_e4m3fn ``[batch_size, next_n, num_heads, head_dim]``.
        kv_cache: uint8 ``[num_blocks, block_kv, 1, head_dim + 4]``. Each page has the e4m3 values
            of all its rows, then their float32 scales. Any page size.
        weights: head weights, float32, bfloat16 or float16 ``[batch_size * next_n, num_heads]``.
        context_lens: ``[batch_size, next_n]``, number of keys that each token sees; or
            ``[batch_size]``, number of keys of each request, so that token ``j`` sees
            ``context_lens[b] - next_n + 1 + j`` keys.
        block_table: ``[batch_size, W]``, page ids.
        schedule_meta: ignored.
        max_context_len: columns of the result; scores of later keys are dropped.
        clean_logits: ignored.
        indices: ignored; the rows of ``block_table`` already give the request of each query.

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
    check = Checker("fp8_paged_mqa_logits", instead="selected_scores")
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
    """:func:`fp8_paged_mqa_logits` with a pair for ``q`` and a choice of the result's dtype.

    Args:
        q: a pair: float8_e4m3fn ``[batch_size, next_n, num_heads, head_dim]``, and None for the FP4
            scales.
        kv_cache: as in :func:`fp8_paged_mqa_logits`, like all other arguments.
        logits_dtype: dtype of the result, float32 or bfloat16.

    Raises:
        TypeError, ValueError: as in :func:`fp8_paged_mqa_logits`, or FP4 queries.

    Source: DeepGEMM ``fp8_fp4_paged_mqa_logits``.

    >>> q = torch.randn(1, 1, 64, 128).to(torch.float8_e4m3fn), None
    >>> kv_cache = torch.zeros(4, 64, 1, 132, dtype=torch.uint8)
    >>> lens, table = torch.tensor([[100]]), torch.tensor([[0, 2]])
    >>> weights, bf16 = torch.ones(1, 64), torch.bfloat16
    >>> scores = fp8_fp4_paged_mqa_logits(
    ...     q, kv_cache, weights, lens, table, None, 128, logits_dtype=bf16
    ... )
    >>> scores.shape, scores.dtype
    (torch.Size([1, 128]), torch.bfloat16)
    """
    check = Checker("fp8_fp4_paged_mqa_logits", instead="selected_scores")
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
            f"{check.op}: q must be a float8_e4m3fn tensor and None, got scales; FP4 is unsupported"
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
        return indexer_scores(q, weights, keys, scales, row_starts=starts, row_ends=ends).to(dtype)
    check.positive("max_seqlen_k", max_seqlen_k)
    # Each row is shifted to its first key, in passes of bounded memory.
    width = max_seqlen_k
    num_rows, num_keys = q.shape[0], keys.shape[0]
    out = torch.empty(num_rows, width, dtype=dtype, device=q.device)
    columns = torch.arange(width, device=q.device)
    # Columns after the last key gather the -inf of column num_keys, so the width is at least
    # num_keys + 1; a multiple of 64 gives all rows the same alignment.
    full_width = (num_keys // 64 + 1) * 64
    row_bytes = 4 * full_width + (8 + 4) * width  # full scores, int64 sources, gathered scores
    rows_per_pass = max(1, MAX_WORKSPACE_BYTES // row_bytes)
    shape = min(rows_per_pass, num_rows), full_width
    full = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    for first in range(0, num_rows, rows_per_pass):
        rows = slice(first, min(first + rows_per_pass, num_rows))
        part = full[: rows.stop - first]
        ranges = {"row_starts": starts[rows], "row_ends": ends[rows]}
        scores = part[:, :num_keys]
        indexer_scores(q[rows], weights[rows], keys, scales, out=scores, **ranges)
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
    """The cache of DeepGEMM's pages: all keys of a page, then their scales."""
    if head_dim == INDEX_FP8.head_dim:
        return cache_of(check, "kv_cache", pages, INDEX_FP8)
    # get_format has no such format. Views of its keys and scales make a cache of e4m3_format.
    format = dataclasses.replace(
        INDEX_FP8, head_dim=head_dim, value_dim=head_dim, fp8_dim=head_dim, scale_block=head_dim
    )
    fields = cache_of(check, "kv_cache", pages, format).fields()
    keys, scales = cast(Tensor, fields.fp8), fields.scales
    return PagedCache(keys, e4m3_format(head_dim, head_dim, head_dim), scales)
