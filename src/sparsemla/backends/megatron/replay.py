"""Selections of a rollout, carried to Megatron's attention layers by the parameters of a batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

CARRIED = "_sparsemla_selections"
"""Attribute of ``PackedSeqParams``, which reaches every layer, also when a layer runs again."""


def replay_selections(
    packed_seq_params: PackedSeqParams, selections: Mapping[int, Tensor]
) -> PackedSeqParams:
    """Let the layers attend to recorded selections in the forward with these parameters.

    The indexers select nothing then; with a loss they still learn, from the recorded lists. Lists
    hold positions in each token's own sequence, so those of a rollout fit wherever the sequence
    lies in the batch. An entry that its token cannot see is masked.

    Args:
        packed_seq_params: of format ``thd``; changed and returned.
        selections: for each layer with an indexer, counted from 0 over all pipeline stages, int32
            or int64 ``[T, K]``: ascending positions, then -1. A row for each token of the whole
            batch, of all context-parallel ranks and with the padding of ``cu_seqlens_q_padded``.

    Returns:
        packed_seq_params.

    Raises:
        ValueError: parameters of another format, or lists of another dtype or rank, or of different
            numbers of tokens.
    """
    if packed_seq_params.qkv_format != "thd":
        raise ValueError(
            "packed_seq_params must have a qkv_format of 'thd' to replay selections, "
            f"got {packed_seq_params.qkv_format!r}"
        )
    for layer_idx, lists in selections.items():
        if lists.dim() != 2 or lists.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"selections[{layer_idx}] must be int32 or int64 [T, K], "
                f"got {lists.dtype} {list(lists.shape)}"
            )
    tokens = {lists.shape[0] for lists in selections.values()}
    if len(tokens) != 1:
        raise ValueError(
            f"selections must have lists of one number of tokens, got {sorted(tokens)}"
        )
    setattr(packed_seq_params, CARRIED, dict(selections))
    return packed_seq_params


def replayed_lists(packed_seq_params: PackedSeqParams | None, layer_idx: int) -> Tensor | None:
    """The recorded lists of a layer, or None if nothing is replayed."""
    selections: dict[int, Tensor] | None = getattr(packed_seq_params, CARRIED, None)
    if selections is None:
        return None
    if layer_idx not in selections:
        raise ValueError(
            f"selections must have a list for layer {layer_idx}, got {sorted(selections)}"
        )
    return selections[layer_idx]
