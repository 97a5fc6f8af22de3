"""Decode attention and merging."""
