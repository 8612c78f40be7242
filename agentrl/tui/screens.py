"""What opens above the main screen: one group's attempts, one attempt's turns, a question, the keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Static

from agentrl.records import AttemptId, GroupId
from agentrl.runtime.status import GroupStatus, Life
from agentrl.tui import groups
from agentrl.tui.widgets import Panel

HELP = """\
1-6, tab      panel        z     the whole screen for it, and back
up, down      move         enter group -> attempts -> turns
s             sort groups  /     filter groups and log; empty: all
p             pause the run, or let it go on
d             drain: end soon, resumable
space, + -    of a recording: stop and go, faster, slower
t             colours: terminal, dark, light
escape        back         q     quit (the run goes on)

Read the top first: what the trainer does, who keeps the batch from it,
and what to change. ▲ alarm: something blocks now. ● hint: tuning.
Ages: green is fresh, yellow at K, red beyond.
↓3 in a title: three more lines below.\
"""


class Drill(Screen[None]):
    """Lines that are drawn anew whenever the run moves. The app calls `refresh` on what is on top."""

    BINDINGS = [Binding("escape,backspace", "app.pop_screen", "back"), Binding("q", "app.quit", "quit")]

    def __init__(self, title: str, lines: Callable[[int, int], Sequence[Text]], *, heading: int, cursor: bool) -> None:
        super().__init__()
        self.panel = Panel(lines, title, name="drill", heading=heading, cursor=cursor)

    def compose(self) -> ComposeResult:
        yield self.panel
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.panel.focus()


class GroupScreen(Drill):
    """The siblings of one group; `find` gives it as it is now, None once its story is over."""

    def __init__(self, group: GroupId, find: Callable[[GroupId], GroupStatus | None]) -> None:
        super().__init__(f"group g{group}", self._attempts, heading=2, cursor=True)
        self._group = group
        self._find = find
        self._last = find(group)

    def _attempts(self, width: int, height: int) -> Sequence[Text]:
        self._last = self._find(self._group) or self._last
        if self._last is None:
            return [Text(""), Text("gone")]
        over = "" if self._find(self._group) else ": trained or dropped, as it was last"
        self.panel.title = f"group g{self._group}  task {self._last.task}{over}"
        return groups.attempts(self._last, width)

    def attempt(self, row: int) -> AttemptId | None:
        """The try in that row; None before its first."""
        if self._last is None or not self._last.members[row].tries:
            return None
        member = self._last.members[row]
        return AttemptId(self._group, member.index, member.tries - 1)


class TurnsScreen(Drill):
    """One attempt from its opening to its batch. waits: how long one that ended at that time has waited for it."""

    def __init__(self, attempt: AttemptId, life: Life, waits: Callable[[AttemptId, float], float]) -> None:
        self._attempt = attempt
        self._life = life
        self._waits = waits
        super().__init__(f"attempt {attempt}", self._lines, heading=2, cursor=False)

    def _lines(self, width: int, height: int) -> Sequence[Text]:
        life = self._life
        if not life.turns:
            return [Text("no durable turn"), Text("")]
        return groups.life(life, self._waits(self._attempt, life.ended_s) if life.ended_s is not None else 0.0, width)


class Ask(ModalScreen[bool]):
    BINDINGS = [Binding("y", "dismiss(True)", "yes"), Binding("n,escape,q,enter", "dismiss(False)", "no")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(f"{self._question}\n\ny  yes    n  no", markup=False)


class Help(ModalScreen[None]):
    BINDINGS = [Binding("escape,q,question_mark,enter", "dismiss", "back")]

    def compose(self) -> ComposeResult:
        with Vertical(classes="box"):
            yield Static(HELP, markup=False)
