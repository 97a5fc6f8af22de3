"""Rotary tables: YaRN frequencies, cos/sin tables, and the softmax scale that goes with them.

Sources: YaRN (arXiv 2309.00071), DeepSeek-V3.2-Exp's inference code, vLLM's deepseek rotary table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsemla.kinds import check_integer, check_kind, check_number


@dataclass(frozen=True)
class Yarn:
    """YaRN's parameters, by the names that model configurations use."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            check_number(name, getattr(self, name), above=0)
        check_number("mscale", self.mscale)
        check_number("mscale_all_dim", self.mscale_all_dim)


def rope_frequencies(dim: int, theta: float, yarn: Yarn | None = None) -> Tensor:
    """Rotation per position of each pair: ``theta^(-2i/dim)``, float32 ``[dim / 2]``.

    With YaRN, pair ``i`` moves from ``f`` to ``f / factor`` along
    ``ramp = clamp((i - low) / (high - low), 0, 1)``, where ``low`` and ``high`` are the pairs that
    turn ``beta_fast`` and ``beta_slow`` times within the original context.

    >>> yarn = Yarn(factor=40, original_max_position_embeddings=4096)
    >>> f"{rope_frequencies(64, 1e4, yarn)[16].item():.4e}"
    '5.5000e-03'

    Raises:
        ValueError: an odd ``dim``.
    """
    check_integer("dim", dim)
    check_number("theta", theta, above=1)
    if yarn is not None:
        check_kind("yarn", yarn, Yarn)
    if dim % 2:
        raise ValueError(f"dim must be even, got {dim}")
    freqs = float(theta) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if yarn is None:
        return freqs.float()

    def pair_that_turns(turns: float) -> float:
        original = yarn.original_max_position_embeddings
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    return (freqs / float(yarn.factor) * ramp + freqs * (1 - ramp)).float()


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention factor ``0.1 * mscale * ln(factor) + 1``; 1 where nothing is stretched."""
    check_number("factor", factor)
    check_number("mscale", mscale)
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def mla_softmax_scale(qk_head_dim: int, yarn: Yarn | None = None) -> float:
    """``qk_head_dim^-0.5 * yarn_mscale(factor, mscale_all_dim)^2``, for the absorbed form too.

    ``qk_head_dim`` is nope + rope of the *unabsorbed* head (192 for DeepSeek-V3), never 576.

    >>> f"{mla_softmax_scale(192, Yarn(40, 4096)):.8f}"
    '0.13523378'
    """
    check_integer("qk_head_dim", qk_head_dim, 1)
    if yarn is not None:
        check_kind("yarn", yarn, Yarn)
    factor = yarn_mscale(yarn.factor, yarn.mscale_all_dim) if yarn else 1.0
    return qk_head_dim**-0.5 * factor * factor


def cos_sin_table(frequencies: Tensor, max_positions: int, *, factor: float = 1.0) -> Tensor:
    """The table that the ops read: float32 ``[max_positions, dim]``, cos half then sin half.

    Args:
        frequencies: ``[dim / 2]``, from :func:`rope_frequencies`.
        max_positions: rows of the table.
        factor: multiplies the whole table (``yarn_mscale(mscale) / yarn_mscale(mscale_all_dim)``,
            which is 1 for DeepSeek-V3.2).
    """
    check_kind("frequencies", frequencies, Tensor)
    if frequencies.dim() != 1 or not frequencies.is_floating_point():
        raise ValueError(
            f"frequencies must be floats of shape [dim / 2], got {frequencies.dtype} "
            f"{list(frequencies.shape)}"
        )
    check_integer("max_positions", max_positions)
    check_number("factor", factor)
    positions = torch.arange(max_positions, dtype=torch.float64, device=frequencies.device)
    angles = positions[:, None] * frequencies.double()  # [max_positions, dim / 2]
    return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(float(factor)).float()


def from_freqs_cis(freqs_cis: Tensor) -> Tensor:
    """MAX's ``freqs_cis [max_positions, dim]`` (cos0, sin0, cos1, sin1, ...) as our table.

    DeepSeek's own complex ``[max_positions, dim / 2]`` is ``view_as_real(it).flatten(-2)`` of that.

    Raises:
        TypeError: complex numbers.
        ValueError: an odd last dimension.
    """
    check_kind("freqs_cis", freqs_cis, Tensor)
    if freqs_cis.dim() == 0:
        raise ValueError("freqs_cis must have shape [max_positions, dim], got []")
    if freqs_cis.is_complex():
        raise TypeError(
            "freqs_cis must hold cos and sin one after the other, got complex numbers; "
            "torch.view_as_real(freqs_cis).flatten(-2) is what is wanted"
        )
    if freqs_cis.shape[-1] % 2:
        raise ValueError(f"freqs_cis must have an even last dimension, got {list(freqs_cis.shape)}")
    return torch.cat([freqs_cis[..., 0::2], freqs_cis[..., 1::2]], dim=-1).float()
