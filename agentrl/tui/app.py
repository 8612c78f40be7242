"""`agentrl top`: in one look, is the trainer waiting, why, and what to do."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal
from textual.widgets import Footer, Input

from agentrl.records import AttemptId, GroupId
from agentrl.runtime.status import Frame, GroupStatus, Status
from agentrl.tui import fleet, groups, log, panels
from agentrl.tui.advice import advise
from agentrl.tui.draw import DIM, FAIR, STRONG, ends, line, took
from agentrl.tui.feed import Feed
from agentrl.tui.screens import Ask, Drill, GroupScreen, Help, TurnsScreen
from agentrl.tui.widgets import Panel

_PICTURES = 120  # that advice and trends look back on
_APART_S = 1.0  # of the run's clock, between two that are kept
_ENTRIES = 1_000
_LATE_S = 0.1  # an event loop that is later than that is worth a word
_SPEEDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_THEMES = {"terminal": "ansi-dark", "dark": "textual-dark", "light": "textual-light"}
_PANELS = ("batch", "freshness", "engines", "lanes", "groups", "log")


class Top(App[None]):
    """Draws what `feed` gives. theme: terminal (its own sixteen colours, whatever they are), dark or light."""

    CSS_PATH = "top.tcss"
    TITLE = "agentrl top"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-narrow"), (130, "-wide")]
    VERTICAL_BREAKPOINTS: list[tuple[int, str]] | None = [(0, "-short"), (36, "-tall"), (50, "-taller")]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "quit", priority=False),
        Binding("question_mark", "help", "help"),
        *[Binding(str(n), f"panel('{name}')", name, show=False) for n, name in enumerate(_PANELS, start=1)],
        Binding("z", "zoom", "zoom"),
        Binding("s", "sort", "sort"),
        Binding("slash", "filter", "filter"),
        Binding("p", "pause", "pause"),
        Binding("d", "drain", "drain"),
        Binding("space", "play", "stop/go"),
        Binding("plus,equals_sign", "speed(1)", "faster", key_display="+"),
        Binding("minus", "speed(-1)", "slower"),
        Binding("t", "colours", "colours", show=False),
        Binding("escape", "leave", "back", show=False),
    ]

    def __init__(self, feed: Feed, *, theme: str = "terminal", speed: float = 1.0) -> None:
        super().__init__()
        self.theme = _THEMES[theme]
        self.pictured = asyncio.Event()
        self._feed = feed
        self._view: panels.View | None = None
        self._note = ""
        self._past: deque[Status] = deque(maxlen=_PICTURES)
        self._told: deque[log.Entry] = deque(maxlen=_ENTRIES)
        self._sort, self._pattern = next(iter(groups.SORTS)), ""
        self._speed, self._going = speed, True

    # --- the screen ---------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield Panel(self._head, name="head")
        yield Panel(self._of(panels.verdict), name="verdict")
        with Horizontal(classes="row"):
            yield Panel(self._of(panels.batch), "1 next batch", name="batch")
            yield Panel(self._of(panels.freshness), "2 freshness", name="freshness")
        with Horizontal(classes="row"):
            yield Panel(self._of(fleet.engines), "3 engines", name="engines", heading=1)
            yield Panel(self._of(fleet.lanes), "4 sandboxes", name="lanes")
        with Container(id="below"):
            yield Panel(self._groups, name="groups", heading=1, cursor=True, length=lambda: len(self.shown_groups()))
            yield Panel(self._entries, "6 advice and events", name="log", length=lambda: len(self._items()))
        yield Input(placeholder="filter groups and log", id="filter")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        for name in ("head", "verdict"):
            self.query_one(f"#{name}", Panel).can_focus = False
        self.query_one("#groups").focus()
        self._feed.play(speed=self._speed, running=self._going)
        self._follow()

    @work
    async def _follow(self) -> None:
        await self._feed.watch(self.show)

    def show(self, frame: Frame) -> None:
        status = frame.status
        if not self._past or status.now_s - self._past[-1].now_s >= _APART_S or status.now_s < self._past[-1].now_s:
            self._past.append(msgspec.structs.replace(status, groups=()))
        for said in frame.news:
            self._told.extend(log.entries(said))
        self._note = frame.note
        bank = [past.bank for past in self._past]
        self._view = panels.View(status, bank, advise([*self._past, status]))
        self.pictured.set()
        self.redraw()

    def redraw(self) -> None:
        for panel in self.screen.query(Panel):
            panel.refresh()

    def _of(self, draw: panels.Draw) -> Callable[[int, int], Sequence[Text]]:
        return lambda width, height: [Text("…")] if self._view is None else draw(self._view, width, height)

    def _head(self, width: int, height: int) -> Sequence[Text]:
        if self._view is None:
            return [Text(f"{self._feed.name}: {self._note or 'no picture yet'}", style=DIM)]
        status = self._view.status
        how = f"recording, speed {self._speed:g}" + ("" if self._going else ", stopped")
        if self._feed.live:
            how = "over" if status.outcome else "live"
        left = line(
            Text(self._feed.name, style=STRONG),
            f"step {status.step}/{status.steps}",
            f"v{status.version}",
            Text(self._note, style="reverse" if self._note else ""),
            f"{status.attempts} conversations",
            Text(f"loop {1e3 * status.loop_lag_s:.0f} ms late" if status.loop_lag_s > _LATE_S else "", style=FAIR),
        )
        return [ends(left, Text(f"{how}  {took(status.now_s)}", style=DIM), width)]

    def _groups(self, width: int, height: int) -> Sequence[Text]:
        if self._view is None:
            return []
        found = self.shown_groups()
        panel = self.query_one("#groups", Panel)
        wanted = f"  filter: {self._pattern}" if self._pattern else ""
        panel.title = f"5 groups {len(found)}  by {self._sort}{wanted}"
        if not found and self._pattern:
            return [Text(""), Text("no group matches; escape shows all", style=DIM)]
        return groups.table(self._view.status, found[panel.window], width)

    def shown_groups(self) -> list[GroupStatus]:
        return [] if self._view is None else groups.chosen(self._view.status, self._sort, self._pattern)

    def _entries(self, width: int, height: int) -> Sequence[Text]:
        shown = self._items()[self.query_one("#log", Panel).window]
        return [item.text if isinstance(item, log.Entry) else item for item in shown]

    def _items(self) -> list[Text | log.Entry]:
        """Advice that the verdict has no room for, then what happened, the newest first."""
        advice = panels.advice_lines(self._view.advice[1:]) if self._view else []
        return [*advice, *(entry for entry in reversed(self._told) if self._pattern in entry[1].lower())]

    # --- keys ---------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A recording is played, a live run is paused and drained; a question is answered first."""
        if len(self.screen_stack) > 1:
            return action in ("quit", "help", "pop_screen", "focus_next", "focus_previous")
        if action in ("play", "speed"):
            return not self._feed.live
        return self._feed.live if action in ("pause", "drain") else True

    def action_panel(self, name: str) -> None:
        panel = self.query_one(f"#{name}", Panel)
        if self.screen.maximized is not None:
            self.screen.minimize()
            self.screen.maximize(panel, container=False)
        panel.focus()

    def action_zoom(self) -> None:
        if self.screen.maximized is not None:
            self.screen.minimize()
        elif isinstance(self.focused, Panel):
            self.screen.maximize(self.focused, container=False)

    def action_sort(self) -> None:
        names = list(groups.SORTS)
        self._sort = names[(names.index(self._sort) + 1) % len(names)]
        self.redraw()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.value, field.display = self._pattern, True
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._pattern = event.value.lower()
        self.redraw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.display = False
        self.query_one("#groups").focus()

    def action_leave(self) -> None:
        if self.screen.maximized is not None:
            self.screen.minimize()
        elif self.query_one("#filter").display:
            self.query_one("#filter").display = False
            self.query_one("#groups").focus()
        elif self._pattern:
            self._pattern = ""
            self.redraw()

    def action_help(self) -> None:
        if not isinstance(self.screen, Help):
            self.push_screen(Help())

    def action_colours(self) -> None:
        names = list(_THEMES.values())
        self.theme = names[(names.index(self.theme) + 1) % len(names)]

    @work
    async def action_pause(self) -> None:
        if self._view is not None:
            self.notify(await self._feed.pause(not self._view.status.paused))

    @work
    async def action_drain(self) -> None:
        if await self.push_screen_wait(Ask(f"Drain {self._feed.name}? It ends soon and can be resumed.")):
            self.notify(await self._feed.drain())

    def action_play(self) -> None:
        self._going = not self._going
        self._feed.play(speed=self._speed, running=self._going)
        self.redraw()

    def action_speed(self, by: int) -> None:
        at = min(range(len(_SPEEDS)), key=lambda i: abs(_SPEEDS[i] - self._speed)) + by
        self._speed = _SPEEDS[max(0, min(at, len(_SPEEDS) - 1))]
        self._feed.play(speed=self._speed, running=self._going)
        self.redraw()

    @work
    async def on_panel_chosen(self, event: Panel.Chosen) -> None:
        """From a group to its attempts, from an attempt to its turns."""
        if isinstance(self.screen, GroupScreen):
            attempt = self.screen.attempt(event.row)
            if attempt is not None:
                await self.push_screen(TurnsScreen(attempt, await self._feed.life(attempt), self._waits))
        elif not isinstance(self.screen, Drill) and event.row < len(found := self.shown_groups()):
            await self.push_screen(GroupScreen(found[event.row].id, self._group))

    def _waits(self, attempt: AttemptId, since: float) -> float:
        """How long the attempt has waited for its batch; 0 where its group's story is over."""
        waits = self._view is not None and self._group(attempt.group) is not None
        return max(0.0, self._view.status.now_s - since) if waits and self._view is not None else 0.0

    def _group(self, wanted: GroupId) -> GroupStatus | None:
        found = self._view.status.groups if self._view is not None else ()
        return next((group for group in found if group.id == wanted), None)
