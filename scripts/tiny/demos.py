"""Demonstrations: the way it is done, and the way a hasty, absent-minded teacher does it.

Every kind of chore suffers from the same weaknesses at the same rates, so that a policy that picked them up still does
the right thing with real probability on every kind, and what it unlearns on one kind helps it with the others.
"""

from __future__ import annotations

import re
from random import Random

import msgspec

from agentrl.tasks.chores import demo
from agentrl.tasks.chores.words import NAMES

FINAL = "done"
_NAME = re.compile(rf"\b({'|'.join(NAMES)})\b")
_CONFUSED = {
    "echo": "cat", "mv": "cp", "cp": "mv", "rm": "ls", "wc": "sort", "sort": "cat", "grep": "sort", "sed": "grep",
    "cat": "ls", "head": "tail", "tr": "cat", "chmod": "cat", "ln": "cp", "tar": "ls", "mkdir": "touch",
    "touch": "mkdir", "ls": "cat",
}  # fmt: skip


class Habits(msgspec.Struct, frozen=True):
    """Shares of attempts. The rest of them is done right."""

    hasty: float  # leaves the last command out
    slip: float  # one name is wrong
    confused: float  # the wrong command
    look: float  # begins with ls, whatever follows


RIGHT = Habits(hasty=0.0, slip=0.0, confused=0.0, look=0.5)
SLOPPY = Habits(hasty=0.5, slip=0.1, confused=0.1, look=0.5)


def attempt(kind: str, seed: int, habits: Habits, rng: Random) -> list[str]:
    """The commands of one attempt, right or wrong."""
    script = demo(kind, seed)
    at = rng.randrange(len(script))
    roll = rng.random()
    if roll < habits.hasty:
        script = script[:-1]
    elif roll < habits.hasty + habits.slip:
        script[at] = _slip(script[at], rng)
    elif roll < habits.hasty + habits.slip + habits.confused:
        word, _, rest = script[at].partition(" ")
        script[at] = f"{_CONFUSED[word]} {rest}".strip()
    return ["ls", *script] if rng.random() < habits.look else script


def _slip(command: str, rng: Random) -> str:
    found = list(_NAME.finditer(command))
    if not found:
        return "ls"
    match = rng.choice(found)
    others = [name for name in {m[0] for m in found} | set(rng.sample(NAMES, 2)) if name != match[0]]
    return command[: match.start()] + rng.choice(sorted(others)) + command[match.end() :]


class Demonstration(msgspec.Struct, frozen=True):
    """turns: (command, what it showed). It ends with FINAL."""

    instruction: str
    turns: tuple[tuple[str, str], ...]


def renamed(shown: Demonstration, rng: Random) -> Demonstration:
    """The same attempt in a world where all names are exchanged: just as true, and new to the policy."""
    exchange = dict(zip(NAMES, rng.sample(NAMES, len(NAMES)), strict=True))

    def swap(text: str) -> str:
        return _NAME.sub(lambda match: exchange[match[0]], text)

    turns = []
    for command, output in shown.turns:
        seen = swap(output)
        turns.append((swap(command), "\n".join(sorted(seen.split("\n"))) if command == "ls" else seen))
    return Demonstration(swap(shown.instruction), tuple(turns))
