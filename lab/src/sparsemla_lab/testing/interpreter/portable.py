"""Repairs of Triton's own interpreter, which runs the portable kernels."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter


@functools.cache
def repair() -> None:
    """Repair five differences between the interpreter and a GPU, and check all accesses.

    Casts from float32 to bfloat16 round instead of truncating. ``range`` takes a kernel's argument:
    numpy 2.4 refuses the conversion of Triton 3.6; Triton 3.9 has the same repair. A scalar
    comparison becomes a bool when it meets a block: otherwise it has the type of its operands, and
    Triton 3.9 refuses such a mask. The maximum of a number and NaN is the number.
    A value that rounds up to a power of two in e4m3 becomes it: the interpreter gives half of it.
    """
    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl
    fp_to_fp = builder.create_fp_to_fp
    splat = builder.create_splat
    patch_tensor = interpreter._patch_lang_tensor

    def rounding_cast(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return cast(self, src, dst_type)
        rounded = torch.tensor(src.data).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    def rounding_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dst_type.scalar != tl.float8e4nv:
            return fp_to_fp(self, src, dst_type, rounding_mode)
        rounded = torch.tensor(src.data).clamp(-448, 448).to(torch.float8_e4m3fn)
        return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), tl.float8e4nv)

    def bool_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        is_bool = arg.data.dtype.kind == "b"
        return splat(self, ret_ty, interpreter.TensorHandle(arg.data, tl.int1) if is_bool else arg)

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder.cast_impl = rounding_cast
    builder.create_fp_to_fp = rounding_fp_to_fp
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_splat = bool_splat
    interpreter._patch_lang_tensor = patch
    _patch_once()
    if knobs.runtime.interpret:
        _bound_accesses()
        _skip_unused_sums()
        _remember_types()


def _bound_accesses() -> None:
    """Refuse accesses outside of the storages of a launch's tensors, as an IndexError.

    The interpreter dereferences any address: of another tensor, or of none, which ends the process.
    """
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    to_host = executor._init_args_hst
    load, store = builder.create_masked_load, builder.create_masked_store
    swap, update = builder.create_atomic_cas, builder.create_atomic_rmw
    storages: list[tuple[int, int]] = []
    """First and last address, exclusive, of each storage of the launch."""

    def add(argument: Any) -> None:
        if isinstance(argument, torch.Tensor):
            storage = argument.untyped_storage()
            storages.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        elif isinstance(argument, tuple):
            for part in argument:
                add(part)

    def to_host_and_remember(self: Any, args: Any, kwargs: Any) -> Any:
        host = to_host(self, args, kwargs)
        storages.clear()
        add((*host[0], *host[1].values()))
        return host

    def check(pointers: Any, mask: Any) -> None:
        at = pointers.data if mask is None else pointers.data[mask.data]
        if not at.size:
            return
        low, high = at.min(), at.max() + pointers.get_element_ty().primitive_bitwidth // 8
        if not any(start <= low and high <= end for start, end in storages):
            raise IndexError(f"a kernel accesses {low:#x} to {high:#x}, outside of one storage")

    def checked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        check(ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def checked_swap(self: Any, ptr: Any, *rest: Any) -> Any:
        check(ptr, None)
        return swap(self, ptr, *rest)

    def checked_update(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        check(ptr, mask)
        return update(self, op, ptr, val, mask, *rest)

    executor._init_args_hst = to_host_and_remember
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_cas, builder.create_atomic_rmw = checked_swap, checked_update


def _patch_once() -> None:
    """Patch the language once for each grid, and not again for each call of a device function.

    A sixth of the time of a small kernel goes there.
    """
    patch = interpreter._patch_lang
    patched: set[Any] = set()  # while a grid runs

    @functools.cache
    def languages(fn: Any) -> set[Any]:
        found = (interpreter.tl, interpreter.tl.core)
        return {x for x in found if any(value is x for value in fn.__globals__.values())}

    def patch_new(fn: Any) -> Any:
        if patched >= languages(fn):
            return interpreter._LangPatchScope()
        scope = patch(fn)
        patched.update(languages(fn))
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_new


def _skip_unused_sums() -> None:
    """Leave out the sums of int64 that tell whether sums and products of integers overflow.

    Triton asserts that they do not where it debugs. The interpreter does not, but computes them.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _remember_types() -> None:
    """Derive what follows from a type once, and not for each value that has it."""
    core, semantic = tl.core, interpreter.TritonSemantic
    init_block, init_tensor = core.block_type.__init__, core.tensor.__init__
    np_dtype, broadcast = interpreter._get_np_dtype, semantic.broadcast_impl_value
    sizes: dict[Any, dict[str, Any]] = {}
    """Shape and number of elements of blocks; blocks of a shape share one object."""
    names: dict[Any, str] = {}
    shapes: dict[Any, tuple[Any, dict[str, Any]]] = {}
    """The same of tensors by that object, which must not be freed: another would have its id."""
    np_dtypes: dict[str, Any] = {}

    def init_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([n if type(n) is int else core._unwrap_if_constexpr(n) for n in shape])
        named = element_ty.name, key
        if named not in names:
            init_block(self, element_ty, shape)
            sizes.setdefault(key, {"shape": self.shape, "numel": self.numel})
            names[named] = self.name
        vars(self).update(sizes[key], name=names[named], element_ty=element_ty)

    def init_tensor_once(self: Any, handle: Any, of: Any) -> None:
        shape = of.shape if of.is_block() else None
        if id(shape) not in shapes:
            init_tensor(self, handle, of)
            shapes[id(shape)] = shape, {"shape": self.shape, "numel": self.numel}
        vars(self).update(shapes[id(shape)][1], handle=handle, type=of, dtype=of.scalar)

    def np_dtype_once(tt_dtype: Any) -> Any:
        if tt_dtype.name not in np_dtypes:
            np_dtypes[tt_dtype.name] = np_dtype(tt_dtype)
        return np_dtypes[tt_dtype.name]

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr
    core.block_type.__init__ = init_block_once
    core.tensor.__init__ = init_tensor_once
    interpreter._get_np_dtype = np_dtype_once
    semantic.broadcast_impl_value = broadcast_others
