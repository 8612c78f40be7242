"""What a live run left behind, for whoever measures it: its recipe, its summary, its kept trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import DataError, UserError
from agentrl.journal.reader import JournalReader
from agentrl.recipe.load import load
from agentrl.recipe.schema import Recipe
from agentrl.records import Trajectory
from agentrl.scheduler import events as news


@dataclass(frozen=True)
class Recorded:
    """steps: those of the summary, in order. trajectories: every kept one, in the order in which they ended."""

    folder: Path
    recipe: Recipe
    summary: dict[str, Any]
    trajectories: list[Trajectory]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return list(self.summary["steps"])


def read(folder: Path) -> Recorded:
    """Blocking. UserError where the folder holds no finished run, DataError where its journal is damaged."""
    missing = [name for name in ("recipe.toml", "summary.json", "run.sqlite") if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder}: no {missing[0]} here", hint="name the folder of a run, e.g. runs/local")
    reader = JournalReader(folder / "run.sqlite")
    ended = [
        event.facts.attempt
        for event in (news.decode(data) for _, data, _ in reader.events())
        if isinstance(event, news.AttemptEnded)
    ]
    found = [trajectory for attempt in dict.fromkeys(ended) if (trajectory := reader.trajectory(attempt)) is not None]
    try:
        summary = msgspec.json.decode((folder / "summary.json").read_bytes())
    except msgspec.DecodeError as exc:
        raise DataError(f"{folder / 'summary.json'}: not JSON ({exc})", hint="let the run finish a step") from exc
    return Recorded(folder, load(folder / "recipe.toml", checked=False), summary, found)
