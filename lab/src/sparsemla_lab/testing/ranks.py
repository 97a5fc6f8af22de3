"""GPUs of the ranks of a host: each its own, or one that several share.

NCCL 2.30 and newer lets ranks share a GPU if its variable ``NCCL_MULTI_RANK_GPU_ENABLE`` is 1. Then
results can be checked with more ranks than GPUs; times are not those of several GPUs.
"""

from __future__ import annotations

import os

import torch

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's variable."""


def shared(num_ranks: int) -> bool:
    """Whether some of so many ranks of this host share a GPU."""
    return os.environ.get(SHARING) == "1" and 0 < torch.cuda.device_count() < num_ranks


def enough_gpus(num_ranks: int) -> bool:
    """Whether so many ranks can run on this host's GPUs."""
    return torch.cuda.device_count() >= num_ranks or shared(num_ranks)


def gpu_of(rank: int, num_ranks: int) -> torch.device:
    """The GPU of a rank of this host."""
    index = rank % torch.cuda.device_count() if shared(num_ranks) else rank
    return torch.device("cuda", index)
