"""Rotate, normalise, quantise, store."""
