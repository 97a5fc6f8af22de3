"""Argument checks of the public ops: kinds, dtypes, shapes, devices; values only on request.

A shape is a string of letters and numbers, such as ``"B S H 576"``. The first tensor with a letter
binds it; every later tensor with this letter must have the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsemla.cache import HostLayer, PagedCache
from sparsemla.formats import CacheFormat
from sparsemla.validation import INTEGERS, LIMIT, check_integer, check_kind, check_number

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_MASKED_TOKENS = 8
"""Most tokens of a list with a mask: one for each bit of a byte."""
Dtypes = torch.dtype | tuple[torch.dtype, ...]
Gradients: TypeAlias = Literal["none", "backward", "all"]
"""The differentiation in which an op drops nothing: none, only backward, or also forward mode.

Results that are constants by definition, such as selections, drop nothing.
"""


class Checker:
    """Checks the arguments of one call: all tensors on one device, with consistent shapes.

    Args:
        op: the op's name, with which every error message begins.
        gradients: which gradients and tangents the op does not drop, see :data:`Gradients`.
        instead: an op with gradients that an error about them names.

    >>> check = Checker("scale")
    >>> x = check.tensor("x", torch.zeros(2, 3), "T D", FLOATS)
    >>> check.tensor("factors", torch.zeros(4), "T", torch.float32)
    Traceback (most recent call last):
    ValueError: scale: factors must have shape [T] = [2], got [4]
    """

    def __init__(
        self, op: str, *, gradients: Gradients = "none", instead: str | None = None
    ) -> None:
        self.op = op
        self.dims: dict[str, int] = {}
        self.device: torch.device | None = None
        self._instead = instead
        # Most calls are without autograd, and then no tensor is asked.
        self._refuses_grad = gradients == "none" and torch.is_grad_enabled()
        self._refuses_tangent = gradients != "all" and forward_ad._current_level >= 0

    def tensor(self, name: str, tensor: object, shape: str, dtypes: Dtypes) -> Tensor:
        """Check one tensor.

        Returns:
            The tensor. uint32 is converted to int64: torch and Triton support few operations on
            uint32, and as int32 its values from 2^31 on would turn negative.

        Raises:
            TypeError: not a tensor, or a dtype that is not among ``dtypes``.
            ValueError: wrong rank, size or device, or a last dimension that is not contiguous.
        """
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{self.op}: {name} must be a tensor, got {type(tensor).__name__}")
        dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
        if tensor.dtype not in dtypes:
            names = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes)
            allowed = " or ".join(names)
            got = str(tensor.dtype).removeprefix("torch.")
            raise TypeError(f"{self.op}: {name} must have dtype {allowed}, got {got}")
        sizes = tensor.shape
        self._shape(name, sizes, shape)
        self._device(name, tensor.device)
        if self._refuses_grad or self._refuses_tangent:
            self.gradient(name, tensor)
        if sizes and sizes[-1] > 1 and tensor.stride()[-1] != 1 and tensor.numel():
            raise ValueError(
                f"{self.op}: {name} must be contiguous in its last dimension, "
                f"got strides {list(tensor.stride())}"
            )
        return tensor.long() if tensor.dtype == torch.uint32 else tensor

    def signed(self, name: str, tensor: object, shape: str) -> Tensor:
        """Check integers whose negative values have a meaning.

        Returns:
            The tensor; uint32 viewed as int32, so that 2^32 - 1 is -1.
        """
        if isinstance(tensor, Tensor) and tensor.dtype == torch.uint32:
            tensor = tensor.view(torch.int32)
        return self.tensor(name, tensor, shape, INTEGERS)

    def gradient(self, name: str, tensor: Tensor) -> None:
        """Check that a tensor needs no gradient that the op would drop.

        Raises:
            ValueError: a tensor that requires a gradient while torch records them, or one with a
                tangent of forward-mode differentiation.
        """
        if self._refuses_grad and tensor.requires_grad:
            raise ValueError(
                f"{self.op}: {name} must not require a gradient, which {self.op} does not compute; "
                f"call it under torch.no_grad(), or with {name}.detach()"
                + (f", or {self._instead}, which has gradients" if self._instead else "")
            )
        if self._refuses_tangent and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ValueError(
                f"{self.op}: {name} must not have a tangent, which {self.op} does not propagate"
            )

    def optional(
        self, name: str, tensor: Tensor | None, shape: str, dtypes: Dtypes
    ) -> Tensor | None:
        """:meth:`tensor` for an argument that may be None."""
        return None if tensor is None else self.tensor(name, tensor, shape, dtypes)

    def written(self, name: str, tensor: object, shape: str, dtypes: Dtypes) -> Tensor:
        """:meth:`tensor` for an output: no two of its elements may share memory."""
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
        """Check the caller's output tensor, or allocate one of ``dtype`` if it is None."""
        if tensor is not None:
            return self.written(name, tensor, shape, (dtype, *others))
        return torch.empty(*self.sizes(shape), dtype=dtype, device=self.device)

    def workspace(self, workspace: Tensor | None, size: int) -> None:
        """Check that a workspace, unless it is None, has ``size`` bytes at an aligned offset."""
        if workspace is None:
            return
        self.tensor("workspace", workspace, "bytes", torch.uint8)
        # Dynamo cannot trace storage_offset(). In compiled code the views of a misaligned workspace
        # raise instead.
        offset = 0 if torch.compiler.is_compiling() else workspace.storage_offset()
        if workspace.shape[0] < size or offset % 16:
            raise ValueError(
                f"{self.op}: workspace must hold {size} bytes from a multiple of 16 on, "
                f"got {workspace.shape[0]} at {offset}"
            )

    def number(self, name: str, value: object) -> None:
        """Check a finite number. Tensors are refused, because reading one would synchronise."""
        check_number(f"{self.op}: {name}", value)

    def epsilon(self, name: str, value: object) -> None:
        """Check a number that is added to a mean of squares."""
        check_number(f"{self.op}: {name}", value, least=0)

    def choice(self, name: str, value: object, allowed: Sequence[str]) -> None:
        """Check a string that must be one of a few."""
        self.kind(name, value, str)
        if value not in allowed:
            names = " or ".join(map(repr, allowed))
            raise ValueError(f"{self.op}: {name} must be {names}, got {value!r}")

    def kind(self, name: str, value: object, kind: type) -> None:
        """Check the class of an argument."""
        check_kind(f"{self.op}: {name}", value, kind)

    def cache(self, name: str, cache: PagedCache, *, may_be_empty: bool = False) -> PagedCache:
        """Check a cache: a single layer, on the device of the call, as a rule with a page."""
        self.kind(name, cache, PagedCache)
        if cache.num_layers is not None:
            raise ValueError(
                f"{self.op}: {name} must be one layer; this cache holds {cache.num_layers}, "
                f"pick one with {name}.layer(layer_idx)"
            )
        if cache.num_slots == 0 and not may_be_empty:
            raise ValueError(f"{self.op}: {name} must have at least one page, got none")
        self._device(name, cache.data.device)
        self.gradient(name, cache.data)
        return cache

    def attended(self, name: str, cache: PagedCache, *, may_be_empty: bool = False) -> PagedCache:
        """:meth:`cache` for rows that attention reads, which must not lie in host memory."""
        if isinstance(cache, HostLayer):
            raise ValueError(
                f"{self.op}: {name} must hold rows in the memory of the device, got a layer of a "
                "HostCache; attend to HotRows.layer, or to rows that gather_dequant made"
            )
        return self.cache(name, cache, may_be_empty=may_be_empty)

    def row_dims(self, name: str, rows: Tensor) -> None:
        """Check that rows have at least one dim."""
        if rows.shape[-1] < 1:
            raise ValueError(
                f"{self.op}: {name} must have at least one dim, got {list(rows.shape)}"
            )

    def head_dim(self, name: str, cache: PagedCache) -> None:
        """Check that D, the last dimension of ``name``, is the ``head_dim`` of the cache."""
        if self.dims["D"] != cache.format.head_dim:
            raise ValueError(
                f"{self.op}: {name} must have last dimension {cache.format.head_dim} for format "
                f"{cache.format.name}, got {self.dims['D']}"
            )

    def queries(self, q: object, q_rope: object, shape: str) -> Tensor:
        """Check the first tensor of queries: all of their dims D, or V and ``q_rope`` has more."""
        return self.tensor("q", q, f"{shape} {'D' if q_rope is None else 'V'}", FLOATS)

    def query_dims(self, q: Tensor, q_rope: Tensor | None, shape: str, cache: PagedCache) -> None:
        """Check that the dims of the queries are those of the cache."""
        if q_rope is None:
            self.head_dim("q", cache)
            return
        fmt = cache.format
        if self.dims["V"] != fmt.value_dim:
            raise ValueError(
                f"{self.op}: q must have last dimension {fmt.value_dim} beside q_rope for format "
                f"{fmt.name}, got {self.dims['V']}"
            )
        self.bind("D-V", fmt.head_dim - fmt.value_dim)
        self.tensor("q_rope", q_rope, f"{shape} D-V", q.dtype)

    def stream(self, name: str, cache: PagedCache, first: PagedCache) -> None:
        """Check the dims of a second cache that takes part in the same softmax as ``first``."""
        dims = first.format.head_dim, first.format.value_dim
        if (cache.format.head_dim, cache.format.value_dim) != dims:
            raise ValueError(
                f"{self.op}: {name} must have head_dim {dims[0]} and value_dim {dims[1]} like "
                f"format {first.format.name}, got format {cache.format.name}"
            )

    def lists(self, list_tokens: int, token_mask: Tensor | None) -> str:
        """Check how many of the T tokens share a list, and bind N, the number of lists.

        Returns:
            The letter of the lists: T if each token has its own.
        """
        self.positive(
            "list_tokens", list_tokens, LIMIT if token_mask is None else MAX_MASKED_TOKENS + 1
        )
        if list_tokens == 1:
            return "T"
        self.bind("N", -(-self.dims["T"] // list_tokens))
        return "N"

    def lengths(self, name: str, lengths: Tensor | None) -> Tensor | None:
        """Check the lengths of selections, one for each request or one for each query token."""
        shape = "B S" if isinstance(lengths, Tensor) and lengths.dim() > 1 else "B"
        return self.optional(name, lengths, shape, INTEGERS)

    def query_dtype(self, cache: PagedCache) -> torch.dtype:
        """The dtype of indexer queries for this key cache."""
        if not cache.format.holds_index_keys:
            raise ValueError(
                f"{self.op}: cache must hold keys of one dtype, with at most one scale a row or in "
                f"MXFP4, got format {cache.format.name}"
            )
        return cache.format.query_dtype

    def index_heads(self) -> None:
        """Check that indexer queries have at least one head, HI, and one dim, DI."""
        if self.dims["HI"] < 1:
            raise ValueError(f"{self.op}: index_q must have at least one head, got none")
        if self.dims.get("DI", 1) < 1:
            raise ValueError(f"{self.op}: index_q must have at least one dim, got none")

    def rope_dim(self, name: str, rope_dim: int, head_dim: int) -> None:
        """Check the number of RoPE dims."""
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
    ) -> tuple[Tensor, Tensor]:
        """Check positions and slots of T tokens; with ``validate`` also their values.

        Returns:
            The positions, uint32 as int64, and the slots, uint32 as int32.
        """
        positions = self.tensor("positions", positions, "T", INTEGERS)
        unsigned = isinstance(slot_mapping, Tensor) and slot_mapping.dtype == torch.uint32
        if unsigned and cache.num_slots > LIMIT:  # slots from 2^31 on would turn negative
            raise ValueError(
                f"{self.op}: slot_mapping must be int64 for {cache.num_slots} slots, got uint32"
            )
        slot_mapping = self.signed("slot_mapping", slot_mapping, "T")
        if self.validates(validate):
            self.values("positions", positions, 0, cos_sin_cache.shape[0])
            lowest = torch.iinfo(slot_mapping.dtype).min  # any negative slot is skipped
            self.values("slot_mapping", slot_mapping, lowest, cache.num_slots)
        return positions, slot_mapping

    def scale_mode(self, scale_mode: str, fmt: CacheFormat) -> None:
        """Check the rounding of scales, ``pow2`` or ``exact``."""
        self.choice("scale_mode", scale_mode, ("pow2", "exact"))
        if scale_mode == "exact" and fmt.num_scales and fmt.scale_dtype != torch.float32:
            raise ValueError(
                f"{self.op}: scale_mode must be 'pow2' for format {fmt.name}, got 'exact'"
            )

    def rotation(self, interleaved: bool, rope_first: bool) -> None:
        """Check the RoPE layout of indexer queries and keys."""
        self.kind("interleaved", interleaved, bool)
        self.kind("rope_first", rope_first, bool)

    def hadamard(self, hadamard: bool, dim: int) -> None:
        """Check that a Hadamard transform of this dimension exists."""
        self.kind("hadamard", hadamard, bool)
        if hadamard and dim & (dim - 1):
            raise ValueError(f"{self.op}: hadamard needs a power-of-two dimension, got {dim}")

    def absent(self, name: str, value: object, when: str) -> None:
        """Check that an argument is None."""
        if value is not None:
            raise ValueError(f"{self.op}: {name} must be None {when}, got {type(value).__name__}")

    def positive(self, name: str, value: object, below: int = LIMIT) -> None:
        """Check an integer, ``1 <= value < below``."""
        check_integer(f"{self.op}: {name}", value, 1, below)

    def validates(self, validate: object) -> bool:
        """Check and return the flag ``validate``, which asks for checks of values."""
        self.kind("validate", validate, bool)
        return bool(validate)

    def bind(self, letter: str, size: int) -> None:
        """Bind a letter for later shapes."""
        self.dims[letter] = size

    def sizes(self, shape: str) -> list[int]:
        """The sizes of a shape; each of its letters must be bound."""
        return [int(dim) if dim.isdigit() else self.dims[dim] for dim in shape.split()]

    def values(self, name: str, tensor: Tensor, low: int, high: int) -> None:
        """Check ``low <= value < high`` for all values; this synchronises with the device.

        Raises:
            ValueError: a value is out of range; the message has the first one and its index.
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
        self,
        cache: PagedCache,
        page_table: Tensor,
        seq_lens: Tensor,
        name: str = "seq_lens",
        ratio: int = 1,
    ) -> None:
        """Check the values of a page table and of the lengths ``name`` that it must cover.

        The cache has a row for every ``ratio`` tokens.
        """
        capacity = page_table.shape[1] * cache.page_size
        self.values(name, seq_lens, 0, (capacity + 1) * ratio)
        used = -(-(seq_lens // ratio) // cache.page_size)  # pages of each request
        columns = torch.arange(page_table.shape[1], device=page_table.device)
        pages = page_table.where(columns < used[:, None], 0)
        self.values("page_table", pages, 0, cache.num_pages)

    def tokens(
        self,
        positions: Tensor,
        request_ids: Tensor,
        page_table: Tensor,
        page_size: int,
        ratio: int,
    ) -> None:
        """Check that tokens have a request, and that pages exist for their keys.

        A request has a key for every ``ratio`` tokens.
        """
        capacity = page_table.shape[1] * page_size
        self.values("positions", positions, 0, (capacity + 1) * ratio - 1)
        self.values("request_ids", request_ids, 0, page_table.shape[0])

    def _shape(self, name: str, sizes: torch.Size, shape: str) -> None:
        dims = shape.split()
        fits = len(sizes) == len(dims)
        if fits:
            for dim, size in zip(dims, sizes, strict=True):
                expected = int(dim) if dim.isdigit() else self.dims.setdefault(dim, size)
                fits = fits and expected == size
        if not fits:
            known = [dim if dim.isdigit() else str(self.dims.get(dim, dim)) for dim in dims]
            wanted = f"[{', '.join(dims)}]"
            if known != dims:
                wanted += f" = [{', '.join(known)}]"
            raise ValueError(f"{self.op}: {name} must have shape {wanted}, got {list(sizes)}")

    def _device(self, name: str, device: torch.device) -> None:
        if self.device is None:
            self.device = device
        if device != self.device:
            raise ValueError(f"{self.op}: {name} must be on {self.device}, got {device}")
