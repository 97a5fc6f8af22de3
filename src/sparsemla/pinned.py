"""Host memory that a GPU reads and writes, registered with its driver and seen as a tensor."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_PIECE = 64 << 30
"""Most bytes of one registration: calls with more than 512 GiB fail on any machine."""
OS_PAGE = 4096
MAPPED = 2
"""``cudaHostRegisterMapped``: the GPU gets an address for the memory."""
CUDA_ERRORS = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    46: "cudaErrorDevicesUnavailable",
    100: "cudaErrorNoDevice",
    304: "cudaErrorOperatingSystem",
    712: "cudaErrorHostMemoryAlreadyRegistered",
    713: "cudaErrorHostMemoryNotRegistered",
    800: "cudaErrorNotPermitted",
    801: "cudaErrorNotSupported",
}
"""Names of the errors of registrations; :func:`torch.cuda.cudart` has their sentences only."""


class HostMemory:
    """Anonymous memory of this process, zeroed and touched.

    Args:
        num_bytes: its exact size.
    """

    def __init__(self, num_bytes: int) -> None:
        try:
            mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise ValueError(f"num_pages: the host has no {num_bytes} bytes: {error}") from error
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock and to translate
        self._mapping = mapping
        self._registered: list[int] = []
        self.bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self.bytes[::OS_PAGE] = 0

    def register(self, device: torch.device, granule: int) -> None:
        """Register the memory in pieces that end at multiples of ``granule``.

        Raises:
            ValueError: the driver refuses; the pieces before are still registered.
        """
        with contextlib.suppress(OSError, AttributeError):
            # A child's writes, or ours after a fork, would move pages away from the GPU.
            self._mapping.madvise(mmap.MADV_DONTFORK)
        start, size = self.bytes.data_ptr(), self.bytes.numel()
        piece = max(MAX_PIECE // granule, 1) * granule
        with torch.cuda.device(device):
            for first in range(0, size, piece):
                count = min(piece, size - first)
                code = int(torch.cuda.cudart().cudaHostRegister(start + first, count, MAPPED))
                if code:
                    _forget_error(device)
                    part = f"piece {first // piece + 1} of {-(-size // piece)}, {count} bytes"
                    raise ValueError(
                        f"num_pages: {size} bytes of host memory must be registered with {device}, "
                        f"but {part}, got {_error(code)}; {_limits()}"
                    )
                self._registered.append(start + first)
                _LIVE[start] = self._mapping

    def release(self) -> list[str]:
        """Take the registrations back; the errors, if there are any."""
        errors = []
        for address in self._registered:
            if code := int(torch.cuda.cudart().cudaHostUnregister(address)):
                errors.append(_error(code))
        if not errors:
            _LIVE.pop(self.bytes.data_ptr(), None)
        self._registered = []
        return errors


_LIVE: dict[int, mmap.mmap] = {}
"""Memory that is registered. It must not be unmapped, even if its cache was lost."""


def available_bytes() -> int | None:
    """Bytes that this process may take: free on the host, within its control group; None: unknown.

    The limit of the control group counts without the memory that it uses already, of which files in
    the page cache are a part.
    """
    limits = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        limits.append(int(line.split()[1]) * 1024)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path("/sys/fs/cgroup", name).read_text(encoding="ascii")))
    return min(limits) if limits else None


def _limits() -> str:
    """The limit of locked memory, and what else makes registrations fail."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    return (
        f"the limit of locked memory (ulimit -l) is {locked}; containers and confidential "
        "computing may forbid it too"
    )


def _error(code: int) -> str:
    name = CUDA_ERRORS.get(code, "error")
    return f"{name} ({code})"


def _forget_error(device: torch.device) -> None:
    """Clear CUDA's last error, which the next launch would raise in place of its own."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


class _Registered:
    """Registered host memory as a GPU sees it, for ``torch.as_tensor``."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows  # whoever has the alias has the memory
        self.__cuda_array_interface__ = {
            "shape": tuple(rows.shape),
            "typestr": "|u1",
            "data": (rows.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def alias(rows: Tensor, device: torch.device) -> Tensor:
    """Registered bytes of the host as a tensor of a GPU, without a copy.

    torch asks the driver where the memory belongs, and copies what belongs elsewhere. So one byte
    is tried first, and DLPack, where nobody is asked, is the way out.
    """
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if torch.as_tensor(_Registered(rows[:1]), device=device).data_ptr() == rows.data_ptr():
            return torch.as_tensor(_Registered(rows), device=device)
    return from_capsule(rows, DLPACK_CUDA, device.index)


DLPACK_CPU, DLPACK_CUDA = 1, 2


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [
    ("tensor", _DLTensor),
    ("manager", ctypes.c_void_p),
    ("deleter", _DELETER),
]
_EXPORTED: dict[int, tuple[Any, ...]] = {}
"""What an exported tensor needs, by the address of its record, until its deleter is called."""


@_DELETER
def _delete(managed: Any) -> None:  # noqa: ANN401
    _EXPORTED.pop(ctypes.addressof(managed.contents), None)


def from_capsule(rows: Tensor, device_type: int, device_id: int) -> Tensor:
    """Bytes ``[n]`` at the same address as a tensor of another device, by a DLPack capsule."""
    shape = (ctypes.c_int64 * 1)(rows.numel())
    managed = _DLManagedTensor(
        _DLTensor(rows.data_ptr(), device_type, device_id, 1, 1, 8, 1, shape, None, 0),
        None,
        _delete,
    )
    _EXPORTED[ctypes.addressof(managed)] = (managed, shape, rows)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    return torch.from_dlpack(new(ctypes.addressof(managed), b"dltensor", None))
