"""Progress of long work on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Fewer bytes are read in less than a second and need no bar.
_SMALL = 1_000_000
# Seconds between lines where no bar can be drawn.
_LINE_EVERY = 30.0


class Count:
    """Work counted up to a total, with figures beside the count."""

    def __init__(self, doing: str, total: int, unit: str, done: int, console: Console):
        self._doing, self._total, self._unit, self._done, self._console = doing, total, unit, done, console
        count = TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit)
        times, figures = (TimeElapsedColumn(), TimeRemainingColumn()), TextColumn("{task.fields[figures]}")
        columns = (TextColumn("{task.description}"), BarColumn(), count, *times, figures)
        self.bar = Progress(*columns, console=console, refresh_per_second=2, disable=not console.is_terminal)
        self._task = self.bar.add_task(doing, total=total, completed=done, figures="")
        self._figures, self._began, self._first = "", time.monotonic(), done
        self._said = self._began

    def advance(self, count: int = 1) -> None:
        self._done += count
        self.bar.advance(self._task, count)
        now = time.monotonic()
        if self.bar.disable and now - self._said >= _LINE_EVERY and self._done < self._total:
            self._said = now
            self._console.print(self._line(now - self._began), soft_wrap=True)

    def figures(self, figures: str) -> None:
        """Show these figures from now on."""
        self._figures = figures
        self.bar.update(self._task, figures=figures)

    def _line(self, seconds: float) -> str:
        left = seconds / max(1, self._done - self._first) * (self._total - self._done)
        beside = f", {self._figures}" if self._figures else ""
        return f"{self._doing}: {self._done:,} of {self._total:,} {self._unit}, about {left / 60:.1f} min left{beside}"


@contextmanager
def count_shown(doing: str, total: int, unit: str, done: int = 0) -> Iterator[Count]:
    """Show the progress of work of `total` units, of which `done` are done already."""
    count = Count(doing, total, unit, done, Console(stderr=True, highlight=False))
    with count.bar:
        yield count


@contextmanager
def bytes_shown(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of reading `total` bytes. Call the yielded function with the number of bytes of each read."""
    console = Console(stderr=True, highlight=False)
    if total < _SMALL:
        yield lambda _: None
        return
    if not console.is_terminal:
        console.print(f"{doing}: {total / 1e6:,.0f} MB to read", soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(doing, total=total)
        yield lambda count: progress.advance(task, count)
