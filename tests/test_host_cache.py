"""Rows in host memory: registration, ranks in turn, and errors."""

from __future__ import annotations

import contextlib
import itertools
import os
from types import SimpleNamespace

import pytest
import torch

from processes import on_two_ranks
from sparsemla import (
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    HostCache,
    PagedCache,
    dense_decode,
    e4m3_format,
    gather_dequant,
    host_cache,
    numa,
    pinned,
    sparse_decode,
    sparse_prefill,
)
from sparsemla.pinned import HostMemory


class Cudart:
    """Registrations of a driver that refuses one of them.

    Args:
        fails_at: number of the registration that gets an error; None for none.
        code: the error.
    """

    def __init__(self, fails_at=None, code=2):
        self.fails_at, self.code = fails_at, code
        self.calls, self.registered, self.cleared = 0, {}, 0

    def cudaHostRegister(self, address, size, flags):
        assert flags == 2
        self.calls += 1
        if self.calls - 1 == self.fails_at:
            return self.code
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address):
        return 0 if self.registered.pop(address, None) else 713


@pytest.fixture
def with_driver(monkeypatch):
    """Installs a driver's registrations for a device ``cuda:0`` of tensors on the CPU."""

    def install(fails_at=None, code=2):
        return install_driver(monkeypatch, Cudart(fails_at, code))

    return install


def install_driver(monkeypatch, cudart):
    def clear(device):
        cudart.cleared += 1

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(host_cache, "check_device", lambda name, device: None)
    monkeypatch.setattr(host_cache, "alias", lambda rows, device: rows)
    monkeypatch.setattr(host_cache, "node_of_gpu", lambda index: None)
    monkeypatch.setattr(pinned, "_forget_error", clear)
    monkeypatch.setattr(pinned, "MAX_PIECE", 300_000)
    return cudart


def allocate(format=FP8_DS_MLA, num_pages=10, device="cpu", **options):
    return HostCache.allocate(format, num_pages, 64, num_layers=2, device=device, **options)


@pytest.mark.parametrize("format", [FP8_DS_MLA, FP8_584, BF16_576, e4m3_format()])
def test_layers_are_caches_as_allocated(format):
    rows, slots = torch.randn(7, format.head_dim), torch.tensor([0, 63, 64, 200, -1, 639, 3])
    with allocate(format) as host:
        assert (host.num_slots, host.num_layers, host.page_size) == (640, 2, 64)
        host.layer(0).write(slots, rows)
        host.layer(1).write(slots, 2 * rows)
        for layer, factor in ((0, 1), (1, 2)):
            cache = host.layer(layer)
            cache.check_layout()
            plain = PagedCache.allocate(format, 10, 64)
            plain.write(slots, factor * rows)
            assert torch.equal(cache.data, plain.data)
            assert cache.scales is None or torch.equal(cache.scales, plain.scales)
        scales = 0 if plain.scales is None else plain.scales.nbytes
        assert host.memory_bytes == 2 * (10 * format.page_bytes(64) + scales)


def test_pieces_end_at_pages_and_cover_all(with_driver):
    cudart = with_driver()
    host = allocate(device="cuda:0")
    start = host.layer(0).data.data_ptr()
    pieces = sorted(cudart.registered.items())
    assert pieces[0][0] == start
    assert all(a + size == b for (a, size), (b, _) in itertools.pairwise(pieces))
    assert sum(cudart.registered.values()) == host.memory_bytes == 20 * 64 * 656
    assert len(pieces) == 5
    for address, size in pieces[:-1]:
        assert size <= pinned.MAX_PIECE
        assert (address + size - start) % (64 * 656) == (address + size) % 4096 == 0
    host.close()
    assert cudart.registered == {} == pinned._LIVE
    host.close()
    assert host.closed
    assert cudart.calls == 5


@pytest.mark.parametrize("fails_at", range(5))
def test_a_piece_that_cannot_be_registered_releases_all(with_driver, fails_at):
    cudart = with_driver(fails_at)
    with pytest.raises(
        ValueError,
        match=rf"num_pages: 839680 bytes .* cuda:0, but piece {fails_at + 1} of 5, 167936 bytes, "
        r"got cudaErrorMemoryAllocation \(2\); the limit of locked memory \(ulimit -l\) is",
    ):
        allocate(device="cuda:0")
    assert cudart.registered == {} == pinned._LIVE
    assert cudart.cleared == 1


def test_errors_without_a_name(with_driver):
    with_driver(0, code=999)
    with pytest.raises(ValueError, match=r"got error \(999\)"):
        allocate(device="cuda:0")


def test_scales_that_cannot_be_registered_release_the_rows(with_driver):
    cudart = with_driver(3)
    with pytest.raises(ValueError, match=r"num_pages: 25600 bytes of .* piece 1 of 1"):
        allocate(e4m3_format(), device="cuda:0")
    assert cudart.calls == 4
    assert cudart.registered == {}


def test_an_unregistration_that_fails_is_said(with_driver):
    cudart = with_driver()
    host = allocate(device="cuda:0")
    cudart.registered.clear()
    with pytest.raises(ValueError, match=r"unregistered: cudaErrorHostMemoryNotRegistered \(713\)"):
        host.close()
    pinned._LIVE.clear()


def of_ranks(rank, failures):
    """The registrations that remain on a rank, and its error, for each (rank, piece) to fail."""
    seen = []
    for failing, piece in failures:
        with pytest.MonkeyPatch.context() as patch:
            cudart = install_driver(patch, Cudart(piece if rank == failing else None))
            try:
                host = allocate(device="cuda:0", group=torch.distributed.group.WORLD)
            except ValueError as error:
                seen.append((len(cudart.registered), cudart.calls, str(error)))
            else:
                seen.append((len(cudart.registered), cudart.calls, None))
                host.close()
                assert cudart.registered == {}
    with pytest.raises(ValueError, match=r"rank 1 of 2 could not .*: num_pages must be at least 1"):
        allocate(num_pages=1 - rank, group=torch.distributed.group.WORLD)
    return seen


def test_ranks_all_have_a_cache_or_none(tmp_path):
    failures = [(None, 0), (0, 0), (0, 3), (1, 0), (1, 4)]
    for rank, seen in enumerate(on_two_ranks(tmp_path, "cpu", of_ranks, failures)):
        for (failing, piece), (registered, calls, error) in zip(failures, seen, strict=True):
            if failing is None:
                assert (registered, error) == (5, None)
                continue
            assert registered == 0
            assert f"rank {failing} of 2 could not allocate, so no rank did" in error
            assert f"but piece {piece + 1} of 5" in error
            # A rank whose turn comes after the failure does not begin.
            assert calls == (piece + 1 if rank == failing else 5 if rank < failing else 0)


def test_more_than_the_host_has(monkeypatch):
    monkeypatch.setattr(host_cache, "available_bytes", lambda: 1_000_000)
    with pytest.raises(
        ValueError,
        match="num_pages must be at most 11, for which 1000000 free bytes of the host suffice, "
        "got 12, which take 1007616",
    ):
        allocate(num_pages=12)
    allocate(num_pages=11).close()


def test_free_bytes_are_known_on_linux():
    free = pinned.available_bytes()
    assert free is not None
    assert 1 << 20 < free < 1 << 60


def test_a_closed_cache_is_refused():
    host = allocate()
    host.close()
    with pytest.raises(ValueError, match="host must be open, got a HostCache that was closed"):
        host.layer(0)
    assert "closed" in repr(host)


def test_a_forked_process_is_refused():
    host = allocate()
    child = os.fork()
    if child == 0:
        try:
            host.layer(0)
        except ValueError as error:
            host.close()  # forgets the rows of the parent
            os._exit(0 if "allocated before it forked" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    host.layer(0)


def test_a_fork_leaves_the_registrations_to_the_parent(with_driver):
    cudart = with_driver()
    host = allocate(device="cuda:0")
    child = os.fork()
    if child == 0:
        host.close()
        os._exit(len(cudart.registered))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    host.close()


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_pages must be at least 1, got 0"):
        allocate(num_pages=0)
    with pytest.raises(ValueError, match=r"layer_idx must be below 2, got 2"):
        allocate().layer(2)
    with pytest.raises(ValueError, match="device must be a GPU or cpu, got 'mps'"):
        allocate(device="mps")
    with pytest.raises(TypeError, match="group must be a ProcessGroup, got str"):
        allocate(group="all")


@pytest.fixture
def host_with_two_nodes(monkeypatch, tmp_path):
    """A GPU on node 1, and rows where the test says."""
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(numa, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(numa, "MAPPINGS", tmp_path / "numa_maps")
    folder = tmp_path / "0000:dc:03.0"
    folder.mkdir()
    (folder / "numa_node").write_text("1\n")
    taken = HostMemory.__init__

    def place(counts):
        def take(memory, num_bytes):
            taken(memory, num_bytes)
            start = memory.bytes.data_ptr()
            lines = [
                f"{start - 8192:x} bind:0 anon=9 N0=9 kernelpagesize_kB=4",
                f"{start:x} default anon=8 dirty=8 {counts} kernelpagesize_kB=4",
                f"{start + (1 << 40):x} default file=/a N0=7 kernelpagesize_kB=4",
            ]
            (tmp_path / "numa_maps").write_text("\n".join(lines))

        monkeypatch.setattr(HostMemory, "__init__", take)
        return folder

    return place


def test_rows_on_the_node_of_the_gpu(with_driver, monkeypatch, host_with_two_nodes):
    with_driver()
    monkeypatch.setattr(host_cache, "node_of_gpu", numa.node_of_gpu)
    folder = host_with_two_nodes("N1=8")
    with allocate(device="cuda:0") as host:
        assert host.numa_nodes == (1, {1: 1.0})
        (folder / "numa_node").write_text("-1\n")  # the system does not know
        assert host.numa_nodes == (None, {1: 1.0})
        numa.MAPPINGS.unlink()
        assert host.numa_nodes == (None, {})


def test_rows_on_another_node_than_the_gpu_are_named(with_driver, monkeypatch, host_with_two_nodes):
    cudart = with_driver()
    monkeypatch.setattr(host_cache, "node_of_gpu", numa.node_of_gpu)
    folder = host_with_two_nodes("N0=6 N1=2")
    with pytest.warns(
        UserWarning,
        match=r"rows should be on NUMA node 1 of cuda:0, got 75% on node 0; .* --membind=1",
    ) as warned:
        host = allocate(device="cuda:0")
    assert warned[0].filename == __file__
    host.close()
    assert not cudart.registered
    (folder / "numa_node").write_text("-1\n")
    allocate(device="cuda:0").close()


def test_the_nodes_of_this_machine():
    with allocate() as host:
        gpu, rows = host.numa_nodes
        assert gpu is None
        assert sum(rows.values()) == pytest.approx(1) if numa.MAPPINGS.exists() else rows == {}


def test_attention_refuses_rows_of_the_host():
    q = torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16)
    slots, table = torch.zeros(1, 1, 4, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    lens = torch.ones(1, dtype=torch.int32)
    with allocate() as host:
        rows = host.layer(0)
        for attend in (
            lambda: sparse_decode(q, rows, slots, softmax_scale=1.0),
            lambda: dense_decode(q, rows, table, lens, softmax_scale=1.0),
            lambda: sparse_prefill(q[0], rows, slots[0], softmax_scale=1.0),
        ):
            with pytest.raises(ValueError, match="must hold rows in the memory of the device"):
                attend()
        out = torch.full((4, 576), -1.0, dtype=torch.bfloat16)
        gather_dequant(rows, table, lens, lens, out=out)
        assert (out[1] == 0).all()


def test_a_cache_without_memory():
    host = allocate(num_pages=1 << 30, device="meta")
    assert host.layer(1).data.shape == (1 << 30, 64, 656)
    host.close()
    assert host.closed


def test_a_capsule_has_the_same_memory():
    """The way out if torch does not take registered memory by its array interface."""
    rows = torch.arange(100, dtype=torch.uint8)
    alias = pinned.from_capsule(rows[4:], pinned.DLPACK_CPU, 0)
    assert alias.data_ptr() == rows.data_ptr() + 4
    alias[0] = 77
    assert rows[4] == 77
    del rows
    assert len(pinned._EXPORTED) == 1
    assert alias.tolist() == [77, *range(5, 100)]
    del alias
    assert not pinned._EXPORTED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_writes_through_to_the_host():
    with allocate(device="cuda") as host:
        layer = host.layer(1)
        assert layer.data.is_cuda
        slots, rows = torch.tensor([5, 630]), torch.randn(2, 576)
        layer.write(slots.cuda(), rows.cuda())
        torch.cuda.synchronize()
        expected = PagedCache.allocate(FP8_DS_MLA, 10, 64, device="cpu")
        expected.write(slots, rows)
        assert torch.equal(layer.data.cpu(), expected.data)
        memory = host._memories[0].bytes.view(2, 10, 64, 656)
        assert torch.equal(memory[1], expected.data)
