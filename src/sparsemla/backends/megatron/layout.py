"""Which keys the tokens of a rank see: Megatron's sequence, context and packed layouts as rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa_layout, dsa_masking
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The tokens of a rank, ``s`` of each of ``b`` sequences, and the keys of all ranks.

    With context parallelism a rank has two chunks of each sequence, and the keys of all ranks are
    gathered and put in order, as in Megatron's own attention. Rows are the keys of one sequence
    after another.

    Attributes:
        positions: int64 ``[s]``, the place of each token among the keys.
        starts, ends: int32 ``[b * s]``, the rows that each token sees.
        num_keys: keys of a sequence, of all ranks.
        order: for gathered keys the place of each among them; None if none are gathered.
        cp: the ranks among which the sequence is divided.
    """

    positions: Tensor
    starts: Tensor
    ends: Tensor
    num_keys: int
    order: Tensor | None
    cp: ProcessGroup

    def gather(self, keys: Tensor) -> Tensor:
        """The keys ``[S, b, ...]`` of all ranks in the order of the sequence, of own ``[s, ...]``.

        Differentiable: a rank's gradient is the sum of those of all ranks.
        """
        if self.order is None:
            return keys
        return gather_from_sequence_parallel_region(keys, group=self.cp).index_select(0, self.order)

    def rows(self, lists: Tensor) -> Tensor:
        """Rows int32 ``[s, K]`` for positions ``[T, K]`` in the own sequence of each of T tokens.

        Tokens are those of all ranks. An entry that its token cannot see becomes -1.
        """
        # Padding behind the last sequence may have places beyond the keys.
        places = self.positions.clamp(max=self.num_keys - 1)
        own = lists.to(places.device).index_select(0, places)
        rows = own + self.starts[:, None]
        seen = (self.positions < self.num_keys)[:, None] & (rows < self.ends[:, None])
        return torch.where(seen & (own >= 0), rows, -1).int()


def layout_of(
    *,
    num_tokens: int,
    batch_size: int,
    device: torch.device,
    cp: ProcessGroup,
    cp_comm_type: str,
    position_ids: Tensor | None,
    packed_seq_params: PackedSeqParams | None,
) -> Layout:
    """The layout of a call with causal attention, by Megatron's own functions."""
    cp_size, cp_rank = cp.size(), cp.rank()
    num_keys = num_tokens * cp_size
    order = positions = None
    if packed_seq_params is not None:
        bounds_q, bounds_kv = dsa_layout.get_packed_qk_cu_seqlens(packed_seq_params)
        positions = torch.arange(num_tokens, device=device)
        if cp_size > 1:
            positions, order = dsa_layout.build_packed_allgather_cp_query_positions_and_key_reorder(
                cu_seqlens_q=bounds_q,
                cu_seqlens_kv=bounds_kv,
                cp_size=cp_size,
                cp_rank=cp_rank,
                device=device,
                local_output_size=num_tokens,
                key_local_output_size=num_tokens,
                global_output_size=num_keys,
            )
    elif cp_size > 1:
        order = dsa_layout.build_zigzag_allgather_cp_key_reorder(num_tokens, cp_size, device)
    _, bounds, _ = dsa_masking.build_dsattention_forward_mask(
        sq=num_tokens,
        skv=num_keys,
        b=batch_size,
        device=device,
        cp_size=cp_size,
        cp_rank=cp_rank,
        cp_comm_type=cp_comm_type,
        cp_group=cp,
        attn_mask_type=AttnMaskType.causal,
        attention_mask=None,
        position_ids=position_ids,
        packed_seq_params=packed_seq_params,
        packed_query_positions=positions,
    )
    starts, ends, _ = bounds
    first = torch.arange(batch_size, device=device)[:, None] * num_keys
    return Layout(
        positions=ends - 1,
        starts=(first + starts).flatten().int(),
        ends=(first + ends).flatten().int(),
        num_keys=num_keys,
        order=order,
        cp=cp,
    )
