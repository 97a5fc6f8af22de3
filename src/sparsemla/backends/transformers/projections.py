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

from sparsemla.weights import HeadWeight

READ_FORWARDS = (
    "torch.nn.modules.linear",
    "transformers.integrations.finegrained_fp8",
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
)
"""Python modules of the forwards that multiply with ``weight`` and block scales, and no more."""

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


def check_skipped(path: str, module: nn.Module) -> None:
    """Refuse a module that does more than transformers' own forward, which is not called here.

    Args:
        path: name of the module in the model.
        module: its parameters are read.
    """
    _check_hooks(path, module)
    kind = type(module)
    known: Any = kind.forward.__module__.partition(".")[0] in ("torch", "transformers")
    if known and _has_forward_of_class(module):
        return
    got = "a forward of the instance" if known else f"{kind.__module__}.{kind.__qualname__}"
    raise ValueError(
        f"model must have transformers' own forward in {path}, of which attention here reads the "
        f"parameters, got {got}: merge the adapter or remove what replaces the forward"
    )


def _check_hooks(path: str, module: Any) -> None:  # noqa: ANN401 - hooks are private
    if not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return
    got = " and ".join(name for hooks, name in HOOKS.items() if getattr(module, hooks))
    raise ValueError(
        f"model must have no hooks on {path}, of which attention here reads the parameters and "
        f"does not call the forward, got {got}: remove it"
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
        num_groups: int | None = None,
    ) -> None:
        self.path = f"{path}.{name}"
        self._parent = parent
        self._name = name
        self._in_features = in_features
        self._num_groups = num_groups
        self._linear: nn.Module | None = None

    @property
    def module(self) -> Any:  # noqa: ANN401 - its class depends on adapters and quantisation
        return getattr(self._parent, self._name)

    def check(self) -> bool:
        """Whether the forward has a weight, and scales of its codes, and no more.

        Raises:
            ValueError: hooks, a bias or dropout, which no matrix has.
        """
        module = self.module
        weight, block = module._parameters.get("weight"), getattr(module, "block_size", None)
        is_read = (
            weight is not None
            and type(module).forward.__module__ in READ_FORWARDS
            and _has_forward_of_class(module)
            and not is_traceable_wrapper_subclass(weight)
            and (block is None or block[0] == block[1])
        )
        parts: Iterable[tuple[str, Any]] = [("", module)] if is_read else module.named_modules()
        for name, part in parts:
            path = f"{self.path}.{name}" if name else self.path
            _check_hooks(path, part)
            if isinstance(bias := getattr(part, "bias", None), Tensor):
                raise ValueError(
                    f"model must have no bias in {path}, of which attention here absorbs the "
                    f"weight, got one of shape {list(bias.shape)}"
                )
            if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p:
                raise ValueError(
                    f"model must have no dropout in {path}, of which attention here absorbs the "
                    f"weight, got p = {part.p} in training mode"
                )
        return is_read

    def stored(self) -> dict[str, Any]:
        """The weight, the scales of FP8 codes, and the side of a scale's block."""
        weight, scale = self.module.weight.detach(), None
        if weight.dtype.itemsize == 1:
            scale = getattr(self.module, "weight_scale_inv", None)
        block = getattr(self.module, "block_size", None) or (128, 128)
        return {
            "weight": weight,
            "weight_scale_inv": None if scale is None else scale.detach(),
            "block": block[0],
        }

    def state(self) -> State:
        """What tells that the stored weight may have changed."""
        module = self.module
        scale = getattr(module, "weight_scale_inv", None)
        return module, state_of(module.weight), None if scale is None else state_of(scale)

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

    def _forward(self, x: Tensor) -> Tensor:
        """``[T, G, N]`` of ``x [T, G, K]``, or of ``x [T, 1, K]`` that all groups share."""
        if self._num_groups is None:
            return self.module(x[:, 0])[:, None]
        return self.module(x.expand(-1, self._num_groups, -1))

    @torch.no_grad()
    def _check_linear(self, matrices: Tensor, dtype: torch.dtype) -> None:
        """Refuse a layer that does not multiply with ``matrices [K, G, N]``."""
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
                f"attention here absorbs, got a {type(self.module).__name__} that is none"
            )


class Absorbed:
    """The matrices of a projection, in the form in which attention multiplies with them.

    Copies keep their memory while their values change: compiled steps and CUDA graphs read it.

    Args:
        projection: see :class:`Projection`.
        split: its matrices, from the arguments ``weight``, ``weight_scale_inv`` and ``block``.

    Attributes:
        weights: the matrices.
    """

    def __init__(
        self,
        projection: Projection,
        split: Callable[..., Iterable[HeadWeight]],
    ) -> None:
        self._projection = projection
        self._split = split
        self._state: State | None = None
        self._copies: dict[tuple[int, str], Tensor] = {}
        self.weights: list[HeadWeight] = []

    def update(self, dtype: torch.dtype, *, anew: bool) -> None:
        """Take the weight from the projection; without ``anew`` only if it may have changed.

        The outputs of a projection with an adapter depend on more than parameters, for example on
        which adapter is active: its weight is taken in each call.

        Args:
            dtype: dtype of the projection's inputs.
            anew: take the weight even if autograd counted no write, as of ``weight.data.copy_``.
        """
        projection = self._projection
        if not projection.check():
            self._take({"weight": projection.weight(dtype)}, sources=())
            self._state = None
        elif anew or self._state != projection.state():
            stored = projection.stored()
            self._take(stored, sources=[x for x in stored.values() if isinstance(x, Tensor)])
            self._state = projection.state()

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
            self._copies.pop(key, None)
            return new
        old = self._copies.get(key)
        kind = new.shape, new.dtype, new.device
        if old is None or (old.shape, old.dtype, old.device) != kind:
            self._copies[key] = new
            return new
        return old.copy_(new)
