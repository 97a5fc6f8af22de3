"""Hard values for attention with Ampere's instructions, in the interpreter; no GPU is needed."""

import importlib
import math

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from sparsemla import FP8_DS_MLA, PagedCache, reference
from sparsemla.kernels.attention.arguments import SparseDecode, Splits
from sparsemla_lab.testing.interpreter import acting_as

pytestmark = [
    pytest.mark.skipif(not knobs.runtime.interpret, reason="Triton does not interpret"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

sm80 = importlib.import_module("sparsemla.kernels.attention.sm80")  # itself, to be patched
NUM_ROWS = 256
NAN = 0xFF


def random_cache():
    """Rows of 656 bytes: codes, four scales, 64 bfloat16 dims."""
    generator = torch.Generator().manual_seed(0)
    cache = PagedCache.allocate(FP8_DS_MLA, NUM_ROWS // 64, 64, device="cpu")
    rows = cache.data.view(torch.uint8).view(-1, 656)
    codes = torch.randn(NUM_ROWS, 512, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(NUM_ROWS, 4, generator=generator) / 16 + 2**-6
    rows[:, :512] = codes.view(torch.uint8)
    rows[:, 512:528] = scales.view(torch.uint8)
    rows[:, 528:] = torch.zeros(NUM_ROWS, 64, dtype=torch.bfloat16).view(torch.uint8)
    return cache, rows


@pytest.fixture(params=["sm_80", "sm_89"], autouse=True)
def gpu(request, monkeypatch):
    """A GPU with 163 KiB of shared memory, and one with 99 that knows e4m3."""
    monkeypatch.setattr(sm80, "has_large_tiles", lambda device: request.param == "sm_80")
    monkeypatch.setattr(sm80, "has_fp8", lambda device: request.param == "sm_89")


def attend(q, cache, topk_indices):
    """Output and LSE, of one split."""
    out = torch.zeros(*q.shape[:3], 512, dtype=torch.bfloat16)
    lse = torch.zeros(q.shape[:3])
    call = SparseDecode(q, cache, topk_indices, 1.0, splits=Splits(1), out=out, lse=lse)
    with acting_as("sm_80"):
        sm80.sparse_decode(call)
    return out, lse


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("dim", [0, 299, 511])
def test_a_nan_code_makes_its_selections_nan_and_no_others(dim, heads):
    cache, rows = random_cache()
    q = torch.randn(1, 1, heads, 576, generator=torch.Generator().manual_seed(1)).bfloat16() / 16
    slots = torch.arange(1, 41, dtype=torch.int32).view(1, 1, -1)
    slots[..., 5] = -1  # whose address is row 0's
    expected = attend(q, cache, slots)
    for row in (0, 41):
        rows[row, dim] = NAN
        rows[row, 512:528].view(torch.float32).fill_(math.nan)
    for got, want in zip(attend(q, cache, slots), expected, strict=True):
        assert torch.equal(got, want)
        assert not got.isnan().any()
    rows[9, dim] = NAN
    for got in attend(q, cache, slots):
        assert got.isnan().all()


@pytest.mark.parametrize("rising", [slice(None), slice(17, 18)], ids=["all heads", "a head"])
@pytest.mark.parametrize("heads", [24, 64])
@pytest.mark.parametrize("rise", [8.0, 1.0, 0.25], ids=["2^11.5", "2^1.4", "2^0.4"])
def test_maxima_that_rise_by_this_factor_a_tile(rise, heads, rising):
    cache, rows = random_cache()
    climb = torch.zeros(NUM_ROWS, 64)
    climb[:, 0] = torch.arange(NUM_ROWS) // 32 * rise
    rows[:, 528:] = climb.bfloat16().view(torch.uint8)
    q = torch.randn(1, 1, heads, 576, generator=torch.Generator().manual_seed(1)) / 16
    q[..., 512] = 0
    q[..., rising, 512] = 1
    q = q.bfloat16()
    slots = torch.arange(NUM_ROWS, dtype=torch.int32).view(1, 1, -1)
    out, lse = attend(q, cache, slots)
    want, want_lse = reference.sparse_decode(q, cache, slots, softmax_scale=1.0)[:2]
    torch.testing.assert_close(lse, want_lse.float(), atol=1e-4, rtol=0)
    error = (out.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1)
    assert error.max() < 0.01
