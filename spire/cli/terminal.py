"""Notes and progress displays on stderr, beside the output of a command."""

from __future__ import annotations

from typing import Any

from rich import progress
from rich.console import Console


def note(text: str) -> None:
    """Print a note on stderr. `text` may contain Rich markup."""
    Console(stderr=True, highlight=False).print(f"[yellow]note:[/] {text}")


def progress_bar(quiet: bool = False) -> progress.Progress:
    """Return a progress display on stderr, which shows nothing if `quiet`."""
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    return progress.Progress(*columns, *times, console=Console(stderr=True, highlight=False), disable=quiet)


def bar_or_lines() -> progress.Progress:
    """Return a progress display on stderr: a bar or, if stderr is not a terminal, a line for each event."""
    bar = progress_bar()
    return bar if bar.console.is_terminal else _Lines(console=bar.console, disable=True)


class _Lines(progress.Progress):
    def add_task(self, description: str, *given: Any, **named: Any) -> progress.TaskID:
        self.console.print(description)
        return super().add_task(description, *given, **named)

    def update(self, task_id: progress.TaskID, **named: Any) -> None:
        super().update(task_id, **named)
        self.console.print(self._tasks[task_id].description)

    def advance(self, task_id: progress.TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        task = self._tasks[task_id]
        self.console.print(f"{task.description}, {task.completed:.0f} of {task.total or 0:.0f}")
