"""Merging of attention states: partial results of splits, or of any parts of the keys."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.kernels.attention.arguments import MergeStates
from sparsemla.kernels.attention.triton.tiles import LN2, LOG2E, LOWEST
from sparsemla.kernels.common.integers import cdiv, next_power_of_2


def partial_results(
    q: Tensor,
    value_dim: int,
    num_splits: int,
    workspace: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs of the splits of a decode: ``[N, B, S, H, V]`` and ``[N, B, S, H]``.

    A single split stores into the results themselves; several store float32 outputs, followed by
    their lses, into the workspace.

    Raises:
        ValueError: the workspace is too small.
    """
    if num_splits == 1:
        return out[None], lse[None]
    shape = num_splits, *q.shape[:3]
    if workspace is None:
        outs = q.new_empty(*shape, value_dim, dtype=torch.float32)
        return outs, q.new_empty(shape, dtype=torch.float32)
    rows = math.prod(shape)
    size = 4 * rows * (value_dim + 1)
    if workspace.numel() < size:
        raise ValueError(
            f"workspace must have at least {size} bytes for {num_splits} splits, "
            f"got {workspace.numel()}"
        )
    floats = workspace[:size].view(torch.float32)
    outs = floats[: rows * value_dim].view(*shape, value_dim)
    return outs, floats[rows * value_dim :].view(shape)


def merge_splits(
    outs: Tensor, lses: Tensor, attn_sink: Tensor | None, out: Tensor | None, lse: Tensor | None
) -> None:
    """Merge the results of several splits, unless the caller merges them itself."""
    if outs.shape[0] > 1 and out is not None:
        launch_merge(outs, lses, attn_sink, out, lse)


@triton.jit(do_not_specialize=["num_parts"])
def _merge(
    outs,
    outs_part,
    outs_request,
    outs_token,
    outs_head,
    lses,
    lses_part,
    lses_request,
    lses_token,
    attn_sink,
    out,
    out_request,
    out_token,
    out_head,
    lse,
    lse_request,
    lse_token,
    num_parts,
    num_tokens,
    num_heads,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Some dims of a (request, token, head): ``sum_i exp(lses[i] - lse) outs[i]``."""
    row = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    head = (row % num_heads).to(tl.int64)
    token = (row // num_heads % num_tokens).to(tl.int64)
    request = (row // num_heads // num_tokens).to(tl.int64)
    d = block * BLOCK + tl.arange(0, BLOCK)
    outs += request * outs_request + token * outs_token + head * outs_head
    lses += request * lses_request + token * lses_token + head
    m = LOWEST
    l = 0.0
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        real = part < num_parts
        part = part.to(tl.int64)
        state = tl.load(lses + part * lses_part, mask=real, other=float("-inf")) * LOG2E
        at = (part * outs_part)[:, None] + d[None, :]
        x = tl.load(outs + at, mask=real[:, None] & (d < V)[None, :], other=0.0).to(tl.float32)
        m_new = tl.maximum(m, tl.max(state))
        alpha = tl.exp2(m - m_new)
        weight = tl.exp2(state - m_new)
        # A part without keys may hold NaN, which must not reach the result.
        x = tl.where((state > float("-inf"))[:, None], x * weight[:, None], 0.0)
        acc = acc * alpha + tl.sum(x, 0)
        l = l * alpha + tl.sum(weight)
        m = m_new
    empty = l == 0
    lse += request * lse_request + token * lse_token + head
    if block == 0:
        tl.store(lse, (m + tl.log2(l)) * LN2)  # log2(0) is -inf
    if attn_sink is not None:
        l += tl.exp2(tl.load(attn_sink + head) * LOG2E - m)
    acc = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, l))
    out += request * out_request + token * out_token + head * out_head
    tl.store(out + d, acc.to(out.dtype.element_ty), mask=d < V)


def launch_merge(
    outs: Tensor, lses: Tensor, attn_sink: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """Merge ``[N, B, S, H, V]`` into ``[B, S, H, V]``."""
    num_parts, batch, num_tokens, num_heads, value_dim = outs.shape
    if lse.numel() == 0:
        return
    # Programs mostly wait for memory: with few rows, split the dims over more programs.
    num_rows = batch * num_tokens * num_heads
    block = min(next_power_of_2(max(value_dim, 1)), 128 if num_rows <= 1024 else 256)
    blocks = max(cdiv(value_dim, block), 1)  # without dims there is an LSE
    parts = min(next_power_of_2(max(num_parts, 1)), 64)  # one step: each waits for its loads
    _merge[(num_rows * blocks,)](
        outs,
        *outs.stride()[:4],
        lses,
        *lses.stride()[:3],
        attn_sink,
        out,
        *out.stride()[:3],
        lse,
        *lse.stride()[:2],
        num_parts,
        num_tokens,
        num_heads,
        V=value_dim,
        BLOCK=block,
        BLOCKS=blocks,
        PARTS=parts,
        num_warps=max(block // 128, block * parts // 2048, 1),
    )


def merge_states(call: MergeStates) -> None:
    outs, lses = call.outs[:, None], call.lses[:, None]
    launch_merge(outs, lses, call.attn_sink, call.out[None], call.lse[None])
