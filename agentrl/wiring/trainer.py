"""The trainer of somebody else's run, in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import AgentRLError, InfraError, UnavailableError, UserError
from agentrl.hosts.local import LocalHost, tail
from agentrl.recipe.load import load
from agentrl.recipe.schema import Recipe, Section
from agentrl.records import Version
from agentrl.train.launch import start_trainer
from agentrl.wiring.attach import FaceClient, LiveRun
from agentrl.wiring.derive import model_path

_STOP_S = 10.0
_TOLD_S = 5.0  # for the last events after the trainer's end
_SERVING = ("steps", "engines", "sandbox", "publish", "schedule", "hosts")  # what the trainer does not depend on
_ELSEWHERE = ("model.path", "tasks.path")  # may have other names on another machine; checksums say what the model is


async def train_for(run: LiveRun, recipe: Recipe, *, stepped: Callable[[dict[str, Any]], None]) -> Version:
    """Runs the trainer against a live run until the run is over; the version it ended with.

    `stepped` hears {"version", "batch", "seconds"} of each step as the run counts it. Raises UserError where the run
    was started with other training settings or trains by itself, UnavailableError where the run goes away.
    """
    folder = Path(run.folder)
    async with FaceClient(run) as face:
        if run.remote:
            recipe_there = await face.recipe()
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            (folder / "recipe.toml").write_text(recipe_there)
        with _only(folder):
            _same(recipe, folder, remote=run.remote)
            held = (await face.versions()).version
            return await _train(run, recipe, face, held, stepped)


@contextlib.contextmanager
def _only(folder: Path) -> Iterator[None]:
    """Two trainers of one name would take each batch from the other. The kernel lets the lock go with its owner."""
    with (folder / "trainer.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another `agentrl train` works for this run", hint="one is enough") from None
        yield


async def _train(
    run: LiveRun, recipe: Recipe, face: FaceClient, version: Version, stepped: Callable[[dict[str, Any]], None]
) -> Version:
    process = await start_trainer(
        LocalHost(),
        recipe,
        run_dir=run.folder,
        url=run.url,
        token_file=str(_token_file(run)),
        model_path=_model(recipe, remote=run.remote),
        remote=run.remote,
    )
    held = version

    async def listen() -> None:
        nonlocal held
        async for said in face.events():
            event = said.get("event", {})
            if event.get("type") == "StepFinished":
                held = Version(event["version"])
                stepped({name: event[name] for name in ("version", "batch", "seconds")})

    listening = asyncio.create_task(listen(), name="run's events")
    try:
        code = await process.wait()
        await asyncio.wait([listening], timeout=_TOLD_S)
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await process.stop(grace_s=_STOP_S)
    if code != 0:
        raise trainer_ended(code, Path(run.folder) / "logs" / "trainer.log")
    return held


def _token_file(run: LiveRun) -> Path:
    """The run's own, or a copy in our folder that only we can read."""
    path = Path(run.folder) / "token"
    if run.remote:
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(run.token + "\n")
    return path


def _model(recipe: Recipe, *, remote: bool) -> str:
    """Empty where the run's host has the model and this one has not: it comes with the first version."""
    try:
        return str(model_path(recipe))
    except UserError:
        if not remote:
            raise
        return ""


def trainer_ended(code: int, log: Path) -> AgentRLError:
    """The trainer's own exit code says whose fault it was, as every exit code of ours; its last words say what."""
    kinds: dict[int, type[AgentRLError]] = {2: UserError, 3: UnavailableError}
    words = tail(str(log), lines=4).partition("trainer: error: ")[2] or tail(str(log))
    return kinds.get(code, InfraError)(f"the trainer ended with code {code}: {words}", hint=f"see {log}")


def _same(recipe: Recipe, folder: Path, *, remote: bool) -> None:
    theirs = load(folder / "recipe.toml", checked=False)
    if theirs.train.embedded:
        raise UserError(
            f"{folder}: the run starts its own trainer", hint="start the run with --set train.embedded=false"
        )
    mine = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, embedded=False))
    elsewhere = _ELSEWHERE if remote else ()
    different = [
        key for key in _differences(mine, theirs) if key.split(".")[0] not in _SERVING and key not in elsewhere
    ]
    if different:
        raise UserError(
            f"{folder}: the run was started with another {', '.join(different[:3])}",
            hint=f"train with the run's own recipe: {folder / 'recipe.toml'}",
        )


def _differences(mine: Section, theirs: Section, path: str = "") -> list[str]:
    found: list[str] = []
    for name in mine.__struct_fields__:
        left, right = getattr(mine, name), getattr(theirs, name)
        if isinstance(left, Section):
            found += _differences(left, right, f"{path}{name}.")
        elif left != right:
            found.append(path + name)
    return found
