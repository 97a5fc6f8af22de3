"""One forward of an enabled model: its masks, its positions, its plan.

A forward with several new columns is planned on the host and packs the real tokens of the batch. A
forward with a single new column is a decode step: it reads no value on the host, and its shapes
depend on the cache's capacity only, so ``torch.compile`` and CUDA graphs can capture it.

Shapes: B rows of the batch, S columns of a step, T tokens of a step (the real ones, or B in a
decode step), R RoPE dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from sparsemla.backends.transformers.cache import LatentCache
from sparsemla.plan import Plan, plan_batch


@dataclass(eq=False)
class Step:
    """One forward of the model, passed to the attention modules as an extra argument.

    Args:
        cache: every layer writes and reads it.
        plan: slots and requests of the tokens; its positions are rows of the step's RoPE table.
        decodes: the step has a single column: one token per row of the batch.
        tokens: int64 ``[T]``, indices of the real columns among B * S; None for all of them.
        selections: the selection of each layer with an indexer, filled if recorded.
    """

    cache: LatentCache
    plan: Plan
    decodes: bool
    tokens: Tensor | None
    selections: dict[int, Tensor] = field(default_factory=dict)
    _rotation: tuple[Tensor, Tensor, Tensor] | None = None
    _copies: dict[torch.device, Step] = field(default_factory=dict)

    def on(self, device: torch.device) -> Step:
        """The step with its tensors on ``device``, copied once per device."""
        if device == self.plan.page_table.device:
            return self
        if device not in self._copies:
            tokens = None if self.tokens is None else self.tokens.to(device)
            self._copies[device] = Step(
                self.cache, _plan_on(self.plan, device), self.decodes, tokens, self.selections
            )
        return self._copies[device]

    def pick(self, x: Tensor) -> Tensor:
        """The tokens ``[T, n]`` of ``x [B, S, n]``."""
        x = x.flatten(0, 1)
        return x if self.tokens is None else x[self.tokens]

    def place(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Scatter ``x [T, n]`` to the real columns of ``shape`` ``[B, S, n]``; padding gets 0."""
        if self.tokens is None:
            return x.view(*shape)
        return x.new_zeros(*shape).flatten(0, 1).index_copy_(0, self.tokens, x).view(*shape)

    def rotation(self, embeddings: tuple[Tensor, Tensor], batch_size: int) -> tuple[Tensor, ...]:
        """The model's cos and sin ``[T, R]``, and float32 ``[T, R]``, cos half then sin half."""
        if self._rotation is None:  # all layers of a device share the first layer's
            cos, sin = (self.pick(part.expand(batch_size, -1, -1)) for part in embeddings)
            half = cos.shape[-1] // 2  # transformers' cos and sin hold each angle twice
            table = torch.cat([cos[:, :half], sin[:, :half]], dim=-1).float()
            self._rotation = cos, sin, table
        return self._rotation


def _plan_on(plan: Plan, device: torch.device) -> Plan:
    """A copy of a plan without prefill chunks, with its tensors on ``device``."""
    moved: dict[str, Any] = {}
    for item in fields(plan):
        value = getattr(plan, item.name)
        if isinstance(value, Tensor):
            moved[item.name] = value.to(device)
    return replace(plan, **moved)


def check_input(name: str, given: Tensor) -> None:
    """Refuse an empty input, or another shape than ``[B, S]`` or ``[B, S, hidden]``."""
    if given.dim() != (2 if name == "input_ids" else 3) or 0 in given.shape:
        shape = "[batch, columns]" if name == "input_ids" else "[batch, columns, hidden_size]"
        raise ValueError(
            f"{name} must have shape {shape} with a row and a column, got {list(given.shape)}"
        )


def prepare_step(
    prepare: Callable[..., dict[str, Any]],
    input_ids: Tensor,
    next_sequence_length: int | None = None,
    past_key_values: Cache | None = None,
    attention_mask: Tensor | None = None,
    is_first_iteration: bool = False,
    **kwargs: object,
) -> dict[str, Any]:
    """The inputs of one of ``generate``'s forwards, as ``prepare`` of transformers makes them.

    After the first iteration ``generate`` only appends ones to the mask. A decode step therefore
    gets the mask of its own column: the past needs no second look, and a mask that does not grow
    compiles once. Since transformers 5.18 a mask without a zero is None from the start.
    """
    if next_sequence_length is not None and next_sequence_length < 1:
        # transformers would slice with [:, -0:] and append the whole chat to the cache again.
        held = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        raise ValueError(
            f"input_ids must have more columns than the {held} that past_key_values holds, got "
            f"{held + next_sequence_length}; past_key_values.crop(-1) forgets the last one"
        )
    decodes = next_sequence_length == 1 and not is_first_iteration
    if decodes and attention_mask is not None and isinstance(past_key_values, LatentCache):
        attention_mask = attention_mask[:, -1:]
    return prepare(
        input_ids,
        next_sequence_length=next_sequence_length,
        past_key_values=past_key_values,
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
    attention_mask: object, cache: LatentCache, num_new: int
) -> tuple[Tensor | None, Tensor]:
    """Bool masks of the past columns, None if not given, and of the new columns."""
    device = cache.page_table.device
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


def check_positions(position_ids: Tensor | None, seen: Tensor, new: Tensor) -> None:
    """Refuse positions that restart, within a row (packed sequences) or after its ``seen`` tokens.

    Args:
        position_ids: ``[B, S]`` or ``[1, S]``; None for transformers' own.
        seen: ``[B]``, cached tokens of each row.
        new: bool ``[B, S]``, which columns are not padding.
    """
    if position_ids is None:
        return
    rows = position_ids.expand(new.shape).cpu()
    for row, length, real in zip(rows, seen.tolist(), new.cpu(), strict=True):
        positions = row[real]
        if (positions.diff() <= 0).any() or (positions[:1] < length).any():
            raise ValueError(
                "position_ids must ascend in each row of the batch, from the number of its cached "
                f"tokens on, got {positions.tolist()[:64]} after {length} tokens"
            )


def packed_step(cache: LatentCache, new: Tensor) -> Step:
    """A step over the real columns of ``new [B, S]``, planned on the host."""
    new = new.cpu()
    query_lens = new.sum(1)
    plan = plan_batch(
        query_lens,
        cache.lengths.cpu() + query_lens,
        cache.page_table,
        page_size=cache.page_size,
        workspace_rows=None,
        require_uniform=False,
    )
    # The model's positions may count padding; the step's RoPE table has one row per token.
    device = cache.page_table.device
    plan = replace(plan, positions=torch.arange(plan.num_tokens, device=device))
    tokens = None if new.all() else new.flatten().nonzero()[:, 0].to(device)
    return Step(cache, plan, decodes=False, tokens=tokens)


def decode_step(cache: LatentCache, new: Tensor) -> Step:
    """A step over one column ``new [B, 1]``; the next real token overwrites padding's slot."""
    pages = cache.page_table.gather(1, (cache.lengths // cache.page_size).long()[:, None])[:, 0]
    requests = cache.rows[:-1]
    plan = Plan(
        num_requests=cache.batch_size,
        num_tokens=cache.batch_size,
        num_decodes=cache.batch_size,
        num_prefills=0,
        num_decode_tokens=cache.batch_size,
        num_prefill_tokens=0,
        decode_query_len=1,
        max_query_len=1,
        max_seq_len=cache.capacity,
        max_context_len=cache.capacity - 1,
        page_size=cache.page_size,
        input_row_offsets=cache.rows,
        seq_lens=cache.lengths + new[:, 0],
        page_table=cache.page_table,
        positions=requests,  # rows of the step's RoPE table
        slot_mapping=(pages * cache.page_size + cache.lengths % cache.page_size).long(),
        request_ids=requests,
        prefill_request_ids=None,
        workspace_starts=None,
        prefill_chunks=(),
    )
    return Step(cache, plan, decodes=True, tokens=None)
