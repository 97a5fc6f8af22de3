"""Exact top-k on Hopper: rows that fit are held in registers, others yield lists of candidates."""

from sparsemla.kernels.topk.sm90.launch import SELECTION, merge_topk, select_topk

__all__ = ["SELECTION", "merge_topk", "select_topk"]
