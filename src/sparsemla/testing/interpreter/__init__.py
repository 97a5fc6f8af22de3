"""Hopper's kernels on the CPU: an interpreter of Gluon.

Triton interprets its portable kernels (``TRITON_INTERPRET=1``), but none of Gluon. Here a launch of
a Gluon kernel on tensors of the CPU runs the kernel's Python source, with NumPy arrays for tensors,
bytes for shared memory, and a thread for each partition of ``gl.warp_specialize``. A test without a
GPU sees what the kernel computes, and whether its barriers hold.

What is asynchronous on a GPU happens at a random time between the first and the last that the
kernel allows, and partitions take turns at random: a copy lands when it is issued, when somebody
waits for it, or in between; an asynchronous MMA reads shared memory when it is waited for. Fresh
shared memory and elements that a mask leaves out are poisoned. So a missing wait gives wrong
numbers, in some runs at least. A wait for an arrival that never comes is reported as a deadlock,
and so are a read of an accumulator before its wait, an MMA without a proxy fence, an arrival too
many, and an address outside of a tensor's storage.

It does not see register layouts, bank conflicts, the order of memory operations inside a
warpgroup, proxy fences after cp.async, the accuracy of FP8 MMAs, time, or anything that the
compiler does. Kernels with PTX of
their own need an entry in :mod:`sparsemla.testing.interpreter.assembly`; those of the selection,
which are mostly PTX, have none.

``values`` has tensors, ``memory`` global and shared memory, ``schedule`` barriers and partitions,
``language`` the functions of Gluon, ``launch`` kernels and their arguments. ``portable`` repairs
Triton's own interpreter.
"""

from sparsemla.testing.interpreter.launch import acting_as_hopper, interpreted_ops, interpreting

__all__ = ["acting_as_hopper", "interpreted_ops", "interpreting"]
