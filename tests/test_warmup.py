"""The warm-up compiles every kernel that an engine's steps reach.

Nothing is compiled here: Triton's compiler is replaced by a list of what it is asked for. The
launches need a process in which Triton does not interpret.
"""

import os
import random
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sparsemla import (
    BF16_512,
    BF16_576,
    FP8_528,
    FP8_584,
    FP8_DS_MLA,
    ContextShard,
    Serving,
    warm_up,
)
from sparsemla_lab.testing.serving import CompressedEngine, Engine, HostEngine, random_step
from turns import in_turns

pytest.importorskip("triton")

# Run by a process of its own; see test_steps_compile_nothing.
COVERAGE = """
import sys
sys.path.insert(0, sys.argv[1])
import test_warmup
target, model, num_steps, drop, first = sys.argv[2:]
test_warmup.check_coverage(target, model, int(num_steps), drop, bool(first))
"""


@contextmanager
def recorded(name):
    """A list of the kernels that are compiled for a target, by name and argument classes."""
    from sparsemla_lab.testing.compile import TARGETS, _CompileOnlyDriver, believe

    (target,) = (one for one in TARGETS if one.name == name)
    kernels = []

    def compile_nothing(src, **options):
        kernels.append(f"{src.name} {src.signature} {src.attrs} {src.constants}")
        return SimpleNamespace(run=None)

    with (
        believe(target, _CompileOnlyDriver(target)),
        mock.patch("triton.compiler.compile", compile_nothing),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device", nullcontext),
    ):
        yield kernels


@pytest.fixture
def run(run_python):
    def run(code, *arguments):
        return run_python(code, os.path.dirname(__file__), *arguments)

    return run


def compressed(fmt, num_heads=64, **limits):
    """What a small engine asks for DeepSeek-V4."""
    limits = {"max_requests": 16, "max_tokens": 1024, "max_seq_len": 65536} | limits
    return Serving(
        fmt,
        num_heads,
        topk=512,
        max_positions=65536,
        table_dtype=torch.float32,
        ratios=(0, 4, 128),
        groups=num_heads // 8,
        **limits,
    )


HOST_ROWS = Serving(
    FP8_DS_MLA,
    16,
    index_heads=0,
    max_requests=16,
    max_tokens=1024,
    max_query_len=3,
    max_seq_len=65536,
    rows_per_seat=8192,
)
SERVINGS = {
    "DeepSeek-V3.2": [
        Serving(fmt, heads, max_query_len=query_len)
        for fmt in (FP8_DS_MLA, BF16_576)
        for heads, query_len in ((128, 1), (16, 3))
    ],
    "DeepSeek-V3.2, fp8_ds_mla": [Serving(FP8_DS_MLA, 16, max_query_len=3)],
    "DeepSeek-V3.2, small": [  # long contexts take thousands of launches a step on gfx942
        Serving(
            FP8_DS_MLA,
            16,
            max_requests=16,
            max_tokens=1024,
            max_query_len=3,
            max_seq_len=16384,
        )
    ],
    "selections in two steps": [
        Serving(
            FP8_DS_MLA,
            16,
            topk=512,
            index_heads=32,
            max_requests=16,
            max_tokens=256,
            max_query_len=3,
            max_seq_len=65536,
            topk_blocks=2048,
        )
    ],
    "DeepSeek-V3.2, host rows": [HOST_ROWS],
    "DeepSeek-V3.2, host rows of a rank": [
        replace(HOST_ROWS, converts=False, shard=ContextShard(1, 2))
    ],
    "DeepSeek-V4": [compressed(FP8_584), compressed(BF16_512, 16, max_query_len=3)],
    "DeepSeek-V4, fp8_528": [compressed(FP8_528)],
}


def engine_of(serving, device, gpu=None):
    if serving.ratios:
        return CompressedEngine(serving, device)
    if serving.rows_per_seat is not None:
        return HostEngine(serving, device)
    return Engine(serving, device, gpu)


def random_steps(servings, gpu, num_steps):
    """Run random steps of engines of two sizes, one with each turn of this iterator."""
    for serving in servings:
        rng = random.Random(0)
        for num_pages in (1000, 1024):
            engine = engine_of(replace(serving, num_pages=num_pages), torch.device("meta"), gpu)
            for _ in range(num_steps):
                yield engine.run(random_step(serving, rng))


def check_coverage(target, model, num_steps, drop, first):
    """Warm up, then run random steps and print each kernel that they compile, or the first ones."""
    from sparsemla import warmup
    from sparsemla.kernels.common.compiling import compile_only
    from sparsemla.kernels.common.device import meta_means

    if drop:
        setattr(warmup, drop, lambda *arguments: None)
    gpu = torch.device("cuda:0")
    servings = SERVINGS[model]
    with recorded(target) as kernels:
        warm_up(*servings, device=gpu, workers=1)
        assert bool(kernels) == (drop != "_search_compressed")
        known = len(kernels)
        with meta_means(gpu), compile_only(1):
            for _ in random_steps(servings, gpu, num_steps):
                if first and len(kernels) > known:
                    break
        sys.stdout.write("\n".join(kernels[known:]))


@pytest.mark.parametrize(
    ("target", "model", "num_steps"),
    [
        ("sm_80", "DeepSeek-V3.2, fp8_ds_mla", 60),
        ("sm_89", "DeepSeek-V3.2, fp8_ds_mla", 60),
        ("sm_90", "DeepSeek-V3.2, fp8_ds_mla", 60),
        ("gfx942", "DeepSeek-V3.2, small", 20),
        ("sm_90", "selections in two steps", 40),
        ("sm_90", "DeepSeek-V3.2, host rows", 40),
        ("sm_90", "DeepSeek-V3.2, host rows of a rank", 20),
        ("sm_80", "DeepSeek-V4, fp8_528", 20),
        ("sm_90", "DeepSeek-V4", 20),
    ],
)
def test_steps_compile_nothing(run, target, model, num_steps):
    done = run(COVERAGE, target, model, str(num_steps), "", "")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == ""


@pytest.mark.slow
@pytest.mark.parametrize("target", in_turns(["sm_80", "sm_90"], 4))
def test_many_steps_compile_nothing(run, target):
    done = run(COVERAGE, target, "DeepSeek-V3.2", "500", "", "")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == ""


def test_steps_of_deepseek_v4_reach_its_kernels(run):
    done = run(COVERAGE, "sm_80", "DeepSeek-V4, fp8_528", "5", "_search_compressed", "")
    assert done.returncode == 0, done.stderr[-4000:]
    assert {line.split()[0] for line in done.stdout.splitlines()} >= {
        "_fused_kernel",
        "_visible_slots_kernel",
        "_entry_slots_kernel",
        "_pool_kernel",
        "_index_kernel",
        "score",
        "_select_kernel",
        "_slots_kernel",
        "_sparse_decode",
        "_sparse_prefill",
        "_inputs_kernel",
        "_groups_kernel",
    }


LEFT_OUT = {
    "_write_keys": "sm_90",
    "_search_selection": "sm_90",
    "_score_keys": "sm_90",
    "_find_slots": "sm_90",
    "_decode": "sm_90",
    "_prefill": "gfx942",  # on NVIDIA GPUs, unsplit decodes use the same kernels
    "_convert": "sm_90",
}


@pytest.mark.slow
@pytest.mark.parametrize("search", in_turns(LEFT_OUT, 3))
def test_steps_notice_what_a_warm_up_leaves_out(run, search):
    done = run(COVERAGE, LEFT_OUT[search], "DeepSeek-V3.2, small", "60", search, "first")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "model"),
    [
        ("_keep_rows", "host rows"),
        ("_decode", "host rows"),
        ("_prefill_contexts", "host rows"),
        ("_prefill_whole", "host rows of a rank"),
    ],
)
def test_steps_over_host_rows_notice_what_a_warm_up_leaves_out(run, search, model):
    done = run(COVERAGE, "sm_90", f"DeepSeek-V3.2, {model}", "60", search, "first")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout


def test_rows_on_the_host_must_suffice_for_a_step():
    serving = Serving(FP8_DS_MLA, max_query_len=3, rows_per_seat=6144)
    with pytest.raises(ValueError, match="rows_per_seat must be at least 6144, as 3 tokens of a"):
        replace(serving, rows_per_seat=6143)
    with pytest.raises(ValueError, match="rows_per_seat must be None with ratios"):
        replace(serving, ratios=(0, 4))
    with pytest.raises(ValueError, match="context_rows must be at least 1"):
        replace(serving, context_rows=0)


NO_GPU = """
import torch
from sparsemla import FP8_DS_MLA, Serving, warm_up
try:
    warm_up(Serving(FP8_DS_MLA))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("configurations", "text", TypeError),
        ("steps", 3, TypeError),
        ("steps", [3], TypeError),
        ("progress", 3, TypeError),
        ("device", 3, TypeError),
        ("device", "none", ValueError),
        ("workers", 1.5, TypeError),
        ("workers", 0, ValueError),
    ],
)
def test_wrong_arguments_are_refused(name, value, error):
    with pytest.raises(error, match=f"warm_up: {name}"):
        warm_up(value) if name == "configurations" else warm_up(**{name: value})


def test_a_configuration_of_deepseek_v4():
    config = {"num_attention_heads": 128, "index_topk": 1024, "index_n_heads": 64, "o_groups": 16}
    config["compress_ratios"] = [128, 128, 4, 128, 4, 0]
    serving = Serving.of_model(config, FP8_584, tensor_parallel_size=8, max_seq_len=1 << 20)
    assert serving.ratios == (0, 4, 128)
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    del config["compress_ratios"]
    config |= {"layer_types": ["sliding_attention", *rates], "compress_rates": rates}  # theirs
    for same in (FP8_584, FP8_584.name):
        again = Serving.of_model(config, same, tensor_parallel_size=8, max_seq_len=1 << 20)
        assert serving == again
    assert (serving.num_heads, serving.groups) == (16, 2)
    assert serving.columns == serving.columns_of(4) == 4096
    assert serving.entry_widths(128) == [128, 512, 2048, 8192]
    with pytest.raises(ValueError, match="cache_format must be given with ratios"):
        replace(serving, cache_format=None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_needed(run):
    done = run(NO_GPU)
    assert "got none" in done.stdout, done.stderr


FAILS = """
import sys
sys.path.insert(0, sys.argv[1])
from unittest import mock
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction
from sparsemla import BF16_576, Serving, warm_up
from test_warmup import recorded

def fails(src, **options):
    raise ValueError(f"{src.name} does not compile")

run = JITFunction.run
serving = Serving(BF16_576, num_heads=16, index_heads=0, converts=False)
with recorded("sm_90"), mock.patch("triton.compiler.compile", fails):
    for _ in range(2):
        try:
            warm_up(serving, device="cuda:0")
        except ValueError as error:
            print(error)
print(JITFunction.run is run, _async_compile.active_mode.get())
"""


def test_a_kernel_that_does_not_compile_surfaces(run):
    done = run(FAILS)
    assert done.returncode == 0, done.stderr[-4000:]
    first, again, left = done.stdout.splitlines()
    assert "does not compile" in first
    assert "does not compile" in again
    assert left == "True None"


# Each line: kernels that a real compilation compiled, and that it found.
COUNT = """
import sys, torch
from sparsemla import dispatch
from sparsemla.kernels.common.compiling import count_compilations
from sparsemla_lab.testing.compile import TARGETS, compile_launch

def ints(*shape):
    return torch.empty(shape, dtype=torch.int32, device="meta")

def launch():
    dispatch.load("to_slots", "triton")(
        topk_indices=ints(3, 2048), page_table=ints(3, 64), request_ids=ints(3), page_size=64,
        workspace_starts=None, prefill_request_ids=None, out=ints(3, 2048),
    )

with count_compilations() as outer, count_compilations() as found:
    compile_launch(launch, TARGETS[0])
    compile_launch(launch, TARGETS[0])
print(*found.compiled, "found", *found.loaded)
assert outer == found
"""


def test_compilations_are_counted(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert [run(COUNT).stdout.split() for _ in range(2)] == [
        ["_slots_kernel", "found"],
        ["found", "_slots_kernel"],
    ]


OTHER_OPS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from sparsemla import BF16_576, PagedCache, dense_decode, merge_states, warm_up
from test_warmup import recorded

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

def step():
    cache = PagedCache.allocate(BF16_576, 64, 64, device="meta")
    table, lens = empty(2, 8, dtype=torch.int32), empty(2, dtype=torch.int32)
    dense_decode(empty(2, 1, 64, 576), cache, table, lens, softmax_scale=0.1, num_splits=1)
    merge_states(empty(2, 2, 64, 512), empty(2, 2, 64, dtype=torch.float32))

step()
with recorded("sm_90") as kernels:
    step()
    warm_up(steps=[step], device="cuda:0")
    step()
print(*[kernel.split()[0] for kernel in kernels])
"""


def test_other_ops_are_warmed_up_by_functions_that_call_them(run):
    # Outside a warm-up, such calls do nothing.
    done = run(OTHER_OPS)
    assert done.stdout.split() == ["_attend", "_merge"], done.stderr[-4000:]


OWN_POSITIONS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from sparsemla import ContextShard, Serving, own_positions, warm_up
from sparsemla.kernels.common.compiling import compile_only
from sparsemla.kernels.common.device import meta_means
from test_warmup import recorded

gpu, shard = torch.device("cuda:0"), ContextShard(1, 2, 64, parts=8)
with recorded("sm_90") as kernels:
    warm_up(Serving(None, index_heads=0, shard=shard), device=gpu)
    assert kernels
    del kernels[:]
    with meta_means(gpu), compile_only(1):
        for tokens in (1, 3, 16, 129, 4000):
            selected = torch.empty(tokens + 1, 2048, dtype=torch.int32, device="meta")
            own_positions(selected[1:], shard=shard)
        assert kernels == []
        own_positions(selected, shard=ContextShard(1, 4, 64, parts=8))
print(*[kernel.split()[0] for kernel in kernels])
"""


def test_lists_of_a_rank_compile_nothing(run):
    done = run(OWN_POSITIONS)
    assert done.stdout.split() == ["_own_positions"], done.stderr[-4000:]


KEPT_ROWS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from sparsemla import (
    ContextShard, PagedCache, RowTable, Serving, e4m3_format, fetch_rows, forget_seats,
    resolve_rows, warm_up,
)
from sparsemla.kernels.common.compiling import compile_only
from sparsemla.kernels.common.device import meta_means
from test_warmup import recorded

gpu, shard = torch.device("cuda:0"), ContextShard(1, 2, 64)

def ints(*shape):
    return torch.empty(shape, dtype=torch.int32, device="meta")

def step(batch, seats, topk=512, rows_per_seat=1030, first=0, fmt="fp8_584"):
    table = RowTable.unchecked(*(ints(seats, rows_per_seat) for _ in range(3)))
    found = resolve_rows(
        ints(2 * batch + first, topk)[first:], ints(batch + 1), ints(batch + first)[first:],
        ints(batch), ints(batch, 77), table, page_size=64, max_query_len=2, shard=shard,
    )
    host, fast = (PagedCache.allocate(fmt, *size, device="meta") for size in ((9, 64), (50, 1)))
    fetch_rows(host, fast, found.miss_slots, found.miss_rows, found.miss_counts)
    forget_seats(table, ints(batch + first)[first:])

with recorded("sm_90") as kernels:
    warm_up(
        Serving(
            "fp8_584", index_heads=0, topk=512, max_tokens=64, max_requests=32, max_query_len=2,
            max_seq_len=4096, shard=shard, rows_per_seat=1030,
        ),
        device=gpu,
    )
    assert kernels
    del kernels[:]
    with meta_means(gpu), compile_only(1):
        for batch, seats, first in ((1, 1, 0), (3, 8, 1), (16, 64, 2), (30, 31, 0)):
            step(batch, seats, first=first)
        step(5, 7, rows_per_seat=1040)
        assert kernels == [], kernels
        step(5, 7, rows_per_seat=9000, fmt=e4m3_format(512, 512))
print(*[kernel.split()[0] for kernel in kernels])
"""


def test_rows_in_fast_memory_compile_nothing(run):
    done = run(KEPT_ROWS)
    assert done.stdout.split() == ["_resolve_kernel", "_fetch_kernel"], done.stderr[-4000:]


EXCHANGES = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from torch import distributed
from sparsemla import exchange_states, exchange_topk, warm_up
from test_warmup import recorded

class Group(distributed.ProcessGroup):  # of two ranks, of which one is missing
    def size(self):
        return 2

group = Group(0, 2)

def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")

def step():
    selected = exchange_topk(empty(3, 64), empty(3, 64, dtype=torch.int32), 64, group=group)
    assert selected.shape == (3, 64)
    for scatter, heads in (("heads", 8), (None, 16)):
        states = empty(2, 3, 16, 512, dtype=torch.bfloat16), empty(2, 3, 16)
        out, lse = exchange_states(*states, group=group, scatter=scatter)
        assert (out.shape, lse.shape) == ((3, heads, 512), (3, heads))

with recorded("sm_80") as kernels:
    warm_up(steps=[step], device="cuda:0")
print(*sorted({kernel.split()[0] for kernel in kernels}))
"""


def test_exchanges_are_warmed_up_without_the_other_ranks(run):
    done = run(EXCHANGES)
    assert done.stdout.split() == ["_merge", "_merge_kernel"], done.stderr[-4000:]


CONVERTED = """
import sys
sys.path.insert(0, sys.argv[1])
from sparsemla import FP4_288, FP8_528, FP8_DS_MLA, Serving, warm_up
from test_warmup import recorded

with recorded("sm_90") as kernels:
    for fmt in (FP4_288, FP8_528, FP8_DS_MLA):
        known = len(kernels)
        limits = {"index_heads": 0, "max_tokens": 1, "max_requests": 1}
        warm_up(Serving(fmt, 16, **limits), device="cuda:0", workers=1)
        print(fmt.name, any(name.startswith("_gather_kernel") for name in kernels[known:]))
"""


def test_rows_that_no_prefill_converts_are_not_converted(run):
    done = run(CONVERTED)
    found = done.stdout.splitlines()
    assert found == ["fp4_288 False", "fp8_528 False", "fp8_ds_mla True"], done.stderr[-4000:]


PERMITTED = """
import sys
sys.path.insert(0, sys.argv[1])
from sparsemla import FP8_DS_MLA, Serving, warm_up
from test_warmup import recorded

with recorded("sm_90") as kernels:
    for heads, permitted in ((32, True), (64, False), (64, True)):
        known = len(kernels)
        limits = {"index_heads": 0, "max_tokens": 1, "max_requests": 1}
        serving = Serving(FP8_DS_MLA, heads, allow_fp8_mma=permitted, **limits)
        warm_up(serving, device="cuda:0", workers=1)
        print(sum(name.startswith(("_round_rows", "_attend_rounded")) for name in kernels[known:]))
"""


def test_fp8_mma_are_compiled_if_prefills_permit_them(run):
    done = run(PERMITTED)
    none, not_permitted, *some = map(int, done.stdout.split())
    assert (none, not_permitted) == (0, 0), done.stderr[-4000:]
    assert all(some)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    "serving",
    [
        *(
            Serving(fmt, num_heads=16, max_query_len=3, max_seq_len=32768, num_pages=1025)
            for fmt in (FP8_DS_MLA, BF16_576)
        ),
        compressed(FP8_584, max_query_len=3, num_pages=1025),
    ],
    ids=lambda serving: serving.cache_format.name,
)
def test_steps_on_a_gpu_compile_and_load_nothing(serving):
    from sparsemla.kernels.common.compiling import count_compilations

    warm_up(serving)
    engine, rng = engine_of(serving, torch.device("cuda", 0)), random.Random(0)
    with count_compilations() as found:
        for _ in range(100):
            engine.run(random_step(serving, rng))
    assert found.compiled == found.loaded == []
