"""Prefill attention: many query tokens at once, sparse over a latent cache or dense over heads."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.checks import FLOATS, INTEGERS, Checker
from sparsemla.formats import CacheFormat, as_format
from sparsemla.kernels import attention
from sparsemla.kernels.attention import schedule
from sparsemla.kernels.attention.arguments import DensePrefill, SparsePrefill
from sparsemla.kernels.repeat import repeated
from sparsemla.ops._library import operator
from sparsemla.plan import host_ints
from sparsemla.validation import check_device, check_integer

_sparse_prefill = operator(attention.SPARSE_PREFILL)


@repeated
def sparse_prefill(
    q: Tensor,
    kv: Tensor | PagedCache,
    topk_indices: Tensor,
    *,
    q_rope: Tensor | None = None,
    softmax_scale: float,
    topk_lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_cache: Tensor | PagedCache | None = None,
    extra_topk_indices: Tensor | None = None,
    extra_topk_lengths: Tensor | None = None,
    list_tokens: int = 1,
    token_mask: Tensor | None = None,
    allow_fp8_mma: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query token over the rows selected for it.

    With ``S`` the multiset of a token's valid indices (both streams), ``K`` the rows and ``V``
    their first ``value_dim`` dims::

        z_j = softmax_scale * <q, K_j>      lse = ln sum_j exp(z_j)     max_logits = max_j z_j
        out = sum_j exp(z_j - lse) V_j      * 1 / (1 + exp(attn_sink - lse))

    There is no causal mask: a token attends to exactly its selected rows. An index ``i`` is valid
    iff ``0 <= i < rows`` and it is among the first ``topk_lengths`` entries; no other row is ever
    read.

    With ``list_tokens``, list ``n`` is that of the tokens ``n * list_tokens .. (n + 1) *
    list_tokens - 1``: of all of them, which is selection by blocks of queries, or with
    ``token_mask`` of those whose bit is set, as :func:`share_lists` makes it of the tokens' own
    lists. Each row is then read once for all tokens of its list. So a row that one of them attends
    to must be finite: NaN or an infinity in it may reach the others. The order in which a token's
    keys are added depends on its neighbours' lists, and so do the last bits of its results.

    ``allow_fp8_mma`` permits FP8 MMAs and does not ask for them. A kernel that has them rounds
    the first ``V`` dims of each query and of each row of ``kv`` to e4m3 with a power of two, and
    the weights ``exp(z_j - max z)`` to e4m3::

        s = 2^ceil(log2(max |x[:V]| / 448))      x[:V] = s * e4m3(x[:V] / s)

    s is at least 2^-40. RoPE dims stay bfloat16. The relative L2 error of out is 2 to 6 percent
    then, instead of 0.2. Hopper has such a kernel for bfloat16 rows of 576 dims and more than 32
    heads, without ``extra_cache``, shared lists and ``max_logits``. It rounds all rows of ``kv`` in
    every call, into 656 bytes a row of temporary memory: permit it for many tokens. All other calls
    give the bits of ``"bf16"``.

    Args:
        q: ``[T, H, D]`` bfloat16, float16 or float32; any H.
        q_rope: ``[T, H, D - V]`` of q's dtype, the last dims of the queries; q is ``[T, H, V]``
            then.
        kv: bfloat16 rows ``[S, D]``, with the value in the first 512 dims (all, if D is less); or a
            cache of any format, read in place. S may be 0.
        topk_indices: int32, int64 or uint32 ``[T, K]``: rows of ``kv``, or slots of the cache;
            ``[N, K]`` with ``N = ceil(T / list_tokens)`` lists.
        softmax_scale: factor of the scores; for MLA ``192^-0.5 * mscale^2``, not ``576^-0.5``.
        topk_lengths: ``[T]``, or ``[N]``, leading entries to use of each row; default all.
        attn_sink: float32 ``[H]``, a logit without a value; +inf and -inf are legal.
        extra_cache: more rows, of any kind that ``kv`` may have and of equal dims, in the same
            softmax.
        extra_topk_indices: ``[T, K2]``, rows of ``extra_cache``, or slots of the cache.
        extra_topk_lengths: ``[T]``.
        list_tokens: neighbouring query tokens of a list; at most 8 with a mask. Not beside
            ``extra_cache`` if there are several.
        token_mask: uint8 ``[N, K]``: bit ``i`` is set if the ``i``-th token of the list attends to
            the entry. Bits of further tokens are ignored. Not beside ``extra_cache``.
        allow_fp8_mma: permit a kernel to round queries and rows to e4m3.
        out: ``[T, H, V]`` bfloat16, float16 or float32, written; default a new one of q's dtype.
        lse: float32 ``[T, H]``, written.
        max_logits: float32 ``[T, H]``, computed and written if given.

    Returns:
        out, and lse: natural logarithm, without the sink. A row without a valid index gets 0 and
        -inf (max_logits -inf).

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format.

    Source: FlashMLA ``flash_mla_sparse_fwd``; MAX ``MLAPrefillSparse``.

    >>> q = torch.randn(3, 16, 576, dtype=torch.bfloat16)
    >>> kv = torch.randn(100, 576, dtype=torch.bfloat16)
    >>> rows = torch.tensor([[0, 1], [5, -1], [-1, -1]], dtype=torch.int32)
    >>> out, lse = sparse_prefill(q, kv, rows, softmax_scale=192**-0.5)
    >>> out.shape, lse[2, 0].item()
    (torch.Size([3, 16, 512]), -inf)
    """
    check = Checker("sparse_prefill", instead="sparse_attention")
    check.queries(q, q_rope, "T H")
    cache = _cache(check, "kv", kv, "S D")
    check.query_dims(q, q_rope, "T H", cache)
    lists = check.lists(list_tokens, token_mask)
    topk_indices = check.tensor("topk_indices", topk_indices, f"{lists} K", INTEGERS)
    topk_lengths = check.optional("topk_lengths", topk_lengths, lists, INTEGERS)
    check.optional("token_mask", token_mask, f"{lists} K", torch.uint8)
    check.optional("attn_sink", attn_sink, "H", torch.float32)
    check.number("softmax_scale", softmax_scale)
    check.kind("allow_fp8_mma", allow_fp8_mma, bool)
    second = None
    if extra_cache is None:
        check.absent("extra_topk_indices", extra_topk_indices, "without extra_cache")
        check.absent("extra_topk_lengths", extra_topk_lengths, "without extra_cache")
    else:
        check.absent("token_mask", token_mask, "beside extra_cache")
        if list_tokens > 1:
            raise ValueError(
                f"sparse_prefill: list_tokens must be 1 beside extra_cache, got {list_tokens}"
            )
        second = _cache(check, "extra_cache", extra_cache, "S2 D")
        check.stream("extra_cache", second, cache)
        extra_topk_indices = check.tensor(
            "extra_topk_indices", extra_topk_indices, "T K2", INTEGERS
        )
        extra_topk_lengths = check.optional("extra_topk_lengths", extra_topk_lengths, "T", INTEGERS)
    check.bind("V", cache.format.value_dim)
    out = check.output("out", out, "T H V", q.dtype, FLOATS)
    lse = check.output("lse", lse, "T H", torch.float32)
    if max_logits is not None:
        check.written("max_logits", max_logits, "T H", torch.float32)
    # A kernel gets streams with rows only.
    if second is not None and second.num_slots == 0:
        second = extra_topk_indices = extra_topk_lengths = None
    if cache.num_slots == 0 and second is not None:
        cache, topk_indices = second, cast(Tensor, extra_topk_indices)
        topk_lengths = extra_topk_lengths
        second = extra_topk_indices = extra_topk_lengths = None
    if cache.num_slots == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        if max_logits is not None:
            max_logits.fill_(-torch.inf)
        return out, lse
    _sparse_prefill(
        SparsePrefill(
            q,
            cache,
            topk_indices,
            softmax_scale,
            q_rope,
            topk_lengths,
            attn_sink,
            second,
            extra_topk_indices,
            extra_topk_lengths,
            list_tokens,
            token_mask,
            allow_fp8_mma,
            out,
            lse,
            max_logits,
        )
    )
    return out, lse


def _cache(check: Checker, name: str, kv: Tensor | PagedCache, shape: str) -> PagedCache:
    """Rows, or the rows of a cache, as a cache."""
    if not isinstance(kv, PagedCache):
        rows = check.tensor(name, kv, shape, torch.bfloat16)
        check.row_dims(name, rows)
        kv = PagedCache.from_rows(rows)
    return check.attended(name, kv, may_be_empty=True)


def prefill_workspace_rows(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    cache_format: CacheFormat | str,
    num_heads: int,
    topk: int,
    max_rows: int = 1 << 18,
    device: torch.device | str | None = None,
) -> int | None:
    """Rows of the bfloat16 workspace with which :func:`sparse_prefill` is faster, or None.

    Without a workspace, each token dequantises every row that it selects. Many tokens finish
    earlier if :func:`gather_dequant` converts the contexts of their requests once and attention
    reads the workspace; a few tokens of long requests finish earlier without one. Measurements of
    the ``sm90`` and ``sm80`` tiers decide; elsewhere the result is None. Pass it to
    :func:`plan_batch` as ``workspace_rows``: its chunks then fit the workspace. A workspace takes
    ``2 * head_dim`` bytes per row, and all layers share it.

    Args:
        query_lens: ``[P]`` host integers, new tokens of each prefill.
        seq_lens: ``[P]`` host integers, context and new tokens.
        cache_format: the format of the cache, or its name.
        num_heads: query heads of this rank.
        topk: most keys that a token selects.
        max_rows: most rows of the workspace, unless one request alone needs more.
        device: device of the op; default the current CUDA device, or the CPU without one.

    Raises:
        TypeError: cache_format is no format and no name.
        ValueError: query_lens and seq_lens are of different lengths.

    >>> from sparsemla import BF16_576
    >>> lens = {"query_lens": [4096], "seq_lens": [32768]}
    >>> prefill_workspace_rows(**lens, cache_format=BF16_576, num_heads=128, topk=2048)
    """
    cache_format = as_format("prefill_workspace_rows: cache_format", cache_format)
    for name, size in (("num_heads", num_heads), ("topk", topk), ("max_rows", max_rows)):
        check_integer(f"prefill_workspace_rows: {name}", size)
    check_device("prefill_workspace_rows: device", device)
    queries, lens = host_ints("query_lens", query_lens), host_ints("seq_lens", seq_lens)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if len(queries) != len(lens):
        raise ValueError(
            f"prefill_workspace_rows: seq_lens must have one length for each of {len(queries)} "
            f"requests, got {len(lens)}"
        )
    pairs = [(int(m), int(n)) for m, n in zip(queries, lens, strict=True) if m > 0]
    num_rows = sum(n for _, n in pairs)
    num_tokens = sum(m for m, _ in pairs)
    num_keys = sum(m * min(n, topk) for m, n in pairs)
    work = num_heads, num_tokens, num_keys, num_rows
    if not schedule.converts_first(cache_format, torch.device(device), *work):
        return None
    return max(min(num_rows, max_rows), *(n for _, n in pairs))


_dense_prefill = operator(attention.DENSE_PREFILL)


@repeated
def dense_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_row_offsets: Tensor,
    kv_row_offsets: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    validate: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Ragged multi-head attention: the form of MLA in which each head has its own keys and values.

    Request ``b`` owns the queries ``input_row_offsets[b] .. input_row_offsets[b + 1]`` and the keys
    ``kv_row_offsets[b] .. kv_row_offsets[b + 1]``. With ``causal``, query ``i`` of ``m`` sees the
    keys ``j <= n - m + i`` of ``n`` (aligned at the end).

    Args:
        q: ``[T, H, D]`` bfloat16, float16 or float32.
        k: ``[S, H, D]`` of q's dtype.
        v: ``[S, H, V]`` of q's dtype.
        input_row_offsets: int32, int64 or uint32 ``[B + 1]``, from 0 to T.
        kv_row_offsets: int32, int64 or uint32 ``[B + 1]``, from 0 to S.
        softmax_scale: factor of the scores.
        causal: mask later keys.
        validate: read the offsets and refuse them unless they ascend from 0 to T (S).
        out: ``[T, H, V]`` of q's dtype, written.
        lse: float32 ``[T, H]``, written.

    Returns:
        out and lse (natural logarithm); 0 and -inf for a row that sees no key.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V3 (arXiv 2412.19437) section 2.1.1; MAX ``flare_mla_prefill``.

    >>> q, k, v = torch.randn(5, 2, 192), torch.randn(9, 2, 192), torch.randn(9, 2, 128)
    >>> out, lse = dense_prefill(
    ...     q, k, v, torch.tensor([0, 3, 5]), torch.tensor([0, 5, 9]), softmax_scale=192**-0.5
    ... )
    >>> out.shape
    torch.Size([5, 2, 128])
    """
    check = Checker("dense_prefill", instead="sparse_attention")
    check.tensor("q", q, "T H D", FLOATS)
    check.tensor("k", k, "S H D", q.dtype)
    check.tensor("v", v, "S H V", q.dtype)
    input_row_offsets = check.tensor("input_row_offsets", input_row_offsets, "B+1", INTEGERS)
    kv_row_offsets = check.tensor("kv_row_offsets", kv_row_offsets, "B+1", INTEGERS)
    if input_row_offsets.shape[0] == 0:
        raise ValueError(
            "dense_prefill: input_row_offsets must have shape [B+1], which is [1] without "
            "requests, got [0]"
        )
    check.number("softmax_scale", softmax_scale)
    check.kind("causal", causal, bool)
    if check.validates(validate):
        check.offsets("input_row_offsets", input_row_offsets, q.shape[0])
        check.offsets("kv_row_offsets", kv_row_offsets, k.shape[0])
    out = check.output("out", out, "T H V", q.dtype)
    lse = check.output("lse", lse, "T H", torch.float32)
    _dense_prefill(
        DensePrefill(q, k, v, input_row_offsets, kv_row_offsets, softmax_scale, causal, out, lse)
    )
    return out, lse
