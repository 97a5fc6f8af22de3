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

Inline assembly is run as PTX, warp by warp, with its atomics, shuffles and barriers, and with the
shared memory of all CTAs of a cluster. Warps take turns at random, and accesses to shared memory
that no barrier orders are reported in every order. So are two programs of a launch of which one
writes what the other accesses, a thread that reads what another one wrote without a barrier in
between, and a kernel that begins early and does not wait for the one in front.

It does not see register layouts, bank conflicts, the order of a warpgroup's accesses to shared
memory that is not PTX's, proxy fences after cp.async, the accuracy of FP8 MMAs, time, or anything
that the compiler does. Instructions of floating-point numbers are not run as PTX: assembly with
them needs an entry in :mod:`sparsemla_lab.testing.interpreter.assembly`.

``values`` has tensors, ``memory`` global and shared memory, ``schedule`` barriers and partitions,
``ptx`` inline assembly, ``races`` accesses that nothing orders, ``language`` the functions of
Gluon, ``launch`` kernels and their arguments. ``portable`` repairs Triton's own interpreter,
and checks its accesses.
"""

from sparsemla_lab.testing.interpreter.launch import acting_as_hopper, interpreted_ops, interpreting

__all__ = ["acting_as_hopper", "interpreted_ops", "interpreting"]
