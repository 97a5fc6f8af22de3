"""Registration of the ops with torch.

Each op is one ``torch.ops.sparsemla`` operator. Most write their results into arguments, so that
their fake implementation, which ``torch.compile`` needs, has nothing to do. Operators that have a
derivative return new tensors, because torch differentiates no operator that writes into arguments.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from sparsemla.cache import PagedCache, misalignment
from sparsemla.dispatch import Launch, only_compiles
from sparsemla.formats import CacheFormat, get_format
from sparsemla.ops._repeat import recording
from sparsemla.pooling import Pooling, WindowState
from sparsemla.weights import HeadWeight

_LIBRARY = torch.library.Library("sparsemla", "DEF")


@dataclass(frozen=True)
class _Record:
    """How an argument of a class that torch does not know is split into tensors, and joined."""

    fields: dict[str, Any]
    split: Callable[[Any], tuple[Any, ...]]
    join: Callable[..., Any]


def _join_cache(data: Tensor, scales: Tensor | None, format: str) -> PagedCache:
    return PagedCache.unchecked(data, get_format(format), scales)


def _join_optional_cache(
    data: Tensor | None, scales: Tensor | None, format: str | None
) -> PagedCache | None:
    return None if data is None or format is None else _join_cache(data, scales, format)


def _split_cache(cache: PagedCache | None) -> tuple[Tensor | None, Tensor | None, str | None]:
    return (None, None, None) if cache is None else (cache.data, cache.scales, cache.format.name)


def _join_weight(
    data: Tensor, scale: Tensor | None, block_rows: int, block_columns: int
) -> HeadWeight:
    return HeadWeight.unchecked(data, scale, (block_rows, block_columns))


def _split_weight(weight: HeadWeight) -> tuple[Tensor, Tensor | None, int, int]:
    return weight.data, weight.scale, *weight.scale_block


_RECORDS: dict[object, _Record] = {
    PagedCache: _Record(
        {"data": Tensor, "scales": Tensor | None, "format": str}, _split_cache, _join_cache
    ),
    PagedCache | None: _Record(
        {"data": Tensor | None, "scales": Tensor | None, "format": str | None},
        _split_cache,
        _join_optional_cache,
    ),
    CacheFormat: _Record({"name": str}, lambda format: (format.name,), get_format),
    Pooling: _Record(
        {"ratio": int, "overlap": bool},
        lambda pooling: (pooling.ratio, pooling.overlap),
        Pooling,
    ),
    WindowState: _Record({"rows": Tensor}, lambda state: (state.rows,), WindowState.unchecked),
    HeadWeight: _Record(
        {"data": Tensor, "scale": Tensor | None, "block_rows": int, "block_columns": int},
        _split_weight,
        _join_weight,
    ),
}


def operator(*mutates: str) -> Callable[[Callable[..., Launch]], Callable[..., None]]:
    """Make ``torch.ops.sparsemla.<name>`` of a function ``_<name>`` that finds the kernel.

    The operator has the function's parameters. The function returns the launcher for its arguments;
    the operator then calls it with them, by name. A cache or a weight becomes several arguments of
    the torch operator: ``cache`` is ``cache_data``, ``cache_scales`` and ``cache_format``.

    Args:
        mutates: the parameters that the kernel writes; for a cache, all of its tensors.
    """

    def register(function: Callable[..., Launch]) -> Callable[..., None]:
        name = function.__name__.removeprefix("_")
        parameters = inspect.signature(function, eval_str=True).parameters
        records = {
            place: _RECORDS[parameter.annotation]
            for place, parameter in enumerate(parameters.values())
            if parameter.annotation in _RECORDS
        }

        def split(arguments: tuple[Any, ...]) -> list[Any]:
            flat: list[Any] = []
            for place, argument in enumerate(arguments):
                if place in records:
                    flat += records[place].split(argument)
                else:
                    flat.append(argument)
            return flat

        def join(flat: tuple[Any, ...]) -> list[Any]:
            arguments, first = [], 0
            for place in range(len(parameters)):
                if place in records:
                    last = first + len(records[place].fields)
                    arguments.append(records[place].join(*flat[first:last]))
                else:
                    last = first + 1
                    arguments.append(flat[first])
                first = last
            return arguments

        def launch(*flat: object) -> None:
            arguments = join(flat)
            function(*arguments)(**dict(zip(parameters, arguments, strict=True)))

        def without_memory(lead: Tensor, *flat: object) -> None:
            # torch.compile traces this function, which must not launch.
            if only_compiles(lead.device):
                launch(lead, *flat)

        on_device = _on_device(launch)
        _LIBRARY.define(name + _schema(parameters, mutates))
        _LIBRARY.impl(name, on_device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"sparsemla::{name}", without_memory, lib=_LIBRARY)
        dispatched = getattr(torch.ops.sparsemla, name)

        def call(*arguments: object) -> None:
            # A recording could not watch a launcher behind torch's dispatcher.
            watched = not torch.compiler.is_compiling() and recording()
            (on_device if watched else dispatched)(*split(arguments))

        return call

    return register


def functional(function: Callable[..., tuple[Any, Callable[[], object]]]) -> Callable[..., Any]:
    """Make ``torch.ops.sparsemla.<name>``, which returns new tensors, of a function ``_<name>``.

    The operator has the function's parameters. The function allocates the results and returns them,
    as its annotation says, with a callable that computes them. :func:`differentiate` adds the
    derivative.
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
        return launch(lead, *rest) if only_compiles(lead.device) else function(lead, *rest)[0]

    _LIBRARY.define(name + _schema(signature.parameters, (), results))
    _LIBRARY.impl(name, _on_device(launch), "CompositeExplicitAutograd")
    torch.library.register_fake(f"sparsemla::{name}", without_memory, lib=_LIBRARY)
    return getattr(torch.ops.sparsemla, name)


def differentiate(
    name: str,
    backward: Callable[..., Any],
    setup_context: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
) -> None:
    """Give a :func:`functional` operator a derivative, as ``torch.library.register_autograd``."""
    torch.library.register_autograd(
        f"sparsemla::{name}", backward, setup_context=setup_context, lib=_LIBRARY
    )


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


def _schema(
    parameters: Mapping[str, inspect.Parameter], mutates: tuple[str, ...], results: object = None
) -> str:
    """The torch schema of parameters, and of results of this type."""
    flat: dict[str, object] = {}
    written = []
    for name, parameter in parameters.items():
        record = _RECORDS.get(parameter.annotation)
        fields = {name: parameter.annotation}
        if record is not None:
            fields = {f"{name}_{part}": kind for part, kind in record.fields.items()}
        flat |= fields
        if name in mutates:
            written += [part for part, kind in fields.items() if kind in (Tensor, Tensor | None)]

    def prototype() -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind, annotation=one) for name, one in flat.items()],
        return_annotation=results,
    )
    return torch.library.infer_schema(prototype, mutates_args=written)


def aligned(*rows: Tensor | PagedCache | None) -> bool:
    """Whether rows of queries and caches start at multiples of 16 bytes."""
    return all(x.aligned if isinstance(x, PagedCache) else _aligned(x) for x in rows)


def _aligned(rows: Tensor | None) -> bool:
    return rows is None or (
        misalignment(rows) == 0
        and all(stride * rows.itemsize % 16 == 0 for stride in rows.stride()[:-1])
    )
