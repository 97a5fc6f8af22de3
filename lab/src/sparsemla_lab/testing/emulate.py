"""Run the kernels of an older NVIDIA GPU on the GPU at hand.

The driver of a newer GPU translates PTX of an older target. This tests the PTX that Triton
generates for sm_80, for example, without an sm_80 GPU. It says nothing about speed, or about the
translation of this PTX for the older GPU itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import max_shared_mem
from triton.runtime import driver

from sparsemla_lab.testing.compile import TARGETS, Target, believe

if TYPE_CHECKING:
    from triton.backends.nvidia.driver import CudaDriver, CudaUtils


def older_target(name: str) -> Target:
    """The target with this name; it must be older than the current GPU.

    Raises:
        ValueError: no older NVIDIA GPU has this name.
    """
    current = torch.cuda.get_device_capability()
    older = {t.name: t for t in TARGETS if not t.is_hip and t.capability < current}
    if name not in older:
        raise ValueError(f"target must be one of {', '.join(older) or '(none)'}; got {name!r}")
    return older[name]


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    """Make the current GPU act as an older one inside the block.

    Dispatch, launchers and Triton see the older GPU's capability, shared memory and target, and
    Triton uses a separate cache folder. A kernel that needs more shared memory than the older GPU
    has is refused as there. The process must not have launched a kernel before, since Triton caches
    kernels per device.

    Args:
        name: ``sm_80`` or ``sm_89``.

    Raises:
        ValueError: no older NVIDIA GPU has this name.
    """
    target = older_target(name)

    def keep_ptx(self: CUDABackend, src: str, *_: object) -> bytes:
        if f".target {name}\n" not in src:
            raise RuntimeError(f"Triton must generate PTX for {name}, got PTX for another target")
        return src.encode() + b"\0"  # the driver loads PTX as well as machine code

    with (
        believe(target, _ActingDriver(target, driver.active)),
        mock.patch.object(CUDABackend, "make_cubin", keep_ptx),
        knobs.cache.scope(),
    ):
        knobs.cache.dir = os.path.join(knobs.cache.dir, f"acting_as_{name}")
        max_shared_mem.cache_clear()
        try:
            yield
        finally:
            max_shared_mem.cache_clear()


class _ActingDriver:
    """The current GPU's Triton driver, with another target."""

    def __init__(self, target: Target, driver: CudaDriver) -> None:
        self._target = target
        self._driver = driver
        self.utils = _ActingUtils(target, driver.utils)

    def get_current_target(self) -> GPUTarget:
        return self._target.gpu

    def __getattr__(self, name: str) -> object:
        return getattr(self._driver, name)


class _ActingUtils:
    """What Triton asks the driver about the GPU, with the other target's size."""

    def __init__(self, target: Target, utils: CudaUtils) -> None:
        self._target = target
        self._utils = utils

    def get_device_properties(self, device: int) -> dict[str, int]:
        sizes = {
            "max_shared_mem": self._target.max_shared,
            "multiprocessor_count": self._target.multiprocessors,
        }
        return self._utils.get_device_properties(device) | sizes

    def __getattr__(self, name: str) -> object:
        return getattr(self._utils, name)
