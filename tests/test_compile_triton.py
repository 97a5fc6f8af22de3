"""Every Triton kernel compiles for every target, fits its shared memory and hardly spills.

Each file of ``tests/launches`` holds a table ``LAUNCHES``: name -> function without arguments that
calls one launcher with tensors on the ``meta`` device; and ``TARGETS``, if only some are meant.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import spills

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
    recorded = spills.read()
    spilling = [
        f"{kernel}: {spilled} bytes, recorded are {recorded.get(kernel, 0)}"
        for kernel, spilled in spills.of(table.stem, lines).items()
        if spilled > recorded.get(kernel, 0)
    ]
    assert not spilling, "\n".join(spilling)
    waiting = [line for line in lines if "serialized" in line]
    assert not waiting, "\n".join(waiting)
    hanging = [line for line in lines if "branched" in line]
    assert not hanging, "\n".join(hanging)
    reused = [line for line in lines if "reused" in line]
    assert not reused, "\n".join(reused)


def test_spills_are_those_of_a_launch_its_kernel_and_its_target():
    line = "sinks, 3 heads               _sparse_decode                   {:7} (4,)  spills {:4}  x"
    of = spills.of("attention", [line.format("sm_90", 0), line.format("gfx942", 8)])
    assert of == {
        "attention / sinks, 3 heads / _sparse_decode / sm_90": 0,
        "attention / sinks, 3 heads / _sparse_decode / gfx942": 8,
    }


def test_recorded_spills_are_of_launches_that_exist():
    from sparsemla.testing.compile import TARGETS

    # A kernel that is gone must not leave room for another one.
    everywhere = [target.name for target in TARGETS]
    launches = {}
    for path in TABLES:
        table = runpy.run_path(str(path))
        for name in table["LAUNCHES"]:
            launches[f"{path.stem} / {name}"] = table.get("TARGETS", everywhere)
    for kernel, spilled in spills.read().items():
        launch, _, target = kernel.rsplit(" / ", 2)
        assert target in launches[launch]
        assert spilled > 0


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
