"""Schedules and PTX of the Hopper top-k; no GPU is needed."""

import functools
import math
import operator
import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import sparsemla
from sparsemla import reference
from sparsemla.kernels.topk import schedule
from sparsemla.kernels.topk.arguments import MergeTopk, SelectTopk
from sparsemla.kernels.topk.sm90 import candidates, merge, radix
from sparsemla.kernels.topk.triton import DEAD_KEY, LIST_BYTES, NAN_KEY
from sparsemla_lab.testing.cases import Draw, adversarial_scores, merge_topk_case
from sparsemla_lab.testing.interpreter import acting_as
from test_topk import merges_with_the_largest_index

COLUMNS = [0, 1, 4096, 32768, 131072, 1 << 20]
TOPK = [1, 512, 1024, 2048, 3000, 9000]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def with_132_multiprocessors(monkeypatch):
    for module in (candidates, schedule):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)


# Columns and k without a sufficient margin for any list up to 8192 and any sample up to 4096.
CROWDED = {(1 << 20, 2048), (1 << 20, 3000)}


def margin_in_sigmas(topk, num_cols, capacity, sample):
    """Standard deviations between a threshold and both k and the capacity."""
    return (math.sqrt(capacity / topk) - 1) * math.sqrt(topk * sample / num_cols)


@pytest.mark.parametrize("num_cols", COLUMNS[3:])
@pytest.mark.parametrize("topk", TOPK[:-1])
def test_threshold_has_a_margin_to_k_and_to_the_capacity(topk, num_cols):
    capacity, sample = candidates._list_and_sample(num_cols, topk)
    most = margin_in_sigmas(topk, num_cols, 8192, candidates.MAX_SAMPLE)
    assert (most < candidates.FEW_SIGMAS) == ((num_cols, topk) in CROWDED)
    if (num_cols, topk) in CROWDED:  # the longest list, and a sample that no other row gets
        assert (capacity, sample) == (8192, 2 * candidates.MAX_SAMPLE)
    else:
        assert sample & (sample - 1) == capacity & (capacity - 1) == 0
        assert sample <= candidates.MAX_SAMPLE
        assert margin_in_sigmas(topk, num_cols, capacity, sample) >= candidates.FEW_SIGMAS


@pytest.mark.parametrize("num_cols", COLUMNS)
@pytest.mark.parametrize("num_rows", [1, 7, 64, 132, 500, 8192])
@pytest.mark.parametrize("topk", TOPK)
def test_lists_fit_their_memory_bound(topk, num_rows, num_cols):
    schedule = candidates.schedule_lists(num_rows, num_cols, topk, CPU)
    assert schedule.num_lists <= schedule.capacity
    assert schedule.num_lists * schedule.limit(num_cols) >= min(num_cols, schedule.capacity)
    assert schedule.programs == 1 or schedule.list_bytes(num_cols) <= LIST_BYTES
    assert 1 <= schedule.programs <= num_rows


class MergeOnTheCpu:
    """A launch of the merge kernel, computed by the definition."""

    def __getitem__(self, grid):
        return functools.partial(self.merge, grid)

    @staticmethod
    def merge(grid, values, indices, out_values, out, num_parts, width, k, *strides, **constants):
        parts = constants["PARTS"]
        assert grid == (values.shape[1], out.shape[0])
        assert parts * constants["WIDTH"] <= merge.MERGE_BLOCK
        assert parts * constants["WIDTH"] % (128 * constants["W"]) == 0
        assert width <= constants["WIDTH"]
        assert k <= constants["SORTED"]
        assert out.shape[0] * parts >= num_parts
        for group, (some, ids) in enumerate(
            zip(values.split(parts), indices.split(parts), strict=True)
        ):
            out[group] = reference.merge_topk(some, ids, topk=k)
            if out_values is not None:
                equal = ids.transpose(0, 1).flatten(1)[:, None] == out[group, :, :, None]
                place = equal.int().argmax(-1)
                out_values[group] = some.transpose(0, 1).flatten(1).float().gather(1, place)


@pytest.mark.parametrize(
    ("num_parts", "width", "topk"),
    [(1, 1, 1), (3, 40, 64), (5, 600, 100), (70, 300, 70), (300, 90, 3), (40, 1, 200)],
)
def test_parts_are_merged_in_groups(num_parts, width, topk, monkeypatch):
    monkeypatch.setattr(merge, "MERGE_BLOCK", 2048)
    monkeypatch.setattr(merge, "_merge_kernel", MergeOnTheCpu())
    case = merge_topk_case(Draw(0, CPU), num_parts=num_parts, num_rows=2, width=width, topk=topk)
    out = torch.empty(2, topk, dtype=torch.int32)
    merge.merge_topk(MergeTopk(**case, out=out))
    assert torch.equal(out, reference.merge_topk(**case))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_largest_index_is_a_candidate(dtype):
    for case in merges_with_the_largest_index(CPU, dtype):
        with acting_as("sm_90"):
            merged = sparsemla.merge_topk(**case)
        assert torch.equal(merged, reference.merge_topk(**case))


ONE_EACH = {
    "mov": lambda a: a,
    "popc": np.bitwise_count,
    "add": operator.add,
    "mul": operator.mul,
    "sub": operator.sub,
    "mad": lambda a, b, c: a * b + c,
    "and": operator.and_,
    "xor": operator.xor,
    "min": np.minimum,
    "shl": lambda a, b: np.where(b < 32, a << (b & 31), 0),
    "shr": lambda a, b: np.where(b < 32, a >> (b & 31), 0),
    "clz": lambda a: 32 - np.ceil(np.log2(a + np.float64(1))),
    "bfe": lambda a, first, bits: a >> first & (1 << bits) - 1,
    "dp4a": lambda a, b, c: c + sum((a >> 8 * i & 255) * (b >> 8 * i & 255) for i in range(4)),
}


KINDS = ("none", "ld", "st", "red")
NONE, MANY = 0, -1


class Threads:
    """The threads of a cluster of CTAs, which run a block of PTX in lockstep.

    Shared memory is uninitialised. A word that one thread writes and another thread reads or writes
    without a barrier in between is a race, unless both threads add to it.
    """

    WORDS = 1 << 14
    """Words of the shared memory of each CTA."""

    def __init__(self, operands, ctas):
        """Take the ``operands``, uint32 ``[threads]`` by name."""
        self.threads = next(iter(operands.values())).size
        self.of_cta = self.threads // ctas
        every = np.arange(self.threads, dtype=np.uint32)
        self.cta = every // np.uint32(self.of_cta)
        special = {
            "%tid.x": every % self.of_cta,
            "%laneid": every % 32,
            "%cluster_ctarank": self.cta,
        }
        self.values = special | operands
        self.memory = np.random.default_rng(0).integers(0, 1 << 32, ctas * self.WORDS, np.uint32)
        self.kind = np.zeros_like(self.memory)
        self.toucher = np.zeros_like(self.memory, np.int64)
        self.afar = np.zeros_like(self.memory, bool)
        self.barriers = 0

    def meet(self, words):
        """Pass a barrier of all threads that access these words."""
        self.kind[words] = NONE
        self.afar[words] = False
        self.barriers += 1

    def run(self, ptx):
        words = 64
        for name, count in re.findall(r"\.shared \.align 16 \.b32 (\w+)\[(\d+)\]", ptx):
            self.values[name] = 4 * (words + self.cta * np.uint32(self.WORDS))
            words += int(count)
        assert words <= self.WORDS
        self.away = {}  # threads waiting at each label
        lines = [line.strip() for line in re.split(r"[\n;]", ptx)]
        at = 0
        while at < len(lines):
            guard, line = re.fullmatch(r"(?:@(\w+) )?(.*)", lines[at]).groups()
            at += 1
            self.away.pop(line.removesuffix(":"), None)
            here = ~np.any([*self.away.values(), np.zeros(self.threads, bool)], 0)
            mask = here & (True if guard is None else self.values[guard])
            if line.startswith("bra.uni"):
                assert (mask.reshape(-1, 32).all(1) == mask.reshape(-1, 32).any(1)).all()
                label = line.split()[1]
                if (mask == here).all():
                    at = lines.index(label + ":")
                elif mask.any():
                    self.away[label] = mask
            elif line.startswith("barrier.cluster.wait"):
                assert here.all()
                self.meet(slice(None))
            elif " " in line and line[0] != ".":
                self.step(*line.split(" ", 1), mask, here)

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
            self.touch(word[mask], np.flatnonzero(mask), KINDS.index(kind))

    def touch(self, word, thread, kind):
        before, toucher = self.kind[word], self.toucher[word]
        own = (before == NONE) | (toucher == thread)
        assert (own | ((before == kind) & (kind != KINDS.index("st")))).all(), "a race"
        assert kind != KINDS.index("st") or np.unique(word).size == word.size
        self.kind[word] = np.where((before == NONE) | (before == kind), kind, KINDS.index("st"))
        self.toucher[word] = np.where(own, thread, MANY)
        self.toucher[word[self.toucher[word] != thread]] = MANY
        self.afar[word] |= thread // self.of_cta != word // self.WORDS

    def step(self, op, rest, mask, here):
        kind, *schedule = op.split(".")
        if kind in KINDS:
            self.access(kind, rest, mask)
            return
        target, *sources = rest.split(", ")
        if kind in ("bar", "setp", "vote", "redux", "shfl"):
            assert (mask == here).all()
        x = [self.get(name) for name in sources]
        of_warp = x[0].reshape(-1, 32) if x else None
        if kind == "bar":
            assert here.all()
            self.meet(~self.afar)
        elif kind == "setp":
            x = getattr(operator, schedule[0])(*x[:2]) & (x[2] if x[2:] else True)
            self.put_flag(target, x, here)
        elif kind == "selp":
            self.put(target, np.where(x[2], *x[:2]), mask)
        elif kind == "vote":
            self.put(target, np.packbits(of_warp, 1, "little").view("<u4").repeat(32), mask)
        elif kind == "redux":
            join = {"add": np.sum, "min": np.min}[schedule[1]]
            self.put(target, join(of_warp, 1).repeat(32), mask)
        elif kind == "shfl" and schedule[1] == "idx":
            lane = x[1].reshape(-1, 32).astype(int) % 32
            self.put(target, np.take_along_axis(of_warp, lane, 1).ravel(), mask)
        elif kind == "shfl":
            target, inside = target.split("|")
            self.put_flag(inside, self.values["%laneid"] >= x[1], here)
            self.put(target, np.roll(of_warp, int(sources[1]), 1).ravel(), mask)
        elif kind == "mapa":
            self.put(target, x[0] % (4 * self.WORDS) + x[1] * (4 * self.WORDS), mask)
        else:
            self.put(target, ONE_EACH[kind](*x), mask)

    def put_flag(self, name, x, mask):
        self.values[name] = np.where(mask, x, self.values.get(name, False))


@pytest.mark.parametrize(
    ("columns", "warps", "ctas", "bounded", "num_cols", "topk"),
    [
        (2048, 8, 1, False, 2048, 512),
        (1024, 8, 1, True, 1000, 999),
        (512, 4, 1, False, 300, 1),
        (2048, 2, 1, True, 2048, 500),
        (2048, 8, 2, False, 1500, 100),
        (1024, 8, 8, False, 1024, 600),
    ],
)
def test_selected_columns_are_written_in_order(columns, warps, ctas, bounded, num_cols, topk):
    each = columns // (32 * warps)
    order = (warps, each // 4, 32, 4), (1, 3, 0, 2)
    for name, row in adversarial_scores(Draw(0, CPU), num_cols, topk).items():
        x = torch.where(row == 0, 0.0, row).numpy()
        bits = x.view(np.int32)
        keys = np.where(np.isnan(x), NAN_KEY.value, bits ^ (bits >> 31 & 0x7FFFFFFF))
        held = np.full(columns, DEAD_KEY.value, np.int32)
        held[:num_cols] = keys
        held = held.view(np.uint32).reshape(order[0]).transpose(order[1]).reshape(each, -1)
        operands = {f"${i}": held[i] for i in range(each)}
        operands[f"${2 * each}"] = np.full(32 * warps, topk, np.uint32)
        operands[f"${3 * each}"] = np.full(32 * warps, keys.min(), np.int32).view(np.uint32)
        threads = Threads(operands, ctas)
        threads.run(radix._search_ptx(each, warps // ctas, ctas, bounded))
        places = np.stack([threads.get(f"${i}") for i in range(each)]).view(np.int32)
        places = places.reshape(each // 4, 4, warps, 32).transpose(2, 0, 3, 1)
        places = torch.from_numpy(places.reshape(-1))
        ids = (places >= 0).nonzero()[:, 0]
        assert torch.equal(places[ids], torch.arange(topk, dtype=torch.int32)), name
        assert torch.equal(ids.int(), reference.select_topk(row[None], topk=topk)[0]), name
        assert threads.barriers <= 16


@pytest.mark.parametrize("num_rows", [1, 8, 9, 16, 17, 64, 66, 67, 132, 133, 9999])
@pytest.mark.parametrize("num_cols", [0, 1, 2048, 2049, 9000, 16384, 32768, 131072, 131073])
@pytest.mark.parametrize("topk", [1, 512, 2048])
def test_registers_of_the_ctas_hold_a_row(num_rows, num_cols, topk):
    call = SelectTopk(torch.empty(num_rows, num_cols, device="meta"), topk)
    if schedule.refuse_registers(call) is not None:
        assert num_rows > 132 or num_cols > schedule.COLUMNS_OF_A_CTA
        return
    columns, ctas = schedule.schedule_registers(call)
    assert columns >= num_cols
    assert 8 <= columns // ctas // (32 * min(32, columns // ctas // 256)) <= 16
    assert ctas == 1 or ctas * num_rows <= 132


@pytest.mark.parametrize(
    ("num_rows", "num_cols", "topk", "reason"),
    [
        (132, 16384, 1, None),
        (133, 4096, 1, None),
        (133, 4097, 1, "takes up to 4096 columns of more than 132 rows, got 4097"),
        (133, 8192, 1024, None),
        (133, 8193, 1024, "takes up to 8192 columns of more than 132 rows, got 8193"),
        (66, 32768, 1, None),
        (67, 16385, 1, "holds 16384 columns of each of 67 rows, got 16385"),
        (1, 131072, 1, None),
        (1, 131073, 1, "holds 131072 columns of each of 1 rows, got 131073"),
        (0, 1 << 20, 1, "holds 16384 columns of each of 0 rows, got 1048576"),
    ],
)
def test_rows_that_registers_refuse_go_through_lists(num_rows, num_cols, topk, reason):
    scores = torch.empty(num_rows, num_cols, device="meta")
    (choice,) = sparsemla.explain(sparsemla.select_topk, scores, topk=topk, gpu="sm_90").choices
    assert choice.kernel == ("sm90.candidates" if reason else "sm90.registers")
    assert dict(choice.refusals)["sm90.registers"] == reason


@pytest.mark.parametrize(
    ("shape", "topk", "kernel", "reason"),
    [
        ((64, 3, 8192), 4096, "sm90", None),
        ((1, 3, 8193), 1, "triton.registers", "takes parts of up to 8192 candidates, got 8193"),
        ((2, 3, 8193), 1, "triton.sorted", "takes parts of up to 8192 candidates, got 8193"),
        ((1, 3, 1), 4097, "triton.sorted", "takes topk up to 4096, got 4097"),
    ],
)
def test_merges_that_the_kernel_takes(shape, topk, kernel, reason):
    values = torch.empty(shape, device="meta")
    indices = torch.empty(shape, dtype=torch.int32, device="meta")
    (choice,) = sparsemla.explain(
        sparsemla.merge_topk, values, indices, topk=topk, gpu="sm_90"
    ).choices
    assert choice.kernel == kernel
    assert dict(choice.refusals)["sm90"] == reason
