"""One forward of an enabled model: its tokens, masks and positions.

A forward with several new columns is planned on the host and packs the real tokens of the batch. A
forward with a single new column is a decode step: it reads no value on the host, and its shapes
depend on the cache's capacity only, so ``torch.compile`` and CUDA graphs can capture it.

Shapes: B rows of the batch, S columns of a step, T tokens of a step (the real ones, or B in a
decode step).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import Cache

from sparsemla.backends.transformers.cache import CACHE, BatchCache

StepType = TypeVar("StepType", bound="Step")


@dataclass(eq=False, kw_only=True)
class Tokens:
    """The real columns of a batch.

    Args:
        tokens: int64 ``[T]``, indices of the real columns among B * S; None for all of them.
    """

    tokens: Tensor | None

    def pick(self, x: Tensor) -> Tensor:
        """The tokens ``[T, n]`` of ``x [B, S, n]``."""
        x = x.flatten(0, 1)
        return x if self.tokens is None else x[self.tokens]

    def place(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Scatter ``x [T, n]`` to the real columns of ``shape`` ``[B, S, n]``; padding gets 0."""
        if self.tokens is None:
            return x.view(*shape)
        return x.new_zeros(*shape).flatten(0, 1).index_copy_(0, self.tokens, x).view(*shape)


@dataclass(eq=False, kw_only=True)
class Step(Tokens):
    """One forward of the model, passed to the attention modules as an extra argument.

    Args:
        cache: every layer writes and reads it.
        decodes: the step has a single column: one token per row of the batch.
        tokens: see :class:`Tokens`.
        selections: the selection of each layer with an indexer, filled if recorded.
    """

    cache: BatchCache
    decodes: bool
    selections: dict[int, Tensor] = field(default_factory=dict)
    _copies: dict[torch.device, Any] = field(default_factory=dict, init=False)

    def on(self: StepType, device: torch.device) -> StepType:
        """The step with its tensors on ``device``, copied once per device."""
        if device == self.cache.device:
            return self
        if device not in self._copies:
            self._copies[device] = _moved(self, device)
        return self._copies[device]


def _moved(value: Any, device: torch.device) -> Any:  # noqa: ANN401 - a field of a step
    """``value`` with its tensors on ``device``, in nested dataclasses too."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {item.name: getattr(value, item.name) for item in fields(value) if item.init}
        return replace(value, **{name: _moved(part, device) for name, part in parts.items()})
    return value


def check_input(name: str, given: Tensor) -> None:
    """Refuse an empty input, or another shape than ``[B, S]`` or ``[B, S, hidden]``."""
    if given.dim() != (2 if name == "input_ids" else 3) or 0 in given.shape:
        shape = "[batch, columns]" if name == "input_ids" else "[batch, columns, hidden_size]"
        raise ValueError(
            f"{name} must have shape {shape} with a row and a column, got {list(given.shape)}"
        )


def check_dropout(modules: Mapping[int, Any]) -> None:
    """Refuse attention modules that drop probabilities in training mode."""
    for layer_idx, module in modules.items():
        if module.training and module.attention_dropout:
            raise ValueError(
                "model must be in eval mode or have an attention_dropout of 0: attention here has "
                f"no dropout, got {module.attention_dropout} in layer {layer_idx}"
            )


def prepare_step(
    prepare: Callable[..., dict[str, Any]],
    input_ids: Tensor,
    next_sequence_length: int | None = None,
    attention_mask: Tensor | None = None,
    is_first_iteration: bool = False,
    **kwargs: object,
) -> dict[str, Any]:
    """The inputs of one of ``generate``'s forwards, as ``prepare`` of transformers makes them.

    After the first iteration ``generate`` only appends ones to the mask. A decode step therefore
    gets the mask of its own column: the past needs no second look, and a mask that does not grow
    compiles once. Since transformers 5.18 a mask without a zero is None from the start.
    """
    cache = kwargs.get(CACHE)
    if next_sequence_length is not None and next_sequence_length < 1:
        # transformers would slice with [:, -0:] and append the whole chat to the cache again.
        held = int(cache.get_seq_length()) if isinstance(cache, Cache) else 0
        raise ValueError(
            f"input_ids must have more columns than the {held} that {CACHE} holds, got "
            f"{held + next_sequence_length}; {CACHE}.crop(-1) forgets the last one"
        )
    decodes = next_sequence_length == 1 and not is_first_iteration
    if decodes and attention_mask is not None and isinstance(cache, BatchCache):
        attention_mask = attention_mask[:, -1:]
    return prepare(
        input_ids,
        next_sequence_length=next_sequence_length,
        attention_mask=attention_mask,
        is_first_iteration=is_first_iteration,
        **kwargs,
    )


def mask_for_generate(*, attention_mask: Tensor | None, **_: object) -> Tensor | None:
    """``generate``'s two-dimensional mask in place of a dense causal one, at the same strides."""
    if attention_mask is None:
        return None
    return attention_mask.clone(memory_format=torch.contiguous_format)


def split_mask(
    attention_mask: object, cache: BatchCache, num_new: int
) -> tuple[Tensor | None, Tensor]:
    """Bool masks of the past columns, None if not given, and of the new columns."""
    device = cache.device
    if attention_mask is None:
        return None, torch.ones(cache.batch_size, num_new, dtype=torch.bool, device=device)
    got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else None
    new, shapes = [cache.batch_size, num_new], ""
    if got != new and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        shapes = f"[batch, new columns] = {new} in a CUDA graph, whose host reads no mask"
    elif got != new:
        whole = [cache.batch_size, int(cache.columns) + num_new]
        if got != whole:
            shapes = f"[batch, columns so far] = {whole} or [batch, new columns] = {new}"
    if shapes or not isinstance(attention_mask, Tensor):
        raise ValueError(
            f"attention_mask must be None or have shape {shapes}, "
            f"got {type(attention_mask).__name__ if got is None else got}"
        )
    mask = attention_mask.to(device) != 0
    return (None if got == new else mask[:, :-num_new]), mask[:, -num_new:]


def check_position_ids(position_ids: Tensor | None, shape: Sequence[int]) -> None:
    """Refuse positions of another shape than ``[B, S]`` or ``[1, S]``."""
    shape = list(shape[:2])
    if position_ids is not None and list(position_ids.shape) not in (shape, [1, shape[1]]):
        raise ValueError(
            f"position_ids must have shape [batch, columns] = {shape}, or one row for all, "
            f"got {list(position_ids.shape)}"
        )


def check_positions(rows: Sequence[Tensor], seen: Sequence[int], *, gaps: bool) -> None:
    """Refuse positions that restart, within a sequence or after its cached tokens.

    Args:
        rows: the positions of each sequence's new tokens, on the host.
        seen: number of cached tokens of each sequence.
        gaps: whether positions may leave numbers out.
    """
    for positions, length in zip(rows, seen, strict=True):
        steps = positions.diff()
        wrong = steps <= 0 if gaps else steps != 1
        if wrong.any() or (positions[:1] < length).any():
            raise ValueError(
                f"position_ids must ascend {'' if gaps else 'by 1 '}in each sequence, from the "
                f"number of its cached tokens on, got {positions.tolist()[:64]} after {length} "
                "tokens; sequences that are packed into a row need attention_mask and "
                f"{CACHE} left out"
            )
