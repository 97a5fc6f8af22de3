"""The weights of a checkpoint folder: each tensor is accounted for, and codes are dequantised.

A tensor of codes has its factors in a tensor beside it, whose name depends on the tool that wrote
the checkpoint. transformers loads codes whose factors it does not know as if they were weights.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsemla.formats import from_e2m1

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights, by their names in safetensors files."""
INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")
FACTORS = ("F32", "F16", "BF16", "F8_E8M0")
"""Dtypes of factors; those of e2m1 are E8M0, which some tools call U8."""

E2M1_GROUP = 32
"""Codes that share a factor in DeepSeek-V4's experts."""

OF_ACTIVATIONS = re.compile(
    r"\.((input|output|activation)_(scale|scale_inv|zero_point)|[qkv]_scale|kv_scale)$"
)
"""Constants that quantise activations, which this package does not quantise."""

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class CheckpointError(ValueError):
    """A checkpoint or option is unusable; the message is for the user."""


class Entry(NamedTuple):
    """A tensor in a file: the file, and the dtype and shape that its header gives."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


class Layout(NamedTuple):
    """How some weights are quantised.

    Attributes:
        kind: ``e4m3``, ``int8``, ``e2m1`` (two in a byte) or ``packed`` (integers in words).
        block: rows and columns that share a factor; 0: all of them.
        bits: width of a packed integer.
    """

    kind: str
    block: tuple[int, int]
    bits: int = 8


class Codes(NamedTuple):
    """A tensor of codes, and the names of the tensors that belong to it."""

    name: str
    scale: str
    layout: Layout
    shape: tuple[int, ...]
    others: tuple[str, ...]


DTYPES = {"e4m3": ("F8_E4M3",), "int8": ("I8",), "e2m1": ("I8", "U8"), "packed": ("I32",)}
"""Dtypes that store the codes of a kind."""


# Quantisations.


def read_quantization(path: Path, config: dict[str, Any]) -> tuple[Layout, ...]:
    """The layouts of a ``config.json``; none if its weights are not quantised.

    Raises:
        CheckpointError: a quantisation that is not read.
    """
    found = config.get("quantization_config")
    if found is None:
        return ()
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path}: quantization_config must be an object, got {type(found).__name__}"
        )
    method = found.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"{path}: quantization_config must have a quant_method of {' or '.join(METHODS)}, "
            f"got {method!r}"
        )
    try:
        layouts = METHODS[method](found)
    except _Refused as refused:
        raise CheckpointError(f"{path}: quantization_config must have {refused}") from None
    if not layouts:
        raise CheckpointError(f"{path}: quantization_config must quantise weights, got none")
    return layouts


class _Refused(Exception):
    """What a quantization_config must have, and what it has."""


def _of_deepseek(config: dict[str, Any]) -> tuple[Layout, ...]:
    """``fp8``: per block, or without one a factor for each tensor or row."""
    if (fmt := config.get("fmt", "e4m3")) != "e4m3":
        raise _Refused(f"fmt 'e4m3', got {fmt!r}")
    block = config.get("weight_block_size")
    whole = Layout("e4m3", (0, 0)), Layout("e4m3", (1, 0))
    experts = Layout("e2m1", (1, E2M1_GROUP))
    if block is None:
        return (*whole, experts)
    return Layout("e4m3", _sizes("weight_block_size", block)), experts


def _of_compressed_tensors(config: dict[str, Any]) -> tuple[Layout, ...]:
    sparsity = _object("sparsity_config", config.get("sparsity_config") or {})
    if (fmt := sparsity.get("format", "dense")) != "dense":
        raise _Refused(f"a sparsity_config with format 'dense', got {fmt!r}")
    groups = _object("config_groups", config.get("config_groups")).items()
    layouts = []
    for group, content in groups:
        content = _object(f"config_groups[{group!r}]", content)
        if content.get("weights") is None:
            continue
        weights = _object(f"config_groups[{group!r}].weights", content["weights"])
        fmt = content.get("format") or config.get("format")
        kinds = {
            ("float-quantized", "float", 8): "e4m3",
            ("naive-quantized", "float", 8): "e4m3",
            ("int-quantized", "int", 8): "int8",
            ("naive-quantized", "int", 8): "int8",
            ("pack-quantized", "int", 4): "packed",
            ("pack-quantized", "int", 8): "packed",
        }
        kind = fmt, weights.get("type"), weights.get("num_bits")
        if kind not in kinds:
            raise _Refused(
                "float-quantized, int-quantized or pack-quantized weights of 8 bits, or "
                f"pack-quantized ones of 4, got format, type and num_bits {kind}"
            )
        if weights.get("symmetric", True) is not True:
            raise _Refused(f"symmetric weights, got symmetric {weights['symmetric']!r}")
        strategy = weights.get("strategy")
        if strategy == "tensor":
            block = 0, 0
        elif strategy == "channel":
            block = 1, 0
        elif strategy == "group":
            block = 1, _size("group_size", weights.get("group_size"))
        elif strategy == "block":
            block = _sizes("block_structure", weights.get("block_structure"))
        else:
            raise _Refused(f"the strategy tensor, channel, group or block, got {strategy!r}")
        layouts.append(Layout(kinds[kind], block, cast(int, weights["num_bits"])))
    return tuple(layouts)


def _of_quark(config: dict[str, Any]) -> tuple[Layout, ...]:
    parts = [config.get("global_quant_config")]
    for name in ("layer_quant_config", "layer_type_quant_config"):
        parts += _object(name, config.get(name) or {}).values()
    layouts = []
    for part in parts:
        weights = _object("global_quant_config", part or {}).get("weight")
        if weights is None:
            continue
        weights = _object("weight", weights)
        if weights.get("symmetric") is False:
            raise _Refused("symmetric weights, got symmetric False")
        kind, scheme = weights.get("dtype"), weights.get("qscheme")
        if (kind, scheme) == ("fp8_e4m3", "per_tensor"):
            layouts.append(Layout("e4m3", (0, 0)))
        elif (kind, scheme) == ("fp8_e4m3", "per_channel"):
            layouts.append(Layout("e4m3", (1, 0)))
        elif (kind, scheme, weights.get("scale_format")) == ("fp4", "per_group", "e8m0"):
            size = _size("group_size", weights.get("group_size"))
            layouts.append(Layout("e2m1", (1, size)))
        else:
            raise _Refused(
                "weights of dtype fp8_e4m3 with qscheme per_tensor or per_channel, or fp4 with "
                f"per_group and scale_format e8m0, got {kind!r} and {scheme!r}"
            )
    return tuple(layouts)


METHODS = {
    "fp8": _of_deepseek,
    "compressed-tensors": _of_compressed_tensors,
    "quark": _of_quark,
}
"""Keyed by ``quant_method``."""


def _object(name: str, found: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise _Refused(f"an object {name}, got {type(found).__name__}")
    return found


def _size(name: str, found: object) -> int:
    if type(found) is not int or found < 1:
        raise _Refused(f"a positive {name}, got {found!r}")
    return found


def _sizes(name: str, found: object) -> tuple[int, int]:
    if not isinstance(found, list) or [type(size) for size in found] != [int, int]:
        raise _Refused(f"two sizes as {name}, got {found!r}")
    if min(found) < 1:
        raise _Refused(f"positive sizes as {name}, got {found!r}")
    return found[0], found[1]


# Files.


def read_entries(directory: Path) -> dict[str, Entry]:
    """The tensors of a folder, by name, from the headers of its files.

    Raises:
        CheckpointError: no files, one that is missing or unreadable, or a tensor in two of them.
    """
    entries: dict[str, Entry] = {}
    for path in _files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    if name in entries:
                        raise CheckpointError(f"{path}: {name} is in {entries[name].path}, too")
                    found = file.get_slice(name)
                    entries[name] = Entry(path, found.get_dtype(), tuple(found.get_shape()))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot read the weights: {error}") from error
    return entries


def _files(directory: Path) -> list[Path]:
    """The files of weights: of the index, or the single one, or any number without an index."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if single.exists():
        return [single]
    if not index.exists():
        if files := sorted(directory.glob("*.safetensors")):
            return files
        raise CheckpointError(f"{directory} has no weights in *.safetensors files")
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} must have a weight_map of names to files")
    names = set(places.values())
    if wrong := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise CheckpointError(f"{index}: weight_map must name files of its folder, got {wrong[0]}")
    return [directory / name for name in sorted(names)]


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint."""
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:  # a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{path.parent} is not a model directory: cannot read {path.name}: {reason}"
        ) from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold an object, got {type(found).__name__}")
    return found


# Tensors.


def unused(
    config: Any,  # noqa: ANN401 - each model has its own
    weights: Iterable[str],
    patterns: Iterable[str],
) -> Callable[[str], bool]:
    """Whether a name is that of a tensor that the model does not need.

    Layers that only draft tokens, indexers of layers that share the selection of another one, and
    constants of quantised activations.

    Args:
        config: transformers' configuration of the model.
        weights: names of the model's weights.
        patterns: of names that transformers ignores for this architecture.
    """
    count = config.num_hidden_layers
    drafts = getattr(config, "num_nextn_predict_layers", None) or 0
    is_quantised = getattr(config, "quantization_config", None) is not None
    indexed = {_layer_of(name) for name in weights if ".indexer." in name}

    def is_unused(name: str) -> bool:
        if is_quantised and OF_ACTIVATIONS.search(name):
            return True
        layer = _layer_of(name)
        if layer is not None and layer < count:
            return ".indexer." in name and bool(indexed) and layer not in indexed
        if layer is not None and layer < count + drafts:
            return True
        return any(re.search(each, name) for each in patterns)

    return is_unused


def _layer_of(name: str) -> int | None:
    found = LAYER.search(name)
    return int(found[1]) if found else None


def match_codes(
    entries: dict[str, Entry], layouts: tuple[Layout, ...], integers: Container[str]
) -> dict[str, Codes]:
    """The weights that are stored as codes, by name.

    Args:
        entries: the tensors that the model needs.
        layouts: of :func:`read_quantization`.
        integers: last parts of the names of the model's integer buffers.

    Raises:
        CheckpointError: codes without factors, with two tensors of them, or in another layout; a
            weight of integers; or an incomplete list of experts.
    """
    matched: dict[str, Codes] = {}
    for name, entry in entries.items():
        if name.rpartition(".")[2] in integers:
            if entry.dtype not in INTEGERS:
                raise CheckpointError(f"{entry.path}: {name} must be integers, got {entry.dtype}")
        elif entry.dtype not in FLOATS and not _owners(name) & entries.keys():
            weight = name.removesuffix("_packed")
            matched[weight] = _match(name, weight, entries, layouts)
    _check_experts(entries)
    return matched


def _owners(name: str) -> set[str]:
    """The weights that a tensor with this name would belong to."""
    owners = set()
    for end in ("_scale_inv", "_scale", "_zero_point", "_shape", "_g_idx"):
        if name.endswith(end):
            weight = name.removesuffix(end)
            owners |= {weight, f"{weight}_packed"}
    if name.endswith(".scale"):
        owners.add(f"{name.removesuffix('.scale')}.weight")
    return owners


def _scale_names(weight: str) -> list[str]:
    """Names that tools give to the factors of a weight."""
    names = [f"{weight}_scale_inv", f"{weight}_scale"]
    if weight.endswith(".weight"):
        names.append(f"{weight.removesuffix('.weight')}.scale")
    return names


def _match(name: str, weight: str, entries: dict[str, Entry], layouts: tuple[Layout, ...]) -> Codes:
    path, dtype, shape = entries[name]
    if not layouts:
        raise CheckpointError(
            f"{path}: {name} must be floats, got {dtype}: config.json has no quantization_config"
        )
    scales = [each for each in _scale_names(weight) if each in entries]
    if len(scales) != 1:
        expected = ", ".join(_scale_names(weight))
        raise CheckpointError(
            f"{path}: {name} is {dtype} and must have one tensor of factors ({expected}), "
            f"got {' and '.join(scales) or 'none'}"
        )
    others = [f"{weight}_zero_point", f"{weight}_shape"]
    if f"{weight}_g_idx" in entries:
        raise CheckpointError(
            f"{path}: {weight}_g_idx orders columns by activation, which is not read"
        )
    scale = entries[scales[0]]
    is_packed = name != weight
    fitting = [
        layout
        for layout in layouts
        if dtype in DTYPES[layout.kind]
        and is_packed == (layout.kind == "packed")
        and len(shape) >= 2
        and scale.shape in _scale_shapes(_unpacked(shape, layout), layout.block)
    ]
    if not fitting:
        raise CheckpointError(
            f"{scale.path}: {scales[0]} of shape {list(scale.shape)} must fit the "
            f"{dtype} codes {list(shape)} of {name} in {path.name} as quantization_config says: "
            f"{' or '.join(_described(layout) for layout in layouts)}"
        )
    layout = fitting[0]
    if scale.dtype not in ((*FACTORS, "U8") if layout.kind == "e2m1" else FACTORS):
        raise CheckpointError(
            f"{scale.path}: {scales[0]} must be one of {', '.join(FACTORS)}, got {scale.dtype}"
        )
    return Codes(name, scales[0], layout, shape, tuple(each for each in others if each in entries))


def _unpacked(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The shape of a weight, of the shape of its codes, up to the last word's padding."""
    in_one = {"e2m1": 2, "packed": 32 // layout.bits}.get(layout.kind, 1)
    return (*shape[:-1], shape[-1] * in_one)


def _scale_shapes(shape: tuple[int, ...], block: tuple[int, int]) -> set[tuple[int, ...]]:
    """Shapes of the factors of a weight ``[..., N, K]``."""
    *batch, rows, _ = shape
    shapes = {(*batch, *_counts(shape, block))}
    if not batch and block == (0, 0):
        shapes |= {(), (1,)}
    if not batch and block == (1, 0):
        shapes |= {(rows,)}
    return shapes


def _counts(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks of rows and of columns in a weight ``[..., N, K]``."""
    rows, cols = shape[-2:]
    return -(-rows // (block[0] or rows or 1)), -(-cols // (block[1] or cols or 1))


def _described(layout: Layout) -> str:
    rows, cols = (size or "all" for size in layout.block)
    bits = f" of {layout.bits} bits" if layout.kind == "packed" else ""
    return f"{layout.kind}{bits} with a factor for {rows} rows and {cols} columns"


def _check_experts(entries: dict[str, Entry]) -> None:
    """Refuse lists of experts with gaps: transformers stacks those that are there."""
    experts: dict[str, dict[str, dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in entries:
        if found := EXPERT.fullmatch(name):
            experts[found[1]][found[3]][int(found[2])] = name
    for prefix, parts in experts.items():
        count = 1 + max(max(part) for part in parts.values())
        for part, names in parts.items():
            if missing := sorted({*range(count)} - {*names}):
                path = entries[next(iter(names.values()))].path
                raise CheckpointError(f"{path}: {prefix}.{missing[0]}.{part} is missing")
            shapes = {entries[name].shape: name for name in names.values()}
            if len(shapes) > 1:
                (shape, name), (other, another), *_ = shapes.items()
                raise CheckpointError(
                    f"{entries[name].path}: experts must have one shape, got {list(shape)} for "
                    f"{name} and {list(other)} for {another}"
                )


@contextlib.contextmanager
def opened_weights(
    entries: dict[str, Entry], codes: dict[str, Codes], dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """All weights, by the names that transformers knows, while their files are open.

    Codes are dequantised; floats are slices, which transformers reads one after the other.

    Raises:
        CheckpointError: a zero point that is not 0, or a shape that does not fit its codes.
    """
    used = {name for each in codes.values() for name in (each.name, each.scale, *each.others)}
    with contextlib.ExitStack() as stack:
        files = {
            path: stack.enter_context(safe_open(path, framework="pt"))
            for path in {entry.path for entry in entries.values()}
        }
        weights: dict[str, Any] = {
            name: files[entry.path].get_slice(name)
            for name, entry in entries.items()
            if name not in used
        }
        for name, found in codes.items():
            weights[name] = _dequantised(
                found, entries, lambda each: files[entries[each].path].get_tensor(each)
            ).to(dtype)
        yield weights


def _dequantised(found: Codes, entries: dict[str, Entry], read: Callable[[str], Tensor]) -> Tensor:
    """float32 ``[..., N, K]``."""
    layout, path = found.layout, entries[found.name].path
    codes, scale = read(found.name), read(found.scale)
    shape = _unpacked(found.shape, layout)
    for name in found.others:
        other = read(name)
        if name.endswith("_zero_point"):
            if other.any():
                raise CheckpointError(f"{entries[name].path}: {name} must be 0")
        elif layout.kind == "packed":
            *batch, cols = other.tolist()
            if (*batch, _words(cols, layout.bits)) != found.shape:
                raise CheckpointError(
                    f"{path}: {found.name} must hold the {other.tolist()} integers of {name}, "
                    f"got shape {list(found.shape)}"
                )
            shape = (*batch, cols)
    if layout.kind == "e2m1":
        values = from_e2m1(codes.view(torch.uint8)).float()
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
    elif layout.kind == "packed":
        values = _integers(codes, layout.bits)[..., : shape[-1]]
    else:
        values = codes.float()
    *_, rows, cols = shape
    counts = _counts(_unpacked(found.shape, layout), layout.block)
    factors = scale.float().reshape(*shape[:-2], *counts)
    for dim, size in ((-2, layout.block[0] or rows), (-1, layout.block[1] or cols)):
        factors = factors.repeat_interleave(size, dim)
    return values * factors[..., :rows, :cols]


def _words(count: int, bits: int) -> int:
    """32-bit words that hold ``count`` integers."""
    return -(-count * bits // 32)


def _integers(words: Tensor, bits: int) -> Tensor:
    """The integers in words, from the low bits up; the least is stored as 0."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2) - (1 << (bits - 1))
