"""Repeated calls: launches of an earlier call with arguments of the same kind, at other addresses.

What an op checks, chooses, allocates and launches follows from the *signature* of its arguments:
classes, dtypes, devices, shapes, strides, addresses modulo 16, and the values of everything that is
not a tensor. No op looks at more, unless it is asked to validate. So the second call with a
signature is recorded, and later ones allocate and launch as it did. This saves most of the host's
time: the checks, torch's dispatcher, the launcher, and Triton's search for the compiled kernel.

A recording does not trust that sentence. It watches every use of a tensor, and is kept only if
each was a question that the signature answers, a view, an allocation or an argument of a launch. It
keeps all memory that the call allocates, that of every chunk, and so does a repeat. So a call is
not repeated if all its chunks together exceed its ``max_workspace_bytes``.

All of it lives in this package. An op is decorated with :func:`repeated`; whoever watches or
replaces checks and choices enters :func:`unrepeated`; and an operator asks :func:`recording`
whether to leave out torch's dispatcher, behind which no launch can be watched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import is_dataclass
from types import ModuleType
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from sparsemla.formats import CacheFormat
from sparsemla.pooling import Pooling
from sparsemla.shards import ContextShard

P = ParamSpec("P")
R = TypeVar("R")

MAX_SIGNATURES = 4096
"""Signatures of an op that are remembered; then it forgets them all."""
ALIGNMENT = 512
"""Bytes, as torch aligns allocations."""

VALUES = {bool, int, str, type(None), torch.dtype, CacheFormat, ContextShard, Pooling}
SEQUENCES = {tuple, list}
QUESTIONS = {
    *(
        getattr(Tensor, name).__get__
        for name in ("device", "dtype", "is_cuda", "itemsize", "ndim", "shape")
    ),
    Tensor.dim,
    Tensor.numel,
    Tensor.size,
    Tensor.storage_offset,
    Tensor.stride,
    Tensor.__len__,
}
"""Uses of a tensor that a signature answers."""
VIEWS = {
    Tensor.__getitem__,
    Tensor.as_strided,
    Tensor.expand,
    Tensor.flatten,
    Tensor.squeeze,
    Tensor.unflatten,
    Tensor.unsqueeze,
    Tensor.view,
}
"""Functions whose result may be a view of their first argument."""
ALLOCATIONS = {torch.empty, torch.empty_like, Tensor.new_empty}

_USUAL_KEYS = (
    torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
).raw_repr()
"""Keys of torch's dispatcher that are always on; modes and transforms add others."""


_mode: ContextVar[Literal["repeat", "run", "record"]] = ContextVar("mode", default="repeat")


def recording() -> bool:
    """Whether a call is being recorded; operators then leave out torch's dispatcher."""
    return _mode.get() == "record"


@contextmanager
def _in_mode(mode: Literal["run", "record"]) -> Iterator[None]:
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def unrepeated() -> AbstractContextManager[None]:
    """Check, choose and launch as for the first time, for those who watch or replace these."""
    return _in_mode("run")


def repeated(op: Callable[P, R]) -> Callable[P, R]:
    """Let an op repeat the launches of an earlier call."""
    known: dict[Hashable, _Repeat | None] = {}
    """A call with None cannot be repeated."""
    once: set[Hashable] = set()
    bound = inspect.signature(op).parameters.get("max_workspace_bytes")

    @functools.wraps(op)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or _mode.get() != "repeat":
            return op(*args, **kwargs)
        tensors: list[Tensor] = []
        addresses: list[int] = []
        try:
            signature = (
                *[_describe(value, tensors, addresses) for value in args],
                tuple(kwargs),
                *[_describe(value, tensors, addresses) for value in kwargs.values()],
            )
        except (_UnknownError, RuntimeError, TypeError):  # of tensors without strides or memory
            return op(*args, **kwargs)
        repeat = known.get(signature)
        if repeat is not None and _is_ordinary(tensors):
            return cast(R, repeat(tensors, addresses))
        if repeat is not None or signature in known or not _can_record(tensors):
            return op(*args, **kwargs)
        if signature not in once:  # a recording takes longer than a call
            if len(once) == MAX_SIGNATURES:
                once.clear()
                known.clear()
            once.add(signature)
            return op(*args, **kwargs)
        max_bytes = kwargs.get(bound.name, bound.default) if bound else None
        recorder = _Recorder(tensors, cast(int | None, max_bytes))
        result = recorder.run(lambda: op(*args, **kwargs))
        known[signature] = recorder.repeat(result)
        return result

    return call


class _UnknownError(Exception):
    """An argument that has no signature."""


def _describe(value: Any, tensors: list[Tensor], addresses: list[int]) -> Hashable:
    """All that an op may know of an argument; adds the argument's tensors to the lists."""
    kind = type(value)
    if kind is Tensor or kind is Parameter:
        address = value.data_ptr()
        tensors.append(value)
        addresses.append(address)
        return (
            value.dtype,
            value.device,
            value.shape,
            value.stride(),
            value.storage_offset(),
            value.is_neg(),
            address % 16,
        )
    if kind is float:
        return kind, value.hex()  # 0.0 equals -0.0
    if kind in VALUES:
        return kind, value  # 1 equals True
    if is_dataclass(kind):  # a cache, a weight, a layer, a plan
        return kind, *[_describe(field, tensors, addresses) for field in vars(value).values()]
    if kind in SEQUENCES:
        return kind, *[_describe(item, tensors, addresses) for item in value]
    raise _UnknownError


def _can_record(tensors: Sequence[Tensor]) -> bool:
    return bool(tensors) and _on_gpu(tensors[0]) and _is_ordinary(tensors)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.version.hip is None


def _is_ordinary(tensors: Sequence[Tensor]) -> bool:
    """Whether torch and Triton would do nothing but launch, on the current device."""
    launches = _launches()
    return (
        torch._C._dispatch_tls_local_include_set().raw_repr() & ~_USUAL_KEYS == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch.autograd._profiler_enabled()
        and not launches.is_watched()
        and launches.current_device() == tensors[0].get_device()
        and not _are_differentiated(tensors)
    )


def _are_differentiated(tensors: Sequence[Tensor]) -> bool:
    """Whether an op might have to refuse gradients or tangents."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # any() takes twice the time
            if tensor.requires_grad:
                return True
    return forward_ad._current_level >= 0


class _Recorder(TorchFunctionMode):
    """Watches what a call does with tensors.

    Args:
        tensors: the arguments.
        max_bytes: of what the call may allocate in all, if there is a bound.
    """

    def __init__(self, tensors: Sequence[Tensor], max_bytes: int | None) -> None:
        super().__init__()
        self._arguments = tuple(tensors)
        self._max_bytes = max_bytes
        self._allocations: list[Tensor] = []
        self._views: list[Tensor] = []
        """Kept, so that no other tensor gets their ids."""
        self._origins = {id(tensor): (tensor, 0) for tensor in tensors}
        """The argument or allocation that a tensor lies in, and its offset in bytes."""
        # One tensor in two arguments does not tell which of them a launch reads.
        self._exact = len(self._origins) == len(tensors)
        self._seen: list[Any] = []

    def run(self, call: Callable[[], R]) -> R:
        """Call a function and watch."""
        watched = _launches().seen_launches()
        with _in_mode("record"), torch.no_grad(), watched as self._seen, self:
            return call()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func in QUESTIONS:
            return result
        if func in ALLOCATIONS and self._can_allocate(result):
            self._allocations.append(result)
            self._origins[id(result)] = result, 0
            self._check_size()
        elif func in VIEWS and _shares_memory(result, args[0]) and id(args[0]) in self._origins:
            origin, offset = self._origins[id(args[0])]
            self._views.append(result)
            self._origins[id(result)] = origin, offset + result.data_ptr() - args[0].data_ptr()
        else:
            self._exact = False
        return result

    def _check_size(self) -> None:
        """Give up, and return the memory, if all chunks together exceed the bound."""
        if self._max_bytes is None or sum(x.nbytes for x in self._allocations) <= self._max_bytes:
            return
        self._exact = False
        for held in (self._allocations, self._views, self._origins, self._seen):
            held.clear()

    def _can_allocate(self, tensor: Tensor) -> bool:
        return tensor.is_contiguous() and tensor.device == self._arguments[0].device

    def repeat(self, result: object) -> _Repeat | None:
        """The call for other addresses, or None if it is not a function of its signature."""
        results = result if isinstance(result, tuple) else (result,)
        new = [tensor for tensor in self._allocations if any(tensor is one for one in results)]
        known = (*self._arguments, *new)
        if not self._exact or not all(
            one is None or any(one is tensor for tensor in known) for one in results
        ):
            return None
        places = {id(tensor): (index, 0) for index, tensor in enumerate(known)}
        room = 0
        for tensor in self._allocations:
            if id(tensor) not in places:
                places[id(tensor)] = len(known), room
                room += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

        def place_of(tensor: Tensor) -> tuple[int, int]:
            origin, offset = self._origins[id(tensor)]
            index, start = places[id(origin)]
            return index, start + offset

        try:
            launches = [_launches().Launch(seen, place_of) for seen in self._seen]
        except KeyError:
            return None
        return _Repeat(
            launches,
            [(tensor.shape, tensor.dtype) for tensor in new],
            room,
            [None if one is None else places[id(one)][0] for one in results],
            getattr(type(result), "_make", tuple) if isinstance(result, tuple) else None,
        )


def _shares_memory(view: Tensor, base: Tensor) -> bool:
    """Whether a tensor with elements is a view of another one."""
    return (
        view.numel() > 0 and view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    )


class _Repeat:
    """A recorded call.

    Args:
        launches: its launches, in order.
        new: shapes and dtypes of the results that it allocates.
        room: bytes of its other allocations together.
        results: its results among the arguments and ``new``, or None.
        join: makes a tuple of its results, or None if it returns one.
    """

    def __init__(
        self,
        launches: Sequence[Callable[[Sequence[int], int], None]],
        new: Sequence[tuple[torch.Size, torch.dtype]],
        room: int,
        results: Sequence[int | None],
        join: Callable[[list[Tensor | None]], object] | None,
    ) -> None:
        self._launches = launches
        self._new = new
        self._room = room
        self._results = results
        self._join = join

    def __call__(self, tensors: list[Tensor], addresses: list[int]) -> object:
        device = tensors[0].device
        for shape, dtype in self._new:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            tensors.append(tensor)
            addresses.append(tensor.data_ptr())
        if self._room:
            room = torch.empty(self._room, dtype=torch.uint8, device=device)
            addresses.append(room.data_ptr())
        stream = _launches().current_stream(device.index)
        for launch in self._launches:
            launch(addresses, stream)
        results = [None if index is None else tensors[index] for index in self._results]
        return results[0] if self._join is None else self._join(results)


@functools.cache
def _launches() -> ModuleType:
    """The module, which imports Triton."""
    from sparsemla.kernels.repeat import launches

    return launches
