"""Compile Triton launches for GPUs that are not there, and say what they need.

A *launch* is a function without arguments that calls a launcher with tensors on torch's ``meta``
device. It is run with a driver that only compiles, once for each target.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sparsemla.kernels.common import device

Launch = Callable[[], object]

MAX_SHARED = 99 * 1024
"""Shared memory that one program may use on every NVIDIA GPU since sm_80, bytes."""

MAX_GRID_YZ = 65535

SERIALIZED = "wgmma.mma_async instructions are serialized"

BRANCHED_ARRIVAL = re.compile(r"^\s*/\*\w+\*/\s+SYNCS\.ARRIVE", re.MULTILINE)
"""An arrival of one thread that is no instruction under a predicate: a branch leads there."""


@dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Args:
        name: ``sm_90`` or ``gfx942``.
        capability: what ``torch.cuda.get_device_capability`` says there.
        multiprocessors: what launchers are told.
        max_shared: shared memory a program may use, bytes.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    max_shared: int = MAX_SHARED

    @property
    def is_hip(self) -> bool:
        return self.name.startswith("gfx")

    @property
    def gpu(self) -> GPUTarget:
        """Triton's name of the target."""
        if self.is_hip:
            return GPUTarget("hip", self.name, 64)
        return GPUTarget("cuda", int(self.name.removeprefix("sm_")), 32)


TARGETS = (
    Target("sm_80", (8, 0), 108),
    Target("sm_90", (9, 0), 132, max_shared=227 * 1024),
    Target("sm_100", (10, 0), 148),
    Target("sm_120", (12, 0), 188),
    Target("gfx942", (9, 4), 304, max_shared=64 * 1024),
)


@dataclass(frozen=True)
class Compiled:
    """One kernel as it was compiled for one target.

    Args:
        kernel: name of the device function.
        target: name of the target.
        grid: programs along each axis.
        num_warps: warps of a program.
        shared: shared memory of a program, bytes.
        registers: vector registers of a thread.
        spills: bytes of local memory of a thread, which registers are spilled to.
        matrix: the matrix instruction in the code, or an empty string.
        serialized: the assembler makes asynchronous matrix instructions wait for each other; looked
            for in kernels that divide their warps.
        branched: a thread takes a branch of its own to arrive at a barrier, and the assembler need
            not join its warp again, of which matrix instructions wait for every thread.
        asm: intermediate representations by name (``ttgir``, ``ptx``, ``amdgcn``, ...).
    """

    kernel: str
    target: str
    grid: tuple[int, ...]
    num_warps: int
    shared: int
    registers: int
    spills: int
    matrix: str
    serialized: bool
    branched: bool
    asm: Mapping[str, str | bytes]

    def __str__(self) -> str:
        return (
            f"{self.kernel:32} {self.target:7} {self.grid!s:18} warps {self.num_warps:2}  "
            f"shared {self.shared:6}  registers {self.registers:3}  spills {self.spills:4}  "
            f"{self.matrix}{' serialized' if self.serialized else ''}"
            f"{' branched' if self.branched else ''}"
        )


def compile_launch(launch: Launch, target: Target) -> list[Compiled]:
    """Every kernel that ``launch`` starts, compiled for ``target`` and not run.

    Raises:
        ValueError: a kernel needs more shared memory than the target gives, or a grid is too large.
    """
    with _pretend(target) as started:
        launch()
    compiled = [_inspect(kernel, grid, log, target) for kernel, grid, log in started]
    for one in compiled:
        if one.shared > target.max_shared:
            raise ValueError(
                f"{one.kernel} needs {one.shared} bytes of shared memory on {target.name}, "
                f"where a program may use {target.max_shared}"
            )
        if max(one.grid[1:], default=1) > MAX_GRID_YZ:
            raise ValueError(f"{one.kernel} has grid {one.grid}; only its first axis may be large")
    return compiled


def compile_everywhere(
    launches: Mapping[str, Launch], targets: Sequence[Target] = TARGETS
) -> dict[tuple[str, str], list[Compiled]]:
    """:func:`compile_launch` of each launch for each target, by (name of the launch, target)."""
    return {
        (name, target.name): compile_launch(launch, target)
        for name, launch in launches.items()
        for target in targets
    }


@contextmanager
def _pretend(target: Target) -> Iterator[list[tuple[CompiledKernel, tuple[int, ...], str]]]:
    """Let torch and Triton believe in ``target``.

    Collects (kernel, grid, what the assembler said if it ran) of what is launched.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET must be unset: the interpreter does not compile")
    started: list[Any] = []
    run = JITFunction.run

    def only_compile(self: JITFunction, *args: object, **kwargs: object) -> object:
        kwargs["warmup"] = True
        with redirect_stdout(io.StringIO()) as log:
            kernel = run(self, *args, **kwargs)
        started.append((kernel, kwargs["grid"], log.getvalue()))
        return kernel

    properties = SimpleNamespace(
        multi_processor_count=target.multiprocessors,
        shared_memory_per_block_optin=target.max_shared,
        major=target.capability[0],
        minor=target.capability[1],
    )
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "get_device_capability", lambda device=None: target.capability),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch.version, "hip", "pretended" if target.is_hip else None),
            (JITFunction, "run", only_compile),
            (driver, "_active", _CompileOnly(target)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(knobs.nvidia.scope())
        knobs.nvidia.dump_ptxas_log = True
        device.describe.cache_clear()
        stack.callback(device.describe.cache_clear)
        yield started


class _CompileOnly:
    """The part of a Triton driver that compilation asks."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target.gpu

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device, so each target is a device of its own.
        return TARGETS.index(self.target)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _inspect(kernel: CompiledKernel, grid: tuple[int, ...], log: str, target: Target) -> Compiled:
    if target.is_hip:
        code = kernel.asm["amdgcn"]
        registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", code)[0])
        spills = int(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", code)[0])
        branched = False
    else:
        code = kernel.asm["ptx"]
        usage = _dump(kernel.asm["cubin"], "-res-usage")
        registers, spills = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
        branched = "mbarrier.arrive" in code and bool(
            BRANCHED_ARRIVAL.search(_dump(kernel.asm["cubin"], "-sass"))
        )
    matrix = re.search(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma", code)
    return Compiled(
        kernel=kernel.metadata.name,
        target=target.name,
        grid=grid,
        num_warps=kernel.metadata.num_warps,
        shared=kernel.metadata.shared,
        registers=registers,
        spills=spills,
        matrix=matrix[0] if matrix else "",
        serialized="setmaxnreg" in code and SERIALIZED in (log or _assembler_log(code, target)),
        branched=branched,
        asm=kernel.asm,
    )


def _dump(cubin: bytes, option: str) -> str:
    """What CUDA's tool says of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _assembler_log(ptx: str, target: Target) -> str:
    """What the assembler says of a kernel that Triton had compiled before."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "kernel.ptx")
        with open(file, "w", encoding="utf-8") as out:
            out.write(ptx)
        arch = target.gpu.arch
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}"]
        return subprocess.run(
            [*command, file, "-o", os.devnull], capture_output=True, text=True, check=True
        ).stderr


def main(path: str, only: str = "") -> None:
    """Compile the table ``LAUNCHES`` of a Python file and write what each kernel needs.

    The names in its ``TARGETS`` are the targets, if it has some.

    Args:
        path: the file.
        only: compile for this target alone.
    """
    table = runpy.run_path(path)
    launches = table["LAUNCHES"]
    names = table.get("TARGETS", [target.name for target in TARGETS])
    targets = [target for target in TARGETS if target.name in names and only in ("", target.name)]
    for name, launch in launches.items():
        for target in targets:
            for compiled in compile_launch(launch, target):
                sys.stdout.write(f"{name:28} {compiled}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(*sys.argv[1:])
