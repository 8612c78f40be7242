"""Plays attempts against the fleet's models as the live turn loop plays them against real ports, without tokens.

reset, then turns (generate where the placement points, operate the sandbox), verify; closing is left to whoever takes
it over. What finished survives: a resumed attempt brings a fresh sandbox to the same state by doing its operations
again, then goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.errors import EngineLost, SandboxLost
from agentrl.ports import Placement
from agentrl.records import (
    AttemptId,
    GroupId,
    Place,
    Record,
    Task,
    TrajectoryFacts,
    Turn,
    Version,
)
from agentrl.scheduler.commands import StartAttempt
from agentrl.sim.fleet.controller import Controller
from agentrl.sim.fleet.engine import EngineModel
from agentrl.sim.fleet.host import HostModel
from agentrl.sim.fleet.ops import AttemptPlan, Op, Plans, TurnPlan
from agentrl.sim.fleet.rank import SimReply

if TYPE_CHECKING:
    from agentrl.runtime.player import Heard

_LOSSES = 8  # of one turn
_REMEMBERED = 65_536  # unfinished members kept for a resume, and openings for the statistics of reuse


class PlayerRules(Record):
    """keep_partial: tokens of an aborted generation are kept and continued; otherwise the turn is sampled anew.
    reuse_across_versions: history computed by other weights may be reused (the live engine client never does)."""

    keep_partial: bool = True
    reuse_across_versions: bool = False
    move_timeout_s: float = 120.0


@dataclass(slots=True)
class _Past:
    """What one attempt has done so far: durable at every turn."""

    turns: int = 0
    tokens: int = 0  # whole transcript
    generated: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reusable_tokens: int = 0
    regenerated: int = 0
    engine_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    tool_s: float = 0.0
    tool_wait_s: float = 0.0
    opened: tuple[float, float] = (0.0, 0.0)  # (queued, run), of the try's sandbox
    versions: dict[Version, int] = field(default_factory=dict)  # in order of appearance
    homes: dict[Place, int] = field(default_factory=dict)  # tokens computed at each place by this try


@dataclass(slots=True)
class _Sampled:
    """One turn's reply over all calls it took; prompt and reuse are those of the first."""

    place: Place
    began_s: float
    reusable: int = 0
    first: SimReply | None = None
    spans: list[tuple[Version, int]] = field(default_factory=list)
    tokens: int = 0
    regenerated: int = 0
    engine_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def add(self, reply: SimReply, seconds: float) -> None:
        self.spans.extend(reply.spans)
        self.tokens += reply.tokens
        self.engine_s += seconds
        self.queue_s += reply.queue_s
        self.prefill_s += reply.prefill_s
        self.decode_s += reply.decode_s


class FleetPlayer:
    """`runtime.player.Player`. The mappings may change while it plays: what is not in them is lost. controller: None
    where its work costs nothing."""

    def __init__(
        self,
        *,
        engines: Mapping[str, EngineModel],
        hosts: Mapping[str, HostModel],
        plans: Plans,
        clock: Callable[[], float],
        rules: PlayerRules | None = None,
        controller: Controller | None = None,
    ) -> None:
        self._engines = engines
        self._hosts = hosts
        self._plans = plans
        self._clock = clock
        self._rules = rules or PlayerRules()
        self._controller = controller
        self._pasts: OrderedDict[tuple[GroupId, int], _Past] = OrderedDict()
        self._openings: OrderedDict[tuple[GroupId, Place], None] = OrderedDict()

    async def play(self, start: StartAttempt, task: Task, placement: Placement, heard: Heard) -> TrajectoryFacts:
        """The facts of a finished attempt. Raises EngineLost, SandboxLost, DeadlineError."""
        host = self._hosts.get(start.host)
        if host is None:
            raise SandboxLost(f"sandbox host {start.host} is gone")
        attempt = start.attempt
        plan = self._plans.plan(task.id, attempt.member)
        past = self._past(attempt, resume=start.resume is not None)
        host.live += 1
        host.peak = max(host.peak, host.live)
        try:
            if self._controller is not None:
                await self._controller.start()
            await self._open(host, plan, past, heard)
            for index in range(past.turns, len(plan.turns)):
                await self._turn(attempt, index, plan, past, host, placement, heard)
            verified = await _operate(host, plan.verify)
            if self._controller is not None:
                await self._controller.attempt()
        except BaseException:
            host.live -= 1
            if not host.lost:
                host.post(plan.cleanup.lane, plan.cleanup.cpu_s, plan.cleanup.wait_s)
            raise
        if heard.later is None:
            await _close(host, plan)
        else:
            heard.later(_close(host, plan))
        self._pasts.pop((attempt.group, attempt.member), None)
        return _facts(attempt, plan, past, verified)

    def _past(self, attempt: AttemptId, *, resume: bool) -> _Past:
        key = (attempt.group, attempt.member)
        past = self._pasts.pop(key, None) if resume else None
        past = self._pasts[key] = past or _Past()
        _bound(self._pasts)
        return past

    async def _open(self, host: HostModel, plan: AttemptPlan, past: _Past, heard: Heard) -> None:
        if past.turns:
            past.homes.clear()
            heard.began(next(iter(past.versions)))
        past.opened = await _operate(host, plan.reset)
        for turn in plan.turns[: past.turns]:
            if turn.op is not None:
                await _operate(host, turn.op)

    async def _turn(
        self,
        attempt: AttemptId,
        index: int,
        plan: AttemptPlan,
        past: _Past,
        host: HostModel,
        placement: Placement,
        heard: Heard,
    ) -> None:
        todo = plan.turns[index]
        start = past.tokens or plan.opening
        sampled = await self._sample(attempt, plan.opening, start, todo.new_tokens, past, placement)
        if index == 0:
            heard.began(sampled.spans[0][0])
        queue_s, run_s = await _operate(host, todo.op) if todo.op is not None else (0.0, 0.0)
        if self._controller is not None:
            await self._controller.turn()
        turn = _turn(index, start, todo, sampled, queue_s, run_s)
        _remember(past, turn, sampled.spans)
        heard.turn(turn)

    async def _sample(
        self, attempt: AttemptId, opening: int, prompt: int, wanted: int, past: _Past, placement: Placement
    ) -> _Sampled:
        """Sample `wanted` tokens, whatever the engines do meanwhile."""
        place = placement.place
        sampled = _Sampled(place, self._clock())
        while sampled.tokens < wanted:
            place = placement.place
            began = self._clock()
            engine = self._engines.get(place.engine)
            try:
                if engine is None:
                    raise EngineLost(f"{place.engine}: no such engine any more")
                reply = await engine.generate(
                    (attempt.group, attempt.member),
                    attempt.group,
                    rank=place.rank,
                    prompt_tokens=prompt + sampled.tokens,
                    new_tokens=wanted - sampled.tokens,
                    namespace=0 if self._rules.reuse_across_versions else None,
                    shared_tokens=opening,
                )
            except EngineLost:
                sampled.regenerated += 1
                if sampled.regenerated > _LOSSES:
                    raise
                await placement.wait_moved(place, deadline_s=self._rules.move_timeout_s)
                continue
            if sampled.first is None:
                sampled.reusable = self._reusable(attempt, opening, prompt, past, place)
                sampled.first = reply
            sampled.place = place
            if reply.finish == "abort" and not self._rules.keep_partial:
                sampled.regenerated += 1
                continue
            sampled.add(reply, self._clock() - began)
        self._openings[attempt.group, place] = None
        _bound(self._openings)
        past.homes[place] = prompt + wanted - 1
        return sampled

    def _reusable(self, attempt: AttemptId, opening: int, prompt: int, past: _Past, place: Place) -> int:
        """Prompt tokens already computed at `place`: by this attempt's last turn there, or by a sibling's opening."""
        siblings = opening if (attempt.group, place) in self._openings else 0
        return min(max(past.homes.get(place, 0), siblings), prompt - 1)


async def _close(host: HostModel, plan: AttemptPlan) -> None:
    try:
        await _operate(host, plan.cleanup)
    finally:
        host.live -= 1


async def _operate(host: HostModel, op: Op) -> tuple[float, float]:
    return await host.run(op.lane, op.cpu_s, op.wait_s, width=op.width)


def _bound(table: OrderedDict[Any, Any]) -> None:
    if len(table) > _REMEMBERED:
        table.popitem(last=False)


def _turn(index: int, start: int, todo: TurnPlan, sampled: _Sampled, queue_s: float, run_s: float) -> Turn:
    assert sampled.first is not None
    end, op = start + todo.new_tokens, todo.op
    return Turn(
        index=index,
        start=start,
        end=end,
        observed_end=end + todo.observed_tokens,
        place=sampled.place,
        prompt_tokens=start,
        cached_tokens=sampled.first.cached_tokens,
        reusable_tokens=sampled.reusable,
        command=None if op is None else op.lane,
        exit_code=None if op is None else 0,
        lane=None if op is None else op.lane,
        began_s=sampled.began_s,
        engine_s=sampled.engine_s,
        queue_s=sampled.queue_s,
        prefill_s=sampled.prefill_s,
        decode_s=sampled.decode_s,
        tool_wait_s=queue_s,
        tool_s=run_s,
        regenerated=sampled.regenerated,
    )


def _remember(past: _Past, turn: Turn, spans: list[tuple[Version, int]]) -> None:
    past.turns += 1
    past.tokens = turn.observed_end
    past.generated += turn.end - turn.start
    past.prompt_tokens += turn.prompt_tokens
    past.cached_tokens += turn.cached_tokens
    past.reusable_tokens += turn.reusable_tokens
    past.regenerated += turn.regenerated
    past.engine_s += turn.engine_s
    past.queue_s += turn.queue_s
    past.prefill_s += turn.prefill_s
    past.tool_s += turn.tool_wait_s + turn.tool_s
    past.tool_wait_s += turn.tool_wait_s
    for version, tokens in spans:
        past.versions[version] = past.versions.get(version, 0) + tokens


def _facts(attempt: AttemptId, plan: AttemptPlan, past: _Past, verified: tuple[float, float]) -> TrajectoryFacts:
    return TrajectoryFacts(
        attempt=attempt,
        reward=plan.reward,
        tokens=past.tokens,
        generated=past.generated,
        versions=tuple(sorted(past.versions.items())),
        turns=past.turns,
        prompt_tokens=past.prompt_tokens,
        cached_tokens=past.cached_tokens,
        reusable_tokens=past.reusable_tokens,
        regenerated=past.regenerated,
        engine_s=past.engine_s,
        queue_s=past.queue_s,
        prefill_s=past.prefill_s,
        tool_s=past.tool_s,
        tool_wait_s=past.tool_wait_s,
        open_wait_s=past.opened[0],
        open_s=past.opened[1],
        verify_wait_s=verified[0],
        verify_s=verified[1],
        stop=plan.stop,
    )
