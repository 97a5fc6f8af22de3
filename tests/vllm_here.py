"""What every test of vLLM begins with."""

import importlib.util
import os

import pytest
import torch


def require_vllm() -> None:
    """Skip a file where vLLM is not installed; to be called before vLLM is imported."""
    if not torch.cuda.is_available():
        # vLLM switches Triton off where it finds no GPU, unless it was told that there is none.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; .ci/run installs it", allow_module_level=True)
    if not torch.cuda.is_available():
        import vllm_kernels  # imports vLLM

        vllm_kernels.replace()
