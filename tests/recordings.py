"""Journals of simulated runs, in the folder of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentrl.journal.store import SqliteJournal
from agentrl.recipe.load import load
from agentrl.sim import world as sim
from agentrl.sim.clock import run as virtual
from agentrl.wiring.derive import policy_of
from agentrl.wiring.sim import Outcome, RudeRun

RECIPE = 'name = "t"\nsteps = 6\n[batch]\ngroups = 2\nsiblings = 3\n'


def recorded(folder: Path, seed: int = 3, recipe: str = RECIPE, rude: sim.Rudeness = sim.KIND) -> Outcome:
    """`recipe` in a simulated world; what is left in `folder` is what replay, top and report read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(recipe)
    policy = policy_of(load(folder / "recipe.toml", checked=False))
    outcome = virtual(RudeRun(seed, policy=policy, rude=rude).play())

    async def write() -> None:
        journal = SqliteJournal.open(folder / "run.sqlite")
        for now, event, digest in outcome.journal:
            journal.record_event(now, event, digest)
        await journal.flush()
        await journal.aclose()

    asyncio.run(write())
    return outcome
