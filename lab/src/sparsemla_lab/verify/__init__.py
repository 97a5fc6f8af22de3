"""Verification of every op on this machine.

Run it as ``sparsemla verify`` or ``python -m sparsemla_lab.verify``.

``matrix`` has the table of cases, ``properties`` the checks of a case, ``run`` the loop and its
report, ``beside`` the checks on a busy device, and ``command`` the command line.
"""
