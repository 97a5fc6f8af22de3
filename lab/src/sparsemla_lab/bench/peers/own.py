"""torch's kernels, and this package's alternative for the same result."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from sparsemla import ops
from sparsemla.cache import PagedCache
from sparsemla.formats import BF16_576
from sparsemla_lab.bench.peers.base import Peer, side
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.training import SCALE, TrainingAttention, dense_side
from sparsemla_lab.bench.workloads import (
    CHUNK_ROWS,
    PAGE_SIZE,
    CachedPrefill,
    DenseDecode,
    HeadProducts,
    Inputs,
    PermittedPrefill,
    SelectTopk,
    SharedBackward,
    SharedPrefill,
    Side,
    WindowedPrefill,
    Workload,
)
from sparsemla_lab.testing.compare import UNQUANTIZED_PROJECTION


class Torch(Peer):
    """``torch.topk``, ``torch.bmm`` in bfloat16 and torch's kernels of attention."""

    name = "torch"
    BACKENDS: ClassVar[dict[str, SDPBackend]] = {
        "FlashAttention-2": SDPBackend.FLASH_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }

    def supports(self, workload: Workload) -> str | None:
        ours = isinstance(workload, (SelectTopk, HeadProducts, TrainingAttention))
        return None if ours else "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if isinstance(workload, HeadProducts):
            return [self._products(workload, inputs)]
        if isinstance(workload, TrainingAttention):
            return [self._dense(name, workload, inputs) for name in self.BACKENDS]

        def run() -> Results:
            return (inputs["scores"].topk(inputs["topk"], dim=-1, sorted=False).indices,)

        return [side("torch.topk", workload, inputs, run)]

    @staticmethod
    def _products(workload: HeadProducts, inputs: Inputs) -> Side:
        x = inputs["x"].transpose(0, 1).contiguous()  # [H, T, K]
        weights = [w.dequantize().bfloat16().transpose(1, 2) for w in inputs["weights"]]

        def run() -> Results:
            return tuple(torch.bmm(x, weight).transpose(0, 1) for weight in weights)

        def check(got: Results) -> None:
            workload.check_within(UNQUANTIZED_PROJECTION, inputs, got)

        return Side("torch.bmm", run, check, note="bfloat16 weights")

    def _dense(self, name: str, workload: TrainingAttention, inputs: Inputs) -> Side:
        backend = self.BACKENDS[name]
        padded = backend is SDPBackend.FLASH_ATTENTION  # it has one size of heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            dims = v.shape[-1]
            if padded:
                v = pad(v, (0, q.shape[-1] - dims))
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)
            return out[0].transpose(0, 1)[..., :dims]

        note = "values padded to the dims of keys" if padded else ""
        return dense_side(f"torch SDPA, {name}", workload, inputs, attend, note)


class Sparsemla(Peer):
    """This package's alternative for the same result, which a user may choose."""

    name = "sparsemla"
    portable = True

    def supports(self, workload: Workload) -> str | None:
        two = CachedPrefill, WindowedPrefill, SharedBackward, SharedPrefill, PermittedPrefill
        if isinstance(workload, two):
            return None
        quantised = isinstance(workload, DenseDecode) and workload.format is not BF16_576
        return None if quantised else "has one way only"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if isinstance(workload, (CachedPrefill, WindowedPrefill)):
            other, name = workload.converted, "sparsemla through a workspace"
            if workload.converts(inputs["q"].device):
                other, name = workload.in_place, "sparsemla in place"
            return [side(name, workload, inputs, lambda: other(inputs))]
        if isinstance(workload, PermittedPrefill):
            bf16 = workload.with_bf16
            return [side("sparsemla bf16 products", workload, inputs, lambda: bf16(inputs))]
        if isinstance(workload, SharedPrefill):
            by_token = workload.by_token
            return [side("sparsemla by token", workload, inputs, lambda: by_token(inputs))]
        if isinstance(workload, SharedBackward):
            own = workload.by_token
            return [side("sparsemla by token", own, inputs, lambda: own.run(inputs))]
        slots = torch.arange(inputs["cache"].num_slots, device=inputs["q"].device)
        cache = PagedCache.allocate(
            BF16_576, inputs["cache"].num_pages, PAGE_SIZE, device=slots.device
        )
        for some in slots.split(CHUNK_ROWS):
            cache.write(some, inputs["cache"].read(some))

        def dense() -> Results:
            return ops.dense_decode(**inputs | {"cache": cache})

        return [side("sparsemla bfloat16", workload, inputs, dense)]
