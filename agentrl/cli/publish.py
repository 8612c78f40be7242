"""`agentrl publish`: which version serves where, and the newest everywhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agentrl.cli.common import Json, Quiet, RunFolder, console, emit, escape, table
from agentrl.cli.progress import Lines, progress
from agentrl.errors import NoProgressError, UnavailableError, UserError
from agentrl.records import Version

if TYPE_CHECKING:
    from agentrl.wiring.attach import LiveRun, Versions
    from agentrl.wiring.publishing import Pushed


def publish(
    run: RunFolder,
    version: Annotated[int | None, typer.Argument(min=0, help="Default: the newest.", show_default=False)] = None,
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for a live run's engines.")] = 60.0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """See each engine's version, and wait until all hold the newest.

    A live run publishes by itself: this waits for it (exit 4 where it does not get there). Where the run is over, its
    version goes to the engines of `agentrl serve up`, by the recipe's strategy.
    """
    from agentrl.wiring.attach import find_run

    wanted = None if version is None else Version(version)
    try:
        live = find_run(str(run))
        with progress(quiet=quiet or json) as tell:
            versions, all_hold = asyncio.run(_wait(live, wanted, wait, tell))
    except UnavailableError as exc:
        if not quiet:
            console.print(f"[dim]{escape(str(exc))}[/]", soft_wrap=True)
        _push(run, wanted, json=json, quiet=quiet)
        return
    document = {"run": str(run), "live": True, "version": versions.version, "engines": versions.engines}
    emit(document, lambda out: _draw_versions(out, versions), json=json, quiet=quiet)
    if not all_hold:
        lacking = ", ".join(versions.lacking(versions.version)) or "no engine is up"
        raise NoProgressError(
            f"{run}: not every engine held version {versions.version} within {wait:g} s ({lacking})",
            hint=f"see {run}/logs/",
        )


async def _wait(live: LiveRun, wanted: Version | None, wait_s: float, tell: Lines) -> tuple[Versions, bool]:
    from agentrl.wiring.attach import FaceClient, until_live

    async with FaceClient(live) as face:
        held = (await face.versions()).version
        if wanted is not None and wanted > held:
            raise UserError(f"{live.folder}: version {wanted} does not exist yet, the trainer holds {held}")
        if wanted is not None and wanted < held:
            raise UserError(
                f"{live.folder}: version {wanted} is older than the trainer's {held}: versions only grow",
                hint="leave the version out to wait for the newest",
            )
        return await until_live(face, wanted, deadline_s=wait_s, progress=tell)


def _push(run: RunFolder, wanted: Version | None, *, json: bool, quiet: bool) -> None:
    from agentrl.wiring.publishing import push, target

    what = target(run, wanted)

    def heard(said: Pushed) -> None:
        if not quiet:
            console.print(
                f"{said.engine}: version {said.before} → [bold]{said.version}[/], paused {said.pause_s:.3f} s"
            )

    with progress(quiet=quiet or json) as tell:
        done = asyncio.run(push(what, heard=heard, progress=tell))
    document = {"run": str(run), "live": False, "version": what.version, "pushed": done}
    emit(document, lambda out: _draw_pushed(out, done), json=json, quiet=quiet)


def _draw_versions(out: Console, versions: Versions) -> None:
    made = table("", "who", ">version")
    made.add_row("trainer", str(versions.version))
    for name, held in versions.engines.items():
        made.add_row(name, f"{held}" if held >= versions.version else f"[yellow]{held}[/]")
    out.print(made)


def _draw_pushed(out: Console, done: list[Pushed]) -> None:
    made = table("", "engine", ">before", ">version", ">staged", ">paused")
    for said in sorted(done, key=lambda said: said.engine):
        figures = (str(said.before), str(said.version), f"{said.stage_s:.3f} s", f"{said.pause_s:.3f} s")
        made.add_row(said.engine, *figures)
    out.print(made)
