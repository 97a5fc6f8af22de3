"""Recorded selections, to replay them in training: by sequence, and packed. Imports no library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def split_selections(
    selections: Sequence[Mapping[int, Tensor]], prompt_lengths: Sequence[int]
) -> list[dict[int, Tensor]]:
    """The recorded selections of each sequence, from the forwards of ``generate``.

    A training forward over a sequence is to attend to the same tokens as the steps that generated
    it. ``generate`` computes all prompts of a batch first, padding left out, then one token of each
    in every step, also of a sequence that has ended. The last token is not computed: it has no
    list, and no training forward needs it.

    Args:
        selections: :attr:`PagedAttention.selections`, a dict for each forward.
        prompt_lengths: real tokens of each prompt.

    Returns:
        For each sequence a dict: for each layer with an indexer int32 ``[tokens, K]``, positions in
        the sequence, then -1.

    Raises:
        ValueError: a forward has another number of tokens.

    >>> prompts = {0: torch.tensor([[0, -1], [0, 1], [0, -1]])}  # of two tokens, and of one
    >>> step = {0: torch.tensor([[1, 2], [0, 1]])}
    >>> [each[0].tolist() for each in split_selections([prompts, step], [2, 1])]
    [[[0, -1], [0, 1], [1, 2]], [[0, -1], [0, 1]]]
    """
    if not selections:
        raise ValueError("selections must have a forward, got none: record_selections=True")
    sequences: list[dict[int, list[Tensor]]] = [{} for _ in prompt_lengths]
    for place, forward in enumerate(selections):
        lengths = [1] * len(prompt_lengths) if place else list(prompt_lengths)
        for layer_idx, lists in forward.items():
            if lists.shape[0] != sum(lengths):
                raise ValueError(
                    f"selections[{place}][{layer_idx}] must have {sum(lengths)} rows for prompts "
                    f"of {list(prompt_lengths)} tokens, got {lists.shape[0]}"
                )
            for sequence, part in zip(sequences, lists.split(lengths), strict=True):
                sequence.setdefault(layer_idx, []).append(part)
    return [
        {layer_idx: join_lists(parts) for layer_idx, parts in sequence.items()}
        for sequence in sequences
    ]


def pack_selections(sequences: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """The selections of several sequences, in the order of a batch that has them.

    Positions stay those in each sequence: the training forward knows where its sequences start,
    whether they are packed into a row or are rows of a padded batch.

    Args:
        sequences: for each sequence a dict, for each layer ``[tokens, K]``; cut the lists of a
            sequence where it ends: ``{layer: lists[:length] for layer, lists in each.items()}``.

    Returns:
        For each layer ``[T, K]`` with the tokens of all sequences and the largest K.

    Raises:
        ValueError: the sequences have no layers, or different ones.

    >>> pack_selections([{0: torch.tensor([[0]])}, {0: torch.tensor([[0, -1], [0, 1]])}])
    {0: tensor([[ 0, -1],
            [ 0, -1],
            [ 0,  1]])}
    """
    layers = {tuple(sorted(sequence)) for sequence in sequences}
    if len(layers) != 1:
        raise ValueError(f"sequences must have lists of the same layers, got {sorted(layers)}")
    return {
        layer_idx: join_lists([each[layer_idx] for each in sequences]) for layer_idx in layers.pop()
    }


def join_lists(lists: Sequence[Tensor]) -> Tensor:
    """``[tokens, K]`` of all lists, the narrower ones filled with -1."""
    width = max(part.shape[1] for part in lists)
    return torch.cat([F.pad(part, (0, width - part.shape[1]), value=-1) for part in lists])
