"""Latent rows on the host in vLLM, on the CPU: planning, the connector, and whole engines' steps.

Blocks, requests, prefix hits and preemptions are those of vLLM's own scheduler. Rows on the host
are plain tensors here.
"""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from turns import in_turns
from vllm_here import require_vllm

require_vllm()

from vllm import SamplingParams
from vllm.config import (
    AttentionConfig,
    CUDAGraphMode,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.utils import torch_utils
from vllm.utils.hashing import sha256
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import index_group
from vllm.v1.attention.selector import _cached_get_attn_backend
from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR, ActiveKVConnector
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids
from vllm.v1.worker.utils import allocate_kv_cache, bind_kv_cache_to_layers

import replay
import test_vllm
from sparsemla import HostCache, HostContext, HotRows, PagedCache, host_context, hot_rows
from sparsemla.backends.vllm import (
    attention,
    host,
    host_attention,
    register,
    settings,
    warmup,
)
from sparsemla.backends.vllm.attention import SparseMLAImpl
from sparsemla.backends.vllm.host_attention import HostRowsImpl
from sparsemla_lab.testing.cases import Draw, decode_queries, prefill_rows
from sparsemla_lab.testing.compare import assert_equal
from test_vllm import (
    CONFIG,
    MAX_TOKENS,
    ON_CPU,
    PAGE_SIZE,
    TOPK,
    Batch,
    InOrder,
    absorb,
    build_model,  # noqa: F401 - fixtures
    builder,
    config,  # noqa: F401
    engine_config,
    heads_of,
    layer,
    like_hopper,  # noqa: F401
    model_config,  # noqa: F401
    one_rank,  # noqa: F401
    plain_vllm,  # noqa: F401
    published,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    for module in (sparse_mla_attention, mla_attention, torch_utils):
        monkeypatch.setattr(module, "PIN_MEMORY", torch.cuda.is_available())
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    yield
    _cached_get_attn_backend.cache_clear()  # it does not look at which connector there is


def connector(**extra):
    return KVTransferConfig(
        kv_connector="HostRowsConnector",
        kv_connector_module_path="sparsemla.backends.vllm.host",
        kv_role="kv_both",
        kv_buffer_device="cpu",
        kv_connector_extra_config={"host_gib": 1, "rows_per_seat": 3 * TOPK} | extra,
    )


def planned(config, layout="LBNHC", num_blocks=8):
    """vLLM's plan of caches for the layers of a model."""
    config.cache_config.kv_cache_layout = layout
    config.cache_config.num_gpu_blocks_override = num_blocks
    groups = get_kv_cache_groups(config, get_kv_cache_spec(config))
    return get_kv_cache_config_from_groups(config, groups, 1 << 30)


@ON_CPU
@pytest.mark.parametrize("nvidia_class_runs", [False, True], ids=["portable", "NVIDIA"])
@pytest.mark.parametrize(("dtype", "row"), [("auto", 1152), ("fp8_ds_mla", 656)])
def test_vllm_plans_blocks_of_index_keys(build_model, nvidia_class_runs, dtype, row):
    resident, _ = build_model(nvidia_class_runs, dtype)
    before = planned(resident)
    made, _ = build_model(nvidia_class_runs, dtype, kv_transfer_config=connector())
    for layout in ("LBNHC", "BLNHC", "LBHNC", "BLHNC"):
        plan = planned(made, layout)
        (group,) = plan.kv_cache_groups
        assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
        assert plan.needs_kv_cache_zeroing == before.needs_kv_cache_zeroing
        assert group.kv_cache_spec.page_size_bytes == 2 * PAGE_SIZE * (4 + 132)
        assert before.kv_cache_groups[0].kv_cache_spec.page_size_bytes == 2 * PAGE_SIZE * (
            row + 132
        )
        total = plan.num_blocks * group.kv_cache_spec.page_size_bytes
        assert {tensor.size for tensor in plan.kv_cache_tensors} == {total}  # of all layers
        caches = allocate_kv_cache(plan, CPU, KVCacheLayout[layout], [PAGE_SIZE])
        assert {cache.shape[0] for cache in caches.values()} == {plan.num_blocks}


class Engine:
    """A model, and vLLM's scheduler and connector around it, as a worker runs them.

    Args:
        config: of the engine.
        model: of it.
        num_blocks: that vLLM has.
    """

    def __init__(self, config, model, num_blocks):
        self.config, self.model = config, model
        plan = planned(config, num_blocks=num_blocks)
        config.cache_config.num_gpu_blocks = plan.num_blocks
        context = config.compilation_config.static_forward_context
        caches = allocate_kv_cache(plan, CPU, KVCacheLayout.LBNHC, [PAGE_SIZE])
        bind_kv_cache_to_layers(caches, context, kv_cache_groups=plan.kv_cache_groups)
        # Layers of a kind share a builder, and so the metadata of a step.
        self.builders, made = {}, {}
        for name, spec in plan.kv_cache_groups[0].kv_cache_spec.kv_cache_specs.items():
            cls = context[name].get_attn_backend().get_builder_cls()
            if cls not in made:
                made[cls] = cls(spec, [name], config, CPU)
            self.builders[name] = made[cls]
        blocks = plan.kv_cache_groups[0].kv_cache_spec.max_num_blocks_per_req(
            config, config.model_config.max_model_len
        )
        self.table_width = get_block_table_width(blocks, PAGE_SIZE)
        self.connector = NO_OP_KV_CONNECTOR
        if config.kv_transfer_config is not None:
            kv_transfer_state._KV_CONNECTOR_AGENT = KVConnectorFactory.create_connector(
                config, KVConnectorRole.WORKER, plan
            )
            self.connector = ActiveKVConnector(config, caches)
        block_size, hash_size = resolve_kv_cache_block_sizes(plan, config)
        register_all_kvcache_specs(config)
        plan = generate_scheduler_kv_cache_config([plan])
        manager = StructuredOutputManager(config)
        self.scheduler = Scheduler(config, plan, manager, block_size, hash_block_size=hash_size)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(hash_size, sha256)
        self.drafts = config.num_speculative_tokens
        self.indices, self.free = {}, list(range(config.scheduler_config.max_num_seqs))
        self.tokens, self.blocks, self.seen = {}, {}, Counter()

    def add(self, name, prompt, max_tokens):
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.tokens[name] = list(prompt)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=self.hasher))

    def step(self):
        """One step; what the model computes, and the queries of requests in their order."""
        out = self.scheduler.schedule()
        gone = out.finished_req_ids | (out.preempted_req_ids or set())
        for name in sorted(gone & self.indices.keys()):
            self.free.append(self.indices.pop(name))
        self.seen["preempted"] += len(out.preempted_req_ids or ())
        computed = {}
        for new in out.scheduled_new_reqs:
            self.indices[new.req_id] = self.free.pop()
            self.blocks[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
            self.seen["hits"] += new.num_computed_tokens > 0
        cached = out.scheduled_cached_reqs
        for name, blocks, done in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self.blocks[name] += blocks[0] if blocks else []
            computed[name] = done
        counts, drafted = out.num_scheduled_tokens, out.scheduled_spec_decode_tokens
        names = sort_batch_req_ids(counts, drafted, 1 + self.drafts)
        hidden, self.moved = torch.empty(0), None
        if not names:
            self.moved = self.connector.no_forward(out).kv_connector_output
        else:
            hidden = self.forward(out, names, computed)
        ends = torch.tensor([counts[name] for name in names]).cumsum(0).tolist()
        sampled, proposals = [], []
        for name, end in zip(names, ends, strict=True):
            known = self.tokens[name]
            own, start = drafted.get(name, []), computed[name]
            logits = hidden[end - counts[name] : end].float() @ self.model.lm_head.weight.float().T
            chosen, tokens = logits.argmax(-1).tolist(), []
            if start + counts[name] - len(own) == len(known):  # it has all of its tokens
                for place in range(len(own) + 1):
                    tokens.append(chosen[counts[name] - len(own) - 1 + place])
                    if place < len(own):
                        self.seen["accepted" if own[place] == tokens[-1] else "rejected"] += 1
                        if own[place] != tokens[-1]:
                            break
            known += tokens
            sampled.append(tokens)
            proposals.append(self.propose(known))
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self.moved,
        )
        self.scheduler.update_from_output(out, output)
        if self.drafts:
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, proposals))
        return hidden, [(name, counts[name], computed[name]) for name in names]

    @property
    def context(self):
        """The rows on the GPU of prefills."""
        return next(each.impl.rows.context for _, each in host._layers(self.config))

    def propose(self, known):
        """Drafts, of which some are right: what followed the last token before."""
        for at in range(len(known) - 2, -1, -1):
            if known[at] == known[-1]:
                return (known[at + 1 :] + known)[: self.drafts]
        return [known[-1]] * self.drafts

    def dummy(self, length=130):
        """A step of requests that do not exist, as on an idle rank of data parallelism."""
        self.connector.set_disabled(True)
        offsets, lens = torch.arange(4).int(), torch.full((3,), length).int()
        common = CommonAttentionMetadata(
            query_start_loc=offsets,
            query_start_loc_cpu=offsets,
            seq_lens=lens,
            seq_lens_cpu_upper_bound=lens,
            num_reqs=3,
            num_actual_tokens=3,
            max_query_len=1,
            max_seq_len=length,
            block_table_tensor=torch.zeros(3, 3, dtype=torch.int32),
            slot_mapping=torch.full((3,), -1),
        )
        zeros = torch.zeros(3, dtype=torch.int64)
        found = self.run_model(common, zeros, zeros)
        self.connector.set_disabled(False)
        return found

    def run_model(self, common, ids, positions, prepare=lambda: None):
        """The model's output for a batch."""
        built = {made: made.build(0, common) for made in set(self.builders.values())}
        metadata = {name: built[made] for name, made in self.builders.items()}
        for each in built.values():
            if isinstance(each, host_attention.HostMetadata) and each.prefills is not None:
                kind = "selected" if self.context.selects(each.prefills, TOPK) else "contexts"
                self.seen["converted" if each.converted else kind] += 1
        mapping = dict.fromkeys(metadata, common.slot_mapping)
        with set_forward_context(metadata, self.config, slot_mapping=mapping), torch.no_grad():
            prepare()
            return self.model(ids, positions)

    def forward(self, out, names, computed):
        """The model's output for a batch."""
        counts = [out.num_scheduled_tokens[name] for name in names]
        spans = [(computed[n], computed[n] + c) for n, c in zip(names, counts, strict=True)]
        positions = [torch.arange(*span) for span in spans]
        drafted = out.scheduled_spec_decode_tokens
        ids = [
            torch.tensor((self.tokens[name] + drafted.get(name, []))[first:last])
            for name, (first, last) in zip(names, spans, strict=True)
        ]
        table = torch.zeros(len(names), self.table_width, dtype=torch.int32)
        for row, name in zip(table, names, strict=True):
            row[: len(self.blocks[name])] = torch.tensor(self.blocks[name])
        slots = [
            row[at // PAGE_SIZE].long() * PAGE_SIZE + at % PAGE_SIZE
            for row, at in zip(table, positions, strict=True)
        ]
        offsets = torch.tensor([0, *counts]).cumsum(0).int()
        lens = torch.tensor([last for _, last in spans]).int()
        common = CommonAttentionMetadata(
            query_start_loc=offsets,
            query_start_loc_cpu=offsets,
            seq_lens=lens,
            seq_lens_cpu_upper_bound=lens,
            num_reqs=len(names),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=int(lens.max()),
            block_table_tensor=table,
            slot_mapping=torch.cat(slots),
        )
        batch = SimpleNamespace(
            idx_mapping=torch.tensor([self.indices[name] for name in names]),
            req_ids=names,
            num_tokens=sum(counts),
        )
        hidden = self.run_model(
            common,
            torch.cat(ids),
            torch.cat(positions),
            lambda: self.connector.pre_forward(out, batch),
        )
        self.connector.finish_forward()
        self.moved = self.connector.post_forward(out.finished_req_ids)
        return hidden


@pytest.fixture
def engines(build_model, model_config, monkeypatch):
    """Makes an engine with rows on the GPU and one with rows on the host, of the same weights."""
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)

    def make(dtype, num_blocks, *, model=None, nvidia_class_runs=False, drafts=0, **extra):
        found, changes = [], {} if model is None else {"model_config": model}
        for transfer in (None, connector(**extra)):
            speculative = None
            if drafts:
                speculative = SpeculativeConfig(
                    method="ngram",
                    num_speculative_tokens=drafts,
                    prompt_lookup_max=2,
                    target_model_config=model_config,
                    target_parallel_config=ParallelConfig(),
                )
            config, made = build_model(
                nvidia_class_runs,
                dtype,
                heads_of(nvidia_class_runs),
                kv_transfer_config=transfer,
                speculative_config=speculative,
                **changes,
            )
            if changes:
                draw = Draw(0)
                with torch.no_grad():
                    for weight in made.parameters():
                        weight.copy_(draw.normal(*weight.shape) * weight.shape[-1] ** -0.5)
            else:
                made.load_weights(published(config).items())
            absorb(config)
            found.append(Engine(config, made, num_blocks))
        return found

    yield make
    agent = kv_transfer_state._KV_CONNECTOR_AGENT
    if agent is not None:
        agent.shutdown()


def run(engines, requests, steps=1000, idle=0, calls=None):
    """Serve requests, each added before a step of its own, and compare all that models compute.

    Args:
        engines: with rows on the GPU, and on the host.
        requests: when they come, their prompts, and how many tokens they want.
        steps: at most.
        idle: the engine with rows on the host has a dummy step behind every so many; 0 for none.
        calls: what records the ops of attention, which must be the same.
    """
    waiting = dict(requests)
    for step in range(steps):
        for name, (at, prompt, length) in list(waiting.items()):
            if at <= step:
                del waiting[name]
                for engine in engines:
                    engine.add(name, prompt, length)
        expected, batch = engines[0].step()
        if calls is not None:
            ops = {op for op, *_ in calls}
            calls.clear()
        found, same = engines[1].step()
        assert batch == same
        if calls is not None:
            assert ops == {op for op, *_ in calls}
            calls.clear()
        assert_equal(f"hidden states of step {step}", found, expected)
        if idle and step % idle == 0:
            engines[1].dummy()
        if not waiting and not engines[0].scheduler.has_unfinished_requests():
            return
    raise AssertionError("requests are still running")


def prompts(count, length, shared=0):
    torch.manual_seed(0)
    made = torch.randint(256, (count, length))
    made[:, :shared] = made[0, :shared]
    return made.tolist()


def stats(engine):
    return engine.connector.kv_connector.hot.stats()


@ON_CPU
@pytest.mark.parametrize("dtype", in_turns(["auto", "fp8_ds_mla"], 2))
def test_a_step_has_the_bits_of_rows_on_the_gpu(engines, monkeypatch, dtype):
    """Requests come one after the other, hit prefixes, are preempted, and take seats of others."""
    calls = replay.spy(monkeypatch, {attention: ("sparse_decode", "sparse_prefill")})
    made = engines(dtype, num_blocks=6, rows_per_seat=TOPK)
    first, second, third, fourth = prompts(4, 150, shared=128)
    requests = {
        "a": (3, first, 50),
        "b": (7, second, 60),
        "c": (9, third[:70], 40),
        "d": (73, fourth, 12),
        "two": (0, third[80:100], 5),
        "at once": (0, third[100:130], 3),
    }
    run(made, requests, calls=calls)
    assert min(made[1].seen[what] for what in ("hits", "preempted", "contexts")) > 0
    assert 0 < stats(made[1]).misses < stats(made[1]).hits


@ON_CPU
@pytest.mark.parametrize("dtype", in_turns(["fp8_ds_mla", "auto"], 2))
def test_drafts_have_the_bits_of_rows_on_the_gpu(engines, dtype):
    """Some are rejected, whose rows the next step writes again."""
    made = engines(dtype, num_blocks=16, drafts=2)
    first, second = prompts(2, 140)
    run(made, {"a": (0, first, 40), "b": (5, second, 30)})
    assert min(made[1].seen[what] for what in ("accepted", "rejected")) > 1


def in_pieces(context, monkeypatch, num_tokens):
    """Selected rows are fetched for so many tokens at a time."""
    selects = context.selects

    def spied(plan, topk):
        found = selects(plan, topk)
        context._caches = [
            PagedCache(each.data[: num_tokens * topk if found else None], each.format)
            for each in caches
        ]
        return found

    caches = context._caches
    monkeypatch.setattr(context, "selects", spied)


@ON_CPU
@pytest.mark.parametrize("piece", in_turns([2, 1000], 2), ids="pieces of {} tokens".format)
def test_prefills_fetch_what_they_select_from_long_contexts(engines, monkeypatch, piece):
    made = engines("fp8_ds_mla", num_blocks=30)
    if piece == 2:
        in_pieces(made[1].context, monkeypatch, piece)
    prompt, other = prompts(2, 63 * 22 + 5)  # beside a decode, the last chunk has 5 tokens
    run(made, {"a": (0, other[:100], 30), "b": (2, prompt, 2)})
    assert made[1].seen["selected"] > 0


@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("interleave", [1, PAGE_SIZE])
def test_ranks_that_share_contexts_have_the_bits_of_rows_on_the_gpu(
    config, monkeypatch, interleave, dtype
):
    monkeypatch.setattr(config, "kv_transfer_config", connector(rows_per_seat=2 * TOPK))
    monkeypatch.setattr(config.parallel_config, "cp_kv_cache_interleave_size", interleave)
    monkeypatch.setattr(config.model_config, "max_model_len", 1664)
    fmt = attention.FORMATS[dtype]
    steps = [
        ([1, 1, 1], [700, 3, 129]),
        ([2, 1, 2], [702, 4, 131]),
        ([1, 1, 1, 9], [703, 5, 130, 400]),  # a draft was rejected
        ([1, 1, 3], [704, 6, 1664]),
    ]
    for rank in range(2):
        draw, modes = Draw(rank), set()
        group = SimpleNamespace(rank_in_group=rank, world_size=2)
        monkeypatch.setattr(host, "get_dcp_group", lambda group=group: group)
        pages = PagedCache.allocate(fmt, 104, PAGE_SIZE)
        pages.write(torch.arange(104 * PAGE_SIZE), prefill_rows(draw, 104 * PAGE_SIZE, 576))
        rows = HostCache.allocate(fmt, 104, PAGE_SIZE, num_layers=1, device="cpu")
        rows.layer(0).data.copy_(pages.data)
        hot = HotRows(rows, seats=8, rows_per_seat=2 * TOPK, topk=TOPK, query_len=2,
                      shard=host.context_shard(config))  # fmt: skip
        table = draw.permutation(104).view(4, 26).int()
        buffer = torch.full((MAX_TOKENS, TOPK), -1, dtype=torch.int32)
        resident = layer(buffer, 6, dtype)
        seats = torch.tensor([5, 0, 2, 7, -1, -1, -1, -1], dtype=torch.int32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(test_vllm.attention, "SparseMLAImpl", host_attention.HostRowsImpl)
            on_host = layer(buffer, 6, dtype)
        for impl in (resident, on_host):
            impl.dcp_world_size, impl.dcp_rank = 2, rank
        context = HostContext(rows, max_rows=1664, shard=host.context_shard(config))
        on_host.rows = host.HostLayer("a layer", 0, hot, context, seats, False)
        for query_lens, seq_lens in steps:
            batch = Batch(draw, query_lens, seq_lens, block_table=table[: len(seq_lens)])
            for token, position in enumerate(batch.positions.tolist()):
                some = draw.permutation(position + 1)[:TOPK].sort().values
                buffer[token] = pad(some, (0, TOPK - len(some)), value=-1)
            q = decode_queries(draw, batch.rows, 6, 576)
            found = []
            for impl, make in (
                (resident, attention.SparseMLAMetadataBuilder),
                (on_host, host_attention.HostRowsMetadataBuilder),
            ):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(test_vllm.attention, "SparseMLAMetadataBuilder", make)
                    made = builder(config, dtype)
                made.reorder_batch_threshold = 2  # a draft
                common = batch.common()
                # Bounds count drafts that were not accepted.
                common.seq_lens_cpu_upper_bound = common.seq_lens.cpu() + 3
                metadata = made.build(0, common)
                metadata.cp_kv_cache_interleave_size = interleave
                found.append(impl.forward_mqa(q, pages.data, metadata, None))
            if metadata.prefills is not None:
                modes.add(context.selects(metadata.prefills, TOPK))
            for name, ours, theirs in zip(("out", "lse"), found[1], found[0], strict=True):
                assert_equal(name, ours, theirs)
        assert modes == {False, True}
        rows.close()


def record(monkeypatch, cls, name, calls):
    """Append the name of a method whenever it is called."""
    call = getattr(cls, name)

    def recorded(*arguments, **options):
        calls.append(name)
        return call(*arguments, **options)

    monkeypatch.setattr(cls, name, recorded)


@ON_CPU
@pytest.mark.parametrize("nvidia_class_runs", [False, True], ids=["portable", "NVIDIA"])
def test_fetches_of_decodes_begin_before_attention(engines, monkeypatch, nvidia_class_runs):
    """When rows are written and selected; in piecewise graphs with attention."""
    made = engines("auto", num_blocks=8, nvidia_class_runs=nvidia_class_runs)[1]
    calls, mode = [], CUDAGraphMode.NONE
    for cls, name in (
        (SparseMLAImpl, "do_kv_cache_update"),
        (SparseMLAImpl, "record_logical_topk_ready"),
        (HotRows, "resolve"),
        (HostRowsImpl, "forward_mqa"),
        (HotRows, "layer"),
    ):
        record(monkeypatch, cls, name, calls)
    monkeypatch.setattr(
        host_attention, "in_piecewise_cudagraph", lambda: mode == CUDAGraphMode.PIECEWISE
    )
    made.add("a", prompts(1, 20)[0], 4)
    made.step()
    written = ["record_logical_topk_ready", "do_kv_cache_update"]
    written = written[:1] if nvidia_class_runs else written
    for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
        calls.clear()
        made.step()
        fetch = ["resolve", "forward_mqa"]
        fetch = fetch if mode == CUDAGraphMode.NONE else fetch[::-1]
        assert calls == 2 * [*written, *fetch, "layer"]


@ON_CPU
def test_a_fetch_of_an_interrupted_step_is_not_taken_for_the_next(engines, monkeypatch):
    monkeypatch.setattr(host_attention, "in_piecewise_cudagraph", lambda: True)
    made = engines("fp8_ds_mla", num_blocks=8)
    impl = next(each.impl for _, each in host._layers(made[1].config))
    impl._begun = object(), None
    run(made, {"a": (0, prompts(1, 20)[0], 4)})
    assert impl._begun is None


@ON_CPU
def test_whole_contexts_are_copied_a_layer_ahead(engines, monkeypatch):
    """Converted or not, each layer's copy has begun when its attention asks for it."""
    made = engines("fp8_ds_mla", num_blocks=8)
    begun = []
    for name in ("_begin", "_take"):
        record(monkeypatch, HostContext, name, begun)
    run(made, {"a": (0, prompts(1, 20)[0], 2)})
    assert begun == ["_begin", "_take", "_take"]  # two layers


@ON_CPU
def test_dummy_steps_touch_no_hot_rows(engines):
    made = engines("fp8_ds_mla", num_blocks=16, rows_per_seat=TOPK)
    first, second = prompts(2, 150)
    run(made, {"a": (0, first, 20), "b": (4, second, 8)}, idle=3)


@ON_CPU
def test_vllm_profiles_graphs_without_the_connector(engines):
    """Layers have placeholders then, with no room for a row."""
    made = engines("fp8_ds_mla", num_blocks=16)[1]
    for _, each in host._layers(made.config):
        each.impl.rows = None
        each.kv_cache = torch.full((8, PAGE_SIZE, 4), 255, dtype=torch.uint8)
    assert made.dummy().isfinite().all()
    assert all((each.kv_cache == 255).all() for _, each in host._layers(made.config))


@ON_CPU
def test_layers_that_share_a_selection_share_seats(engines, tmp_path, monkeypatch):
    fields = CONFIG | {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "index_topk_pattern": "FSS",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
    for function in ("current_stream", "_create_side_stream", "_create_event"):
        monkeypatch.setattr(index_group, function, lambda *arguments: InOrder())
    made = engines("fp8_ds_mla", num_blocks=16, model=model, rows_per_seat=TOPK)
    assert [each.impl.selects for _, each in host._layers(made[1].config)] == [True, False, False]
    first, second = prompts(2, 150)
    run(made, {"a": (0, first, 12), "b": (4, second, 8)})
    assert host.leaders([True, False, False, True, True, False]) == [0, 0, 0, 3, 4, 4]


@ON_CPU
def test_the_nvidia_class_writes_through_to_the_host(engines):
    """vLLM's kernel for queries, which is interpreted, takes seconds a step."""
    made = engines("auto", num_blocks=8, nvidia_class_runs=True, rows_per_seat=TOPK)
    run(made, {"a": (0, prompts(1, 20)[0], 4)})
    assert stats(made[1]).misses > 0


@ON_CPU
def test_contexts_are_converted_on_their_way_from_the_host(engines, like_hopper, monkeypatch):
    monkeypatch.setattr(attention, "_conversion_pays_off", lambda *arguments: True)
    monkeypatch.setattr(attention, "prefill_workspace_rows", lambda *_, max_rows, **__: max_rows)
    made, begun = engines("fp8_ds_mla", num_blocks=16), []
    record(monkeypatch, HostContext, "_begin", begun)
    first, second = prompts(2, 150)
    run(made, {"a": (0, first, 20), "b": (4, second, 8)})
    assert made[1].seen["contexts"] == made[1].seen["selected"] == 0
    assert made[1].seen["converted"] > 0
    assert len(begun) == made[1].seen["converted"]  # once for both layers


def scheduled(new=(), resumed=(), **changes):
    """What vLLM's scheduler tells the connector."""
    out = SchedulerOutput.make_empty()
    out.scheduled_new_reqs = [SimpleNamespace(req_id=name) for name in new]
    out.scheduled_cached_reqs.resumed_req_ids = set(resumed)
    for name, value in changes.items():
        setattr(out, name, value)
    return out


@pytest.fixture
def schedulers_side(build_model):
    """The connector as vLLM's scheduler makes it, by the path of its module."""
    config, _ = build_model(False, "fp8_ds_mla", kv_transfer_config=connector())
    made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, planned(config))
    assert type(made) is host.HostRowsConnector
    return made


@ON_CPU
def test_the_scheduler_tells_which_requests_take_a_seat(schedulers_side):
    out = scheduled(["a", "b"], ["c"])
    assert schedulers_side.build_connector_meta(out).new_ids == {"a", "b", "c"}
    assert out.has_sync_kv_loads
    assert schedulers_side.get_num_new_matched_tokens(None, 5) == (0, False)
    assert schedulers_side.request_finished_all_groups(None, ([1],)) == (False, None)
    assert not schedulers_side.requires_kv_delivery
    copies = [SimpleNamespace()]
    with pytest.raises(ValueError, match="must not copy blocks with HostRowsConnector, got 1 cop"):
        schedulers_side.build_connector_meta(scheduled(kv_cache_block_copies=copies))


@ON_CPU
def test_the_connector_says_how_many_blocks_fit(build_model):
    gib = 2.5 * 2 * PAGE_SIZE * 656 / 2**30  # two blocks and a half of two layers
    config, _ = build_model(False, "fp8_ds_mla", kv_transfer_config=connector(host_gib=gib))
    assert host.HostRowsConnector(config, KVConnectorRole.WORKER, planned(config, num_blocks=2))
    with pytest.raises(ValueError, match=r"rows of 3 blocks, .* --num-gpu-blocks-override 2"):
        host.HostRowsConnector(config, KVConnectorRole.WORKER, planned(config, num_blocks=3))


REFUSED = {
    "CUSTOM": ({"attention_config__backend": None}, "--attention-backend must be CUSTOM"),
    "indexer": ({"indexer": False}, "VLLM_PLUGINS must name sparsemla_indexer"),
    "rows": ({"rows_per_seat": TOPK - 1}, f"rows_per_seat must be at least {TOPK}, .* {TOPK - 1}"),
    "drafts": (
        {"rows_per_seat": 2 * TOPK, "speculative_config": SimpleNamespace(
            num_speculative_tokens=2, attention_backend=None, draft_model_config=None
        )},
        f"rows_per_seat must be at least {3 * TOPK}, index_topk for each of 3 query tokens",
    ),
    "runner": ({"runner": False}, "VLLM_USE_V2_MODEL_RUNNER must not be 0"),
    "pcp": ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-.* got 2"),
    "pp": ({"parallel_config__pipeline_parallel_size": 2}, "--pipeline-parallel-size .* got 2"),
    "dbo": ({"parallel_config__enable_dbo": True}, "--enable-dbo and --ubatch-size must be off"),
    "hisparse": ({"attention_config__hisparse_config": object()}, "HiSparse must be off"),
    "no host_gib": ({"host_gib": None}, "host_gib .* must be a positive number, .* got None"),
    "host_gib": ({"host_gib": -1}, "host_gib .* must be a positive number, .* got -1"),
    "rows_per_seat": ({"rows_per_seat": "many"}, "rows_per_seat .* positive integer, .* 'many'"),
    "unknown": ({"host_gb": 3}, "must have host_gib and rows_per_seat only, got host_gb"),
    "model": ({"architectures": ["DeepseekV4ForCausalLM"]}, "must be one of DeepseekV32For"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_rows_on_the_host_do_not_take_stop_the_start(
    model_config, plain_vllm, monkeypatch, name
):
    changes, reason = REFUSED[name]
    changes, extra = dict(changes), {}
    for key in ("host_gib", "rows_per_seat", "host_gb"):
        if key in changes:
            extra[key] = changes.pop(key)
    register()
    monkeypatch.setattr(settings, "indexer_is_active", lambda: changes.get("indexer", True))
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", changes.get("runner", True))
    monkeypatch.setattr(
        ModelConfig, "architectures", changes.get("architectures", model_config.architectures)
    )
    config = engine_config(
        model_config,
        attention_config=AttentionConfig(backend="CUSTOM"),
    )
    config.kv_transfer_config = connector(**extra)
    for where, value in changes.items():
        part, _, field = where.partition("__")
        if part in vars(config):
            monkeypatch.setattr(getattr(config, part) if field else config, field or part, value)
    with pytest.raises(ValueError, match=f"sparsemla: .*{reason}"):
        settings.refuse(config)


def test_a_connector_beside_others_stops_the_start(model_config, plain_vllm):
    register()
    config = engine_config(model_config, attention_config=AttentionConfig(backend="CUSTOM"))
    both = [{"kv_connector": name} for name in ("HostRowsConnector", "NixlConnector")]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_buffer_device="cpu",
        kv_connector_extra_config={"connectors": both},
    )
    with pytest.raises(ValueError, match=r"must be the only KV connector, .* got MultiCon"):
        settings.refuse(config)


@pytest.mark.parametrize("beside", [(), ("NixlConnector",)], ids=["alone", "of several"])
def test_a_connector_that_leaves_out_index_keys_stops_the_start(model_config, plain_vllm, beside):
    """``test_vllm_connectors.py`` shows that it does."""
    register()
    config = engine_config(model_config, attention_config=AttentionConfig(backend="CUSTOM"))
    parts = [{"kv_connector": name} for name in ("ExampleConnector", *beside)]
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector" if beside else "ExampleConnector",
        kv_role="kv_both",
        kv_buffer_device="cpu",
        kv_connector_extra_config={"connectors": parts} if beside else {},
    )
    with pytest.raises(ValueError, match=r"sparsemla: ExampleConnector of vLLM writes no index"):
        settings.refuse(config)


@ON_CPU
def test_more_seats_than_the_gpu_has_room_for_stop_the_start(build_model, monkeypatch):
    monkeypatch.setattr(host_attention, "reserved_bytes", lambda *arguments: 1 << 60)
    with pytest.raises(ValueError, match=r"--max-num-seqs and rows_per_seat .* got 8 and 384"):
        build_model(False, "fp8_ds_mla", kv_transfer_config=connector())


def test_sleep_mode_is_refused_by_vllm():
    assert not host.HostRowsConnector.supports_sleep_mode(connector())


@ON_CPU
@pytest.mark.parametrize("dtype", in_turns(["auto", "fp8_ds_mla"], 2))
def test_rows_on_the_host_reach_no_kernel_that_was_not_warmed_up(
    run_python, engines, monkeypatch, dtype
):
    found = []
    monkeypatch.setattr(warmup, "warm_up", lambda *keys, steps: found.append((keys, steps)))
    _, made = engines(dtype, num_blocks=30)
    ops = {
        attention: ("sparse_decode", "sparse_prefill"),
        host_context: ("fetch_rows", "to_slots"),
        hot_rows: ("fetch_rows", "forget_seats", "resolve_rows"),
    }
    calls = replay.spy(monkeypatch, ops)
    first, second = prompts(2, 63 * 22 + 5)
    made.add("a", first[:100], 30)
    for _ in range(2):
        made.step()
    made.add("b", second, 2)
    while made.scheduler.has_unfinished_requests():
        made.step()
    assert min(made.seen[what] for what in ("selected", "contexts")) > 0
    keys = list(dict.fromkeys(warmup.attention_layers(made.config, host_attention.HostRowsImpl)))
    warmup.KERNELS.compile_many(keys)
    ((servings, steps),) = found
    assert len(servings) == 1
    assert replay.missing_kernels(run_python, calls, *servings, steps=steps) == []
