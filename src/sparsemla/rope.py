"""Rotary embedding (RoPE): YaRN frequencies, cos/sin tables and the softmax scale.

Sources: YaRN (arXiv 2309.00071), DeepSeek-V3.2-Exp's inference code, vLLM's deepseek rotary table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsemla.validation import check_integer, check_kind, check_number


@dataclass(frozen=True)
class Yarn:
    """YaRN's parameters, named as in model configurations.

    Args:
        factor: ratio of the extended context to the original one.
        original_max_position_embeddings: length of the original context, in tokens.
        beta_fast: pairs with at least this many turns in the original context keep their frequency.
        beta_slow: pairs with at most this many turns divide their frequency by ``factor``.
        mscale: numerator of the cos/sin table's factor, see :func:`yarn_mscale`.
        mscale_all_dim: denominator of this factor; it also scales the softmax.

    Raises:
        TypeError: a parameter that is not a number.
        ValueError: a parameter that must be positive and is not.

    >>> Yarn(factor=40, original_max_position_embeddings=4096).beta_fast
    32.0
    """

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
    """Angular frequency of each pair, in radians per position: ``f[i] = theta^(-2i/dim)``.

    With YaRN ``f[i] * (1 - ramp[i]) + f[i] / factor * ramp[i]``, where
    ``ramp[i] = clamp((i - low) / (high - low), 0, 1)``. Pair ``low`` turns ``beta_fast`` times
    within the original context, pair ``high`` turns ``beta_slow`` times.

    Args:
        dim: number of RoPE dims, even.
        theta: the base, above 1.
        yarn: YaRN's parameters; None for plain RoPE.

    Returns:
        float32 ``[dim / 2]`` on torch's default device, with the bits of the CPU.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a dim that is odd or negative, or a theta of at most 1.

    Source: YaRN, arXiv 2309.00071, section 3.2.

    >>> yarn = Yarn(factor=40, original_max_position_embeddings=4096)
    >>> f"{rope_frequencies(64, 1e4, yarn)[16].item():.4e}"
    '5.5000e-03'
    """
    check_integer("dim", dim)
    check_number("theta", theta, above=1)
    if yarn is not None:
        check_kind("yarn", yarn, Yarn)
    if dim % 2:
        raise ValueError(f"dim must be even, got {dim}")
    freqs = float(theta) ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if yarn is None:
        return _on_default_device(freqs)

    def pair_with(turns: float) -> float:
        original = yarn.original_max_position_embeddings
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / width).clamp(0, 1)
    return _on_default_device(freqs / float(yarn.factor) * ramp + freqs * (1 - ramp))


def _on_default_device(frequencies: Tensor) -> Tensor:
    return frequencies.float().to(torch.get_default_device())


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention factor: ``0.1 * mscale * ln(factor) + 1``, or 1 if ``factor <= 1``.

    Raises:
        TypeError: an argument that is not a number.

    Source: YaRN, arXiv 2309.00071, section 3.3; DeepSeek's ``yarn_get_mscale``.

    >>> round(yarn_mscale(40, 1.0), 4)
    1.3689
    """
    check_number("factor", factor)
    check_number("mscale", mscale)
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def mla_softmax_scale(qk_head_dim: int, yarn: Yarn | None = None) -> float:
    """MLA's softmax scale: ``qk_head_dim^-0.5 * yarn_mscale(factor, mscale_all_dim)^2``.

    It holds with and without weight absorption.

    Args:
        qk_head_dim: no-RoPE plus RoPE dims of a head *before* absorption: 192 for DeepSeek-V3, not
            576.
        yarn: YaRN's parameters; None for plain RoPE.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a qk_head_dim below 1.

    Source: DeepSeek-V3's ``MLA.softmax_scale``.

    >>> f"{mla_softmax_scale(192, Yarn(40, 4096)):.8f}"
    '0.13523378'
    """
    check_integer("qk_head_dim", qk_head_dim, 1)
    if yarn is not None:
        check_kind("yarn", yarn, Yarn)
    factor = yarn_mscale(yarn.factor, yarn.mscale_all_dim) if yarn else 1.0
    return qk_head_dim**-0.5 * factor * factor


def cos_sin_table(frequencies: Tensor, max_positions: int, *, factor: float = 1.0) -> Tensor:
    """Cosines and sines of all positions: the RoPE table of the ops.

    ``table[p] = factor * concat(cos(p * frequencies), sin(p * frequencies))``

    Args:
        frequencies: ``[dim / 2]`` of any floating dtype, from :func:`rope_frequencies`.
        max_positions: rows of the table, one per position.
        factor: ``yarn_mscale(s, mscale) / yarn_mscale(s, mscale_all_dim)`` for YaRN's factor ``s``;
            1 for DeepSeek-V3.2.

    Returns:
        float32 ``[max_positions, dim]`` on the device of frequencies.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: frequencies that are not a vector of floats, or a negative max_positions.

    >>> cos_sin_table(rope_frequencies(4, 1e4), 2)
    tensor([[1.0000, 1.0000, 0.0000, 0.0000],
            [0.5403, 0.9999, 0.8415, 0.0100]])
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
    """Convert MAX's interleaved ``freqs_cis`` to the layout of :func:`cos_sin_table`.

    For DeepSeek's complex ``freqs_cis [max_positions, dim / 2]``, pass
    ``torch.view_as_real(freqs_cis).flatten(-2)``.

    Args:
        freqs_cis: ``[max_positions, dim]`` of any real dtype: cos 0, sin 0, cos 1, sin 1, ...

    Returns:
        float32 ``[max_positions, dim]``: all cosines, then all sines.

    Raises:
        TypeError: freqs_cis is not a tensor, or complex.
        ValueError: freqs_cis is a scalar, or its last dimension is odd.

    >>> from_freqs_cis(torch.tensor([[1.0, 0.0, 0.5, 0.8]]))
    tensor([[1.0000, 0.5000, 0.0000, 0.8000]])
    """
    check_kind("freqs_cis", freqs_cis, Tensor)
    if freqs_cis.dim() == 0:
        raise ValueError("freqs_cis must have shape [max_positions, dim], got []")
    if freqs_cis.is_complex():
        raise TypeError(
            "freqs_cis must have real values, cos and sin in turn, got complex numbers; "
            "pass torch.view_as_real(freqs_cis).flatten(-2)"
        )
    if freqs_cis.shape[-1] % 2:
        raise ValueError(f"freqs_cis must have an even last dimension, got {list(freqs_cis.shape)}")
    return torch.cat([freqs_cis[..., 0::2], freqs_cis[..., 1::2]], dim=-1).float()
