"""MAX's ``MLAPrefillSparse``: its ``kernel`` over bfloat16 rows, its ``kernel_fp8`` over e4m3 rows.

The arguments have MAX's names, dtypes and layouts. The expected outputs are the softmax over each
token's selected rows in float64.

Run ``python examples/documents/max_prefill_sparse.py``, on a GPU with ``cuda`` behind it.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from torch import Tensor

from sparsemla import BF16_576, PagedCache, e4m3_format, sparse_prefill

H, DEPTH, V_DEPTH = 16, 576, 512
PAGE_SIZE, NUM_LAYERS, NUM_BLOCKS = 16, 2, 8
MASKED = 2**32 - 1


def arguments(scale_block_size: int | None) -> SimpleNamespace:
    """Absorbed queries of five tokens; None for ``kernel``, else the block of ``kernel_fp8``."""
    torch.manual_seed(0)
    given = SimpleNamespace()
    given.q = torch.randn(5, H, DEPTH).bfloat16()
    given.indices_stride = 24
    slots = torch.stack([torch.randperm(NUM_BLOCKS * PAGE_SIZE)[:24] for _ in given.q])
    slots[1, 7] = slots[3] = MASKED  # in MAX's prefill an index outside of the rows is no key
    given.indices = slots.flatten().to(torch.uint32)  # block * PAGE_SIZE + offset, of any layer
    given.topk_lengths = torch.tensor([24, 24, 9, 24, 0], dtype=torch.uint32)
    given.scale, given.layer_idx = 192**-0.5, 1
    given.attn_sink = torch.randn(H)
    blocks = torch.randn(NUM_BLOCKS, 1, NUM_LAYERS, PAGE_SIZE, 1, DEPTH)
    given.kv_blocks = blocks.bfloat16()
    given.scales = None
    if scale_block_size is not None:
        given.kv_blocks = (blocks * 8).to(torch.float8_e4m3fn)
    if scale_block_size:
        count = -(-DEPTH // scale_block_size)
        given.scales = torch.rand(*blocks.shape[:-1], count) / 8
    return given


def on(device: str, given: SimpleNamespace) -> SimpleNamespace:
    """The arguments with their tensors on a device."""
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(given).items()}
    return SimpleNamespace(**moved)


def run(given: SimpleNamespace, scale_block_size: int | None) -> Tensor:
    """The call of sparsemla."""
    fmt = BF16_576 if scale_block_size is None else e4m3_format(DEPTH, V_DEPTH, scale_block_size)
    scales = None if given.scales is None else given.scales[:, 0, :, :, 0]
    cache = PagedCache(given.kv_blocks[:, 0, :, :, 0], fmt, scales).layer(given.layer_idx)  # views
    out, _ = sparse_prefill(
        given.q,
        cache,
        given.indices.view(-1, given.indices_stride),
        softmax_scale=given.scale,
        topk_lengths=given.topk_lengths,
        attn_sink=given.attn_sink,
    )
    return out


def expected(given: SimpleNamespace, scale_block_size: int | None) -> Tensor:
    """float64 ``[T, H, V_DEPTH]``."""
    rows = given.kv_blocks[:, 0, given.layer_idx, :, 0].double().flatten(0, 1)
    if given.scales is not None:
        scales = given.scales[:, 0, given.layer_idx, :, 0].flatten(0, 1)
        rows *= scales.repeat_interleave(scale_block_size, 1)[:, :DEPTH]
    out = torch.zeros(5, H, V_DEPTH, dtype=torch.float64)
    indices = given.indices.long().view(5, -1)
    for t, length in enumerate(given.topk_lengths.tolist()):
        chosen = indices[t, :length]
        keys = rows[chosen[chosen < len(rows)]]
        weights = (given.q[t].double() @ keys.T * given.scale).exp()
        weights /= (weights.sum(1) + given.attn_sink.double().exp())[:, None]
        out[t] = weights @ keys[:, :V_DEPTH]
    return out


def main(device: str = "cpu") -> int:
    """Run all calls; 1 if an output is farther from float64 than bfloat16 explains."""
    worst = 0.0
    for scale_block_size in (None, 0, 128):
        given = arguments(scale_block_size)
        out = run(on(device, given), scale_block_size).cpu()
        wanted = expected(given, scale_block_size)
        error = float((out - wanted).norm() / wanted.norm())
        kernel = "kernel" if scale_block_size is None else f"kernel_fp8[{scale_block_size}]"
        sys.stdout.write(f"MLAPrefillSparse.{kernel}: relative error {error:.4f}\n")
        worst = max(worst, error)
    return int(worst > 0.01)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
