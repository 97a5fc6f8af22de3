"""Caches of models of which some layers have linear attention.

That attention stays transformers' own, and so do its states, which the cache keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from sparsemla.backends.transformers.cache import CACHE, BatchCache, Store, ordinary_tensors

LINEAR = "linear_attention"
"""Type of layers without keys, whose attention stays that of transformers."""


class LinearStates:
    """The states of layers with linear attention, which transformers writes.

    Args:
        layers: of the cache; None for layers with keys.
    """

    def __init__(self, layers: list[LinearAttentionLayer | None]) -> None:
        self.layers = layers

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple(LINEAR for layer in self.layers if layer is not None)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.tensors())

    def _states(self) -> Iterator[dict[int, Tensor | None]]:
        for layer in self.layers:
            if layer is not None:
                yield from (layer.conv_states, layer.recurrent_states)

    def tensors(self) -> Iterator[Tensor]:
        for states in self._states():
            yield from (state for state in states.values() if state is not None)

    @ordinary_tensors
    def keep(self) -> None:
        """Copy states that transformers allocated in inference mode: later steps write them."""
        for states in self._states():
            for key, state in states.items():
                if state is not None and state.is_inference():
                    states[key] = state.clone()

    def clear(self, batch_size: int) -> None:
        """Start with new layers; transformers allocates their states."""
        for layer_idx, layer in enumerate(self.layers):
            if layer is not None:
                self.layers[layer_idx] = LinearAttentionLayer()

    def reserve(self, num_tokens: int) -> None:
        """Do nothing: a state does not grow."""

    def fit(self, lengths: Sequence[int]) -> None:
        """Do nothing: a state does not grow."""

    def select(self, rows: Tensor) -> None:
        for states in self._states():
            for key, state in states.items():
                if state is not None:
                    chosen = state[rows.to(state.device)]
                    in_place = chosen.shape == state.shape  # the addresses are kept
                    states[key] = state.copy_(chosen) if in_place else chosen


class HybridCache(BatchCache):
    """A cache that also keeps the states of layers with linear attention, if there are any.

    Args:
        stores: of the other layers.
        device: device of the attributes.
        linear: for each layer of the model, whether its attention is linear; empty if none is.
        page_size, batch_size, max_length: see :class:`BatchCache`.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        device: torch.device,
        *,
        linear: Sequence[bool] = (),
        page_size: int,
        batch_size: int,
        max_length: int | None,
    ) -> None:
        states = LinearStates([LinearAttentionLayer() if each else None for each in linear])
        super().__init__(
            [*stores, states] if linear else stores,
            device,
            page_size=page_size,
            batch_size=batch_size,
            max_length=max_length,
        )
        self.layers = states.layers
        self._linear = states

    def advance(self, new: Tensor) -> None:
        """Count the columns ``new [B, S]`` of a step, True where they are not padding."""
        super().advance(new)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            self._linear.keep()

    def reset(self) -> None:
        """Forget all columns but keep the pages."""
        super().reset()
        for layer in self.layers:
            if layer is not None:
                layer.reset()

    def _shorten(self, lengths: Tensor) -> None:
        if self.layers and not torch.equal(lengths, self.lengths):
            raise ValueError(
                f"{CACHE} must keep its columns: linear attention has no states of earlier ones; "
                f"{CACHE}.reset() forgets all"
            )
        super()._shorten(lengths)
