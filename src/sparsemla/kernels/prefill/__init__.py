"""Prefill attention."""
