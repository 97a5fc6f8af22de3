"""Train a small model with sparse attention: dense, then the indexer alone, then both sparsely.

The task is recall: a sequence lists pairs of a key and a value, then asks for keys. One layer can
answer if each query finds one row among all. So a selection of a few rows is as good as dense
attention if the indexer is right, and the answers are lost if it is not: random lists, the control,
must fail. Measured are the accuracy, and the share of dense attention that selected rows hold.

    python examples/train_recall.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsemla import (
    attention_target,
    dense_index_loss,
    index_loss,
    select_rows,
    selected_scores,
    sparse_attention,
)

PAIRS, QUERIES, SYMBOLS = 8, 16, 16
"""Pairs and queries of a sequence; keys, and values, to draw from."""
LENGTH = 2 * PAIRS + QUERIES
TOPK = 4
HEADS, DIM, HIDDEN = 2, 32, 64
INDEX_HEADS, INDEX_DIM = 4, 16
SCALE = DIM**-0.5


@dataclass(frozen=True)
class Batch:
    """Packed sequences: a row for each token.

    Args:
        tokens: ``[T]``; keys come first in the vocabulary, then values.
        answers: the value of each query's key, -1 for tokens that ask nothing.
        row_starts, row_ends: what each token may see: its sequence up to itself.
    """

    tokens: Tensor
    answers: Tensor
    row_starts: Tensor
    row_ends: Tensor

    @property
    def visible(self) -> tuple[Tensor, Tensor]:
        """Lists of all rows that tokens see, and their lengths."""
        rows = self.row_starts[:, None] + torch.arange(LENGTH, dtype=torch.int32)
        return rows, self.row_ends - self.row_starts


def make_batch(size: int, generator: torch.Generator) -> Batch:
    """Draw some sequences."""
    order = torch.rand(size, SYMBOLS, generator=generator).argsort(1)
    keys = order[:, :PAIRS]
    values = torch.randint(SYMBOLS, (size, PAIRS), generator=generator)
    asked = torch.randint(PAIRS, (size, QUERIES), generator=generator)
    pairs = torch.stack([keys, SYMBOLS + values], 2).flatten(1)
    tokens = torch.cat([pairs, keys.gather(1, asked)], 1)
    answers = torch.full((size, LENGTH), -1)
    answers[:, 2 * PAIRS :] = values.gather(1, asked)
    starts = torch.arange(size, dtype=torch.int32).repeat_interleave(LENGTH) * LENGTH
    ends = torch.arange(1, size * LENGTH + 1, dtype=torch.int32)
    return Batch(tokens.flatten(), answers.flatten(), starts, ends)


@dataclass(frozen=True)
class Projected:
    """What a layer's attention and its indexer read, one row for each token."""

    q: Tensor
    kv: Tensor
    index_q: Tensor
    weights: Tensor
    index_k: Tensor


class Model(nn.Module):
    """One layer. A row knows its token and the one before, so that a value's row has its key."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * SYMBOLS, HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS * DIM, bias=False)
        self.kv = nn.Linear(2 * HIDDEN, DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, SYMBOLS, bias=False)
        self.indexer = nn.ModuleDict(
            {
                "q": nn.Linear(HIDDEN, INDEX_HEADS * INDEX_DIM, bias=False),
                "weights": nn.Linear(HIDDEN, INDEX_HEADS, bias=False),
                "k": nn.Linear(2 * HIDDEN, INDEX_DIM, bias=False),
            }
        )

    def project(self, tokens: Tensor) -> Projected:
        """Queries and rows. The indexer learns from a loss of its own: its inputs are detached."""
        x = self.embed(tokens)
        pair = torch.cat([x, x.roll(1, 0)], 1)
        own, both = x.detach(), pair.detach()
        return Projected(
            self.q(x).view(-1, HEADS, DIM),
            self.kv(pair),
            self.indexer["q"](own).view(-1, INDEX_HEADS, INDEX_DIM),
            self.indexer["weights"](own) * (INDEX_HEADS * INDEX_DIM) ** -0.5,
            self.indexer["k"](both),
        )

    def language_parameters(self) -> list[nn.Parameter]:
        """All parameters but the indexer's."""
        return [p for name, p in self.named_parameters() if not name.startswith("indexer")]


def selection(some: Projected, batch: Batch, topk: int = TOPK) -> Tensor:
    """The indexer's rows of each token."""
    index_q, index_k = some.index_q.bfloat16(), some.index_k.bfloat16()
    ranges = {"row_starts": batch.row_starts, "row_ends": batch.row_ends}
    return select_rows(index_q, some.weights, index_k, topk=topk, **ranges)


def random_rows(batch: Batch, generator: torch.Generator, topk: int = TOPK) -> Tensor:
    """Random rows of those that a token sees."""
    rows, lengths = batch.visible
    order = torch.rand(rows.shape, generator=generator)
    hidden = torch.arange(LENGTH) >= lengths[:, None]
    picked = order.masked_fill(hidden, 2).argsort(1)[:, :topk]
    return rows.gather(1, picked).where(~hidden.gather(1, picked), -1)


def language_loss(model: Model, out: Tensor, batch: Batch) -> tuple[Tensor, float]:
    """The loss of the queries, and the share of right answers."""
    asks = batch.answers >= 0
    logits, answers = model.out(out.flatten(1)[asks]), batch.answers[asks]
    loss = nn.functional.cross_entropy(logits, answers)
    return loss, float((logits.argmax(1) == answers).float().mean())


def step(model: Model, batch: Batch, stage: str) -> tuple[Tensor, Tensor]:
    """The losses of a step: the language model's, and the indexer's; 0 where a stage has none."""
    some = model.project(batch.tokens)
    mean = torch.full(batch.tokens.shape, 1 / len(batch.tokens))
    if stage == "sparse":
        rows, lengths = selection(some, batch), None
    else:
        rows, lengths = batch.visible
    out, lse = sparse_attention(some.q, some.kv, rows, softmax_scale=SCALE, topk_lengths=lengths)
    language, _ = language_loss(model, out, batch)
    none = language.new_zeros(())
    lse = lse.detach()
    if stage == "dense":
        return language, none
    if stage == "warm-up":
        indexer = dense_index_loss(
            some.q,
            some.kv,
            lse,
            some.index_q,
            some.weights,
            some.index_k,
            softmax_scale=SCALE,
            row_starts=batch.row_starts,
            row_ends=batch.row_ends,
            row_weights=mean,
            # A few sequences at a time: a token sees rows of its own sequence only.
            max_workspace_bytes=64 * LENGTH * len(batch.tokens),
        )
        return none, indexer
    target = attention_target(some.q, some.kv, rows, lse, softmax_scale=SCALE)
    scores = selected_scores(some.index_q, some.weights, some.index_k, rows)
    return language, index_loss(scores, target, row_weights=mean)


def train(
    model: Model, stage: str, steps: int, rate: float, generator: torch.Generator, size: int = 32
) -> Iterator[tuple[float, float]]:
    """Yield the losses of each step. A stage trains the parameters that have one."""
    indexer = list(model.indexer.parameters())
    groups = {
        "dense": model.language_parameters(),
        "warm-up": indexer,
        "sparse": [*model.language_parameters(), *indexer],
    }
    optimizer = torch.optim.Adam(groups[stage], lr=rate)
    for _ in range(steps):
        losses = step(model, make_batch(size, generator), stage)
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        yield losses[0].item(), losses[1].item()


LISTS = ("dense", "selected", "random")
"""Lists to evaluate a model with: all rows, the indexer's, and random ones."""


@torch.no_grad()
def evaluate(model: Model, batch: Batch, lists: str) -> tuple[float, float, float]:
    """Accuracy, the attention that the lists hold, and the most that lists of their width could."""
    some = model.project(batch.tokens)
    every, lengths = batch.visible
    options = {"softmax_scale": SCALE, "topk_lengths": lengths}
    out, lse = sparse_attention(some.q, some.kv, every, **options)
    attention = attention_target(some.q, some.kv, every, lse, **options)
    asks = batch.answers >= 0
    if lists == "dense":
        return language_loss(model, out, batch)[1], 1.0, 1.0
    if lists == "selected":
        rows = selection(some, batch)
    else:
        rows = random_rows(batch, torch.Generator().manual_seed(0))
    out, _ = sparse_attention(some.q, some.kv, rows, softmax_scale=SCALE)
    columns = (rows - batch.row_starts[:, None]).clamp_min(0).long()
    held = attention.gather(1, columns).where(rows >= 0, 0).sum(1)
    best = attention.topk(TOPK, 1).values.sum(1)
    return language_loss(model, out, batch)[1], *(float(x[asks].mean()) for x in (held, best))


STAGES = (("dense", 120, 1e-2), ("warm-up", 60, 1e-2), ("sparse", 30, 1e-3))
"""Stages with their steps and learning rates."""


def main(stages: Sequence[tuple[str, int, float]] = STAGES) -> int:
    """Run the stages; 0 if the indexer finds what dense attention reads, and random lists fail."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model, held_out = Model(), make_batch(64, torch.Generator().manual_seed(1))
    for stage, steps, rate in stages:
        losses = list(train(model, stage, steps, rate, generator))
        (first, first_index), (last, last_index) = losses[0], losses[-1]
        sys.stdout.write(
            f"{stage:8} language {first:.3f} to {last:.3f}, indexer {first_index:.3f} to "
            f"{last_index:.3f}\n"
        )
        found = {lists: evaluate(model, held_out, lists) for lists in LISTS}
        for lists, (accuracy, held, best) in found.items():
            sys.stdout.write(
                f"    {lists:8} accuracy {accuracy:.3f}, mass {held:.3f} of {best:.3f}\n"
            )
    (dense, *_), (selected, held, best), (random, *_) = found.values()
    learned = dense > 0.95 and selected > 0.98 * dense and held > 0.95 * best
    return 0 if learned and random < 0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
