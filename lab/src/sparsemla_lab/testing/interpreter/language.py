"""The functions of Gluon, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl

from sparsemla_lab.testing.interpreter import assembly, ptx
from sparsemla_lab.testing.interpreter.global_memory import Pointer
from sparsemla_lab.testing.interpreter.memory import Descriptor, Shared, fence
from sparsemla_lab.testing.interpreter.schedule import Accumulator, Copy, program
from sparsemla_lab.testing.interpreter.values import (
    Array,
    Layout,
    Tensor,
    array_in,
    array_of,
    as_tensor,
    bytes_of,
    common_type,
    divide,
    expanded,
    known_layout,
    layout_of,
    numbers_of,
    pairwise,
    rounded,
)

# ---- arithmetic --------------------------------------------------------------------------------


def _elementwise(compute: Callable[[Array], Array]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with np.errstate(all="ignore"):
            found = np.asarray(compute(x.values))
        return Tensor(rounded(found, x.dtype), x.dtype, x.layout)

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
        layout = x.layout if keep_dims else _layout_without(x, axis)
        return Tensor(rounded(found, dtype), dtype, layout)

    return call


def _layout_without(x: Tensor, axis: int | None) -> Layout:
    """The layout of a result without an axis."""
    if x.layout is None or axis is None or x.values.ndim == 1:
        return None
    return gl.SliceLayout(axis % x.values.ndim, x.layout)


def _running(
    x: Any, axis: int, combine: Callable[..., Any], reverse: bool = False
) -> list[tuple[Tensor, ...]]:
    """What a function of the kernel makes of the first slices of one or several tensors."""
    parts = x if isinstance(x, tuple) else (x,)
    results: list[tuple[Tensor, ...]] = []
    order = range(parts[0].shape[axis])
    for i in reversed(order) if reverse else order:
        each = tuple(
            Tensor(np.take(part.values, i, axis), part.dtype, _layout_without(part, axis))
            for part in parts
        )
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
        Tensor(
            np.stack([part.values for part in parts], axis),
            parts[0].dtype,
            expanded(parts[0].layout, axis),
        )
        for parts in zip(*results, strict=True)
    )
    return joined if isinstance(x, tuple) else joined[0]


def _where(condition: Any, x: Any, y: Any) -> Tensor:
    if not isinstance(x, Tensor) and not isinstance(y, Tensor):
        x = as_tensor(x)
    dtype = common_type(x, y)
    found = np.where(array_of(condition), array_in(x, dtype), array_in(y, dtype))
    return Tensor(np.asarray(found), dtype, layout_of(condition, x, y))


def _fma(x: Any, y: Any, z: Any) -> Tensor:
    """Rounded once, but for results halfway between two."""
    a, b, c = (array_of(value).astype(np.float64) for value in (x, y, z))
    return Tensor(np.asarray(a * b + c, np.float32), tl.float32, layout_of(x, y, z))


def _broadcast(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a, b = np.broadcast_arrays(x.values, y.values)
    layout = layout_of(x, y)
    return Tensor(a, x.dtype, layout), Tensor(b, y.dtype, layout)


def _full(shape: Sequence[int], value: Any, dtype: tl.dtype, layout: object = None) -> Tensor:
    values = np.broadcast_to(array_in(value, dtype), numbers_of((shape,)))
    return Tensor(values, dtype, known_layout(layout))


def _convert_layout(x: Any, layout: object, assert_trivial: bool = False) -> Any:
    """A tensor, or pointers."""
    return x.in_layout(known_layout(layout))


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
    layout = layout_of(*args)
    if isinstance(found, tuple):
        return tuple(one.to(each).in_layout(layout) for one, each in zip(found, dtype, strict=True))
    return found.to(dtype).in_layout(layout)


# ---- MMAs --------------------------------------------------------------------------------------

MMA_TYPES = tl.bfloat16, tl.float16, tl.float8e4nv, tl.float8e5
"""Of the operands of ``mma_v2``; those of 8 bits need sm_89."""


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


def _mma_v2(a: Tensor, b: Tensor, acc: Tensor, input_precision: object = None) -> Tensor:
    """mma.sync, of 2 or 3 axes; refuses what the compiler refuses."""
    parent = acc.layout
    if not isinstance(parent, gl.NVMMADistributedLayout) or list(parent.version) != [2, 0]:
        raise TypeError(f"acc of mma_v2 must be in an NVMMADistributedLayout of 2.0, got {parent}")
    for number, (name, x) in enumerate((("a", a), ("b", b))):
        layout = x.layout
        if not isinstance(layout, gl.DotOperandLayout):
            raise TypeError(f"{name} of mma_v2 must be in a DotOperandLayout, got {layout}")
        if layout.operand_index != number:
            raise TypeError(
                f"{name} of mma_v2 must be operand {number}, got {layout.operand_index}"
            )
        if layout.parent != parent:
            raise TypeError(
                f"the parent of {name} of mma_v2 must be that of acc, {parent}, got {layout.parent}"
            )
        if layout.k_width * bytes_of(x.dtype) < 4:
            raise TypeError(
                f"{name} of mma_v2 must have words of 4 bytes, got a k_width of {layout.k_width} "
                f"and {x.dtype}"
            )
    if a.layout.k_width != b.layout.k_width:
        raise TypeError(f"operands of mma_v2 must have one k_width, got {a.layout} and {b.layout}")
    if a.dtype != b.dtype:
        raise TypeError(f"operands of mma_v2 must have one type, got {a.dtype} and {b.dtype}")
    if a.dtype not in MMA_TYPES or acc.dtype != tl.float32:
        raise NotImplementedError(f"mma_v2 of {a.dtype} with sums in {acc.dtype}")
    smallest = 32 // bytes_of(a.dtype)
    if a.shape[-1] < smallest:
        raise TypeError(f"mma_v2 must sum over at least {smallest} elements, got {a.shape[-1]}")
    if [*a.shape[:-1], *b.shape[-2:]] != [*acc.shape[:-1], a.shape[-1], acc.shape[-1]]:
        raise TypeError(f"mma_v2 gets a of {a.shape}, b of {b.shape} and acc of {acc.shape}")
    with np.errstate(all="ignore"):
        found = acc.values + a.values.astype(np.float32) @ b.values.astype(np.float32)
    return Tensor(np.asarray(found), tl.float32, parent)


# ---- copies ------------------------------------------------------------------------------------


def _load(pointer: Pointer, mask: Any = None, other: Any = None, **options: Any) -> Tensor:
    return pointer.load(mask, other)


def _store(pointer: Pointer, value: Any, mask: Any = None, **options: Any) -> None:
    pointer.store(value, mask)


def _async_load(to: Shared, pointer: Pointer, mask: Any = None, **options: Any) -> None:
    """cp.async: elements that the mask leaves out become 0."""
    shape = list(np.broadcast_shapes(pointer.shape, np.shape(array_of(mask))))
    if shape != to.shape:
        raise TypeError(f"a kernel copies {shape} to {to.shape}")
    cta = program()
    to.expect_copy()
    copy = Copy(lambda: to.write(pointer.load(mask, 0).values, fenced=True), to.end_copy)
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
            copy.end()


def _arrive_after_copies(bar: Shared, increment_count: bool = True) -> None:
    """Each thread arrives when all its copies so far have ended."""
    if increment_count:
        raise NotImplementedError("arrivals that a barrier does not count")
    partition = program().current
    partition.issued = copies = [copy for copy in partition.issued if not copy.has_ended]

    def event() -> None:
        for copy in copies:
            copy.end()
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
        np.arange(start, end, dtype=np.int32), tl.int32, known_layout(layout)
    ),
    "associative_scan": _scan,
    "broadcast": _broadcast,
    "cast": lambda x, dtype: as_tensor(x).to(dtype),
    "cdiv": lambda x, y: (x + y - 1) // y,
    "convert_layout": _convert_layout,
    "exp2": _elementwise(np.exp2),
    "expand_dims": lambda x, axis: Tensor(
        np.expand_dims(x.values, axis), x.dtype, expanded(x.layout, axis)
    ),
    "fdiv": lambda x, y: divide(x, y),
    "fma": _fma,
    "full": _full,
    "full_like": lambda x, value: _full(x.shape, value, x.dtype, x.layout),
    "gather": lambda x, index, axis: Tensor(
        np.take_along_axis(x.values, index.values.astype(np.int64), axis), x.dtype, index.layout
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
    "zeros": lambda shape, dtype, layout=None: _full(shape, 0, dtype, layout),
    "zeros_like": lambda x: _full(x.shape, 0, x.dtype, x.layout),
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
    "mma_v2": _mma_v2,
    "warpgroup_mma": _warpgroup_mma,
    "warpgroup_mma_wait": _warpgroup_mma_wait,
}
"""Functions of ``gluon.language`` and of its modules for NVIDIA's GPUs."""
