"""Tools of tests and ``verify``: inputs, comparisons, poisoned memory, GPU-less compilation."""
