"""vLLM's kernels of DeepSeek-V4 that are written in Python, loaded without vLLM.

They are Triton kernels, and kernels in the CuTe DSL, which need the packages ``cutlass`` and
``quack``. Of vLLM's tree their own files are read, the launchers of ``model_executor/warmup`` and
the helpers that these files import; stand-ins take the place of the rest.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import INDEX_FP8, CacheFormat
from sparsemla.weights import HeadWeight
from sparsemla_lab.bench.peers import deep_gemm
from sparsemla_lab.bench.peers.base import Peer, Unavailable, installed, stand_ins
from sparsemla_lab.bench.peers.vllm import CACHE_ROWS, empty_like
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import Inputs, PoolWindows, ProjectGroups, Side, Workload
from sparsemla_lab.testing.compare import UNQUANTIZED_PROJECTION, assert_close, assert_equal

FOLDERS = (
    "model_executor.warmup",
    "models.deepseek_v4.common.ops",
    "models.deepseek_v4.nvidia.ops",
    "utils",
    "v1.attention.ops",
)
"""Packages of vLLM whose files are found, but whose ``__init__.py`` does not run."""


class VLLMPython(Peer):
    """DeepSeek-V4's compressor and output projection as vLLM runs them."""

    name = "vLLM Python"
    OPS: ClassVar[str] = "models.deepseek_v4.common.ops"
    STATE_PAGES: ClassVar[dict[int, int]] = {4: 4, 128: 8}
    """Rows of a page of the compressor's state, by ratio."""

    def __init__(self, directories: list[Path]) -> None:
        installed("triton")
        self.directories = directories
        for root in directories:
            if (root / "vllm" / self.OPS.replace(".", "/")).is_dir():
                self.root = root / "vllm"
                break
        else:
            raise Unavailable(f"vllm/{self.OPS.replace('.', '/')} is not there")
        with vllm_parts(self.root):
            compress = _module(f"{self.OPS}.fused_compress_quant_cache")
            self.save = _module(f"{self.OPS}.save_partial_states")._SAVE_PARTIAL_STATES_KERNEL
            self.rotate = _module(f"{self.OPS}.fused_inv_rope_fp8_quant")
            self.queries = _module(f"{self.OPS}.fused_indexer_q").fused_indexer_q_rope_quant
            self.slots = _module(f"{self.OPS}.cache_utils").compute_global_topk_indices_and_lens
        self.compress = compress.compress_norm_rope_store_triton

    def supports(self, workload: Workload) -> str | None:
        return None if isinstance(workload, (PoolWindows, ProjectGroups)) else "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if isinstance(workload, ProjectGroups):
            return [self._project(workload, inputs)]
        return self._pools(workload, inputs) if isinstance(workload, PoolWindows) else []

    def _pools(self, workload: PoolWindows, inputs: Inputs) -> list[Side]:
        return [
            self._pool(kind, workload, inputs) for kind in self.kinds(workload.format, every=True)
        ]

    def kinds(self, format: CacheFormat, *, every: bool = False) -> list[str]:
        """The languages of the compressors that vLLM has for a format, its choice last.

        With ``every`` also those that it takes on other GPUs only.
        """
        has_cute_dsl = all(importlib.util.find_spec(name) for name in ("cutlass", "quack"))
        if format is INDEX_FP8 or not has_cute_dsl:
            return ["Triton"]
        return ["Triton", "CuTe DSL"] if every else ["CuTe DSL"]

    @functools.cached_property
    def cute_dsl(self) -> Callable[..., None]:
        """The compressor for 512 dims on NVIDIA GPUs; it has the interface of Triton's.

        Imported once, because each import compiles its kernels again.
        """
        with vllm_parts(self.root):
            ops = _module("models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl")
        compressor: Callable[..., None] = ops._SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL
        return compressor

    def note(self, kind: str, format: CacheFormat) -> str:
        """A remark on the time of a compressor."""
        other = kind == "Triton" and format is not INDEX_FP8
        return "vLLM takes its CuTe DSL kernel on NVIDIA GPUs" if other else ""

    def _pool(self, kind: str, workload: PoolWindows, inputs: Inputs) -> Side:
        cache = empty_like(inputs["cache"])
        compress, check = self.compressor(kind, workload, inputs, cache)

        def run() -> Results:
            compress()
            return (cache.data,)

        note = self.note(kind, workload.format)
        return Side(f"vLLM {kind} compressor", run, lambda got: check(), note=note)

    def compressor(
        self, kind: str, workload: PoolWindows, inputs: Inputs, cache: PagedCache
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Every token's row into a paged state, then the entries from there; and their check."""
        compress = self.compress if kind == "Triton" else self.cute_dsl
        pooling, dim = workload.pooling, workload.format.head_dim
        width, page = pooling.width(dim), self.STATE_PAGES[pooling.ratio]
        state, table, slots = _paged_state(inputs, page)
        # Elements of a scale, and bytes of a row's elements and of its scales.
        block, row, scale = (128, 128, 4) if workload.format is INDEX_FP8 else (64, 576, 8)
        kept = {
            "state_cache": state,
            "positions": inputs["positions"],
            "slot_mapping": slots,
            "block_size": page,
            "state_width": width,
            "compress_ratio": pooling.ratio,
            "pdl_kwargs": {},
        }
        constants = {
            "num_actual": len(slots),
            "token_to_req_indices": inputs["request_ids"],
            "block_table": table,
            "cos_sin_cache": inputs["cos_sin_cache"],
            "kv_cache": cache.data,
            "k_cache_metadata": SimpleNamespace(slot_mapping=inputs["slot_mapping"]),
            "head_dim": dim,
            "rope_head_dim": inputs["cos_sin_cache"].shape[1],
            "overlap": pooling.overlap,
            "use_fp4_cache": False,
            "rms_norm_weight": inputs["norm_weight"],
            "rms_norm_eps": 1e-6,
            "quant_block": block,
            "token_stride": row,
            "scale_dim": scale,
        }

        def run() -> None:
            self.save(kv=inputs["values"], score=inputs["gates"], ape=inputs["gate_bias"], **kept)
            compress(**kept, **constants)

        def check() -> None:
            some, expected, rings = workload.expected(inputs)
            targets = inputs["slot_mapping"][some]
            targets = targets[targets >= 0]
            if len(targets):
                written = cache.read(targets)
                wanted = expected.read(torch.arange(len(targets), device=targets.device))
                assert_close("entries", written, wanted, CACHE_ROWS)
            last = inputs["positions"][some] % rings.rows.shape[1]
            wanted = rings.rows[torch.arange(len(some), device=some.device), last]
            assert_equal("state", state.view(-1, 2, width)[slots[some]], wanted)

        return run, check

    def _project(self, workload: ProjectGroups, inputs: Inputs) -> Side:
        x = inputs["x"]
        names = "weight", "cos_sin_cache", "positions"
        project = self.projection(*(inputs[name] for name in names), heads=x.shape[1])

        def run() -> Results:
            return (project(x),)

        def check(results: Results) -> None:
            # Its scales are powers of two, so it rounds activations otherwise.
            workload.check_within(UNQUANTIZED_PROJECTION, inputs, results)

        return Side("vLLM fused_inv_rope_fp8_quant, DeepGEMM fp8_einsum", run, check)

    def projection(
        self, weight: HeadWeight, table: Tensor, positions: Tensor, *, heads: int
    ) -> Callable[[Tensor], Tensor]:
        """Its inverse rotation and quantisation, then DeepGEMM with FP32 scales as on Hopper."""
        gemm = deep_gemm.load(self.directories)
        groups, outputs, width = weight.data.shape
        num_tokens, rope = len(positions), table.shape[1]
        dim = width * groups // heads
        # Scales lie with tokens next to each other, each column aligned to 16 bytes.
        aligned = -(-num_tokens // 4) * 4
        limit = torch.finfo(torch.float8_e4m3fn).max
        out = weight.data.new_empty(num_tokens, groups, outputs, dtype=torch.bfloat16)

        def project(x: Tensor) -> Tensor:
            codes, scales = self.rotate._fused_inv_rope_fp8_quant_kernel_impl(
                x,
                positions,
                table,
                heads // groups,
                128,
                dim // 128,
                dim - rope,
                rope // 2,
                False,
                limit,
                aligned,
                num_tokens,
                groups,
                width,
                width // 128,
                True,
            )
            gemm.set_pdl(True)  # as vLLM does; DeepGEMM's other rows are without
            gemm.fp8_einsum(
                "bhr,hdr->bhd",
                (codes.transpose(0, 1), scales.transpose(0, 1)),
                (weight.data, weight.scale),
                out,
                recipe=(1, 128, 128),
            )
            gemm.set_pdl(False)
            return out

        return project


def _paged_state(inputs: Inputs, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """The state as vLLM keeps it: a row for each token of the step and of the window before it.

    Returns:
        float32 ``[pages, page, 2 * width]``, the page table ``[B, W]``, and the slot of each token.
    """
    positions, rings, rows = inputs["positions"], inputs["ring_ids"], inputs["state"].rows
    batch, ring, device = len(rings), rows.shape[1], positions.device
    steps = positions.view(batch, -1)
    first, last = (steps[:, 0] - ring + 1).clamp(min=0) // page, steps[:, -1] // page
    count = int((last - first).amax()) + 1
    pages = torch.arange(batch * count, dtype=torch.int32, device=device).view(batch, count)
    # Pages before the window are freed.
    table = torch.zeros(batch, int(first.amax()) + count, dtype=torch.int32, device=device)
    table.scatter_(1, first[:, None] + torch.arange(count, device=device), pages)
    state = torch.zeros(batch * count * page, *rows.shape[2:], device=device)
    earlier = steps[:, :1] - torch.arange(ring - 1, 0, -1, device=device)
    request, place = (earlier >= 0).nonzero(as_tuple=True)
    before = earlier[request, place]
    state[table[request, before // page].long() * page + before % page] = rows[
        rings[request].long(), before % ring
    ]
    requests = inputs["request_ids"].long()
    slots = table[requests, positions // page].long() * page + positions % page
    return state.view(batch * count, page, -1), table, slots


def _module(name: str) -> types.ModuleType:
    return importlib.import_module(f"vllm.{name}")


def vllm_parts(root: Path) -> AbstractContextManager[None]:
    """Let files below ``root`` be imported as parts of a package ``vllm`` that never runs."""
    parts: dict[str, dict[str, object]] = {"vllm": {"__path__": [str(root)]}}
    for folder in FOLDERS:
        names = folder.split(".")
        for depth in range(1, len(names) + 1):
            path = root.joinpath(*names[:depth])
            parts[".".join(["vllm", *names[:depth]])] = {"__path__": [str(path)]}
    parts["vllm.envs"] = {}
    parts["vllm.platforms"] = {"current_platform": PLATFORM}
    parts["vllm.triton_utils"] = triton_utils()
    parts["vllm.utils.deep_gemm"] = {"mqa_logits_use_mx_scales": lambda: False}
    parts["vllm.utils.import_utils"] = {"has_cutedsl": lambda: False}
    parts["vllm.utils.torch_utils"] = {"direct_register_custom_op": lambda **_: None}
    parts["vllm.model_executor.layers.quantization.utils.quant_utils"] = {"get_fp8_min_max": None}
    parts["vllm.transformers_utils.deepseek_v4_utils"] = {"get_compress_ratios": None}
    return stand_ins("vllm", parts)


def triton_utils() -> dict[str, object]:
    """The contents of ``vllm.triton_utils``."""
    triton = installed("triton")
    language = importlib.import_module("triton.language")
    return {"HAS_TRITON": True, "tl": language, "triton": triton}


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


PLATFORM = SimpleNamespace(
    is_rocm=lambda: False,
    is_cuda=lambda: True,
    is_xpu=lambda: False,
    is_cpu=lambda: False,
    fp8_dtype=lambda: torch.float8_e4m3fn,
    is_arch_support_pdl=_is_hopper,
)
"""Stands in for ``vllm.platforms.current_platform``."""
