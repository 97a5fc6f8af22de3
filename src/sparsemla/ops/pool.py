"""Windows of tokens, pooled into cache rows."""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.checks import FLOATS, INTEGERS, Checker
from sparsemla.formats import ScaleMode
from sparsemla.kernels import pool
from sparsemla.kernels.pool.arguments import PoolWindows
from sparsemla.kernels.repeat import repeated
from sparsemla.ops._library import operator
from sparsemla.ops.quant import TABLES
from sparsemla.pooling import Pooling, WindowState

_pool_windows = operator(pool.POOL_WINDOWS)


@repeated
def pool_windows(
    values: Tensor,
    gates: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    state: WindowState,
    cache: PagedCache,
    input_row_offsets: Tensor,
    *,
    pooling: Pooling,
    gate_bias: Tensor | None = None,
    positions: Tensor,
    request_ids: Tensor,
    ring_ids: Tensor,
    slot_mapping: Tensor,
    eps: float = 1e-6,
    interleaved: bool = True,
    scale_mode: ScaleMode = "pow2",
    validate: bool = False,
    kv_out: Tensor | None = None,
) -> None:
    """Pool the windows that this step closes, and store each as one row of a cache.

    The token at position ``p`` closes window ``w = p // r`` if ``(p + 1) % r == 0``, for the ratio
    ``r``. The window's *entry*, for each dim ``d`` of D::

        g[s]  = gates[s] + gate_bias[s % r]
        x     = sum_s softmax_s(g[s, d]) * values[s, d]          s = w r .. p
        x     = x * rsqrt(mean(x^2) + eps) * norm_weight
        x[-R:] = RoPE(x[-R:], w r)          cache[slot_mapping[t]] = quantise(x)

    in float32 up to the one rounding into the cache. With ``overlap``, values and gates have two
    series of D dims: ``s`` also runs over the window before, whose tokens take part with their
    first series, the window's own with the second. Window 0 has none before it.

    The rows of earlier steps come from ``state``, which then keeps the step's last rows. Rows are
    kept by position: a step that begins at a lower position than the last one ended, after drafts
    were rejected, finds the rows before it and overwrites the others.

    Args:
        values, gates: ``[T, D]``, with overlap ``[T, 2 D]``, bfloat16, float16 or float32; may be
            strided slices of a fused projection.
        norm_weight: ``[D]`` bfloat16, float16 or float32.
        cos_sin_cache: float32 or bfloat16 ``[max_positions, R]``, cos half then sin half.
        state: the rows of windows that are still open, written; rings of at least
            ``pooling.window`` rows, or pages of any number.
        cache: where the entries go; ``head_dim`` of its format is D.
        pooling: the windows.
        gate_bias: float32 ``[r, D]``, with overlap ``[r, 2 D]``.
        positions: int32, int64 or uint32 ``[T]``, consecutive within a request.
        request_ids: int32, int64 or uint32 ``[T]``, the request of each token. A token that is not
            among those of its request, such as the padding of a plan, does nothing.
        input_row_offsets: int32, int64 or uint32 ``[B + 1]``, the first token of each request, and
            the end of the last one; padding tokens may follow.
        ring_ids: int32, int64 or uint32 ``[B]``, the ring of each request in ``state``. Without a
            ring, -1, a request has the tokens of this step only and keeps none. Or ``[B, W]``,
            pages of state rows that an engine allocates like those of a cache: with
            ``n = rows.shape[1]``, position ``p`` has the row ``rows[ring_ids[b, p // n], p % n]``,
            and every row of the step is kept. A position without a page in ``state`` is like one
            without a ring.
        slot_mapping: int32, int64 or uint32 ``[T]``, where the entry of the window goes that a
            token closes; negative writes nothing. Slots of other tokens are not used. No slot may
            occur twice.
        eps: RMSNorm epsilon.
        interleaved: RoPE pairs are (2i, 2i+1) if True, (i, i + R/2) if False.
        scale_mode: ``pow2`` or ``exact`` scales.
        validate: read the integers and refuse values out of range.
        kv_out: bfloat16 ``[T, D]``, written if given: the entries before quantisation, 0 for tokens
            that close no window.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format; state
            and cache are untouched then.

    Source: DeepSeek-V4 inference code, ``Compressor``; vLLM ``fused_compress_quant_cache``.

    >>> from sparsemla import FP8_584, PagedCache, cos_sin_table, rope_frequencies
    >>> pooling = Pooling(4, overlap=True)
    >>> state = WindowState.allocate(pooling, 512, num_rings=1)
    >>> cache = PagedCache.allocate(FP8_584, num_pages=1, page_size=64)
    >>> values, gates = torch.randn(2, 9, 1024)
    >>> steps = torch.arange(9)
    >>> pool_windows(
    ...     values,
    ...     gates,
    ...     torch.ones(512),
    ...     cos_sin_table(rope_frequencies(64, 1.6e5), 64),
    ...     state,
    ...     cache,
    ...     pooling=pooling,
    ...     positions=steps,
    ...     request_ids=torch.zeros(9, dtype=torch.int32),
    ...     input_row_offsets=torch.tensor([0, 9]),
    ...     ring_ids=torch.tensor([0]),
    ...     slot_mapping=steps // 4,
    ... )
    >>> cache.read(torch.arange(3)).abs().amax(1) > 0  # tokens 3 and 7 closed windows 0 and 1
    tensor([ True,  True, False])
    """
    check = Checker("pool_windows")
    check.kind("pooling", pooling, Pooling)
    check.kind("state", state, WindowState)
    check.cache("cache", cache)
    dim = cache.format.head_dim
    check.bind("D", dim)
    check.bind("W", pooling.width(dim))
    check.bind("ratio", pooling.ratio)
    check.tensor("values", values, "T W", FLOATS)
    check.tensor("gates", gates, "T W", FLOATS)
    check.tensor("norm_weight", norm_weight, "D", FLOATS)
    check.tensor("cos_sin_cache", cos_sin_cache, "P R", TABLES)
    check.rope_dim("cos_sin_cache", cos_sin_cache.shape[1], dim)
    check.optional("gate_bias", gate_bias, "ratio W", torch.float32)
    check.tensor("state", state.rows, "rings rows 2 W", torch.float32)
    paged = isinstance(ring_ids, Tensor) and ring_ids.dim() == 2
    kind, least = ("pages", 1) if paged else ("rings", pooling.window)
    if state.rows.shape[1] < least:
        raise ValueError(
            f"pool_windows: state must have {kind} of at least {least} rows, "
            f"got {state.rows.shape[1]}"
        )
    positions, slot_mapping = check.writes(positions, slot_mapping, cos_sin_cache, cache, validate)
    request_ids = check.tensor("request_ids", request_ids, "T", INTEGERS)
    ring_ids = check.signed("ring_ids", ring_ids, "B pages" if paged else "B")
    input_row_offsets = check.tensor("input_row_offsets", input_row_offsets, "N", INTEGERS)
    if input_row_offsets.shape[0] != ring_ids.shape[0] + 1:
        raise ValueError(
            f"pool_windows: input_row_offsets must have {ring_ids.shape[0] + 1} elements, one more "
            f"than ring_ids, got {input_row_offsets.shape[0]}"
        )
    check.epsilon("eps", eps)
    check.kind("interleaved", interleaved, bool)
    check.scale_mode(scale_mode, cache.format)
    if kv_out is not None:
        check.written("kv_out", kv_out, "T D", torch.bfloat16)
    if validate:
        end = min(int(input_row_offsets[-1]), values.shape[0])
        check.offsets("input_row_offsets", input_row_offsets, end)
        check.values("ring_ids", ring_ids, -1, state.rows.shape[0])
    _pool_windows(
        PoolWindows(
            values,
            gates,
            norm_weight,
            cos_sin_cache,
            state,
            cache,
            pooling,
            positions,
            request_ids,
            input_row_offsets,
            ring_ids,
            slot_mapping,
            gate_bias,
            eps,
            interleaved,
            scale_mode,
            kv_out,
        )
    )
