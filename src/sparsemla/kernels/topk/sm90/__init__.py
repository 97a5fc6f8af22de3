"""Exact top-k on Hopper: rows held in registers where they fit, or lists of candidates."""

from sparsemla.kernels.topk.sm90.launch import merge_topk, select_topk

__all__ = ["merge_topk", "select_topk"]
