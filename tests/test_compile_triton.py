"""Every Triton kernel compiles for every target, fits its shared memory and hardly spills.

Each file of ``tests/launches`` holds a table ``LAUNCHES``: name -> function without arguments that
calls one launcher with tensors on the ``meta`` device; and ``TARGETS``, if only some are meant.
"""

import itertools
from pathlib import Path

import pytest

import spills

pytest.importorskip("triton")

from sparsemla_lab.testing.compile import (
    BRANCHED_ARRIVAL,
    TARGETS,
    compile_launch,
    launches_of,
    report,
)

NAMES = [target.name for target in TARGETS]
TABLES = sorted((Path(__file__).parent / "launches").glob("*.py"))


def in_gluon(table, target):
    """Whether the kernels are in Gluon and chosen for the target."""
    return table.stem.startswith("sm90_") or (
        table.stem.startswith("sm80_") and target in ("sm_80", "sm_89")
    )


def is_for_oldest(index, target):
    """Which Triton makes the machine code of a launch in Gluon: the oldest, or the newest.

    Those with two targets meet both.
    """
    return (index + (target == "sm_89")) % 2 == 0


def every_launch():
    """Each launch of each table for each of its targets; one launch a table is not slow.

    The kernels in Gluon compile on two versions of Triton, by turns. Slow launches also take turns
    from one commit to the next, as most commits change neither kernels nor Triton: those in Gluon
    four, with both versions in each, and portable ones six, so that a launch has a target in most.
    """
    for table in TABLES:
        first, *_ = pairs = launches_of(str(table))
        launches = list(dict(pairs))
        for launch, target in pairs:
            quick = launch == first[0] and target in ("sm_90", "gfx942")
            marks, index = [], launches.index(launch)
            if in_gluon(table, target):
                older = is_for_oldest(index, target)
                marks += [pytest.mark.gluon, pytest.mark.oldest if older else pytest.mark.newest]
                turns = pytest.mark.turns(index // 2, 4)
            else:
                turns = pytest.mark.turns(index + NAMES.index(target), len(NAMES))
            if not quick:
                marks += [pytest.mark.slow, turns]
            yield pytest.param(
                table, launch, target, marks=marks, id=f"{table.stem}-{launch}-{target}"
            )


def every_other_launch():
    """What the other version compiles, and the targets whose turn another launch has."""
    for table in TABLES:
        pairs = launches_of(str(table))
        launches = list(dict(pairs))
        for launch, target in pairs:
            if in_gluon(table, target):
                index = launches.index(launch)
                older = not is_for_oldest(index, target)
                marks = [pytest.mark.gluon, pytest.mark.oldest if older else pytest.mark.newest]
                yield table, launch, target, [*marks, pytest.mark.turns(index // 2, 6)]
        for launch, target in launches_of(str(table), others=True):
            turns = pytest.mark.turns(launches.index(launch) + NAMES.index(target), len(NAMES))
            yield table, launch, target, [pytest.mark.newest, turns]


@pytest.mark.parametrize(("table", "launch", "target"), list(every_launch()))
def test_launch_compiles(compiler, table, launch, target):
    lines = compiler.submit(report, str(table), launch, target).result()
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "launch", "target"),
    [
        pytest.param(table, launch, target, marks=marks, id=f"{table.stem}-{launch}-{target}")
        for table, launch, target, marks in every_other_launch()
    ],
)
def test_launch_fits_without_machine_code(compiler, table, launch, target):
    """Its language, layouts and shared memory, which differ by Triton and target the most."""
    lines = compiler.submit(report, str(table), launch, target, lower=False).result()
    assert lines
    assert not [line for line in lines if "reused" in line]


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


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_turns_leave_no_target_out(table):
    pairs, others = launches_of(str(table)), launches_of(str(table), others=True)
    assert len({*pairs, *others}) == len(pairs) + len(others)
    if others:
        each = itertools.product(dict(pairs), {target for _, target in pairs})
        assert {*pairs, *others} == {*each}


def test_machine_code_may_only_be_left_out_for_nvidia_gpus():
    gfx942 = next(target for target in TARGETS if target.is_hip)
    with pytest.raises(ValueError, match="lower must be true for gfx942"):
        compile_launch(lambda: None, gfx942, lower=False)


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
