"""The transformers backend: the same model with and without this package's attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from devices import spread
from sparsemla import (
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    INDEX_FP8,
    MLALayer,
    PagedCache,
    bf16_format,
    decode_branch,
    e4m3_format,
    explain,
    plan_batch,
)

transformers = pytest.importorskip("transformers")

from transformers.generation import CompileConfig  # noqa: E402

from sparsemla.backends.transformers import LatentCache, disable, enable  # noqa: E402
from sparsemla.backends.transformers.cache import CACHE  # noqa: E402
from sparsemla.backends.transformers.layers import Example  # noqa: E402
from sparsemla_lab.testing.models import CLASSES, copying_model  # noqa: E402

TOPK = 16
ALL = 64  # a top-k that no context of these tests exceeds
PAD = 255


def make_model(model_type: str = "deepseek_v32", **overrides: Any) -> Any:
    """A small float32 model with real attention geometry and clear margins between logits.

    Embeddings of unit standard deviation and tied output embeddings: each position predicts its
    own byte, clearly, and attention moves the logits without deciding between near ties.
    """
    name = CLASSES[model_type]
    settings: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 8,  # no experts: rounding flips their choice, too
        "max_position_embeddings": 4096,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
        "attn_implementation": "sdpa",
    }
    if model_type != "deepseek_v3":
        settings |= {"index_topk": ALL, "index_n_heads": 16, "index_head_dim": 128}
    if model_type == "hy_v4":
        num_layers = overrides.get("num_hidden_layers", 2)
        settings |= {"mlp_layer_types": ["dense"] * num_layers, "attn_implementation": "eager"}
    config = getattr(transformers, f"{name}Config")(**(settings | overrides))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                deviation = parameter.shape[-1] ** -0.5
                deviation = 1.0 if "embed_tokens" in parameter_name else deviation
                deviation *= 0.3 if "down_proj" in parameter_name else 1.0
                parameter.normal_(0, deviation, generator=generator)
            elif (
                parameter_name.endswith(("layernorm.weight", "sinks")) or "k_norm" in parameter_name
            ):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(batch_size: int, length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (batch_size, length), generator=generator)


@pytest.fixture(scope="module")
def shared_model() -> Any:
    return make_model()


@pytest.fixture
def model(shared_model: Any) -> Iterator[Any]:
    with torch.no_grad():
        yield shared_model
    assert "forward" not in vars(shared_model.model), "a test left the model enabled"


def set_topk(model: Any, topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn.indexer, "index_topk", topk)


def assert_close(got: Tensor, expected: Tensor, *, rms: float) -> None:
    """Root mean square error relative to the logits' deviation, and the same top-1 everywhere.

    Where two indexer scores agree to bfloat16 (to e4m3), one of TOPK tokens (some of them) may
    differ: with a selection, the mean over some positions is bounded by 0.04 (0.2). Without one
    (all tokens, or the same tokens on both sides) only roundings differ: of queries and cached rows
    to bfloat16, 0.006, or of rows to e4m3, 0.06.
    """
    assert got.isfinite().all()
    error = (got - expected).pow(2).mean().sqrt() / expected.std()
    assert error < rms, float(error)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    ("cache_format", "topk", "rms"),
    [
        (BF16_576, ALL, 0.006),
        (BF16_576, TOPK, 0.04),
        (FP8_DS_MLA, ALL, 0.06),
        (FP8_DS_MLA, TOPK, 0.2),
    ],
)
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_prefill_and_each_decode_step(model, monkeypatch, cache_format, topk, rms, page_size):
    set_topk(model, topk, monkeypatch)
    ids = tokens(2, 60)
    expected = model(ids).logits
    with enable(model, cache_format=cache_format, page_size=page_size) as handle:
        outputs = [model(ids[:, :50])]
        for column in range(50, 60):
            past = outputs[-1].past_key_values
            assert past is handle.cache
            assert past.get_seq_length() == column
            outputs.append(model(ids[:, column : column + 1], past_key_values=past))
    logits = [output.logits for output in outputs]
    assert_close(logits[0], expected[:, :50], rms=rms)
    assert_close(torch.cat(logits[1:], 1), expected[:, 50:], rms=rms)


@pytest.mark.parametrize(("cache_format", "rms"), [(BF16_576, 0.006), (FP8_DS_MLA, 0.06)])
def test_attention_over_the_same_selection(model, monkeypatch, cache_format, rms):
    set_topk(model, TOPK, monkeypatch)
    ids = tokens(1, 100)
    with enable(model, cache_format=cache_format, record_selections=True) as handle:
        got = model(ids).logits
    own = torch.arange(100, dtype=torch.int32)[:, None]
    for layer_idx, selection in handle.selections[0].items():
        chosen = selection.where(selection >= 0, own)[None]  # a token that is there already
        indexer = model.model.layers[layer_idx].self_attn.indexer
        monkeypatch.setattr(indexer, "forward", lambda *args, chosen=chosen, **kwargs: chosen)
    assert_close(got, model(ids).logits, rms=rms)


def test_steps_of_several_tokens(model):
    ids = tokens(2, 60)
    with enable(model) as handle:
        expected = model(ids).logits
        cache = handle.new_cache(2)
        pieces = [
            model(part, past_key_values=cache).logits for part in ids.split([41, 1, 11, 7], 1)
        ]
        assert_close(torch.cat(pieces, 1), expected, rms=0.003)


WITH_INDEXER = [model_type for model_type in CLASSES if model_type != "deepseek_v3"]


@pytest.mark.parametrize(
    ("model_type", "dtype", "index_format", "least"),
    [
        # bfloat16 keys and queries; a wrong rotation leaves less than half
        *((model_type, torch.float32, None, 0.97) for model_type in WITH_INDEXER),
        # the same keys and queries, bit for bit
        *((model_type, torch.bfloat16, None, 1.0) for model_type in WITH_INDEXER),
        ("hy_v4", torch.float32, INDEX_FP8, 0.9),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_selections_equal_transformers(model_type, dtype, index_format, least):
    # One layer, so that different roundings of attention reach no indexer.
    num_layers = 2 if dtype == torch.float32 else 1
    model = make_model(model_type, index_topk=TOPK, num_hidden_layers=num_layers).to(dtype)
    ids = tokens(1, 200)
    theirs: list[Tensor] = []
    hooks = [
        layer.self_attn.indexer.register_forward_hook(lambda *a: theirs.append(a[-1][0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
        for hook in hooks:
            hook.remove()
        with enable(model, index_format=index_format, record_selections=True) as handle:
            model(ids)
    (ours,) = handle.selections
    for layer_idx in range(num_layers):
        assert ours[layer_idx].shape == (200, TOPK)
        same = 0
        for position, row in enumerate(ours[layer_idx].tolist()):
            mine = [index for index in row if index >= 0]
            assert mine == sorted(set(mine))
            assert len(mine) == min(position + 1, TOPK)
            assert mine[-1] <= position
            same += len(set(mine) & set(theirs[layer_idx][position].tolist()))
        assert same / (ours[layer_idx] >= 0).sum() >= least


@pytest.mark.parametrize("given", ["position_ids", "no position_ids"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_results(model, side, given):
    ids = tokens(2, 40)
    padded, mask = ids.clone(), torch.ones_like(ids)
    hidden = slice(0, 11) if side == "left" else slice(29, 40)
    short = ids[1:, 11:] if side == "left" else ids[1:, :29]
    padded[1, hidden], mask[1, hidden] = PAD, 0
    extra = {}
    if given == "position_ids":
        extra["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    with enable(model) as handle:
        batch = model(padded, attention_mask=mask, **extra)
        assert handle.cache.lengths.tolist() == [40, 29]
        alone = [model(ids[:1]).logits[0], model(short).logits[0]]
    for row in range(2):
        # Without position_ids a left-padded row is rotated from 11 on; only distances count.
        assert_close(batch.logits[row][mask[row].bool()], alone[row], rms=0.006)
    assert batch.logits.isfinite().all()


def test_a_left_padded_row_takes_no_slots_for_padding(model):
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, :35] = 0
    with enable(model, page_size=8) as handle:
        model(ids, attention_mask=mask)
        cache = handle.cache
        rows = cache.latents[0].data[cache.page_table[1].long()].flatten(0, 1)
        assert rows[:5].any(-1).all()
        assert not rows[5:].any()


def test_a_row_of_padding_only(model):
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0] = 0
    with enable(model):
        batch = model(ids, attention_mask=mask).logits
        assert_close(batch[1], model(ids[1:]).logits[0], rms=0.006)
        assert model(ids, attention_mask=mask * 0).logits.isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"prefill_chunk_size": 16},
        {"do_sample": True, "top_k": 5},
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "num_beams": 3},
    ],
    ids=str,
)
def test_generate_gives_the_same_tokens(model, options):
    ids = tokens(2, 40)
    ids[1, :10] = PAD
    arguments = {"attention_mask": (ids != PAD).long(), "max_new_tokens": 12, **options}
    torch.manual_seed(0)
    expected = model.generate(ids, **arguments)
    torch.manual_seed(0)
    with enable(model, page_size=8):
        assert torch.equal(model.generate(ids, **arguments), expected)


def without_attention(model: Any) -> Any:
    """The model with attention that adds nothing."""
    changed = copy.deepcopy(model)
    for layer in changed.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    return changed


@pytest.mark.parametrize(
    ("model_type", "dtype", "num_tokens"),
    [
        ("deepseek_v32", torch.bfloat16, 512),
        ("deepseek_v32", torch.float32, 128),
        ("deepseek_v3", torch.float32, 128),
    ],
    ids=str,
)
def test_tokens_equal_eager_attention(model_type, dtype, num_tokens, device):
    """Greedy generation by a model with wide margins, for a batch with left padding.

    Its two best logits differ by at least 18, at the median by 34; our logits differ by up to 0.7.
    Without attention 2 % of the tokens are right.
    """
    model: Any = copying_model(model_type, dtype=dtype).to(device)
    ids = (tokens(2, 60) % 127 + 1).to(device)
    ids[1, :15] = 0
    arguments: dict[str, Any] = {
        "attention_mask": (ids != 0).long(),
        "max_new_tokens": num_tokens,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    with torch.no_grad():
        expected = model.generate(ids, **arguments)
        with enable(model) as handle:
            got = model.generate(ids, **arguments)
            assert handle.cache.lengths.tolist() == [59 + num_tokens, 44 + num_tokens]
        assert torch.equal(got.sequences, expected.sequences)

        logits, ours = (torch.stack(output.logits, 1).float() for output in (expected, got))
        best = logits.topk(2, -1).values
        assert (best[..., 0] - best[..., 1]).min() > 17
        assert (ours - logits).abs().max() < 1

        mask = torch.nn.functional.pad(arguments["attention_mask"], (0, num_tokens - 1), value=1)
        blind = without_attention(model)(expected.sequences[:, :-1], attention_mask=mask).logits
        right = blind[:, 59:].argmax(-1) == expected.sequences[:, 60:]
        assert right.float().mean() < 0.05


@pytest.mark.parametrize("model_type", ["axk2", "hy_v4"])
def test_relatives_choose_the_same_tokens(model_type):
    """Each generated token is transformers' choice after the same tokens, by a margin of 18.

    The bfloat16 model and its eager attention choose the same tokens.
    """
    model: Any = copying_model(model_type)
    ids = tokens(1, 60) % 127 + 1
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 120, "do_sample": False}
    with torch.no_grad():
        with enable(model):
            text = model.generate(ids, **arguments)
        for dtype in (torch.float32, torch.bfloat16):
            logits = model.to(dtype)(text[:, :-1]).logits[:, 59:].float()
            with enable(model):
                ours = model(text[:, :-1]).logits[:, 59:].float()
            best = logits.topk(2, -1)
            assert torch.equal(best.indices[..., 0], text[:, 60:])
            assert (best.values[..., 0] - best.values[..., 1]).min() > 17
            assert (ours - logits).abs().max() < 1


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"q_lora_rank": None, "rope_interleave": False},
        {"attention_bias": True, "kv_lora_rank": 96, "qk_rope_head_dim": 32},
    ],
    ids=["defaults", "no query rank, halves", "biases, other sizes"],
)
def test_dense_models(overrides):
    model = make_model("deepseek_v3", **overrides)
    ids, mask = tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :11] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=positions).logits
        with enable(model, page_size=7) as handle:
            assert handle.new_cache(1).index_keys == {}
            cache, outputs = None, []
            for part in torch.arange(60).split([40, 1, 1, 13, 1, 1, 1, 2]):
                output = model(
                    ids[:, part],
                    attention_mask=mask[:, : part[-1] + 1],
                    position_ids=positions[:, part],
                    past_key_values=cache,
                )
                cache = output.past_key_values
                outputs.append(output.logits)
    real = mask.bool()
    assert_close(torch.cat(outputs, 1)[real], expected[real], rms=0.006)


class Calls(TorchDispatchMode):
    """Names of the operators that ran and begin with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith(self.prefix):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_decode_step_of_a_dense_model_is_the_decode_branch():
    model = make_model("deepseek_v3", num_hidden_layers=1)
    ids = tokens(2, 10)
    with torch.no_grad(), enable(model) as handle:
        past = model(ids[:, :9]).past_key_values
        with Calls("sparsemla::") as step:
            model(ids[:, 9:], past_key_values=past)
        attention = model.model.layers[0].self_attn
        layer = MLALayer(
            *handle._layers.absorbed[0].weights,
            attention.kv_a_layernorm.weight,
            torch.ones(10, 64),
            attention.scaling,
        )
        table = past.page_table
        plan = plan_batch([1, 1], [10, 10], table, page_size=64, workspace_rows=None)
        q, kv = torch.randn(2, 4, 192).bfloat16(), torch.randn(2, 576).bfloat16()
        with Calls("sparsemla::") as branch:
            decode_branch(q, kv, past.latents[0], layer, plan)
    assert step.names == branch.names


def test_indexers_of_other_sizes_are_quantised_too(model):
    small = make_model(index_head_dim=96, kv_lora_rank=96)
    ids = tokens(1, 50)
    with torch.no_grad():
        expected = small(ids).logits
        with enable(small, cache_format=e4m3_format(160, 96, 32)) as handle:
            assert_close(small(ids).logits, expected, rms=0.08)
            assert handle.cache.formats[1] == ("e4m3_96v96b96",) * 2


class TestContinuing:
    """Cached columns are not computed again."""

    @pytest.fixture
    def columns(self, model, monkeypatch):
        """The columns that each forward computes."""
        seen: list[int] = []
        hook = model.model.embed_tokens.register_forward_hook(
            lambda module, args, output: seen.append(args[0].shape[1])
        )
        yield seen
        hook.remove()

    @pytest.mark.parametrize("max_length", [None, 64])
    def test_a_second_turn(self, model, columns, max_length):
        first, second = tokens(1, 30), tokens(1, 9, seed=2)
        options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
        with enable(model, page_size=8) as handle:
            cache = handle.new_cache(1, max_length)
            mask = torch.ones_like(first)
            turn = model.generate(first, attention_mask=mask, past_key_values=cache, **options)
            chat = torch.cat([turn.sequences, second], 1)
            mask = torch.ones_like(chat)
            expected = model.generate(chat, attention_mask=mask, **options).sequences
            columns.clear()
            turn = model.generate(
                chat, attention_mask=mask, past_key_values=turn.past_key_values, **options
            )
            assert turn.past_key_values is cache
        # The last token of an answer has not been through the model yet.
        assert columns == [10, 1, 1, 1, 1]
        assert torch.equal(turn.sequences, expected)

    def test_a_batch_whose_rows_ended_at_different_columns(self, model):
        """Padding after an answer was computed like tokens; the next mask hides it."""
        ids, more = tokens(2, 30), tokens(2, 12, seed=2)
        mask = torch.ones(2, 42, dtype=torch.long)
        mask[0, :4], mask[1, 25:30] = 0, 0
        with enable(model, page_size=8):
            expected = model(
                torch.cat([ids, more], 1),
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp_min(0),
            ).logits[:, 30:]
            unaware = mask[:, :30].clone()
            unaware[1] = 1
            cache = model(
                ids,
                attention_mask=unaware,
                position_ids=(unaware.cumsum(1) - 1).clamp_min(0),
            ).past_key_values
            logits = model(
                more,
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1)[:, 30:],
                past_key_values=cache,
            ).logits
            assert cache.lengths.tolist() == [38, 37]
        assert_close(logits, expected, rms=0.006)

    @pytest.mark.parametrize("max_length", [None, 64])
    def test_one_new_column_after_padding(self, model, max_length):
        """As with several new columns, the mask hides the latest of a row or is refused."""
        ids, mask = tokens(2, 31), torch.ones(2, 31, dtype=torch.long)
        mask[0, :4], mask[1, 25:30] = 0, 0
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        last = {"position_ids": positions[:, 30:]}
        with enable(model, page_size=8) as handle:
            expected = model(ids, attention_mask=mask, position_ids=positions).logits[:, 30:]
            unaware = mask[:, :30].clone()
            unaware[1] = 1
            at = (unaware.cumsum(1) - 1).clamp_min(0)
            cache = handle.new_cache(2, max_length)
            model(ids[:, :30], attention_mask=unaware, position_ids=at, past_key_values=cache)
            before, between = cache.lengths.tolist(), mask.clone()
            between[0, 10] = 0
            for wrong, message in (
                (torch.ones(2, 31), "as in the steps before"),
                (between, "as in the steps before"),
                (torch.ones(2, 30), r"got \[2, 30\]"),
                (torch.ones(2, 32), r"got \[2, 32\]"),
                (torch.ones(2, 0), r"got \[2, 0\]"),
            ):
                with pytest.raises(ValueError, match=message):
                    model(ids[:, 30:], attention_mask=wrong, past_key_values=cache, **last)
                assert cache.lengths.tolist() == before
            logits = model(ids[:, 30:], attention_mask=mask, past_key_values=cache, **last).logits
            assert cache.lengths.tolist() == [27, 26]
        assert_close(logits, expected, rms=0.006)

    @pytest.mark.parametrize("max_length", [None, 64])
    def test_generate_after_padding(self, model, max_length):
        """A turn that ends at once, then a turn with this end as its only new column."""
        ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
        mask[1, 25:29] = 0
        options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
        with enable(model, page_size=8) as handle:
            expected = model.generate(ids, attention_mask=mask, **options).sequences
            cache = handle.new_cache(2, max_length)
            model(ids[:, :29], past_key_values=cache)
            got = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
            assert got.past_key_values is cache
            assert cache.lengths.tolist() == [35, 31]
        assert torch.equal(got.sequences, expected)

    @pytest.mark.parametrize("max_length", [None, 64])
    @pytest.mark.parametrize("columns_kept", [10, 12])
    def test_generate_without_a_new_column(self, model, max_length, columns_kept):
        """transformers would append the whole chat to the cache a second time."""
        ids = tokens(1, 12)
        options = {"attention_mask": torch.ones_like(ids[:, :10]), "max_new_tokens": 4}
        with enable(model, page_size=8) as handle:
            expected = model.generate(ids[:, :10], **options)
            cache = handle.new_cache(1, max_length)
            model(ids[:, :columns_kept], past_key_values=cache)
            with pytest.raises(
                ValueError, match=rf"more columns than the {columns_kept} that .* holds, got 10;"
            ):
                model.generate(ids[:, :10], past_key_values=cache, **options)
            cache.crop(9 - columns_kept)  # the message's advice
            assert torch.equal(
                model.generate(ids[:, :10], past_key_values=cache, **options), expected
            )

    def test_positions_that_start_over(self, model):
        """As ``generate(prefill_chunk_size=...)`` gives them before transformers 5.23."""
        ids, positions = tokens(1, 30), torch.arange(30)[None]
        with enable(model, page_size=8) as handle:
            expected = model(ids).logits[:, 20:]
            cache = handle.new_cache(1)
            model(ids[:, :20], past_key_values=cache)
            with pytest.raises(ValueError, match=r"position_ids must ascend .* after 20 tokens"):
                model(ids[:, :4], position_ids=positions[:, :4], past_key_values=cache)
            assert cache.lengths.tolist() == [20]
            rest = {"position_ids": positions[:, 20:], "past_key_values": cache}
            assert_close(model(ids[:, 20:], **rest).logits, expected, rms=0.003)

    @pytest.mark.parametrize("max_length", [None, 64])
    def test_decode_steps_of_generate_compare_no_past_mask(self, model, max_length):
        ids = tokens(2, 10)
        ids[1, :3] = PAD
        with enable(model, page_size=8) as handle:
            cache = handle.new_cache(2, max_length)
            with Calls("aten::equal") as compared:
                model.generate(
                    ids,
                    attention_mask=(ids != PAD).long(),
                    past_key_values=cache,
                    max_new_tokens=5,
                )
        assert compared.names == []

    @pytest.mark.parametrize("max_length", [None, 64])
    @pytest.mark.parametrize("copied", [False, True])
    def test_prefix_computed_in_inference_mode(self, model, max_length, copied):
        ids = tokens(2, 30)
        arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5}
        with enable(model, page_size=8) as handle:
            expected = model.generate(ids, **arguments)
            with torch.inference_mode():
                cache = handle.new_cache(2, max_length)
                model(ids[:, :20], past_key_values=cache)
                cache.crop(-1)
                cache.reorder_cache(torch.tensor([0, 1]))
                if max_length is None:
                    cache.batch_repeat_interleave(2)
                    cache.batch_select_indices(torch.tensor([0, 2]))
                if copied:
                    cache = copy.deepcopy(cache)
            got = model.generate(ids, past_key_values=cache, **arguments)
            assert not any(tensor.is_inference() for tensor in cache._tensors())
        assert torch.equal(got, expected)

    def test_one_prefix_for_several_prompts(self, model, columns):
        prefix, prompts = tokens(1, 30), tokens(3, 8, seed=2)
        with enable(model, page_size=8) as handle:
            shared = model(prefix).past_key_values
            expected = model(torch.cat([prefix.expand(3, -1), prompts], 1)).logits[:, 30:]
            columns.clear()
            each = [
                model(prompt[None], past_key_values=copy.deepcopy(shared)).logits
                for prompt in prompts
            ]
            assert shared.get_seq_length() == 30
            shared.batch_repeat_interleave(3)
            together = model(prompts, past_key_values=shared).logits
            assert handle.cache is shared
        assert columns == [8, 8, 8, 8]
        assert_close(torch.cat(each), expected, rms=0.003)
        assert_close(together, expected, rms=0.003)

    def test_a_static_cache_is_cropped_reset_and_reordered_in_place(self, model):
        ids = tokens(2, 20)
        with enable(model, page_size=8) as handle:
            expected = model(ids).logits
            cache = handle.new_cache(2, max_length=30)
            addresses = [tensor.data_ptr() for tensor in cache._tensors()]
            for rows in ([0, 1], [1, 0]):
                model(ids[:, :15], past_key_values=cache)
                cache.crop(-5)
                assert int(cache.get_seq_length()) == 10
                cache.reorder_cache(torch.tensor(rows))
                logits = model(ids[rows, 10:], past_key_values=cache).logits
                assert_close(logits, expected[rows, 10:], rms=0.003)
                cache.reset()
            assert addresses == [tensor.data_ptr() for tensor in cache._tensors()]


class TestCompiled:
    """One graph for every decode step, however long the rows have become."""

    @pytest.fixture(autouse=True)
    def nothing_compiled(self):
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        ("model_type", "overrides"),
        [("glm_moe_dsa", {"indexer_types": ["full", "shared"]}), ("deepseek_v3", {})],
        ids=["glm_moe_dsa", "deepseek_v3"],
    )
    @torch.no_grad()
    def test_decode_steps(self, model_type, overrides):
        model = make_model(model_type, **overrides)
        ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
        mask[1, :9] = 0
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        step = torch.compile(model.__call__, fullgraph=True, backend=counter)
        with enable(model, page_size=8) as handle:
            for run in range(2):  # a second cache is served by the first one's code
                caches = [handle.new_cache(2, max_length=64) for _ in range(2)]
                for cache in caches:
                    model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
                for column in range(20, 40):
                    token, new = ids[:, column : column + 1], mask[:, column : column + 1]
                    given = {"attention_mask": new, "position_ids": token * 0 + column}
                    eager = model(token, past_key_values=caches[0], **given).logits
                    logits = step(token, past_key_values=caches[1], **given).logits
                    assert torch.equal(logits, eager), (run, column)
                assert [cache.counted for cache in caches] == [40, 20]  # compiled: not by the host
                assert [cache.count() for cache in caches] == [40, 40]
        assert counter.frame_count == 1

    @torch.no_grad()
    @pytest.mark.parametrize("max_length", [None, 64])
    def test_masks_of_past_columns_break_the_graph(self, max_length):
        """The host reads them, which breaks a graph."""
        model = make_model("deepseek_v3", num_hidden_layers=1)
        ids, mask = tokens(1, 9), torch.ones(1, 9)
        mask[0, 5:8] = 0
        with enable(model) as handle:
            cache = handle.new_cache(1, max_length)
            model(ids[:, :8], past_key_values=cache)
            given = {"attention_mask": mask, "past_key_values": cache}
            step = torch.compile(model.__call__, fullgraph=True, backend="eager")
            with pytest.raises(torch._dynamo.exc.TorchDynamoException):
                step(ids[:, 8:], **given)
            assert cache.lengths.tolist() == [8]
            broken = torch.compile(model.__call__, backend="eager")
            broken(ids[:, 8:], **given)
            assert cache.lengths.tolist() == [6]

    def test_generate_over_a_static_cache(self, model):
        ids = tokens(2, 40)
        ids[1, :10] = PAD
        arguments = {"attention_mask": (ids != PAD).long(), "max_new_tokens": 12}
        expected = model.generate(ids, **arguments)
        config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
        config._compile_all_devices = True  # not on GPUs only
        torch._dynamo.utils.counters.clear()
        with enable(model, page_size=8) as handle:
            for new_tokens in (12, 7):
                arguments["max_new_tokens"] = new_tokens
                got = model.generate(
                    ids, cache_implementation="static", compile_config=config, **arguments
                )
                assert torch.equal(got, expected[:, : 40 + new_tokens])
            assert handle.cache.max_length == 51
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class TestSeveralDevices:
    """Layers on several devices, as ``from_pretrained(device_map=...)`` puts them."""

    def model(self) -> Any:
        types = ["full", "shared", "full", "shared"]
        return make_model("glm_moe_dsa", num_hidden_layers=4, indexer_types=types)

    @pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a CUDA build of torch")
    @pytest.mark.parametrize("cache_format", [BF16_576, FP8_DS_MLA])
    @torch.no_grad()
    def test_decode_steps_mix_no_devices(self, cache_format, monkeypatch):
        """Fake tensors need no GPU, compute nothing, and refuse operators over two devices."""
        h200 = SimpleNamespace(
            major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        devices = [torch.device("cuda:0"), torch.device("cuda:1")]
        with FakeTensorMode():
            model = self.model()
            spread(model, devices)
            token = torch.zeros(3, 1, dtype=torch.long, device=devices[0])
            with enable(model, page_size=8, cache_format=cache_format) as handle:
                cache = handle.new_cache(3)
                cache.reserve(20)
                for _ in range(2):
                    logits = model(token, past_key_values=cache).logits
                assert logits.device == devices[0]
                cache.reorder_cache(torch.tensor([1, 0, 2], device=devices[0]))
                cache.batch_repeat_interleave(2)
                model(token.repeat(2, 1), past_key_values=cache)
        assert [latents.data.device for latents in cache.latents] == devices * 2
        assert [keys.data.device for keys in cache.index_keys.values()] == [devices[0]] * 2
        assert cache.page_table.device == devices[0]

    def test_pages_stay_on_their_device(self):
        devices = [torch.device("cpu"), torch.device("meta")]
        layers = [PagedCache.allocate(FP8_584, 0, 4, device=device) for device in devices]
        cache = LatentCache(layers, {1: layers[1]}, batch_size=2)
        cache.reserve(5)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache = copy.deepcopy(cache)
        assert [latents.data.device for latents in cache.latents] == devices
        assert [latents.num_pages for latents in cache.latents] == [8, 8]
        assert cache.index_keys[1].data.device == devices[1]
        assert cache.page_table.device == cache.real.device == devices[0]

    def test_a_step_is_copied_once_for_a_device(self, model):
        cpu, meta = torch.device("cpu"), torch.device("meta")
        with enable(model) as handle:
            cache = handle.new_cache(2)
            cache.reserve(5)
            step = handle._layers.packed_step(cache, torch.ones(2, 5, dtype=torch.bool))
        assert step.on(cpu) is step
        copied = step.on(meta)
        assert copied is step.on(meta)
        assert copied.selections is step.selections
        for name, value in vars(step.plan).items():
            moved = getattr(copied.plan, name)
            if isinstance(value, Tensor):
                assert (moved.device, moved.shape) == (meta, value.shape), name
            else:
                assert moved == value, name

    @pytest.mark.gpu
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
    @torch.no_grad()
    def test_two_gpus_say_the_same_as_one(self):
        ids = tokens(2, 40).cuda(0)
        ids[1, :10] = PAD
        arguments = {"attention_mask": (ids != PAD).long(), "max_new_tokens": 12}
        one, two = self.model().cuda(0), self.model()
        spread(two, [torch.device("cuda:0"), torch.device("cuda:1")])
        for options in ({}, {"num_beams": 3}, {"use_cache": False}):
            with enable(one, page_size=8), enable(two, page_size=8):
                expected = one.generate(ids, **arguments, **options)
                assert torch.equal(two.generate(ids, **arguments, **options), expected)

    def test_hooks_of_accelerate(self, model):
        accelerate = pytest.importorskip("accelerate")
        ids = tokens(2, 20)
        arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5}
        hooked = accelerate.dispatch_model(
            copy.deepcopy(model), device_map={"": "cpu"}, force_hooks=True
        )
        with enable(model), enable(hooked):
            assert torch.equal(hooked.generate(ids, **arguments), model.generate(ids, **arguments))

    def test_attention_on_two_devices_or_none(self, model):
        changed = copy.deepcopy(model)
        changed.model.layers[1].self_attn.o_proj.to("meta")
        with pytest.raises(ValueError, match=r"on one device, got cpu, meta in layer 1"):
            enable(changed)
        changed.model.layers[1].to("meta")
        with pytest.raises(ValueError, match=r"layer 1 on meta: device_map must not offload"):
            enable(changed)


class Streamer:
    """Keeps the tokens that generate() gives it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None: ...


def test_what_the_guide_says_that_works(model, tmp_path):
    """Beside the tests of generate, padding, compiled steps, packed rows and adapters."""
    ids = tokens(1, 40)
    embeds = model.get_input_embeddings()(ids)
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **options)
    loss = model(ids, labels=ids).loss
    with enable(model):
        streamer = Streamer()
        assert torch.equal(model.generate(ids, streamer=streamer, **options), expected)
        assert streamer.tokens == expected[0].tolist()
        assert torch.equal(model.generate(inputs_embeds=embeds, **options), expected[:, 40:])
        assistant = make_model(num_hidden_layers=1)
        assert torch.equal(model.generate(ids, assistant_model=assistant, **options), expected)
        for cache in (
            transformers.DynamicCache(),
            transformers.DynamicCache(config=model.config),
            transformers.StaticCache(config=model.config, max_cache_len=46),
        ):
            assert torch.equal(model.generate(ids, **{CACHE: cache}, **options), expected)
        output = model(ids, labels=ids, output_hidden_states=True)
        torch.testing.assert_close(output.loss, loss, rtol=1e-3, atol=1e-3)
        assert len(output.hidden_states) == 3
        assert model(ids, logits_to_keep=1).logits.shape == (1, 1, 256)
        model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded.generate(ids, **options), expected)
    with pytest.raises(ValueError, match="sparsemla"):
        type(model).from_pretrained(tmp_path, attn_implementation="sparsemla")


def test_generate_with_guessed_tokens(model):
    """Prompt lookup takes several tokens per step and crops wrong guesses."""
    ids = tokens(1, 20).repeat(1, 2)
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    expected = model.generate(ids, **arguments)
    with enable(model, page_size=8):
        got = model.generate(ids, prompt_lookup_num_tokens=3, **arguments)
    assert torch.equal(got, expected)


def test_a_cropped_cache_grows(model):
    ids = tokens(1, 40)
    with enable(model, page_size=4):
        expected = model(ids).logits
        cache = model(ids[:, :10]).past_key_values
        cache.crop(torch.tensor(-3))  # as generate does with guessed tokens
        for at in range(7, 40):
            got = model(ids[:, at : at + 1], past_key_values=cache).logits
            assert_close(got, expected[:, at : at + 1], rms=0.003)


def test_disable_restores_the_model_bit_for_bit(model):
    ids = tokens(2, 30)
    before, attributes = model(ids).logits, set(vars(model.model))
    handle = enable(model)
    assert not torch.equal(model(ids).logits, before)
    handle.disable()
    handle.disable()
    assert torch.equal(model(ids).logits, before)
    assert set(vars(model.model)) == attributes


class TestEnablingAgain:
    """As when a cell of a notebook runs twice."""

    def test_the_same_arguments_return_the_handle(self, model):
        handle = enable(model, cache_format="fp8_ds_mla")
        cache = model(tokens(1, 20)).past_key_values
        assert enable(model, cache_format=FP8_DS_MLA) is handle
        assert handle.cache is cache
        disable(model)
        disable(model)

    def test_other_arguments_renew_it(self, model):
        ids = tokens(1, 20)
        plain, attributes = model(ids).logits, set(vars(model.model))
        with enable(model, cache_format="fp8_ds_mla"):
            expected = model(ids).logits
        old = enable(model)
        new = enable(model, cache_format="fp8_ds_mla")
        assert new is not old
        assert torch.equal(model(ids).logits, expected)
        old.disable()  # no longer that of the model
        assert torch.equal(model(ids).logits, expected)
        assert old.cache is None
        disable(model)
        assert torch.equal(model(ids).logits, plain)
        assert set(vars(model.model)) == attributes

    def test_an_error_leaves_the_handle_in_place(self, model):
        handle = enable(model)
        with pytest.raises(ValueError, match="page_size must be at least 1"):
            enable(model, page_size=0)
        assert enable(model) is handle
        disable(model)

    def test_the_outermost_block_disables(self, model):
        with enable(model) as handle:
            with enable(model) as again:
                assert again is handle
            assert "forward" in vars(model.model)
            with pytest.raises(ValueError, match="options within a with block, got page_size=7"):
                enable(model, page_size=7)
        assert "forward" not in vars(model.model)
        handle.disable()

    def test_another_part_of_the_model(self, model):
        with enable(model), pytest.raises(ValueError, match="be the DeepseekV32ForCausalLM that"):
            enable(model.model)

    def test_a_copy_has_a_handle_of_its_own(self, model):
        with enable(model) as handle:
            copied = copy.deepcopy(model)
            own = enable(copied)
            assert own is not handle
            assert enable(copied) is own
        assert "forward" in vars(copied.model)
        disable(copied)
        assert "forward" not in vars(copied.model)


def test_the_handle_prints_layers_formats_bytes_and_kernels(model):
    handle = enable(model, cache_format="fp8_ds_mla", page_size=16)
    lines = [
        "PagedAttention of DeepseekV32ForCausalLM: 2 layers on cpu",
        "  rows: fp8_ds_mla; index keys: index_fp8",
        "  cache: 1576 bytes a token",
        "  decode kernels: indexer_topk cpu, sparse_decode cpu",
    ]
    assert repr(handle).splitlines() == lines
    model(tokens(1, 20))
    lines[2] += f", {2 * 16 * 1576} in use"
    assert repr(handle).splitlines() == lines
    handle.disable()
    assert repr(handle).startswith("PagedAttention of DeepseekV32ForCausalLM, disabled: 2 layers")


@pytest.mark.parametrize(
    ("sizes", "gpu", "expected"),
    [
        ({"heads": 128, "width": 2048, "index_heads": 64, "topk": 2048}, "sm_90", {"sm90"}),
        ({"heads": 128, "width": None}, "sm_80", {"sm80"}),
        ({"heads": 64, "width": 128, "extra_width": 512, "has_sink": True}, "sm_90", {"sm90"}),
    ],
    ids=["selected", "dense", "two selections"],
)
def test_the_kernels_of_a_handle_are_those_of_the_gpu(sizes, gpu, expected):
    example = Example(**sizes)
    found = explain(example.run, FP8_DS_MLA, INDEX_FP8, 64, torch.device("meta"), gpu=gpu)
    assert {name.split(".")[0] for name in found.kernels.values()} == expected
    assert ("indexer_topk" in found.kernels) == bool(example.index_heads)


def test_disable_restores_a_forward_that_was_replaced_before(model):
    module = model.model.layers[0].self_attn
    before = module.forward
    module.forward = lambda *args, **kwargs: before(*args, **kwargs)
    replaced = module.forward
    with enable(model):
        assert module.forward is not replaced
    assert module.forward is replaced
    del module.forward


def test_a_model_without_a_head(model):
    ids = tokens(2, 20)
    expected = model(ids).logits
    before = set(vars(model.model))
    with enable(model.model, page_size=8) as handle:
        output = model.model(ids[:, :15])
        rest = model.model(ids[:, 15:], past_key_values=handle.cache)
    states = torch.cat([output.last_hidden_state, rest.last_hidden_state], 1)
    assert_close(model.lm_head(states), expected, rms=0.006)
    assert set(vars(model.model)) == before


def test_no_cache_is_kept_without_use_cache(model):
    with enable(model) as handle:
        assert model(tokens(1, 10), use_cache=False).past_key_values is None
        assert handle.cache is None


@pytest.mark.parametrize(
    ("cache_format", "expected"), [(BF16_576, 1152 + 256), (FP8_DS_MLA, 656 + 132)]
)
def test_cache_bytes(model, cache_format, expected):
    with enable(model, cache_format=cache_format, page_size=16) as handle:
        cache = model(tokens(2, 33)).past_key_values
        assert cache.bytes_per_token == 2 * expected
        caches = [*cache.latents, *cache.index_keys.values()]
        allocated = sum(c.data.nbytes for c in caches)
        assert cache.nbytes == allocated == 2 * 48 * 2 * expected
        model(tokens(2, 20), past_key_values=cache)
        assert cache.page_table.shape == (2, 6)  # 53 tokens need 4 pages; 3 are doubled
        assert sorted(cache.page_table.flatten().tolist()) == list(range(12))
        assert cache is handle.cache


def test_cache_rows_are_copied_not_shared(model):
    ids = tokens(2, 20)
    with enable(model, page_size=8):
        cache = model(ids).past_key_values
        cache.reorder_cache(torch.tensor([1, 1]))
        step = model(torch.tensor([[3], [4]]), past_key_values=cache).logits
        alone = [
            model(torch.cat([ids[1], torch.tensor([token])])[None]).logits[:, -1:]
            for token in (3, 4)
        ]
        assert_close(step, torch.cat(alone), rms=0.003)


def test_cache_selects_repeats_crops_and_resets(model):
    ids = tokens(3, 20)
    with enable(model, page_size=8):
        expected = model(ids).logits
        cache = model(ids[:, :15]).past_key_values
        cache.crop(-5)
        assert cache.get_seq_length() == 10
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 4
        rest = ids[[2, 2, 0, 0], 10:]
        logits = model(rest, past_key_values=cache).logits
        assert_close(logits, expected[[2, 2, 0, 0], 10:], rms=0.003)
        cache.reset()
        logits = model(ids[[0, 1, 2, 0]], past_key_values=cache).logits
        assert_close(logits, expected[[0, 1, 2, 0]], rms=0.003)


@pytest.mark.parametrize("max_length", [None, 20])
def test_an_empty_cache(model, max_length):
    """It can be selected, repeated, cropped, reset and then used like any other cache."""
    ids = tokens(6, 20)
    with enable(model, page_size=8) as handle:
        expected = model(ids).logits

        def check(cache):
            assert int(cache.get_seq_length()) == 0
            rows = cache.batch_size
            logits = model(ids[:rows], past_key_values=cache).logits
            assert_close(logits, expected[:rows], rms=0.003)

        for change in (
            lambda cache: cache.batch_repeat_interleave(3),
            lambda cache: cache.batch_repeat_interleave(1),
            lambda cache: cache.batch_select_indices(torch.tensor([1])),
            lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
            lambda cache: cache.crop(0),
            lambda cache: cache.reset(),
            lambda cache: cache.reserve(0),
            lambda cache: copy.deepcopy(cache),
        ):
            cache = handle.new_cache(2, max_length)
            change(cache)
            check(cache)
        cache = handle.new_cache(2, max_length)
        cache.batch_select_indices(torch.tensor([], dtype=torch.long))
        assert cache.batch_size == 0
        cache.batch_repeat_interleave(2)
        assert (cache.batch_size, cache.lengths.tolist()) == (0, [])
        with pytest.raises(ValueError, match=r"must lie in \[-0, 0\], got -1"):
            handle.new_cache(2, max_length).crop(-1)


RELATIVES = {
    "glm_moe_dsa": {
        "num_hidden_layers": 3,
        "indexer_types": ["full", "shared", "full"],
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    "hy_v4": {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]},
    "axk2": {
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
}


@pytest.mark.parametrize("model_type", RELATIVES)
def test_relatives(model_type):
    """Shared selections, sinks, gates of the output, other RoPE pairs and dims."""
    model = make_model(model_type, **RELATIVES[model_type])
    ids = tokens(2, 60)
    with torch.no_grad():
        expected = model(ids).logits
        with enable(model, record_selections=True) as handle:
            output = model(ids[:, :50])
            assert_close(output.logits, expected[:, :50], rms=0.006)
            layers = {0, 1} if model_type == "axk2" else {0, 2}
            assert set(handle.selections[0]) == set(handle.cache.index_keys) == layers
            output = model(ids[:, 50:51], past_key_values=output.past_key_values)
            assert_close(output.logits, expected[:, 50:51], rms=0.006)
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
        | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_types(rope):
    """The step's cos and sin are transformers' own, so any type is served as transformers does."""
    model = make_model(rope_parameters={"rope_theta": 1e4} | rope, max_position_embeddings=32)
    ids = tokens(1, 60)
    with torch.no_grad():
        expected = [model(ids).logits]
        cache = transformers.DynamicCache(config=model.config)
        expected += [model(part, past_key_values=cache).logits for part in ids.split([30, 30], 1)]
        with enable(model) as handle:
            cache = handle.new_cache(1)
            got = [model(ids).logits]
            got += [model(part, past_key_values=cache).logits for part in ids.split([30, 30], 1)]
    for mine, theirs in zip(got, expected, strict=True):
        assert_close(mine, theirs, rms=0.006)


def test_half_precision_models(model):
    ids = tokens(2, 50)
    expected = model(ids).logits
    for dtype in (torch.bfloat16, torch.float16):
        half = copy.deepcopy(model).to(dtype)
        with enable(half):
            logits = half(ids).logits
        assert logits.dtype == dtype
        assert_close(logits.float(), expected, rms=0.02)


def test_fp8_projections_are_absorbed_with_their_scales(model):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    changed = copy.deepcopy(model)
    reference = copy.deepcopy(model)
    for layer, exact in zip(changed.model.layers, reference.model.layers, strict=True):
        weight = layer.self_attn.kv_b_proj.weight
        rows, cols = weight.shape
        blocks = weight.reshape(rows // 128, 128, cols // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).reshape(rows, cols).to(torch.float8_e4m3fn)
        module = fp8.FP8Linear(cols, rows, block_size=(128, 128))
        module.weight = torch.nn.Parameter(codes, requires_grad=False)
        module.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
        layer.self_attn.kv_b_proj = module
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        exact.self_attn.kv_b_proj.weight.copy_(codes.float() * spread)
    ids = tokens(1, 40)
    with enable(changed), enable(reference):
        assert_close(changed(ids).logits, reference(ids).logits, rms=0.06)


def test_backward_raises_an_error(model):
    with torch.enable_grad(), enable(model):
        loss = model(tokens(1, 10)).logits.sum()
        with pytest.raises(NotImplementedError, match="no backward"):
            loss.backward()


class TestRefusals:
    def test_a_model_within_an_adapter_of_another_package(self):
        """PEFT's models are no models of transformers."""

        class Adapted(torch.nn.Module):
            def get_base_model(self) -> None: ...

        for call in (enable, disable):
            with pytest.raises(TypeError, match=r"which get_base_model\(\) returns, got Adapted"):
                call(Adapted())

    def test_other_architectures(self):
        config = transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        with pytest.raises(ValueError, match="deepseek_v4 or glm5_next_text, got 'llama'"):
            enable(transformers.LlamaForCausalLM(config))
        with pytest.raises(TypeError, match="must be a PreTrainedModel, got Linear"):
            enable(torch.nn.Linear(2, 2))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"cache_format": FP8_584}, "cache_format must have head_dim 576 .* got fp8_584"),
            ({"cache_format": bf16_format(576)}, "value_dim 512 .* got bf16_576v576"),
            ({"index_format": BF16_576}, "index_format must have head_dim 128"),
            ({"index_format": e4m3_format(128, 128, 64)}, "at most one scale a row"),
            ({"page_size": 0}, "page_size must be at least 1, got 0"),
            ({"page_size": "64"}, "page_size must be an integer, got str"),
            ({"cache_format": 656}, "cache_format must be a CacheFormat, got int"),
        ],
    )
    def test_formats(self, model, arguments, message):
        with pytest.raises((ValueError, TypeError), match=message):
            enable(model, **arguments)

    def test_index_format_without_an_indexer(self):
        model = make_model("deepseek_v3", num_hidden_layers=1)
        with pytest.raises(ValueError, match="index_format must be None"):
            enable(model, index_format=INDEX_FP8)

    @pytest.mark.parametrize(
        ("model_type", "sizes", "message"),
        [
            (
                "deepseek_v3",  # the configuration of a DeepSeek-V3.2
                {"index_topk": 64, "index_head_dim": 128},
                "an indexer where its configuration has index_topk, index_head_dim: layers of "
                "model_type 'deepseek_v3' have none",
            ),
            ("deepseek_v32", {"num_hidden_layers": 0}, "a layer with sparse attention, got none"),
        ],
        ids=["indexer", "layers"],
    )
    def test_models_without_a_part(self, model_type, sizes, message):
        with pytest.raises(ValueError, match=f"model must have {message}"):
            enable(make_model(model_type, **sizes))

    def test_a_first_layer_that_shares_a_selection(self):
        model = make_model("glm_moe_dsa", indexer_types=["shared", "full"])
        with enable(model), pytest.raises(ValueError, match="prev_topk_indices must be given"):
            model(tokens(1, 6))
        with pytest.raises(ValueError, match=r"indexer in layer 0, got indexers in \[1\]"):
            enable(model, training=True)
        model = make_model("glm_moe_dsa", indexer_types=["shared", "shared"])
        with pytest.raises(ValueError, match=r"indexer in layer 0, got indexers in \[\]"):
            enable(model, training=True)

    def test_arguments_of_training(self, model):
        with pytest.raises(
            ValueError, match=r"index_loss_coefficient must be left out .* got 0\.5"
        ):
            enable(model, index_loss_coefficient=0.5)  # type: ignore[call-overload]

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"qk_rope_head_dim": 33}, "even qk_rope_head_dim, got 33"),
            ({"index_head_dim": 32}, "index_head_dim of at least 64, .* got 32"),
        ],
    )
    def test_head_sizes(self, sizes, message):
        model = make_model(num_hidden_layers=1)
        for name, size in sizes.items():  # transformers itself refuses to make some
            setattr(model.config, name, size)
        with pytest.raises(ValueError, match=message):
            enable(model)

    def test_more_columns_than_a_static_cache_has(self, model):
        with enable(model, page_size=8) as handle:
            cache = handle.new_cache(1, max_length=16)
            with pytest.raises(ValueError, match="room for 17 columns, got max_length 16"):
                model(tokens(1, 17), past_key_values=cache)
            model(tokens(1, 15), past_key_values=cache)
            model(tokens(1, 1), past_key_values=cache)
            full = copy.deepcopy(cache)
            mask = torch.zeros(1, 17)  # would hide the past columns
            for options in ({}, {"attention_mask": mask}):
                with pytest.raises(ValueError, match=f"{CACHE} must have room for 17 columns"):
                    model(tokens(1, 1), past_key_values=cache, **options)
            before, after = ([*each._tensors()] for each in (full, cache))
            assert all(map(torch.equal, before, after)), "a refused step wrote"
            cache.crop(-1)
            full.reset()
            for each in (cache, full):
                model(tokens(1, 1), past_key_values=each)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                {"attention_mask": torch.ones(1, 1, 6, 6)},
                r"attention_mask must be None or have shape .* = \[1, 6\] or .* got \[1, 1, 6, 6\]",
            ),
            ({"attention_mask": torch.ones(1, 7)}, r"got \[1, 7\]"),
            ({"attention_mask": {"full": None}}, "got dict"),
            (
                {
                    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
                    "attention_mask": torch.ones(1, 6),
                },
                r"position_ids must ascend .* got \[0, 1, 2, 0, 1, 2\] after 0 tokens",
            ),
            ({"output_attentions": True}, "output_attentions must be False"),
        ],
        ids=["4d", "length", "dict", "packed", "attentions"],
    )
    def test_arguments(self, model, arguments, message):
        with enable(model), pytest.raises(ValueError, match=message):
            model(tokens(1, 6), **arguments)

    def test_no_input(self, model):
        with enable(model), pytest.raises(ValueError, match="got neither"):
            model()

    def test_both_inputs(self, model):
        ids = tokens(1, 3)
        embeds = model.model.embed_tokens(ids)
        with enable(model), pytest.raises(ValueError, match=r"input_ids or inputs_embeds .* both"):
            model(ids, inputs_embeds=embeds)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"input_ids": torch.empty(1, 0).long()}, r"input_ids must have .* got \[1, 0\]"),
            ({"input_ids": torch.empty(0, 4).long()}, r"input_ids must have .* got \[0, 4\]"),
            ({"input_ids": torch.ones(4).long()}, r"input_ids must have .* got \[4\]"),
            ({"inputs_embeds": torch.ones(1, 0, 64)}, r"inputs_embeds must .* got \[1, 0, 64\]"),
            ({"inputs_embeds": torch.ones(2, 64)}, r"inputs_embeds must have .* got \[2, 64\]"),
        ],
    )
    def test_inputs_without_a_column(self, model, arguments, message):
        with enable(model), pytest.raises(ValueError, match=message):
            model(**arguments)

    def test_an_empty_prompt(self, model):
        with enable(model), pytest.raises(ValueError, match=r"input_ids must have"):
            model.generate(torch.empty(1, 0).long(), max_new_tokens=1)

    @pytest.mark.parametrize("past", [((1, 2),), (), [torch.ones(2)], 7], ids=str)
    def test_caches_of_another_kind(self, model, past):
        with enable(model), pytest.raises(TypeError, match=rf"{CACHE} must be .* got "):
            model(tokens(1, 2), past_key_values=past)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((-1,), "batch_size must be at least 0, got -1"),
            ((2, 0), "max_length must be at least 1, got 0"),
            ((2, -3), "max_length must be at least 1, got -3"),
            (("2",), "batch_size must be an integer, got str"),
            ((2, 7.5), "max_length must be an integer, got float"),
        ],
    )
    def test_sizes_of_a_cache(self, model, arguments, message):
        with enable(model) as handle, pytest.raises((ValueError, TypeError), match=message):
            handle.new_cache(*arguments)

    def test_training(self, model):
        with enable(model), torch.enable_grad():
            model.train()
            try:
                with pytest.raises(ValueError, match="eval mode"):
                    model(tokens(1, 6))
            finally:
                model.eval()

    def test_a_cache_of_transformers(self, model):
        past = model(tokens(1, 6)).past_key_values
        with enable(model), pytest.raises(ValueError, match="got a DynamicCache"):
            model(tokens(1, 1), past_key_values=past)

    @pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
    def test_a_cache_with_another_place_for_its_rows(self, model, implementation, monkeypatch):
        if not torch.cuda.is_available():  # a build of torch with CUDA makes the cache's stream
            monkeypatch.setattr(torch, "Stream", type("Stream", (), {}))
        with enable(model), pytest.raises(ValueError, match=r"got a .* that offloads layers"):
            model.generate(tokens(1, 6), max_new_tokens=2, cache_implementation=implementation)

    def test_a_cache_of_a_class_of_its_own(self, model):
        class Own(transformers.DynamicCache):
            pass

        with enable(model), pytest.raises(ValueError, match="got a Own"):
            model(tokens(1, 6), past_key_values=Own(config=model.config))

    def test_an_empty_cache_of_transformers_twice(self, model):
        past = transformers.DynamicCache(config=model.config)
        with enable(model):
            assert isinstance(
                model(tokens(1, 6), past_key_values=past).past_key_values, LatentCache
            )
            with pytest.raises(ValueError, match="the cache in the output"):
                model(tokens(1, 1), past_key_values=past)

    def test_a_cache_under_either_name(self, model):
        base, prompt, last = model.base_model, tokens(1, 6), tokens(1, 1)
        with enable(model) as attention:
            one, two = attention.new_cache(1), attention.new_cache(1)
            base(prompt, cache=one)
            base(prompt, past_key_values=two)
            outputs = base(last, cache=one), base(last, past_key_values=two)
            assert torch.equal(*(output.last_hidden_state for output in outputs))
            with pytest.raises(ValueError, match=r"cache must be left out .* got both"):
                base(last, cache=one, past_key_values=one)

    def test_our_cache_in_another_model(self, model):
        with enable(model):
            past = model(tokens(1, 6)).past_key_values
            with pytest.raises(ValueError, match=r"must hold 2 rows, .* got 1"):
                model(tokens(2, 1), past_key_values=past)
            mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])
            with pytest.raises(ValueError, match="as in the steps before"):
                model(tokens(1, 2), past_key_values=past, attention_mask=mask)
            with pytest.raises(ValueError, match=r"must lie in \[-6, 0\], got 1"):
                past.crop(1)
        fp8 = enable(model, cache_format=FP8_DS_MLA)
        with fp8, pytest.raises(ValueError, match=r"layers of the formats .*fp8_ds_mla"):
            model(tokens(1, 1), past_key_values=past)
        with pytest.raises(ValueError, match="got a LatentCache"):
            model(tokens(1, 1), past_key_values=past)


def test_growing_keeps_page_padding_and_separate_scales():
    """Formats with padded pages or a scale tensor survive growth and reordering."""
    for fmt in (FP8_584, FP8_DS_MLA):
        latents = [PagedCache.allocate(fmt, 0, 3)]
        cache = LatentCache(latents, {}, batch_size=2)
        cache.reserve(3)
        rows = torch.randn(3, fmt.head_dim)
        cache.latents[0].write(cache.page_table[1].long() * 3 + torch.arange(3), rows)
        stored = cache.latents[0].read(cache.page_table[1].long() * 3 + torch.arange(3))
        cache.reserve(7)
        cache.reorder_cache(torch.tensor([1, 1, 0]))
        for row in (0, 1):
            slots = cache.page_table[row, :1].long() * 3 + torch.arange(3)
            assert torch.equal(cache.latents[0].read(slots), stored)
