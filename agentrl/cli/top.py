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
    run: Annotated[
        str, typer.Argument(help="A run's folder, the URL of a live one, or HOST:FOLDER over SSH.", show_default=False)
    ],
    replay: Annotated[bool, typer.Option("--replay", help="Play it from its journal, even while it is live.")] = False,
    speed: Annotated[float, typer.Option(min=0.1, help="Of a recording: seconds of the run per second.")] = 10.0,
    at: Annotated[float, typer.Option(min=0, help="Of a recording: begin at this second; inf: its end.")] = 0.0,
    theme: Annotated[Theme, typer.Option(help="Colours; terminal: its own sixteen.")] = Theme.TERMINAL,
    token_file: Annotated[
        Path | None, typer.Option(help="With a URL: a copy of the run's file `token`, where its folder is elsewhere.")
    ] = None,
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
    drawn = asyncio.run(_session(run, token_file, replay, speed, at, theme, size if snapshot is not None else ""))
    if snapshot is not None:
        snapshot.write_text(drawn)
        console.print(f"[dim]written[/] {snapshot}", soft_wrap=True)


async def _session(
    run: str, token_file: Path | None, replay: bool, speed: float, at: float, theme: Theme, size: str
) -> str:
    """size: of a snapshot, which is returned; empty: the screen, until somebody quits."""
    from agentrl.tui.app import Top
    from agentrl.tui.snapshot import snapshot
    from agentrl.wiring.top import Recording

    async with AsyncExitStack() as stack:
        feed = Recording(Path(run), until=at) if replay else await _feed(run, stack, token_file, at)
        if not size:
            await Top(feed, theme=theme.value, speed=speed).run_async()
            return ""
        columns, _, lines = size.partition("x")
        shown = "dark" if theme is Theme.TERMINAL else theme.value
        return await snapshot(feed, (int(columns), int(lines)), theme=shown)


async def _feed(run: str, stack: AsyncExitStack, token_file: Path | None, at: float) -> Feed:
    """The live run, if it is live; else its recording, if its folder is here."""
    from agentrl.wiring.attach import FaceClient, is_url
    from agentrl.wiring.reach import behind_ssh, way
    from agentrl.wiring.top import LiveFeed, Recording

    try:
        look = await stack.enter_async_context(way(run, "top", token_file=token_file))
        found = await look()
        face = await stack.enter_async_context(FaceClient(found))
        await face.versions()
        name, folder = (run, "") if found.remote else (Path(found.folder).name, found.folder)
        return LiveFeed(name, face, look, folder)
    except UnavailableError as exc:
        if behind := behind_ssh(run):
            hint = f"if it is over, play it there: ssh -t {behind[1]} agentrl top {behind[2]}"
            raise UnavailableError(str(exc), hint=hint) from exc
        if is_url(run):
            raise
    return Recording(Path(run), until=at)
