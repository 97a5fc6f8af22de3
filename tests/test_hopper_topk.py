"""How the Hopper top-k is spread over the device; no GPU is needed."""

import functools
import math

import pytest
import torch

pytest.importorskip("triton")

from sparsemla import reference
from sparsemla.kernels.topk import sm90, triton
from sparsemla.testing.cases import Draw, merge_topk_case

COLUMNS = [0, 1, 4096, 32768, 131072, 1 << 20]
TOPK = [1, 512, 1024, 2048, 3000, 9000]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def of_132_multiprocessors(monkeypatch):
    monkeypatch.setattr(sm90, "num_multiprocessors", lambda device: 132)


@pytest.mark.parametrize("num_cols", COLUMNS[3:])
@pytest.mark.parametrize("topk", TOPK[:-1])
def test_a_threshold_keeps_clear_of_k_and_of_the_list(topk, num_cols):
    capacity, sample = sm90._list_and_sample(num_cols, topk)
    assert sample & (sample - 1) == capacity & (capacity - 1) == 0
    if sample > sm90.MAX_SAMPLE:
        return  # no list is long enough
    chosen = topk * sample / num_cols
    room = math.sqrt(capacity / topk) - 1
    assert room * math.sqrt(chosen) >= sm90.FEW_SIGMAS


@pytest.mark.parametrize("num_cols", COLUMNS)
@pytest.mark.parametrize("num_rows", [1, 7, 64, 132, 500, 8192])
@pytest.mark.parametrize("topk", TOPK)
def test_lists_have_room_and_memory_is_bounded(topk, num_rows, num_cols):
    how = sm90.plan(num_rows, num_cols, topk, CPU)
    assert how.num_lists <= how.capacity
    assert how.num_lists * how.limit(num_cols) >= min(num_cols, how.capacity)
    assert how.programs == 1 or how.list_bytes(num_cols) <= triton.LIST_BYTES
    assert 1 <= how.programs <= num_rows


class MergeOnTheCpu:
    """What one launch of the kernel of merges does, by the definition."""

    def __getitem__(self, grid):
        return functools.partial(self.merge, grid)

    @staticmethod
    def merge(grid, values, indices, out_values, out, num_parts, width, k, *strides, **constants):
        parts = constants["PARTS"]
        assert grid == (values.shape[1], out.shape[0])
        assert parts * constants["WIDTH"] <= sm90.MERGE_BLOCK
        assert parts * constants["WIDTH"] % (128 * constants["W"]) == 0
        assert width <= constants["WIDTH"]
        assert k <= constants["SORTED"]
        assert out.shape[0] * parts >= num_parts
        for group, (some, ids) in enumerate(
            zip(values.split(parts), indices.split(parts), strict=True)
        ):
            out[group] = reference.merge_topk(some, ids, k)
            if out_values is not None:
                equal = ids.transpose(0, 1).flatten(1)[:, None] == out[group, :, :, None]
                place = equal.int().argmax(-1)
                out_values[group] = some.transpose(0, 1).flatten(1).float().gather(1, place)


@pytest.mark.parametrize(
    ("num_parts", "width", "topk"),
    [(1, 1, 1), (3, 40, 64), (5, 600, 100), (70, 300, 70), (300, 90, 3), (40, 1, 200)],
)
def test_parts_are_merged_in_groups(num_parts, width, topk, monkeypatch):
    monkeypatch.setattr(sm90, "MERGE_BLOCK", 2048)
    monkeypatch.setattr(sm90, "_merge_kernel", MergeOnTheCpu())
    case = merge_topk_case(Draw(0, CPU), num_parts=num_parts, num_rows=2, width=width, topk=topk)
    out = torch.empty(2, topk, dtype=torch.int32)
    sm90.merge_topk(**case, out=out)
    assert torch.equal(out, reference.merge_topk(**case))
