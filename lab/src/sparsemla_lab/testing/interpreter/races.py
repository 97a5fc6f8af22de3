"""Accesses to shared memory that nothing orders: vector clocks of warps.

Each warp has a time, which advances when the warp lets others see what it did, and knows up to
which time of each other warp it has seen everything. Two accesses to a word by different threads
are a race if neither has seen the other, and one of them stores; two atomic ones are none. So a
missing barrier is found in every order of the warps, and not only where it gives a wrong result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsemla_lab.testing.interpreter.values import POISON, Array

READ, WRITE, ATOMIC = range(3)
NAMES = ("reads", "writes", "adds to")
CONFLICTS = {READ: (WRITE, ATOMIC), WRITE: (READ, WRITE, ATOMIC), ATOMIC: (READ, WRITE)}
"""Kinds of earlier accesses that must have been seen."""
SEVERAL = -1
"""Stands for the lane, if several lanes of a warp have accessed a word."""


class Clocks:
    """What each warp of a cluster has seen.

    Attributes:
        seen: ``[w, v]``, the time of warp v up to which warp w has seen its accesses; ``[w, w]`` is
            the time of warp w.
    """

    def __init__(self, num_warps: int) -> None:
        self.seen = np.eye(num_warps, dtype=np.int32)

    def release(self, warps: slice) -> Array:
        """What these warps have seen and done; what they do from now on is later."""
        found = np.asarray(self.seen[warps].max(0))
        own = np.arange(len(self.seen))[warps]
        self.seen[own, own] += 1
        return found

    def acquire(self, warps: slice, found: Array) -> None:
        """Let these warps have seen all that others have released."""
        self.seen[warps] = np.maximum(self.seen[warps], found)


class Accesses:
    """Who accessed the words of a variable in the shared memory of a CTA, and when.

    Args:
        name: of the variable.
        num_words: its size.
        owners: the warps of the CTA.
        clocks: of the cluster.
    """

    def __init__(self, name: str, num_words: int, owners: slice, clocks: Clocks) -> None:
        self._name, self._owners, self._clocks = name, owners, clocks
        shape = len(NAMES), len(clocks.seen), num_words
        self._times = np.zeros(shape, np.int32)
        self._lanes = np.zeros(shape, np.int8)

    def record(self, kind: int, warp: int, lanes: Array, words: Array) -> None:
        """Record an instruction of a warp: each lane accesses its words.

        Raises:
            RuntimeError: nothing orders it after an access of another thread, or after the start of
                the other CTA; or several lanes write a word.
        """
        seen = self._clocks.seen[warp]
        now = seen[warp]
        if not seen[self._owners].any():
            raise RuntimeError(
                f"a race: warp {warp} {NAMES[kind]} {self._name!r} of a CTA that may not have begun"
            )
        for other in CONFLICTS[kind]:
            late = (self._times[other][:, words] > seen[:, None]).any(1)
            late[warp] = np.any(
                (self._times[other, warp, words] == now)
                & (self._lanes[other, warp, words] != lanes)
            )
            if late.any():
                raise RuntimeError(
                    f"a race: warp {warp} {NAMES[kind]} {self._name!r} where warp "
                    f"{int(late.argmax())} {NAMES[other]} it, and no barrier orders the two"
                )
        times, of_lanes = self._times[kind, warp], self._lanes[kind, warp]
        known = np.where(times[words] == now, of_lanes[words], lanes)
        times[words] = now
        of_lanes[words] = lanes
        together = of_lanes[words] != lanes
        if kind == WRITE and together.any():
            raise RuntimeError(
                f"a race: several lanes of warp {warp} write a word of {self._name!r}"
            )
        of_lanes[words[together | (known != lanes)]] = SEVERAL

    def check_end(self) -> None:
        """Check that all accesses of other CTAs come before the end of this one.

        Raises:
            RuntimeError: this CTA, and its memory, may be gone.
        """
        late = (self._times > self._clocks.seen[self._owners].max(0)[:, None]).any((0, 2))
        late[self._owners] = False
        if late.any():
            raise RuntimeError(
                f"a race: warp {int(late.argmax())} accesses {self._name!r} of a CTA that may have "
                "ended"
            )


class Variable:
    """A variable that PTX declares in the shared memory of each CTA of a cluster.

    Args:
        block: the assembly that declares it.
        name: its name there.
        num_words: its size.
        warps: those of each CTA.
        clocks: of the cluster.
    """

    def __init__(
        self, block: object, name: str, num_words: int, warps: Sequence[slice], clocks: Clocks
    ) -> None:
        self.block, self.name = block, name
        self.words = np.full((len(warps), num_words), POISON * 0x01010101, np.uint32)
        self.accesses = [Accesses(name, num_words, owners, clocks) for owners in warps]

    def check_end(self) -> None:
        """Check that no CTA accesses the variable of another that may have ended."""
        for accesses in self.accesses:
            accesses.check_end()
