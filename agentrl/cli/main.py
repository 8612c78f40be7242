"""`agentrl`: the folders are the verbs. Importing this must stay cheap: a verb imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import agentrl
from agentrl.cli import bench, common, doctor, hosts, plan, publish, replay, report, run, sandbox, serve, top, train

app = typer.Typer(
    name="agentrl",
    help="Asynchronous agentic RL: shorten the time until the next fresh, valid batch reaches the trainer.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong input, 3 a host or dependency is not available, 4 no progress,"
    " 130 interrupted. Every command takes --debug: tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.command("run")(run.run)
app.command("rollout")(run.rollout)
app.command("train")(train.train)
app.command("publish")(publish.publish)
app.add_typer(serve.app, name="serve")
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(hosts.app, name="hosts")
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
app.command("top")(top.top)
app.command("replay")(replay.replay)
app.command("report")(report.report)
app.add_typer(bench.app, name="bench")


def _version(asked: bool) -> None:
    if asked:
        common.out.print(f"agentrl {agentrl.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(given: list[str] | None = None) -> None:
    """Always raises SystemExit. given: the arguments; default: the process's own."""
    own, rest = _split(sys.argv[1:] if given is None else given)
    debug = "--debug" in own or bool(os.environ.get("AGENTRL_DEBUG"))
    argv = [arg for arg in own if arg != "--debug"] + rest
    sys.exit(common.guarded(lambda: app(args=argv, prog_name="agentrl"), debug=debug, json="--json" in own))


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our own options end at `--`: what follows belongs to the command in a sandbox."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at:]


if __name__ == "__main__":
    main()
