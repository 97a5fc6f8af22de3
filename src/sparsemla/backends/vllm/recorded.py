"""Layers whose selections are recorded, for :mod:`sparsemla.backends.vllm.recording`.

Layers share one buffer of selected positions. Where selections are recorded, each one with an
indexer copies its own to a tensor that outlives the step, also in captured graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.model_executor.models.utils import extract_layer_index

from sparsemla.backends.recorder import dtype_for
from sparsemla.backends.vllm.settings import RecordsConfig


def reserve_selections(config: VllmConfig, cache: Any, buffer: Tensor) -> None:  # noqa: ANN401
    """Let a layer have room for its selections, if they are recorded on this rank.

    One tensor-parallel rank records, as all have the same lists. The layers of a draft model are
    behind those of the model, and are not recorded.

    Args:
        config: of the engine.
        cache: vLLM's index cache of the layer, which gets an attribute ``selections``.
        buffer: int32 ``[max_num_batched_tokens, topk]``, of selected positions.
    """
    model = config.model_config
    if (
        RecordsConfig.of(config) is None
        or get_tp_group().rank_in_group > 0
        or extract_layer_index(cache.prefix) >= model.hf_text_config.num_hidden_layers
    ):
        return
    # vLLM's profiling counts it.
    cache.selections = torch.empty_like(buffer, dtype=dtype_for(model.max_model_len))


def keep_selection(cache: Any, chosen: Tensor) -> None:  # noqa: ANN401 - see above
    """Copy the selection of a step, if the layer is recorded."""
    kept = getattr(cache, "selections", None)
    if kept is not None:
        kept[: len(chosen)].copy_(chosen)


def recorded_layers(config: VllmConfig) -> Iterator[tuple[int, str, Any]]:
    """The number, the name in the metadata of a step, and the index cache of recorded layers."""
    for name, layer in config.compilation_config.static_forward_context.items():
        if hasattr(layer, "selections"):
            yield extract_layer_index(name), name, layer
