"""Uninitialised memory made visible: ``torch.empty`` and similar functions return NaN."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Fill new uninitialised tensors: floats with NaN, integers with their largest value.

    >>> with poisoned_empty():
    ...     torch.empty(2), torch.empty(1, dtype=torch.int32)
    (tensor([nan, nan]), tensor([2147483647], dtype=torch.int32))
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic: Any = torch.utils.deterministic  # its attributes are properties of a class
    was_filled = deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        # PyTorch fills memory only in deterministic mode, which warns about some functions.
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            deterministic.fill_uninitialized_memory = was_filled
            torch.use_deterministic_algorithms(was_deterministic, warn_only=was_warn_only)
