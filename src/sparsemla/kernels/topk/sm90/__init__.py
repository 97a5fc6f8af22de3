"""Exact top-k on Hopper: in registers for rows that fit, by lists of candidates for others."""
