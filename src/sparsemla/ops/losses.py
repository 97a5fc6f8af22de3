"""What trains the lightning indexer: selections, scores, targets and losses, with gradients."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor

from sparsemla.checks import FLOATS, INTEGERS, Checker
from sparsemla.kernels import losses
from sparsemla.kernels.losses.arguments import (
    AttentionTarget,
    DenseIndexGradients,
    DenseIndexLoss,
    SelectedScores,
    SelectedScoresBackward,
)
from sparsemla.ops._library import composed, differentiate, functional, refuse_derivative
from sparsemla.ops.indexer import QUERIES, indexer_scores
from sparsemla.ops.topk import select_topk


def select_rows(
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    *,
    row_starts: Tensor,
    row_ends: Tensor,
    topk: int,
    max_workspace_bytes: int = 256 << 20,
) -> Tensor:
    """The ``topk`` best rows of each query token among contiguous index keys.

    Scores as in :func:`indexer_scores`, selection as in :func:`select_topk` (exact, ties to the
    lower row). The results are rows of ``index_k``, and of every tensor with one row per token, so
    that packed sequences need no offsets: ``row_starts`` and ``row_ends`` say what a token sees.

    The operator returns a new tensor and never runs twice under selective checkpointing that saves
    it. A selection has no gradient.

    Args:
        index_q: float8_e4m3fn or bfloat16 ``[T, HI, DI]``.
        weights: bfloat16, float16 or float32 ``[T, HI]``, with every factor folded in.
        index_k: ``[S, DI]`` of index_q's dtype.
        topk: k, any positive number.
        row_starts, row_ends: int32, int64 or uint32 ``[T]``; clamped to [0, S].
        max_workspace_bytes: bound on the memory of the scores at any time; at least one token is
            processed. On a GPU, the lists of the selection take up to 149 MiB more.

    Returns:
        int32 ``[T, topk]``, ascending rows, then -1.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) section 2.1.

    >>> index_q, index_k = (
    ...     torch.ones(2, 1, 8).bfloat16(),
    ...     torch.arange(5).bfloat16()[:, None].repeat(1, 8),
    ... )
    >>> starts, ends = torch.tensor([0, 3]), torch.tensor([3, 5])  # two packed sequences
    >>> select_rows(index_q, torch.ones(2, 1), index_k, topk=2, row_starts=starts, row_ends=ends)
    tensor([[1, 2],
            [3, 4]], dtype=torch.int32)
    """
    check = Checker("select_rows", gradients="backward")
    check.tensor("index_q", index_q, "T HI DI", QUERIES)
    check.index_heads()
    check.tensor("weights", weights, "T HI", FLOATS)
    check.tensor("index_k", index_k, "S DI", index_q.dtype)
    check.positive("topk", topk)
    row_starts = check.tensor("row_starts", row_starts, "T", INTEGERS)
    row_ends = check.tensor("row_ends", row_ends, "T", INTEGERS)
    check.positive("max_workspace_bytes", max_workspace_bytes, below=2**63)
    with torch.no_grad():
        return _select_rows(
            index_q, weights, index_k, topk, row_starts, row_ends, max_workspace_bytes
        )


@composed
def _select_rows(
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    topk: int,
    row_starts: Tensor,
    row_ends: Tensor,
    max_workspace_bytes: int,
) -> tuple[Tensor, Callable[[], None]]:
    num_tokens, num_rows = index_q.shape[0], index_k.shape[0]
    out = index_q.new_empty(num_tokens, topk, dtype=torch.int32)

    def compute() -> None:
        at_once = max(1, min(num_tokens, max_workspace_bytes // (4 * max(num_rows, 1))))
        scores = index_q.new_empty(at_once, num_rows, dtype=torch.float32)
        for first in range(0, num_tokens, at_once):
            part = slice(first, min(first + at_once, num_tokens))
            starts, ends, some = row_starts[part], row_ends[part], scores[: part.stop - first]
            indexer_scores(
                index_q[part],
                weights[part],
                index_k,
                None,
                row_starts=starts,
                row_ends=ends,
                out=some,
            )
            select_topk(some, topk=topk, row_starts=starts, row_ends=ends, out=out[part])
        starts = row_starts.clamp(0, num_rows).int()[:, None]
        out.copy_(torch.where(out < 0, -1, out + starts))

    return out, compute


def _allocate_entries(call: SelectedScores | AttentionTarget) -> Tensor:
    """Memory for a result of each entry of the lists."""
    return call.topk_indices.new_empty(call.topk_indices.shape, dtype=torch.float32)


_selected_scores = functional(losses.SELECTED_SCORES, _allocate_entries)


def selected_scores(
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    topk_indices: Tensor,
    *,
    topk_lengths: Tensor | None = None,
) -> Tensor:
    """Index scores of the listed rows, differentiable in ``index_q``, ``weights`` and ``index_k``.

    For a valid entry ``j`` (``0 <= j < S``, among the first ``topk_lengths`` entries)::

        scores[t, j] = sum_h weights[t, h] * relu(<index_q[t, h], index_k[j]>)

    in float32, and -inf for the others, whose rows are never read. An entry that is listed twice
    has two scores, and its row the gradient of both. :func:`selected_scores_backward` has the
    gradients; they have the same bits in every run.

    Args:
        index_q: bfloat16, float16 or float32 ``[T, HI, DI]``.
        weights: bfloat16, float16 or float32 ``[T, HI]``, with every factor folded in; may be
            negative.
        index_k: ``[S, DI]`` of index_q's dtype.
        topk_indices: int32, int64 or uint32 ``[T, K]``, rows of ``index_k``.
        topk_lengths: ``[T]``, leading entries to use of each row; default all.

    Returns:
        float32 ``[T, K]``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) section 2.1.

    >>> index_q, weights, index_k = (
    ...     torch.ones(1, 2, 8),
    ...     torch.ones(1, 2, requires_grad=True),
    ...     torch.ones(3, 8),
    ... )
    >>> scores = selected_scores(index_q, weights, index_k, torch.tensor([[2, -1, 0]]))
    >>> scores
    tensor([[16., -inf, 16.]], grad_fn=<...>)
    >>> scores[0, 2].backward()
    >>> weights.grad
    tensor([[8., 8.]])
    """
    check = Checker("selected_scores", gradients="backward")
    call = SelectedScores(index_q, weights, index_k, topk_indices, topk_lengths)
    return cast(Tensor, _selected_scores(_listed(check, call)))


Listed = TypeVar("Listed", SelectedScores, SelectedScoresBackward)


def _listed(check: Checker, call: Listed) -> Listed:
    """Check an indexer's tensors and its lists; returns them with integers as signed ones."""
    _check_indexer(check, call)
    topk_indices = check.tensor("topk_indices", call.topk_indices, "T K", INTEGERS)
    topk_lengths = check.optional("topk_lengths", call.topk_lengths, "T", INTEGERS)
    return call._replace(topk_indices=topk_indices, topk_lengths=topk_lengths)


def _check_indexer(
    check: Checker, call: SelectedScores | SelectedScoresBackward | DenseIndexGradients
) -> None:
    check.tensor("index_q", call.index_q, "T HI DI", FLOATS)
    check.index_heads()
    check.tensor("weights", call.weights, "T HI", FLOATS)
    check.tensor("index_k", call.index_k, "S DI", call.index_q.dtype)


def _allocate_gradients(call: SelectedScoresBackward) -> tuple[Tensor, Tensor, Tensor]:
    return _new_gradients(call.index_q, call.weights, call.index_k)


def _new_gradients(
    index_q: Tensor, weights: Tensor, index_k: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients: contiguous, whatever the strides of the arguments."""
    return (
        index_q.new_empty(index_q.shape),
        weights.new_empty(weights.shape),
        index_k.new_empty(index_k.shape),
    )


_selected_scores_backward = functional(losses.SELECTED_SCORES_BACKWARD, _allocate_gradients)


def selected_scores_backward(
    dscores: Tensor,
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    topk_indices: Tensor,
    *,
    topk_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`selected_scores`, for a trainer's own ``autograd.Function``.

    With ``x[t, h, j] = <index_q[t, h], index_k[j]>`` and
    ``b = dscores[t, j] weights[t, h] [x > 0]``, over valid entries::

        dweights[t, h]  = sum_j dscores[t, j] relu(x[t, h, j])
        dindex_q[t, h]  = sum_j b[t, h, j] index_k[j]
        dindex_k[j]    += sum_h b[t, h, j] index_q[t, h]    for each t and entry that names j

    Sums are in float32. The shares of a row of ``dindex_k`` are added in the order of the entries,
    in chunks of tokens: no atomic adds, the same bits in every run.

    Args:
        dscores: float32 ``[T, K]``; values at invalid entries are ignored, even NaN.
        index_q, weights, index_k, topk_indices, topk_lengths: as in :func:`selected_scores`.

    Returns:
        dindex_q, dweights and dindex_k, with the shapes and dtypes of their inputs.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) section 2.1.

    >>> index_q, weights, index_k = torch.ones(1, 2, 8), torch.ones(1, 2), torch.ones(3, 8)
    >>> lists = torch.tensor([[2, 2]])
    >>> dindex_q, dweights, dindex_k = selected_scores_backward(
    ...     torch.ones(1, 2), index_q, weights, index_k, lists
    ... )
    >>> dindex_k[:, 0]
    tensor([0., 0., 4.])
    """
    check = Checker("selected_scores_backward", gradients="backward")
    check.tensor("dscores", dscores, "T K", torch.float32)
    call = SelectedScoresBackward(dscores, index_q, weights, index_k, topk_indices, topk_lengths)
    return cast(tuple[Tensor, Tensor, Tensor], _selected_scores_backward(_listed(check, call)))


def _gradients_of_scores(
    call: SelectedScores, results: tuple[None], dscores: Tensor | None
) -> dict[str, Tensor]:
    dscores = torch.zeros_like(_allocate_entries(call)) if dscores is None else dscores.contiguous()
    dindex_q, dweights, dindex_k = _selected_scores_backward(
        SelectedScoresBackward(dscores, *call[:-1])
    )
    return {"index_q": dindex_q, "weights": dweights, "index_k": dindex_k}


differentiate(losses.SELECTED_SCORES, _gradients_of_scores, keep=SelectedScores._fields[:-1])
refuse_derivative("selected_scores_backward", "selected_scores has no second derivative")

_attention_target = functional(losses.ATTENTION_TARGET, _allocate_entries)


def attention_target(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    topk_lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """What all heads together attend to: the distribution that the indexer learns.

    Over the valid entries ``j`` of a token's list, 0 elsewhere::

        z_j       = softmax_scale * <q[t, h], kv[j]>
        a[t, j]   = sum_h exp(z_j - lse[t, h]) / (1 + exp(attn_sink[h] - lse[t, h]))
        target    = a / sum_j a[t, j]                               a itself without normalize

    ``lse`` is that of the attention over the same lists, so the heads are not normalised again, and
    neither are logits averaged. With a sink, a head counts by the share of its attention that goes
    to keys; leave ``attn_sink`` out to give all heads the same weight. With tensor parallelism,
    each rank has some of the heads: sum the results of ``normalize=False`` over the ranks, then
    divide.

    The target is a constant of the loss: it has no gradient. Memory is bounded: nothing is stored
    per head.

    Args:
        q: bfloat16, float16 or float32 ``[T, H, D]``.
        kv: ``[S, D]`` of q's dtype; all dims are keys.
        topk_indices: int32, int64 or uint32 ``[T, K]``, rows of ``kv``.
        lse: float32 ``[T, H]``, natural logarithm, without the sink.
        softmax_scale: factor of the scores.
        topk_lengths: ``[T]``, leading entries to use of each row; default all.
        attn_sink: float32 ``[H]``, a logit without a value; +inf and -inf are legal.
        normalize: divide by the sum of the row. A row without mass stays 0.

    Returns:
        float32 ``[T, K]``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) section 2.1.

    >>> q, kv = torch.zeros(1, 4, 16), torch.zeros(9, 16)
    >>> lse = torch.full((1, 4), 2.0).log()  # two keys with z = 0
    >>> attention_target(q, kv, torch.tensor([[5, -1, 7]]), lse, softmax_scale=1.0)
    tensor([[0.5000, 0.0000, 0.5000]])
    """
    check = Checker("attention_target", gradients="backward")
    check.tensor("q", q, "T H D", FLOATS)
    check.row_dims("kv", check.tensor("kv", kv, "S D", q.dtype))
    topk_indices = check.tensor("topk_indices", topk_indices, "T K", INTEGERS)
    check.tensor("lse", lse, "T H", torch.float32)
    check.number("softmax_scale", softmax_scale)
    topk_lengths = check.optional("topk_lengths", topk_lengths, "T", INTEGERS)
    check.optional("attn_sink", attn_sink, "H", torch.float32)
    check.kind("normalize", normalize, bool)
    call = AttentionTarget(
        q, kv, topk_indices, lse, softmax_scale, topk_lengths, attn_sink, normalize
    )
    with torch.no_grad():
        return cast(Tensor, _attention_target(call))


def index_loss(scores: Tensor, target: Tensor, *, row_weights: Tensor | None = None) -> Tensor:
    """The divergence of the indexer's softmax from the target, summed over the tokens.

    Over the entries with a score above -inf, with ``0 ln 0 = 0``::

        loss = sum_t row_weights[t] sum_j p_j (ln p_j - scores[t, j] + ln sum_i exp(scores[t, i]))
        dloss / dscores[t, j] = row_weights[t] (m_t softmax(scores[t])_j - p_j)      m_t = sum_j p_j

    For a target that sums to 1 this is ``KL(target || softmax(scores))``; a row without mass
    counts nothing. Plain torch, which ``torch.compile`` fuses.

    Args:
        scores: float32 ``[T, K]``, from :func:`selected_scores`; differentiable.
        target: float32 ``[T, K]``, from :func:`attention_target`; a constant.
        row_weights: float32 ``[T]``, a mask, a coefficient or ``1 / T``; default 1. A token of
            weight 0 is left out, even if its values are NaN.

    Returns:
        float32 scalar.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) section 2.1.

    >>> index_loss(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]))
    tensor(0.6931)
    """
    check = Checker("index_loss", gradients="all")
    check.tensor("scores", scores, "T K", torch.float32)
    check.tensor("target", target, "T K", torch.float32)
    check.optional("row_weights", row_weights, "T", torch.float32)
    valid = scores != -torch.inf
    if row_weights is not None:
        row_weights = row_weights.detach()
        valid = valid & (row_weights != 0)[:, None]
    p = target.detach().where(valid, 0)
    # A row of -inf alone would have a gradient of NaN.
    some = valid.any(-1, keepdim=True)
    found = scores.where(valid, 0)
    lse = scores.where(valid | ~some, -torch.inf).where(some, 0).logsumexp(-1, keepdim=True)
    losses = (torch.xlogy(p, p) - p * (found - lse)).sum(-1)
    # Autocast would round the operands of a dot product.
    return (losses if row_weights is None else losses * row_weights).sum()


def _allocate_loss(call: DenseIndexLoss) -> Tensor:
    return call.lse.new_empty(())


_dense_index_loss = functional(losses.DENSE_INDEX_LOSS, _allocate_loss)


def dense_index_loss(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    *,
    softmax_scale: float,
    row_starts: Tensor,
    row_ends: Tensor,
    row_weights: Tensor | None = None,
    max_workspace_bytes: int = 256 << 20,
) -> Tensor:
    """The divergence of the indexer from dense attention, over all visible keys (warm-up).

    :func:`index_loss` over the rows ``row_starts[t] <= s < row_ends[t]``, with::

        scores[t, s] = sum_h weights[t, h] * relu(<index_q[t, h], index_k[s]>)
        a[t, s]      = sum_h exp(softmax_scale * <q[t, h], k[s, h]> - lse[t, h])
        target       = a / sum_s a[t, s]

    Differentiable in ``index_q``, ``weights`` and ``index_k``; the attention is a constant. Nothing
    of size tokens times context exists: the op works on as many tokens at a time as the workspace
    holds. If gradients are needed, the same pass computes them, because the only factor that it
    does not know is one scalar. On a GPU, no bit of the loss and its gradients depends on the
    workspace.

    For attention with a sink, ``logaddexp(lse, attn_sink)`` weights heads by what they attend to.

    Args:
        q: bfloat16, float16 or float32 ``[T, H, D]``.
        k: of q's dtype, ``[S, H, D]``, or ``[S, D]`` if all heads share the keys.
        lse: float32 ``[T, H]``, natural logarithm, of the attention over the same rows.
        index_q: bfloat16, float16 or float32 ``[T, HI, DI]``.
        weights: bfloat16, float16 or float32 ``[T, HI]``, with every factor folded in.
        index_k: ``[S, DI]`` of index_q's dtype.
        softmax_scale: factor of the attention's scores.
        row_starts, row_ends: int32, int64 or uint32 ``[T]``; clamped to [0, S].
        row_weights: float32 ``[T]``, a mask, a coefficient or ``1 / T``; default 1. A token of
            weight 0 is left out, even if its values are NaN.
        max_workspace_bytes: bound on the memory of scores and targets at any time, 8 bytes for
            each of S rows and a token; at least 64 tokens are processed.

    Returns:
        float32 scalar.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) section 2.1, the dense warm-up stage.

    >>> q, k, lse = torch.zeros(2, 4, 16), torch.zeros(2, 4, 16), torch.tensor([[0.0], [0.6931]])
    >>> index_q, weights, index_k = (
    ...     torch.ones(2, 1, 8),
    ...     torch.ones(2, 1),
    ...     torch.eye(2, 8, requires_grad=True),
    ... )
    >>> causal = {"row_starts": torch.tensor([0, 0]), "row_ends": torch.tensor([1, 2])}
    >>> lse = lse.repeat(1, 4)
    >>> loss = dense_index_loss(q, k, lse, index_q, weights, index_k, softmax_scale=0.25, **causal)
    >>> loss.requires_grad, abs(loss.item()) < 1e-6  # equal scores, equal attention
    (True, True)
    """
    attention, indexer = (q, k, lse), (index_q, weights, index_k)
    call = DenseIndexGradients(
        *attention, *indexer, softmax_scale, row_starts, row_ends, max_workspace_bytes, row_weights
    )
    call = _checked("dense_index_loss", call)
    if torch.is_grad_enabled() and any(x.requires_grad for x in indexer):
        loss: Tensor = _dense_index_gradients(call)[0]
        return loss
    with torch.no_grad():
        return cast(Tensor, _dense_index_loss(call.of_loss()))


def _allocate_loss_and_gradients(
    call: DenseIndexGradients,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of float16 tensors are float32, to be multiplied before they are rounded."""
    dindex_q, dweights, dindex_k = (
        x.new_empty(x.shape, dtype=torch.float32 if x.dtype == torch.float16 else x.dtype)
        for x in (call.index_q, call.weights, call.index_k)
    )
    return call.lse.new_empty(()), dindex_q, dweights, dindex_k


_dense_index_gradients = functional(losses.DENSE_INDEX_GRADIENTS, _allocate_loss_and_gradients)


def dense_index_gradients(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    *,
    softmax_scale: float,
    row_starts: Tensor,
    row_ends: Tensor,
    row_weights: Tensor | None = None,
    max_workspace_bytes: int = 256 << 20,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`dense_index_loss` and its gradients, for a trainer's own ``autograd.Function``.

    With ``x = <index_q[t, h], index_k[s]>``, over the rows that a token sees::

        g[t, s]        = row_weights[t] (softmax(scores[t])_s - target[t, s])
        b[t, h, s]     = g[t, s] weights[t, h] [x > 0]
        dweights[t, h] = sum_s g[t, s] relu(x)
        dindex_q[t, h] = sum_s b[t, h, s] index_k[s]
        dindex_k[s]    = sum_t sum_h b[t, h, s] index_q[t, h]

    Args:
        q, k, lse, index_q, weights, index_k: as in :func:`dense_index_loss`.
        softmax_scale, row_starts, row_ends, row_weights, max_workspace_bytes: the same.

    Returns:
        The loss, float32, then dindex_q, dweights and dindex_k, with the dtypes of their inputs.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) section 2.1, the dense warm-up stage.

    >>> q, k, lse = torch.zeros(1, 4, 16), torch.zeros(1, 4, 16), torch.zeros(1, 4)
    >>> index_q, weights, index_k = torch.ones(1, 2, 8), torch.ones(1, 2), torch.ones(1, 8)
    >>> rows = {"row_starts": torch.tensor([0]), "row_ends": torch.tensor([1])}
    >>> dense_index_gradients(q, k, lse, index_q, weights, index_k, softmax_scale=0.25, **rows)[2]
    tensor([[0., 0.]])
    """
    attention, indexer = (q, k, lse), (index_q, weights, index_k)
    call = DenseIndexGradients(
        *attention, *indexer, softmax_scale, row_starts, row_ends, max_workspace_bytes, row_weights
    )
    call = _checked("dense_index_gradients", call)
    with torch.no_grad():
        loss, *grads = _dense_index_gradients(call)
    if torch.is_grad_enabled() and any(x.requires_grad for x in indexer):
        # Its results refuse a second derivative.
        grads = _dense_index_loss_backward(torch.ones_like(loss), *grads, *indexer)
    dindex_q, dweights, dindex_k = (
        grad.to(x.dtype) for grad, x in zip(grads, indexer, strict=True)
    )
    return loss, dindex_q, dweights, dindex_k


def _checked(op: str, call: DenseIndexGradients) -> DenseIndexGradients:
    """Check the arguments of a dense loss; returns them with integers as signed ones."""
    check = Checker(op, gradients="backward")
    check.tensor("q", call.q, "T H D", FLOATS)
    shared = isinstance(call.k, Tensor) and call.k.dim() == 2
    check.tensor("k", call.k, "S D" if shared else "S H D", call.q.dtype)
    check.tensor("lse", call.lse, "T H", torch.float32)
    _check_indexer(check, call)
    check.number("softmax_scale", call.softmax_scale)
    row_starts = check.tensor("row_starts", call.row_starts, "T", INTEGERS)
    row_ends = check.tensor("row_ends", call.row_ends, "T", INTEGERS)
    check.optional("row_weights", call.row_weights, "T", torch.float32)
    check.positive("max_workspace_bytes", call.max_workspace_bytes, below=2**63)
    return call._replace(row_starts=row_starts, row_ends=row_ends)


def _gradients_of_dense_loss(
    call: DenseIndexGradients,
    results: tuple[None, Tensor, Tensor, Tensor],
    dloss: Tensor | None,
    *rest: None,
) -> dict[str, Tensor]:
    dloss = torch.zeros((), device=call.index_q.device) if dloss is None else dloss
    dindex_q, dweights, dindex_k = _dense_index_loss_backward(
        dloss, *results[1:], call.index_q, call.weights, call.index_k
    )
    return {"index_q": dindex_q, "weights": dweights, "index_k": dindex_k}


@composed
def _dense_index_loss_backward(
    dloss: Tensor,
    dindex_q: Tensor,
    dweights: Tensor,
    dindex_k: Tensor,
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[[], None]]:
    """The gradients times ``dloss``; a second derivative would also depend on the indexer."""
    results = _new_gradients(index_q, weights, index_k)

    def compute() -> None:
        for result, grad in zip(results, (dindex_q, dweights, dindex_k), strict=True):
            result.copy_(grad.float() * dloss)

    return results, compute


differentiate(
    losses.DENSE_INDEX_GRADIENTS,
    _gradients_of_dense_loss,
    keep=("index_q", "weights", "index_k", "dindex_q", "dweights", "dindex_k"),
    constants=("dindex_q", "dweights", "dindex_k"),
)
refuse_derivative("dense_index_loss_backward", "dense_index_loss has no second derivative")
