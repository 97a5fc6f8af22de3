"""Pieces that kernels share."""
