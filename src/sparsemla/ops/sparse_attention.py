"""Differentiable attention over selected rows, for training."""

from typing import TypeVar

import torch
from torch import Tensor

from sparsemla.checks import FLOATS, INTEGERS, Checker
from sparsemla.formats import LATENT_DIM
from sparsemla.kernels import attention, backward
from sparsemla.kernels.attention.arguments import SparseAttention
from sparsemla.kernels.backward.arguments import SparseAttentionBackward
from sparsemla.ops._library import differentiate, functional, refuse_derivative

MAX_WORKSPACE_BYTES = 2 << 30
"""Bound on the workspace of a backward pass, unless its caller gives another."""


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    *,
    softmax_scale: float,
    topk_lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    list_tokens: int = 1,
    token_mask: Tensor | None = None,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of each query token over the rows selected for it, with gradients.

    The results of :func:`sparse_prefill` over rows, bit for bit, where that op takes the dtype::

        z_j = softmax_scale * <q, K_j>      lse = ln sum_j exp(z_j)
        out = sum_j exp(z_j - lse) V_j      * 1 / (1 + exp(attn_sink - lse))

    over the valid indices ``j`` of a token; ``V_j`` are the first 512 dims of the row ``K_j``. q,
    kv and attn_sink get gradients, from out and from lse; :func:`sparse_attention_backward` has
    their formulas. The graph keeps q, kv, the indices, out and lse. A second derivative is refused.

    Rows are numbered over all of kv. So packed sequences need no offsets, and a token sees what its
    list says: there is no causal mask.

    Neighbouring tokens may share a list, as in :func:`sparse_prefill`. With the lists and masks
    of :func:`share_lists` each token attends to what its own list selects, a row is read once for
    all tokens of a list, and its gradient gets one term from all of them. Last bits differ from
    those of own lists.

    Args:
        q: ``[T, H, D]`` bfloat16, float16 or float32; any H.
        kv: rows ``[S, D]`` of q's dtype, with the value in the first 512 dims (all, if D is less).
        topk_indices: int32, int64 or uint32 ``[T, K]``, rows of kv; others are masked. ``[N, K]``
            with ``N = ceil(T / list_tokens)`` lists.
        softmax_scale: factor of the scores; for MLA ``192^-0.5 * mscale^2``, not ``576^-0.5``.
        topk_lengths: ``[T]``, or ``[N]``, leading entries to use of each row; default all.
        attn_sink: float32 ``[H]``, a logit without a value; +inf and -inf are legal.
        list_tokens: neighbouring tokens of a list; at most 8 with a mask.
        token_mask: uint8 ``[N, K]``: bit ``i`` is set if the ``i``-th token of the list attends to
            the entry; default all do. Rows to which a token of the list attends must be finite: NaN
            or an infinity may reach the list's other tokens.
        deterministic: give the gradient of kv the same bits in every run; see
            :func:`sparse_attention_backward`.

    Returns:
        out ``[T, H, V]`` of q's dtype, and lse float32 ``[T, H]``: natural logarithm, without the
        sink. A row without a valid index gets 0 and -inf, and no gradient.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) section 2.1.

    >>> q = torch.randn(3, 16, 576, requires_grad=True)
    >>> kv = torch.randn(100, 576, requires_grad=True)
    >>> rows = torch.tensor([[0, 1], [5, -1], [-1, -1]], dtype=torch.int32)
    >>> out, lse = sparse_attention(q, kv, rows, softmax_scale=192**-0.5)
    >>> out.sum().backward()
    >>> kv.grad.abs().sum(1).nonzero()[:, 0]
    tensor([0, 1, 5])
    """
    call = SparseAttention(
        q,
        kv,
        topk_indices,
        softmax_scale,
        topk_lengths,
        attn_sink,
        list_tokens,
        token_mask,
        deterministic,
    )
    return _sparse_attention(_checked(Checker("sparse_attention", gradients="backward"), call))


def _allocate(call: SparseAttention) -> tuple[Tensor, Tensor]:
    q, value_dim = call.q, min(call.kv.shape[1], LATENT_DIM)
    return q.new_empty(*q.shape[:2], value_dim), q.new_empty(q.shape[:2], dtype=torch.float32)


_sparse_attention = functional(attention.SPARSE_ATTENTION, _allocate)


def sparse_attention_backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    topk_lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    list_tokens: int = 1,
    token_mask: Tensor | None = None,
    dlse: Tensor | None = None,
    deterministic: bool = True,
    accumulate: Tensor | None = None,
    max_workspace_bytes: int = MAX_WORKSPACE_BYTES,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of :func:`sparse_attention`, for trainers with their own autograd function.

    With the results of the forward, for each token and head, over its valid entries ``j``::

        P_j   = exp(softmax_scale * <q, K_j> - lse)      g = 1 / (1 + exp(attn_sink - lse))
        delta = <dout, out>                              dS_j = P_j (g (<dout, V_j> - delta) + dlse)

        dq      = softmax_scale * sum_j dS_j K_j
        dkv_j  += softmax_scale * sum_h dS_j q_h         all dims
        dkv_j  += sum_h g P_j dout_h                     the dims of the value
        d_sink  = - sum_t (1 - g) delta

    A row of kv that a list names twice gets both terms. All sums are in float32. On a GPU, unless q
    is float32, ``g P`` and dS are rounded to bfloat16 before they are multiplied; for bfloat16
    inputs so is each term of dkv, the sum over the heads of a token, or of the tokens that share a
    list.

    Args:
        dout: ``[T, H, V]`` of q's dtype, the gradient of out.
        q, kv, topk_indices, softmax_scale, topk_lengths, attn_sink, list_tokens, token_mask: as in
            the forward.
        out: ``[T, H, V]`` of q's dtype, from the forward.
        lse: float32 ``[T, H]``, from the forward.
        dlse: float32 ``[T, H]``, the gradient of lse; default zero.
        deterministic: add the terms of a row of kv in the order of lists and entries. The bits are
            then the same in every run and for every ``max_workspace_bytes``. If False, kernels
            may add them in any order: the portable ones do, without lists and with less workspace.
        accumulate: float32 ``[S, D]``, to which the gradient of kv is added; for microbatches, and
            for rows that several ranks share.
        max_workspace_bytes: bound on the workspace of a GPU, but at least that of one list. The
            CPU needs about 64 MiB, and at least the rows of one list.

    Returns:
        dq ``[T, H, D]`` of q's dtype; dkv ``[S, D]`` of kv's dtype, or ``accumulate``; d_sink
        float32 ``[H]``, None without a sink.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    >>> q, kv = torch.randn(3, 4, 64), torch.randn(9, 64)
    >>> rows = torch.tensor([[0, 1], [5, -1], [-1, -1]], dtype=torch.int32)
    >>> out, lse = sparse_attention(q, kv, rows, softmax_scale=0.1)
    >>> dq, dkv, d_sink = sparse_attention_backward(
    ...     torch.ones_like(out), q, kv, rows, out, lse, softmax_scale=0.1
    ... )
    >>> dq.shape, dkv.shape, d_sink
    (torch.Size([3, 4, 64]), torch.Size([9, 64]), None)
    """
    check = Checker("sparse_attention_backward", gradients="backward")
    check.tensor("dout", dout, "T H V", FLOATS)
    call = _checked(
        check,
        SparseAttentionBackward(
            dout,
            q,
            kv,
            topk_indices,
            out,
            lse,
            softmax_scale,
            max_workspace_bytes,
            topk_lengths,
            attn_sink,
            list_tokens,
            token_mask,
            dlse,
            deterministic,
            as_float32=accumulate is not None,
        ),
    )
    check.tensor("dout", dout, "T H V", q.dtype)
    check.tensor("out", out, "T H V", q.dtype)
    check.tensor("lse", lse, "T H", torch.float32)
    check.optional("dlse", dlse, "T H", torch.float32)
    if accumulate is not None:
        check.written("accumulate", accumulate, "S D", torch.float32)
    check.positive("max_workspace_bytes", max_workspace_bytes, below=2**63)
    dq, dkv, d_sink = _sparse_attention_backward(call)
    if accumulate is not None:
        dkv = accumulate.add_(dkv)
    return dq, dkv, None if attn_sink is None else d_sink


def _allocate_gradients(call: SparseAttentionBackward) -> tuple[Tensor, Tensor, Tensor]:
    q, kv = call.q, call.kv
    num_sinks = 0 if call.attn_sink is None else q.shape[1]
    dkv = kv.new_empty(kv.shape, dtype=torch.float32 if call.as_float32 else kv.dtype)
    return q.new_empty(q.shape), dkv, call.lse.new_empty(num_sinks)


_sparse_attention_backward = functional(backward.SPARSE_ATTENTION_BACKWARD, _allocate_gradients)
refuse_derivative("sparse_attention_backward", "sparse_attention has no second derivative")


Attention = TypeVar("Attention", SparseAttention, SparseAttentionBackward)


def _checked(check: Checker, call: Attention) -> Attention:
    """Check the forward's arguments and bind V; returns them with integers as signed ones."""
    check.tensor("q", call.q, "T H D", FLOATS)
    check.tensor("kv", call.kv, "S D", call.q.dtype)
    if 0 in call.kv.shape:
        raise ValueError(
            f"{check.op}: kv must have at least one row and one dim, got {list(call.kv.shape)}"
        )
    lists = check.lists(call.list_tokens, call.token_mask)
    topk_indices = check.tensor("topk_indices", call.topk_indices, f"{lists} K", INTEGERS)
    topk_lengths = check.optional("topk_lengths", call.topk_lengths, lists, INTEGERS)
    check.optional("token_mask", call.token_mask, f"{lists} K", torch.uint8)
    check.optional("attn_sink", call.attn_sink, "H", torch.float32)
    check.number("softmax_scale", call.softmax_scale)
    check.kind("deterministic", call.deterministic, bool)
    check.bind("V", min(call.kv.shape[1], LATENT_DIM))
    return call._replace(topk_indices=topk_indices, topk_lengths=topk_lengths)


def _gradients(
    call: SparseAttention, results: tuple[Tensor, Tensor], dout: Tensor | None, dlse: Tensor | None
) -> dict[str, Tensor | None]:
    out, lse = results
    dq, dkv, d_sink = _sparse_attention_backward(
        SparseAttentionBackward(
            dout=torch.zeros_like(out) if dout is None else dout.contiguous(),
            dlse=None if dlse is None else dlse.contiguous(),
            max_workspace_bytes=MAX_WORKSPACE_BYTES,
            **call._replace(out=out, lse=lse)._asdict(),
        )
    )
    return {"q": dq, "kv": dkv, "attn_sink": None if call.attn_sink is None else d_sink}


differentiate(attention.SPARSE_ATTENTION, _gradients)
