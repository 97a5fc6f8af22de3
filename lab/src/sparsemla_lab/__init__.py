"""The workshop of sparsemla: its command line, checks, benchmarks, demos and test tools.

The command ``sparsemla`` and its options are provisional; the modules are internal and change
without notice. The package has the version of the ``sparsemla`` that it needs.
"""
