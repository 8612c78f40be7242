"""What a run's folder holds of its scheduler: the policy; and runs of the simulated fleet kept as such a folder."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import tomli

from agentrl.errors import UserError
from agentrl.journal.store import SqliteJournal
from agentrl.recipe import show
from agentrl.recipe.load import load, load_sim
from agentrl.recipe.sim import SimRecipe
from agentrl.records import AttemptId, LoadReport, Turn, Version
from agentrl.runtime.loop import Listener
from agentrl.runtime.trace import Trace
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.sim.fleet import build
from agentrl.wiring.derive import policy_of
from agentrl.wiring.fleet import Fleet, Options, simulate


def policy_in(folder: Path) -> Policy:
    """Of the run in `folder`, live or simulated. UserError where there is none."""
    path = folder / "recipe.toml"
    if not path.is_file():
        raise UserError(f"{folder}: no run here (recipe.toml is missing)", hint="name a run's folder, e.g. runs/local")
    with contextlib.suppress(tomli.TOMLDecodeError):  # `load` says it better
        if "fleet" in tomli.loads(path.read_text()):
            return build.policy_of(load_sim(path))
    return policy_of(load(path, checked=False))


def keep(recipe: SimRecipe, seed: int, folder: Path) -> orders.Finish:
    """One simulated run, left in `folder` as a live one leaves itself: recipe, journal, trace. Blocking.

    UserError where something is there already.
    """
    if (folder / "recipe.toml").exists():
        raise UserError(f"{folder}: there is a run already", hint="name a folder that is not there")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(show.dump(recipe))
    fleets: list[Fleet] = []
    trace = Traced(folder / "trace.json", fleets)
    with contextlib.closing(trace):
        finish = simulate(recipe, seed, Options(), trace, watch=fleets.append)
    asyncio.run(_write(folder / "run.sqlite", fleets[0].driver.world.journal.log))  # type: ignore[attr-defined]
    return finish


async def _write(path: Path, log: Sequence[tuple[float, bytes, bytes]]) -> None:
    journal = SqliteJournal.open(path)
    for now, event, digest in log:
        journal.record_event(now, event, digest)
    await journal.flush()
    await journal.aclose()


class Traced(Listener):
    """A trace of a simulated run, whose clock is that of the one fleet in `fleets` once it is built."""

    def __init__(self, path: Path, fleets: Sequence[Fleet]) -> None:
        self._trace = Trace(path)
        self._fleets = fleets

    def turn(self, attempt: AttemptId, turn: Turn) -> None:
        self._trace.turn(attempt, turn, self._now)

    def staged(self, engine: str, version: Version, seconds: float) -> None:
        self._trace.weights(engine, "stage", version, self._now - seconds, self._now)

    def swapped(self, engine: str, report: LoadReport, began: float, others_tokens: int) -> None:
        self._trace.weights(engine, "swap", report.version, began, self._now, others=others_tokens)

    def heard(self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core) -> None:
        self._trace.heard(now, event, commands, core)

    @property
    def _now(self) -> float:
        return self._fleets[0].driver.world.clock()

    def close(self) -> None:
        self._trace.close()
