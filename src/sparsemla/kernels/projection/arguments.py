"""The records of the projections: the arguments that the public ops have checked."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.kernels.common.table import ALLOCATED
from sparsemla.weights import HeadWeight

FEW_ROWS = 4096
"""Tokens times heads up to which the portable kernel for few tokens is as fast as Hopper's."""
FEW_MERGED_ROWS = 8192
"""The same for parts, which the portable kernel merges as it loads them."""


class ProjectHeads(NamedTuple):
    """Arguments of :func:`sparsemla.project_heads`."""

    x: Tensor
    weight: HeadWeight
    lses: Tensor | None = None
    attn_sink: Tensor | None = None
    batch_invariant: bool = False
    workspace: Tensor | None = None
    out: Tensor = ALLOCATED


class ProjectGroups(NamedTuple):
    """Arguments of :func:`sparsemla.project_groups`."""

    x: Tensor
    weight: HeadWeight
    cos_sin_cache: Tensor | None = None
    positions: Tensor | None = None
    lses: Tensor | None = None
    attn_sink: Tensor | None = None
    workspace: Tensor | None = None
    out: Tensor = ALLOCATED
