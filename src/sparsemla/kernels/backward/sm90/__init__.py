"""The gradients of attention over selected rows, on Hopper: for up to 64 heads, and for more."""
