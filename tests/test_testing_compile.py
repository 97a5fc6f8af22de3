"""Drivers that only compile or act as an older GPU, and the resources that they report."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

KERNEL = """
import torch, triton, triton.language as tl

@triton.jit
def product(x, y, out, N: tl.constexpr):
    cells = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    result = tl.load(out + cells)
    for i in range(8):
        result = tl.dot(tl.load(x + i * N + cells), tl.load(y + i * N + cells), result)
    tl.store(out + cells, result)

def launch(n, grid=(3, 4), stages=1):
    x = torch.empty(n, n, dtype=torch.bfloat16, device="meta")
    out = torch.empty(n, n, dtype=torch.float32, device="meta")
    product[grid](x, x, out, n, num_stages=stages)
"""


# The layout conversion after the last wait needs scratch and may take the barrier's memory.
WITH_BARRIER = """
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

@gluon.jit
def transpose(x, MODE: gl.constexpr):
    FROM: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    TO: gl.constexpr = gl.BlockedLayout([4, 1], [4, 8], [1, 4], [0, 1])
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    if MODE != "uninitialised":
        mbarrier.init(bar.index(0), count=1)
        mbarrier.arrive(bar.index(0), count=1)
        mbarrier.wait(bar.index(0), 0)
    if MODE == "invalidated":
        mbarrier.invalidate(bar.index(0))
    at = gl.arange(0, 64, gl.SliceLayout(1, FROM))[:, None] * 64
    at += gl.arange(0, 64, gl.SliceLayout(0, FROM))[None, :]
    y = gl.convert_layout(gl.load(x + at), TO)
    at = gl.arange(0, 64, gl.SliceLayout(1, TO))[:, None]
    gl.store(x + at + gl.arange(0, 64, gl.SliceLayout(0, TO))[None, :] * 64, y)
    if MODE == "used":
        mbarrier.arrive(bar.index(0), count=1)

def launch(mode):
    transpose[(1,)](torch.empty(64, 64, device="meta"), mode, num_warps=4)
"""


COMMAND = """
import runpy, warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the module that has been imported
    runpy.run_module("sparsemla_lab.testing.compile", run_name="__main__")
"""


@pytest.fixture
def compile_table(run_python, tmp_path):
    """Runs ``python -m sparsemla_lab.testing.compile`` on a launch of a kernel."""

    def run(launch, kernel=KERNEL):
        table = tmp_path / "table.py"
        table.write_text(f"{kernel}\nLAUNCHES = {{'case': lambda: {launch}}}\n")
        return run_python(COMMAND, str(table), "sm_90")

    return run


def test_report_lists_the_resources_of_a_kernel(compile_table):
    done = compile_table("launch(64)")
    assert done.returncode == 0, done.stderr
    for word in ("product", "sm_90", "(3, 4)", "shared", "spills    0", "wgmma.mma_async"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ("launch(128, stages=4)", "bytes of shared memory on sm_90"),
        ("launch(64, grid=(1, 65536))", "must have at most 65535 programs along the second"),
    ],
)
def test_kernels_that_do_not_fit_are_refused(compile_table, launch, message):
    done = compile_table(launch)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize(
    ("mode", "reused"),
    [("dead", True), ("invalidated", False), ("used", False), ("uninitialised", False)],
)
def test_reused_barrier_memory_is_found(compile_table, mode, reused):
    done = compile_table(f"launch({mode!r})", WITH_BARRIER)
    assert done.returncode == 0, done.stderr
    assert ("reused" in done.stdout) == reused, done.stdout


def test_an_older_gpu_has_its_shared_memory(monkeypatch):
    from triton.compiler.compiler import max_shared_mem
    from triton.runtime import driver

    from sparsemla_lab.testing.emulate import acting_as

    sizes = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}
    utils = SimpleNamespace(get_device_properties=lambda device: sizes, load_binary="load")
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils, launcher_cls="launcher"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    max_shared_mem.cache_clear()
    assert max_shared_mem(0) == 232448
    for name, shared, count in (("sm_80", 163 * 1024, 108), ("sm_89", 99 * 1024, 128)):
        with acting_as(name):
            assert max_shared_mem(0) == shared
            assert torch.cuda.get_device_properties(0).name == name
            found = driver.active.utils.get_device_properties(0)
            assert found == sizes | {"max_shared_mem": shared, "multiprocessor_count": count}
            assert driver.active.utils.load_binary == "load"
            assert driver.active.launcher_cls == "launcher"
    assert max_shared_mem(0) == 232448
    max_shared_mem.cache_clear()
