"""What every verb shares: output, errors, exit codes."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from agentrl.errors import AgentRLError

console = Console(stderr=True, highlight=False)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else goes to stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a recipe key: a.b=c. May be repeated.")]

INTERRUPTED = 130


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def guarded(body: Callable[[], None], *, debug: bool) -> int:
    """Run a command; one clear error and an honest exit code instead of a traceback."""
    try:
        body()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 1
    except BaseException as exc:
        if debug:
            traceback.print_exc()
        return _report(_first(exc))
    return 0


def _first(exc: BaseException) -> BaseException:
    """The most telling member of an exception group: a typed error before any other."""
    if not isinstance(exc, BaseExceptionGroup):
        return exc
    members = [_first(e) for e in exc.exceptions]
    return next((e for e in members if isinstance(e, AgentRLError)), members[0])


def _report(exc: BaseException) -> int:
    if isinstance(exc, AgentRLError):
        console.print(f"[bold red]error:[/] {_escape(str(exc))}")
        if exc.hint:
            console.print(f"  [dim]{_escape(exc.hint)}[/]")
        return exc.exit_code
    console.print(f"[bold red]error:[/] a bug in agentrl: {_escape(f'{type(exc).__name__}: {exc}')}")
    console.print("  [dim]run again with --debug for the traceback and report it[/]")
    return 1


def _escape(text: str) -> str:
    return text.replace("[", "\\[")
