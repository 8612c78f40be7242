"""`agentrl`: the folders are the verbs."""

from __future__ import annotations

import os
import sys

import typer

from agentrl.cli import common

app = typer.Typer(
    name="agentrl",
    help="Asynchronous agentic RL: shorten the time until the next fresh, valid batch reaches the trainer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _register() -> None:
    from agentrl.cli import run

    app.command("run")(run.run)
    app.command("rollout")(run.rollout)


def main() -> None:
    debug = "--debug" in sys.argv or bool(os.environ.get("AGENTRL_DEBUG"))
    argv = [arg for arg in sys.argv[1:] if arg != "--debug"]
    _register()
    sys.exit(common.guarded(lambda: app(args=argv, prog_name="agentrl"), debug=debug))


if __name__ == "__main__":
    main()
