"""Every Triton kernel compiles for every target, fits its shared memory and hardly spills.

Each file of ``tests/launches`` holds a table ``LAUNCHES``: name -> function without arguments that
calls one launcher with tensors on the ``meta`` device; and ``TARGETS``, if only some are meant.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Bytes of registers that each table's worst launch has been seen to spill, over Triton 3.6 to 3.9:
# two loops over FP8 pages in one kernel leave some addresses without a register; top-k keeps the
# numbers of lanes there, out of its loops (804 on AMD); a product of few tokens keeps all
# weights of its rows in registers; a selection of slots spills 720 on Triton 3.9.
SPILLED_BYTES = {
    "attention": 264,
    "hopper_columns": 96,
    "hopper_indexer": 720,
    "hopper_rows": 200,
    "hopper_topk": 456,
    "indexer": 160,
    "projection": 304,
    "topk": 804,
}
TABLES = sorted((Path(__file__).parent / "launches").glob("*.py"))


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_launches_compile_for_every_target(table):
    # A process of its own: here Triton may be the interpreter, which cannot compile.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "sparsemla.testing.compile", str(table)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert lines
    limit = SPILLED_BYTES.get(table.stem, 0)
    spilling = [line for line in lines if int(re.findall(r"spills +(\d+)", line)[0]) > limit]
    assert not spilling, "\n".join(spilling)
    waiting = [line for line in lines if "serialized" in line]
    assert not waiting, "\n".join(waiting)
