"""Per-head GEMMs: queries into the latent space, attended latents to the heads' outputs."""

import torch
from torch import Tensor

from sparsemla import dispatch
from sparsemla.checks import Checker
from sparsemla.kinds import check_integer
from sparsemla.ops._library import operator
from sparsemla.weights import HeadWeight


def project_heads(
    x: Tensor,
    weight: HeadWeight,
    *,
    lses: Tensor | None = None,
    attn_sink: Tensor | None = None,
    batch_invariant: bool = False,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each head's vector with the head's matrix.

    ``out[t, h] = weight[h] @ x[t, h]``. With e4m3 weights the activations are quantised as well,
    with one scale ``max(amax, 1e-4) / 448`` for each token, head and block of ``scale_block[1]``
    inputs, and each block's float32 sum is multiplied by both scales.

    With ``lses``, the parts ``x`` are merged first, as by :func:`merge_states`, and rounded to
    bfloat16.

    Args:
        x: bfloat16 ``[T, H, K]``; with lses, the parts, float32 ``[S, T, H, K]``; may be strided.
        weight: ``[H, N, K]``. The op may read it before the previous kernel has ended, so
            synchronise after a kernel that writes it.
        lses: float32 ``[S, T, H]``, natural logarithms; an lse of -inf makes the op ignore its
            part.
        attn_sink: float32 ``[H]``, with lses: a logit without a value.
        batch_invariant: give a token the same bits alone and in any batch; slower for many
            tokens.
        workspace: uint8, with lses: at least :func:`merge_workspace_size`, room for the merged
            vectors; default a new one.
        out: bfloat16 ``[T, H, N]``, written; may be a slice of a wider buffer.

    Returns:
        bfloat16 ``[T, H, N]``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: MAX ``mla_decode_branch_fp8`` (its two batched GEMMs); DeepSeek-V3 (arXiv 2412.19437)
    section 3.3.2.

    >>> from sparsemla import HeadWeight
    >>> x = torch.ones(3, 2, 128, dtype=torch.bfloat16)
    >>> project_heads(x, HeadWeight(torch.ones(2, 512, 128, dtype=torch.bfloat16)))[0, 0, 0].item()
    128.0
    """
    check = Checker("project_heads")
    check.kind("weight", weight, HeadWeight)
    check.kind("batch_invariant", batch_invariant, bool)
    if lses is None:
        check.tensor("x", x, "T H K", torch.bfloat16)
        check.absent("attn_sink", attn_sink, "without lses")
        check.absent("workspace", workspace, "without lses")
    else:
        check.tensor("x", x, "S T H K", torch.float32)
        check.tensor("lses", lses, "S T H", torch.float32)
        check.optional("attn_sink", attn_sink, "H", torch.float32)
        check.workspace(workspace, merge_workspace_size(*x.shape[1:]))
    check.tensor("weight", weight.data, "H N K", weight.data.dtype)
    check.optional("weight.scale", weight.scale, "H SN SK", torch.float32)
    out = check.output("out", out, "T H N", torch.bfloat16)
    _project_heads(
        x,
        weight,
        lses,
        attn_sink,
        batch_invariant,
        workspace,
        out,
    )
    return out


def merge_workspace_size(num_tokens: int, num_heads: int, dim: int) -> int:
    """Bytes of merged vectors ``[T, H, K]`` in bfloat16, and of their float32 lses.

    Args:
        num_tokens: T.
        num_heads: H.
        dim: K.

    Raises:
        TypeError, ValueError: a size that is not an integer, or negative.
    """
    for name, size in {"num_tokens": num_tokens, "num_heads": num_heads, "dim": dim}.items():
        check_integer(f"merge_workspace_size: {name}", size)
    rows = num_tokens * num_heads
    return -(-2 * dim * rows // 16) * 16 + 4 * rows


@operator("workspace", "out")
def _project_heads(
    x: Tensor,
    weight: HeadWeight,
    lses: Tensor | None,
    attn_sink: Tensor | None,
    batch_invariant: bool,
    workspace: Tensor | None,
    out: Tensor,
) -> dispatch.Launch:
    return dispatch.find("project_heads", x, num_heads=x.shape[-2])
