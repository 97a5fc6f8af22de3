"""Reference of pooled windows. Shapes: T tokens, D dims of an entry, W dims of a token's values."""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import ScaleMode
from sparsemla.pooling import Pooling, WindowState
from sparsemla.reference.quant import fused_rope_rmsnorm_quant


def pool_windows(
    values: Tensor,
    gates: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    state: WindowState,
    cache: PagedCache,
    input_row_offsets: Tensor,
    *,
    pooling: Pooling,
    gate_bias: Tensor | None = None,
    positions: Tensor,
    request_ids: Tensor,
    ring_ids: Tensor,
    slot_mapping: Tensor,
    eps: float = 1e-6,
    interleaved: bool = True,
    scale_mode: ScaleMode = "pow2",
) -> Tensor:
    """Pool the windows that close, write their entries, then keep the step's rows."""
    values, gates = values.float(), gates.float()  # [T, W]
    num_tokens, dim = len(positions), norm_weight.shape[0]
    ratio, num_rows = pooling.ratio, state.rows.shape[1]
    if gate_bias is not None:
        gates = gates + gate_bias[positions.long() % ratio]
    pooled = values.new_zeros(num_tokens, dim)  # [T, D]
    starts, slots = torch.zeros_like(positions), torch.full_like(slot_mapping, -1)
    kept = []
    for token in range(num_tokens):
        position, request = int(positions[token]), int(request_ids[token])
        if not 0 <= request < len(ring_ids) or position < 0:
            continue
        first, end = input_row_offsets[request : request + 2].clamp(0, num_tokens).tolist()
        if not first <= token < end:
            continue
        ring = _ring_of(position, ring_ids[request], state)
        paged = ring_ids.dim() == 2
        if ring >= 0 and (paged or token + num_rows >= end):  # later rows take places of a ring
            kept.append((ring, position % num_rows, token))
        if (position + 1) % ratio:
            continue
        slots[token] = slot_mapping[token]
        starts[token] = position + 1 - ratio
        window = []  # values and gates [D] of each token that takes part
        for before in reversed(range(min(pooling.window, position + 1))):
            series = 1 if pooling.overlap and before < ratio else 0
            part = slice(series * dim, series * dim + dim)
            if token - before >= first:
                window.append((values[token - before, part], gates[token - before, part]))
                continue
            place = position - before
            ring = _ring_of(place, ring_ids[request], state)
            if ring >= 0:
                row = state.rows[ring, place % num_rows]  # [2, W]
                window.append((row[0, part], row[1, part]))
        found, weights = (torch.stack(part) for part in zip(*window, strict=True))  # [n, D]
        pooled[token] = (weights.softmax(0) * found).sum(0)
    for ring, place, token in kept:
        state.rows[ring, place] = torch.stack([values[token], gates[token]])
    no_queries = values.new_empty(num_tokens, 0, cos_sin_cache.shape[1])
    _, entries = fused_rope_rmsnorm_quant(
        no_queries,
        pooled,
        cos_sin_cache,
        norm_weight,
        cache,
        positions=starts,
        slot_mapping=slots,
        eps=eps,
        interleaved=interleaved,
        scale_mode=scale_mode,
    )
    return entries


def _ring_of(position: int, ring_ids: Tensor, state: WindowState) -> int:
    """The ring of a request ``[]``, or the page ``[W]`` of a position; -1 if there is none."""
    num_rings, num_rows = state.rows.shape[:2]
    page = position // num_rows if ring_ids.dim() else 0
    ring = int(ring_ids.flatten()[page]) if page < ring_ids.numel() else -1
    return ring if 0 <= ring < num_rings else -1
