"""Panels on the screen: a titled rule and lines below it, which scroll where there is no room; some have a cursor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text
from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.widget import Widget

from agentrl.tui.draw import fit

Lines = Callable[[int, int], Sequence[Text]]
"""(width, height) -> lines. More than `height` may come; what is out of sight is not shown."""


class Panel(Widget, can_focus=True):
    """Draws `lines`. heading: how many of them stay when the rest scrolls. cursor: whether one of them is marked."""

    BINDINGS = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "move(-10)", "page up", show=False),
        Binding("pagedown", "move(10)", "page down", show=False),
        Binding("home", "move(-1000000)", "first", show=False),
        Binding("end", "move(1000000)", "last", show=False),
    ]

    class Chosen(Message):
        def __init__(self, panel: Panel, row: int) -> None:
            super().__init__()
            self.panel = panel
            self.row = row

    def __init__(self, lines: Lines, title: str = "", *, name: str, heading: int = 0, cursor: bool = False) -> None:
        super().__init__(id=name)
        self.border_title = title
        self.row = 0
        self._lines = lines
        self._heading = heading
        self._cursor = cursor
        self._top = 0
        self._count = 0

    def render(self) -> Text:
        width, height = self.size.width, self.size.height
        drawn = list(self._lines(width, height))
        head, body = drawn[: self._heading], drawn[self._heading :]
        room, self._count = max(1, height - len(head)), len(body)
        self.row = max(0, min(self.row, len(body) - 1))
        if self._cursor:
            self._top = max(self.row - room + 1, min(self._top, self.row))
        self._top = max(0, min(self._top, len(body) - room))
        shown = body[self._top : self._top + room]
        if self._cursor and self.has_focus and shown:
            at = self.row - self._top
            shown = [*shown[:at], _marked(shown[at], width), *shown[at + 1 :]]
        left = len(body) - self._top - len(shown)
        self.border_subtitle = f"{left} more ↓" if left > 0 else ""
        return Text("\n").join(fit(each, width) for each in [*head, *shown])

    def action_move(self, by: int) -> None:
        if self._cursor:
            self.row = max(0, min(self.row + by, self._count - 1))
        else:
            self._top = max(0, self._top + by)
        self.refresh()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_move(-3)

    def on_click(self, event: events.Click) -> None:
        if self._cursor:
            self.row = max(0, min(self._top + event.y - 1 - self._heading, self._count - 1))
            self.refresh()

    def key_enter(self) -> None:
        if self._cursor and self._count:
            self.post_message(self.Chosen(self, self.row))


def _marked(text: Text, width: int) -> Text:
    marked = text.copy()
    marked.pad_right(max(0, width - marked.cell_len))
    marked.stylize("reverse")
    return marked
