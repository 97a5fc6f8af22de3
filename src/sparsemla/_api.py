"""Every public name of the package; :mod:`sparsemla` imports them at the first use of one."""
# ruff: noqa: F403, F405

from sparsemla.cache import PagedCache, slots_of
from sparsemla.explanation import Explanation, explain
from sparsemla.formats import (
    BF16_512,
    BF16_576,
    FP4_288,
    FP8_528,
    FP8_584,
    FP8_DS_MLA,
    INDEX_FP8,
    INDEX_MXFP4,
    CacheFormat,
    RowFields,
    bf16_format,
    e4m3_format,
    get_format,
)
from sparsemla.host_cache import HostCache, NumaNodes
from sparsemla.host_context import HostContext
from sparsemla.hot_rows import HotRows, HotSelection, HotStats
from sparsemla.ops import *
from sparsemla.ops.branch import branch_workspace_size
from sparsemla.ops.decode import decode_workspace_size
from sparsemla.ops.lists import SharedLists
from sparsemla.ops.prefill import prefill_workspace_rows
from sparsemla.ops.projection import group_workspace_size, merge_workspace_size
from sparsemla.ops.residency import Resolved, resolve_workspace_size
from sparsemla.parallel import (
    ExchangeWorkspace,
    exchange_rows,
    exchange_states,
    exchange_topk,
)
from sparsemla.plan import (
    Plan,
    PlanBuffers,
    PrefillChunk,
    plan_batch,
    plan_on_device,
    split_decodes_and_prefills,
    split_prefill_chunks,
)
from sparsemla.pooling import Pooling, WindowState
from sparsemla.residency import RowTable
from sparsemla.rope import (
    Yarn,
    cos_sin_table,
    from_freqs_cis,
    mla_softmax_scale,
    rope_frequencies,
    yarn_mscale,
)
from sparsemla.runner import DecodeRunner
from sparsemla.shards import ContextShard
from sparsemla.warmup import Serving, WarmUp, warm_up
from sparsemla.weights import (
    HeadWeight,
    MLALayer,
    absorb_kv_b_proj,
    dequantize_blocks,
    group_o_a_proj,
    projection_weight,
)

__all__ = [
    "BF16_512",
    "BF16_576",
    "FP4_288",
    "FP8_528",
    "FP8_584",
    "FP8_DS_MLA",
    "INDEX_FP8",
    "INDEX_MXFP4",
    "CacheFormat",
    "ContextShard",
    "DecodeRunner",
    "ExchangeWorkspace",
    "Explanation",
    "HeadWeight",
    "HostCache",
    "HostContext",
    "HotRows",
    "HotSelection",
    "HotStats",
    "MLALayer",
    "NumaNodes",
    "PagedCache",
    "Plan",
    "PlanBuffers",
    "Pooling",
    "PrefillChunk",
    "Resolved",
    "RowFields",
    "RowTable",
    "Serving",
    "SharedLists",
    "WarmUp",
    "WindowState",
    "Yarn",
    "absorb_kv_b_proj",
    "append_index_keys",
    "attention_target",
    "bf16_format",
    "branch_workspace_size",
    "cos_sin_table",
    "decode_branch",
    "decode_workspace_size",
    "dense_decode",
    "dense_index_gradients",
    "dense_index_loss",
    "dense_prefill",
    "dequantize_blocks",
    "e4m3_format",
    "entry_slots",
    "exchange_rows",
    "exchange_states",
    "exchange_topk",
    "explain",
    "fetch_rows",
    "forget_seats",
    "from_freqs_cis",
    "fused_indexer_rope_quant",
    "fused_rope_rmsnorm_quant",
    "gather_dequant",
    "get_format",
    "group_o_a_proj",
    "group_workspace_size",
    "index_loss",
    "indexer_scores",
    "indexer_scores_paged",
    "indexer_topk",
    "merge_states",
    "merge_topk",
    "merge_workspace_size",
    "mla_softmax_scale",
    "own_positions",
    "plan_batch",
    "plan_on_device",
    "pool_windows",
    "prefill_branch",
    "prefill_workspace_rows",
    "prepare_index_queries",
    "project_groups",
    "project_heads",
    "projection_weight",
    "resolve_rows",
    "resolve_workspace_size",
    "rope_frequencies",
    "select_rows",
    "select_topk",
    "selected_scores",
    "selected_scores_backward",
    "share_lists",
    "slots_of",
    "sparse_attention",
    "sparse_attention_backward",
    "sparse_decode",
    "sparse_prefill",
    "split_decodes_and_prefills",
    "split_prefill_chunks",
    "to_slots",
    "visible_slots",
    "warm_up",
    "yarn_mscale",
]
