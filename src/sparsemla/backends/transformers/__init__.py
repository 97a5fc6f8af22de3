"""This package's attention inside models of Hugging Face transformers, 5.17 to 5.24.

:func:`enable` replaces the attention of a model with latent rows, such as DeepSeek's or GLM-5, and
the cache that the model keeps between steps: paged caches and this package's ops take their place.
Weights, ``generate`` and all other layers stay as they are in transformers. transformers expands
keys and values for each head and masks a ``[tokens, context]`` score matrix; this backend stores
rows that all heads share and attends to the selected ones only.
``enable(model, training=True)`` trains a DeepSeek-V3.2 or GLM-5 model with its indexers, over the
same selections.
"""

from sparsemla.backends.selections import pack_selections, split_selections
from sparsemla.backends.transformers.attention import PagedAttention, disable, enable, refuse
from sparsemla.backends.transformers.cache import BatchCache
from sparsemla.backends.transformers.deepseek_v4 import CompressedCache
from sparsemla.backends.transformers.glm5_next import PooledCache
from sparsemla.backends.transformers.latent import LatentCache
from sparsemla.backends.transformers.training import TrainingAttention

__all__ = [
    "BatchCache",
    "CompressedCache",
    "LatentCache",
    "PagedAttention",
    "PooledCache",
    "TrainingAttention",
    "disable",
    "enable",
    "pack_selections",
    "refuse",
    "split_selections",
]
