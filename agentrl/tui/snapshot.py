"""One frame as an SVG picture, without a terminal."""

from __future__ import annotations

import asyncio

from textual.pilot import Pilot
from textual.widgets import Footer

from agentrl.tui.app import Top
from agentrl.tui.feed import Feed


async def snapshot(
    feed: Feed, size: tuple[int, int], *, theme: str = "dark", keys: tuple[str, ...] = (), deadline_s: float = 60.0
) -> str:
    """size: (columns, lines). keys: pressed once the first picture is there. TimeoutError where none comes."""
    app = Top(feed, theme=theme)
    async with app.run_test(size=size) as pilot:
        async with asyncio.timeout(deadline_s):
            await app.pictured.wait()
            await _whole(app, pilot)
            await pilot.press(*keys)
            await _whole(app, pilot)
        drawn = app.export_screenshot(title="agentrl top")
    return drawn.replace("<svg ", '<svg xml:space="preserve" ', 1)  # some viewers drop leading spaces otherwise


async def _whole(app: Top, pilot: Pilot[None]) -> None:
    """The footer composes itself anew, later than the rest, whenever the keys change; then it is laid out."""
    await pilot.pause()
    while any(not footer.children or not footer.children[-1].region for footer in app.screen.query(Footer)):
        await pilot.pause()
    await pilot.pause()
