"""Kernels for Hopper and Ampere on the CPU: an interpreter of Gluon.

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
many, and an address outside of a tensor's storage. A partition that accesses a tile to which its
own cp.async is under way is an error in every run: it has not waited for the copy's group.

On Ampere, threads wait for each other where the compiler sees that they must, so a kernel needs no
barriers around ordinary accesses to shared memory, and none are asked for here. ``mma_v2`` refuses
operands of other layouts or types than the compiler takes.

Inline assembly is run as PTX, warp by warp, with its atomics, shuffles and barriers, and with the
shared memory of all CTAs of a cluster. Warps take turns at random, and accesses to shared memory
that no barrier orders are reported in every order. So are two programs of a launch of which one
writes what the other accesses, a thread that reads what another one wrote without a barrier in
between, and a kernel that begins early and does not wait for the one in front.

It does not see which layouts of registers meet, but in ``mma_v2``, nor bank conflicts, the order
of a warpgroup's accesses to shared memory that is not PTX's, proxy fences after cp.async, the
accuracy of FP8 MMAs, time, or anything that the compiler does. Assembly whose result depends on
where a layout puts elements needs an entry in :mod:`sparsemla_lab.testing.interpreter.assembly`.

``values`` has tensors, ``memory`` global and shared memory, ``schedule`` barriers and partitions,
``ptx`` inline assembly, ``floats`` its floating-point numbers, ``races`` accesses that nothing
orders, ``language`` the functions of Gluon, ``launch`` kernels and their arguments. ``portable``
repairs Triton's own interpreter, and checks its accesses.
"""

from sparsemla_lab.testing.interpreter.launch import (
    TIER_OF,
    acting_as,
    interpreted_ops,
    interpreting,
)

__all__ = ["TIER_OF", "acting_as", "interpreted_ops", "interpreting"]
