"""Settings of the engines' plugins that the engines have no option for. Imports no engine."""

from __future__ import annotations

import os

FP8_MMA = "SPARSEMLA_FP8_MMA"
"""Environment variable: ``1`` permits FP8 MMAs in prefills over rows that a step has converted."""


def permits_fp8_mma() -> bool:
    """Whether the environment permits FP8 MMAs; by default it does not.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(FP8_MMA, "0")
    if value not in ("0", "1"):
        raise ValueError(f"sparsemla: {FP8_MMA} must be 0 or 1, got {value!r}")
    return value == "1"
