"""How the Hopper top-k is spread over the device; no GPU is needed."""

import math

import pytest
import torch

pytest.importorskip("triton")

from sparsemla.kernels.topk import sm90, triton

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
