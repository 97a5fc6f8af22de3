"""GLM-5.3-Flash in vLLM: its layer of attention, with this package's indexer and attention.

The layer, its caches, their groups and their metadata are those of vLLM's
``Glm5NextForConditionalGeneration``; transformers' class of the same weights says what the layer
computes.
"""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch

from vllm_here import require_vllm

require_vllm()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import Glm5NextTextConfig
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextAttention
    from vllm.config import (
        AttentionConfig,
        CompilationConfig,
        DeviceConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.forward_context import set_forward_context
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    from glm5_next_alone import attention as theirs  # before ``pooled``
    from sparsemla.backends import vllm as plugins
    from sparsemla.backends.vllm import attention, indexer, pooled, register_indexer, warmup

import replay
from sparsemla import FP8_DS_MLA, FP8_NOPE, PagedCache
from sparsemla_lab.testing.cases import Draw
from test_vllm import (
    absorb,
    build_model,  # noqa: F401 - a fixture
    engine_config,
    model_config,  # noqa: F401 - a fixture
    one_rank,  # noqa: F401 - a fixture
    plain_vllm,  # noqa: F401 - a fixture
)
from vllm_layers import CachedLayers, positions_of

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the layer is built for the CPU")
HIDDEN, HEADS, TOPK, MAX_TOKENS, LENGTH = 256, 8, 128, 256, 420
TEXT = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "v_head_dim": 64,
    "index_topk": TOPK,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "num_hidden_layers": 1,
    "layer_types": ["deepseek_sparse_attention"],
    "indexer_types": ["full"],
    "mlp_layer_types": ["dense"],
}


class Engine(CachedLayers):
    """A layer with the caches and the metadata that vLLM's runner makes for it.

    Args:
        config: vLLM's.
        text: the model's.
        weights: of transformers' layer.
    """

    def __init__(self, config, text, weights):
        self.draw = Draw(1)
        width = -(-(TOPK + text.index_kpool - 1) // 128) * 128
        self.buffer = torch.full((MAX_TOKENS, width), 2**31 - 1, dtype=torch.int32)
        with set_default_torch_dtype(torch.bfloat16):
            self.layer = theirs.Glm5NextMLAAttention(
                config,
                text,
                **{name: TEXT[name] for name in ("hidden_size", "q_lora_rank", "kv_lora_rank")},
                num_heads=HEADS,
                qk_nope_head_dim=TEXT["qk_nope_head_dim"],
                qk_rope_head_dim=0,
                v_head_dim=TEXT["v_head_dim"],
                cache_config=config.cache_config,
                prefix="model.layers.0.self_attn",
                topk_indices_buffer=self.buffer,
                skip_rope=True,
            )
        load(self.layer, weights)
        absorb(config)
        super().__init__(config, self.draw, get_kv_cache_spec(config), 64 << 20)

    def table(self, group, request, last):
        """The pages of a request in a group, with room for its first tokens."""
        spec, most, row = self.row(group, request, LENGTH)
        for block in range(min(-(-last // spec.block_size), most)):
            if not row[block]:
                row[block] = self.free.pop(0)
        return row

    def step(self, chunks, padding=0, dummy=False):
        """Serve chunks ``(request, first, inputs [n, hidden])``, decodes first; their outputs.

        A dummy step has page 0 and no slots, as vLLM's have.
        """
        counts = [len(inputs) for *_, inputs in chunks]
        ends = [first + len(inputs) for _, first, inputs in chunks]
        positions = positions_of(chunks, padding)
        owner = torch.repeat_interleave(torch.tensor(counts))
        real = positions[: len(owner)]
        buffer = torch.full((len(self.tables), MAX_TOKENS), -1)
        tables = []
        for number, group in enumerate(self.caches.kv_cache_groups):
            rows = [
                self.table(number, request, end)
                for (request, *_), end in zip(chunks, ends, strict=True)
            ]
            tables.append(torch.stack(rows + [torch.zeros_like(rows[0])] * bool(padding)))
            size = group.kv_cache_spec.block_size
            if dummy:
                tables[-1].zero_()
            elif size >= 64:  # rings have no slots
                pages = tables[-1][owner, real // size].long()
                buffer[number, : len(owner)] = pages * size + real % size
        metadata = self.metadata(counts, ends, positions, tables, buffer[:, : len(positions)])
        x = torch.cat([inputs for *_, inputs in chunks])
        x = torch.cat([x, x.new_full((padding, HIDDEN), math.nan)])
        slots = {
            name: buffer[number, : len(positions)]
            for number, group in enumerate(self.caches.kv_cache_groups)
            for name in group.layer_names
        }
        context = set_forward_context(metadata, self.config, slot_mapping=slots)
        with context, torch.no_grad():
            out = self.layer(x, positions)
        return out[: sum(counts)].split(counts)

    def whole(self, request, x, chunks):
        """The layer's outputs for a request that comes in chunks of so many tokens."""
        found, first = [], 0
        for count in chunks:
            found += self.step([(request, first, x[first : first + count])])
            first += count
        return torch.cat(found)


def load(layer, weights):
    """Load transformers' weights, as vLLM's class of the whole model maps them."""
    own = dict(layer.named_parameters())
    q_a, latent = weights["q_a_proj.weight"], weights["kv_a_proj_with_mqa.weight"]
    key, heads = weights["indexer.wk.weight"], weights["indexer.weights_proj.weight"]
    weights = weights | {
        "fused_qkv_a_proj.weight": torch.cat([q_a, latent]),
        "indexer.wk_weights_proj.weight": torch.cat([key, heads]),
    }
    loaded = set()
    for name, weight in weights.items():
        place = f"mla_attn.{name}".replace("indexer.", "indexer.inner.")
        for target in (name, place):
            if target in own:
                own[target].data.copy_(weight)
                loaded.add(target)
    assert own.keys() == loaded


def layer_of_transformers(text):
    """Its class in float32, with random weights of bfloat16."""
    made, draw = Glm5NextTextAttention(text, 0).eval(), Draw(0)
    for name, weight in made.named_parameters():
        if name.endswith("ape"):
            weight.data = draw.normal(*weight.shape)
        elif weight.dim() > 1:
            weight.data = (draw.normal(*weight.shape) * weight.shape[-1] ** -0.5).bfloat16().float()
        else:
            offset = float(name.endswith("norm.weight"))
            weight.data = (offset + 0.2 * draw.normal(*weight.shape)).bfloat16().float()
    return made


@pytest.fixture
def made(build_model, model_config, monkeypatch):
    """Makes an engine of one layer, and transformers' layer with its weights."""
    monkeypatch.setattr(plugins, "_nvidia_class_runs", lambda: False)

    def make(kpool, dtype="auto", **changes):
        register_indexer()
        fields = {"qk_rope_head_dim": 0, "index_kpool": kpool, "index_topk": TOPK}
        for name, value in fields.items():
            monkeypatch.setattr(model_config.hf_config, name, value, raising=False)
        text = Glm5NextTextConfig(
            **TEXT, index_kpool=kpool, indexer_rope_interleave=True, attn_implementation="eager"
        )
        other = layer_of_transformers(text)
        config = engine_config(
            model_config,
            dtype,
            MAX_TOKENS,
            attention_config=AttentionConfig(backend="CUSTOM"),
            compilation_config=CompilationConfig(custom_ops=["none"]),
            **changes,
        )
        config.cache_config.block_size = max(2 * kpool * 64, 256)
        config.scheduler_config.disable_hybrid_kv_cache_manager = False  # as on a GPU
        with set_current_vllm_config(config):
            return Engine(config, text, other.state_dict()), other

    return make


def expected_of(other, x):
    """What transformers' layer computes, and the tokens that it selects ``[T, n]``."""
    x, mask = x.float()[None], torch.ones(1, len(x), dtype=torch.bool)
    with torch.no_grad():
        out = other(x, mask)[0][0]
        q_low = other.q_a_layernorm(other.q_a_proj(x))
        selected = other.indexer(x, q_low, mask, None)[0]
    return out, selected


def indexer_of(index_topk, qk_rope_head_dim, index_head_dim):
    """What :class:`PooledIndexer` looks at first."""
    return SimpleNamespace(
        head_dim=index_head_dim,
        rope_dim=qk_rope_head_dim,
        topk_tokens=index_topk,
        index_kpool=4,
        vllm_config=VllmConfig(device_config=DeviceConfig(device="cpu")),
    )


def overlap(found, expected):
    """The share of expected tokens that were selected."""
    shares = []
    for ours, others in zip(found.tolist(), expected.tolist(), strict=True):
        others = {token for token in others if token >= 0}
        shares.append(len(others & set(ours)) / len(others))
    return sum(shares) / len(shares)


@ON_CPU
@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("kpool", [4, 16])
def test_a_layer_agrees_with_transformers(made, kpool, dtype):
    engine, other = made(kpool, dtype)
    assert type(engine.layer.mla_attn.indexer) is pooled.PooledIndexer
    assert type(engine.layer.mla_attn.mla_attn.impl) is attention.SinkImpl
    rows = engine.layer.mla_attn.mla_attn.kv_cache
    assert rows.shape[-1] * rows.element_size() == (528 if dtype == "fp8_ds_mla" else 1024)
    x = Draw(2).normal(LENGTH, HIDDEN).bfloat16()
    expected, selected = expected_of(other, x)
    chunks = [1, 2, kpool - 1, 150, 90, 1, 1, 1]
    found, lists, first = [], [], 0
    for count in [*chunks, LENGTH - sum(chunks)]:
        found += engine.step([(0, first, x[first : first + count])])
        lists.append(engine.buffer[:count].clone())
        first += count
    found, lists = torch.cat(found).float(), torch.cat(lists)
    # All lists are as long as they may be, and name each token once.
    positions = torch.arange(LENGTH)
    counts = torch.minimum(positions + 1, TOPK + (positions + 1) % kpool)
    assert torch.equal((lists >= 0).sum(1), counts)
    assert all(len({*row[row >= 0].tolist()}) == n for row, n in zip(lists, counts, strict=True))
    assert (lists <= positions[:, None]).all()
    # They ascend, as lists of rows on the host must, with -1 behind.
    keys = torch.where(lists < 0, 2**31 - 1, lists)
    assert torch.equal(keys.sort(1).values, keys)
    # Until there are more tokens than are selected, only roundings differ.
    away = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert away[:TOPK].mean() < (0.05 if dtype == "fp8_ds_mla" else 0.01)
    assert overlap(lists[TOPK:], selected[TOPK:]) > 0.96
    assert away[TOPK:].mean() < 0.2


@ON_CPU
@pytest.mark.parametrize("kpool", [4, 16])
def test_a_batch_gives_what_each_request_gives_alone(made, kpool):
    """Decodes of one and of several tokens, prefills, padding; rejected drafts come again."""
    engine, _ = made(kpool)
    x, y = (Draw(seed).normal(200, HIDDEN).bfloat16() for seed in (3, 4))
    alone = [engine.whole(f"alone {i}", rows, [200]) for i, rows in enumerate((x, y))]
    steps = [
        [(0, 0, x[:131]), (1, 0, y[:7])],
        [(1, 7, y[7:9]), (0, 131, x[131:150])],
        [(0, 150, x[150:151]), (1, 9, torch.full_like(y[9:12], 3))],  # drafts, all rejected
        [(1, 9, y[9:10]), (0, 151, x[151:152])],
        [(0, 152, x[152:200]), (1, 10, y[10:200])],
    ]
    found = {0: torch.zeros_like(alone[0]), 1: torch.zeros_like(alone[1])}
    for number, chunks in enumerate(steps):
        outputs = engine.step(chunks, padding=number % 2 * 3)
        for (request, first, _), out in zip(chunks, outputs, strict=True):
            found[request][first : first + len(out)] = out
    for request, expected in enumerate(alone):
        away = (found[request].float() - expected.float()).norm() / expected.float().norm()
        assert away < 0.02


@ON_CPU
def test_a_dummy_step_writes_to_no_page(made):
    engine, _ = made(4)
    engine.step([(0, 0, Draw(5).normal(70, HIDDEN).bfloat16())])
    before = {name: part.kv_cache.clone() for name, part in engine.parts.items()}
    engine.step([(0, 70, torch.full((9, HIDDEN), 3.0).bfloat16())], dummy=True)
    for name, part in engine.parts.items():
        assert torch.equal(before[name].view(torch.uint8), part.kv_cache.view(torch.uint8))


@ON_CPU
def test_the_rings_of_open_pools_hold_a_pool_and_its_drafts(made):
    engine, _ = made(4)
    (tail,) = [part for name, part in engine.parts.items() if name.endswith("tail_cache")]
    assert tail.kv_cache.dtype == torch.float32
    assert tail.kv_cache.shape[1:] == (2, 4, 128)
    assert engine.support == "UNIFORM_BATCH"


REFUSED = {
    "index_topk": (130, "index_topk must be a multiple of index_kpool 4, got 130"),
    "qk_rope_head_dim": (64, "qk_rope_head_dim must be 0, got 64"),
    "index_head_dim": (64, "index_head_dim must be 128, got 64"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_dims_that_are_not_served_are_refused(field):
    value, reason = REFUSED[field]
    usual = {"index_topk": TOPK, "qk_rope_head_dim": 0, "index_head_dim": 128}
    with pytest.raises(ValueError, match=f"sparsemla_indexer: {reason}; otherwise remove"):
        pooled.PooledIndexer(indexer_of(**usual | {field: value}))


def test_ranks_that_share_contexts_are_refused():
    made = indexer_of(index_topk=TOPK, qk_rope_head_dim=0, index_head_dim=128)
    made.vllm_config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ValueError, match=r"decode_context_parallel_size must be 1, .* got 2"):
        pooled.PooledIndexer(made)


def test_528_bytes_are_the_first_of_those_that_vllm_writes(made):
    """vLLM's op rounds as :data:`sparsemla.FP8_DS_MLA` does; padding has no slot."""
    engine, _ = made(4, "fp8_ds_mla")
    impl, draw = engine.layer.mla_attn.mla_attn.impl, Draw(6)
    latent = draw.normal(40, 512).bfloat16()
    slots = torch.cat([draw.permutation(192)[:30], torch.full((4,), -1)])
    caches = [PagedCache.allocate(fmt, 3, 64) for fmt in (FP8_DS_MLA, FP8_NOPE)]
    caches[0].write(slots[:30], torch.nn.functional.pad(latent[:30], (0, 64)))
    impl.do_kv_cache_update(latent, None, caches[1].data, slots, "fp8_ds_mla", torch.ones(1))
    assert torch.equal(caches[1].data, caches[0].data[..., :528])


@ON_CPU
@pytest.mark.parametrize("kpool", [4, 16])
def test_steps_reach_no_kernel_that_was_not_warmed_up(run_python, made, monkeypatch, kpool):
    engine, _ = made(kpool, "fp8_ds_mla")
    # As vLLM sets it once caches are there: to the least of all groups, that of open pools.
    engine.config.cache_config.block_size = kpool
    (keys,) = warmup.pooled_layers(engine.config, engine.layer.mla_attn.indexer)
    serving, rows = warmup.attention_layers(engine.config, attention.SinkImpl)
    names = "pool_windows", "prepare_index_queries", "expand_pools"
    attends = "fused_rope_rmsnorm_quant", "sparse_decode", "sparse_prefill"
    calls = replay.spy(monkeypatch, {pooled: names, indexer: ("indexer_topk",), attention: attends})
    x = engine.draw.normal(200, HIDDEN).bfloat16()
    engine.step([(0, 0, x[:40])])
    engine.step([(0, 40, x[40:41]), (1, 0, x[:5])])
    engine.step([(0, 41, x[41:42]), (1, 5, x[5:6])], padding=3)
    engine.step([(0, 42, x[42:43]), (1, 6, x[6:9]), (2, 0, x[:190])])
    assert {op for op, *_ in calls} == {*names, *attends, "indexer_topk"}
    sweeps, servings = [*keys.sweeps(), *rows.sweeps()], [serving, *keys.selections()]
    assert replay.missing_kernels(run_python, calls, *servings, steps=sweeps) == []
