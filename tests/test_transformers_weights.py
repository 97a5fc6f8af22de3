"""Weights of enabled models: adapters, hooks, biases, and values that change after a call."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sparsemla import e4m3_format

transformers = pytest.importorskip("transformers")

from sparsemla.backends.transformers import disable, enable  # noqa: E402
from sparsemla.backends.transformers.linear import LINEAR  # noqa: E402
from sparsemla_lab.testing.models import CLASSES, copying_model  # noqa: E402
from sparsemla_lab.testing.models_glm5 import pooled_model  # noqa: E402
from sparsemla_lab.testing.models_v4 import compressed_copying_model  # noqa: E402

MODELS: dict[str, Callable[..., Any]] = {
    **{name: functools.partial(copying_model, name, lag=5, index_topk=8) for name in CLASSES},
    "deepseek_v3": functools.partial(copying_model, "deepseek_v3", lag=5),
    "glm5_next": pooled_model,
    "deepseek_v4": compressed_copying_model,
}
ABSORBED = {name: "o_a_proj" if name == "deepseek_v4" else "kv_b_proj" for name in MODELS}

every_model = pytest.mark.parametrize("model_type", MODELS)


@functools.cache
@torch.no_grad()
def built(model_type: str) -> Any:
    """A model with random weights, each of which moves the logits."""
    model = MODELS[model_type]()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        random = torch.randn(parameter.shape, generator=generator)
        if "embed_tokens" in name or name.endswith(("sinks", "position_bias", "ape")):
            parameter.copy_(random)
        elif "norm" in name and parameter.dim() == 1:
            parameter.add_(0.1 * random)
        elif parameter.dim() > 1 and "conv" not in name:
            parameter.copy_(random * (0.02 if name.endswith("fn") else parameter.shape[-1] ** -0.5))
    return model


def make_model(model_type: str) -> Any:
    return copy.deepcopy(built(model_type))


def make_tokens(model_type: str) -> Tensor:
    """DeepSeek-V4 pools windows of 128 tokens."""
    columns = 140 if model_type == "deepseek_v4" else 30
    return torch.randint(1, 128, (1, columns), generator=torch.Generator().manual_seed(1))


def attention_of(model: Any) -> dict[str, Any]:
    """The attention modules with keys, by their names in the base model."""
    base = getattr(model.base_model, "language_model", model.base_model)
    types = getattr(base.config, "layer_types", None) or [""] * len(base.layers)
    return {
        f"layers.{idx}.self_attn": layer.self_attn
        for idx, (layer, kind) in enumerate(zip(base.layers, types, strict=True))
        if kind != LINEAR
    }


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """The logits of a model that is enabled for this forward alone."""
    with enable(model):
        return model(ids).logits


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class Adapted(nn.Module):
    """A layer with an adapter, which is linear whatever the layer's weight is made of.

    As those of peft, it has the weight of the layer that it wraps.
    """

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.active = True

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        out = self.base_layer(x)
        return out + self.scale * self.base_layer(x.roll(1, -1)) if self.active else out

    def merged(self) -> Tensor:
        return self.weight + self.scale * self.weight.roll(-1, 1)


def linear_layers(model: Any) -> list[tuple[Any, str]]:
    """Parent and name of each linear layer in the last layer with an indexer, or in the last."""
    attention = list(attention_of(model).values())
    chosen = [each for each in attention if "indexer" in dict(each.named_modules())]
    chosen += [each for each in attention if getattr(each, "compressor", None) is not None]
    found = []
    for parent in (chosen or attention)[0].modules():
        found += [(parent, name) for name, x in parent.named_children() if isinstance(x, nn.Linear)]
    return found


class TestAdapters:
    @every_model
    def test_of_every_linear_layer(self, model_type):
        """An adapter that is added to an enabled model counts as if it were merged."""
        model, merged, ids = make_model(model_type), make_model(model_type), make_tokens(model_type)
        layers, others = linear_layers(model), linear_layers(merged)
        plain = logits_of(model, ids)
        names = set()
        for (parent, name), (other, _) in zip(layers, others, strict=True):
            before, weight = getattr(parent, name), getattr(other, name).weight
            with enable(model):
                model(ids)
                adapter = Adapted(before)
                setattr(parent, name, adapter)
                got = model(ids).logits
                if name == ABSORBED[model_type]:
                    adapter.active = False
                    assert torch.equal(model(ids).logits, plain)
            old = weight.clone()
            weight.copy_(adapter.merged())
            expected = logits_of(merged, ids)
            weight.copy_(old)
            setattr(parent, name, before)
            change = (expected - plain).norm()
            assert change > 0.001 * plain.norm(), name
            assert (got - expected).norm() < 0.1 * change, name
            names.add(name)
        assert ABSORBED[model_type] in names

    @every_model
    def test_of_the_absorbed_layer(self, model_type):
        """Logits beside those of transformers, in a prefill and in decode steps."""
        model, ids = make_model(model_type), make_tokens(model_type)
        for module in attention_of(model).values():  # no selection that rounding could flip
            for part in module.modules():
                if hasattr(part, "index_topk"):
                    part.index_topk = 512
        plain = model(ids).logits
        for module in attention_of(model).values():
            name = ABSORBED[model_type]
            setattr(module, name, Adapted(getattr(module, name)))
        expected = model(ids).logits
        with enable(model):
            past = model(ids[:, :-2]).past_key_values
            parts = [
                model(ids[:, -2:-1], past_key_values=past),
                model(ids[:, -1:], past_key_values=past),
            ]
        got = torch.cat([part.logits for part in parts], 1)
        change = (expected - plain)[:, -2:].norm()
        assert (got - expected[:, -2:]).norm() < 0.1 * change


ATTENTION = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]


@pytest.mark.filterwarnings("ignore:target_parameters:RuntimeWarning")  # of a model without experts
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
class TestPEFT:
    """The table of docs/transformers-details.md."""

    @pytest.fixture
    def with_adapter(self):
        peft = pytest.importorskip("peft")

        def make(model: Any, target_modules: Any, **options: Any) -> Any:
            config = peft.LoraConfig(r=4, target_modules=target_modules, **options)
            adapted = peft.get_peft_model(model, config)
            generator = torch.Generator().manual_seed(0)
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:  # 0 at first
                    parameter.data.normal_(0, 0.05, generator=generator)
            return adapted.eval()

        return make

    @pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
    @pytest.mark.parametrize(
        ("targets", "dropout"),
        [
            (ATTENTION, 0.1),
            (["kv_b_proj"], 0.0),
            (["wq_b", "wk", "weights_proj"], 0.1),
            ("all-linear", 0.0),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
    )
    def test_target_modules(self, with_adapter, model_type, targets, dropout):
        ids = torch.arange(40)[None] % 128
        plain = copying_model(model_type, index_topk=64)
        before = plain(ids).logits
        adapted = with_adapter(plain, targets, lora_dropout=dropout)
        expected = adapted(ids).logits
        with enable(adapted.get_base_model()):
            got = adapted(ids).logits
        size = (expected - before).abs().max() if "q_b_proj" in targets else expected.abs().max()
        assert (got - expected).abs().max() < 0.05 * size
        with torch.enable_grad(), enable(adapted.get_base_model(), training=True):
            adapted.train()
            adapted(input_ids=ids, labels=ids).loss.backward()
        trained = {name: x for name, x in adapted.named_parameters() if x.requires_grad}
        assert trained
        assert [name for name, x in trained.items() if x.grad is None or not x.grad.any()] == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lora_dropout": 0.1}, r"no dropout in .*kv_b_proj\.lora_dropout"),
            ({"lora_bias": True}, r"no bias in .*kv_b_proj\.lora_B"),
            ({"modules_to_save": ["indexer"]}, "got .*ModulesToSaveWrapper"),
        ],
        ids=["dropout", "bias", "indexer"],
    )
    def test_refusals_in_training(self, with_adapter, options, message):
        adapted = with_adapter(copying_model("deepseek_v32"), ["kv_b_proj"], **options).train()
        ids = torch.arange(40)[None]
        with pytest.raises(ValueError, match=message):  # noqa: PT012 - by enable, or by the forward
            enable(adapted.get_base_model(), training=True)
            adapted(input_ids=ids, labels=ids)
        disable(adapted.get_base_model())

    @pytest.mark.parametrize("module", ["kv_a_layernorm", "indexer"])
    def test_refusals_in_inference(self, with_adapter, module):
        adapted = with_adapter(
            copying_model("deepseek_v32"), ["q_b_proj"], modules_to_save=[module]
        )
        with pytest.raises(ValueError, match=r"got .*ModulesToSaveWrapper"):
            enable(adapted.get_base_model())

    def test_a_norm_trains(self, with_adapter):
        """Its forward is called in training."""
        adapted = with_adapter(
            copying_model("deepseek_v32"), ["q_b_proj"], modules_to_save=["kv_a_layernorm"]
        ).train()
        ids = torch.arange(40)[None]
        with torch.enable_grad(), enable(adapted.get_base_model(), training=True):
            adapted(input_ids=ids, labels=ids).loss.backward()
        norms = [x for name, x in adapted.named_parameters() if "layernorm.modules_to_save" in name]
        assert norms
        assert all(x.grad is not None and x.grad.any() for x in norms)


def test_a_projection_with_a_parametrization_is_what_it_computes():
    """Here the weight is computed in each call, and is no parameter."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    model, doubled, ids = (make_model("deepseek_v32"), make_model("deepseek_v32"), make_tokens(""))
    for module, other in zip(
        attention_of(model).values(), attention_of(doubled).values(), strict=True
    ):
        parametrize.register_parametrization(module.kv_b_proj, "weight", Doubled())
        parametrize.register_parametrization(module.kv_a_layernorm, "weight", Doubled())
        other.kv_b_proj.weight.mul_(2)
        other.kv_a_layernorm.weight.mul_(2)
    assert torch.equal(logits_of(model, ids), logits_of(doubled, ids))


@pytest.mark.parametrize("name", ["kv_b_proj", "q_b_proj"])
def test_a_forward_of_the_instance_counts(name):
    model, doubled, ids = make_model("deepseek_v32"), make_model("deepseek_v32"), make_tokens("")
    for module, other in zip(
        attention_of(model).values(), attention_of(doubled).values(), strict=True
    ):
        forward = getattr(module, name).forward
        getattr(module, name).forward = lambda x, forward=forward: 2 * forward(x)
        getattr(other, name).weight.mul_(2)
    assert torch.equal(logits_of(model, ids), logits_of(doubled, ids))


def skipped_modules(model_type: str) -> list[str]:
    """Modules whose forward attention does not call, in the layer that has the most."""
    if model_type == "deepseek_v4":
        names = ["q_b_norm", "kv_norm", "o_a_proj"]
        for part in ("compressor", "compressor.indexer"):
            names += [part, f"{part}.kv_norm", f"{part}.rotary_emb"]
        return [*names, "compressor.indexer.scorer", "rotary_emb of the model"]
    names = ["kv_a_layernorm", "kv_b_proj"]
    return names if model_type == "deepseek_v3" else [*names, "indexer"]


def registered(hook: str) -> Callable[[nn.Module], Callable[[], None]]:
    def change(module: nn.Module) -> Callable[[], None]:
        return getattr(module, f"register_{hook}")(lambda *given: None).remove

    return change


def replaced(module: nn.Module) -> Callable[[], None]:
    forward = module.forward
    module.forward = lambda *given, **options: forward(*given, **options)
    return lambda: delattr(module, "forward")


def another_class(module: nn.Module) -> Callable[[], None]:
    kind = type(module)
    forward = {"forward": lambda self, *given: kind.forward(self, *given)}
    module.__class__ = type("Mine", (kind,), forward)
    return lambda: setattr(module, "__class__", kind)


CHANGES: dict[str, tuple[Callable[[nn.Module], Callable[[], None]], str]] = {
    "forward hook": (registered("forward_hook"), "no hooks on .* got a forward hook"),
    "pre-hook": (registered("forward_pre_hook"), "no hooks on .* got a forward pre-hook"),
    "backward hook": (registered("full_backward_hook"), "no hooks on .* got a backward hook"),
    "forward": (replaced, "own forward in .* got a forward of the instance"),
    "class": (another_class, r"own forward in .* got .*\.Mine"),
}


class TestRefusals:
    @every_model
    @pytest.mark.parametrize("change", CHANGES)
    def test_of_what_is_not_called(self, model_type, change):
        """Before and after ``enable``, and no longer when it is gone."""
        model, ids = make_model(model_type), make_tokens(model_type)[:, :9]
        make, message = CHANGES[change]
        layer_idx = 1 if model_type in ("deepseek_v4", "glm5_next") else 0
        path = f"layers.{layer_idx}.self_attn"
        for name in skipped_modules(model_type):
            if name == ABSORBED[model_type] and change in ("forward", "class"):
                continue  # its forward is asked for its weight
            if name.endswith("of the model"):
                module, named = model.model.rotary_emb, message.replace(" .* ", " rotary_emb.* ")
            else:
                module = attention_of(model)[path].get_submodule(name)
                named = message.replace(" .* ", rf" {path}\.{name}.* ")
            with enable(model) as handle:
                past = model(ids[:, :5]).past_key_values
                undo = make(module)
                before = copy.deepcopy(past)
                with pytest.raises(ValueError, match=named):
                    model(ids[:, 5:6], past_key_values=past)
                with pytest.raises(ValueError, match=named):
                    model(ids)
                with pytest.raises(ValueError, match=named):
                    handle.new_cache(1)
                assert all(map(torch.equal, past._tensors(), before._tensors()))
                undo()
                model(ids[:, 5:6], past_key_values=past)
            undo = make(module)
            with pytest.raises(ValueError, match=named):
                enable(model)
            undo()
        assert "forward" not in vars(model.base_model)

    def test_of_rotary_embeddings_that_differ(self):
        model, ids = make_model("deepseek_v4"), make_tokens("deepseek_v4")
        attention = attention_of(model)["layers.1.self_attn"]
        rotary = attention.compressor.indexer.rotary_emb
        with enable(model):
            rotary.compress_inv_freq.mul_(2)
            with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.compressor\.indexer\.rot"):
                model(ids)
            rotary.compress_inv_freq.div_(2)
            model(ids)
            attention.q_b_norm.eps *= 2
            with pytest.raises(ValueError, match=r"one epsilon in layers\.1\.self_attn\.q_b_norm"):
                model(ids)

    def test_of_a_norm_in_a_fused_op(self):
        """With quantised index keys the indexer's norm is part of an op."""
        model, ids = make_model("deepseek_v32"), make_tokens("")
        norm = attention_of(model)["layers.0.self_attn"].indexer.k_norm
        calls: list[object] = []
        hook = norm.register_forward_hook(lambda *given: calls.append(None))
        logits_of(model, ids)
        assert len(calls) == 1
        formats = {"cache_format": e4m3_format(96, 64, 64), "index_format": e4m3_format(64, 64, 64)}
        with pytest.raises(ValueError, match=r"no hooks on layers\.0\.self_attn\.indexer\.k_norm"):
            enable(model, **formats)
        hook.remove()
        with enable(model, **formats):
            model(ids)

    @every_model
    def test_of_what_no_matrix_has(self, model_type):
        model, ids = make_model(model_type), make_tokens(model_type)[:, :9]
        path, module = list(attention_of(model).items())[-1]
        name = ABSORBED[model_type]
        before = getattr(module, name)
        adapter = Adapted(before)
        adapter.dropout = nn.Dropout(0.1).train()
        hooked = Adapted(before)
        hooked.inner = nn.Identity()
        hooked.inner.register_forward_hook(lambda *given: None)
        biased, curved = Adapted(before), Adapted(before)
        biased.forward = lambda x: before(x) + 0.01
        curved.forward = lambda x: before(x).tanh()
        rows = before.out_features
        for layer, message in (
            (adapter, rf"no dropout in {path}\.{name}\.dropout.* got p = 0\.1 in training mode"),
            (hooked, rf"no hooks on {path}\.{name}\.inner"),
            (
                biased,
                rf"a linear layer without a constant term as {path}\.{name}.* got Adapted with",
            ),
            (
                curved,
                rf"a linear layer without a constant term as {path}\.{name}.* got Adapted with",
            ),
        ):
            with enable(model):
                setattr(module, name, layer)
                with pytest.raises(ValueError, match=message):
                    model(ids)
            with pytest.raises(ValueError, match=message):
                enable(model)
            setattr(module, name, before)
        bias = rf"no bias in {path}\.{name}, .* got one of shape \[{rows}\]"
        for layer in (before, Adapted(before)):
            setattr(module, name, layer)
            with enable(model):
                before.bias = nn.Parameter(torch.ones(rows))
                with pytest.raises(ValueError, match=bias.replace(", ", ".*, ")):
                    model(ids)
            with pytest.raises(ValueError, match=bias.replace(", ", ".*, ")):
                enable(model)
            before.bias = None
        logits_of(model, ids)


def copied(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.copy_(value)


def copied_uncounted(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.data.copy_(value)


def other_memory(parameter: nn.Parameter, value: Tensor) -> None:
    parameter.data = value


WAYS = {"copy_": copied, "data.copy_": copied_uncounted, "data =": other_memory}


def changed_weights(model: Any, seed: int) -> dict[str, Tensor]:
    """Other values of all parameters of attention."""
    generator = torch.Generator().manual_seed(seed)
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: p * (1 + 0.2 * torch.randn(p.shape, generator=generator).to(p.dtype))
        for module in attention_of(model).values()
        for p in module.parameters()
    }


class TestUpdates:
    """A model whose weights change gives the logits of one that is enabled after the change."""

    @every_model
    def test_after_a_call(self, model_type):
        model, fresh, ids = make_model(model_type), make_model(model_type), make_tokens(model_type)

        def as_if_enabled_now() -> Tensor:
            fresh.load_state_dict(model.state_dict())
            return logits_of(fresh, ids)

        with enable(model):
            before = model(ids).logits
            for seed, (name, way) in enumerate(WAYS.items()):
                for key, value in changed_weights(model, seed).items():
                    way(model.get_parameter(key), value)
                got = model(ids).logits
                assert (got - before).norm() > 0.05 * before.norm(), name
                assert torch.equal(got, as_if_enabled_now()), name
                before = got
            for assign in (False, True):
                weights = changed_weights(model, 7 + assign)
                model.load_state_dict(weights, strict=False, assign=assign)
                got = model(ids).logits
                assert not torch.equal(got, before), assign
                assert torch.equal(got, as_if_enabled_now()), assign
                before = got
            model.to(torch.bfloat16)
            fresh.to(torch.bfloat16)
            assert torch.equal(model(ids).logits, as_if_enabled_now())
            model.to(torch.float32)
            fresh.to(torch.float32)
            assert torch.equal(model(ids).logits, as_if_enabled_now())

    @every_model
    def test_between_decode_steps(self, model_type):
        model, ids = make_model(model_type), make_tokens(model_type)
        for name in ("copy_", "data =", "replaced"):
            weights = changed_weights(model, 3)
            handle = enable(model)
            past = model(ids[:, :-1]).past_key_values
            other = copy.deepcopy(past)
            for key, value in weights.items():
                if name in WAYS:
                    WAYS[name](model.get_parameter(key), value)
                else:
                    parent, _, last = key.rpartition(".")
                    setattr(model.get_submodule(parent), last, nn.Parameter(value))
            got = model(ids[:, -1:], past_key_values=past).logits
            handle.disable()
            with enable(model):
                assert torch.equal(model(ids[:, -1:], past_key_values=other).logits, got), name

    @every_model
    @pytest.mark.parametrize("kind", ["no cache", "an empty one of transformers", "a new cache"])
    def test_before_a_prompt_of_one_token(self, model_type, kind):
        """It is a decode step, over a cache that has no row of the old weights."""
        model, ids = make_model(model_type), make_tokens(model_type)[:, :1]
        with enable(model) as handle:
            before = model(ids).logits
            for key, value in changed_weights(model, 3).items():
                copied_uncounted(model.get_parameter(key), value)
            cache = transformers.DynamicCache() if kind.startswith("an empty") else None
            cache = handle.new_cache(1) if kind == "a new cache" else cache
            got = model(ids, past_key_values=cache).logits
        expected = logits_of(model, ids)
        assert not torch.equal(expected, before)
        assert torch.equal(got, expected)

    @every_model
    def test_beside_transformers(self, model_type):
        model, ids = make_model(model_type), make_tokens(model_type)
        for module in attention_of(model).values():  # no selection that rounding could flip
            for part in module.modules():
                if hasattr(part, "index_topk"):
                    part.index_topk = 512
        before = model(ids).logits
        with enable(model):
            model(ids)
            for key, value in changed_weights(model, 3).items():
                copied_uncounted(model.get_parameter(key), value)
            got = model(ids).logits
        expected = model(ids).logits
        assert (got - expected).norm() < 0.1 * (expected - before).norm()

    @pytest.mark.parametrize("kind", ["inference tensors", "rotary"])
    def test_of_other_tensors(self, kind):
        """Inference tensors have no version; DeepSeek-V4's tables are made of frequencies."""
        ids = make_tokens("deepseek_v4")
        with torch.inference_mode(kind == "inference tensors"):
            model = compressed_copying_model()
            fresh = compressed_copying_model()
            with enable(model) as handle:
                before = model(ids).logits
                addresses = [x.data_ptr() for x in handle._layers._tables.values()]
                if kind == "rotary":
                    for module in (model, fresh):
                        for name, buffer in module.named_buffers():
                            if name.endswith("inv_freq"):
                                buffer.mul_(0.5)
                else:
                    for module in (model, fresh):
                        for attention in attention_of(module).values():
                            attention.o_a_proj.weight.mul_(2)
                got = model(ids).logits
                assert addresses == [x.data_ptr() for x in handle._layers._tables.values()]
            assert not torch.equal(got, before)
            assert torch.equal(got, logits_of(fresh, ids))

    def test_of_a_model_enabled_in_inference_mode(self):
        """The copies are ordinary tensors, which are written in any mode."""
        for model_type in ("deepseek_v32", "deepseek_v4"):
            model, fresh = make_model(model_type), make_model(model_type)
            ids = make_tokens(model_type)
            with torch.inference_mode():
                handle = enable(model)
                model(ids)
            for each in (model, fresh):
                for key, value in changed_weights(each, 0).items():
                    copied(each.get_parameter(key), value)
            got = model(ids).logits
            handle.disable()
            assert torch.equal(got, logits_of(fresh, ids))

    def test_copies_keep_their_memory_and_views_are_not_written(self):
        """CUDA graphs read the copies; another owner may have the memory of a view."""
        for dtype in (torch.float32, torch.bfloat16):
            model, ids = make_model("deepseek_v4").to(dtype), make_tokens("deepseek_v4")
            weight = attention_of(model)["layers.0.self_attn"].o_a_proj.weight
            with enable(model) as handle:
                model(ids)
                (absorbed,) = handle._layers.absorbed[0].weights
                address = absorbed.data.data_ptr()
                is_view = address == weight.data_ptr()
                assert is_view == (dtype == torch.bfloat16)
                old = weight.data
                kept = old.clone()
                weight.data = old + 1
                model(ids)
                (absorbed,) = handle._layers.absorbed[0].weights
                assert torch.equal(absorbed.data.flatten(), weight.bfloat16().flatten())
                assert torch.equal(old, kept)
                assert absorbed.data.data_ptr() == (weight.data_ptr() if is_view else address)


def test_a_cache_format_of_codes():
    """Updates reach attention over FP8 rows, too."""
    model, fresh, ids = make_model("deepseek_v32"), make_model("deepseek_v32"), make_tokens("")
    formats = {"cache_format": e4m3_format(96, 64, 64)}
    with enable(model, **formats):
        model(ids)
        for module in (model, fresh):
            for key, value in changed_weights(module, 0).items():
                copied_uncounted(module.get_parameter(key), value)
        got = model(ids).logits
    with enable(fresh, **formats):
        assert torch.equal(fresh(ids).logits, got)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm5_next", "deepseek_v4"])
def test_fp8_projections(model_type):
    """Their codes are read in place and their scales copied: both follow the parameters."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    ids, name = make_tokens(model_type), ABSORBED[model_type]

    def quantised() -> Any:
        model = make_model(model_type)
        for module in attention_of(model).values():
            plain = getattr(module, name)
            rows, cols = plain.weight.shape
            kind, grouped = fp8.FP8Linear, {}
            if model_type == "deepseek_v4":
                kind, grouped = fp8.FP8GroupedLinear, {"n_groups": plain.n_groups}
            layer = kind(cols, rows, block_size=(128, 128), **grouped)
            codes = (plain.weight * 256).to(torch.float8_e4m3fn)
            layer.weight = nn.Parameter(codes, requires_grad=False)
            layer.weight_scale_inv.data.fill_(1 / 256)
            setattr(module, name, layer)
        return model

    model = quantised()

    def change(model: Any) -> None:
        for module in attention_of(model).values():
            layer = getattr(module, name)
            layer.weight.data.copy_(layer.weight.float().roll(1, 1).to(torch.float8_e4m3fn))
            layer.weight_scale_inv.data.mul_(0.25)

    plain = logits_of(make_model(model_type), ids)
    with enable(model):
        before = model(ids).logits
        assert (before - plain).norm() < 0.2 * plain.norm()
        change(model)
        got = model(ids).logits
    fresh = quantised()
    change(fresh)
    assert torch.equal(got, logits_of(fresh, ids))
    assert not torch.equal(got, before)
    for module, other in zip(
        attention_of(model).values(), attention_of(fresh).values(), strict=True
    ):
        for each in (module, other):  # floats are multiplied without the scales
            layer = getattr(each, name)
            layer.weight = nn.Parameter(layer.weight.float() / 256, requires_grad=False)
        getattr(module, name).weight_scale_inv.fill_(torch.nan)
    assert torch.equal(logits_of(model, ids), logits_of(fresh, ids))


def test_fp8_projections_with_blocks_that_are_no_squares(monkeypatch):
    """Their forward is asked for the weight."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")

    def linear(x: Tensor, weight: Tensor, scale: Tensor, *_: Any, **__: Any) -> Tensor:
        spread = scale.repeat_interleave(32, 0).repeat_interleave(16, 1)
        return x @ (weight.float() * spread).T

    monkeypatch.setattr(fp8, "fp8_linear", linear)
    model, plain, ids = make_model("deepseek_v32"), make_model("deepseek_v32"), make_tokens("")
    for module, other in zip(
        attention_of(model).values(), attention_of(plain).values(), strict=True
    ):
        codes = (module.kv_b_proj.weight * 256).to(torch.float8_e4m3fn)
        rows, cols = codes.shape
        layer = fp8.FP8Linear(cols, rows, block_size=(32, 16))
        layer.weight = nn.Parameter(codes, requires_grad=False)
        layer.weight_scale_inv.copy_(2.0 ** -torch.arange(8.0, 12.0).expand(rows // 32, -1))
        module.kv_b_proj = layer
        other.kv_b_proj.weight.copy_(linear(torch.eye(cols), codes, layer.weight_scale_inv).T)
    assert torch.equal(logits_of(model, ids), logits_of(plain, ids))


def test_a_compiled_step_has_the_weights_of_the_latest_prefill():
    torch._dynamo.reset()
    model, fresh, ids = make_model("deepseek_v3"), make_model("deepseek_v3"), make_tokens("")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(model.__call__, fullgraph=True, backend=counter)

    def decoded(model: Any, handle: Any, step: Callable[..., Any]) -> Tensor:
        cache = handle.new_cache(1, max_length=32)
        model(ids[:, :20], past_key_values=cache)
        return step(ids[:, 20:21], past_key_values=cache).logits

    with enable(model) as handle:
        for seed in range(3):
            got = decoded(model, handle, step)
            with enable(fresh) as other:
                assert torch.equal(got, decoded(fresh, other, fresh))
            for each in (model, fresh):
                for key, value in changed_weights(each, seed).items():
                    copied_uncounted(each.get_parameter(key), value)
        assert counter.frame_count == 1


class TestTraining:
    @pytest.fixture(autouse=True)
    def grad(self) -> Iterator[None]:
        with torch.enable_grad():
            yield

    @pytest.mark.parametrize("stage", ["dense", "sparse"])
    def test_gradients_reach_an_adapter(self, stage):
        """By the chain rule from the gradient of the merged weight."""
        ids = make_tokens("")
        model, merged = (make_model("deepseek_v32").requires_grad_(True) for _ in range(2))
        attention, other = (list(attention_of(each).values()) for each in (model, merged))
        with enable(model, training=stage):
            model(ids, labels=ids)
            for module in attention:  # also after ``enable``
                module.kv_b_proj = Adapted(module.kv_b_proj)
            loss = model(ids, labels=ids).loss
            loss.backward()
        for module, plain in zip(attention, other, strict=True):
            plain.kv_b_proj.weight.data = module.kv_b_proj.merged().detach()
        with enable(merged, training=stage):
            expected = merged(ids, labels=ids).loss
            expected.backward()
        torch.testing.assert_close(loss, expected)
        for module, plain in zip(attention, other, strict=True):
            adapter, grad = module.kv_b_proj, plain.kv_b_proj.weight.grad
            weight = adapter.base_layer.weight
            torch.testing.assert_close(
                weight.grad, grad + 0.5 * grad.roll(1, 1), atol=1e-5, rtol=1e-3
            )
            torch.testing.assert_close(
                adapter.scale.grad, (grad * weight.roll(-1, 1)).sum(), atol=1e-5, rtol=1e-3
            )
        found = dict(model.named_parameters())
        for name, parameter in merged.named_parameters():
            if "kv_b_proj" not in name and parameter.grad is not None:
                torch.testing.assert_close(
                    found[name].grad, parameter.grad, atol=1e-4, rtol=1e-3, msg=name
                )

    def test_backward_raises_where_only_parameters_of_attention_are_trained(self):
        """No hidden state before the last layer's attention has a graph."""
        model, ids = make_model("deepseek_v32").requires_grad_(False), make_tokens("")
        last = model.model.layers[-1]
        last.mlp.down_proj.weight.requires_grad_(True)
        last.self_attn.kv_b_proj = Adapted(last.self_attn.kv_b_proj)
        with enable(model):
            loss = model(ids, labels=ids).loss
            with pytest.raises(NotImplementedError, match="no backward pass"):
                loss.backward()

    def test_what_is_refused(self):
        model, ids = make_model("deepseek_v32"), make_tokens("")
        (path, module), *_ = attention_of(model).items()
        for name, message in (
            ("indexer", rf"no hooks on {path}\.indexer, .* got a forward hook"),
            ("kv_b_proj", rf"no hooks on {path}\.kv_b_proj, .* got a forward hook"),
        ):
            with enable(model, training=True) as training:
                hook = module.get_submodule(name).register_forward_hook(lambda *given: None)
                with pytest.raises(ValueError, match=message):
                    model(ids)
                training.stage = "dense"
                if name == "kv_b_proj":  # its forward is called
                    model(ids)
            with pytest.raises(ValueError, match=message):
                enable(model, training=True)
            hook.remove()
        before, adapter = module.kv_b_proj, Adapted(module.kv_b_proj)
        adapter.dropout = nn.Dropout(0.1)
        curved = Adapted(before)
        curved.forward = lambda x: before(x).tanh()
        narrow = nn.Linear(before.in_features, 3, bias=False)
        narrow.forward = functools.partial(nn.Linear.forward, narrow)
        outputs = rf"{before.out_features} outputs of {path}\.kv_b_proj, got 3"
        for layer, message in (
            (adapter, rf"no dropout in {path}\.kv_b_proj\.dropout"),
            (curved, rf"a linear layer without a constant term as {path}\.kv_b_proj"),
            (narrow, outputs),
            (nn.Linear(before.in_features, before.out_features), rf"no bias in {path}\.kv_b_proj"),
        ):
            with enable(model, training=True):
                module.kv_b_proj = layer
                with pytest.raises(ValueError, match=message):
                    model.train()(ids)
                module.kv_b_proj = before
