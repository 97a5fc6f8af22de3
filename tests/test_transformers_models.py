"""Small random models of every type that one adapter serves, beside transformers' own attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from sparsemla import INDEX_FP8  # noqa: E402
from sparsemla.backends.transformers import enable  # noqa: E402
from sparsemla.backends.transformers.cache import CACHE  # noqa: E402

PAD = 63

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 8,  # no experts: rounding flips their choice, too
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "max_position_embeddings": 4096,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": True,
}

INDEXER: dict[str, Any] = {"index_topk": 512, "index_n_heads": 4, "index_head_dim": 32}

LLAMA4: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 256.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}

LARGE4: dict[str, Any] = INDEXER | {
    "num_hidden_layers": 5,
    "kv_source_layers": [0, 0, 2, 3, 3],
    "no_rope_layers": [1, 1, 1, 0, 0],
    "indexer_types": ["full", "shared", "full", "full", "full"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
"""Rows of one layer for two, with RoPE and without; an indexer without RoPE, too."""

LONGCAT: dict[str, Any] = {
    "num_layers": 2,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 16,
    "n_routed_experts": 2,
    "zero_expert_num": 1,
    "moe_topk": 3,
    "routed_scaling_factor": 1.0,
}
"""Two layers of two attention modules each."""

DOTS3: dict[str, Any] = INDEXER | {
    "num_hidden_layers": 3,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "mlp_layer_types": ["dense"] * 3,
    "sliding_window": 11,
    "head_dim": 40,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 40,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 24,
    "swa_v_head_dim": 12,
}

VISION: dict[str, dict[str, Any]] = {
    "kimi_k25": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "pos_emb_height": 2,
        "pos_emb_width": 2,
    },
    "mistral_large4": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 32,
    },
}

MODEL_CLASSES = {
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "mistral4": "Mistral4ForCausalLM",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
}

LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense"] * 2,
}

MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "deepseek_v3": {},
    "kimi_k25": {},
    "sarvam_mla": {"q_lora_rank": None, "head_dim": 16},
    "axk1": {},
    "youtu": {},
    "glm4_moe_lite": {"mlp_layer_types": ["dense"] * 2},
    "mistral4": {"rope_parameters": LLAMA4},
    "minicpm3": {"scale_emb": 1, "scale_depth": 2**0.5},
    "longcat_flash": LONGCAT,
    "kimi_linear": LINEAR,
    "bailing_hybrid": LINEAR,
    "deepseek_v32": INDEXER,
    "axk2": INDEXER,
    "glm_moe_dsa": INDEXER | {"indexer_types": ["full", "shared"]},
    "hy_v4": INDEXER | {"mlp_layer_types": ["dense"] * 2},
    "mistral_large4": LARGE4,
    "dots3_note_text": DOTS3,
}
"""Fields of configurations that differ from :data:`SIZES`, by ``model_type``."""


def make_model(model_type: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A model with logits of about unit size that attention changes.

    Skips where this version of transformers does not have the type.
    """
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    settings = SIZES | MODELS[model_type] | sizes
    if model_type in ("kimi_k25", "mistral_large4"):  # models that read images, too
        kind = transformers.CONFIG_MAPPING[model_type]
        config = kind(text_config=settings, vision_config=VISION[model_type])
    else:
        config = transformers.AutoConfig.for_model(model_type, **settings)
    config._attn_implementation = "eager"
    kind = MODEL_CLASSES.get(model_type)
    if kind is None:
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    else:
        model = getattr(transformers, kind)(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, 1, generator=generator)
            elif parameter.dim() > 1 and "conv" not in name:
                modest = "down_proj" in name or "lm_head" in name
                deviation = (0.3 if modest else 1.0) * parameter.shape[-1] ** -0.5
                parameter.normal_(0, deviation, generator=generator)
            elif any(part in name for part in ("norm", "alpha", "softmax_scaling")):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


def tokens(batch_size: int, length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, PAD, (batch_size, length), generator=generator)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


def error(got: Tensor, expected: Tensor) -> float:
    """The root mean square error, relative to the deviation of the logits."""
    assert got.isfinite().all()
    return float((got - expected).pow(2).mean().sqrt() / expected.std())


ROUNDING = 0.02
"""Of bfloat16 rows, queries and products in two to five layers. Attention without one of the parts
of :data:`WRONG` differs by more than four times as much."""


def test_prefill_decode_and_chunks(model, device):
    model, ids = copy.deepcopy(model).to(device), tokens(2, 60).to(device)
    expected = model(ids).logits
    with enable(model, page_size=8) as handle:
        assert error(model(ids).logits, expected) < ROUNDING
        cache = handle.new_cache(2)
        pieces = [
            model(part, **{CACHE: cache}).logits for part in ids.split([30, 1, 1, 1, 20, 7], 1)
        ]
        assert error(torch.cat(pieces, 1), expected) < ROUNDING
    assert torch.equal(model(ids).logits, expected)


def test_a_padded_row_equals_the_row_alone(model):
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, :13], ids[1, :13] = 0, PAD
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    expected = [model(ids[:1]).logits, model(ids[1:, 13:]).logits]
    with enable(model, page_size=8) as handle:
        got = model(ids, attention_mask=mask, position_ids=positions).logits
        assert handle.cache.lengths.tolist() == [40, 27]
        assert error(got[:1], expected[0]) < ROUNDING
        assert error(got[1:, 13:], expected[1]) < ROUNDING


def test_generate_continues_on_its_cache(model):
    """The second call computes its own tokens only; logits equal those of the whole text."""
    ids = tokens(2, 20)
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with enable(model, page_size=8) as handle:
        first = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **options
        )
        chat = torch.cat([first.sequences, tokens(2, 5, seed=2)], 1)
        second = model.generate(
            chat,
            attention_mask=torch.ones_like(chat),
            max_new_tokens=3,
            **{CACHE: handle.cache},
            **options,
        )
    whole = model(second.sequences).logits
    got = torch.stack([*first.logits, *second.logits], 1)
    columns = [*range(19, 25), *range(30, 33)]
    assert error(got, whole[:, columns]) < ROUNDING


ONE_LAYER: dict[str, tuple[str, dict[str, Any]]] = {
    "with RoPE": ("mistral_large4", {"no_rope_layers": [1]}),
    "without RoPE": ("mistral_large4", {"no_rope_layers": [0]}),
    "dots3_note": ("dots3_note_text", {"layer_types": ["indexed_attention"]}),
}
"""Models of a layer, so that roundings of attention reach no indexer."""


@pytest.mark.parametrize("index_format", [None, INDEX_FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("model_type", "sizes"), ONE_LAYER.values(), ids=ONE_LAYER)
def test_selections_equal_transformers(model_type, sizes, index_format):
    """The same bfloat16 keys and queries select the same tokens; FP8 ones 97 of 100.

    transformers rotates Dots3Note's in float32. Without one of the parts or another rotation, less
    than nine of ten are the same.
    """
    one = {"num_hidden_layers": 1, "mlp_layer_types": ["dense"]}
    if model_type == "mistral_large4":
        one |= {"kv_source_layers": [0], "indexer_types": ["full"]}
    index = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 128}
    model = make_model(model_type, torch.bfloat16, vocab_size=200, **one, **index, **sizes)
    ids = torch.randperm(200, generator=torch.Generator().manual_seed(1))[None]  # no equal keys
    base = getattr(model.base_model, "language_model", model.base_model)
    theirs: list[Tensor] = []
    indexer = base.layers[0].self_attn.indexer
    hook = indexer.register_forward_hook(lambda *a: theirs.append(a[-1][0]))
    model(ids)
    hook.remove()
    with enable(model, index_format=index_format, record_selections=True) as handle:
        model(ids)
    chosen, same = handle.selections[0][0], 0
    for mine, their in zip(chosen.tolist(), theirs[0].tolist(), strict=True):
        same += len({token for token in mine if token >= 0} & set(their))
    least = 0.95 if index_format else 0.99 if model_type == "dots3_note_text" else 1
    assert same / (chosen >= 0).sum() >= least


def test_fp8_rows_beside_rows_without_rope(device):
    """Rows of 656 bytes with RoPE, of 528 without; only rows of owners are kept."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    model, ids = make_model("mistral_large4", **sizes).to(device), tokens(2, 50).to(device)
    expected = model(ids).logits
    with enable(model, cache_format="fp8_ds_mla", page_size=8) as handle:
        got = model(ids).logits
        rows, keys = handle.cache.formats
        assert rows == ("fp8_ds_mla", "fp8_ds_mla", "e4m3_512v512b128")
        assert keys == ("index_fp8",) * 4
        assert handle.cache.bytes_per_token == 2 * 656 + 528 + 4 * 132
        assert "rows: fp8_ds_mla, e4m3_512v512b128;" in repr(handle)
    assert ROUNDING / 4 < error(got, expected) < 0.1


@pytest.mark.parametrize("model_type", ["mistral_large4", "dots3_note_text", "longcat_flash"])
def test_a_static_cache_and_other_rows(model_type, device):
    """Rows of a cache may be exchanged, copied and forgotten; its memory stays where it is."""
    model, ids = make_model(model_type).to(device), tokens(2, 30).to(device)
    expected = model(ids).logits
    with enable(model, page_size=8) as handle:
        cache = handle.new_cache(2, max_length=32)
        model(ids[:, :20], **{CACHE: cache})
        addresses = [tensor.data_ptr() for tensor in cache._tensors()]
        cache.crop(-5)
        cache.reorder_cache(torch.tensor([1, 0], device=device))
        model(ids.flip(0)[:, 15:29], **{CACHE: cache})
        last = model(ids.flip(0)[:, 29:], **{CACHE: cache}).logits
        assert addresses == [tensor.data_ptr() for tensor in cache._tensors()]
    assert error(last.flip(0), expected[:, 29:]) < ROUNDING


@pytest.mark.parametrize("model_type", ["kimi_linear", "bailing_hybrid"])
def test_states_of_linear_attention_go_forward_only(model_type):
    model, ids = make_model(model_type), tokens(2, 12)
    with enable(model) as handle:
        model(ids)
        with pytest.raises(ValueError, match="linear attention has no states of earlier ones"):
            handle.cache.crop(-1)
        with pytest.raises(ValueError, match="the states of linear attention know no other"):
            model(ids[:1], cu_seq_lens_q=torch.tensor([0, 5, 12]))


@pytest.mark.parametrize(
    ("model_type", "sizes", "message"),
    [
        (
            "mistral_large4",
            {"no_rope_layers": [1, 0, 1, 0, 0]},
            r"latest earlier layer without RoPE .* kv_source_layers\[1\], and has none, got 0",
        ),
        (
            "mistral_large4",
            {"kv_source_layers": [0, 0, 2, 2, 0], "no_rope_layers": [1] * 5},
            r"latest earlier layer with RoPE .* kv_source_layers\[4\], 2, got 0",
        ),
        ("mistral4", {"rope_parameters": {"rope_type": "default"}}, "got None and None"),
    ],
    ids=["no owner", "another owner", "scale"],
)
def test_configurations_that_are_refused(model_type, sizes, message):
    with pytest.raises(ValueError, match=message):
        enable(make_model(model_type, **sizes))


def test_unknown_parts_are_refused():
    """A version of transformers that adds a part to a known type is not served without it."""
    model = make_model("axk1")
    attention = model.model.layers[1].self_attn
    attention.head_mixer = torch.nn.Linear(4, 4)
    attention.temperature = torch.nn.Parameter(torch.ones(4))
    unknown = r"got temperature, head_mixer in layers\.1\.self_attn"
    with pytest.raises(ValueError, match=unknown):
        enable(model)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v41", "its layers share entries, and transformers has no class of it"),
        ("hy_v4_vl_text", "its positions have three axes"),
        ("llama", "it has no kv_lora_rank"),
        ("some_mla", "no test compares its attention"),
    ],
)
def test_other_types_are_refused(model_type, reason):
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)
    config.model_type = model_type
    if model_type == "some_mla":
        config.kv_lora_rank = 8
    with pytest.raises(ValueError, match=f"got '{model_type}': .*{reason}"):
        enable(model)
