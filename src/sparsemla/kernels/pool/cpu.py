"""Pooled windows on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemla.kernels.common import cpu
from sparsemla.kernels.pool.arguments import PoolWindows
from sparsemla.kernels.quant.cpu import fused_rope_rmsnorm_quant
from sparsemla.pooling import WindowState


def pool_windows(call: PoolWindows) -> None:
    values, gates, gate_bias, state = call.values, call.gates, call.gate_bias, call.state
    pooling, ring_ids = call.pooling, call.ring_ids
    requests, places = call.request_ids.long(), call.positions.long()
    known = (requests >= 0) & (requests < len(ring_ids)) & (places >= 0)
    requests = requests.where(known, 0)
    tokens = torch.arange(len(places))
    offsets = call.input_row_offsets.long().clamp(0, len(places))
    # Without requests there is one offset.
    firsts, ends = offsets[requests], offsets[(requests + 1).clamp_max(len(ring_ids))]
    known &= (tokens >= firsts) & (tokens < ends)
    requests = requests.where(known, -1)
    closing = (known & ((places + 1) % pooling.ratio == 0)).nonzero()[:, 0]
    starts = torch.zeros_like(places)
    starts[closing] = places[closing] + 1 - pooling.ratio
    _check_starts(starts, pooling.ratio, call.cos_sin_cache)
    slots = torch.full_like(call.slot_mapping, -1)
    slots[closing] = call.slot_mapping[closing]
    cpu.check_slots("pool_windows", slots, call.cache)
    pooled = torch.zeros(len(places), call.norm_weight.shape[0], dtype=torch.float32)
    # A window takes its width in float32 four times over: values, gates, weights, products.
    size = 4 * 4 * pooling.window * pooled.shape[1] + 1
    for part in cpu.blocks(len(closing), cpu.WORKSPACE_BYTES // size):
        some = closing[part]
        pooled[some] = _pool(call, some, places, firsts, requests)
    fused_rope_rmsnorm_quant(call.write(pooled, starts, slots))
    num_rows = state.rows.shape[1]
    rings = _rings_of(ring_ids, requests, places[:, None], state)[:, 0]
    kept = ((rings >= 0) & (call.paged | (tokens + num_rows >= ends))).nonzero()[:, 0]
    state.rows[rings[kept], places[kept] % num_rows] = torch.stack(
        [values[kept].float(), _biased(gates[kept], gate_bias, places[kept] % pooling.ratio)], 1
    )


def _check_starts(starts: Tensor, ratio: int, cos_sin_cache: Tensor) -> None:
    """Refuse windows that begin at a position without a row in the table."""
    outside = starts >= cos_sin_cache.shape[0]
    if outside.any():
        start = int(starts[outside][0])
        raise ValueError(
            f"pool_windows: positions must be of windows that begin below "
            f"{cos_sin_cache.shape[0]}, the rows of cos_sin_cache, got {start + ratio - 1} of the "
            f"window from {start} on"
        )


def _pool(
    call: PoolWindows, closing: Tensor, places: Tensor, firsts: Tensor, requests: Tensor
) -> Tensor:
    """The pools ``[n, D]`` of the windows that the tokens ``closing [n]`` close."""
    values, gates, gate_bias, state = call.values, call.gates, call.gate_bias, call.state
    pooling, dim = call.pooling, call.norm_weight.shape[0]
    before = torch.arange(pooling.window - 1, -1, -1)  # oldest token first
    where = places[closing, None] - before  # [n, window]
    source = closing[:, None] - before
    in_step = (where >= 0) & (source >= firsts[closing, None])
    ring = _rings_of(call.ring_ids, requests[closing], where, state)
    in_ring = (where >= 0) & ~in_step & (ring >= 0)
    source = source.where(in_step, 0)
    ring = ring.where(in_ring, 0)
    row = (where % state.rows.shape[1]).where(in_ring, 0)
    biased = _biased(gates[source], gate_bias, where % pooling.ratio)
    if len(state.rows):
        kept = state.rows[ring, row]  # [n, window, 2, width]
        found = kept[:, :, 0].where(in_ring[..., None], values[source].float())
        biased = kept[:, :, 1].where(in_ring[..., None], biased)
    else:
        found = values[source].float()
    present = (in_step | in_ring)[..., None]
    found = found.where(present, 0)
    biased = biased.where(present, -torch.inf)
    if pooling.overlap:  # the older window takes part with its first series
        found, biased = (
            torch.cat([x[:, : pooling.ratio, :dim], x[:, pooling.ratio :, dim:]], 1)
            for x in (found, biased)
        )
    return (biased.softmax(1) * found).sum(1)


def _rings_of(ring_ids: Tensor, requests: Tensor, places: Tensor, state: WindowState) -> Tensor:
    """Rings, or pages, of rows at positions ``[n, k]`` of requests ``[n]``; -1 if there is none."""
    num_rings, num_rows = state.rows.shape[:2]
    paged = ring_ids.dim() == 2
    table = ring_ids.long() if paged else ring_ids.long()[:, None]
    columns = places // num_rows if paged else torch.zeros_like(places)
    found = (requests[:, None] >= 0) & (columns >= 0) & (columns < table.shape[1])
    if not table.numel():
        return torch.full_like(places, -1)
    rings = table[requests.clamp(min=0)[:, None], columns.where(found, 0)]
    return rings.where(found & (rings >= 0) & (rings < num_rings), -1)


def _biased(gates: Tensor, gate_bias: Tensor | None, places: Tensor) -> Tensor:
    """float32 gates, with the bias of their places in the window."""
    return gates.float() if gate_bias is None else gates.float() + gate_bias[places]
