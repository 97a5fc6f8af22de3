"""The portable gather kernels against the reference, with poison where nothing may be read."""

import pytest
import torch

from sparsemla import (
    BF16_512,
    BF16_576,
    FP4_288,
    FP8_528,
    FP8_584,
    FP8_DS_MLA,
    PagedCache,
    bf16_format,
    dispatch,
    e4m3_format,
    reference,
)
from sparsemla_lab.testing.cases import Draw, embed, entry_slots_case

pytest.importorskip("triton")

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [
    BF16_576,
    BF16_512,
    bf16_format(100, 64),
    FP8_DS_MLA,
    FP8_584,
    FP4_288,
    FP8_528,
    e4m3_format(),
    e4m3_format(scale_block=576),
    e4m3_format(scale_block=0),
    e4m3_format(200, 100, 48),
]


@pytest.fixture(autouse=True)
def on_device():
    with torch.device(DEVICE):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("prefills", [False, True])
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_to_slots(page_size, prefills, dtype):
    table = torch.randint(0, 9, (3, 5), dtype=dtype)
    table[1, 2:] = -1
    indices = torch.randint(-3, 6 * page_size, (11, 1100), dtype=dtype)
    indices[:, 7], indices[:, 8] = INT_MIN, INT_MAX
    requests = torch.randint(0, 3, (11,), dtype=dtype)
    kinds = {}
    if prefills:
        kinds["workspace_starts"] = torch.tensor([0, 70], dtype=dtype)
        kinds["prefill_request_ids"] = torch.randint(-1, 2, (11,), dtype=dtype)
    out = torch.full((11, 1100), -7, dtype=torch.int32)
    arguments = {
        "topk_indices": indices,
        "page_table": table,
        "request_ids": requests,
        "page_size": page_size,
        **kinds,
    }
    dispatch.load("to_slots", "triton")(**arguments, out=out)
    assert torch.equal(out, reference.to_slots(**arguments))


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("ratio", "page_size"), [(1, 64), (3, 1), (128, 2)])
def test_slots_of_keys(ratio, page_size, dtype):
    draw = Draw(0, DEVICE)
    case = entry_slots_case(draw, ratio=ratio, page_size=page_size, dtype=dtype)
    out = torch.full_like(case["positions"], -7, dtype=torch.int32)
    dispatch.load("entry_slots", "triton")(**case, out=out)
    assert torch.equal(out, reference.entry_slots(**case))
    case["page_table"] = embed(case["page_table"])
    for width in (20, 1100):
        case["width"] = width
        slots, lengths = torch.full((len(out), width + 3), -7).int(), torch.full_like(out, -7)
        dispatch.load("visible_slots", "triton")(**case, out=slots[:, :width], lengths=lengths)
        expected = reference.visible_slots(**case)
        assert torch.equal(slots[:, :width], expected[0])
        assert torch.equal(lengths, expected[1])
        assert (slots[:, width:] == -7).all()


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


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("fmt", FORMATS)
def test_gather_dequant(fmt, page_size):
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
