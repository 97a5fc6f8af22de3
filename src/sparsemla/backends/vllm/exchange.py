"""Selection from index keys that ranks share: vLLM's decode context parallelism (DCP).

The positions of a context are dealt out to the ranks, so each rank scores a part of each row. It
offers its own best, with scores and positions; the offers of all ranks are merged in the order of
:func:`sparsemla.select_topk`. A collective gathers them, or on GPUs of one host, in decodes, one
kernel exchanges and merges them through symmetric memory. Every rank gets the selection that one
rank alone would make, because a key's score does not depend on where the key is stored.

This module imports nothing of vLLM: the caller brings the collective.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from sparsemla import (
    ContextShard,
    ExchangeWorkspace,
    PagedCache,
    exchange_topk,
    indexer_scores_paged,
    select_topk,
)
from sparsemla.parallel import merge_offers

LOGGER = logging.getLogger("vllm.sparsemla")


MOST_TOKENS = 256
"""Of a step whose offers symmetric memory takes: 128 MiB of inboxes at most, with 2048 each."""


def exchange_workspace(
    group: distributed.ProcessGroup, max_tokens: int, topk: int, device: torch.device
) -> ExchangeWorkspace | None:
    """Symmetric memory for the selections of decodes; None, with a line in the log, without any.

    All ranks of the group must call it together.
    """
    workspace = ExchangeWorkspace(
        max_tokens=min(max_tokens, MOST_TOKENS), max_candidates=topk, group=group, device=device
    )
    if workspace.inboxes is not None:
        return workspace
    LOGGER.info("sparsemla: collectives gather the selections of ranks: %s", workspace.refusal)
    return None


class Run(NamedTuple):
    """Consecutive requests with equally many query tokens.

    Attributes:
        requests: indices of the requests in the batch.
        first_token: index of the first query token.
        query_len: query tokens of each request, at least 1.
    """

    requests: slice
    first_token: int
    query_len: int

    @classmethod
    def all_of(cls, query_start_loc: Tensor) -> list[Run]:
        """The runs of a batch, from prefix sums of its query lengths; padding is left out.

        Query lengths 1, 1, 7, 0 are two runs, of 1 and of 7 tokens a request.
        """
        runs, request, token = [], 0, 0
        for query_len, group in itertools.groupby(query_start_loc.diff().tolist()):
            count = len(list(group))
            if query_len:
                runs.append(cls(slice(request, request + count), token, query_len))
            request += count
            token += count * query_len
        return runs

    def pieces(self, at_once: int) -> Iterator[tuple[slice, slice]]:
        """Requests and tokens of pieces of at most ``at_once`` tokens.

        A piece is several requests, or tokens of a single one.
        """
        step = max(at_once // self.query_len, 1)
        for first in range(self.requests.start, self.requests.stop, step):
            requests = slice(first, min(first + step, self.requests.stop))
            begin = self.first_token + (first - self.requests.start) * self.query_len
            end = begin + (requests.stop - first) * self.query_len
            for token in range(begin, end, at_once):
                yield requests, slice(token, min(token + at_once, end))


@dataclass(frozen=True)
class ShardedRows:
    """The query tokens of a batch and this rank's part of their keys.

    Attributes:
        shard: this rank's share.
        runs: the requests, by numbers of query tokens on the host.
        lengths: int32 ``[T]``, keys of each token on this rank; 0 for padding.
        all_gather: joins a tensor of each rank along their first dim, in the order of ranks.
        workspace: exchanges pieces of up to ``max_tokens`` tokens in one launch; None gathers all.
    """

    shard: ContextShard
    runs: list[Run]
    lengths: Tensor
    all_gather: Callable[[Tensor], Tensor]
    workspace: ExchangeWorkspace | None = None

    def select_topk(
        self,
        q: Tensor,
        weights: Tensor,
        cache: PagedCache,
        page_table: Tensor,
        topk: int,
        *,
        max_workspace_bytes: int,
        out: Tensor,
    ) -> None:
        """:func:`sparsemla.indexer_topk` over the keys of all ranks.

        All ranks must call it with the same sizes: collectives of all ranks have to match.

        Args:
            q: ``[T, HI, 128]`` float8_e4m3fn.
            weights: float32 ``[T, HI]``.
            cache: this rank's index keys.
            page_table: int32 ``[B, W]``, pages of this rank's keys.
            topk: k.
            max_workspace_bytes: bound on scores and offers of several tokens.
            out: int32 ``[T, topk]``, written.
        """
        columns = page_table.shape[1] * cache.page_size
        offered = min(topk, columns)
        # Scores; a rank's offers, and 64-bit columns to gather their scores; all ranks' offers.
        row_bytes = 4 * columns + 8 * offered * (2 + self.shard.num_ranks)
        out.fill_(-1)
        for run in self.runs:
            for requests, tokens in run.pieces(max(max_workspace_bytes // row_bytes, 1)):
                sizes = requests.stop - requests.start, -1
                lengths = self.lengths[tokens]
                scores = indexer_scores_paged(
                    q[tokens].unflatten(0, sizes),
                    weights[tokens].unflatten(0, sizes),
                    cache,
                    page_table[requests],
                    lengths.unflatten(0, sizes),
                    max_seq_len=columns,
                ).flatten(0, 1)
                rows = select_topk(scores, topk=offered, row_ends=lengths)
                selected, shard, workspace = out[tokens], self.shard, self.workspace
                if workspace is not None and len(rows) <= workspace.max_tokens:
                    exchange_topk(
                        scores, rows, topk, shard=shard, workspace=workspace, out=selected
                    )
                    continue
                merge_offers(
                    scores.gather(1, rows.clamp(min=0).long()),
                    shard.positions(rows),
                    topk,
                    all_gather=self.all_gather,
                    out=selected,
                )
