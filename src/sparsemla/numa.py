"""The NUMA nodes of GPUs and of memory, as Linux names them."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

PCI_DEVICES = Path("/sys/bus/pci/devices")
MAPPINGS = Path("/proc/self/numa_maps")
"""A line for each mapping of this process: its first address, and its pages on each node."""


def node_of_gpu(index: int) -> int | None:
    """The node of a GPU; None if it is not known, as on hosts with one."""
    found: Any = torch.cuda.get_device_properties(index)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        domain, bus, device = found.pci_domain_id, found.pci_bus_id, found.pci_device_id
        path = PCI_DEVICES / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "numa_node"
        node = int(path.read_text(encoding="ascii"))
        return node if node >= 0 else None
    return None


def nodes_of_memory(addresses: Iterable[int]) -> dict[int, float]:
    """The share of the pages of these mappings on each node; empty if it is not known."""
    pages: Counter[int] = Counter()
    with contextlib.suppress(OSError):
        # Neighbours of one kind are one mapping: look for the last one that begins before.
        mappings = {
            int(line.partition(" ")[0], 16): line
            for line in MAPPINGS.read_text(encoding="utf-8", errors="replace").splitlines()
        }
        starts = {
            max((start for start in mappings if start <= address), default=-1)
            for address in addresses
        }
        for start in starts & mappings.keys():
            for node, count in re.findall(r" N(\d+)=(\d+)", mappings[start]):
                pages[int(node)] += int(count)
    return {node: count / pages.total() for node, count in sorted(pages.items())}
