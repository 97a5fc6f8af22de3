"""The interpreter of Gluon: what it finds in small kernels, and the package's kernels in it."""

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from sparsemla import indexer_topk
from sparsemla.kernels.attention import schedule
from sparsemla.kernels.common.fp8 import HALVES_OF_FOUR
from sparsemla.kernels.common.gluon import async_load, barrier, reinterpret, tma_load
from sparsemla.kernels.repeat import unrepeated
from sparsemla.kernels.topk.arguments import SelectTopk
from sparsemla.kernels.topk.schedule import refuse_registers, schedule_registers
from sparsemla.kernels.topk.sm90 import candidates
from sparsemla_lab.testing import cases
from sparsemla_lab.testing.interpreter import TIER_OF, acting_as, interpreted_ops, interpreting
from sparsemla_lab.verify import run
from sparsemla_lab.verify.matrix import MATRIX, Case

pytestmark = [
    pytest.mark.skipif(not knobs.runtime.interpret, reason="Triton does not interpret"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

SEEDS = range(8)
VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
MATRIX_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
TOKEN_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


# ---- two partitions ----------------------------------------------------------------------------


@gluon.jit
def copy_producer(x, smem, full, empty, BLOCKS: gl.constexpr, WAITS: gl.constexpr):
    for block in range(BLOCKS):
        if WAITS:
            mbarrier.wait(empty, (block & 1) ^ 1)
        async_load(smem, x + block * 64 + gl.arange(0, 64, VECTOR))
        async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def copy_consumer(out, smem, full, empty, BLOCKS: gl.constexpr, WAITS: gl.constexpr):
    for block in range(BLOCKS):
        if WAITS:
            mbarrier.wait(full, block & 1)
        gl.store(out + block * 64 + gl.arange(0, 64, VECTOR), smem.load(VECTOR))
        mbarrier.arrive(empty, count=1)


@gluon.jit
def copy_kernel(
    x, out, BLOCKS: gl.constexpr, COUNT: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr
):
    smem = gl.allocate_shared_memory(gl.int32, [64], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=COUNT)
    mbarrier.init(empty, count=1)
    gl.warp_specialize(
        [
            (copy_consumer, (out, smem, full, empty, BLOCKS, FULL)),
            (copy_producer, (x, smem, full, empty, BLOCKS, EMPTY)),
        ],
        [4],
        [24],
    )


def copied(seed, count=128, full=True, empty=True):
    """Whether a kernel with these waits copies right."""
    x, out = torch.arange(256, dtype=torch.int32), torch.empty(256, dtype=torch.int32)
    with interpreting(seed):
        copy_kernel[(1,)](x, out, 4, count, full, empty)
    return torch.equal(out, x)


def test_a_right_kernel_is_right_in_every_order():
    assert all(copied(seed) for seed in SEEDS)


@pytest.mark.parametrize("missing", ["full", "empty"])
def test_a_missing_wait_shows_in_some_order(missing):
    def is_right(seed):
        try:
            return copied(seed, **{missing: False})
        except RuntimeError:  # a wait for a phase that has passed
            return False

    assert not all(is_right(seed) for seed in SEEDS)


def test_a_missing_arrival_is_a_deadlock():
    with pytest.raises(RuntimeError, match="deadlock: 2 partitions wait"):
        copied(0, count=129)


def test_arrivals_are_counted():
    with pytest.raises(RuntimeError, match="more than 64 arrivals"):
        copied(0, count=64)


# ---- an MMA ------------------------------------------------------------------------------------


@gluon.jit
def product_kernel(a, b, out, FENCE: gl.constexpr, WAIT: gl.constexpr):
    rows = gl.arange(0, 64, gl.SliceLayout(1, MATRIX_LAYOUT))
    columns = gl.arange(0, 64, gl.SliceLayout(0, MATRIX_LAYOUT))
    at = rows[:, None] * 64 + columns[None, :]
    left = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    right = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    left.store(gl.load(a + at))
    right.store(gl.load(b + at))
    if FENCE:
        fence_async_shared()
    acc = gl.zeros([64, 64], gl.float32, ACC)
    acc = warpgroup_mma(left, right, acc, use_acc=False, is_async=True)
    if WAIT:
        acc = warpgroup_mma_wait(0, deps=[acc])
    gl.store(out + at, gl.convert_layout(acc, MATRIX_LAYOUT))


def product(fence=True, wait=True):
    a, b = torch.randn(2, 64, 64).bfloat16()
    out = torch.empty(64, 64)
    with interpreting():
        product_kernel[(1,)](a, b, out, fence, wait)
    return torch.allclose(out, a.float() @ b.float(), atol=1e-4)


def test_a_product():
    assert product()


def test_an_mma_needs_a_fence_and_a_wait():
    with pytest.raises(RuntimeError, match="without a proxy fence"):
        product(fence=False)
    with pytest.raises(RuntimeError, match="without a wait for its MMA"):
        product(wait=False)


# ---- memory ------------------------------------------------------------------------------------


@gluon.jit
def panel_kernel(desc, out):
    smem = gl.allocate_shared_memory(gl.bfloat16, [64, 128], TILE)
    panels = reinterpret(smem, gl.bfloat16, [2, 64, 64], TILE)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, 2 * 64 * 64 * 2)
    for panel in gl.static_range(2):
        to = reinterpret(panels.index(panel), gl.bfloat16, [1, 64, 64], TOKEN_TILE)
        tma_load(desc, [1, 0, panel * 64], bar, to)
    mbarrier.wait(bar, 0)
    rows = gl.arange(0, 64, gl.SliceLayout(1, MATRIX_LAYOUT))
    columns = gl.arange(0, 128, gl.SliceLayout(0, MATRIX_LAYOUT))
    gl.store(out + rows[:, None] * 128 + columns[None, :], smem.load(MATRIX_LAYOUT))


def test_a_tile_is_panels_of_64_columns_and_tma_fills_with_zeros():
    x, out = torch.randn(2, 50, 100).bfloat16(), torch.empty(64, 128, dtype=torch.bfloat16)
    desc = TensorDescriptor(
        torch.nn.functional.pad(x, (0, 4)), [2, 50, 100], [50 * 104, 104, 1], [1, 64, 64],
        TOKEN_TILE.value,
    )  # fmt: skip
    with interpreting():
        panel_kernel[(1,)](desc, out)
    assert torch.equal(out, torch.nn.functional.pad(x[1], (0, 28, 0, 14)))


@gluon.jit
def load_kernel(x, out, last):
    at = gl.arange(0, 64, VECTOR)
    gl.store(out + at, gl.load(x + at, mask=at < last))


def test_addresses_stay_inside_and_masked_elements_are_poison():
    x, out = torch.arange(32, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    with interpreting():
        load_kernel[(1,)](x, out, 32)
        assert torch.equal(out[:32], x)
        assert (out[32:] == 0x7F7F7F7F).all()
        with pytest.raises(IndexError, match="bytes 0 to 132 of a storage of 128"):
            load_kernel[(1,)](x, out, 33)


@gluon.jit
def number_kernel(x, y, out):
    at = gl.arange(0, 4, VECTOR)
    a, b = gl.load(x + at), gl.load(y + at)
    gl.store(out + at, (a // 4).to(gl.float32))
    gl.store(out + (4 + at), (a % 4).to(gl.float32))
    gl.store(out + (8 + at), b.to(gl.bfloat16) * 3)
    gl.store(out + (12 + at), b.to(gl.float8e4nv).to(gl.float32))
    gl.store(out + (16 + at), (a.to(gl.uint32) >> 28).to(gl.float32))
    gl.store(out + (20 + at), gl.maximum(b, gl.where(a > 0, float("nan"), 0.0)))


def test_numbers_are_those_of_triton():
    x = torch.tensor([-7, 7, -8, 9], dtype=torch.int32)
    y = torch.tensor([1.004, 1000.0, -0.3, 2.0**-10])
    out = torch.empty(6, 4)
    with interpreting():
        number_kernel[(1,)](x, y, out)
    assert out[0].tolist() == [-1, 1, -2, 2]
    assert out[1].tolist() == [-3, 3, 0, 1]
    assert torch.equal(out[2], (y.bfloat16() * 3).float())
    assert out[3].tolist() == [1.0, 448.0, -0.3125, 2.0**-9 * 0.0]
    assert out[4].tolist() == [15, 0, 15, 0]
    assert torch.equal(out[5], torch.tensor([1.004, 1000.0, 0.0, 2.0**-10]))


def test_the_environment_is_checked(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET must be 1"), acting_as("sm_90"):
        pass


@gluon.jit
def add_kernel(x, out, BARRIER: gl.constexpr):
    at = gl.arange(0, 128, VECTOR)
    gl.store(out + at, gl.load(x + at) + 1)
    if BARRIER:
        barrier()
    gl.store(out + 128 + at, gl.load(out + 127 - at))


def test_threads_read_what_others_wrote_behind_a_barrier():
    x, out = torch.arange(128, dtype=torch.int32), torch.empty(256, dtype=torch.int32)
    with interpreting():
        add_kernel[(1,)](x, out, True)
        assert torch.equal(out, torch.cat([x + 1, (x + 1).flip(0)]))
        with pytest.raises(
            RuntimeError, match="a thread writes and another reads, with no barrier"
        ):
            add_kernel[(1,)](x, out, False)
        with pytest.raises(RuntimeError, match="writes what another program reads"):
            add_kernel[(2,)](x, out, True)


@gluon.jit
def crowd_kernel(x, out):
    at = gl.arange(0, 64, VECTOR)
    gl.store(out + at // 2, gl.load(x + at))


def test_a_store_has_one_value_for_an_address():
    x, out = torch.arange(64, dtype=torch.int32), torch.empty(32, dtype=torch.int32)
    with interpreting():
        crowd_kernel[(1,)](x // 2, out)
        assert torch.equal(out, x[:32])
        with pytest.raises(RuntimeError, match="several values for an address"):
            crowd_kernel[(1,)](x, out)


@gluon.jit
def early_kernel(x, out, WAIT: gl.constexpr):
    at = gl.arange(0, 64, VECTOR)
    if WAIT:
        gdc_wait()
    gl.store(out + at, gl.load(x + at))


def test_an_early_kernel_waits_for_the_one_in_front():
    x, out = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    with interpreting():
        early_kernel[(1,)](x, out, True, launch_pdl=True)
        assert torch.equal(out, x)
        with pytest.raises(RuntimeError, match="before it waits for the one in front"):
            early_kernel[(1,)](x, out, False, launch_pdl=True)


# ---- PTX ---------------------------------------------------------------------------------------


@gluon.jit
def block_kernel(x, out, TEXT: gl.constexpr, RESULT: gl.constexpr):
    at = gl.arange(0, 128, VECTOR)
    found = gl.inline_asm_elementwise(
        TEXT, RESULT + ",r,r", [gl.load(x + at), at], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.store(out + at, found)


def run_block(text, x=None, result="=r", seed=0, **options):
    """Results of PTX for 128 threads: $1 is x, and $2 the thread's number."""
    x = torch.arange(128, dtype=torch.int32) if x is None else x
    out = torch.empty(128, dtype=torch.int32)
    with interpreting(seed):
        block_kernel[(1,)](x, out, text, result, **options)
    return out


REVERSE = """{
    .reg .b32 at, from;
    .shared .align 16 .b32 line[128];
    mov.u32 at, line;
    mad.lo.u32 from, $2, -4, at;
    mad.lo.u32 at, $2, 4, at;
    st.shared.b32 [at], $1;
    bar.sync 0;
    ld.shared.b32 $0, [from+508];
}"""


def test_warps_exchange_through_shared_memory():
    assert run_block(REVERSE).tolist() == list(range(127, -1, -1))
    for seed in SEEDS:
        with pytest.raises(RuntimeError, match=r"a race: warp \d (reads|writes) 'line'"):
            run_block(REVERSE.replace("bar.sync 0;", ""), seed=seed)
    with pytest.raises(IndexError, match="outside of all variables"):
        run_block(REVERSE.replace("508", "512"))
    with pytest.raises(IndexError, match="misaligned"):
        run_block(REVERSE.replace("508", "507"))


def test_lanes_of_a_warp_need_a_barrier_too():
    one_warp = REVERSE.replace("from, $2, -4", "from, $2, 0").replace("508", "0")
    assert run_block(one_warp).tolist() == [0] * 128
    with pytest.raises(RuntimeError, match=r"several lanes of warp . write a word of 'line'"):
        run_block(REVERSE.replace("at, $2, 4, at", "at, $2, 0, at"))


COUNT = """{
    .reg .b32 at;
    .reg .pred first;
    .shared .align 16 .b32 count[1];
    mov.u32 at, count;
    setp.eq.u32 first, $2, 0;
    @first st.shared.b32 [at], 5;
    bar.sync 0;
    red.shared.add.u32 [at], $1;
    bar.sync 0;
    ld.shared.b32 $0, [at];
}"""


def test_atomic_additions_race_with_all_but_themselves():
    assert run_block(COUNT).tolist() == [5 + 127 * 64] * 128
    first, second, third = COUNT.split("bar.sync 0;")
    for missing in (first + second + "bar.sync 0;" + third, first + "bar.sync 0;" + second + third):
        with pytest.raises(RuntimeError, match="a race: warp"):
            run_block(missing)


def test_warps_that_miss_a_barrier_are_a_deadlock():
    leaves = COUNT.replace("red.shared", "@first bra OUT;\nred.shared")
    leaves = leaves.replace("[at], 5;", "[at], 5;\nsetp.lt.u32 first, $2, 32;")
    with pytest.raises(RuntimeError, match="deadlock: 3 of 4 warps"):
        run_block(leaves[:-1] + "OUT:\nmov.b32 $0, 0;\n}")


LOOP = """{
    .reg .pred more;
    .reg .b32 left;
    mov.b32 left, $1;
    mov.b32 $0, 0;
    AGAIN:
    add.u32 $0, $0, left;
    sub.u32 left, left, 1;
    setp.gt.s32 more, left, 0;
    @more bra AGAIN;
    shfl.sync.bfly.b32 $0, $0, 1, 31, -1;
}"""


def test_lanes_go_around_a_loop_as_often_as_each_needs():
    x = torch.arange(128, dtype=torch.int32) % 5
    found = run_block(LOOP, x, "=&r").view(64, 2).flip(1).flatten()
    assert torch.equal(found, x * (x + 1) // 2)


def test_a_result_may_share_a_register_with_an_operand():
    right = run_block("{ mov.b32 $0, 0; add.u32 $0, $0, $1; }", result="=&r")
    assert right.tolist() == list(range(128))
    assert (run_block("{ mov.b32 $0, 0; add.u32 $0, $0, $1; }") == 0x7F).all()
    assert (run_block("{ .reg .b32 unused; mov.b32 unused, $1; }") == 0x7F).all()


TO_OTHER = """{
    .reg .b32 at, cta, there;
    .shared .align 16 .b32 word[64];
    mov.u32 cta, %cluster_ctarank;
    xor.b32 cta, cta, 1;
    mov.u32 at, %tid.x;
    mov.u32 there, word;
    mad.lo.u32 at, at, 4, there;
    mapa.shared::cluster.u32 there, at, cta;
    BARRIER
    st.shared::cluster.b32 [there], $1;
    BARRIER
    ld.shared.b32 $0, [at];
}"""
CLUSTER_BARRIER = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"


def test_ctas_of_a_cluster_write_to_each_other():
    text = TO_OTHER.replace("BARRIER", CLUSTER_BARRIER)
    cluster = {"num_warps": 2, "num_ctas": 2}
    assert run_block(text, **cluster).tolist() == [*range(64, 128), *range(64)]
    first, second, third = TO_OTHER.split("BARRIER")
    for missing, message in (
        (first + second + CLUSTER_BARRIER + third, "may not have begun"),
        (first + CLUSTER_BARRIER + second + third, "no barrier orders"),
        (first + CLUSTER_BARRIER + second + "bar.sync 0;" + third, "no barrier orders"),
        (text.replace("arrive.release", "arrive.relaxed"), "may not have begun"),
        (
            text.replace("ld.shared.b32 $0, [at]", "ld.shared::cluster.b32 $0, [there]"),
            "have ended",
        ),
    ):
        for seed in SEEDS:
            with pytest.raises(RuntimeError, match=message):
                run_block(missing, seed=seed, **cluster)


# ---- Ampere ------------------------------------------------------------------------------------

SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
OTHER_SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8]))
BATCHED_SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2, 1], [1, 16, 8]))
SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
WORDS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
UNSWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def pipeline_kernel(
    a, b, out, valid, TILES: gl.constexpr, LEFT: gl.constexpr, COMMITS: gl.constexpr,
    BEHIND: gl.constexpr
):  # fmt: skip
    """The sum of a_t @ b_t, of which rows from ``valid`` on are left out; a tile ahead."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, MATRIX_LAYOUT))
    columns = gl.arange(0, 64, gl.SliceLayout(0, MATRIX_LAYOUT))
    at = rows[:, None] * 64 + columns[None, :]
    left = gl.allocate_shared_memory(a.dtype.element_ty, [64, 64], SWIZZLED, gl.load(a + at))
    tiles = gl.allocate_shared_memory(a.dtype.element_ty, [2, 64, 64], SWIZZLED)
    inside = (rows < valid)[:, None]
    async_load(tiles.index(0), b + at, inside)
    if COMMITS:
        async_copy.commit_group()
    acc = gl.zeros([64, 64], gl.float32, SUMS)
    for i in range(TILES):
        if BEHIND:
            async_copy.wait_group(LEFT)
        async_load(tiles.index((i + 1) % 2), b + (i + 1) % TILES * 4096 + at, inside)
        async_copy.commit_group()
        if not BEHIND:
            async_copy.wait_group(LEFT)
        x = left.load(gl.DotOperandLayout(0, SUMS, 2))
        y = tiles.index(i % 2).load(gl.DotOperandLayout(1, SUMS, 2))
        acc = mma_v2(x, y, acc)
    gl.store(out + at, gl.convert_layout(acc, MATRIX_LAYOUT))


def pipelined(dtype=torch.bfloat16, left=0, commits=True, behind=True, seed=0, valid=50):
    """Whether a pipeline with these waits computes the right sum."""
    a, b, out = torch.randn(64, 64).to(dtype), torch.randn(3, 64, 64).to(dtype), torch.empty(64, 64)
    with interpreting(seed):
        pipeline_kernel[(1,)](a, b, out, valid, 3, left, commits, behind)
    b[:, valid:] = 0
    return torch.allclose(out.double(), (a.double() @ b.double()).sum(0), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_run_ahead_of_products(dtype):
    for seed in SEEDS:
        assert pipelined(dtype, seed=seed)
        assert pipelined(dtype, left=1, behind=False, seed=seed)


@pytest.mark.parametrize("wrong", [{"left": 1}, {"left": 2, "behind": False}, {"commits": False}])
def test_a_tile_is_read_once_its_group_has_been_waited_for(wrong):
    for seed in SEEDS:
        with pytest.raises(RuntimeError, match="a kernel reads shared memory before"):
            pipelined(seed=seed, **wrong)


@gluon.jit
def overwriting_kernel(x, COPIES: gl.constexpr):
    at = gl.arange(0, 128, VECTOR)
    smem = gl.allocate_shared_memory(gl.int32, [128], PLAIN)
    async_load(smem, x + at)
    if COPIES:
        async_load(smem, x + at)
    else:
        smem.store(at)


@pytest.mark.parametrize(("copies", "access"), [(True, "copies to"), (False, "writes")])
def test_a_copy_is_not_overwritten_while_it_is_under_way(copies, access):
    x = torch.arange(128, dtype=torch.int32)
    with (
        interpreting(),
        pytest.raises(RuntimeError, match=f"a kernel {access} shared memory before its cp.async"),
    ):
        overwriting_kernel[(1,)](x, copies)


@gluon.jit
def operands_kernel(a, b, out, A: gl.constexpr, B: gl.constexpr):
    rows = gl.arange(0, 64, gl.SliceLayout(1, MATRIX_LAYOUT))
    columns = gl.arange(0, 64, gl.SliceLayout(0, MATRIX_LAYOUT))
    at = rows[:, None] * 64 + columns[None, :]
    x, y = gl.convert_layout(gl.load(a + at), A), gl.convert_layout(gl.load(b + at), B)
    acc = mma_v2(x, y + 0, gl.zeros([64, 64], gl.float32, SUMS))
    gl.store(out + at, gl.convert_layout(acc, MATRIX_LAYOUT))


def operand(number, parent=SUMS.value, k_width=2):
    return gl.DotOperandLayout(number, parent, k_width)


def multiply(left, right, dtypes=(torch.bfloat16, torch.bfloat16)):
    a, b = (torch.randn(64, 64).to(dtype) for dtype in dtypes)
    out = torch.empty(64, 64)
    with interpreting():
        operands_kernel[(1,)](a, b, out, left, right)
    return torch.allclose(out, a.float() @ b.float(), atol=1e-4)


def test_operands_of_mma_v2():
    assert multiply(operand(0), operand(1))
    assert multiply(operand(0, k_width=4), operand(1, k_width=4))
    mixed = torch.bfloat16, torch.float16
    for layouts, dtypes, message in (
        ((MATRIX_LAYOUT.value, operand(1)), None, "a of mma_v2 must be in a DotOperandLayout"),
        ((operand(1), operand(1)), None, "a of mma_v2 must be operand 0, got 1"),
        ((operand(0), operand(1, OTHER_SUMS.value)), None, "parent of b of mma_v2 must be that"),
        ((operand(0), operand(1, k_width=4)), None, "must have one k_width"),
        ((operand(0, k_width=1), operand(1, k_width=1)), None, "words of 4 bytes"),
        ((operand(0), operand(1)), mixed, "must have one type, got bf16 and fp16"),
    ):
        with pytest.raises(TypeError, match=message):
            multiply(*layouts, *([dtypes] if dtypes else []))


@gluon.jit
def batched_kernel(a, b, out, WORD_LAYOUT: gl.constexpr):
    """Products of two pairs of matrices, stored as words and read as pairs of bfloat16."""
    BATCHED: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [1, 4, 1], [2, 1, 0])
    batch = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, BATCHED)))[:, None, None]
    rows = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, BATCHED)))[None, :, None]
    words = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, BATCHED)))[None, None, :]
    at = batch * 1024 + rows * 32 + words
    left = gl.allocate_shared_memory(gl.int32, [2, 32, 32], WORDS, gl.load(a + at))
    right = gl.allocate_shared_memory(gl.int32, [2, 32, 32], WORD_LAYOUT, gl.load(b + at))
    x = reinterpret(left, gl.bfloat16, [2, 32, 64], SWIZZLED)
    y = reinterpret(right, gl.bfloat16, [2, 32, 64], SWIZZLED).permute((0, 2, 1))
    x = x.load(gl.DotOperandLayout(0, BATCHED_SUMS, 2))
    y = y.load(gl.DotOperandLayout(1, BATCHED_SUMS, 2))
    acc = mma_v2(x, y, gl.zeros([2, 32, 32], gl.float32, BATCHED_SUMS))
    gl.store(out + at, gl.convert_layout(acc, BATCHED))


def test_batches_of_tiles_with_a_swizzle():
    a, b = torch.randn(2, 2, 32, 64).bfloat16()
    words = a.view(torch.int32), b.view(torch.int32)
    out, scrambled = torch.empty(2, 2, 32, 32)
    with interpreting():
        batched_kernel[(1,)](*words, out, WORDS)
        batched_kernel[(1,)](*words, scrambled, UNSWIZZLED)
    right = a.float() @ b.float().mT
    assert torch.allclose(out, right, atol=1e-4)
    assert not torch.allclose(scrambled, right, atol=1)


@gluon.jit
def halves_kernel(codes, out):
    at = gl.arange(0, 256, gl.BlockedLayout([4], [32], [2], [0]))
    halves = gl.inline_asm_elementwise(
        HALVES_OF_FOUR, "=r,=r,r", [gl.load(codes + at)], dtype=gl.float16, is_pure=True, pack=4
    )
    gl.store(out + at, halves)


def test_bytes_and_halves_are_packed_in_registers():
    codes, out = torch.arange(256, dtype=torch.uint8), torch.empty(256, dtype=torch.float16)
    with interpreting():
        halves_kernel[(1,)](codes, out, num_warps=2)
    expected = codes.view(torch.float8_e4m3fn).float() / 256
    assert torch.equal(out.float().nan_to_num(7), expected.nan_to_num(7))


def test_floating_point_instructions():
    x = torch.randn(128)
    bits = x.view(torch.int32)
    twice = run_block("cvt.rn.bf16x2.f32 $0, $1, $1;", bits).view(torch.bfloat16).view(128, 2)
    assert torch.equal(twice, x.bfloat16()[:, None].expand(128, 2))
    pairs = twice.contiguous().view(torch.int32).flatten()
    text = "{.reg .b32 z; mov.b32 z, 0x3f803f80; fma.rn.bf16x2 $0, $1, $1, z;}"
    found = run_block(text, pairs, "=&r").view(torch.bfloat16).view(128, 2)
    assert torch.equal(found, (twice.double() * twice.double() + 1).bfloat16())
    # 1.5 * (1 + 2^-7) lies halfway between two bfloat16; 2^-40 less is nearer to the lower one.
    text = "{.reg .b32 y, z; mov.b32 y, 0x3f813f81; mov.b32 z, 0xab80ab80;"
    text += " fma.rn.bf16x2 $0, $1, y, z;}"
    found = run_block(text, torch.full((128,), 0x3FC03FC0, dtype=torch.int32), "=&r")
    assert (found == 0x3FC13FC1).all()
    found = run_block("mul.f32 $0, $1, 0f40400000;", bits).view(torch.float32)
    assert torch.equal(found, x * 3)
    with pytest.raises(NotImplementedError, match=r"cvt\.rz\.bf16x2\.f32"):
        run_block("cvt.rz.bf16x2.f32 $0, $1, $1;", bits)


# ---- kernels of the package --------------------------------------------------------------------

SLOW = (  # or without kernels for Hopper; on Ampere, they take turns
    "maxima that climb",
    "140 requests",
    "float32",
    "W_U",
    "DeepSeek-V4-Flash",  # tests/test_sm90_groups.py has smaller ones
    "parts, ",
    "a few requests of 128 heads",
    "128 x 512",
    "heads, fp8_584",
    "extra stream, 64 heads",
    "2500 columns",
    "ratio 4, drafts",
    "ratio 4, a prefill",
    "ratio 4, not causal",
    "not causal",
)
PORTABLE = (  # the kernels for Hopper refuse their weights, or so few index heads or dims
    *(
        ("project_groups", case)
        for case in (
            "one token, bf16",
            "one token, 128x128",
            "128 rows, bf16",
            "128 rows, 140 tokens, bf16",
            "one group of DeepSeek-V4, 9 tokens, bf16",
        )
    ),
    *(
        ("project_heads", f"{case}, 512 x 128, {kind}")
        for case, kind in (
            ("12 tokens of 2 heads", "128x128"),
            ("40 tokens of 2 heads", "128x128"),
            ("40 tokens of 2 heads", "bf16"),
        )
    ),
    ("selected_scores", "8 heads"),
    ("selected_scores_backward", "8 heads"),
    ("dense_index_loss", "ragged"),
    ("dense_index_gradients", "ragged"),
)
CASES = [
    (op, case)
    for op in MATRIX
    if op in interpreted_ops("sm_90")
    for case in run.chosen_cases(op, "cuda", quick=True)
    if not any(part in case.name for part in SLOW) and (op, case.name) not in PORTABLE
]
PORTABLE_ON_AMPERE = {  # cases that the kernels with Ampere's instructions refuse
    "project_groups": (
        "one token, bf16",
        "one token, 128x128",
        "128 rows, bf16",
        "128 rows, 140 tokens, bf16",
        "5 parts, bf16",
        "5 parts, 128x128",
        "one group of DeepSeek-V4, 9 tokens, bf16",
    ),
    "indexer_scores": (
        "causal, fp8",
        "segments, fp8",
        "ragged, fp8",
        "exact",
    ),
    "sparse_prefill": (
        "FP8 MMA, 64 heads",
        "FP8 MMA, few valid indices",
        "FP8 MMA, rows that grow along a list",
        "576 dims, 128 heads",
        "RoPE dims of 64 heads in another tensor",
        "extra stream, 64 heads, bf16_512v512",
        "shared lists, 4 tokens of 16 heads",
        "shared lists, 8 tokens of 8 heads, shuffled",
        "shared lists, 4 tokens attend to all",
    ),
    "sparse_decode": (
        "fp8_ds_mla",
        "fp8_584",
        "extra stream of pages of 2",
        "no valid slot",
        "3 splits, strided, fp8_584",
        "lengths of each token, 64 heads, bf16_512v512",
        "12 requests, 3 heads, float32",
        "RoPE dims of 64 heads in another tensor, bf16_576v512",
        "RoPE dims of 64 heads in another tensor, e4m3_576v512b128",
        "a few requests of 128 heads, bf16_576v512",
    ),
    "dense_decode": (
        "fp8_ds_mla",
        "fp8_584",
        "12 requests, 3 heads, float32",
        "bfloat16, pages of 192",
        "bfloat16, pages of 512",
    ),
}
SLOW_ON_AMPERE = ("DeepSeek-V4-Flash", "300 tokens of 16 heads")
ODD_SCALES = (  # scales that are no powers of two: each key is rounded to bfloat16
    "one exact scale",
    "scales of any value",
    "exact scales, one key",
    "exact scales, 16 heads, fp8_ds_mla",
    "exact scales, 128 heads, fp8_ds_mla",
)
FOR_AMPERE = [
    (op, case)
    for op in MATRIX
    if op in interpreted_ops("sm_80")
    for quick in (True, False)
    for case in run.chosen_cases(op, "cuda", quick=quick)
    if case.name not in PORTABLE_ON_AMPERE.get(op, ())
    and not any(part in case.name for part in SLOW_ON_AMPERE)
    and (quick or case.name in ODD_SCALES)
]


def of_some_tokens(case):
    """A case with more tokens than a GPU runs at once, with some of them.

    Those are the ones that have the fewest entries of a stream, and one of each kind.
    """

    def build(draw):
        arguments = case.build(draw)
        lengths = [arguments["topk_lengths"], arguments["extra_topk_lengths"]]
        first = torch.arange(13)  # every third and every fourth have no keys of a stream
        some = torch.cat([first, *(each.argsort()[:5] for each in lengths)])
        lists = [name for name in arguments if "topk" in name]
        return arguments | {name: arguments[name][some] for name in ("q", *lists)}

    return dataclasses.replace(case, build=build)


def check_case(gpu, op, case):
    """Right on poisoned memory, and with equal bits when things happen in another order."""
    if op == "sparse_prefill" and case.large:
        case = of_some_tokens(case)
    with acting_as(gpu):
        outcome = run._run_case(op, case, "cpu", reruns=1)
    assert outcome.tiers == (TIER_OF[gpu],)
    assert outcome.failures == ()


ROWS = {  # of a kind of scores, the length; of columns after it, the scores are NaN
    "all NaN": 1.0,  # listed again, and at last searched in passes over the row
    "normal": 1.0,
    "all equal": 1.0,
    "NaN, infinities, zeros": 1.0,
    "plateau of zeros": 0.8,
    "best at the end": 0.9,
    "one tiny": 0.1,
    "infinities": 0.0,
}


def hard_rows(draw, num_rows, num_cols, topk):
    """Scores of which some mislead a sample, and rows that end early."""
    kinds = cases.adversarial_scores(draw, num_cols, topk)
    names = list(ROWS)[:num_rows]
    ends = draw.tensor([int(ROWS[name] * num_cols) for name in names])
    scores = torch.stack([kinds[name] for name in names])
    scores[torch.arange(num_cols) >= ends[:, None]] = float("nan")
    return {"scores": scores, "topk": topk, "row_ends": ends}


@pytest.mark.parametrize(
    ("num_rows", "num_cols", "topk", "multiprocessors", "held_by", "slices"),
    [
        pytest.param(2, 20000, 2048, 4, 2, None, id="rows in clusters of two"),
        pytest.param(1, 17000, 300, 8, 4, None, id="a row in a cluster of four"),
        pytest.param(8, 9000, 600, 1, None, 1, id="candidates in shared memory"),
        pytest.param(2, 17000, 5000, 1, None, 1, id="candidates in global memory"),
        pytest.param(2, 33000, 64, 4, None, 2, id="slices of a row"),
        pytest.param(1, 70000, 512, 8, None, 8, id="slices of a row, a list of all warps"),
    ],
)
def test_every_kernel_of_the_selection(num_rows, num_cols, topk, multiprocessors, held_by, slices):
    arguments = functools.partial(hard_rows, num_rows=num_rows, num_cols=num_cols, topk=topk)
    with acting_as("sm_90", num_cols, multiprocessors):
        call = SelectTopk(torch.empty(num_rows, num_cols), topk)
        held = None if refuse_registers(call) else schedule_registers(call)
        lists = candidates.schedule_lists(num_rows, num_cols, topk, torch.device("cpu"))
        outcome = run._run_case("select_topk", Case("", arguments), "cpu", reruns=0)
    assert (held and held.ctas, None if held else lists.slices) == (held_by, slices)
    assert outcome.tiers == ("sm90",)
    assert outcome.failures == ()


@pytest.mark.parametrize("name", ["64 heads", "exact scales, 128 heads, fp8_ds_mla"])
def test_tiles_of_16_heads_in_one_split_have_their_own_sinks(name, monkeypatch):
    monkeypatch.setattr(schedule, "multiprocessors", lambda device: 132)
    (case,) = (c for c in run.chosen_cases("sparse_decode", "cuda", quick=False) if c.name == name)
    with acting_as("sm_90"):
        outcome = run._run_case("sparse_decode", case, "cpu", reruns=1)
    assert outcome.tiers == ("sm90",)
    assert outcome.failures == ()


@pytest.mark.parametrize("offsets", [[0, 12, 3, 7, 12], [5, 2, 9, 1, 12]])
def test_a_token_in_several_groups_is_stored_once(offsets):
    """Where offsets decrease, a selection has no meaning, but its kernels have no race."""
    arguments = cases.indexer_topk_case(
        cases.Draw(0), query_lens=(3, 3, 3, 3), seq_lens=(130, 300, 200, 260), num_heads=64
    )
    arguments["input_row_offsets"] = torch.tensor(offsets, dtype=torch.int32)
    with unrepeated(), acting_as("sm_80"):
        selected = indexer_topk(**arguments)
    assert ((selected >= -1) & (selected < 300)).all()


@pytest.mark.parametrize(("op", "case"), CASES, ids=[f"{op}: {case.name}" for op, case in CASES])
def test_kernels_for_hopper(op, case):
    check_case("sm_90", op, case)


def every_case_for_ampere():
    slow = [(op, case) for op, case in FOR_AMPERE if any(part in case.name for part in SLOW)]
    for op, case in FOR_AMPERE:
        marks = pytest.mark.turns(slow.index((op, case)), 4) if (op, case) in slow else ()
        yield pytest.param(op, case, marks=marks, id=f"{op}: {case.name}")


@pytest.mark.parametrize(("op", "case"), list(every_case_for_ampere()))
def test_kernels_for_ampere(op, case):
    check_case("sm_80", op, case)
