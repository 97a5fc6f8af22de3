"""GEMMs with one matrix per head, or per group of heads, before and after attention."""

import torch
from torch import Tensor

from sparsemla.checks import INTEGERS, Checker
from sparsemla.kernels import projection
from sparsemla.kernels.projection.arguments import ProjectGroups, ProjectHeads
from sparsemla.kernels.repeat import repeated
from sparsemla.ops._library import operator
from sparsemla.ops.quant import TABLES
from sparsemla.validation import check_integer, check_kind
from sparsemla.weights import HeadWeight

_project_heads = operator(projection.PROJECT_HEADS)


@repeated
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
    _project_heads(ProjectHeads(x, weight, lses, attn_sink, batch_invariant, workspace, out))
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


_project_groups = operator(projection.PROJECT_GROUPS)


@repeated
def project_groups(
    x: Tensor,
    weight: HeadWeight,
    *,
    cos_sin_cache: Tensor | None = None,
    positions: Tensor | None = None,
    lses: Tensor | None = None,
    attn_sink: Tensor | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Undo the rotation of each head's output and multiply each group of heads with its matrix.

    DeepSeek-V4's output projection. G groups of H / G neighbouring heads, whose outputs lie behind
    each other (K = H / G * V)::

        x[t, h, -R:] = RoPE(x[t, h, -R:], -positions[t])
        out[t, g]    = weight[g] @ x[t, group g]

    The rotation takes pairs (2i, 2i + 1) of the last R dims and is computed in float32. Its result
    is rounded once: to bfloat16, or with e4m3 weights to e4m3. As in :func:`project_heads` the
    activations then have one scale ``max(amax, 1e-4) / 448`` for each token, group and block of
    ``scale_block[1]`` inputs, and each block's float32 sum is multiplied by both scales.

    With ``lses``, the parts ``x`` are merged first, as by :func:`merge_states`, and rounded to
    bfloat16.

    Args:
        x: bfloat16 ``[T, H, V]``; with lses, the parts, float32 ``[S, T, H, V]``; may be strided.
        weight: ``[G, N, K]``, one matrix per group (:func:`group_o_a_proj`). The op may read it
            before the previous kernel has ended, so synchronise after a kernel that writes it.
        cos_sin_cache: float32 or bfloat16 ``[max_positions, R]``, cos half then sin half: the table
            that rotated the queries; None if nothing is to be undone.
        positions: int32, int64 or uint32 ``[T]``, of the queries; with cos_sin_cache.
        lses: float32 ``[S, T, H]``, natural logarithms; an lse of -inf makes the op ignore its
            part.
        attn_sink: float32 ``[H]``, with lses: a logit without a value.
        workspace: uint8, at least :func:`group_workspace_size`, room for the inputs of the
            products; default a new one.
        out: bfloat16 ``[T, G, N]``, written; may be a slice of a wider buffer.

    Returns:
        bfloat16 ``[T, G, N]``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V4's inference code, ``Attention``; vLLM ``fused_inv_rope_fp8_quant``.

    >>> from sparsemla import HeadWeight, cos_sin_table, rope_frequencies
    >>> table = cos_sin_table(rope_frequencies(64, 1e4), 128)
    >>> weight = HeadWeight(torch.ones(2, 32, 4 * 512, dtype=torch.bfloat16))
    >>> x = torch.randn(3, 8, 512, dtype=torch.bfloat16)
    >>> project_groups(x, weight, cos_sin_cache=table, positions=torch.arange(3)).shape
    torch.Size([3, 2, 32])
    """
    check = Checker("project_groups")
    check.kind("weight", weight, HeadWeight)
    if lses is None:
        check.tensor("x", x, "T H V", torch.bfloat16)
        check.absent("attn_sink", attn_sink, "without lses")
    else:
        check.tensor("x", x, "S T H V", torch.float32)
        check.tensor("lses", lses, "S T H", torch.float32)
        check.optional("attn_sink", attn_sink, "H", torch.float32)
    check.tensor("weight", weight.data, "G N K", weight.data.dtype)
    check.optional("weight.scale", weight.scale, "G SN SK", torch.float32)
    heads, dim, groups = (check.dims[letter] for letter in "HVG")
    if heads * dim != groups * check.dims["K"] or groups > heads or (groups and heads % groups):
        raise ValueError(
            f"project_groups: weight must have shape [G, N, H / G * V] with a divisor G of H = "
            f"{heads} and V = {dim}, got {list(weight.data.shape)}"
        )
    if cos_sin_cache is None:
        check.absent("positions", positions, "without cos_sin_cache")
    else:
        check.tensor("cos_sin_cache", cos_sin_cache, "P R", TABLES)
        check.rope_dim("cos_sin_cache", cos_sin_cache.shape[1], dim)
        positions = check.tensor("positions", positions, "T", INTEGERS)
    check.workspace(workspace, _group_bytes(check.dims["T"], weight))
    out = check.output("out", out, "T G N", torch.bfloat16)
    _project_groups(
        ProjectGroups(x, weight, cos_sin_cache, positions, lses, attn_sink, workspace, out)
    )
    return out


def group_workspace_size(num_tokens: int, weight: HeadWeight) -> int:
    """Bytes of the inputs of :func:`project_groups`, ``[T, G, K]``, and of their scales.

    Args:
        num_tokens: T.
        weight: ``[G, N, K]``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or a negative num_tokens.
    """
    check_integer("group_workspace_size: num_tokens", num_tokens)
    check_kind("group_workspace_size: weight", weight, HeadWeight)
    return _group_bytes(num_tokens, weight)


def _group_bytes(num_tokens: int, weight: HeadWeight) -> int:
    groups, _, inputs = weight.data.shape
    rows = num_tokens * groups
    if weight.scale is None:
        return 2 * rows * inputs
    return -(-rows * inputs // 16) * 16 + 4 * rows * weight.scale.shape[2]
