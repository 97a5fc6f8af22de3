"""Decode with Ampere's instructions where each split has one tile of keys."""

from unittest import mock

import pytest
import torch

from sparsemla import BF16_576, FP8_DS_MLA, PagedCache, reference
from sparsemla.kernels.attention.arguments import SparseDecode, Splits

sm80 = pytest.importorskip("sparsemla.kernels.attention.sm80")
one_tile = pytest.importorskip("sparsemla.kernels.attention.sm80_one_tile")
interpreter = pytest.importorskip("sparsemla_lab.testing.interpreter")
TOLERANCE = 3e-3


def call_of(fmt, heads, num_keys, splits, stride=576):
    """Two requests of one token, one with fewer keys; some slots are none."""
    draw = torch.Generator().manual_seed(heads + num_keys)
    cache = PagedCache.allocate(fmt, 4, 64)
    cache.write(torch.arange(256), torch.randn(256, 576, generator=draw).bfloat16())
    room = torch.randn(2, 1, heads, stride, generator=draw).bfloat16()
    slots = torch.stack([torch.randperm(256, generator=draw)[:num_keys] for _ in range(2)])
    slots[:, 3::7] = -1
    return SparseDecode(
        q=room[..., :576],
        cache=cache,
        topk_indices=slots[:, None].int(),
        softmax_scale=192**-0.5,
        topk_lengths=torch.tensor([num_keys, num_keys // 3], dtype=torch.int32),
        attn_sink=torch.randn(heads, generator=draw),
        splits=Splits(splits),
        out=torch.full((2, 1, heads, 512), float("nan"), dtype=torch.bfloat16),
        lse=torch.full((2, 1, heads), float("nan")),
    )


def run(call):
    """Whether the kernel of one tile ran; the results of the call are checked."""
    with (
        interpreter.acting_as("sm_80"),
        mock.patch.object(one_tile, "launch", wraps=one_tile.launch) as launched,
    ):
        sm80.sparse_decode(call)
    given = call._asdict()
    wanted = {
        name: given[name] for name in ("softmax_scale", "topk_lengths", "attn_sink", "q_rope")
    }
    out, lse = reference.sparse_decode(call.q, call.cache, call.topk_indices, **wanted)
    error = (call.out.double() - out.double()).norm() / out.double().norm()
    assert error < TOLERANCE
    torch.testing.assert_close(call.lse, lse, atol=1e-4, rtol=1e-4)
    return launched.called


@pytest.mark.parametrize(
    ("fmt", "heads", "num_keys", "splits"),
    [
        (BF16_576, 8, 128, 2),
        (BF16_576, 32, 90, 3),
        (FP8_DS_MLA, 16, 100, 4),
        (FP8_DS_MLA, 3, 128, 2),
    ],
)
def test_splits_of_one_tile(fmt, heads, num_keys, splits):
    assert run(call_of(fmt, heads, num_keys, splits))


@pytest.mark.parametrize(
    ("splits", "stride"), [(1, 576), (2, 576), (4, 584)], ids=["one", "more keys", "unaligned"]
)
def test_other_calls_get_the_loop(splits, stride):
    assert not run(call_of(BF16_576, 8, 160, splits, stride))
