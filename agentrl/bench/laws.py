"""`agentrl bench laws`: the unchanged core and driver in a rude world, seed after seed, every law after every event."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

from rich.console import Console
from rich.progress import track

from agentrl.scheduler.laws import LawBroken
from agentrl.sim.clock import run
from agentrl.wiring.sim import Outcome, RudeRun

console = Console(stderr=True, highlight=False)


def sweep(seeds: int, *, first: int = 0, quiet: bool = False) -> dict[str, Any]:
    """Plays `seeds` seeds from `first`. `failures`: seed, law (0: none by number) and what, first come first."""
    began = time.perf_counter()
    outcomes: Counter[str] = Counter()
    events = crashes = 0
    virtual_s = 0.0
    failures: list[dict[str, Any]] = []
    for seed in track(
        range(first, first + seeds), "laws", console=console, disable=quiet or not console.is_terminal, transient=True
    ):
        result = play(seed)
        if isinstance(result, dict):
            failures.append(result)
            continue
        outcomes[result.finish.outcome] += 1
        events += len(result.journal)
        crashes += result.crashes
        virtual_s += result.elapsed_s
    return {
        "mode": "sim",
        "seeds": seeds,
        "first": first,
        "outcomes": dict(outcomes),
        "events": events,
        "crashes": crashes,
        "virtual_s": virtual_s,
        "wall_s": time.perf_counter() - began,
        "failures": failures,
    }


def play(seed: int) -> Outcome | dict[str, Any]:
    """One seed's outcome, or what broke. Its log is silenced: faults are the point here."""
    root = logging.getLogger("agentrl")
    level, root.level = root.level, logging.CRITICAL + 1
    try:
        return run(RudeRun(seed).play())
    except Exception as exc:
        first = _first(exc)
        return {
            "seed": seed,
            "law": first.law if isinstance(first, LawBroken) else 0,
            "what": f"{type(first).__name__}: {first}",
            "replay": f"agentrl bench laws --seeds 1 --first {seed}",
        }
    finally:
        root.setLevel(level)


def _first(exc: BaseException) -> BaseException:
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc


def show(result: dict[str, Any]) -> None:
    rate = result["events"] / max(result["wall_s"], 1e-9)
    console.print(
        f"[dim](simulated)[/] {result['seeds']} seeds, {result['events']} events, "
        f"{result['crashes']} crashes and resumes, "
        f"{result['virtual_s']:.0f} virtual s in {result['wall_s']:.1f} s ({rate:.0f} events/s); "
        f"outcomes {result['outcomes']}; [bold]{len(result['failures'])} broken laws[/]"
    )
    for failure in result["failures"][:10]:
        console.print(f"seed {failure['seed']}: {failure['what']}\n  replay: {failure['replay']}", markup=False)
