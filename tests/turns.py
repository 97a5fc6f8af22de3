"""Parameters of tests that take turns from one run of CI to the next.

``--turn N`` runs those of one turn; without it, every test runs. `.ci/run` takes the seconds of the
commit's time, so that a commit has the same tests each time, and the next one most likely others.
"""

from collections.abc import Iterable

import pytest


def in_turns(values: Iterable, of: int) -> list:
    """Values that take ``of`` turns."""
    return [pytest.param(one, marks=pytest.mark.turns(i, of)) for i, one in enumerate(values)]


def is_late(item: pytest.Item, turn: int) -> bool:
    """Whether a test has another turn."""
    marker = item.get_closest_marker("turns")
    if marker is None:
        return False
    number, of = marker.args
    return turn % of != number % of
