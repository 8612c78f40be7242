"""How fast one engine is on this machine: tokens a second at several loads, and how much of a prompt it need not
compute again. `agentrl bench engine`.

Wall-clock figures include HTTP and prefill, and depend on what else runs; CPU seconds per thousand tokens do so less.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from agentrl.recipe.schema import Engines, Recipe
from agentrl.records import Reply, Sampling
from agentrl.wiring.lone import LoneEngine, lone_engine

PROMPT_TOKENS = 200
NEW_TOKENS = 128
IDS = 256  # prompts use the first ids of the vocabulary
GROUPS, SIBLINGS, TURNS, OBSERVED_TOKENS = 8, 8, 4, 30
DEADLINE_S = 120.0

DEFAULT = Recipe(name="bench-engine", engines=Engines(count=1, slots=64))


def main(
    recipe: Recipe | None = None,
    *,
    json_file: str = "",
    sequences: Sequence[int] = (1, 16, 64),
    repeats: int = 3,
    quiet: bool = False,
) -> dict[str, Any]:
    """Start the recipe's engine (default: the embedded one with the built-in policy, 64 slots), measure, stop it.

    Prints a table to stderr unless quiet, writes JSON where asked, and returns the same figures.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        figures = asyncio.run(measure(recipe or DEFAULT, Path(folder), sequences=sequences, repeats=repeats))
    if not quiet:
        print(table(figures), file=sys.stderr)
    if json_file:
        Path(json_file).write_text(json.dumps(figures, indent=2) + "\n")
    return figures


async def measure(recipe: Recipe, folder: Path, *, sequences: Sequence[int], repeats: int) -> dict[str, Any]:
    """`load`: per number of sequences the best tokens/s of `repeats` runs and all of them."""
    began = time.perf_counter()
    async with lone_engine(recipe, folder) as lone:
        start_s = time.perf_counter() - began
        await _decode(lone, 1, 8)  # first calls allocate
        load = [await _load(lone, count, repeats) for count in sequences]
        reuse = await _reuse(lone)
        return {
            "bench": "engine",
            "kind": lone.info.kind,
            "software": lone.info.software,
            "cpus": len(psutil.Process().cpu_affinity() or ()),
            "busy_before": psutil.getloadavg()[0],
            "slots": lone.info.slots,
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": NEW_TOKENS,
            "start_s": round(start_s, 2),
            "rss_mb": round(_rss_mb(lone)),
            "load": load,
            "prefix": reuse,
        }


async def _load(lone: LoneEngine, count: int, repeats: int) -> dict[str, Any]:
    speeds, cpu_s, tokens = [], _cpu_s(lone), 0
    for _ in range(repeats):
        began = time.perf_counter()
        made = await _decode(lone, count, NEW_TOKENS)
        speeds.append(made / (time.perf_counter() - began))
        tokens += made
    return {
        "sequences": count,
        "tokens_per_s": round(max(speeds)),
        "runs": [round(speed) for speed in speeds],
        "cpu_ms_per_token": round(1000 * (_cpu_s(lone) - cpu_s) / tokens, 3),
    }


async def _decode(lone: LoneEngine, count: int, new: int) -> int:
    prompts = [random.choices(range(IDS), k=PROMPT_TOKENS) for _ in range(count)]
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(_ask(lone, p, new, i % lone.info.ranks)) for i, p in enumerate(prompts)]
    return sum(len(call.result().tokens) for call in calls)


async def _reuse(lone: LoneEngine) -> dict[str, Any]:
    """Conversations of several turns, in groups that share their opening: what share of the reusable was reused."""
    began, cpu_s = time.perf_counter(), _cpu_s(lone)
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(_group(lone, number)) for number in range(GROUPS)]
    figures = [sum(column) for column in zip(*(call.result() for call in calls), strict=True)]
    cached, reusable, prompt, made = figures
    return {
        "groups": GROUPS,
        "siblings": SIBLINGS,
        "turns": TURNS,
        "reuse": round(cached / reusable, 4),
        "prompt_tokens": prompt,
        "generated_tokens": made,
        "tokens_per_s": round(made / (time.perf_counter() - began)),
        "cpu_ms_per_token": round(1000 * (_cpu_s(lone) - cpu_s) / made, 3),
    }


async def _group(lone: LoneEngine, number: int) -> tuple[int, int, int, int]:
    """(cached, reusable, prompt, generated) tokens of one group, its siblings sent together."""
    opening = random.Random(number).choices(range(IDS), k=PROMPT_TOKENS)
    rank = number % lone.info.ranks
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(_conversation(lone, opening, rank)) for _ in range(SIBLINGS)]
    cached, reusable, prompt, made = (sum(c) for c in zip(*(call.result() for call in calls), strict=True))
    return cached, reusable + (SIBLINGS - 1) * len(opening), prompt, made


async def _conversation(lone: LoneEngine, opening: list[int], rank: int) -> tuple[int, int, int, int]:
    history, cached, reusable, prompt, made = list(opening), 0, 0, 0, 0
    for turn in range(TURNS):
        reply = await _ask(lone, history, 24, rank)
        cached, prompt, made = cached + reply.cached_tokens, prompt + len(history), made + len(reply.tokens)
        history += reply.tokens
        if turn < TURNS - 1:
            reusable += len(history)
        history += random.choices(range(IDS), k=OBSERVED_TOKENS)
    return cached, reusable, prompt, made


async def _ask(lone: LoneEngine, prompt: Sequence[int], new: int, rank: int) -> Reply:
    sampling = Sampling(max_new_tokens=new)
    return await lone.engine.generate(uuid.uuid4().hex, prompt, sampling, rank=rank, deadline_s=DEADLINE_S)


def _processes(lone: LoneEngine) -> list[psutil.Process]:
    root = psutil.Process(lone.process.pid)
    return [root, *root.children(recursive=True)]


def _cpu_s(lone: LoneEngine) -> float:
    return float(sum(times.user + times.system for times in (p.cpu_times() for p in _processes(lone))))


def _rss_mb(lone: LoneEngine) -> float:
    return float(sum(p.memory_info().rss for p in _processes(lone))) / 2**20


def table(figures: dict[str, Any]) -> str:
    lines = [
        f"engine {figures['kind']} {figures['software']}: started in {figures['start_s']} s, {figures['rss_mb']} MB, "
        f"load average before {figures['busy_before']:.1f} on {figures['cpus']} CPUs",
        f"prompts of {figures['prompt_tokens']} tokens, {figures['new_tokens']} new tokens each",
        f"{'sequences':>10} {'tok/s':>8} {'CPU ms/token':>14}   runs",
    ]
    lines += [
        f"{row['sequences']:>10} {row['tokens_per_s']:>8} {row['cpu_ms_per_token']:>14}   {row['runs']}"
        for row in figures["load"]
    ]
    prefix = figures["prefix"]
    lines.append(
        f"{prefix['groups']} groups x {prefix['siblings']} siblings x {prefix['turns']} turns: prefix reuse "
        f"{prefix['reuse']:.3f}, {prefix['tokens_per_s']} tok/s"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main(json_file=sys.argv[1] if len(sys.argv) > 1 else "")
