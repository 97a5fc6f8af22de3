"""The reference of every op: short float32 PyTorch with the arguments of the public op.

The reference defines the op, and every implementation is tested against it. Reference functions
have no output arguments, do not bound their memory, and return unrounded float32 in place of
bfloat16.
"""

from sparsemla.reference.branch import decode_branch, prefill_branch
from sparsemla.reference.decode import dense_decode, merge_states, sparse_decode
from sparsemla.reference.gather import entry_slots, gather_dequant, to_slots, visible_slots
from sparsemla.reference.indexer import (
    indexer_scores,
    indexer_scores_paged,
    indexer_topk,
    indexer_topk_blocks,
    indexer_topk_of_blocks,
)
from sparsemla.reference.lists import own_positions, share_lists
from sparsemla.reference.losses import (
    attention_target,
    dense_index_gradients,
    dense_index_loss,
    index_loss,
    select_rows,
    selected_scores,
    selected_scores_backward,
)
from sparsemla.reference.pool import pool_windows
from sparsemla.reference.prefill import dense_prefill, sparse_prefill
from sparsemla.reference.projection import project_groups, project_heads
from sparsemla.reference.quant import (
    append_index_keys,
    fused_indexer_rope_quant,
    fused_rope_rmsnorm_quant,
    prepare_index_queries,
)
from sparsemla.reference.residency import fetch_rows, forget_seats, resolve_rows
from sparsemla.reference.sparse_attention import sparse_attention, sparse_attention_backward
from sparsemla.reference.topk import merge_topk, select_topk

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
