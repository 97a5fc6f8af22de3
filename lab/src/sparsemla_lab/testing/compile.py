"""Compile Triton kernels for GPUs that are not present, and report their resources.

A *launch* is a function without arguments that launches kernels on tensors of torch's ``meta``
device. :func:`compile_launch` runs it with a driver that only compiles.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.nvidia.compiler import (
    get_ptx_version_from_options,
    get_ptxas,
    sm_arch_from_capability,
)
from triton.compiler import CompiledKernel, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sparsemla.kernels.common import device

Launch = Callable[[], object]

MAX_SHARED = 99 * 1024
"""Bytes of shared memory per program on every NVIDIA GPU since sm_80."""

MAX_GRID_YZ = 65535

SERIALIZED = "wgmma.mma_async instructions are serialized"

BRANCHED_ARRIVAL = re.compile(r"^\s*/\*\w+\*/\s+SYNCS\.ARRIVE", re.MULTILINE)
"""In SASS, a barrier arrival without a predicate, reached by a single thread through a branch."""

BARRIERS = re.compile(
    r"^ *(%\S+) = ttg\.local_alloc : \(\) -> (!ttg\.memdesc<(\d+x)*i64,.*?>)", re.M
)
"""Allocation of barriers in TTGIR: name and type; the type begins with the number of barriers."""


@dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Args:
        name: ``sm_90`` or ``gfx942``.
        capability: result of ``torch.cuda.get_device_capability`` on this GPU.
        multiprocessors: number of SMs, from which launchers choose grids and splits.
        max_shared: bytes of shared memory per program.
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
        """The target as Triton describes it."""
        if self.is_hip:
            return GPUTarget("hip", self.name, 64)
        return GPUTarget("cuda", int(self.name.removeprefix("sm_")), 32)


TARGETS = (
    Target("sm_80", (8, 0), 108, max_shared=163 * 1024),
    Target("sm_89", (8, 9), 128),
    Target("sm_90", (9, 0), 132, max_shared=227 * 1024),
    Target("sm_100", (10, 0), 148),
    Target("sm_120", (12, 0), 188),
    Target("gfx942", (9, 4), 304, max_shared=64 * 1024),
)


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one target, and its resources.

    Args:
        kernel: name of the device function.
        target: name of the target.
        grid: programs along each axis.
        num_warps: warps per program.
        shared: bytes of shared memory per program.
        registers: vector registers per thread.
        spills: bytes of local memory per thread for spilled registers.
        matrix: the MMA instruction in the code, or an empty string.
        serialized: ptxas serialised asynchronous MMAs. Only warp-specialised kernels are checked.
        branched: a thread branches away from its warp to arrive at a barrier. ptxas need not make
            the warp reconverge, but warpgroup MMAs need all threads of a warp.
        reused: the memory of a valid barrier is reused, see :func:`_reuses_barriers`.
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
    reused: bool
    asm: Mapping[str, str | bytes]

    def __str__(self) -> str:
        return (
            f"{self.kernel:32} {self.target:7} {self.grid!s:18} warps {self.num_warps:2}  "
            f"shared {self.shared:6}  registers {self.registers:3}  spills {self.spills:4}  "
            f"{self.matrix}{' serialized' if self.serialized else ''}"
            f"{' branched' if self.branched else ''}{' reused' if self.reused else ''}"
        )


_inspected: dict[CompiledKernel, Compiled] = {}
"""Kernels by identity: a launch in chunks has each many times, and launches share some."""


def compile_launch(launch: Launch, target: Target, *, lower: bool = True) -> list[Compiled]:
    """Compile every kernel of ``launch`` for ``target`` without running it.

    Args:
        launch: the launch.
        target: the GPU.
        lower: whether Triton's GPU dialect is lowered to machine code, most of the time. If
            not, only its shared memory is allocated, and what code tells is 0, empty or false:
            registers, spills, the MMA, serialised MMAs and branches to arrivals. For NVIDIA GPUs.

    Raises:
        ValueError: a kernel needs more shared memory than the target has, or a grid is too large.
    """
    if target.is_hip and not lower:
        raise ValueError(f"lower must be true for {target.name}, which has no allocation by itself")
    with _compile_only(target, lower) as launched:
        launch()
    for kernel, grid, log in launched:
        if kernel not in _inspected:
            _inspected[kernel] = _inspect(kernel, grid, log, target)
    kernels = [replace(_inspected[kernel], grid=grid) for kernel, grid, _ in launched]
    for kernel in kernels:
        if kernel.shared > target.max_shared:
            raise ValueError(
                f"{kernel.kernel} needs {kernel.shared} bytes of shared memory on {target.name}, "
                f"which has {target.max_shared} per program"
            )
        if max(kernel.grid[1:], default=1) > MAX_GRID_YZ:
            raise ValueError(
                f"{kernel.kernel} must have at most {MAX_GRID_YZ} programs along the second and "
                f"third axis, got grid {kernel.grid}"
            )
    return kernels


@contextmanager
def believe(target: Target, stand_in: object) -> Iterator[None]:
    """Make torch and Triton report ``target`` as the current GPU.

    Args:
        target: the GPU to report.
        stand_in: replaces Triton's active driver.
    """
    properties = SimpleNamespace(
        name=target.name,
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
            (driver, "_active", stand_in),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        device.query.cache_clear()
        stack.callback(device.query.cache_clear)
        yield


@contextmanager
def _compile_only(
    target: Target, lower: bool
) -> Iterator[list[tuple[CompiledKernel, tuple[int, ...], str]]]:
    """Compile launched kernels for ``target`` instead of running them.

    Yields a list that grows with each launch: kernel, grid, and ptxas's log if it ran.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET must be unset: the interpreter does not compile")
    launched: list[Any] = []
    run = JITFunction.run

    def warm_up(self: JITFunction, *args: object, **kwargs: object) -> object:
        kwargs["warmup"] = True
        with redirect_stdout(io.StringIO()) as log:
            kernel = run(self, *args, **kwargs)
        launched.append((kernel, kwargs["grid"], log.getvalue()))
        return kernel

    with (
        believe(target, _CompileOnlyDriver(target, lower)),
        device.meta_means(torch.device("cuda")),
        mock.patch.object(JITFunction, "run", warm_up),
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        knobs.runtime.scope(),
    ):
        if not lower:
            knobs.runtime.add_stages_inspection_hook = _without_machine_code
            knobs.cache.dir = os.path.join(knobs.cache.dir, "not-lowered")
        knobs.nvidia.dump_ptxas_log = True
        yield launched


def _without_machine_code(
    backend: BaseBackend | None = None,
    stages: dict[str, Callable[..., object]] | None = None,
    *_: object,
) -> tuple[str, str] | None:
    """Triton's hook for stages of compilation. Without arguments, a key for its caches."""
    if backend is None or stages is None:
        return "without machine code", "without machine code"

    def allocate(module: ir.module, metadata: dict[str, Any]) -> str:
        _allocate(module, backend.target)
        text = str(module)
        metadata["name"] = re.findall(r"tt\.func public @(\w+)", text)[0]
        metadata["shared"] = module.get_int_attr("ttg.shared")
        metadata["num_warps"] = module.get_int_attr("ttg.total-num-warps") or metadata["num_warps"]
        return text

    stages["llir"] = allocate
    stages["ptx"] = lambda source, metadata: ""
    stages["cubin"] = lambda source, metadata: b""
    return None


class _CompileOnlyDriver:
    """The methods of a Triton driver that compilation needs."""

    def __init__(self, target: Target, lower: bool = True) -> None:
        self.target = target
        # Triton caches compiled kernels per device index, so each target needs its own index.
        self.device = TARGETS.index(target) + (0 if lower else len(TARGETS))

    def get_current_target(self) -> GPUTarget:
        return self.target.gpu

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _inspect(kernel: CompiledKernel, grid: tuple[int, ...], log: str, target: Target) -> Compiled:
    if target.is_hip:
        code = kernel.asm["amdgcn"]
        registers = int(re.findall(r"\.vgpr_count:\s+(\d+)", code)[0])
        spills = int(re.findall(r"\.private_segment_fixed_size:\s+(\d+)", code)[0])
        branched = False
    elif not kernel.asm["cubin"]:
        code, registers, spills, branched = kernel.asm["ptx"], 0, 0, False
    else:
        code = kernel.asm["ptx"]
        cubin, tools = kernel.asm["cubin"], knobs.nvidia
        usage = _dump(cubin, tools.cuobjdump.path, "-res-usage")
        registers, spills = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
        # Only code, and without an analysis of its branches: a quarter faster than cuobjdump.
        branched = "mbarrier.arrive" in code and bool(
            BRANCHED_ARRIVAL.search(_dump(cubin, tools.nvdisasm.path, "-c", "-ndf"))
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
        serialized="setmaxnreg" in code
        and bool(kernel.asm["cubin"])
        and SERIALIZED in (log or _assembler_log(code, target)),
        branched=branched,
        reused="init_barrier" in kernel.asm["ttgir"]
        and _reuses_barriers(kernel.asm["ttgir"], target),
        asm=kernel.asm,
    )


def _reuses_barriers(ttgir: str, target: Target) -> bool:
    """Whether the memory of a barrier is reused although the barrier is still valid.

    Triton's allocator reuses the memory of a barrier after its last use. PTX requires
    ``mbarrier.inval`` first; without it, a switch of the GPU to another process and back may change
    these bytes. To find out, shared memory is allocated again with every barrier that the kernel
    does not invalidate alive to the end. Addresses then differ if and only if memory was reused.
    """
    valid = _valid_barriers(ttgir)
    if not valid:
        return False
    uses = "".join(f"    ttg.local_dealloc {name} : {kind}\n" for name, kind in valid)
    prolonged = re.sub(r"^(?= *tt\.return)", uses, ttgir, flags=re.MULTILINE)
    return _addresses(prolonged, target) != _addresses(ttgir, target)


def _addresses(ttgir: str, target: Target) -> Counter[str]:
    """Count the addresses that Triton gives to shared memory."""
    backend = make_backend(target.gpu)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    _allocate(module, target.gpu)
    return Counter(re.findall(r"allocation\.offset = (\d+)", str(module)))


def _allocate(module: ir.module, gpu: GPUTarget) -> None:
    """The first passes of Triton's lowering to LLVM, up to the allocation of shared memory."""
    ptx_version = get_ptx_version_from_options(make_backend(gpu).parse_options({}), gpu.arch)
    manager = ir.pass_manager(module.context)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, gpu.arch, ptx_version)
    manager.run(module, "allocate")


def _valid_barriers(text: str) -> list[tuple[str, str]]:
    """Name and type of each allocation of barriers that a kernel does not invalidate."""
    owners = dict(re.findall(r"(%\S+) = ttg\.memdesc_index (%[^[\s]+)", text))
    invalid = [owners.get(name, name) for name in re.findall(r"inval_barrier (%[^,\s]+)", text)]
    barriers = ((name, kind, int(count[:-1] or 1)) for name, kind, count in BARRIERS.findall(text))
    return [(name, kind) for name, kind, count in barriers if invalid.count(name) < count]


def _dump(cubin: bytes, *command: str) -> str:
    """The output of a tool for a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [*command, file.name], capture_output=True, text=True, check=True
        ).stdout


def _assembler_log(ptx: str, target: Target) -> str:
    """The log of ptxas for a kernel that Triton took from its cache."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "kernel.ptx")
        with open(file, "w", encoding="utf-8") as out:
            out.write(ptx)
        arch = target.gpu.arch
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}"]
        return subprocess.run(
            [*command, file, "-o", os.devnull], capture_output=True, text=True, check=True
        ).stderr


def launches_of(path: str, only: str = "", *, others: bool = False) -> list[tuple[str, str]]:
    """Pairs of launch and target from a Python file.

    Args:
        path: a file with a dict ``LAUNCHES``, name to launch, and optionally ``TARGETS``, names of
            the targets of every launch, default all; and names of more targets, of which each
            launch has one: ``IN_TURN``, or ``ONE_OF`` for kernels without an MMA, whose code these
            targets hardly change.
        only: name of the single target; default all of them.
        others: the pairs that the turns of ``IN_TURN`` leave out.
    """
    table = _table(path)
    targets = tuple(table.get("TARGETS", [target.name for target in TARGETS]))
    in_turn = tuple(table.get("IN_TURN", ()))
    turns = itertools.cycle(in_turn or table.get("ONE_OF", ("",)))
    return [
        (launch, target)
        for launch, turn in zip(table["LAUNCHES"], turns, strict=False)
        for target in (sorted({*in_turn} - {turn}) if others else (*targets, turn))
        if target and only in ("", target)
    ]


def report(path: str, launch: str, target: str, *, lower: bool = True) -> list[str]:
    """One line for each kernel of a launch: its resources on the target.

    For ``lower`` see :func:`compile_launch`.
    """
    (gpu,) = (one for one in TARGETS if one.name == target)
    compiled = compile_launch(_table(path)["LAUNCHES"][launch], gpu, lower=lower)
    return [f"{launch:28} {one}" for one in compiled]


@functools.cache
def _table(path: str) -> dict[str, Any]:
    return runpy.run_path(path)


def main(path: str, only: str = "") -> None:
    """Compile the launches of a Python file and print the resources of each kernel."""
    for launch, target in launches_of(path, only):
        for line in report(path, launch, target):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(*sys.argv[1:])
