"""Stands in for SGLang's ``sgl_kernel`` where its binary belongs to another torch.

SGLang 0.5.23 imports ``sgl_kernel`` at start, whatever it serves, and its binary loads with one
version of torch only. A greedy bfloat16 run of a DeepSeek-V3.2 calls seven functions of it, which
are here in PyTorch. Any other name can be imported, and raises ``NotImplementedError`` when it is
called: nothing is computed by a kernel that is not the one SGLang asked for.

Not for serving: it is slower than the binary. Put the folder above on ``PYTHONPATH`` and start
SGLang with greedy requests and these settings::

    SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1  # the check reads the binary's version
    SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD=0  # no dense prefills, which need FA3
    SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python  # SGLang's Rust library needs its torch, too
    --sampling-backend pytorch --moe-runner-backend triton

A bfloat16 cache needs ``--dsa-decode-backend flashmla_sparse``, as the default, ``fa3``, is in the
binary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

__version__ = "0"


def rmsnorm(
    input: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    out: Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """``input / rms(input) * weight``, computed in float32.

    Args:
        input: bfloat16 ``[T, N]``.
        weight: ``[N]``.
        eps: added to the mean square.
        out: written, if given.
        enable_pdl: of the binary's launch.
    """
    _must_be_bfloat16("rmsnorm", input)
    x = input.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    return torch.empty_like(input).copy_(x) if out is None else out.copy_(x)


def fused_add_rmsnorm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """``residual += input``, then ``input = rmsnorm(residual)`` of the sum before it is rounded."""
    _must_be_bfloat16("fused_add_rmsnorm", input, residual)
    x = input.float() + residual.float()
    residual.copy_(x)
    input.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float())


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """``silu`` of the first half of the last dim times the second half, computed in float32."""
    _must_be_bfloat16("silu_and_mul", input)
    gate, up = input.float().chunk(2, dim=-1)
    x = functional.silu(gate) * up
    return x.to(input.dtype) if out is None else out.copy_(x)


def moe_align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Tensor,
    experts_ids: Tensor,
    num_tokens_post_pad: Tensor,
    cumsum_buffer: Tensor,
    pad_sorted_token_ids: bool = False,
) -> None:
    """Sort the experts of all tokens into blocks of one expert each.

    Args:
        topk_ids: experts of each token ``[T, experts of a token]``, -1 for none.
        num_experts: their number, and one for none.
        block_size: entries of a block.
        sorted_token_ids: written, ``[entries]``: places in ``topk_ids``, and its size to fill up.
        experts_ids: written, ``[blocks]``.
        num_tokens_post_pad: written, ``[1]``: entries of all blocks in use.
        cumsum_buffer: of the binary.
        pad_sorted_token_ids: whether other entries are written; they always are.
    """
    kinds = topk_ids.flatten().long() + 1
    counts = kinds.new_zeros(num_experts).scatter_add_(0, kinds, torch.ones_like(kinds))
    sizes = (counts + block_size - 1) // block_size * block_size
    ends = sizes.cumsum(0)
    order = kinds.argsort(stable=True)
    ordered = kinds[order]
    shift = (ends - sizes) - (counts.cumsum(0) - counts)
    places = torch.arange(len(order), device=order.device) + shift[ordered]
    sorted_token_ids.fill_(len(order)).scatter_(0, places, order.to(sorted_token_ids.dtype))
    blocks = torch.arange(len(experts_ids), device=order.device) * block_size
    experts_ids.copy_(torch.searchsorted(ends, blocks, right=True).clamp(max=num_experts - 1) - 1)
    num_tokens_post_pad.copy_(ends[-1:])


def moe_sum_reduce(input: Tensor, output: Tensor, routed_scaling_factor: float) -> None:
    """The sum over the experts of each token, times a factor.

    Args:
        input: bfloat16 ``[T, experts of a token, N]``.
        output: written, ``[T, N]``.
        routed_scaling_factor: the factor.
    """
    _must_be_bfloat16("moe_sum_reduce", input)
    output.copy_(input.float().sum(1) * routed_scaling_factor)


def fast_topk_transform_fused(
    score: Tensor,
    lengths: Tensor,
    page_table_size_1: Tensor,
    cu_seqlens_q: Tensor,
    topk: int,
    row_starts: Tensor | None = None,
) -> Tensor:
    """Slots of the keys with the best scores, int32 ``[T, topk]``, then -1.

    Args:
        score: ``[T, N]``; row t competes with ``lengths[t]`` columns from ``row_starts[t]`` on.
        lengths: ``[T]``.
        page_table_size_1: slots of the keys of each request ``[B, keys]``.
        cu_seqlens_q: ``[B + 1]``, first row of each request, and T.
        topk: length of a list.
        row_starts: ``[T]``, default 0.
    """
    starts = torch.zeros_like(lengths) if row_starts is None else row_starts
    columns = torch.arange(score.shape[1], device=score.device)
    positions = columns - starts[:, None]
    seen = (positions >= 0) & (positions < lengths[:, None])
    found = score.masked_fill(~seen, -torch.inf).topk(min(topk, score.shape[1])).indices
    rows = torch.arange(len(score), device=score.device)
    requests = torch.bucketize(rows, cu_seqlens_q[1:], right=True)
    present = seen.gather(1, found)  # the table may have no column for the others
    slots = page_table_size_1[requests[:, None], positions.gather(1, found) * present]
    lists = torch.full((len(score), topk), -1, dtype=torch.int32, device=score.device)
    lists[:, : found.shape[1]] = torch.where(present, slots, -1)
    return lists


def weak_ref_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself: what a captured CUDA graph returns stays allocated while it is used."""
    return tensor


def _must_be_bfloat16(name: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.bfloat16:
            raise NotImplementedError(
                f"sgl_kernel.{name} of this stand-in takes bfloat16, got {tensor.dtype}"
            )


def _absent(place: str) -> Callable[..., None]:
    def absent(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            f"{place} is not in this stand-in for sgl_kernel, which is for greedy bfloat16 runs of "
            "DeepSeek-V3.2"
        )

    return absent


class _Module(ModuleType):
    """A module of ``sgl_kernel``: any name can be imported from it."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


class _Modules(MetaPathFinder, Loader):
    """Finds the modules of ``sgl_kernel`` but scalar types, which SGLang can do without."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}.") or name == f"{__name__}.scalar_type":
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(f"{__name__}.{name}")


sys.meta_path.insert(0, _Modules())
