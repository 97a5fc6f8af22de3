"""The public ops: check the arguments, select an implementation, launch it. No maths here."""

from sparsemla.ops.branch import decode_branch, prefill_branch
from sparsemla.ops.decode import dense_decode, merge_states, sparse_decode
from sparsemla.ops.gather import entry_slots, gather_dequant, to_slots, visible_slots
from sparsemla.ops.indexer import (
    indexer_scores,
    indexer_scores_paged,
    indexer_topk,
    indexer_topk_blocks,
    indexer_topk_of_blocks,
)
from sparsemla.ops.lists import own_positions, share_lists
from sparsemla.ops.losses import (
    attention_target,
    dense_index_gradients,
    dense_index_loss,
    index_loss,
    select_rows,
    selected_scores,
    selected_scores_backward,
)
from sparsemla.ops.pool import pool_windows
from sparsemla.ops.prefill import dense_prefill, sparse_prefill
from sparsemla.ops.projection import project_groups, project_heads
from sparsemla.ops.quant import (
    append_index_keys,
    fused_indexer_rope_quant,
    fused_rope_rmsnorm_quant,
    prepare_index_queries,
)
from sparsemla.ops.residency import fetch_rows, forget_seats, resolve_rows
from sparsemla.ops.sparse_attention import sparse_attention, sparse_attention_backward
from sparsemla.ops.topk import merge_topk, select_topk

__all__ = [
    "append_index_keys",
    "attention_target",
    "decode_branch",
    "dense_decode",
    "dense_index_gradients",
    "dense_index_loss",
    "dense_prefill",
    "entry_slots",
    "fetch_rows",
    "forget_seats",
    "fused_indexer_rope_quant",
    "fused_rope_rmsnorm_quant",
    "gather_dequant",
    "index_loss",
    "indexer_scores",
    "indexer_scores_paged",
    "indexer_topk",
    "indexer_topk_blocks",
    "indexer_topk_of_blocks",
    "merge_states",
    "merge_topk",
    "own_positions",
    "pool_windows",
    "prefill_branch",
    "prepare_index_queries",
    "project_groups",
    "project_heads",
    "resolve_rows",
    "select_rows",
    "select_topk",
    "selected_scores",
    "selected_scores_backward",
    "share_lists",
    "sparse_attention",
    "sparse_attention_backward",
    "sparse_decode",
    "sparse_prefill",
    "to_slots",
    "visible_slots",
]
