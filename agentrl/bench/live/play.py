"""Plays arms: one live run after another, each in its own folder, their order rotated from repetition to repetition, so
that a machine that grows faster or slower favours none."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from agentrl.bench.live import cpu
from agentrl.bench.live.sheet import WARM, measured
from agentrl.errors import AgentRLError, RecipeError, UserError
from agentrl.ports import Progress
from agentrl.recipe.check import check
from agentrl.recipe.schema import Recipe
from agentrl.records import Record
from agentrl.wiring import Trial, build_live
from agentrl.wiring.recorded import read

Runs = dict[str, list[dict[str, Any]]]
"""Of each arm, the figures of its runs: one for each repetition, in order."""


class Arm(Record):
    name: str
    recipe: Recipe
    trial: Trial


def ready(recipe: Recipe, file: Path, arms: Sequence[Arm], out: Path) -> None:
    """One error, before anything starts, where the recipe cannot be compared with itself or `out` is in use."""
    for key, wrong, hint in (
        ("engines.attach", recipe.engines.attach, "leave it out: every arm has fresh engines"),
        ("sandbox.attach", recipe.sandbox.attach, "leave it out: every arm has a daemon of its own"),
    ):
        if wrong:
            raise RecipeError(f"{file}: {key}", "a bench starts its own", hint=hint)
    if recipe.steps < WARM + 2:
        hint = f"at least {WARM + 2}: the first {WARM} intervals are left out"
        raise RecipeError(f"{file}: steps", f"{recipe.steps} is too few to measure", hint=hint)
    for arm in arms:
        for problem in check(arm.recipe):
            if problem.fatal:
                raise RecipeError(f"{file}: {problem.where}", f"{arm.name}: {problem.message}", hint=problem.hint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: something is there already", hint="name a folder that is not there with --out")


def play_all(
    arms: Sequence[Arm], repeat: int, out: Path, tell: Progress, said: Callable[[str], None]
) -> tuple[Runs, float]:
    """Every arm `repeat` times, with the seed of the repetition; and the seconds it took. Blocking. AgentRLError
    where a run does not end well; what was played stays in `out`."""
    began, count = time.monotonic(), repeat * len(arms)
    runs: Runs = {arm.name: [] for arm in arms}
    for repetition in range(repeat):
        first = repetition % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            done = sum(map(len, runs.values()))
            tell("bench", f"{arm.name}, run {done + 1} of {count}", done / count)
            recipe = msgspec.structs.replace(arm.recipe, seed=arm.recipe.seed + repetition)
            run = asyncio.run(_play(recipe, arm.trial, out / f"{_slug(arm.name)}-{repetition + 1}", tell))
            runs[arm.name].append(run)
            said(f"{done + 1} of {count}: {run['mean_s']:.2f} s a step  {arm.name}, seed {recipe.seed}")
    tell("bench", "done", 1.0)
    return runs, time.monotonic() - began


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


async def _play(recipe: Recipe, trial: Trial, folder: Path, tell: Progress) -> dict[str, Any]:
    looks: list[Counter[str]] = []

    def stepped(step: dict[str, Any]) -> None:
        if step["step"] in (WARM, recipe.steps):
            looks.append(cpu.spent())

    async with build_live(recipe, folder, shown=stepped, progress=tell, trial=trial) as live:
        with _logged(folder / "logs" / "run.log"):
            live.follow(recipe, tell, trainer=trial.trains)
            finish = await live.drive()
        summary = live.summary()
    if finish.outcome != "done":
        raise AgentRLError(f"{folder}: the run ended as {finish.outcome}: {finish.detail}", hint="see its logs/run.log")
    spent = {role: (looks[-1][role] - looks[0][role]) / (recipe.steps - WARM) for role in cpu.ROLES}
    return {"folder": str(folder), "seed": recipe.seed, **measured(summary, read(folder).trajectories), "cpu_s": spent}


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """What agentrl logs goes to this file, and nowhere else."""
    logger, handler = logging.getLogger("agentrl"), logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(before[0])
        logger.propagate = before[1]
