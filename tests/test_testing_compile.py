"""The compile-only driver reports what kernels need and refuses what does not fit."""

import os
import subprocess
import sys

import pytest

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


def compile_table(tmp_path, launch):
    table = tmp_path / "table.py"
    table.write_text(f"{KERNEL}\nLAUNCHES = {{'case': lambda: {launch}}}\n")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "sparsemla.testing.compile", str(table), "sm_90"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_report_of_a_kernel(tmp_path):
    done = compile_table(tmp_path, "launch(64)")
    assert done.returncode == 0, done.stderr
    for word in ("product", "sm_90", "(3, 4)", "shared", "spills    0", "wgmma.mma_async"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ("launch(128, stages=4)", "bytes of shared memory on sm_90"),
        ("launch(64, grid=(1, 65536))", "only its first axis may be large"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, launch, message):
    done = compile_table(tmp_path, launch)
    assert done.returncode != 0
    assert message in done.stderr
