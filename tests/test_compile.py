"""The ops are operators that torch knows: schemas hold, and torch.compile traces them whole."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import sparsemla
from sparsemla import (
    BF16_512,
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    INDEX_FP8,
    ContextShard,
    PagedCache,
    Pooling,
    RowTable,
    bf16_format,
    branch_workspace_size,
    e4m3_format,
)
from sparsemla_lab.testing.cases import (
    Draw,
    attention_target_case,
    branch_case,
    dense_decode_case,
    dense_index_loss_case,
    dense_prefill_case,
    entry_slots_case,
    fetch_rows_case,
    forget_seats_case,
    head_weight,
    index_loss_case,
    indexer_scores_case,
    indexer_scores_paged_case,
    indexer_topk_blocks_case,
    indexer_topk_case,
    indexer_topk_of_blocks_case,
    merge_topk_case,
    mla_layer,
    own_positions_case,
    paged_requests,
    pool_windows_case,
    project_groups_case,
    project_heads_case,
    resolve_rows_case,
    select_rows_case,
    selected_scores_backward_case,
    selected_scores_case,
    share_lists_case,
    shared_prefill_case,
    sparse_attention_backward_case,
    sparse_attention_case,
    sparse_decode_case,
    sparse_prefill_case,
    split_queries,
    visible_slots_case,
)
from sparsemla_lab.testing.compare import assert_equal

PAGE = 72
"""Tokens of a page for which a 584-byte page needs no padding: opcheck clones strides away."""


INDEX_BF16 = bf16_format(128)


def latent_write_arguments(fmt=FP8_DS_MLA):
    draw = Draw(0)
    dim = fmt.head_dim
    return {
        "q_rope": draw.normal(4, 3, 64),
        "kv": draw.normal(4, dim),
        "cos_sin_cache": draw.normal(100, 64),
        "kv_norm_weight": draw.normal(dim if dim == fmt.value_dim else dim - 64),
        "cache": PagedCache.allocate(fmt, 3, PAGE),
        "positions": torch.arange(4),
        "slot_mapping": torch.tensor([3, -1, 100, 20]),
    }


def in_place_arguments():
    case = latent_write_arguments()
    return case | {"out": case["q_rope"]}


def key_write_arguments(fmt=INDEX_FP8):
    draw = Draw(1)
    return {
        "index_k": draw.normal(4, 128),
        "norm_weight": draw.normal(128),
        "norm_bias": draw.normal(128),
        "cos_sin_cache": draw.normal(100, 64),
        "cache": PagedCache.allocate(fmt, 3, 8),
        "positions": torch.arange(4),
        "slot_mapping": torch.arange(4),
    }


def query_arguments(fmt=INDEX_FP8):
    draw = Draw(2)
    return {
        "index_q": draw.normal(4, 3, 128),
        "weights": draw.normal(4, 3),
        "cos_sin_cache": draw.normal(100, 64),
        "positions": torch.arange(4),
        "format": fmt,
    }


def index_step_arguments(fmt=INDEX_FP8):
    queries, keys = query_arguments(fmt), key_write_arguments(fmt)
    return {"index_q": queries["index_q"], "weights": queries["weights"]} | keys


def pool_arguments():
    return pool_windows_case(
        Draw(3), BF16_576, Pooling(4, overlap=True), steps=[(0, 4), (3, 5)], page_size=8
    )


def to_slots_arguments():
    draw = Draw(3)
    return {
        "topk_indices": draw.integers(-1, 10, 4, 6),
        "page_table": draw.integers(0, 9, 2, 5),
        "request_ids": draw.integers(0, 2, 4),
        "page_size": 4,
        "workspace_starts": draw.tensor([0, 100]),
        "prefill_request_ids": draw.integers(-1, 2, 4),
    }


def gather_arguments():
    draw = Draw(4)
    cache, table = paged_requests(draw, FP8_DS_MLA, [9, 20], 8)
    return {
        "cache": cache,
        "page_table": table,
        "seq_lens": draw.tensor([9, 20]),
        "workspace_starts": draw.tensor([0, 9]),
        "out": torch.zeros(29, 576, dtype=torch.bfloat16),
    }


def decode_arguments(fmt=FP8_DS_MLA, **options):
    return sparse_decode_case(Draw(5), format=fmt, with_sink=True, with_lengths=True, **options)


def merge_arguments():
    draw = Draw(6)
    return {"outs": draw.normal(2, 4, 3, 16), "lses": draw.normal(2, 4, 3)}


def branch_arguments(topk, **options):
    draw = Draw(7)
    layer = mla_layer(draw, **options)
    return branch_case(
        draw, layer, query_lens=[1, 3], seq_lens=[9, 5], topk=topk, format=FP8_DS_MLA, page_size=8
    )


def with_workspace(case):
    options = {"num_splits": 2, "max_pages_per_request": case["plan"].page_table.shape[1]}
    size = branch_workspace_size(*case["q"].shape[:2], **options)
    return case | {"num_splits": 2, "workspace": torch.zeros(size, dtype=torch.uint8)}


CALLS = {
    "fused_rope_rmsnorm_quant": latent_write_arguments,
    "fused_rope_rmsnorm_quant, scales apart": lambda: latent_write_arguments(e4m3_format()),
    "fused_rope_rmsnorm_quant, V4": lambda: latent_write_arguments(FP8_584),
    "fused_rope_rmsnorm_quant, whole queries": lambda: (
        latent_write_arguments(FP8_584) | {"q_rope": Draw(1).normal(4, 3, 512), "query_norm": True}
    ),
    "fused_rope_rmsnorm_quant, in place": in_place_arguments,
    "append_index_keys": key_write_arguments,
    "fused_rope_rmsnorm_quant, with rows": lambda: (
        latent_write_arguments() | {"kv_out": torch.zeros(4, 576).bfloat16()}
    ),
    "fused_indexer_rope_quant": index_step_arguments,
    "prepare_index_queries": query_arguments,
    "prepare_index_queries, bf16": lambda: query_arguments(INDEX_BF16),
    "pool_windows": pool_arguments,
    "pool_windows, with rows": lambda: (
        pool_arguments() | {"kv_out": torch.zeros(12, 576).bfloat16(), "gate_bias": None}
    ),
    "to_slots": to_slots_arguments,
    "entry_slots": lambda: entry_slots_case(Draw(3)),
    "visible_slots": lambda: visible_slots_case(Draw(3)),
    "share_lists": lambda: share_lists_case(Draw(3), with_lengths=True),
    "own_positions": lambda: own_positions_case(Draw(3)),
    "own_positions, parts": lambda: own_positions_case(Draw(3), shard=ContextShard(1, 2, parts=8)),
    "resolve_rows": lambda: resolve_rows_case(Draw(3)),
    "resolve_rows, parts": lambda: resolve_rows_case(Draw(3), shard=ContextShard(1, 2, parts=8)),
    "fetch_rows": lambda: fetch_rows_case(Draw(3), FP8_DS_MLA),
    "fetch_rows, scales": lambda: fetch_rows_case(Draw(3), e4m3_format()),
    "forget_seats": lambda: forget_seats_case(Draw(3)),
    "gather_dequant": gather_arguments,
    "indexer_scores": lambda: indexer_scores_case(Draw(8)),
    "indexer_scores, bf16": lambda: indexer_scores_case(Draw(8), fp8=False),
    "indexer_scores_paged": lambda: indexer_scores_paged_case(Draw(9)),
    "indexer_scores_paged, bf16": lambda: indexer_scores_paged_case(Draw(9), format=INDEX_BF16),
    "indexer_topk": lambda: indexer_topk_case(Draw(10)),
    "indexer_topk, bf16": lambda: indexer_topk_case(Draw(10), format=INDEX_BF16),
    "indexer_topk_blocks": lambda: indexer_topk_blocks_case(Draw(10)),
    "indexer_topk_of_blocks": lambda: indexer_topk_of_blocks_case(Draw(10)),
    "select_topk": lambda: {"scores": Draw(11).normal(3, 50), "topk": 7},
    "merge_topk": lambda: merge_topk_case(Draw(11)),
    "sparse_prefill": lambda: sparse_prefill_case(Draw(12), with_sink=True),
    "sparse_prefill, max_logits": lambda: (
        sparse_prefill_case(Draw(12)) | {"max_logits": torch.zeros(5, 8)}
    ),
    "sparse_prefill, FP8 MMA": lambda: sparse_prefill_case(Draw(12)) | {"allow_fp8_mma": True},
    "sparse_prefill, cache": lambda: {
        "q": Draw(13).normal(3, 8, 512).bfloat16(),
        "kv": PagedCache.allocate(BF16_512, 3, 8),
        "topk_indices": Draw(13).integers(-1, 30, 3, 9),
        "softmax_scale": 0.05,
    },
    "sparse_prefill, two streams": lambda: (
        sparse_prefill_case(Draw(12), head_dim=512)
        | {
            "extra_cache": PagedCache.allocate(FP8_584, 3, 8),
            "extra_topk_indices": Draw(13).integers(-1, 30, 5, 9),
        }
    ),
    "sparse_prefill, shared lists": lambda: shared_prefill_case(Draw(12), with_sink=True),
    "sparse_prefill, queries in two tensors": lambda: split_queries(sparse_prefill_case(Draw(12))),
    "sparse_attention": lambda: sparse_attention_case(Draw(12), with_sink=True),
    "sparse_attention, shared lists": lambda: sparse_attention_case(Draw(12), list_tokens=2),
    "sparse_attention_backward": lambda: sparse_attention_backward_case(Draw(12), with_sink=True),
    "sparse_attention_backward, no sink": lambda: (
        sparse_attention_backward_case(Draw(12), with_dlse=True)
        | {"accumulate": torch.zeros(128, 576)}
    ),
    "sparse_attention_backward, shared lists": lambda: sparse_attention_backward_case(
        Draw(12), list_tokens=2, with_sink=True
    ),
    "sparse_decode": decode_arguments,
    "sparse_decode, queries in two tensors": lambda: split_queries(decode_arguments()),
    "sparse_decode, two streams": lambda: decode_arguments(
        FP8_584, page_size=PAGE, extra=(FP8_584, 50, 16, PAGE)
    ),
    "sparse_decode, lengths of tokens": lambda: decode_arguments(query_len=2, own_lengths=True),
    "sparse_decode, splits in a workspace": lambda: (
        decode_arguments() | {"num_splits": 2, "workspace": torch.empty(1 << 17, dtype=torch.uint8)}
    ),
    "dense_decode": lambda: dense_decode_case(Draw(14), format=BF16_576),
    "dense_prefill": lambda: dense_prefill_case(Draw(15)),
    "merge_states": merge_arguments,
    "project_heads": lambda: {
        "x": Draw(16).normal(3, 2, 64).bfloat16(),
        "weight": head_weight(Draw(16), 2, 32, 64),
    },
    "project_heads, parts": lambda: project_heads_case(Draw(16), num_parts=2, with_sink=True),
    "project_heads, fp8": lambda: {
        "x": Draw(16).normal(3, 2, 256).bfloat16(),
        "weight": head_weight(Draw(16), 2, 32, 256, (32, 128)),
    },
    "project_groups": lambda: project_groups_case(Draw(17)),
    "project_groups, fp8 parts in a workspace": lambda: (
        project_groups_case(Draw(17), block=(128, 128), num_parts=2, with_sink=True)
        | {"workspace": torch.zeros(1 << 16, dtype=torch.uint8)}
    ),
    "decode_branch, sparse": lambda: branch_arguments(8, with_sink=True),
    "decode_branch, dense": lambda: branch_arguments(None),
    "decode_branch, fp8 weights": lambda: branch_arguments(8, block=(128, 128)),
    "decode_branch, sparse in a workspace": lambda: with_workspace(branch_arguments(8)),
    "decode_branch, dense in a workspace": lambda: with_workspace(branch_arguments(None)),
    "prefill_branch, sparse": lambda: branch_arguments(8, with_sink=True),
    "prefill_branch, dense": lambda: branch_arguments(None),
    "select_rows": lambda: select_rows_case(Draw(17)),
    "selected_scores": lambda: selected_scores_case(Draw(18), with_lengths=True),
    "selected_scores_backward": lambda: selected_scores_backward_case(Draw(18), with_lengths=True),
    "attention_target": lambda: attention_target_case(Draw(19), with_sink=True),
    "index_loss": lambda: index_loss_case(Draw(20), with_row_weights=True),
    "dense_index_loss": lambda: dense_index_loss_case(Draw(21), with_row_weights=True),
    "dense_index_gradients": lambda: dense_index_loss_case(Draw(21), shared_keys=True),
}
OPERATORS = [name for name in CALLS if "branch" not in name and name != "index_loss"]
DIFFERENTIABLE = {
    "sparse_attention": ("q", "kv"),
    "sparse_attention, shared lists": ("q", "kv"),
    "selected_scores": ("index_q", "weights", "index_k"),
    "index_loss": ("scores",),
    "dense_index_loss": ("index_q", "weights", "index_k"),
}
"""Calls of ops with gradients, and the arguments that have one."""


def tensors_of(case, results):
    """Results, and the tensors that the call may write."""
    results = results if isinstance(results, tuple) else (results,)
    written = [
        part
        for value in case.values()
        if isinstance(value, (PagedCache, RowTable))
        for part in vars(value).values()
        if isinstance(part, torch.Tensor)
    ]
    given = [case.get("out"), case.get("max_logits"), case.get("stats")]
    return [part for part in (*results, *written, *given) if part is not None]


@pytest.mark.parametrize("call", CALLS)
def test_compiled_calls_equal_eager_ones(call):
    op = getattr(sparsemla, call.split(",")[0])
    eager, compiled = CALLS[call](), CALLS[call]()
    torch._dynamo.reset()
    expected = tensors_of(eager, op(**eager))

    def run(case):
        return op(**case)

    got = tensors_of(compiled, torch.compile(run, fullgraph=True, backend="aot_eager")(compiled))
    for index, (actual, wanted) in enumerate(zip(got, expected, strict=True)):
        assert_equal(f"{call}[{index}]", actual, wanted)


def test_every_public_op_is_compiled():
    assert {call.split(",")[0] for call in CALLS} == set(sparsemla.ops.__all__)


class Recorder(TorchDispatchMode):
    """Records the operators that calls reach, with their arguments.

    Operators that write into arguments do not run: the arguments would hold the results, and
    opcheck would see no change.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace != "sparsemla":
            return function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {})) if function._schema.returns else None


def holds_fp8(args):
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn for x in args)


@pytest.mark.parametrize("call", OPERATORS)
def test_operators_match_their_schemas(call):
    with Recorder() as recorder:
        getattr(sparsemla, call.split(",")[0])(**CALLS[call]())
    ((function, args, kwargs),) = recorder.calls
    utils = ["test_faketensor", "test_aot_dispatch_dynamic"]
    if function._schema.returns:  # the others write into arguments and have no derivative
        utils.append("test_autograd_registration")
    if not holds_fp8(args):  # which test_schema cannot compare
        utils.append("test_schema")
    torch.library.opcheck(function, args, kwargs, test_utils=utils)


def test_the_backward_of_the_dense_loss_matches_its_schema():
    case, inputs = differentiated("dense_index_loss")
    with Recorder() as recorder:
        sparsemla.dense_index_loss(**case).backward(inputs=inputs)
    function, args, kwargs = recorder.calls[-1]
    assert function == torch.ops.sparsemla.dense_index_loss_backward.default
    torch.library.opcheck(function, [x.detach() for x in args], kwargs)


def test_every_operator_is_checked():
    registered = {
        name.removeprefix("sparsemla::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("sparsemla::")
    }
    public = {call.split(",")[0] for call in OPERATORS}
    assert registered == public | {"dense_index_loss_backward"}


def finite(result):
    """The sum of a result's finite values, for a gradient of ones."""
    return result.where(result.isfinite(), 0).sum()


def differentiated(call):
    """Arguments of a call, and those among them that have gradients."""
    case = CALLS[call]()
    for name in DIFFERENTIABLE[call]:
        case[name] = case[name].detach().requires_grad_()
    return case, [case[name] for name in DIFFERENTIABLE[call]]


@pytest.mark.parametrize("call", DIFFERENTIABLE)
def test_compiled_gradients_equal_eager_ones(call):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def run(case):
        results = getattr(sparsemla, call.split(",")[0])(**case)
        return sum(finite(one) for one in (results if isinstance(results, tuple) else (results,)))

    case, inputs = differentiated(call)
    expected = torch.autograd.grad(run(case), inputs)
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    found = torch.autograd.grad(compiled(case), inputs)
    assert counter.frame_count == 1
    for name, got, wanted in zip(DIFFERENTIABLE[call], found, expected, strict=True):
        assert_equal(name, got, wanted)


# Raised within opcheck of torch 2.14 and newer.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning:torch._subclasses.meta_utils")
@pytest.mark.parametrize(
    ("call", "operator"),
    [
        ("sparse_attention", "sparse_attention"),
        ("sparse_attention, shared lists", "sparse_attention"),
        ("selected_scores", "selected_scores"),
        ("dense_index_loss", "dense_index_gradients"),
    ],
)
def test_differentiable_operators_match_their_gradients(call, operator):
    defaults = {"list_tokens": 1, "token_mask": None, "deterministic": True}
    case = defaults | differentiated(call)[0]
    parameters = getattr(torch.ops.sparsemla, operator).default._schema.arguments
    arguments = [case[parameter.name] for parameter in parameters]
    torch.library.opcheck(getattr(torch.ops.sparsemla, operator).default, arguments)


def test_compiled_step_writes_the_cache_on_every_call():
    case = latent_write_arguments()
    other = latent_write_arguments()
    other["kv"] = other["kv"] * 2
    other["cache"] = case["cache"]

    def step(case):
        sparsemla.fused_rope_rmsnorm_quant(**case)
        slots = torch.tensor([[[3, 9, 20, -1]]], dtype=torch.int32)
        q = torch.ones(1, 1, 2, 576, dtype=torch.bfloat16)
        return sparsemla.sparse_decode(q, case["cache"], slots, softmax_scale=0.05)[0]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    first = compiled(case)
    second = compiled(other)
    assert_equal("first", first, step(case))
    assert_equal("second", second, step(other))


def test_one_compiled_graph_serves_all_batch_sizes():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def run(q, cache, slots):
        return sparsemla.sparse_decode(q, cache, slots, softmax_scale=0.05)[0]

    compiled = torch.compile(run, fullgraph=True, backend=counter, dynamic=True)
    for batch in (3, 5, 9, 10, 13, 16, 20, 23):
        case = decode_arguments(batch=batch)
        arguments = case["q"], case["cache"], case["topk_indices"].repeat(1, 1, 40)
        assert_equal("out", compiled(*arguments), run(*arguments))
    assert counter.frame_count <= 4


def test_symbolic_traces():
    case = decode_arguments(batch=3)

    def run(q, slots):
        return sparsemla.sparse_decode(q, case["cache"], slots, softmax_scale=0.05)[0]

    arguments = case["q"], case["topk_indices"]
    traced = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*arguments)
    assert_equal("out", traced(*arguments), run(*arguments))


@pytest.mark.parametrize("fmt", [FP8_584, FP8_DS_MLA, e4m3_format()])
def test_compiled_writes_change_only_their_layer(fmt):
    # Pages of 64 rows are padded in the 584-byte format, and a layer's pages lie apart.
    def run(case):
        return sparsemla.fused_rope_rmsnorm_quant(**case)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    wholes = []
    for function in (run, compiled):
        whole = PagedCache.allocate(fmt, 3, 64, num_layers=3)
        for part in whole.fields():
            if part is not None:
                part.view(torch.uint8).fill_(7)
        function(latent_write_arguments(fmt) | {"cache": whole.layer(1)})
        wholes.append(whole)
    for name, got, wanted in zip(
        ("fp8", "scales", "bf16"), wholes[1].fields(), wholes[0].fields(), strict=True
    ):
        if got is not None:
            assert_equal(name, got, wanted)
            assert (got[:, 0].contiguous().view(torch.uint8) == 7).all()
