"""vLLM's portable layer of MLA with this package's indexer in the place of vLLM's."""

from typing import Any

from torch import nn
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.models.deepseek_v2 import Indexer

from sparsemla.backends.vllm.indexer import SparseMLAIndexer
from sparsemla.backends.vllm.surface import GLM5_NEXT, check
from sparsemla.backends.vllm.warmup import register_indexer

POOLED = "vllm.models.glm5next.common.attention", "Indexer"
"""Module and name of GLM-5.3-Flash's indexer."""


class SparseMLAWrapper(MultiHeadLatentAttentionWrapper):
    """vLLM's MLA layer with this package's indexer: that of DeepSeek-V3.2, or of GLM-5.3-Flash.

    Raises:
        ValueError: the layer has another indexer.
    """

    indexer: nn.Module | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on to vLLM
        super().__init__(*args, **kwargs)
        indexer: Any = self.indexer
        if indexer is None:
            return
        found = type(indexer).__module__, type(indexer).__name__
        if found == POOLED:
            check(GLM5_NEXT)
            # Imports a part of the model, which most engines never do.
            from sparsemla.backends.vllm import pooled

            check((), pooled)
            self.indexer = pooled.PooledIndexer(indexer)
            return
        if type(indexer) is not Indexer:
            raise ValueError(
                "sparsemla_indexer: the indexer must be that of DeepSeek-V3.2 or GLM-5.3-Flash, "
                f"got {'.'.join(found)}; remove sparsemla_indexer from VLLM_PLUGINS"
            )
        register_indexer(
            indexer.vllm_config, indexer.n_head, indexer.topk_tokens, self.indexer_rope_emb
        )
        self.indexer = SparseMLAIndexer(indexer)
