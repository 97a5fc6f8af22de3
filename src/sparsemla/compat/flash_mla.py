"""FlashMLA's interface: ``import sparsemla.compat.flash_mla as flash_mla``.

The functions have the arguments, defaults, layouts and conventions of FlashMLA's Python functions,
plus ``out`` and ``enable_batch_invariant`` of vLLM's fork. Any head count, page size, top-k and
device is supported. As in FlashMLA, the lse is a natural logarithm without the sink, and +inf for a
row without a key.

Lengths, tables and indices may be int32, int64 or uint32.
"""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.checks import FLOATS, INTEGERS, Checker
from sparsemla.compat._cache import cache_of
from sparsemla.formats import FP8_584, FP8_DS_MLA, CacheFormat, bf16_format
from sparsemla.ops import dense_decode, sparse_decode, sparse_prefill

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_sparse_prefill",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

FP8_FORMATS = {(fmt.head_dim, fmt.row_width): fmt for fmt in (FP8_DS_MLA, FP8_584)}
"""The quantised formats by (head_dim of the query, bytes per row), as FlashMLA selects them."""

ONE_BYTE = (torch.uint8, torch.int8, torch.float8_e4m3fn)


class FlashMLASchedMeta:
    """An empty placeholder for FlashMLA's schedule; one object serves all shapes and lengths."""


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """A placeholder schedule for :func:`flash_mla_with_kvcache`; all arguments are ignored.

    Source: FlashMLA ``get_mla_metadata``.

    >>> schedule, num_splits = get_mla_metadata()
    >>> num_splits is None
    True
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    out: Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decode attention over selected rows with ``indices``, else over all rows of each request.

    Calls :func:`sparsemla.sparse_decode` or :func:`sparsemla.dense_decode`, which have the formula.
    Unlike FlashMLA, it supports any head count, page size and top-k, bfloat16 caches with
    ``indices``, FP8 caches and ``attn_sink`` without ``indices``, and indices outside the cache,
    which are masked like -1.

    Args:
        q: ``[B, S, H, D]`` bfloat16, float16 or float32.
        k_cache: ``[num_blocks, page_block_size, num_heads_k, D]`` bfloat16; with is_fp8_kvcache
            ``[num_blocks, page_block_size, num_heads_k, 656]`` (D is 576) or ``584`` (D is 512) of
            any one-byte dtype. num_heads_k divides H, and is 1 with ``indices``.
        block_table: ``[B, W]``, block ids; ignored with ``indices``.
        cache_seqlens: ``[B]``, keys of each request; ignored with ``indices``.
        head_dim_v: leading dims of a key that are the value: 512, or any number in bfloat16 caches.
        tile_scheduler_metadata: ignored.
        num_splits: None.
        softmax_scale: factor of the logits. The default is FlashMLA's ``D ** -0.5``; MLA needs
            :func:`sparsemla.mla_softmax_scale`, which counts the dims of a head before absorption.
        causal: mask later tokens of the same step; must be False with ``indices``.
        is_fp8_kvcache: whether the caches are quantised.
        indices: ``[B, S, topk]``, ``block * page_block_size + offset``; -1 is no key.
        attn_sink: float32 ``[H]``, a logit per head without a value.
        extra_k_cache: a second cache of the same format, with any page size.
        extra_indices_in_kvcache: ``[B, S, extra_topk]``, indices into ``extra_k_cache``.
        topk_length: ``[B]``, number of leading indices to use; default all.
        extra_topk_length: ``[B]``, the same for ``extra_indices_in_kvcache``.
        out: ``[B, S, H, head_dim_v]`` of q's dtype, overwritten; a new tensor if None.
        enable_batch_invariant: compute each row in one split, independent of the batch.

    Returns:
        out ``[B, S, H, head_dim_v]``, and lse float32 ``[B, H, S]``: natural logarithm, without
        the sink. A row without a key gets 0 and +inf.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: an argument of the wrong shape or device, or an argument that FlashMLA refuses
            in this mode.

    Source: FlashMLA ``flash_mla_with_kvcache``.

    >>> q = torch.randn(2, 1, 20, 576, dtype=torch.bfloat16)
    >>> k_cache = torch.randn(5, 48, 1, 576, dtype=torch.bfloat16)
    >>> block_table = torch.tensor([[4, 0], [2, -1]], dtype=torch.int32)
    >>> cache_seqlens = torch.tensor([90, 0], dtype=torch.int32)
    >>> schedule, _ = get_mla_metadata()
    >>> out, lse = flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, schedule)
    >>> out.shape, lse.shape, lse[1, 0].item()
    (torch.Size([2, 1, 20, 512]), torch.Size([2, 20, 1]), inf)
    """
    check = Checker("flash_mla_with_kvcache", instead="sparse_attention")
    check.tensor("q", q, "batch_size seq_len_q num_heads_q head_dim", FLOATS)
    check.absent("num_splits", num_splits, "as get_mla_metadata returns it")
    batch, query_len, num_heads, head_dim = q.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    check.number("softmax_scale", scale)
    check.kind("causal", causal, bool)
    check.kind("is_fp8_kvcache", is_fp8_kvcache, bool)
    check.kind("enable_batch_invariant", enable_batch_invariant, bool)
    splits = 1 if enable_batch_invariant else None
    check.optional("attn_sink", attn_sink, "num_heads_q", torch.float32)
    check.kind("head_dim_v", head_dim_v, int)
    check.bind("head_dim_v", head_dim_v)
    if out is not None:
        check.tensor("out", out, "batch_size seq_len_q num_heads_q head_dim_v", q.dtype)

    if indices is not None:
        if causal:
            raise ValueError(
                "flash_mla_with_kvcache: causal must be False with indices, which already select "
                "the keys of each token; got True"
            )
        indices = check.tensor("indices", indices, "batch_size seq_len_q topk", INTEGERS)
        topk_length = check.optional("topk_length", topk_length, "batch_size", INTEGERS)
        extra_cache = None
        if extra_k_cache is None:
            check.absent(
                "extra_indices_in_kvcache", extra_indices_in_kvcache, "without extra_k_cache"
            )
            check.absent("extra_topk_length", extra_topk_length, "without extra_k_cache")
        else:
            shape = "batch_size seq_len_q extra_topk"
            extra_indices_in_kvcache = check.tensor(
                "extra_indices_in_kvcache", extra_indices_in_kvcache, shape, INTEGERS
            )
            extra_topk_length = check.optional(
                "extra_topk_length", extra_topk_length, "batch_size", INTEGERS
            )
            (extra_cache,) = _caches(check, "extra_k_cache", extra_k_cache, is_fp8_kvcache, "1")
        (cache,) = _caches(check, "k_cache", k_cache, is_fp8_kvcache, "1")
        out, lse = sparse_decode(
            q,
            cache,
            indices,
            softmax_scale=scale,
            topk_lengths=topk_length,
            attn_sink=attn_sink,
            extra_cache=extra_cache,
            extra_topk_indices=extra_indices_in_kvcache,
            extra_topk_lengths=extra_topk_length,
            num_splits=splits,
            out=out,
        )
        return out, _flash_mla_lse(lse).transpose(1, 2)

    for name, value in (
        ("extra_k_cache", extra_k_cache),
        ("extra_indices_in_kvcache", extra_indices_in_kvcache),
        ("topk_length", topk_length),
        ("extra_topk_length", extra_topk_length),
    ):
        check.absent(name, value, "without indices")
    block_table = check.tensor("block_table", block_table, "batch_size W", INTEGERS)
    cache_seqlens = check.tensor("cache_seqlens", cache_seqlens, "batch_size", INTEGERS)
    caches = _caches(check, "k_cache", k_cache, is_fp8_kvcache, "num_heads_k")
    if not caches or num_heads % len(caches):
        raise ValueError(
            f"flash_mla_with_kvcache: k_cache must have a head count that divides q's {num_heads}, "
            f"got {len(caches)}"
        )
    if out is None:
        out = q.new_empty(batch, query_len, num_heads, head_dim_v)
    lse = torch.empty(batch, query_len, num_heads, dtype=torch.float32, device=q.device)
    group = num_heads // len(caches)
    for index, cache in enumerate(caches):
        heads = slice(index * group, (index + 1) * group)
        dense_decode(
            q[:, :, heads],
            cache,
            block_table,
            cache_seqlens,
            softmax_scale=scale,
            causal=causal,
            attn_sink=None if attn_sink is None else attn_sink[heads],
            num_splits=splits,
            out=out[:, :, heads],
            lse=lse[:, :, heads],
        )
    return out, _flash_mla_lse(lse).transpose(1, 2)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Prefill attention of each query token over its selected rows.

    Calls :func:`sparsemla.sparse_prefill`, which has the formula. Unlike FlashMLA, it supports any
    head count, top-k and dims, and ignores NaNs in rows selected after ``topk_length``.

    Args:
        q: ``[s_q, h_q, d_qk]`` bfloat16, float16 or float32.
        kv: ``[s_kv, 1, d_qk]`` bfloat16.
        indices: ``[s_q, 1, topk]``; rows outside ``[0, s_kv)`` are masked.
        sm_scale: factor of the logits.
        d_v: leading dims of a row that are the value.
        attn_sink: float32 ``[h_q]``, a logit per head without a value.
        topk_length: ``[s_q]``, number of leading indices to use; default all.
        out: ``[s_q, h_q, d_v]`` of q's dtype, overwritten; a new tensor if None.

    Returns:
        out ``[s_q, h_q, d_v]``, max_logits and lse, both float32 ``[s_q, h_q]``; natural
        logarithm, without the sink. A row without a key gets 0, -inf and +inf.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: FlashMLA ``flash_mla_sparse_fwd``.

    >>> q = torch.randn(3, 20, 576, dtype=torch.bfloat16)
    >>> kv = torch.randn(100, 1, 576, dtype=torch.bfloat16)
    >>> indices = torch.tensor([[[0, 1]], [[5, -1]], [[-1, 100]]], dtype=torch.int32)
    >>> out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, sm_scale=192**-0.5)
    >>> out.shape, max_logits[2, 0].item(), lse[2, 0].item()
    (torch.Size([3, 20, 512]), -inf, inf)
    """
    return _sparse_prefill(
        Checker("flash_mla_sparse_fwd", instead="sparse_attention"),
        q,
        kv,
        indices,
        sm_scale,
        d_v,
        attn_sink,
        topk_length,
        out,
    )


def flash_mla_sparse_prefill(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512
) -> Tensor:
    """The first result of :func:`flash_mla_sparse_fwd`, which has the other arguments, too.

    Attention backends for other vendors' GPUs that derive from vLLM's call a function of this name
    for the output alone. Releases of vLLM before ``flash_mla_sparse_fwd`` had its three results
    under this name; code for these needs :func:`flash_mla_sparse_fwd`.

    >>> q = torch.randn(3, 20, 576, dtype=torch.bfloat16)
    >>> kv = torch.randn(100, 1, 576, dtype=torch.bfloat16)
    >>> indices = torch.randint(100, (3, 1, 32), dtype=torch.int32)
    >>> flash_mla_sparse_prefill(q, kv, indices, 192**-0.5).shape
    torch.Size([3, 20, 512])
    """
    check = Checker("flash_mla_sparse_prefill", instead="sparse_attention")
    return _sparse_prefill(check, q, kv, indices, sm_scale, d_v)[0]


def _sparse_prefill(
    check: Checker,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Prefill attention: out, max_logits and FlashMLA's lse."""
    check.tensor("q", q, "s_q h_q d_qk", FLOATS)
    check.tensor("kv", kv, "s_kv 1 d_qk", torch.bfloat16)
    indices = check.tensor("indices", indices, "s_q 1 topk", INTEGERS)
    check.optional("attn_sink", attn_sink, "h_q", torch.float32)
    topk_length = check.optional("topk_length", topk_length, "s_q", INTEGERS)
    check.kind("d_v", d_v, int)
    check.number("sm_scale", sm_scale)
    format = _bf16_format(check, "d_v", kv.shape[2], d_v)
    check.bind("d_v", d_v)
    if out is not None:
        check.tensor("out", out, "s_q h_q d_v", q.dtype)
    max_logits = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    out, lse = sparse_prefill(
        q,
        cache_of(check, "kv", kv, format, may_be_empty=True),  # pages of one row
        indices[:, 0],
        softmax_scale=sm_scale,
        topk_lengths=topk_length,
        attn_sink=attn_sink,
        out=out,
        max_logits=max_logits,
    )
    return out, max_logits, _flash_mla_lse(lse)


def _caches(
    check: Checker, name: str, k_cache: Tensor, is_fp8: bool, heads: str
) -> list[PagedCache]:
    """Check ``k_cache``; returns a cache per key head. ``heads``: the letter of their number."""
    head_dim, value_dim = check.dims["head_dim"], check.dims["head_dim_v"]
    shape = f"{name}_blocks {name}_block_size {heads}"
    if is_fp8:
        check.tensor(name, k_cache, f"{shape} {name}_bytes", ONE_BYTE)
        format = _fp8_format(check, name, head_dim, k_cache.shape[3])
        if value_dim != format.value_dim:
            raise ValueError(
                f"{check.op}: head_dim_v must be {format.value_dim} for {name} of format "
                f"{format.name}, got {value_dim}"
            )
    else:
        check.tensor(name, k_cache, f"{shape} head_dim", torch.bfloat16)
        format = _bf16_format(check, "head_dim_v", head_dim, value_dim)
    return [cache_of(check, name, pages, format) for pages in k_cache.unbind(2)]


def _fp8_format(check: Checker, name: str, head_dim: int, row_bytes: int) -> CacheFormat:
    if (head_dim, row_bytes) not in FP8_FORMATS:
        known = " or ".join(f"{width} for a head_dim of {dim}" for dim, width in FP8_FORMATS)
        raise ValueError(
            f"{check.op}: {name} must have a last dimension of {known} with is_fp8_kvcache, "
            f"got {row_bytes} for {head_dim}"
        )
    return FP8_FORMATS[head_dim, row_bytes]


def _bf16_format(check: Checker, name: str, head_dim: int, value_dim: int) -> CacheFormat:
    if not 0 < value_dim <= head_dim:
        raise ValueError(f"{check.op}: {name} must lie in [1, {head_dim}], got {value_dim}")
    return bf16_format(head_dim, value_dim)


def _flash_mla_lse(lse: Tensor) -> Tensor:
    """FlashMLA's convention: +inf for a row without a key, in place."""
    return lse.masked_fill_(lse == -torch.inf, torch.inf)
