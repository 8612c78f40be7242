"""Who plays one attempt. Live, `rollout.attempt.play` against real ports; simulated, a model of it (`sim`).

The driver only knows this Protocol, so that both worlds run under the same core and the same driver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from agentrl import ports
from agentrl.errors import SandboxLost
from agentrl.records import AttemptId, Task, Trajectory, TrajectoryFacts, Turn, Version
from agentrl.rollout.attempt import play
from agentrl.rollout.order import Later, Openings, Order, Ports, Template
from agentrl.runtime.placement import Scatter
from agentrl.scheduler import commands as orders


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What a player tells while it plays: the first sampled token's version, each durable turn, the durable whole.
    later: takes over what is left to do then; None: the player does it before it returns."""

    began: Callable[[Version], None]
    turn: Callable[[Turn], None]
    ended: Callable[[Trajectory], None]
    later: Later | None = None


class Player(Protocol):
    async def play(
        self, start: orders.StartAttempt, task: Task, placement: ports.Placement, heard: Heard
    ) -> TrajectoryFacts:
        """The facts of a finished attempt, its trajectory durable by then. Raises typed errors of `errors`."""
        ...


@dataclass
class Scattered:
    """Plays as `player` does, but wherever `scatter` says, whatever the scheduler placed where: for benches."""

    player: Player
    scatter: Scatter

    async def play(
        self, start: orders.StartAttempt, task: Task, placement: ports.Placement, heard: Heard
    ) -> TrajectoryFacts:
        return await self.player.play(start, task, self.scatter, heard)


@dataclass(kw_only=True)
class LivePlayer:
    """template_order: what every attempt is told; attempt, task and resume are filled in here."""

    engines: dict[str, ports.Engine]
    hosts: dict[str, ports.SandboxHost]
    verifier: ports.Verifier
    journal: ports.Journal
    template: Template
    template_order: Order
    clock: Callable[[], float]
    new_rid: Callable[[], str]
    _openings: Openings = field(default_factory=Openings)

    async def play(
        self, start: orders.StartAttempt, task: Task, placement: ports.Placement, heard: Heard
    ) -> TrajectoryFacts:
        host = self.hosts.get(start.host)
        if host is None:
            raise SandboxLost(f"sandbox host {start.host} is gone")
        attempt = start.attempt
        if start.resume is not None:
            earlier = [AttemptId(attempt.group, attempt.member, t) for t in range(attempt.attempt)]
            self.journal.adopt(earlier, attempt)
        order = msgspec.structs.replace(
            self.template_order, attempt=attempt, task=task, resume=start.resume is not None
        )
        trajectory = await play(
            order,
            Ports(
                engines=self.engines,
                placement=placement,
                sandboxes=host,
                verifier=self.verifier,
                journal=self.journal,
                template=self.template,
                clock=self.clock,
                new_rid=self.new_rid,
                began=heard.began,
                turn_done=heard.turn,
                later=heard.later,
                openings=self._openings,
            ),
        )
        heard.ended(trajectory)
        return trajectory.facts
