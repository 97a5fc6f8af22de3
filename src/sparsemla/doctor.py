"""What this machine has, and which tiers work on it."""

from __future__ import annotations

import platform
from importlib import metadata

import torch
from rich import box
from rich.table import Table

import sparsemla
from sparsemla import dispatch
from sparsemla.cache import PagedCache
from sparsemla.formats import FP8_DS_MLA

PACKAGES = ("torch", "triton", "numpy", "transformers", "safetensors", "matplotlib")

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
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {name!r}")
    return DTYPES[name]


def parse_capability(device: str, capability: str | None) -> tuple[int, int] | None:
    """A compute capability such as ``9.0``; if None, that of this machine's first GPU.

    >>> parse_capability("cuda", "9.0")
    (9, 0)
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if device == "cpu":
        if capability is not None:
            raise ValueError(f"capability must not be given for the device cpu, got {capability}")
        return None
    if capability is None:
        if not torch.cuda.is_available():
            raise ValueError("capability must be given on a machine without a CUDA GPU")
        return torch.cuda.get_device_capability()
    major, _, minor = capability.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"capability must have the form 9.0, got {capability!r}")
    return int(major), int(minor)


def version_lines() -> list[str]:
    """A line for Python and each package."""
    lines = [
        f"sparsemla     {sparsemla.__version__}",
        f"python        {platform.python_version()} on {platform.platform()}",
    ]
    for package in PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "not installed"
        lines.append(f"{package:<13} {version}")
    return lines


def device_lines() -> list[str]:
    """A line for the CPU and each GPU."""
    lines = [f"cpu           {platform.machine()}, {torch.get_num_threads()} threads"]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        lines.append(
            f"cuda:{index}        {device.name}, capability {device.major}.{device.minor}, "
            f"{device.total_memory / 2**30:.0f} GiB"
        )
    return lines


def tier_table() -> Table:
    """For each device and tier: how many ops it takes, and whether it computes attention right."""
    table = Table("device", "tier", "ops", "state", box=box.SIMPLE_HEAD, pad_edge=False)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        capability = parse_capability(device, None)
        explanations = [
            dispatch.explain(dispatch.Problem(op, device, capability)) for op in dispatch.OPS
        ]
        for tier in dispatch.TIERS:
            reasons = [dict(explanation.refusals)[tier.name] for explanation in explanations]
            refused = [reason for reason in reasons if reason is not None]
            taken = len(reasons) - len(refused)
            state = _check(device, tier.name) if taken else ", ".join(dict.fromkeys(refused))
            table.add_row(device, tier.name, f"{taken} of {len(reasons)}", state)
    return table


def _check(device: str, tier: str) -> str:
    """Run ``sparse_decode`` in a tier and compare it with the reference."""
    if dispatch.OPS["sparse_decode"].kernel(tier) is None:
        return "takes problems; sparse_decode, which would be tried, is not among them"
    torch.manual_seed(0)
    cache = PagedCache.allocate(FP8_DS_MLA, num_pages=2, page_size=16, device=device)
    cache.write(torch.arange(32, device=device), torch.randn(32, 576, device=device))
    q = torch.randn(2, 1, 16, 576, device=device).bfloat16()
    outs = []
    for name in (tier, "reference"):
        out, lse = (
            q.new_zeros(2, 1, 16, 512),
            torch.zeros(2, 1, 16, dtype=torch.float32, device=device),
        )
        arguments = {
            "topk_indices": torch.arange(32, dtype=torch.int32, device=device).view(2, 1, 16),
            "softmax_scale": 192**-0.5,
            "topk_lengths": None,
            "attn_sink": None,
            "extra_cache": None,
            "extra_topk_indices": None,
            "extra_topk_lengths": None,
            "schedule": (1,),
            "workspace": None,
        }
        try:
            dispatch.load("sparse_decode", name)(q=q, cache=cache, out=out, lse=lse, **arguments)
        except Exception as error:  # whatever is wrong with a tier is what doctor reports
            return f"fails: {type(error).__name__}: {error}"
        outs.append(out.float())
    distance = (outs[0] - outs[1]).abs().max().item() / outs[1].abs().max().item()
    return f"works: sparse_decode is within {distance:.1e} of the reference"
