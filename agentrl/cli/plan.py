"""`agentrl plan`: what follows from a recipe, problems first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from rich.console import Console

from agentrl.cli.common import USER, Json, Quiet, RecipeFile, Set, emit, escape, table
from agentrl.recipe.load import load

if TYPE_CHECKING:
    from agentrl.wiring.plan import Fleet, Plan, Window


def plan(recipe: RecipeFile, set_: Set = None, json: Json = False, quiet: Quiet = False) -> None:
    """Derived numbers before anything starts: window, capacity, age, KV, lanes, memory, disk. Problems first.

    Exit 2 where the recipe cannot work.
    """
    from agentrl.wiring.plan import plan as planned

    found = planned(load(recipe, overrides=set_ or [], checked=False))
    emit(found, lambda out: _draw(out, found), json=json, quiet=quiet)
    if not found.works:
        raise typer.Exit(USER)


def _draw(out: Console, found: Plan) -> None:
    for problem in found.problems:
        mark = "[bold red]cannot work[/]" if problem.fatal else "[yellow]note[/]"
        out.print(f"{mark} {problem.where}: {escape(problem.message)}")
        out.print(f"  [dim]{escape(problem.hint)}[/]")
    if not found.problems:
        out.print("[green]no problems[/]")
    numbers = table("", "what", ">number", "follows from")
    for row in _rows(found):
        numbers.add_row(*row)
    out.print(numbers)
    if found.hosts:
        hosts = table("", "host", "address", "engines", ">sandboxes")
        for host in found.hosts:
            hosts.add_row(host.name, host.address, " ".join(host.engines) or "none", str(host.sandboxes or "none"))
        out.print(hosts)
    lanes = table("", "lane", ">cap", "CPUs", "shared with")
    for lane in found.lanes:
        lanes.add_row(lane.lane, str(lane.cap), lane.cpus, ", ".join(lane.shared_with))
    if found.lanes:
        out.print(lanes)


def _known(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "SGLang decides"


def _kv_rows(fleet: Fleet) -> list[tuple[str, str, str]]:
    kv = fleet.kv
    if kv is None:
        return []
    holds = f"{kv.rank_gb:,.1f} GB a rank" if kv.rank_tokens else "engines.gpu_gb would tell how many fit"
    return [
        ("KV of one token", f"{kv.token_bytes:,} B", f"config.json: {kv.of}"),
        ("KV memory", f"{kv.wanted_gb:,.1f} GB", f"a rank's slots at full length; {holds}"),
    ]


def _window_row(window: Window) -> tuple[str, str, str]:
    if not window.auto:
        return "open groups W", f"{window.groups}", f"a surplus of {window.surplus} over the batch"
    return (
        "open groups W",
        f"auto, from {window.groups}",
        "the least of: slots and lanes busy, trainer busy, K met",
    )


def _rows(found: Plan) -> list[tuple[str, str, str]]:
    window, fleet, step, machine = found.window, found.fleet, found.step, found.machine
    return [
        _window_row(window),
        ("batch B", f"{window.batch_groups} of {window.siblings}", f"{step.trajectories} trajectories a step"),
        (
            "conversations",
            f"{'≤ ' * window.auto}{window.attempts}",
            f"a batch needs {window.attempts_of_a_batch}; {fleet.slots} slots",
        ),
        (
            "expected age W/B",
            f"{window.versions_in_flight:.1f}",
            "versions passing while a group is open, on average",
        ),
        ("bound K", f"{window.bound}", f"rule of thumb: at least 2 W/B = {window.bound_wanted}"),
        ("KV tokens", _known(fleet.kv_tokens), f"all conversations at full length: {fleet.kv_wanted:,}"),
        ("KV of one rank", _known(fleet.kv_of_rank), f"its slots at full length: {fleet.kv_of_rank_wanted:,}"),
        *_kv_rows(fleet),
        ("tokens of a step", f"≤ {step.tokens:,}", f"at most {step.micro_batches} packed forward passes"),
        ("versions", f"0 to {step.last_version}", "one a step"),
        ("sandboxes", f"{machine.sandboxes}", f"limits sum to {machine.sandboxes_memory / 1e9:.1f} GB"),
        ("memory free", f"{machine.memory_available / 1e9:.1f} GB", f"of {machine.memory_total / 1e9:.1f} GB"),
        ("model", f"{machine.model_bytes / 1e6:,.1f} MB", "as stored"),
        (
            "disk",
            f"{(machine.weights_disk + machine.checkpoints_disk) / 1e6:,.0f} MB",
            f"versions {machine.weights_disk / 1e6:,.0f}, checkpoints {machine.checkpoints_disk / 1e6:,.0f};"
            f" {machine.disk_free / 1e9:.1f} GB free",
        ),
        ("CPUs", f"{machine.cpus}", f"kept for serving: {machine.serving_cpus or 'none'}"),
    ]
