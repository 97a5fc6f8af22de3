"""Names of Gluon that changed between Triton 3.6 and 3.9."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if hasattr(async_copy, "async_load"):
    async_load = async_copy.async_load
else:
    async_load = async_copy.async_copy_global_to_shared

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(tile, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """View a shared memory tile with another dtype, shape and layout over the same bytes."""
    if RENAMED:
        same = tile.reinterpret(dtype, shape, layout)
    else:
        same = tile._reinterpret(dtype, shape, layout)
    return same


@gluon.jit
def opaque_zero(x):
    """A 0 that the compiler cannot fold: it would keep a descriptor for every constant index."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def opaque(x):
    """``x``, an int32, of which LLVM knows nothing: it would compute what depends on it early."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


def descriptor(
    tensor: Tensor, shape: list[int], strides: list[int], box: list[int], layout: gl.constexpr
) -> TensorDescriptor:
    """A TMA descriptor. Triton asserts an alignment, which repeated calls share."""
    with torch._C.DisableTorchFunction():
        return TensorDescriptor(tensor, shape, strides, box, layout)


if hasattr(gl, "barrier"):
    barrier = gl.barrier
else:
    barrier = gl.thread_barrier
