"""How the Hopper top-k is spread over the device; no GPU is needed."""

import functools
import math
import operator
import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from sparsemla import reference
from sparsemla.kernels.topk import sm90, triton
from sparsemla.testing.cases import Draw, adversarial_scores, merge_topk_case

COLUMNS = [0, 1, 4096, 32768, 131072, 1 << 20]
TOPK = [1, 512, 1024, 2048, 3000, 9000]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def of_132_multiprocessors(monkeypatch):
    monkeypatch.setattr(sm90, "num_multiprocessors", lambda device: 132)


@pytest.mark.parametrize("num_cols", COLUMNS[3:])
@pytest.mark.parametrize("topk", TOPK[:-1])
def test_a_threshold_keeps_clear_of_k_and_of_the_list(topk, num_cols):
    capacity, sample = sm90._list_and_sample(num_cols, topk)
    assert sample & (sample - 1) == capacity & (capacity - 1) == 0
    if sample > sm90.MAX_SAMPLE:
        return  # no list is long enough
    chosen = topk * sample / num_cols
    room = math.sqrt(capacity / topk) - 1
    assert room * math.sqrt(chosen) >= sm90.FEW_SIGMAS


@pytest.mark.parametrize("num_cols", COLUMNS)
@pytest.mark.parametrize("num_rows", [1, 7, 64, 132, 500, 8192])
@pytest.mark.parametrize("topk", TOPK)
def test_lists_have_room_and_memory_is_bounded(topk, num_rows, num_cols):
    how = sm90.plan(num_rows, num_cols, topk, CPU)
    assert how.num_lists <= how.capacity
    assert how.num_lists * how.limit(num_cols) >= min(num_cols, how.capacity)
    assert how.programs == 1 or how.list_bytes(num_cols) <= triton.LIST_BYTES
    assert 1 <= how.programs <= num_rows


class MergeOnTheCpu:
    """What one launch of the kernel of merges does, by the definition."""

    def __getitem__(self, grid):
        return functools.partial(self.merge, grid)

    @staticmethod
    def merge(grid, values, indices, out_values, out, num_parts, width, k, *strides, **constants):
        parts = constants["PARTS"]
        assert grid == (values.shape[1], out.shape[0])
        assert parts * constants["WIDTH"] <= sm90.MERGE_BLOCK
        assert parts * constants["WIDTH"] % (128 * constants["W"]) == 0
        assert width <= constants["WIDTH"]
        assert k <= constants["SORTED"]
        assert out.shape[0] * parts >= num_parts
        for group, (some, ids) in enumerate(
            zip(values.split(parts), indices.split(parts), strict=True)
        ):
            out[group] = reference.merge_topk(some, ids, k)
            if out_values is not None:
                equal = ids.transpose(0, 1).flatten(1)[:, None] == out[group, :, :, None]
                place = equal.int().argmax(-1)
                out_values[group] = some.transpose(0, 1).flatten(1).float().gather(1, place)


@pytest.mark.parametrize(
    ("num_parts", "width", "topk"),
    [(1, 1, 1), (3, 40, 64), (5, 600, 100), (70, 300, 70), (300, 90, 3), (40, 1, 200)],
)
def test_parts_are_merged_in_groups(num_parts, width, topk, monkeypatch):
    monkeypatch.setattr(sm90, "MERGE_BLOCK", 2048)
    monkeypatch.setattr(sm90, "_merge_kernel", MergeOnTheCpu())
    case = merge_topk_case(Draw(0, CPU), num_parts=num_parts, num_rows=2, width=width, topk=topk)
    out = torch.empty(2, topk, dtype=torch.int32)
    sm90.merge_topk(**case, out=out)
    assert torch.equal(out, reference.merge_topk(**case))


ONE_EACH = {
    "mov": lambda a: a,
    "popc": np.bitwise_count,
    "add": operator.add,
    "sub": operator.sub,
    "mad": lambda a, b, c: a * b + c,
    "and": operator.and_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
}


class Threads:
    """The threads of one program, which carry out a block of PTX in lockstep.

    Shared memory begins with anything. What one thread writes and another one looks at or writes,
    with no barrier between, is a race, unless both add to it.
    """

    def __init__(self, operands):
        """Take the ``operands``, uint32 ``[threads]`` by name."""
        self.threads = next(iter(operands.values())).size
        thread = np.arange(self.threads, dtype=np.uint32)
        bit = np.uint32(1) << thread % 32
        special = {"%tid.x": thread, "%laneid": thread % 32}
        masks = {"%lanemask_eq": bit, "%lanemask_lt": bit - np.uint32(1)}
        self.values = special | masks | operands
        self.barriers = 0

    def run(self, ptx):
        words = 64
        for name, count in re.findall(r"\.shared \.align 16 \.b32 (\w+)\[(\d+)\]", ptx):
            self.values[name] = np.full(self.threads, 4 * words, np.uint32)
            words += int(count)
        self.memory = np.random.default_rng(0).integers(0, 1 << 32, words, dtype=np.uint32)
        self.touched = {}  # since the last barrier: word -> how, and by which threads
        lines = [line.strip() for line in re.split(r"[\n;]", ptx)]
        at = 0
        while at < len(lines):
            guard, line = re.fullmatch(r"(?:@(\w+) )?(.*)", lines[at]).groups()
            at += 1
            mask = np.ones(self.threads, bool) if guard is None else self.values[guard]
            if line.startswith("bra.uni"):
                assert mask.all() == mask.any()
                at = lines.index(line.split()[1] + ":") if mask.all() else at
            elif " " in line and line[0] != ".":
                self.step(*line.split(" ", 1), mask)

    def get(self, name):
        if name in self.values:
            return self.values[name]
        return np.full(self.threads, int(name, 0) & 0xFFFFFFFF, np.uint32)

    def put(self, name, x, mask):
        self.values[name] = np.where(mask, x.astype(np.uint32), self.values.get(name, 0))

    def access(self, kind, text, mask):
        place, names = re.search(r"\[(.*)\]", text)[1], re.sub(r"\[.*\]|[{},]", " ", text).split()
        base, _, offset = place.partition("+")
        first = self.get(base) + np.uint32(offset or 0)
        assert not (first[mask] % (4 * len(names))).any()
        for i, name in enumerate(names):
            word = np.where(mask, first // 4 + i, 0)
            if kind == "ld":
                self.put(name, self.memory[word], mask)
            elif kind == "st":
                self.memory[word[mask]] = self.get(name)[mask]
            else:
                np.add.at(self.memory, word[mask], self.get(name)[mask])
            for thread in np.flatnonzero(mask):
                kinds, threads = self.touched.setdefault(word[thread], (set(), set()))
                kinds.add(kind)
                threads.add(thread)
                assert len(threads) == 1 or kinds in ({"ld"}, {"red"}), text

    def step(self, op, rest, mask):
        kind, *how = op.split(".")
        if kind in ("ld", "st", "red"):
            self.access(kind, rest, mask)
            return
        target, *sources = rest.split(", ")
        if kind in ("bar", "setp", "vote", "redux", "shfl"):
            assert mask.all()
        x = [self.get(name) for name in sources]
        of_warp = x[0].reshape(-1, 32) if x else None
        if kind == "bar":
            self.touched, self.barriers = {}, self.barriers + 1
        elif kind == "setp":
            self.values[target] = getattr(operator, how[0])(*x[:2]) & (x[2] if x[2:] else True)
        elif kind == "selp":
            self.put(target, np.where(x[2], *x[:2]), mask)
        elif kind == "vote":
            self.put(target, np.packbits(of_warp, 1, "little").view("<u4").repeat(32), mask)
        elif kind == "redux":
            self.put(target, of_warp.sum(1).repeat(32), mask)
        elif kind == "shfl":
            target, inside = target.split("|")
            self.values[inside] = self.values["%laneid"] >= x[1]
            self.put(target, np.roll(of_warp, int(sources[1]), 1).ravel(), mask)
        else:
            self.put(target, ONE_EACH[kind](*x), mask)


@pytest.mark.parametrize(
    ("columns", "warps", "num_cols", "topk"),
    [(2048, 8, 2048, 512), (1024, 32, 1000, 999), (512, 4, 300, 1), (512, 1, 512, 100)],
)
def test_the_best_of_a_row_that_a_program_holds_find_their_places(columns, warps, num_cols, topk):
    each = columns // (32 * warps)
    for name, row in adversarial_scores(Draw(0, CPU), num_cols, topk).items():
        x = torch.where(row == 0, 0.0, row).numpy()
        bits = x.view(np.int32)
        keys = np.where(np.isnan(x), sm90.NAN_KEY.value, bits ^ (bits >> 31 & 0x7FFFFFFF))
        held = np.full(columns, sm90.DEAD_KEY.value, np.int32)
        held[:num_cols] = keys
        held = held.view(np.uint32).reshape(warps, each, 32).swapaxes(0, 1).reshape(each, -1)
        k = np.full(32 * warps, topk, np.uint32)
        operands = {f"${each + i}": held[i] for i in range(each)} | {f"${2 * each}": k}
        threads = Threads(operands)
        threads.run(sm90._held_ptx(each, warps))
        places = np.stack([threads.get(f"${i}") for i in range(each)]).view(np.int32)
        places = torch.from_numpy(places.reshape(each, warps, 32).swapaxes(0, 1).reshape(-1))
        ids = (places >= 0).nonzero()[:, 0]
        assert torch.equal(places[ids], torch.arange(topk, dtype=torch.int32)), name
        assert torch.equal(ids.int(), reference.select_topk(row[None], topk)[0]), name
        assert threads.barriers <= 12


@pytest.mark.parametrize("num_cols", [0, 1, 2048, 2049, 9000, sm90.HELD])
def test_a_program_holds_a_row(num_cols):
    columns, warps = sm90.held(num_cols)
    assert columns >= num_cols
    assert columns // (32 * warps) in (8, 16)
    assert warps <= 32
