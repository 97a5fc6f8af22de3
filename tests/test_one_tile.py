"""Decode with Ampere's instructions where each split has one tile of keys."""

from __future__ import annotations

import pytest
import torch

from sparsemla import BF16_576, FP8_DS_MLA, CacheFormat, PagedCache, reference
from sparsemla.kernels import attention
from sparsemla.kernels.attention.arguments import SparseDecode, Splits
from sparsemla.kernels.attention.schedule import DecodeWork, sparse

interpreter = pytest.importorskip("sparsemla_lab.testing.interpreter")
TOLERANCE = 3e-3
(KERNEL,) = (k for k in attention.SPARSE_DECODE.kernels if k.name == "sm80.one_tile")


def call_of(
    heads: int,
    num_keys: int,
    splits: Splits,
    *,
    fmt: CacheFormat = BF16_576,
    stride: int = 576,
    apart: bool = False,
    extra: bool = False,
) -> SparseDecode:
    """Two requests of one token, one with fewer keys; some slots are none, and their rows NaN."""
    draw = torch.Generator().manual_seed(heads + num_keys)
    cache = PagedCache.allocate(fmt, 4, 64)
    cache.write(torch.arange(256), torch.randn(256, 576, generator=draw).bfloat16())
    room = torch.randn(2, 1, heads, stride, generator=draw).bfloat16()
    slots = torch.stack([torch.randperm(256, generator=draw)[:num_keys] for _ in range(2)])
    unseen = torch.ones(256, dtype=torch.bool)
    slots[:, 3::7] = -1
    lengths = torch.tensor([num_keys, num_keys // 3], dtype=torch.int32)
    for row, length in zip(slots, lengths.tolist(), strict=True):
        unseen[row[:length][row[:length] >= 0]] = False
    if fmt == BF16_576:
        cache.data.view(256, -1)[unseen] = float("nan")
    q = room[..., :576]
    more = {"extra_cache": cache, "extra_topk_indices": slots[:, None].int()} if extra else {}
    return SparseDecode(
        q=q[..., :512] if apart else q,
        q_rope=q[..., 512:].clone() if apart else None,
        cache=cache,
        topk_indices=slots[:, None].int(),
        softmax_scale=192**-0.5,
        topk_lengths=lengths,
        attn_sink=torch.randn(heads, generator=draw),
        splits=splits,
        out=torch.full((2, 1, heads, 512), float("nan"), dtype=torch.bfloat16),
        lse=torch.full((2, 1, heads), float("nan")),
        **more,
    )


@pytest.mark.parametrize(
    ("heads", "num_keys", "splits", "apart"),
    [
        (8, 128, Splits(2), False),
        (32, 90, Splits(3), True),
        (3, 64, Splits(2), False),
        (64, 100, Splits(4, 16), False),
        (64, 128, Splits(2, 16), True),
    ],
    ids=str,
)
def test_a_split_of_one_tile_agrees_with_the_reference(heads, num_keys, splits, apart):
    call = call_of(heads, num_keys, splits, apart=apart)
    with interpreter.acting_as("sm_80"):
        assert KERNEL.refuse(call) is None
        KERNEL.load()(call)
    names = "softmax_scale", "topk_lengths", "attn_sink", "q_rope"
    given = {name: getattr(call, name) for name in names}
    out, lse = reference.sparse_decode(call.q, call.cache, call.topk_indices, **given)
    assert (call.out.double() - out.double()).norm() < TOLERANCE * out.double().norm()
    torch.testing.assert_close(call.lse, lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (call_of(8, 64, Splits(1)), "takes up to 64 keys in each of several splits, got 64 in 1"),
        (call_of(8, 160, Splits(2)), "takes up to 64 keys in each of several splits, got 160 in 2"),
        (call_of(8, 128, Splits(2), stride=584), "multiples of 16 elements"),
        (call_of(64, 128, Splits(2)), "takes up to 32 query rows that share keys, got 64"),
        (call_of(8, 128, Splits(2), fmt=FP8_DS_MLA), "needs bf16_576v512 rows, got fp8_ds_mla"),
        (call_of(8, 128, Splits(2), extra=True), "takes no extra cache"),
    ],
    ids=["one split", "two tiles", "strides", "many heads", "FP8 rows", "two caches"],
)
def test_other_calls_are_refused(call, reason):
    assert reason in KERNEL.refuse(call)


@pytest.mark.parametrize(
    ("batch", "heads", "splits"),
    [(1, 16, Splits(64)), (2, 8, Splits(64)), (1, 64, Splits(32, 16))],
    ids=str,
)
def test_few_requests_have_a_tile_a_split(batch, heads, splits):
    assert sparse(DecodeWork(batch, 1, heads, 2048, BF16_576, 108), "sm80") == splits
    assert sparse(DecodeWork(16, 1, heads, 2048, BF16_576, 108), "sm80").num_splits < 32
    two = DecodeWork(batch, 1, heads, 2048, BF16_576, 108, extra=True)  # the kernel takes one cache
    assert sparse(two, "sm80").num_splits < splits.num_splits
