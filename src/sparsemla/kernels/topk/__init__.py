"""Exact top-k."""
