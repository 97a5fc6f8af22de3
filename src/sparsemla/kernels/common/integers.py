"""Integers of launchers.

Triton has functions of these names for kernels; on the host a call of one takes microseconds.
"""


def cdiv(x: int, y: int) -> int:
    """``x / y``, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below ``n``; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0
