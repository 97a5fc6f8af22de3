"""A KV connector of vLLM that keeps latent rows in host memory.

A block of vLLM names index keys on the GPU and latent rows on the host. The attention backend
shrinks its pages on the GPU to a placeholder, so vLLM plans blocks for the index keys alone, and
block tables, slots, prefix caching and preemption are those of vLLM. Once vLLM has planned,
:class:`HostRowsConnector` allocates the rows, and layers write and read these instead of the
placeholder.

A request of vLLM's model runner V2 has an index that it keeps while it runs: its seat in
:class:`sparsemla.HotRows`. Before each forward pass the connector copies the seats of the batch
into a tensor that captured graphs read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_dcp_group, get_tp_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.models.deepseek_v32.attention import DeepseekV32Attention
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionMetadata, max_decode_query_len
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec, UniformTypeKVCacheSpecs

from sparsemla import FP8_DS_MLA, CacheFormat, ContextShard, HostCache, HostContext, HotRows
from sparsemla.backends.vllm.settings import HOST_CONNECTOR, HostRowsConfig

if TYPE_CHECKING:
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

LOGGER = init_logger("vllm.sparsemla")
PLACEHOLDER_BYTES = 4
"""Bytes of a row on the GPU: vLLM needs some, and its fused kernel views them as float32."""
PAGE_SIZE = 64


@dataclass(frozen=True)
class HostLayer:
    """A layer's rows on the host, and its rows on the GPU.

    Attributes:
        name: of the layer in the metadata of a step.
        index: of the layer among those with rows on the host.
        hot: hot rows of all layers, for decodes.
        context: rows of all layers for prefills.
        seats: int32 ``[max_num_seqs]``, of the requests of the batch, -1 behind the last.
        writes_first: vLLM writes the step's rows before it selects, in a fused kernel.
    """

    name: str
    index: int
    hot: HotRows
    context: HostContext
    seats: Tensor
    writes_first: bool


@dataclass
class HostRowsMetadata(KVConnectorMetadata):
    """What the scheduler tells the workers in a step.

    Attributes:
        new_ids: requests that take a seat, and so find rows of another one.
    """

    new_ids: frozenset[str]


class HostRowsConnector(KVConnectorBase_V1, SupportsHMA):
    """Rows on the host for the layers of this package's attention.

    It transfers nothing between engines. Its constructor takes :class:`HostRowsConfig` from
    ``kv_connector_extra_config``.

    Raises:
        ValueError: the blocks that vLLM planned take more than ``host_gib``.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = HostRowsConfig.of(vllm_config)
        if settings is None:
            raise ValueError(f"sparsemla: kv_connector must be {HOST_CONNECTOR}, got another")
        self.settings = settings
        check_host_memory(settings, kv_cache_config)
        self.host: HostCache | None = None
        self.hot: HotRows | None = None
        self.seats: Tensor | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """No: nothing leaves the engine."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """No: sleep would discard hot rows, and keep the host's memory."""
        return False

    # The scheduler's side.

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """None: prefixes are found in vLLM's own cache of blocks."""
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Do nothing: blocks are vLLM's."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> HostRowsMetadata:
        """The requests that take a seat in a step.

        Raises:
            ValueError: vLLM would copy blocks, which have no rows on the GPU.
        """
        if copies := scheduler_output.kv_cache_block_copies:
            raise ValueError(
                f"sparsemla: vLLM must not copy blocks with {HOST_CONNECTOR}, got "
                f"{len(copies)} copies; remove it from --kv-transfer-config"
            )
        # Otherwise vLLM would call start_load_kv behind the forward pass.
        scheduler_output.has_sync_kv_loads = True
        new = (request.req_id for request in scheduler_output.scheduled_new_reqs)
        return HostRowsMetadata(
            frozenset(new) | scheduler_output.scheduled_cached_reqs.resumed_req_ids
        )

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks of a finished request are free at once."""
        return False, None

    # The workers' side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Allocate rows and hot rows, and hand them to the layers.

        Args:
            kv_caches: of all layers, by name: index keys, and placeholders of latent rows.

        Raises:
            ValueError: layers of several formats, or host memory that cannot be registered.
        """
        config, settings = self._vllm_config, self.settings
        named = [(name, layer) for name, layer in _layers(config) if name in kv_caches]
        layers = [layer for _, layer in named]
        impls = [layer.impl for layer in layers]
        selects, formats = [impl.selects for impl in impls], {impl.format for impl in impls}
        if len(formats) != 1:
            raise ValueError(
                "sparsemla: all layers with rows on the host must have one format, got "
                f"{sorted(fmt.name for fmt in formats)}; remove {HOST_CONNECTOR} from "
                "--kv-transfer-config"
            )
        (fmt,) = formats
        placeholder, group, sharing = layers[0].kv_cache, get_tp_group(), get_dcp_group()
        num_seats = config.scheduler_config.max_num_seqs
        for impl in impls:
            impl.reserved = None  # the memory of the hot rows
        self.host = HostCache.allocate(
            fmt,
            placeholder.shape[0],
            PAGE_SIZE,
            num_layers=len(layers),
            device=placeholder.device,
            group=group.cpu_group if group.world_size > 1 else None,
        )
        self.hot = HotRows(
            self.host,
            seats=num_seats,
            rows_per_seat=settings.rows_per_seat,
            topk=impls[0].topk_indices_buffer.shape[1],
            query_len=max_decode_query_len(config),
            leaders=leaders(selects),
            shard=context_shard(config),
        )
        context = HostContext(
            self.host,
            max_rows=max(impl.context_rows for impl in impls),
            shard=context_shard(config),
        )
        self.seats = torch.full((num_seats,), -1, dtype=torch.int32, device=placeholder.device)
        for index, (name, layer) in enumerate(named):
            layer.kv_cache = self.host.layer(index).data
            fused = isinstance(layer, DeepseekV32Attention)
            layer.impl.rows = HostLayer(name, index, self.hot, context, self.seats, fused)
        LOGGER.info(
            "sparsemla: %d latent rows of %d layers are on the host, %.1f GiB for each of %d ranks "
            "(%d with the same rows); on the GPU, %d hot rows for each of %d requests take %.1f "
            "GiB, rows of prefills %.1f GiB",
            self.host.num_slots,
            len(layers),
            self.host.memory_bytes / 2**30,
            group.world_size,
            group.world_size // sharing.world_size,
            settings.rows_per_seat,
            num_seats,
            self.hot.memory_bytes / 2**30,
            context.memory_bytes / 2**30,
        )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        """Set the seats of the batch, and forget rows of those that had other requests.

        Args:
            forward_context: ignored.
            kwargs: ``request_state_indices``, integers ``[num_reqs]`` on the device, and
                ``request_ids``, both in the order of the batch; nothing in a step without one.
        """
        indices = kwargs.get("request_state_indices")
        if indices is None or self.seats is None or self.hot is None:
            return
        metadata = self._get_connector_metadata()
        new_ids = metadata.new_ids if isinstance(metadata, HostRowsMetadata) else frozenset()
        new = [place for place, each in enumerate(kwargs["request_ids"]) if each in new_ids]
        if new:
            places = async_tensor_h2d(new, device=indices.device, dtype=torch.int64)
            self.hot.forget(indices[places])
        self.seats[: len(indices)].copy_(indices)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: the attention of a layer fetches its rows."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Do nothing: layers write to the host."""

    def wait_for_save(self) -> None:
        """Leave no seats behind: vLLM's dummy steps, also of replayed graphs, must touch none."""
        if self.seats is not None:
            self.seats.fill_(-1)

    def shutdown(self) -> None:
        """Release the host's memory."""
        if self.host is not None:
            self.host.close()


def check_host_memory(settings: HostRowsConfig, kv_cache_config: KVCacheConfig) -> None:
    """Check that the rows of vLLM's blocks fit.

    Raises:
        ValueError: they do not; with the setting to change.
    """
    rows = [_row_bytes(spec) * spec.block_size for spec in _placeholders(kv_cache_config)]
    blocks, limit = kv_cache_config.num_blocks, int(settings.host_gib * 2**30)
    needed = blocks * sum(rows)
    if needed > limit:
        raise ValueError(
            f"sparsemla: host_gib must be at least {needed / 2**30:.1f} for the rows of {blocks} "
            f"blocks, got {settings.host_gib:g}; raise it, or pass "
            f"--num-gpu-blocks-override {limit // sum(rows)}"
        )


def _placeholders(kv_cache_config: KVCacheConfig) -> Iterator[MLAAttentionSpec]:
    """The specs of layers whose rows are on the host."""
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        uniform = isinstance(spec, UniformTypeKVCacheSpecs)
        specs = spec.kv_cache_specs.values() if uniform else [spec] * len(group.layer_names)
        for each in specs:
            if getattr(each, "state_content_bytes", None) == PLACEHOLDER_BYTES:
                yield each


def _row_bytes(spec: MLAAttentionSpec) -> int:
    """Bytes of a row, whose place the placeholder takes."""
    quantised = spec.cache_dtype_str == FP8_DS_MLA.name
    return FP8_DS_MLA.bytes_per_token if quantised else spec.head_size * spec.dtype.itemsize


def _layers(config: VllmConfig) -> Iterator[tuple[str, Any]]:
    """The layers with rows on the host and their names, in the order of the model."""
    for name, layer in config.compilation_config.static_forward_context.items():
        if getattr(getattr(layer, "impl", None), "rows_on_host", False):
            yield name, layer


def leaders(selects: list[bool]) -> list[int]:
    """For each layer, the last one before it that selects, or itself."""
    found: list[int] = []
    for layer, own in enumerate(selects):
        found.append(layer if own else found[-1])
    return found


def context_shard(config: VllmConfig) -> ContextShard | None:
    """This rank's share of contexts, None if it has whole ones."""
    group = get_dcp_group()
    if group.world_size == 1:
        return None
    interleave = config.parallel_config.cp_kv_cache_interleave_size
    return ContextShard(group.rank_in_group, group.world_size, interleave)


def reserved_bytes(
    config: VllmConfig, settings: HostRowsConfig, fmt: CacheFormat, topk: int, context_rows: int
) -> int:
    """Bytes of a layer's hot rows, and its share of the rows of prefills."""
    hot = HotRows.size(
        fmt,
        num_layers=1,
        seats=config.scheduler_config.max_num_seqs,
        rows_per_seat=settings.rows_per_seat,
        topk=topk,
        query_len=max_decode_query_len(config),
    )
    layers = config.model_config.get_total_num_hidden_layers()
    return hot + cdiv(HostContext.size(fmt, max_rows=context_rows), layers)
