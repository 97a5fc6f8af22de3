"""Training attention of one sequence: over selected latent rows, or dense over keys of heads.

Both are the same layer's attention. Sparse attention reads the latent rows, with queries and
outputs in their space; the peers' dense attention reads the keys and values of single heads, to
which these rows are projected. The projections take as many FLOP on either side and are in neither
time. A sparse pass costs the more for each row, a dense one reads more rows the longer the sequence
is: :func:`crossing_lines` finds the length from which the sparse pass is faster.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sparsemla import ops, reference
from sparsemla_lab.bench.report import Row
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import (
    INDEX_DIM,
    INDEX_HEADS,
    LATENT,
    NOPE,
    ROPE,
    RUN,
    VALUE,
    Inputs,
    Side,
    Workload,
    _causal_entries,
    _check_attention,
    _check_best,
    _check_index_gradients,
    _generator,
    _indexer,
    _parts_of_tokens,
    _select_causal,
    _some,
)
from sparsemla_lab.testing.cases import eighths
from sparsemla_lab.testing.compare import (
    DENSE_PREFILL_OUT,
    INDEX_LOSS,
    SPARSE_ATTENTION_GRADIENT,
    SPARSE_PREFILL_LSE,
    SPARSE_PREFILL_OUT,
    Tolerance,
    assert_close,
    gradient_sizes,
    score_sizes,
)

SCALE = (NOPE + ROPE) ** -0.5
DENSE_GRADIENT = Tolerance(2**-20, rel=5.01 / 128, cos=2e-5, size=2**-5)
"""As for sparse attention, and twice that for kernels that add blocks of tokens in bfloat16: the
cosine of torch's kernel for CPUs differs by 1.3e-5."""
LSE = replace(SPARSE_PREFILL_LSE, size=2**-16)
"""The LSE of a token that sees one row is a sum of 576 products, which may cancel out. Hopper adds
16 at a time and truncates: 36 errors of 2^-23 are 2^-17.8. A row more or less is 2^-11."""
SCORES_AT_ONCE = 1 << 26
"""Scores of a head that the definition of dense attention keeps at a time."""
TOKENS_AT_ONCE = 256
"""Tokens whose terms of some rows the definition of sparse attention keeps at a time."""
INDEXED_AT_ONCE = 64
"""Tokens whose lists the definition of the indexer's loss keeps at a time."""


@dataclass(frozen=True)
class TrainingAttention(Workload):
    """The forward and backward pass of one causal sequence, with ``topk`` latent rows a token.

    With ``indexer`` 1 an indexer selects the rows, and learns: its loss and gradients are part of
    the work. Otherwise runs of 64 tokens share 7 of 8 rows; queries of the indexer are alike in
    such runs, too.
    """

    tokens: int
    heads: int
    topk: int
    indexer: int = 0
    op: ClassVar[str] = "training_attention"

    @property
    def label(self) -> str:
        return "" if self.indexer else "overlapping"

    @property
    def pairs(self) -> int:
        """Pairs of a token and a row that it sees."""
        return _causal_entries(self.tokens, self.tokens)

    @property
    def flop(self) -> float:
        """Seven products over the selected rows, two of them forward; and those of the indexer."""
        dim, entries = LATENT + ROPE, _causal_entries(self.tokens, self.topk)
        attention = 2.0 * self.heads * (4 * dim + 3 * LATENT)
        # The target is a product, listed scores and their gradients are four. All rows have scores.
        target = 2.0 * (self.heads * dim + 4 * INDEX_HEADS * INDEX_DIM)
        scores = 2.0 * self.pairs * INDEX_HEADS * INDEX_DIM
        return entries * attention + self.indexer * (entries * target + scores)

    @property
    def dense_flop(self) -> float:
        return 2.0 * self.pairs * self.heads * (4 * (NOPE + ROPE) + 3 * VALUE)

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            x = torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16)
            return x.mul_(scale)

        w_uk, w_uv = (normal(self.heads, NOPE, LATENT, scale=LATENT**-0.5) for _ in range(2))
        rows = normal(self.tokens, LATENT + ROPE, scale=0.25)
        q = normal(self.tokens, self.heads, NOPE + ROPE, scale=4)
        dout = normal(self.tokens, self.heads, VALUE, scale=0.1)
        latent, rope = rows.split([LATENT, ROPE], 1)
        keys = torch.einsum("sl,hnl->shn", latent, w_uk)
        inputs: Inputs = {
            "q": torch.cat([torch.einsum("thn,hnl->thl", q[..., :NOPE], w_uk), q[..., NOPE:]], -1),
            "kv": rows,
            "dout": torch.einsum("thv,hvl->thl", dout, w_uv),
            "dense_q": q,
            "dense_k": torch.cat([keys, rope[:, None].expand(-1, self.heads, -1)], -1),
            "dense_v": torch.einsum("sl,hvl->shv", latent, w_uv),
            "dense_dout": dout,
            "w_uk": w_uk,
            "w_uv": w_uv,
        }
        if self.indexer:
            return inputs | self._build_indexer(draw)
        lists = _select_causal(draw, self.tokens, self.topk, "overlapping")
        return inputs | {"topk_indices": lists}

    def _build_indexer(self, draw: torch.Generator) -> Inputs:
        """An indexer whose queries are alike in runs of tokens, as are those of a trained one."""
        few = _indexer(draw, -(-self.tokens // RUN), self.tokens)
        index_q, weights = (few[name].repeat_interleave(RUN, 0) for name in ("index_q", "weights"))
        noise = torch.randn(index_q.shape, generator=draw, device=draw.device, dtype=index_q.dtype)
        ends = torch.arange(1, self.tokens + 1, dtype=torch.int32, device=draw.device)
        return {
            "index_q": eighths(index_q + noise / 4)[: self.tokens],
            "weights": weights[: self.tokens],
            "index_k": few["index_k"],
            "row_starts": torch.zeros_like(ends),
            "row_ends": ends,
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        """Inputs, results and lists; a gradient has the size of its input."""
        out = inputs["dout"].nbytes + 4 * self.tokens * self.heads
        sides = 2 * (inputs["q"].nbytes + inputs["kv"].nbytes) + inputs["dout"].nbytes + out
        lists = 4 * self.tokens * self.topk
        learnt = sum(
            inputs[name].nbytes for name in ("index_q", "weights", "index_k") if name in inputs
        )
        return sides + lists + 2 * learnt

    def run(self, inputs: Inputs) -> Results:
        """As a trainer calls it: through autograd."""
        names = "q", "kv", *(("index_q", "weights", "index_k") if self.indexer else ())
        leaves = {name: inputs[name].detach().requires_grad_() for name in names}
        if self.indexer:
            ranges = {name: inputs[name] for name in ("row_starts", "row_ends")}
            index = inputs["index_q"], inputs["weights"], inputs["index_k"]
            lists = ops.select_rows(*index, topk=self.topk, **ranges)
        else:
            lists = inputs["topk_indices"]
        with torch.enable_grad():
            out, lse = ops.sparse_attention(leaves["q"], leaves["kv"], lists, softmax_scale=SCALE)
            if not self.indexer:
                gradients = torch.autograd.grad(out, list(leaves.values()), inputs["dout"])
                return out.detach(), lse.detach(), *gradients
            attended = inputs["q"], inputs["kv"], lists, lse.detach()
            target = ops.attention_target(*attended, softmax_scale=SCALE)
            scores = ops.selected_scores(
                leaves["index_q"], leaves["weights"], leaves["index_k"], lists
            )
            loss = ops.index_loss(scores, target)
            gradients = torch.autograd.grad(
                (out, loss), list(leaves.values()), (inputs["dout"], torch.ones_like(loss))
            )
        return out.detach(), lse.detach(), *gradients, lists, loss.detach()[None]

    def check(self, inputs: Inputs, results: Results) -> None:
        """Check some tokens; and some rows, whose gradients have terms of every token."""
        out, lse, dq, dkv = results[:4]
        lists = results[-2] if self.indexer else inputs["topk_indices"]
        given = {name: inputs[name] for name in ("q", "kv", "dout")} | {"softmax_scale": SCALE}
        given |= {"out": out, "lse": lse}
        some = _some(self.tokens, 16, lists.device)
        part = given | _taken(given, some) | {"topk_indices": lists[some]}
        names = "q", "kv", "topk_indices", "softmax_scale"
        expected = reference.sparse_attention(**{name: part[name] for name in names})
        _check_attention((out,), some, expected, (SPARSE_PREFILL_OUT, LSE), self.op)
        sizes = _score_sizes(part["q"], part["kv"], part["topk_indices"])
        assert_close(f"{self.op} lse", lse[some], expected[1], LSE, sizes)
        wanted, *_ = reference.sparse_attention_backward(**part)
        sizes, _ = gradient_sizes(part)
        assert_close(f"{self.op} dq", dq[some], wanted, SPARSE_ATTENTION_GRADIENT, sizes)

        wanted = torch.zeros(dkv.shape, device=dkv.device)
        squares = torch.zeros_like(wanted)
        for start in range(0, self.tokens, TOKENS_AT_ONCE):
            tokens = torch.arange(
                start, min(start + TOKENS_AT_ONCE, self.tokens), device=some.device
            )
            named = (lists[tokens][..., None] == some).any(1)  # whether a token selects a row
            part = given | _taken(given, tokens) | {"topk_indices": some.where(named, -1)}
            wanted += reference.sparse_attention_backward(**part)[1]
            squares += gradient_sizes(part)[1].square()
        rows = dkv[some], wanted[some], SPARSE_ATTENTION_GRADIENT, squares[some].sqrt()
        assert_close(f"{self.op} dkv", *rows)
        if not (bool(dq.isfinite().all()) and bool(dkv.isfinite().all())):
            raise AssertionError(f"{self.op}: a gradient is not finite")
        if self.indexer:
            self._check_indexer(inputs, results)

    def _check_indexer(self, inputs: Inputs, results: Results) -> None:
        """Check the selection of some tokens, and what the indexer learns from all of them."""
        lse, (*gradients, lists, loss) = results[1], results[4:]
        some = _some(self.tokens, 4, lists.device)
        arguments = {
            "index_q": inputs["index_q"][some],
            "weights": inputs["weights"][some],
            "index_k": inputs["index_k"],
            "index_k_scales": None,
            "row_starts": inputs["row_starts"][some],
            "row_ends": inputs["row_ends"][some],
        }
        scores = reference.indexer_scores(**arguments)
        sizes = score_sizes("indexer_scores", arguments)
        for place, token in enumerate(some.tolist()):
            seen = slice(token + 1)
            found, size = scores[place, seen], sizes[place, seen].amax()
            _check_best(self.op, lists[token], found, self.topk, size)

        index = {name: inputs[name] for name in ("index_q", "weights", "index_k")} | {
            "topk_indices": lists
        }
        learnt, targets = [], []
        for part, chosen in _parts_of_tokens(index, INDEXED_AT_ONCE):
            learnt.append(reference.selected_scores(**chosen))
            attended = inputs["q"][part], inputs["kv"], lists[part], lse[part]
            targets.append(reference.attention_target(*attended, softmax_scale=SCALE))
        scores, target = torch.cat(learnt), torch.cat(targets)
        losses = torch.xlogy(target, target) - target * scores.log_softmax(-1)
        expected = losses.where(lists >= 0, 0).sum()
        assert_close(f"{self.op} loss", loss[0], expected, INDEX_LOSS)
        # The gradient of a score is a difference, with the errors of its terms.
        probs = scores.softmax(-1)
        _check_index_gradients(
            "selected_scores_backward",
            index | {"dscores": probs - target},
            tuple(gradients),
            INDEXED_AT_ONCE,
            index | {"dscores": probs + target},
        )

    def check_dense(self, inputs: Inputs, results: Results) -> None:
        """Check out, dq, dk and dv of two heads; no element of any head may be NaN."""
        names = "dense_q", "dense_k", "dense_v", "dense_dout"
        if not all(bool(result.isfinite().all()) for result in results):
            raise AssertionError(f"{self.op}: a dense result is not finite")
        for head in {0, self.heads - 1}:
            of_head = tuple(inputs[name][:, head].float() for name in names)
            got = tuple(result[:, head].float() for result in results)
            _check_dense_head(f"{self.op} head {head}", of_head, got)


def _score_sizes(q: Tensor, kv: Tensor, topk_indices: Tensor) -> Tensor:
    """The size of the products in the largest score of each token and head."""
    rows = kv[topk_indices.clamp(min=0)].float().square()
    squares = torch.einsum("thd,tkd->thk", q.float().square(), rows)
    squares.masked_fill_(topk_indices[:, None] < 0, 0)
    return SCALE * squares.amax(-1).sqrt()


def _taken(arguments: Inputs, tokens: Tensor) -> Inputs:
    """The arguments with a row for each token, of some tokens."""
    return {name: arguments[name][tokens] for name in ("q", "dout", "out", "lse")}


def _check_dense_head(name: str, inputs: tuple[Tensor, ...], got: Results) -> None:
    """Compare out, dq, dk and dv of a head with causal attention by its formulas.

    Kernels subtract ``<dout, out>`` from the gradient of P, some with the output as they rounded
    it. Its terms are in the sizes of elements, beside those of the products.
    """
    q, k, v, dout = inputs
    dk, dv, dk_squares, dv_squares = (torch.zeros_like(x) for x in (k, v, k, v))
    rows = torch.arange(len(k), device=k.device)
    for some in rows.split(max(SCORES_AT_ONCE // len(k), 1)):
        logits = SCALE * q[some] @ k.T
        probs = logits.masked_fill_(rows > some[:, None], -torch.inf).softmax(-1)
        out = probs @ v
        delta = (dout[some] * out).sum(-1, keepdim=True)
        dlogits = SCALE * probs * (dout[some] @ v.T - delta)
        # Of <dout, out>, and of each product.
        shared = SCALE * (dout[some] * out).square().sum(-1, keepdim=True).sqrt()
        sizes = (dlogits.square() @ k.square() + (shared * (probs @ k)).square()).sqrt()
        squares = dlogits.square() + (shared * probs).square()
        assert_close(f"{name} out", got[0][some], out, DENSE_PREFILL_OUT)
        assert_close(f"{name} dq", got[1][some], dlogits @ k, DENSE_GRADIENT, sizes)
        dk += dlogits.T @ q[some]
        dv += probs.T @ dout[some]
        dk_squares += squares.T @ q[some].square()
        dv_squares += probs.T.square() @ dout[some].square()
    assert_close(f"{name} dk", got[2], dk, DENSE_GRADIENT, dk_squares.sqrt())
    assert_close(f"{name} dv", got[3], dv, DENSE_GRADIENT, dv_squares.sqrt())


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention with :data:`SCALE` of q, k ``[T, H, 192]`` and v ``[T, H, 128]``."""


def dense_side(
    name: str, workload: TrainingAttention, inputs: Inputs, attend: Attend, note: str = ""
) -> Side:
    """Forward and backward pass of a kernel of dense attention, through autograd."""
    leaves = [inputs[f"dense_{part}"].detach().requires_grad_() for part in "qkv"]

    def run() -> Results:
        with torch.enable_grad():
            out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, inputs["dense_dout"])

    return Side(name, run, lambda got: workload.check_dense(inputs, got), note=note)


def training_workloads() -> list[Workload]:
    """The lengths among which dense and sparse attention cross, with and without the indexer."""
    return [
        TrainingAttention(tokens, heads, 2048, indexer)
        for indexer in (0, 1)
        for heads in (128, 64)
        for tokens in (2048, 4096, 8192, 16384, 32768)
    ]


def crossing_lines(rows: Sequence[Row]) -> list[str]:
    """The fastest dense attention beside the sparse one, and where they cross; empty without rows.

    A ratio is the dense time over the sparse one, from the same run.
    """
    fastest: dict[TrainingAttention, tuple[float, Row]] = {}
    for row in rows:
        if row.op == TrainingAttention.op and row.peer_us is not None:
            workload = TrainingAttention(**row.shape)
            if workload not in fastest or row.peer_us < fastest[workload][0]:
                fastest[workload] = row.peer_us, row
    lines = []
    for heads, topk in dict.fromkeys((each.heads, each.topk) for each in fastest):
        lines += ["", f"training attention, {heads} heads, top-k {topk}: forward and backward"]
        lines.append(_table_line("tokens", "dense", "sparse", "ratio", "with indexer", "ratio"))
        ratios: tuple[dict[int, float], ...] = {}, {}
        lengths = {each.tokens for each in fastest if (each.heads, each.topk) == (heads, topk)}
        for tokens in sorted(lengths):
            dense, cells = "", []
            for indexer in (0, 1):
                workload = TrainingAttention(tokens, heads, topk, indexer)
                if workload not in fastest:
                    cells += ["", ""]
                    continue
                us, row = fastest[workload]
                rate = workload.dense_flop / us / 1e6
                dense = dense or f"{us / 1e3:.2f} ms, {rate:.0f} TFLOP/s ({row.peer})"
                ratios[indexer][tokens] = us / row.ours_us
                sparse = f"{row.ours_us / 1e3:.2f} ms, {row.tflops:.0f} TFLOP/s"
                cells += [sparse, f"{us / row.ours_us:.2f}"]
            lines.append(_table_line(str(tokens), dense, *cells))
        for words, found in zip(("sparse", "sparse with its indexer"), ratios, strict=True):
            if found:
                lines.append(f"{words} is faster {_crossing(found)}")
    return lines[1:]


def _table_line(*cells: str) -> str:
    widths = 8, 42, 24, 7, 24, 7
    return "".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _crossing(ratios: dict[int, float]) -> str:
    """Where the ratio passes 1, between two lengths in logarithms of both."""
    points = sorted(ratios.items())
    if points[0][1] >= 1:
        return f"at {points[0][0]} tokens already"
    for (before, low), (after, high) in itertools.pairwise(points):
        if high >= 1:
            share = -math.log(low) / math.log(high / low)
            return f"from {before * (after / before) ** share:.0f} tokens on"
    return f"at no length up to {points[-1][0]} tokens"
