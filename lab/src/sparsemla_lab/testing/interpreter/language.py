"""The functions of Gluon, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import triton.language as tl

from sparsemla_lab.testing.interpreter import assembly, ptx
from sparsemla_lab.testing.interpreter.global_memory import Pointer
from sparsemla_lab.testing.interpreter.memory import Descriptor, Shared, fence
from sparsemla_lab.testing.interpreter.schedule import Accumulator, Copy, program
from sparsemla_lab.testing.interpreter.values import (
    Array,
    Tensor,
    array_in,
    array_of,
    as_tensor,
    common_type,
    divide,
    numbers_of,
    pairwise,
    rounded,
)

# ---- arithmetic --------------------------------------------------------------------------------


def _elementwise(compute: Callable[[Array], Array]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            return Tensor(rounded(np.asarray(compute(x.values)), x.dtype), x.dtype)

    return call


def _extreme(propagating: Any, ignoring: Any) -> Callable[..., Tensor]:
    def call(x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Any:
        return pairwise(propagating if propagate_nan == tl.PropagateNan.ALL else ignoring)(x, y)

    return call


def _reduction(compute: Callable[..., Array]) -> Callable[..., Tensor]:
    def call(x: Tensor, axis: int | None = None, keep_dims: bool = False) -> Tensor:
        dtype = x.dtype
        if dtype.is_int() and dtype.primitive_bitwidth < 32:
            dtype = tl.int32
        with np.errstate(all="ignore"):
            found = np.asarray(compute(array_in(x, dtype), axis=axis, keepdims=keep_dims))
        return Tensor(rounded(found, dtype), dtype)

    return call


def _running(
    x: Any, axis: int, combine: Callable[..., Any], reverse: bool = False
) -> list[tuple[Tensor, ...]]:
    """What a function of the kernel makes of the first slices of one or several tensors."""
    parts = x if isinstance(x, tuple) else (x,)
    results: list[tuple[Tensor, ...]] = []
    order = range(parts[0].shape[axis])
    for i in reversed(order) if reverse else order:
        each = tuple(Tensor(np.take(part.values, i, axis), part.dtype) for part in parts)
        if results:
            found = combine(*results[-1], *each)
            each = found if isinstance(found, tuple) else (found,)
        results.append(each)
    return results


def _reduce(x: Any, axis: int, combine: Callable[..., Any]) -> Any:
    last = _running(x, axis, combine)[-1]
    return last if isinstance(x, tuple) else last[0]


def _scan(x: Any, axis: int, combine: Callable[..., Any], reverse: bool = False) -> Any:
    results = _running(x, axis, combine, reverse)
    if reverse:
        results.reverse()
    joined = tuple(
        Tensor(np.stack([part.values for part in parts], axis), parts[0].dtype)
        for parts in zip(*results, strict=True)
    )
    return joined if isinstance(x, tuple) else joined[0]


def _where(condition: Any, x: Any, y: Any) -> Tensor:
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        x = as_tensor(x)
    dtype = common_type(x, y)
    found = np.where(array_of(condition), array_in(x, dtype), array_in(y, dtype))
    return Tensor(np.asarray(found), dtype)


def _fma(x: Any, y: Any, z: Any) -> Tensor:
    """Rounded once, but for results halfway between two."""
    a, b, c = (array_of(value).astype(np.float64) for value in (x, y, z))
    return Tensor(np.asarray(a * b + c, np.float32), tl.float32)


def _broadcast(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a, b = np.broadcast_arrays(x.values, y.values)
    return Tensor(a, x.dtype), Tensor(b, y.dtype)


def _full(shape: Sequence[int], value: Any, dtype: tl.dtype, layout: object = None) -> Tensor:
    return Tensor(np.broadcast_to(array_in(value, dtype), numbers_of((shape,))), dtype)


def tensor_range(*bounds: Any) -> Iterator[Tensor]:
    """Loop variables are tensors."""
    for i in range(*[int(bound) for bound in bounds]):
        yield as_tensor(i)


def _inline_asm(
    asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    text = assembly.text_of(asm)
    if text not in assembly.known():
        return ptx.run(asm, constraints, args, dtype, pack)
    with np.errstate(all="ignore"):
        found = assembly.known()[text](*args)
    if isinstance(found, tuple):
        return tuple(one.to(each) for one, each in zip(found, dtype, strict=True))
    return found.to(dtype)


# ---- MMAs --------------------------------------------------------------------------------------


def _warpgroup_mma(
    a: Shared | Tensor, b: Shared, acc: Tensor, *, use_acc: Any = True, is_async: bool = False
) -> Tensor:
    keep = bool(use_acc)
    for operand in (a, b):
        if isinstance(operand, Shared):
            operand.check_fence()

    def compute() -> Array:
        x = a.read() if isinstance(a, Shared) else a.values
        with np.errstate(all="ignore"):
            found = x.astype(np.float32) @ b.read().astype(np.float32)
            if keep:  # of an earlier MMA, which nobody needs to wait for
                found += acc.happen() if isinstance(acc, Accumulator) else acc.values
        return np.asarray(found)

    result = Accumulator(compute, acc.shape)
    program().current.mmas.append(result)
    program().pause()
    if not is_async:
        _warpgroup_mma_wait()
    return result


def _warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    program().pause()
    mmas = program().current.mmas
    while len(mmas) > num_outstanding:
        mma = mmas.pop(0)
        mma.happen()
        mma.is_ready = True
    return deps[0] if len(deps) == 1 else tuple(deps)


# ---- copies ------------------------------------------------------------------------------------


def _load(pointer: Pointer, mask: Any = None, other: Any = None, **options: Any) -> Tensor:
    return pointer.load(mask, other)


def _store(pointer: Pointer, value: Any, mask: Any = None, **options: Any) -> None:
    pointer.store(value, mask)


def _async_load(to: Shared, pointer: Pointer, mask: Any = None, **options: Any) -> None:
    """cp.async: elements that the mask leaves out become 0."""
    cta = program()
    copy = Copy(lambda: to.write(pointer.load(mask, 0).values, fenced=True))
    cta.current.issued.append(copy)
    cta.current.group.append(copy)
    cta.later(copy.happen)


def _commit_group() -> None:
    partition = program().current
    partition.groups.append(partition.group)
    partition.group = []


def _wait_group(num_outstanding: int = 0) -> None:
    groups = program().current.groups
    while len(groups) > num_outstanding:
        for copy in groups.pop(0):
            copy.happen()


def _arrive_after_copies(bar: Shared, increment_count: bool = True) -> None:
    """Each thread arrives when all its copies so far have landed."""
    if increment_count:
        raise NotImplementedError("arrivals that a barrier does not count")
    partition = program().current
    partition.issued = copies = [copy for copy in partition.issued if copy.under_way]

    def event() -> None:
        for copy in copies:
            copy.happen()
        bar.barrier.arrive(partition.num_threads)

    program().later(event)


def tma_load(
    source: Descriptor, place: Sequence[Any], bar: Shared, to: Shared, pred: Any = True
) -> None:
    """Has the name of a cp.async in a module of its own, so the table cannot hold both."""
    if pred:
        start = [int(each) for each in place]

        def event() -> None:
            to.write(source.read(start).reshape(to.shape), fenced=True)
            bar.barrier.receive(to.num_bytes)

        program().later(event)


# ---- barriers ----------------------------------------------------------------------------------


def _wait(bar: Shared, phase: Any, pred: Any = True) -> None:
    if pred:
        program().wait(bar.barrier, int(phase))


def _arrive(bar: Shared, count: int = 1, pred: Any = True) -> None:
    if pred:
        bar.barrier.arrive(count)
        program().pause()


def _expect(bar: Shared, num_bytes: Any, pred: Any = True) -> None:
    if pred:
        bar.barrier.arrive(expect=int(num_bytes))


# ---- the table ---------------------------------------------------------------------------------


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _same(x: Any, *args: object, **kwargs: object) -> Any:
    return x


FUNCTIONS: dict[str, Callable[..., Any]] = {
    # of a kernel
    "num_programs": lambda axis: as_tensor(program().grid[axis]),
    "program_id": lambda axis: as_tensor(program().place[axis]),
    "static_assert": _nothing,
    "static_range": range,
    "warp_specialize": lambda calls, warps, registers: program().specialize(calls, warps),
    # of tensors
    "abs": _elementwise(np.abs),
    "arange": lambda start, end, layout=None: Tensor(
        np.arange(start, end, dtype=np.int32), tl.int32
    ),
    "associative_scan": _scan,
    "broadcast": _broadcast,
    "cast": lambda x, dtype: as_tensor(x).to(dtype),
    "cdiv": lambda x, y: (x + y - 1) // y,
    "convert_layout": _same,
    "exp2": _elementwise(np.exp2),
    "expand_dims": lambda x, axis: Tensor(np.expand_dims(x.values, axis), x.dtype),
    "fdiv": lambda x, y: divide(x, y),
    "fma": _fma,
    "full": _full,
    "full_like": lambda x, value: _full(x.shape, value, x.dtype),
    "gather": lambda x, index, axis: Tensor(
        np.take_along_axis(x.values, index.values.astype(np.int64), axis), x.dtype
    ),
    "inline_asm_elementwise": _inline_asm,
    "join": lambda x, y: Tensor(np.stack([x.values, y.values], -1), x.dtype),
    "log": _elementwise(np.log),
    "log2": _elementwise(np.log2),
    "max": _reduction(np.fmax.reduce),
    "maximum": _extreme(np.maximum, np.fmax),
    "min": _reduction(np.fmin.reduce),
    "minimum": _extreme(np.minimum, np.fmin),
    "multiple_of": _same,
    "permute": Tensor.permute,
    "reduce": _reduce,
    "reshape": Tensor.reshape,
    "split": Tensor.split,
    "sqrt": _elementwise(np.sqrt),
    "sum": _reduction(np.sum),
    "where": _where,
    "zeros": lambda shape, dtype, layout=None: _full(shape, 0, dtype),
    "zeros_like": lambda x: _full(x.shape, 0, x.dtype),
    # of memory
    "allocate_shared_memory": Shared.allocate,
    "async_copy_global_to_shared": _async_load,
    "async_load": _async_load,
    "commit_group": _commit_group,
    "load": _load,
    "store": _store,
    "wait_group": _wait_group,
    # of barriers; in a program one partition runs at a time, and its threads run together
    "arrive": _arrive,
    "barrier": lambda *_, **__: program().barrier(),
    "expect": _expect,
    "fence_async_shared": fence,
    "gdc_launch_dependents": _nothing,
    "gdc_wait": lambda: program().memory.wait_for_inputs(),
    "invalidate": _nothing,
    "init": lambda bar, count: bar.barrier.init(count),
    "mbarrier_arrive": _arrive_after_copies,
    "thread_barrier": lambda: program().barrier(),
    "wait": _wait,
    # of tensor cores
    "warpgroup_mma": _warpgroup_mma,
    "warpgroup_mma_wait": _warpgroup_mma_wait,
}
"""Functions of ``gluon.language`` and of its modules for NVIDIA's GPUs."""
