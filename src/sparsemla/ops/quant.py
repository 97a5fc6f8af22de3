"""The ops that write caches: rotate, normalise, quantise, store."""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.checks import FLOATS, INTEGERS, Checker
from sparsemla.formats import INDEX_FP8, CacheFormat, ScaleMode, as_format
from sparsemla.kernels import quant
from sparsemla.kernels.quant.arguments import (
    AppendIndexKeys,
    FusedIndexerRopeQuant,
    FusedRopeRmsnormQuant,
    PrepareIndexQueries,
)
from sparsemla.kernels.repeat import repeated
from sparsemla.ops._library import operator

TABLES = (torch.float32, torch.bfloat16)
ROTATED = (*FLOATS, torch.float8_e4m3fn)

_fused_rope_rmsnorm_quant = operator(quant.FUSED_ROPE_RMSNORM_QUANT)


@repeated
def fused_rope_rmsnorm_quant(
    q_rope: Tensor,
    kv: Tensor,
    cos_sin_cache: Tensor,
    kv_norm_weight: Tensor,
    cache: PagedCache,
    *,
    positions: Tensor,
    slot_mapping: Tensor,
    eps: float = 1e-6,
    query_norm: bool = False,
    interleaved: bool = True,
    scale_mode: ScaleMode = "pow2",
    validate: bool = False,
    out: Tensor | None = None,
    kv_out: Tensor | None = None,
) -> Tensor:
    """Rotate the queries; normalise, rotate, quantise and store the latent rows.

    For a token at position ``p`` with projected row ``x`` (N norm dims, R RoPE dims)::

        x[:N]  = x[:N] * rsqrt(mean(x[:N]^2) + eps) * kv_norm_weight
        x[-R:] = RoPE(x[-R:], p)            cache[slot] = quantise(x)
        out    = RoPE(q_rope, p)            kv_out = x

    in float32 up to the one rounding into each result. DeepSeek-V3 has N + R = D; in DeepSeek-V4
    the norm covers all dims and the rotation the last R (N = D), and with ``query_norm`` each head
    ``q`` of D dims is prepared likewise, without a weight::

        q       = q * rsqrt(mean(q^2) + eps)
        q[-R:]  = RoPE(q[-R:], p)           out = q

    A negative slot writes nothing into the cache. NaN stays NaN and does not change its block's
    scale.

    Args:
        q_rope: ``[T, H, R]`` bfloat16, float16 or float32, with query_norm the whole queries
            ``[T, H, D]``; may be a strided slice.
        kv: ``[T, D]`` bfloat16, float16 or float32, the row before norm and RoPE; may be a strided
            slice of a fused projection.
        cos_sin_cache: float32 or bfloat16 ``[max_positions, R]``, cos half then sin half.
        kv_norm_weight: ``[N]`` bfloat16, float16 or float32.
        cache: the cache to write; ``head_dim`` of its format is D.
        positions: int32, int64 or uint32 ``[T]``.
        slot_mapping: int32, int64 or uint32 ``[T]``; no slot may occur twice.
        eps: RMSNorm epsilon, of rows and queries.
        query_norm: normalise whole queries before their last R dims are rotated.
        interleaved: RoPE pairs are (2i, 2i+1) if True, (i, i + R/2) if False.
        scale_mode: ``pow2`` or ``exact`` scales.
        validate: read positions and slot_mapping and refuse values out of range.
        out: of q_rope's shape and any float dtype or float8_e4m3fn, written; may be ``q_rope``
            itself, or the last dims of the ``[T, H, D]`` queries of attention.
        kv_out: bfloat16 ``[T, D]``, written if given: the rows before quantisation, for a prefill
            that attends to this step's own tokens. Tokens without a slot are written too.

    Returns:
        The queries, of q_rope's shape, in the dtype of ``out``, else of ``q_rope``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format; the
            cache is untouched then.

    Source: MAX ``mla_fused_rope_rmsnorm_quantization``; DeepSeek-V2 (arXiv 2405.04434) section 2.1;
    DeepSeek-V4's inference code, ``Attention``.

    >>> from sparsemla import FP8_DS_MLA, PagedCache, cos_sin_table, rope_frequencies
    >>> cache = PagedCache.allocate(FP8_DS_MLA, num_pages=2, page_size=64)
    >>> table = cos_sin_table(rope_frequencies(64, 1e4), 128)
    >>> q_rope, kv = torch.randn(3, 16, 64), torch.randn(3, 576)
    >>> steps = torch.arange(3)
    >>> fused_rope_rmsnorm_quant(
    ...     q_rope, kv, table, torch.ones(512), cache, positions=steps, slot_mapping=steps
    ... ).shape
    torch.Size([3, 16, 64])
    """
    check = Checker("fused_rope_rmsnorm_quant")
    check.kind("query_norm", query_norm, bool)
    shape = "T H D" if query_norm else "T H R"
    check.tensor("q_rope", q_rope, shape, FLOATS)
    check.tensor("kv", kv, "T D", FLOATS)
    check.tensor("cos_sin_cache", cos_sin_cache, "P R", TABLES)
    check.tensor("kv_norm_weight", kv_norm_weight, "N", FLOATS)
    check.cache("cache", cache)
    check.head_dim("kv", cache)
    check.rope_dim("cos_sin_cache", cos_sin_cache.shape[1], kv.shape[1])
    if kv_norm_weight.shape[0] > kv.shape[1]:
        raise ValueError(
            f"fused_rope_rmsnorm_quant: kv_norm_weight must have at most {kv.shape[1]} elements, "
            f"got {kv_norm_weight.shape[0]}"
        )
    positions, slot_mapping = check.writes(positions, slot_mapping, cos_sin_cache, cache, validate)
    check.epsilon("eps", eps)
    check.kind("interleaved", interleaved, bool)
    check.scale_mode(scale_mode, cache.format)
    if out is None:
        out = check.output("out", None, shape, q_rope.dtype)
    else:
        check.written("out", out, shape, ROTATED)
    if kv_out is not None:
        check.written("kv_out", kv_out, "T D", torch.bfloat16)
    _fused_rope_rmsnorm_quant(
        FusedRopeRmsnormQuant(
            q_rope,
            kv,
            cos_sin_cache,
            kv_norm_weight,
            cache,
            positions,
            slot_mapping,
            eps,
            query_norm,
            interleaved,
            scale_mode,
            out,
            kv_out,
        )
    )
    return out


_append_index_keys = operator(quant.APPEND_INDEX_KEYS)


@repeated
def append_index_keys(
    index_k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin_cache: Tensor,
    cache: PagedCache,
    *,
    positions: Tensor,
    slot_mapping: Tensor,
    eps: float = 1e-6,
    interleaved: bool = False,
    rope_first: bool = True,
    hadamard: bool = False,
    scale_mode: ScaleMode = "pow2",
    validate: bool = False,
) -> None:
    """Normalise, rotate, quantise and store indexer keys.

    For each token ``cache[slot] = quantise(Hadamard(RoPE(LayerNorm(index_k))))``, LayerNorm over
    all dims, RoPE on the first or last R, the Hadamard transform only with ``hadamard``, in
    float32.

    Args:
        index_k: ``[T, DI]`` bfloat16, float16 or float32; may be a strided slice.
        norm_weight, norm_bias: ``[DI]`` bfloat16, float16 or float32.
        cos_sin_cache: float32 or bfloat16 ``[max_positions, R]``, cos half then sin half.
        cache: the indexer cache to write; ``head_dim`` of its format is DI.
        positions: int32, int64 or uint32 ``[T]``.
        slot_mapping: int32, int64 or uint32 ``[T]``; negative writes nothing; no slot may occur
            twice.
        eps: LayerNorm epsilon.
        interleaved: False for DeepSeek-V3.2's indexer, True for GLM's.
        rope_first: rotate the first R dims (V3.2, GLM), or the last (V4).
        hadamard: apply the orthogonal Walsh-Hadamard transform, to queries and keys alike.
        scale_mode: ``pow2`` or ``exact`` scales.
        validate: read positions and slot_mapping and refuse values out of range.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format; the
            cache is untouched then.

    Source: DeepSeek-V3.2-Exp inference code, ``Indexer``; vLLM ``indexer_k_quant_and_cache``.

    >>> from sparsemla import INDEX_FP8, PagedCache, cos_sin_table, rope_frequencies
    >>> cache = PagedCache.allocate(INDEX_FP8, num_pages=2, page_size=64)
    >>> table = cos_sin_table(rope_frequencies(64, 1e4), 128)
    >>> steps, ones = torch.arange(3), torch.ones(128)
    >>> append_index_keys(
    ...     torch.randn(3, 128), ones, 0 * ones, table, cache, positions=steps, slot_mapping=steps
    ... )
    """
    check = Checker("append_index_keys")
    check.tensor("index_k", index_k, "T D", FLOATS)
    check.tensor("norm_weight", norm_weight, "D", FLOATS)
    check.tensor("norm_bias", norm_bias, "D", FLOATS)
    check.tensor("cos_sin_cache", cos_sin_cache, "P R", TABLES)
    check.cache("cache", cache)
    check.head_dim("index_k", cache)
    check.query_dtype(cache)
    check.rope_dim("cos_sin_cache", cos_sin_cache.shape[1], index_k.shape[1])
    positions, slot_mapping = check.writes(positions, slot_mapping, cos_sin_cache, cache, validate)
    check.epsilon("eps", eps)
    check.rotation(interleaved, rope_first)
    check.scale_mode(scale_mode, cache.format)
    check.hadamard(hadamard, index_k.shape[1])
    _append_index_keys(
        AppendIndexKeys(
            index_k,
            norm_weight,
            norm_bias,
            cos_sin_cache,
            cache,
            positions,
            slot_mapping,
            eps,
            interleaved,
            rope_first,
            hadamard,
            scale_mode,
        )
    )


_prepare_index_queries = operator(quant.PREPARE_INDEX_QUERIES)


@repeated
def prepare_index_queries(
    index_q: Tensor,
    weights: Tensor,
    cos_sin_cache: Tensor,
    *,
    positions: Tensor,
    format: CacheFormat | str = INDEX_FP8,
    interleaved: bool = False,
    rope_first: bool = True,
    hadamard: bool = False,
    scale_mode: ScaleMode = "pow2",
    out: Tensor | None = None,
    weights_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate and quantise indexer queries, and fold every factor into the head weights.

    ``out = quantise(Hadamard(RoPE(index_q)))`` as the keys are, and
    ``weights_out = weights * HI^-0.5 * DI^-0.5 * scale of the query``, in float32. An FP4 format
    has several scales a row: ``out`` then has the values, exact in bfloat16, and ``weights_out`` no
    scale.

    Args:
        index_q: ``[T, HI, DI]`` bfloat16, float16 or float32.
        weights: ``[T, HI]`` bfloat16, float16 or float32; may be negative.
        cos_sin_cache: float32 or bfloat16 ``[max_positions, R]``, cos half then sin half.
        positions: int32, int64 or uint32 ``[T]``.
        format: the format of the key cache and of the queries, which may be bfloat16.
        interleaved, rope_first, hadamard: as in :func:`append_index_keys`.
        scale_mode: ``pow2`` or ``exact`` scales.
        out: ``[T, HI, DI]`` float8_e4m3fn, or bfloat16 for an unquantised or an FP4 format,
            written.
        weights_out: float32 ``[T, HI]``, written.

    Returns:
        out and weights_out.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V3.2-Exp inference code, ``Indexer``.

    >>> from sparsemla import cos_sin_table, rope_frequencies
    >>> table = cos_sin_table(rope_frequencies(64, 1e4), 128)
    >>> index_q, weights = prepare_index_queries(
    ...     torch.randn(3, 64, 128), torch.randn(3, 64), table, positions=torch.arange(3)
    ... )
    >>> index_q.dtype, weights.shape
    (torch.float8_e4m3fn, torch.Size([3, 64]))
    """
    check = Checker("prepare_index_queries")
    check.tensor("index_q", index_q, "T HI DI", FLOATS)
    check.index_heads()
    check.tensor("weights", weights, "T HI", FLOATS)
    check.tensor("cos_sin_cache", cos_sin_cache, "P R", TABLES)
    positions = check.tensor("positions", positions, "T", INTEGERS)
    check.rope_dim("cos_sin_cache", cos_sin_cache.shape[1], index_q.shape[2])
    format = as_format("prepare_index_queries: format", format)
    check.rotation(interleaved, rope_first)
    check.scale_mode(scale_mode, format)
    check.hadamard(hadamard, index_q.shape[2])
    if format.head_dim != index_q.shape[2] or not format.holds_index_keys:
        raise ValueError(
            f"prepare_index_queries: format must have head_dim {index_q.shape[2]}, and at most one "
            f"scale a row or MXFP4, got {format.name}"
        )
    out = check.output("out", out, "T HI DI", format.query_dtype)
    weights_out = check.output("weights_out", weights_out, "T HI", torch.float32)
    _prepare_index_queries(
        PrepareIndexQueries(
            index_q,
            weights,
            cos_sin_cache,
            positions,
            format,
            interleaved,
            rope_first,
            hadamard,
            scale_mode,
            out,
            weights_out,
        )
    )
    return out, weights_out


_fused_indexer_rope_quant = operator(quant.FUSED_INDEXER_ROPE_QUANT)


@repeated
def fused_indexer_rope_quant(
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin_cache: Tensor,
    cache: PagedCache,
    *,
    positions: Tensor,
    slot_mapping: Tensor,
    eps: float = 1e-6,
    interleaved: bool = False,
    rope_first: bool = True,
    hadamard: bool = False,
    scale_mode: ScaleMode = "pow2",
    validate: bool = False,
    out: Tensor | None = None,
    weights_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`append_index_keys` and :func:`prepare_index_queries` of a step, in one launch.

    Args:
        index_q: ``[T, HI, DI]`` bfloat16, float16 or float32.
        weights: ``[T, HI]`` bfloat16, float16 or float32; may be negative.
        index_k: ``[T, DI]`` bfloat16, float16 or float32; like ``weights``, it may be a slice of a
            fused projection.
        norm_weight, norm_bias: ``[DI]`` bfloat16, float16 or float32, of the keys' LayerNorm.
        cos_sin_cache: float32 or bfloat16 ``[max_positions, R]``, cos half then sin half.
        cache: the indexer cache to write; ``head_dim`` of its format is DI.
        positions: int32, int64 or uint32 ``[T]``.
        slot_mapping: int32, int64 or uint32 ``[T]``; negative writes no key; no slot may occur
            twice.
        eps: LayerNorm epsilon.
        interleaved, rope_first, hadamard, scale_mode, validate: as in :func:`append_index_keys`.
        out: ``[T, HI, DI]`` float8_e4m3fn, or bfloat16 for an unquantised or an FP4 format,
            written.
        weights_out: float32 ``[T, HI]``, written.

    Returns:
        out and weights_out.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format; the
            cache is untouched then.

    Source: DeepSeek-V3.2-Exp inference code, ``Indexer``; vLLM ``fused_indexer_q_rope_quant`` and
    ``indexer_k_quant_and_cache``.

    >>> from sparsemla import INDEX_FP8, PagedCache, cos_sin_table, rope_frequencies
    >>> cache = PagedCache.allocate(INDEX_FP8, num_pages=2, page_size=64)
    >>> table = cos_sin_table(rope_frequencies(64, 1e4), 128)
    >>> steps, ones = torch.arange(3), torch.ones(128)
    >>> q, weights, k = torch.randn(3, 64, 128), torch.randn(3, 64), torch.randn(3, 128)
    >>> q, weights = fused_indexer_rope_quant(
    ...     q, weights, k, ones, 0 * ones, table, cache, positions=steps, slot_mapping=steps
    ... )
    >>> q.dtype, weights.shape
    (torch.float8_e4m3fn, torch.Size([3, 64]))
    """
    check = Checker("fused_indexer_rope_quant")
    check.tensor("index_q", index_q, "T HI D", FLOATS)
    check.index_heads()
    check.tensor("weights", weights, "T HI", FLOATS)
    check.tensor("index_k", index_k, "T D", FLOATS)
    check.tensor("norm_weight", norm_weight, "D", FLOATS)
    check.tensor("norm_bias", norm_bias, "D", FLOATS)
    check.tensor("cos_sin_cache", cos_sin_cache, "P R", TABLES)
    check.cache("cache", cache)
    check.head_dim("index_k", cache)
    dtype = check.query_dtype(cache)
    check.rope_dim("cos_sin_cache", cos_sin_cache.shape[1], index_k.shape[1])
    positions, slot_mapping = check.writes(positions, slot_mapping, cos_sin_cache, cache, validate)
    check.epsilon("eps", eps)
    check.rotation(interleaved, rope_first)
    check.scale_mode(scale_mode, cache.format)
    check.hadamard(hadamard, index_k.shape[1])
    out = check.output("out", out, "T HI D", dtype)
    weights_out = check.output("weights_out", weights_out, "T HI", torch.float32)
    _fused_indexer_rope_quant(
        FusedIndexerRopeQuant(
            index_q,
            weights,
            index_k,
            norm_weight,
            norm_bias,
            cos_sin_cache,
            cache,
            positions,
            slot_mapping,
            eps,
            interleaved,
            rope_first,
            hadamard,
            scale_mode,
            out,
            weights_out,
        )
    )
    return out, weights_out
