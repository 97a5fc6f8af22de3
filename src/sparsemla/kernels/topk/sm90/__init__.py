"""Exact top-k on Hopper: in registers for rows that fit, by lists of candidates for others."""

from sparsemla.kernels.topk.sm90.launch import SELECTION, merge_topk, select_topk

__all__ = ["SELECTION", "merge_topk", "select_topk"]
