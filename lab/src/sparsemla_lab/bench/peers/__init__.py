"""Other implementations, if installed, on the inputs of a workload.

Peers are searched in this order: in a directory with ``vllm/``, ``sgl_flash_mla/``, ``sglang/`` and
``attn_gym/`` of unpacked wheels (the extension modules load without their packages' dependencies)
and with ``libq8kv8.so``, SGLang's FP8 prefill as a compiled library; among the files of installed
packages; as the packages ``flash_mla`` and ``deep_gemm``. Kernels in Python of vLLM, SGLang and
attention-gym are loaded without importing these. TileLang ships kernels as examples only; three
files of its ``examples/deepseek_v32``, ``sparse_mla_fwd_pipelined.py``, ``sparse_mla_bwd.py`` and
``topk_selector.py``, are loaded from ``DIR/deepseek_v32``.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

import torch

from sparsemla_lab.bench.peers.attn_gym import AttentionGym
from sparsemla_lab.bench.peers.base import Peer
from sparsemla_lab.bench.peers.cudnn import CuDNN
from sparsemla_lab.bench.peers.deep_gemm import DeepGEMM
from sparsemla_lab.bench.peers.fa3 import FA3
from sparsemla_lab.bench.peers.flash_attn import FlashAttention3
from sparsemla_lab.bench.peers.flash_mla import FlashMLA
from sparsemla_lab.bench.peers.own import Sparsemla, Torch
from sparsemla_lab.bench.peers.sglang import (
    SGLangCandidateBlocks,
    SGLangQ8KV8,
    SGLangTriton,
    SglFlashMLA,
)
from sparsemla_lab.bench.peers.sglang_triton import SGLangSparseMLA, SGLangTritonV4
from sparsemla_lab.bench.peers.tilelang import TileLang
from sparsemla_lab.bench.peers.vllm import VLLM
from sparsemla_lab.bench.peers.vllm_python import VLLMPython
from sparsemla_lab.bench.peers.vllm_triton import VLLMTriton

PEERS = (
    FlashMLA,
    SglFlashMLA,
    FA3,
    FlashAttention3,
    SGLangTriton,
    SGLangSparseMLA,
    SGLangTritonV4,
    SGLangQ8KV8,
    SGLangCandidateBlocks,
    DeepGEMM,
    VLLM,
    VLLMPython,
    VLLMTriton,
    AttentionGym,
    TileLang,
    CuDNN,
)


def find_peers(directory: Path | None = None) -> tuple[list[Peer], dict[str, str]]:
    """The installed peers, and why each other peer is unavailable.

    Args:
        directory: folder to search before the installed packages.
    """
    directories = [] if directory is None else [directory.resolve()]
    # Extensions load without their packages; imports of these take long and change global state.
    for name in ("vllm", "sgl_flash_mla", "sglang", "attn_gym"):
        package = importlib.util.find_spec(name)
        if package is not None and package.submodule_search_locations:
            directories.append(Path(package.submodule_search_locations[0]).parent)
    found: list[Peer] = [Torch(), Sparsemla()]
    missing = {}
    for kind in PEERS:
        try:
            found.append(kind(directories))
        except Exception as error:  # any failure to load is reported as the reason
            missing[kind.name] = " ".join(str(error).split())
    return found, missing


def versions(directory: Path | None = None) -> dict[str, str]:
    """Versions of the packages measured: in ``directory``, installed, or imported."""
    found = {}
    for name in (
        "sparsemla",
        "torch",
        "triton",
        "flash_attn_3",
        "flash_mla",
        "deep_gemm",
        "vllm",
        "tilelang",
        "sgl_flash_mla",
        "sglang",
        "attn_gym",
        "nvidia_cudnn_frontend",
    ):
        path = sys.path if directory is None else [str(directory), *sys.path]
        package = next(iter(metadata.distributions(name=name, path=path)), None)
        version = getattr(sys.modules.get(name), "__version__", None)
        if package is not None:
            found[name] = package.version
        elif isinstance(version, str):
            found[name] = version
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found
