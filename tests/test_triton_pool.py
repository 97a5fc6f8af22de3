"""The portable kernels of pooled windows, on short steps instead of the table's long ones."""

import pytest

from sparsemla import Pooling, bf16_format
from sparsemla_lab.testing.cases import pool_windows_case
from sparsemla_lab.verify.matrix import Case, build
from test_tiers import DEVICE, check

pytest.importorskip("triton")

# The second launch passes over rows that are no entries, of any values; numpy warns of some.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

STEPS = ((0, 5), (6, 3), (127, 2), (12, 1))


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
    make = build(
        pool_windows_case, bf16_format(96), Pooling(4, overlap=True), **{"steps": STEPS} | options
    )
    check("triton", DEVICE, "pool_windows", Case("", make))
