"""Delayed inputs: the next kernel starts long before the copies of its inputs finish.

This tests programmatic dependent launch: a kernel that reads an input before it waits for the
previous kernel reads the old bytes.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from sparsemla.kernels.common.early import begins_early, let_next_begin, wait_for_inputs

BLOCK = 16384
"""Bytes per program of a copy."""
PAUSE_NS = tl.constexpr(5_000_000)
"""Nanoseconds, more than the host needs to launch the copies and an op after them."""


@triton.jit
def _pause_kernel(EARLY: tl.constexpr):
    let_next_begin(EARLY)
    if EARLY:
        now = globaltimer()
        end = now + PAUSE_NS
        while now < end:
            now = globaltimer()


@triton.jit(do_not_specialize=["size"])
def _copy_kernel(target, source, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)


def copy_late(copies: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Pause, then copy bytes on the GPU, with programmatic dependent launch if the GPU has it.

    The next kernel then starts at once and reads the old bytes unless it waits for the last copy.

    Args:
        copies: pairs of target and source, uint8 ``[N]``.
        device: device of all of them.
    """
    early = begins_early(device)
    none = torch.empty(0, dtype=torch.uint8, device=device)
    _copy_kernel[(1,)](none, none, 0, BLOCK=BLOCK, **early)  # compiled before the pause begins
    _pause_kernel[(1,)](**early)
    for target, source in copies:
        grid = (triton.cdiv(target.numel(), BLOCK),)
        _copy_kernel[grid](target, source, target.numel(), BLOCK=BLOCK, **early)


def bytes_of(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, uint8 ``[N]``."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
