"""Every Triton kernel compiles for every target, fits its shared memory and hardly spills.

Each file of ``tests/launches`` holds a table ``LAUNCHES``: name -> function without arguments that
calls one launcher with tensors on the ``meta`` device; and ``TARGETS``, if only some are meant.
"""

from pathlib import Path

import pytest

import spills

pytest.importorskip("triton")

from sparsemla_lab.testing.compile import BRANCHED_ARRIVAL, launches_of, report

TABLES = sorted((Path(__file__).parent / "launches").glob("*.py"))


def every_launch():
    """Each launch of each table for each of its targets; one launch a table is not slow.

    Ampere's launches have two targets in Gluon. Of the four pairs of target and version of Triton,
    oldest or newest, each launch compiles for two, so that it meets both of each.
    """
    for table in TABLES:
        first, *_ = pairs = launches_of(str(table))
        launches = list(dict(pairs))
        for launch, target in pairs:
            quick = launch == first[0] and target in ("sm_90", "gfx942")
            marks = [] if quick else [pytest.mark.slow]
            if table.stem.startswith("sm90_"):
                marks.append(pytest.mark.gluon)
            elif table.stem.startswith("sm80_") and target in ("sm_80", "sm_89"):
                marks.append(pytest.mark.gluon)
                if {(launch, "sm_80"), (launch, "sm_89")} <= {*pairs}:
                    older = (launches.index(launch) + (target == "sm_89")) % 2 == 0
                    marks.append(pytest.mark.oldest if older else pytest.mark.newest)
            yield pytest.param(
                table, launch, target, marks=marks, id=f"{table.stem}-{launch}-{target}"
            )


@pytest.mark.parametrize(("table", "launch", "target"), list(every_launch()))
def test_launch_compiles(compiler, pytestconfig, table, launch, target):
    assemble = not pytestconfig.getoption("without_assembler")
    lines = compiler.submit(report, str(table), launch, target, assemble=assemble).result()
    assert lines
    recorded = spills.read()
    spilling = [
        f"{kernel}: {spilled} bytes, recorded are {recorded.get(kernel, 0)}"
        for kernel, spilled in spills.of(table.stem, lines).items()
        if spilled > recorded.get(kernel, 0)
    ]
    assert not spilling, "\n".join(spilling)
    flaws = ("serialized", "branched", "reused")
    flawed = [line for line in lines if any(flaw in line for flaw in flaws)]
    assert not flawed, "\n".join(flawed)


def test_spills_are_counted_by_launch_kernel_and_target():
    line = "sinks, 3 heads               _sparse_decode                   {:7} (4,)  spills {:4}  x"
    of = spills.of("attention", [line.format("sm_90", 0), line.format("gfx942", 8)])
    assert of == {
        "attention / sinks, 3 heads / _sparse_decode / sm_90": 0,
        "attention / sinks, 3 heads / _sparse_decode / gfx942": 8,
    }


def test_recorded_spills_belong_to_existing_launches():
    # The record of a removed kernel must not allow another kernel to spill.
    pairs = {
        (table.stem, launch, target)
        for table in TABLES
        for launch, target in launches_of(str(table))
    }
    for kernel, spilled in spills.read().items():
        table, launch, _, target = kernel.split(" / ")
        assert (table, launch, target) in pairs
        assert spilled > 0


def test_branched_arrivals_differ_from_predicated_ones():
    # As in the machine code of one kernel, before and after it was mended.
    arrival = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x38380], RZ ;"
    assert BRANCHED_ARRIVAL.search(f"   @P1 BRA 0x2130 ;\n        /*1c90*/           {arrival}")
    assert not BRANCHED_ARRIVAL.search(f"   NOP ;\n        /*20f0*/      @!P0 {arrival}")


# Launches that differ only in counts must share a kernel: each compilation delays a server.
COUNTS = """
import runpy, sys
from functools import partial
from sparsemla import FP8_DS_MLA, INDEX_FP8
from sparsemla_lab.testing.compile import TARGETS, compile_launch

def table(name):
    return runpy.run_path(f"{sys.argv[1]}/{name}.py")

sm_90 = next(target for target in TARGETS if target.name == "sm_90")
fused, index = table("quant")["fused"], table("quant")["index_step"]
project, select = table("projection")["project"], table("sm90_topk")["select"]
for launches in (
    [fused(FP8_DS_MLA, tokens=n) for n in (1, 17, 32)],
    [index(INDEX_FP8, tokens=n) for n in (1, 17, 32)],
    [project(t, 16, 128, 512, parts=n) for t, n in ((61, 17), (64, 32))],
    [partial(select, n, 8192, 2048, page_size=64) for n in (513, 528)],
):
    compiled = [compile_launch(launch, sm_90) for launch in launches]
    print(*sorted({len({id(one.asm) for one in same}) for same in zip(*compiled, strict=True)}))
"""


def test_different_counts_share_a_kernel(run_python):
    done = run_python(COUNTS, str(TABLES[0].parent))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["1"] * 4  # each a single kernel


# If values are truncated to another type first, their codes may be off by one step.
CODES = """
import re, runpy, sys
from sparsemla_lab.testing.compile import TARGETS, compile_launch

launch = runpy.run_path(f"{sys.argv[1]}/quant.py")["LAUNCHES"]["fused fp8_ds_mla"]
for target in TARGETS:
    if target.capability >= (8, 9) and not target.is_hip:
        (compiled,) = compile_launch(launch, target)
        print(target.name, *set(re.findall(r"cvt\\S*e4m3\\S*", compiled.asm["ptx"])))
"""


def test_codes_are_rounded_once(run_python):
    done = run_python(CODES, str(TABLES[0].parent))
    assert done.returncode == 0, done.stderr[-4000:]
    names = ("sm_89", "sm_90", "sm_100", "sm_120")
    assert done.stdout.splitlines() == [f"{one} cvt.rn.satfinite.e4m3x2.f32" for one in names]
