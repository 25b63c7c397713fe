"""Progress of long reads on stderr: a bar on a terminal, else one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# Fewer bytes are read in less than a second and need no bar.
_SMALL = 1_000_000


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
