"""Devices and packages of this machine, its working tiers, and the kernels of a call."""

from __future__ import annotations

import importlib.util
import platform
import re
from dataclasses import dataclass
from importlib import metadata

import torch
from rich import box
from rich.table import Table

import sparsemla
from sparsemla.cache import PagedCache
from sparsemla.dispatch import OPS, only
from sparsemla.formats import FP8_DS_MLA, get_format
from sparsemla.kernels.common.device import describe
from sparsemla.kernels.common.table import TIERS
from sparsemla.numa import node_of_gpu
from sparsemla.validation import missing_gpu, not_one_of
from sparsemla_lab.options import DEMO_PACKAGES, INSTALL_DEMO
from sparsemla_lab.support import Support, cpu_support, gpu_support
from sparsemla_lab.typical import describe_call, function_of, typical_call

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "vllm",
    "sglang",
    "safetensors",
    "matplotlib",
)

_PROOF = "proof         "

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def parse_dtype(name: str) -> torch.dtype:
    """The dtype called ``name``.

    >>> parse_dtype("bf16")
    torch.bfloat16
    """
    if name not in DTYPES:
        raise not_one_of("dtype", DTYPES, name)
    return DTYPES[name]


@dataclass(frozen=True)
class Gpu:
    """A GPU to explain a problem for.

    Args:
        target: the compiler's name, such as ``sm_90`` or ``gfx942``.
        capability: of ``torch.cuda.get_device_capability``.
        name: the driver's name; None for a GPU that this machine lacks.
    """

    target: str
    capability: tuple[int, int]
    name: str | None = None

    @classmethod
    def here(cls, index: int = 0) -> Gpu:
        """A GPU of this machine."""
        found = torch.cuda.get_device_properties(index)
        target = f"sm_{found.major}{found.minor}"
        if torch.version.hip:
            target = found.gcnArchName.partition(":")[0]
        return cls(target, (found.major, found.minor), found.name)


def parse_gpu(device: str, capability: str | None) -> Gpu | None:
    """The GPU with a compute capability or target; if None, this machine's first one.

    >>> parse_gpu("cuda", "9.0")
    Gpu(target='sm_90', capability=(9, 0), name=None)
    >>> parse_gpu("cuda", "gfx942").capability
    (9, 4)

    Raises:
        ValueError: no such device or GPU.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if device == "cpu":
        if capability is not None:
            raise ValueError(f"capability must not be given for the device cpu, got {capability}")
        return None
    if capability is None:
        if not torch.cuda.is_available():
            raise ValueError(
                f"capability must be given on this machine, for example 9.0: {missing_gpu()}"
            )
        return Gpu.here()
    if capability == "gfx942":
        return Gpu(capability, (9, 4))
    digits = re.fullmatch(r"sm_(\d+)(\d)a?|(\d+)\.(\d)", capability)
    if digits is None:
        raise ValueError(f"capability must be like 9.0, sm_90 or gfx942, got {capability!r}")
    major, minor = (int(digit) for digit in digits.groups() if digit is not None)
    return Gpu(f"sm_{major}{minor}", (major, minor))


def explain_lines(
    op: str,
    device: str,
    capability: str | None = None,
    *,
    dtype: str | None = None,
    cache_format: str | None = None,
    **sizes: int | None,
) -> list[str]:
    """A typical call of an op or branch, the kernels that it launches, and the GPU's proofs.

    Raises:
        ValueError: an unknown op, device, GPU, format or dtype, or a size that the op has not.
    """
    gpu = parse_gpu(device, capability)
    call = typical_call(
        op,
        "cpu" if gpu is None or gpu.name is None else "cuda",
        dtype=None if dtype is None else parse_dtype(dtype),
        cache_format=None if cache_format is None else get_format(cache_format),
        **sizes,
    )
    simulated = gpu.target if gpu is not None and gpu.name is None else None
    explanation = sparsemla.explain(function_of(op), gpu=simulated, **call)
    return [
        "the call:",
        *(f"  {line}" for line in describe_call(call)),
        *str(explanation).splitlines(),
        *(f"proof: {proof}" for proof in proofs(gpu)),
    ]


def proofs(gpu: Gpu | None) -> list[str]:
    """The proofs for a GPU, or with None for this machine's CPU."""
    rows: tuple[Support, ...] = (cpu_support(platform.machine()),)
    if gpu is not None:
        rows = gpu_support(gpu.target, gpu.name)
    return [row.line(_triton_version()) for row in rows]


def _triton_version() -> str | None:
    """The version of the imported Triton; its packages for ROCm have other names."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return None


def version_lines() -> list[str]:
    """A line for Python and each package."""
    lines = [
        f"sparsemla     {sparsemla.__version__}",
        f"python        {platform.python_version()} on {platform.platform()}",
    ]
    for package in PACKAGES:
        try:
            # The metadata of torch's wheels leaves out the build, such as +cu130.
            version = torch.__version__ if package == "torch" else metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "not installed"
        lines.append(f"{package:<13} {version}")
    return lines


def device_lines() -> list[str]:
    """A line for the CPU and for each GPU, with its proofs."""
    lines = [f"cpu           {platform.machine()}, {torch.get_num_threads()} threads"]
    lines += [_PROOF + proof for proof in proofs(None)]
    for index in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(index).total_memory
        gpu = Gpu.here(index)
        node = node_of_gpu(index)
        on = "" if node is None else f", NUMA node {node}"
        lines.append(f"cuda:{index}        {gpu.name}, {gpu.target}, {memory / 2**30:.0f} GiB{on}")
        lines += [_PROOF + proof for proof in proofs(gpu)]
    return lines


@dataclass(frozen=True)
class TierRow:
    """A tier on a device.

    Args:
        device: ``cpu`` or ``cuda``.
        tier: its name.
        num_ops: ops that it has kernels for.
        refusal: why the device does not run it, or None.
        state: the result of a run of ``sparse_decode``, or the refusal.
    """

    device: str
    tier: str
    num_ops: int
    refusal: str | None
    state: str


def tier_rows() -> list[TierRow]:
    """Each device and tier, after a run of ``sparse_decode``."""
    rows = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for name, refuse in TIERS.items():
            taken = sum(name in {kernel.tier for kernel in op.kernels} for op in OPS.values())
            refusal = refuse(describe(torch.device(device)))
            state = refusal or _check(device, name)
            rows.append(TierRow(device, name, 0 if refusal else taken, refusal, state))
    return rows


def tier_table(rows: list[TierRow]) -> Table:
    """For each device and tier: its number of ops, and whether its attention works."""
    table = Table("device", "tier", "ops", "state", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(row.device, row.tier, f"{row.num_ops} of {len(OPS)}", row.state)
    return table


def next_lines(rows: list[TierRow]) -> list[str]:
    """A verdict on the tiers, and the commands that a user of this machine runs next."""
    failed = [row for row in rows if row.state.startswith("fails")]
    if failed:
        names = ", ".join(f"{row.tier} on {row.device}" for row in failed)
        op = "sparsemla verify --op sparse_decode"
        return [f"Not well: {names}. Next, for a report: {op}, and this output in an issue."]
    devices = {row.device for row in rows if row.refusal is None}
    steps = []
    if "cuda" in devices:
        lines = ["All is well: every tier that this machine's GPU or CPU can run works."]
        steps.append(("sparsemla verify --quick", "check every op on this GPU"))
        steps.append(("sparsemla bench --op sparse_decode", "time it"))
    else:
        lines = [f"All is well on the CPU, which runs every op. No GPU: {missing_gpu()}."]
        steps.append(
            (
                "sparsemla explain sparse_decode --device cuda --capability 9.0",
                "see a GPU's kernels",
            )
        )
        steps.append(("sparsemla verify --quick", "check every op"))
    if all(importlib.util.find_spec(name) for name in DEMO_PACKAGES):
        steps.insert(0, ("sparsemla demo", "see what a trained model loses and finds"))
    else:
        steps.insert(0, (INSTALL_DEMO, "add transformers, for sparsemla demo and generate"))
    return [*lines, "Next:", *(f"  {why}: {command}" for command, why in steps)]


def _check(device: str, tier: str) -> str:
    """Run ``sparse_decode`` in a tier and compare it with the reference."""
    torch.manual_seed(0)
    cache = PagedCache.allocate(FP8_DS_MLA, num_pages=2, page_size=16, device=device)
    cache.write(torch.arange(32, device=device), torch.randn(32, 576, device=device))
    q = torch.randn(2, 1, 16, 576, device=device).bfloat16()
    slots = torch.arange(32, dtype=torch.int32, device=device).view(2, 1, 16)
    outs = []
    for name in (tier, "reference"):
        try:
            with only(name):
                out, _ = sparsemla.sparse_decode(
                    q, cache, slots, softmax_scale=192**-0.5, num_splits=1
                )
        except Exception as error:  # any failure of a tier is reported
            return f"fails: {type(error).__name__}: {error}"
        outs.append(out.float())
    distance = (outs[0] - outs[1]).abs().max().item() / outs[1].abs().max().item()
    return f"works: sparse_decode is within {distance:.1e} of the reference"
