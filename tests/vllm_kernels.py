"""A kernel of vLLM's in torch: Triton's interpreter takes most of the time of whole models.

It is not under test here; one test compares both.
"""

import inspect

import torch
from vllm.models.deepseek_v32.common import kernels

INTERPRETED_Q = kernels._fused_q_kernel


def rotated(x, cos, sin, *, interleaved):
    """In float32, as the kernel rounds."""
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


class FusedQ:
    """``_fused_q_kernel``: rotates and quantizes queries, of attention and of the indexer."""

    names = tuple(inspect.signature(INTERPRETED_Q.fn).parameters)

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **named):
        given = dict(zip(self.names, args, strict=False)) | named
        pos = given["pos_ptr"]
        cos, sin = given["q_pe_cos_sin_ptr"][pos].float()[:, None].chunk(2, -1)
        q_pe = rotated(given["q_pe_ptr"].float(), cos, sin, interleaved=True)
        if given["QUANTIZE_MQA"]:
            packed = torch.cat([given["ql_nope_ptr"].float(), q_pe], -1) / given["q_scale_ptr"]
            given["mqa_q_fp8_ptr"].copy_(packed)  # both saturate
        else:
            given["q_pe_out_ptr"].copy_(q_pe)
        if given["HAS_INDEXER"]:
            self.index(given, pos)

    def index(self, given, pos):
        table = given["index_q_cos_sin_ptr"]
        cos, sin = table[pos].float()[:, None].chunk(2, -1)
        turning, rest = given["index_q_ptr"].float().tensor_split([table.shape[-1]], -1)
        turned = rotated(turning, cos, sin, interleaved=given["INDEX_ROPE_INTERLEAVE"])
        query = torch.cat([turned, rest], -1)
        largest = query.abs().amax(-1, keepdim=True).clamp(min=1e-4)
        scale = (largest / given["FP8_MAX"]).log2().ceil().exp2()
        given["index_q_fp8_ptr"].copy_(query / scale)
        weights = given["index_weights_ptr"].float() * scale[..., 0]
        weights *= given["index_weights_softmax_scale"]
        given["index_weights_out_ptr"].copy_(weights * given["index_weights_head_scale"])


def replace() -> None:
    """Let every model of this process use it."""
    kernels._fused_q_kernel = FusedQ()
