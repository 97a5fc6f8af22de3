"""Weights of an MLA layer in the absorbed form, and how to get them out of ``kv_b_proj``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsemla.checks import FLOATS, Checker


@dataclass(frozen=True, eq=False)
class HeadWeight:
    """One matrix for each head, bfloat16, or e4m3 with a scale for each block.

    Args:
        data: ``[H, N, K]``; a head maps ``K`` inputs to ``N`` outputs.
        scale: float32 ``[H, ceil(N / n), ceil(K / k)]`` for e4m3 data, else None.
        scale_block: ``(n, k)``, the block that shares a scale.
    """

    data: Tensor
    scale: Tensor | None = None
    scale_block: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        check = Checker("HeadWeight")
        check.kind("data", self.data, Tensor)
        if self.scale is not None:
            check.kind("scale", self.scale, Tensor)
        if self.data.dim() != 3:
            raise ValueError(f"data must have shape [H, N, K], got {list(self.data.shape)}")
        is_fp8 = self.data.dtype == torch.float8_e4m3fn
        if not is_fp8 and self.data.dtype != torch.bfloat16:
            raise TypeError(f"data must be bfloat16 or float8_e4m3fn, got {self.data.dtype}")
        if (self.scale is not None) != is_fp8:
            raise ValueError("scale must be given exactly for float8_e4m3fn data")
        if self.scale is not None:
            heads, rows, cols = self.data.shape
            shape = (heads, -(-rows // self.scale_block[0]), -(-cols // self.scale_block[1]))
            if self.scale.dtype != torch.float32:
                raise TypeError(f"scale must be float32, got {self.scale.dtype}")
            if tuple(self.scale.shape) != shape:
                raise ValueError(
                    f"scale must have shape {list(shape)}, got {list(self.scale.shape)}"
                )

    @classmethod
    def unchecked(
        cls, data: Tensor, scale: Tensor | None, scale_block: tuple[int, int]
    ) -> HeadWeight:
        """The weight of parts that come from another one, and fit each other as they did there."""
        weight = object.__new__(cls)
        vars(weight).update(data=data, scale=scale, scale_block=scale_block)
        return weight

    def transpose(self) -> HeadWeight:
        """The matrices the other way round, ``[H, K, N]``; a copy."""
        scale = None if self.scale is None else _turned(self.scale)
        return HeadWeight(_turned(self.data), scale, self.scale_block[::-1])

    def dequantize(self) -> Tensor:
        """float32 ``[H, N, K]``."""
        if self.scale is None:
            return self.data.float()
        n, k = self.scale_block
        spread = self.scale.repeat_interleave(n, 1).repeat_interleave(k, 2)
        return self.data.float() * spread[:, : self.data.shape[1], : self.data.shape[2]]


def _turned(matrices: Tensor) -> Tensor:
    """A copy, ``[H, K, N]`` of ``[H, N, K]``, in that order also where there are no heads."""
    return matrices.transpose(1, 2).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)
class MLALayer:
    """What stays the same in every call of one attention layer.

    Args:
        w_uk: ``[H, L, P]``, no-RoPE query to latent.
        w_uv: ``[H, V, L]``, attended latent to the head's value.
        kv_norm_weight: ``[L]``, RMSNorm weight of the latent.
        cos_sin_cache: float32 or bfloat16 ``[max_positions, R]``
            (:func:`sparsemla.rope.cos_sin_table`).
        softmax_scale: factor of the scores (:func:`sparsemla.rope.mla_softmax_scale`).
        norm_eps: RMSNorm epsilon.
        interleaved: RoPE pairs are (2i, 2i+1) if True, (i, i + R/2) if False.
        attn_sink: float32 ``[H]`` or None.

    Raises:
        TypeError: weights that are no HeadWeight, or an argument of another kind or dtype.
        ValueError: shapes or devices that disagree, or a last dimension that is not contiguous.
    """

    w_uk: HeadWeight
    w_uv: HeadWeight
    kv_norm_weight: Tensor
    cos_sin_cache: Tensor
    softmax_scale: float
    norm_eps: float = 1e-6
    interleaved: bool = True
    attn_sink: Tensor | None = None

    def __post_init__(self) -> None:
        # All that a branch would refuse later, when it has written its rows.
        check = Checker("MLALayer")
        check.kind("w_uk", self.w_uk, HeadWeight)
        check.kind("w_uv", self.w_uv, HeadWeight)
        for name, weight, shape, blocks in (
            ("w_uk", self.w_uk, "H L P", "H lb pb"),
            ("w_uv", self.w_uv, "H V L", "H vb mb"),
        ):
            check.tensor(name, weight.data, shape, weight.data.dtype)
            check.optional(f"{name}.scale", weight.scale, blocks, torch.float32)
        check.tensor("kv_norm_weight", self.kv_norm_weight, "L", FLOATS)
        table = (torch.float32, torch.bfloat16)
        check.tensor("cos_sin_cache", self.cos_sin_cache, "max_positions R", table)
        check.optional("attn_sink", self.attn_sink, "H", torch.float32)
        check.number("softmax_scale", self.softmax_scale)
        check.number("norm_eps", self.norm_eps)
        check.kind("interleaved", self.interleaved, bool)

    @property
    def num_heads(self) -> int:
        return self.w_uk.data.shape[0]

    @property
    def kv_lora_rank(self) -> int:
        """L, dims of the latent."""
        return self.w_uk.data.shape[1]

    @property
    def qk_nope_head_dim(self) -> int:
        """P, query dims without RoPE."""
        return self.w_uk.data.shape[2]

    @property
    def qk_rope_head_dim(self) -> int:
        """R, query and key dims with RoPE."""
        return self.cos_sin_cache.shape[1]

    @property
    def v_head_dim(self) -> int:
        """V, dims of a head's value."""
        return self.w_uv.data.shape[1]


def dequantize_blocks(weight: Tensor, scale: Tensor, block: int = 128) -> Tensor:
    """float32 of a matrix ``[N, K]`` with one scale ``[ceil(N/block), ceil(K/block)]`` a block."""
    return HeadWeight(weight[None], scale.float()[None], (block, block)).dequantize()[0]


def absorb_kv_b_proj(
    weight: Tensor,
    weight_scale_inv: Tensor | None = None,
    *,
    num_heads: int,
    qk_nope_head_dim: int,
    v_head_dim: int,
    block: int = 128,
) -> tuple[HeadWeight, HeadWeight]:
    """``w_uk`` and ``w_uv`` of a ``kv_b_proj`` weight.

    Row ``h * (P + V) + i`` of the weight is row ``i`` of head ``h``: W_UK for the first ``P`` rows,
    W_UV for the others. FP8 codes are kept as they are: where the ``block`` x ``block`` scales of
    the unsplit matrix straddle heads or the W_UK/W_UV border (GLM's P = 192, V = 256), the scales
    are spread to finer blocks of ``gcd(block, P, V)`` rows, which no border cuts.

    Args:
        weight: ``[H * (P + V), L]``, any float dtype, or float8_e4m3fn.
        weight_scale_inv: ``[ceil(H * (P + V) / block), ceil(L / block)]`` for FP8 weights.
        num_heads: H.
        qk_nope_head_dim: P.
        v_head_dim: V.
        block: side of a scale's block.

    Returns:
        ``w_uk [H, L, P]`` and ``w_uv [H, V, L]``.

    Raises:
        TypeError: weights or scales that are no tensors of floats.
        ValueError: the shapes do not fit, or scales are missing or superfluous.
    """
    check = Checker("absorb_kv_b_proj")
    check.kind("weight", weight, Tensor)
    if weight_scale_inv is not None:
        check.kind("weight_scale_inv", weight_scale_inv, Tensor)
    if not weight.is_floating_point():  # codes of another quantisation
        raise TypeError(f"weight must have a float dtype, got {weight.dtype}")
    head_rows = qk_nope_head_dim + v_head_dim
    if weight.dim() != 2 or weight.shape[0] != num_heads * head_rows:
        raise ValueError(
            f"weight must have shape [{num_heads} * {head_rows}, L], got {list(weight.shape)}"
        )
    is_fp8 = weight.dtype == torch.float8_e4m3fn
    if is_fp8 != (weight_scale_inv is not None):
        raise ValueError("weight_scale_inv must be given exactly for a float8_e4m3fn weight")
    heads = weight.view(num_heads, head_rows, weight.shape[1])  # [H, P + V, L]
    w_uk, w_uv = heads.split([qk_nope_head_dim, v_head_dim], dim=1)
    w_uk = _turned(w_uk)  # [H, L, P]
    if weight_scale_inv is None:
        return HeadWeight(w_uk.bfloat16()), HeadWeight(w_uv.bfloat16().contiguous())
    expected = (-(-weight.shape[0] // block), -(-weight.shape[1] // block))
    if tuple(weight_scale_inv.shape) != expected:
        raise ValueError(
            f"weight_scale_inv must have shape {list(expected)}, got {list(weight_scale_inv.shape)}"
        )
    fine = math.gcd(block, qk_nope_head_dim, v_head_dim)
    scales = weight_scale_inv.float().repeat_interleave(block // fine, dim=0)
    scales = scales[: weight.shape[0] // fine].view(num_heads, head_rows // fine, -1)
    uk_scale, uv_scale = scales.split([qk_nope_head_dim // fine, v_head_dim // fine], dim=1)
    return (
        HeadWeight(w_uk, _turned(uk_scale), (block, fine)),
        HeadWeight(w_uv.contiguous(), uv_scale.contiguous(), (fine, block)),
    )
