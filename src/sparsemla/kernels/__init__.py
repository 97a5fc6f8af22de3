"""Implementations, one package a family of ops, one module a tier (``cpu``, ``triton``)."""
