"""Which kernel takes a call, and why the others refuse it."""

from pathlib import Path

import pytest
import torch

import sparsemla
from sparsemla import (
    BF16_512,
    BF16_576,
    FP4_288,
    FP8_584,
    FP8_DS_MLA,
    PagedCache,
    dispatch,
    e4m3_format,
    explain,
    prefill_workspace_rows,
)
from sparsemla.cache import aligned
from sparsemla.formats import bf16_format
from sparsemla.kernels import attention
from sparsemla.kernels.attention.arguments import MergeStates, SparseDecode
from sparsemla.kernels.common.device import GPUS, simulated
from sparsemla.kernels.common.table import TIERS, Kernel
from sparsemla.kernels.repeat import unrepeated


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape):
    return empty(*shape, dtype=torch.int32)


def pages(fmt, num_pages=8):
    return PagedCache.allocate(fmt, num_pages, 64, device="meta")


def decode(fmt=FP8_DS_MLA, num_heads=64, batch=300, query_len=1, extra=None, **options):
    """A sparse decode of enough requests that heads are not taken in tiles."""
    streams = {}
    if extra is not None:
        lists = ints(batch, query_len, 64)
        streams = {"extra_cache": pages(extra), "extra_topk_indices": lists}
    return {
        "q": empty(batch, query_len, num_heads, fmt.head_dim),
        "cache": pages(fmt),
        "topk_indices": ints(batch, query_len, 2048),
        "softmax_scale": 0.1,
        **streams,
        **options,
    }


def dense(fmt=FP8_DS_MLA, num_heads=64, query_len=1, **options):
    return {
        "q": empty(3, query_len, num_heads, fmt.head_dim),
        "cache": pages(fmt),
        "page_table": ints(3, 8),
        "seq_lens": ints(3),
        "softmax_scale": 0.1,
        **options,
    }


def prefill(fmt=None, num_heads=64, extra=None, **options):
    streams = {}
    if extra is not None:
        streams = {"extra_cache": pages(extra), "extra_topk_indices": ints(6, 64)}
    return {
        "q": empty(6, num_heads, 576 if fmt is None else fmt.head_dim),
        "kv": empty(100, 576) if fmt is None else pages(fmt),
        "topk_indices": ints(6, 2048),
        "softmax_scale": 0.1,
        **streams,
        **options,
    }


def attend(num_heads=64, dtype=torch.bfloat16, **options):
    return {
        "q": empty(6, num_heads, 576, dtype=dtype),
        "kv": empty(100, 576, dtype=dtype),
        "topk_indices": ints(6, 2048),
        "softmax_scale": 0.1,
        **options,
    }


def gradients(num_heads=64, **options):
    arguments = attend(num_heads, **options)
    out = empty(6, num_heads, 512)
    return {"dout": out, "out": out, "lse": empty(6, num_heads, dtype=torch.float32), **arguments}


def shared(make, *args, **options):
    """Two tokens share a list."""
    lists = {"topk_indices": ints(3, 70), "token_mask": empty(3, 70, dtype=torch.uint8)}
    return make(*args, **options) | lists | {"list_tokens": 2}


def on(gpu, op, arguments):
    (choice,) = explain(getattr(sparsemla, op), **arguments, gpu=gpu).choices
    return choice


HOPPER = [
    ("sparse_decode", decode(FP8_DS_MLA, 32), "sm90.fp8_few_heads"),
    ("sparse_decode", decode(FP8_DS_MLA, 33), "sm90.fp8"),
    ("sparse_decode", decode(FP8_DS_MLA, 128, batch=1), "sm90.fp8_few_heads"),  # tiles of 16 heads
    ("sparse_decode", decode(FP8_DS_MLA, 128, batch=1, num_splits=4), "sm90.fp8"),
    ("sparse_decode", decode(FP8_584, extra=FP8_584), "sm90.fp8"),
    ("sparse_decode", decode(e4m3_format(scale_block=64)), "sm90.fp8"),
    ("sparse_decode", decode(BF16_576, 8), "sm90.bf16_few_heads"),
    ("sparse_decode", decode(BF16_512, extra=BF16_512), "sm90.bf16"),
    ("dense_decode", dense(FP8_DS_MLA, 16, 2), "sm90.fp8_few_heads"),
    ("dense_decode", dense(FP8_DS_MLA, 17, 2), "sm90.fp8"),
    ("dense_decode", dense(BF16_576, 8), "sm90.bf16"),
    ("sparse_prefill", prefill(), "sm90.bf16"),
    ("sparse_prefill", prefill(allow_fp8_mma=True), "sm90.fp8_mma"),
    ("sparse_prefill", prefill(num_heads=32, allow_fp8_mma=True), "sm90.bf16_few_heads"),
    ("sparse_prefill", prefill(FP8_584, extra=FP8_584), "sm90.fp8"),
    ("sparse_prefill", prefill(FP8_DS_MLA, 16), "sm90.fp8_few_heads"),
    ("sparse_prefill", shared(prefill, num_heads=8), "sm90.bf16"),
    ("sparse_attention", attend(), "sm90.bf16"),
    ("sparse_attention", attend(16), "sm90.bf16_few_heads"),
    ("sparse_attention", shared(attend, 16), "sm90.bf16"),
    ("sparse_attention_backward", gradients(64), "sm90.one_pass"),
    ("sparse_attention_backward", gradients(65), "sm90"),
    ("sparse_attention_backward", shared(gradients, 32), "sm90.one_pass"),
    ("sparse_attention_backward", shared(gradients, 33), "sm90"),
    ("sparse_attention_backward", gradients(129), "triton"),
]


@pytest.mark.parametrize(("op", "arguments", "kernel"), HOPPER)
def test_hopper_takes(op, arguments, kernel):
    assert on("sm_90", op, arguments).kernel == kernel


def misaligned(arguments):
    q = arguments["q"]
    return arguments | {"q": empty(*q.shape[:-1], q.shape[-1] + 1)[..., : q.shape[-1]]}


HALF = empty(300, 1, 64, 576, dtype=torch.float16)
REFUSALS = {
    "dtype": ("sparse_decode", decode(q=HALF), "needs bfloat16 queries, got torch.float16"),
    "alignment": ("sparse_decode", misaligned(decode()), "multiples of 16 bytes"),
    "dims": ("sparse_decode", decode(bf16_format(192, 128)), "512 of value, got bf16_192v128"),
    "scales": ("sparse_decode", decode(e4m3_format(scale_block=32)), "scales of 64 or 128 dims"),
    "fp4": (
        "sparse_decode",
        decode(FP4_288),
        "needs scales of 64 or 128 dims, or of a row, got fp4_288",
    ),
    "other format": (
        "sparse_decode",
        decode(extra=BF16_576),
        "needs an extra cache of format fp8_ds_mla, got bf16_576v512",
    ),
    "separate scales": (
        "sparse_decode",
        decode(e4m3_format(), extra=e4m3_format()),
        "needs scales in the rows or pages of an extra cache",
    ),
    "dense dtype": (
        "dense_decode",
        dense(q=HALF[:3]),
        "needs bfloat16 queries, got torch.float16",
    ),
    "results": (
        "sparse_prefill",
        prefill(out=empty(6, 64, 512, dtype=torch.float32)),
        "gives bfloat16 results, not torch.float32",
    ),
    "lists of FP8 rows": (
        "sparse_prefill",
        shared(prefill, FP8_DS_MLA),
        "needs bfloat16 rows for lists of several query tokens, got fp8_ds_mla",
    ),
    "training dtype": (
        "sparse_attention",
        attend(dtype=torch.float32),
        "needs bfloat16 queries, got torch.float32",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_hopper_refuses(name):
    op, arguments, reason = REFUSALS[name]
    choice = on("sm_90", op, arguments)
    assert choice.kernel == "triton"
    refusals = [said for kernel, said in choice.refusals if kernel.startswith("sm90")]
    assert all(refusals)
    assert any(reason in refusal for refusal in refusals)


ROWS = {
    "sparse_decode": {
        "sm90.fp8_few_heads": "takes up to 32 query rows that share keys, got 64",
        "sm90.fp8": None,
        "sm90.bf16_few_heads": "needs bfloat16 rows, got fp8_ds_mla",
        "sm90.bf16": "needs bfloat16 rows, got fp8_ds_mla",
    },
    "dense_decode": {
        "sm90.fp8_few_heads": "takes up to 32 query rows that share keys, got 64",
        "sm90.fp8": None,
        "sm90.bf16": "needs bfloat16 rows, got fp8_ds_mla",
    },
    "sparse_prefill": {
        "sm90.fp8_mma": "needs allow_fp8_mma=True",
        "sm90.fp8_few_heads": "needs FP8 rows, got bf16_576v512",
        "sm90.fp8": "needs FP8 rows, got bf16_576v512",
        "sm90.bf16_few_heads": "takes up to 32 query rows that share keys, got 64",
        "sm90.bf16": None,
    },
    "sparse_attention": {
        "sm90.bf16_few_heads": "takes up to 32 query rows that share keys, got 64",
        "sm90.bf16": None,
    },
}
AMPERE = {
    "sparse_decode": {
        "sm80.one_tile": "needs bf16_576v512 rows, got fp8_ds_mla",
        "sm80": None,
    },
    "dense_decode": {"sm80": None},
    "sparse_prefill": {"sm80": None},
    "sparse_attention": {},
}
CALLS = {"sparse_decode": decode, "dense_decode": dense, "sparse_prefill": prefill}
CALLS["sparse_attention"] = attend


@pytest.mark.parametrize("op", ROWS)
def test_each_row_of_hopper_says_why_not(op):
    expected = (
        ROWS[op]
        | AMPERE[op]
        | {
            "triton": None,
            "cpu": "needs CPU tensors, got sm_90",
            "reference": None,
        }
    )
    assert dict(on("sm_90", op, CALLS[op]()).refusals) == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fmt": BF16_512}, "needs bfloat16 rows of 576 dims, got bf16_512v512"),
        ({"fmt": BF16_576}, "needs bfloat16 rows of 576 dims, got bf16_576v512"),  # pages of 64
        ({"num_heads": 32}, "takes more than 32 query heads, got 32"),
        ({"max_logits": empty(6, 64, dtype=torch.float32)}, "no max_logits"),
    ],
    ids=["512 dims", "pages", "heads", "max_logits"],
)
def test_fp8_mma_refuses(options, reason):
    choice = on("sm_90", "sparse_prefill", prefill(**options, allow_fp8_mma=True))
    assert choice.kernel != "sm90.fp8_mma"
    assert reason in dict(choice.refusals)["sm90.fp8_mma"]


@pytest.mark.parametrize(("op", "make"), CALLS.items())
@pytest.mark.parametrize("gpu", sorted({*GPUS} - {"sm_90"}))
def test_other_gpus_get_other_kernels(gpu, op, make):
    choice = on(gpu, op, make())
    ampere = gpu.startswith("sm_") and AMPERE[op].get("sm80", "") is None
    assert choice.kernel == ("sm80" if ampere else "triton")
    assert {
        reason.partition(",")[0] for kernel, reason in choice.refusals if kernel.startswith("sm90")
    } == {"needs a Hopper GPU (sm_90)"}


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (decode, {"fmt": e4m3_format(576, 512, 64)}, "needs 448 or 512 e4m3 dims"),
        (
            prefill,
            {"list_tokens": 2, "topk_indices": ints(3, 2048)},
            "needs a list for each query token",
        ),
    ],
    ids=["e4m3 RoPE dims", "shared lists"],
)
def test_the_kernel_for_ampere_refuses(make, options, reason):
    op = {decode: "sparse_decode", prefill: "sparse_prefill"}[make]
    choice = on("sm_80", op, make(**options))
    assert choice.kernel == "triton"
    assert reason in dict(choice.refusals)["sm80"]


def test_gpus_before_sm_80_get_the_definition():
    old = GPUS["sm_80"]._replace(capability=(7, 5))
    with simulated(old):
        choice = dispatch.explain_call(attention.SPARSE_DECODE, SparseDecode(**decode()))
    assert choice.kernel == "reference"
    assert dict(choice.refusals)["triton"] == "needs a GPU from sm_80 on, got sm_75"


def test_the_cpu_gets_the_kernels_of_torch():
    assert explain(sparsemla.merge_states, **states()).kernels == {"merge_states": "cpu"}


def states(device="cpu"):
    return {"outs": torch.rand(2, 5, 3, 8, device=device), "lses": torch.rand(2, 5, 3)}


def test_an_explanation_launches_nothing_and_names_every_op():
    out = torch.full((5, 3, 8), 7.0)
    explained = explain(lambda: sparsemla.merge_states(**states(), out=out))
    assert (out == 7).all()
    assert str(explained).splitlines() == [
        "merge_states: cpu",
        "  triton: needs CUDA or ROCm tensors, got a CPU",
        "  cpu: chosen",
        "  reference: would do, slower",
    ]


def test_unknown_gpus_are_refused():
    for gpu in ("A100", "sm_", "gfx90a"):
        with pytest.raises(ValueError, match=f"gpu must be like sm_90, or gfx942; got '{gpu}'"):
            explain(sparsemla.merge_states, **states(), gpu=gpu)


def test_only_one_tier_or_one_kernel_is_launched():
    # Within it, the device is not asked.
    with dispatch.only("reference"):
        assert explain(sparsemla.merge_states, **states()).kernels == {"merge_states": "reference"}
    for name in ("sm90", "sm90.fp8"):
        with dispatch.only(name):
            choice = on(None, "sparse_decode", decode())
        assert choice.kernel == "sm90.fp8"
        assert dict(choice.refusals)["triton"] == f"is none of {name}"
    with dispatch.only("sm90.fp8_few_heads"):
        assert on(None, "sparse_decode", decode(num_heads=8)).kernel == "sm90.fp8_few_heads"


def test_a_call_that_no_kernel_of_a_tier_takes_is_refused():
    with (
        dispatch.only("sm90.bf16"),
        pytest.raises(
            ValueError,
            match=r"sparse_decode: no kernel of sm90\.bf16 takes the call: "
            r"sm90\.bf16 needs bfloat16 rows, got fp8_ds_mla",
        ),
    ):
        explain(sparsemla.sparse_decode, **decode())
    with (
        dispatch.only("sm90"),
        pytest.raises(ValueError, match=r"merge_states: no kernel of sm90 .*: it has none"),
        unrepeated(),
    ):
        sparsemla.merge_states(**states())


@pytest.mark.parametrize("name", ["sm100", "sm90.fp4", "", "triton.fp8"])
def test_unknown_tiers_and_kernels_are_refused(name):
    with (
        pytest.raises(
            ValueError, match=f"name must be one of sm90, sm80, triton, .*; got '{name}'"
        ),
        dispatch.only(name),
    ):
        pass


def test_rows_of_unlisted_tiers_are_refused():
    with pytest.raises(ValueError, match="must begin with one of sm90, sm80, triton, cpu"):
        Kernel("sm100.fp8", lambda: print)
    for op in attention.OPS.values():
        assert {kernel.tier for kernel in op.kernels} <= {*TIERS}


def test_load_refuses_unknown_ops():
    with pytest.raises(ValueError, match=r"op must be one of .*; got 'sparse'"):
        dispatch.load("sparse", "triton")


def test_load_makes_the_record_of_fields():
    out, lse = torch.empty(5, 3, 8), torch.empty(5, 3)
    dispatch.load("merge_states", "cpu")(**states(), out=out, lse=lse)
    assert out.isfinite().all()
    with pytest.raises(TypeError, match="topk"):
        dispatch.load("merge_states", "cpu")(**states(), out=out, lse=lse, topk=3)


def test_the_choice_of_a_kernel_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_logged", set())
    call = MergeStates(**states())
    with caplog.at_level("INFO", logger="sparsemla"), unrepeated():
        for _ in range(2):
            sparsemla.merge_states(**states())
    assert caplog.messages == [str(dispatch.explain_call(attention.MERGE_STATES, call))]
    with (
        caplog.at_level("INFO", logger="sparsemla"),
        unrepeated(),
        dispatch.only("reference"),
    ):
        sparsemla.merge_states(**states())
    assert caplog.messages[1].splitlines()[0] == "merge_states: reference"


def workspace_rows(query_lens, seq_lens, num_heads=128, fmt=FP8_DS_MLA, gpu="sm_90", **options):
    with simulated(GPUS[gpu]):
        return prefill_workspace_rows(
            query_lens, seq_lens, cache_format=fmt, num_heads=num_heads, topk=2048, **options
        )


def test_long_chunks_are_converted_first():
    assert workspace_rows([4096], [32768]) == 32768
    assert workspace_rows([64], [131072]) is None
    assert workspace_rows([64, 448], [1000, 130000]) == 131000
    # Fewer heads do less with a row; short requests select fewer keys than topk.
    assert workspace_rows([256], [131072], num_heads=16) is None
    assert workspace_rows([8], [8000]) == 8000
    assert workspace_rows([8], [400]) is None


def test_conversion_counts_whole_waves_of_tiles():
    # H200, in place or converted: 90 or 93 us with 64 tokens, 168 or 153 with 80.
    assert workspace_rows([64], [32768]) is None
    assert workspace_rows([80], [32768]) == 32768
    # 64 heads: 92 or 97 us with 128 tokens, 170 or 155 with 144.
    assert workspace_rows([128], [32768], num_heads=64) is None
    assert workspace_rows([144], [32768], num_heads=64) == 32768


def test_bfloat16_caches_are_not_converted():
    assert workspace_rows([4096], [32768], fmt=BF16_576) is None
    assert workspace_rows([], []) is None
    assert workspace_rows([0], [500]) is None


def test_a_workspace_holds_at_least_one_request():
    lens = [4096] * 4, [32768] * 4
    assert workspace_rows(*lens) == 131072
    assert workspace_rows(*lens, max_rows=70000) == 70000
    assert workspace_rows(*lens, max_rows=1000) == 32768
    with pytest.raises(ValueError, match="one length for each of 1 requests, got 2"):
        workspace_rows([1], [1, 2])


@pytest.mark.parametrize("gpu", ["sm_80", "sm_89"])
def test_older_gpus_convert_first_too(gpu):
    for num_heads in (16, 64, 128):
        assert workspace_rows([2048], [32768], num_heads, gpu=gpu) == 32768
        assert workspace_rows([64], [131072], num_heads, gpu=gpu) is None
    assert workspace_rows([2048], [1 << 20], gpu=gpu) == 1 << 20
    assert workspace_rows([2048], [1 << 20], 64, gpu=gpu) is None


def test_unmeasured_gpus_read_in_place():
    assert workspace_rows([4096], [32768], gpu="gfx942") is None
    assert prefill_workspace_rows(
        [4096], [32768], cache_format=FP8_DS_MLA, num_heads=128, topk=2048, device="cpu"
    ) is None  # fmt: skip


def cache_of(fmt):
    return PagedCache.allocate(fmt, 2, 5)


@pytest.mark.parametrize("fmt", [BF16_576, FP8_DS_MLA, FP8_584], ids=lambda f: f.name)
def test_allocated_caches_are_aligned(fmt):
    assert cache_of(fmt).aligned


def test_misaligned_tensors_are_detected():
    q = torch.empty(2, 8, 576, dtype=torch.bfloat16)
    assert aligned(q, cache_of(FP8_DS_MLA), None)
    assert aligned(torch.empty(2, 8, 584, dtype=torch.bfloat16)[..., :576])
    assert not aligned(torch.empty(2, 8, 577, dtype=torch.bfloat16)[..., :576])
    shifted = PagedCache(torch.empty(2, 5, 660, dtype=torch.uint8)[..., 4:], FP8_DS_MLA)
    assert not aligned(q, cache_of(FP8_DS_MLA), shifted)
    apart = PagedCache(torch.empty(2, 5, 660, dtype=torch.uint8)[..., :656], FP8_DS_MLA)
    assert not apart.aligned


def test_empty_caches_are_not_aligned():
    assert not PagedCache.allocate(FP8_DS_MLA, 0, 5).aligned


LAUNCHED = """
import sys
sys.path.insert(0, sys.argv[1])
import launched
launched.main(*sys.argv[2:])
"""


def test_explain_names_what_is_launched(run_python):
    """For every case that ``sparsemla verify`` runs, large ones aside."""
    pytest.importorskip("triton")
    done = run_python(LAUNCHED, str(Path(__file__).parent), "sm_80", "sm_90")
    assert done.returncode == 0, done.stderr[-4000:]
    *wrong, count = done.stdout.splitlines()
    assert not wrong, "\n".join(wrong)
    assert int(count.removesuffix(" calls")) > 2 * 600
