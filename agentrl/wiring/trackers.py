"""Experiment trackers that a recipe asks for: each step's line of metrics goes to them as well.

Imported only where `[telemetry]` names one; a missing package is an error before anything starts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from agentrl.errors import UnavailableError, UserError
from agentrl.recipe.schema import Recipe

log = logging.getLogger("agentrl.trackers")


class Tracker(Protocol):
    def step(self, line: Mapping[str, Any]) -> None:
        """One optimizer step, as in metrics.jsonl. Must not block for long: the run waits."""
        ...

    def close(self) -> None: ...


def trackers(recipe: Recipe, folder: Path) -> list[Tracker]:
    """Opened; the caller closes them. Blocking. UnavailableError where a package is missing, UserError where a service
    refuses."""
    asked: list[Tracker] = []
    if recipe.telemetry.tensorboard:
        _need("tensorboard", "telemetry.tensorboard")
        asked.append(TensorBoard(folder / "tensorboard"))
    if recipe.telemetry.wandb:
        _need("wandb", "telemetry.wandb")
        asked.append(WandB(recipe, folder))
    return asked


class Shown:
    """What hears each step's line: people, and the trackers. `close` closes those; blocking."""

    def __init__(self, people: Callable[[dict[str, Any]], None], tracked: Sequence[Tracker]) -> None:
        self._people = people
        self._tracked = tracked

    def __call__(self, line: dict[str, Any]) -> None:
        """A tracker that fails is no reason to lose a run: it is logged."""
        self._people(line)
        for tracker in self._tracked:
            try:
                tracker.step(line)
            except Exception as exc:
                log.warning("%s did not take step %s: %s", type(tracker).__name__, line.get("step"), exc)

    def close(self) -> None:
        for tracker in self._tracked:
            tracker.close()


def _need(package: str, key: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UnavailableError(
            f"{key}: the package {package} is not installed",
            hint=f"pip install 'agentrl[{package}]', or leave {key} out",
        )


def scalars(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Its figures by name, `age/max` for {"age": {"max": ...}}. What is absent or no number is left out."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)


class TensorBoard:
    """Event files in `folder`; a resumed run goes on in a file beside."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder))

    def step(self, line: Mapping[str, Any]) -> None:
        for name, value in scalars(line):
            self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of the project that `telemetry.wandb` names, resumed under the same id."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=recipe.telemetry.wandb,
                name=folder.resolve().name,
                id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
                dir=str(folder),
                config=msgspec.to_builtins(recipe),
                resume="allow",
                settings=wandb.Settings(silent=True),
            )
        except wandb.Error as exc:
            raise UserError(
                f"telemetry.wandb: {exc}", hint="log in with `wandb login`, or set WANDB_MODE=offline"
            ) from exc

    def step(self, line: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(line)), step=line["step"])

    def close(self) -> None:
        self._run.finish()
