"""The indexer of Hunyuan V4 in vLLM: that of DeepSeek-V3.2 whose RoPE rotates the last dims.

vLLM's layer makes its indexer itself and calls it before its attention. The models below exchange
the class that it makes; all else is vLLM's.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.models.hy_v4.nvidia import attention, model, mtp

from sparsemla.backends.vllm.indexer import index_cache_backend, refuse, run_indexer
from sparsemla.backends.vllm.surface import HY_V4, check
from sparsemla.backends.vllm.warmup import register_indexer


class Indexer(attention.Indexer):
    """vLLM's indexer of a layer, with this package's index keys and selection.

    Raises:
        ValueError: a setting is not supported.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on to vLLM
        super().__init__(*args, **kwargs)
        refuse(self.vllm_config, self.head_dim, portable=True)
        self.k_cache.get_attn_backend = index_cache_backend

    def forward(
        self, hidden_states: Tensor, qr: Tensor, positions: Tensor, rotary_emb: nn.Module
    ) -> Tensor:
        """Write this step's keys to the cache, and select keys for its tokens.

        Args:
            hidden_states: ``[T, hidden_size]``.
            qr: ``[T, q_lora_rank]``, the compressed queries.
            positions: ``[T]``, position of each token in its request.
            rotary_emb: vLLM's rotary embedding of the indexer.

        Returns:
            The buffer of selected positions, int32; its first T rows are new.
        """
        return run_indexer(self, hidden_states, qr, positions, rotary_emb, rope_first=False)


@contextlib.contextmanager
def exchanged() -> Iterator[None]:
    """Exchange vLLM's class of indexers, as long as a model is built."""
    theirs = attention.Indexer
    attention.Indexer = Indexer
    try:
        yield
    finally:
        attention.Indexer = theirs


class WithIndexer(nn.Module):
    """A model of vLLM, built with this package's indexer.

    Raises:
        ValueError: the configuration is not supported.
        RuntimeError: something of vLLM does not fit.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check(HY_V4, sys.modules[__name__])
        with exchanged():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.modules():
            if isinstance(layer, attention.HYV4MLAAttention) and layer.indexer is not None:
                register_indexer(
                    vllm_config,
                    layer.indexer.n_head,
                    layer.indexer.topk_tokens,
                    layer.indexer_rope_emb,
                    rope_first=False,
                )


class HYV4ForCausalLM(WithIndexer, model.HYV4ForCausalLM):
    """vLLM's class of Hunyuan V4."""


class HYV4MTP(WithIndexer, mtp.HYV4MTP):
    """Its layers for multi-token prediction."""
