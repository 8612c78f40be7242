"""Makes the tiny policy that ships with agentrl: a GLM-4-MoE of a million parameters, warm-started on shell chores.

    python scripts/build_tiny_policy.py                    # writes agentrl/models/tiny, minutes on two cores
    python scripts/build_tiny_policy.py --evaluate         # plays with the one that is there, by kind

The teacher is scripted and noisy (tiny/demos.py); what its commands show comes from running them. The policy learns
from its own words only, and stops where it solves about two chores in five: reinforcement is to find the rest.
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
from tiny.demos import FINAL, Demonstration, Habits, attempt
from tiny.demos import renamed as rename
from tiny.play import Attempt, Speech, play
from tiny.reinforce import rehearse
from tiny.world import World

from agentrl.rollout.observation import SYSTEM
from agentrl.tasks.chores import KINDS
from agentrl.tasks.chores.words import NAMES

TINY = Path(__file__).resolve().parents[1] / "agentrl" / "models" / "tiny"
TEACHING_SEEDS = 100_000  # far from those that a run is offered
TRIAL_SEEDS = 200_000
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
    parser.add_argument("--per-kind", type=int, default=150, help="demonstrations of each kind that are run for real")
    parser.add_argument("--steps", type=int, default=1600, help="at most so many supervised steps")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--target", type=float, default=0.38, help="stop at this mean reward")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate", action="store_true", help="only play with the policy in --out")
    parser.add_argument("--rehearse", type=int, default=0, metavar="SEEDS", help="only try 20 steps of reinforcement")
    parser.add_argument("--rl-lr", type=float, default=3e-4)
    parser.add_argument("--lag", type=int, default=2, help="rehearsal: versions between playing and training")
    return parser.parse_args()


async def _build(args: argparse.Namespace, scratch: Path) -> None:
    rng = Random(args.seed)
    with _progress() as progress:
        async with World(scratch, backend=args.backend) as world:
            shown = await _demonstrations(args, world, rng, progress)
            folder = scratch / "model"
            folder.mkdir()
            shutil.copy(TINY / "chat_template.jinja", folder)
            words.save(_tokenizer(shown), folder, policy.CONTEXT)
            policy.save_generation(folder)
            speech = Speech(folder)
            model = policy.new(args.seed, speech.stops)
            await _train(args, model, speech, shown, world, rng, progress)
            report = await _trial(model, speech, world, 16)
    model.save_pretrained(folder)
    policy.save_generation(folder)
    args.out.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        shutil.copy(file, args.out)
    _print(report, model)


async def _evaluate(args: argparse.Namespace, scratch: Path) -> None:
    model = policy.Glm4MoeForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    async with World(scratch, backend=args.backend) as world:
        _print(await _trial(model, Speech(args.out), world, 16), model)


async def _rehearse(args: argparse.Namespace, scratch: Path) -> None:
    speech = Speech(args.out)
    async with World(scratch, backend=args.backend) as world:
        for seed in range(args.rehearse):
            model = policy.Glm4MoeForCausalLM.from_pretrained(args.out, dtype=torch.float32)
            curve = await rehearse(model, speech, world, steps=20, lr=args.rl_lr, lag=args.lag, seed=seed)
            first, last = sum(curve[:5]) / 5, sum(curve[-5:]) / 5
            console.print(f"seed {seed}, lr {args.rl_lr:g}, lag {args.lag}: first 5 {first:.3f}, last 5 {last:.3f}")
            console.print(" ".join(f"{reward:.2f}" for reward in curve))


async def _demonstrations(
    args: argparse.Namespace, world: World, rng: Random, progress: Progress
) -> list[tuple[str, Demonstration]]:
    shown: list[tuple[str, Demonstration]] = []
    bar = progress.add_task("demonstrations, commands run for real", total=len(KINDS) * args.per_kind)
    for number in range(args.per_kind):
        for kind in KINDS:
            seed = TEACHING_SEEDS + number
            async with world.room(kind, seed) as room:
                commands = attempt(kind, seed, Habits(), rng)
                turns = tuple([(command, await room.run(command)) for command in commands])
                shown.append((kind, Demonstration(room.task.instruction, turns)))
            progress.advance(bar)
    return shown


def _tokenizer(shown: list[tuple[str, Demonstration]]) -> words.Tokenizer:
    texts = [SYSTEM, FINAL, "shell\ncommand\n"] * 100
    for _, one in shown:
        texts += [one.instruction, *(text for turn in one.turns for text in turn)]
    return words.build(texts, NAMES, policy.VOCABULARY)


async def _train(
    args: argparse.Namespace,
    model: policy.Glm4MoeForCausalLM,
    speech: Speech,
    shown: list[tuple[str, Demonstration]],
    world: World,
    rng: Random,
    progress: Progress,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    warm = 50
    bar = progress.add_task("supervised steps", total=args.steps)
    for step in range(args.steps):
        scale = min(1.0, (step + 1) / warm) * max(0.1, 1 - step / args.steps)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * scale
        batch = [speech.script(kind, rename(one, rng)) for kind, one in rng.sample(shown, args.batch)]
        chosen, counts = policy.logprobs(model, [(a.tokens, a.trainable) for a in batch])
        loss = -(chosen * counts).sum() / counts.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.update(bar, advance=1, description=f"supervised steps, loss {loss.item():.3f}")
        if (step + 1) % 100 == 0 and step + 1 >= args.steps // 4:
            trial = await _trial(model, speech, world, 4, seed=step)
            mean = sum(a.reward for a in trial) / len(trial)
            progress.console.print(f"step {step + 1}: loss {loss.item():.3f}, mean reward {mean:.3f}")
            if mean >= args.target:
                break


async def _trial(
    model: policy.Glm4MoeForCausalLM, speech: Speech, world: World, per_kind: int, seed: int = 0
) -> list[Attempt]:
    torch.manual_seed(seed)
    problems = [(kind, TRIAL_SEEDS + 1000 * seed + number) for number in range(per_kind) for kind in KINDS]
    attempts: list[Attempt] = []
    for start in range(0, len(problems), 84):
        attempts += await play(model, speech, world, problems[start : start + 84])
    return attempts


def _print(attempts: list[Attempt], model: policy.Glm4MoeForCausalLM) -> None:
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
