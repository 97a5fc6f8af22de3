"""MAX's ``mla_fused_rope_rmsnorm_quantization``, into a bfloat16 and into an e4m3 cache.

The arguments have MAX's names, dtypes and layouts. MAX's FP8 rows have no scales: a value is cast
to e4m3 as it is. The expected rows and queries are computed in float64.

Run ``python examples/documents/max_rope_norm_quant.py``, on a GPU with ``cuda`` behind it.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from torch import Tensor

from sparsemla import (
    BF16_576,
    PagedCache,
    e4m3_format,
    from_freqs_cis,
    fused_rope_rmsnorm_quant,
    plan_on_device,
)

H, L, R = 8, 512, 64
PAGE_SIZE, NUM_LAYERS = 16, 2


def arguments(dtype: torch.dtype) -> SimpleNamespace:
    """Two requests: two tokens after 15, in two blocks, and one token after 20."""
    torch.manual_seed(0)
    given = SimpleNamespace()
    given.q_rope = torch.randn(3, H, R).bfloat16()
    given.q_rope_output = torch.empty_like(given.q_rope)
    given.kv = torch.randn(3, L + R).bfloat16()  # what kv_input_fn loads
    given.input_row_offsets = torch.tensor([0, 2, 3], dtype=torch.uint32)
    angles = torch.arange(64)[:, None] * 1e4 ** (-torch.arange(0, R, 2) / R)
    given.freqs_cis = torch.stack([angles.cos(), angles.sin()], -1).flatten(-2).bfloat16()
    given.gamma = (1 + 0.1 * torch.randn(L)).bfloat16()
    given.kv_blocks = torch.randn(5, 1, NUM_LAYERS, PAGE_SIZE, 1, L + R).to(dtype)
    given.cache_lengths = torch.tensor([15, 20], dtype=torch.uint32)
    given.lookup_table = torch.tensor([[4, 2], [0, 3]], dtype=torch.uint32)
    given.layer_idx, given.epsilon = 1, 1e-6
    return given


def on(device: str, given: SimpleNamespace) -> SimpleNamespace:
    """The arguments with their tensors on a device."""
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(given).items()}
    return SimpleNamespace(**moved)


def run(given: SimpleNamespace) -> None:
    """The call of sparsemla: it writes ``q_rope_output`` and the rows of the step."""
    is_fp8 = given.kv_blocks.dtype == torch.float8_e4m3fn
    fmt = e4m3_format(L + R, L, scale_block=0) if is_fp8 else BF16_576
    cache = PagedCache(given.kv_blocks[:, 0, :, :, 0], fmt).layer(given.layer_idx)  # views
    plan = plan_on_device(
        page_table=given.lookup_table,
        input_row_offsets=given.input_row_offsets,
        cache_lengths=given.cache_lengths,
        page_size=PAGE_SIZE,
        num_tokens=3,
        max_query_len=2,
    )
    fused_rope_rmsnorm_quant(
        given.q_rope,
        given.kv,
        from_freqs_cis(given.freqs_cis),
        given.gamma,
        cache,
        positions=plan.positions,
        slot_mapping=plan.slot_mapping,
        eps=given.epsilon,
        out=given.q_rope_output,
    )


def rotate(x: Tensor, freqs: Tensor) -> Tensor:
    """RoPE of neighbouring pairs; ``freqs`` is a row of freqs_cis."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turns = torch.view_as_complex(freqs.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


def expected(given: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """float64 queries ``[3, H, R]`` and blocks."""
    queries, blocks = given.q_rope.double(), given.kv_blocks.double()
    places = [(15, 4, 15), (16, 2, 0), (20, 3, 4)]  # position, block, offset of each token
    for t, (position, block, offset) in enumerate(places):
        latent, k_rope = given.kv[t].double().split([L, R])
        latent = latent * (latent.square().mean() + given.epsilon).rsqrt() * given.gamma.double()
        row = torch.cat([latent, rotate(k_rope, given.freqs_cis[position])])
        blocks[block, 0, given.layer_idx, offset, 0] = row
        queries[t] = rotate(queries[t], given.freqs_cis[position])
    return queries, blocks


def main(device: str = "cpu") -> int:
    """Write both caches; 1 if a value is farther from float64 than one rounding."""
    right = True
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        given = arguments(dtype)
        queries, blocks = expected(given)
        given = on(device, given)
        run(given)
        info = torch.finfo(dtype)
        # Half a step, and what float32 leaves where the two terms of a rotation cancel.
        half = {"rtol": info.eps / 2 * 1.001, "atol": info.smallest_normal * info.eps / 2 + 1e-6}
        close = torch.isclose(given.kv_blocks.cpu().double(), blocks, **half)
        rotated = given.q_rope_output.cpu().double()
        close_q = torch.isclose(rotated, queries, rtol=2**-8 * 1.001, atol=1e-6)
        sys.stdout.write(
            f"mla_fused_rope_rmsnorm_quantization, {dtype}: {int(close.sum())} of "
            f"{close.numel()} values in blocks and {int(close_q.sum())} of {close_q.numel()} in "
            "q_rope_output are one rounding from float64\n"
        )
        right &= bool(close.all() and close_q.all())
    return int(not right)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
