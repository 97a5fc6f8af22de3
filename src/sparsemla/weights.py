"""Weights of an attention layer: MLA's absorbed form, split from ``kv_b_proj``, and groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsemla.checks import FLOATS, Checker
from sparsemla.formats import FLOAT32_TINY, fp8_scales, to_fp8
from sparsemla.state import outside_autocast
from sparsemla.validation import check_device, check_integer, check_kind

SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


@dataclass(frozen=True, eq=False)
class HeadWeight:
    """One matrix per head, or per group of heads: bfloat16, or e4m3 with a scale per block.

    Args:
        data: ``[H, N, K]``; the matrix of a head maps ``K`` inputs to ``N`` outputs.
        scale: for e4m3 data ``[H, ceil(N / n), ceil(K / k)]``, or one for all matrices: ``[]``,
            ``[1]`` or ``[1, 1, 1]``; float32, bfloat16 or float8_e8m0fnu, kept as float32
            ``[H, ceil(N / n), ceil(K / k)]``. None for bfloat16 data.
        scale_block: ``(n, k)``, the block that shares a scale.

    Raises:
        TypeError: data or scale is not a tensor, or has another dtype.
        ValueError: shapes that do not fit, or a scale that is missing or superfluous.
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
            _check_block(self.scale_block)
            heads, rows, cols = self.data.shape
            shape = (heads, -(-rows // self.scale_block[0]), -(-cols // self.scale_block[1]))
            if self.scale.dtype not in SCALES:
                raise TypeError(
                    "scale must be float32, bfloat16 or float8_e8m0fnu, got "
                    f"{str(self.scale.dtype).removeprefix('torch.')}"
                )
            scale = self.scale.float()
            if tuple(scale.shape) != shape:
                if tuple(scale.shape) not in ((), (1,), (1, 1, 1)):
                    raise ValueError(
                        f"scale must have shape {list(shape)}, or [] for one of all matrices, "
                        f"got {list(scale.shape)}"
                    )
                scale = scale.reshape(1, 1, 1).expand(shape).contiguous()
            object.__setattr__(self, "scale", scale)  # of a frozen class

    @classmethod
    def quantize(cls, data: Tensor, scale_block: tuple[int, int] | None = (128, 128)) -> HeadWeight:
        """Quantise matrices to e4m3, with ``scale = amax / 448`` per block.

        Args:
            data: ``[H, N, K]`` bfloat16, float16 or float32.
            scale_block: ``(n, k)``, or None for one scale for all matrices.

        Raises:
            TypeError: data is not a tensor of floats.
            ValueError: data has another rank, or scale_block is not two positive counts.

        Source: ``dynamic_per_batched_tensor_quant`` of vLLM, which takes one scale.

        >>> weight = HeadWeight.quantize(torch.ones(2, 512, 128))
        >>> weight.data.dtype, weight.scale.shape, weight.dequantize()[0, 0, 0].item()
        (torch.float8_e4m3fn, torch.Size([2, 4, 1]), 1.0)
        """
        check = Checker("HeadWeight.quantize")
        check.kind("data", data, Tensor)
        if not data.is_floating_point() or data.dtype.itemsize < 2:
            raise TypeError(f"data must be bfloat16, float16 or float32, got {data.dtype}")
        if data.dim() != 3:
            raise ValueError(f"data must have shape [H, N, K], got {list(data.shape)}")
        n, k = (128, 128) if scale_block is None else scale_block
        check.positive("scale_block[0]", n)
        check.positive("scale_block[1]", k)
        _, rows, cols = data.shape
        x = data.float()
        counts = -(-rows // n), -(-cols // k)
        padded = torch.nn.functional.pad(x.abs(), (0, -cols % k, 0, -rows % n))
        blocks = padded.view(len(x), counts[0], n, counts[1], k)
        amax = blocks.amax((2, 4))  # [H, ceil(N / n), ceil(K / k)]
        if scale_block is None and amax.numel():
            amax = amax.amax().expand_as(amax)
        scale = fp8_scales(amax).clamp_min(FLOAT32_TINY)
        spread = _spread(scale, (n, k), rows, cols)
        return cls(to_fp8(x / spread), scale.contiguous(), (int(n), int(k)))

    @classmethod
    def unchecked(
        cls, data: Tensor, scale: Tensor | None, scale_block: tuple[int, int]
    ) -> HeadWeight:
        """A weight without checks, of parts that another HeadWeight has checked."""
        weight = object.__new__(cls)
        object.__setattr__(weight, "data", data)
        object.__setattr__(weight, "scale", scale)
        object.__setattr__(weight, "scale_block", scale_block)
        return weight

    def transpose(self) -> HeadWeight:
        """The transposed matrices ``[H, K, N]``; a copy."""
        scale = None if self.scale is None else _turned(self.scale)
        return HeadWeight(_turned(self.data), scale, self.scale_block[::-1])

    def dequantize(self) -> Tensor:
        """float32 ``[H, N, K]``."""
        if self.scale is None:
            return self.data.float()
        return self.data.float() * _spread(self.scale, self.scale_block, *self.data.shape[1:])


def _spread(scale: Tensor, block: tuple[int, int], rows: int, cols: int) -> Tensor:
    """One scale for each element ``[..., N, K]``."""
    spread = scale.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return spread[..., :rows, :cols]


def _check_block(block: object) -> None:
    if not isinstance(block, (tuple, list)) or len(block) != 2:
        raise TypeError(f"scale_block must be two integers, got {block!r}")
    for size in block:
        check_integer("scale_block", size, 1)


def _turned(matrices: Tensor) -> Tensor:
    """A contiguous copy ``[H, K, N]`` of ``[H, N, K]``, also for H = 0."""
    return matrices.transpose(1, 2).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)
class MLALayer:
    """The constants of one attention layer, equal in every call.

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
        TypeError: weights that are not HeadWeights, or an argument of another kind or dtype.
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
        # Check now: a branch would refuse a wrong layer only after it has written its rows.
        check = Checker("MLALayer", gradients="all")
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
        check.epsilon("norm_eps", self.norm_eps)
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
    """Dequantise ``[N, K]`` to float32; scales are ``[ceil(N/block), ceil(K/block)]``."""
    check = Checker("dequantize_blocks", gradients="all")
    check.tensor("weight", weight, "N K", torch.float8_e4m3fn)
    check.tensor("scale", scale, "SN SK", (*FLOATS, torch.float8_e8m0fnu))
    check.positive("block", block)
    return HeadWeight(weight[None], scale.float()[None], (block, block)).dequantize()[0]


def projection_weight(
    project: Callable[[Tensor], Tensor],
    in_features: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> Tensor:
    """The weight of a linear layer without a bias, from its outputs for the unit vectors.

    With it :func:`absorb_kv_b_proj` supports layers of any quantisation, at the cost of one GEMM
    with an identity matrix.

    Args:
        project: maps ``[in_features, in_features]`` to ``[in_features, N]``.
        in_features: K.
        dtype: dtype of the unit vectors.
        device: device of the unit vectors.

    Returns:
        ``[N, K]`` of project's output dtype.

    Raises:
        TypeError: project does not return a tensor.
        ValueError: project returns another number of rows.

    Source: ``get_and_maybe_dequant_weights`` of vLLM.

    >>> layer = torch.nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
    >>> torch.equal(projection_weight(layer, 4), layer.weight)
    True
    """
    if not callable(project):
        raise TypeError(f"project must be callable, got {type(project).__name__}")
    check_integer("in_features", in_features, 1)
    check_kind("dtype", dtype, torch.dtype)
    check_device("device", device)
    with torch.no_grad():
        made = outside_autocast(project)(torch.eye(in_features, dtype=dtype, device=device))
    if not isinstance(made, Tensor):
        raise TypeError(f"project must return a tensor, got {type(made).__name__}")
    if made.dim() != 2 or made.shape[0] != in_features:
        raise ValueError(f"project must return [{in_features}, N], got {list(made.shape)}")
    return made.T


def _scales_of(scale: Tensor, weight: Tensor, block: int) -> tuple[Tensor, int]:
    """float32 ``[ceil(N / rows), ceil(K / block)]`` of a weight ``[N, K]``, and its ``rows``."""
    rows, cols = weight.shape
    blocks = -(-rows // block), -(-cols // block)
    shape, scale = tuple(scale.shape), scale.float()
    if shape == blocks:
        return scale, block
    if shape in ((), (1,), (1, 1)):
        return scale.reshape(1, 1).expand(blocks), block
    if shape in ((rows,), (rows, 1)):
        return scale.reshape(rows, 1).expand(rows, blocks[1]), 1
    if shape == (rows, blocks[1]):
        return scale, 1
    raise ValueError(
        f"weight_scale_inv must have shape {list(blocks)}, [{rows}, {blocks[1]}], [{rows}] or [], "
        f"got {list(shape)}; projection_weight gives the weight of any other quantisation"
    )


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
    W_UV for the others. e4m3 codes with scales per block, or a single scale, keep their bits:
    if the ``block`` x ``block`` scales of the unsplit matrix straddle heads or the W_UK/W_UV
    border (GLM's P = 192, V = 256), the scales are repeated for finer blocks of
    ``gcd(block, P, V)`` rows, which no border cuts. Other codes become bfloat16;
    :meth:`HeadWeight.quantize` converts them to e4m3. :func:`projection_weight` gives the weight of
    layers with any other quantisation.

    Args:
        weight: ``[H * (P + V), L]``, any float dtype, or codes: float8_e4m3fn, float8_e5m2, int8.
        weight_scale_inv: for codes, factors of any float dtype, per block
            ``[ceil(H * (P + V) / block), ceil(L / block)]``, per row and group of ``block`` columns
            ``[H * (P + V), ceil(L / block)]``, per row ``[H * (P + V)]`` or ``[H * (P + V), 1]``,
            or a single factor ``[]`` or ``[1]``.
        num_heads: H.
        qk_nope_head_dim: P.
        v_head_dim: V.
        block: side of a scale's block, and columns of a group.

    Returns:
        ``w_uk [H, L, P]`` and ``w_uv [H, V, L]``.

    Raises:
        TypeError: a weight that is not a tensor of floats or codes, or scales that are not floats.
        ValueError: the shapes do not fit, or scales are missing or superfluous.
    """
    check = Checker("absorb_kv_b_proj")
    check_integer("num_heads", num_heads)
    check_integer("qk_nope_head_dim", qk_nope_head_dim)
    check_integer("v_head_dim", v_head_dim)
    check_integer("block", block, 1)
    _check_codes(check, weight, weight_scale_inv)
    head_rows = qk_nope_head_dim + v_head_dim
    if weight.dim() != 2 or weight.shape[0] != num_heads * head_rows:
        raise ValueError(
            f"weight must have shape [{num_heads} * {head_rows}, L], num_heads times "
            f"qk_nope_head_dim + v_head_dim, got {list(weight.shape)}"
        )
    fine = math.gcd(block, qk_nope_head_dim, v_head_dim)
    heads, scales = _matrices(weight, weight_scale_inv, (num_heads, head_rows), fine, block)
    w_uk, w_uv = heads.split([qk_nope_head_dim, v_head_dim], dim=1)
    w_uk = _turned(w_uk)  # [H, L, P]
    if scales is None:
        return HeadWeight(w_uk), HeadWeight(w_uv.contiguous())
    uk_scale, uv_scale = scales.split([qk_nope_head_dim // fine, v_head_dim // fine], dim=1)
    return (
        HeadWeight(w_uk, _turned(uk_scale), (block, fine)),
        HeadWeight(w_uv.contiguous(), uv_scale.contiguous(), (fine, block)),
    )


def group_o_a_proj(
    weight: Tensor,
    weight_scale_inv: Tensor | None = None,
    *,
    num_groups: int,
    block: int = 128,
) -> HeadWeight:
    """The matrices of groups of heads in an ``o_a_proj`` weight, DeepSeek-V4's ``wo_a``.

    Row ``g * N + i`` of the weight is row ``i`` of group ``g``. Codes are treated as by
    :func:`absorb_kv_b_proj`: e4m3 codes with scales per block, or a single scale, keep their bits.

    Args:
        weight: ``[G * N, K]``, any float dtype, or codes: float8_e4m3fn, float8_e5m2, int8.
        weight_scale_inv: for codes, factors of any float dtype, float8_e8m0fnu included, per block
            ``[ceil(G * N / block), ceil(K / block)]``, per row and group of ``block`` columns
            ``[G * N, ceil(K / block)]``, per row ``[G * N]`` or ``[G * N, 1]``, or a single factor
            ``[]`` or ``[1]``.
        num_groups: G.
        block: side of a scale's block, and columns of a group.

    Returns:
        ``[G, N, K]``, for :func:`project_groups`.

    Raises:
        TypeError: a weight that is not a tensor of floats or codes, or scales that are not floats.
        ValueError: the shapes do not fit, or scales are missing or superfluous.

    >>> group_o_a_proj(torch.randn(2 * 32, 128), num_groups=2).data.shape
    torch.Size([2, 32, 128])
    """
    check = Checker("group_o_a_proj")
    check_integer("num_groups", num_groups, 1)
    check_integer("block", block, 1)
    _check_codes(check, weight, weight_scale_inv)
    if weight.dim() != 2 or weight.shape[0] % num_groups:
        raise ValueError(
            f"weight must have shape [{num_groups} * N, K] with num_groups = {num_groups}, "
            f"got {list(weight.shape)}"
        )
    rows = weight.shape[0] // num_groups
    fine = math.gcd(block, rows)
    data, scale = _matrices(weight, weight_scale_inv, (num_groups, rows), fine, block)
    return HeadWeight(data, scale, (fine, block))


def _check_codes(check: Checker, weight: Tensor, weight_scale_inv: Tensor | None) -> None:
    """Check the dtypes of a checkpoint's weight, and that exactly codes have scales."""
    check.kind("weight", weight, Tensor)
    if weight_scale_inv is not None:
        check.kind("weight_scale_inv", weight_scale_inv, Tensor)
        if not weight_scale_inv.is_floating_point():
            raise TypeError(
                f"weight_scale_inv must have a float dtype, got {weight_scale_inv.dtype}"
            )
    if not weight.is_floating_point() and weight.dtype != torch.int8:  # packed codes, for example
        raise TypeError(
            f"weight must have a float dtype or int8, got {weight.dtype}; projection_weight gives "
            "the weight of any other quantisation"
        )
    is_quantised = weight.dtype.itemsize == 1
    if is_quantised != (weight_scale_inv is not None):
        raise ValueError(
            "weight_scale_inv must be given exactly for a weight of codes, "
            f"got {'none' if is_quantised else 'one'} for {weight.dtype}"
        )


def _matrices(
    weight: Tensor, scale: Tensor | None, counts: tuple[int, int], fine: int, block: int
) -> tuple[Tensor, Tensor | None]:
    """The rows of a checkpoint's weight ``[C * N, K]`` as ``counts = (C, N)``: ``[C, N, K]``.

    Returns:
        bfloat16 and None, or e4m3 codes and a scale for each ``fine`` rows and ``block`` columns.
    """
    if scale is not None:
        scale, rows = _scales_of(scale, weight, block)
        if weight.dtype != torch.float8_e4m3fn or rows != block:
            weight, scale = weight.float() * _spread(scale, (rows, block), *weight.shape), None
    matrices = weight.reshape(*counts, weight.shape[1])
    if scale is None:
        return matrices.bfloat16(), None
    scale = scale.repeat_interleave(block // fine, dim=0)[: weight.shape[0] // fine]
    return matrices, scale.view(counts[0], counts[1] // fine, -1)
