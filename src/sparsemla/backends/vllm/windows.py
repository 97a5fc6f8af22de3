"""Raw rows of DeepSeek-V4 and V4.1 in vLLM, and prefills over them and over entries.

Prefills read the FP8 caches in place, or first convert the rows that they see to bfloat16 if that
is faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.sparse_swa import (
    DeepseekSparseSWAMetadata,
    DeepseekSparseSWAMetadataBuilder,
)
from vllm.v1.worker.workspace import current_workspace_manager

from sparsemla import CacheFormat, PagedCache, sparse_prefill, to_slots
from sparsemla.backends.vllm.attention import decode_workspace, decode_workspace_bytes
from sparsemla.backends.vllm.conversions import (
    ROW_BYTES,
    Chosen,
    Conversion,
    Part,
    Rule,
    attend,
    reserved_rows,
)


@dataclass
class WindowMetadata(DeepseekSparseSWAMetadata):
    """vLLM's metadata of raw rows, with the chunks of prefills to convert.

    Attributes:
        conversions: chunks of all prefills of the batch, keyed by the rule of the layers that
            convert them; others read the caches in place.
    """

    conversions: dict[Rule, tuple[Conversion, ...]] = field(default_factory=dict)


class WindowBuilder(DeepseekSparseSWAMetadataBuilder):
    """What a model's builder of :class:`WindowMetadata` adds to vLLM's, which it also inherits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on to vLLM
        super().__init__(*args, **kwargs)
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        rules = [layer.rule for layer in layers if isinstance(layer, WindowedAttention)]
        self.rules = list(dict.fromkeys(rules))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        replay_start: Tensor | None = None,
    ) -> WindowMetadata:
        """The metadata of one step."""
        found = super().build(common_prefix_len, common_attn_metadata, fast_build, replay_start)
        metadata = WindowMetadata(**vars(found))
        if metadata.num_prefills:
            query_lens = metadata.prefill_query_lens_cpu.tolist()
            seq_lens = metadata.prefill_seq_lens_cpu.tolist()  # upper bounds
            for rule in self.rules:
                chunks = [
                    self._conversion(metadata, rule, query_lens, seq_lens, begin, end)
                    for begin, end in rule.chunks(query_lens, seq_lens)
                ]
                metadata.conversions[rule] = tuple(chunks)
        return metadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> WindowMetadata:
        """Metadata with fixed addresses: a captured prefill reads the caches in place."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        metadata.conversions.clear()
        return metadata

    def _conversion(
        self,
        metadata: WindowMetadata,
        rule: Rule,
        query_lens: list[int],
        seq_lens: list[int],
        begin: int,
        end: int,
    ) -> Conversion:
        """The conversion of prefills ``begin .. end - 1``."""
        requests = slice(metadata.num_decodes + begin, metadata.num_decodes + end)
        offsets = metadata.query_start_loc_cpu[[requests.start, requests.stop]].tolist()
        tokens, decodes = slice(*offsets), metadata.num_decode_tokens
        request_ids = metadata.token_to_req_indices[tokens] - requests.start
        lengths = metadata.prefill_seq_lens[begin:end]
        # Copies begin at multiples of 16 bytes, as kernels are compiled for.
        seen = metadata.prefill_gather_lens[begin:end].clone()
        window = metadata.prefill_swa_lens[tokens.start - decodes : tokens.stop - decodes].clone()
        pairs = list(zip(query_lens[begin:end], seq_lens[begin:end], strict=True))
        raw = Part.of(seen, [rule.raw_rows(m, n) for m, n in pairs], lengths - seen)
        entries = None
        if rule.ratio:
            entries = Part.of(lengths // rule.ratio, [rule.entries(n) for _, n in pairs])
        # The last token of a request owns its last row, and a token's window ends with its own.
        ends = metadata.query_start_loc[requests.start + 1 : requests.stop + 1]
        device, int32 = lengths.device, torch.int32
        numbers = torch.arange(tokens.start, tokens.stop, dtype=int32, device=device)
        behind = (raw.starts + seen - ends)[request_ids] + numbers + 1 - window
        columns = torch.arange(rule.window, dtype=int32, device=device)
        return Conversion(
            tokens, requests, request_ids, raw, behind[:, None] + columns, window, entries
        )

    def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, Any]:
        """No schedules."""
        return super().build_tile_scheduler(0)


class WindowedAttention:
    """What layers of DeepSeek-V4 and V4.1 add to vLLM's classes, which they also inherit.

    Attributes:
        rule: when the layer converts rows for prefills.
        conversion_rows: most rows of a conversion.
        workspace_bytes: of the workspace that all layers share.
    """

    rule: Rule
    conversion_rows: int
    workspace_bytes: int

    topk_indices_buffer: Tensor
    max_num_batched_tokens: int
    n_local_heads: int
    window_size: int
    attn_sink: Tensor

    def reserve(
        self, config: VllmConfig, *, ratio: int, topk: int | None, format: CacheFormat
    ) -> None:
        """Grow the workspace to what decodes and converted prefills need.

        Args:
            config: vLLM's.
            ratio, topk, format: of :class:`~sparsemla.backends.vllm.conversions.Rule`.
        """
        device, most_tokens = self.attn_sink.device, self.max_num_batched_tokens
        self.rule = Rule(
            ratio,
            num_heads=self.n_local_heads,
            window=self.window_size,
            topk=topk,
            max_tokens=most_tokens,
            max_seq_len=config.model_config.max_model_len,
            device=device,
            format=format,
        )
        self.conversion_rows = reserved_rows(self.rule)
        self.workspace_bytes = max(
            decode_workspace_bytes(most_tokens, self.n_local_heads, device),
            self.conversion_rows * ROW_BYTES,
        )
        decode_workspace(self.workspace_bytes)  # grow it now: captured graphs hold its address

    def attend_prefills(
        self,
        q: Tensor,
        positions: Tensor,
        raw: PagedCache,
        window: WindowMetadata,
        cache: PagedCache | None,
        entries: Any,  # noqa: ANN401 - vLLM's metadata, which has a class for each model
        output: Tensor,
        **shared: Any,  # noqa: ANN401 - passed on to attention
    ) -> None:
        """Attention of the prefills of a step, which follow its decodes.

        Args:
            q: ``[T, H, 512]`` bfloat16.
            positions: int64 ``[T]``.
            raw: the raw rows.
            window: where they are.
            cache: the entries, or None.
            entries: where they are, or None.
            output: ``[T, H, 512]``, of which prefills and their padding are written.
            shared: scale and sinks.
        """
        first = window.num_decode_tokens
        prefills = slice(first, first + window.num_prefill_tokens)
        if prefills.start == prefills.stop:
            return
        conversions = window.conversions.get(self.rule, ())
        fits = all(each.num_rows <= self.conversion_rows for each in conversions)
        if conversions and fits:
            for each in conversions:
                chosen = None
                if cache is not None:
                    indices = self.chosen_entries(each.tokens, entries, window)
                    counts = self._num_entries(positions[each.tokens], indices)
                    chosen = Chosen(cache, entries.block_table, indices, counts)
                rows = ((each.num_rows, raw.format.head_dim), torch.bfloat16)
                attend(
                    each,
                    q,
                    raw,
                    window.block_table,
                    chosen,
                    current_workspace_manager().get_simultaneous(rows)[0],
                    out=output,
                    **shared,
                )
            output[conversions[-1].tokens.stop : prefills.stop] = 0  # padding
            return
        slots = lengths = None
        if cache is not None:
            slots = self.entry_slots(prefills, cache, entries, window)
            lengths = self._num_entries(positions[prefills], slots)
        sparse_prefill(
            q[prefills],
            raw,
            window.prefill_swa_indices[:, 0],
            topk_lengths=window.prefill_swa_lens,
            extra_cache=cache,
            extra_topk_indices=slots,
            extra_topk_lengths=lengths,
            out=output[prefills],
            **shared,
        )

    def chosen_entries(
        self,
        tokens: slice,
        entries: Any,  # noqa: ANN401 - as above
        window: WindowMetadata,
    ) -> Tensor:
        """Entries ``[T, K]`` of their requests that tokens attend to; -1 behind the last."""
        return self.topk_indices_buffer[tokens]

    def entry_slots(
        self,
        tokens: slice,
        cache: PagedCache,
        entries: Any,  # noqa: ANN401 - as above
        window: WindowMetadata,
    ) -> Tensor:
        """Slots ``[T, K]`` of the entries that tokens attend to; -1 behind the last."""
        return to_slots(
            self.chosen_entries(tokens, entries, window),
            entries.block_table,
            window.token_to_req_indices[tokens],
            page_size=cache.page_size,
        )

    def _num_entries(self, positions: Tensor, indices: Tensor) -> Tensor:
        """The number of entries ``[T]`` that tokens at ``positions [T]`` attend to."""
        return ((positions + 1) // self.rule.ratio).clamp(max=indices.shape[1]).int()
