"""Run what an older NVIDIA GPU would run on the GPU that is there.

PTX of an older target is valid for every newer GPU, whose driver translates it. So the code that
Triton generates for sm_80 can be run, and proven right, without such a GPU. It proves nothing about
speed, nor about the older GPU's own translation of that PTX.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from sparsemla.testing.compile import TARGETS, Target, believe


def older_target(name: str) -> Target:
    """The target of that name.

    Raises:
        ValueError: it is no NVIDIA GPU older than the one that is there.
    """
    there = torch.cuda.get_device_capability()
    older = {t.name: t for t in TARGETS if not t.is_hip and t.capability < there}
    if name not in older:
        raise ValueError(f"target must be one of {', '.join(older) or '(none)'}; got {name!r}")
    return older[name]


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    """Let the GPU act as an older one while the block runs.

    Dispatch, launchers and Triton are told the older GPU's capability, shared memory and target;
    Triton's cache has a folder of its own. A process must not have launched a kernel before: Triton
    keeps kernels by device.

    Args:
        name: ``sm_80`` or ``sm_89``.

    Raises:
        ValueError: it is no NVIDIA GPU older than the one that is there.
    """
    target = older_target(name)

    def keep_ptx(self: CUDABackend, src: str, *_: object) -> bytes:
        if f".target {name}\n" not in src:
            raise RuntimeError(f"Triton was to generate PTX for {name}, got other code")
        return src.encode() + b"\0"  # the driver takes PTX in the place of machine code

    with (
        believe(target, _Acting(target, driver.active)),
        mock.patch.object(CUDABackend, "make_cubin", keep_ptx),
        knobs.cache.scope(),
    ):
        knobs.cache.dir = os.path.join(knobs.cache.dir, f"acting_as_{name}")
        yield


class _Acting:
    """Triton's driver of the GPU that is there, with the target of another."""

    def __init__(self, target: Target, there: object) -> None:
        self._target = target
        self._there = there

    def get_current_target(self) -> GPUTarget:
        return self._target.gpu

    def __getattr__(self, name: str) -> object:
        return getattr(self._there, name)
