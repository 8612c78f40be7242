"""Lines of progress: on a terminal, and nowhere else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from agentrl.cli.progress import progress


def said(*, terminal: bool, quiet: bool) -> str:
    to = io.StringIO()
    with progress(quiet=quiet, to=Console(file=to, force_terminal=terminal, width=100)) as tell:
        tell("engine e0", "loading [weights]", 0.5)
        tell("engine e0", "serves", 1.0)
        tell("sandbox host h1", "starting")
    return to.getvalue()


def test_a_terminal_sees_who_is_at_what() -> None:
    drawn = said(terminal=True, quiet=False)
    for part in ("engine e0", "serves", "100%", "sandbox host h1", "starting"):
        assert part in drawn


@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (True, True), (False, True)])
def test_nobody_else_does(terminal: bool, quiet: bool) -> None:
    assert said(terminal=terminal, quiet=quiet).strip() == ""
