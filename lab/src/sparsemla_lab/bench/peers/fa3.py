"""vLLM's FlashAttention 3, which decodes selected bfloat16 rows as pages of one token."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import BF16_512, BF16_576, FP8_NOPE
from sparsemla_lab.bench.peers.base import Peer, Unavailable, first, side
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import Inputs, Side, SparseDecode, WindowedDecode, Workload


class FA3(Peer):
    """The kernel of vLLM's backend ``FLASH_ATTN_MLA_SPARSE``, the default for bfloat16 caches."""

    name = "FA3"
    LIBRARY: ClassVar[str] = "vllm/vllm_flash_attn/_vllm_fa3_C*.so"

    def __init__(self, directories: list[Path]) -> None:
        for root in directories:
            if library := first(root, self.LIBRARY):
                torch.ops.load_library(str(library))
                return
        raise Unavailable(f"{self.LIBRARY} is not there")

    def supports(self, workload: Workload) -> str | None:
        if not isinstance(workload, SparseDecode) or isinstance(workload, WindowedDecode):
            return "has no such op"
        if workload.format not in (BF16_576, BF16_512, FP8_NOPE):
            return "takes a bfloat16 cache"
        return None if workload.query_len == 1 else "its causal mask needs one token a request"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        ops = torch.ops._vllm_fa3_C
        q, rows = inputs["q"][:, 0], _rows_of(inputs["cache"])[:, None, None]
        nope, rope = q[..., :512].contiguous(), q[..., 512:].contiguous()
        keys = rows[..., 512:]
        if keys.shape[-1] == 0:  # as in vLLM: it needs 64 dims of keys, so queries have zeros
            rope, keys = torch.zeros_like(nope[..., :64]), rows[..., :64]
        slots = inputs["topk_indices"][:, 0]
        (batch, topk), (heads, device) = slots.shape, (q.shape[1], q.device)
        counts = torch.full((batch,), topk, dtype=torch.int32, device=device)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        # fmt: off
        schedule = ops.get_scheduler_metadata(
            batch, 1, topk, heads, 1, 64, 512, q.dtype, counts,
            starts, None, None, None, None,  # cu_seqlens_q, _k, _k_new, seqused_q, leftpad_k
            1, 0, True, -1, -1,  # page_size, max_seqlen_k_new, causal, window
            False, 0, None, 0,  # softcap, num_splits, pack_gqa, sm_margin
        )

        def run() -> Results:
            return (ops.fwd(
                rope, keys, rows[..., :512], None, None,  # q, k, v, k_new, v_new
                nope, None, starts, None, None, None, counts,  # q_v, out, cu_seqlens, seqused_q, _k
                1, topk, slots,  # max_seqlen_q, max_seqlen_k, page_table
                None, None, None, None, None,  # kv_batch_idx, leftpad_k, rotary, seqlens_rotary
                None, None, None,  # q_descale, k_descale, v_descale
                inputs["softmax_scale"], True, -1, -1, 0.0, True,  # causal, window, softcap, rotary
                schedule, 0, None, 0, None,  # num_splits, pack_gqa, sm_margin, s_aux
                1, 0, None,  # context parallelism: ranks, rank, lengths
            )[0][:, None],)
        # fmt: on

        note = "pages of one row, scheduled before"
        if inputs["cache"].format is FP8_NOPE:
            note += ", over bfloat16 rows"
        return [side(self.name, workload, inputs, run, note)]


def _rows_of(cache: PagedCache) -> Tensor:
    """The rows of a cache in bfloat16: its own, or converted before the clock starts."""
    if cache.format.fp8_dim == 0:
        return cache.data.view(cache.num_slots, -1)
    return cache.read(torch.arange(cache.num_slots, device=cache.data.device))
