"""Benchmarks. A time is printed only after the result that it belongs to has been checked."""
