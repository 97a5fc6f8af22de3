"""Programmatic dependent launch: a kernel begins while the one before it still runs.

Before its wait, a kernel may only do work that reads nothing an earlier kernel writes. It lets the
next kernel begin as soon as all of its own programs have begun. A wait ends when the previous
kernel has ended. That kernel has waited as well, so all earlier results are visible then.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsemla.kernels.common.device import describe

RESIDENT = 16
"""One-warp programs that fit on a multiprocessor, with up to 128 registers per thread."""


def begins_early(device: torch.device, num_programs: int = 0) -> dict[str, bool]:
    """Launch options for a kernel that has a constant ``EARLY`` and calls both functions below.

    Args:
        device: the GPU.
        num_programs: the grid of a kernel of one-warp programs. If they do not all fit on the GPU
            at once, the next kernel cannot begin before the last program has, and the permission
            halves the rate at which programs start; such a kernel is launched without overlap.
    """
    found = describe(device)
    early = found.overlaps and num_programs <= RESIDENT * found.multiprocessors
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Let the next kernel begin, up to its own wait."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait until all earlier kernels have ended."""
    if EARLY:
        gdc_wait()
