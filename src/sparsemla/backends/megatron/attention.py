"""Megatron's DSA attention with this package's ops: selection, attention and the indexer's loss."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
    DSAttention,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from sparsemla.backends.megatron.layout import Layout, layout_of
from sparsemla.backends.megatron.losses import dense_loss, sparse_loss
from sparsemla.backends.megatron.replay import replayed_lists
from sparsemla.formats import LATENT_DIM
from sparsemla.ops import select_rows, sparse_attention


class Index(NamedTuple):
    """What an indexer makes of the tokens."""

    index_q: Tensor
    """``[b * s, HI, DI]``"""
    weights: Tensor
    """``[b * s, HI]``"""
    index_k: Tensor
    """``[b * S, DI]``, of all ranks."""


class SparseMLAttention(DSAttention):
    """``DSAttention`` of Megatron-core: the same parameters, arguments, layouts and results.

    Attention and the gradients of keys have the same bits in every run; a selection is exact, with
    ties to the earlier token. Index queries and keys are rounded to bfloat16 for the selection.
    Neither attention nor a loss stores anything of size tokens times keys.

    Shapes: s tokens of a rank, b sequences, S keys of all ranks, H heads of a rank, D latent and
    RoPE dims, L latent dims, V value dims, HI and DI indexer heads and dims, K entries of a list.

    Raises:
        ValueError: a setting that is not supported.
    """

    _HOLDER_ATTR = "_sparsemla_topk_indices"  # rows, where Megatron's own has positions

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        _check_config(config)
        super().__init__(config, *args, **kwargs)
        cp_size = self.pg_collection.cp.size()
        if cp_size > 1 and self.cp_comm_type != "allgather":
            raise ValueError(
                f"cp_comm_type must be 'allgather' with {cp_size} context-parallel ranks, "
                f"got {self.cp_comm_type!r}"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        position_ids: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        up_v_weight: Tensor | None = None,
    ) -> Tensor:
        """Attention ``[s, b, H * V]`` of absorbed queries over the keys that the indexer selects.

        Args:
            query: ``[s, b, H, D]``, or ``[s, H, D]`` if packed.
            key: ``[s, b, 1, D]``, or ``[s, 1, D]``: the rank's own, gathered here.
            value: None.
            attention_mask: carries shared selections, as in Megatron; not read.
            x: hidden states ``[s, b, hidden]``, ``s / ranks`` tokens with sequence parallelism.
            qr: compressed queries of x's tokens.
            position_ids: ``[b, s]``, read with context parallelism, where they are equal.
            attn_mask_type: ``AttnMaskType.causal``.
            attention_bias: None.
            packed_seq_params: sequences in a row, of format ``thd``.
            up_v_weight: ``[H, V, L]``.

        Raises:
            ValueError: an argument that is not supported, or of another layout.
        """
        up_v_weight = _check_absorbed(
            value, attention_bias, attn_mask_type, packed_seq_params, up_v_weight
        )
        if query.dim() == 3:
            query, key = query[:, None], key[:, None]
        num_tokens, batch_size = query.shape[:2]
        self._check_tokens(num_tokens, key, x)
        layout = layout_of(
            num_tokens=num_tokens,
            batch_size=batch_size,
            device=query.device,
            cp=self.pg_collection.cp,
            cp_comm_type=self.cp_comm_type,
            position_ids=position_ids,
            packed_seq_params=packed_seq_params,
        )
        q = _in_rows(query)  # [b * s, H, D]
        kv = _in_rows(layout.gather(key[:, :, 0]))  # [b * S, D]

        coefficient = self.config.dsa_indexer_loss_coeff or 0.0
        computes = self.indexer is not None
        learns = self.training and torch.is_grad_enabled() and coefficient > 0 and computes
        replayed = replayed_lists(packed_seq_params, self.source_layer - 1)
        index = None
        if learns or (replayed is None and computes):
            with torch.set_grad_enabled(learns):
                index = self._index(x.detach(), qr.detach(), packed_seq_params, layout)
        if replayed is not None:
            self._check_replayed(replayed, layout)
            topk_indices = layout.rows(replayed)
        elif index is not None:
            topk_indices = self._select(index, layout)
        else:
            topk_indices = self._shared(packed_seq_params, attention_mask)
        if self.index_share and index is not None:
            holder = self._get_index_share_topk_holder(packed_seq_params, attention_mask)
            holder[self.layer_number] = topk_indices

        out, lse = sparse_attention(q, kv, topk_indices, softmax_scale=self.softmax_scale)
        out = out[..., : self.config.kv_lora_rank]
        out = torch.einsum("thl,hvl->thv", out, up_v_weight.to(out.dtype))
        out = out.flatten(1).unflatten(0, (batch_size, num_tokens)).transpose(0, 1).contiguous()
        if not learns or index is None:
            return out
        row_weights = coefficient * self._row_weights(packed_seq_params, len(q), q.device)
        attention = q.detach(), kv.detach(), lse.detach()
        loss = self._loss(*attention, index, topk_indices, layout, row_weights)
        self._log(loss)
        attached: Tensor = DSAIndexerLossAutoScaler.apply(out, loss)
        return attached

    def _index(
        self,
        x: Tensor,
        qr: Tensor,
        packed_seq_params: PackedSeqParams | None,
        layout: Layout,
    ) -> Index:
        index_q, index_k, weights = self.indexer.forward_before_topk(x, qr, packed_seq_params)
        if not self.config.dsa_indexer_scoring_relu:
            # Any x is the difference of relu(x) and relu(-x).
            index_q = torch.cat([index_q, -index_q], dim=2)
            weights = torch.cat([weights, -weights], dim=2)
        index_k = layout.gather(index_k).to(index_q.dtype)
        return Index(_in_rows(index_q), _in_rows(weights), _in_rows(index_k))

    def _loss(
        self,
        q: Tensor,
        kv: Tensor,
        lse: Tensor,
        index: Index,
        topk_indices: Tensor,
        layout: Layout,
        row_weights: Tensor,
    ) -> Tensor:
        if self.config.dsa_indexer_use_sparse_loss:
            return sparse_loss(
                q,
                kv,
                lse,
                *index,
                topk_indices,
                softmax_scale=self.softmax_scale,
                row_weights=row_weights,
                tp=self.pg_collection.tp,
            )
        return dense_loss(
            q,
            kv,
            *index,
            softmax_scale=self.softmax_scale,
            row_starts=layout.starts,
            row_ends=layout.ends,
            row_weights=row_weights,
            tp=self.pg_collection.tp,
        )

    @torch.no_grad()
    def _select(self, index: Index, layout: Layout) -> Tensor:
        """Rows int32 ``[b * s, K]``. Tensor-parallel ranks select for a share of the tokens each.

        They all have the same indexer and the same tokens, and the scores of a token depend on no
        other token.
        """
        tp = self.pg_collection.tp
        share = len(index.index_q) // tp.size()
        own = slice(tp.rank() * share, (tp.rank() + 1) * share)
        rows = select_rows(
            index.index_q[own].bfloat16(),
            index.weights[own],
            index.index_k.bfloat16(),
            topk=min(self.index_topk, layout.num_keys),
            row_starts=layout.starts[own],
            row_ends=layout.ends[own],
        )
        return cast(Tensor, gather_from_sequence_parallel_region(rows, group=tp))

    def _shared(
        self, packed_seq_params: PackedSeqParams | None, attention_mask: Tensor | None
    ) -> Tensor:
        """What an earlier layer of this forward has selected."""
        config = self.config
        if (
            packed_seq_params is None
            and attention_mask is None
            and config.pipeline_model_parallel_size > 1
            and config.recompute_granularity is not None
        ):
            raise ValueError(
                "packed_seq_params or attention_mask must be given with dsa_indexer_topk_freq="
                f"{self.index_topk_freq}, recompute_granularity={config.recompute_granularity!r} "
                f"and pipeline_model_parallel_size={config.pipeline_model_parallel_size}: a layer "
                "that runs again would find the selection of a later microbatch, got neither"
            )
        holder = self._get_index_share_topk_holder(packed_seq_params, attention_mask)
        if self.source_layer not in holder:
            raise ValueError(
                f"layer {self.layer_number} must run after layer {self.source_layer}, whose "
                f"selection it shares, in one pipeline stage, got layers {sorted(holder)}"
            )
        return cast(Tensor, holder[self.source_layer])

    def _row_weights(
        self, packed_seq_params: PackedSeqParams | None, num_rows: int, device: torch.device
    ) -> Tensor:
        """Weights float32 ``[b * s]`` of a mean over real tokens, or of their sum."""
        real = getattr(packed_seq_params, "real_token_mask_q", None)
        if real is None:
            weights = torch.ones(num_rows, device=device)
        else:
            weights = real.to(device=device, dtype=torch.float32).flatten()
        if self.config.calculate_per_token_loss:
            return weights
        return weights / weights.sum().clamp(min=1)

    def _log(self, loss: Tensor) -> None:
        """Hand the loss to Megatron's log, which averages it, or sums that of tokens."""
        cp = self.pg_collection.cp if self.pg_collection.cp.size() > 1 else None
        per_token = self.config.calculate_per_token_loss
        DSAIndexerLossLoggingHelper.save_loss_to_tracker(
            loss=loss,
            layer_number=self.layer_number,
            num_layers=self.config.num_layers,
            reduce_group=cp if per_token else None,
            avg_group=None if per_token else cp,
        )

    def _check_tokens(self, num_tokens: int, key: Tensor, x: Tensor) -> None:
        """Refuse layouts that absorbed attention does not produce."""
        if len(key) != num_tokens:
            raise ValueError(
                f"key must have the {num_tokens} tokens of query, the rank's own, got {len(key)}"
            )
        divided = self.config.sequence_parallel and self.pg_collection.tp.size() > 1
        expected = len(x) * (self.pg_collection.tp.size() if divided else 1)
        if num_tokens != expected:
            raise ValueError(
                f"query must have {expected} tokens, those of x on all tensor-parallel ranks, "
                f"got {num_tokens}"
            )

    def _check_replayed(self, lists: Tensor, layout: Layout) -> None:
        if self.config.mtp_num_layers:
            raise ValueError(
                "mtp_num_layers must be None to replay selections, "
                f"got {self.config.mtp_num_layers}: Megatron counts MTP layers from 1, too"
            )
        if len(lists) != layout.num_keys:
            raise ValueError(
                f"selections[{self.source_layer - 1}] must have a row for each of the "
                f"{layout.num_keys} tokens of the batch, got {len(lists)}"
            )


def _in_rows(x: Tensor) -> Tensor:
    """``[b * s, ...]``, one sequence after another, of ``[s, b, ...]``."""
    return x.transpose(0, 1).flatten(0, 1)


def _check_config(config: TransformerConfig) -> None:
    """Refuse settings that would be ignored, or cannot be."""
    if config.dsa_kernel_backend != "none":
        raise ValueError(
            "dsa_kernel_backend must be 'none': sparsemla's layers call no other kernels, "
            f"got {config.dsa_kernel_backend!r}"
        )
    if config.attention_dropout:
        raise ValueError(
            "attention_dropout must be 0: a selection has no dropout, "
            f"got {config.attention_dropout}"
        )
    if not 0 < config.kv_lora_rank <= LATENT_DIM:
        raise ValueError(f"kv_lora_rank must be 1 to {LATENT_DIM}, got {config.kv_lora_rank}")


def _check_absorbed(
    value: Tensor | None,
    attention_bias: Tensor | None,
    attn_mask_type: AttnMaskType | None,
    packed_seq_params: PackedSeqParams | None,
    up_v_weight: Tensor | None,
) -> Tensor:
    """Refuse what absorbed causal attention does not pass; returns the weight of the values."""
    for name, given in {"value": value, "attention_bias": attention_bias}.items():
        if given is not None:
            raise ValueError(f"{name} must be None in absorbed attention, got {list(given.shape)}")
    if up_v_weight is None:
        raise ValueError("up_v_weight must be given: attention is absorbed, got None")
    if attn_mask_type != AttnMaskType.causal:
        raise ValueError(f"attn_mask_type must be AttnMaskType.causal, got {attn_mask_type}")
    if packed_seq_params is not None and packed_seq_params.qkv_format != "thd":
        raise ValueError(
            "packed_seq_params must have a qkv_format of 'thd', "
            f"got {packed_seq_params.qkv_format!r}"
        )
    return up_v_weight
