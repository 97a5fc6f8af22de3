"""MAX's ``mla_indexer_ragged_float8_paged``, causal and without a mask.

The arguments have MAX's names, dtypes and layouts. The expected selection is the best of the scores
in float64: each head's product with a key is clamped at 0, then weighted and added.

Run ``python examples/documents/max_indexer.py``, on a GPU with ``cuda`` behind it.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from torch import Tensor

from sparsemla import PagedCache, e4m3_format, indexer_topk, plan_on_device

HEADS, DEPTH, TOP_K = 64, 128, 8
PAGE_SIZE, NUM_LAYERS = 16, 2


def arguments() -> SimpleNamespace:
    """Three requests: two tokens after 40, a first token, and three tokens after 3."""
    torch.manual_seed(0)
    given = SimpleNamespace()
    given.q = torch.randn(6, HEADS, DEPTH).to(torch.float8_e4m3fn)
    given.q_s = torch.randn(6, HEADS)  # a weight of each head, times the scale of its query
    given.input_row_offsets = torch.tensor([0, 2, 3, 6], dtype=torch.uint32)
    # k_collection: the keys of this step are in it, and cache_lengths does not count them.
    given.k_blocks = torch.randn(6, 1, NUM_LAYERS, PAGE_SIZE, 1, DEPTH).to(torch.float8_e4m3fn)
    given.k_scales = torch.rand(6, 1, NUM_LAYERS, PAGE_SIZE, 1, 1)
    given.cache_lengths = torch.tensor([40, 0, 3], dtype=torch.uint32)
    given.lookup_table = torch.tensor([[2, 5, 0], [3, 0, 0], [1, 0, 0]], dtype=torch.uint32)
    given.layer_idx = 1
    return given


def on(device: str, given: SimpleNamespace) -> SimpleNamespace:
    """The arguments with their tensors on a device."""
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(given).items()}
    return SimpleNamespace(**moved)


def run(given: SimpleNamespace, *, causal: bool) -> Tensor:
    """The call of sparsemla."""
    cache = PagedCache(  # views
        given.k_blocks[:, 0, :, :, 0],
        e4m3_format(DEPTH, DEPTH, scale_block=DEPTH),
        given.k_scales[:, 0, :, :, 0],
    )
    plan = plan_on_device(
        page_table=given.lookup_table,
        input_row_offsets=given.input_row_offsets,
        cache_lengths=given.cache_lengths,
        page_size=PAGE_SIZE,
        num_tokens=6,
        max_query_len=3,
    )
    return indexer_topk(
        given.q,
        given.q_s,
        cache.layer(given.layer_idx),
        input_row_offsets=plan.input_row_offsets,
        seq_lens=plan.seq_lens,
        page_table=plan.page_table,
        topk=TOP_K,
        causal=causal,
    )


def is_right(given: SimpleNamespace, selected: Tensor, *, causal: bool) -> bool:
    """Whether each row lists the best visible keys in ascending order, then -1."""
    offsets = given.input_row_offsets.tolist()
    keys = given.k_blocks[:, 0, given.layer_idx, :, 0].double()
    keys = keys * given.k_scales[:, 0, given.layer_idx, :, 0]
    for b, cached in enumerate(given.cache_lengths.tolist()):
        own = keys[given.lookup_table.long()[b]].flatten(0, 1)  # by position
        for i, t in enumerate(range(offsets[b], offsets[b + 1])):
            visible = cached + (i + 1 if causal else offsets[b + 1] - offsets[b])
            products = (given.q[t].double() @ own[:visible].T).relu()  # [HEADS, visible]
            scores = given.q_s[t].double() @ products
            best = scores.topk(min(TOP_K, visible)).indices.sort().values.tolist()
            if selected[t].tolist() != best + [-1] * (TOP_K - len(best)):
                return False
    return True


def main(device: str = "cpu") -> int:
    """Select with both masks; 1 if a selection is wrong."""
    given = arguments()
    wrong = 0
    for mask_str, causal in (("causal", True), ("null", False)):
        selected = run(on(device, given), causal=causal).cpu()
        right = is_right(given, selected, causal=causal)
        sys.stdout.write(
            f"mla_indexer_ragged_float8_paged, {mask_str}: {'best' if right else 'OTHER'} keys\n"
        )
        wrong += not right
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
