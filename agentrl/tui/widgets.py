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
    """Draws `lines`. heading: how many of them stay when the rest scrolls. cursor: whether one of them is marked.

    length: for long lists; then `lines` gives the heading and only those of `window`, out of so many.
    """

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

    def __init__(
        self,
        lines: Lines,
        title: str = "",
        *,
        name: str,
        heading: int = 0,
        cursor: bool = False,
        length: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(id=name)
        self.title = title
        self.row = 0
        self.window = slice(0, 0)
        self._lines = lines
        self._heading = heading
        self._cursor = cursor
        self._length = length
        self._count = 0
        self._entitled = ""

    def render(self) -> Text:
        width, height = self.size.width, self.size.height
        room = max(1, height - self._heading)
        if self._length is not None:
            self._settle(self._length(), room)
            drawn = list(self._lines(width, height))
            head, shown = drawn[: self._heading], drawn[self._heading :]
        else:
            drawn = list(self._lines(width, height))
            head, body = drawn[: self._heading], drawn[self._heading :]
            self._settle(len(body), room)
            shown = body[self.window]
        if self._cursor and self.has_focus and shown:
            at = self.row - self.window.start
            shown[at] = _marked(shown[at], width)
        self._entitle(max(0, self._count - self.window.stop))
        return Text("\n").join(fit(each, width) for each in [*head, *shown])

    def _entitle(self, below: int) -> None:
        """`title`, and how many lines are out of sight below; set only where it changes, as that draws anew."""
        title = f"{self.title}  ↓{below}" if below and self.title else self.title
        if title != self._entitled:
            self._entitled = title
            self.border_title = Text(title)  # a str would be read as markup

    def _settle(self, count: int, room: int) -> None:
        """Which lines are in sight, now that there are `count`: the cursor's among them."""
        self._count = count
        self.row = max(0, min(self.row, count - 1))
        top = self.window.start
        if self._cursor:
            top = max(self.row - room + 1, min(top, self.row))
        top = max(0, min(top, count - room))
        self.window = slice(top, min(count, top + room))

    def action_move(self, by: int) -> None:
        if self._cursor:
            self.row = max(0, min(self.row + by, self._count - 1))
        else:
            top = max(0, self.window.start + by)
            self.window = slice(top, top)
        self.refresh()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.action_move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.action_move(-3)

    def on_click(self, event: events.Click) -> None:
        if self._cursor:
            self.row = max(0, min(self.window.start + event.y - 1 - self._heading, self._count - 1))
            self.refresh()

    def key_enter(self) -> None:
        if self._cursor and self._count:
            self.post_message(self.Chosen(self, self.row))


def _marked(text: Text, width: int) -> Text:
    """Its colours would be those of the background."""
    return fit(Text(text.plain, style="reverse"), width)
