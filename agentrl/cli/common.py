"""What every verb shares: options, output, errors, exit codes."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from agentrl.errors import AgentRLError

_PIPED_WIDTH = 200  # what is not a terminal is not folded at 80 columns

console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _PIPED_WIDTH)
"""Progress and errors."""

out = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
"""Results for people."""

RecipeFile = Annotated[Path, typer.Argument(help="A recipe, e.g. recipes/local.toml.", show_default=False)]
RunFolder = Annotated[Path, typer.Argument(help="A run's folder, e.g. runs/local-20260101-120000.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else goes to stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no tables: errors and the exit code.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a recipe key: a.b=c. May be repeated.")]

FAILED, USER, UNAVAILABLE, INTERRUPTED = 1, 2, 3, 130


def print_json(value: Any) -> None:
    """Times that are not numbers become null: the document is JSON, not nearly."""
    document = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2)
    sys.stdout.write(document.decode() + "\n")
    sys.stdout.flush()


def emit(document: Any, draw: Callable[[Console], None], *, json: bool, quiet: bool) -> None:
    """A command's result: one JSON document, or what `draw` prints for people."""
    if json:
        print_json(document)
    elif not quiet:
        draw(out)


def table(title: str, *columns: str) -> Table:
    """Numbers to the right: a column whose name starts with `>`."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        name = column.removeprefix(">")
        made.add_column(name, justify="right" if name != column else "left", overflow="fold")
    return made


def guarded(body: Callable[[], None], *, debug: bool, json: bool = False) -> int:
    """Run a command; one clear error and an honest exit code instead of a traceback.

    With json, the error is the document on stdout as well.
    """
    try:
        body()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else FAILED
    except BrokenPipeError:  # the reader has seen enough; the interpreter must not complain at its last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except BaseException as exc:
        if debug:
            traceback.print_exc()
        return _report(_first(exc), json=json)
    return 0


def _first(exc: BaseException) -> BaseException:
    """The most telling member of an exception group: a typed error before any other."""
    if not isinstance(exc, BaseExceptionGroup):
        return exc
    members = [_first(e) for e in exc.exceptions]
    return next((e for e in members if isinstance(e, AgentRLError)), members[0])


def _report(exc: BaseException, *, json: bool) -> int:
    if isinstance(exc, AgentRLError):
        message, hint, code = str(exc), exc.hint, exc.exit_code
    elif isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT):
        message, code = f"{exc.filename or 'a file'}: no space left on the disk", UNAVAILABLE
        hint = "free space and give the same command again"
    else:
        message, code = f"a bug in agentrl: {type(exc).__name__}: {exc}", FAILED
        hint = "run again with --debug for the traceback and report it"
    console.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    if hint:
        console.print(f"  [dim]{escape(hint)}[/]", soft_wrap=True)
    if json:
        print_json({"error": {"kind": type(exc).__name__, "message": message, "hint": hint, "exit_code": code}})
    return code


def escape(text: str) -> str:
    return text.replace("[", "\\[")
