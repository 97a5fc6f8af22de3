"""Results of attention are rounded to bfloat16 once, after the sink and after all parts.

Of two keys with equal scores each has the weight 1/2, in bfloat16 too. The mean of their values has
one bit more than bfloat16; a rounding before the sink is applied would change every fifth result.
"""

from __future__ import annotations

import math

import pytest
import torch

import sparsemla
from sparsemla import PagedCache
from sparsemla.kernels.common import cpu
from sparsemla_lab.testing.cases import Draw

HEADS = 8


@pytest.fixture
def pair(device):
    """Queries of zeros, two keys, and the outputs with a sink, in float64."""
    draw = Draw(0, device)
    rows = draw.normal(2, 512).bfloat16()
    sink = draw.normal(HEADS)
    share = 1 / (1 + (sink.double() - math.log(2)).exp())
    wanted = rows.double().mean(0) * share[:, None]
    return rows.new_zeros(1, HEADS, 512), rows, sink, wanted


def check(out, wanted):
    """A float32 result beside a tie of bfloat16 may be rounded to the other side."""
    assert (out.view(HEADS, 512) != wanted.bfloat16()).float().mean() < 2**-7


def test_the_pair_tells_two_roundings_from_one(pair):
    _, rows, sink, _ = pair
    share = torch.sigmoid(math.log(2) - sink)
    twice = rows.float().mean(0).bfloat16() * share[:, None]
    with pytest.raises(AssertionError):
        check(twice.bfloat16(), pair[3])


@pytest.mark.parametrize("op", ["sparse_prefill", "sparse_attention", "sparse_decode"])
def test_a_sink_rounds_once(pair, op):
    q, rows, sink, wanted = pair
    indices = torch.tensor([[0, 1]], device=q.device)
    if op == "sparse_decode":
        q, rows, indices = q[None], PagedCache.from_rows(rows), indices[None]
    out, _ = getattr(sparsemla, op)(q, rows, indices, softmax_scale=1.0, attn_sink=sink)
    check(out, wanted)


def test_a_sink_of_dense_decode_rounds_once(pair):
    q, rows, sink, wanted = pair
    cache = PagedCache.from_rows(rows)
    table, lens = torch.tensor([[0, 1]], device=q.device), torch.tensor([2], device=q.device)
    out, _ = sparsemla.dense_decode(q[None], cache, table, lens, softmax_scale=1.0, attn_sink=sink)
    check(out, wanted)


@pytest.mark.parametrize("with_sink", [False, True])
def test_long_contexts_of_dense_decode_round_once(monkeypatch, with_sink):
    """The CPU merges parts of a context: here of two keys each."""
    draw = Draw(0)
    rows, sink = draw.normal(4, 512).bfloat16(), draw.normal(HEADS)
    wanted = rows.double().mean(0).expand(HEADS, -1)
    if with_sink:
        wanted = wanted / (1 + (sink.double() - math.log(4)).exp())[:, None]
    monkeypatch.setattr(cpu, "WORKSPACE_BYTES", 2 * 8 * 512)
    out, _ = sparsemla.dense_decode(
        rows.new_zeros(1, 1, HEADS, 512),
        PagedCache.from_rows(rows),
        torch.arange(4)[None],
        torch.tensor([4]),
        softmax_scale=1.0,
        attn_sink=sink if with_sink else None,
    )
    check(out, wanted)
