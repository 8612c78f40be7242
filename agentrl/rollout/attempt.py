"""The turn loop: one conversation between a policy and a sandbox, from the task's words to a durable trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from agentrl.errors import DeadlineError, InfraError, TaskError
from agentrl.records import Blame, ExecResult, Place, Stop, Trajectory, Turn, TurnPayload, Verdict
from agentrl.rollout.actions import Malformed, Run, Submit, parse
from agentrl.rollout.generation import Generation, generate
from agentrl.rollout.observation import SYSTEM
from agentrl.rollout.order import Openings, Order, Ports
from agentrl.rollout.stops import stop_after
from agentrl.rollout.transcript import Transcript
from agentrl.rollout.workspace import Workspace, digest

__all__ = ["Openings", "Order", "Ports", "play"]


async def play(order: Order, ports: Ports) -> Trajectory:
    """Play one attempt to its end; the trajectory is durable when this returns.

    What the model does wrong is data in the trajectory. Raises TaskError where the task is broken and an InfraError
    where the world is; DeadlineError after order.deadline_s. The sandbox is given back on every path: by ports.later
    once the trajectory is durable, for its group waits for nothing more.
    """
    if order.resume and (kept := await ports.journal.kept(order.attempt)):
        return kept
    budget = asyncio.timeout(order.deadline_s)
    try:
        async with budget:
            return await _play(order, ports)
    except TimeoutError as exc:
        if not budget.expired():
            raise
        raise DeadlineError(f"{order.attempt}: not finished within {order.deadline_s:g} s") from exc


async def _play(order: Order, ports: Ports) -> Trajectory:
    past = await ports.journal.turns(order.attempt) if order.resume else []
    attempt = _Attempt(order, ports, past)
    workspace = attempt.workspace
    try:
        await workspace.open()
        while (stop := attempt.stop) is None:
            await attempt.turn()
        verdict = await workspace.grade(ports.verifier)
        _raise_ungraded(order, verdict)
        trajectory = attempt.trajectory(stop, verdict)
        await ports.journal.keep(trajectory)
    except BaseException:
        await workspace.close()
        raise
    if ports.later is None:
        await workspace.close()
    else:
        ports.later(workspace.close())
    return trajectory


class _Attempt:
    def __init__(self, order: Order, ports: Ports, past: Sequence[TurnPayload]) -> None:
        self._order = order
        self._ports = ports
        self._resumed = len(past)
        self._turns = [payload.turn for payload in past]
        if past:
            self._opening = len(past[0].opening)
            self._transcript = Transcript.rebuild(past)
            ports.began(past[0].spans[0].version)
        else:
            opening = ports.template.opening(order.system or SYSTEM, order.task.instruction)
            self._opening = len(opening)
            self._transcript = Transcript(opening)
        if self._opening >= order.context_tokens:
            raise TaskError(
                f"task {order.task.id}: its opening of {self._opening} tokens does not fit",
                hint=f"raise model.context_tokens ({order.context_tokens}) or shorten the instruction",
            )
        self.workspace = Workspace(ports.sandboxes, order, ports.new_rid()[:8], self._turns)
        # A turn without an observation was the last one, whichever rule ended it.
        self.stop = self._stop(full=bool(past) and not past[-1].observed)

    async def turn(self) -> None:
        """Generate, act, observe, and wait until that is durable."""
        order, ports, transcript = self._order, self._ports, self._transcript
        opening = tuple(transcript.tokens) if not self._turns else ()
        room = order.context_tokens - len(transcript)
        limit = min(order.sampling.max_new_tokens, room)
        generation = await generate(order, ports, transcript.tokens, limit, self._reusable)
        start, end = transcript.reply(generation.sampled)
        ports.openings.computed(order.attempt.group, generation.place)
        if not self._turns:
            ports.began(generation.sampled.spans[0].version)

        turn = self._describe(generation, start, end)
        turn, text = await self._act(turn, generation)
        observed = ports.template.observation(text, after=transcript.tokens[-1])
        self._turns.append(turn)
        self.stop = self._stop(full=len(transcript) + len(observed) >= order.context_tokens)
        if self.stop:
            observed = []  # nobody will read it
        turn = self._turns[-1] = msgspec.structs.replace(turn, observed_end=transcript.observe(observed))
        await self._record(turn, opening, generation, observed)

    async def _act(self, turn: Turn, generation: Generation) -> tuple[Turn, str]:
        """Do what the reply asks for; the turn with what came of it, and the observation."""
        action = parse(self._ports.template.decode(generation.sampled.tokens), cut=generation.cut)
        match action:
            case Run(command=command):
                result, text = await self.workspace.run(command, turn.index)
                return _with_result(turn, command, result, text), text
            case Malformed(reason=reason):
                return msgspec.structs.replace(turn, parse_error=reason), reason
            case Submit():
                return turn, ""

    async def _record(
        self, turn: Turn, opening: tuple[int, ...], generation: Generation, observed: Sequence[int]
    ) -> None:
        sampled = generation.sampled
        payload = TurnPayload(
            turn=turn,
            opening=opening,
            reply=tuple(sampled.tokens),
            logprobs=tuple(sampled.logprobs),
            spans=tuple(sampled.spans),
            observed=tuple(observed),
        )
        self._ports.journal.record_turn(self._order.attempt, payload)
        await self._ports.journal.flush()
        self.workspace.remember(turn)
        self._ports.turn_done(turn)

    def trajectory(self, stop: Stop, verdict: Verdict) -> Trajectory:
        transcript, order = self._transcript, self._order
        return Trajectory(
            attempt=order.attempt,
            task=order.task.id,
            kind=order.task.kind,
            tokens=tuple(transcript.tokens),
            trainable=tuple(transcript.trainable),
            logprobs=tuple(transcript.logprobs),
            spans=tuple(transcript.spans),
            turns=tuple(self._turns),
            stop=stop,
            verdict=verdict,
            began_s=self._turns[0].began_s,
            ended_s=self._ports.clock(),
            open_wait_s=self.workspace.open_wait_s,
            open_s=self.workspace.open_s,
        )

    def _describe(self, generation: Generation, start: int, end: int) -> Turn:
        return Turn(
            index=len(self._turns),
            start=start,
            end=end,
            observed_end=end,
            place=generation.place,
            prompt_tokens=generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
            reusable_tokens=generation.reusable_tokens,
            began_s=generation.began_s,
            engine_s=generation.engine_s,
            queue_s=generation.queue_s,
            prefill_s=generation.prefill_s,
            decode_s=generation.decode_s,
            regenerated=generation.regenerated,
        )

    def _stop(self, *, full: bool) -> Stop | None:
        task = self._order.task
        return stop_after(
            self._turns,
            max_turns=task.max_turns or self._order.max_turns,
            parse_limit=self._order.parse_limit,
            agent_timeout_s=task.agent_timeout_s,
            full=full,
        )

    def _reusable(self, place: Place) -> int:
        """Prompt tokens already computed at `place`: by this attempt's last turn there, or by a sibling's opening.

        The last token before a reply's end, and the prompt's own last one, are always computed anew.
        """
        mine = max((t.end - 1 for t in self._turns[self._resumed :] if t.place == place), default=0)
        siblings = self._opening if self._ports.openings.knows(self._order.attempt.group, place) else 0
        return min(max(mine, siblings), len(self._transcript) - 1)


def _with_result(turn: Turn, command: str, result: ExecResult, text: str) -> Turn:
    return msgspec.structs.replace(
        turn,
        command=command,
        exit_code=result.exit_code,
        output_sha=digest(text),
        lane=result.lane,
        tool_wait_s=result.queue_s,
        tool_s=result.run_s,
    )


def _raise_ungraded(order: Order, verdict: Verdict) -> None:
    """A failure is never a reward: without one, whoever is to blame is told."""
    if verdict.reward is not None:
        return
    what = f"{order.attempt}: task {order.task.id} could not be graded: {verdict.detail or 'no reason given'}"
    if verdict.blame is Blame.TASK:
        raise TaskError(what, hint=f"try its solution and tests by hand: {order.task.root}")
    raise InfraError(what)
