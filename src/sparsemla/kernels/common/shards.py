"""How ranks share the positions of a context, in Triton; see :class:`sparsemla.ContextShard`."""

import triton
import triton.language as tl


@triton.jit
def row_of(position, NUM_RANKS: tl.constexpr, INTERLEAVE: tl.constexpr):
    """The row of a position on the rank that keeps it."""
    return position // INTERLEAVE // NUM_RANKS * INTERLEAVE + position % INTERLEAVE
