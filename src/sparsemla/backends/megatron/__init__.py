"""DSA attention of Megatron-core 0.19 by this package's ops, through its module specs.

:func:`block_spec` is a drop-in for Megatron's own function of the layer specs::

    provider.transformer_layer_spec = block_spec                  # Megatron-Bridge
    --spec sparsemla.backends.megatron block_spec                 # Megatron-LM

Importing this module imports Megatron-core.
"""

from megatron.core import package_info

VERSION = 0, 19
"""The version of Megatron-core whose attention the backend derives from."""

if package_info.VERSION[:2] != VERSION:
    # Megatron's --spec turns an ImportError into a log line, and trains with its own kernels.
    raise RuntimeError(
        f"sparsemla.backends.megatron must have Megatron-core {VERSION[0]}.{VERSION[1]}, "
        f"got {package_info.__version__}"
    )

from sparsemla.backends.megatron.attention import SparseMLAttention  # noqa: E402
from sparsemla.backends.megatron.replay import replay_selections  # noqa: E402
from sparsemla.backends.megatron.specs import block_spec, with_sparsemla  # noqa: E402

__all__ = ["SparseMLAttention", "block_spec", "replay_selections", "with_sparsemla"]
