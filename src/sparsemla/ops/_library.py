"""Registration of the ops with torch.

Each op is one ``torch.ops.sparsemla`` operator. Most write their results into arguments, so that
their fake implementation, which ``torch.compile`` needs, has nothing to do. Operators that have a
derivative return new tensors, because torch differentiates no operator that writes into arguments.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Generic, NoReturn, get_args, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from sparsemla import dispatch
from sparsemla.cache import PagedCache
from sparsemla.dispatch import launches_on
from sparsemla.formats import CacheFormat, get_format
from sparsemla.kernels.attention.arguments import Splits
from sparsemla.kernels.common.table import C, Op
from sparsemla.kernels.repeat import recording
from sparsemla.pooling import Pooling, WindowState
from sparsemla.residency import RowTable
from sparsemla.shards import ContextShard
from sparsemla.weights import HeadWeight

_NAMESPACE = __name__.partition(".")[0]  # not always sparsemla: loaders may rename the package
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")
_OPERATORS = getattr(torch.ops, _NAMESPACE)


@dataclass(frozen=True)
class _Record:
    """How an argument of a class that torch does not know is split into tensors, and joined."""

    fields: dict[str, Any]
    split: Callable[[Any], tuple[Any, ...]]
    join: Callable[..., Any]

    def optional(self) -> "_Record":
        """The same for an argument that may be None: all of its fields are None then."""
        absent = (None,) * len(self.fields)
        return _Record(
            {name: kind | None for name, kind in self.fields.items()},
            lambda argument: absent if argument is None else self.split(argument),
            lambda first, *rest: None if first is None else self.join(first, *rest),
        )


def _join_cache(data: Tensor, scales: Tensor | None, format: str) -> PagedCache:
    return PagedCache.unchecked(data, get_format(format), scales)


def _join_weight(
    data: Tensor, scale: Tensor | None, block_rows: int, block_columns: int
) -> HeadWeight:
    return HeadWeight.unchecked(data, scale, (block_rows, block_columns))


_CACHE = _Record(
    {"data": Tensor, "scales": Tensor | None, "format": str},
    lambda cache: (cache.data, cache.scales, cache.format.name),
    _join_cache,
)
_SPLITS = _Record({"num_splits": int, "head_tile": int}, tuple, Splits)
_SHARD = _Record(
    {"rank": int, "num_ranks": int, "interleave": int, "parts": int | None},
    lambda shard: (shard.rank, shard.num_ranks, shard.interleave, shard.parts),
    ContextShard.unchecked,
)

_RECORDS: dict[object, _Record] = {
    Splits | None: _SPLITS.optional(),
    PagedCache: _CACHE,
    PagedCache | None: _CACHE.optional(),
    CacheFormat: _Record({"name": str}, lambda format: (format.name,), get_format),
    Pooling: _Record(
        {"ratio": int, "overlap": bool},
        lambda pooling: (pooling.ratio, pooling.overlap),
        Pooling,
    ),
    ContextShard: _SHARD,
    ContextShard | None: _SHARD.optional(),
    RowTable: _Record(
        {"keys": Tensor, "rows": Tensor, "order": Tensor},
        lambda table: (table.keys, table.rows, table.order),
        RowTable.unchecked,
    ),
    WindowState: _Record({"rows": Tensor}, lambda state: (state.rows,), WindowState.unchecked),
    HeadWeight: _Record(
        {"data": Tensor, "scale": Tensor | None, "block_rows": int, "block_columns": int},
        lambda weight: (weight.data, weight.scale, *weight.scale_block),
        _join_weight,
    ),
}


class _Flat(Generic[C]):
    """An op's record as the arguments of its torch operator, and back.

    A cache or a weight becomes several arguments: ``cache`` is ``cache_data``, ``cache_scales`` and
    ``cache_format``.

    Args:
        arguments: the record.
        left_out: fields that the operator does not take; they are None.
    """

    def __init__(self, arguments: type[C], left_out: Sequence[str] = ()) -> None:
        self._make = arguments
        hints = get_type_hints(arguments)
        self.kinds = {name: kind for name, kind in hints.items() if name not in left_out}
        self._given = [name not in left_out for name in hints]
        self._records = [_RECORDS.get(kind) for kind in self.kinds.values()]
        """For each field that is taken: its record, or None."""

    def split(self, call: C) -> list[Any]:
        flat: list[Any] = []
        for record, argument in zip(self._records, compress(call, self._given), strict=True):
            if record is None:
                flat.append(argument)
            else:
                flat += record.split(argument)
        return flat

    def join(self, flat: Sequence[Any]) -> C:
        arguments: list[Any] = []
        first, records = 0, iter(self._records)
        for given in self._given:
            record = next(records) if given else None
            if not given:
                arguments.append(None)
            elif record is None:
                arguments.append(flat[first])
                first += 1
            else:
                last = first + len(record.fields)
                arguments.append(record.join(*flat[first:last]))
                first = last
        return self._make(*arguments)


def operator(op: Op[C]) -> Callable[[C], None]:
    """Make ``torch.ops.sparsemla.<name>`` of an op that writes its results into arguments.

    The operator has the record's fields as parameters and runs the kernel that takes them. The
    returned function calls it with a record.
    """
    flat = _Flat(op.arguments)

    def launch(*arguments: object) -> None:
        dispatch.launch(op, flat.join(arguments))

    def without_memory(lead: Tensor, *rest: object) -> None:
        # torch.compile traces this function, which must not launch.
        if launches_on(lead.device):
            launch(lead, *rest)

    on_device = _on_device(launch)
    _LIBRARY.define(op.name + _schema(flat.kinds, (*op.outputs, *op.mutates)))
    _LIBRARY.impl(op.name, on_device, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{op.name}", without_memory, lib=_LIBRARY)
    dispatched = getattr(_OPERATORS, op.name)

    def call(arguments: C) -> None:
        # A recording could not watch a launcher behind torch's dispatcher.
        watched = not torch.compiler.is_compiling() and recording()
        (on_device if watched else dispatched)(*flat.split(arguments))

    return call


def functional(op: Op[C], allocate: Callable[[C], Any]) -> Callable[[C], Any]:
    """Make ``torch.ops.sparsemla.<name>``, which returns new tensors; it may have a derivative.

    The operator has the record's fields but its outputs as parameters. ``allocate`` makes the
    outputs, with the annotation of the operator's results.
    """
    flat = _Flat(op.arguments, op.outputs)

    def launch(*arguments: object) -> object:
        results = without_launch(*arguments)
        outputs = results if isinstance(results, tuple) else (results,)
        call: Any = flat.join(arguments)
        dispatch.launch(op, call._replace(**dict(zip(op.outputs, outputs, strict=True))))
        return results

    def without_launch(*arguments: object) -> object:
        return allocate(flat.join(arguments))

    def without_memory(lead: Tensor, *rest: object) -> object:
        # torch.compile traces this function, which must not launch.
        return (launch if launches_on(lead.device) else without_launch)(lead, *rest)

    results = inspect.signature(allocate, eval_str=True).return_annotation
    _LIBRARY.define(op.name + _schema(flat.kinds, (), results))
    _LIBRARY.impl(op.name, _on_device(launch), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{op.name}", without_memory, lib=_LIBRARY)
    dispatched = getattr(_OPERATORS, op.name)
    return lambda call: dispatched(*flat.split(call))


class _Context(FunctionCtx):
    """What a forward pass keeps for its gradient."""

    saved_tensors: tuple[Tensor, ...]
    values: list[object]


_SAVED = object()
"""Stands for a tensor that autograd keeps."""


def differentiate(
    op: Op[C],
    backward: Callable[..., Mapping[str, Tensor | None]],
    *,
    keep: Sequence[str] | None = None,
    constants: Sequence[str] = (),
) -> None:
    """Give a :func:`functional` operator a derivative.

    Args:
        op: the op.
        backward: of the record, the results (a tuple) and their gradients (None where there is
            none), to the gradients by the names of their fields.
        keep: fields and outputs whose tensors ``backward`` gets, and which stay in memory until
            then; the others are None. Default all.
        constants: outputs without a gradient.
    """
    flat = _Flat(op.arguments, op.outputs)
    names = list(_flattened(flat.kinds))
    kept = [keep is None or name in keep for name in (*names, *op.outputs)]

    def save(ctx: _Context, inputs: tuple[object, ...], output: object) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        tensors: list[Tensor] = []
        ctx.values = []
        for value, wanted in zip((*inputs, *outputs), kept, strict=True):
            if not isinstance(value, Tensor):
                ctx.values.append(value)
            elif wanted:
                ctx.values.append(_SAVED)
                tensors.append(value)
            else:
                ctx.values.append(None)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(
            *(output for name, output in zip(op.outputs, outputs, strict=True) if name in constants)
        )
        ctx.set_materialize_grads(False)

    def gradients(ctx: _Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        values = [next(saved) if value is _SAVED else value for value in ctx.values]
        found = backward(flat.join(values[: len(names)]), tuple(values[len(names) :]), *grads)
        return tuple(found.get(name) for name in names)

    torch.library.register_autograd(
        f"{_NAMESPACE}::{op.name}", gradients, setup_context=save, lib=_LIBRARY
    )


def refuse_derivative(name: str, message: str) -> None:
    """Let the derivative of a :func:`functional` or :func:`composed` operator raise an error."""

    def refuse(ctx: FunctionCtx, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError(message)

    torch.library.register_autograd(f"{_NAMESPACE}::{name}", refuse, lib=_LIBRARY)


def composed(function: Callable[..., tuple[Any, Callable[[], object]]]) -> Callable[..., Any]:
    """Make ``torch.ops.sparsemla.<name>`` of a function ``_<name>`` that calls torch and other ops.

    The operator returns new tensors and has the function's parameters. The function allocates the
    results and returns them, as its annotation says, with a callable that computes them.
    """
    name = function.__name__.removeprefix("_")
    signature = inspect.signature(function, eval_str=True)
    results, _ = get_args(signature.return_annotation)

    def launch(*arguments: object) -> object:
        allocated, compute = function(*arguments)
        compute()
        return allocated

    def without_memory(lead: Tensor, *rest: object) -> object:
        # torch.compile traces this function, which must not launch.
        return launch(lead, *rest) if launches_on(lead.device) else function(lead, *rest)[0]

    _LIBRARY.define(
        name + _schema({n: p.annotation for n, p in signature.parameters.items()}, (), results)
    )
    _LIBRARY.impl(name, _on_device(launch), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{name}", without_memory, lib=_LIBRARY)
    return getattr(_OPERATORS, name)


def _on_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's implementation: ``launch`` without autograd and autocast, on the lead's GPU."""

    def on_device(lead: Tensor, *rest: object) -> object:
        # Autograd would record the torch functions that a kernel calls.
        if torch.is_grad_enabled():
            with torch.no_grad():
                return on_device(lead, *rest)
        # Autocast would round their operands.
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                return on_device(lead, *rest)
        # Triton launches on the current GPU; the tensors may be on another one.
        if lead.is_cuda and lead.device.index != torch.cuda.current_device():
            with torch.cuda.device(lead.device):
                return launch(lead, *rest)
        return launch(lead, *rest)

    return on_device


def _flattened(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a torch operator, from fields of these kinds."""
    flat: dict[str, Any] = {}
    for name, kind in kinds.items():
        record = _RECORDS.get(kind)
        if record is None:
            flat[name] = kind
        else:
            flat |= {f"{name}_{part}": part_kind for part, part_kind in record.fields.items()}
    return flat


def _schema(kinds: Mapping[str, Any], mutates: Sequence[str], results: object = None) -> str:
    """The torch schema of fields, and of results of this type."""
    written = [
        part
        for name in mutates
        for part, kind in _flattened({name: kinds[name]}).items()
        if kind in (Tensor, Tensor | None)
    ]

    def prototype() -> None: ...

    parameter = inspect.Parameter
    prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            parameter(name, parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in _flattened(kinds).items()
        ],
        return_annotation=results,
    )
    return torch.library.infer_schema(prototype, mutates_args=written)
