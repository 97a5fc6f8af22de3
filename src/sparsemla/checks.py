"""Argument checks of the public ops: dtypes, shapes, devices; never a value unless asked.

Shapes are written as letters and numbers, ``"B S H 576"``; a letter is bound by the first tensor
that has it and must agree from then on.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import cast

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import CacheFormat
from sparsemla.kinds import INTEGERS, LIMIT

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SIGNED = (torch.int32, torch.int64)
"""Where negative values have a meaning."""

Dtypes = torch.dtype | tuple[torch.dtype, ...]


class Checker:
    """Checks the tensors of one call; all on one device, letters of shapes in agreement."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.dims: dict[str, int] = {}
        self.device: torch.device | None = None

    def tensor(self, name: str, tensor: object, shape: str, dtypes: Dtypes) -> Tensor:
        """Check one tensor.

        Returns:
            The tensor; uint32 as int64, since torch and kernels compute little with it, and since
            its values from 2^31 on must stay beyond every range.

        Raises:
            TypeError: not a tensor, or a dtype that is not among ``dtypes``.
            ValueError: rank, size, device, or a last dimension that is not contiguous.
        """
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{self.op}: {name} must be a tensor, got {type(tensor).__name__}")
        dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
        if tensor.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            got = str(tensor.dtype).removeprefix("torch.")
            raise TypeError(f"{self.op}: {name} must have dtype {allowed}, got {got}")
        sizes = tensor.shape
        self._shape(name, sizes, shape)
        self._device(name, tensor.device)
        if sizes and sizes[-1] > 1 and tensor.stride()[-1] != 1 and tensor.numel():
            raise ValueError(
                f"{self.op}: {name} must be contiguous in its last dimension, "
                f"got strides {list(tensor.stride())}"
            )
        return tensor.long() if tensor.dtype == torch.uint32 else tensor

    def optional(
        self, name: str, tensor: Tensor | None, shape: str, dtypes: Dtypes
    ) -> Tensor | None:
        """Check a tensor that may be None; what :meth:`tensor` returns."""
        return None if tensor is None else self.tensor(name, tensor, shape, dtypes)

    def written(self, name: str, tensor: object, shape: str, dtypes: Dtypes) -> Tensor:
        """Check a tensor that is written: no two of its elements lie in one place."""
        tensor = self.tensor(name, tensor, shape, dtypes)
        strides = tensor.stride()
        if (
            tensor.numel()
            and 0 in strides
            and any(
                size > 1 for size, stride in zip(tensor.shape, strides, strict=True) if stride == 0
            )
        ):
            raise ValueError(
                f"{self.op}: {name} must have memory for each element, "
                f"got shape {list(tensor.shape)} of strides {list(strides)}"
            )
        return tensor

    def output(
        self,
        name: str,
        tensor: Tensor | None,
        shape: str,
        dtype: torch.dtype,
        others: tuple[torch.dtype, ...] = (),
    ) -> Tensor:
        """The caller's output tensor, checked, or a new one of ``dtype``."""
        if tensor is not None:
            return self.written(name, tensor, shape, (dtype, *others))
        return torch.empty(*self.sizes(shape), dtype=dtype, device=self.device)

    def workspace(self, workspace: Tensor | None, size: int) -> None:
        """Check that scratch memory that may be None holds ``size`` bytes, well aligned."""
        if workspace is None:
            return
        self.tensor("workspace", workspace, "bytes", torch.uint8)
        # Dynamo cannot ask for an offset; in compiled code the views refuse a wrong one.
        offset = 0 if torch.compiler.is_compiling() else workspace.storage_offset()
        if workspace.shape[0] < size or offset % 16:
            raise ValueError(
                f"{self.op}: workspace must hold {size} bytes from a multiple of 16 on, "
                f"got {workspace.shape[0]} at {offset}"
            )

    def number(self, name: str, value: object) -> None:
        """Check a factor or another real number; a tensor's would have to be waited for."""
        if not isinstance(value, (float, int)) and not isinstance(value, Real):
            raise TypeError(f"{self.op}: {name} must be a number, got {type(value).__name__}")

    def kind(self, name: str, value: object, kind: type) -> None:
        """Check the class of an argument that is no tensor."""
        if not isinstance(value, kind):
            raise TypeError(
                f"{self.op}: {name} must be a {kind.__name__}, got {type(value).__name__}"
            )

    def cache(self, name: str, cache: PagedCache) -> PagedCache:
        """Check a cache that an op reads or writes: one layer, this call's device."""
        self.kind(name, cache, PagedCache)
        if cache.num_layers is not None:
            raise ValueError(
                f"{self.op}: {name} must be one layer; this cache holds {cache.num_layers}, "
                f"pick one with {name}.layer(layer_idx)"
            )
        if cache.num_slots == 0:
            raise ValueError(f"{self.op}: {name} must have at least one page, got none")
        self._device(name, cache.data.device)
        return cache

    def head_dim(self, name: str, cache: PagedCache) -> None:
        """Check that the last dim of `name`, letter D, is the head_dim of the cache's format."""
        if self.dims["D"] != cache.format.head_dim:
            raise ValueError(
                f"{self.op}: {name} must have last dimension {cache.format.head_dim} for format "
                f"{cache.format.name}, got {self.dims['D']}"
            )

    def stream(self, name: str, cache: PagedCache, first: PagedCache) -> None:
        """Check a cache whose rows join those of another one."""
        self.cache(name, cache)
        dims = first.format.head_dim, first.format.value_dim
        if (cache.format.head_dim, cache.format.value_dim) != dims:
            raise ValueError(
                f"{self.op}: {name} must have rows of {dims[0]} dims of which {dims[1]} are the "
                f"value, as format {first.format.name} has, got format {cache.format.name}"
            )

    def query_dtype(self, cache: PagedCache) -> torch.dtype:
        """The dtype that indexer queries have for this key cache."""
        fmt = cache.format
        if fmt.num_scales > 1 or 0 < fmt.fp8_dim < fmt.head_dim:
            raise ValueError(
                f"{self.op}: cache must hold keys of one dtype and at most one scale a row, "
                f"got format {fmt.name}"
            )
        return torch.float8_e4m3fn if fmt.fp8_dim else torch.bfloat16

    def index_heads(self) -> None:
        """Check that indexer queries, letter HI, have heads: a score is a sum over them."""
        if self.dims["HI"] < 1:
            raise ValueError(f"{self.op}: q must have at least one head, got none")

    def rope_dim(self, name: str, rope_dim: int, head_dim: int) -> None:
        """Check a count of rotated dims."""
        if rope_dim % 2 or rope_dim > head_dim:
            raise ValueError(
                f"{self.op}: {name} must have an even last dimension of at most {head_dim}, "
                f"got {rope_dim}"
            )

    def writes(
        self,
        positions: Tensor,
        slot_mapping: Tensor,
        cos_sin_cache: Tensor,
        cache: PagedCache,
        validate: bool,
    ) -> Tensor:
        """Check where T tokens are written: slots in the cache, and positions in the RoPE table.

        Returns:
            The positions, as :meth:`tensor` returns them.
        """
        positions = self.tensor("positions", positions, "T", INTEGERS)
        self.tensor("slot_mapping", slot_mapping, "T", SIGNED)
        if self.validates(validate):
            self.values("positions", positions, 0, cos_sin_cache.shape[0])
            lowest = torch.iinfo(slot_mapping.dtype).min  # any negative slot is skipped
            self.values("slot_mapping", slot_mapping, lowest, cache.num_slots)
        return positions

    def scale_mode(self, scale_mode: str, fmt: CacheFormat) -> None:
        """Check how scales are rounded."""
        if scale_mode not in ("pow2", "exact"):
            raise ValueError(f"{self.op}: scale_mode must be 'pow2' or 'exact', got {scale_mode!r}")
        if scale_mode == "exact" and fmt.num_scales and fmt.scale_dtype != torch.float32:
            raise ValueError(
                f"{self.op}: scale_mode must be 'pow2' for format {fmt.name}, got 'exact'"
            )

    def rotation(self, interleaved: bool, rope_first: bool) -> None:
        """Check how an indexer's vectors are rotated."""
        self.kind("interleaved", interleaved, bool)
        self.kind("rope_first", rope_first, bool)

    def hadamard(self, hadamard: bool, dim: int) -> None:
        """Check that a Hadamard transform exists."""
        self.kind("hadamard", hadamard, bool)
        if hadamard and dim & (dim - 1):
            raise ValueError(f"{self.op}: hadamard needs a power-of-two dimension, got {dim}")

    def absent(self, name: str, value: object, when: str) -> None:
        """Check that an argument was not given."""
        if value is not None:
            raise ValueError(f"{self.op}: {name} must be None {when}, got {type(value).__name__}")

    def positive(self, name: str, value: object, below: int = LIMIT) -> None:
        """Check a count."""
        if not isinstance(value, Integral) or cast(int, value) < 1:
            raise ValueError(f"{self.op}: {name} must be a positive integer, got {value!r}")
        if cast(int, value) >= below:
            raise ValueError(f"{self.op}: {name} must be below {below}, got {value!r}")

    def validates(self, validate: object) -> bool:
        """Check the argument that asks for values to be read."""
        self.kind("validate", validate, bool)
        return bool(validate)

    def bind(self, letter: str, size: int) -> None:
        """Fix a letter of the shapes that follow."""
        self.dims[letter] = size

    def sizes(self, shape: str) -> list[int]:
        """The sizes that a shape of bound letters and numbers stands for."""
        return [int(dim) if dim.isdigit() else self.dims[dim] for dim in shape.split()]

    def values(self, name: str, tensor: Tensor, low: int, high: int) -> None:
        """Check values (this reads them, so it waits for the device): ``low <= value < high``.

        Raises:
            ValueError: naming the first value outside and where it stands.
        """
        wrong = (tensor < low) | (tensor >= high)
        if bool(wrong.any()):
            where = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{self.op}: {name} must lie in [{low}, {high}), "
                f"got {int(tensor[tuple(where)])} at {where}"
            )

    def offsets(self, name: str, offsets: Tensor, total: int) -> None:
        """Check the values of row offsets: they ascend from 0 to ``total``."""
        values = offsets.tolist()
        if values[0] != 0 or values[-1] != total or values != sorted(values):
            raise ValueError(f"{self.op}: {name} must ascend from 0 to {total}, got {values}")

    def paging(
        self, cache: PagedCache, page_table: Tensor, seq_lens: Tensor, name: str = "seq_lens"
    ) -> None:
        """Check the values of a page table and of the lengths, called name, that it must cover."""
        capacity = page_table.shape[1] * cache.page_size
        self.values(name, seq_lens, 0, capacity + 1)
        used = -(-seq_lens // cache.page_size)  # pages of each request
        columns = torch.arange(page_table.shape[1], device=page_table.device)
        pages = page_table.where(columns < used[:, None], 0)
        self.values("page_table", pages, 0, cache.num_pages)

    def _shape(self, name: str, sizes: torch.Size, shape: str) -> None:
        dims = shape.split()
        fits = len(sizes) == len(dims)
        if fits:
            for dim, size in zip(dims, sizes, strict=True):
                expected = int(dim) if dim.isdigit() else self.dims.setdefault(dim, size)
                fits = fits and expected == size
        if not fits:
            known = [dim if dim.isdigit() else str(self.dims.get(dim, dim)) for dim in dims]
            raise ValueError(
                f"{self.op}: {name} must have shape [{', '.join(dims)}] = [{', '.join(known)}], "
                f"got {list(sizes)}"
            )

    def _device(self, name: str, device: torch.device) -> None:
        if self.device is None:
            self.device = device
        if device != self.device:
            raise ValueError(f"{self.op}: {name} must be on {self.device}, got {device}")
