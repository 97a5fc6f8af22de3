"""What an enabled model's handles have in common: they replace methods and restore them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from transformers import PreTrainedModel

HandleType = TypeVar("HandleType", bound="Handle")


class Handle(ABC):
    """Methods of modules that are replaced until :meth:`disable`.

    Args:
        model: as it was given to :func:`enable`.
        base: its part with the layers.
    """

    def __init__(self, model: PreTrainedModel, base: PreTrainedModel) -> None:
        self._model = model
        self._base = base
        self._before: list[tuple[Any, str, object]] = []
        self._blocks = 0

    @property
    @abstractmethod
    def options(self) -> Mapping[str, object]:
        """The arguments of :func:`enable` that give this handle."""

    @abstractmethod
    def _install(self) -> None:
        """Replace the methods of a model that is not enabled."""

    def _replace(self, module: object, name: str, method: Callable[..., object]) -> None:
        """Hide a method of the module's class by an instance attribute."""
        self._before.append((module, name, vars(module).get(name)))
        setattr(module, name, method)

    def disable(self) -> None:
        """Restore transformers' own attention; a second call does nothing."""
        for module, name, method in reversed(self._before):
            delattr(module, name)
            if method is not None:
                setattr(module, name, method)
        self._before = []

    def _title(self) -> str:
        state = "" if self._before else ", disabled"
        return f"{type(self).__name__} of {type(self._model).__name__}{state}"

    def __enter__(self: HandleType) -> HandleType:
        self._blocks += 1
        return self

    def __exit__(self, *exception: object) -> None:
        self._blocks -= 1
        if not self._blocks:
            self.disable()


def handle_of(base: PreTrainedModel) -> Handle | None:
    """The handle of an enabled model, by its part with the layers."""
    owner = getattr(vars(base).get("forward"), "__self__", None)
    return owner if isinstance(owner, Handle) else None


def renew(
    model: PreTrainedModel,
    base: PreTrainedModel,
    options: Mapping[str, object],
    make: Callable[[], HandleType],
) -> HandleType:
    """The model's handle if it has these options, else a new one in its place.

    Raises:
        TypeError, ValueError: of ``make``; the model is enabled through another part of it, or
            within a ``with`` block of a handle with other options.
    """
    current: Any = handle_of(base)
    if current is not None and current._model is not model:
        raise ValueError(
            f"model must be the {type(current._model).__name__} that is enabled already, got a "
            f"{type(model).__name__} with the same layers"
        )
    if current is not None and current.options == options:
        return current
    if current is not None and current._blocks:
        raise ValueError(
            f"model must keep its options within a with block, got {_changes(current, options)}"
        )
    handle = make()
    if current is not None:
        current.disable()
    handle._install()
    return handle


def _changes(current: Handle, options: Mapping[str, object]) -> str:
    before = current.options
    return ", ".join(
        f"{name}={value!r}"
        for name, value in options.items()
        if name not in before or before[name] != value
    )
