"""The portable gather kernels where nothing may be read or written; test_tiers.py has the rest."""

import pytest
import torch

from sparsemla import FP8_DS_MLA, PagedCache, bf16_format, dispatch, e4m3_format, reference
from sparsemla_lab.testing.cases import Draw, embed, visible_slots_case

pytest.importorskip("triton")

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def on_device():
    with torch.device(DEVICE):
        torch.manual_seed(0)
        yield


def test_to_slots_reads_slices_and_ignores_ids_out_of_range():
    table = torch.full((4, 9), INT_MAX, dtype=torch.int32)[:2, :3]
    table[:] = torch.arange(6).view(2, 3)
    indices = torch.full((4, 12), 5, dtype=torch.int32)[:, :5]
    buffer = torch.full((4, 8), -7, dtype=torch.int32)
    dispatch.load("to_slots", "triton")(
        topk_indices=indices,
        page_table=table,
        request_ids=torch.tensor([1, -1, 2, INT_MAX]),
        page_size=4,
        workspace_starts=torch.tensor([100]),
        prefill_request_ids=torch.tensor([-1, -1, 1, INT_MAX]),
        out=buffer[:, :5],
    )
    assert buffer[:, :5].tolist() == [[4 * 4 + 1] * 5] + [[-1] * 5] * 3
    assert (buffer[:, 5:] == -7).all()


def test_visible_slots_in_slices():
    case = visible_slots_case(Draw(0, DEVICE))
    case["page_table"] = embed(case["page_table"])
    expected, lengths = reference.visible_slots(**case)
    out = torch.full((len(expected), 23), -7, dtype=torch.int32)
    results = {"out": out[:, :20], "lengths": torch.full_like(lengths, -7)}
    dispatch.load("visible_slots", "triton")(**case, **results)
    assert torch.equal(out[:, :20], expected)
    assert torch.equal(results["lengths"], lengths)
    assert (out[:, 20:] == -7).all()


def poisoned_cache(fmt, num_pages, page_size, used):
    """A cache with random rows in the pages ``used``, and 0xFF (NaN) everywhere else."""
    layers = PagedCache.allocate(fmt, num_pages, page_size, num_layers=2)
    layers.data.view(torch.uint8).fill_(0xFF)
    if layers.scales is not None:
        layers.scales.fill_(float("nan"))
    cache = layers.layer(1)
    slots = (torch.tensor(used)[:, None] * page_size + torch.arange(page_size)).flatten()
    cache.write(slots, torch.randn(len(slots), fmt.head_dim) * torch.rand(len(slots), 1).exp2())
    return cache


@pytest.mark.parametrize(
    "fmt", [FP8_DS_MLA, bf16_format(100, 64), e4m3_format(200, 100, 48)], ids=lambda fmt: fmt.name
)
def test_gather_into_a_slice(fmt):
    page_size = 5
    cache = poisoned_cache(fmt, 9, page_size, [7, 2, 4])
    table = torch.tensor([[7, 2, INT_MIN], [INT_MAX, 8, 8], [4, -1, 9]], dtype=torch.int32)
    lens = torch.tensor([page_size + 1, 0, 3 * page_size], dtype=torch.int32)
    starts = torch.tensor([page_size * 4, 0, 2], dtype=torch.int32)
    first = torch.tensor([page_size // 2, 0, 0])
    out = torch.full((page_size * 6 + 3, fmt.head_dim + 8), 7.0, dtype=torch.bfloat16)
    expected = out.clone()
    arguments = {
        "cache": cache,
        "page_table": table,
        "seq_lens": lens,
        "workspace_starts": starts,
        "seq_starts": first,
    }
    dispatch.load("gather_dequant", "triton")(**arguments, out=out[:, : fmt.head_dim])
    reference.gather_dequant(**arguments, out=expected[:, : fmt.head_dim])
    assert torch.equal(out, expected)


def test_gather_dequant_of_many_requests():
    cache = poisoned_cache(FP8_DS_MLA, 40, 2, list(range(40)))
    lens = torch.arange(40) % 3
    arguments = {
        "cache": cache,
        "page_table": torch.randperm(40)[:, None].int(),
        "seq_lens": lens,
        "workspace_starts": lens.cumsum(0) - lens,
    }
    out = torch.zeros(int(lens.sum()), 576, dtype=torch.bfloat16)
    expected = reference.gather_dequant(**arguments, out=out.clone())
    dispatch.load("gather_dequant", "triton")(**arguments, out=out)
    assert torch.equal(out, expected)
