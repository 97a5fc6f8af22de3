"""This package's attention inside models of Hugging Face transformers, 5.17 to 5.23.

:func:`enable` replaces the attention of a DeepSeek-V3, DeepSeek-V3.2 or GLM-5 model and the cache
that the model keeps between steps: paged latent caches and the ops of this package take their
place. Weights, ``generate`` and all other layers stay as they are in transformers.
transformers expands keys and values for each head and masks a ``[tokens, context]`` score matrix;
this backend stores one latent row per token and attends to the selected rows only.
"""

from sparsemla.backends.transformers.attention import PagedAttention, enable, refuse
from sparsemla.backends.transformers.cache import BatchCache
from sparsemla.backends.transformers.latent import LatentCache

__all__ = ["BatchCache", "LatentCache", "PagedAttention", "enable", "refuse"]
