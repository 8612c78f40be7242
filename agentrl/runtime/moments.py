"""When each batch was where on its way: its groups ready, dispatched, trained on, its weights ordered and live.

Fed every event after the core has handled it. A live run's telemetry feeds one, a report another from the journal.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentrl.records import GroupId, Version
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler import publication
from agentrl.scheduler.core import Core


class Moments(msgspec.Struct):
    """Seconds of the run's clock, each not before the one above it; None: not yet.

    step_began_s: by the trainer's own duration of the step. publish_began_s: the first order to bring this version, or
    a newer one, to an engine: in rounds that of the round's last step. live_s: every engine with work serves it.
    """

    batch: int
    ready_s: dict[GroupId, float]
    dispatched_s: float
    version: Version | None = None
    step_began_s: float | None = None
    step_ended_s: float | None = None
    publish_began_s: float | None = None
    live_s: float | None = None


class Timeline:
    """batches: by id, all that were dispatched."""

    def __init__(self) -> None:
        self.batches: dict[int, Moments] = {}
        self._ready: dict[GroupId, float] = {}  # of groups in the bank
        self._trained: list[Moments] = []  # not live yet

    def stepped(self, batch: int, version: Version, seconds: float, now: float) -> None:
        """The step has ended; said twice, the first counts."""
        moments = self.batches.get(batch)
        if moments is not None and moments.step_ended_s is None:
            moments.version, moments.step_ended_s = version, now
            moments.step_began_s = max(moments.dispatched_s, now - seconds)
            self._trained.append(moments)

    def heard(
        self, now: float, event: news.Event, commands: Sequence[orders.Command], core: Core
    ) -> tuple[list[Moments], list[Moments]]:
        """(dispatched by this event, live by it)."""
        match event:
            case news.AttemptEnded() | news.Resumed():
                for group, at in core.bank.items():
                    self._ready.setdefault(group, at)
            case news.StepFinished():
                self.stepped(event.batch, event.version, event.seconds, now)
            case _:
                pass
        return [moments for order in commands for moments in self._follow(now, order)], self._live(now, core)

    def _follow(self, now: float, order: orders.Command) -> list[Moments]:
        match order:
            case orders.TrainOn() if order.batch not in self.batches:
                ready = {proof.group: self._ready.pop(proof.group, now) for proof in order.proofs}
                self.batches[order.batch] = Moments(order.batch, ready, now)
                return [self.batches[order.batch]]
            case orders.DropGroup():
                self._ready.pop(order.group, None)
            case orders.StageWeights():
                for moments in self._trained:
                    if moments.publish_began_s is None and (moments.version or 0) <= order.version:
                        moments.publish_began_s = now
            case _:
                pass
        return []

    def _live(self, now: float, core: Core) -> list[Moments]:
        if not self._trained:
            return []
        served = publication.live_version(core.engines, Version(-1))
        live = [moments for moments in self._trained if (moments.version or 0) <= served]
        for moments in live:
            if moments.publish_began_s is None:  # engines that were started anew came with it
                moments.publish_began_s = now
            moments.live_s = now
            self._trained.remove(moments)
        return live
