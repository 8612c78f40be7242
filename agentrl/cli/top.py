"""`agentrl top`: the screen beside a run."""

from __future__ import annotations

import asyncio
import importlib.util
from contextlib import AsyncExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.common import console
from agentrl.errors import UnavailableError, UserError

if TYPE_CHECKING:
    from agentrl.tui.feed import Feed


class Theme(StrEnum):
    TERMINAL = "terminal"
    DARK = "dark"
    LIGHT = "light"


def top(
    run: Annotated[str, typer.Argument(help="A run's folder, or the URL of a live one.", show_default=False)],
    replay: Annotated[bool, typer.Option("--replay", help="Play it from its journal, even while it is live.")] = False,
    speed: Annotated[float, typer.Option(min=0.1, help="Of a recording: seconds of the run per second.")] = 10.0,
    at: Annotated[float, typer.Option(min=0, help="Of a recording: begin at this second; inf: its end.")] = 0.0,
    theme: Annotated[Theme, typer.Option(help="Colours; terminal: its own sixteen.")] = Theme.TERMINAL,
    snapshot: Annotated[Path | None, typer.Option(help="Write one frame as SVG, without a terminal.")] = None,
    size: Annotated[str, typer.Option(help="Of the snapshot: columns x lines.")] = "120x40",
) -> None:
    """Is the trainer waiting, why, and what to do: live, or of a finished run again.

    The run does not notice, unless it is told to pause (p) or to drain (d). Press ? for the keys.
    """
    if importlib.util.find_spec("textual") is None:
        raise UnavailableError("textual is not installed", hint="pip install 'agentrl[tui]'")
    if snapshot is not None:
        if not snapshot.parent.is_dir():
            raise UserError(f"{snapshot.parent}: no such folder", hint="make it first")
        columns, _, lines = size.partition("x")
        if not (columns.isdecimal() and lines.isdecimal() and int(columns) >= 20 and int(lines) >= 8):
            raise UserError(f"--size {size}: not columns x lines", hint="e.g. --size 120x40; at least 20x8")
    drawn = asyncio.run(_session(run, replay=replay, speed=speed, at=at, theme=theme, size=size if snapshot else ""))
    if snapshot is not None:
        snapshot.write_text(drawn)
        console.print(f"[dim]written[/] {snapshot}", soft_wrap=True)


async def _session(run: str, *, replay: bool, speed: float, at: float, theme: Theme, size: str) -> str:
    """size: of a snapshot, which is returned; empty: the screen, until somebody quits."""
    from agentrl.tui.app import Top
    from agentrl.tui.snapshot import snapshot

    async with AsyncExitStack() as stack:
        feed = await _feed(run, stack, replay=replay, at=at)
        if not size:
            await Top(feed, theme=theme.value, speed=speed).run_async()
            return ""
        columns, _, lines = size.partition("x")
        shown = "dark" if theme is Theme.TERMINAL else theme.value
        return await snapshot(feed, (int(columns), int(lines)), theme=shown)


async def _feed(run: str, stack: AsyncExitStack, *, replay: bool, at: float) -> Feed:
    """The live run, if it is live; else its recording."""
    from agentrl.wiring.attach import FaceClient, find_run
    from agentrl.wiring.top import LiveFeed, Recording

    if not replay:
        try:
            found = find_run(run)
            face = await stack.enter_async_context(FaceClient(found))
            await face.status()
            return LiveFeed(found, face)
        except UnavailableError:
            if run.startswith(("http://", "https://")):
                raise
    return Recording(Path(run), until=at)
