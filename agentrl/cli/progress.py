"""Progress where work is long: lines that move on a terminal; nothing where there is none, or where quiet is asked for.

What works below the command line takes a `ports.Progress` and knows nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from agentrl.cli.common import console, escape


class Lines:
    """A `ports.Progress`: one line for each `who`, drawn by rich. Safe to call from any thread."""

    def __init__(self, drawn: Progress) -> None:
        self._drawn = drawn
        self._lines: dict[str, TaskID] = {}

    def __call__(self, who: str, what: str, share: float | None = None) -> None:
        line = self._lines.get(who)
        if line is None:
            line = self._lines[who] = self._drawn.add_task(escape(who), total=None, what="")
        total = None if share is None else 1.0
        self._drawn.update(line, total=total, completed=share or 0.0, what=escape(what))


@contextmanager
def progress(*, quiet: bool, to: Console = console) -> Iterator[Lines]:
    """Lines on standard error while the block runs; they are gone after it. quiet: `--quiet` or `--json`."""
    drawn = Progress(
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[what]}[/]"),
        console=to,
        transient=True,
        disable=quiet or not to.is_terminal,
    )
    with drawn:
        yield Lines(drawn)
