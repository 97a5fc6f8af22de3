"""A plain matmul in Triton, compiled for the GPU that another one acts as."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """Rows, columns and depth of a program's tile, its warps and stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


TILES = (Tile(128, 256, 32, 8, 3), Tile(128, 128, 32, 4, 4), Tile(128, 128, 64, 8, 3))
"""The fastest that were found on an H100 as sm_80 and as sm_89."""


@triton.jit
def _matmul(
    a,
    b,
    out,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile of ``out [M, N] = a [M, K] @ b [N, K]^T``; GROUP rows of tiles share columns in L2."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    at = tl.program_id(0) % (GROUP * tiles_n)
    m = (first + at % rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = at // rows * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a += m[:, None] * K + k[None, :]
    b += n[None, :] * K + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, K, BLOCK_K):
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += BLOCK_K
        b += BLOCK_K
    tl.store(out + m[:, None] * N + n[None, :], acc.to(tl.bfloat16))


def matmul(a: Tensor, b: Tensor, out: Tensor, tile: Tile) -> tuple[Tensor]:
    """``out = a @ b^T``, bfloat16; sizes are multiples of the tile's."""
    (m, k), n = a.shape, b.shape[0]
    grid = (m // tile.block_m) * (n // tile.block_n)
    _matmul[(grid,)](
        a,
        b,
        out,
        m,
        n,
        k,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP=8,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return (out,)
