"""Attention of vLLM over latent rows in host memory; see :mod:`sparsemla.backends.vllm.host`.

Decodes attend to hot rows on the GPU, prefills to the rows that :class:`sparsemla.HostContext`
brings: the selected ones, or whole contexts if these are fewer. Where the backend converts the
contexts of prefills to bfloat16, it converts them on their way from the host.

The rows of a step are written to the host, and decodes select, before the queries of attention are
complete. What vLLM computes in between hides the search among hot rows and the fetch. A piecewise
graph would be captured without their end: there they begin with attention.

Kernels, lists and rows are those of a cache on the GPU, and so are the bits of the results.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import in_piecewise_cudagraph
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

from sparsemla import HotSelection, Plan, Serving
from sparsemla.backends.vllm.attention import (
    SparseMLABackend,
    SparseMLAImpl,
    SparseMLAMetadata,
    SparseMLAMetadataBuilder,
    part_plan,
    prefill_plan,
)
from sparsemla.backends.vllm.host import (
    PLACEHOLDER_BYTES,
    HostLayer,
    context_shard,
    reserved_bytes,
)
from sparsemla.backends.vllm.settings import HOST_CONNECTOR, HostRowsConfig
from sparsemla.backends.vllm.warmup import Key


class HostRowsBackend(SparseMLABackend):
    """:class:`SparseMLABackend` with rows on the host."""

    @staticmethod
    def get_impl_cls() -> type[HostRowsImpl]:
        """The class that computes attention in each layer."""
        return HostRowsImpl

    @staticmethod
    def get_builder_cls() -> type[HostRowsMetadataBuilder]:
        """The class that builds the metadata of each step."""
        return HostRowsMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Leave a placeholder of the latent rows on the GPU."""
        return replace(spec, state_content_bytes=PLACEHOLDER_BYTES)


@dataclass(kw_only=True)
class HostMetadata(SparseMLAMetadata):
    """Metadata of a step over rows on the host.

    Attributes:
        decodes: the plan of the decodes, None without any.
        prefills: the plan of the prefills, None without any.
    """

    decodes: Plan | None = None
    prefills: Plan | None = None


class HostRowsMetadataBuilder(SparseMLAMetadataBuilder):
    """Builds the metadata of a step over rows on the host."""

    metadata_cls = HostMetadata

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> HostMetadata:
        """The metadata of one step."""
        common = common_attn_metadata
        metadata = cast(HostMetadata, super().build(common_prefix_len, common, fast_build))
        if metadata.num_decodes:
            count = metadata.num_decodes
            metadata.decodes = part_plan(  # of static tensors, which captured graphs read
                metadata,
                num_tokens=metadata.num_decode_tokens,
                decode_query_len=metadata.decode_max_query_len,
                input_row_offsets=metadata.query_start_loc[: count + 1],
                seq_lens=metadata.seq_lens[:count],
                page_table=metadata.block_table[:count],
                request_ids=metadata.req_id_per_token[: metadata.num_decode_tokens],
            )
        if metadata.num_prefills:
            metadata.prefills = metadata.converted or self._prefills(metadata, common)
        return metadata

    def _prefills(self, metadata: HostMetadata, common: CommonAttentionMetadata) -> Plan:
        """The plan of prefills over rows in the host's format."""
        lens, shard = common.seq_lens_cpu_upper_bound, context_shard(self.vllm_config)
        if lens is None:
            raise ValueError("sparsemla: vLLM must give lengths on the host, got none")
        longest = self.vllm_config.model_config.max_model_len
        lens = lens.clamp(max=longest)  # bounds count drafts that were not accepted
        if shard is not None:
            lens, longest = shard.lengths(lens), shard.longest(longest)
        return prefill_plan(metadata, common, lens, longest)


class HostRowsImpl(SparseMLAImpl):
    """Attention of one layer with rows on the host.

    Attributes:
        rows_on_host: what the connector finds the layer by.
        rows: the rows, None until the connector has them. vLLM profiles graphs before.
        selects: the layer has an indexer, whose selection later layers may share.
        context_rows: bfloat16 rows of a workspace for prefills.
        reserved: memory that vLLM's profiling counts, in the place of rows on the GPU.
    """

    rows_on_host: ClassVar[bool] = True
    converts_in_workspace: ClassVar[bool] = False
    rows: HostLayer | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        settings, buffer = HostRowsConfig.of(config), self.topk_indices_buffer
        if settings is None:
            raise ValueError(f"sparsemla: --kv-transfer-config must have {HOST_CONNECTOR}")
        self.selects, topk = self._indexer is not None, buffer.shape[1]
        shard, longest = context_shard(config), config.model_config.max_model_len
        longest = longest if shard is None else shard.longest(longest)
        row_bytes = max(longest, topk) * self.format.bytes_per_token
        self.context_rows = max(cdiv(row_bytes, 2 * self.format.head_dim), self.conversion_rows)
        size = reserved_bytes(config, settings, self.format, topk, self.context_rows)
        self._begun: tuple[SparseMLAMetadata, HotSelection] | None = None
        try:
            self.reserved: Tensor | None = buffer.new_empty(size, dtype=torch.uint8)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            seats = config.scheduler_config.max_num_seqs
            raise ValueError(
                "sparsemla: --max-num-seqs and rows_per_seat must leave room on the GPU, got "
                f"{seats} and {settings.rows_per_seat}: they take {size} bytes in each layer; "
                "lower one"
            ) from error

    def warm_up_keys(self, serving: Serving) -> Iterable[Key]:
        """What the layer may ask of the GPU, once the connector has its rows."""
        if self.rows is None:
            return
        hot, context = self.rows.hot, self.rows.context
        yield replace(
            serving,
            rows_per_seat=hot.rows_per_seat,
            context_rows=context.max_rows,
            shard=context.shard,
        )

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write rows to the host, but nothing to the placeholder, which has no room for a row."""
        if self.rows is not None:
            super().do_kv_cache_update(
                kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale
            )
            self._begin(self.rows)

    def record_logical_topk_ready(self) -> None:
        """Begin to fetch, if the step's rows were written before the selection."""
        super().record_logical_topk_ready()
        if self.rows is not None and self.rows.writes_first:
            self._begin(self.rows)

    def _begin(self, rows: HostLayer) -> None:
        """Begin the fetch of decodes, whose rows are written and whose selection is known."""
        if not in_piecewise_cudagraph():
            metadata = get_attention_context(rows.name)[0]
            if isinstance(metadata, HostMetadata) and metadata.decodes is not None:
                self._begun = metadata, self._resolve(rows, metadata)

    def _resolve(self, rows: HostLayer, metadata: HostMetadata) -> HotSelection:
        """Search the selections of decodes among hot rows, and fetch those that are missing."""
        chosen = self.topk_indices_buffer[: metadata.num_decode_tokens]
        seats = rows.seats[: metadata.num_decodes]
        return rows.hot.resolve(rows.index, chosen, cast(Plan, metadata.decodes), seats)

    def converted_rows(self, kv_cache: Tensor, plan: Plan, number: int) -> Tensor:
        """The bfloat16 rows of a chunk, which were copied while the layer before computed."""
        rows = cast(HostLayer, self.rows)
        if number == 0 and not rows.context.continues(plan, rows.index):
            rows.context.start(plan, rows.index)
        return rows.context.rows(rows.index, number)

    def attend_in_place(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        metadata: SparseMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor]:
        """Attention over rows that are fetched, with the kernel of a batch on the GPU."""
        some = q[0] if isinstance(q, tuple) else q
        num_tokens, decodes = some.shape[0], metadata.num_decode_tokens
        rows = self.rows
        if rows is None or not isinstance(metadata, HostMetadata):
            out = some.new_zeros(*some.shape[:2], self.format.value_dim)
            return out, out.new_full(some.shape[:2], -torch.inf, dtype=torch.float32)
        if decodes >= num_tokens:
            return self._attend_hot(rows, q, metadata, is_decode=True)
        out = some.new_empty(*some.shape[:2], self.format.value_dim)
        lse = torch.empty(some.shape[:2], dtype=torch.float32, device=some.device)
        if decodes:
            hot = self._attend_hot(rows, _part(q, slice(decodes)), metadata, is_decode=False)
            out[:decodes], lse[:decodes] = hot
        plan = cast(Plan, metadata.prefills)
        end = decodes + plan.num_tokens
        chosen = self.topk_indices_buffer[decodes:end]
        for piece, cache, indices in rows.context.selected(rows.index, chosen, plan):
            tokens = slice(decodes + piece.start, decodes + piece.stop)
            counts = (indices >= 0).sum(1, dtype=torch.int32)
            out[tokens], lse[tokens] = self.attend(
                _part(q, tokens), cache, indices, counts, is_decode=False
            )
        out[end:] = 0  # padding
        lse[end:] = -torch.inf
        return out, lse

    def _attend_hot(
        self,
        rows: HostLayer,
        q: Tensor | tuple[Tensor, Tensor],
        metadata: HostMetadata,
        *,
        is_decode: bool,
    ) -> tuple[Tensor, Tensor]:
        """Attention of all decodes of a batch."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] is metadata:
            found = begun[1]
        else:
            found = self._resolve(rows, metadata)
        cache = rows.hot.layer(rows.index)
        return self.attend(q, cache, found.rows, found.counts, is_decode=is_decode)


def _part(q: Tensor | tuple[Tensor, Tensor], tokens: slice) -> Tensor | tuple[Tensor, Tensor]:
    """Queries of some tokens."""
    return (q[0][tokens], q[1][tokens]) if isinstance(q, tuple) else q[tokens]
