"""Integers of launchers.

Triton's functions of these names take microseconds per call on the host.
"""


def cdiv(x: int, y: int) -> int:
    """``x / y``, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest power of two at or above ``n``; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0
