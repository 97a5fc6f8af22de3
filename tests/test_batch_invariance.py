"""A token's selection and attention have the same bits in any batch, order and chunking.

This is what ``VLLM_BATCH_INVARIANT`` relies on: one prefill kernel for every token of a step, and
an exact selection from scores that do not depend on the batch.
"""

import itertools

import pytest
import torch

from sparsemla import BF16_576, FP8_DS_MLA, INDEX_FP8, indexer_topk, merge_states, sparse_prefill
from sparsemla_lab.testing.cases import Draw, decode_queries, page_tables, sinks, written_cache
from sparsemla_lab.testing.compare import assert_equal

PAGE = 64
CHUNKS = 1, 2, 7, 16


def sizes(device):
    """Tokens, selected rows, pages and contexts: few on a CPU, those of serving on a GPU."""
    return (300, 2048, 1024, 30000) if device == "cuda" else (20, 64, 8, 300)


def chunks_of(total, size):
    return [slice(first, min(first + size, total)) for first in range(0, total, size)]


@pytest.mark.parametrize("num_heads", [8, 16, 64, 128])
@pytest.mark.parametrize("fmt", [FP8_DS_MLA, BF16_576], ids=lambda fmt: fmt.name)
def test_attention_of_a_token_does_not_depend_on_the_others(device, fmt, num_heads):
    tokens, topk, pages, _ = sizes(device)
    draw = Draw(0, device)
    cache = written_cache(draw, fmt, pages, PAGE)
    q = decode_queries(draw, tokens, num_heads, 576)
    slots = draw.integers(0, cache.num_slots, tokens, topk)
    lengths, sink = draw.integers(0, topk + 1, tokens), sinks(draw, num_heads)

    def attend(rows):
        arguments = {"softmax_scale": 0.07, "topk_lengths": lengths[rows], "attn_sink": sink}
        return sparse_prefill(q[rows], cache, slots[rows], **arguments)

    out, lse = attend(slice(None))
    for size in CHUNKS:
        parts = [attend(rows) for rows in chunks_of(tokens, size)]
        assert_equal(f"out in chunks of {size}", torch.cat([part[0] for part in parts]), out)
        assert_equal(f"lse in chunks of {size}", torch.cat([part[1] for part in parts]), lse)
    others = draw.permutation(3 * tokens) % tokens
    mixed_out, mixed_lse = attend(others)
    assert_equal("out among others", mixed_out, out[others])
    assert_equal("lse among others", mixed_lse, lse[others])


def test_merged_states_of_a_head_do_not_depend_on_the_others(device):
    draw = Draw(3, device)
    outs, lses, sink = draw.normal(5, 200, 19, 8), draw.normal(5, 200, 19), draw.normal(19)
    out, lse = merge_states(outs, lses, attn_sink=sink)
    for size in CHUNKS:
        some = [merge_states(outs[:, t], lses[:, t], attn_sink=sink) for t in chunks_of(200, size)]
        assert_equal(f"out in chunks of {size}", torch.cat([part[0] for part in some]), out)
        assert_equal(f"lse in chunks of {size}", torch.cat([part[1] for part in some]), lse)
        some = [
            merge_states(outs[:, :, h], lses[:, :, h], attn_sink=sink[h])
            for h in chunks_of(19, size)
        ]
        assert_equal(f"out of {size} heads", torch.cat([part[0] for part in some], 1), out)
        assert_equal(f"lse of {size} heads", torch.cat([part[1] for part in some], 1), lse)


@pytest.mark.parametrize("index_heads", [32, 64])
def test_selection_of_a_token_does_not_depend_on_the_others(device, index_heads):
    tokens, topk, _, context = sizes(device)
    draw = Draw(1, device)
    lens = [context, 5, context // 2, 1, context - 1]
    table, num_pages = page_tables(draw, lens, PAGE)
    cache = written_cache(draw, INDEX_FP8, num_pages, PAGE)
    q = draw.normal(tokens + 30, index_heads, 128, dtype=torch.float8_e4m3fn)
    weights = draw.normal(tokens + 30, index_heads)

    def select(rows, requests, query_lens, seq_lens, **options):
        offsets = [0, *itertools.accumulate(query_lens)]
        return indexer_topk(
            q[rows],
            weights[rows],
            cache,
            input_row_offsets=draw.tensor(offsets),
            seq_lens=draw.tensor(seq_lens),
            page_table=table[requests],
            topk=topk,
            **options,
        )

    own = slice(0, tokens)
    expected = select(own, [0], [tokens], [context])
    for size in CHUNKS:
        for rows in chunks_of(tokens, size):
            count, end = rows.stop - rows.start, context - tokens + rows.stop
            assert_equal("in chunks", select(rows, [0], [count], [end]), expected[rows])
    # Behind and between other requests, and with scores in several pieces.
    order, query_lens = [1, 2, 0, 3, 4], [3, 7, tokens, 1, 5]
    rows = torch.arange(tokens, tokens + sum(query_lens) - tokens, device=device)
    rows = torch.cat([rows[:10], torch.arange(tokens, device=device), rows[10:]])
    for max_bytes in (256 << 20, 1 << 20):
        chosen = select(
            rows, order, query_lens, [lens[i] for i in order], max_workspace_bytes=max_bytes
        )
        assert_equal("among others", chosen[10 : 10 + tokens], expected)
