"""Implementations: one package per family of ops, one module per tier (``cpu``, ``triton``)."""
