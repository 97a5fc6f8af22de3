"""DSA layers in Megatron-core, beside its own: results, gradients, losses, on one and two ranks.

CI installs Megatron-core for this file alone: see `.ci/run`.
"""

import copy
import dataclasses
import importlib
import importlib.util
import re
import warnings
from pathlib import Path

import pytest
import torch

import processes
from sparsemla.backends.records import SelectionRecord
from sparsemla.backends.selections import pack_selections, split_selections

if importlib.util.find_spec("megatron") is None:
    pytest.skip("Megatron-core is not installed; .ci/run installs it", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import package_info, parallel_state
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.experimental_attention_variant import dsa, dsa_layout
    from megatron.core.transformer.spec_utils import build_module, import_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    import sparsemla.backends.megatron
    from sparsemla.backends.megatron import (
        SparseMLAttention,
        block_spec,
        losses,
        replay_selections,
        with_sparsemla,
    )

pytestmark = pytest.mark.filterwarnings("ignore")

HIDDEN, HEADS, TOKENS, TOPK, LAYERS = 64, 4, 24, 8, 4


class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class LayerNorm(torch.nn.LayerNorm):
    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class Duplicated(torch.nn.Linear):
    """In place of TransformerEngine's, whose weight all ranks have."""

    def __init__(self, num_inputs, num_outputs, *, config, **kwargs):
        super().__init__(num_inputs, num_outputs, bias=False, dtype=config.params_dtype)

    def forward(self, x):
        return super().forward(x), None


class Provider(LocalSpecProvider):
    """Modules for Megatron's specs, which otherwise need TransformerEngine and CUDA."""

    def linear(self):
        return ColumnParallelLinear

    def layer_norm(self, rms_norm=False, for_qk=False, has_residual=False):
        return RMSNorm if rms_norm else LayerNorm


class RoundedIndexer(dsa.DSAIndexer):
    """Megatron's, with bfloat16 values in queries and keys: the selection rounds no further."""

    def forward_before_topk(self, *args):
        q, k, weights = super().forward_before_topk(*args)
        q, k = (x + (x.bfloat16().to(x.dtype) - x).detach() for x in (q, k))
        return q, k, weights


def layer_spec(config):
    """Megatron's attention layer, for the CPU."""
    spec = specs.get_dsa_module_spec_for_backend(config, Provider())
    return on_cpu(spec)


def on_cpu(spec):
    indexer = spec.submodules.core_attention.submodules.indexer
    indexer.module = RoundedIndexer
    indexer.submodules.linear_wq_b = Duplicated
    indexer.submodules.linear_wk = Duplicated
    indexer.submodules.linear_weights_proj = Duplicated
    return spec


def make_config(**changes):
    settings = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 16,
        "v_head_dim": 16,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 16,
        "dsa_indexer_head_dim": 32,
        "dsa_indexer_topk": TOPK,
        "dsa_indexer_loss_coeff": 0.5,
        "dsa_indexer_use_sparse_loss": True,
        "dsa_indexer_rotate_activation": False,
        "rope_type": "rope",
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "add_bias_linear": False,
        "apply_rope_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
    }
    return MLATransformerConfig(**(settings | changes))


def packed(*lengths, padded=()):
    """Parameters of sequences in a row, of these lengths with those of their padding."""

    def bounds(lengths):
        return torch.tensor([0, *lengths]).cumsum(0).int()

    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds(lengths),
        cu_seqlens_kv=bounds(lengths),
        max_seqlen_q=max([*lengths, *padded]),
        max_seqlen_kv=max([*lengths, *padded]),
    )
    if padded:
        params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = bounds(padded)
    return params


def group():
    return ProcessGroupCollection.use_mpu_process_groups()


def make_layer(config, spec, device="cpu"):
    torch.manual_seed(0)
    layer = build_module(
        spec,
        config=config,
        layer_number=1,
        cp_comm_type=config.cp_comm_type,
        pg_collection=group(),
    )
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" not in name:
                parameter.mul_(6)  # attention and index scores far from uniform
    return layer.to(device)


def run(layer, x, packed_seq_params=None):
    """Output, gradients and the logged loss of a layer."""
    tracker = dsa.DSAIndexerLossLoggingHelper.tracker
    tracker.clear()
    tracker["values"] = torch.zeros(LAYERS, device=x.device)
    dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale = torch.tensor(3.0)
    x = x.clone().requires_grad_()
    out, _ = layer(x, None, packed_seq_params=packed_seq_params)
    results = {"out": out.detach()}
    if out.requires_grad:
        generator = torch.Generator().manual_seed(1)
        out.backward(torch.randn(out.shape, generator=generator).to(out))
        results["x"] = x.grad
        results |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    groups = {name: tracker.get(name) is not None for name in ("reduce_group", "avg_group")}
    return results | {"loss": tracker["values"], "groups": torch.tensor([*groups.values()]).long()}


def both(config, x, packed_seq_params=None, training=True):
    """What Megatron's layer makes of x, and ours with its parameters."""
    spec = layer_spec(config)
    theirs, ours = (make_layer(config, each, x.device) for each in (spec, with_sparsemla(spec)))
    assert type(theirs.core_attention) is dsa.DSAttention
    assert type(ours.core_attention) is SparseMLAttention
    ours.load_state_dict(theirs.state_dict())
    return [run(layer.train(training), x, copy.copy(packed_seq_params)) for layer in (theirs, ours)]


def assert_same(expected, actual, tolerance=2**-17):
    """Sums in another order: differences of a few roundings of the largest element."""
    assert expected.keys() == actual.keys()
    for name, theirs in expected.items():
        ours = actual[name]
        if theirs is None:
            assert ours is None, name
            continue
        ours, theirs = ours.cpu(), theirs.cpu()  # a rank may have its own GPU
        difference = (ours.double() - theirs.double()).abs().max()
        assert difference <= tolerance * theirs.abs().max(), (name, difference)


CASES = {
    "sparse loss": ({}, None),
    "dense loss": ({"dsa_indexer_use_sparse_loss": False}, None),
    "sum over tokens": ({"calculate_per_token_loss": True}, None),
    "no relu": ({"dsa_indexer_scoring_relu": False}, None),
    "no loss": ({"dsa_indexer_loss_coeff": 0.0}, None),
    "packed": ({}, packed(5, 12, 7)),
    "packed, dense loss": ({"dsa_indexer_use_sparse_loss": False}, packed(5, 12, 7)),
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    meeting = f"file://{tmp_path_factory.mktemp('ranks')}/meeting"
    with pytest.MonkeyPatch.context() as patch:
        on_this_device(patch.setattr, "cpu")
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def on_this_device(set_attribute, device):
    """Let Megatron, which asks for TransformerEngine's modules and CUDA's memory, do without."""
    set_attribute(specs, "_get_backend_spec_provider", lambda config: Provider())
    if device == "cuda":
        return
    tensor = torch.tensor
    set_attribute(torch, "tensor", lambda *args, pin_memory=False, **kw: tensor(*args, **kw))
    set_attribute(torch.Tensor, "cuda", lambda x, non_blocking=False: x)
    set_attribute(torch.cuda, "current_device", lambda: torch.device("cpu"))


@pytest.mark.parametrize("case", CASES)
def test_layer_equals_megatrons(case):
    changes, params = CASES[case]
    config = make_config(**changes)
    x = inputs(params)
    theirs, ours = both(config, x, params)
    assert_same(theirs, ours)
    learns = config.dsa_indexer_loss_coeff > 0
    assert (theirs["loss"][0] > 0.01) == learns
    assert (theirs["core_attention.indexer.linear_wk.weight"] is not None) == learns


def test_evaluation():
    """Outside of training nothing is logged, and the indexer has no gradient."""
    theirs, ours = both(make_config(), torch.randn(TOKENS, 2, HIDDEN), training=False)
    assert_same(theirs, ours)
    assert not ours["loss"].any()


def test_bfloat16():
    """Both round what they return, and Megatron the attention of its heads, too."""
    config = make_config(params_dtype=torch.bfloat16, bf16=True)
    theirs, ours = both(config, torch.randn(TOKENS, 2, HIDDEN).bfloat16())
    assert_same(theirs, ours, 2**-6)


def test_lists_of_all_keys_are_bounded(monkeypatch):
    """The warm-up's loss has the same bits for any number of tokens at a time."""
    x, config = torch.randn(TOKENS, 2, HIDDEN), make_config(dsa_indexer_use_sparse_loss=False)
    _, expected = both(config, x)
    monkeypatch.setattr(losses, "MAX_LIST_BYTES", 4 * 2 * TOKENS * 5)
    _, found = both(config, x)
    assert_same(expected, found, 0)


TENSOR_PARALLEL = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CONTEXT_PARALLEL = {"context_parallel_size": 2, "cp_comm_type": "all_gather"}
DENSE = {"dsa_indexer_use_sparse_loss": False}
RANK_CASES = {
    "tp": (TENSOR_PARALLEL, None),
    "tp, dense loss": (TENSOR_PARALLEL | DENSE, None),
    "cp": (CONTEXT_PARALLEL, None),
    "cp, sum over tokens": (CONTEXT_PARALLEL | {"calculate_per_token_loss": True}, None),
    "cp, packed": (CONTEXT_PARALLEL, packed(5, 11, 4, padded=(8, 12, 4))),
    "cp, packed, dense loss": (CONTEXT_PARALLEL | DENSE, packed(8, 12, 4)),
}


REAL = torch.tensor([*[1] * 5, *[0] * 3, *[1] * 11, 0, *[1] * 4]).bool()
"""Which tokens of "cp, packed" are no padding."""


def ranks(rank, device):
    """Both layers on one of two ranks, in each case."""
    on_this_device(setattr, device)
    results = {}
    for case, (changes, params) in RANK_CASES.items():
        config = make_config(**changes)
        parallel_state.initialize_model_parallel(
            config.tensor_model_parallel_size, context_parallel_size=config.context_parallel_size
        )
        whole, params = inputs(params).to(device), moved(params, device)
        places = places_of(rank, config, params)
        if case == "cp, packed":
            params = copy.copy(params)
            params.real_token_mask_q = REAL[places].to(device)
        results[case] = both(config, whole[places], params), places
        if params is not None:
            layer = make_layer(config, with_sparsemla(layer_spec(config)), device)
            replayed = run(layer, whole[places], replay_selections(copy.copy(params), lists()))
            results[case] += (replayed["out"],)
        parallel_state.destroy_model_parallel()
    return results


def inputs(params):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(TOKENS, 2 if params is None else 1, HIDDEN, generator=generator)


def places_of(rank, config, params):
    """The tokens of a rank in its order."""
    if config.context_parallel_size == 1:
        return torch.arange(TOKENS).view(2, -1)[rank]
    if params is None:
        return dsa_layout.build_zigzag_cp_local_positions(TOKENS, 2, rank, torch.device("cpu"))
    bounds, _ = dsa_layout.get_packed_qk_cu_seqlens(params)
    return dsa_layout.build_packed_allgather_cp_local_positions(
        bounds, 2, rank, torch.device("cpu")
    )


def moved(params, device):
    """A copy of packed parameters on a device."""
    if params is None:
        return None
    tensors = {name: x for name, x in vars(params).items() if isinstance(x, torch.Tensor)}
    return dataclasses.replace(params, **{name: x.to(device) for name, x in tensors.items()})


@pytest.fixture(scope="module", params=processes.RANK_DEVICES)
def both_ranks(request, tmp_path_factory):
    device = request.param
    return processes.on_two_ranks(tmp_path_factory.mktemp("two"), device, ranks, device)


@pytest.mark.parametrize("case", RANK_CASES)
def test_two_ranks(case, both_ranks):
    for results in both_ranks:
        (theirs, ours), *_ = results[case]
        assert_same(theirs, ours)
        assert theirs["loss"][0] > 0.01


@pytest.mark.parametrize("case", ["cp, packed", "cp, packed, dense loss"])
def test_two_ranks_replay(case, both_ranks):
    """Recorded lists name tokens of a sequence, whichever rank has them."""
    changes, params = RANK_CASES[case]
    config = make_config(**changes | {"context_parallel_size": 1})
    layer = make_layer(config, with_sparsemla(layer_spec(config)))
    x = inputs(params)
    whole = run(layer, x, replay_selections(copy.copy(params), lists()))["out"]
    bounds, _ = dsa_layout.get_packed_qk_cu_seqlens(params)
    own_place = torch.cat([torch.arange(n) for n in bounds.diff().tolist()])[:, None]
    seen = {0: lists()[0].where(lists()[0] <= own_place, -1)}
    assert not torch.equal(seen[0], lists()[0])
    masked = run(layer, x, replay_selections(copy.copy(params), seen))["out"]
    assert torch.equal(masked, whole)
    own = run(layer, x, copy.copy(params))["out"]
    assert (whole - own).abs().max() > 0.1 * own.abs().max()
    for results in both_ranks:
        _, places, out = results[case]
        assert_same({"out": whole[places]}, {"out": out})


def lists():
    """For layer 0 some earlier tokens of each token's sequence, by their positions."""
    generator = torch.Generator().manual_seed(3)
    return {0: torch.randint(-2, 9, (TOKENS, 5), generator=generator).sort(-1, descending=True)[0]}


def make_model(config, spec, **options):
    for layer in spec.layer_specs:
        on_cpu(layer.submodules.self_attention)
    torch.manual_seed(0)
    model = GPTModel(
        config,
        spec,
        vocab_size=32,
        max_sequence_length=TOKENS,
        position_embedding_type="none",
        **options,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attention" in name and "norm" not in name:
                parameter.mul_(6)
    return model


def train(model, params=None):
    """The losses, gradients and logged losses of a step."""
    tracker = dsa.DSAIndexerLossLoggingHelper.tracker
    tracker.clear()
    tracker["values"] = torch.zeros(LAYERS)
    ids = torch.randint(32, (1, TOKENS), generator=torch.Generator().manual_seed(4))
    places = torch.arange(TOKENS)[None]
    found = model(ids, places, None, labels=ids.roll(-1), packed_seq_params=params)
    found.sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"losses": found.detach(), "logged": tracker["values"], **grads}


SHARED = {"dsa_indexer_topk_freq": 2}


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("params", [None, packed(5, 12, 7)], ids=["whole", "packed"])
def test_model_that_shares_selections(sparse, params):
    """The whole model, by :func:`block_spec`, with indexers in every second layer."""
    config = make_config(dsa_indexer_use_sparse_loss=sparse, **SHARED)
    theirs = make_model(
        config, specs.get_transformer_block_with_experimental_attention_variant_spec(config)
    )
    ours = make_model(config, block_spec(config))
    assert [type(layer.self_attention.core_attention) for layer in ours.decoder.layers] == [
        SparseMLAttention
    ] * LAYERS
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    results = [train(model, copy.copy(params)) for model in (theirs, ours)]
    # Hidden states differ in their last bits, and so may an index query's rounding to bfloat16.
    assert_same(*results, tolerance=2**-11)
    assert (results[1]["logged"] > 0).tolist() == [True, False] * 2


def test_replay():
    """A model that replays its own selections has the same bits."""
    config, params = make_config(**SHARED), packed(5, 12, 7)
    model = make_model(config, block_spec(config))
    expected = train(model, params)
    rows = getattr(params, SparseMLAttention._HOLDER_ATTR)
    assert sorted(rows) == [1, 3]
    firsts = torch.tensor([*[0] * 5, *[5] * 12, *[17] * 7])[:, None]
    recorded = {
        number - 1: torch.where(each < 0, -1, each - firsts) for number, each in rows.items()
    }
    model.zero_grad()
    found = train(model, replay_selections(packed(5, 12, 7), recorded))
    assert_same(expected, found, 0)

    with torch.no_grad():  # other indexers select other tokens, but are not asked
        for name, parameter in model.named_parameters():
            if "indexer" in name:
                parameter.neg_()
    model.zero_grad()
    found = train(model, replay_selections(packed(5, 12, 7), recorded))
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=0, atol=0)
    model.zero_grad()
    assert not torch.equal(train(model, packed(5, 12, 7))["losses"], expected["losses"])


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ],
    ids=["attention", "layers"],
)
def test_recomputation(recompute, monkeypatch):
    """A layer that runs again has the same bits, also if it shares a selection."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    monkeypatch.setattr(random, "_get_all_rng_states", tuple)  # of CUDA
    monkeypatch.setattr(random, "_set_all_rng_states", lambda *states: None)
    runs, forward = [], SparseMLAttention.forward
    monkeypatch.setattr(
        SparseMLAttention, "forward", lambda *args, **kw: runs.append(0) or forward(*args, **kw)
    )
    plain, again = make_config(**SHARED), make_config(**SHARED, **recompute)
    expected = train(make_model(plain, block_spec(plain)), packed(5, 12, 7))
    assert len(runs) == LAYERS
    found = train(make_model(again, block_spec(again)), packed(5, 12, 7))
    assert len(runs) == 3 * LAYERS
    assert_same(expected, found, 0)


NAMES = {
    "model.embed_tokens": "embedding.word_embeddings",
    "model.norm": "decoder.final_layernorm",
    "model.layers": "decoder.layers",
    "lm_head": "output_layer",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.down_proj": "mlp.linear_fc2",
    "self_attn.indexer.k_norm": "self_attention.core_attention.indexer.k_norm",
    "self_attn.indexer.": "self_attention.core_attention.indexer.linear_",
    "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
    "self_attn.kv_a_layernorm": "self_attention.kv_layernorm",
    "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
    "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
    "self_attn.q_a_layernorm": "self_attention.q_layernorm",
    "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
    "self_attn.o_proj": "self_attention.linear_proj",
}
"""Parameters of transformers' DeepSeek-V3.2, and of Megatron's model."""


def megatron_parameters(parameters):
    """The parameters of a model of transformers, for Megatron."""
    found = {}
    for name, parameter in parameters.items():
        if "up_proj" in name:
            continue
        if "gate_proj" in name:
            parameter = torch.cat([parameter, parameters[name.replace("gate_proj", "up_proj")]])
            name = name.replace("gate_proj", "linear_fc1")
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        found[name] = parameter
    return found


def test_a_rollout_of_transformers_is_replayed():
    """Tokens of `generate`, whose rows are bfloat16, trained in float32 by Megatron."""
    pytest.importorskip("transformers")
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    from sparsemla.backends.transformers import enable

    sizes = {
        "vocab_size": 32,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "first_k_dense_replace": LAYERS,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": TOPK,
    }
    torch.manual_seed(0)
    policy = DeepseekV32ForCausalLM(DeepseekV32Config(**sizes, pad_token_id=0, eos_token_id=None))
    with torch.no_grad():
        for name, parameter in policy.eval().named_parameters():
            if "norm" not in name:
                parameter.mul_(6 if "self_attn" in name else 3)
    config = make_config(
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        layernorm_epsilon=1e-6,
        dsa_indexer_loss_coeff=0.0,
    )
    model = make_model(config, block_spec(config), share_embeddings_and_output_weights=False)
    model.load_state_dict(megatron_parameters(policy.state_dict()), strict=False)

    prompts, mask = torch.randint(1, 32, (2, 40)), torch.ones(2, 40, dtype=torch.int64)
    mask[0, :4] = 0
    with enable(policy, record_selections=True) as rollout:
        answers = policy.generate(prompts, attention_mask=mask, max_new_tokens=20, do_sample=False)
    recorded = split_selections(rollout.selections, mask.sum(1).tolist())
    sequences = [answers[0, 4:-1], answers[1, :-1]]
    about = {"model": "tiny", "topk": TOPK}
    sent = [
        SelectionRecord(score_dtype="bfloat16", selections=each, **about).to_bytes()
        for each in recorded
    ]
    read = [
        SelectionRecord.from_bytes(data).checked(num_tokens=len(ids), **about)
        for data, ids in zip(sent, sequences, strict=True)
    ]

    lengths = [len(each) for each in sequences]
    ids = torch.cat(sequences)[None]
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        with enable(policy):
            expected = torch.cat([policy(each[None]).logits for each in sequences], 1)
        with enable(policy, training=True):
            trained = policy(ids, position_ids=places, selections=pack_selections(read)).logits
        own = model(ids, places, None, packed_seq_params=packed(*lengths))
        params = replay_selections(packed(*lengths), pack_selections(read))
        replayed = model(ids, places, None, packed_seq_params=params)
    assert_same({"logits": trained}, {"logits": replayed}, 2**-15)  # another trainer
    errors = [
        (each.log_softmax(-1) - expected.log_softmax(-1)).abs().max() for each in (own, replayed)
    ]
    assert errors[1] < 0.02 < 0.1 < errors[0]


@pytest.mark.parametrize(
    ("selections", "message"),
    [
        ({0: torch.zeros(TOKENS, 2)}, "selections[0] must be int32 or int64 [T, K], got"),
        ({0: torch.zeros(TOKENS).int()}, "selections[0] must be int32 or int64 [T, K], got"),
        (
            {0: torch.zeros(3, 1).int(), 2: torch.zeros(4, 1).int()},
            "selections must have lists of one number of tokens, got [3, 4]",
        ),
        ({}, "selections must have lists of one number of tokens, got []"),
    ],
)
def test_replay_refuses_lists(selections, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replay_selections(packed(TOKENS), selections)


def test_replay_refuses():
    with pytest.raises(ValueError, match=r"qkv_format of 'thd' to replay selections, got 'sbhd'"):
        replay_selections(PackedSeqParams(qkv_format="sbhd"), lists())
    for changes, found, message in [
        (SHARED, {0: torch.zeros(TOKENS, 1).int()}, "a list for layer 2, got [0]"),
        ({}, {0: torch.zeros(3, 1).int()}, "selections[0] must have a row for each of the 24"),
        ({"mtp_num_layers": 1}, lists(), "mtp_num_layers must be None to replay selections, got 1"),
    ]:
        config = make_config(**changes)
        model = make_model(config, block_spec(config))
        with pytest.raises(ValueError, match=re.escape(message)):
            train(model, replay_selections(packed(TOKENS), found))


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("dsa_kernel_backend", "cudnn", "dsa_kernel_backend must be 'none': .*, got 'cudnn'"),
        ("attention_dropout", 0.1, "attention_dropout must be 0: .*, got 0.1"),
        ("kv_lora_rank", 513, "kv_lora_rank must be 1 to 512, got 513"),
    ],
)
def test_settings_are_refused(setting, value, message):
    config = make_config()
    setattr(config, setting, value)  # Megatron itself refuses some without CUDA
    with pytest.raises(ValueError, match=message):
        make_layer(config, with_sparsemla(layer_spec(config)))


def call(layer, **changes):
    """The core attention of a layer, with other arguments."""
    config = layer.config
    dims = config.kv_lora_rank + config.qk_pos_emb_head_dim
    arguments = {
        "query": torch.randn(TOKENS, 1, HEADS, dims),
        "key": torch.randn(TOKENS, 1, 1, dims),
        "value": None,
        "attention_mask": None,
        "x": torch.randn(TOKENS, 1, HIDDEN),
        "qr": torch.randn(TOKENS, 1, 32),
        "attn_mask_type": AttnMaskType.causal,
        "up_v_weight": torch.randn(HEADS, 16, 32),
    }
    return layer.core_attention(**arguments | changes)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("value", torch.zeros(3), r"value must be None in absorbed attention, got \[3\]"),
        ("attention_bias", torch.zeros(2), r"attention_bias must be None in .*, got \[2\]"),
        ("up_v_weight", None, "up_v_weight must be given: attention is absorbed, got None"),
        ("attn_mask_type", None, "attn_mask_type must be AttnMaskType.causal, got None"),
        ("key", torch.zeros(9, 1, 1, 48), "key must have the 24 tokens of query.*, got 9"),
        ("x", torch.zeros(9, 1, HIDDEN), "query must have 9 tokens, those of x .*, got 24"),
        (
            "packed_seq_params",
            PackedSeqParams(qkv_format="sbhd"),
            "packed_seq_params must have a qkv_format of 'thd', got 'sbhd'",
        ),
    ],
)
def test_arguments_are_refused(name, value, message):
    config = make_config()
    layer = make_layer(config, with_sparsemla(layer_spec(config)))
    tracker = dsa.DSAIndexerLossLoggingHelper.tracker
    tracker["values"] = torch.zeros(LAYERS)
    assert call(layer).shape == (TOKENS, 1, HEADS * 16)
    with pytest.raises(ValueError, match=message):
        call(layer, **{name: value})


def test_shared_selections_that_would_be_lost_are_refused():
    config = make_config(**SHARED)
    layer = make_layer(config, with_sparsemla(layer_spec(config)))
    core = layer.core_attention
    core.skip_topk, core.indexer, core.layer_number = True, None, 2
    with pytest.raises(ValueError, match=r"layer 2 must run after layer 1, .*, got layers \[\]"):
        call(layer)
    config.pipeline_model_parallel_size, config.recompute_granularity = 2, "full"
    with pytest.raises(ValueError, match="packed_seq_params or attention_mask must be given with"):
        call(layer)


def test_context_parallelism_is_by_allgather():
    config = make_config()
    pair = copy.copy(group())
    pair.cp = type("Pair", (), {"size": lambda self: 2, "rank": lambda self: 0})()
    spec = with_sparsemla(layer_spec(config))
    with pytest.raises(ValueError, match=r"cp_comm_type must be 'allgather' with 2 .*, got 'p2p'"):
        build_module(
            spec.submodules.core_attention,
            config=config,
            layer_number=1,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            pg_collection=pair,
        )


class ModelConfig:
    """As Megatron-LM's builder passes it to the function of `--spec`."""

    def __init__(self, transformer):
        self.transformer = transformer

    def __getattr__(self, name):
        return getattr(self.transformer, name)


def test_specs():
    """A copy is changed; Megatron-LM's `--spec` finds the function."""
    config = make_config()
    before = specs.get_transformer_block_with_experimental_attention_variant_spec(config)
    after = with_sparsemla(before)
    for spec, attention in ((before, dsa.DSAttention), (after, SparseMLAttention)):
        layers = [each.submodules.self_attention for each in spec.layer_specs]
        assert {each.submodules.core_attention.module for each in layers} == {attention}
    hybrid = with_sparsemla(hybrid_stack_spec).submodules.dsa_layer.submodules.self_attention
    assert hybrid.submodules.core_attention.module is SparseMLAttention
    assert import_module(("sparsemla.backends.megatron", "block_spec")) is block_spec
    layers = block_spec(ModelConfig(config), vp_stage=None).layer_specs
    found = {each.submodules.self_attention.submodules.core_attention.module for each in layers}
    assert (len(layers), found) == (LAYERS, {SparseMLAttention})
    with pytest.raises(ValueError, match="spec must have a DSAttention, got TransformerBlockSub"):
        with_sparsemla(after)
    config.experimental_attention_variant = None
    with pytest.raises(ValueError, match="experimental_attention_variant must be 'dsa', got None"):
        block_spec(config)


def test_other_versions_are_refused(monkeypatch):
    monkeypatch.setattr(package_info, "VERSION", (0, 20, 0, ""))
    monkeypatch.setattr(package_info, "__version__", "0.20.0")
    with pytest.raises(RuntimeError, match=r"must have Megatron-core 0\.19, got 0\.20\.0"):
        importlib.reload(sparsemla.backends.megatron)


def test_the_benchmark_compares_both_paths(run_python):
    code = "import sys; sys.path[:0] = sys.argv[1:]; import megatron_core as bench; "
    code += "raise SystemExit(bench.main(['--device', 'cpu']))"
    here = Path(__file__).parent
    done = run_python(code, str(here), str(here.parent / "benchmarks"))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert ["Megatron" in line for line in lines] == [True, True, False, False, False]
    assert all("sparsemla" in line for line in lines)
