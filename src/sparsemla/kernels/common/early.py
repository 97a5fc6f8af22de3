"""Kernels that begin while the one in front of them still runs (programmatic dependent launch).

Such a kernel may do what needs nobody's results, and waits before the rest. The ones behind it may
begin as soon as all of its programs have; they wait for its end, and it for the end of those in
front of it, so that the results of every kernel before are there after the wait.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsemla.kernels.common.device import describe

RESIDENT = 16
"""Programs of one warp that a multiprocessor has room for, of up to 128 registers a thread."""


def begins_early(device: torch.device, num_programs: int = 0) -> dict[str, bool]:
    """Launch options of a kernel with a constant ``EARLY`` that calls both functions below.

    A kernel of one-warp programs says how many they are. Where not all run at once nothing can
    overlap before the last of them has begun, and that each lets the next kernel begin halves the
    rate at which they do: such a kernel is launched behind the one in front of it.
    """
    found = describe(device)
    early = found.overlaps and num_programs <= RESIDENT * found.multiprocessors
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """The kernel behind this one may begin, up to its own wait."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Wait for the end of the kernels in front of this one."""
    if EARLY:
        gdc_wait()
