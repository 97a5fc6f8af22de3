"""A typical call of each op, at sizes that a user may set: the calls that ``explain`` explains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsemla import FP8_DS_MLA, INDEX_FP8, ContextShard, PagedCache, Pooling, ops
from sparsemla.formats import CacheFormat
from sparsemla.validation import not_one_of
from sparsemla.weights import HeadWeight
from sparsemla_lab.testing import cases
from sparsemla_lab.testing.cases import Arguments, Draw


@dataclass(frozen=True)
class Typical:
    """The call of an op at typical sizes.

    Args:
        make: the generator of the arguments.
        sizes: its keywords.
        names: its keyword for each size that a user may set: ``cache_format``, ``num_heads``,
            ``topk``, ``dtype``, ``num_tokens``.
    """

    make: Callable[..., Arguments]
    sizes: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


HEADS = {"num_heads": "num_heads"}
DTYPE = {"dtype": "dtype"}
TOKENS = {"num_tokens": "num_tokens"}
TOPK = {"topk": "topk"}
FORMAT = {"cache_format": "format"}
SELECTED = HEADS | DTYPE | TOKENS | TOPK


def _of_requests(make: Callable[..., Arguments]) -> Callable[..., Arguments]:
    """A generator with ``num_tokens`` requests of one token each in place of its lengths."""

    def case(draw: Draw, num_tokens: int, **sizes: object) -> Arguments:
        return make(draw, seq_lens=[4096] * num_tokens, **sizes)

    return case


def _queries(make: Callable[..., Arguments], keys: str) -> Callable[..., Arguments]:
    """A generator with one request of ``num_tokens`` new tokens in place of its lengths."""

    def case(draw: Draw, num_tokens: int, **sizes: object) -> Arguments:
        lens = {"query_lens": [num_tokens], keys: [max(num_tokens, 4096)]}
        return make(draw, **lens, **sizes)

    return case


def _prefill(draw: Draw, cache_format: CacheFormat | None, **sizes: Any) -> Arguments:  # noqa: ANN401
    if cache_format is None:
        return cases.sparse_prefill_case(draw, num_rows=4096, **sizes)
    sizes["batch"] = sizes.pop("num_tokens")
    return cases.paged_prefill_case(draw, format=cache_format, **sizes)


def _merge(draw: Draw, num_tokens: int, num_heads: int, dtype: torch.dtype) -> Arguments:
    outs = draw.normal(2, num_tokens, num_heads, 512, dtype=dtype)
    return {"outs": outs, "lses": draw.normal(2, num_tokens, num_heads)}


def _branch(draw: Draw, num_tokens: int, num_heads: int, **sizes: Any) -> Arguments:  # noqa: ANN401
    layer = cases.mla_layer(draw, num_heads=num_heads, block=(128, 128))
    ones, seq_lens = [1] * num_tokens, [400] * num_tokens
    return cases.branch_case(draw, layer, query_lens=ones, seq_lens=seq_lens, **sizes)


_LATENT = FORMAT | HEADS | DTYPE | TOKENS
_WRITE = {"format": FP8_DS_MLA, "num_tokens": 16, "num_heads": 128}
_KEYS = {"format": INDEX_FP8, "num_tokens": 16}
_LOSS = {"num_tokens": 64, "num_rows": 128, "num_heads": 128}
_BRANCH = {"format": FP8_DS_MLA, "num_heads": 128, "num_tokens": 4, "topk": None}
_DENSE_LOSS = Typical(
    cases.dense_index_loss_case,
    {"num_tokens": 64, "num_heads": 16, "num_index_heads": 64, "index_dim": 128},
    HEADS | DTYPE | TOKENS,
)
_SCORES = {"num_tokens": 64, "num_heads": 64, "topk": 128}
_CANDIDATES = {
    "num_tokens": 64,
    "num_heads": 32,
    "topk": 512,
    "format": INDEX_FP8,
    "block_size": 8,
    "exact": False,
}

TYPICAL = {
    "sparse_decode": Typical(
        cases.sparse_decode_case,
        {"format": FP8_DS_MLA, "num_heads": 128, "topk": 2048, "batch": 1},
        FORMAT | HEADS | DTYPE | TOPK | {"num_tokens": "batch"},
    ),
    "dense_decode": Typical(
        _of_requests(cases.dense_decode_case),
        {"format": FP8_DS_MLA, "num_heads": 128, "num_tokens": 1},
        _LATENT,
    ),
    "sparse_prefill": Typical(
        _prefill,
        {"cache_format": None, "num_heads": 128, "topk": 2048, "num_tokens": 64},
        {"cache_format": "cache_format", **SELECTED},
    ),
    "sparse_attention": Typical(
        cases.sparse_attention_case,
        {"num_heads": 128, "topk": 128, "num_tokens": 64},
        SELECTED,
    ),
    "sparse_attention_backward": Typical(
        cases.sparse_attention_backward_case,
        {"num_heads": 128, "topk": 128, "num_tokens": 64},
        SELECTED,
    ),
    "dense_prefill": Typical(
        _queries(cases.dense_prefill_case, "kv_lens"),
        {"num_heads": 16, "num_tokens": 64},
        HEADS | DTYPE | TOKENS,
    ),
    "merge_states": Typical(
        _merge,
        {"num_heads": 128, "num_tokens": 16, "dtype": torch.float32},
        HEADS | DTYPE | TOKENS,
    ),
    "fused_rope_rmsnorm_quant": Typical(cases.fused_rope_rmsnorm_quant_case, _WRITE, _LATENT),
    "append_index_keys": Typical(cases.append_index_keys_case, _KEYS, FORMAT | DTYPE | TOKENS),
    "prepare_index_queries": Typical(
        cases.prepare_index_queries_case, _KEYS | {"num_heads": 64}, _LATENT
    ),
    "fused_indexer_rope_quant": Typical(
        cases.fused_indexer_rope_quant_case, _KEYS | {"num_heads": 64}, _LATENT
    ),
    "pool_windows": Typical(
        cases.pool_windows_case, {"format": FP8_DS_MLA, "pooling": Pooling(4, True)}, FORMAT | DTYPE
    ),
    "to_slots": Typical(
        cases.to_slots_case, {"topk": 2048, "num_tokens": 16}, DTYPE | TOKENS | TOPK
    ),
    "entry_slots": Typical(cases.entry_slots_case, {}, DTYPE),
    "visible_slots": Typical(cases.visible_slots_case, {}, DTYPE),
    "gather_dequant": Typical(
        cases.gather_dequant_case, {"format": FP8_DS_MLA, "seq_lens": [500, 300]}, FORMAT
    ),
    "share_lists": Typical(
        cases.share_lists_case, {"topk": 2048, "num_tokens": 64}, DTYPE | TOKENS | TOPK
    ),
    "own_positions": Typical(
        cases.own_positions_case,
        {"topk": 2048, "num_tokens": 16, "num_positions": 4096, "shard": ContextShard(0, 4, 64)},
        DTYPE | TOKENS | TOPK,
    ),
    "resolve_rows": Typical(
        cases.resolve_rows_case,
        {"topk": 2048, "spare": 2048, "contexts": [9000] * 4, "query_lens": [1] * 4},
        DTYPE | TOPK,
    ),
    "fetch_rows": Typical(
        cases.fetch_rows_case,
        {"format": FP8_DS_MLA, "topk": 2048, "num_tokens": 4},
        FORMAT | DTYPE | TOKENS | TOPK,
    ),
    "forget_seats": Typical(cases.forget_seats_case, {}, DTYPE),
    "indexer_scores": Typical(
        cases.indexer_scores_case,
        {"num_tokens": 64, "num_keys": 512, "num_heads": 64},
        HEADS | TOKENS,
    ),
    "indexer_scores_paged": Typical(
        _of_requests(cases.indexer_scores_paged_case),
        {"num_tokens": 1, "num_heads": 64, "format": INDEX_FP8},
        FORMAT | HEADS | TOKENS,
    ),
    "indexer_topk": Typical(
        _queries(cases.indexer_topk_case, "seq_lens"),
        {"num_tokens": 64, "num_heads": 64, "topk": 2048, "format": INDEX_FP8, "exact": False},
        FORMAT | HEADS | TOKENS | TOPK,
    ),
    "indexer_topk_blocks": Typical(
        _queries(cases.indexer_topk_blocks_case, "seq_lens"),
        _CANDIDATES | {"topk_blocks": 2048},
        FORMAT | HEADS | TOKENS | TOPK,
    ),
    "indexer_topk_of_blocks": Typical(
        _queries(cases.indexer_topk_of_blocks_case, "seq_lens"),
        _CANDIDATES | {"num_blocks": 2048},
        FORMAT | HEADS | TOKENS | TOPK,
    ),
    "select_topk": Typical(
        cases.select_topk_case,
        {"num_rows": 16, "num_cols": 4096, "topk": 2048},
        DTYPE | TOPK | {"num_tokens": "num_rows"},
    ),
    "merge_topk": Typical(
        cases.merge_topk_case,
        {"num_rows": 16, "width": 64, "topk": 64},
        DTYPE | TOPK | {"num_tokens": "num_rows"},
    ),
    "project_heads": Typical(
        cases.project_heads_case,
        {"num_tokens": 16, "num_heads": 128, "block": (128, 128)},
        HEADS | TOKENS,
    ),
    "project_groups": Typical(
        cases.project_groups_case,
        {"num_tokens": 16, "num_heads": 16, "num_groups": 2, "rows": 256, "block": (128, 128)},
        HEADS | TOKENS,
    ),
    "selected_scores": Typical(cases.selected_scores_case, _SCORES, SELECTED),
    "selected_scores_backward": Typical(cases.selected_scores_backward_case, _SCORES, SELECTED),
    "attention_target": Typical(cases.attention_target_case, _LOSS | {"topk": 128}, SELECTED),
    "dense_index_loss": _DENSE_LOSS,
    "dense_index_gradients": _DENSE_LOSS,
    "decode_branch": Typical(_branch, _BRANCH, FORMAT | HEADS | TOKENS | TOPK),
    "prefill_branch": Typical(_branch, _BRANCH, FORMAT | HEADS | TOKENS | TOPK),
}
"""The typical call of each op and branch."""


def typical_call(op: str, device: str, **sizes: object) -> Arguments:
    """The arguments of a typical call of an op.

    Args:
        op: a key of :data:`TYPICAL`.
        device: device of the tensors.
        sizes: sizes in place of the typical ones; None for the typical one.

    Raises:
        ValueError: there is no such op, or it has no such size.
    """
    if op not in TYPICAL:
        raise not_one_of("op", TYPICAL, op)
    typical = TYPICAL[op]
    given = {name: value for name, value in sizes.items() if value is not None}
    for name in given:
        if name not in typical.names:
            known = ", ".join(typical.names) or "nothing"
            raise ValueError(f"{op} has no {name} to set, but {known}")
    chosen = {typical.names[name]: value for name, value in given.items()}
    return typical.make(Draw(0, device), **typical.sizes | chosen)


def describe_call(arguments: Arguments) -> list[str]:
    """A line for each argument of a call that is not None: its shape and dtype, or its value."""
    return [f"{name}: {_describe(value)}" for name, value in arguments.items() if value is not None]


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, PagedCache):
        return f"{value.format.name}, {value.num_pages} pages of {value.page_size} rows"
    if isinstance(value, HeadWeight):
        scales = "" if value.scale is None else f", scales of blocks {list(value.scale_block)}"
        return _describe(value.data) + scales
    if isinstance(value, (bool, int, float, str)):
        return str(value)
    return type(value).__name__


def function_of(op: str) -> Callable[..., object]:
    """The public function of an op."""
    function: Callable[..., object] = getattr(ops, op)
    return function
