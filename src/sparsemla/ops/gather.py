"""From selected positions to cache slots, and from cache rows to a bfloat16 workspace."""

import torch
from torch import Tensor

from sparsemla import dispatch
from sparsemla.cache import PagedCache
from sparsemla.checks import INTEGERS, SIGNED, Checker
from sparsemla.ops._library import operator


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
        check.tensor("prefill_request_ids", prefill_request_ids, "T", SIGNED)
    if check.validates(validate):
        check.values("request_ids", request_ids, 0, page_table.shape[0])
    out = check.output("out", out, "T K", torch.int32)
    if workspace_starts is not None and workspace_starts.shape[0] == 0:  # every token decodes
        workspace_starts = prefill_request_ids = None
    _to_slots(
        topk_indices, page_table, request_ids, page_size, workspace_starts, prefill_request_ids, out
    )
    return out


@operator("out")
def _to_slots(
    topk_indices: Tensor,
    page_table: Tensor,
    request_ids: Tensor,
    page_size: int,
    workspace_starts: Tensor | None,
    prefill_request_ids: Tensor | None,
    out: Tensor,
) -> dispatch.Launch:
    return dispatch.find("to_slots", topk_indices, topk=topk_indices.shape[1])


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
    _gather_dequant(cache, page_table, seq_lens, workspace_starts, seq_starts, out)
    return out


@operator("out")
def _gather_dequant(
    cache: PagedCache,
    page_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    seq_starts: Tensor | None,
    out: Tensor,
) -> dispatch.Launch:
    return dispatch.find("gather_dequant", out, format=cache.format)
