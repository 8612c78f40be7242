"""`agentrl sandbox up|status|down|exec|build|gc`: the lane-pinned sandbox daemon."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agentrl.cli.common import FAILED, UNAVAILABLE, Json, Quiet, RecipeFile, Set, console, emit, table
from agentrl.recipe.load import load

if TYPE_CHECKING:
    from agentrl.records import ExecResult, SandboxHostStatus
    from agentrl.wiring.services import Serving

app = typer.Typer(
    help="The recipe's sandbox daemons, on this machine or its hosts, running on after the command.",
    no_args_is_help=True,
)


@app.command()
def up(recipe: RecipeFile, set_: Set = None, json: Json = False, quiet: Quiet = False) -> None:
    """Start the daemon, or one on each host with the role sandbox, and return once all serve."""
    from agentrl.wiring.services import Services

    loaded = load(recipe, overrides=set_ or [])
    services = Services("sandbox", loaded.name)
    if not quiet:
        where = f" on {', '.join(loaded.sandbox_hosts)}" if loaded.hosts else ""
        console.print(f"[dim]starting the sandbox daemon{where}; log[/] {services.log}")
    serving = services.up(loaded, timeout_s=loaded.sandbox.start_timeout_s)
    emit(serving, lambda out: _draw_up(out, serving, str(recipe)), json=json, quiet=quiet)


@app.command()
def status(recipe: RecipeFile, set_: Set = None, json: Json = False, quiet: Quiet = False) -> None:
    """Live sandboxes, and each lane's cap, queue and CPUs. Exit 3 where no daemon serves."""
    from agentrl.wiring import survey
    from agentrl.wiring.services import Services

    loaded = load(recipe, overrides=set_ or [])
    serving = Services("sandbox", loaded.name).running()
    if serving is None:
        emit(
            {"serving": None, "status": None},
            lambda out: out.print(f"no daemon of recipe {loaded.name} runs; `agentrl sandbox up {recipe}` starts one"),
            json=json,
            quiet=quiet,
        )
        raise typer.Exit(UNAVAILABLE)
    said = asyncio.run(survey.daemons(serving))
    emit(
        {"serving": serving, "status": said[0], "hosts": said},
        lambda out: _draw_status(out, said),
        json=json,
        quiet=quiet,
    )


@app.command()
def down(recipe: RecipeFile, set_: Set = None, json: Json = False, quiet: Quiet = False) -> None:
    """Stop the daemons; each closes all its sandboxes first. Nothing is left but their logs."""
    from agentrl.wiring.services import Services

    loaded = load(recipe, overrides=set_ or [])
    stopped = Services("sandbox", loaded.name).down()
    said = "stopped" if stopped else "none ran"
    emit(
        {"recipe": loaded.name, "stopped": stopped},
        lambda out: out.print(f"sandbox daemon of recipe {loaded.name}: {said}"),
        json=json,
        quiet=quiet,
    )


@app.command("exec")
def exec_(
    recipe: RecipeFile,
    command: Annotated[list[str], typer.Argument(help="The command, after --.", show_default=False)],
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until it is killed.")] = 20.0,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="Allow the process backend, which isolates nothing.")
    ] = False,
    host: Annotated[str, typer.Option(help="The daemon of this host; default: the first.")] = "",
    set_: Set = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Open a fresh sandbox at the running daemon, run one command in it, close it.

    Exit 0 where the command's own exit code is 0, else 1; its code is in the output.
    """
    from agentrl.wiring.sandboxes import exec_once

    loaded = load(recipe, overrides=set_ or [])
    result = asyncio.run(exec_once(loaded, command, timeout_s=timeout, trusted=trusted, host=host))
    emit(result, lambda out: _draw_result(out, result), json=json, quiet=quiet)
    if result.exit_code != 0:
        raise typer.Exit(FAILED)


@app.command()
def gc(
    recipe: RecipeFile,
    set_: Set = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Remove what dead daemons left on this machine and the recipe's hosts, of any run, and folders of dead runs there.

    Sandboxes of a living daemon are not touched.
    """
    from agentrl.wiring.sandboxes import collect_garbage

    loaded = load(recipe, overrides=set_ or [])
    removed = asyncio.run(collect_garbage(loaded))
    emit({"removed": removed}, lambda out: out.print(f"{removed} sandboxes removed"), json=json, quiet=quiet)


@app.command()
def build(
    recipe: RecipeFile,
    set_: Set = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Build the images of the recipe's task folders on this machine's Docker engine, those that it lacks.

    A folder's image is named by its content; one that has not changed is not built again.
    """
    from agentrl.wiring.images import build as build_images

    loaded = load(recipe, overrides=set_ or [])
    built, of = asyncio.run(build_images(loaded, lambda line: None if quiet else console.print(f"[dim]{line}[/]")))
    emit({"built": built, "images": of}, lambda out: out.print(f"{built} of {of} built"), json=json, quiet=quiet)


def _draw_up(out: Console, serving: Serving, recipe: str) -> None:
    for part in serving.parts:
        where = f" on {part.host}" if part.host else ""
        out.print(f"sandbox daemon{where} at {part.url}, process {part.pid}, log {part.log}")
    out.print(f"[dim]try it:[/] agentrl sandbox exec {recipe} -- uname -a")
    out.print(f"[dim]use it:[/] agentrl run {recipe} --set sandbox.attach={serving.folder}")
    out.print(f"[dim]stop it:[/] agentrl sandbox down {recipe}")


def _draw_status(out: Console, hosts: list[SandboxHostStatus]) -> None:
    for said in hosts:
        _draw_host(out, said)


def _draw_host(out: Console, said: SandboxHostStatus) -> None:
    out.print(f"{said.name}: backend {said.backend}, {said.live} live sandboxes\n[dim]{said.isolation}[/]")
    made = table("", "lane", ">cap", ">running", ">queued", ">done", ">wait mean", ">p95", "CPUs", "shared with")
    for lane in said.lanes:
        figures = [str(n) for n in (lane.cap, lane.running, lane.queued, lane.done)]
        waits = [f"{1e3 * s:.1f} ms" for s in (lane.wait_s_mean, lane.wait_s_p95)]
        cpus = ",".join(map(str, lane.cpus))
        made.add_row(lane.lane, *figures, *waits, cpus, ", ".join(lane.merged_with))
    out.print(made)


def _draw_result(out: Console, result: ExecResult) -> None:
    out.print(result.output.rstrip("\n"), markup=False, soft_wrap=True)
    how = "timed out" if result.timed_out else "out of memory" if result.oom else f"exit {result.exit_code}"
    cut = f", {result.total_bytes} bytes in all" if result.truncated else ""
    why = f" ({result.lane_reason})" if result.lane_reason else ""
    console.print(
        f"[dim]{how}; lane {result.lane}{why}, queued {1e3 * result.queue_s:.1f} ms,"
        f" ran {1e3 * result.run_s:.1f} ms{cut}[/]"
    )
