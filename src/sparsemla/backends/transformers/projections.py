"""Modules whose parameters attention reads, because it does not call their forward.

Attention in the absorbed form multiplies with the parts of ``kv_b_proj``, DeepSeek-V4's with the
groups of ``o_a_proj``, and fused ops normalise with the weight of a norm. An adapter, a hook or a
bias of such a module must not be lost: a projection's weight is that of its forward, and whatever
else its parameters do not tell is refused.

Shapes: N outputs and K inputs of a projection, G groups of a grouped one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from sparsemla.weights import HeadWeight

READ_FORWARDS = (
    "torch.nn.modules.linear",
    "transformers.integrations.finegrained_fp8",
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
)
"""Python modules of the forwards that multiply with ``weight`` and block scales, and no more."""

OWN_FORWARDS = ("torch.", "transformers.")
"""Python packages of the forwards whose parameters attention knows how to read."""

HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}
"""Attributes of a module, and what they hold."""

LINEAR_ERROR = 0.25
"""Relative error of a linear layer's outputs that rounded activations explain."""

State: TypeAlias = tuple[object, ...]
"""What tells that a parameter may have changed."""


def state_of(x: Tensor) -> State:
    """It changes with the memory of ``x``, and with writes that autograd counts."""
    return x.untyped_storage()._cdata, 0 if x.is_inference() else x._version


def check_skipped(parent: str, name: str, module: nn.Module) -> None:
    """Refuse a module that does more than transformers' own forward, which is not called here.

    Args:
        parent: name of the module's parent in the model.
        name: name of the module there.
        module: its parameters are read.
    """
    _check_hooks(parent, name, module)
    kind: Any = type(module)
    known = kind.forward.__module__.startswith(OWN_FORWARDS)
    if known and _has_forward_of_class(module):
        return
    path = _joined(parent, name)
    got = "a forward of the instance" if known else f"{kind.__module__}.{kind.__qualname__}"
    raise ValueError(
        f"model must have transformers' own forward in {path}, of which attention here reads the "
        f"parameters, got {got}: merge the adapter or remove what replaces the forward"
    )


def _joined(parent: str, name: str) -> str:
    return ".".join(filter(None, (parent, name)))


def _check_hooks(parent: str, name: str, module: Any) -> None:  # noqa: ANN401 - they are private
    if not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return
    got = " and ".join(kind for hooks, kind in HOOKS.items() if getattr(module, hooks))
    raise ValueError(
        f"model must have no hooks on {_joined(parent, name)}, of which attention here reads the "
        f"parameters and does not call the forward, got {got}: remove it"
    )


def _has_forward_of_class(module: nn.Module) -> bool:
    """Whether a call runs the class's forward, on other devices at most (accelerate's hook)."""
    forward = vars(module).get("forward")
    if forward is None:
        return True
    hook: Any = vars(module).get("_hf_hook")
    if type(hook).__name__ == "AlignDevicesHook" and not hook.offload:
        forward = vars(module)["_old_forward"]
    return getattr(forward, "__func__", None) is type(module).forward


class Projection:
    """A linear layer that attention absorbs.

    Args:
        path: name of its parent in the model.
        parent: the module that holds it.
        name: its attribute there, which an adapter replaces at any time.
        in_features: K.
        out_features: N.
        num_groups: G of a grouped layer, whose forward maps ``[T, G, K]`` to ``[T, G, N]``; None
            for one that maps ``[T, K]`` to ``[T, N]``.
    """

    def __init__(
        self,
        path: str,
        parent: nn.Module,
        name: str,
        *,
        in_features: int,
        out_features: int,
        num_groups: int | None = None,
    ) -> None:
        self.path = f"{path}.{name}"
        self._parent = parent
        self._name = name
        self._in_features = in_features
        self._out_features = out_features
        self._num_groups = num_groups
        self._linear: nn.Module | None = None

    @property
    def module(self) -> Any:  # noqa: ANN401 - its class depends on adapters and quantisation
        return getattr(self._parent, self._name)

    def check(self, module: Any) -> bool:  # noqa: ANN401 - its class may be any
        """Whether the forward has a weight, and scales of its codes, and no more.

        Raises:
            ValueError: hooks, a bias or dropout, which no matrix has.
        """
        attributes = vars(module)
        weight, block = attributes["_parameters"].get("weight"), attributes.get("block_size")
        if (
            weight is not None
            and type(module).forward.__module__ in READ_FORWARDS
            and _has_forward_of_class(module)
            and not is_traceable_wrapper_subclass(weight)
            and (block is None or block[0] == block[1])
        ):
            self._check_part("", module)
            return True
        for name, part in module.named_modules():
            self._check_part(name, part)
        return False

    def _check_part(self, name: str, part: Any) -> None:  # noqa: ANN401 - its class may be any
        _check_hooks(self.path, name, part)
        if (bias := part._parameters.get("bias")) is not None:
            raise ValueError(
                f"model must have no bias in {_joined(self.path, name)}, of which attention here "
                f"absorbs the weight, got one of shape {list(bias.shape)}"
            )
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p:
            raise ValueError(
                f"model must have no dropout in {_joined(self.path, name)}, of which attention "
                f"here absorbs the weight, got p = {part.p} in training mode"
            )

    def stored(self, module: Any) -> dict[str, Any]:  # noqa: ANN401 - its class may be any
        """The weight, the scales of FP8 codes, and the side of a scale's block."""
        weight, scale = module.weight.detach().contiguous(), None
        if weight.dtype.itemsize == 1:
            scale = getattr(module, "weight_scale_inv", None)
        block = getattr(module, "block_size", None) or (128, 128)
        return {
            "weight": weight,
            "weight_scale_inv": None if scale is None else scale.detach(),
            "block": block[0],
        }

    def state(self, module: Any) -> State:  # noqa: ANN401 - its class may be any
        """What tells that the stored weight may have changed."""
        parameters = module._parameters
        scale = parameters.get("weight_scale_inv")
        weight = state_of(parameters["weight"])
        return module, weight, None if scale is None else state_of(scale)

    def weight(self, dtype: torch.dtype) -> Tensor:
        """``[G N, K]`` with a graph, from the forward's outputs for the unit vectors.

        Args:
            dtype: dtype of the layer's inputs.
        """
        device = next(self._parent.parameters()).device
        outputs = self._forward(torch.eye(self._in_features, dtype=dtype, device=device)[:, None])
        if self._linear is not self.module:
            self._check_linear(outputs.detach(), dtype)
            self._linear = self.module
        return outputs.flatten(1).T

    def trained_weight(self, dtype: torch.dtype) -> Tensor:
        """``[G N, K]`` with a graph: the parameter, if the forward has no more than that."""
        module = self.module
        return module.weight if self.check(module) else self.weight(dtype)

    def _forward(self, x: Tensor) -> Tensor:
        """``[T, G, N]`` of ``x [T, G, K]``, or of ``x [T, 1, K]`` that all groups share."""
        if self._num_groups is None:
            return self.module(x[:, 0])[:, None]
        return self.module(x.expand(-1, self._num_groups, -1))

    @torch.no_grad()
    def _check_linear(self, matrices: Tensor, dtype: torch.dtype) -> None:
        """Refuse a layer that does not multiply with ``matrices [K, G, N]``."""
        if matrices.shape[-1] != self._out_features:
            raise ValueError(
                f"model must have {self._out_features} outputs of {self.path}, got "
                f"{matrices.shape[-1]}"
            )
        # Large vectors tell a nonlinear layer, small ones a constant term.
        sizes = torch.tensor([1.0, 2.0**-10], device="cpu").repeat(4)[:, None, None]
        generator = torch.Generator("cpu").manual_seed(0)
        shape = len(sizes), self._num_groups or 1, self._in_features
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * sizes
        x = x.to(matrices.device, dtype)
        expected = torch.einsum("tgk,kgn->tgn", x.float(), matrices.float())
        error = (self._forward(x).float() - expected).norm(dim=-1)
        if not bool((error <= LINEAR_ERROR * expected.norm(dim=-1)).all()):
            raise ValueError(
                f"model must have a linear layer without a constant term as {self.path}, which "
                f"attention here absorbs, got {type(self.module).__name__} with other outputs"
            )


class Absorbed:
    """The matrices of a projection, in the form in which attention multiplies with them.

    Copies keep their memory while their values change: compiled steps and CUDA graphs read it.

    Args:
        projection: see :class:`Projection`.
        split: its matrices, from the arguments ``weight``, ``weight_scale_inv`` and ``block``.
        model: its dtype is that of the projection's inputs.

    Attributes:
        weights: the matrices.
    """

    def __init__(
        self,
        projection: Projection,
        split: Callable[..., Iterable[HeadWeight]],
        *,
        model: PreTrainedModel,
    ) -> None:
        self._projection = projection
        self._split = split
        self._model = model
        self._state: State | None = None
        self._copies: dict[tuple[int, str], Tensor] = {}
        self.weights: list[HeadWeight] = []

    def update(self, *, anew: bool) -> None:
        """Take the weight from the projection; without ``anew`` only if it may have changed.

        The outputs of a projection with an adapter depend on more than parameters, for example on
        which adapter is active: its weight is taken in each call.

        Args:
            anew: take the weight even if autograd counted no write, as of ``weight.data.copy_``.
        """
        projection = self._projection
        module = projection.module
        if not projection.check(module):
            weight = projection.weight(self._model.dtype).contiguous()
            self._take({"weight": weight}, sources=())
            self._state = None
            return
        state = projection.state(module)
        if anew or state != self._state:
            stored = projection.stored(module)
            self._take(stored, sources=[x for x in stored.values() if isinstance(x, Tensor)])
            self._state = state

    def _take(self, stored: Mapping[str, Any], sources: Iterable[Tensor]) -> None:
        shared = {x.untyped_storage()._cdata for x in sources}
        self.weights = [
            HeadWeight.unchecked(
                self._kept((place, "data"), new.data, shared),
                None if new.scale is None else self._kept((place, "scale"), new.scale, shared),
                new.scale_block,
            )
            for place, new in enumerate(self._split(**stored))
        ]

    def _kept(self, key: tuple[int, str], new: Tensor, shared: Collection[int]) -> Tensor:
        """``new`` in the memory of the copy before, unless it is a view of the parameter."""
        if new.untyped_storage()._cdata in shared:
            return new
        old = self._copies.get(key)
        kind = new.shape, new.dtype, new.device
        if old is None or (old.shape, old.dtype, old.device) != kind:
            self._copies[key] = new
            return new
        return old.copy_(new)
