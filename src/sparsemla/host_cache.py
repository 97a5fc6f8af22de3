"""Latent rows of all layers in host memory, which a GPU reads and writes over its link.

A page id names index keys on the GPU and latent rows on the host, so page tables, prefix sharing
and preemption of an engine stay as they are.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, cast

import torch
from torch import Tensor, distributed

from sparsemla.cache import HostLayer
from sparsemla.formats import CacheFormat, as_format
from sparsemla.numa import node_of_gpu, nodes_of_memory
from sparsemla.pinned import OS_PAGE, HostMemory, alias, available_bytes
from sparsemla.validation import check_device, check_integer, check_kind


class NumaNodes(NamedTuple):
    """Where a GPU and the rows of a :class:`HostCache` are, in a host with several memories.

    Attributes:
        gpu: the node of the GPU; None if the system does not name it, or without a GPU.
        rows: the share of the rows on each node; empty if the system does not tell.
    """

    gpu: int | None
    rows: dict[int, float]


class HostCache:
    """Latent rows of all layers in host memory, which the GPU reads and writes as tensors.

    :meth:`allocate` makes one. Ops that write caches write through to the host, and
    :func:`sparsemla.gather_dequant` and :func:`sparsemla.fetch_rows` read from it. Attention reads
    rows on the GPU and refuses these.

    The memory is registered with the GPU and so locked. :meth:`close`, or the end of a ``with``
    block, waits for the device and releases it; nothing else does. Layers must not be used after
    that. A forked process must not use a cache of its parent.

    Attributes:
        format: the format of a row.
        num_layers: number of layers.
        num_pages: pages of each layer.
        page_size: tokens of a page.
        device: the device that reads and writes the rows.
        memory_bytes: of host memory.

    >>> from sparsemla import FP8_DS_MLA
    >>> with HostCache.allocate(FP8_DS_MLA, 8, 64, num_layers=2, device="cpu") as host:
    ...     host.layer(1).write(torch.tensor([3, 64]), torch.randn(2, 576))
    ...     host
    HostCache(fp8_ds_mla, 8 pages of 64 rows in each of 2 layers, 671744 bytes for cpu)
    """

    def __init__(
        self,
        format: CacheFormat | str,
        num_pages: int,
        page_size: int,
        *,
        num_layers: int,
        device: torch.device | str | None = None,
    ) -> None:
        fmt = as_format("format", format)
        for name, size in (
            ("num_pages", num_pages),
            ("page_size", page_size),
            ("num_layers", num_layers),
        ):
            check_integer(name, size, 1)
        check_device("device", device)
        self.format, self.num_pages, self.page_size = fmt, int(num_pages), int(page_size)
        self.num_layers = int(num_layers)
        self.device = indexed(torch.get_default_device() if device is None else device)
        self._pid = os.getpid()
        # [num_layers, num_pages] pages of rows, and of scales for formats with a tensor of them
        lead = self.num_layers, self.num_pages
        row_bytes, scale_bytes = fmt.page_bytes(self.page_size), 0
        if fmt.scales_in == "tensor":
            scale_bytes = self.page_size * fmt.num_scales * fmt.scale_dtype.itemsize
        self.memory_bytes = math.prod(lead) * (row_bytes + scale_bytes)
        if self.device.type != "meta":
            self._check_room()
        self._memories: list[HostMemory] = []
        self._layers: list[HostLayer] = []
        try:
            rows = self._take(*lead, row_bytes).view(fmt.storage_dtype)
            rows = rows[..., : self.page_size * fmt.row_width]
            rows = rows.unflatten(-1, (self.page_size, fmt.row_width))
            scales: Sequence[Tensor | None] = [None] * self.num_layers
            if scale_bytes:
                pages = self._take(*lead, scale_bytes).view(fmt.scale_dtype)
                scales = [*pages.unflatten(-1, (self.page_size, fmt.num_scales))]
            self._layers += map(HostLayer, rows, itertools.repeat(fmt), scales)
            if self.device.type == "cuda":
                self._check_nodes()
        except BaseException:
            self.close()
            raise

    @classmethod
    def allocate(
        cls,
        format: CacheFormat | str,
        num_pages: int,
        page_size: int,
        *,
        num_layers: int,
        device: torch.device | str | None = None,
        group: distributed.ProcessGroup | None = None,
    ) -> HostCache:
        """Allocate zeroed rows in memory of exactly their size, and register it with the GPU.

        This process touches the memory first, so that its NUMA policy decides where it lies
        (``numactl --membind``); a warning names rows on another node than the GPU's. Registration
        takes about 0.1 s for each GB. The layout is
        ``[num_layers, num_pages, page_size, row]``.

        Args:
            format: the format of a row, or its name.
            num_pages: pages of each layer.
            page_size: tokens of a page.
            num_layers: number of layers.
            device: a GPU; ``cpu`` for plain tensors by the same code, ``meta`` for tensors without
                memory; default torch's default device.
            group: ranks that allocate together, each its own cache. They take turns, because
                registrations of several processes at once stall a host, and all have a cache or
                none. A group of gloo waits without a GPU. Its timeout must cover all turns.

        Raises:
            TypeError, ValueError: an argument of the wrong kind, a size out of range, more bytes
                than the host has, memory that cannot be registered, or a rank of the group that
                failed. Nothing stays allocated or registered.
        """
        make = functools.partial(
            cls, format, num_pages, page_size, num_layers=num_layers, device=device
        )
        if group is None:
            return make()
        check_kind("group", group, distributed.ProcessGroup)
        return _in_turn(make, group)

    def __repr__(self) -> str:
        of_layers = f"{self.num_pages} pages of {self.page_size} rows in each of {self.num_layers}"
        size = "closed" if self.closed else f"{self.memory_bytes} bytes for {self.device}"
        return f"HostCache({self.format.name}, {of_layers} layers, {size})"

    def __enter__(self) -> HostCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_slots(self) -> int:
        """Rows of one layer, ``num_pages * page_size``."""
        return self.num_pages * self.page_size

    @property
    def numa_nodes(self) -> NumaNodes:
        """The NUMA nodes of the GPU and of the rows, read from the system at each access."""
        gpu = node_of_gpu(self.device.index) if self.device.type == "cuda" else None
        return NumaNodes(gpu, self._nodes_of_rows())

    def _nodes_of_rows(self) -> dict[int, float]:
        return nodes_of_memory(memory.bytes.data_ptr() for memory in self._memories)

    @property
    def closed(self) -> bool:
        """Whether the memory was released."""
        return not self._layers

    def layer(self, layer_idx: int) -> HostLayer:
        """The rows of a layer: on a GPU, a CUDA tensor over host memory.

        Raises:
            TypeError: layer_idx is not an integer.
            ValueError: layer_idx is out of range; the cache is closed, or belongs to the process
                that this one was forked from.
        """
        check_integer("layer_idx", layer_idx, 0, self.num_layers)
        self.check_open()
        return self._layers[layer_idx]

    def check_open(self) -> None:
        """Check that this process may use the rows.

        Raises:
            ValueError: the cache is closed, or belongs to the process that this one was forked
                from.
        """
        if self.closed:
            raise ValueError("host must be open, got a HostCache that was closed")
        # torch.compile does not trace getpid.
        if not torch.compiler.is_compiling() and os.getpid() != self._pid:
            raise ValueError(
                f"host must be of this process, {os.getpid()}, got a HostCache that process "
                f"{self._pid} allocated before it forked; allocate it in the process that uses it"
            )

    def close(self) -> None:
        """Wait for the device and release the memory; the second call does nothing.

        In a forked process, whose parent has the memory, it only forgets the rows.

        Raises:
            ValueError: the driver refused to take a registration back.
        """
        memories, self._memories = self._memories, []
        self._layers.clear()
        if self.device.type == "cuda" and memories and os.getpid() == self._pid:
            torch.cuda.synchronize(self.device)
            errors = [error for memory in memories for error in memory.release()]
            if errors:
                raise ValueError(f"host memory could not be unregistered: {'; '.join(errors)}")

    def _take(self, num_layers: int, num_pages: int, page_bytes: int) -> Tensor:
        """Memory ``[num_layers, num_pages, page_bytes]``, uint8, as the device sees it."""
        if self.device.type == "meta":
            return torch.empty(num_layers, num_pages, page_bytes, dtype=torch.uint8, device="meta")
        memory = HostMemory(num_layers * num_pages * page_bytes)
        self._memories.append(memory)
        seen = memory.bytes
        if self.device.type == "cuda":
            # A copy of a page then lies in one piece.
            memory.register(self.device, math.lcm(page_bytes, OS_PAGE))
            seen = alias(memory.bytes, self.device)
        return seen.view(num_layers, num_pages, page_bytes)

    def _check_nodes(self) -> None:
        """Warn of rows that reach the GPU by way of another node."""
        gpu = node_of_gpu(self.device.index)
        if gpu is None:
            return
        remote = {node: share for node, share in self._nodes_of_rows().items() if node != gpu}
        if remote:
            shares = ", ".join(f"{share:.0%} on node {node}" for node, share in remote.items())
            warnings.warn(
                f"HostCache: rows should be on NUMA node {gpu} of {self.device}, got {shares}; "
                f"run the process under numactl --cpunodebind={gpu} --membind={gpu}",
                stacklevel=4,
            )

    def _check_room(self) -> None:
        """Check that the host has the bytes."""
        free = available_bytes()
        if free is not None and self.memory_bytes > free:
            fitting = free // (self.memory_bytes // self.num_pages)
            raise ValueError(
                f"num_pages must be at most {fitting}, for which {free} free bytes of the host "
                f"suffice, got {self.num_pages}, which take {self.memory_bytes}"
            )


def indexed(device: torch.device | str) -> torch.device:
    """The device with its number.

    Raises:
        ValueError: neither a GPU, a CPU, nor torch's device without memory.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"device must be a GPU or cpu, got {str(device)!r}")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _in_turn(make: Callable[[], HostCache], group: distributed.ProcessGroup) -> HostCache:
    """What ``make`` returns, called by one rank after the other; by all or, at last, by none."""
    made: HostCache | None = None
    try:
        for rank in range(group.size()):
            failure: Exception | None = None
            if rank == group.rank():
                try:
                    made = make()
                except Exception as error:
                    failure = error
            report = [None if failure is None else f"{type(failure).__name__}: {failure}"]
            # The next rank begins when it has this one's report.
            source = distributed.get_global_rank(group, rank)
            distributed.broadcast_object_list(report, source, group)
            if report[0] is not None:
                raise ValueError(
                    f"group: rank {rank} of {group.size()} could not allocate, so no rank did: "
                    f"{report[0]}"
                ) from failure
    except BaseException:
        if made is not None:
            made.close()
        raise
    return cast(HostCache, made)
