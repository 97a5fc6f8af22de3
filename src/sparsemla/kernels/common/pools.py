"""Tokens of selected pools, in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from sparsemla.kernels.common.integers import next_power_of_2

BLOCK = 1024
"""Most entries of a program: eight for each thread."""


RUNTIME = ("counts", "lengths", "table", "table_row", "request_ids", "offsets", "num_lists")
"""Parts of batches and tables of any width: Triton would compile a kernel for each alignment."""


@triton.jit(do_not_specialize=RUNTIME)
def _expand_pools(
    pools,
    pools_list,
    counts,
    lengths,
    table,
    table_row,
    request_ids,
    offsets,
    out,
    out_list,
    num_lists,
    TOPK: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chosen, end, first_open = 0, 0, 0
    if number < num_lists:
        count = tl.load(counts + number).to(tl.int32)
        chosen = tl.minimum(count, TOPK) * RATIO
        end = chosen
        first_open = count * RATIO
        if WIDTH > TOPK * RATIO:
            end += tl.load(lengths + number).to(tl.int32) % RATIO
    pool = tl.load(pools + number * pools_list + at // RATIO, mask=at < chosen, other=0)
    token = tl.where(at < chosen, pool * RATIO + at % RATIO, first_open + at - chosen)
    named = (at < end) & (pool >= 0)
    if table is not None:
        row = number
        if request_ids is not None:
            row = tl.load(request_ids + number, mask=number < num_lists, other=0).to(tl.int64)
        token = tl.load(table + row * table_row + token, mask=named, other=0).to(tl.int32)
    if offsets is not None:
        token += tl.load(offsets + number, mask=number < num_lists, other=0).to(tl.int32)
    tl.store(out + number * out_list + at, tl.where(named, token, -1), mask=at < WIDTH)


def expand_pools(
    pools: Tensor,
    counts: Tensor,
    ratio: int,
    out: Tensor,
    *,
    lengths: Tensor | None = None,
    table: Tensor | None = None,
    request_ids: Tensor | None = None,
    offsets: Tensor | None = None,
) -> None:
    """Write the tokens of each query token's pools, then those of its open pool, then -1.

    Args:
        pools: int32 ``[T, K]``, selected complete pools, then -1.
        counts: integers ``[T]``, complete pools that each token may select from.
        ratio: R, tokens of a pool.
        out: int32 ``[N, K * R]``, or with ``lengths`` ``[N, at least K * R + R - 1]``; lists after
            the first T get -1.
        lengths: integers ``[T]``, tokens that each token sees.
        table: ``[B, W]``, slots of the tokens of each request; default positions.
        request_ids: integers ``[T]``, rows of the table; default one for each token.
        offsets: integers ``[T]``, added to the positions of each token.
    """
    width = out.shape[1]
    block = min(next_power_of_2(width), BLOCK)
    _expand_pools[(len(out), -(-width // block))](
        pools,
        pools.stride(0),
        counts,
        lengths,
        table,
        0 if table is None else table.stride(0),
        request_ids,
        offsets,
        out,
        out.stride(0),
        len(pools),
        TOPK=pools.shape[1],
        RATIO=ratio,
        WIDTH=width,
        BLOCK=block,
    )
