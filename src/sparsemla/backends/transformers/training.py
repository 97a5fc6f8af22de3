"""Training of DeepSeek-V3.2 and GLM-5 models: stages, the indexer's loss, replayed selections.

Shapes: B rows of the batch, S columns, T tokens (the real columns), H heads, P and R query dims
without and with RoPE, L latent dims, HI and DI indexer heads and dims, K entries of a list.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb_interleave

from sparsemla.backends.transformers.cache import CACHE, one_cache
from sparsemla.backends.transformers.dense import dense_attention, dense_attention_with_lse
from sparsemla.backends.transformers.handle import Handle
from sparsemla.backends.transformers.keywords import split_keywords
from sparsemla.backends.transformers.latent import ARCHITECTURES, indexed, kv_b_proj
from sparsemla.backends.transformers.layers import check_device, path_of
from sparsemla.backends.transformers.projections import check_skipped
from sparsemla.backends.transformers.sequences import (
    STAGES,
    Index,
    Results,
    Stage,
    TrainingStep,
    find_sequences,
    first_rows,
    own_positions,
)
from sparsemla.backends.transformers.step import check_dropout, check_input, check_position_ids
from sparsemla.checks import FLOATS
from sparsemla.formats import LATENT_DIM
from sparsemla.ops import (
    attention_target,
    dense_index_loss,
    index_loss,
    select_rows,
    selected_scores,
    sparse_attention,
)

TRAINED = ("deepseek_v32", "glm_moe_dsa")
"""Model types with an indexer to train."""


class _After(torch.autograd.Function):
    """``value``, with a gradient that reaches ``others`` as zeros: backward visits them, too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:  # noqa: ANN401
        ctx.others = [(x.shape, x.dtype, x.device) for x in others]
        return value.detach()  # a view would make FSDP warn

    @staticmethod
    def backward(ctx: Any, dvalue: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
        zeros = [
            torch.zeros((), dtype=dtype, device=device).expand(shape)
            for shape, dtype, device in ctx.others
        ]
        return dvalue, *zeros


class TrainingAttention(Handle):
    """The handle of a model that is enabled for training.

    A context manager that disables on exit.

    Attributes:
        index_losses: for each layer of the latest forward, of any thread, the mean over its tokens
            of ``KL(attention of all heads || softmax of the index scores)``, with a graph. Empty in
            the dense stage, without gradients, and if no parameter of an indexer requires one.
        index_loss_coefficient: factor of :attr:`index_loss` in the ``loss`` of the model's output.
        selections: if recorded, one dict per forward of the sparse stage: for each layer with an
            indexer int32 ``[T, K]``, ascending positions in the token's own sequence, then -1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        training: Stage,
        index_loss_coefficient: float,
        record_selections: bool,
    ) -> None:
        base = cast(PreTrainedModel, model.base_model)
        super().__init__(model, base)
        _check_model(model)
        self._modules: list[Any] = [layer.self_attn for layer in cast(Any, base).layers]
        indexers = (idx for idx, each in enumerate(self._modules) if each.indexer is not None)
        self._served = _served_by(list(indexers), len(self._modules))
        self._architecture = ARCHITECTURES[base.config.model_type]
        self._projections = {
            module: kv_b_proj(path_of(layer_idx), module)
            for layer_idx, module in enumerate(self._modules)
        }
        self._records = record_selections
        self.index_losses: dict[int, Tensor] = {}
        self.index_loss_coefficient = index_loss_coefficient
        self.selections: list[dict[int, Tensor]] = []
        self.stage = training
        self._check_skipped()

    @property
    def options(self) -> Mapping[str, object]:
        return {
            "training": self.stage,
            "index_loss_coefficient": self.index_loss_coefficient,
            "record_selections": self._records,
        }

    def _install(self) -> None:
        model, base = self._model, self._base
        if model is not base:
            self._head_names = list(inspect.signature(model.forward).parameters)
            head = functools.partial(self._head, model.forward)
            # Keep the wrapped signature, which the Trainer reads.
            self._replace(model, "forward", functools.update_wrapper(head, model.forward))
        self._base_forward = base.forward
        self._replace(base, "forward", self._forward)
        for layer_idx, layer in enumerate(cast(Any, base).layers):
            attend = functools.partial(self._attend, layer_idx)
            self._replace(layer.self_attn, "forward", attend)
            # FSDP changes the class, and transformers checkpoints in the forward of the last one.
            own = vars(layer).get("forward") or functools.partial(_forward_of_class, layer)
            decode = functools.partial(self._layer, layer_idx, own)
            self._replace(layer, "forward", decode)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self._title()}: {len(self._modules)} layers, {options}"

    @property
    def stage(self) -> Stage:
        """What is trained, and by which attention; assign another to switch.

        - ``"dense"``: the main model, by dense attention; no indexer runs.
        - ``"warmup"``: the indexers alone, towards dense attention over all visible tokens.
        - ``"sparse"``: both, by attention over the selected tokens.
        """
        return self._stage

    @stage.setter
    def stage(self, stage: Stage) -> None:
        if stage not in STAGES:
            raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
        self._stage = stage

    @property
    def index_loss(self) -> Tensor:
        """The loss of all indexers in the latest forward, a scalar with a graph.

        The sum over the indexers of the mean of :attr:`index_losses` over the layers that the
        indexer serves; for layers that share an indexer that of IndexCache (arXiv 2603.12201).
        """
        return self._sum(self.index_losses)

    def _sum(self, index_losses: Mapping[int, Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=self._base.device)
        for layer_idx, loss in index_losses.items():
            owner = self._served[layer_idx]
            total = total + loss.to(total.device) / self._served.count(owner)
        return total

    def indexer_parameters(self) -> list[nn.Parameter]:
        """The parameters of the indexers, which learn from :attr:`index_loss` only."""
        indexers = [module.indexer for module in self._modules if module.indexer is not None]
        return [parameter for indexer in indexers for parameter in indexer.parameters()]

    def main_parameters(self) -> list[nn.Parameter]:
        """All other parameters, which do not learn from :attr:`index_loss`."""
        indexers = {id(parameter) for parameter in self.indexer_parameters()}
        return [each for each in self._model.parameters() if id(each) not in indexers]

    def _head(self, forward: Callable[..., Any], *args: object, **kwargs: object) -> object:
        """The forward of the model with its head: the indexers' loss is added to ``loss``."""
        default = self._base.config.return_dict
        as_dict = kwargs.pop("return_dict", None)
        # Another thread's forward may be the latest, so that this one's losses come along.
        index_losses: dict[int, Tensor] = {}
        output = forward(*args, return_dict=True, sparsemla_losses=index_losses, **kwargs)
        if output.loss is not None and index_losses:
            named: Any = dict(zip(self._head_names, args, strict=False)) | kwargs
            share = _share_of_step(**named)
            index_loss = self._sum(index_losses).to(output.loss.device)
            output.loss = output.loss + self.index_loss_coefficient * share * index_loss
        return output if (default if as_dict is None else as_dict) else output.to_tuple()

    def _forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        cache: Cache | None = None,
        selections: Mapping[int, Tensor] | None = None,
        sparsemla_losses: dict[int, Tensor] | None = None,
        **kwargs: object,
    ) -> object:
        """The model's forward; attention modules receive a :class:`TrainingStep`."""
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None or (input_ids is not None and inputs_embeds is not None):
            got = "neither" if given is None else "both"
            raise ValueError(f"input_ids or inputs_embeds must be given, got {got}")
        check_input("inputs_embeds" if input_ids is None else "input_ids", given)
        if use_cache or one_cache(past_key_values, cache) is not None:
            name = "use_cache" if use_cache else CACHE
            raise ValueError(
                f"{name} must be left out: a model that trains keeps no cache; "
                "enable(model) without training generates"
            )
        check_position_ids(position_ids, given.shape)
        passed, boundaries = split_keywords(self._base, kwargs)
        check_dropout(dict(enumerate(self._modules)))
        indexers = self.indexer_parameters()
        learns = (
            torch.is_grad_enabled()
            and self.stage != "dense"
            and any(parameter.requires_grad for parameter in indexers)
        )
        if self.stage == "warmup" and torch.is_grad_enabled():
            self._check_frozen()
        self._check_skipped()
        tokens, lengths = find_sequences(given, attention_mask, position_ids, boundaries)
        if boundaries and position_ids is None and tokens is None:
            position_ids = own_positions(lengths, given.shape[:2], given.device)
        ends = torch.arange(1, sum(lengths) + 1, dtype=torch.int32, device=given.device)
        step = TrainingStep(
            tokens=tokens,
            lengths=lengths,
            row_starts=first_rows(lengths, given.device),
            row_ends=ends,
            stage=self.stage,
            learns=learns,
            replayed=self._check_replayed(selections, len(ends)),
            results=Results(),
        )
        output: Any = self._base_forward(
            input_ids=input_ids,
            # transformers passes on a mask with four dimensions and builds none.
            attention_mask=torch.empty(0, 0, 0, 0, device="cpu"),
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            sparsemla_step=step,
            **passed,
        )
        index_losses = step.results.losses
        if step.stage == "warmup":
            # The main model has no gradient, but FSDP's hooks wait for one on their way down.
            hidden_states = output[0]
            index_losses = {
                layer_idx: _After.apply(loss, hidden_states)
                for layer_idx, loss in step.results.losses.items()
            }
        self.index_losses = index_losses
        if sparsemla_losses is not None:
            sparsemla_losses.update(index_losses)
        if self._records and self.stage == "sparse":
            self.selections.append(step.results.selections)
        return output

    def _check_skipped(self) -> None:
        """Refuse modules whose forward, which is not called here, does more than others know."""
        for layer_idx, module in enumerate(self._modules):
            if module.indexer is not None:
                check_skipped(path_of(layer_idx), "indexer", module.indexer)
            if self.stage == "sparse":  # the other stages call kv_b_proj
                self._projections[module].check(module.kv_b_proj)

    def _check_frozen(self) -> None:
        indexers = {id(parameter) for parameter in self.indexer_parameters()}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in indexers:
                raise ValueError(
                    "main_parameters() must not require gradients in the warmup stage, which "
                    f"trains the indexers alone, got {name} that does"
                )

    def _check_replayed(
        self, selections: Mapping[int, Tensor] | None, num_tokens: int
    ) -> Mapping[int, Tensor]:
        if selections is None:
            return {}
        if self.stage != "sparse":
            raise ValueError(f"selections must be left out in the {self.stage} stage")
        expected = sorted(set(self._served))
        if sorted(selections) != expected:
            raise ValueError(
                f"selections must have a list for each of the layers {expected}, "
                f"got {sorted(selections)}"
            )
        for layer_idx, lists in selections.items():
            integers = (torch.int32, torch.int64)
            if lists.dim() != 2 or lists.shape[0] != num_tokens or lists.dtype not in integers:
                raise ValueError(
                    f"selections[{layer_idx}] must be int32 or int64 [{num_tokens}, K], a row for "
                    f"each token of the batch, got {lists.dtype} {list(lists.shape)}"
                )
        return selections

    def _layer(
        self,
        layer_idx: int,
        forward: Callable[..., Any],
        hidden_states: Tensor,
        *args: object,
        sparsemla_step: TrainingStep,
        **kwargs: object,
    ) -> object:
        """The forward of a decoder layer; the warmup stage keeps no graph of the main model."""
        step = sparsemla_step
        if not (step.learns and step.stage == "warmup"):
            return forward(hidden_states, *args, sparsemla_step=step, **kwargs)
        output = forward(hidden_states.detach(), *args, sparsemla_step=step, **kwargs)
        out, *rest = output if isinstance(output, tuple) else (output,)
        out = _After.apply(out, hidden_states, step.results.losses[layer_idx])
        return (out, *rest) if isinstance(output, tuple) else out

    def _attend(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        *,
        sparsemla_step: TrainingStep,
        position_embeddings: tuple[Tensor, Tensor],
        **given: object,
    ) -> tuple[Tensor | None, ...]:
        """The forward of an attention module."""
        step, attention = sparsemla_step, self._modules[layer_idx]
        if step.learns and not torch.is_grad_enabled():
            raise ValueError(
                "gradient checkpointing must have use_reentrant=False: the reentrant kind computes "
                "layers without a graph, and loses the indexers' loss"
            )
        x = step.pick(hidden_states)  # [T, hidden]
        rotation = tuple(
            step.pick(part.expand(hidden_states.shape[0], -1, -1)) for part in position_embeddings
        )
        q_resid = attention.q_a_layernorm(attention.q_a_proj(x))
        q = torch.unflatten(
            attention.q_b_proj(q_resid), -1, (attention.num_heads, -1)
        )  # [T, H, P + R]
        dims = [attention.kv_lora_rank, attention.qk_rope_head_dim]
        latent, k_rope = attention.kv_a_proj_with_mqa(x).split(dims, dim=-1)
        latent = attention.kv_a_layernorm(latent)  # [T, L]
        q_nope, q_rope = q.split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], dim=-1)
        q_rope, k_rope = apply_rotary_pos_emb_interleave(q_rope, k_rope[:, None], *rotation)
        parts = q_nope, q_rope.to(q.dtype), latent.to(q.dtype), k_rope[:, 0].to(q.dtype)
        index = self._index(layer_idx, x, q_resid, rotation, step)
        if index is None or index.topk_indices is None:
            out, loss = self._attend_to_all(attention, *parts, index, step)
        else:
            out, loss = self._attend_to_selected(attention, *parts, index, step)
        if loss is not None:
            step.results.losses.setdefault(layer_idx, loss)
        out = attention.o_proj(out.flatten(1))  # of [T, H, V]
        out = step.place(out, hidden_states.shape)
        return (out, None, None) if self._architecture.shares_selection else (out, None)

    def _index(
        self,
        layer_idx: int,
        x: Tensor,
        q_resid: Tensor,
        rotation: Sequence[Tensor],
        step: TrainingStep,
    ) -> Index | None:
        """What the layer's indexer, or the one that it shares, makes of the tokens."""
        owner = self._served[layer_idx]
        if owner != layer_idx:
            return step.results.indexes.get(owner)
        indexer = self._modules[layer_idx].indexer
        dense = step.attends_to_all(indexer.index_topk)
        records = self._records and step.stage == "sparse"
        index = None
        if step.learns or not dense:
            with torch.set_grad_enabled(step.learns):
                index_q, weights, index_k = indexed(
                    indexer,
                    x.detach(),
                    q_resid.detach(),
                    rotation,
                    interleaved=self._architecture.interleaved_indexer,
                    rope_first=self._architecture.indexer_rope_first,
                )
            index_k = index_k.to(index_q.dtype)
            rows = scores = None
            if not dense:
                rows = self._select(layer_idx, index_q, weights, index_k, step)
                scores = selected_scores(index_q, weights, index_k, rows) if step.learns else None
            index = Index(index_q, weights, index_k, rows, scores)
            if self._served.count(owner) > 1:
                step.results.indexes.setdefault(layer_idx, index)
        if records:
            rows = step.everything(x.device) if dense else cast(Index, index).topk_indices
            step.results.selections.setdefault(layer_idx, step.positions(cast(Tensor, rows)))
        return index

    def _select(
        self, layer_idx: int, index_q: Tensor, weights: Tensor, index_k: Tensor, step: TrainingStep
    ) -> Tensor:
        """The rows int32 ``[T, K]`` that the indexer selects, or that are replayed."""
        if step.replayed:
            return step.rows(step.replayed[layer_idx].to(index_q.device))
        # Round as in inference.
        return select_rows(
            index_q.detach().bfloat16(),
            weights.detach(),
            index_k.detach().bfloat16(),
            topk=min(self._modules[layer_idx].indexer.index_topk, max(step.lengths)),
            row_starts=step.row_starts.to(index_q.device),
            row_ends=step.row_ends.to(index_q.device),
        )

    def _attend_to_selected(
        self,
        attention: Any,  # noqa: ANN401 - its class depends on the architecture
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        index: Index,
        step: TrainingStep,
    ) -> tuple[Tensor, Tensor | None]:
        """Sparse attention in the absorbed form: heads ``[T, H, V]``, and the indexer's loss."""
        rows, scale = cast(Tensor, index.topk_indices), attention.scaling
        weight = self._projections[attention].trained_weight(latent.dtype)
        weight = torch.unflatten(weight, 0, (attention.num_heads, -1))
        w_uk, w_uv = weight.split([attention.qk_nope_head_dim, attention.v_head_dim], dim=1)
        q_latent = torch.einsum("thp,hpl->thl", q_nope, w_uk)
        q = torch.cat([q_latent, q_rope], dim=-1)  # [T, H, L + R]
        kv = torch.cat([latent, k_rope], dim=-1)  # [T, L + R]
        out, lse = sparse_attention(q, kv, rows, softmax_scale=scale)
        out = torch.einsum("thl,hvl->thv", out[..., : latent.shape[-1]], w_uv)
        if index.scores is None:
            return out, None
        target = attention_target(q.detach(), kv.detach(), rows, lse.detach(), softmax_scale=scale)
        return out, index_loss(index.scores, target, row_weights=_mean(target))

    def _attend_to_all(
        self,
        attention: Any,  # noqa: ANN401 - its class depends on the architecture
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        index: Index | None,
        step: TrainingStep,
    ) -> tuple[Tensor, Tensor | None]:
        """Dense attention as in transformers: heads ``[T, H, V]``, and the indexer's loss."""
        dims = [attention.qk_nope_head_dim, attention.v_head_dim]
        heads = torch.unflatten(attention.kv_b_proj(latent), -1, (attention.num_heads, -1))
        k_nope, v = heads.split(dims, dim=-1)
        q = torch.cat([q_nope, q_rope], dim=-1)  # [T, H, P + R]
        k = torch.cat([k_nope, k_rope[:, None].expand(*k_nope.shape[:2], -1)], dim=-1)
        scale = attention.scaling
        if index is None:
            return dense_attention(q, k, v, step.lengths, softmax_scale=scale), None
        out, lse = dense_attention_with_lse(q, k, v, step.lengths, softmax_scale=scale)
        loss = dense_index_loss(
            q.detach(),
            k.detach(),
            lse.detach(),
            index.index_q,
            index.weights,
            index.index_k,
            softmax_scale=scale,
            row_starts=step.row_starts.to(q.device),
            row_ends=step.row_ends.to(q.device),
            row_weights=_mean(lse),
        )
        return out, loss


def _forward_of_class(module: nn.Module, *args: object, **kwargs: object) -> object:
    return type(module).forward(module, *args, **kwargs)


def _mean(x: Tensor) -> Tensor:
    """Weights float32 ``[T]`` of a mean over the rows of ``x [T, n]``."""
    return torch.full(x.shape[:1], 1 / x.shape[0], dtype=torch.float32, device=x.device)


def _share_of_step(
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: object,
) -> Tensor | float:
    """The share of an optimizer's step that a micro-batch is, by its labels.

    The Trainer passes the number of labels of the whole step, by which it divides the losses.
    """
    if num_items_in_batch is None:
        return 1.0
    counted = labels[..., 1:] if shift_labels is None else shift_labels
    return (counted != ignore_index).sum() / num_items_in_batch


def _served_by(indexers: Sequence[int], num_layers: int) -> list[int]:
    """For each layer the layer of the indexer that selects for it: the latest so far."""
    if not indexers or indexers[0] != 0:
        raise ValueError(f"model must have an indexer in layer 0, got indexers in {indexers}")
    return [max(idx for idx in indexers if idx <= layer) for layer in range(num_layers)]


def _check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose layers cannot be trained here."""
    base: Any = model.base_model
    config: Any = base.config
    if config.model_type not in TRAINED:
        raise ValueError(
            f"model must have a model_type of {' or '.join(TRAINED)} to be trained, "
            f"got {config.model_type!r}"
        )
    if getattr(model, "is_quantized", False):
        raise ValueError("model must not be quantised: gradients need its weights as floats")
    if config.attention_dropout:
        raise ValueError(
            "model must have an attention_dropout of 0: a selection has no dropout, "
            f"got {config.attention_dropout}"
        )
    if config.kv_lora_rank > LATENT_DIM:
        raise ValueError(
            f"model must have a kv_lora_rank of at most {LATENT_DIM}, got {config.kv_lora_rank}"
        )
    for layer_idx, layer in enumerate(base.layers):
        check_device(layer_idx, layer.self_attn)
        for name, parameter in layer.self_attn.kv_b_proj.named_parameters():
            if parameter.dtype not in FLOATS:
                dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
                raise ValueError(
                    f"model must have a kv_b_proj of {dtypes}, got {parameter.dtype} as its {name} "
                    f"in layer {layer_idx}"
                )
