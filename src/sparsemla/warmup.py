"""Compile every kernel that an engine's configuration can reach, before the engine serves.

Triton compiles a kernel at its first launch with new constants (tiles, splits, formats) or new
classes of arguments: a dtype, a None, an integer that is 1 or a multiple of 16, a pointer that is a
multiple of 16 bytes. A warm-up runs the public ops on tensors without memory. Their launches
compile in the background and run nothing. So the schedules that serve requests also tell what to
compile, and no rule is written twice.

Sizes are many and kernels are few. The sizes of a class are searched by bisection: where both ends
of a range launch the same kernels, all sizes between them do.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import INDEX_FP8, CacheFormat, as_format
from sparsemla.host_cache import HostCache
from sparsemla.host_context import HostContext
from sparsemla.kernels.attention.schedule import converts_first
from sparsemla.kernels.common.device import meta_means, num_multiprocessors
from sparsemla.ops import (
    entry_slots,
    fetch_rows,
    forget_seats,
    fused_indexer_rope_quant,
    fused_rope_rmsnorm_quant,
    gather_dequant,
    indexer_topk,
    indexer_topk_blocks,
    indexer_topk_of_blocks,
    own_positions,
    pool_windows,
    prepare_index_queries,
    project_groups,
    resolve_rows,
    sparse_decode,
    sparse_prefill,
    to_slots,
    visible_slots,
)
from sparsemla.plan import Plan, plan_batch, plan_on_device
from sparsemla.pooling import Pooling, WindowState
from sparsemla.residency import RowTable
from sparsemla.shards import ContextShard
from sparsemla.validation import check_device, check_integer, check_kind
from sparsemla.weights import HeadWeight

INTEGERS = (
    "max_position_embeddings",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "head_dim",
    "sliding_window",
    "o_groups",
    "o_lora_rank",
)
"""Fields of ``config.json`` that are read where a model has them."""

ROPE_DIM = 64
"""Dims of RoPE in an indexer's head."""
SELECTED = 4
"""Tokens of DeepSeek-V4's entries that overlap and that an indexer selects."""
EVERY = 1024
"""Up to so many decodes, each count is looked at: more splits may be worse and better again."""


@dataclass(frozen=True)
class Serving:
    """What an engine may ask of one GPU: a model's dims on this rank, and the engine's limits.

    Args:
        cache_format: of the latent cache, or its name; None if the engine has its own attention.
        num_heads: query heads of this rank.
        query_pitch: elements between the RoPE dims of two heads of a query, which lie in a tensor
            of their own; None if they lie behind the other dims.
        topk: keys that a token selects.
        index_heads: heads of the indexer; 0 if the engine has its own indexer.
        max_tokens: most tokens of a step.
        max_requests: most requests of a step.
        max_query_len: most tokens of a decode, 1 and its drafts.
        max_seq_len: most tokens of a request.
        page_size: tokens of a page, of both caches.
        table_width: columns of the page table; default as many as ``max_seq_len`` needs.
        converts: prefills may read a workspace of :func:`sparsemla.prefill_workspace_rows`.
        allow_fp8_mma: these prefills permit FP8 MMAs.
        sinks: attention has an ``attn_sink``, as DeepSeek-V4's always has.
        rows_per_seat: with latent rows in host memory, hot rows of a request and layer, as
            :class:`sparsemla.HotRows` has them; None if the GPU keeps all rows.
        context_rows: with rows in host memory, the ``max_rows`` of
            :class:`sparsemla.HostContext`; default ``max_seq_len``.
        num_pages: of each cache; None if it is not known yet.
        page_stride: elements between pages of the latent cache; None if pages are adjacent.
        index_page_stride: the same of the indexer's keys.
        max_workspace_bytes: of :func:`sparsemla.indexer_topk`.
        ratio: tokens of an index key; above 1 the engine writes keys by other ops.
        topk_blocks: candidate blocks of a token, for selections in two steps as DeepSeek-V4.1 has
            them: :func:`sparsemla.indexer_topk_blocks` and
            :func:`sparsemla.indexer_topk_of_blocks`; None if layers do not share blocks.
        block_size: index keys of a block.
        interleaved: RoPE of the indexer rotates neighbours.
        rope_first: it rotates the first dims of the indexer's heads, or the last (Hunyuan V4).
        max_positions: rows of the indexer's table of cosines and sines.
        table_dtype: of that table.
        ratios: of the layers of a DeepSeek-V4: tokens of an entry, 0 for layers that attend to the
            window only. Entries of 4 tokens overlap and are selected by the indexer. Empty for
            other models.
        sliding_window: tokens of the window, for DeepSeek-V4.
        groups: groups of heads of the output projection on this rank, for DeepSeek-V4.
        group_width: outputs of a group.
        shard: this rank's share of every context, for :func:`sparsemla.own_positions`; None if a
            rank has whole contexts.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or a limit below 1.

    >>> from sparsemla import FP8_DS_MLA
    >>> Serving(FP8_DS_MLA, num_heads=16, max_seq_len=32768).page_size
    64
    """

    cache_format: CacheFormat | str | None
    num_heads: int = 128
    query_pitch: int | None = 192
    topk: int = 2048
    index_heads: int = 64
    max_tokens: int = 8192
    max_requests: int = 256
    max_query_len: int = 1
    max_seq_len: int = 163840
    page_size: int = 64
    table_width: int | None = None
    converts: bool = True
    allow_fp8_mma: bool = False
    sinks: bool = False
    rows_per_seat: int | None = None
    context_rows: int | None = None
    num_pages: int | None = None
    page_stride: int | None = None
    index_page_stride: int | None = None
    max_workspace_bytes: int = 256 << 20
    ratio: int = 1
    topk_blocks: int | None = None
    block_size: int = 8
    interleaved: bool = False
    rope_first: bool = True
    max_positions: int = 163840
    table_dtype: torch.dtype = torch.bfloat16
    ratios: tuple[int, ...] = ()
    sliding_window: int = 128
    groups: int = 8
    group_width: int = 1024
    shard: ContextShard | None = None

    def __post_init__(self) -> None:
        if self.cache_format is not None:
            fmt = as_format("cache_format", self.cache_format)
            object.__setattr__(self, "cache_format", fmt)
        check_integer("index_heads", self.index_heads)
        for name in ("num_heads", "topk", "max_tokens", "max_requests", "max_query_len"):
            check_integer(name, getattr(self, name), 1)
        for name in ("max_seq_len", "page_size", "max_workspace_bytes", "ratio", "max_positions"):
            check_integer(name, getattr(self, name), 1)
        check_kind("allow_fp8_mma", self.allow_fp8_mma, bool)
        check_kind("sinks", self.sinks, bool)
        check_kind("rope_first", self.rope_first, bool)
        if self.query_pitch is not None:
            check_integer("query_pitch", self.query_pitch, ROPE_DIM)
        check_integer("block_size", self.block_size, 1)
        for name in ("rows_per_seat", "context_rows", "topk_blocks"):
            if (size := getattr(self, name)) is not None:
                check_integer(name, size, 1)
        least = self.max_query_len * self.topk
        if self.rows_per_seat is not None and self.rows_per_seat < least:
            raise ValueError(
                f"rows_per_seat must be at least {least}, as {self.max_query_len} tokens of a "
                f"decode may select {self.topk} rows each, got {self.rows_per_seat}"
            )
        check_kind("ratios", self.ratios, tuple)
        for ratio in self.ratios:
            check_integer("ratios", ratio)
        for name in ("sliding_window", "groups", "group_width"):
            check_integer(name, getattr(self, name), 1)
        if self.shard is not None:
            check_kind("shard", self.shard, ContextShard)
        if self.ratios and self.rows_per_seat is not None:
            raise ValueError("rows_per_seat must be None with ratios, whose rows are entries")
        for name in ("ratios", "rows_per_seat"):
            if getattr(self, name) and self.cache_format is None:
                raise ValueError(f"cache_format must be given with {name}, got None")

    @classmethod
    def of_model(
        cls,
        config: Mapping[str, Any],
        cache_format: CacheFormat | str,
        *,
        tensor_parallel_size: int = 1,
        max_tokens: int = 8192,
        max_requests: int = 256,
        max_query_len: int = 1,
        max_seq_len: int | None = None,
    ) -> Serving:
        """What vLLM with both plugins asks for a model; for DeepSeek-V4, your own engine.

        Args:
            config: ``config.json`` of a DeepSeek-V3.2, DeepSeek-V4 or GLM-5, as published or as
                transformers writes it.
            cache_format: of the latent cache, or its name.
            tensor_parallel_size: GPUs that share the heads.
            max_tokens, max_requests, max_query_len: fields of this class.
            max_seq_len: most tokens of a request; default the model's.

        Raises:
            ValueError: the model has no indexer, its heads cannot be shared so, the format has
                other dims than a DeepSeek-V4's rows, or the model is a DeepSeek-V4.1.

        >>> from sparsemla import FP8_DS_MLA
        >>> config = {"num_attention_heads": 128, "index_topk": 2048, "index_n_heads": 64}
        >>> Serving.of_model(config, FP8_DS_MLA, tensor_parallel_size=8).num_heads
        16
        """
        cache_format = as_format("cache_format", cache_format)
        wanted = ("num_attention_heads", "index_topk", "index_n_heads")
        absent = [name for name in wanted if name not in config]
        if absent:
            raise ValueError(f"config must have {', '.join(wanted)}; it lacks {', '.join(absent)}")
        for name in wanted:
            check_integer(f"config: {name}", config[name], 1)
        for name in INTEGERS:
            if config.get(name) is not None:
                check_integer(f"config: {name}", config[name])
        heads, rest = divmod(config["num_attention_heads"], tensor_parallel_size)
        if rest:
            raise ValueError(
                f"tensor_parallel_size must divide {config['num_attention_heads']} heads, "
                f"got {tensor_parallel_size}"
            )
        max_positions = config.get("max_position_embeddings", cls.max_positions)
        max_seq_len = max_seq_len or max_positions
        serving = cls(
            cache_format,
            num_heads=heads,
            query_pitch=config.get("qk_nope_head_dim", 128) + config.get("qk_rope_head_dim", 64),
            topk=config["index_topk"],
            index_heads=config["index_n_heads"],
            max_tokens=max_tokens,
            max_requests=max_requests,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            max_workspace_bytes=512 << 20,
            max_positions=max_positions,
        )
        if ratios := entry_ratios(config):
            dim = config.get("head_dim", 512)
            if (cache_format.head_dim, cache_format.value_dim) != (dim, dim):
                raise ValueError(
                    f"cache_format must have head_dim and value_dim {dim} for this model, "
                    f"got {cache_format.name}"
                )
            return replace(
                serving,
                table_dtype=torch.float32,
                ratios=ratios,
                sliding_window=config.get("sliding_window", cls.sliding_window),
                groups=max(config.get("o_groups", cls.groups) // tensor_parallel_size, 1),
                group_width=config.get("o_lora_rank", cls.group_width),
            )
        return replace(
            serving,
            # vLLM's tables are wide enough for a multiple of 128 tokens.
            table_width=-(-max_seq_len // 128) * 2,
            interleaved=config.get("indexer_rope_interleave", False),
        )

    @property
    def columns(self) -> int:
        """Columns of the page table of index keys, and of all caches but DeepSeek-V4's."""
        return self.table_width or self.columns_of(self.index_ratio)

    def columns_of(self, ratio: int) -> int:
        """Columns of the page table of a cache that has a row for each ``ratio`` tokens."""
        return -(-self.max_seq_len // (ratio * self.page_size))

    @property
    def index_ratio(self) -> int:
        """Tokens of an index key."""
        return SELECTED if self.ratios else self.ratio

    def entry_widths(self, ratio: int) -> list[int]:
        """Numbers of entries that lists of all entries of a request may have room for."""
        widths = [128]
        while widths[-1] * ratio < self.max_seq_len:
            widths.append(4 * widths[-1])
        return widths

    @property
    def max_decodes(self) -> int:
        """Most tokens of a step that has decodes only."""
        return min(self.max_tokens, self.max_requests * self.max_query_len)

    def caches(self, format: CacheFormat | str, page_stride: int | None = None) -> list[PagedCache]:
        """Caches without memory, one of each class of page counts."""
        format, size = as_format("format", format), self.page_size
        page_counts = (1024, 1025) if self.num_pages is None else (self.num_pages,)
        if page_stride is None:
            return [PagedCache.allocate(format, n, size, device="meta") for n in page_counts]
        width, caches = format.row_width, []
        for pages in page_counts:
            data = without_memory(pages * page_stride, dtype=format.storage_dtype)
            data = data.as_strided((pages, size, width), (page_stride, width, 1))
            caches.append(PagedCache(data, format))
        return caches


def entry_ratios(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens of an entry in the kinds of layers of a DeepSeek-V4, 0 for none; empty for others.

    Args:
        config: ``config.json``: published ones have ``compress_ratios``, one for each layer, those
            of transformers ``layer_types`` and ``compress_rates``.

    Raises:
        ValueError: the model is a DeepSeek-V4.1.

    >>> rates = {"compressed_sparse_attention": 4}
    >>> entry_ratios({"layer_types": ["sliding_attention", *rates], "compress_rates": rates})
    (0, 4)
    """
    if config.get("model_type") == "deepseek_v41":
        raise ValueError("config must not be of a deepseek_v41, whose layers share entries")
    for name, kind in (("compress_ratios", list), ("layer_types", list), ("compress_rates", dict)):
        if config.get(name) is not None:
            check_kind(f"config: {name}", config[name], kind)
    if "compress_ratios" in config:
        for ratio in config["compress_ratios"] or ():
            check_integer("config: compress_ratios", ratio)
        return tuple(sorted(set(config["compress_ratios"] or ())))
    rates = config.get("compress_rates") or {}
    kinds = config.get("layer_types") or [] if rates else []
    return tuple(sorted({rates.get(kind, 0) for kind in kinds}))


@dataclass(frozen=True)
class Sweep:
    """A step of any size.

    Args:
        step: calls ops with tensors on torch's ``meta`` device for a number of tokens.
        limit: most tokens.
        every: up to so many tokens, each number is looked at.
    """

    step: Callable[[int], object]
    limit: int
    every: int = 4


@dataclass(frozen=True)
class WarmUp:
    """What a warm-up did.

    Args:
        compiled: number of kernels that were compiled.
        found: number of kernels that were found in Triton's persistent cache.
        seconds: time that it took.
    """

    compiled: int
    found: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.compiled} kernels compiled and {self.found} found in the cache "
            f"in {self.seconds:.1f} s"
        )


def warm_up(
    *configurations: Serving,
    steps: Sequence[Callable[[], object] | Sweep] = (),
    device: torch.device | str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WarmUp:
    """Compile every kernel that engines with these configurations can reach, and load it.

    Triton keeps compiled kernels in its persistent cache, where later processes find them.

    Args:
        configurations: what the engines may ask of the GPU.
        steps: functions that call any other ops with tensors on torch's ``meta`` device, of the
            shapes that will be served; or sweeps over the sizes of such a function.
        device: the GPU; default the current one.
        workers: threads that compile; default one for each core, 16 at most.
        progress: called after each kernel with the numbers of kernels that are ready and of all.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or no worker.
        RuntimeError: there is no GPU.
        Exception: a kernel does not compile; the first error of Triton.

    ```python
    serving = Serving(FP8_DS_MLA, num_heads=16, max_seq_len=32768)
    print(warm_up(serving))
    ```
    """
    from sparsemla.kernels.common.compiling import compile_only, count_compilations

    for each in configurations:
        check_kind("warm_up: configurations", each, Serving)
    for name, functions in (("steps", steps), ("progress", () if progress is None else [progress])):
        if not isinstance(functions, Sequence) or not all(
            callable(each) or isinstance(each, Sweep) for each in functions
        ):
            raise TypeError(f"warm_up: {name} must be callable, got {functions!r}")
    check_device("warm_up: device", device)
    check_integer("warm_up: workers", 1 if workers is None else workers, 1)
    if not torch.cuda.is_available():
        raise RuntimeError("warm_up: kernels are compiled for the GPU that is present; got none")
    began = time.perf_counter()
    gpu = torch.device("cuda" if device is None else device)
    workers = workers or min(os.cpu_count() or 1, 16)
    with (
        torch.cuda.device(gpu),
        meta_means(gpu),
        count_compilations() as kernels,
    ):
        with compile_only(workers) as compiler:
            for serving in configurations:
                _search(serving, compiler.kernels_of)
            for step in steps:
                if isinstance(step, Sweep):
                    _sweep(step, compiler.kernels_of)
                else:
                    step()
        compiler.finish(progress)
    seconds = time.perf_counter() - began
    return WarmUp(len(kernels.compiled), len(kernels.loaded), seconds)


Kernels = frozenset[int]
"""Numbers of the kernels that a step launches."""
KernelsOf = Callable[[Callable[[], object]], Kernels]


class _Search:
    """Runs steps of an engine at sizes that reach all of their kernels."""

    def __init__(self, serving: Serving, kernels_of: KernelsOf) -> None:
        self._serving = serving
        self._kernels_of = kernels_of

    def __call__(
        self, step: Callable[..., object], *arguments: object, limit: int, every: int = 4
    ) -> None:
        """Run ``step`` of the engine with these arguments and a size."""
        _sweep(
            Sweep(functools.partial(step, self._serving, *arguments), limit, every),
            self._kernels_of,
        )


def _search(serving: Serving, kernels_of: KernelsOf) -> None:
    """Run every op at sizes that reach all of its kernels."""
    search = _Search(serving, kernels_of)
    if serving.ratios:
        _search_compressed(serving, kernels_of)
        return
    if serving.index_heads:
        caches = serving.caches(INDEX_FP8, serving.index_page_stride)
        _search_selection(serving, caches[0], kernels_of)  # does not see the number of pages
        for cache in caches:
            if serving.ratio == 1:
                search(_write_keys, cache, limit=serving.max_tokens)
            # Scores also depend on the number of requests, but only on classes of sizes.
            for pages in (1, 16, 3):
                if pages <= serving.columns:
                    _score_keys(serving, cache, pages)
    if serving.shard is not None:
        selection = without_memory(serving.max_tokens, serving.topk)
        kernels_of(functools.partial(own_positions, selection, shard=serving.shard))
    if serving.cache_format is None:
        return
    if serving.rows_per_seat is not None:
        kernels_of(functools.partial(_keep_rows, serving, serving.rows_per_seat))
    search(_find_slots, limit=serving.max_tokens)
    if serving.rows_per_seat is not None:
        _search_host(serving, kernels_of)
        return
    for cache in serving.caches(serving.cache_format, serving.page_stride):
        rows = _flat(cache)
        search(_decode, rows, limit=serving.max_decodes, every=EVERY)
        search(_prefill, rows, limit=serving.max_tokens)
        if serving.converts and _may_convert(serving, cache.format):
            for start in (0, 1, 2):
                search(_convert, cache, start, limit=serving.max_requests)


def _may_convert(serving: Serving, format: CacheFormat) -> bool:
    """Whether there are prefills that are faster over converted rows on this GPU."""
    meta, heads = torch.device("meta"), serving.num_heads
    return converts_first(format, meta, heads, num_tokens=1, num_keys=1 << 30, num_rows=1)


def _sweep(sweep: Sweep, kernels_of: KernelsOf) -> None:
    def look(size: int) -> Kernels:
        return kernels_of(functools.partial(sweep.step, size))

    _sizes(look, sweep.limit, every=sweep.every)


def _search_selection(serving: Serving, cache: PagedCache, kernels_of: KernelsOf) -> None:
    """Run the selection, whose kernels depend on the tokens and on the pages of the page table.

    Where one of the two is a power of 4, the other is searched. Kernels change at few sizes, so all
    pairs of sizes that were found are run.
    """

    @functools.cache
    def look(tokens: int, pages: int) -> Kernels:
        return kernels_of(lambda: _select_keys(serving, cache, tokens, 1, pages))

    token_counts, page_counts = set[int](), {serving.columns}  # a whole table is common
    # More tokens than eight for each multiprocessor only take more waves of the same kernels.
    max_tokens = min(serving.max_tokens, 8 * num_multiprocessors(torch.device("meta")))
    for power in (4**i for i in range(6)):
        if power <= serving.columns:
            token_counts |= _bisect(
                functools.partial(look, pages=power), range(1, max_tokens + 1, 2)
            )
        if power <= max_tokens:
            page_counts |= _bisect(functools.partial(look, power), range(1, serving.columns + 1, 2))
    for tokens in token_counts:
        for pages in page_counts:
            look(tokens, pages)


def _sizes(look: Callable[[int], Kernels], limit: int, *, every: int = 4) -> set[int]:
    """Look at sizes up to ``limit`` until each kernel has been met; sizes where kernels change.

    Triton specialises integers that are 1 or multiples of 16, and pointers that are multiples of 16
    bytes; with ``size`` int32 in front of a tensor, that depends on ``size``.
    """
    look = functools.cache(look)
    found = set(range(1, min(every, limit) + 1))
    for size in found:
        look(size)
    for rest, step in ((0, 16), (4, 16), (1, 2)):
        first = every + 1 + (rest - every - 1) % step
        found |= _bisect(look, range(first, limit + 1, step))
    return found


def _bisect(look: Callable[[int], Kernels], sizes: range) -> set[int]:
    """Neighbours that launch other kernels, and both ends."""
    if len(sizes) == 0:
        return set()
    if look(sizes[0]) == look(sizes[-1]) or len(sizes) == 2:
        return {sizes[0], sizes[-1]}
    middle = len(sizes) // 2
    return _bisect(look, sizes[: middle + 1]) | _bisect(look, sizes[middle:])


def without_memory(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """A tensor for launches that only compile."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _page_table(serving: Serving, requests: int, pages: int) -> Tensor:
    return without_memory(requests, serving.columns)[:, :pages]


def _flat(cache: PagedCache) -> PagedCache:
    """All rows of a cache as pages of one row, those between pages included; a slot is a row."""
    width = cache.format.row_width
    num_rows = (cache.num_pages - 1) * (cache.data.stride(0) // width) + cache.page_size
    rows = cache.data.as_strided((num_rows, width), (width, 1))
    return PagedCache(rows.unsqueeze(1), cache.format)


def _write_keys(serving: Serving, cache: PagedCache, tokens: int) -> None:
    heads, dim = serving.index_heads, cache.format.head_dim
    # Of one projection.
    keys_and_weights = without_memory(tokens, dim + heads, dtype=torch.bfloat16)
    fused_indexer_rope_quant(
        without_memory(tokens, heads, dim, dtype=torch.bfloat16),
        keys_and_weights[:, dim:],
        keys_and_weights[:, :dim],
        without_memory(dim, dtype=torch.float32),
        without_memory(dim, dtype=torch.float32),
        without_memory(serving.max_positions, ROPE_DIM, dtype=serving.table_dtype),
        cache,
        positions=without_memory(tokens, dtype=torch.int64),
        slot_mapping=without_memory(tokens, dtype=torch.int64),
        interleaved=serving.interleaved,
        rope_first=serving.rope_first,
        weights_out=without_memory(tokens, heads, dtype=torch.float32),
    )


def _select_keys(
    serving: Serving,
    cache: PagedCache,
    tokens: int,
    requests: int,
    pages: int,
    max_workspace_bytes: int | None = None,
) -> None:
    request = (
        without_memory(
            tokens, serving.index_heads, cache.format.head_dim, dtype=torch.float8_e4m3fn
        ),
        without_memory(tokens, serving.index_heads, dtype=torch.float32),
        cache,
        without_memory(requests + 1),
        without_memory(requests),
        _page_table(serving, requests, pages),
    )
    options: dict[str, Any] = {
        "topk": serving.topk,
        "ratio": serving.index_ratio,
        "max_workspace_bytes": max_workspace_bytes or serving.max_workspace_bytes,
    }
    indexer_topk(*request, **options)
    if serving.topk_blocks is not None:
        options["block_size"] = serving.block_size
        indexer_topk_blocks(*request, **options, topk_blocks=serving.topk_blocks)
        indexer_topk_of_blocks(*request, without_memory(tokens, serving.topk_blocks), **options)


def _score_keys(serving: Serving, cache: PagedCache, pages: int) -> None:
    """The selection for one request and several, also in chunks of which the last is one token.

    The tokens of a request decide on the tile: there may be one, or more.
    """
    pairs_of_tokens = 2 * (4 * pages * serving.page_size + 8)
    for tokens in (1, 2, 3, 4, 5, 7, 8, 16, 32):
        for requests in sorted({1, 2, tokens}):
            if tokens <= serving.max_tokens and requests <= min(tokens, serving.max_requests):
                for max_bytes in (None, pairs_of_tokens):
                    _select_keys(serving, cache, tokens, requests, pages, max_bytes)


def _find_slots(serving: Serving, tokens: int) -> None:
    requests = min(tokens, serving.max_requests)
    to_slots(
        without_memory(tokens, serving.topk),
        _page_table(serving, requests, serving.columns),
        without_memory(tokens),
        page_size=serving.page_size,
    )


def _keep_rows(serving: Serving, rows_per_seat: int) -> None:
    """The ops over a cache in host memory; their kernels see no count of tokens."""
    fmt = as_format("cache_format", cast("CacheFormat", serving.cache_format))
    batch = serving.max_requests
    table = RowTable.allocate(batch, rows_per_seat, device="meta")
    host = PagedCache.allocate(fmt, 1024, serving.page_size, device="meta")
    fast = PagedCache.allocate(fmt, batch * rows_per_seat, 1, device="meta")
    for stats in (None, without_memory(2, dtype=torch.int64)):
        found = resolve_rows(
            without_memory(serving.max_decodes, serving.topk),
            without_memory(batch + 1),
            without_memory(batch),
            without_memory(batch),
            _page_table(serving, batch, serving.columns),
            table,
            page_size=serving.page_size,
            max_query_len=serving.max_query_len,
            shard=serving.shard,
            stats=stats,
        )
    fetch_rows(host, fast, found.miss_slots, found.miss_rows, found.miss_counts)
    # Followers of a selection fetch the rows of the step's tokens.
    new = serving.max_decodes, serving.max_query_len
    fetch_rows(
        host, fast, without_memory(*new), without_memory(*new), without_memory(serving.max_decodes)
    )
    forget_seats(table, without_memory(batch))


def _queries(serving: Serving, fmt: CacheFormat, *rows: int) -> tuple[Tensor, Tensor | None]:
    """Queries as the engine has them: whole, or without and with their RoPE dims."""
    rope_dim = fmt.head_dim - fmt.value_dim
    heads = *rows, serving.num_heads
    if serving.query_pitch is None or rope_dim == 0:
        return without_memory(*heads, fmt.head_dim, dtype=torch.bfloat16), None
    wide = without_memory(*heads, serving.query_pitch, dtype=torch.bfloat16)
    return without_memory(*heads, fmt.value_dim, dtype=torch.bfloat16), wide[..., -rope_dim:]


def _sinks(serving: Serving) -> Tensor | None:
    return without_memory(serving.num_heads, dtype=torch.float32) if serving.sinks else None


def _decode(serving: Serving, rows: PagedCache, tokens: int) -> None:
    q, q_rope = _queries(serving, rows.format, tokens, 1)
    sparse_decode(
        q,
        rows,
        without_memory(tokens, 1, serving.topk),
        q_rope=q_rope,
        softmax_scale=1.0,
        topk_lengths=without_memory(tokens),
        attn_sink=_sinks(serving),
    )


def _prefill(serving: Serving, rows: PagedCache, tokens: int) -> None:
    q, q_rope = _queries(serving, rows.format, tokens)
    sparse_prefill(
        q,
        rows,
        without_memory(tokens, serving.topk),
        q_rope=q_rope,
        softmax_scale=1.0,
        topk_lengths=without_memory(tokens),
        attn_sink=_sinks(serving),
    )


def _convert(serving: Serving, cache: PagedCache, start: int, requests: int) -> None:
    """Prefill over converted rows, behind ``start`` decodes of one token."""
    heads, fmt = serving.num_heads, cache.format
    end = start + requests  # one token a request: counts of tokens are no classes of a kernel
    page_table = _page_table(serving, end, serving.columns)[start:]
    starts, request_ids = without_memory(requests), without_memory(requests)
    rows = without_memory(16 * requests + start, fmt.head_dim, dtype=torch.bfloat16)
    gather_dequant(cache, page_table, without_memory(end)[start:], starts, out=rows)
    slots = to_slots(
        without_memory(end, serving.topk)[start:],
        page_table,
        request_ids,
        page_size=cache.page_size,
        workspace_starts=starts,
        prefill_request_ids=request_ids,
    )
    q, q_rope = _queries(serving, fmt, end)
    sparse_prefill(
        q[start:],
        rows,
        slots,
        q_rope=None if q_rope is None else q_rope[start:],
        softmax_scale=1.0,
        attn_sink=_sinks(serving),
        allow_fp8_mma=serving.allow_fp8_mma,
        out=without_memory(end, heads, fmt.value_dim, dtype=torch.bfloat16)[start:],
        lse=without_memory(end, heads, dtype=torch.float32)[start:],
    )


def _search_host(serving: Serving, kernels_of: KernelsOf) -> None:
    """Run attention of decodes over hot rows, and of prefills over rows from the host."""
    fmt, search = cast(CacheFormat, serving.cache_format), _Search(serving, kernels_of)
    for pages in [cache.num_pages for cache in serving.caches(fmt)]:
        host = HostCache.allocate(fmt, pages, serving.page_size, num_layers=2, device="meta")
        max_rows = serving.context_rows or serving.max_seq_len
        context = HostContext(host, max_rows=max_rows, shard=serving.shard)
        if serving.converts:
            for start in (0, 1, 2):
                search(_prefill_contexts, context, start, limit=serving.max_requests)
    # Fetches do not see the number of pages.
    for start in (0, 1):
        search(_prefill_selected, context, start, limit=serving.max_tokens)
    for start in (0, 1, 2):
        search(_prefill_whole, context, start, limit=serving.max_requests)
    num_rows = serving.max_requests * cast(int, serving.rows_per_seat)
    hot = PagedCache.allocate(fmt, num_rows, 1, device="meta")
    search(_decode, hot, limit=serving.max_decodes, every=EVERY)
    search(_prefill, hot, limit=serving.max_tokens)


def _prefill_selected(serving: Serving, context: HostContext, start: int, tokens: int) -> None:
    """Prefills over the rows that they select, behind ``start`` requests."""
    requests = min(tokens, serving.max_requests)
    plan = plan_on_device(
        without_memory(requests),
        without_memory(requests),
        _page_table(serving, start + requests, serving.columns)[start:],
        page_size=serving.page_size,
        num_tokens=tokens,
        max_query_len=tokens,
    )
    for piece, rows, _ in context.selected(0, without_memory(tokens, serving.topk), plan):
        _prefill(serving, rows, piece.stop - piece.start)


def _host_plan(serving: Serving, context: HostContext, start: int, requests: int) -> Plan:
    """Prefills with chunks, behind ``start`` decodes of one token."""
    lengths = [1] * start + [serving.max_query_len + 1] * requests
    return plan_batch(
        lengths,
        lengths,
        _page_table(serving, len(lengths), serving.columns),
        page_size=serving.page_size,
        workspace_rows=context.max_rows,
        decode_threshold=serving.max_query_len,
    )


def _prefill_whole(serving: Serving, context: HostContext, start: int, requests: int) -> None:
    """Prefills over whole contexts in the host's format, behind ``start`` decodes."""
    if start + requests > serving.max_requests:
        return
    plan = _host_plan(serving, context, start, requests).prefills
    chosen = without_memory(start + plan.num_tokens, serving.topk)[start:]
    for piece, rows, _ in context.selected(0, chosen, plan):
        _prefill(serving, rows, piece.stop - piece.start)


def _prefill_contexts(serving: Serving, context: HostContext, start: int, requests: int) -> None:
    """Prefills over whole contexts, behind ``start`` decodes of one token."""
    if start + requests > serving.max_requests:
        return
    plan = _host_plan(serving, context, start, requests)
    prefills, fmt, tokens = plan.prefills, cast(CacheFormat, serving.cache_format), plan.num_tokens
    slots = to_slots(
        without_memory(tokens, serving.topk)[start:],
        prefills.page_table,
        prefills.request_ids,
        page_size=serving.page_size,
        workspace_starts=prefills.workspace_starts,
        prefill_request_ids=prefills.prefill_request_ids,
    )
    q, q_rope = _queries(serving, fmt, tokens)
    out = without_memory(tokens, serving.num_heads, fmt.value_dim, dtype=torch.bfloat16)
    lse = without_memory(tokens, serving.num_heads, dtype=torch.float32)
    context.start(prefills)
    for layer, (number, chunk) in itertools.product(range(2), enumerate(prefills.prefill_chunks)):
        of_chunk = slice(start + chunk.tokens.start, start + chunk.tokens.stop)
        sparse_prefill(
            q[of_chunk],
            context.rows(layer, number),
            slots[chunk.tokens],
            q_rope=None if q_rope is None else q_rope[of_chunk],
            softmax_scale=1.0,
            allow_fp8_mma=serving.allow_fp8_mma,
            out=out[of_chunk],
            lse=lse[of_chunk],
        )


def _search_compressed(serving: Serving, kernels_of: KernelsOf) -> None:
    """Run every op of DeepSeek-V4's layers at sizes that reach all of its kernels."""
    fmt, search = cast(CacheFormat, serving.cache_format), _Search(serving, kernels_of)
    in_steps, in_decodes = serving.max_tokens, serving.max_decodes
    poolings = [Pooling(ratio, overlap=ratio == SELECTED) for ratio in serving.ratios if ratio]
    search(_project, limit=in_steps)
    search(_find_window, limit=in_steps)
    for pooling in poolings:
        search(_find_entries, pooling.ratio, limit=in_steps)
    caches = serving.caches(fmt)  # of raw rows, and of entries
    streams: list[_Stream | None] = [None]
    for cache in caches:
        search(_write_rows, cache, limit=in_steps)
        for pooling in poolings:
            search(_pool, cache, pooling, limit=in_steps)
            if pooling.ratio == SELECTED:
                streams.append(_Stream(cache, serving.topk, has_lengths=False))
            else:
                widths = serving.entry_widths(pooling.ratio)
                streams += [_Stream(cache, width, has_lengths=True) for width in widths]
    for cache, extra in itertools.product(caches, streams):
        search(_attend_to_both, cache, extra, True, limit=in_decodes, every=EVERY)
        search(_attend_to_both, cache, extra, False, limit=in_steps)
    if SELECTED not in serving.ratios or not serving.index_heads:
        return
    search(_prepare_queries, limit=in_steps)
    search(_find_slots, limit=in_steps)
    key_caches = serving.caches(INDEX_FP8)
    _search_selection(serving, key_caches[0], kernels_of)
    for keys in key_caches:
        search(_pool, keys, Pooling(SELECTED, overlap=True), limit=in_steps)
        for pages in (1, 16, 3):
            if pages <= serving.columns:
                _score_keys(serving, keys, pages)


class _Stream(NamedTuple):
    """Entries that tokens attend to: ``width`` of them, or as many as the lengths say."""

    cache: PagedCache
    width: int
    has_lengths: bool


def _tokens(size: int) -> dict[str, Any]:
    """Positions and requests of a step's tokens."""
    return {
        "positions": without_memory(size, dtype=torch.int64),
        "request_ids": without_memory(size),
    }


def _rope_table(serving: Serving) -> Tensor:
    return without_memory(serving.max_positions, ROPE_DIM, dtype=serving.table_dtype)


def _find_window(serving: Serving, tokens: int) -> None:
    visible_slots(
        **_tokens(tokens),
        page_table=without_memory(min(tokens, serving.max_requests), serving.columns_of(1)),
        width=serving.sliding_window,
        page_size=serving.page_size,
    )


def _find_entries(serving: Serving, ratio: int, tokens: int) -> None:
    page_table = without_memory(min(tokens, serving.max_requests), serving.columns_of(ratio))
    rows: dict[str, Any] = {
        "page_table": page_table,
        "ratio": ratio,
        "page_size": serving.page_size,
    }
    entry_slots(**_tokens(tokens), **rows)
    if ratio != SELECTED:
        for width in serving.entry_widths(ratio):
            visible_slots(**_tokens(tokens), **rows, width=width)


def _write_rows(serving: Serving, cache: PagedCache, tokens: int) -> None:
    """Raw rows, and the norm and rotation of queries."""
    dim = cache.format.head_dim
    q = without_memory(tokens, serving.num_heads, dim, dtype=torch.bfloat16)
    fused_rope_rmsnorm_quant(
        q,
        without_memory(tokens, dim, dtype=torch.bfloat16),
        _rope_table(serving),
        without_memory(dim, dtype=torch.bfloat16),
        cache,
        positions=without_memory(tokens, dtype=torch.int64),
        slot_mapping=without_memory(tokens, dtype=torch.int64),
        query_norm=True,
        out=torch.empty_like(q),
    )


def _pool(serving: Serving, cache: PagedCache, pooling: Pooling, tokens: int) -> None:
    """Entries or index keys of the windows that a step closes."""
    dim = cache.format.head_dim
    width = pooling.width(dim)
    requests = min(tokens, serving.max_requests)
    pool_windows(
        without_memory(tokens, width, dtype=torch.bfloat16),
        without_memory(tokens, width, dtype=torch.bfloat16),
        without_memory(dim, dtype=torch.bfloat16),
        _rope_table(serving),
        WindowState.allocate(
            pooling,
            dim,
            num_rings=serving.max_requests,
            max_drafts=serving.max_query_len - 1,
            device="meta",
        ),
        cache,
        pooling=pooling,
        gate_bias=without_memory(pooling.ratio, width, dtype=torch.float32),
        **_tokens(tokens),
        input_row_offsets=without_memory(requests + 1),
        ring_ids=without_memory(requests),
        slot_mapping=without_memory(tokens),
    )


def _prepare_queries(serving: Serving, tokens: int) -> None:
    heads = serving.index_heads
    prepare_index_queries(
        without_memory(tokens, heads, INDEX_FP8.head_dim, dtype=torch.bfloat16),
        without_memory(tokens, heads, dtype=torch.bfloat16),
        _rope_table(serving),
        positions=without_memory(tokens, dtype=torch.int64),
        interleaved=True,
        rope_first=False,
    )


def _attend_to_both(
    serving: Serving, raw: PagedCache, extra: _Stream | None, decodes: bool, tokens: int
) -> None:
    """One softmax over the window and the entries of a second stream."""
    rows = (tokens, 1) if decodes else (tokens,)
    attend: Callable[..., object] = sparse_decode if decodes else sparse_prefill
    second: dict[str, object] = {}
    if extra is not None:
        second = {
            "extra_cache": extra.cache,
            "extra_topk_indices": without_memory(*rows, extra.width),
            "extra_topk_lengths": without_memory(tokens) if extra.has_lengths else None,
        }
    attend(
        without_memory(*rows, serving.num_heads, raw.format.head_dim, dtype=torch.bfloat16),
        raw,
        without_memory(*rows, serving.sliding_window),
        softmax_scale=1.0,
        topk_lengths=without_memory(tokens),
        attn_sink=without_memory(serving.num_heads, dtype=torch.float32),
        **second,
    )


def _project(serving: Serving, tokens: int) -> None:
    """The first output projection, with e4m3 and with bfloat16 weights."""
    dim = cast(CacheFormat, serving.cache_format).head_dim
    shape = serving.groups, serving.group_width, serving.num_heads // serving.groups * dim
    blocks = shape[0], -(-shape[1] // 128), -(-shape[2] // 128)
    for weight in (
        HeadWeight(without_memory(*shape, dtype=torch.bfloat16)),
        HeadWeight(
            without_memory(*shape, dtype=torch.float8_e4m3fn),
            without_memory(*blocks, dtype=torch.float32),
        ),
    ):
        project_groups(
            without_memory(tokens, serving.num_heads, dim, dtype=torch.bfloat16),
            weight,
            cos_sin_cache=_rope_table(serving),
            positions=without_memory(tokens, dtype=torch.int64),
        )
