"""Arguments of the ops: hypothesis draws shapes, kinds and a seed; the seed determines the values.

A drawn case is a dictionary of plain values, which hypothesis prints if an example fails. The
function with the op's name turns it into the op's arguments. Inputs are as dirty as allowed:
unreferenced rows are NaN or huge, indices take any value of their dtype, tensors are slices of
larger ones, pages are shuffled, requests may be empty.
"""

from __future__ import annotations

import math
import random

import torch
from hypothesis import strategies as st

import definitions
from sparsemla import (
    BF16_512,
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    INDEX_FP8,
    ContextShard,
    HeadWeight,
    MLALayer,
    PagedCache,
    RowTable,
    bf16_format,
    e4m3_format,
    get_format,
    plan_batch,
)

E4M3 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32)

SEEDS = st.integers(0, 2**32 - 1)
FLAGS = st.booleans()
HEADS = st.one_of(st.integers(1, 6), st.sampled_from([0, 16, 33, 64, 128]))
PAGE_SIZES = st.one_of(st.integers(1, 8), st.sampled_from([16, 61, 64, 69, 128, 130]))
TOPKS = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 129, 513, 600]))
FLOAT_DTYPES = st.sampled_from(FLOATS)
INT_DTYPES = st.sampled_from([torch.int32, torch.int64])
MODES = st.sampled_from(["pow2", "exact"])
MAGNITUDES = st.sampled_from([0.05, 1.0, 3.0])

FORMATS = st.sampled_from(
    [
        BF16_576,
        BF16_512,
        FP8_DS_MLA,
        FP8_584,
        bf16_format(40, 24),
        bf16_format(96),
        e4m3_format(),
        e4m3_format(576, 512, 0),
        e4m3_format(576, 512, 576),
        e4m3_format(160, 96, 48),
    ]
).map(lambda fmt: fmt.name)
INDEX_FORMATS = st.sampled_from(
    [
        INDEX_FP8,
        bf16_format(128),
        bf16_format(32),
        e4m3_format(64, 64, 64),
        e4m3_format(128, 128, 0),
    ]
).map(lambda fmt: fmt.name)


def cases(**parts):
    """Dictionaries of a seed and the values that the parts draw."""
    return st.fixed_dictionaries({"seed": SEEDS, **parts})


CACHES = {
    "fmt": FORMATS,
    "page_size": PAGE_SIZES,
    "layered": FLAGS,
    "mode": MODES,
    "poison": st.sampled_from([0xFF, 0x7F]),
}
INDEX_CACHES = {**CACHES, "fmt": INDEX_FORMATS}


class Draw:
    """Random tensors on a device; the same numbers on every one."""

    def __init__(self, seed, device="cpu", strided=False):
        self.generator = torch.Generator().manual_seed(seed)
        self.random = random.Random(seed)
        self.device, self.strided = device, strided

    def give(self, tensor):
        """The tensor on the device, as a slice of a larger one of NaN or -1 if strided."""
        tensor = tensor.to(self.device)
        return embedded(tensor) if self.strided else tensor

    def normal(self, *shape, dtype=torch.float32, magnitude=1.0):
        x = torch.randn(shape, generator=self.generator) * magnitude
        return self.give(x.to(dtype))

    def below(self, high, *shape):
        """int64 of [0, high) on the CPU."""
        return torch.randint(0, max(high, 1), shape, generator=self.generator)

    def number(self, low, high):
        """One integer of [low, high]."""
        return self.random.randint(low, high)

    def choice(self, values):
        return self.random.choice(values)

    def chance(self, share):
        return self.random.random() < share

    def shuffled(self, values):
        return self.random.sample(list(values), len(values))

    def integers(self, values, dtype=torch.int32, shape=None):
        tensor = torch.tensor(values, dtype=dtype)
        return self.give(tensor if shape is None else tensor.view(shape))


def embedded(tensor):
    """The same values inside a larger tensor of NaN, or of -1: its strides are the larger one's."""
    shape = [*(n + 1 for n in tensor.shape[:-1]), tensor.shape[-1] + 16]
    filler = math.nan if tensor.is_floating_point() else -1
    larger = torch.full(shape, filler, device=tensor.device, dtype=torch.float32).to(tensor.dtype)
    return larger[tuple(slice(n) for n in tensor.shape)].copy_(tensor)


def outside(num_rows, dtype):
    """Indices out of range; some would be in range without their high bits."""
    ids = [-1, -7, -(2**31), 2**31 - 1, num_rows, num_rows + 5]
    if dtype == torch.int64:
        ids += [2**32, 2**32 + 1, -(2**32) + 1, 2**58, 2**62, -(2**63), 2**63 - 1]
    return ids


def new_cache(draw, num_pages, *, fmt, page_size, layered, poison, **_):
    """A cache full of poison; with ``layered``, the middle one of three layers."""
    fmt = get_format(fmt)
    layers = 3 if layered else None
    cache = PagedCache.allocate(fmt, num_pages, page_size, num_layers=layers, device=draw.device)
    definitions.storage(cache.data).fill_(poison)
    if cache.scales is not None:
        definitions.storage(cache.scales).fill_(poison)
    return cache.layer(1) if layered else cache


def fill(draw, cache, slots, *, mode, magnitude=1.0, equal=False, whole=False, **_):
    """Write random rows to slots: the same row if ``equal``, small integers if ``whole``."""
    fmt = definitions.format_of(cache.format.name)
    rows = torch.randn(len(slots), fmt.head_dim, generator=draw.generator) * magnitude
    if whole:
        rows = torch.randint(-2, 3, rows.shape, generator=draw.generator).float()
    if equal:
        rows[:] = rows[:1]
    mode = "pow2" if fmt.scale_bytes == 1 else mode
    definitions.store(cache, slots, definitions.quantized(fmt, rows.numpy(), mode))


def used_slots(draw, cache, share=0.8):
    """Some slots of a cache, at least one."""
    slots = draw.shuffled(range(cache.num_slots))
    return slots[: max(int(share * len(slots)), 1)]


def selections(draw, num_rows, topk, used, num_slots, dtype, lengths=None, duplicates=True):
    """Indices ``[num_rows, topk]``; behind a row's length they may name any row."""
    beyond = outside(num_slots, dtype)
    rows, all_invalid = [], draw.chance(0.1)
    for r in range(num_rows):
        share = draw.choice([0.0, 0.5, 0.9, 1.0]) if not all_invalid else 0.0
        pool = used[: draw.number(1, len(used))] if duplicates else draw.shuffled(used)
        row = [
            draw.choice(pool) if draw.chance(share) else draw.choice(beyond) for _ in range(topk)
        ]
        if lengths is not None:
            for j in range(max(lengths[r], 0), topk):
                row[j] = draw.choice([*beyond, draw.number(0, num_slots - 1)])
        rows.append(row)
    return draw.integers(rows, dtype, (num_rows, topk))


def sinks(draw, num_heads):
    values = [draw.choice([-math.inf, math.inf, 0.0, 3.0, -2.5, 40.0]) for _ in range(num_heads)]
    return draw.give(torch.tensor(values, dtype=torch.float32))


def attention_scale(draw, cache, magnitude):
    """A scale that makes logits of order 1 to 5."""
    return draw.choice([0.3, 1.0, 4.0]) * cache.format.head_dim**-0.5 / max(magnitude, 0.1)


def tables(draw, lengths, page_size, num_pages, dtype, holes):
    """Page tables of requests ``[B, W]``: garbage after the last page, and holes if ``holes``."""
    beyond = outside(num_pages, dtype)
    if dtype == torch.int64 and page_size > 2:  # wraps to the slot of a row in 64 bits
        beyond.append(-(-(2**64) // page_size))
    width = max([-(-n // page_size) for n in lengths], default=0) + draw.number(0, 2)
    free, rows = draw.shuffled(range(num_pages)), []
    for length in lengths:
        used = -(-length // page_size)
        row, free = free[:used], free[used:]
        if holes:
            row = [draw.choice(beyond) if draw.chance(0.3) else page for page in row]
        rows.append(row + [draw.choice(beyond) for _ in range(width - used)])
    return draw.integers(rows, dtype, (len(lengths), width))


def pages_needed(lengths, page_size):
    return sum(-(-n // page_size) for n in lengths)


def paged(
    draw, lengths, /, *, page_size, index_dtype, holes=False, num_more=2, filled=None, **parts
):
    """A cache with requests of these lengths, poison in all other rows, and its page table.

    With ``filled``, positions from there on are poison as well: the op will write them.
    """
    num_pages = pages_needed(lengths, page_size) + num_more
    cache = new_cache(draw, num_pages, page_size=page_size, **parts)
    table = tables(draw, lengths, page_size, num_pages, index_dtype, holes)
    slots = [
        slot
        for b, length in enumerate(lengths if filled is None else filled)
        for slot in definitions.keys_of_request(cache, definitions.ints(table)[b], length)
        if slot >= 0
    ]
    fill(draw, cache, sorted(set(slots)), **parts)
    return cache, table


def repaged(draw, cache, table):
    """The same requests on other pages."""
    order = torch.randperm(cache.num_pages, generator=draw.generator)
    data = torch.empty_strided(
        cache.data.shape, cache.data.stride(), dtype=cache.data.dtype, device=cache.data.device
    )
    definitions.storage(data).fill_(0xFF)
    data[order] = cache.data
    scales = None
    if cache.scales is not None:
        scales = torch.empty_like(cache.scales)
        scales[order] = cache.scales
    inside = (table >= 0) & (table < cache.num_pages)
    moved = order.to(table.device)[table.where(inside, 0).long()].to(table.dtype)
    return PagedCache(data, cache.format, scales), moved.where(inside, table)


# --- attention -----------------------------------------------------------------------------------

ATTENTION = {
    "num_heads": HEADS,
    "dtype": FLOAT_DTYPES,
    "index_dtype": INT_DTYPES,
    "magnitude": MAGNITUDES,
    "equal": st.sampled_from([False, False, False, True]),
    "sink": FLAGS,
    "strided": FLAGS,
    **CACHES,
}
SELECTION = {"topk": TOPKS, "lengths": FLAGS, "num_pages": st.integers(1, 4)}

EXTRA = st.none() | st.fixed_dictionaries({**CACHES, **SELECTION, "topk": st.integers(0, 70)})
SPARSE_DECODE = cases(
    batch=st.integers(0, 3),
    query_len=st.integers(0, 3),
    extra=EXTRA,
    own_lengths=FLAGS,
    num_splits=st.none() | st.integers(1, 5),
    **SELECTION,
    **ATTENTION,
)


def _selected(draw, shape, batch, query_len, *, index_dtype, magnitude, equal=False, own=False):
    """A cache, indices ``[B, S, K]`` and lengths ``[B]``, or ``[B, S]`` if ``own``, or None."""
    cache = new_cache(draw, **shape)
    used = used_slots(draw, cache)
    fill(draw, cache, used, mode=shape["mode"], magnitude=magnitude, equal=equal)
    topk, lengths, row_lengths = shape["topk"], None, None
    if shape["lengths"]:
        size = (batch, query_len) if own else (batch,)
        lengths = [draw.number(0, topk + 3) for _ in range(math.prod(size))]
        row_lengths = lengths if own else [n for n in lengths for _ in range(query_len)]
        lengths = draw.integers(lengths, index_dtype, size)
    flat = selections(
        draw, batch * query_len, topk, used, cache.num_slots, index_dtype, row_lengths
    )
    indices = draw.give(flat.reshape(batch, query_len, topk))
    return cache, indices, lengths


def sparse_decode(draw, shape):
    batch, query_len, num_heads = shape["batch"], shape["query_len"], shape["num_heads"]
    kinds = {name: shape[name] for name in ("index_dtype", "magnitude", "equal")}
    kinds["own"] = shape["own_lengths"]
    cache, indices, lengths = _selected(draw, shape, batch, query_len, **kinds)
    arguments = {
        "q": draw.normal(batch, query_len, num_heads, cache.format.head_dim, dtype=shape["dtype"]),
        "cache": cache,
        "topk_indices": indices,
        "softmax_scale": attention_scale(draw, cache, shape["magnitude"]),
        "topk_lengths": lengths,
        "attn_sink": sinks(draw, num_heads) if shape["sink"] else None,
        "num_splits": shape["num_splits"],
    }
    if shape["extra"] is not None:
        found = _selected(draw, _like(cache, shape["extra"]), batch, query_len, **kinds)
        names = ("extra_cache", "extra_topk_indices", "extra_topk_lengths")
        arguments.update(zip(names, found, strict=True))
    return arguments


def _like(cache, extra):
    """The shape of a second stream, with the dims of the first one's cache."""
    dims = cache.format.head_dim, cache.format.value_dim
    fmt = get_format(extra["fmt"])
    same = (fmt.head_dim, fmt.value_dim) == dims
    return extra if same else {**extra, "fmt": bf16_format(*dims).name}


SPARSE_PREFILL = cases(
    num_tokens=st.integers(0, 6), as_rows=FLAGS, extra=EXTRA, **SELECTION, **ATTENTION
)


def sparse_prefill(draw, shape):
    num_tokens, num_heads = shape["num_tokens"], shape["num_heads"]
    if shape["as_rows"]:
        dim = get_format(shape["fmt"]).head_dim
        fmt = bf16_format(dim, min(dim, 512)).name
        shape = {**shape, "fmt": fmt, "page_size": 1, "num_pages": shape["num_pages"] * 30}
    kinds = {name: shape[name] for name in ("index_dtype", "magnitude", "equal")}
    cache, indices, lengths = _selected(draw, shape, num_tokens, 1, **kinds)
    caches = {"kv": cache}
    arguments = {
        "q": draw.normal(num_tokens, num_heads, cache.format.head_dim, dtype=shape["dtype"]),
        "kv": cache.data[:, 0] if shape["as_rows"] else cache,
        "topk_indices": draw.give(indices[:, 0]),
        "softmax_scale": attention_scale(draw, cache, shape["magnitude"]),
        "topk_lengths": lengths,
        "attn_sink": sinks(draw, num_heads) if shape["sink"] else None,
    }
    if shape["extra"] is not None:
        found = _selected(draw, _like(cache, shape["extra"]), num_tokens, 1, **kinds)
        caches["extra_cache"] = arguments["extra_cache"] = found[0]
        arguments["extra_topk_indices"] = draw.give(found[1][:, 0])
        arguments["extra_topk_lengths"] = found[2]
    return arguments, caches


SHARED = {"list_tokens": st.integers(1, 8), "token_mask": st.sampled_from([True, True, False])}
SHARED_PREFILL = cases(
    num_tokens=st.integers(0, 20),
    as_rows=FLAGS,
    extra=st.none(),
    **SHARED,
    **SELECTION,
    **ATTENTION,
)


def shared_prefill(draw, shape):
    """The arguments of ``sparse_prefill`` with any lists and masks, and the cache."""
    num_tokens, list_tokens = shape["num_tokens"], shape["list_tokens"]
    num_lists = -(-num_tokens // list_tokens)
    arguments, caches = sparse_prefill(draw, {**shape, "num_tokens": num_lists})
    size = num_tokens, *arguments["q"].shape[1:]
    arguments["q"] = draw.normal(*size, dtype=shape["dtype"])
    arguments["list_tokens"] = list_tokens
    if shape["token_mask"]:
        marks = draw.below(256, num_lists, shape["topk"])
        arguments["token_mask"] = draw.give(marks.where(draw.below(3, *marks.shape) > 0, 0).byte())
    return arguments, caches["kv"]


SHARE_LISTS = cases(
    num_tokens=st.integers(0, 20),
    list_tokens=st.integers(1, 8),
    topk=TOPKS,
    kind=st.sampled_from(["ascending", "ascending", "any", "mixed"]),
    lengths=FLAGS,
    index_dtype=INT_DTYPES,
    strided=FLAGS,
)


def share_lists(draw, shape):
    num_tokens, topk, dtype = shape["num_tokens"], shape["topk"], shape["index_dtype"]
    limit = draw.number(topk + 1, 3 * topk + 2)
    beyond, rows = outside(limit, dtype), []
    for _ in range(num_tokens):
        ids = draw.shuffled(range(limit))[: draw.number(0, topk)]
        ids += [draw.choice(beyond) for _ in range(min(draw.number(0, 2), topk - len(ids)))]
        ids += [draw.choice([-1, -7]) for _ in range(topk - len(ids))]
        if shape["kind"] == "any" or (shape["kind"] == "mixed" and draw.chance(0.1)):
            ids = draw.shuffled(ids) if draw.chance(0.8) else ids
        else:
            named = sorted({row for row in ids if row >= 0})
            ids = named + [draw.choice([-1, -(2**31)]) for _ in range(topk - len(named))]
        rows.append(ids)
    lengths = [draw.number(-2, topk + 3) for _ in range(num_tokens)]
    return {
        "topk_indices": draw.integers(rows, dtype, (num_tokens, topk)),
        "list_tokens": shape["list_tokens"],
        "topk_lengths": draw.integers(lengths, dtype) if shape["lengths"] else None,
    }


OWN_POSITIONS = cases(
    num_tokens=st.integers(0, 5),
    topk=TOPKS,
    num_ranks=st.integers(1, 8),
    parts=st.none() | st.integers(1, 4),
    interleave=st.sampled_from([1, 2, 3, 64, 1000, 2**26 - 1]),
    ascends=FLAGS,
    index_dtype=INT_DTYPES,
    strided=FLAGS,
)


def own_positions(draw, shape):
    num_tokens, topk, dtype = shape["num_tokens"], shape["topk"], shape["index_dtype"]
    num_ranks, interleave, parts = shape["num_ranks"], shape["interleave"], shape["parts"]
    limit = draw.choice([2 * topk + 1, 20 * interleave, 2**31])
    beyond, rows = outside(2**31 - 6, dtype), []
    for _ in range(num_tokens):
        ids = [draw.number(0, limit - 1) for _ in range(topk)]
        if shape["ascends"]:
            ids = sorted(set(ids))[: draw.number(0, topk)]
            ids += [-1] * (topk - len(ids))
        else:
            ids = [draw.choice(beyond) if draw.chance(0.2) else each for each in ids]
        rows.append(ids)
    return {
        "topk_indices": draw.integers(rows, dtype, (num_tokens, topk)),
        "shard": ContextShard(
            draw.number(0, num_ranks - 1),
            num_ranks,
            interleave,
            None if parts is None else parts * num_ranks,
        ),
    }


RESOLVE_ROWS = cases(
    batch=st.integers(0, 3),
    topk=st.sampled_from([1, 2, 5, 17, 40]),
    query_len=st.integers(1, 3),
    spare=st.integers(0, 20),
    page_size=st.sampled_from([1, 3, 64]),
    num_ranks=st.integers(1, 3),
    interleave=st.sampled_from([1, 2, 64]),
    parts=st.none() | st.integers(1, 3),
    index_dtype=INT_DTYPES,
    strided=FLAGS,
)


def resolve_rows(draw, shape):
    dtype, topk, num_ranks = shape["index_dtype"], shape["topk"], shape["num_ranks"]
    width, page_size, batch = draw.number(1, 4), shape["page_size"], shape["batch"]
    capacity = width * page_size
    per_seat, num_seats = shape["query_len"] * topk + shape["spare"], batch + draw.number(1, 2)
    everything = capacity * num_ranks + draw.number(0, 5)
    keys, rows, order = [], [], []
    for _ in range(num_seats):
        held = sorted(draw.shuffled(range(capacity))[: draw.number(0, per_seat)])
        keys.append(held + [2**31 - 1] * (per_seat - len(held)))
        rows.append(draw.shuffled(range(per_seat)))
        order.append(draw.shuffled(range(per_seat)))
    queries = [draw.number(0, shape["query_len"] + 1) for _ in range(batch)]
    offsets = [sum(queries[:b]) for b in range(batch + 1)]
    lists, nowhere = [], [each for each in outside(2**31 - 6, dtype) if each != 2**31 - 6]
    for _ in range(offsets[-1] + draw.number(0, 2)):
        ids = draw.shuffled(range(min(everything, 4 * topk)))[: draw.number(0, topk)]
        if draw.chance(0.5):
            ids = draw.shuffled(range(everything))[: draw.number(0, topk)]
        ids = sorted(ids)
        if draw.chance(0.1):
            ids = ids[::-1] if draw.chance(0.5) else ids[:1] * 2 + ids[2:]
        tail = [draw.choice(nowhere) if draw.chance(0.1) else -1]
        lists.append((ids + tail * topk)[:topk])
    pages = [[draw.number(0, 40) for _ in range(width)] for _ in range(batch)]
    for each in pages:
        if draw.chance(0.3):
            each[draw.number(0, width - 1)] = draw.choice([-1, -(2**31), 2**31 - 1])
    seats = draw.shuffled(range(num_seats))[:batch]
    lengths = [draw.number(0, everything) for _ in range(batch)]
    for b in range(batch):
        if draw.chance(0.1):
            seats[b] = draw.choice([-1, num_seats, 2**31 - 1, -(2**31)])
    rank, parts = draw.number(0, num_ranks - 1), shape["parts"]
    shard = ContextShard(
        rank, num_ranks, shape["interleave"], None if parts is None else parts * num_ranks
    )
    return {
        "topk_indices": draw.integers(lists, dtype, (len(lists), topk)),
        "input_row_offsets": draw.integers(offsets, dtype),
        "seq_lens": draw.integers(lengths, dtype),
        "seats": draw.integers(seats, dtype),
        "page_table": draw.integers(pages, dtype, (batch, width)),
        "table": RowTable(*(draw.integers(part) for part in (keys, rows, order))),
        "page_size": page_size,
        "max_query_len": shape["query_len"],
        "shard": None if num_ranks == 1 and parts is None else shard,
        "stats": draw.integers([7, 2**40], torch.int64),
    }


FETCH_ROWS = cases(
    **CACHES,
    num_tokens=st.integers(0, 4),
    topk=st.sampled_from([0, 1, 7, 20]),
    index_dtype=INT_DTYPES,
    strided=FLAGS,
)


def fetch_rows(draw, shape):
    tokens, topk, dtype = shape["num_tokens"], shape["topk"], shape["index_dtype"]
    source, _ = paged(draw, [draw.number(1, 60), 9], **shape)
    fmt, num_rows = source.format, tokens * topk + draw.number(1, 4)
    target = PagedCache.allocate(fmt, num_rows, 1, device=draw.device)
    for part in target.stored_bytes():
        part.copy_(draw.below(256, *part.shape).to(torch.uint8))
    beyond, missing = outside(source.num_slots, dtype), outside(num_rows, dtype)
    slots = [draw.number(0, source.num_slots - 1) for _ in range(tokens * topk)]
    rows = draw.shuffled(range(num_rows))[: tokens * topk]
    slots = [draw.choice(beyond) if draw.chance(0.1) else each for each in slots]
    rows = [draw.choice(missing) if draw.chance(0.1) else each for each in rows]
    counts = [draw.number(-1, topk + 1) for _ in range(tokens)]
    return {
        "source": source,
        "target": target,
        "miss_slots": draw.integers(slots, dtype, (tokens, topk)),
        "miss_rows": draw.integers(rows, dtype, (tokens, topk)),
        "miss_counts": draw.integers(counts, dtype),
    }


LENGTHS = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 150)), max_size=3)

DENSE_DECODE = cases(
    seq_lens=LENGTHS,
    query_len=st.integers(0, 3),
    causal=FLAGS,
    holes=FLAGS,
    num_splits=st.none() | st.integers(1, 5),
    **ATTENTION,
)


def dense_decode(draw, shape):
    lengths, num_heads = shape["seq_lens"], shape["num_heads"]
    cache, table = paged(draw, lengths, **shape)
    size = len(lengths), shape["query_len"], num_heads, cache.format.head_dim
    return {
        "q": draw.normal(*size, dtype=shape["dtype"]),
        "cache": cache,
        "page_table": table,
        "seq_lens": draw.integers(lengths, shape["index_dtype"]),
        "softmax_scale": attention_scale(draw, cache, shape["magnitude"]),
        "causal": shape["causal"],
        "attn_sink": sinks(draw, num_heads) if shape["sink"] else None,
        "num_splits": shape["num_splits"],
    }


DENSE_PREFILL = cases(
    requests=st.lists(
        st.tuples(st.integers(0, 20), st.one_of(st.integers(0, 40), st.integers(0, 200))),
        max_size=3,
    ),
    num_heads=st.integers(0, 5),
    head_dim=st.sampled_from([1, 24, 64, 192]),
    value_dim=st.sampled_from([1, 24, 128, 256]),
    dtype=FLOAT_DTYPES,
    index_dtype=INT_DTYPES,
    causal=FLAGS,
    strided=FLAGS,
    magnitude=MAGNITUDES,
)


def offsets(draw, lengths, dtype):
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return draw.integers(ends, dtype)


def dense_prefill(draw, shape):
    queries, keys = [list(n) for n in zip(*shape["requests"], strict=True)] or [[], []]
    num_heads, dtype = shape["num_heads"], shape["dtype"]
    size = num_heads, shape["head_dim"]
    return {
        "q": draw.normal(sum(queries), *size, dtype=dtype),
        "k": draw.normal(sum(keys), *size, dtype=dtype, magnitude=shape["magnitude"]),
        "v": draw.normal(sum(keys), num_heads, shape["value_dim"], dtype=dtype),
        "input_row_offsets": offsets(draw, queries, shape["index_dtype"]),
        "kv_row_offsets": offsets(draw, keys, shape["index_dtype"]),
        "softmax_scale": draw.choice([0.3, 1.0, 4.0]) * shape["head_dim"] ** -0.5,
        "causal": shape["causal"],
    }


MERGE_STATES = cases(
    num_parts=st.integers(0, 5),
    num_tokens=st.integers(0, 5),
    num_heads=HEADS,
    value_dim=st.sampled_from([1, 24, 512]),
    dtype=FLOAT_DTYPES,
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    sink=FLAGS,
    strided=FLAGS,
)


def merge_states(draw, shape):
    size = shape["num_parts"], shape["num_tokens"], shape["num_heads"]
    outs = draw.normal(*size, shape["value_dim"], dtype=shape["dtype"])
    lses = draw.normal(*size, magnitude=shape["spread"])
    empty = draw.below(4, *size).to(draw.device) == 0
    if draw.chance(0.3):
        empty[:] |= (draw.below(2, *size[1:]) == 0).to(draw.device)
    lses.masked_fill_(empty, -math.inf)
    outs.masked_fill_(empty[..., None], math.nan)
    sink = sinks(draw, shape["num_heads"]) if shape["sink"] else None
    return {"outs": outs, "lses": lses, "attn_sink": sink}


# --- indexer and selection -----------------------------------------------------------------------

INDEXER = {
    "num_heads": st.sampled_from([1, 2, 3, 5, 32, 64]),
    "weight_dtype": FLOAT_DTYPES,
    "index_dtype": INT_DTYPES,
    "strided": FLAGS,
    "whole": FLAGS,
}

INDEXER_SCORES = cases(
    num_tokens=st.integers(0, 6),
    num_keys=st.one_of(st.integers(0, 70), st.sampled_from([256, 257])),
    head_dim=st.sampled_from([1, 16, 32, 128, 200]),
    fp8=FLAGS,
    key_scales=FLAGS,
    equal=FLAGS,
    **INDEXER,
)


def whole_numbers(draw, *shape, high=2):
    return (draw.below(2 * high + 1, *shape) - high).float()


def index_values(draw, *shape, whole, dtype):
    """Queries or keys: normal values, or small integers, which sum exactly in any order."""
    if whole:
        return draw.give(whole_numbers(draw, *shape).to(dtype))
    return draw.normal(*shape, dtype=dtype)


def indexer_scores(draw, shape):
    num_tokens, num_keys, whole = shape["num_tokens"], shape["num_keys"], shape["whole"]
    dtype = E4M3 if shape["fp8"] else torch.bfloat16
    q = index_values(
        draw, num_tokens, shape["num_heads"], shape["head_dim"], whole=whole, dtype=dtype
    )
    keys = index_values(draw, num_keys, shape["head_dim"], whole=whole, dtype=dtype)
    scales = draw.give(torch.rand(num_keys, generator=draw.generator) + 0.5)
    beyond = outside(num_keys, shape["index_dtype"])
    bounds = [
        [draw.choice([e, draw.number(0, num_keys), draw.choice(beyond)]) for _ in range(num_tokens)]
        for e in (0, num_keys)
    ]
    low = min([max(a, 0) for a in bounds[0]], default=0)
    if num_keys and shape["equal"]:
        keys[:], scales[:] = keys[:1].clone(), scales[:1].clone()
    elif num_keys:  # keys that no row sees
        keys[:low], scales[:low] = math.nan, math.nan
    return {
        "index_q": q,
        "weights": index_values(
            draw, num_tokens, shape["num_heads"], whole=whole, dtype=shape["weight_dtype"]
        ),
        "index_k": keys,
        "index_k_scales": scales if shape["key_scales"] else None,
        "row_starts": draw.integers(bounds[0], shape["index_dtype"]),
        "row_ends": draw.integers(bounds[1], shape["index_dtype"]),
    }


def _index_queries(draw, shape, cache, *lead):
    fmt = cache.format
    dtype = E4M3 if fmt.fp8_dim else torch.bfloat16
    size = *lead, shape["num_heads"]
    q = index_values(draw, *size, fmt.head_dim, whole=shape["whole"], dtype=dtype)
    weights = index_values(draw, *size, whole=shape["whole"], dtype=shape["weight_dtype"])
    return q, weights


INDEXER_SCORES_PAGED = cases(
    seq_lens=LENGTHS,
    query_len=st.integers(0, 3),
    per_row=FLAGS,
    max_seq_len=st.integers(1, 160),
    holes=FLAGS,
    equal=FLAGS,
    **INDEXER,
    **INDEX_CACHES,
)


def indexer_scores_paged(draw, shape):
    lengths, query_len, dtype = shape["seq_lens"], shape["query_len"], shape["index_dtype"]
    cache, table = paged(draw, lengths, **shape)
    q, weights = _index_queries(draw, shape, cache, len(lengths), query_len)
    given = draw.integers(lengths, dtype)
    if shape["per_row"]:
        rows = [[draw.number(0, n) for _ in range(query_len)] for n in lengths]
        given = draw.integers(rows, dtype, (len(lengths), query_len))
    return {
        "index_q": q,
        "weights": weights,
        "cache": cache,
        "page_table": table,
        "seq_lens": given,
        "max_seq_len": shape["max_seq_len"],
    }


RAGGED = {
    "requests": st.lists(
        st.tuples(st.integers(0, 4), st.one_of(st.integers(0, 9), st.integers(0, 150))), max_size=3
    ),
    "topk": st.one_of(st.integers(1, 12), st.sampled_from([64, 200])),
    "causal": FLAGS,
    "max_workspace_bytes": st.sampled_from([1, 64, 1000, 1 << 20]),
    "padding": st.integers(0, 2),
    "holes": FLAGS,
    "equal": FLAGS,
    **INDEXER,
    **INDEX_CACHES,
}
INDEXER_TOPK = cases(as_slots=FLAGS, **RAGGED)
BLOCK_SIZES = st.sampled_from([1, 2, 3, 8, 8, 16, 200])
INDEXER_TOPK_BLOCKS = cases(
    topk_blocks=st.one_of(st.integers(1, 9), st.just(80)), block_size=BLOCK_SIZES, **RAGGED
)
INDEXER_TOPK_OF_BLOCKS = cases(
    num_blocks=st.integers(0, 12), block_size=BLOCK_SIZES, beyond=FLAGS, **RAGGED
)


def indexer_topk(draw, shape):
    return ragged_selection(draw, shape) | {"as_slots": shape["as_slots"]}


def indexer_topk_blocks(draw, shape):
    sizes = {name: shape[name] for name in ("topk_blocks", "block_size")}
    return ragged_selection(draw, shape) | sizes


def indexer_topk_of_blocks(draw, shape):
    """Blocks ascend, some behind the last key; the rest is negative."""
    arguments = ragged_selection(draw, shape)
    width, size, dtype = shape["num_blocks"], shape["block_size"], shape["index_dtype"]
    longest = max((max(m, n) for m, n in shape["requests"]), default=0)
    most = longest // (arguments["ratio"] * size) + 2
    last = 2**62 if dtype == torch.int64 else 2**31 - 1
    lists = []
    for _ in range(len(arguments["index_q"])):
        count = draw.choice([min(width, most), draw.number(0, min(width, most))])
        listed = sorted(torch.randperm(most, generator=draw.generator)[:count].tolist())
        if shape["beyond"] and listed:
            listed[-1] = last  # its keys would be at positions beyond int32
        lists += listed + [draw.choice([-1, -(2**31)])] * (width - count)
    blocks = draw.integers(lists, dtype, (len(arguments["index_q"]), width))
    return arguments | {"blocks": blocks, "block_size": size}


def ragged_selection(draw, shape):
    requests = [(m, max(n, m)) for m, n in shape["requests"]]
    lengths, dtype = [n for _, n in requests], shape["index_dtype"]
    ratio = draw.choice([1, 1, 4, 7])
    cache, table = paged(draw, [n // ratio for n in lengths], **shape)
    num_tokens = sum(m for m, _ in requests) + shape["padding"]
    q, weights = _index_queries(draw, shape, cache, num_tokens)
    return {
        "index_q": q,
        "weights": weights,
        "cache": cache,
        "input_row_offsets": offsets(draw, [m for m, _ in requests], dtype),
        "seq_lens": draw.integers(lengths, dtype),
        "page_table": table,
        "topk": shape["topk"],
        "causal": shape["causal"],
        "ratio": ratio,
        "max_workspace_bytes": shape["max_workspace_bytes"],
    }


SELECT_TOPK = cases(
    num_rows=st.integers(0, 5),
    num_columns=st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 257, 3000])),
    topk=st.one_of(st.integers(1, 40), st.sampled_from([256, 512])),
    kind=st.sampled_from(["normal", "ties", "special", "low bits"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    index_dtype=INT_DTYPES,
    starts=FLAGS,
    ends=FLAGS,
    page_size=st.none() | PAGE_SIZES,
    strided=FLAGS,
)


def score_values(draw, *shape, kind):
    if kind == "ties":
        return whole_numbers(draw, *shape, high=1)
    if kind == "special":
        values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 1e-40, -1e-45])
        return values[draw.below(len(values), *shape)]
    if kind == "low bits":  # one power of two, with neighbouring low bits
        return (draw.below(9, *shape) + 0x3F800000).to(torch.int32).view(torch.float32)
    return torch.randn(shape, generator=draw.generator)


def select_topk(draw, shape):
    num_rows, num_columns, dtype = shape["num_rows"], shape["num_columns"], shape["index_dtype"]
    scores = score_values(draw, num_rows, num_columns, kind=shape["kind"])
    beyond = outside(num_columns, dtype)

    def bounds():
        return [draw.choice([draw.number(0, num_columns), draw.choice(beyond)]) for _ in scores]

    arguments = {
        "scores": draw.give(scores.to(shape["dtype"])),
        "topk": shape["topk"],
        "row_starts": draw.integers(bounds(), dtype) if shape["starts"] else None,
        "row_ends": draw.integers(bounds(), dtype) if shape["ends"] else None,
    }
    if shape["page_size"] is not None:
        table, requests = page_tables(draw, num_rows, num_columns, shape["page_size"], dtype)
        arguments.update(page_table=table, request_ids=requests, page_size=shape["page_size"])
    return arguments


def page_tables(draw, num_rows, num_columns, page_size, dtype):
    """Tables of two requests of any ids, perhaps too narrow, and the request of each row."""
    width = draw.number(0, -(-num_columns // page_size) + 1)
    limit = 2**31 // page_size  # slots from this page on overflow int32
    ids = [-1, -(2**31), 0, 1, 5, 2**31 - 1]
    ids += [page for page in (limit - 1, limit, limit + 1) if page < 2**31]
    if dtype == torch.int64:
        ids += [2**32, 2**58, 2**62, 2**63 - 1, -(2**63)]
    table = [[draw.choice([draw.number(0, 900), draw.choice(ids)]) for _ in range(width)]]
    table += [[draw.number(0, 900) for _ in range(width)]]
    requests = [draw.number(0, 1) for _ in range(num_rows)]
    return draw.integers(table, dtype, (2, width)), draw.integers(requests, dtype)


MERGE_TOPK = cases(
    num_parts=st.integers(0, 4),
    num_rows=st.integers(0, 4),
    num_candidates=st.integers(0, 40),
    topk=st.integers(1, 50),
    kind=st.sampled_from(["normal", "ties", "special"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    index_dtype=INT_DTYPES,
    strided=FLAGS,
)


def merge_topk(draw, shape):
    parts, rows, width = shape["num_parts"], shape["num_rows"], shape["num_candidates"]
    values = score_values(draw, parts, rows, width, kind=shape["kind"])
    ids = torch.empty(parts, rows, width, dtype=torch.int64)
    for r in range(rows):
        count = parts * width
        order = torch.tensor(draw.shuffled(range(3 * count)), dtype=torch.int64)[:count]
        far = order.new_tensor([draw.choice([0, 2**31 - 1 - 3 * count]) for _ in range(1)])
        ids[:, r] = (order + far).view(parts, width)
    gone = draw.below(4, parts, rows, width) == 0
    ids[gone] = draw.choice([-1, -(2**31)])
    values[gone & (draw.below(2, parts, rows, width) == 0)] = math.nan
    return {
        "values": draw.give(values.to(shape["dtype"])),
        "indices": draw.give(ids.to(shape["index_dtype"])),
        "topk": shape["topk"],
    }


TO_SLOTS = cases(
    num_tokens=st.integers(0, 5),
    topk=st.integers(0, 40),
    page_size=PAGE_SIZES,
    prefills=st.none() | st.integers(0, 3),
    index_dtype=INT_DTYPES,
    strided=FLAGS,
)


def to_slots(draw, shape):
    num_tokens, topk, dtype = shape["num_tokens"], shape["topk"], shape["index_dtype"]
    size, prefills = shape["page_size"], shape["prefills"]
    table, requests = page_tables(draw, num_tokens, 3 * size, size, dtype)
    beyond = outside(3 * size, dtype)
    ids = [
        draw.choice([draw.number(0, 4 * size), draw.choice(beyond)])
        for _ in range(num_tokens * topk)
    ]
    arguments = {
        "topk_indices": draw.integers(ids, dtype, (num_tokens, topk)),
        "page_table": table,
        "request_ids": requests,
        "page_size": size,
    }
    if prefills is not None:
        starts = [draw.number(0, 5000) for _ in range(prefills)]
        numbers = [draw.number(-1, prefills - 1) for _ in range(num_tokens)]
        arguments["workspace_starts"] = draw.integers(starts, dtype)
        arguments["prefill_request_ids"] = draw.integers(numbers, dtype)
    return arguments


KEY_SLOTS = cases(
    num_tokens=st.integers(0, 5),
    width=st.integers(1, 40),
    ratio=st.sampled_from([1, 3, 4, 128]),
    page_size=PAGE_SIZES,
    index_dtype=INT_DTYPES,
    strided=FLAGS,
)


def key_slots(draw, shape):
    """The arguments that ``entry_slots`` and ``visible_slots`` share."""
    num_tokens, ratio, dtype = shape["num_tokens"], shape["ratio"], shape["index_dtype"]
    size = shape["page_size"]
    table, requests = page_tables(draw, num_tokens, 3 * size, size, dtype)
    beyond = [p for p in outside(3 * size * ratio, dtype) if p < 2**63 - 1]
    positions = [
        draw.choice([draw.number(0, 4 * size * ratio), draw.choice(beyond)])
        for _ in range(num_tokens)
    ]
    return {
        "positions": draw.integers(positions, dtype),
        "page_table": table,
        "request_ids": requests,
        "ratio": ratio,
        "page_size": size,
    }


GATHER_DEQUANT = cases(
    seq_lens=LENGTHS,
    starts=FLAGS,
    index_dtype=INT_DTYPES,
    holes=FLAGS,
    strided=FLAGS,
    magnitude=MAGNITUDES,
    **CACHES,
)


def gather_dequant(draw, shape):
    lengths, dtype = shape["seq_lens"], shape["index_dtype"]
    cache, table = paged(draw, lengths, **shape)
    firsts = [draw.number(0, n) if shape["starts"] else 0 for n in lengths]
    counts = [n - first for n, first in zip(lengths, firsts, strict=True)]
    starts, total = [0] * len(counts), draw.number(0, 2)
    for b in draw.shuffled(range(len(counts))):
        starts[b] = total
        total += counts[b] + draw.number(0, 2)
    return {
        "cache": cache,
        "page_table": table,
        "seq_lens": draw.integers(counts, dtype),
        "workspace_starts": draw.integers(starts, dtype),
        "seq_starts": draw.integers(firsts, dtype) if shape["starts"] else None,
        "out": draw.normal(total, cache.format.head_dim, dtype=torch.bfloat16),
    }


# --- cache writers -------------------------------------------------------------------------------

MAX_POSITIONS = 40

WRITES = {
    "num_tokens": st.integers(0, 6),
    "dtype": FLOAT_DTYPES,
    "index_dtype": INT_DTYPES,
    "table_dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    "interleaved": FLAGS,
    "num_pages": st.integers(1, 3),
    "magnitude": st.sampled_from([1e-6, 0.05, 1.0, 50.0]),
    "nan": FLAGS,
    "strided": FLAGS,
}


def rope_table(draw, rope_dim, dtype):
    angles = torch.rand(MAX_POSITIONS, rope_dim // 2, generator=draw.generator) * 6.3
    return draw.give(torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype))


def written_slots(draw, cache, num_tokens, dtype):
    """Distinct slots, some negative; a token without a free slot writes nothing."""
    free = draw.shuffled(range(cache.num_slots))[:num_tokens]
    free += [-1] * (num_tokens - len(free))
    return [draw.choice([-1, -(2**31)]) if draw.chance(0.2) else slot for slot in free]


def scale_mode(shape):
    return "pow2" if get_format(shape["fmt"]).scale_dtype != torch.float32 else shape["mode"]


FUSED_ROPE = cases(
    num_heads=HEADS,
    rope_dim=st.sampled_from([0, 2, 8, 24]),
    norm=st.sampled_from(["all", "value", "none"]),
    out_dtype=st.none() | st.sampled_from([*FLOATS, E4M3]),
    kv_out=FLAGS,
    eps=st.sampled_from([1e-6, 1e-2]),
    **WRITES,
    **CACHES,
)


def fused_rope_rmsnorm_quant(draw, shape):
    cache = new_cache(draw, **shape)
    fmt, num_tokens, dtype = cache.format, shape["num_tokens"], shape["dtype"]
    rope = shape["rope_dim"]
    norm = {"all": fmt.head_dim, "value": fmt.head_dim - rope, "none": 0}[shape["norm"]]
    kv = draw.normal(num_tokens, fmt.head_dim, dtype=dtype, magnitude=shape["magnitude"])
    if shape["nan"] and num_tokens:
        kv[draw.number(0, num_tokens - 1), draw.number(0, fmt.head_dim - 1)] = math.nan
    slots = written_slots(draw, cache, num_tokens, shape["index_dtype"])
    positions = [draw.number(0, MAX_POSITIONS - 1) for _ in range(num_tokens)]
    return {
        "q_rope": draw.normal(num_tokens, shape["num_heads"], rope, dtype=dtype),
        "kv": kv,
        "cos_sin_cache": rope_table(draw, rope, shape["table_dtype"]),
        "kv_norm_weight": draw.normal(norm, dtype=dtype),
        "cache": cache,
        "positions": draw.integers(positions, shape["index_dtype"]),
        "slot_mapping": draw.integers(slots, shape["index_dtype"]),
        "eps": shape["eps"],
        "interleaved": shape["interleaved"],
        "scale_mode": scale_mode(shape),
    }


INDEX_WRITES = {**WRITES, "rope_first": FLAGS, "hadamard": FLAGS, "rope_half": st.integers(0, 16)}
APPEND_INDEX_KEYS = cases(**INDEX_WRITES, **INDEX_CACHES)


def append_index_keys(draw, shape):
    cache = new_cache(draw, **shape)
    dim, num_tokens, dtype = cache.format.head_dim, shape["num_tokens"], shape["dtype"]
    k = draw.normal(num_tokens, dim, dtype=dtype, magnitude=shape["magnitude"])
    if shape["nan"] and num_tokens:
        k[draw.number(0, num_tokens - 1), draw.number(0, dim - 1)] = math.nan
    slots = written_slots(draw, cache, num_tokens, shape["index_dtype"])
    positions = [draw.number(0, MAX_POSITIONS - 1) for _ in range(num_tokens)]
    return {
        "index_k": k,
        "norm_weight": draw.normal(dim, dtype=dtype),
        "norm_bias": draw.normal(dim, dtype=dtype),
        "cos_sin_cache": rope_table(draw, 2 * shape["rope_half"], shape["table_dtype"]),
        "cache": cache,
        "positions": draw.integers(positions, shape["index_dtype"]),
        "slot_mapping": draw.integers(slots, shape["index_dtype"]),
        "interleaved": shape["interleaved"],
        "rope_first": shape["rope_first"],
        "hadamard": shape["hadamard"],
        "scale_mode": scale_mode(shape),
    }


FUSED_INDEXER = cases(
    num_heads=st.one_of(st.integers(1, 5), st.just(64)), **INDEX_WRITES, **INDEX_CACHES
)


def fused_indexer_rope_quant(draw, shape):
    keys = append_index_keys(draw, shape)
    size = shape["num_tokens"], shape["num_heads"]
    dim = keys["cache"].format.head_dim
    q = draw.normal(*size, dim, dtype=shape["dtype"], magnitude=shape["magnitude"])
    return {"index_q": q, "weights": draw.normal(*size, dtype=shape["dtype"]), **keys}


def prepare_index_queries(draw, shape):
    both = fused_indexer_rope_quant(draw, shape)
    names = ("index_q", "weights", "cos_sin_cache", "positions", "interleaved", "rope_first")
    arguments = {name: both[name] for name in (*names, "hadamard", "scale_mode")}
    return {**arguments, "format": both["cache"].format}


CACHE_WRITE = cases(
    num_tokens=st.integers(0, 40),
    num_pages=st.integers(1, 3),
    dtype=FLOAT_DTYPES,
    index_dtype=INT_DTYPES,
    magnitude=st.sampled_from([1e-6, 1e-3, 1.0, 3e4]),
    nan=FLAGS,
    strided=FLAGS,
    **{**CACHES, "fmt": st.one_of(FORMATS, INDEX_FORMATS)},
)


def cache_write(draw, shape):
    cache = new_cache(draw, **shape)
    num_tokens, dim = shape["num_tokens"], cache.format.head_dim
    rows = draw.normal(num_tokens, dim, dtype=shape["dtype"], magnitude=shape["magnitude"])
    if shape["nan"] and num_tokens:
        rows[draw.number(0, num_tokens - 1), draw.number(0, dim - 1)] = math.nan
    slots = written_slots(draw, cache, num_tokens, shape["index_dtype"])
    return cache, draw.integers(slots, shape["index_dtype"]), rows


# --- products and branches -----------------------------------------------------------------------

PROJECT_HEADS = cases(
    num_tokens=st.integers(0, 6),
    num_heads=st.one_of(st.integers(1, 5), st.sampled_from([0, 33])),
    num_outputs=st.sampled_from([1, 24, 128, 200]),
    num_inputs=st.sampled_from([1, 24, 128, 192, 512]),
    scale_block=st.none() | st.sampled_from([(128, 128), (64, 128), (128, 64), (5, 16)]),
    num_parts=st.none() | st.integers(1, 4),
    sink=FLAGS,
    magnitude=st.sampled_from([1e-6, 1.0, 100.0]),
    strided=FLAGS,
)


def head_weight(draw, num_heads, num_outputs, num_inputs, scale_block):
    size = num_heads, num_outputs, num_inputs
    if scale_block is None:
        return HeadWeight(draw.normal(*size, dtype=torch.bfloat16, magnitude=num_inputs**-0.5))
    n, k = scale_block
    data = draw.normal(*size, magnitude=num_inputs**-0.5).mul(64).to(E4M3)
    blocks = num_heads, -(-num_outputs // n), -(-num_inputs // k)
    scale = draw.give((torch.rand(blocks, generator=draw.generator) + 0.5) / 64)
    return HeadWeight(draw.give(data), scale, scale_block)


def project_heads(draw, shape):
    num_tokens, num_heads, num_inputs = shape["num_tokens"], shape["num_heads"], shape["num_inputs"]
    size = num_tokens, num_heads, num_inputs
    block, parts = shape["scale_block"], shape["num_parts"]
    arguments = {"weight": head_weight(draw, num_heads, shape["num_outputs"], num_inputs, block)}
    if parts is None:
        x = draw.normal(*size, dtype=torch.bfloat16, magnitude=shape["magnitude"])
        return {"x": x, **arguments}
    merged = merge_states(
        draw,
        {
            "num_parts": parts,
            "num_tokens": num_tokens,
            "num_heads": num_heads,
            "value_dim": num_inputs,
            "dtype": torch.float32,
            "spread": 1.0,
            "sink": shape["sink"],
        },
    )
    return {
        "x": merged["outs"],
        "lses": merged["lses"],
        "attn_sink": merged["attn_sink"],
        **arguments,
    }


PROJECT_GROUPS = cases(
    num_tokens=st.integers(0, 5),
    num_groups=st.integers(1, 3),
    heads_per_group=st.integers(1, 3),
    value_dim=st.sampled_from([16, 24, 40, 64]),
    num_outputs=st.sampled_from([1, 17, 64, 130]),
    rope_half=st.integers(0, 8),
    scale_block=st.none() | st.sampled_from([(128, 128), (32, 16)]),
    table_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    index_dtype=INT_DTYPES,
    magnitude=st.sampled_from([1e-6, 1.0, 100.0]),
    strided=FLAGS,
)


def project_groups(draw, shape):
    num_tokens, groups = shape["num_tokens"], shape["num_groups"]
    heads, value = groups * shape["heads_per_group"], shape["value_dim"]
    x = draw.normal(num_tokens, heads, value, dtype=torch.bfloat16, magnitude=shape["magnitude"])
    inputs = shape["heads_per_group"] * value
    weight = head_weight(draw, groups, shape["num_outputs"], inputs, shape["scale_block"])
    if shape["rope_half"] == 0:
        return {"x": x, "weight": weight}
    positions = [draw.number(0, MAX_POSITIONS - 1) for _ in range(num_tokens)]
    return {
        "x": x,
        "weight": weight,
        "cos_sin_cache": rope_table(draw, 2 * shape["rope_half"], shape["table_dtype"]),
        "positions": draw.integers(positions, shape["index_dtype"]),
    }


SELECTED_SCORES = cases(
    num_tokens=st.integers(0, 5),
    num_heads=st.sampled_from([1, 3, 16, 33]),
    head_dim=st.sampled_from([8, 32, 40, 128]),
    num_rows=st.integers(1, 20),
    topk=st.one_of(st.integers(1, 20), st.sampled_from([64, 65])),
    dtype=FLOAT_DTYPES,
    weight_dtype=FLOAT_DTYPES,
    lengths=FLAGS,
    index_dtype=INT_DTYPES,
    strided=FLAGS,
)


def selected_scores(draw, shape):
    """Vectors of small whole numbers, so that every sum is exact and its sign certain."""
    num_tokens, num_rows, dtype = shape["num_tokens"], shape["num_rows"], shape["dtype"]
    heads, dim, topk = shape["num_heads"], shape["head_dim"], shape["topk"]
    lengths = None
    if shape["lengths"]:
        lengths = draw.integers([draw.number(-1, topk + 2) for _ in range(num_tokens)])
    beyond = outside(num_rows, shape["index_dtype"])
    ids = [
        draw.choice(beyond) if draw.chance(0.2) else draw.number(0, num_rows - 1)
        for _ in range(num_tokens * topk)
    ]
    return {
        "index_q": draw.give(whole_numbers(draw, num_tokens, heads, dim).to(dtype)),
        "weights": draw.give(whole_numbers(draw, num_tokens, heads).to(shape["weight_dtype"])),
        "index_k": draw.give(whole_numbers(draw, num_rows, dim).to(dtype)),
        "topk_indices": draw.integers(ids, shape["index_dtype"], (num_tokens, topk)),
        "topk_lengths": lengths,
    }


SPARSE_ATTENTION = cases(
    num_tokens=st.integers(0, 4),
    num_heads=HEADS,
    head_dim=st.sampled_from([1, 24, 128, 576]),
    num_rows=st.integers(1, 40),
    topk=st.one_of(st.integers(0, 20), st.sampled_from([64, 65])),
    dtype=FLOAT_DTYPES,
    lengths=FLAGS,
    sink=FLAGS,
    dlse=FLAGS,
    deterministic=FLAGS,
    normalize=FLAGS,
    index_dtype=INT_DTYPES,
    magnitude=MAGNITUDES,
    strided=FLAGS,
    list_tokens=st.one_of(st.none(), st.integers(1, 8)),
)


def sparse_attention(draw, shape):
    """Arguments of ``sparse_attention``; rows that no list names are NaN."""
    num_tokens, num_rows, dim = shape["num_tokens"], shape["num_rows"], shape["head_dim"]
    topk, lengths = shape["topk"], None
    if shape["lengths"]:
        lengths = [draw.number(0, topk + 2) for _ in range(num_tokens)]
    used = draw.shuffled(range(num_rows))[: draw.number(1, num_rows)]
    kinds = {"dtype": shape["index_dtype"], "lengths": lengths}
    indices = selections(draw, num_tokens, topk, used, num_rows, **kinds)
    kv = draw.normal(num_rows, dim, dtype=shape["dtype"], magnitude=shape["magnitude"])
    kv[[row for row in range(num_rows) if row not in used]] = math.nan
    return {
        "q": draw.normal(num_tokens, shape["num_heads"], dim, dtype=shape["dtype"]),
        "kv": kv,
        "topk_indices": indices,
        "softmax_scale": draw.choice([0.3, 1.0, 2.0]) * dim**-0.5 / max(shape["magnitude"], 0.1),
        "topk_lengths": None if lengths is None else draw.integers(lengths, shape["index_dtype"]),
        "attn_sink": sinks(draw, shape["num_heads"]) if shape["sink"] else None,
    }


DENSE_INDEX = cases(
    num_tokens=st.integers(0, 5),
    num_rows=st.integers(1, 40),
    num_heads=st.integers(1, 5),
    index_heads=st.sampled_from([1, 3, 16, 33]),
    head_dim=st.sampled_from([8, 40, 192]),
    index_dim=st.sampled_from([8, 40, 128]),
    shared=FLAGS,
    row_weights=FLAGS,
    dtype=FLOAT_DTYPES,
    index_dtype=INT_DTYPES,
    max_workspace_bytes=st.sampled_from([1, 1 << 20]),
    strided=FLAGS,
)


def dense_index(draw, shape):
    """The indexer's vectors are small whole numbers, so that the sign of every dot is certain."""
    num_tokens, num_rows, dtype = shape["num_tokens"], shape["num_rows"], shape["dtype"]
    heads, dim = shape["num_heads"], shape["head_dim"]
    size = num_tokens, shape["index_heads"]
    bounds = [
        [draw.choice([end, draw.number(0, num_rows)]) for _ in range(num_tokens)]
        for end in (0, num_rows)
    ]
    keys = (num_rows, dim) if shape["shared"] else (num_rows, heads, dim)
    weights = draw.give(whole_numbers(draw, *size) * size[1] ** -0.5 / 16)
    factors = draw.normal(num_tokens).abs() if shape["row_weights"] else None
    return {
        "q": draw.normal(num_tokens, heads, dim, dtype=dtype),
        "k": draw.normal(*keys, dtype=dtype),
        "lse": draw.normal(num_tokens, heads),
        "index_q": draw.give(whole_numbers(draw, *size, shape["index_dim"]).to(dtype)),
        "weights": weights,
        "index_k": draw.give(whole_numbers(draw, num_rows, shape["index_dim"]).to(dtype)),
        "softmax_scale": dim**-0.5,
        "row_starts": draw.integers(bounds[0], shape["index_dtype"]),
        "row_ends": draw.integers(bounds[1], shape["index_dtype"]),
        "row_weights": factors,
        "max_workspace_bytes": shape["max_workspace_bytes"],
    }


BRANCH = cases(
    requests=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), min_size=1, max_size=3),
    num_heads=st.one_of(st.integers(1, 5), st.just(17)),
    dims=st.sampled_from(
        [
            ("fp8_ds_mla", 128, 128),
            (BF16_576.name, 24, 32),
            ("bf16_40v24", 16, 8),
            ("e4m3_160v96b48", 32, 24),
        ]
    ),
    kv_dtype=FLOAT_DTYPES,
    index_dtype=INT_DTYPES,
    sparse=FLAGS,
    extra=FLAGS,
    topk=st.integers(0, 30),
    lengths=FLAGS,
    sink=FLAGS,
    fp8=FLAGS,
    interleaved=FLAGS,
    workspace_rows=st.sampled_from([20, 50, 16384]),
    padding=st.integers(0, 2),
    strided=FLAGS,
    **{name: part for name, part in CACHES.items() if name != "fmt"},
)


def layer_of(draw, shape, fmt, nope, value):
    latent, rope = fmt.value_dim, fmt.head_dim - fmt.value_dim
    num_heads = shape["num_heads"]
    block = (128, 128) if shape["fp8"] else None
    return MLALayer(
        w_uk=head_weight(draw, num_heads, latent, nope, block),
        w_uv=head_weight(draw, num_heads, value, latent, block),
        kv_norm_weight=draw.normal(latent, dtype=torch.bfloat16),
        cos_sin_cache=rope_table(draw, rope, torch.float32)[:, :rope].repeat(2, 1),
        softmax_scale=draw.choice([0.5, 1.0]) * (nope + rope) ** -0.5,
        interleaved=shape["interleaved"],
        attn_sink=sinks(draw, num_heads) if shape["sink"] else None,
    )


def branch(draw, shape):
    fmt, nope, value = shape["dims"]
    requests = [(m, c + m) for m, c in shape["requests"]]
    queries, lengths = [list(n) for n in zip(*requests, strict=True)]
    lengths = [n if m else 0 for m, n in requests]
    contexts = [n - m if m else 0 for m, n in requests]
    parts = {**shape, "fmt": fmt, "index_dtype": torch.int32}
    cache, table = paged(draw, lengths, filled=contexts, **parts)
    plan = plan_batch(
        queries,
        lengths,
        table,
        page_size=shape["page_size"],
        workspace_rows=None,
        require_uniform=False,
        num_padded_tokens=sum(queries) + shape["padding"],
    )
    layer = layer_of(draw, shape, cache.format, nope, value)
    num_tokens, size = plan.num_tokens, layer.qk_nope_head_dim + layer.qk_rope_head_dim
    arguments = {
        "q": draw.normal(num_tokens, layer.num_heads, size, dtype=torch.bfloat16),
        "kv": draw.normal(num_tokens, cache.format.head_dim, dtype=shape["kv_dtype"]),
        "cache": cache,
        "layer": layer,
        "plan": plan,
    }
    if shape["sparse"]:
        live = [
            slot
            for b, length in enumerate(lengths)
            for slot in definitions.keys_of_request(cache, definitions.ints(table)[b], length)
        ]
        arguments.update(_chosen(draw, shape, "", cache, live or [-1], num_tokens))
    return arguments


def _chosen(draw, shape, prefix, cache, used, num_tokens):
    """Selections for a branch from the used slots of a cache, and their lengths."""
    dtype, topk = shape["index_dtype"], shape["topk"]
    lengths = [draw.number(0, topk + 3) for _ in range(num_tokens)] if shape["lengths"] else None
    indices = selections(draw, num_tokens, topk, used, cache.num_slots, dtype, lengths)
    return {
        f"{prefix}topk_indices": indices,
        f"{prefix}topk_lengths": None if lengths is None else draw.integers(lengths, dtype),
    }


def extra_stream(draw, shape, cache, num_tokens):
    """A second cache of equal dims with the selections from it."""
    fmt = bf16_format(cache.format.head_dim, cache.format.value_dim)
    extra = new_cache(draw, 2, **{**shape, "fmt": draw.choice([cache.format, fmt]).name})
    used = used_slots(draw, extra)
    fill(draw, extra, used, mode=shape["mode"])
    return {"extra_cache": extra, **_chosen(draw, shape, "extra_", extra, used, num_tokens)}


PLANS = cases(
    requests=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=5),
    page_size=PAGE_SIZES,
    decode_threshold=st.integers(0, 4),
    require_uniform=FLAGS,
    workspace_rows=st.none() | st.integers(1, 60),
    padding=st.none() | st.integers(0, 3),
    share=st.none() | st.tuples(st.integers(1, 4), st.sampled_from([1, 3, 8])),
    buffered=FLAGS,
)


def plan_arguments(draw, shape):
    requests, size = shape["requests"], shape["page_size"]
    lengths = kept = [m + c for m, c in requests]
    shard = None
    if shape["share"] is not None:
        num_ranks, interleave = shape["share"]
        shard = ContextShard(draw.number(0, num_ranks - 1), num_ranks, interleave)
        kept = [shard.longest(n) for n in lengths]
    table = tables(draw, kept, size, pages_needed(kept, size) + 2, torch.int32, False)
    return [m for m, _ in requests], lengths, table, shard
