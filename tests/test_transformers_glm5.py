"""GLM-5.3-Flash in the transformers backend: pooled index keys, latent rows without RoPE."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsemla import FP8_584, INDEX_FP8, bf16_format, e4m3_format

transformers = pytest.importorskip("transformers")

from sparsemla.backends.transformers import enable  # noqa: E402
from sparsemla.backends.transformers.cache import CACHE  # noqa: E402
from sparsemla_lab.testing.models_glm5 import PARTS, finding_model, pooled_model, prompt  # noqa: E402


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> Any:
    """Every token sees all others, so that no selection can flip."""
    return pooled_model(index_topk=512)


def tokens(batch_size: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 256, (batch_size, length), generator=generator)


@pytest.mark.parametrize(
    ("dtype", "bound", "latent", "index_dim"),
    [
        (torch.float32, 0.02, 64, 32),
        (torch.bfloat16, 0.2, 64, 32),
        (torch.bfloat16, 0.2, 512, 128),  # GLM-5.3-Flash's
    ],
    ids=str,
)
def test_logits_beside_eager_attention(dtype, bound, latent, index_dim, device):
    """The bounds of DeepSeek-V4's layers; the logits' deviation is 1."""
    sizes = {"kv_lora_rank": latent, "index_head_dim": index_dim, "index_topk": 512}
    model = pooled_model(dtype, **sizes).to(device)
    ids = tokens(1, 150).to(device)
    expected = model(ids).logits.float()
    with enable(model, page_size=8) as handle:
        whole = model(ids).logits.float()
        cache = handle.new_cache(1)
        pieces = [70, 1, 1, 1, 5, 40, 1, 1, 30]
        parts = [model(part, past_key_values=cache).logits for part in ids.split(pieces, 1)]
        assert cache.bytes_per_token == 2 * 2 * latent + 2 * index_dim / 4
    assert 0.8 < expected.std() < 1.2
    for got in (whole, torch.cat(parts, 1).float()):
        assert (got - expected).abs().max() < bound
    assert torch.equal(model(ids).logits.float(), expected)


def test_selections_equal_transformers(device):
    """bfloat16 keys and queries flip some; the keys of other pools or gates flip most."""
    model, ids, theirs = pooled_model().to(device), tokens(1, 150).to(device), []
    indexer = model.model.language_model.layers[1].self_attn.indexer
    hook = indexer.register_forward_hook(lambda *a: theirs.append(a[-1][0]))
    model(ids)
    hook.remove()
    with enable(model, record_selections=True) as handle:
        model(ids)
    pools = handle.selections[0][1]
    assert pools.shape == (150, 2)
    assert pools[:5, 0].tolist() == [-1, -1, -1, 0, 0]
    same = 0
    for row, chosen in zip(pools.tolist(), theirs[0].tolist(), strict=True):
        same += len(set(row) & {token // 4 for token in chosen[:8]} - {-1})
    assert same / (pools >= 0).sum() > 0.97


def test_a_padded_row_equals_the_row_alone(model):
    """As in transformers, pools begin with the first real token of a row."""
    ids, mask = tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :13] = 0
    expected = model(ids, attention_mask=mask).logits
    with enable(model, page_size=8) as handle:
        batch = model(ids, attention_mask=mask)
        assert handle.cache.lengths.tolist() == [60, 47]
        assert (batch.logits - expected)[mask.bool()].abs().max() < 0.02
        alone = model(ids[1:, 13:]).logits
        assert (batch.logits[1:, 13:] - alone).abs().max() < 0.02


@pytest.fixture(scope="module")
def text() -> Tensor:
    """The prompt and 40 tokens that our attention generates."""
    ids, _ = prompt()
    model = finding_model()
    with torch.no_grad(), enable(model, page_size=8):
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False
        )


def wrong(model: Any, text: Tensor) -> int:
    """How many of the 40 tokens are not the most likely after those before them."""
    logits = model(text[:, :-1]).logits[:, -40:]
    return int((logits.argmax(-1) != text[:, -40:]).sum())


def test_tokens_equal_eager_attention(text, device):
    """Each token is transformers' choice after the same tokens, by a margin of 15 in its logits."""
    ids, after = prompt()
    expected = [int(ids[0, -1]) % PARTS]
    for _ in range(39):
        expected.append(int(after[expected[-1]]))
    assert torch.equal(text[0, -40:], PARTS * torch.tensor(expected) + after[expected])
    for dtype in (torch.float32, torch.bfloat16):
        model = finding_model(dtype).to(device)
        logits = model(text[:, :-1].to(device)).logits[:, -40:].float()
        best = logits.topk(2, -1).values
        assert (best[..., 0] - best[..., 1]).min() > 14
        assert wrong(model, text.to(device)) == 0
        with enable(model, page_size=8):
            ours = model(text[:, :-1].to(device)).logits[:, -40:].float()
            assert wrong(model, text.to(device)) == 0
        assert (ours - logits).abs().max() < 1


def test_fp8_caches_choose_the_same_tokens(text):
    model = finding_model()
    with enable(model, cache_format=e4m3_format(64, 64, 64)) as handle:
        assert handle.new_cache(1).formats[1] == (e4m3_format(32, 32, 32).name,)
        assert wrong(model, text) == 0


def test_other_pooled_keys_choose_other_tokens(text):
    model = finding_model()
    bias = model.model.language_model.layers[1].self_attn.indexer.index_kpool_compress_ape
    bias.copy_(bias.roll(1, 0))
    with enable(model):
        assert wrong(model, text) > 4


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"num_beams": 3}, {"cache_implementation": "static"}],
    ids=str,
)
def test_generate_gives_the_same_tokens(text, options):
    model, ids = finding_model(), text[:, :70].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, **options}
    expected = model.generate(ids, **arguments)
    with enable(model, page_size=8):
        assert torch.equal(model.generate(ids, **arguments), expected)


def test_rows_of_a_cache(model):
    """Copies, selections of rows and a reset keep the states of all layers; nothing is cropped."""
    ids = tokens(2, 30)
    with enable(model, page_size=8) as handle:
        expected = model(ids).logits
        cache = handle.new_cache(2)
        model(ids[:, :20], past_key_values=cache)
        other = copy.deepcopy(cache)
        other.batch_select_indices(torch.tensor([1]))
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = model(ids.flip(0)[:, 20:], past_key_values=cache).logits
        assert (swapped.flip(0) - expected[:, 20:]).abs().max() < 0.02
        alone = model(ids[1:, 20:], past_key_values=other).logits
        assert (alone - expected[1:, 20:]).abs().max() < 0.02
        with pytest.raises(ValueError, match=f"{CACHE} must keep its columns"):
            cache.crop(-1)
        cache.crop(0)
        cache.reset()
        again = model(ids, past_key_values=cache).logits
        assert (again - expected).abs().max() < 0.02


def test_a_static_cache_keeps_its_memory(model):
    """States that transformers allocates in inference mode are copied once, and no more."""
    ids = tokens(2, 30)
    with torch.inference_mode(), enable(model, page_size=8) as handle:
        cache = handle.new_cache(2, max_length=32)
        model(ids[:, :20], past_key_values=cache)
        addresses = [tensor.data_ptr() for tensor in cache._tensors()]
        model(ids[:, 20:29], past_key_values=cache)
        model(ids[:, 29:], past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert addresses == [tensor.data_ptr() for tensor in cache._tensors()]


@pytest.mark.parametrize(
    ("sizes", "arguments", "message"),
    [
        ({"index_kpool_always_select_tail": False}, {}, "index_kpool_always_select_tail"),
        ({}, {"cache_format": FP8_584}, "cache_format must have head_dim 64"),
        ({}, {"index_format": INDEX_FP8}, "index_format must have head_dim 32"),
        ({}, {"cache_format": bf16_format(64, 32)}, "value_dim 64"),
        ({"layer_types": ["linear_attention"] * 3}, {}, "got linear ones only"),
    ],
    ids=["tail", "rows", "keys", "values", "linear"],
)
def test_refusals(sizes, arguments, message):
    with pytest.raises(ValueError, match=message):
        enable(pooled_model(**sizes), **arguments)


def test_a_first_layer_that_shares_a_selection():
    model = pooled_model(indexer_types=["full", "shared", "full"])  # the first is linear
    with enable(model), pytest.raises(ValueError, match="prev_topk_indices must be given"):
        model(tokens(1, 6))
