"""The first output projection of DeepSeek-V4, read from the linear layer that vLLM loads."""

from __future__ import annotations

import functools
import math
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from sparsemla import HeadWeight, project_groups, projection_weight

BLOCK = 128
"""Rows and columns that share a scale of e4m3 codes."""


class GroupProjection(nn.Module):
    """The matrices of a linear layer ``wo_a``, one for each group of heads.

    vLLM updates weights in place while captured graphs go on reading them. So nothing here may
    become stale, and no address may change:

    - bfloat16 weights, e4m3 codes and float32 scales of blocks that no group cuts are views of the
      layer's parameters,
    - other scales are converted, and a weight of another quantisation becomes the layer's outputs
      for unit vectors. :meth:`refresh` writes such copies into the same memory again; an update of
      parameters without it is refused.

    Args:
        linear: vLLM's layer, with ``[G * N, K]`` weights.
        num_groups: G.
        out_features: N, outputs of a group.
        in_features: K, inputs of a group.
        name: of the layer, for errors.
    """

    linear: Any
    unpacked: Tensor | None
    scale: Tensor | None

    def __init__(
        self, linear: nn.Module, num_groups: int, out_features: int, in_features: int, name: str
    ) -> None:
        super().__init__()
        # Not a child: the parameters belong to the attention layer.
        object.__setattr__(self, "linear", linear)
        self.shape = num_groups, out_features, in_features
        self.name = name
        # Buffers, because sleep mode keeps those while it discards other memory.
        self.register_buffer("unpacked", None, persistent=False)
        self.register_buffer("scale", None, persistent=False)
        self._weight: HeadWeight | None = None

    @classmethod
    def of(cls, layer: Any, prefix: str) -> GroupProjection:  # noqa: ANN401 - a layer of vLLM
        """That of an attention layer of DeepSeek-V4 or V4.1, called ``prefix``."""
        inputs = layer.n_heads * layer.head_dim // layer.n_groups
        return cls(layer.wo_a, layer.n_local_groups, layer.o_lora_rank, inputs, f"{prefix}.wo_a")

    def forward(self, out: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
        """Rotate heads back and project each group, ``[T, G * N]``.

        Args:
            out: ``[T, H, 512]``, what heads attended to.
            positions: int64 ``[T]``.
            cos_sin_cache: float32 ``[P, 64]``, of :func:`sparsemla.project_groups`.
        """
        groups = project_groups(
            out, self.weight(), cos_sin_cache=cos_sin_cache, positions=positions
        )
        return groups.flatten(1)

    def weight(self) -> HeadWeight:
        """``[G, N, K]``, with the parameters' present values."""
        return self.refresh() if self._weight is None else self._weight

    def update(self) -> None:
        """:meth:`refresh` after a load of weights, if the layer is ready to compute.

        In the first load it is not, and a reload by layers, which takes parameters and buffers away
        in the meantime, prepares it later.
        """
        away = "scale" not in self._buffers or "unpacked" not in self._buffers
        if self._weight is not None and not away and not next(self.linear.parameters()).is_meta:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> HeadWeight:
        """Read the layer again, which vLLM has loaded and prepared for its own kernels.

        Raises:
            ValueError: the layer computes more than a product with matrices.
        """
        linear, (num_groups, rows, cols) = self.linear, self.shape
        if linear.bias is not None:
            raise ValueError(f"sparsemla: {self.name} must not have a bias")
        weight = getattr(linear, "weight", None)
        shape = num_groups * rows, cols
        if weight is None or not weight.is_contiguous() or weight.flatten(0, -2).shape != shape:
            return self._unpack()
        matrices = weight.detach().view(self.shape)
        if weight.dtype == torch.float8_e4m3fn:
            name = "weight_scale" if hasattr(linear, "weight_scale") else "weight_scale_inv"
            blocks = -(-num_groups * rows // BLOCK), -(-cols // BLOCK)
            scale = getattr(linear, name, None)
            if scale is not None and scale.dim() > 1 and scale.flatten(0, -2).shape == blocks:
                return self._read_codes(matrices, scale.detach())
        elif isinstance(linear.quant_method, UnquantizedLinearMethod):
            self._weight = HeadWeight(matrices)
            return self._weight
        return self._unpack()

    def _read_codes(self, codes: Tensor, scale: Tensor) -> HeadWeight:
        """e4m3 codes ``[G, N, K]`` with a scale ``[..., ceil(K / 128)]`` for each block."""
        if not scale.is_floating_point():
            raise ValueError(
                f"sparsemla: the scales of {self.name} must be float32, bfloat16 or "
                f"float8_e8m0fnu, got {scale.dtype}"
            )
        num_groups, rows, _ = self.shape
        fine = math.gcd(BLOCK, rows)  # rows of blocks that no group cuts
        if fine == BLOCK and scale.dtype == torch.float32 and scale.is_contiguous():
            spread = scale
        else:
            made = scale.float().flatten(0, -2).repeat_interleave(BLOCK // fine, 0)
            self.scale = self._kept(self.scale, made)
            spread = self.scale[: num_groups * rows // fine]
        self._weight = HeadWeight(codes, spread.view(num_groups, rows // fine, -1), (fine, BLOCK))
        return self._weight

    def _unpack(self) -> HeadWeight:
        """A bfloat16 copy of weights in the format of a kernel."""
        linear, (num_groups, rows, cols) = self.linear, self.shape
        weight = getattr(linear, "weight", None)
        if getattr(linear, "input_scale", None) is not None:
            raise ValueError(
                f"sparsemla: {self.name} must be quantised without a static scale of its inputs, "
                "which would change the weight's values"
            )
        if weight is not None and weight.dim() == 3:
            raise ValueError(
                f"sparsemla: {self.name} must have weights [{num_groups}, {rows}, {cols}] in "
                f"bfloat16, or in float8_e4m3fn with a scale for each {BLOCK} x {BLOCK}; got "
                f"{list(weight.shape)} in {weight.dtype}"
            )
        device = next(linear.parameters()).device
        found = projection_weight(linear, cols, device=device).bfloat16().view(self.shape)
        self.unpacked = self._kept(self.unpacked, found)
        self._weight = HeadWeight(self.unpacked)
        return self._weight

    def _kept(self, kept: Tensor | None, made: Tensor) -> Tensor:
        """A copy of parameters, at its address if there was one."""
        # vLLM looks parameters up by this method to overwrite them without any other call.
        self.linear.get_parameter = functools.partial(_refuse_update, self.name)
        return made.contiguous() if kept is None else kept.copy_(made)


def update_projections(model: nn.Module) -> None:
    """:meth:`GroupProjection.update` of all layers of a model, after a load of weights."""
    for layer in model.modules():
        if isinstance(layer, GroupProjection):
            layer.update()


def _refuse_update(layer: str, name: str) -> NoReturn:
    raise ValueError(
        f"sparsemla: {layer}.{name} must be updated in the format of a checkpoint "
        "(is_checkpoint_format), because a converted copy of it is in use"
    )
