"""Indexer scores and their top-k."""
