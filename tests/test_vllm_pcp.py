"""Prefill context parallelism of vLLM: ranks that divide the tokens of a step, on the CPU.

vLLM's own manager deals out the tokens and restores their order, and vLLM's own layer gathers the
new rows. The ranks are processes that talk through gloo.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_here import require_vllm

require_vllm()

from vllm import _custom_ops
from vllm.config import CUDAGraphMode, ModelConfig, ParallelConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_model_parallel,
    get_pcp_group,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.models.deepseek_v32 import attention as deepseek_v32
from vllm.utils import torch_utils
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.pcp_manager import PCPManager
from vllm.v1.worker.workspace import init_workspace_manager

from sparsemla import INDEX_FP8, PagedCache, reference
from sparsemla.backends.vllm import attention, indexer, nvidia, warmup
from sparsemla_lab.testing.cases import Draw, decode_queries, prefill_rows
from sparsemla_lab.testing.compare import SPARSE_PREFILL_OUT, assert_close, assert_equal
from test_vllm import (
    CONFIG,
    LAYER,
    MAX_TOKENS,
    PAGE_SIZE,
    TOPK,
    Batch,
    builder,
    config,  # noqa: F401 - fixtures
    engine_config,
    fork,  # noqa: F401
    layer,
    model_config,  # noqa: F401
    one_rank,  # noqa: F401
    refusals,
    selecting,
)

RANKS, HEADS = 2, 3
STEPS = {
    "a prompt": {"query_lens": [30], "seq_lens": [30], "decodes": 0},
    "a chunk": {"query_lens": [23], "seq_lens": [300], "decodes": 0},
    "decodes": {"query_lens": [1, 1, 1], "seq_lens": [300, 2, 129], "decodes": 3},
    "one decode": {"query_lens": [1], "seq_lens": [200], "decodes": 1},  # one rank has no token
    "drafts": {"query_lens": [3, 3], "seq_lens": [131, 400], "decodes": 2},
    "both": {"query_lens": [1, 1, 9, 21], "seq_lens": [200, 64, 137, 400], "decodes": 2},
    "short prompts": {"query_lens": [1, 2, 1], "seq_lens": [130, 2, 1], "decodes": 1},
}


def global_batch(batch, decodes):
    """A step of all ranks, as vLLM's runner makes it."""
    count = len(batch.query_lens)
    made = InputBatch.make_dummy(
        count, batch.tokens, InputBuffers(count, batch.tokens, torch.device("cpu"))
    )
    query_lens = np.array(batch.query_lens, dtype=np.int32)
    seq_lens = np.array(batch.seq_lens, dtype=np.int32)
    starts = np.cumsum([0, *query_lens], dtype=np.int32)
    made.num_scheduled_tokens = query_lens
    made.query_start_loc, made.query_start_loc_np = torch.from_numpy(starts), starts
    made.seq_lens = made.seq_lens_cpu_upper_bound = torch.from_numpy(seq_lens)
    made.num_computed_tokens_np = seq_lens - query_lens
    made.prefill_len_np = np.where(np.arange(count) < decodes, seq_lens - query_lens, seq_lens)
    made.is_prefilling_np = np.arange(count) >= decodes
    made.has_prefill = decodes < count
    made.positions = batch.positions
    return made


def local_step(manager, batch, decodes, padded):
    """This rank's part of a step: positions, metadata, and the slots of all ranks.

    Args:
        manager: vLLM's.
        batch: the step of all ranks.
        decodes: its first requests.
        padded: tokens of a rank in a captured graph, or None.
    """
    mode = CUDAGraphMode.NONE if padded is None else CUDAGraphMode.PIECEWISE
    descriptor = BatchExecutionDescriptor(mode, padded, None)
    local = manager.partition_batch(global_batch(batch, decodes), descriptor)
    slots = manager._convert_to_gathered_slot_mappings(batch.slot_mapping[None])[0]
    upper = local.seq_lens_cpu_upper_bound[: local.num_reqs]
    return local, CommonAttentionMetadata(
        query_start_loc=local.query_start_loc[: local.num_reqs + 1],
        query_start_loc_cpu=torch.from_numpy(local.query_start_loc_np[: local.num_reqs + 1]),
        seq_lens=local.seq_lens,
        seq_lens_cpu_upper_bound=upper,
        num_reqs=local.num_reqs,
        num_actual_tokens=local.num_tokens,
        max_query_len=int(local.num_scheduled_tokens.max()),
        max_seq_len=int(upper.max()),
        block_table_tensor=batch.block_table[local.idx_mapping],
        slot_mapping=slots,
        is_prefilling=torch.from_numpy(local.is_prefilling_np),
    )


def write_rows(kv_c, k_pe, cache, slots, *, kv_cache_dtype, scale, skip_scale):
    """Instead of vLLM's compiled op."""
    rows = torch.cat([kv_c, k_pe], dim=-1)
    PagedCache(cache, attention.FORMATS[kv_cache_dtype]).write(slots, rows)


def write_keys(k, cache, slots, block, scale_fmt):
    """Instead of vLLM's compiled op."""
    assert (block, scale_fmt) == (128, "ue8m0")
    PagedCache(cache, INDEX_FP8).write(slots, k.float())


def check_step(config, batch, decodes, padded, dtype):
    """A layer's selection and output, which vLLM's manager puts in order, against one rank's."""
    draw, group, buffers = batch.draw, get_pcp_group(), (4 * len(batch.seq_lens), 2 * MAX_TOKENS)
    manager = PCPManager(RANKS, group.rank_in_group, torch.device("cpu"), True, *buffers)
    latents, keys = (
        batch.cache(attention.FORMATS[dtype]),
        PagedCache.allocate(INDEX_FP8, batch.num_blocks, PAGE_SIZE),
    )
    # Scores of small integers are exact: a CPU may add in another order for another width.
    keys.write(
        torch.arange(batch.num_blocks * PAGE_SIZE),
        draw.integers(-3, 4, batch.num_blocks * PAGE_SIZE, 128).float(),
    )
    new_rows = prefill_rows(draw, batch.tokens, 576).bfloat16()
    new_keys = draw.integers(-3, 4, batch.tokens, 128).bfloat16()
    index_q = draw.integers(-2, 3, batch.tokens, 32, 128).to(torch.float8_e4m3fn)
    weights = draw.integers(-3, 4, batch.tokens, 32).float()
    q = decode_queries(draw, batch.tokens, HEADS, 576)

    local, common = local_step(manager, batch, decodes, padded)
    own = manager._local_gather_idx  # of its tokens and their padding
    with set_current_vllm_config(config):
        name = f"index {len(config.compilation_config.static_forward_context)}"
        cached = nvidia.IndexCache(132, torch.uint8, name, config.cache_config)
    cached.kv_cache = keys.data
    spec, backend = cached.get_kv_cache_spec(config), cached.get_attn_backend()
    index_builder = backend.get_builder_cls()(spec, [cached.prefix], config, torch.device("cpu"))
    buffer = torch.full((MAX_TOKENS, TOPK), 2**31 - 1, dtype=torch.int32)
    made = layer(buffer, HEADS, dtype)
    attends = SimpleNamespace(
        indexer=SimpleNamespace(
            k_cache=cached,
            quant_block_size=128,
            scale_fmt="ue8m0",
            topk_tokens=TOPK,
            head_dim=128,
            max_model_len=2048,
            max_total_seq_len=2048,
            indexer_op=SimpleNamespace(topk_backend="auto"),
        ),
        kv_cache=latents.data,
        kv_cache_dtype=dtype,
        layer_name=LAYER,
        skip_topk=False,
        use_pcp=True,
        pcp_shard_decode_requests=config.parallel_config.pcp_shard_decode_requests,
        topk_indices_buffer=buffer,
        dcp_manager=None,
        impl=made,
        num_local_heads=HEADS,
        kv_lora_rank=512,
        v_head_dim=512,
        W_UV=torch.eye(512, dtype=torch.bfloat16).expand(HEADS, -1, -1),
        prefill_backend=None,
        _dense_mha_metadata_layer_name="",
        _vllm_config=config,
        _k_scale=torch.ones(1),
        _k_scale_float=1.0,
        _fp8_kv_needs_view=False,
        _fp8_query=False,
        _use_sparse_mha=lambda metadata: False,
    )
    context = config.compilation_config.static_forward_context
    context[LAYER] = attends
    metadata = {
        LAYER: builder(config, dtype).build(0, common),
        cached.prefix: index_builder.build(0, common),
    }
    output = torch.full((len(own), HEADS * 512), torch.nan, dtype=torch.bfloat16)
    with set_forward_context(
        metadata, config, slot_mapping=dict.fromkeys(metadata, common.slot_mapping)
    ):
        deepseek_v32.DeepseekV32Attention._sparse_indexer_and_attn(
            attends, None, None, None, None, index_q[own], new_keys[own], weights[own],
            new_rows[own, :512], new_rows[own, 512:], q[own, :, :512], q[own, :, 512:], output,
        )  # fmt: skip
    assert (buffer[local.num_tokens : len(own)] == -1).all()
    assert (output[local.num_tokens :] == 0).all()

    # On one rank, over caches that this step has written.
    assert_equal("rows", latents.read(batch.slot_mapping).float(), written(dtype, new_rows))
    assert_equal("keys", keys.read(batch.slot_mapping).float(), new_keys.float())
    expected = reference.indexer_topk(
        index_q,
        weights,
        keys,
        input_row_offsets=torch.tensor([0, *batch.query_lens]).cumsum(0),
        seq_lens=torch.tensor(batch.seq_lens),
        page_table=batch.block_table,
        topk=TOPK,
    )
    assert_equal("selection", manager.restore_hidden_states(buffer[: len(own)]), expected)
    slots = reference.to_slots(expected, batch.block_table, batch.request_ids, page_size=PAGE_SIZE)
    wanted = reference.sparse_prefill(q, latents, slots, softmax_scale=192**-0.5)[0]
    out = manager.restore_hidden_states(output).unflatten(1, (HEADS, 512))
    assert_close("out", out, wanted, SPARSE_PREFILL_OUT)
    return local


def written(dtype, rows):
    """Rows as a cache keeps them."""
    pages = -(-len(rows) // PAGE_SIZE)
    cache = PagedCache.allocate(attention.FORMATS[dtype], pages, PAGE_SIZE)
    cache.write(torch.arange(len(rows)), rows)
    return cache.read(torch.arange(len(rows))).float()


def run_rank(rank, folder):
    """One of several processes, each with a part of the tokens."""
    import conftest  # noqa: F401 - repairs Triton's interpreter

    torch.set_num_threads(1)
    init_workspace_manager(torch.device("cpu"))
    sparse_mla_attention.PIN_MEMORY = mla_attention.PIN_MEMORY = torch_utils.PIN_MEMORY = False
    torch.accelerator.empty_cache = lambda: None
    _custom_ops.concat_and_cache_mla = write_rows
    _custom_ops.indexer_k_quant_and_cache = write_keys
    attention.SparseMLAImpl.record_logical_topk_ready = lambda self: None
    deepseek_v32.sparse_attn_indexer = nvidia.sparse_attn_indexer
    parallel = ParallelConfig(prefill_context_parallel_size=RANKS)
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16")
    idle = 0
    for number, step in enumerate(STEPS.values()):
        dtype = ["auto", "fp8_ds_mla"][number % 2]
        config = engine_config(model, dtype, parallel_config=parallel)
        with set_current_vllm_config(config):
            init_distributed_environment(RANKS, rank, f"file://{folder}/ranks", rank, "gloo")
            initialize_model_parallel(1, 1, RANKS)
            for padded in (None, 24):
                batch = Batch(Draw(number), step["query_lens"], step["seq_lens"])
                idle += not check_step(config, batch, step["decodes"], padded, dtype).num_tokens
            destroy_model_parallel()
    assert (idle > 0) == (rank == 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are processes on the CPU")
def test_ranks_that_divide_tokens_compute_the_step_of_one(fork, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.multiprocessing.start_processes(
        run_rank, (str(tmp_path),), RANKS, start_method="forkserver"
    )


def test_a_draft_step_that_all_ranks_repeat_writes_its_own_keys(config, monkeypatch):
    """Its slots are those of one rank; a graph has padding behind them."""
    monkeypatch.setattr(_custom_ops, "indexer_k_quant_and_cache", write_keys)
    batch = Batch(Draw(0), [1, 1], [200, 3], padded_tokens=2)
    common = batch.common()
    common.slot_mapping, common.num_actual_tokens = batch.slot_mapping, batch.tokens
    new_keys = batch.draw.integers(-3, 4, batch.rows, 128).bfloat16()
    keys, _, _, chosen = selecting(
        config,
        batch,
        common=common,
        k=new_keys,
        quant_block_size=128,
        scale_fmt="ue8m0",
        use_pcp=True,
        pcp_shard_decode_requests=True,
    )
    assert_equal("keys", keys.read(batch.slot_mapping).float(), new_keys[:2].float())
    assert (chosen >= 0).sum(1)[: batch.rows].tolist() == [TOPK, 3, 0, 0]


@pytest.mark.parametrize("dcp", [1, 2])
def test_ranks_divide_tokens_or_contexts(config, monkeypatch, dcp):
    monkeypatch.setattr(config.parallel_config, "prefill_context_parallel_size", 2)
    monkeypatch.setattr(config.parallel_config, "decode_context_parallel_size", dcp)
    group = SimpleNamespace(world_size=dcp)
    monkeypatch.setattr(indexer, "get_dcp_group", lambda: group)
    assert nvidia.index_cache_backend().supports_pcp() == (dcp == 1)
    if dcp == 1:
        assert refusals(use_pcp=True) == []
        indexer.refuse(config, 128)
        return
    (reason,) = refusals(use_pcp=True, use_dcp=True)
    assert reason.endswith("attend for the same tokens; got 2 and 2")
    with pytest.raises(ValueError, match="must be 1 beside decode context parallelism"):
        indexer.refuse(config, 128)


def test_the_portable_class_does_not_divide_tokens(config, monkeypatch):
    monkeypatch.setattr(config.parallel_config, "prefill_context_parallel_size", 2)
    with pytest.raises(ValueError, match="must be 1 in vLLM's portable class"):
        indexer.refuse(config, 128, portable=True)


def test_a_rank_that_divides_tokens_warms_up_two_parts_of_each_request(config, monkeypatch):
    alone = warmup._limits(config)["max_requests"]
    monkeypatch.setattr(config.parallel_config, "prefill_context_parallel_size", 2)
    assert warmup._limits(config)["max_requests"] == 2 * alone
