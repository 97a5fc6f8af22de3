"""Training of transformers' models: stages, losses, replay, and several processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import processes

transformers = pytest.importorskip("transformers")

from sparsemla import FP8_DS_MLA  # noqa: E402
from sparsemla.backends.transformers import (  # noqa: E402
    TrainingAttention,
    disable,
    enable,
    pack_selections,
    split_selections,
)
from sparsemla.backends.transformers.cache import CACHE  # noqa: E402
from sparsemla.backends.transformers.dense import (  # noqa: E402
    dense_attention,
    dense_attention_with_lse,
)
from sparsemla_lab.testing.models import copying_model  # noqa: E402

# transformers 5.23 renames gradient checkpointing; 5.17 has the old name only.
old_name_of_checkpointing = pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning")

TOPK, ALL = 6, 64
COLUMNS = 24


def make_model(model_type: str = "deepseek_v32", *, topk: int = TOPK, **sizes: Any) -> Any:
    """A model with attention that is not too certain: gradients would drown in rounding."""
    sizes = {"index_head_dim": 32} | sizes
    model: Any = copying_model(model_type, lag=5, index_topk=topk, **sizes)
    for layer in model.model.layers:
        layer.self_attn.q_b_proj.weight.data *= 0.2
    return model


def tokens(rows: int = 2, columns: int = COLUMNS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(128, (rows, columns), generator=generator)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model, which are cleared."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float
) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        error = (found[name] - grad).abs().max() / grad.abs().max()
        assert error <= tolerance, (name, float(error))


def count_calls(module: nn.Module) -> list[object]:
    """Grows with each call of the module."""
    calls: list[object] = []
    module.register_forward_pre_hook(lambda *given: calls.append(None))
    return calls


def freeze(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(False)


@pytest.fixture(scope="module")
def shared_model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def shared_glm() -> Any:
    """Its second layer has no indexer, and attends to what the first selects."""
    return make_model("glm_moe_dsa", num_hidden_layers=3, indexer_types=["full", "shared", "full"])


@pytest.fixture
def model(shared_model) -> Iterator[Any]:
    yield shared_model
    shared_model.eval().requires_grad_(True).zero_grad()
    assert "forward" not in vars(shared_model), "a test left the model enabled"


class Theirs:
    """A forward of transformers' eager attention, whose indexers select what ours selected.

    Attributes:
        loss: of the language model.
        divergences: for each layer the mean divergence of the indexer from attention, by their
            formulas, with a graph.
    """

    def __init__(
        self, model: Any, ids: Tensor, mask: Tensor, selections: dict[int, Tensor] | None
    ) -> None:
        real = mask.bool()
        self.divergences: dict[int, Tensor] = {}
        scores: dict[int, Tensor] = {}

        def score(layer_idx: int, indexer: Any, *args: Any) -> Tensor:
            """The scores with a graph: their indexer without its last line, and no_grad."""
            found: list[Tensor] = []
            with pytest.MonkeyPatch.context() as patch:
                topk = torch.Tensor.topk

                def keep(x: Tensor, *given: Any, **options: Any) -> Any:
                    found.append(x)
                    return topk(x, *given, **options)

                patch.setattr(torch.Tensor, "topk", keep)
                hidden, q_resid, *rest = args
                with torch.enable_grad():
                    type(indexer).forward.__wrapped__(
                        indexer, hidden.detach(), q_resid.detach(), *rest
                    )
            scores[layer_idx] = found[0]
            if selections is None:
                return torch.arange(ids.shape[1]).expand(*ids.shape, -1)
            columns = real.int().argsort(dim=1, descending=True, stable=True)  # real ones first
            lists = torch.zeros(*ids.shape, selections[layer_idx].shape[1], dtype=torch.int64)
            lists[real] = selections[layer_idx].long()
            chosen = columns[:, None].expand(-1, ids.shape[1], -1).gather(2, lists.clamp_min(0))
            own = torch.arange(ids.shape[1])[None, :, None]
            return chosen.where(lists >= 0, own)  # a token that is there already

        with pytest.MonkeyPatch.context() as patch:
            for layer_idx, layer in enumerate(model.model.layers):
                indexer = layer.self_attn.indexer
                if indexer is not None:
                    forward = lambda *a, i=layer_idx, x=indexer, **k: score(i, x, *a)  # noqa: E731
                    patch.setattr(indexer, "forward", forward)
            output = model(
                ids,
                attention_mask=mask,
                labels=labels_of(ids, mask),
                output_attentions=True,
                use_cache=False,
            )
        self.loss, self.logits = output.loss, output.logits
        for layer_idx, attention in enumerate(output.attentions):
            owner = max(idx for idx in scores if idx <= layer_idx)
            target = attention.detach().mean(1)[real]  # [T, columns]
            own = scores[owner][real].masked_fill(target == 0, -torch.inf)
            terms = F.kl_div(own.log_softmax(-1), target, reduction="none")
            self.divergences[layer_idx] = terms.where(target > 0, 0).sum(-1).mean()


def padding(side: str | None) -> Tensor:
    mask = torch.ones(2, COLUMNS, dtype=torch.int64)
    if side is not None:
        mask[1, slice(7) if side == "left" else slice(-7, None)] = 0
    return mask


def labels_of(ids: Tensor, mask: Tensor) -> Tensor:
    """Labels of real tokens that a real token precedes: padding predicts nothing."""
    return ids.masked_fill((mask == 0) | (mask.roll(1, 1) == 0), -100)


@pytest.mark.parametrize(
    ("shares", "stage", "topk", "side"),
    [
        (False, "dense", TOPK, "right"),
        (False, "sparse", TOPK, None),
        (False, "sparse", ALL, "right"),
        (False, "warmup", TOPK, "left"),
        (True, "sparse", TOPK, "left"),
        (True, "warmup", TOPK, None),
    ],
)
def test_losses_and_gradients_equal_transformers(
    model, shared_glm, monkeypatch, shares, stage, topk, side
):
    model = shared_glm.requires_grad_(True) if shares else model
    ids, mask = tokens(), padding(side)
    indexers = [layer.self_attn.indexer for layer in model.model.layers]
    for indexer in filter(None, indexers):
        monkeypatch.setattr(indexer, "index_topk", topk)
    with enable(model, training=stage, record_selections=True) as training:
        if stage == "warmup":
            freeze(training.main_parameters())
        output = model(ids, attention_mask=mask, labels=labels_of(ids, mask))
        language = output.loss - training.index_loss
        losses = training.index_losses
        output.loss.backward()
        if stage == "sparse":
            width = min(topk, int(mask.sum(1).max()))
            assert training.selections[0][0].shape == (mask.sum(), width)
    found = gradients(model)
    theirs = Theirs(model, ids, mask, training.selections[0] if stage == "sparse" else None)
    torch.testing.assert_close(language, theirs.loss)
    real = mask.bool()
    torch.testing.assert_close(output.logits[real], theirs.logits[real], atol=1e-4, rtol=1e-4)
    total = theirs.loss
    if stage == "dense":
        assert not losses
    else:
        for layer_idx, divergence in theirs.divergences.items():
            torch.testing.assert_close(losses[layer_idx], divergence, atol=1e-5, rtol=1e-4)
        # An indexer that serves two layers learns their mean.
        served = [0.5, 0.5, 1] if shares else [1, 1]
        total = total + sum(part * theirs.divergences[i] for i, part in enumerate(served))
    total.backward()
    assert_equal_gradients(found, gradients(model), 1e-4)


def test_each_loss_reaches_its_own_parameters(model):
    ids = tokens()
    with enable(model, training=True) as training:
        main, indexers = training.main_parameters(), training.indexer_parameters()
        assert len(main) + len(indexers) == len(list(model.parameters()))
        assert len(indexers) == 2 * 5
        output = model(ids, labels=ids)
        own = training.index_loss
        language = output.loss - own.detach()
        grads = torch.autograd.grad(own, main + indexers, retain_graph=True, allow_unused=True)
        assert all(grad is None for grad in grads[: len(main)])
        assert all(grad.any() for grad in grads[len(main) :])
        logits = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        torch.testing.assert_close(logits, language)
        grads = torch.autograd.grad(logits, main + indexers, allow_unused=True)
        assert all(grad.any() for grad in grads[: len(main)])
        assert all(grad is None for grad in grads[len(main) :])


def test_coefficient_of_the_loss(model):
    ids = tokens()
    with enable(model, training=True, index_loss_coefficient=0.5) as training:
        halved = model(ids, labels=ids).loss
        language = halved - 0.5 * training.index_loss
        training.index_loss_coefficient = 0
        model(ids, labels=ids).loss.backward()  # zeros, not None: DDP waits for gradients
        assert not any(parameter.grad.any() for parameter in training.indexer_parameters())
        # The Trainer divides a step's losses by its labels: here four batches of this size.
        training.index_loss_coefficient = 1.0
        count = 4 * (ids.numel() - len(ids))
        quarter = model(ids, labels=ids, num_items_in_batch=torch.tensor(count)).loss
        torch.testing.assert_close(quarter, (language + training.index_loss) / 4)
        with torch.no_grad():
            evaluated, logits = model(ids, labels=ids, return_dict=False)
        torch.testing.assert_close(evaluated, language)
        assert training.index_losses == {}
        assert training.index_loss == 0
        assert logits.shape == (2, COLUMNS, 128)


def test_a_loss_is_that_of_its_own_forward(model):
    """Also where another forward, of another thread, is the latest when the loss is made."""
    ids = tokens()
    with enable(model, training=True):
        expected = model(ids, labels=ids).loss

        def forward_of_another(*_: object) -> None:
            hook.remove()
            model(ids.roll(3, 1), labels=ids)

        hook = model.lm_head.register_forward_hook(forward_of_another)
        torch.testing.assert_close(model(ids, labels=ids).loss, expected, atol=0, rtol=0)


def test_stages_switch_and_the_model_is_restored(model):
    ids = tokens()
    with torch.no_grad():
        before = model(ids).logits
    training = enable(model, training="dense")
    dense = model(ids, labels=ids).loss
    training.stage = "sparse"
    assert model(ids, labels=ids).loss != dense
    assert len(training.index_losses) == 2
    freeze(training.main_parameters())
    training.stage = "warmup"
    assert model(ids, labels=ids).loss.requires_grad
    freeze(training.indexer_parameters())
    assert not model(ids, labels=ids).loss.requires_grad
    training.disable()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before, atol=0, rtol=0)


class TestPacked:
    """Sequences of a row attend to themselves only."""

    LENGTHS = (9, 1, 14)

    def packed(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        ids = tokens(1)
        positions = torch.cat([torch.arange(length) for length in self.LENGTHS])[None]
        return ids, positions, list(ids.split(self.LENGTHS, 1))

    @pytest.mark.parametrize("stage", ["dense", "sparse"])
    def test_equal_sequences_alone(self, model, stage):
        ids, positions, parts = self.packed()
        with enable(model, training=stage) as training:
            logits = model(ids, position_ids=positions).logits
            together = training.index_loss
            alone = [(model(part).logits, training.index_loss) for part in parts]
            torch.testing.assert_close(logits, torch.cat([x for x, _ in alone], 1))
            mean = sum(loss * length for (_, loss), length in zip(alone, self.LENGTHS, strict=True))
            torch.testing.assert_close(together, mean / COLUMNS)

    def test_offsets_of_flash_attention(self, model):
        ids, positions, _ = self.packed()
        offsets = torch.tensor([0, 9, 10, 24], dtype=torch.int32)
        options = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 14}
        with torch.no_grad(), enable(model, training=True):
            expected = model(ids, position_ids=positions).logits
            got = model(ids, position_ids=positions, **options).logits
        torch.testing.assert_close(got, expected, atol=0, rtol=0)

    @pytest.mark.parametrize("ends", [[0, 10, 9, 24], [0, 9, 9, 24], [1, 24], [0, 23], [0, 25]])
    def test_offsets_that_do_not_ascend(self, model, ends):
        offsets = torch.tensor(ends, dtype=torch.int32)
        with enable(model, training=True), pytest.raises(ValueError, match="cu_seq_lens_q must"):
            model(self.packed()[0], cu_seq_lens_q=offsets)

    def test_rows_of_a_batch(self, model):
        """A second row starts a sequence, also where its position would continue the first."""
        ids = tokens()
        positions = torch.cat([torch.arange(24), torch.arange(24, 48)]).view(2, 24)
        with torch.no_grad(), enable(model, training=True):
            both = model(ids, position_ids=positions).logits
            second = model(ids[1:], position_ids=positions[1:]).logits
        torch.testing.assert_close(both[1:], second)


class TestReplay:
    """Training attends to the tokens that generation attended to."""

    def rollout(self, model: Any, ids: Tensor, mask: Tensor, count: int) -> tuple[Tensor, Any]:
        with enable(model, record_selections=True) as handle:
            generated = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
            )
            lengths = mask.sum(1).tolist()
            return generated, split_selections(handle.selections, lengths)

    def test_of_generate_in_packed_sequences(self, model):
        mask = torch.ones(2, 16, dtype=torch.int64)
        mask[0, :5] = 0
        generated, lists = self.rollout(model, tokens(2, 16), mask, 4)
        # The last token was not computed.
        sequences = [generated[0, 5:-1], generated[1, :-1]]
        packed = torch.cat(sequences)[None]
        positions = torch.cat([torch.arange(len(each)) for each in sequences])[None]
        recorded = pack_selections(lists)
        assert {layer: tuple(x.shape) for layer, x in recorded.items()} == {
            0: (33, TOPK),
            1: (33, TOPK),
        }
        with enable(model, training=True, record_selections=True) as training:
            logits = model(packed, position_ids=positions, selections=recorded).logits
            model(packed, position_ids=positions)
            replayed, chosen = training.selections
            for layer_idx, selection in recorded.items():
                assert torch.equal(replayed[layer_idx], selection)
        with torch.no_grad(), enable(model, record_selections=True) as handle:
            expected = torch.cat([model(each[None]).logits for each in sequences], 1)
        error = (logits - expected).pow(2).mean().sqrt() / expected.std()
        assert error < 0.006  # inference rounds rows and queries to bfloat16
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        # Nothing was rounded before the first indexer.
        assert torch.equal(chosen[0], pack_selections(handle.selections)[0])

    def test_wrong_lists_are_not_followed(self, model):
        """An entry behind its token, or before its sequence, is masked, not read."""
        ids = tokens(1)
        own = torch.arange(COLUMNS)[:, None]
        wrong = torch.cat([own, own + 1, own - 1000], 1)
        alone = {layer: torch.cat([own, own * 0 - 1, own * 0 - 1], 1) for layer in (0, 1)}
        with torch.no_grad(), enable(model, training=True):
            got = model(ids, selections={0: wrong, 1: wrong}).logits
            torch.testing.assert_close(got, model(ids, selections=alone).logits)

    def test_lists_of_other_shapes(self, model):
        ids = tokens(1)
        lists = {0: torch.zeros(COLUMNS, 4, dtype=torch.int32)}
        narrow = lists | {1: torch.zeros(COLUMNS - 1, 4, dtype=torch.int32)}
        with enable(model, training=True) as training:
            with pytest.raises(ValueError, match="selections must have a list for each of the"):
                model(ids, selections=lists)
            with pytest.raises(ValueError, match=r"selections\[1\] must be int32 or int64 \[24"):
                model(ids, selections=narrow)
            training.stage = "dense"
            with pytest.raises(ValueError, match="selections must be left out in the dense stage"):
                model(ids, selections=lists | {1: lists[0]})
        with pytest.raises(ValueError, match="must have a forward"):
            split_selections([], [3])
        with pytest.raises(ValueError, match=r"selections\[0\]\[0\] must have 3 rows"):
            split_selections([lists], [2, 1])
        with pytest.raises(ValueError, match="the same layers"):
            pack_selections([lists, {1: lists[0]}])


def test_a_warmup_keeps_no_graph_of_the_main_model(model):
    kept: list[tuple[int, ...]] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(tuple(x.shape))
        return x

    with enable(model, training="warmup") as training:
        freeze(training.main_parameters())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(tokens())
    assert kept
    assert not any(model.config.intermediate_size in shape for shape in kept)


@old_name_of_checkpointing
@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_checkpointing_changes_no_bit(shared_glm, stage):
    model, ids = shared_glm.requires_grad_(True).train(), tokens()
    with enable(model, training=stage, record_selections=True) as training:
        if stage == "warmup":
            freeze(training.main_parameters())
        model(ids, labels=ids).loss.backward()
        expected = gradients(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        output = model(ids, labels=ids)
        losses = dict(training.index_losses)
        output.loss.backward()
        assert_equal_gradients(gradients(model), expected, 0)
        # The losses of the second run of a layer would keep its graph.
        assert all(training.index_losses[layer_idx] is loss for layer_idx, loss in losses.items())
        if stage == "sparse":
            model.gradient_checkpointing_enable({"use_reentrant": True})
            with pytest.raises(ValueError, match="must have use_reentrant=False"):
                model(ids, labels=ids)
    model.gradient_checkpointing_disable()


def test_compiles_without_graph_break():
    model, ids = make_model(num_hidden_layers=1), tokens()
    with enable(model, training=True):
        model(ids, labels=ids).loss.backward()
        expected = gradients(model)
        step = torch.compile(model.__call__, fullgraph=True, backend="eager")
        step(ids, labels=ids).loss.backward()
    assert_equal_gradients(gradients(model), expected, 1e-5)


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
@pytest.mark.parametrize(
    ("dtype", "autocasts"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)],
    ids=str,
)
def test_half_precision(stage, dtype, autocasts):
    """Weights of bfloat16, or float32 weights under autocast."""
    model, ids = make_model(), tokens()
    with enable(model, training=stage) as training:
        if stage == "warmup":
            freeze(training.main_parameters())
        model(ids, labels=ids).loss.backward()
        expected = gradients(model)
        if not autocasts:
            model.to(dtype)
        with torch.autocast("cpu", dtype, enabled=autocasts):
            loss = model(ids, labels=ids).loss
        loss.backward()
    for name, grad in gradients(model).items():
        cosine = F.cosine_similarity(grad.float().flatten(), expected[name].flatten(), dim=0)
        assert cosine > 0.97, (name, float(cosine))


@pytest.mark.parametrize("lengths", [(8, 8), (5, 11), (16,)])
@pytest.mark.parametrize("value_dim", [24, 40])
def test_dense_attention(device, lengths, value_dim):
    q, k = torch.randn(2, 16, 3, 32, device=device).unbind()
    v = torch.randn(16, 3, value_dim, device=device)
    token = torch.arange(16, device=device)
    sequence = token.new_tensor(range(len(lengths))).repeat_interleave(token.new_tensor(lengths))
    seen = (sequence[:, None] == sequence) & (token[:, None] >= token)
    scores = torch.einsum("thd,shd->hts", q, k) * 0.2
    scores = scores.masked_fill(~seen, -torch.inf)
    expected = torch.einsum("hts,shv->thv", scores.softmax(-1), v)
    out, lse = dense_attention_with_lse(q, k, v, lengths, softmax_scale=0.2)
    torch.testing.assert_close(lse, scores.logsumexp(-1).T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    alone = dense_attention(q, k, v, lengths, softmax_scale=0.2)
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stage", ["dense", "warmup", "sparse"])
def test_on_a_gpu(stage):
    """bfloat16 on a GPU against float32 on the CPU, for lists of the same tokens."""
    sizes = {"kv_lora_rank": 512, "index_head_dim": 128}
    model, ids = make_model(topk=32, **sizes), tokens(2, 100)
    with enable(model, training=stage, record_selections=True) as training:
        if stage == "warmup":
            freeze(training.main_parameters())
        model(ids, labels=ids).loss.backward()
        expected = gradients(model)
        lists = training.selections[0] if stage == "sparse" else None
        model.to("cuda", torch.bfloat16)
        model(ids.cuda(), labels=ids.cuda(), selections=lists).loss.backward()
    for name, grad in gradients(model).items():
        own = grad.float().cpu().flatten()
        cosine = F.cosine_similarity(own, expected[name].flatten(), dim=0)
        assert cosine > 0.97, (name, float(cosine))


def _model_on_a_gpu() -> Any:
    """A bfloat16 model with the same bits in every process.

    Its weights come from factorisations, which more threads round elsewhere; a rank has only one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = make_model(topk=32, kv_lora_rank=512, index_head_dim=128)
    torch.set_num_threads(threads)
    return model.to("cuda", torch.bfloat16)


def _train(
    rank: int, world: int, kind: str, stage: Any, device: str
) -> tuple[float, dict[str, Tensor]]:
    """Two steps on a rank's part of a batch: the loss, and the gradients of a rank."""
    from torch.distributed.fsdp import fully_shard

    model, ids = make_model(), tokens(4)
    if device == "cuda":
        model = _model_on_a_gpu()
        ids = tokens(4, 100).cuda()
    with enable(model, training=stage) as training:
        if stage == "warmup":
            freeze(training.main_parameters())
        runs: Any = model
        if kind == "fsdp":
            if stage == "sparse":
                model.train().gradient_checkpointing_enable({"use_reentrant": False})
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
            again = count_calls(model.model.layers[1].mlp)
        elif kind == "ddp":
            training.index_loss_coefficient = 0.0
            runs = nn.parallel.DistributedDataParallel(model)
        ids = ids.chunk(world)[rank]
        for _ in range(2):
            model.zero_grad()
            loss = runs(ids, labels=ids).loss
            loss.backward()
    found = gradients(model)
    if kind == "fsdp":
        assert len(again) == (4 if stage == "sparse" else 2)
        found = {name: grad.full_tensor() for name, grad in found.items()}
    return loss.item(), {name: grad.float().cpu() for name, grad in found.items()}


def _one_process(
    num_ranks: int, stage: str, device: str
) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """What ranks should find: the loss, gradients, and for each how far theirs may be away.

    On the CPU, in float32, of the whole batch. On GPUs, in bfloat16, the mean of the ranks' parts,
    each by itself: a product of other rows is rounded elsewhere, and gradients whose terms cancel
    then differ much (on a CPU by 0.13 of the largest for the bias of an indexer's norm, with or
    without ranks). What ranks may round is the sum of parts, once for each addition.
    """
    if device == "cpu":
        loss, expected = _train(0, 1, "alone", stage, device)
        return loss, expected, {name: 1e-4 * float(x.abs().max()) for name, x in expected.items()}
    parts = [_train(rank, num_ranks, "alone", stage, device) for rank in range(num_ranks)]
    names, additions = parts[0][1], num_ranks - 1
    stacked = {name: torch.stack([found[name] for _, found in parts]) for name in names}
    tolerances = {
        name: additions * 2**-8 * float(x.abs().mean(0).max()) for name, x in stacked.items()
    }
    loss = sum(each for each, _ in parts) / num_ranks
    return loss, {name: x.mean(0) for name, x in stacked.items()}, tolerances


def assert_near(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerances: dict[str, float]
) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        error = float((found[name] - grad).abs().max())
        assert error <= tolerances[name], (name, error, tolerances[name])


@old_name_of_checkpointing
@pytest.mark.parametrize(("num_ranks", "device"), processes.RANKS)
@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_fsdp_equals_one_process(stage, num_ranks, device, tmp_path):
    loss, expected, tolerances = _one_process(num_ranks, stage, device)
    arguments = (num_ranks, "fsdp", stage, device)
    ranks = processes.on_ranks(num_ranks, tmp_path, device, _train, *arguments)
    assert sum(each for each, _ in ranks) / num_ranks == pytest.approx(loss, rel=1e-5)
    for _, found in ranks:
        assert_near(found, expected, tolerances)


class Nested(torch.autograd.Function):
    """A backward pass that runs ``depth`` more, each within the last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.depth:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).backward()
        return grad, None


@pytest.mark.parametrize(("num_ranks", "device"), processes.RANKS)
def test_ddp_without_the_index_loss(num_ranks, device, tmp_path):
    """A coefficient of 0 leaves zeros: DDP finds no parameter without a gradient."""
    _, expected, tolerances = _one_process(num_ranks, "sparse", device)
    # Beyond 60 autograd takes a thread, and no process that is forked then has backward passes.
    Nested.apply(torch.ones(1, requires_grad=True), 80).backward()
    arguments = (num_ranks, "ddp", "sparse", device)
    for _, found in processes.on_ranks(num_ranks, tmp_path, device, _train, *arguments):
        indexers = [name for name in found if "indexer" in name]
        assert indexers
        assert not any(found.pop(name).any() for name in indexers)
        assert_near(found, {name: expected[name] for name in found}, tolerances)
        assert found.keys() | set(indexers) == expected.keys()


@old_name_of_checkpointing
@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_trainer(model, tmp_path, stage):
    """The Trainer needs no subclass: the output's loss has all losses, for any accumulation."""
    pytest.importorskip("accelerate")
    examples = [{"input_ids": row, "labels": row} for row in tokens(4)]
    with enable(model, training=stage) as training:
        if stage == "warmup":
            freeze(training.main_parameters())
        before = [parameter.clone() for parameter in training.indexer_parameters()]
        trained = make_model()
        trained.load_state_dict(model.state_dict())
        losses = []
        for accumulation in (1, 2):
            arguments = transformers.TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=4 // accumulation,
                gradient_accumulation_steps=accumulation,
                gradient_checkpointing=True,
                max_steps=1,
                learning_rate=1e-3,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
            )
            model.load_state_dict(trained.state_dict())
            trainer = transformers.Trainer(model, arguments, train_dataset=examples)
            losses.append(trainer.train().training_loss)
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        after = training.indexer_parameters()
        assert all((x != y).any() for x, y in zip(before, after, strict=True))
        model.load_state_dict(trained.state_dict())


class TestRefusals:
    def test_of_enable(self, model):
        with pytest.raises(ValueError, match="training must be True, False or one of dense, warm"):
            enable(model, training="wrong")  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="cache_format, index_format and page_size must be"):
            enable(model, training=True, cache_format=FP8_DS_MLA)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="index_loss_coefficient must be a number"):
            enable(model, training=True, index_loss_coefficient="1")  # type: ignore[call-overload]
        with enable(model, training=True) as training:
            assert isinstance(training, TrainingAttention)
            with pytest.raises(ValueError, match="stage must be one of dense, warmup, sparse"):
                training.stage = "wrong"  # type: ignore[assignment]
            with pytest.raises(ValueError, match="must keep its options within a with block"):
                enable(model)

    def test_of_models(self, model, monkeypatch):
        with pytest.raises(ValueError, match="model_type of deepseek_v32 or glm_moe_dsa to be"):
            enable(copying_model("deepseek_v3", lag=5, num_hidden_layers=1), training=True)
        monkeypatch.setattr(model, "is_quantized", True, raising=False)
        with pytest.raises(ValueError, match="model must not be quantised"):
            enable(model, training=True)
        monkeypatch.undo()
        monkeypatch.setattr(model.config, "attention_dropout", 0.1)
        with pytest.raises(ValueError, match=r"attention_dropout of 0: .* got 0\.1"):
            enable(model, training=True)
        monkeypatch.undo()
        with pytest.raises(ValueError, match=r"kv_b_proj of .*, got torch\.float64 as its weight"):
            enable(make_model(num_hidden_layers=1).double(), training=True)
        with pytest.raises(ValueError, match="kv_lora_rank of at most 512, got 576"):
            enable(make_model(num_hidden_layers=1, kv_lora_rank=576), training=True)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"use_cache": True}, "use_cache must be left out: a model that trains keeps no cache"),
            ({CACHE: transformers.DynamicCache()}, f"{CACHE} must be left out"),
            ({"output_attentions": True}, "output_attentions must be False"),
            ({"attention_mask": torch.ones(2, 1, 3, 3)}, r"shape \[batch, columns\] = \[2, 3\]"),
            ({"attention_mask": torch.zeros(2, 3)}, "attention_mask must have a real token"),
            (
                {"attention_mask": torch.ones(2, 3), "position_ids": torch.tensor([[0, 1, 0]])},
                "position_ids must ascend in each row where attention_mask is given",
            ),
            ({"cu_seq_lens_q": torch.tensor([0, 3])}, "cu_seq_lens_q must ascend from 0 to the 3"),
            ({"inputs_embeds": torch.zeros(2, 3, 64)}, "must be given, got both"),
            ({"input_ids": None}, "must be given, got neither"),
        ],
        ids=lambda value: None if isinstance(value, str) else "-".join(value),
    )
    def test_of_a_forward(self, model, given, message):
        with enable(model, training=True), pytest.raises(ValueError, match=message):
            model(**{"input_ids": tokens(2, 3)} | given)

    def test_of_a_warmup_that_trains_more(self, model):
        with enable(model, training="warmup"):
            with pytest.raises(ValueError, match=r"got model\.embed_tokens\.weight that does"):
                model(tokens(1, 3))
            with torch.no_grad():
                model(tokens(1, 3))

    def test_of_generation(self, model):
        with (
            enable(model, training=True),
            pytest.raises(ValueError, match="enable\\(model\\) without training generates"),
        ):
            model.generate(tokens(1, 3), max_new_tokens=2)


def test_enabling_again(model):
    training = enable(model, training="dense")
    assert enable(model, training="dense") is training
    training.stage = "sparse"
    assert enable(model, training=True) is training
    assert repr(training) == (
        "TrainingAttention of DeepseekV32ForCausalLM: 2 layers, training='sparse', "
        "index_loss_coefficient=1.0, record_selections=False"
    )
    renewed = enable(model, training="dense")
    assert renewed is not training
    with torch.no_grad():
        expected = model(tokens()).logits
        handle = enable(model)
        assert model(tokens(), use_cache=True).past_key_values is handle.cache is not None
        handle.disable()
        enable(model, training="dense")
        assert torch.equal(model(tokens()).logits, expected)
    disable(model)
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.model)


def test_without_a_head(model):
    """A trainer's own loop: the losses are the handle's."""
    ids = tokens()
    with enable(model, training=True) as training:
        model(ids)
        expected = training.index_loss
    with enable(model.model, training=True) as training:
        hidden = model.model(inputs_embeds=model.model.embed_tokens(ids)).last_hidden_state
        torch.testing.assert_close(training.index_loss, expected)
        (hidden.mean() + training.index_loss).backward()
    assert all(p.grad is not None for p in model.model.parameters())
