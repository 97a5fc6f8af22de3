"""Attention on Hopper: one kernel each for bfloat16 and FP8 rows, many and few heads."""
