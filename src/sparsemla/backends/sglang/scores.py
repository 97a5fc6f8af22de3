"""The indexer's scores on GPUs for which DeepGEMM has no kernels.

SGLang asks the functions around which these hooks are for DeepGEMM's. Its variable
``SGLANG_FP8_PAGED_MQA_LOGITS_TORCH``, by which they answer with loops in PyTorch, has no effect
where this package answers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sparsemla.compat import deep_gemm

DEEP_GEMM = 9, 0
"""Least compute capability of DeepGEMM's kernels."""


@functools.cache
def deep_gemm_runs() -> bool:
    """Whether DeepGEMM has kernels for the GPU; asked in each step of each layer."""
    return torch.cuda.get_device_capability() >= DEEP_GEMM


def mqa_logits(resolve: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Around ``resolve_fp8_mqa_logits_fn``: scores of contiguous keys."""
    return resolve() if deep_gemm_runs() else deep_gemm.fp8_mqa_logits


def paged_mqa_logits(resolve: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Around ``resolve_fp8_paged_mqa_logits_fn``: scores of the keys on pages."""
    return resolve() if deep_gemm_runs() else deep_gemm.fp8_paged_mqa_logits


def paged_mqa_logits_metadata(resolve: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Around ``resolve_paged_mqa_logits_metadata_fn``: a schedule that nobody reads."""
    return resolve() if deep_gemm_runs() else deep_gemm.get_paged_mqa_logits_metadata


def num_sms(resolve: Callable[[], int]) -> int:
    """Around ``resolve_num_sms``, which imports DeepGEMM."""
    return resolve() if deep_gemm_runs() else deep_gemm.get_num_sms()
