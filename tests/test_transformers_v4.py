"""DeepSeek-V4 in the transformers backend: windows, entries of 4 tokens, entries of 128."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.overrides import TorchFunctionMode

from devices import spread
from sparsemla import (
    BF16_512,
    FP4_288,
    FP8_584,
    INDEX_FP8,
    INDEX_MXFP4,
    Pooling,
    bf16_format,
    e4m3_format,
)

transformers = pytest.importorskip("transformers")

from sparsemla.backends.transformers import deepseek_v4, enable  # noqa: E402
from sparsemla_lab.testing.models import copying_model  # noqa: E402
from sparsemla_lab.testing.models_v4 import (  # noqa: E402
    compressed_copying_model,
    copied_tokens,
    draft_layer,
    markov_weights,
)

SLIDING, CSA, HCA = 0, 4, 128
MIXED = [SLIDING, CSA, HCA, CSA]
TOPK = 8
ALL = 512


def make_model(ratios: list[int], **overrides: Any) -> Any:
    """A small model with random weights that routes every token to all experts."""
    settings: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": len(ratios),
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_n_heads": 16,  # with fewer, scores are often 0, and ties are broken differently
        "index_head_dim": 32,
        "index_topk": ALL,
        "compress_ratios": ratios,
        "n_routed_experts": 2,
        "num_experts_per_tok": 2,
        "num_hash_layers": 0,
        "hc_sinkhorn_iters": 4,
        "max_position_embeddings": 1 << 20,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 1 << 16,
        },
        "pad_token_id": 255,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = transformers.DeepseekV4Config(**(settings | overrides))
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "position_bias")) or "embed_tokens" in name:
                parameter.normal_(0, 1, generator=generator)
            elif parameter.dim() > 1:
                deviation = 0.02 if name.endswith("fn") else parameter.shape[-1] ** -0.5
                parameter.normal_(0, deviation, generator=generator)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(batch_size: int, length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 250, (batch_size, length), generator=generator)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


PIECES = [130, 1, 1, 1, 5, 60, 3, 1, 1, 1, 96]


@pytest.mark.parametrize(
    ("ratios", "dtype", "bound"),
    [
        ([SLIDING], torch.float32, 0.02),
        ([CSA], torch.float32, 0.02),
        ([HCA], torch.float32, 0.02),
        (MIXED, torch.float32, 0.05),
        (MIXED, torch.bfloat16, 0.2),
    ],
    ids=str,
)
def test_logits_beside_eager_attention(ratios, dtype, bound, device):
    """Every token sees all entries, so that no selection can flip; the logits' deviation is 1.

    Queries, keys and the outputs of heads are rounded to bfloat16: 2^-9 of values around 1 in each
    layer. Errors of bfloat16 models are those of transformers' own bfloat16.
    """
    model = make_model(ratios).to(device, dtype)
    ids = tokens(1, 300).to(device)
    expected = model(ids).logits.float()
    with enable(model, page_size=8) as handle:
        whole = model(ids).logits.float()
        cache = handle.new_cache(1)
        parts = [model(part, past_key_values=cache).logits for part in ids.split(PIECES, 1)]
    assert 0.8 < expected.std() < 1.2
    for got in (whole, torch.cat(parts, 1).float()):
        assert (got - expected).abs().max() < bound


class ExactGEMMs(TorchFunctionMode):
    """Linear layers in float64: bits that do not depend on the number of rows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            return func(*(None if x is None else x.double() for x in args)).to(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All GEMMs outside of attention give a token the same bits in any batch."""
    project = deepseek_v4.project_groups

    def one_by_one(x: Tensor, weight: Any, *, positions: Tensor, **given: Any) -> Tensor:
        parts = zip(x.split(1), positions.split(1), strict=True)
        return torch.cat([project(row, weight, positions=at, **given) for row, at in parts])

    monkeypatch.setattr(deepseek_v4, "project_groups", one_by_one)
    with ExactGEMMs():
        yield


def attend(layers: Any, cache: Any, x: Tensor, real: Tensor, pieces: list[int]) -> tuple[Any, Any]:
    """The output of each layer for ``x [B, S, hidden]`` in pieces, and the selections."""
    outputs, selections = [], []
    for part, new in zip(x.split(pieces, 1), real.split(pieces, 1), strict=True):
        cache.reserve(int(cache.columns) + part.shape[1])
        step = (layers.decode_step if part.shape[1] == 1 else layers.packed_step)(cache, new)
        out = [layers.attend(i, part, step, {})[0] for i in layers.modules]
        outputs.append(torch.stack(out))
        selections += [
            torch.nn.functional.pad(s, (0, TOPK - s.shape[1]), value=-1)
            for s in step.selections.values()
        ]
        cache.advance(new)
    return torch.cat(outputs, 2), torch.cat(selections)


@pytest.mark.parametrize(
    ("cache_format", "more"),
    [(None, [[127, 128, 45], [3] * 20 + [68, 1, 1, 1, 1, 168]]), (e4m3_format(64, 64, 32), [])],
    ids=["bf16", "e4m3"],
)
def test_bits_do_not_depend_on_the_pieces(exact, cache_format, more):
    """Outputs, selections, entries and index keys; entries end at 3, 7, ..., 127 and 255."""
    model = make_model([SLIDING, CSA, HCA], index_topk=TOPK)
    x, real = torch.randn(1, 300, 64), torch.ones(1, 300, dtype=torch.bool)
    results = []
    with enable(model, page_size=4, cache_format=cache_format, record_selections=True) as handle:
        for pieces in ([300], PIECES, *more):
            # With room for all columns, lists are equally wide: on some CPUs the order in which
            # a row's keys are added up depends on the width.
            cache = handle.new_cache(1, 300)
            result = attend(handle._layers, cache, x, real, pieces)
            for pages, layer_idx, count in (
                (cache.entries[deepseek_v4.CSA], 1, 75),
                (cache.index_keys, 1, 75),
                (cache.entries[deepseek_v4.HCA], 2, 2),
            ):
                at = torch.arange(count)
                slots = pages.table[0].long()[at // 4] * 4 + at % 4
                result += (pages.caches[layer_idx].read(slots),)
            results.append(result)
    for result in results[1:]:
        for got, expected in zip(result, results[0], strict=True):
            assert torch.equal(got, expected)


def test_rows_of_a_batch_equal_each_alone(exact):
    """Left and right padding, a row that starts late, a decode step without a row."""
    model = make_model([SLIDING, CSA, HCA], index_topk=TOPK)
    x, real = torch.randn(4, 290, 64), torch.ones(4, 290, dtype=torch.bool)
    real[1, :11] = False
    real[2, :135] = False
    real[3, 140:] = False
    with enable(model, page_size=8, record_selections=True) as handle:
        pieces = [130, 1, 1, 1, 1, 100, 1, 55]
        batch, _ = attend(handle._layers, handle.new_cache(4), x, real, pieces)
        for row in range(4):
            own = x[row : row + 1, real[row]]
            alone, _ = attend(
                handle._layers,
                handle.new_cache(1),
                own,
                torch.ones(own.shape[:2]) > 0,
                [own.shape[1]],
            )
            assert torch.equal(batch[:, row, real[row]], alone[:, 0])


@pytest.fixture(scope="module")
def shared_model() -> Any:
    return compressed_copying_model()


@pytest.fixture
def model(shared_model: Any) -> Iterator[Any]:
    yield shared_model
    assert "forward" not in vars(shared_model.model), "a test left the model enabled"


def generated(model: Any) -> Tensor:
    """200 random tokens and 512 that our attention generates."""
    ids = tokens(1, 200).to(model.device)
    with torch.no_grad(), enable(model) as handle:
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=512, do_sample=False
        )
        assert handle.cache.lengths.tolist() == [711]
    return text


@pytest.fixture(scope="module")
def text(shared_model: Any) -> Tensor:
    return generated(shared_model)


HEADS_OF_FLASH = {
    "head_dim": 512,
    "rope_dim": 64,
    "num_attention_heads": 64,
    "o_groups": 16,
    "index_n_heads": 64,
    "index_head_dim": 128,
}


def right(model: Any, text: Tensor) -> Tensor:
    """Whether each of the 512 tokens is the most likely one after those before it."""
    logits = model(text[:, :-1]).logits[:, 199:]
    return logits.argmax(-1) == text[:, 200:]


def test_drafting_layers_find_what_the_model_finds():
    """Those of DSpark, but for a token behind each window: then another is the latest."""
    far = 100
    model = compressed_copying_model(far=far, o_lora_rank=16)
    ids = tokens(1, 200)
    for _ in range(256):
        ids = torch.cat([ids, copied_tokens(ids, far)[:, -1:]], dim=1)
    drafting = copy.deepcopy(model)
    drafting.model.layers = torch.nn.ModuleList([draft_layer(model, far)])
    before, after = markov_weights(256)
    with torch.no_grad():
        assert right_of(model(ids[:, :-1]).logits, ids).all()
        logits = drafting(ids[:, :-1]).logits + before[ids[:, :-1]] @ after.T
    wrong = (~right_of(logits, ids)).nonzero()[:, 1] + 200
    assert set(wrong.tolist()) <= {200, 256, 384}  # the first behind a window


def right_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Whether each token from the 200th on is the most likely one."""
    return logits[:, 199:].argmax(-1) == ids[:, 200:]


def test_512_tokens_equal_eager_attention(model, text, device):
    """Each token is transformers' choice after the same tokens, so its own text is the same.

    Its two best logits differ by 18 at least; ours differ from them by less than 1.
    """
    if device != "cpu":
        model = copy.deepcopy(model).to(device)
        text = generated(model)
    assert torch.equal(copied_tokens(text[:, :-1])[:, -512:], text[:, 200:])
    assert right(model, text).all()
    logits = model(text[:, :-1]).logits[:, 199:]
    best = logits.topk(2, -1).values
    assert (best[..., 0] - best[..., 1]).min() > 17
    with enable(model):
        ours = model(text[:, :-1]).logits[:, 199:]
    assert (ours - logits).abs().max() < 1
    start = text[:, :250]
    options = {"attention_mask": torch.ones_like(start), "max_new_tokens": 16, "do_sample": False}
    assert torch.equal(model.generate(start, **options), text[:, :266])


@pytest.mark.parametrize(
    ("sizes", "dtype", "cache_format"),
    [
        ({}, torch.bfloat16, None),
        (HEADS_OF_FLASH, torch.float32, FP8_584),
    ],
    ids=["bf16", "fp8_584"],
)
def test_other_dtypes_choose_the_same_tokens(text, sizes, dtype, cache_format, device):
    other, text = compressed_copying_model(dtype=dtype, **sizes).to(device), text.to(device)
    if dtype == torch.bfloat16:
        assert right(other, text).all()
    with enable(other, cache_format=cache_format):
        assert right(other, text).all()


class TestMutants:
    """Wrong versions of this attention, which the text must tell from the right one."""

    def wrong(self, model: Any, text: Tensor) -> int:
        with enable(model):
            return int((~right(model, text)).sum())

    def test_halves_swapped(self, text):
        model = compressed_copying_model()
        compressor = model.model.layers[1].self_attn.compressor
        for module in (compressor.kv_proj, compressor.gate_proj):
            module.weight.copy_(module.weight.roll(64, 0))
        compressor.position_bias.copy_(compressor.position_bias.roll(64, 1))
        assert self.wrong(model, text) > 256

    @pytest.mark.parametrize(("layer_idx", "least"), [(1, 256), (2, 64)])
    def test_no_position_bias(self, text, layer_idx, least):
        model = compressed_copying_model()
        model.model.layers[layer_idx].self_attn.compressor.position_bias.zero_()
        assert self.wrong(model, text) > least

    def test_no_sink(self, text):
        model = compressed_copying_model()
        model.model.layers[1].self_attn.sinks.fill_(-torch.inf)
        assert self.wrong(model, text) > 256

    def test_outputs_stay_rotated(self, model, text, monkeypatch):
        project = deepseek_v4.project_groups
        monkeypatch.setattr(
            deepseek_v4, "project_groups", lambda x, weight, **_: project(x, weight)
        )
        assert self.wrong(model, text) > 256

    def test_the_table_of_other_layers(self, model, text, monkeypatch):
        other = {"main": "compress", "compress": "main"}
        table = deepseek_v4.CompressedLayers._new_table
        monkeypatch.setattr(
            deepseek_v4.CompressedLayers,
            "_new_table",
            lambda self, kind, *given: table(self, other[kind], *given),
        )
        assert self.wrong(model, text) > 256

    @pytest.mark.parametrize(("op", "least"), [("indexer_topk", 90), ("visible_slots", 2)])
    def test_entries_are_seen_a_token_late(self, model, text, monkeypatch, op, least):
        """Entry ``w`` for ``w < p // ratio``: every 4th token is wrong, or some in 128."""
        original = getattr(deepseek_v4, op)

        def late(*args: Any, ratio: int = 1, **given: Any) -> Any:
            if op == "indexer_topk":
                given["seq_lens"] = given["seq_lens"] - 1
            elif ratio > 1:
                args = (args[0] - 1, *args[1:])
            return original(*args, ratio=ratio, **given)

        monkeypatch.setattr(deepseek_v4, op, late)
        assert self.wrong(model, text) >= least


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_cache": False, "max_new_tokens": 3},
        {"num_beams": 3},
        {"prefill_chunk_size": 48},
        {"do_sample": True, "top_k": 5},
    ],
    ids=str,
)
def test_generate_gives_the_same_tokens(model, options, device):
    if device != "cpu":
        model = copy.deepcopy(model).to(device)
    ids = tokens(2, 200).to(device)
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, **options}
    torch.manual_seed(0)
    expected = model.generate(ids, **arguments)
    torch.manual_seed(0)
    with enable(model, page_size=8):
        assert torch.equal(model.generate(ids, **arguments), expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_two_gpus_say_the_same_as_one(model):
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    one, two = copy.deepcopy(model).to(devices[0]), copy.deepcopy(model)
    spread(two, devices)
    ids = tokens(2, 200).to(devices[0])
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    for options in ({}, {"num_beams": 3}, {"use_cache": False}):
        arguments = {"attention_mask": mask, "max_new_tokens": 12, **options}
        with enable(one, page_size=8), enable(two, page_size=8):
            expected = one.generate(ids, **arguments)
            assert torch.equal(two.generate(ids, **arguments), expected)


def test_padding_is_not_pooled(model):
    """Unlike in transformers, a padded row gives the tokens of the row alone."""
    ids, mask = tokens(2, 200), torch.ones(2, 200, dtype=torch.long)
    mask[1, :30] = 0
    with enable(model, page_size=8) as handle:
        got = model.generate(ids, attention_mask=mask, max_new_tokens=12)
        alone = model.generate(ids[1:, 30:], attention_mask=mask[1:, 30:], max_new_tokens=12)
        assert torch.equal(got[1:, 200:], alone[:, 170:])
        assert torch.equal(copied_tokens(alone)[:, 19:-1], alone[:, 172:])
        model(ids, attention_mask=mask * 0)  # padding only
        assert handle.cache.lengths.tolist() == [0, 0]


def test_fp8_projections_keep_their_codes(model, text):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    changed = copy.deepcopy(model)
    for layer in changed.model.layers:
        plain = layer.self_attn.o_a_proj
        cols, rows = plain.in_features, plain.out_features
        scale = plain.weight.abs().view(rows, cols // 128, 128).amax((0, 2)).clamp(min=1e-4) / 448
        codes = (plain.weight.view(rows, -1, 128) / scale[:, None]).flatten(1)
        module = fp8.FP8GroupedLinear(cols, rows, n_groups=plain.n_groups, block_size=(128, 128))
        module.weight = torch.nn.Parameter(codes.to(torch.float8_e4m3fn), requires_grad=False)
        module.weight_scale_inv = torch.nn.Parameter(scale[None], requires_grad=False)
        layer.self_attn.o_a_proj = module
    with enable(changed):
        assert right(changed, text).all()


class TestContinuing:
    @pytest.mark.parametrize("max_length", [None, 320])
    def test_a_second_turn(self, model, text, max_length):
        options = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
        first, chat = text[:, :201], torch.cat([text[:, :210], tokens(1, 40)], 1)
        with enable(model, page_size=8) as handle:
            mask = torch.ones_like(chat)
            expected = model.generate(chat, attention_mask=mask, **options).sequences
            cache = handle.new_cache(1, max_length)
            turn = model.generate(
                first, attention_mask=mask[:, :201], past_key_values=cache, **options
            )
            assert torch.equal(turn.sequences, text[:, :210])
            turn = model.generate(
                chat, attention_mask=mask, past_key_values=turn.past_key_values, **options
            )
            assert turn.past_key_values is cache
        assert torch.equal(turn.sequences, expected)

    @pytest.mark.parametrize("max_length", [None, 320])
    def test_rows_are_selected_repeated_wound_back_and_reset(self, model, max_length):
        ids = tokens(3, 270)
        with enable(model, page_size=8) as handle:
            expected = model(ids).logits
            cache = handle.new_cache(3, max_length)
            addresses = [tensor.data_ptr() for tensor in cache._tensors()]
            model(ids[:, :258], past_key_values=cache)
            with pytest.raises(
                ValueError, match="all tokens of a row or at most the last 8, got 9"
            ):
                cache.crop(-9)
            cache.crop(-3)
            model(ids[:, 255:256], past_key_values=cache)
            with pytest.raises(ValueError, match="at most the last 8, got 9"):
                cache.crop(-7)  # 258 tokens were there
            cache.crop(-6)
            assert cache.lengths.tolist() == [250] * 3
            order = [1, 2, 0]
            cache.reorder_cache(torch.tensor(order))
            if max_length is None:
                cache.batch_select_indices(torch.tensor([2, 0]))
                cache.batch_repeat_interleave(2)
                cache, order = copy.deepcopy(cache), [0, 0, 1, 1]
            else:
                assert addresses == [tensor.data_ptr() for tensor in cache._tensors()]
            logits = model(ids[order, 250:], past_key_values=cache).logits
            assert (logits - expected[order, 250:]).abs().max() < 0.05
            for store in cache.stores:  # a later text reads nothing of an earlier one
                for tensor in store.tensors():
                    if tensor.is_floating_point():
                        tensor.fill_(torch.nan)
            cache.reset()
            logits = model(ids[order], past_key_values=cache).logits
            assert (logits - expected[order]).abs().max() < 0.05
            cache.crop(-270)
            model(ids[order, :20], past_key_values=cache)
            cache.crop(-1)  # counted from 20 tokens, not from 270

    def test_hidden_columns(self, model):
        """Padding behind an answer was computed like tokens; the next mask hides up to 8."""
        ids, mask = tokens(2, 180), torch.ones(2, 180, dtype=torch.long)
        mask[1, 162:170] = 0
        with enable(model, page_size=8):
            expected = model(ids, attention_mask=mask).logits[:, 170:]
            cache = model(ids[:, :170]).past_key_values
            got = model(ids[:, 170:], attention_mask=mask, past_key_values=cache).logits
            assert (got - expected).abs().max() < 0.05
            cache = model(ids[:, :170]).past_key_values
            mask[1, 161] = 0
            with pytest.raises(ValueError, match="at most the last 8, got 9"):
                model(ids[:, 170:], attention_mask=mask, past_key_values=cache)
            assert cache.lengths.tolist() == [170, 170]


def test_decode_steps_compile_once(device):
    torch._dynamo.reset()
    model = make_model(
        [CSA, HCA],
        index_topk=TOPK,
        hc_mult=1,
        hc_sinkhorn_iters=1,
        experts_implementation="batched_mm",
    ).to(device)
    ids, mask = tokens(2, 140).to(device), torch.ones(2, 140, dtype=torch.long, device=device)
    mask[1, :9] = 0
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.__call__, fullgraph=True, backend=counter)
    with enable(model, page_size=8) as handle:
        for first in (124, 127):  # a second cache is served by the first one's code
            caches = [handle.new_cache(2, max_length=192) for _ in range(2)]
            for cache in caches:
                model(ids[:, :first], attention_mask=mask[:, :first], past_key_values=cache)
            for column in range(first, first + 5):
                token = ids[:, column : column + 1]
                given = {"position_ids": token * 0 + column}
                eager = model(token, past_key_values=caches[0], **given).logits
                logits = step(token, past_key_values=caches[1], **given).logits
                assert torch.equal(logits, eager), column
    assert counter.frame_count == 1


def test_a_step_is_copied_once_for_a_device(model):
    meta = torch.device("meta")
    with enable(model) as handle:
        cache = handle.new_cache(2)
        cache.reserve(5)
        step = handle._layers.packed_step(cache, torch.ones(2, 5, dtype=torch.bool))
    copied = step.on(meta)
    assert copied is step.on(meta)
    assert copied.selections is step.selections
    for tensor in (
        copied.plan.positions,
        *copied.sliding_window,
        copied.csa.page_table,
        copied.workspace.before,
    ):
        assert tensor.device == meta


@pytest.mark.parametrize(
    ("formats", "index_dim", "row", "index"),
    [
        ((None, None), 64, 1024, 128),
        ((FP8_584, None), 64, 584, 68),
        ((FP4_288, INDEX_MXFP4), 128, 288, 68),
    ],
    ids=["bf16", "fp8_584", "fp4_288"],
)
def test_cache_bytes(formats, index_dim, row, index):
    model = compressed_copying_model(head_dim=512, rope_dim=64, index_head_dim=index_dim)
    with enable(model, cache_format=formats[0], index_format=formats[1], page_size=16):
        cache = model(tokens(2, 33)).past_key_values
    assert cache.bytes_per_token == (row + index) / 4 + row / 128
    states = 4 * 2 * (16 * 1024 + 16 * 2 * index_dim + 136 * 512)
    assert cache.bytes_per_row == 3 * 136 * row + states
    # 48 columns fit: 16 entries of 4 tokens, and a page of 16 of 128.
    assert cache.nbytes == 2 * (cache.bytes_per_row + 16 * (row + index) + 16 * row)


@pytest.mark.parametrize(
    ("first", "pairs", "formats", "per_token", "per_row"),
    [
        ([deepseek_v4.WINDOW] * 2, 20, (FP8_584, INDEX_FP8), 3850.25, 17_996_992),
        ([deepseek_v4.WINDOW] * 2, 20, (BF16_512, bf16_format(128)), 6880, 20_570_112),
        ([deepseek_v4.HCA] * 2, 29, (FP8_584, INDEX_FP8), 5511.4375, 27_028_800),
        ([deepseek_v4.HCA] * 2, 29, (BF16_512, bf16_format(128)), 9848, 30_679_040),
    ],
    ids=["Flash, FP8", "Flash, bf16", "Pro, FP8", "Pro, bf16"],
)
def test_sizes_of_the_published_models(first, pairs, formats, per_token, per_row):
    """The numbers in docs/deepseek-v4.md."""
    types = [*first, *[deepseek_v4.CSA, deepseek_v4.HCA] * pairs, deepseek_v4.CSA]
    cache = deepseek_v4.CompressedCache(
        [(kind, torch.device("meta")) for kind in types],
        {deepseek_v4.CSA: Pooling(4, overlap=True), deepseek_v4.HCA: Pooling(128)},
        *formats,
        sliding_window=128,
        page_size=64,
        batch_size=0,
        max_length=None,
    )
    assert (cache.bytes_per_token, cache.bytes_per_row) == (per_token, per_row)


class TestRefusals:
    @pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
    def test_frequencies_that_depend_on_the_length(self, rope_type):
        model = make_model([CSA])
        model.model.rotary_emb.rope_type["compress"] = rope_type
        with pytest.raises(ValueError, match=rf"rope_parameters\['compress'\], got '{rope_type}'"):
            enable(model)

    def test_other_model_types(self):
        model = make_model([SLIDING])
        model.config.model_type = "deepseek_v41"
        with pytest.raises(ValueError, match="got 'deepseek_v41': its layers share entries"):
            enable(model)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"cache_format": BF16_512}, "cache_format must have head_dim 64 .* got bf16_512"),
            ({"cache_format": bf16_format(64, 32)}, "value_dim 64 for this model"),
            ({"index_format": bf16_format(64)}, "index_format must have head_dim 32"),
            ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ],
    )
    def test_formats(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            enable(make_model([CSA]), **arguments)

    def test_positions_with_gaps(self, model):
        with enable(model), pytest.raises(ValueError, match=r"ascend by 1 in each .* \[0, 2\]"):
            model(tokens(1, 2), position_ids=torch.tensor([[0, 2]]))

    def test_a_cache_of_another_model(self, model):
        other: Any = copying_model("deepseek_v3")
        with enable(other):
            past = other(tokens(1, 4) % 128).past_key_values
        with enable(model), pytest.raises(ValueError, match="layers of the formats"):
            model(tokens(1, 1), past_key_values=past)
        with enable(model):
            past = model(tokens(1, 4)).past_key_values
        with pytest.raises(ValueError, match="got a CompressedCache"):
            model(tokens(1, 1), past_key_values=past)
