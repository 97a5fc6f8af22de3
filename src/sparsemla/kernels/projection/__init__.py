"""Per-head products."""
