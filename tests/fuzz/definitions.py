"""Definitions of all ops in float64, written from their formulas and from the bytes of the records.

Nothing here comes from the package: formats are decoded by a second description of their byte
layout, and each op is a loop over requests or tokens. A definition takes the arguments of its op
and returns float64 arrays. Definitions with sums also return error bounds: the sums of the terms'
magnitudes, which hold even if the terms cancel out.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import torch

INF = float("inf")
FLOAT32 = 2.0**-24
"""Half the distance of float32 numbers near 1: the relative error of one rounding."""
TINY = 1e-37
"""GPUs flush subnormal float32 numbers, below 1.2e-38, to 0: the error of a few terms."""
SUM = 2.0**-18
"""Error of some hundred float32 additions in any order, relative to the sum of magnitudes."""

MANTISSA = {torch.float8_e4m3fn: 3, torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
LEAST = {torch.float8_e4m3fn: -6, torch.bfloat16: -126, torch.float16: -14, torch.float32: -126}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float16: 65504.0}


def f64(tensor):
    """A tensor as a float64 array; e4m3 by its bits."""
    if tensor is None:
        return None
    if tensor.dtype == torch.float8_e4m3fn:
        return e4m3(tensor.detach().contiguous().view(torch.uint8).cpu().numpy())
    return tensor.detach().double().cpu().numpy()


def ints(tensor):
    return tensor.detach().cpu().numpy().astype(object)


# --- numbers -------------------------------------------------------------------------------------


def e4m3(codes):
    """Values of e4m3 codes: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7F is NaN."""
    codes = np.asarray(codes, np.int64)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * np.exp2(exponent - 10.0))
    value = np.where((codes & 127) == 127, np.nan, value)
    return np.where(codes & 128, -value, value)


def e4m3_code(values):
    """Codes of float64 values that e4m3 holds."""
    table = e4m3(np.arange(127))
    codes = np.searchsorted(table, np.abs(values))
    return (codes + 128 * np.signbit(values)).astype(np.uint8)


def rounded(x, dtype):
    """The nearest value of a dtype, ties to even; e4m3 saturates, bfloat16 has float32's range."""
    x = np.asarray(x, np.float64)
    _, exponent = np.frexp(np.where(np.isfinite(x), x, 1.0))
    step = np.exp2(np.maximum(exponent - 1, LEAST[dtype]) - MANTISSA[dtype])
    with np.errstate(all="ignore"):
        near = np.where(np.isfinite(x), np.rint(x / step) * step, x)
    if dtype == torch.float8_e4m3fn:
        return np.clip(near, -448.0, 448.0)
    limit = LARGEST.get(dtype, 2.0**128)
    return np.where(np.abs(near) >= limit * (1 + 2.0**-12), np.copysign(INF, near), near)


def half_step(x, dtype):
    """The largest change of x by rounding to the dtype."""
    return np.maximum(
        np.abs(x) * 2.0 ** -(MANTISSA[dtype] + 1), 2.0 ** (LEAST[dtype] - MANTISSA[dtype] - 1)
    )


def ceil_pow2(x):
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.exp2(np.where(mantissa == 0.5, exponent - 1.0, exponent * 1.0))


# --- records -------------------------------------------------------------------------------------


class Format(NamedTuple):
    """Dims of a record, and how its e4m3 dims are scaled."""

    head_dim: int
    value_dim: int
    fp8_dim: int = 0
    block: int = 0
    scale_bytes: int = 4
    min_amax: float = 0.0
    min_scale: float = 2.0**-126

    @property
    def num_scales(self):
        return -(-self.fp8_dim // self.block) if self.block else 0

    def spread(self, scales):
        return np.repeat(scales, self.block, axis=-1)[..., : self.fp8_dim]

    def blocks(self, rows):
        """``[..., fp8_dim]`` as a list of the runs of dims that share a scale."""
        return [rows[..., i : i + self.block] for i in range(0, self.fp8_dim, self.block)]

    def scale(self, amax, mode):
        """The scale of a block with the largest magnitude amax, computed in float32."""
        amax = np.maximum(np.float32(amax), np.float32(self.min_amax))
        scale = amax.astype(np.float32) / np.float32(448)
        if mode == "exact":
            return np.maximum(scale, np.float32(2.0**-126)).astype(np.float64)
        return ceil_pow2(np.maximum(scale, np.float32(self.min_scale)).astype(np.float64))


def format_of(name):
    if name == "fp8_ds_mla":
        return Format(576, 512, 512, 128, min_scale=1e-4)
    if name == "fp8_584":
        return Format(512, 512, 448, 64, scale_bytes=1, min_amax=1e-4)
    if name == "index_fp8":
        return Format(128, 128, 128, 128, min_amax=1e-4)
    if match := re.fullmatch(r"bf16_(\d+)v(\d+)", name):
        return Format(int(match[1]), int(match[2]))
    match = re.fullmatch(r"e4m3_(\d+)v(\d+)b(\d+)", name)
    return Format(int(match[1]), int(match[2]), int(match[1]), int(match[3]))


class Places(NamedTuple):
    """Addresses ``[n, bytes]`` of the parts of records: in the data's storage, in the scales'."""

    fp8: np.ndarray
    bf16: np.ndarray
    scales: np.ndarray
    separate: bool


def places(cache, slots):
    """Addresses of the records of slots, byte by byte."""
    data, size, name = cache.data, cache.data.shape[1], cache.format.name
    fmt = format_of(name)
    page, offset = np.divmod(np.asarray(slots, np.int64), size)
    unit = data.element_size()
    start = unit * (data.storage_offset() + page * data.stride(0))
    row = start + unit * offset * data.stride(1)
    separate = False
    if name == "fp8_ds_mla":
        fp8, scales, bf16 = row, row + 512, row + 528
    elif name == "fp8_584":
        fp8, bf16 = start + 576 * offset, start + 576 * offset + 448
        scales = start + 576 * size + 8 * offset
    elif name == "index_fp8":
        fp8, bf16, scales = start + 128 * offset, start, start + 128 * size + 4 * offset
    else:
        fp8 = bf16 = scales = row
        if cache.scales is not None:
            t, separate = cache.scales, True
            scales = 4 * (t.storage_offset() + page * t.stride(0) + offset * t.stride(1))

    def run(begin, count):
        return begin[:, None] + np.arange(count)

    return Places(
        run(fp8, fmt.fp8_dim),
        run(bf16, 2 * (fmt.head_dim - fmt.fp8_dim)),
        run(scales, fmt.num_scales * fmt.scale_bytes),
        separate,
    )


def storage(tensor):
    """All bytes of the memory that a tensor is a view of, as a tensor."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage())


def memory(cache):
    """Copies of all bytes of a cache: of the data, and of the scales where they are separate."""
    tensors = [cache.data] if cache.scales is None else [cache.data, cache.scales]
    return [storage(tensor).cpu().numpy().copy() for tensor in tensors]


class Rows(NamedTuple):
    """Stored records ``[n, ...]``: values of the codes, scales, and the bfloat16 dims."""

    fp8: np.ndarray
    scales: np.ndarray
    bf16: np.ndarray


def records(cache, slots):
    fmt, at, raw = format_of(cache.format.name), places(cache, slots), memory(cache)
    scales = np.ascontiguousarray(raw[-1 if at.separate else 0][at.scales])
    if fmt.scale_bytes == 1:
        scales = np.where(scales == 255, np.nan, np.exp2(scales - 127.0))
    else:
        scales = scales.view(np.float32).astype(np.float64)
    halves = np.ascontiguousarray(raw[0][at.bf16]).view(np.uint16).astype(np.uint32) << 16
    return Rows(e4m3(raw[0][at.fp8]), scales, halves.view(np.float32).astype(np.float64))


def dequantized(cache, slots):
    """Rows ``[n, head_dim]``: ``bfloat16(float32(code) * scale)``, then the bfloat16 dims."""
    fmt, rows = format_of(cache.format.name), records(cache, slots)
    values = rows.fp8
    if fmt.block:
        with np.errstate(all="ignore"):
            product = values.astype(np.float32) * fmt.spread(rows.scales).astype(np.float32)
        values = product.astype(np.float64)
    return np.concatenate([rounded(values, torch.bfloat16), rows.bf16], axis=-1)


def store(cache, slots, rows):
    """Write records bit by bit: codes, scales and bfloat16 values that the format can hold."""
    fmt, at = format_of(cache.format.name), places(cache, slots)
    data = storage(cache.data)

    def put(target, where, values):
        where = torch.from_numpy(where.reshape(-1)).to(target.device)
        target[where] = torch.from_numpy(values.reshape(-1)).to(target.device)

    nan = np.isnan(rows.fp8)
    codes = e4m3_code(np.where(nan, 0, rows.fp8)) | np.where(nan, 127, 0).astype(np.uint8)
    put(data, at.fp8, codes)
    halves = (rows.bf16.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    put(data, at.bf16, halves.view(np.uint8))
    if fmt.scale_bytes == 1:
        with np.errstate(all="ignore"):
            exponents = np.log2(rows.scales) + 127
        scales = np.where(np.isnan(rows.scales), 255, exponents).astype(np.uint8)
    else:
        scales = rows.scales.astype(np.float32).view(np.uint8)
    put(storage(cache.scales) if at.separate else data, at.scales, scales)


def quantized(fmt, rows, mode):
    """Records of float32 rows ``[n, head_dim]``, every step in float32 as the formula has it."""
    rows = np.asarray(rows, np.float32)
    fp8, scales = rows[:, : fmt.fp8_dim].astype(np.float64), np.zeros((len(rows), 0))
    if fmt.block:
        amax = [np.nanmax(np.abs(b), axis=-1, initial=0) for b in fmt.blocks(fp8)]
        scales = fmt.scale(np.stack(amax, axis=-1), mode)
        with np.errstate(all="ignore"):
            quotient = fp8.astype(np.float32) / fmt.spread(scales).astype(np.float32)
        fp8 = quotient.astype(np.float64)
    bf16 = rounded(rows[:, fmt.fp8_dim :].astype(np.float64), torch.bfloat16)
    return Rows(rounded(fp8, torch.float8_e4m3fn), scales, bf16)


# --- cache writers -------------------------------------------------------------------------------


class Near(NamedTuple):
    """Values and the error bounds of their computation in float32."""

    value: np.ndarray
    error: np.ndarray | None  # None for exact values

    def at(self, index):
        return Near(self.value[index], None if self.error is None else self.error[index])


def rotated(near, cos_sin, interleaved):
    """RoPE of the last dim of ``near [..., R]``; pairs are (2i, 2i+1) or (i, i + R/2)."""
    half = cos_sin.shape[-1] // 2
    value, error = np.empty_like(near.value), np.empty_like(near.error)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos_sin[..., i], cos_sin[..., half + i]
        a, b = near.value[..., first], near.value[..., second]
        da, db = near.error[..., first], near.error[..., second]
        value[..., first], value[..., second] = a * c - b * s, a * s + b * c
        error[..., first] = abs(c) * da + abs(s) * db + 4 * FLOAT32 * (abs(a * c) + abs(b * s))
        error[..., second] = abs(s) * da + abs(c) * db + 4 * FLOAT32 * (abs(a * s) + abs(b * c))
    return Near(value, error)


def exactly(x):
    return Near(x.copy(), np.zeros_like(x))


def joined(parts):
    values, errors = zip(*parts, strict=True)
    return Near(np.concatenate(values, axis=-1), np.concatenate(errors, axis=-1))


def latent_rows(kv, cos_sin_cache, weight, positions, eps, interleaved):
    """Rows ``[T, D]`` that :func:`fused_rope_rmsnorm_quant` stores, before quantisation."""
    x, w, table = f64(kv), f64(weight), f64(cos_sin_cache)
    norm, rope = w.shape[0], table.shape[1]
    rows = exactly(x)
    for t, position in enumerate(ints(positions)):
        if norm:
            with np.errstate(all="ignore"):
                normed = x[t, :norm] / np.sqrt(np.mean(x[t, :norm] ** 2) + eps) * w
            rows.value[t, :norm], rows.error[t, :norm] = normed, 32 * FLOAT32 * abs(normed)
        dims = slice(x.shape[1] - rope, None)
        turned = rotated(
            Near(rows.value[t, dims], rows.error[t, dims]), table[position], interleaved
        )
        rows.value[t, dims], rows.error[t, dims] = turned
    return rows


def rope_queries(q_rope, cos_sin_cache, positions, interleaved):
    x, table = f64(q_rope), f64(cos_sin_cache)
    out = exactly(x)
    for t, position in enumerate(ints(positions)):
        turned = rotated(exactly(x[t]), table[position][None], interleaved)
        out.value[t], out.error[t] = turned
    return out


def layer_norm(x, weight, bias, eps):
    mean = np.mean(x, axis=-1, keepdims=True)
    variance = np.mean((x - mean) ** 2, axis=-1, keepdims=True)
    factor = 1 / np.sqrt(variance + eps)
    normed = (x - mean) * factor
    energy = np.mean(x * x, axis=-1, keepdims=True) / (variance + eps)
    error = 16 * FLOAT32 * (1 + energy) * abs(normed)
    error += 8 * FLOAT32 * factor * (abs(x) + np.mean(abs(x), axis=-1, keepdims=True))
    value = normed * weight + bias
    return Near(value, error * abs(weight) + 2 * FLOAT32 * (abs(value) + abs(bias)))


def hadamard(near):
    n = near.value.shape[-1]
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    total = np.sum(near.error + 16 * FLOAT32 * abs(near.value), axis=-1, keepdims=True)
    error = np.broadcast_to(total * n**-0.5, near.value.shape)
    return Near(near.value @ matrix * n**-0.5, error)


def index_vectors(near, cos_sin, interleaved, rope_first, transform):
    """Indexer queries or keys ``[..., DI]`` rotated on their first or last dims, transformed."""
    dim, rope = near.value.shape[-1], cos_sin.shape[-1]
    if rope_first:
        turned = rotated(near.at((..., slice(0, rope))), cos_sin, interleaved)
        near = joined([turned, near.at((..., slice(rope, dim)))])
    else:
        turned = rotated(near.at((..., slice(dim - rope, dim))), cos_sin, interleaved)
        near = joined([near.at((..., slice(0, dim - rope))), turned])
    return hadamard(near) if transform else near


def index_keys(k, weight, bias, cos_sin_cache, positions, eps, interleaved, rope_first, transform):
    """Keys ``[T, DI]`` that :func:`append_index_keys` stores, before quantisation."""
    near = layer_norm(f64(k), f64(weight), f64(bias), eps)
    cos_sin = f64(cos_sin_cache)[ints(positions).astype(np.int64)]
    return index_vectors(near, cos_sin, interleaved, rope_first, transform)


def index_queries(q, cos_sin_cache, positions, interleaved, rope_first, transform):
    cos_sin = f64(cos_sin_cache)[ints(positions).astype(np.int64)]
    near = exactly(f64(q))
    return index_vectors(near, cos_sin[:, None], interleaved, rope_first, transform)


# --- indices and rows ----------------------------------------------------------------------------

NOWHERE = -1


def slot_of(table_row, position, page_size):
    """The slot of a position; -1 without a page, or if the slot does not fit int32."""
    if position < 0 or position // page_size >= len(table_row):
        return NOWHERE
    page = int(table_row[position // page_size])
    slot = page * page_size + position % page_size
    return slot if page >= 0 and slot < 2**31 else NOWHERE


def to_slots(topk_indices, page_table, request_ids, page_size, workspace_starts, prefills):
    ids, table, requests = ints(topk_indices), ints(page_table), ints(request_ids)
    out = np.full(ids.shape, NOWHERE, np.int64)
    for t in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            index = int(ids[t, j])
            if index < 0 or index // page_size >= table.shape[1]:
                continue
            if workspace_starts is not None and prefills[t] >= 0:
                out[t, j] = int(workspace_starts[int(prefills[t])]) + index
            else:
                out[t, j] = slot_of(table[int(requests[t])], index, page_size)
    return out


def entry_slots(positions, page_table, request_ids, ratio, page_size):
    table, out = ints(page_table), []
    for position, request in zip(ints(positions), ints(request_ids), strict=True):
        entries, open_tokens = divmod(int(position) + 1, ratio)
        row = table[int(request)]
        out.append(NOWHERE if open_tokens else slot_of(row, entries - 1, page_size))
    return np.array(out, np.int64)


def visible_slots(positions, page_table, request_ids, ratio, page_size, width):
    table, lengths = ints(page_table), []
    out = np.full((len(positions), width), NOWHERE, np.int64)
    for t, (position, request) in enumerate(zip(ints(positions), ints(request_ids), strict=True)):
        seen = max(int(position) + 1, 0) // ratio
        keys = range(max(seen - width, 0), seen)
        lengths.append(len(keys))
        out[t, : len(keys)] = [slot_of(table[int(request)], key, page_size) for key in keys]
    return out, np.array(lengths, np.int64)


def own_lists(indices, lengths, token_mask, num_tokens, list_tokens):
    """The list of each token, from lists that tokens share."""
    rows, lists = ints(indices), []
    for t in range(num_tokens):
        n, i = divmod(t, list_tokens)
        end = len(rows[n]) if lengths is None else max(min(int(ints(lengths)[n]), len(rows[n])), 0)
        marks = [255] * end if token_mask is None else ints(token_mask)[n]
        lists.append([int(rows[n][j]) for j in range(end) if int(marks[j]) & 2**i])
    return lists


def own_positions(topk_indices, rank, num_ranks, interleave, parts):
    """Rows of a rank's parts, and how many each has."""
    parts = num_ranks if parts is None else parts
    out, counts = [], []
    for positions in ints(topk_indices):
        turns = {part: [] for part in range(parts) if part % num_ranks == rank}
        for position in map(int, positions):
            part = position // interleave % parts
            if 0 <= position < 2**31 and part in turns:
                # Turns of this rank that end before the position's, and the place in its own.
                before = (position // interleave - rank) // num_ranks
                turns[part].append(before * interleave + position % interleave)
        counts.append([len(rows) for rows in turns.values()])
        out.append([rows + [NOWHERE] * (len(positions) - len(rows)) for rows in turns.values()])
    shape = len(out), len(range(rank, parts, num_ranks))
    return (
        np.array(out, np.int64).reshape(*shape, topk_indices.shape[1]),
        np.array(counts, np.int64).reshape(shape),
    )


def kept_positions(length, rank, num_ranks, interleave):
    """The positions below a length that a rank keeps, in order."""
    return [p for p in range(length) if p // interleave % num_ranks == rank]


def resolve_rows(
    topk_indices,
    input_row_offsets,
    seq_lens,
    seats,
    page_table,
    table,
    page_size,
    max_query_len,
    shard,
    stats,
):
    """Rows, counts, slots, rows and counts of misses, new ones; keys, rows and order; stats.

    A seat is a list of pairs of a row and its position or None, least recently used first.
    """
    rank, num_ranks, interleave, parts = shard or (0, 1, 1, None)
    own_parts = range(rank, parts or num_ranks, num_ranks)
    indices, table_rows = ints(topk_indices).tolist(), ints(page_table).tolist()
    keys, rows, order = (ints(part).tolist() for part in table)
    size, hits, misses = len(keys[0]), *ints(stats).tolist()
    results = [([[] for _ in own_parts], [], [], 0) for _ in indices]
    offsets = [min(max(int(offset), 0), len(indices)) for offset in ints(input_row_offsets)]
    for b, (seat, length) in enumerate(
        zip(ints(seats).tolist(), ints(seq_lens).tolist(), strict=True)
    ):
        first, end = offsets[b], offsets[b + 1]
        if not 0 <= seat < len(keys) or length <= 0 or first >= end:
            continue
        context = len(kept_positions(max(length - (end - first), 0), rank, num_ranks, interleave))
        held = {row: key for row, key in zip(rows[seat], keys[seat], strict=True) if key < context}
        used = [(row, held[row]) for row in order[seat] if row in held]
        used = [(row, None) for row in order[seat] if row not in held] + used
        empty = [row for row in rows[seat] if row not in held]
        for token in range(first, min(end, first + max_query_len)):
            listed = [p for p in indices[token] if 0 <= p < 2**31 - 1]
            rest = indices[token][len(listed) :]
            if listed != sorted({*listed}) or any(0 <= p < 2**31 - 1 for p in rest):
                listed = []
            whole = [p for p in listed if p // interleave % num_ranks == rank]
            places = [
                (p, p // (interleave * num_ranks) * interleave + p % interleave) for p in whole
            ]
            places = [(p, local) for p, local in places if local < len(table_rows[b]) * page_size]
            locals_ = {local for _, local in places}
            row_of = {key: row for row, key in used if key in locals_}
            hits += len(row_of)
            for _, local in places:
                page = table_rows[b][local // page_size]
                slot = page * page_size + local % page_size
                if local in row_of or page < 0 or slot >= 2**31:
                    continue
                at = next(i for i, (_, key) in enumerate(used) if key not in locals_)
                row, _ = used.pop(at)
                used.insert(at, (row, local))
                row_of[local] = row
                results[token][1].append(slot)
                results[token][2].append(seat * size + row)
                results[token] = (*results[token][:3], results[token][3] + (local >= context))
                misses += 1
            last = [(row_of[local], local) for _, local in places if local in row_of]
            used = [pair for pair in used if pair not in last] + last
            for p, local in places:
                part = own_parts.index(p // interleave % (parts or num_ranks))
                row = seat * size + row_of[local] if local in row_of else NOWHERE
                results[token][0][part].append(row)
        pairs = sorted((key, row) for row, key in used if key is not None)
        pairs += [(2**31 - 1, row) for row in empty if (row, None) in used]
        keys[seat], rows[seat] = map(list, zip(*pairs, strict=True))
        order[seat] = [row for row, _ in used]
    width = topk_indices.shape[1]

    def padded(lists):
        wide = [each + [NOWHERE] * (width - len(each)) for each in lists]
        return np.array(wide, np.int64).reshape(len(lists), width)

    out = [padded(each[0]) for each in results]
    counts = [[len(part) for part in each[0]] for each in results]
    out = np.array(out, np.int64).reshape(len(results), len(own_parts), width)
    counts = np.array(counts, np.int64).reshape(len(results), len(own_parts))
    if parts is None:
        out, counts = out[:, 0], counts[:, 0]
    return (
        *(
            out,
            counts,
            padded([each[1] for each in results]),
            padded([each[2] for each in results]),
        ),
        np.array([len(each[1]) for each in results], np.int64),
        np.array([each[3] for each in results], np.int64),
        *(keys, rows, order, [hits, misses]),
    )


def fetch_rows(source, target, miss_slots, miss_rows, miss_counts):
    """The bytes of target's rows, and of their scales: by slots of source."""
    slots, rows, counts = (ints(each).tolist() for each in (miss_slots, miss_rows, miss_counts))
    wanted = []
    for before, after in zip(source.stored_bytes(), target.stored_bytes(), strict=True):
        before, after = before.flatten(0, 1).cpu().numpy(), after.flatten(0, 1).cpu().numpy().copy()
        for of_slots, of_rows, count in zip(slots, rows, counts, strict=True):
            for slot, row in list(zip(of_slots, of_rows, strict=True))[: max(count, 0)]:
                if 0 <= row < len(after):
                    after[row] = before[slot] if 0 <= slot < len(before) else 0
        wanted.append(after)
    return wanted


def share_lists(topk_indices, list_tokens, topk_lengths):
    """Lists, lengths and masks of groups of tokens."""
    lists = own_lists(topk_indices, topk_lengths, None, len(topk_indices), 1)
    num_tokens, topk = topk_indices.shape
    out, lengths, token_mask = [], [], []
    for first in range(0, num_tokens, list_tokens):
        group, merged = lists[first : first + list_tokens], {}
        group += [[]] * (list_tokens - len(group))
        named = [[row for row in rows if row >= 0] for rows in group]
        if all(
            rows[: len(some)] == some and some == sorted(set(some))
            for rows, some in zip(group, named, strict=True)
        ):
            for i, rows in enumerate(named):
                for row in rows:
                    merged[row] = merged.get(row, 0) + 2**i
            entries = sorted(merged.items())
            lengths.append(len(entries))
        else:
            padded = [rows + [NOWHERE] * (topk - len(rows)) for rows in group]
            entries = [
                (max(row, NOWHERE), 2**i if row >= 0 else 0)
                for i, rows in enumerate(padded)
                for row in rows
            ]
            lengths.append(len(entries))
        entries += [(NOWHERE, 0)] * (list_tokens * topk - len(entries))
        out.append([row for row, _ in entries])
        token_mask.append([mark for _, mark in entries])
    shape = len(lengths), list_tokens * topk
    parts = np.array(out, object).reshape(shape), np.array(token_mask, np.int64).reshape(shape)
    return parts[0].astype(np.int64), np.array(lengths, np.int64), parts[1]


def keys_of_request(cache, table_row, length):
    """Slots ``[length]`` of a request's keys, -1 where a page does not exist."""
    size, num_pages = cache.data.shape[1], cache.data.shape[0]
    slots = [slot_of(table_row, i, size) for i in range(length)]
    return np.array([s if s < size * num_pages else NOWHERE for s in slots], np.int64)


def gather_dequant(cache, page_table, seq_lens, workspace_starts, seq_starts, out):
    """The workspace after the op, float64, given its contents before."""
    result, table = f64(out).copy(), ints(page_table)
    for b, length in enumerate(ints(seq_lens)):
        first = 0 if seq_starts is None else int(seq_starts[b])
        slots = keys_of_request(cache, table[b], first + int(length))[first:]
        rows = np.zeros((int(length), out.shape[1]))
        rows[slots >= 0] = dequantized(cache, slots[slots >= 0])
        result[int(workspace_starts[b]) :][: int(length)] = rows
    return result


# --- selection -----------------------------------------------------------------------------------


def best(scores, topk):
    """Indices of the topk largest, ascending: NaN is smallest, and ties go to the lower index."""
    order = sorted(
        range(len(scores)), key=lambda i: (np.isnan(scores[i]), -np.nan_to_num(scores[i], nan=0), i)
    )
    return sorted(order[:topk])


def select_topk(scores, topk, row_starts, row_ends):
    values = f64(scores)
    num_rows, num_columns = values.shape
    out = np.full((num_rows, topk), NOWHERE, np.int64)
    for r in range(num_rows):
        start = 0 if row_starts is None else min(max(int(row_starts[r]), 0), num_columns)
        end = num_columns if row_ends is None else min(max(int(row_ends[r]), 0), num_columns)
        chosen = best(values[r, start : max(end, start)], topk)
        out[r, : len(chosen)] = chosen
    return out


def merge_topk(values, indices, topk):
    scores, ids = f64(values), ints(indices)
    out = np.full((scores.shape[1], topk), NOWHERE, np.int64)
    for r in range(scores.shape[1]):
        candidates = sorted(
            (int(i), v)
            for i, v in zip(ids[:, r].reshape(-1), scores[:, r].reshape(-1), strict=True)
            if i >= 0
        )
        chosen = best(np.array([v for _, v in candidates]), topk)
        out[r, : len(chosen)] = [candidates[i][0] for i in chosen]
    return out


def scores_of(q, weights, keys, key_scales):
    """Scores ``[n]`` of keys ``[n, DI]`` for one token ``q [HI, DI]``, and the terms' magnitude."""
    score, magnitude = np.zeros(len(keys)), np.zeros(len(keys))
    for head in range(len(q)):
        score += weights[head] * np.maximum(keys @ q[head], 0)
        magnitude += abs(weights[head]) * (abs(keys) @ abs(q[head]))
    return Near(score * key_scales, magnitude * abs(key_scales))


def indexer_scores(index_q, weights, index_k, index_k_scales, row_starts, row_ends):
    queries, factors, rows = f64(index_q), f64(weights), f64(index_k)
    scales = np.ones(len(rows)) if index_k_scales is None else f64(index_k_scales)
    out = Near(np.full((len(queries), len(rows)), -INF), np.zeros((len(queries), len(rows))))
    for m in range(len(queries)):
        start = min(max(int(row_starts[m]), 0), len(rows))
        at = slice(start, max(min(max(int(row_ends[m]), 0), len(rows)), start))
        out.value[m, at], out.error[m, at] = scores_of(queries[m], factors[m], rows[at], scales[at])
    return out


def paged_scores(q, weights, cache, table_row, length):
    """Scores of one token for keys ``0 .. length - 1`` of its request, -inf without a page."""
    slots = keys_of_request(cache, table_row, length)
    there = slots >= 0
    out = Near(np.full(length, -INF), np.zeros(length))
    rows = records(cache, slots[there])
    if cache.format.name.startswith("bf16"):
        keys, scales = rows.bf16, np.ones(len(rows.bf16))
    else:
        keys = rows.fp8
        scales = rows.scales[:, 0] if rows.scales.shape[1] else np.ones(len(keys))
    out.value[there], out.error[there] = scores_of(q, weights, keys, scales)
    return out


def block_scores(scores, block_size):
    """The best score of each block of keys, infinite for the last one."""
    starts = range(0, len(scores.value), block_size)
    value, error = (np.array([part[i : i + block_size].max() for i in starts]) for part in scores)
    value[-1:], error[-1:] = INF, 0.0
    return Near(value, error)


def keys_in(blocks, block_size, visible):
    """The positions below ``visible`` in blocks, in the order of these."""
    listed = [range(b * block_size, (b + 1) * block_size) for b in blocks if 0 <= b < visible]
    return [n for keys in listed for n in keys if n < visible]


# --- attention -----------------------------------------------------------------------------------


class Attention(NamedTuple):
    """Attention of rows ``[...]``, magnitudes of the weighted values, and the effect of errors of
    queries, keys and values: ``shaken`` on out, ``sway`` on lse, ``most`` on the largest logit.
    """

    out: np.ndarray
    lse: np.ndarray
    largest: np.ndarray
    terms: np.ndarray
    shaken: np.ndarray
    sway: np.ndarray
    most: np.ndarray

    @classmethod
    def empty(cls, *shape, value_dim):
        out, terms, shaken = np.zeros((3, *shape, value_dim))
        sway, most = np.zeros((2, *shape))
        return cls(out, np.full(shape, -INF), np.full(shape, -INF), terms, shaken, sway, most)


def attend(result, at, q, keys, values, softmax_scale, sink):
    """Attention of one row ``q [D]`` of one head over ``keys [n, D]`` into ``result[at]``."""
    if len(keys.value) == 0:
        return
    z = softmax_scale * (keys.value @ q.value)
    loose = abs(keys.value) @ q.error
    if keys.error is not None:
        loose += keys.error @ (abs(q.value) + q.error)
    loose *= abs(softmax_scale)
    largest = np.max(z)
    weights = np.exp(z - largest)
    lse = largest + np.log(np.sum(weights))
    p = weights / np.sum(weights)
    out, terms = p @ values.value, p @ abs(values.value)
    sway = p @ loose
    # To first order, plus the exponential's growth for larger errors.
    shaken = ((p * loose) @ abs(values.value) + 2 * sway * abs(out)) * np.exp(2 * np.max(loose))
    if values.error is not None:
        shaken += p @ values.error
    share = 1.0
    if sink is not None:
        with np.errstate(over="ignore"):
            share = 1 / (1 + np.exp(sink - lse))
    result.out[at], result.lse[at], result.largest[at] = out * share, lse, largest
    result.terms[at], result.shaken[at] = terms * share, shaken * share
    result.sway[at], result.most[at] = sway * np.exp(np.max(loose)), np.max(loose)


def valid_entries(indices_row, length, num_rows):
    """The indices that count: within the rows, and before the length."""
    row = indices_row if length is None else indices_row[: max(int(length), 0)]
    return np.array([i for i in row if 0 <= i < num_rows], np.int64)


class Stream(NamedTuple):
    """A cache with the selections of rows ``[R, K]`` and their lengths ``[R]``."""

    cache: object
    indices: np.ndarray
    lengths: np.ndarray | None

    def rows(self, r):
        num_rows = self.cache.data.shape[0] * self.cache.data.shape[1]
        length = None if self.lengths is None else self.lengths[r]
        return dequantized(self.cache, valid_entries(self.indices[r], length, num_rows))


def sparse_attention(q, streams, softmax_scale, attn_sink):
    """``q [R, H, D]`` over the union of the streams' rows: one softmax of all of them."""
    sinks, value_dim = f64(attn_sink), format_of(streams[0].cache.format.name).value_dim
    result = Attention.empty(*q.value.shape[:2], value_dim=value_dim)
    for r in range(q.value.shape[0]):
        rows = np.concatenate([stream.rows(r) for stream in streams])
        keys, values = Near(rows, None), Near(rows[:, :value_dim], None)
        for h in range(q.value.shape[1]):
            sink = None if sinks is None else sinks[h]
            attend(result, (r, h), q.at((r, h)), keys, values, softmax_scale, sink)
    return result


def dense_decode(q, cache, page_table, seq_lens, softmax_scale, causal, attn_sink):
    table, sinks = ints(page_table), f64(attn_sink)
    batch, query_len, num_heads = q.value.shape[:3]
    value_dim = format_of(cache.format.name).value_dim
    result = Attention.empty(batch, query_len, num_heads, value_dim=value_dim)
    for b in range(batch):
        length = int(seq_lens[b])
        slots = keys_of_request(cache, table[b], length)
        for j in range(query_len):
            seen = slots[: max(length - query_len + 1 + j, 0)] if causal else slots
            rows = dequantized(cache, seen[seen >= 0])
            keys, values = Near(rows, None), Near(rows[:, :value_dim], None)
            for h in range(num_heads):
                sink = None if sinks is None else sinks[h]
                attend(result, (b, j, h), q.at((b, j, h)), keys, values, softmax_scale, sink)
    return result


def dense_prefill(q, k, v, input_row_offsets, kv_row_offsets, softmax_scale, causal):
    result = Attention.empty(*q.value.shape[:2], value_dim=v.value.shape[2])
    for b in range(len(input_row_offsets) - 1):
        first, last = int(input_row_offsets[b]), int(input_row_offsets[b + 1])
        start, stop = int(kv_row_offsets[b]), int(kv_row_offsets[b + 1])
        for i in range(last - first):
            ahead = (stop - start) - (last - first)
            end = start + max(ahead + i + 1, 0) if causal else stop
            for h in range(q.value.shape[1]):
                at, row = (slice(start, end), h), (first + i, h)
                attend(result, row, q.at(row), k.at(at), v.at(at), softmax_scale, None)
    return result


def merge_states(outs, lses, attn_sink):
    """Out, lse, and the magnitudes of the terms of out; a part without keys has no weight."""
    parts, logs, sinks = f64(outs), f64(lses), f64(attn_sink)
    num_parts, num_tokens, num_heads, dim = parts.shape
    out, terms = np.zeros((2, num_tokens, num_heads, dim))
    lse = np.full((num_tokens, num_heads), -INF)
    for t in range(num_tokens):
        for h in range(num_heads):
            live = [n for n in range(num_parts) if logs[n, t, h] > -INF]
            if not live:
                continue
            top = max(logs[n, t, h] for n in live)
            lse[t, h] = top + np.log(sum(np.exp(logs[n, t, h] - top) for n in live))
            share = 1.0
            if sinks is not None:
                with np.errstate(over="ignore"):
                    share = 1 / (1 + np.exp(sinks[h] - lse[t, h]))
            for n in live:
                weight = np.exp(logs[n, t, h] - lse[t, h]) * share
                out[t, h] += weight * parts[n, t, h]
                terms[t, h] += weight * abs(parts[n, t, h])
    return out, lse, terms


# --- products ------------------------------------------------------------------------------------


def head_weights(data, scale, block):
    """float64 ``[H, N, K]``."""
    weights = f64(data).copy()
    if scale is not None:
        factors = f64(scale)
        for n in range(weights.shape[1]):
            for k in range(0, weights.shape[2], block[1]):
                at = slice(k, k + block[1])
                weights[:, n, at] *= factors[:, n // block[0], k // block[1], None]
    return weights


def through_e4m3(x, error, block):
    """Activations ``[..., K]`` rounded to e4m3, with one scale per block.

    Returns the values and their error bounds if the inputs have errors of up to ``error``; values
    near a rounding border may go either way.
    """
    value, bound = np.empty_like(x), np.empty_like(x)
    for k in range(0, x.shape[-1], block):
        at = (..., slice(k, k + block))
        amax = np.max(abs(x[at]), axis=-1, keepdims=True)
        loose = np.max(error[at], axis=-1, keepdims=True) / np.maximum(amax, 1e-4)
        scale = (np.maximum(amax, np.float32(1e-4)).astype(np.float32) / np.float32(448)).astype(
            np.float64
        )
        slack = error[at] / scale + (loose + 4 * FLOAT32) * abs(x[at]) / scale
        codes, low, high = (
            rounded(x[at] / scale + shift, torch.float8_e4m3fn) for shift in (0, -slack, slack)
        )
        value[at] = codes * scale
        bound[at] = np.maximum(high - codes, codes - low) * scale
        bound[at] += (loose + 4 * FLOAT32) * abs(value[at])
    return value, bound


def project_heads(near, weights, scale_block):
    """``[T, H, N]`` from vectors ``[T, H or 1, K]``, rounded to e4m3 if scales have a block."""
    x, error = near
    if scale_block is not None:
        x, error = through_e4m3(x, error, scale_block)
    value, bound = np.zeros((2, len(x), *weights.shape[:2]))
    for h in range(len(weights)):
        own = h % x.shape[1]
        value[:, h] = x[:, own] @ weights[h].T
        bound[:, h] = (error[:, own] + SUM * abs(x[:, own])) @ abs(weights[h]).T
    return Near(value, bound)


def unrotated(x, cos_sin_cache, positions):
    """Heads' outputs ``[T, H, V]`` with the rotation of their last dims undone, not rounded."""
    out, table = exactly(f64(x)), f64(cos_sin_cache).copy()
    rope = table.shape[1]
    table[:, rope // 2 :] *= -1
    for t, position in enumerate(ints(positions)):
        dims = t, slice(None), slice(out.value.shape[2] - rope, None)
        turned = rotated(out.at(dims), table[position][None], True)
        out.value[dims], out.error[dims] = turned
    return out


# --- losses --------------------------------------------------------------------------------------


def selected_scores(index_q, weights, index_k, topk_indices, topk_lengths):
    """float64 ``[T, K]``; -inf for entries that are not valid."""
    q, w, k = f64(index_q), f64(weights), f64(index_k)
    lists = ints(topk_indices)
    scores = np.full(lists.shape, -np.inf)
    for t, j, row in listed(lists, topk_lengths, len(k)):
        scores[t, j] = w[t] @ np.maximum(q[t] @ k[row], 0)
    return scores


def selected_scores_backward(dscores, index_q, weights, index_k, topk_indices, topk_lengths):
    """float64 gradients of ``index_q``, ``weights`` and ``index_k``."""
    d, q, w, k = f64(dscores), f64(index_q), f64(weights), f64(index_k)
    grads = np.zeros_like(q), np.zeros_like(w), np.zeros_like(k)
    for t, j, row in listed(ints(topk_indices), topk_lengths, len(k)):
        dots = q[t] @ k[row]
        factors = d[t, j] * w[t] * (dots > 0)
        grads[0][t] += factors[:, None] * k[row]
        grads[1][t] += d[t, j] * np.maximum(dots, 0)
        grads[2][row] += factors @ q[t]
    return grads


def listed_attention(q, kv, topk_indices, topk_lengths, softmax_scale, attn_sink):
    """Attention of ``q [T, H, D]`` over listed rows."""
    rows, lists, sinks = f64(kv), ints(topk_indices), f64(attn_sink)
    result = Attention.empty(*q.value.shape[:2], value_dim=min(rows.shape[1], 512))
    for t, ids in enumerate(lists):
        length = None if topk_lengths is None else ints(topk_lengths)[t]
        keys = rows[valid_entries(ids, length, len(rows))]
        for h in range(q.value.shape[1]):
            sink = None if sinks is None else sinks[h]
            pair = Near(keys, None), Near(keys[:, :512], None)
            attend(result, (t, h), q.at((t, h)), *pair, softmax_scale, sink)
    return result


def listed_gradients(
    dout, q, kv, topk_indices, out, lse, softmax_scale, topk_lengths, attn_sink, dlse
):
    """Gradients of q, kv and the sink, and the magnitudes of their terms."""
    given, queries, rows, result, logs = (f64(x) for x in (dout, q, kv, out, lse))
    size = queries.shape[:2]
    dlogs = np.zeros(size) if dlse is None else f64(dlse)
    share = np.ones(size) if attn_sink is None else shares(logs, f64(attn_sink))
    dq, dkv, dsink = (np.zeros((2, *shape)) for shape in (queries.shape, rows.shape, size[1:]))
    for t, ids in enumerate(ints(topk_indices)):
        length = None if topk_lengths is None else ints(topk_lengths)[t]
        at = valid_entries(ids, length, len(rows))
        if len(at) == 0:
            continue
        keys = rows[at]
        p = np.exp(softmax_scale * queries[t] @ keys.T - logs[t][:, None])  # [H, n]
        g, more = share[t][:, None], dlogs[t][:, None]
        for i, size_of in enumerate((np.asarray, abs)):  # the values, and their magnitudes
            d, o, values = size_of(given[t]), size_of(result[t]), size_of(keys[:, :512])
            delta = (d * o).sum(-1, keepdims=True)
            ds = p * (g * (d @ values.T - (-delta if i else delta)) + size_of(more))
            dq[i, t] = size_of(softmax_scale) * ds @ size_of(keys)
            terms = size_of(softmax_scale) * ds.T @ size_of(queries[t])
            terms[:, :512] += (g * p).T @ d
            np.add.at(dkv[i], at, terms)
            dsink[i] += (1 if i else -1) * (1 - share[t]) * delta[:, 0]
    return [Near(*pair) for pair in (dq, dkv, dsink)]


def shares(lse, sinks):
    """What a sink leaves of the weights; NaN for a token without a row and a sink of -inf."""
    with np.errstate(over="ignore", invalid="ignore"):
        return 1 / (1 + np.exp(sinks - lse))


def attention_target(q, kv, topk_indices, lse, softmax_scale, topk_lengths, attn_sink, normalize):
    """Target ``[T, K]``: the weights of all heads together, 0 for entries that are not valid."""
    queries, rows, logs, lists = f64(q), f64(kv), f64(lse), ints(topk_indices)
    share = np.ones(logs.shape) if attn_sink is None else shares(logs, f64(attn_sink))
    target = np.zeros(lists.shape)
    for t, j, row in listed(lists, topk_lengths, len(rows)):
        z = softmax_scale * queries[t] @ rows[row]
        target[t, j] = (np.exp(z - logs[t]) * share[t]).sum()
    mass = target.sum(1, keepdims=True)
    return target / np.where(mass > 0, mass, 1) if normalize else target


def dense_index_gradients(
    q, k, lse, index_q, weights, index_k, softmax_scale, row_starts, row_ends, row_weights
):
    """The loss and the gradients of the indexer, with the magnitudes of their terms."""
    queries, keys, logs, iqs, ws, iks = (f64(x) for x in (q, k, lse, index_q, weights, index_k))
    keys = keys if keys.ndim == 3 else keys[:, None].repeat(queries.shape[1], 1)
    factors = np.ones(len(queries)) if row_weights is None else f64(row_weights)
    starts, ends = ints(row_starts), ints(row_ends)
    loss, grads = np.zeros(2), [np.zeros((2, *x.shape)) for x in (iqs, ws, iks)]
    for t, factor in enumerate(factors):
        at = np.arange(max(starts[t], 0), max(min(ends[t], len(iks)), starts[t], 0))
        if len(at) == 0:
            continue
        z = softmax_scale * np.einsum("hd,shd->hs", queries[t], keys[at])
        target = np.exp(z - logs[t][:, None]).sum(0)
        target /= target.sum()
        dots = iqs[t] @ iks[at].T  # [HI, n]
        scores = ws[t] @ np.maximum(dots, 0)
        logs_of = scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())
        terms = target * (np.log(target) - logs_of)
        loss += factor * terms.sum(), abs(factor) * abs(terms).sum()
        p = np.exp(logs_of)
        for i, d in enumerate((factor * (p - target), abs(factor) * (p + target))):
            size_of = abs if i else np.asarray
            shares_of = d * size_of(ws[t])[:, None] * (dots > 0)  # [HI, n]
            grads[0][i, t] = shares_of @ size_of(iks[at])
            grads[1][i, t] = np.maximum(dots, 0) @ d
            np.add.at(grads[2][i], at, shares_of.T @ size_of(iqs[t]))
    return Near(*loss), [Near(*pair) for pair in grads]


def listed(lists, lengths, num_rows):
    """Token, place and row of each valid entry."""
    ends = [lists.shape[1]] * len(lists) if lengths is None else ints(lengths)
    for t, row_ids in enumerate(lists):
        for j, row in enumerate(row_ids[: max(ends[t], 0)]):
            if 0 <= row < num_rows:
                yield t, j, row


# --- plans ---------------------------------------------------------------------------------------


def split_decodes(query_lens, threshold, uniform):
    """The number of leading decode requests."""
    if max(query_lens, default=0) <= threshold and (not uniform or threshold <= 1):
        return len(query_lens)
    if query_lens and query_lens[0] > threshold:
        return 0
    for i, length in enumerate(query_lens):
        if (length not in (query_lens[0], 0)) if uniform else length > threshold:
            return i
    return len(query_lens)


def plan(query_lens, seq_lens, table, page_size, threshold, uniform, workspace_rows, padded, share):
    """The fields of a plan, or None if the batch must be refused; share as of kept_positions."""
    num_requests, num_tokens = len(query_lens), sum(query_lens)
    seq_lens = [n if m else 0 for m, n in zip(query_lens, seq_lens, strict=True)]
    decodes = split_decodes(query_lens, threshold, uniform)
    longest = max(query_lens[:decodes], default=0)
    total = num_tokens if padded is None else padded
    if uniform:
        empty = [i for i in range(decodes) if query_lens[i] == 0]
        if empty and any(query_lens[empty[0] :]):
            return None
        if decodes == num_requests:
            if padded not in (None, decodes * longest):
                return None
            total = decodes * longest
    chunks = None
    rows = [len(kept_positions(n, 0, *share[1:])) for n in seq_lens]  # of the rank with the most
    if workspace_rows is not None:
        if any(n > workspace_rows for n in rows[decodes:]):
            return None
        chunks = chunks_of(rows[decodes:], workspace_rows)
    tokens = [(b, i) for b in range(num_requests) for i in range(query_lens[b])]
    positions = [seq_lens[b] - query_lens[b] + i for b, i in tokens]
    kept = [kept_positions(n, *share) for n in seq_lens]
    row_at = [{p: row for row, p in enumerate(each)} for each in kept]
    slots = [
        slot_of(table[b], row_at[b].get(p, -1), page_size)
        for (b, _), p in zip(tokens, positions, strict=True)
    ]
    padding = total - num_tokens
    decode_tokens = total if decodes == num_requests else sum(query_lens[:decodes])
    fields = {
        "num_requests": num_requests,
        "num_tokens": total,
        "num_decodes": decodes,
        "num_prefills": num_requests - decodes,
        "num_decode_tokens": decode_tokens,
        "num_prefill_tokens": total - decode_tokens,
        "decode_query_len": longest,
        "max_query_len": max(query_lens, default=0),
        "max_seq_len": max(seq_lens, default=0),
        "max_context_len": max(
            [n - m for m, n in zip(query_lens, seq_lens, strict=True)], default=0
        ),
        "page_size": page_size,
        "input_row_offsets": [sum(query_lens[:b]) for b in range(num_requests + 1)],
        "seq_lens": seq_lens,
        "positions": positions + [0] * padding,
        "slot_mapping": slots + [NOWHERE] * padding,
        "request_ids": [b for b, _ in tokens] + [0] * padding,
        "prefill_request_ids": None,
        "workspace_starts": None,
        "chunks": [],
    }
    if chunks:
        fields["prefill_request_ids"] = [max(b - decodes, -1) for b, _ in tokens] + [-1] * padding
        fields["workspace_starts"] = [
            sum(rows[decodes + first : decodes + i])
            for first, stop in chunks
            for i in range(first, stop)
        ]
        for first, stop in chunks:
            requests = slice(decodes + first, decodes + stop)
            span = slice(sum(query_lens[: requests.start]), sum(query_lens[: requests.stop]))
            lens = [len(positions) for positions in kept[requests]]
            fields["chunks"].append((requests, span, sum(rows[requests]), lens))
    return fields


def chunks_of(seq_lens, workspace_rows):
    """``(start, stop)`` of runs of requests that fill the workspace greedily."""
    chunks, start = [], 0
    while start < len(seq_lens):
        stop, total = start, 0
        while stop < len(seq_lens) and total + seq_lens[stop] <= workspace_rows:
            total += seq_lens[stop]
            stop += 1
        chunks.append((start, stop))
        start = stop
    return chunks
