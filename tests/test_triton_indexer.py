"""The portable indexer's workspace, and lengths past the table; test_tiers.py has the rest."""

import pytest
import torch

from sparsemla import INDEX_FP8, PagedCache, dispatch, indexer_topk
from sparsemla_lab.testing.cases import Draw, indexer_topk_case

pytest.importorskip("triton")

from sparsemla.kernels.indexer import sm90
from sparsemla.kernels.indexer import triton as kernels
from sparsemla.kernels.indexer.arguments import IndexerTopk
from sparsemla.kernels.topk import triton as topk_kernels
from sparsemla.kernels.topk.sm90 import candidates
from test_tiers import DEVICE


def test_lengths_past_the_page_table_are_clamped():
    case = indexer_topk_case(Draw(0, DEVICE), query_lens=[2], seq_lens=[64], topk=70, causal=False)
    case |= {"page_table": case["page_table"][:, :1], "seq_lens": case["seq_lens"] * 0 + 2**31 - 1}
    with dispatch.only("triton"):
        out = indexer_topk(**case)
    assert out[0].sort().values[-64:].tolist() == list(range(64))


@pytest.mark.parametrize(
    ("selection", "scheduler"),
    [(kernels.SELECTION, topk_kernels), (sm90.SELECTION, candidates)],
    ids=["triton", "sm90"],
)
@pytest.mark.parametrize("num_keys", [64, 4096, 131072, 1 << 20])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 177, 500, 8192])
@pytest.mark.parametrize("megabytes", [1, 16, 32, 256])
@pytest.mark.parametrize("topk", [512, 2048])
def test_workspace_stays_below_its_bound(
    topk, megabytes, num_tokens, num_keys, selection, scheduler, monkeypatch
):
    """For all chunks, on a GPU with 132 multiprocessors."""
    monkeypatch.setattr(scheduler, "num_multiprocessors", lambda device: 132)
    chunks = []

    bound = megabytes << 20
    with torch.device("meta"):
        out = torch.empty(num_tokens, topk, dtype=torch.int32)
        call = IndexerTopk(
            index_q=torch.empty(num_tokens, 64, 128),
            weights=torch.empty(num_tokens, 64),
            cache=PagedCache.allocate(INDEX_FP8, 1, 64),
            input_row_offsets=torch.empty(10),
            seq_lens=torch.empty(9),
            page_table=torch.empty(9, num_keys // 64, dtype=torch.int32),
            topk=topk,
            max_workspace_bytes=bound,
            out=out,
        )
    select = selection._replace(select_topk=lambda part: chunks.append(part.scores.shape[0]))
    kernels.select_in_chunks(call, lambda *_: None, select)
    schedules = [selection.schedule_lists(n, num_keys, topk, out.device) for n in set(chunks)]
    lists = max(schedule.list_bytes(num_keys) for schedule in schedules)
    assert sum(chunks) == num_tokens
    assert max(chunks) == 1 or lists + max(chunks) * (4 * num_keys + 8) <= bound
    assert max(chunks) > 1 or lists < 18e6
