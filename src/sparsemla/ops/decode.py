"""Decode attention: a few query tokens for each request, over the paged cache."""

import math

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.checks import FLOATS, INTEGERS, Checker
from sparsemla.kernels import attention
from sparsemla.kernels.attention import schedule
from sparsemla.kernels.attention.arguments import DenseDecode, MergeStates, SparseDecode, Splits
from sparsemla.kernels.repeat import repeated
from sparsemla.ops._library import operator
from sparsemla.validation import check_device, check_integer


def decode_workspace_size(
    batch: int,
    query_len: int,
    num_heads: int,
    *,
    num_splits: int | None = None,
    value_dim: int = 512,
    device: torch.device | str | None = None,
) -> int:
    """Bytes of workspace that :func:`sparse_decode` and :func:`dense_decode` need.

    Each split of the keys leaves a float32 output and an lse for each row; one split needs nothing.

    Args:
        batch: requests, B; without ``num_splits``, the largest batch.
        query_len: query tokens of a request, S.
        num_heads: query heads, H.
        num_splits: the op's ``num_splits``; None for the most that it may choose on ``device``.
        value_dim: the format's ``value_dim``.
        device: device of the op; default the current CUDA device, or the CPU without one.

    Returns:
        The size of a uint8 tensor, enough for every number of keys.

    >>> decode_workspace_size(4, 1, 16, num_splits=8)
    1050624
    """
    for name, size, least in (
        ("batch", batch, 0),
        ("query_len", query_len, 0),
        ("num_heads", num_heads, 0),
        ("num_splits", 1 if num_splits is None else num_splits, 1),
        ("value_dim", value_dim, 1),
    ):
        check_integer(f"decode_workspace_size: {name}", size, least)
    check_device("decode_workspace_size: device", device)
    rows = query_len * num_heads
    if num_splits is not None:
        return _workspace_bytes(batch * rows, num_splits, value_dim)
    # Fewer requests are split more, so the largest batch need not have the largest workspace.
    return max(
        _workspace_bytes(count * rows, most_splits(count, rows, device), value_dim)
        for count in range(batch + 1)
    )


def most_splits(batch: int, rows: int, device: torch.device | str | None) -> int:
    """The most splits that an op may choose for requests of ``rows`` (token, head) pairs."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # Rows of a request may share keys or not; with fewer CTAs, keys are split more.
    processors = schedule.multiprocessors(torch.device(device))
    return schedule.most_splits(batch * -(-rows // 64), processors)


def _workspace_bytes(num_rows: int, num_splits: int | None, value_dim: int) -> int:
    """Bytes of ``num_splits`` partial results; 0 if the kernel chooses the number."""
    if num_splits is None or num_splits == 1:
        return 0
    return 4 * num_splits * num_rows * (value_dim + 1)


def _check_splits(
    check: Checker, q: Tensor, cache: PagedCache, num_splits: int | None, workspace: Tensor | None
) -> Splits | None:
    """The caller's splits, or None. A kernel that chooses checks the workspace itself."""
    if num_splits is not None:
        check.positive("num_splits", num_splits)
    num_rows = math.prod(q.shape[:3])
    check.workspace(workspace, _workspace_bytes(num_rows, num_splits, cache.format.value_dim))
    return None if num_splits is None else Splits(num_splits)


_sparse_decode = operator(attention.SPARSE_DECODE)


@repeated
def sparse_decode(
    q: Tensor,
    cache: PagedCache,
    topk_indices: Tensor,
    *,
    q_rope: Tensor | None = None,
    softmax_scale: float,
    topk_lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_cache: PagedCache | None = None,
    extra_topk_indices: Tensor | None = None,
    extra_topk_lengths: Tensor | None = None,
    num_splits: int | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query token over the cache rows selected for it.

    With ``S`` the multiset of valid slots of a query token (both streams), ``K`` the dequantised
    rows and ``V`` their first ``value_dim`` dims::

        z_j = softmax_scale * <q, K_j>      lse = ln sum_j exp(z_j)
        out = sum_j exp(z_j - lse) V_j      * 1 / (1 + exp(attn_sink - lse))

    A slot is valid iff ``0 <= slot < cache.num_slots`` and it is among the first ``topk_lengths``
    entries; no other row is ever read. A duplicate slot counts twice.

    Args:
        q: ``[B, S, H, D]`` bfloat16, float16 or float32; D is the format's ``head_dim``, H any.
        q_rope: ``[B, S, H, D - V]`` of q's dtype, the last dims of the queries; q is
            ``[B, S, H, V]`` then.
        cache: rows of any format.
        topk_indices: int32, int64 or uint32 ``[B, S, K]``, slots in ``cache`` (:func:`to_slots`).
        softmax_scale: factor of the scores; for MLA ``192^-0.5 * mscale^2``, not ``576^-0.5``.
        topk_lengths: ``[B, S]``, leading entries to use of each row, or ``[B]`` for all rows of a
            request; default all.
        attn_sink: float32 ``[H]``, a logit without a value; +inf and -inf are legal.
        extra_cache: a second cache of equal dims, any format and page size, in the same softmax.
        extra_topk_indices: ``[B, S, K2]``, slots in ``extra_cache``.
        extra_topk_lengths: ``[B, S]`` or ``[B]``.
        num_splits: number of splits of a row's keys, computed in parallel; default from shapes and
            multiprocessors. With a given number, a request gets the same bits in any batch.
        workspace: uint8, at least :func:`decode_workspace_size`; default a new one.
        out: ``[B, S, H, V]`` of q's dtype, written.
        lse: float32 ``[B, S, H]``, written.

    Returns:
        out, and lse: natural logarithm, without the sink. A row without a valid slot gets 0, -inf.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format.

    Source: FlashMLA ``flash_mla_with_kvcache`` with indices; MAX ``mla_decode_branch_fp8``.

    >>> from sparsemla import FP8_DS_MLA, PagedCache
    >>> cache = PagedCache.allocate(FP8_DS_MLA, num_pages=4, page_size=64)
    >>> cache.write(torch.arange(100), torch.randn(100, 576))
    >>> q = torch.randn(2, 1, 16, 576, dtype=torch.bfloat16)
    >>> slots = torch.randint(0, 100, (2, 1, 32), dtype=torch.int32)
    >>> out, lse = sparse_decode(q, cache, slots, softmax_scale=192**-0.5)
    >>> out.shape, lse.shape
    (torch.Size([2, 1, 16, 512]), torch.Size([2, 1, 16]))
    """
    check = Checker("sparse_decode", instead="sparse_attention")
    check.queries(q, q_rope, "B S H")
    check.attended("cache", cache)
    check.query_dims(q, q_rope, "B S H", cache)
    topk_indices = check.tensor("topk_indices", topk_indices, "B S K", INTEGERS)
    topk_lengths = check.lengths("topk_lengths", topk_lengths)
    check.optional("attn_sink", attn_sink, "H", torch.float32)
    check.number("softmax_scale", softmax_scale)
    if extra_cache is None:
        check.absent("extra_topk_indices", extra_topk_indices, "without extra_cache")
        check.absent("extra_topk_lengths", extra_topk_lengths, "without extra_cache")
    else:
        check.stream("extra_cache", check.attended("extra_cache", extra_cache), cache)
        extra_topk_indices = check.tensor(
            "extra_topk_indices", extra_topk_indices, "B S K2", INTEGERS
        )
        extra_topk_lengths = check.lengths("extra_topk_lengths", extra_topk_lengths)
    check.bind("V", cache.format.value_dim)
    splits = _check_splits(check, q, cache, num_splits, workspace)
    out = check.output("out", out, "B S H V", q.dtype)
    lse = check.output("lse", lse, "B S H", torch.float32)
    _sparse_decode(
        SparseDecode(
            q,
            cache,
            topk_indices,
            softmax_scale,
            q_rope,
            topk_lengths,
            attn_sink,
            extra_cache,
            extra_topk_indices,
            extra_topk_lengths,
            splits,
            workspace,
            out,
            lse,
        )
    )
    return out, lse


_dense_decode = operator(attention.DENSE_DECODE)


@repeated
def dense_decode(
    q: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    attn_sink: Tensor | None = None,
    validate: bool = False,
    num_splits: int | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query token over all keys of its request.

    The formula is in :func:`sparse_decode`; the keys are ``0 .. seq_lens[b] - 1``. With ``causal``,
    query token ``j`` of ``S`` sees the keys ``k <= seq_lens[b] - S + j`` (aligned at the end), so a
    request shorter than ``S`` has empty leading rows. A page id out of range masks the keys of its
    page.

    Args:
        q: ``[B, S, H, D]`` bfloat16, float16 or float32.
        cache: rows of any format, any page size.
        page_table: int32, int64 or uint32 ``[B, W]``; entries past a request's length are never
            used.
        seq_lens: int32, int64 or uint32 ``[B]``, keys of each request, this step's included; 0 is
            legal.
        softmax_scale: factor of the scores; for MLA ``192^-0.5 * mscale^2``, not ``576^-0.5``.
        causal: mask later tokens of the same step.
        attn_sink: float32 ``[H]``, a logit without a value.
        validate: read page_table and seq_lens and refuse values out of range.
        num_splits: number of splits of a row's keys, computed in parallel; default from shapes and
            multiprocessors. With a given number, a request gets the same bits in any batch.
        workspace: uint8, at least :func:`decode_workspace_size`; default a new one.
        out: ``[B, S, H, V]`` of q's dtype, written.
        lse: float32 ``[B, S, H]``, written.

    Returns:
        out, and lse: natural logarithm, without the sink. An empty row gets 0 and -inf.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format.

    Source: FlashMLA ``flash_mla_with_kvcache``; MAX ``flare_mla_decode_ragged``.

    >>> from sparsemla import BF16_576, PagedCache
    >>> cache = PagedCache.allocate(BF16_576, num_pages=4, page_size=64)
    >>> q = torch.randn(2, 1, 16, 576, dtype=torch.bfloat16)
    >>> table = torch.tensor([[0, 2], [3, -1]], dtype=torch.int32)
    >>> lens = torch.tensor([100, 7], dtype=torch.int32)
    >>> dense_decode(q, cache, table, lens, softmax_scale=192**-0.5)[0].shape
    torch.Size([2, 1, 16, 512])
    """
    check = Checker("dense_decode", instead="sparse_attention")
    check.tensor("q", q, "B S H D", FLOATS)
    check.attended("cache", cache)
    check.head_dim("q", cache)
    page_table = check.tensor("page_table", page_table, "B W", INTEGERS)
    seq_lens = check.tensor("seq_lens", seq_lens, "B", INTEGERS)
    check.optional("attn_sink", attn_sink, "H", torch.float32)
    check.number("softmax_scale", softmax_scale)
    check.kind("causal", causal, bool)
    if check.validates(validate):
        check.paging(cache, page_table, seq_lens)
    check.bind("V", cache.format.value_dim)
    splits = _check_splits(check, q, cache, num_splits, workspace)
    out = check.output("out", out, "B S H V", q.dtype)
    lse = check.output("lse", lse, "B S H", torch.float32)
    _dense_decode(
        DenseDecode(
            q,
            cache,
            page_table,
            seq_lens,
            softmax_scale,
            causal,
            attn_sink,
            splits,
            workspace,
            out,
            lse,
        )
    )
    return out, lse


_merge_states = operator(attention.MERGE_STATES)


@repeated
def merge_states(
    outs: Tensor,
    lses: Tensor,
    *,
    attn_sink: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of key sets, from the attention over each.

    ``lse = ln sum_i exp(lses[i])`` and ``out = sum_i exp(lses[i] - lse) outs[i]``. If the lse of a
    part is -inf, its out is ignored, even NaN.

    Args:
        outs: ``[N, T, H, V]`` bfloat16, float16 or float32, partial outputs without the sink.
        lses: float32 ``[N, T, H]``, natural logarithms.
        attn_sink: float32 ``[H]``, applied to the merged output.
        out: ``[T, H, V]`` of outs' dtype, written.
        lse: float32 ``[T, H]``, written; must not lie in lses.

    Returns:
        out and lse; 0 and -inf where every part is empty.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: FlashMLA's split-KV combine; FlashInfer ``merge_states``.

    >>> outs, lses = torch.ones(2, 5, 3, 8), torch.zeros(2, 5, 3)
    >>> out, lse = merge_states(outs, lses)
    >>> round(lse[0, 0].item(), 4)
    0.6931
    """
    check = Checker("merge_states")
    check.tensor("outs", outs, "N T H V", FLOATS)
    check.tensor("lses", lses, "N T H", torch.float32)
    check.optional("attn_sink", attn_sink, "H", torch.float32)
    out = check.output("out", out, "T H V", outs.dtype)
    lse = check.output("lse", lse, "T H", torch.float32)
    _merge_states(MergeStates(outs, lses, attn_sink, out, lse))
    return out, lse
