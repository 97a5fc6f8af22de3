"""Sparse multi-head latent attention for PyTorch: caches, indexer, top-k, attention, planner.

Importing the package touches no GPU and compiles nothing.
"""

from sparsemla.cache import PagedCache, slots_of
from sparsemla.dispatch import Explanation, Problem, explain
from sparsemla.formats import (
    BF16_512,
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    INDEX_FP8,
    CacheFormat,
    RowFields,
    bf16_format,
    e4m3_format,
    get_format,
)
from sparsemla.ops import (
    append_index_keys,
    decode_branch,
    dense_decode,
    dense_prefill,
    fused_indexer_rope_quant,
    fused_rope_rmsnorm_quant,
    gather_dequant,
    indexer_scores,
    indexer_scores_paged,
    indexer_topk,
    merge_states,
    merge_topk,
    prefill_branch,
    prepare_index_queries,
    project_heads,
    select_topk,
    sparse_decode,
    sparse_prefill,
    to_slots,
)
from sparsemla.ops.branch import branch_workspace_size
from sparsemla.ops.decode import decode_workspace_size
from sparsemla.ops.prefill import prefill_workspace_rows
from sparsemla.ops.projection import merge_workspace_size
from sparsemla.plan import (
    Plan,
    PlanBuffers,
    PrefillChunk,
    plan_batch,
    plan_on_device,
    split_decodes_and_prefills,
    split_prefill_chunks,
)
from sparsemla.rope import (
    Yarn,
    cos_sin_table,
    from_freqs_cis,
    mla_softmax_scale,
    rope_frequencies,
    yarn_mscale,
)
from sparsemla.runner import DecodeRunner
from sparsemla.weights import (
    HeadWeight,
    MLALayer,
    absorb_kv_b_proj,
    dequantize_blocks,
    projection_weight,
)

__version__ = "0.1.0"

__all__ = [
    "BF16_512",
    "BF16_576",
    "FP8_584",
    "FP8_DS_MLA",
    "INDEX_FP8",
    "CacheFormat",
    "DecodeRunner",
    "Explanation",
    "HeadWeight",
    "MLALayer",
    "PagedCache",
    "Plan",
    "PlanBuffers",
    "PrefillChunk",
    "Problem",
    "RowFields",
    "Yarn",
    "absorb_kv_b_proj",
    "append_index_keys",
    "bf16_format",
    "branch_workspace_size",
    "cos_sin_table",
    "decode_branch",
    "decode_workspace_size",
    "dense_decode",
    "dense_prefill",
    "dequantize_blocks",
    "e4m3_format",
    "explain",
    "from_freqs_cis",
    "fused_indexer_rope_quant",
    "fused_rope_rmsnorm_quant",
    "gather_dequant",
    "get_format",
    "indexer_scores",
    "indexer_scores_paged",
    "indexer_topk",
    "merge_states",
    "merge_topk",
    "merge_workspace_size",
    "mla_softmax_scale",
    "plan_batch",
    "plan_on_device",
    "prefill_branch",
    "prefill_workspace_rows",
    "prepare_index_queries",
    "project_heads",
    "projection_weight",
    "rope_frequencies",
    "select_topk",
    "slots_of",
    "sparse_decode",
    "sparse_prefill",
    "split_decodes_and_prefills",
    "split_prefill_chunks",
    "to_slots",
    "yarn_mscale",
]
