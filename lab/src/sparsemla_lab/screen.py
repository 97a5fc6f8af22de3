"""What a command shows while it works: lines and tables as they are ready, and the time left."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text


class Screen:
    """Lines of results on stdout, and how far the work is.

    A terminal shows a bar with the time left below the lines. Without one, or on a dumb one, each
    step is a plain line on stderr.
    """

    def __init__(self) -> None:
        self._out, self._errors = Console(highlight=False), Console(stderr=True, highlight=False)
        terminals = [each for each in (self._out, self._errors) if each.is_interactive]
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            _TimeLeft(self),
            console=(terminals or [self._out])[0],
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            expand=True,
            disable=not terminals,
        )
        self._costs: Mapping[str, float] = {}
        self._done = 0.0
        self._begun = self._advanced = 0.0

    def __enter__(self) -> Screen:
        self._progress.start()  # at once: packages take seconds to import
        self._task = self._progress.add_task("loading the model", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def print(self, text: str = "", *, style: str | None = None) -> None:
        """A paragraph of results, wrapped."""
        self._out.print(text, style=style, markup=False)

    def line(self, text: str) -> None:
        """A line of results, as it is."""
        self._out.print(text, markup=False, soft_wrap=True)

    def begin(self, costs: Mapping[str, float]) -> None:
        """Announce the steps, in their order.

        Args:
            costs: for each step its share of the time, in any unit.
        """
        self._costs = costs
        self._begun = self._advanced = time.monotonic()
        self._progress.update(self._task, description="", total=sum(costs.values()))

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Callable[[float], None]]:
        """Work at a step; gives a function that takes the share of it that is done."""
        number, cost = list(self._costs).index(name) + 1, self._costs[name]
        self._progress.update(self._task, description=name)
        if self._progress.disable:
            left = f", {self.time_left()}" if self._done else ""
            self._errors.print(f"[{number}/{len(self._costs)}] {name}{left}", markup=False)
        before = self._done

        def advance(share: float) -> None:
            self._done, self._advanced = before + cost * share, time.monotonic()
            self._progress.update(self._task, completed=self._done)

        yield advance
        advance(1)

    def time_left(self) -> str:
        """The time left, by the pace until now."""
        if not self._done:
            return ""
        now = time.monotonic()
        pace = (self._advanced - self._begun) / self._done
        left = pace * (sum(self._costs.values()) - self._done) - (now - self._advanced)
        seconds = 5 * math.ceil(max(left, 1) / 5)
        return f"about {seconds} s left" if seconds < 120 else f"about {seconds // 60} min left"


class _TimeLeft(ProgressColumn):
    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def render(self, task: Task) -> Text:
        return Text(self._screen.time_left())


class Table:
    """A table that is shown row by row, with columns as wide as their heads.

    Args:
        write: takes each line.
        heads: of the columns, the first of which is aligned to the left; may have several lines.
        first: least width of the first column.
    """

    def __init__(
        self, write: Callable[[str], object], heads: Sequence[str], *, first: int = 0
    ) -> None:
        self._write = write
        lines = [head.split("\n") for head in heads]
        self._widths = [max(map(len, each)) for each in lines]
        self._widths[0] = max(self._widths[0], first)
        height = max(map(len, lines))
        for row in zip(*([""] * (height - len(each)) + each for each in lines), strict=True):
            self.row(*row)
        write("-" * (sum(self._widths) + 2 * (len(heads) - 1)))

    def row(self, *cells: Any) -> None:  # noqa: ANN401 - whatever str() takes
        """Show a row."""
        name, *rest = map(str, cells)
        shown = [name.ljust(self._widths[0])]
        shown += [cell.rjust(width) for cell, width in zip(rest, self._widths[1:], strict=True)]
        self._write("  ".join(shown).rstrip())
