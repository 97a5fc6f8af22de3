"""Functions of all CPU kernels: dequantised rows, attention over a block of keys, merge by LSE."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import RowFields, from_e2m1
from sparsemla.kernels.common.groups import attended, chunks
from sparsemla.state import Table

WORKSPACE_BYTES = 64 << 20
"""Bytes of a temporary buffer, of any context length; a kernel holds a few such buffers."""

KEY_BYTES = 4 << 20
"""Keys that each thread gathers at a time: enough rows to amortise a call."""


SMALL_LSE = 2.0
"""Below this LSE, the flash kernel's error of 3e-5 is not small against the allowed 2^-15 of it."""


def blocks(total: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size`` (at least one) that cover ``range(total)``."""
    size = max(size, 1)
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def check_positions(op: str, positions: Tensor, cos_sin_cache: Tensor) -> None:
    """Refuse positions without a row in the table; on a CPU, reading the values costs no wait."""
    outside = (positions < 0) | (positions >= cos_sin_cache.shape[0])
    if outside.any():
        raise ValueError(
            f"{op}: positions must lie in [0, {cos_sin_cache.shape[0]}), the rows of "
            f"cos_sin_cache, got {int(positions[outside][0])}"
        )


def check_slots(op: str, slot_mapping: Tensor, cache: PagedCache) -> None:
    """Refuse slots past the last one before anything is written, as :func:`check_positions`."""
    outside = slot_mapping >= cache.num_slots
    if outside.any():
        raise ValueError(
            f"{op}: slot_mapping must be below {cache.num_slots}, the slots of cache, "
            f"got {int(slot_mapping[outside][0])}"
        )


@Table
def _e4m3_pairs(device: torch.device) -> Tensor:
    """int32 ``[65536]``: two e4m3 codes to their two bfloat16 values, low byte first."""
    codes = torch.arange(65536, dtype=torch.int32, device=device)
    pair = torch.stack([codes & 0xFF, codes >> 8], dim=-1).to(torch.uint8)
    return pair.view(torch.float8_e4m3fn).to(torch.bfloat16).view(torch.int32).squeeze(-1)


def e4m3_to_bf16(x: Tensor) -> Tensor:
    """bfloat16 of contiguous e4m3 ``[..., n]``, exact; several times faster than ``x.bfloat16()``.

    torch converts e4m3 one value at a time; a table gives two at once.
    """
    if x.shape[-1] % 2 or not x.is_contiguous():
        return x.to(torch.bfloat16)
    pairs = x.view(torch.int16).to(torch.int32) & 0xFFFF
    return _e4m3_pairs(x.device)[pairs].view(torch.bfloat16)


def dequantize(fields: RowFields, scale_block: int) -> Tensor:
    """bfloat16 rows ``[n, head_dim]`` of parts ``[n, ...]``, as ``CacheFormat.dequantize``."""
    if fields.fp8 is None:
        return cast(Tensor, fields.bf16)
    packed = fields.fp8.dtype == torch.uint8
    x = from_e2m1(fields.fp8) if packed else e4m3_to_bf16(fields.fp8)
    if fields.scales is not None:
        # A product with float32 scales is rounded once, to bfloat16.
        scales = fields.scales.float().repeat_interleave(scale_block, dim=-1)
        x = (x * scales[:, : x.shape[1]]).to(torch.bfloat16)
    return x if fields.bf16 is None else torch.cat([x, fields.bf16], dim=-1)


def read_rows(cache: PagedCache, slots: Tensor) -> Tensor:
    """Dequantised bfloat16 rows ``[n, head_dim]`` of valid ``slots [n]``."""
    out = torch.empty(slots.shape[0], cache.format.head_dim, dtype=torch.bfloat16)
    # The conversion has temporaries several times the size of the rows.
    for part in blocks(slots.shape[0], WORKSPACE_BYTES // (16 * cache.format.head_dim)):
        out[part] = dequantize(cache.gather(slots[part]), cache.format.scale_block)
    return out


def flat_rows(cache: PagedCache) -> Tensor | None:
    """All rows ``[num_slots, head_dim]`` as a view, if they are bfloat16 and evenly spaced."""
    if cache.format.fp8_dim:
        return None
    rows = cache.data
    if cache.num_pages > 1 and rows.stride(0) != rows.stride(1) * cache.page_size:
        return None
    return rows.as_strided(
        (cache.num_slots, rows.shape[2]), (rows.stride(1), 1), rows.storage_offset()
    )


def valid_slots(cache: PagedCache, slots: Tensor, lengths: Tensor | None) -> Tensor:
    """Mask ``[R, K]``: which ``slots [R, K]`` exist and lie within ``lengths [R]``."""
    valid = (slots >= 0) & (slots < cache.num_slots)
    if lengths is not None:
        valid &= torch.arange(slots.shape[1]) < lengths[:, None]
    return valid


def selected_rows(
    kv: Tensor, topk_indices: Tensor, topk_lengths: Tensor | None, num_heads: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Chunks of tokens, with float32 rows ``[n, K, D]`` that they select from ``kv [S, D]``.

    Rows and scores of ``num_heads`` heads take WORKSPACE_BYTES each, or what one token needs.

    Yields:
        The tokens, their rows, 0 where an entry is not valid, and ``valid [n, K]``.
    """
    num_tokens, topk = topk_indices.shape
    token_bytes = 4 * topk * max(kv.shape[1], num_heads)
    for tokens in blocks(num_tokens, WORKSPACE_BYTES // max(token_bytes, 1)):
        ids = topk_indices[tokens].long()
        valid = (ids >= 0) & (ids < kv.shape[0])
        if topk_lengths is not None:
            valid &= torch.arange(topk) < topk_lengths[tokens, None]
        rows = kv[ids.where(valid, 0)].float()
        if not valid.all():
            rows.masked_fill_(~valid[..., None], 0)
        yield tokens, rows, valid


class SharedRows(NamedTuple):
    """Lists, the ``size`` tokens that share each of them, and float32 rows ``[n, K, D]``."""

    lists: slice
    tokens: slice
    size: int
    rows: Tensor
    valid: Tensor
    """``[n, K]``: whether an entry names a row, to which one of the tokens attends."""
    seen: Tensor
    """``[n, 1 or size * H, K]``: to which entries each token's heads attend."""


def shared_rows(
    kv: Tensor,
    topk_indices: Tensor,
    topk_lengths: Tensor | None,
    shape: torch.Size,
    list_tokens: int,
    token_mask: Tensor | None,
) -> Iterator[SharedRows]:
    """:func:`selected_rows` of lists that tokens share; ``shape`` is that of queries ``[T, H, D]``.

    The last list, if it has fewer tokens, comes alone.
    """
    num_tokens, num_heads = shape[:2]
    topk_indices = attended(topk_indices, token_mask, num_tokens, list_tokens)
    for part, _, size in chunks(num_tokens, list_tokens, max(num_tokens, 1)):
        lengths = None if topk_lengths is None else topk_lengths[part]
        for some, rows, valid in selected_rows(kv, topk_indices[part], lengths, size * num_heads):
            lists = slice(part.start + some.start, part.start + some.stop)
            first = lists.start * list_tokens
            tokens = slice(first, first + size * (lists.stop - lists.start))
            seen = valid[:, None]
            if token_mask is not None:
                bits = torch.ones(size, dtype=torch.uint8) << torch.arange(size).to(torch.uint8)
                attends = (token_mask[lists, None] & bits[:, None]) != 0  # [n, size, K]
                seen = seen & attends.repeat_interleave(num_heads, 1)
            yield SharedRows(lists, tokens, size, rows, valid, seen)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of ``q [R, M, D]`` over ``keys [R, K, D]`` and ``values [R, K, D]``.

    Args:
        q: bfloat16 or float32.
        keys: of q's dtype; must be finite if ``valid`` has one row for all of M.
        values: of q's dtype; like keys.
        valid: bool ``[R, K]`` or ``[R or 1, M, K]``, or None if every key is valid.
        softmax_scale: factor of the scores.

    Returns:
        out ``[R, M, D]`` of q's dtype and lse float32 ``[R, M]``; 0 and -inf without a valid key.
    """
    if q.numel() == 0:  # torch's kernel divides by the count of rows
        return q, q.new_empty(q.shape[:2], dtype=torch.float32)
    mask = None
    if valid is not None:
        valid = valid[:, None] if valid.dim() == 2 else valid  # [R or 1, 1 or M, K]
        mask = torch.zeros(valid.shape, dtype=q.dtype).masked_fill_(~valid, -torch.inf)[:, None]
    # The public scaled_dot_product_attention runs this kernel and drops the LSE.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[:, None], keys[:, None], values[:, None], attn_mask=mask, scale=softmax_scale
    )
    out, lse = out[:, 0], lse[:, 0]
    if q.dtype == torch.bfloat16:
        _refine_small(lse, q, keys, valid, softmax_scale)
    if valid is not None:
        lse.masked_fill_(~valid.any(-1), -torch.inf)
    # The flash kernel ignores keys with weight 0 even if they are not finite.
    for row in _nonfinite_rows(q, keys, values):
        pieces = q[row], keys[row], values[row], _of_row(valid, row)
        out[row], lse[row] = _attend_exactly(*pieces, softmax_scale)
    return out, lse


def _of_row(valid: Tensor | None, row: int) -> Tensor | None:
    return None if valid is None else valid[min(row, valid.shape[0] - 1)]


def _nonfinite_rows(q: Tensor, keys: Tensor, values: Tensor) -> list[int]:
    """Indices of rows with NaN or infinities; may include a row with overflow of finite values."""
    total = q.sum((1, 2)) + keys.sum((1, 2))
    if values is not keys:
        total += values.sum((1, 2))
    return (~total.isfinite()).nonzero()[:, 0].tolist()


def _logits(q: Tensor, keys: Tensor, valid: Tensor | None, softmax_scale: float) -> Tensor:
    """float64 ``[M, K]`` of ``q [M, D]`` and ``keys [K, D]``, -inf where not valid.

    K may depend on the neighbouring rows; float64 keeps this below the float32 rounding.
    """
    logits = (q.double() @ keys.double().T) * softmax_scale
    return logits if valid is None else logits.masked_fill_(~valid, -torch.inf)


def _attend_exactly(
    q: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """:func:`attend` for one row ``q [M, D]`` with NaN or infinities, by its definition."""
    logits = _logits(q, keys, valid, softmax_scale)
    lse = logits.logsumexp(-1)
    probs = (logits - lse[:, None]).exp_()  # [M, K]
    if valid is None:
        return probs @ values.double(), lse
    # 0 * NaN is NaN: a NaN value reaches all queries of M for which its key is valid.
    finite = values.isfinite()
    spoilt = valid.float() @ (~finite).float() > 0  # [M, D]
    out = probs.masked_fill_(~valid, 0) @ values.double().masked_fill(~finite, 0)
    return out.masked_fill_(spoilt, torch.nan), lse


def _refine_small(
    lse: Tensor, q: Tensor, keys: Tensor, valid: Tensor | None, softmax_scale: float
) -> None:
    """Recompute the LSE of rows near 0 from float64 scores.

    For bfloat16 the flash kernel's exponentials share a relative error of 3e-5. It cancels out in
    out, and it is below the rounding of an LSE that is not small.
    """
    for row in (lse.abs() < SMALL_LSE).any(-1).nonzero()[:, 0].tolist():
        lse[row] = _logits(q[row], keys[row], _of_row(valid, row), softmax_scale).logsumexp(-1)


def finish(
    out: Tensor,
    lse: Tensor,
    attn_sink: Tensor | None,
    unrounded: Callable[[], Tensor] | None = None,
) -> Tensor:
    """``out [R, H, V]`` with the sink in its denominator; rows without a key are 0.

    ``unrounded``, for a bfloat16 ``out``, computes it in float32: the product with the sink's share
    is to be rounded once. A head of which the sink takes nothing keeps its bits.
    """
    if attn_sink is None:
        return out
    # Not torch.sigmoid, for the reason of :func:`merge`.
    share = (
        (attn_sink - lse).exp_().add_(1).reciprocal_().masked_fill_(lse.isneginf(), 0)[..., None]
    )
    if unrounded is not None and ((share != 0) & (share != 1)).any():
        out = out.where(share == 1, unrounded()[..., : out.shape[-1]])
    return out * share


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The union of two attention states ``[..., M, D]`` and ``[..., M]``, in float32."""
    # torch.logaddexp gives other bits to the last elements of a tensor, which fill no vector.
    gap = (lse - more_lse).abs_().masked_fill_(lse == more_lse, 0)  # 0 between infinities
    total = torch.maximum(lse, more_lse).add_(gap.neg_().exp_().log1p_())
    shares = [(part - total).exp_().masked_fill_(part.isneginf(), 0) for part in (lse, more_lse)]
    return out * shares[0][..., None] + more * shares[1][..., None], total
