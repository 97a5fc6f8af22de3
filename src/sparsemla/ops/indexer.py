"""The lightning indexer: scores of all keys for each query token, and the best keys."""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.checks import FLOATS, INTEGERS, Checker
from sparsemla.kernels import indexer
from sparsemla.kernels.indexer.arguments import (
    IndexerScores,
    IndexerScoresPaged,
    IndexerTopk,
    IndexerTopkBlocks,
    IndexerTopkOfBlocks,
)
from sparsemla.kernels.repeat import repeated
from sparsemla.ops._library import operator

QUERIES = (torch.float8_e4m3fn, torch.bfloat16)
WEIGHTS = FLOATS
MAX_BLOCK_SIZE = 1024
"""Most keys of a block: a program holds a block's scores in registers."""

_indexer_scores = operator(indexer.INDEXER_SCORES)


@repeated
def indexer_scores(
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    index_k_scales: Tensor | None,
    *,
    row_starts: Tensor,
    row_ends: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Scores of contiguous keys, each query row over its own range (prefill).

    ``out[m, n] = index_k_scales[n] * sum_h weights[m, h] * relu(<index_q[m, h], index_k[n]>)`` for
    ``row_starts[m] <= n < row_ends[m]``, -inf elsewhere; accumulated in float32.

    Args:
        index_q: float8_e4m3fn or bfloat16 ``[M, HI, DI]``.
        weights: bfloat16, float16 or float32 ``[M, HI]``, with every factor folded in
            (:func:`prepare_index_queries`); may be negative.
        index_k: ``[N, DI]`` of index_q's dtype.
        index_k_scales: float32 ``[N]``, or None for 1.
        row_starts, row_ends: int32, int64 or uint32 ``[M]``; clamped to [0, N].
        out: float32 ``[M, N]``, written; rows may be strided.

    Returns:
        float32 ``[M, N]``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepGEMM ``fp8_mqa_logits``; DeepSeek-V3.2 (arXiv 2512.02556) section 2.1.

    >>> index_q, index_k = torch.ones(1, 4, 32).bfloat16(), torch.ones(3, 32).bfloat16()
    >>> start, end = torch.tensor([0]), torch.tensor([2])
    >>> indexer_scores(index_q, torch.ones(1, 4), index_k, None, row_starts=start, row_ends=end)
    tensor([[128., 128., -inf]])
    """
    check = Checker("indexer_scores", instead="selected_scores")
    check.tensor("index_q", index_q, "M HI DI", QUERIES)
    check.index_heads()
    check.tensor("weights", weights, "M HI", WEIGHTS)
    check.tensor("index_k", index_k, "N DI", index_q.dtype)
    check.optional("index_k_scales", index_k_scales, "N", torch.float32)
    row_starts = check.tensor("row_starts", row_starts, "M", INTEGERS)
    row_ends = check.tensor("row_ends", row_ends, "M", INTEGERS)
    out = check.output("out", out, "M N", torch.float32)
    _indexer_scores(
        IndexerScores(index_q, weights, index_k, index_k_scales, row_starts, row_ends, out)
    )
    return out


_indexer_scores_paged = operator(indexer.INDEXER_SCORES_PAGED)


@repeated
def indexer_scores_paged(
    index_q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    max_seq_len: int,
    ratio: int = 1,
    validate: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Scores of the paged keys of each request (decode).

    ``out[b, s, n]`` is the score of :func:`indexer_scores` for the key at position ``n`` of request
    ``b``, for ``n`` below the row's length divided by ``ratio``, rounded down; -inf elsewhere and
    for page ids out of range.

    Args:
        index_q: float8_e4m3fn or bfloat16 ``[B, S, HI, DI]``, to match the cache's format.
        weights: bfloat16, float16 or float32 ``[B, S, HI]``, with every factor folded in.
        cache: indexer keys, any page size.
        page_table: int32, int64 or uint32 ``[B, W]``.
        seq_lens: int32, int64 or uint32: ``[B, S]``, the length of each row; or ``[B]``, the length
            of each request: row ``j`` then has the length ``seq_lens[b] - S + 1 + j``.
        max_seq_len: columns of the result; rows with more keys are cut.
        ratio: tokens of a key; lengths count tokens.
        validate: read page_table and seq_lens and refuse values out of range.
        out: float32 ``[B, S, max_seq_len]``, written; rows may be strided.

    Returns:
        float32 ``[B, S, max_seq_len]``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format.

    Source: DeepGEMM ``fp8_paged_mqa_logits``.

    >>> from sparsemla import INDEX_FP8, PagedCache
    >>> cache = PagedCache.allocate(INDEX_FP8, num_pages=4, page_size=64)
    >>> index_q = torch.randn(2, 1, 64, 128).to(torch.float8_e4m3fn)
    >>> table, lens = torch.tensor([[0, 2], [3, 1]]), torch.tensor([100, 7])
    >>> weights = torch.ones(2, 1, 64)
    >>> indexer_scores_paged(index_q, weights, cache, table, lens, max_seq_len=128).shape
    torch.Size([2, 1, 128])
    """
    check = Checker("indexer_scores_paged", instead="selected_scores")
    check.cache("cache", cache)
    check.tensor("index_q", index_q, "B S HI D", check.query_dtype(cache))
    check.index_heads()
    check.head_dim("index_q", cache)
    check.tensor("weights", weights, "B S HI", WEIGHTS)
    page_table = check.tensor("page_table", page_table, "B W", INTEGERS)
    per_row = isinstance(seq_lens, Tensor) and seq_lens.dim() == 2
    seq_lens = check.tensor("seq_lens", seq_lens, "B S" if per_row else "B", INTEGERS)
    check.positive("max_seq_len", max_seq_len)
    check.positive("ratio", ratio)
    if check.validates(validate) and index_q.shape[1] > 0:
        lengths = seq_lens.amax(1) if per_row else seq_lens
        check.paging(cache, page_table, lengths, ratio=ratio)
    check.bind("N", max_seq_len)
    out = check.output("out", out, "B S N", torch.float32)
    _indexer_scores_paged(
        IndexerScoresPaged(index_q, weights, cache, page_table, seq_lens, max_seq_len, ratio, out)
    )
    return out


_indexer_topk = operator(indexer.INDEXER_TOPK)


@repeated
def indexer_topk(
    index_q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    *,
    topk: int,
    causal: bool = True,
    ratio: int = 1,
    as_slots: bool = False,
    max_workspace_bytes: int = 256 << 20,
    validate: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The ``topk`` best keys of each query token, in memory that does not grow with the context.

    Scores as in :func:`indexer_scores`, selection as in :func:`select_topk` (exact, ties to the
    lower position). Each ``ratio`` tokens of a request have one key. The token at position ``p``
    competes with the first ``(p + 1) // ratio`` keys if ``causal``, else with all
    ``seq_lens[b] // ratio``. Requests are ragged; a prefill, a decode and a speculative decode are
    all the same to this op.

    Args:
        index_q: float8_e4m3fn or bfloat16 ``[T, HI, DI]``, to match the cache's format.
        weights: bfloat16, float16 or float32 ``[T, HI]``, with every factor folded in.
        cache: indexer keys, any page size; this step's keys are already in it.
        input_row_offsets: int32, int64 or uint32 ``[B + 1]``, first query token of each request.
            Tokens before the first request or after the last get -1.
        seq_lens: int32, int64 or uint32 ``[B]``, tokens of each request, this step's included.
        page_table: int32, int64 or uint32 ``[B, W]``, pages of the keys.
        topk: k, any positive number.
        causal: mask later keys.
        ratio: tokens of a key: 1, or the ratio of :class:`Pooling` for pooled keys. A token sees
            the keys of all windows that are complete with it.
        as_slots: return the slots of the selected keys, as :func:`to_slots` would, instead of
            positions.
        max_workspace_bytes: bound on the memory of the scores at any time, on a GPU including the
            lists of the selection. A GPU processes at least one token: 4 bytes for each key that
            the page table has room for, and up to 18 MB of lists. The CPU processes at least
            ``max(topk, 2048)`` keys of a token, with buffers of some 40 MiB in addition.
        validate: read the offsets, lengths and page ids and refuse values out of range.
        out: int32 ``[T, topk]``, written.

    Returns:
        int32 ``[T, topk]``, ascending positions in the request, then -1; or their slots.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format.

    Source: MAX ``mla_indexer_ragged_float8_paged``; DeepSeek-V3.2 (arXiv 2512.02556) section 2.1;
    ``ratio``: DeepSeek-V4 inference code, ``Indexer``.

    >>> from sparsemla import INDEX_FP8, PagedCache
    >>> cache = PagedCache.allocate(INDEX_FP8, num_pages=4, page_size=64)
    >>> index_q = torch.randn(3, 64, 128).to(torch.float8_e4m3fn)
    >>> indexer_topk(
    ...     index_q,
    ...     torch.ones(3, 64),
    ...     cache,
    ...     input_row_offsets=torch.tensor([0, 2, 3]),
    ...     seq_lens=torch.tensor([2, 5]),
    ...     page_table=torch.tensor([[0], [3]]),
    ...     topk=4,
    ... )
    tensor([[ 0, -1, -1, -1],
            [ 0,  1, -1, -1],
            [ 0,  1,  2,  3]], dtype=torch.int32)
    """
    check = Checker("indexer_topk", gradients="all")
    input_row_offsets, seq_lens, page_table = _check_ragged(
        check,
        index_q,
        weights,
        cache,
        input_row_offsets,
        seq_lens,
        page_table,
        causal=causal,
        ratio=ratio,
        max_workspace_bytes=max_workspace_bytes,
        validate=validate,
    )
    check.positive("topk", topk)
    check.kind("as_slots", as_slots, bool)
    check.bind("K", topk)
    out = check.output("out", out, "T K", torch.int32)
    _indexer_topk(
        IndexerTopk(
            index_q,
            weights,
            cache,
            input_row_offsets,
            seq_lens,
            page_table,
            topk,
            causal,
            ratio,
            as_slots,
            max_workspace_bytes,
            out,
        )
    )
    return out


_indexer_topk_blocks = operator(indexer.INDEXER_TOPK_BLOCKS)


@repeated
def indexer_topk_blocks(
    index_q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    *,
    topk: int,
    topk_blocks: int,
    block_size: int,
    causal: bool = True,
    ratio: int = 1,
    max_workspace_bytes: int = 256 << 20,
    validate: bool = False,
    out: Tensor | None = None,
    blocks_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`indexer_topk`, and the best blocks of keys, among which later layers select.

    Block ``i`` of a request has the keys at positions ``i * block_size`` to
    ``(i + 1) * block_size - 1``. Its score is the best score of those that the token sees, and NaN
    counts as -inf. The block with the last key that the token sees is always chosen, and so are all
    of at most ``topk_blocks``; ties go to the lower block. :func:`indexer_topk_of_blocks` takes the
    blocks.

    Args:
        index_q: as for :func:`indexer_topk`, like all arguments that are not listed.
        weights: as there.
        cache: as there.
        input_row_offsets: as there.
        seq_lens: as there.
        page_table: as there.
        topk: keys of a token, any positive number.
        topk_blocks: blocks of a token, any positive number.
        block_size: keys of a block.
        causal: mask later keys.
        ratio: tokens of a key.
        max_workspace_bytes: bound on the memory of the scores, as for :func:`indexer_topk`; at
            least one token is processed at a time.
        validate: read the offsets, lengths and page ids and refuse values out of range.
        out: int32 ``[T, topk]``, written.
        blocks_out: int32 ``[T, topk_blocks]``, written.

    Returns:
        The selection of :func:`indexer_topk`, and the blocks, int32 ``[T, topk_blocks]``: they
        ascend, then -1.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format.

    Source: DeepSeek-V4.1, the layer ``candidate_source_layer_id``; vLLM's
    ``select_candidate_blocks``.

    >>> from sparsemla import INDEX_FP8, PagedCache
    >>> cache = PagedCache.allocate(INDEX_FP8, num_pages=4, page_size=64)
    >>> index_q = torch.randn(1, 64, 128).to(torch.float8_e4m3fn)
    >>> request = torch.tensor([0, 1]), torch.tensor([21]), torch.tensor([[3]])
    >>> sizes = {"topk": 2, "topk_blocks": 2, "block_size": 8}
    >>> indexer_topk_blocks(index_q, torch.ones(1, 64), cache, *request, **sizes)
    (tensor([[0, 1]], dtype=torch.int32), tensor([[0, 2]], dtype=torch.int32))
    """
    check = Checker("indexer_topk_blocks", gradients="all")
    input_row_offsets, seq_lens, page_table = _check_ragged(
        check,
        index_q,
        weights,
        cache,
        input_row_offsets,
        seq_lens,
        page_table,
        causal=causal,
        ratio=ratio,
        max_workspace_bytes=max_workspace_bytes,
        validate=validate,
    )
    check.positive("topk", topk)
    check.positive("topk_blocks", topk_blocks)
    check.positive("block_size", block_size, MAX_BLOCK_SIZE + 1)
    check.bind("K", topk)
    check.bind("topk_blocks", topk_blocks)
    out = check.output("out", out, "T K", torch.int32)
    blocks_out = check.output("blocks_out", blocks_out, "T topk_blocks", torch.int32)
    _indexer_topk_blocks(
        IndexerTopkBlocks(
            index_q,
            weights,
            cache,
            input_row_offsets,
            seq_lens,
            page_table,
            topk,
            topk_blocks,
            block_size,
            causal,
            ratio,
            max_workspace_bytes,
            out,
            blocks_out,
        )
    )
    return out, blocks_out


_indexer_topk_of_blocks = operator(indexer.INDEXER_TOPK_OF_BLOCKS)


@repeated
def indexer_topk_of_blocks(
    index_q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    blocks: Tensor,
    *,
    topk: int,
    block_size: int,
    causal: bool = True,
    ratio: int = 1,
    max_workspace_bytes: int = 256 << 20,
    validate: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`indexer_topk` among the keys of each token's own blocks; no other key is read.

    The keys of a token are those of its blocks that :func:`indexer_topk` would offer it, so the
    work does not grow with the context. :func:`to_slots` makes slots of the positions.

    Args:
        index_q: as for :func:`indexer_topk`, like all arguments that are not listed.
        weights: as there.
        cache: as there.
        input_row_offsets: as there.
        seq_lens: as there.
        page_table: as there.
        blocks: int32, int64 or uint32 ``[T, C]``, blocks of ``block_size`` keys as
            :func:`indexer_topk_blocks` returns them: they ascend, and negative ones come last.
            Blocks behind the last key that a token sees name nothing. In any other order the
            result is some of the listed keys.
        topk: k, any positive number.
        block_size: keys of a block.
        causal: mask later keys.
        ratio: tokens of a key.
        max_workspace_bytes: bound on the memory of the scores; at least one token, with 4 bytes for
            each key of its blocks, is processed at a time.
        validate: read the offsets, lengths, page ids and blocks and refuse values out of range, and
            blocks that do not ascend.
        out: int32 ``[T, topk]``, written.

    Returns:
        int32 ``[T, topk]``, ascending positions in the request, then -1.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format.

    Source: DeepSeek-V4.1, the layers behind ``candidate_source_layer_id``; vLLM's
    ``sparse_mqa_indexer``, SGLang's ``topk_among_blocks``.

    >>> from sparsemla import INDEX_FP8, PagedCache
    >>> cache = PagedCache.allocate(INDEX_FP8, num_pages=4, page_size=64)
    >>> index_q = torch.randn(1, 64, 128).to(torch.float8_e4m3fn)
    >>> request = torch.tensor([0, 1]), torch.tensor([21]), torch.tensor([[3]])
    >>> indexer_topk_of_blocks(
    ...     index_q,
    ...     torch.ones(1, 64),
    ...     cache,
    ...     *request,
    ...     torch.tensor([[1, 2]]),
    ...     topk=3,
    ...     block_size=8,
    ... )
    tensor([[ 8,  9, 10]], dtype=torch.int32)
    """
    check = Checker("indexer_topk_of_blocks", gradients="all")
    input_row_offsets, seq_lens, page_table = _check_ragged(
        check,
        index_q,
        weights,
        cache,
        input_row_offsets,
        seq_lens,
        page_table,
        causal=causal,
        ratio=ratio,
        max_workspace_bytes=max_workspace_bytes,
        validate=validate,
    )
    blocks = check.tensor("blocks", blocks, "T C", INTEGERS)
    check.positive("topk", topk)
    check.positive("block_size", block_size, MAX_BLOCK_SIZE + 1)
    if validate:
        _check_blocks(check.op, blocks)
    check.bind("K", topk)
    out = check.output("out", out, "T K", torch.int32)
    _indexer_topk_of_blocks(
        IndexerTopkOfBlocks(
            index_q,
            weights,
            cache,
            input_row_offsets,
            seq_lens,
            page_table,
            blocks,
            topk,
            block_size,
            causal,
            ratio,
            max_workspace_bytes,
            out,
        )
    )
    return out


def _check_ragged(
    check: Checker,
    index_q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    *,
    causal: bool,
    ratio: int,
    max_workspace_bytes: int,
    validate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Check the queries and keys of ragged requests; returns the checked offsets and tables."""
    check.cache("cache", cache)
    check.tensor("index_q", index_q, "T HI D", check.query_dtype(cache))
    check.index_heads()
    check.head_dim("index_q", cache)
    check.tensor("weights", weights, "T HI", WEIGHTS)
    page_table = check.tensor("page_table", page_table, "B W", INTEGERS)
    seq_lens = check.tensor("seq_lens", seq_lens, "B", INTEGERS)
    check.bind("B+1", seq_lens.shape[0] + 1)
    input_row_offsets = check.tensor("input_row_offsets", input_row_offsets, "B+1", INTEGERS)
    check.positive("max_workspace_bytes", max_workspace_bytes, below=2**63)
    check.kind("causal", causal, bool)
    check.positive("ratio", ratio)
    if check.validates(validate):
        check.offsets("input_row_offsets", input_row_offsets, index_q.shape[0])
        check.paging(cache, page_table, seq_lens, ratio=ratio)
    return input_row_offsets, seq_lens, page_table


def _check_blocks(op: str, blocks: Tensor) -> None:
    """Check the values of lists of blocks: the negative ones come last, the others ascend."""
    before, after = blocks[:, :-1], blocks[:, 1:]
    wrong = ((after >= 0) & ((before < 0) | (after <= before))).any(1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"{op}: blocks must ascend in each row, and negative ones come last, got "
            f"{blocks[row].tolist()} for token {row}"
        )
