"""Attention over latent rows: sparse and dense, prefill and decode, and merging of states.

``sparse_attention`` is the forward pass of training: ``sparse_prefill`` over rows of any dtype.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsemla.cache import PagedCache, aligned
from sparsemla.formats import BF16_576, CacheFormat
from sparsemla.kernels.attention.arguments import (
    DenseDecode,
    DensePrefill,
    MergeStates,
    SparseAttention,
    SparseDecode,
    SparsePrefill,
)
from sparsemla.kernels.attention.schedule import (
    FEW_HEADS,
    ONE_TILE_KEYS,
    refused_format,
    splits_of_sparse,
)
from sparsemla.kernels.common.table import Kernel, LazyModule, Op

if TYPE_CHECKING:
    from sparsemla.kernels.attention import cpu, sm80, sm80_one_tile, triton
    from sparsemla.kernels.attention.sm90 import bf16, bf16_few_heads, fp8, fp8_few_heads, fp8_mma
else:
    cpu, sm80, sm80_one_tile, triton = (
        LazyModule(f"{__name__}.{name}") for name in ("cpu", "sm80", "sm80_one_tile", "triton")
    )
    bf16, bf16_few_heads, fp8, fp8_few_heads, fp8_mma = (
        LazyModule(f"{__name__}.sm90.{name}")
        for name in ("bf16", "bf16_few_heads", "fp8", "fp8_few_heads", "fp8_mma")
    )


def refused_by_sm90(
    queries: Tensor,
    rows: PagedCache | Tensor,
    out: Tensor | None = None,
    *,
    q_rope: Tensor | None = None,
    extra: PagedCache | None = None,
    shared: bool = False,
) -> str | None:
    """Why the Hopper kernels refuse queries over rows, or None.

    Args:
        queries: their rows.
        rows: the rows that they attend to: a cache, or rows of the queries' dtype.
        out: where the results are written.
        q_rope: the RoPE dims of the queries, unless they are the last dims of ``queries``.
        extra: the rows of a second stream.
        shared: whether several query tokens share a list, or each attends to some of it.
    """
    refused = _refuse_dtypes(queries, out)
    if refused is not None:
        return refused
    cache = rows if isinstance(rows, PagedCache) else PagedCache.from_rows(rows)
    fmt = cache.format
    refused = _refuse_rows(queries, q_rope, cache, extra) or refused_format(fmt)
    if refused is not None:
        return refused
    if shared and fmt.fp8_dim:
        return f"needs bfloat16 rows for lists of several query tokens, got {fmt.name}"
    if extra is not None and fmt.fp8_dim and fmt.scales_in not in ("row", "page"):
        return f"needs scales in the rows or pages of an extra cache, got {fmt.name}"
    return None


def _refuse_dtypes(queries: Tensor, out: Tensor | None) -> str | None:
    """Why no kernel in Gluon takes these queries and outputs, or None."""
    if queries.dtype != torch.bfloat16:
        return f"needs bfloat16 queries, got {queries.dtype}"
    if out is not None and out.dtype != torch.bfloat16:
        return f"gives bfloat16 results, not {out.dtype}"
    return None


def _refuse_rows(
    queries: Tensor, q_rope: Tensor | None, cache: PagedCache, extra: PagedCache | None
) -> str | None:
    """Why no kernel in Gluon takes these rows, or None."""
    if not aligned(queries, q_rope, cache, extra):
        return "needs queries and caches with rows that start at multiples of 16 bytes"
    if extra is not None and extra.format != cache.format:
        return f"needs an extra cache of format {cache.format.name}, got {extra.format.name}"
    return None


def _needs_fp8_rows(cache: PagedCache) -> str | None:
    return None if cache.format.fp8_dim else f"needs FP8 rows, got {cache.format.name}"


def _needs_bf16_rows(cache: PagedCache) -> str | None:
    return f"needs bfloat16 rows, got {cache.format.name}" if cache.format.fp8_dim else None


def _needs_few_rows(num_rows: int) -> str | None:
    if num_rows > FEW_HEADS:
        return f"takes up to {FEW_HEADS} query rows that share keys, got {num_rows}"
    return None


def _refuse_decode(call: SparseDecode) -> str | None:
    return refused_by_sm90(call.q, call.cache, call.out, q_rope=call.q_rope, extra=call.extra_cache)


def _refuse_few_heads(call: SparseDecode) -> str | None:
    tile = splits_of_sparse(call).head_tile
    return _needs_few_rows(tile if tile < 64 else call.q.shape[2])


def _refuse_format_by_sm80(fmt: CacheFormat) -> str | None:
    """Why the kernel with Ampere's instructions refuses a format, or None."""
    if fmt.value_dim != 512 or fmt.head_dim not in (512, 576) or fmt.is_fp4:
        return f"needs 512 or 576 dims with 512 of value, got {fmt.name}"
    if fmt.fp8_dim == 0:
        return None
    quantised = fmt.fp8_dim == 512 or (fmt.fp8_dim, fmt.head_dim) == (448, 512)
    if not quantised or fmt.scale_block not in (0, 64, 128):
        return f"needs 448 or 512 e4m3 dims with scales of 64 or 128, got {fmt.name}"
    if fmt.scale_dtype == torch.float8_e4m3fn:
        return f"needs float32 or e8m0 scales, got {fmt.name}"
    return None


def _refuse_by_sm80(call: SparseDecode | SparsePrefill, cache: PagedCache) -> str | None:
    """Why the kernel with Ampere's instructions refuses a call, or None."""
    extra = call.extra_topk_indices
    if extra is not None and extra.dtype != call.topk_indices.dtype:
        return f"needs extra indices of {call.topk_indices.dtype}, got {extra.dtype}"
    return (
        _refuse_dtypes(call.q, call.out)
        or _refuse_rows(call.q, call.q_rope, cache, call.extra_cache)
        or _refuse_format_by_sm80(cache.format)
    )


def _refuse_one_tile(call: SparseDecode) -> str | None:
    """Why the kernel for splits of one tile refuses a call, or None."""
    fmt = call.cache.format
    if fmt != BF16_576:
        return f"needs {BF16_576.name} rows, got {fmt.name}"
    if call.extra_cache is not None:
        return "takes no extra cache"
    most, splits = max(ONE_TILE_KEYS), splits_of_sparse(call).num_splits
    if splits == 1 or call.num_keys > most * splits:
        return f"takes up to {most} keys in each of several splits, got {call.num_keys} in {splits}"
    queries = (call.q,) if call.q_rope is None else (call.q, call.q_rope)
    if any(stride % 16 for q in queries for stride in q.stride()[:-1]):
        return "needs queries with strides that are multiples of 16 elements"
    return _refuse_few_heads(call) or _refuse_by_sm80(call, call.cache)


SPARSE_DECODE = Op(
    "sparse_decode",
    SparseDecode,
    (
        Kernel(
            "sm90.fp8_few_heads",
            lambda: fp8_few_heads.sparse_decode,
            lambda call: (
                _needs_fp8_rows(call.cache) or _refuse_few_heads(call) or _refuse_decode(call)
            ),
        ),
        Kernel(
            "sm90.fp8",
            lambda: fp8.sparse_decode,
            lambda call: _needs_fp8_rows(call.cache) or _refuse_decode(call),
        ),
        Kernel(
            "sm90.bf16_few_heads",
            lambda: bf16_few_heads.sparse_decode,
            lambda call: (
                _needs_bf16_rows(call.cache) or _refuse_few_heads(call) or _refuse_decode(call)
            ),
        ),
        Kernel(
            "sm90.bf16",
            lambda: bf16.sparse_decode,
            lambda call: _needs_bf16_rows(call.cache) or _refuse_decode(call),
        ),
        Kernel("sm80.one_tile", lambda: sm80_one_tile.sparse_decode, _refuse_one_tile),
        Kernel(
            "sm80",
            lambda: sm80.sparse_decode,
            lambda call: _refuse_by_sm80(call, call.cache),
        ),
        Kernel("triton", lambda: triton.sparse_decode),
        Kernel("cpu", lambda: cpu.sparse_decode),
    ),
    outputs=("out", "lse"),
    mutates=("workspace",),
)


def _refuse_dense(call: DenseDecode) -> str | None:
    return refused_by_sm90(call.q, call.cache, call.out)


DENSE_DECODE = Op(
    "dense_decode",
    DenseDecode,
    (
        Kernel(
            "sm90.fp8_few_heads",
            lambda: fp8_few_heads.dense_decode,
            lambda call: (
                _needs_fp8_rows(call.cache)
                or _needs_few_rows(call.q.shape[1] * call.q.shape[2])
                or _refuse_dense(call)
            ),
        ),
        Kernel(
            "sm90.fp8",
            lambda: fp8.dense_decode,
            lambda call: _needs_fp8_rows(call.cache) or _refuse_dense(call),
        ),
        Kernel(
            "sm90.bf16",
            lambda: bf16.dense_decode,
            lambda call: _needs_bf16_rows(call.cache) or _refuse_dense(call),
        ),
        Kernel(
            "sm80",
            lambda: sm80.dense_decode,
            lambda call: (
                _refuse_dtypes(call.q, call.out)
                or _refuse_rows(call.q, None, call.cache, None)
                or _refuse_format_by_sm80(call.cache.format)
            ),
        ),
        Kernel("triton", lambda: triton.dense_decode),
        Kernel("cpu", lambda: cpu.dense_decode),
    ),
    outputs=("out", "lse"),
    mutates=("workspace",),
)


def _refuse_prefill(call: SparsePrefill) -> str | None:
    return refused_by_sm90(
        call.q,
        call.kv,
        call.out,
        q_rope=call.q_rope,
        extra=call.extra_cache,
        shared=call.shared,
    )


def _needs_few_heads(call: SparsePrefill | SparseAttention) -> str | None:
    if call.shared:
        return "needs a list for each query token"
    return _needs_few_rows(call.q.shape[1])


def _refuse_fp8_mma(call: SparsePrefill) -> str | None:
    if not call.allow_fp8_mma:
        return "needs allow_fp8_mma=True"
    if call.kv.format != BF16_576 or call.kv.page_size != 1:
        return f"needs bfloat16 rows of 576 dims, got {call.kv.format.name}"
    if call.q.shape[1] <= FEW_HEADS:
        return f"takes more than {FEW_HEADS} query heads, got {call.q.shape[1]}"
    if call.shared or call.extra_cache is not None or call.max_logits is not None:
        return "takes no shared lists, no second stream and no max_logits"
    return _refuse_prefill(call)


def _refuse_prefill_by_sm80(call: SparsePrefill) -> str | None:
    if call.shared:
        return "needs a list for each query token"
    return _refuse_by_sm80(call, call.kv)


SPARSE_PREFILL = Op(
    "sparse_prefill",
    SparsePrefill,
    (
        Kernel("sm90.fp8_mma", lambda: fp8_mma.sparse_prefill, _refuse_fp8_mma),
        Kernel(
            "sm90.fp8_few_heads",
            lambda: fp8_few_heads.sparse_prefill,
            lambda call: (
                _needs_fp8_rows(call.kv) or _needs_few_heads(call) or _refuse_prefill(call)
            ),
        ),
        Kernel(
            "sm90.fp8",
            lambda: fp8.sparse_prefill,
            lambda call: _needs_fp8_rows(call.kv) or _refuse_prefill(call),
        ),
        Kernel(
            "sm90.bf16_few_heads",
            lambda: bf16_few_heads.sparse_prefill,
            lambda call: (
                _needs_bf16_rows(call.kv) or _needs_few_heads(call) or _refuse_prefill(call)
            ),
        ),
        Kernel(
            "sm90.bf16",
            lambda: bf16.sparse_prefill,
            lambda call: _needs_bf16_rows(call.kv) or _refuse_prefill(call),
        ),
        Kernel("sm80", lambda: sm80.sparse_prefill, _refuse_prefill_by_sm80),
        Kernel("triton", lambda: triton.sparse_prefill),
        Kernel("cpu", lambda: cpu.sparse_prefill),
    ),
    outputs=("out", "lse", "max_logits"),
)


def _refuse_attention(call: SparseAttention) -> str | None:
    return refused_by_sm90(call.q, call.kv, call.out, shared=call.shared)


SPARSE_ATTENTION = Op(
    "sparse_attention",
    SparseAttention,
    (
        Kernel(
            "sm90.bf16_few_heads",
            lambda: bf16_few_heads.sparse_attention,
            lambda call: _needs_few_heads(call) or _refuse_attention(call),
        ),
        Kernel("sm90.bf16", lambda: bf16.sparse_attention, _refuse_attention),
        Kernel("triton", lambda: triton.sparse_attention),
        Kernel("cpu", lambda: cpu.sparse_attention),
    ),
    outputs=("out", "lse"),
)

DENSE_PREFILL = Op(
    "dense_prefill",
    DensePrefill,
    (
        Kernel("triton", lambda: triton.dense_prefill),
        Kernel("cpu", lambda: cpu.dense_prefill),
    ),
    outputs=("out", "lse"),
)

MERGE_STATES = Op(
    "merge_states",
    MergeStates,
    (
        Kernel("triton", lambda: triton.merge_states),
        Kernel("cpu", lambda: cpu.merge_states),
    ),
    outputs=("out", "lse"),
)

OPS = {
    op.name: op
    for op in (
        SPARSE_PREFILL,
        SPARSE_ATTENTION,
        DENSE_PREFILL,
        SPARSE_DECODE,
        DENSE_DECODE,
        MERGE_STATES,
    )
}
