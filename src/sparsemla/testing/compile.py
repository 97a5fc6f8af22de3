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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget, Language
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import CompiledKernel, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sparsemla import dispatch
from sparsemla.kernels.common import device

Launch = Callable[[], object]

MAX_SHARED = 99 * 1024
"""Shared memory that one program may use on every NVIDIA GPU since sm_80, bytes."""

MAX_GRID_YZ = 65535

SERIALIZED = "wgmma.mma_async instructions are serialized"

BRANCHED_ARRIVAL = re.compile(r"^\s*/\*\w+\*/\s+SYNCS\.ARRIVE", re.MULTILINE)
"""An arrival of one thread that is no instruction under a predicate: a branch leads there."""

BARRIERS = re.compile(
    r"^ *(%\S+) = ttg\.local_alloc : \(\) -> (!ttg\.memdesc<(\d+x)*i64,.*?>)", re.M
)
"""Memory of barriers in TTGIR: its name and type, which begins with how many there are."""


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
    Target("sm_89", (8, 9), 128),
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
        reused: the memory of a barrier that is still valid serves something else, too; see
            :func:`_reuses_barriers`.
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
def believe(target: Target, stand_in: object) -> Iterator[None]:
    """Let torch and Triton believe that the current GPU is ``target``.

    Args:
        target: the GPU.
        stand_in: the driver that Triton asks meanwhile.
    """
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
            (driver, "_active", stand_in),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        for known in (device.describe, dispatch.problem_of):
            known.cache_clear()
            stack.callback(known.cache_clear)
        yield


@contextmanager
def _pretend(target: Target) -> Iterator[list[tuple[CompiledKernel, tuple[int, ...], str]]]:
    """Compile for ``target`` what is launched, and do not run it.

    Collects (kernel, grid, what the assembler said if it ran).
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

    with (
        believe(target, _CompileOnly(target)),
        mock.patch.object(JITFunction, "run", only_compile),
        knobs.nvidia.scope(),
    ):
        knobs.nvidia.dump_ptxas_log = True
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
        reused="init_barrier" in kernel.asm["ttgir"] and _reuses_barriers(kernel.asm, target),
        asm=kernel.asm,
    )


def _reuses_barriers(asm: Mapping[str, str], target: Target) -> bool:
    """Whether the memory of a barrier that is still valid serves something else, too.

    Triton's allocator gives the memory of a barrier away once nobody waits for it any more. PTX
    demands ``mbarrier.inval`` before; without it, those bytes change under their new owner when the
    GPU switches to another process and back. So the kernel is lowered again with all barriers
    alive to its end, except those that it invalidates: no address moves unless memory was shared.
    """
    text = asm["ttgir"]
    valid = _valid(text)
    if not valid:
        return False
    uses = "".join(f"    ttg.local_dealloc {name} : {kind}\n" for name, kind in valid)
    kept = re.sub(r"^(?= *tt\.return)", uses, text, flags=re.MULTILINE)
    backend = make_backend(target.gpu)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(kept)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    sizes = re.findall(r'"ttg\.(num-warps|num-ctas)" = (\d+)', text)
    options = backend.parse_options({name.replace("-", "_"): int(size) for name, size in sizes})
    stages: dict[str, Callable[..., str]] = {}
    backend.add_stages(stages, options, Language.GLUON)
    return _numbers(str(stages["llir"](module, {}))) != _numbers(asm["llir"])


def _valid(text: str) -> list[tuple[str, str]]:
    """Name and type of the memory of barriers that a kernel does not invalidate."""
    owners = dict(re.findall(r"(%\S+) = ttg\.memdesc_index (%[^[\s]+)", text))
    ended = [owners.get(name, name) for name in re.findall(r"inval_barrier (%[^,\s]+)", text)]
    found = ((name, kind, int(count[:-1] or 1)) for name, kind, count in BARRIERS.findall(text))
    return [(name, kind) for name, kind, count in found if ended.count(name) < count]


def _numbers(llir: str) -> Counter[str]:
    """How often each integer is in LLVM's code: addresses in shared memory are among them.

    Values, labels and metadata are left out, as their numbers and order may differ between runs.
    """
    code = re.sub(r"^!.*", "", llir, flags=re.MULTILINE)
    return Counter(re.findall(r"(?<![%!#\w.])-?\d+(?![\w.:])", code))


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
