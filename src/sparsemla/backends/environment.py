"""Settings of the engines' plugins that the engines have no option for. Imports no engine."""

from __future__ import annotations

import os

FP8_MMA = "SPARSEMLA_FP8_MMA"
"""Environment variable: ``1`` permits FP8 MMAs in prefills over rows that a step has converted."""

DIVIDE_ROWS_FROM = "SPARSEMLA_DIVIDE_ROWS_FROM"
"""Environment variable: mean keys of a prefill's rows from which ranks divide them."""


def permits_fp8_mma() -> bool:
    """Whether the environment permits FP8 MMAs; by default it does not.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(FP8_MMA, "0")
    if value not in ("0", "1"):
        raise ValueError(f"sparsemla: {FP8_MMA} must be 0 or 1, got {value!r}")
    return value == "1"


def divide_rows_from() -> int | None:
    """The mean number of keys from which ranks divide rows, or None for the default.

    Raises:
        ValueError: the variable is no positive integer.
    """
    value = os.environ.get(DIVIDE_ROWS_FROM)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and int(value)):
        raise ValueError(f"sparsemla: {DIVIDE_ROWS_FROM} must be a positive integer, got {value!r}")
    return int(value)
