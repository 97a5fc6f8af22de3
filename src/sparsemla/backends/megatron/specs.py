"""Megatron's layer specs with this package's attention."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from sparsemla.backends.megatron.attention import SparseMLAttention


def block_spec(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> Any:  # noqa: ANN401 - Megatron's class
    """The layer specs of a DSA model, with this package's attention.

    Megatron's ``get_transformer_block_with_experimental_attention_variant_spec``, whose arguments
    it has, then :func:`with_sparsemla`. Checkpoints are those of Megatron's own attention: the
    parameters and their names are the same.

    Raises:
        ValueError: ``experimental_attention_variant`` is not ``"dsa"``.
    """
    if config.experimental_attention_variant != "dsa":
        raise ValueError(
            "experimental_attention_variant must be 'dsa', "
            f"got {config.experimental_attention_variant!r}"
        )
    spec = get_transformer_block_with_experimental_attention_variant_spec(
        config, vp_stage=vp_stage, pp_rank=pp_rank
    )
    return with_sparsemla(spec)


def with_sparsemla(spec: Any) -> Any:  # noqa: ANN401 - a tree of Megatron's dataclasses
    """A copy of a spec in which :class:`SparseMLAttention` takes the place of ``DSAttention``.

    Args:
        spec: a ``ModuleSpec``, submodules such as ``TransformerBlockSubmodules``, or a list.

    Raises:
        ValueError: the spec has no ``DSAttention``.
    """
    replaced, count = _replace(spec)
    if not count:
        raise ValueError(f"spec must have a DSAttention, got {type(spec).__name__} without one")
    return replaced


def _replace(spec: Any) -> tuple[Any, int]:  # noqa: ANN401 - as above
    """The spec with our attention, and how many there are; a part without one is kept as it is."""
    if isinstance(spec, list | tuple):
        parts = [_replace(each) for each in spec]
        count = sum(found for _, found in parts)
        return (type(spec)(part for part, _ in parts) if count else spec), count
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec, 0
    if isinstance(spec, ModuleSpec) and spec.module is DSAttention:
        return dataclasses.replace(spec, module=SparseMLAttention), 1
    found = {each.name: _replace(getattr(spec, each.name)) for each in dataclasses.fields(spec)}
    changed = {name: part for name, (part, count) in found.items() if count}
    if not changed:
        return spec, 0
    return dataclasses.replace(spec, **changed), sum(count for _, count in found.values())
