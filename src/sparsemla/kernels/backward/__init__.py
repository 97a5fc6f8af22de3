"""The gradients of attention over selected rows."""

from typing import TYPE_CHECKING

from sparsemla.cache import aligned
from sparsemla.kernels.attention import refused_by_sm90
from sparsemla.kernels.backward.arguments import SparseAttentionBackward
from sparsemla.kernels.common.table import Kernel, LazyModule, Op

if TYPE_CHECKING:
    from sparsemla.kernels.backward import cpu, triton
    from sparsemla.kernels.backward.sm90 import one_pass, two_tiles
else:
    cpu, triton, one_pass, two_tiles = (
        LazyModule(f"{__name__}.{name}")
        for name in ("cpu", "triton", "sm90.one_pass", "sm90.two_tiles")
    )


def _refuse(call: SparseAttentionBackward, most: int) -> str | None:
    list_heads = call.list_tokens * call.q.shape[1]
    if list_heads > most:
        return f"takes at most {most} heads of the tokens of a list, got {list_heads}"
    if 0 in (*call.q.shape, call.topk_indices.shape[1]):
        return "needs query tokens, heads and entries of lists"
    if not aligned(call.dout):
        return "needs gradients of out with rows that start at multiples of 16 bytes"
    return refused_by_sm90(call.q, call.kv)


SPARSE_ATTENTION_BACKWARD = Op(
    "sparse_attention_backward",
    SparseAttentionBackward,
    (
        Kernel(
            "sm90.one_pass",
            lambda: one_pass.sparse_attention_backward,
            lambda call: _refuse(call, 64),
        ),
        Kernel(
            "sm90",
            lambda: two_tiles.sparse_attention_backward,
            lambda call: _refuse(call, 128),
        ),
        Kernel("triton", lambda: triton.sparse_attention_backward),
        Kernel("cpu", lambda: cpu.sparse_attention_backward),
    ),
    outputs=("dq", "dkv", "d_sink"),
)

OPS = {SPARSE_ATTENTION_BACKWARD.name: SPARSE_ATTENTION_BACKWARD}
