"""What the plugin replaces in SGLang, and the checks that it can and that it did."""

from __future__ import annotations

import hashlib
import inspect
import logging
import pkgutil
from collections.abc import Callable
from inspect import Parameter
from typing import Any, NamedTuple

from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs

from sparsemla.backends.sglang.attention import (
    check_tail,
    compute_flashmla_metadata,
    forward_fa3,
    forward_flashmla_kv,
    forward_flashmla_sparse,
    prepare,
    resolve_tail,
)
from sparsemla.backends.sglang.scores import (
    mqa_logits,
    num_sms,
    paged_mqa_logits,
    paged_mqa_logits_metadata,
)
from sparsemla.backends.sglang.settings import refuse
from sparsemla.backends.sglang.topk import (
    build_pool_plan,
    build_topk_v2_plan,
    select_pools,
    topk_transform,
)

logger = logging.getLogger(__name__)

BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
TOPK = "sglang.srt.layers.attention.dsa.dsa_topk_backend.DSATopKBackend"
INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer"
TAILS = "sglang.srt.layers.attention.dsa.dsa_backend_kpool.DeepseekSparseAttnBackendKPoolMixin"
POOLS = "sglang.srt.layers.attention.dsa.kpool_fp8_index"
POOLED_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer_kpool.IndexerKPool"
SCORES = "sglang.srt.layers.attention.dsa.utils"
ARGUMENTS = "sglang.srt.server_args.ServerArgs"


class Hook(NamedTuple):
    """A function of SGLang and ours.

    Attributes:
        target: dotted path in SGLang.
        signature: its signature without annotations.
        body: first digits of the SHA-256 of its source, which was read beside ours.
        function: replaces it, runs around it, with itself as the first argument, or after it, with
            its result as the first argument.
        kind: REPLACE, AROUND or AFTER.
    """

    target: str
    signature: str
    body: str
    function: Callable[..., Any]
    kind: HookType = HookType.REPLACE


def check_settings(result: None, self: ServerArgs) -> None:
    """After ``check_server_args``: refuse settings that the plugin does not support.

    SGLang checks its arguments after it has loaded all plugins, and before it starts other
    processes.

    Raises:
        RuntimeError: another plugin has replaced our functions.
        ValueError: with the reason why the settings are not supported.
    """
    check_installed()
    reason = refuse(resolving_view(self), model_config_of(self))
    if reason is not None:
        raise ValueError(f"sparsemla: {reason}; otherwise remove sparsemla from SGLANG_PLUGINS")


HOOKS = (
    Hook(
        f"{BACKEND}._forward_flashmla_kv",
        "(self, q_all, kv_cache, v_head_dim, sm_scale, layer, metadata, page_table_1)",
        "5f7786995e6f003c",
        forward_flashmla_kv,
    ),
    Hook(
        f"{BACKEND}._forward_flashmla_sparse",
        "(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, topk_length=None, "
        "attn_sink=None)",
        "0e9ad8a5bf3797e4",
        forward_flashmla_sparse,
    ),
    Hook(
        f"{BACKEND}._forward_fa3",
        "(self, q_rope, kv_cache, v_head_dim, q_nope, page_table, cache_seqlens, cu_seqlens_q, "
        "cu_seqlens_k, max_seqlen_q, sm_scale, logit_cap, page_size)",
        "56d82e9d9cc15a7b",
        forward_fa3,
    ),
    Hook(
        f"{BACKEND}._compute_flashmla_metadata",
        "(self, cache_seqlens, seq_len_q)",
        "93c8e8fd611b27a6",
        compute_flashmla_metadata,
    ),
    Hook(
        f"{BACKEND}._build_topk_v2_plan",
        "(self, seqlens_expanded)",
        "a9f5f841bc9ea438",
        build_topk_v2_plan,
    ),
    Hook(
        f"{TOPK}.topk_transform",
        "(self, logits, lengths, topk, topk_transform_method, attn_metadata, "
        "cu_seqlens_q_topk=None, topk_indices_offset=None, row_starts=None, batch_idx_list=None, "
        "force_unfused_topk=False)",
        "0cf1cb1d264246fa",
        topk_transform,
    ),
    Hook(
        f"{TAILS}._check_kpool_tail_backend",
        "(self, topk_indices, dsa_impl, phase)",
        "b4a0c5423c3f17d0",
        check_tail,
    ),
    Hook(
        f"{TAILS}._resolve_kpool_tail_backend",
        "(self, topk_indices, dsa_impl)",
        "48a144706d45efe3",
        resolve_tail,
    ),
    Hook(
        f"{POOLS}.topk_from_pooled_history_logits",
        "(logits, group_lengths, kpool, topk, page_table=None, topk_offsets=None, seq_lens=None, "
        "row_starts=None, out_rows=None, page_table_row_index=None, topk_v2_plan=None)",
        "8038970eb1a927c4",
        select_pools,
    ),
    Hook(
        f"{POOLS}.build_kpool_topk_v2_plan",
        "(pool_lens)",
        "460c2a6557e4c239",
        build_pool_plan,
    ),
    Hook(
        f"{SCORES}.resolve_fp8_mqa_logits_fn",
        "()",
        "2527e796e61445d5",
        mqa_logits,
        HookType.AROUND,
    ),
    Hook(
        f"{SCORES}.resolve_fp8_paged_mqa_logits_fn",
        "()",
        "62fd710b06b65be0",
        paged_mqa_logits,
        HookType.AROUND,
    ),
    Hook(
        f"{SCORES}.resolve_paged_mqa_logits_metadata_fn",
        "()",
        "bf996fe9f8974440",
        paged_mqa_logits_metadata,
        HookType.AROUND,
    ),
    Hook(
        f"{SCORES}.resolve_num_sms",
        "()",
        "bfd83c0f3620e2ce",
        num_sms,
        HookType.AROUND,
    ),
    Hook(
        f"{BACKEND}.__init__",
        "(self, model_runner, skip_prefill=False, speculative_step_id=0, topk=0, "
        "speculative_num_steps=0, seed_dsa_topk_from_draft_extend=False)",
        "8bc55d265b9da733",
        prepare,
        HookType.AFTER,
    ),
    Hook(
        f"{ARGUMENTS}.check_server_args",
        "(self)",
        "84a23bc7327d0246",
        check_settings,
        HookType.AFTER,
    ),
)
"""All functions of SGLang 0.5.23 that the plugin touches.

For another version of SGLang, read each function that has changed, change ``VERSION`` and this
table until ``tests/test_sglang.py`` passes, and read what else our functions use of SGLang's
classes.
"""

CALLERS = {
    f"{BACKEND}.forward_extend": "37843e98f43257bd",
    f"{BACKEND}.forward_decode": "80c9f3493d3d2166",
    f"{INDEXER}._get_topk_paged": "311411cd487351aa",
    f"{INDEXER}._get_topk_ragged": "34aecba1fd46538f",
    f"{POOLED_INDEXER}._full_topk_for_short_sequence": "6c8343f7b3f8a59a",
    f"{POOLED_INDEXER}._get_topk_paged": "6cea20ed445f406e",
    f"{POOLED_INDEXER}._get_topk_ragged_kpool": "b9df03c6890c6b4b",
    f"{POOLED_INDEXER}._kpool_topk_by_row_chunks": "b9be91d91f4e4276",
    f"{POOLED_INDEXER}._topk_from_kpool_logits": "b2496ae8b91857f9",
}
"""Bodies of functions that choose a replaced method and its arguments."""


def install() -> None:
    """Register and apply all hooks, and log the replaced functions.

    Raises:
        RuntimeError: a signature or a body is not that of the table, or a hook did not take.
    """
    bodies = dict(CALLERS)
    for hook in HOOKS:
        found = signature(pkgutil.resolve_name(hook.target))
        if found != hook.signature:
            raise RuntimeError(f"{hook.target} must have signature {hook.signature}, got {found}")
        if not is_installed(hook):
            bodies[hook.target] = hook.body
    for target, digits in bodies.items():
        if (found := body(pkgutil.resolve_name(target))) != digits:
            raise RuntimeError(f"{target} has changed: read it again, its body is {found}")
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind)
    HookRegistry.apply_hooks()
    check_installed()
    logger.info("sparsemla replaces %s", ", ".join(hook.target for hook in HOOKS))


def check_installed() -> None:
    """Raise RuntimeError unless SGLang calls each of our functions.

    SGLang only logs that it failed to apply a hook.
    """
    missing = [hook.target for hook in HOOKS if not is_installed(hook)]
    if missing:
        raise RuntimeError(f"the hooks of {', '.join(missing)} did not take")


def signature(function: Callable[..., Any]) -> str:
    """The signature of a function, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([p.replace(annotation=Parameter.empty) for p in parameters]))


def body(function: Callable[..., Any]) -> str:
    """First digits of the SHA-256 of a function's source."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def is_installed(hook: Hook) -> bool:
    """Whether the target is SGLang's wrapper of our function."""
    function = pkgutil.resolve_name(hook.target)
    if not inspect.isfunction(function):  # a function with a cache is of another type
        return False
    return inspect.getclosurevars(function).nonlocals.get("hook") is hook.function
