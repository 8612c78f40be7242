"""What a bench changes of a live run and no recipe can: how calls are routed, whether there are lanes, who trains."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Literal

import msgspec

from agentrl import ports
from agentrl.recipe.schema import Recipe
from agentrl.records import Batch, GroupProof, Record, Span, StepReport, Trajectory, Version
from agentrl.runtime.collector import Collector
from agentrl.runtime.placement import Scatter
from agentrl.runtime.player import LivePlayer, Player, Scattered


class Trial(Record):
    """A run as its recipe says, but for this.

    weights: published: after each step. collected: no trainer, batches are kept as files. unpublished: each batch is
    trained on and its weights are saved, but to the run its trainer holds version 0 for ever: what a run costs without
    publication. per_request: each call goes to a random rank. pooled: one pool of CPUs without caps, no lanes.
    """

    weights: Literal["published", "collected", "unpublished"] = "published"
    per_request: bool = False
    pooled: bool = False

    @property
    def trains(self) -> bool:
        return self.weights != "collected"

    def trainer(self, desk: ports.Trainer, folder: Path, store: ports.WeightStore, keep: int) -> ports.Trainer:
        if self.weights == "collected":
            return Collector(folder / "batches", Version(0))
        return Unpublished(desk, store, keep) if self.weights == "unpublished" else desk

    def player(self, player: LivePlayer, recipe: Recipe) -> Player:
        if not self.per_request:
            return player
        return Scattered(player, Scatter(player.engines, recipe.engines.ranks, Random(f"{recipe.seed}/scatter")))


AS_IT_IS = Trial()


class Unpublished:
    """ports.Trainer around one that trains; not resumable. Its batches say that their tokens are of the version that it
    holds, so that it does for each token what it would do for a fresh one. keep: of its versions, on disk."""

    def __init__(self, inner: ports.Trainer, store: ports.WeightStore, keep: int) -> None:
        self._inner = inner
        self._store = store
        self._keep = keep
        self._held = Version(0)
        self._idle = asyncio.Event()  # no step is under way: the trainer may ask again before its step is reported
        self._idle.set()

    async def wait_ready(self) -> Version:
        await self._inner.wait_ready()
        await self._idle.wait()
        return Version(0)

    async def step(self, batch: Batch) -> StepReport:
        self._idle.clear()
        report = await self._inner.step(_as_of(batch, self._held))
        self._held = report.version
        await asyncio.to_thread(self._store.prune, self._keep, (Version(0),))
        self._idle.set()
        return msgspec.structs.replace(report, version=batch.version)

    async def aclose(self) -> None:
        await self._inner.aclose()


def _as_of(batch: Batch, version: Version) -> Batch:
    """The same batch with `version` for its own."""

    def proof(made: GroupProof) -> GroupProof:
        trained = sum(count for _, count in made.tokens)
        return msgspec.structs.replace(made, oldest=version, tokens=((version, trained),))

    def spans(trajectory: Trajectory) -> Trajectory:
        moved = tuple(Span(span.start, span.end, version) for span in trajectory.spans)
        return msgspec.structs.replace(trajectory, spans=moved)

    return msgspec.structs.replace(
        batch,
        version=version,
        proofs=tuple(map(proof, batch.proofs)),
        trajectories=tuple(map(spans, batch.trajectories)),
    )
