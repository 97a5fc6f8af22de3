import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sparsemla
from sparsemla import (
    BF16_576,
    FP8_DS_MLA,
    PlanBuffers,
    bf16_format,
    plan_batch,
    reference,
)
from sparsemla_lab.testing.cases import Draw, branch_case, mla_layer, sparse_decode_case
from sparsemla_lab.testing.compare import (
    BRANCH_FP8_OUT,
    BRANCH_OUT,
    assert_close,
    assert_equal,
    assert_rows_close,
    check_op,
)
from sparsemla_lab.testing.poison import poisoned_empty
from sparsemla_lab.verify import properties

BATCHES = {
    "decode": ([1, 1, 1], [1, 70, 129]),
    "speculative decode": ([3, 3], [3, 66]),
    "prefill": ([40], [40]),
    "chunked prefill": ([20, 5], [150, 69]),
    "mixed": ([1, 1, 9, 30], [65, 1, 9, 100]),
    "with empty requests": ([2, 0, 0], [70, 0, 0]),
}
by_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
by_branch = pytest.mark.parametrize("branch", ["decode_branch", "prefill_branch"])
by_topk = pytest.mark.parametrize("topk", [None, 16, 256], ids=["dense", "top 16", "top 256"])
LATENT_FORMATS = [BF16_576, FP8_DS_MLA]
by_format = pytest.mark.parametrize("fmt", LATENT_FORMATS)


def check(branch, make, tolerance=BRANCH_OUT, **only_op):
    """Run a branch and its reference, each on a cache of its own; compare outputs and caches."""
    actual, expected = make(), make()
    with poisoned_empty():
        out = getattr(sparsemla, branch)(**actual, **only_op)
    wanted = getattr(reference, branch)(**expected)
    assert_close("out", out, wanted, tolerance)
    assert_rows_close("cache", actual["cache"], expected["cache"])
    return out


@by_branch
@by_topk
@by_batch
@by_format
def test_batches_match_the_reference(device, branch, batch, topk, fmt):
    query_lens, seq_lens = batch

    def make():
        draw = Draw(0, device)
        layer = mla_layer(draw, num_heads=3, with_sink=topk is not None)
        return branch_case(
            draw, layer, query_lens=query_lens, seq_lens=seq_lens, topk=topk, format=fmt
        )

    check(branch, make)


LAYERS = {
    "no heads": {"num_heads": 0},
    "one head": {"num_heads": 1},
    "64 heads": {"num_heads": 64},
    "GLM-5": {"num_heads": 4, "nope": 192, "value": 256},
    "half-split RoPE": {"interleaved": False},
    "large epsilon": {"norm_eps": 0.5},
    "small": {"latent": 96, "nope": 24, "rope": 16, "value": 40},
}


@by_branch
@by_topk
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
def test_layers_match_the_reference(device, branch, topk, options):
    def make():
        draw = Draw(1, device)
        layer = mla_layer(draw, **options)
        return branch_case(
            draw,
            layer,
            query_lens=[1, 6],
            seq_lens=[66, 20],
            topk=topk,
            format=bf16_format(layer.kv_lora_rank + layer.qk_rope_head_dim, layer.kv_lora_rank),
            page_size=16,
        )

    check(branch, make)


@by_branch
@by_topk
@pytest.mark.parametrize("block", [(128, 128), (128, 64)], ids=str)
def test_fp8_weights(device, branch, topk, block):
    def make():
        draw = Draw(2, device)
        layer = mla_layer(draw, block=block)
        return branch_case(
            draw, layer, query_lens=[1, 6], seq_lens=[66, 20], topk=topk, format=FP8_DS_MLA
        )

    check(branch, make, BRANCH_FP8_OUT)


@by_branch
@by_topk
def test_scales_are_rounded_as_asked(device, branch, topk):
    def make(scale_mode="exact"):
        draw = Draw(21, device)
        case = branch_case(
            draw,
            mla_layer(draw),
            query_lens=[1, 6],
            seq_lens=[66, 20],
            topk=topk,
            format=FP8_DS_MLA,
        )
        return case | {"scale_mode": scale_mode}

    check(branch, make)
    exact, pow2 = make(), make("pow2")
    for case in (exact, pow2):
        getattr(sparsemla, branch)(**case)
    slots = exact["plan"].slot_mapping
    scales = [case["cache"].gather(slots).scales for case in (exact, pow2)]
    assert_equal("scales of pow2", scales[1].log2().round().exp2(), scales[1])
    assert (scales[0] != scales[1]).float().mean() > 0.9


@by_branch
def test_selections_with_lengths(device, branch):
    def make():
        draw = Draw(3, device)
        case = branch_case(
            draw, mla_layer(draw), query_lens=[3, 4], seq_lens=[70, 9], topk=8, format=FP8_DS_MLA
        )
        return case | {"topk_lengths": draw.tensor([8, 0, 1, 7, 8, 2, 3])}

    out = check(branch, make)
    assert (out[1] == 0).all()


@by_branch
@by_topk
def test_padding_tokens_write_nothing(device, branch, topk):
    def make():
        draw = Draw(4, device)
        return branch_case(
            draw,
            mla_layer(draw),
            query_lens=[2, 3],
            seq_lens=[66, 3],
            topk=topk,
            num_padded_tokens=9,
        )

    case = make()
    out = getattr(sparsemla, branch)(**case)
    expected = getattr(reference, branch)(**make())
    assert_close("out", out[:5], expected[:5], BRANCH_OUT)
    assert out.isfinite().all()
    # Only the context and this step's tokens are written; all other slots are still NaN.
    slots = torch.arange(case["cache"].num_slots, device=device)
    assert int(case["cache"].read(slots).isfinite().all(-1).sum()) == 66 + 3


@pytest.mark.parametrize("workspace_rows", [1, 2, 3, 7, 64, 100, 1000])
def test_prefill_context_in_pieces(device, workspace_rows):
    def make():
        draw = Draw(5, device)
        return branch_case(
            draw, mla_layer(draw), query_lens=[5, 2, 1], seq_lens=[80, 2, 40], format=FP8_DS_MLA
        )

    # Each piece is merged into a bfloat16 result: roundings by 2^-9.8 of an element add up.
    pieces = 1 + 75 // max(1, workspace_rows // 3)
    roundings = BRANCH_OUT.rel + 7 * 2**-9.8 * math.sqrt(pieces)
    tolerance = replace(BRANCH_OUT, rel=roundings, size=BRANCH_OUT.size + roundings, cos=1e-4)
    check("prefill_branch", make, tolerance, workspace_rows=workspace_rows)


@pytest.mark.parametrize("workspace_rows", [2, 8, 30, 100000])
def test_gathered_context_fits_the_workspace(device, workspace_rows, monkeypatch):
    draw = Draw(6, device)
    case = branch_case(draw, mla_layer(draw), query_lens=[1, 2, 3], seq_lens=[80, 2, 40])
    gathered = []
    gather = sparsemla.ops.branch.gather_dequant

    def recording(*args, **kwargs):
        gathered.append(len(kwargs["out"]))
        return gather(*args, **kwargs)

    monkeypatch.setattr(sparsemla.ops.branch, "gather_dequant", recording)
    sparsemla.prefill_branch(**case, workspace_rows=workspace_rows)
    own, *context = gathered
    assert own == 6
    assert sum(context) >= 79 + 38
    assert max(context) <= 3 * 79  # the whole context
    assert max(context) <= max(workspace_rows, 3)  # one row a request at the least


def test_dense_and_sparse_over_everything_agree(device):
    outs = []
    for topk in (None, 200):
        draw = Draw(7, device)
        case = branch_case(draw, mla_layer(draw), query_lens=[4, 9], seq_lens=[66, 9], topk=topk)
        outs.append(sparsemla.prefill_branch(**case))
        outs.append(sparsemla.decode_branch(**case))
    for out in outs[1:]:
        assert_close("out", out, outs[0].float(), BRANCH_OUT)


def test_an_extra_stream(device):
    def make():
        draw = Draw(8, device)
        layer = mla_layer(draw, num_heads=3, with_sink=True)
        case = branch_case(draw, layer, query_lens=[1, 1], seq_lens=[66, 5], topk=8)
        extra = sparse_decode_case(draw, format=FP8_DS_MLA, batch=2, topk=20, page_size=2)
        return case | {
            "extra_cache": extra["cache"],
            "extra_topk_indices": extra["topk_indices"][:, 0].contiguous(),
            "extra_topk_lengths": draw.tensor([20, 3]),
        }

    check("decode_branch", make)


@by_branch
@by_topk
def test_strided_inputs_and_given_outputs(device, branch, topk):
    def make():
        draw = Draw(9, device)
        return branch_case(draw, mla_layer(draw), query_lens=[2, 3], seq_lens=[66, 3], topk=topk)

    case = make()
    expected = getattr(sparsemla, branch)(**make())
    fused = torch.zeros(5, 576 + 700, dtype=torch.bfloat16, device=device)
    fused[:, 700:] = case["kv"]
    wide = torch.zeros(5, 4, 300, dtype=torch.bfloat16, device=device)
    wide[..., 100:292] = case["q"]
    buffer = torch.zeros(5, 4, 200, dtype=torch.bfloat16, device=device)
    out = buffer[..., 72:]
    case |= {"kv": fused[:, 700:], "q": wide[..., 100:292]}
    assert getattr(sparsemla, branch)(**case, out=out) is out
    assert_equal("out", out.contiguous(), expected)
    assert (buffer[..., :72] == 0).all()
    assert_equal("q", wide[..., 100:292].contiguous(), make()["q"])


@by_branch
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_latents_of_other_dtypes(device, branch, dtype):
    def make():
        draw = Draw(10, device)
        case = branch_case(draw, mla_layer(draw), query_lens=[2, 3], seq_lens=[66, 3], topk=8)
        return case | {"kv": case["kv"].to(dtype)}

    check(branch, make)


def test_a_plan_in_buffers_serves_a_smaller_batch(device):
    draw = Draw(11, device)
    layer = mla_layer(draw)
    case = branch_case(
        draw, layer, query_lens=[1, 1], seq_lens=[66, 5], format=FP8_DS_MLA, require_uniform=True
    )
    buffers = PlanBuffers(4, 8, 5, device)
    table = torch.cat([case["plan"].page_table, case["plan"].page_table])
    plan = plan_batch(
        [1, 1, 0, 0], [66, 5, 0, 0], table, page_size=64, workspace_rows=None, buffers=buffers
    )
    assert plan.num_tokens == 4
    expected = sparsemla.decode_branch(**case)
    pad = torch.zeros_like
    padded = case | {
        "q": torch.cat([case["q"], pad(case["q"])]),
        "kv": torch.cat([case["kv"], pad(case["kv"])]),
        "plan": plan,
    }
    out = sparsemla.decode_branch(**padded)
    assert_close("out", out[:2], expected.float(), BRANCH_OUT)


def test_attention_of_one_token_is_its_own_value(device):
    # A first token attends to itself alone: its output is W_UV of its own normalised latent.
    draw = Draw(12, device)
    layer = mla_layer(draw)
    case = branch_case(draw, layer, query_lens=[1], seq_lens=[1])
    latent = case["kv"][0, :512].float()
    normed = latent * torch.rsqrt(latent.square().mean() + 1e-6) * layer.kv_norm_weight
    expected = layer.w_uv.dequantize() @ normed
    for branch in ("decode_branch", "prefill_branch"):
        out = getattr(sparsemla, branch)(**case)
        assert_close(branch, out[0], expected, BRANCH_OUT)


def test_the_absorbed_form_equals_the_form_with_keys_of_each_head(device):
    draw = Draw(13, device)
    layer = mla_layer(draw)
    case = branch_case(draw, layer, query_lens=[6], seq_lens=[70])
    (expected,) = check_op("prefill_branch", case)
    (out,) = check_op("decode_branch", case)
    assert_close("out", out, expected.float(), BRANCH_OUT)


@by_branch
def test_no_tokens(device, branch):
    draw = Draw(14, device)
    case = branch_case(draw, mla_layer(draw), query_lens=[0, 0], seq_lens=[0, 0])
    assert getattr(sparsemla, branch)(**case).shape == (0, 4, 128)
    case["topk_indices"] = torch.zeros(0, 8, dtype=torch.int32, device=device)
    assert getattr(sparsemla, branch)(**case).shape == (0, 4, 128)


def test_sinks_of_both_infinities(device):
    draw = Draw(15, device)
    layer = mla_layer(draw)
    sink = torch.tensor([math.inf, -math.inf, 0.0, math.inf], device=device)
    with_sink = type(layer)(**{**vars(layer), "attn_sink": sink})
    case = branch_case(draw, layer, query_lens=[1, 1], seq_lens=[66, 5], topk=16)
    plain = sparsemla.decode_branch(**case)
    out = sparsemla.decode_branch(**case | {"layer": with_sink})
    assert (out[:, [0, 3]] == 0).all()
    assert_equal("head 1", out[:, 1].contiguous(), plain[:, 1].contiguous())


@by_branch
@pytest.mark.parametrize("batch", ["mixed", "chunked prefill", "with empty requests"])
def test_without_a_causal_mask_a_token_sees_its_whole_request(device, branch, batch):
    query_lens, seq_lens = BATCHES[batch]

    def make():
        draw = Draw(16, device)
        case = branch_case(draw, mla_layer(draw), query_lens=query_lens, seq_lens=seq_lens)
        return case | {"causal": False}

    out = check(branch, make)
    causal = getattr(sparsemla, branch)(**make() | {"causal": True})
    last = make()["plan"].input_row_offsets[1:].long() - 1  # tokens with the same keys either way
    assert_close("last tokens", out[last], causal[last].float(), BRANCH_OUT)
    assert not torch.equal(out, causal)


@by_branch
def test_causal_false_is_refused_with_a_selection(device, branch):
    draw = Draw(17, device)
    case = branch_case(draw, mla_layer(draw), query_lens=[2], seq_lens=[9], topk=8)
    with pytest.raises(ValueError, match="causal must be True with topk_indices"):
        getattr(sparsemla, branch)(**case, causal=False)


@by_topk
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    "block",
    [pytest.param(None, id="bf16"), pytest.param((128, 128), id="fp8", marks=pytest.mark.slow)],
)
def test_request_gets_the_same_bits_alone_and_in_a_batch(device, topk, num_splits, block):
    draw = Draw(18, device)
    query_lens, seq_lens = [1, 3] + [1] * 30, [66, 5, *range(1, 31)]
    layer = mla_layer(draw, num_heads=3, block=block)
    case = branch_case(
        draw, layer, query_lens=query_lens, seq_lens=seq_lens, topk=topk, format=FP8_DS_MLA
    )
    with mock.patch.object(properties, "NUM_SPLITS", num_splits):
        properties.check_alone("decode_branch", case)


class Allocations(TorchDispatchMode):
    """Count the tensors that a call allocates outside of this package's ops."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sparsemla":
            return None
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.seen.append(str(func))
        return result


@by_topk
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("num_splits", [None, 1, 3])
def test_no_allocations_with_a_workspace(device, topk, num_splits, causal):
    if topk is not None and not causal:
        return

    def make():
        draw = Draw(19, device)
        layer = mla_layer(draw)
        case = branch_case(draw, layer, query_lens=[1, 3], seq_lens=[66, 5], topk=topk)
        return case | {"causal": causal, "num_splits": num_splits}

    case = make()
    columns = 0 if topk else case["plan"].page_table.shape[1]
    size = sparsemla.branch_workspace_size(
        4, 4, num_splits=num_splits, max_pages_per_request=columns, device=device
    )
    out = torch.empty(4, 4, 128, dtype=torch.bfloat16, device=device)
    guard = torch.full((size + 64,), 77, dtype=torch.uint8, device=device)
    case |= {"workspace": guard[:size], "out": out}
    with Allocations() as allocations:
        sparsemla.decode_branch(**case)
    assert allocations.seen == []
    if device == "cuda":
        sparsemla.decode_branch(**case)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        sparsemla.decode_branch(**case)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before

    case = make() | {"workspace": guard[:size], "out": out}
    sparsemla.decode_branch(**case)
    assert_equal("out", out, sparsemla.decode_branch(**make()))
    assert (guard[size:] == 77).all()


def test_a_small_workspace_is_refused_before_anything_is_written(device):
    draw = Draw(20, device)
    case = branch_case(draw, mla_layer(draw), query_lens=[1, 3], seq_lens=[66, 5])
    before = case["cache"].data.clone()
    columns = case["plan"].page_table.shape[1]
    size = sparsemla.branch_workspace_size(4, 4, num_splits=1, max_pages_per_request=columns)
    workspace = torch.empty(size - 16, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=f"workspace must hold {size} bytes"):
        sparsemla.decode_branch(**case, num_splits=1, workspace=workspace)
    with pytest.raises(ValueError, match="num_splits must be at least 1, got 0"):
        sparsemla.decode_branch(**case, num_splits=0)
    assert_equal("cache", case["cache"].data, before)


@by_topk
@pytest.mark.parametrize("op", ["decode_branch", "prefill_branch"])
def test_products_are_batch_invariant_only_if_asked(op, topk, device, monkeypatch):
    draw, asked = Draw(22, device), []
    case = branch_case(draw, mla_layer(draw), query_lens=[1, 3], seq_lens=[66, 5], topk=topk)
    project = sparsemla.ops.branch.project_heads

    def recording(*args, batch_invariant=False, **kwargs):
        asked.append(batch_invariant)
        return project(*args, batch_invariant=batch_invariant, **kwargs)

    monkeypatch.setattr(sparsemla.ops.branch, "project_heads", recording)
    getattr(sparsemla, op)(**case)
    assert set(asked) == {False}
    if op == "decode_branch":
        asked.clear()
        sparsemla.decode_branch(**case, num_splits=1)
        assert set(asked) == {True}


@pytest.mark.parametrize("num_heads", [1, 16, 128])
def test_a_workspace_serves_steps_of_fewer_tokens_too(num_heads, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sparsemla.kernels.attention.schedule, "multiprocessors", lambda device: 132)
    size = sparsemla.branch_workspace_size(40, num_heads, device="cuda")
    for tokens in range(41):
        for splits in range(1, sparsemla.ops.decode.most_splits(tokens, num_heads, "cuda") + 1):
            needed = sparsemla.branch_workspace_size(tokens, num_heads, num_splits=splits)
            assert needed <= size


@pytest.mark.parametrize("topk", [None, 16], ids=["dense", "sparse"])
@pytest.mark.parametrize("num_padded_tokens", [None, 45])
def test_mixed_batch_in_both_branches(device, topk, num_padded_tokens):
    def make():
        draw = Draw(21, device)
        layer = mla_layer(draw, num_heads=3)
        query_lens, seq_lens = BATCHES["mixed"]
        return branch_case(
            draw,
            layer,
            query_lens=query_lens,
            seq_lens=seq_lens,
            topk=topk,
            format=FP8_DS_MLA,
            num_padded_tokens=num_padded_tokens,
            require_uniform=True,
        )

    case, whole = make(), make()
    plan = case["plan"]
    assert (plan.num_decodes, plan.num_prefills) == (2, 2)
    out = torch.full((plan.num_tokens, 3, 128), torch.nan, dtype=torch.bfloat16, device=device)
    n = plan.num_decode_tokens
    for branch, part, tokens in (
        (sparsemla.decode_branch, plan.decodes, slice(0, n)),
        (sparsemla.prefill_branch, plan.prefills, slice(n, None)),
    ):
        rows = {name: case[name][tokens] for name in ("q", "kv", "topk_indices") if name in case}
        branch(**case | rows | {"plan": part, "out": out[tokens]})
    expected = reference.decode_branch(**whole)
    assert_close("out", out[:41], expected[:41], BRANCH_OUT)
    assert_rows_close("cache", case["cache"], whole["cache"])


def test_clamped_lengths_exclude_entries_past_the_keys(device):
    draw = Draw(22, device)
    layer = mla_layer(draw, num_heads=3)
    query_lens, seq_lens = [1, 3], [5, 70]
    case = branch_case(draw, layer, query_lens=query_lens, seq_lens=seq_lens, topk=16)
    plan, indices = case["plan"], case["topk_indices"]
    expected = sparsemla.decode_branch(**case)
    foreign = int(plan.slot_mapping[-1])  # a row of another request
    behind = torch.arange(16, device=device) >= plan.clamp_topk(16)[:, None]
    filled = case | {"topk_indices": indices.masked_fill(behind, foreign)}
    clamped = sparsemla.decode_branch(**filled, topk_lengths=plan.clamp_topk(16))
    assert_equal("out", clamped, expected)
    assert not torch.equal(sparsemla.decode_branch(**filled), expected)
