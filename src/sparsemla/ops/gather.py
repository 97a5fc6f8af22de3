"""Cache slots of selected, visible and new keys; cache rows in a bfloat16 workspace."""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.checks import INTEGERS, Checker
from sparsemla.kernels import gather
from sparsemla.kernels.gather.arguments import EntrySlots, GatherDequant, ToSlots, VisibleSlots
from sparsemla.kernels.repeat import repeated
from sparsemla.ops._library import operator

_to_slots = operator(gather.TO_SLOTS)


@repeated
def to_slots(
    topk_indices: Tensor,
    page_table: Tensor,
    request_ids: Tensor,
    *,
    page_size: int,
    workspace_starts: Tensor | None = None,
    prefill_request_ids: Tensor | None = None,
    validate: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Positions in a request to slots of the cache, or to rows of a prefill workspace.

    ==============================================  ====================================
    case, first match                               result
    ==============================================  ====================================
    index < 0, or its page is outside the table     -1
    the token's request or prefill does not exist   -1
    ``prefill_request_ids[t] >= 0``                 ``workspace_starts[that] + index``
    the table holds a negative page id there        -1
    the result does not fit int32                   -1
    otherwise                                       ``page * page_size + index % page_size``
    ==============================================  ====================================

    Args:
        topk_indices: int32, int64 or uint32 ``[T, K]``, positions in the token's request, -1 for
            none.
        page_table: int32, int64 or uint32 ``[B, W]``.
        request_ids: int32, int64 or uint32 ``[T]``, the request of each token.
        page_size: tokens of a page.
        workspace_starts: int32, int64 or uint32 ``[num_prefills]``, first workspace row of each
            prefill.
        prefill_request_ids: int32, int64 or uint32 ``[T]``, number of the token's prefill, -1 for
            decodes.
        validate: read request_ids and refuse values out of range.
        out: int32 ``[T, K]``, written.

    Returns:
        int32 ``[T, K]``, in the order of the indices.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: vLLM ``triton_convert_req_index_to_global_index``.

    >>> table = torch.tensor([[7, 2]], dtype=torch.int32)
    >>> to_slots(torch.tensor([[5, 0, -1, 8]]), table, torch.tensor([0]), page_size=4)
    tensor([[ 9, 28, -1, -1]], dtype=torch.int32)
    """
    check = Checker("to_slots")
    topk_indices = check.tensor("topk_indices", topk_indices, "T K", INTEGERS)
    page_table = check.tensor("page_table", page_table, "B W", INTEGERS)
    request_ids = check.tensor("request_ids", request_ids, "T", INTEGERS)
    check.positive("page_size", page_size)
    if workspace_starts is None:
        check.absent("prefill_request_ids", prefill_request_ids, "without workspace_starts")
    else:
        workspace_starts = check.tensor("workspace_starts", workspace_starts, "P", INTEGERS)
        prefill_request_ids = check.signed("prefill_request_ids", prefill_request_ids, "T")
    if check.validates(validate):
        check.values("request_ids", request_ids, 0, page_table.shape[0])
    out = check.output("out", out, "T K", torch.int32)
    if workspace_starts is not None and workspace_starts.shape[0] == 0:  # every token decodes
        workspace_starts = prefill_request_ids = None
    _to_slots(
        ToSlots(
            topk_indices,
            page_table,
            request_ids,
            page_size,
            workspace_starts,
            prefill_request_ids,
            out,
        )
    )
    return out


_entry_slots = operator(gather.ENTRY_SLOTS)


@repeated
def entry_slots(
    positions: Tensor,
    page_table: Tensor,
    request_ids: Tensor,
    *,
    ratio: int,
    page_size: int,
    validate: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The slot of the entry that each token completes: the ``slot_mapping`` of pooled keys.

    A request has one key, an *entry*, for every ``ratio`` tokens. The token at position ``p``
    completes entry ``p // ratio`` if ``(p + 1) % ratio == 0``. All other tokens get -1, as do
    tokens without a request, negative positions, and entries for which :func:`to_slots` gives -1.

    Args:
        positions: int32, int64 or uint32 ``[T]``, position of each token in its request.
        page_table: int32, int64 or uint32 ``[B, W]``, pages of the entries.
        request_ids: int32, int64 or uint32 ``[T]``, the request of each token.
        ratio: tokens of an entry.
        page_size: entries of a page.
        validate: read positions and request_ids and refuse values out of range.
        out: int32 ``[T]``, written.

    Returns:
        int32 ``[T]``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V4 inference code, ``Compressor``; vLLM ``CompressorMetadata``.

    >>> table = torch.tensor([[7, 2]])
    >>> entry_slots(torch.arange(6, 12), table, torch.zeros(6).long(), ratio=4, page_size=2)
    tensor([-1, 15, -1, -1, -1,  4], dtype=torch.int32)
    """
    check = Checker("entry_slots")
    positions = check.tensor("positions", positions, "T", INTEGERS)
    page_table = check.tensor("page_table", page_table, "B W", INTEGERS)
    request_ids = check.tensor("request_ids", request_ids, "T", INTEGERS)
    check.positive("ratio", ratio)
    check.positive("page_size", page_size)
    if check.validates(validate):
        check.tokens(positions, request_ids, page_table, page_size, ratio)
    out = check.output("out", out, "T", torch.int32)
    _entry_slots(EntrySlots(positions, page_table, request_ids, ratio, page_size, out))
    return out


_visible_slots = operator(gather.VISIBLE_SLOTS)


@repeated
def visible_slots(
    positions: Tensor,
    page_table: Tensor,
    request_ids: Tensor,
    *,
    width: int,
    ratio: int = 1,
    page_size: int,
    validate: bool = False,
    out: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The slots of the last ``width`` keys that each token sees, as a selection without an indexer.

    A request has one key for every ``ratio`` tokens. The token at position ``p`` sees the keys
    ``0 .. (p + 1) // ratio - 1``, and of these the last ``width`` are listed in ascending order: a
    sliding window of tokens with a ratio of 1; with a larger ratio all entries of a layer that has
    no indexer, if ``width`` has room for them.

    A listed key becomes -1 where :func:`to_slots` gives -1, as on pages that the window has left.

    Args:
        positions: int32, int64 or uint32 ``[T]``, position of each token in its request.
        page_table: int32, int64 or uint32 ``[B, W]``, pages of the keys.
        request_ids: int32, int64 or uint32 ``[T]``, the request of each token. A token whose
            request does not exist, or whose position is negative, sees nothing.
        width: columns of the result, the most keys of a token.
        ratio: tokens of a key.
        page_size: keys of a page.
        validate: read positions and request_ids and refuse values out of range.
        out: int32 ``[T, width]``, written.
        lengths: int32 ``[T]``, written.

    Returns:
        ``(slots, lengths)``: int32 ``[T, width]`` and ``[T]``. The first ``lengths[t]`` columns of
        row ``t`` list keys; the rest is -1.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V4 inference code, ``get_window_topk_idxs`` and ``get_compress_topk_idxs``.

    >>> table = torch.tensor([[7, 2]])
    >>> visible_slots(torch.arange(3), table, torch.zeros(3).long(), width=2, page_size=2)
    (tensor([[14, -1],
            [14, 15],
            [15,  4]], dtype=torch.int32), tensor([1, 2, 2], dtype=torch.int32))
    """
    check = Checker("visible_slots")
    positions = check.tensor("positions", positions, "T", INTEGERS)
    page_table = check.tensor("page_table", page_table, "B W", INTEGERS)
    request_ids = check.tensor("request_ids", request_ids, "T", INTEGERS)
    check.positive("width", width)
    check.positive("ratio", ratio)
    check.positive("page_size", page_size)
    if check.validates(validate):
        check.tokens(positions, request_ids, page_table, page_size, ratio)
    check.bind("width", width)
    out = check.output("out", out, "T width", torch.int32)
    lengths = check.output("lengths", lengths, "T", torch.int32)
    _visible_slots(
        VisibleSlots(positions, page_table, request_ids, width, ratio, page_size, out, lengths)
    )
    return out, lengths


_gather_dequant = operator(gather.GATHER_DEQUANT)


@repeated
def gather_dequant(
    cache: PagedCache,
    page_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    *,
    out: Tensor,
    seq_starts: Tensor | None = None,
    validate: bool = False,
) -> Tensor:
    """Dequantise the rows of requests into one bfloat16 workspace.

    ``out[workspace_starts[b] + i] = row of position seq_starts[b] + i`` for ``i < seq_lens[b]``;
    bfloat16 dims are copied bit for bit, e4m3 dims become ``bfloat16(float32(fp8) * scale)``. Rows
    of ``out`` that no request covers keep their values, and rows outside of ``out`` are skipped; a
    page id out of range gives a zero row.

    Args:
        cache: rows of any format, any page size.
        page_table: int32, int64 or uint32 ``[B, W]``.
        seq_lens: int32, int64 or uint32 ``[B]``, rows to gather for each request; 0 is legal.
        workspace_starts: int32, int64 or uint32 ``[B]``, first row of each request in ``out``.
        out: bfloat16 ``[rows, head_dim]``, written.
        seq_starts: int32, int64 or uint32 ``[B]``, first position of each request; default 0.
        validate: read the values and refuse lengths and page ids out of range.

    Returns:
        out.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format.

    Source: vLLM ``cp_gather_and_upconvert_fp8_kv_cache``.

    >>> from sparsemla import FP8_DS_MLA, PagedCache
    >>> cache = PagedCache.allocate(FP8_DS_MLA, num_pages=4, page_size=2)
    >>> table, lens = torch.tensor([[3, 1]]), torch.tensor([3])
    >>> workspace = torch.empty(3, 576, dtype=torch.bfloat16)
    >>> gather_dequant(cache, table, lens, torch.tensor([0]), out=workspace).shape
    torch.Size([3, 576])
    """
    check = Checker("gather_dequant")
    check.cache("cache", cache)
    check.bind("D", cache.format.head_dim)
    page_table = check.tensor("page_table", page_table, "B W", INTEGERS)
    seq_lens = check.tensor("seq_lens", seq_lens, "B", INTEGERS)
    workspace_starts = check.tensor("workspace_starts", workspace_starts, "B", INTEGERS)
    seq_starts = check.optional("seq_starts", seq_starts, "B", INTEGERS)
    check.written("out", out, "rows D", torch.bfloat16)
    if check.validates(validate):
        check.paging(cache, page_table, seq_lens)
        if seq_starts is not None:
            check.values("seq_starts", seq_starts, 0, page_table.shape[1] * cache.page_size + 1)
            check.paging(cache, page_table, seq_lens + seq_starts, "seq_starts + seq_lens")
        check.values("workspace_starts", workspace_starts, 0, len(out) + 1)
        check.values("workspace_starts + seq_lens", workspace_starts + seq_lens, 0, len(out) + 1)
    _gather_dequant(GatherDequant(out, cache, page_table, seq_lens, workspace_starts, seq_starts))
    return out
