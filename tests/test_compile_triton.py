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
# weights of its rows in registers; a selection of slots spills 720 on Triton 3.9, and attention of
# 17 to 32 rows 88 there, 64 on 3.6.
SPILLED_BYTES = {
    "attention": 264,
    "hopper_columns": 88,
    "hopper_indexer": 720,
    "hopper_projection": 72,
    "hopper_rows": 280,
    "hopper_topk": 312,
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
    hanging = [line for line in lines if "branched" in line]
    assert not hanging, "\n".join(hanging)
    reused = [line for line in lines if "reused" in line]
    assert not reused, "\n".join(reused)


def test_an_arrival_that_a_branch_leads_to_is_told_from_a_predicated_one():
    from sparsemla.testing.compile import BRANCHED_ARRIVAL

    # As in the machine code of one kernel, before and after it was mended.
    arrival = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x38380], RZ ;"
    assert BRANCHED_ARRIVAL.search(f"   @P1 BRA 0x2130 ;\n        /*1c90*/           {arrival}")
    assert not BRANCHED_ARRIVAL.search(f"   NOP ;\n        /*20f0*/      @!P0 {arrival}")


# Launches that differ in counts alone, and must get one kernel: each costs a server a wait.
COUNTS = """
import runpy, sys
from functools import partial
from sparsemla import FP8_DS_MLA, INDEX_FP8
from sparsemla.testing.compile import TARGETS, compile_launch

def table(name):
    return runpy.run_path(f"{sys.argv[1]}/{name}.py")

sm_90 = next(target for target in TARGETS if target.name == "sm_90")
fused, index = table("quant")["fused"], table("quant")["index_step"]
project, select = table("projection")["project"], table("hopper_topk")["select"]
for launches in (
    [fused(FP8_DS_MLA, tokens=n) for n in (1, 17, 32)],
    [index(INDEX_FP8, tokens=n) for n in (1, 17, 32)],
    [project(t, 16, 128, 512, parts=n) for t, n in ((61, 17), (64, 32))],
    [partial(select, n, 8192, 2048, page_size=64) for n in (513, 528)],
):
    compiled = [compile_launch(launch, sm_90) for launch in launches]
    print(*sorted({len({id(one.asm) for one in same}) for same in zip(*compiled, strict=True)}))
"""


def test_counts_share_a_kernel():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COUNTS, str(TABLES[0].parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["1"] * 4  # each a single kernel


# Codes of values that are truncated to another type first may be one step off.
CODES = """
import re, runpy, sys
from sparsemla.testing.compile import TARGETS, compile_launch

launch = runpy.run_path(f"{sys.argv[1]}/quant.py")["LAUNCHES"]["fused fp8_ds_mla"]
for target in TARGETS:
    if target.capability >= (8, 9) and not target.is_hip:
        (compiled,) = compile_launch(launch, target)
        print(target.name, *set(re.findall(r"cvt\\S*e4m3\\S*", compiled.asm["ptx"])))
"""


def test_codes_are_rounded_once():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CODES, str(TABLES[0].parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    names = ("sm_89", "sm_90", "sm_100", "sm_120")
    assert done.stdout.splitlines() == [f"{one} cvt.rn.satfinite.e4m3x2.f32" for one in names]
