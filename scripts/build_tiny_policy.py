"""Makes the tiny policy that ships with agentrl: a GLM-4-MoE of a million parameters, warm-started on shell chores.

    python scripts/build_tiny_policy.py                    # writes agentrl/models/tiny, minutes on two cores
    python scripts/build_tiny_policy.py --evaluate         # plays with the one that is there, by kind

A scripted teacher (tiny/demos.py) shows how each chore is done; what its commands show comes from running them. Then
a sloppy one spoils the policy until it solves about two chores in five. What is left is a policy that knows every chore
and has bad habits: what a run of reinforcement has to find is there to be found.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from tiny import model as policy
from tiny import tokenizer as words
from tiny.demos import FINAL, RIGHT, SLOPPY, Demonstration, Habits, attempt
from tiny.play import Attempt, Speech
from tiny.reinforce import rehearse
from tiny.school import School, trial
from tiny.world import World
from tokenizers import Tokenizer
from transformers import Glm4MoeForCausalLM

from agentrl.rollout.observation import SYSTEM
from agentrl.tasks.chores import KINDS
from agentrl.tasks.chores.words import NAMES

TINY = Path(__file__).resolve().parents[1] / "agentrl" / "models" / "tiny"
TEACHING_SEEDS = 100_000  # far from those that a run is offered
console = Console(stderr=True)


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="tiny-policy-") as scratch:
        work = _rehearse if args.rehearse else _evaluate if args.evaluate else _build
        asyncio.run(work(args, Path(scratch)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TINY)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="namespace", help="sandbox backend that runs the commands")
    parser.add_argument("--per-kind", type=int, default=50, help="demonstrations of each kind that are run for real")
    parser.add_argument("--steps", type=int, default=1500, help="at most so many supervised steps in each of two parts")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--able", type=float, default=0.9, help="the first part ends at this mean reward")
    parser.add_argument("--target", type=float, default=0.35, help="the second part ends at this mean reward")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--evaluate", action="store_true", help="only play with the policy in --out")
    parser.add_argument("--rehearse", type=int, default=0, metavar="SEEDS", help="only try 20 steps of reinforcement")
    parser.add_argument("--rl-lr", type=float, default=3e-4)
    parser.add_argument("--lag", type=int, default=2, help="rehearsal: versions between playing and training")
    return parser.parse_args()


async def _build(args: argparse.Namespace, scratch: Path) -> None:
    rng = Random(args.seed)
    folder = scratch / "model"
    folder.mkdir()
    with _progress() as progress:
        async with World(scratch, backend=args.backend) as world:
            right = await _demonstrations(args.per_kind, world, RIGHT, rng, progress)
            sloppy = await _demonstrations(args.per_kind, world, SLOPPY, rng, progress)
            shutil.copy(TINY / "chat_template.jinja", folder)
            words.save(_tokenizer(right + sloppy), folder, policy.CONTEXT)
            policy.save_generation(folder)
            school = School(Speech(folder), world, rng, progress, batch=args.batch)
            model = policy.new(args.seed, school.speech.stops)
            await school.teach(model, right, lr=args.lr, steps=args.steps, until=lambda mean: mean >= args.able)
            await school.teach(
                model, sloppy, lr=args.lr / 10, steps=args.steps, until=lambda mean: mean <= args.target, every=20
            )
            report = await trial(model, school.speech, world, 16)
    model.save_pretrained(folder)
    policy.save_generation(folder)
    args.out.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        shutil.copyfile(file, args.out / file.name)
    _print(report, model)


async def _evaluate(args: argparse.Namespace, scratch: Path) -> None:
    model = Glm4MoeForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    async with World(scratch, backend=args.backend) as world:
        _print(await trial(model, Speech(args.out), world, 16), model)


async def _rehearse(args: argparse.Namespace, scratch: Path) -> None:
    speech = Speech(args.out)
    async with World(scratch, backend=args.backend) as world:
        for seed in range(args.rehearse):
            model = Glm4MoeForCausalLM.from_pretrained(args.out, dtype=torch.float32)
            curve = await rehearse(model, speech, world, steps=20, lr=args.rl_lr, lag=args.lag, seed=seed)
            first, last = sum(curve[:5]) / 5, sum(curve[-5:]) / 5
            console.print(f"seed {seed}, lr {args.rl_lr:g}, lag {args.lag}: first 5 {first:.3f}, last 5 {last:.3f}")
            console.print(" ".join(f"{reward:.2f}" for reward in curve))


async def _demonstrations(
    per_kind: int, world: World, habits: Habits, rng: Random, progress: Progress
) -> list[tuple[str, Demonstration]]:
    shown: list[tuple[str, Demonstration]] = []
    bar = progress.add_task("demonstrations, commands run for real", total=len(KINDS) * per_kind)
    for seed in range(TEACHING_SEEDS, TEACHING_SEEDS + per_kind):
        for kind in KINDS:
            async with world.room(kind, seed) as room:
                commands = attempt(kind, seed, habits, rng)
                turns = tuple([(command, await room.run(command)) for command in commands])
                shown.append((kind, Demonstration(room.task.instruction, turns)))
            progress.advance(bar)
    return shown


def _tokenizer(shown: list[tuple[str, Demonstration]]) -> Tokenizer:
    texts = [SYSTEM, FINAL, "shell\ncommand\n"] * 100
    for _, one in shown:
        texts += [one.instruction, *(text for turn in one.turns for text in turn)]
    return words.build(texts, NAMES, policy.VOCABULARY)


def _print(attempts: list[Attempt], model: Glm4MoeForCausalLM) -> None:
    by_kind: dict[str, list[Attempt]] = defaultdict(list)
    for one in attempts:
        by_kind[one.kind].append(one)
    table = Table("kind", "reward", "turns", "tokens", "malformed")
    for kind, group in [*by_kind.items(), ("all", attempts)]:
        size = len(group)
        table.add_row(
            kind,
            f"{sum(a.reward for a in group) / size:.2f}",
            f"{sum(a.turns for a in group) / size:.1f}",
            f"{sum(len(a.tokens) for a in group) / size:.0f}",
            f"{sum(a.malformed for a in group) / size:.2f}",
        )
    console.print(table)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters")


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )


if __name__ == "__main__":
    began = time.monotonic()
    main()
    console.print(f"{time.monotonic() - began:.0f} s")
