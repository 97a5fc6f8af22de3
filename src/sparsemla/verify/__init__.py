"""Check of every op on the device at hand: ``sparsemla verify``, ``python -m sparsemla.verify``.

``matrix`` is the table of cases, ``properties`` what holds for a case, ``run`` the loop and its
report, ``command`` the command line.
"""
