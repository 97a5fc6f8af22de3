"""Stand-ins for kernels of vLLM, beside these in Triton's interpreter."""

import pytest
import torch

from vllm_here import require_vllm

require_vllm()

from vllm.models.deepseek_v32.common import kernels

if torch.cuda.is_available():
    pytest.skip("the stand-ins are for the CPU", allow_module_level=True)

import vllm_kernels


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("indexer", [False, True])
def test_queries(quantize, interleave, indexer, monkeypatch):
    """Odd heads, strides, zeros, powers of two, and values beyond FP8: equal bits."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draw)

    tokens, heads, index_heads = 5, 3, 4
    whole = (normal(tokens, heads, 96) * 4).bfloat16()
    index_q = normal(tokens, index_heads, 128).bfloat16()
    index_q[0, 0] = 0  # below the smallest scale
    index_q[1] *= 2.0 ** torch.arange(-20, 20, 10)[:, None]
    index_q[2] = 448.0  # where a scale is a power of two without rounding up
    index_q[3, 0, 70:] = 1e4
    whole[4] *= 1000
    angles = normal(50, 32)
    given = {
        "positions": torch.tensor([0, 49, 7, 7, 20]),
        "q_pe": whole[..., 32:],
        "q_pe_cos_sin_cache": torch.cat([angles.cos(), angles.sin()], -1),
        "index_q": index_q,
        "index_q_cos_sin_cache": torch.cat([angles.sin(), angles.cos()], -1),
        "ql_nope": whole[..., :32],
        "q_scale": torch.tensor([0.3]),
        "index_weights": normal(tokens, index_heads),
        "index_weights_softmax_scale": 0.7,
        "index_weights_head_scale": 0.3,
        "has_indexer": indexer,
        "index_rope_interleave": interleave,
        "quantize_mqa": quantize,
    }
    assert isinstance(kernels._fused_q_kernel, vllm_kernels.FusedQ)
    ours = kernels.fused_q(**given)
    monkeypatch.setattr(kernels, "_fused_q_kernel", vllm_kernels.INTERPRETED_Q)
    theirs = kernels.fused_q(**given)
    for one, other in list(zip(ours, theirs, strict=True))[0 if indexer else 2 :]:
        assert torch.equal(one.float(), other.float())
