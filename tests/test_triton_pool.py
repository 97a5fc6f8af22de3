"""The portable kernels of pooled windows: cases that test_tiers.py has with long steps only."""

import pytest
import torch

from sparsemla import BF16_512, FP8_584, INDEX_FP8, INDEX_MXFP4, Pooling, bf16_format, dispatch
from sparsemla_lab.testing.cases import Draw, pool_windows_case
from sparsemla_lab.testing.compare import (
    BFLOAT16_ULP,
    FLOAT32_ULPS,
    assert_close,
    assert_rows_close,
    run_reference,
)
from sparsemla_lab.testing.poison import poisoned_empty

pytest.importorskip("triton")

# The second launch passes over rows that are no entries, here of NaN; numpy warns of their maximum.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = bf16_format(96)
CSA = Pooling(4, overlap=True)
STEPS = ((0, 5), (6, 3), (127, 2), (12, 1))


def check_kernel(make):
    actual, expected = make(), make()
    with poisoned_empty():
        dispatch.load("pool_windows", "triton")(**actual)
    (rows,) = run_reference("pool_windows", expected)
    assert_rows_close("cache", actual["cache"], expected["cache"])
    assert_close("state", actual["state"].rows, expected["state"].rows, FLOAT32_ULPS)
    if "kv_out" in actual:
        assert_close("kv_out", actual["kv_out"].float(), rows.float(), BFLOAT16_ULP)


@pytest.mark.parametrize(
    "options",
    [
        {"state_page": 4},
        {"state_page": 20, "strided": True},
        {"steps": ((0, 21),)},
        {"steps": ((6, 21), (3, 1), (7, 1))},
        {"steps": ((3, 1), (0, 40), (5, 23)), "state_page": 4},
    ],
    ids=str,
)
def test_long_steps_and_rows_on_pages(options):
    options = {"steps": STEPS} | options
    check_kernel(lambda: pool_windows_case(Draw(1, DEVICE), SMALL, CSA, **options))
