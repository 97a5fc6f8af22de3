"""What an enabled model's handles have in common: they replace methods and restore them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

HandleType = TypeVar("HandleType", bound="Handle")


class Handle:
    """Methods of modules that are replaced until :meth:`disable`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, object]] = []

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

    def __enter__(self: HandleType) -> HandleType:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()
