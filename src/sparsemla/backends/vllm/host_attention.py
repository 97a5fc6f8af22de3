"""Attention of vLLM over latent rows in host memory; see :mod:`sparsemla.backends.vllm.host`.

Decodes attend to hot rows on the GPU, prefills to rows that each layer fetches into vLLM's
workspace: the selected ones, or whole contexts if these are fewer. Where the backend converts the
contexts of prefills to bfloat16, it converts them on their way from the host.

Kernels, lists and rows are those of a cache on the GPU, and so are the bits of the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.utils.math_utils import round_up
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.workspace import current_workspace_manager

from sparsemla import (
    ContextShard,
    PagedCache,
    Serving,
    fetch_rows,
    own_positions,
    split_prefill_chunks,
    to_slots,
)
from sparsemla.backends.vllm.attention import (
    SparseMLABackend,
    SparseMLAImpl,
    SparseMLAMetadata,
    SparseMLAMetadataBuilder,
)
from sparsemla.backends.vllm.host import (
    PAGE_SIZE,
    PLACEHOLDER_BYTES,
    HostLayer,
    context_shard,
    reserved_bytes,
)
from sparsemla.backends.vllm.hosted import HostedLayer
from sparsemla.backends.vllm.settings import HOST_CONNECTOR, HostRowsConfig
from sparsemla.backends.vllm.warmup import Key
from sparsemla.plan import Plan

PIECE_BYTES = 64 << 20
"""Bytes of selected rows that are fetched at once, if they are those of four tokens or more."""
MULTIPLE, ALIGNED = 4, 16
"""Tokens of a piece, and columns of lists, are multiples of these: Triton has one kernel then."""


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


@dataclass
class Staging:
    """A chunk of n prefills whose rows are fetched together.

    Attributes:
        tokens: indices of their query tokens in the batch.
        request_ids: int32 ``[tokens]``, request of each token, counted from the first of the chunk.
        block_table: int32 ``[n, W]``.
        context: whole contexts, or None to fetch the selected rows.
    """

    tokens: slice
    request_ids: Tensor
    block_table: Tensor
    context: Context | None


@dataclass
class Context:
    """Whole contexts of a chunk of n prefills.

    Attributes:
        starts: int32 ``[n]``, first workspace row of each request.
        slots: int32 ``[n, L]``, slots of the rows of each request.
        rows: int32 ``[n, L]``, workspace rows.
        counts: int32 ``[n]``, rows of each request on this rank.
    """

    starts: Tensor
    slots: Tensor
    rows: Tensor
    counts: Tensor


@dataclass(kw_only=True)
class HostMetadata(SparseMLAMetadata):
    """Metadata of a step over rows on the host.

    Attributes:
        decodes: the plan of the decodes, None without any.
        stagings: chunks of all prefills that are not converted.
    """

    decodes: Plan | None = None
    stagings: tuple[Staging, ...] = ()


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
            metadata.decodes = decode_plan(metadata)
        if metadata.num_prefills and not metadata.conversions:
            metadata.stagings = tuple(self._stagings(metadata, common))
        return metadata

    def _stagings(
        self, metadata: HostMetadata, common: CommonAttentionMetadata
    ) -> Iterator[Staging]:
        """Chunks of all prefills."""
        config, shard = self.vllm_config, context_shard(self.vllm_config)
        prefills = slice(metadata.num_decodes, metadata.num_decodes + metadata.num_prefills)
        offsets = common.query_start_loc_cpu[prefills.start : prefills.stop + 1]
        lens = common.seq_lens_cpu_upper_bound
        if lens is None:
            raise ValueError("sparsemla: vLLM must give lengths on the host, got none")
        lens, seq_lens = lens[prefills], common.seq_lens[prefills]
        if shard is not None:
            lens, seq_lens = shard.lengths(lens), shard.lengths(seq_lens)
        num_rows = staged_rows(config.model_config.max_model_len, self.topk_tokens, shard)
        for begin, end in split_prefill_chunks(lens, num_rows):
            requests = slice(prefills.start + begin, prefills.start + end)
            tokens = slice(int(offsets[begin]), int(offsets[end]))
            staging = Staging(
                tokens,
                metadata.req_id_per_token[tokens] - requests.start,
                common.block_table_tensor[requests],
                None,
            )
            part = lens[begin:end]
            selected, total = (tokens.stop - tokens.start) * self.topk_tokens, int(part.sum())
            if 2 * selected >= total:
                staging.context = self._context(staging.block_table, part, seq_lens[begin:end])
            yield staging

    def _context(self, block_table: Tensor, lens: Tensor, seq_lens: Tensor) -> Context:
        """Whole contexts; ``lens`` on the host are upper bounds."""
        ends, most = lens.cumsum(0), round_up(int(lens.max()), ALIGNED)
        starts = (ends - lens).int().to(self.device, non_blocking=True)
        positions = torch.arange(most, dtype=torch.int32, device=self.device).expand(len(lens), -1)
        requests = torch.arange(len(lens), dtype=torch.int32, device=self.device)
        slots = to_slots(positions, block_table, requests, page_size=PAGE_SIZE)
        return Context(starts, slots, starts[:, None] + positions, seq_lens.int().clone())


def decode_plan(metadata: HostMetadata) -> Plan:
    """The decodes of a step, in views of the static tensors that vLLM's runner updates."""
    tokens = metadata.num_decode_tokens
    none = metadata.slot_mapping[:0]  # what hot rows do not read
    return Plan(
        num_requests=metadata.num_decodes,
        num_tokens=tokens,
        num_decodes=metadata.num_decodes,
        num_prefills=0,
        num_decode_tokens=tokens,
        num_prefill_tokens=0,
        decode_query_len=metadata.decode_max_query_len,
        max_query_len=metadata.decode_max_query_len,
        max_seq_len=metadata.max_seq_len,
        max_context_len=metadata.max_seq_len,
        page_size=PAGE_SIZE,
        input_row_offsets=metadata.query_start_loc[: metadata.num_decodes + 1],
        seq_lens=metadata.seq_lens[: metadata.num_decodes],
        page_table=metadata.block_table[: metadata.num_decodes],
        positions=none,
        slot_mapping=none,
        request_ids=none,
        prefill_request_ids=None,
        workspace_starts=None,
        prefill_chunks=(),
    )


def staged_rows(max_model_len: int, topk: int, shard: ContextShard | None) -> int:
    """Workspace rows for the longest context on a rank, and for selections of four tokens."""
    longest = max_model_len if shard is None else shard.longest(max_model_len)
    return round_up(max(longest, MULTIPLE * topk), ALIGNED)


class HostRowsImpl(SparseMLAImpl):
    """Attention of one layer with rows on the host.

    Attributes:
        rows_on_host: what the connector finds the layer by.
        rows: the rows, None until the connector has them. vLLM profiles graphs before.
        selects: the layer has an indexer, whose selection later layers may share.
        reserved: memory that vLLM's profiling counts, in the place of the hot rows.
    """

    rows_on_host: ClassVar[bool] = True
    rows: HostLayer | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        settings, buffer = HostRowsConfig.of(config), self.topk_indices_buffer
        if settings is None:
            raise ValueError(f"sparsemla: --kv-transfer-config must have {HOST_CONNECTOR}")
        self.selects = self._indexer is not None
        self.shard, self.topk = context_shard(config), buffer.shape[1]
        self.staged_rows = staged_rows(config.model_config.max_model_len, self.topk, self.shard)
        row_bytes = self.format.bytes_per_token
        self.workspace_bytes = max(self.workspace_bytes, self.staged_rows * row_bytes)
        self._workspace()
        most = min(PIECE_BYTES // row_bytes, self.staged_rows) // self.topk
        tokens_at_once = max(most // MULTIPLE, 1) * MULTIPLE
        numbers = torch.arange(tokens_at_once * self.topk, dtype=torch.int32, device=buffer.device)
        self.piece_rows = numbers.view(tokens_at_once, self.topk)
        size = reserved_bytes(config, settings, self.format, self.topk)
        try:
            self.reserved: Tensor | None = buffer.new_empty(size, dtype=torch.uint8)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            seats = config.scheduler_config.max_num_seqs
            raise ValueError(
                "sparsemla: --max-num-seqs and rows_per_seat must leave room on the GPU, got "
                f"{seats} and {settings.rows_per_seat}: hot rows take {size} bytes in each layer; "
                "lower one"
            ) from error

    def warm_up_more(self, serving: Serving) -> Iterable[Key]:
        """Attention over the rows of prefills, and what brings rows to the GPU."""
        if self.rows is None:
            return
        hot = self.rows.hot
        for count in (hot.seats * hot.rows_per_seat, self.staged_rows):
            yield replace(serving, num_pages=count, page_size=1, page_stride=None, converts=False)
        yield HostedLayer(
            self.format,
            topk=self.topk,
            num_pages=self.rows.host.data.shape[0],
            page_size=PAGE_SIZE,
            table_width=serving.table_width or 1,
            seats=hot.seats,
            all_seats=hot.seats * self.rows.leaders,
            rows_per_seat=hot.rows_per_seat,
            staged_rows=self.staged_rows,
            shares=self.rows.leaders < hot.num_layers,
            shard=self.shard,
            max_tokens=serving.max_tokens,
            max_query_len=serving.max_query_len,
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

    def attend_in_place(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        metadata: SparseMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor]:
        """Attention over rows that are fetched, with the kernel of a batch on the GPU."""
        some = q[0] if isinstance(q, tuple) else q
        num_tokens = some.shape[0]
        if self.rows is None or not isinstance(metadata, HostMetadata):
            out = some.new_zeros(*some.shape[:2], self.format.value_dim)
            return out, out.new_full(some.shape[:2], -torch.inf, dtype=torch.float32)
        decodes = metadata.num_decode_tokens
        if decodes >= num_tokens:
            return self._attend_hot(self.rows, q, metadata, is_decode=True)
        out = some.new_empty(*some.shape[:2], self.format.value_dim)
        lse = torch.empty(some.shape[:2], dtype=torch.float32, device=some.device)
        end = decodes
        if decodes:
            hot = self._attend_hot(self.rows, _part(q, slice(decodes)), metadata, is_decode=False)
            out[:decodes], lse[:decodes] = hot
        for staging in metadata.stagings:
            for tokens, cache, indices, counts in self._staged(self.rows.host, staging):
                out[tokens], lse[tokens] = self.attend(
                    _part(q, tokens), cache, indices, counts, is_decode=False
                )
                end = tokens.stop
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
        chosen = self.topk_indices_buffer[: metadata.num_decode_tokens]
        seats = rows.seats[: metadata.num_decodes]
        found = rows.hot.resolve(rows.layer, chosen, cast(Plan, metadata.decodes), seats)
        return self.attend(
            q, rows.hot.layer(rows.layer), found.rows, found.counts, is_decode=is_decode
        )

    def _staged(
        self, host: PagedCache, staging: Staging
    ) -> Iterator[tuple[slice, PagedCache, Tensor, Tensor]]:
        """Tokens of a chunk, fetched rows, the rows that each token selects, and their numbers."""
        start, table, ids = staging.tokens.start, staging.block_table, staging.request_ids
        chosen = self.topk_indices_buffer[staging.tokens]
        if self.shard is None:
            counts = (chosen >= 0).sum(1, dtype=torch.int32)
        else:
            own, own_counts = own_positions(chosen, shard=self.shard)
            chosen, counts = own[:, 0], own_counts[:, 0]
        context = staging.context
        if context is not None:
            cache = self._fetched(host, context.slots, context.rows, context.counts)
            indices = to_slots(
                chosen,
                table,
                ids,
                page_size=PAGE_SIZE,
                workspace_starts=context.starts,
                prefill_request_ids=ids,
            )
            yield staging.tokens, cache, indices, counts
            return
        slots = to_slots(chosen, table, ids, page_size=PAGE_SIZE)
        for begin in range(0, len(slots), len(self.piece_rows)):
            piece = slice(begin, min(begin + len(self.piece_rows), len(slots)))
            rows = self.piece_rows[: piece.stop - begin]
            cache = self._fetched(host, slots[piece], rows, counts[piece])
            yield slice(start + begin, start + piece.stop), cache, rows, counts[piece]

    def _fetched(self, host: PagedCache, slots: Tensor, rows: Tensor, counts: Tensor) -> PagedCache:
        """Rows of the host in the workspace shared by all layers."""
        spec = ((self.staged_rows, 1, self.format.row_width), self.format.storage_dtype)
        cache = PagedCache(current_workspace_manager().get_simultaneous(spec)[0], self.format)
        fetch_rows(host, cache, slots, rows, counts)
        return cache


def _part(q: Tensor | tuple[Tensor, Tensor], tokens: slice) -> Tensor | tuple[Tensor, Tensor]:
    """Queries of some tokens."""
    return (q[0][tokens], q[1][tokens]) if isinstance(q, tuple) else q[tokens]
