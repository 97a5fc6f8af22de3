"""Every keyword of transformers' models: used, refused, or without effect on attention."""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

from transformers.loss.loss_utils import ForCausalLMLoss, fixed_cross_entropy  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from sparsemla.backends.transformers import PagedAttention, TrainingAttention, enable  # noqa: E402
from sparsemla.backends.transformers.cache import CACHE  # noqa: E402
from sparsemla.backends.transformers.keywords import MODALITIES, PASSED_ON  # noqa: E402
from sparsemla.backends.transformers.sequences import BOUNDARIES  # noqa: E402
from sparsemla_lab.testing.models import CLASSES, copying_model  # noqa: E402
from sparsemla_lab.testing.models_glm5 import pooled_model  # noqa: E402
from test_transformers_v4 import MIXED  # noqa: E402
from test_transformers_v4 import make_model as compressed_model  # noqa: E402

ALL_CLASSES = CLASSES | {"deepseek_v4": "DeepseekV4", "glm5_next": "Glm5Next"}
TRAINED = ("deepseek_v32", "glm_moe_dsa")


def small_model(model_type: str) -> Any:
    """A model whose experts and selections cannot flip: every token sees all others."""
    if model_type == "glm5_next":
        return pooled_model(index_topk=512)
    if model_type == "deepseek_v4":
        return compressed_model(MIXED)
    options = {} if model_type == "deepseek_v3" else {"index_topk": 512}
    return copying_model(model_type, lag=5, **options)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


@pytest.fixture
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Iterator[Any]:
    """The model of the type that the test asks for, or DeepSeek-V3.2."""
    model_type = getattr(request, "param", "deepseek_v32")
    if model_type not in models:
        models[model_type] = small_model(model_type)
    with torch.no_grad():
        yield models[model_type].eval()


every_model = pytest.mark.parametrize("model", list(ALL_CLASSES), indirect=True)


def tokens(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 120, (rows, columns), generator=generator)


HEAD = {
    "labels",
    "logits_to_keep",
    "mm_encoder_outputs",
    "encoder_outputs",
    "mm_token_type_ids",
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "video_grid_thw",
}
CONDITIONAL = {"output_attentions": True, "is_causal": False}
"""Refused with these values."""

REFUSED = {
    # attention functions
    "block_table",
    "dropout",
    "kernel_options",
    "position_bias",
    "s_aux",
    "scaling",
    "sliding_window",
    "softcap",
    # what modules of transformers pass to each other
    "cache_params",
    "hidden_states",
    "k",
    "key",
    "logits",
    "max_seqlen_k",
    "max_seqlen_q",
    "module",
    "position_embeddings",
    "prev_topk_indices",
    "q",
    "query",
    "source",
    "target",
    "v",
    "value",
    "vocab_size",
    # earlier versions, and other libraries
    "cache_position",
    "cu_seqlens",
    "head_mask",
    "cu_seq_len_q",
}


class TestKeywords:
    """A keyword that a new version of transformers accepts fails the first test until it is read.

    The handles name those that they use. The class around the base model reads HEAD. PASSED_ON
    changes no bit of the logits. REFUSED raises an error.
    """

    def accepted(self) -> Iterator[tuple[str, str]]:
        """Each keyword that some function on the way through a model reads, with the function."""
        functions: dict[str, Any] = {
            "ForCausalLMLoss": ForCausalLMLoss,
            "fixed_cross_entropy": fixed_cross_entropy,
            **dict(ALL_ATTENTION_FUNCTIONS.items()),
        }
        sources = ["utils.generic", "utils.output_capturing", "modeling_layers"]
        for model_type, prefix in ALL_CLASSES.items():
            sources.append(f"models.{model_type}.modeling_{model_type}")
            for name, kind in vars(importlib.import_module(f"transformers.{sources[-1]}")).items():
                ends = ("ForCausalLM", "Model", "Generation", "DecoderLayer", "Attention")
                own = name.startswith(prefix) and "Vision" not in name
                if own and name.endswith(ends) and "forward" in vars(kind):
                    functions[name] = kind.forward
        for name, function in functions.items():
            for parameter in inspect.signature(function).parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:
                    for group in typing.get_args(parameter.annotation):
                        yield from ((key, group.__name__) for key in group.__annotations__)
                elif parameter.name != "self":
                    yield parameter.name, name
        for source in sources:
            text = inspect.getsource(importlib.import_module(f"transformers.{source}"))
            for key in re.findall(r'kwargs\.(?:get|pop)\(\s*"(\w+)"', text):
                yield key, source

    def test_each_is_classified(self):
        used = {
            name
            for handle in (PagedAttention, TrainingAttention)
            for name in inspect.signature(handle._forward).parameters
        }
        classes = [used, set(BOUNDARIES), set(PASSED_ON), HEAD, REFUSED]
        classes.append(set(CONDITIONAL))
        known = set().union(*classes)
        assert len(known) == sum(map(len, classes)), "a keyword has two classes"
        accepted = dict(self.accepted())
        assert {"cu_seq_lens_q", "seq_idx", "softcap", "debug_io", "shift_labels"} <= set(accepted)
        assert {name: by for name, by in accepted.items() if name not in known} == {}

    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize("name", sorted(REFUSED | set(CONDITIONAL)))
    def test_refused(self, model, name, training):
        value = CONDITIONAL.get(name, torch.ones(1))
        with enable(model, training=training), pytest.raises((TypeError, ValueError), match=name):
            model(tokens(1, 6), **{name: value})

    @every_model
    def test_unknown_keywords_are_refused_by_every_model(self, model):
        with enable(model):
            with pytest.raises(TypeError, match="softcap, nothing must be left out"):
                model(tokens(1, 6), softcap=30.0, nothing=1)
            model(tokens(1, 6), softcap=None)

    def test_of_other_encoders(self, models):
        model = models.setdefault("glm5_next", small_model("glm5_next"))
        with torch.no_grad(), enable(model):
            expected = model(tokens(1, 6)).logits
            for name in MODALITIES:
                options = {f"{name}cu_seqlens": torch.tensor([0, 4])}
                assert torch.equal(model(tokens(1, 6), **options).logits, expected)

    @pytest.mark.parametrize("training", [False, True])
    @pytest.mark.parametrize("name", [name for name in PASSED_ON if "debug" not in name])
    def test_passed_on(self, model, name, training):
        ids = tokens(2, 12)
        values: dict[str, Any] = {
            "return_dict": False,
            "num_items_in_batch": 40,
            "ignore_index": int(ids[0, 3]),
            "shift_labels": ids.roll(2, 1),
            "prune_layers": True,
        }
        given = {"labels": ids, name: values.get(name, True)}
        stock = model(ids, **given)
        with enable(model, training=training):
            expected = model(ids, labels=ids)
            got = model(ids, **given)
        if name == "return_dict":
            assert isinstance(got, tuple)
            assert torch.equal(got[1], expected.logits)
            return
        assert torch.equal(got.logits, expected.logits)
        torch.testing.assert_close(got.loss, stock.loss, atol=0.02, rtol=0.02)
        if name == "output_hidden_states":
            for ours, theirs in zip(got.hidden_states, stock.hidden_states, strict=True):
                assert (ours - theirs).abs().mean() < 0.02 * theirs.std()

    def test_labels_of_the_share_of_a_step(self, model):
        """The indexers' loss is weighed by the labels that the language model's loss counts."""
        ids = tokens(2, 12)
        shifted = ids.roll(-1, 1).masked_fill(ids % 3 == 0, -7)
        count = int((shifted != -7).sum())
        with torch.enable_grad(), enable(model, training=True) as training:

            def added(*args: Any, **options: Any) -> Tensor:
                training.index_loss_coefficient = 1.0
                loss = model(*args, **options).loss
                training.index_loss_coefficient = 0.0
                return (loss - model(*args, **options).loss) / training.index_loss

            options = {"ignore_index": -7, "num_items_in_batch": 4 * count}
            got = added(ids, labels=ids, shift_labels=shifted, **options)
            torch.testing.assert_close(got, torch.tensor(0.25))
            got = added(ids, None, None, None, None, ids, num_items_in_batch=88)
            torch.testing.assert_close(got, torch.tensor(0.25))

    @every_model
    def test_of_the_head(self, model):
        ids = tokens(2, 12)
        with enable(model):
            whole = model(ids).logits
            assert torch.equal(model(ids, logits_to_keep=3).logits, whole[:, -3:])
            picked = torch.tensor([4, 1])
            torch.testing.assert_close(model(ids, logits_to_keep=picked).logits, whole[:, picked])


LENGTHS = (140, 1, 30)
ENDS = torch.tensor([0, 140, 141, 171], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
INDICES = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))[None].int()
ONES = torch.ones(1, 171)
GIVEN: list[dict[str, Any]] = [
    {"position_ids": POSITIONS},
    {"cu_seq_lens_q": ENDS},
    {"cu_seq_lens_k": ENDS.long()},
    {"seq_idx": INDICES},
    {"cu_seq_lens_q": ENDS, "attention_mask": ONES},
    {"seq_idx": INDICES, "attention_mask": ONES, "position_ids": POSITIONS},
    {
        "position_ids": POSITIONS,
        "cu_seq_lens_q": ENDS,
        "cu_seq_lens_k": ENDS,
        "max_length_q": 140,
        "max_length_k": torch.tensor(200),
        "seq_idx": INDICES,
        "use_cache": False,
    },
]
"""The same sequences, as different collators say it."""


class TestPacked:
    """Sequences of a row attend to themselves only, however they are given."""

    @pytest.mark.parametrize(
        "model", [name for name in ALL_CLASSES if name != "glm5_next"], indirect=True
    )
    def test_equal_sequences_alone(self, model):
        ids = tokens(1, 171)
        records = model.config.model_type != "deepseek_v3"
        with enable(model, page_size=8, record_selections=records) as handle:
            alone = [model(part).logits for part in ids.split(LENGTHS, 1)]
            lists = [each[1] for each in handle.selections]
            handle.selections.clear()
            kept = handle.cache
            for given in GIVEN:
                output = model(ids, **given)
                assert output.get("past_key_values") is None
                assert output.get("cache") is None
                error = output.logits - torch.cat(alone, 1)
                assert error.abs().max() < 0.03 * output.logits.std()
            assert handle.cache is kept
            packed = [each[1] for each in handle.selections]
        for found in packed:
            for got, expected in zip(found.split(LENGTHS), lists, strict=True):
                width = max(got.shape[1], expected.shape[1])
                padded = (F.pad(x, (0, width - x.shape[1]), value=-1) for x in (got, expected))
                assert torch.equal(*padded)

    @pytest.mark.parametrize("stage", ["dense", "sparse"])
    @pytest.mark.parametrize("model", TRAINED, indirect=True)
    def test_in_training(self, model, stage):
        ids = tokens(1, 171)
        with enable(model, training=stage):
            expected = model(ids, position_ids=POSITIONS).logits
            alone = torch.cat([model(part).logits for part in ids.split(LENGTHS, 1)], 1)
            torch.testing.assert_close(expected, alone, atol=1e-3, rtol=1e-3)
            for given in GIVEN:
                assert torch.equal(model(ids, **given).logits, expected)

    def test_equal_transformers_masks(self, model):
        """Without a cache transformers separates sequences by positions, also at a gap."""
        ids, positions = tokens(2, 20), torch.arange(20).repeat(2, 1)
        positions[0, 12:] -= 12
        positions[1, 7:] += 3
        given = {"position_ids": positions, "use_cache": False}
        expected = model(ids, **given).logits
        with enable(model):
            got = model(ids, **given).logits
            joined = model(ids[1:], position_ids=positions[1:]).logits  # with a cache, one sequence
        assert (got - expected).abs().mean() < 0.01 * expected.std()
        assert (got[1:] - joined).abs().mean() > 0.05 * expected.std()
        expected = model(ids[1:], position_ids=positions[1:]).logits
        assert (joined - expected).abs().mean() < 0.01 * expected.std()

    def test_pages_are_those_of_the_sequences(self, model):
        """A short sequence takes no pages for the longest."""
        cache = enable(model, page_size=8)
        with cache:
            batch = cache.new_cache(3)
            batch.fit((140, 1, 30))
            assert batch.page_table.shape == (3, 18)
            assert [int((row >= 0).sum()) for row in batch.page_table] == [18, 1, 4]
            assert len(batch.latents[0].data) == 23


@every_model
def test_a_mask_of_single_tokens(model):
    """A step of several columns whose rows have one real token or none."""
    ids, mask = tokens(3, 4), torch.zeros(3, 4)
    mask[[0, 2], 3] = 1
    with enable(model):
        got = model(ids, attention_mask=mask).logits[[0, 2], 3]
        alone = model(ids[[0, 2], 3:]).logits[:, 0]
    assert (got - alone).abs().max() < 0.03 * alone.std()


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (
                {"position_ids": torch.arange(6)[None], "cu_seq_lens_q": torch.tensor([0, 2, 6])},
                r"position_ids and cu_seq_lens_q must have the same sequences, got lengths of "
                r"\[6\] and \[2, 4\]",
            ),
            (
                {"cu_seq_lens_k": torch.tensor([0, 6]), "cu_seq_lens_q": torch.tensor([0, 2, 6])},
                "cu_seq_lens_k and cu_seq_lens_q must have the same sequences",
            ),
            (
                {
                    "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]]),
                    "cu_seq_lens_q": torch.tensor([0, 6]),
                },
                "seq_idx and cu_seq_lens_q must have the same sequences",
            ),
            (
                {
                    "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]]),
                    "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]]),
                },
                "position_ids and seq_idx must have the same sequences",
            ),
            (
                {
                    "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1]]),
                    "cu_seq_lens_q": torch.tensor([0, 2, 6]),
                },
                "attention_mask must be None or ones where cu_seq_lens_q is given",
            ),
            (
                {"attention_mask": torch.ones(1, 7), "cu_seq_lens_q": torch.tensor([0, 2, 6])},
                "attention_mask must be None or have shape",
            ),
            (
                {"cu_seq_lens_q": torch.tensor([0, 2, 6]), "max_length_q": 3},
                "max_length_q must be at least 4, the length of the longest sequence, got 3",
            ),
            (
                {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]]), "max_length_k": 3},
                "max_length_k must be at least 4",
            ),
            ({"max_length_q": 5}, "max_length_q must be at least 6"),
            ({"max_length_q": "6"}, "max_length_q must be an integer, got str"),
            ({"cu_seq_lens_q": [0, 2, 6]}, "cu_seq_lens_q must be a Tensor, got list"),
            ({"cu_seq_lens_q": torch.tensor([0.0, 6.0])}, "cu_seq_lens_q must have dtype int32"),
            (
                {"cu_seq_lens_q": torch.tensor([[0, 6]])},
                "cu_seq_lens_q must ascend from 0 to the 6",
            ),
            ({"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_q must ascend from 0 to the 6"),
            ({"cu_seq_lens_k": torch.tensor([0, 3, 3, 6])}, "cu_seq_lens_k must ascend from 0"),
            ({"cu_seq_lens_q": torch.tensor([0])}, "cu_seq_lens_q must ascend from 0"),
            ({"cu_seq_lens_q": torch.tensor([]).int()}, "cu_seq_lens_q must ascend from 0"),
            (
                {"seq_idx": torch.zeros(6).int()},
                r"seq_idx must have shape .* = \[1, 6\], got \[6\]",
            ),
            ({"position_ids": torch.arange(6)}, r"position_ids must have shape .* = \[1, 6\]"),
            ({"position_ids": torch.arange(5)[None]}, r"position_ids must have .* got \[1, 5\]"),
            ({"position_ids": torch.zeros(3, 1, 6).int()}, "position_ids must have shape"),
            (
                {
                    "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
                    "attention_mask": torch.ones(1, 6),
                },
                "position_ids must ascend in each .* attention_mask",
            ),
        ],
        ids=lambda value: None if isinstance(value, str) else "-".join(value),
    )
    @pytest.mark.parametrize("training", [False, True])
    def test_boundaries(self, model, given, message, training):
        with (
            enable(model, training=training),
            pytest.raises((TypeError, ValueError), match=message),
        ):
            model(tokens(1, 6), **given)

    @pytest.mark.parametrize("name", ["cu_seq_lens_q", "position_ids"])
    def test_linear_attention_cannot_separate_sequences(self, models, name):
        model = models.setdefault("glm5_next", small_model("glm5_next"))
        value = {"cu_seq_lens_q": ENDS, "position_ids": POSITIONS}[name]
        with enable(model):
            with pytest.raises(ValueError, match=f"{name}.* one sequence in each row"):
                model(tokens(1, 171), **{name: value})
            model(tokens(1, 171), cu_seq_lens_q=torch.tensor([0, 171]))

    def test_a_cache_holds_no_packed_rows(self, model):
        ids, options = tokens(1, 171), {"cu_seq_lens_q": ENDS}
        with enable(model) as handle:
            with pytest.raises(ValueError, match="use_cache must be False or None"):
                model(ids, use_cache=True, **options)
            for columns in (171, 1):
                with pytest.raises(ValueError, match=f"cu_seq_lens_q must be .* {CACHE} is given"):
                    model(ids[:, :columns], past_key_values=handle.new_cache(1), **options)
            with pytest.raises(ValueError, match=f"{CACHE} left out"):
                model(ids, past_key_values=handle.new_cache(1), position_ids=POSITIONS)
            with pytest.raises(ValueError, match="cu_seq_lens_q must be left out"):
                model.generate(ids, max_new_tokens=2, **options)

    def test_a_refused_call_spends_no_cache(self, model):
        past = transformers.DynamicCache(config=model.config)
        with enable(model):
            with pytest.raises(ValueError, match="position_ids must have shape"):
                model(tokens(1, 6), past_key_values=past, position_ids=torch.arange(6))
            positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
            with pytest.raises(ValueError, match="position_ids must ascend"):
                model(tokens(1, 6), past_key_values=past, position_ids=positions)
            model(tokens(1, 6), past_key_values=past)

    @every_model
    def test_dropout(self, model, monkeypatch):
        (layer_idx, module), *_ = (
            (layer_idx, layer.self_attn)
            for layer_idx, layer in enumerate(
                model.base_model.layers
                if hasattr(model.base_model, "layers")
                else model.model.language_model.layers
            )
            if hasattr(layer.self_attn, "attention_dropout")
        )
        stages = [False, True] if model.config.model_type in TRAINED else [False]
        for training in stages:
            with enable(model, training=training):
                model.train()
                model(tokens(1, 6))
                monkeypatch.setattr(module, "attention_dropout", 0.1)
                with pytest.raises(ValueError, match=f"got 0.1 in layer {layer_idx}"):
                    model(tokens(1, 6))
                model.eval()
                model(tokens(1, 6))
                monkeypatch.undo()
