"""The turn loop, every way it can go. Engines, sandboxes and the journal are the in-memory ports of agentrl.sim."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import AgentRLError, DeadlineError, EngineLost, InfraError, ReplayDiverged, SandboxLost, TaskError
from agentrl.records import Blame, Place, Sampling, Span, Stop, Trajectory, Turn, Verdict, Version
from agentrl.rollout.attempt import Ports, play
from agentrl.rollout.order import Openings
from agentrl.sim.memory import MemoryJournal, MemorySandboxHost, MemoryVerifier
from agentrl.sim.scripted import Hang, Meanwhile, MovablePlacement, Raise, Say, ScriptedEngine
from tests.builders import TEMPLATE, answer, attempt_id, call, fake_ports, order, task

E1 = Place("e1", 0)


def played(ports: Ports, **changes: Any) -> Trajectory:
    return asyncio.run(play(order(**changes), ports))


def fails(error: type[AgentRLError], ports: Ports, **changes: Any) -> str:
    with pytest.raises(error) as caught:
        played(ports, **changes)
    assert not ports.sandboxes.live
    return str(caught.value)


def text(trajectory: Trajectory) -> str:
    return TEMPLATE.decode(trajectory.tokens)


def test_a_solved_task() -> None:
    ports = fake_ports(call("add done"), call("show"), answer())
    result = played(ports)
    assert (result.stop, result.verdict.reward, len(result.turns)) == (Stop.SUBMITTED, 1.0, 3)
    assert [turn.command for turn in result.turns] == ["add done", "show", None]
    assert not ports.sandboxes.live
    assert asyncio.run(ports.journal.load([result.attempt])) == [result]
    assert asyncio.run(ports.journal.turns(result.attempt)) == []


def test_a_group_does_not_wait_for_the_return_of_a_sandbox() -> None:
    """Once the trajectory is durable, whoever takes what is left gets the return of the sandbox; a failure has no
    later."""
    left: list[Coroutine[None, None, None]] = []

    async def scenario() -> None:
        ports = fake_ports(call("add done"), answer(), later=left.append)
        trajectory = await play(order(), ports)
        assert len(ports.sandboxes.live) == 1
        assert await ports.journal.load([trajectory.attempt]) == [trajectory]
        await left.pop()
        assert not ports.sandboxes.live

    asyncio.run(scenario())
    fails(InfraError, fake_ports(answer(), verifier=MemoryVerifier([Verdict(reward=None)]), later=left.append))
    assert not left


def test_tokens_in_are_tokens_out() -> None:
    ports = fake_ports(call("add done"), call("count 3"), answer())
    result = played(ports)
    first, second, third = ports.engines["e0"].prompts
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert list(result.tokens[: len(third)]) == third
    said = [t for t, mine in zip(result.tokens, result.trainable, strict=True) if mine]
    assert said == [*call("add done").ids, *call("count 3").ids, *answer().ids]
    assert [(s.start, s.end) for s in result.spans] == [(turn.start, turn.end) for turn in result.turns]
    assert result.tokens.count(TEMPLATE.OBSERVATION) == 2  # the stop token that opens an observation is not doubled
    assert "[exit 3]" in text(result)


def test_reuse_counts_what_this_attempt_computed_before() -> None:
    result = played(fake_ports(call("add done"), call("show"), answer()))
    assert [turn.reusable_tokens for turn in result.turns] == [0, result.turns[0].end - 1, result.turns[1].end - 1]
    assert [turn.cached_tokens for turn in result.turns] == [turn.reusable_tokens for turn in result.turns]


def test_reuse_counts_a_siblings_opening_at_the_same_place_only() -> None:
    openings = Openings()
    engines = fake_ports(answer(), answer()).engines
    played(fake_ports(engines=engines, openings=openings))
    sibling = played(fake_ports(engines=engines, openings=openings), attempt=attempt_id(member=1))
    stranger = played(fake_ports(answer(), openings=openings), attempt=attempt_id(group=2))
    turn = sibling.turns[0]
    assert turn.reusable_tokens == turn.cached_tokens == turn.prompt_tokens - 1
    assert stranger.turns[0].reusable_tokens == 0


def test_openings_forget_the_oldest() -> None:
    openings = Openings(limit=2)
    for group in range(3):
        openings.computed(attempt_id(group).group, E1)
    assert [openings.knows(attempt_id(group).group, E1) for group in range(3)] == [False, True, True]


# --- stops: all data ------------------------------------------------------------------------------------------------


def test_turn_limit_and_the_last_command_still_counts() -> None:
    ports = fake_ports(call("count 1"), call("add done"))
    result = played(ports, max_turns=2)
    assert (result.stop, result.verdict.reward) == (Stop.TURN_LIMIT, 1.0)
    assert result.turns[-1].observed_end == result.turns[-1].end == len(result.tokens)


def test_the_tasks_own_turn_limit_wins() -> None:
    assert len(played(fake_ports(call("show"), call("show")), task=task(max_turns=1)).turns) == 1


def test_malformed_replies_are_shown_their_fault() -> None:
    two = Say((*call("show").ids[:-1], *call("show").ids))
    result = played(fake_ports(two, call("add done"), answer()))
    assert result.turns[0].parse_error.startswith("2 tool calls")
    assert "2 tool calls in one reply" in text(result)
    assert (result.stop, result.verdict.reward) == (Stop.SUBMITTED, 1.0)


def test_parse_limit_counts_in_a_row() -> None:
    bad = Say((*TEMPLATE.encode("<tool_call>"), TEMPLATE.END))
    result = played(fake_ports(bad, call("show"), bad, bad), parse_limit=2)
    assert (result.stop, len(result.turns)) == (Stop.PARSE_LIMIT, 4)


def test_a_reply_cut_at_its_limit_is_malformed() -> None:
    result = played(fake_ports(call("add done"), answer()), sampling=Sampling(max_new_tokens=10))
    assert "cut at its token limit" in result.turns[0].parse_error
    assert result.turns[0].end - result.turns[0].start == 10


def test_context_full_by_an_observation_that_does_not_fit() -> None:
    ports = fake_ports(call("add done"), call("show"), call("show"), call("show"))
    result = played(ports, context_tokens=220)
    assert result.stop is Stop.CONTEXT_FULL
    assert len(result.tokens) <= 220
    assert result.verdict.reward == 1.0


def test_context_full_by_the_reply_itself() -> None:
    result = played(fake_ports(call("x" * 300)), context_tokens=100)
    assert (result.stop, len(result.tokens)) == (Stop.CONTEXT_FULL, 100)


def test_the_agents_time_is_its_own() -> None:
    """The clock ticks once a reading: 1 s for each engine call."""
    ports = fake_ports(call("show"), call("show"), call("show"))
    assert len(played(ports, task=task(agent_timeout_s=2.0)).turns) == 2


# --- engines --------------------------------------------------------------------------------------------------------


def test_a_lost_engine_costs_one_turn_only() -> None:
    placement = MovablePlacement(Place("e0", 0))
    e0 = ScriptedEngine("e0", [call("add done"), Meanwhile(lambda: placement.move(E1), Raise(EngineLost("gone")))])
    e1 = ScriptedEngine("e1", [call("show"), answer()], version=1)
    result = played(fake_ports(placement=placement, engines={"e0": e0, "e1": e1}))
    assert [turn.regenerated for turn in result.turns] == [0, 1, 0]
    assert [turn.place.engine for turn in result.turns] == ["e0", "e1", "e1"]
    assert [span.version for span in result.spans] == [0, 1, 1]
    assert [turn.reusable_tokens for turn in result.turns] == [0, 0, result.turns[1].end - 1]
    assert e1.prompts[0] == e0.prompts[1]


def test_the_turn_waits_for_another_place_to_be_named() -> None:
    async def scenario() -> Trajectory:
        ports = fake_ports(Raise(EngineLost("gone")))
        ports.engines["e1"].script.append(answer())
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(play(order(), ports))
            group.create_task(ports.placement.waited_for()).add_done_callback(lambda _: ports.placement.move(E1))
        return playing.result()

    assert asyncio.run(scenario()).turns[0].place == E1


def test_no_engine_left_in_time() -> None:
    fails(DeadlineError, fake_ports(Raise(EngineLost("gone"))), move_timeout_s=0.01)


def test_an_engine_that_left_the_fleet_is_lost() -> None:
    ports = fake_ports()
    ports.placement.move(Place("e9", 0))
    fails(DeadlineError, ports, move_timeout_s=0.01)


def test_engines_that_keep_failing_end_the_attempt() -> None:
    class Restless:
        place = Place("e0", 0)

        async def wait_moved(self, away_from: Place, *, deadline_s: float) -> Place:
            return self.place

    ports = fake_ports(*[Raise(EngineLost("gone"))] * 20, placement=Restless())
    fails(EngineLost, ports)
    assert len(ports.engines["e0"].prompts) == 9


def test_an_aborted_reply_goes_on_from_its_partial() -> None:
    whole = call("add done")
    ports = fake_ports(Say(whole.ids, abort_after=7), answer())
    result = played(ports)
    assert result.tokens[result.turns[0].start : result.turns[0].end] == whole.ids
    assert result.spans[0] == Span(result.turns[0].start, result.turns[0].end, Version(0))
    assert ports.engines["e0"].prompts[1] == ports.engines["e0"].prompts[0] + list(whole.ids[:7])
    assert result.turns[0].prompt_tokens == result.turns[0].start


def test_a_partial_survives_the_loss_of_the_next_engine() -> None:
    whole = call("add done").ids
    placement = MovablePlacement(Place("e0", 0))
    lost = Meanwhile(lambda: placement.move(E1), Raise(EngineLost("gone")))
    e0 = ScriptedEngine("e0", [Say(whole[:7], abort_after=7), lost])
    e1 = ScriptedEngine("e1", [Say(whole[7:]), answer()], version=1)
    result = played(fake_ports(placement=placement, engines={"e0": e0, "e1": e1}))
    assert result.tokens[result.turns[0].start : result.turns[0].end] == whole
    assert [(s.end - s.start, s.version) for s in result.spans][:2] == [(7, 0), (len(whole) - 7, 1)]
    assert result.turns[0].regenerated == 1


def test_a_partial_that_used_the_whole_budget_is_cut() -> None:
    result = played(fake_ports(Say(call("show").ids, abort_after=10), answer()), sampling=Sampling(max_new_tokens=10))
    assert result.turns[0].end - result.turns[0].start == 10
    assert result.turns[0].parse_error


def test_aborts_without_a_token_do_not_go_on_for_ever() -> None:
    ports = fake_ports(*[Say((), abort_after=0)] * 50)
    assert "without a token" in fails(EngineLost, ports)


def test_a_silent_engine_is_a_deadline() -> None:
    fails(DeadlineError, fake_ports(Hang()), request_timeout_s=0.01)


def test_a_silent_engine_that_was_left_meanwhile() -> None:
    placement = MovablePlacement(Place("e0", 0))
    ports = fake_ports(Meanwhile(lambda: placement.move(E1), Hang()), placement=placement)
    ports.engines["e1"].script.append(answer())
    assert played(ports, request_timeout_s=0.01).turns[0].regenerated == 1


@pytest.mark.parametrize(
    "nonsense",
    [
        {"logprobs": (-1.0,)},
        {"logprobs": (float("nan"), -1.0)},
        {"logprobs": (0.5, -1.0)},
        {"tokens": (-1, 2)},
        {"tokens": (), "logprobs": (), "spans": ()},
        {"finish": "because"},
        {"spans": ()},
        {"spans": (Span(0, 1, Version(0)),)},
        {"spans": (Span(0, 2, Version(0)), Span(2, 2, Version(1)))},
        {"spans": (Span(1, 2, Version(0)), Span(0, 1, Version(0)))},
        {"tokens": (1,) * 500, "logprobs": (-1.0,) * 500, "spans": (Span(0, 500, Version(0)),)},
    ],
)
def test_nonsense_from_an_engine_is_an_engine_lost(nonsense: dict[str, Any]) -> None:
    class Liar(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            reply = await super().generate(*args, **kwargs)
            return msgspec.structs.replace(reply, **nonsense)

    ports = fake_ports(engines={"e0": Liar("e0", [Say((1, TEMPLATE.END))])})
    fails(DeadlineError, ports, move_timeout_s=0.01)  # lost, and no other is named


# --- sandboxes ------------------------------------------------------------------------------------------------------


def test_a_lost_sandbox_is_rebuilt_from_the_recorded_commands() -> None:
    host = MemorySandboxHost(losses=1)
    ports = fake_ports(call("add done"), call("show"), call("lose x"), answer(), sandboxes=host)
    result = played(ports)
    assert result.verdict.reward == 1.0
    replayed = [command for box, command in host.commands if box == "box-1"]
    assert replayed == ["add done", "show", "lose x"]
    assert not host.live


def test_a_sandbox_lost_again_and_again_is_an_infra_fault() -> None:
    host = MemorySandboxHost(losses=100)
    fails(SandboxLost, fake_ports(call("lose x"), sandboxes=host))
    assert len(host.commands) == 3


def test_a_replay_that_diverges_is_never_trained_on() -> None:
    host = MemorySandboxHost(losses=1)
    ports = fake_ports(call("clock"), call("lose x"), answer(), sandboxes=host)
    assert "another result of turn 0" in fails(ReplayDiverged, ports)
    assert not ReplayDiverged.resumable


def test_a_sandbox_lost_while_grading() -> None:
    host = MemorySandboxHost()
    verifier = MemoryVerifier([SandboxLost("gone")])
    result = played(fake_ports(call("add done"), answer(), sandboxes=host, verifier=verifier))
    assert result.verdict.reward == 1.0
    assert host.commands == [("box-0", "add done"), ("box-1", "add done")]


def test_a_broken_task_says_so() -> None:
    host = MemorySandboxHost()
    host.refuse.append(TaskError("set-up failed"))
    assert "set-up failed" in fails(TaskError, fake_ports(answer(), sandboxes=host))


def test_an_instruction_that_does_not_fit_is_the_tasks_fault() -> None:
    assert "does not fit" in fails(TaskError, fake_ports(answer()), context_tokens=5)


@pytest.mark.parametrize(("blame", "error"), [(Blame.TASK, TaskError), (Blame.INFRA, InfraError)])
def test_what_cannot_be_graded_is_no_reward(blame: Blame, error: type[AgentRLError]) -> None:
    verifier = MemoryVerifier([Verdict(reward=None, blame=blame, detail="no reward file")])
    ports = fake_ports(answer(), verifier=verifier)
    assert "no reward file" in fails(error, ports)
    assert asyncio.run(ports.journal.kept(attempt_id())) is None


def test_the_whole_attempt_has_a_deadline() -> None:
    assert "not finished within" in fails(DeadlineError, fake_ports(Hang()), deadline_s=0.01)


# --- telemetry ------------------------------------------------------------------------------------------------------


def test_telemetry_hears_the_first_version_once_and_every_durable_turn() -> None:
    versions: list[Version] = []
    turns: list[Turn] = []
    result = played(fake_ports(call("show"), answer(), began=versions.append, turn_done=turns.append))
    assert versions == [0]
    assert tuple(turns) == result.turns


# --- resume and cancel ----------------------------------------------------------------------------------------------

SCRIPT = (call("add x"), call("count 2"), call("add done"), answer())


@given(crash_at=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_a_cancelled_attempt_releases_its_sandbox_and_resumes_to_the_same_conversation(crash_at: int) -> None:
    """Cancelled at its n-th suspension, wherever that is; then resumed by a new process on the same journal."""
    whole = played(fake_ports(*SCRIPT))
    ports = fake_ports(*SCRIPT)

    async def scenario() -> Trajectory:
        playing = asyncio.create_task(play(order(), ports))
        for _ in range(crash_at):
            await asyncio.sleep(0)
        playing.cancel()
        await asyncio.wait({playing})
        assert not ports.sandboxes.live
        assert not ports.engines["e0"].running
        ports.journal.crash()
        done = await ports.journal.turns(attempt_id())
        later = fake_ports(*SCRIPT[len(done) :], journal=ports.journal)
        result = await play(order(resume=True), later)
        assert not later.sandboxes.live
        return result

    result = asyncio.run(scenario())
    assert (result.tokens, result.trainable, result.logprobs, result.spans) == (
        whole.tokens,
        whole.trainable,
        whole.logprobs,
        whole.spans,
    )
    assert (result.stop, result.verdict.reward) == (whole.stop, whole.verdict.reward)


def test_the_cancel_test_reaches_every_part_of_an_attempt() -> None:
    """Guards the range above: 40 suspensions are more than a whole attempt has."""

    async def suspensions() -> int:
        playing = asyncio.create_task(play(order(), fake_ports(*SCRIPT)))
        count = 0
        while not playing.done():
            await asyncio.sleep(0)
            count += 1
        return count

    assert 15 < asyncio.run(suspensions()) < 40


@pytest.mark.parametrize("script", [SCRIPT, (call("show"),) * 3, (Say((*TEMPLATE.encode("<tool_call>"), 260)),) * 3])
def test_an_attempt_that_had_ended_only_needs_its_grade(script: tuple[Say, ...]) -> None:
    limits: dict[str, Any] = {"max_turns": 3 if len(script) == 3 else 8}
    lost = MemoryVerifier([InfraError("host gone")])
    ports = fake_ports(*script, verifier=lost)
    fails(InfraError, ports, **limits)
    result = played(fake_ports(journal=ports.journal), resume=True, **limits)
    assert len(result.turns) == len(script)


def test_a_kept_attempt_is_not_played_again() -> None:
    ports = fake_ports(answer())
    result = played(ports)
    again = fake_ports(journal=ports.journal)
    assert played(again, resume=True) == result
    assert not again.engines["e0"].prompts


def test_a_close_that_hangs_is_left_to_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.rollout import workspace
    from agentrl.sim.memory import MemorySandbox

    async def hang(self: MemorySandbox) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(workspace, "_CLOSE_S", 0.01)
    monkeypatch.setattr(MemorySandbox, "close", hang)
    assert played(fake_ports(call("add done"), answer())).verdict.reward == 1.0


def test_an_unresumed_order_starts_afresh() -> None:
    journal = MemoryJournal()
    fails(DeadlineError, fake_ports(call("add x"), Hang(), journal=journal), request_timeout_s=0.01)
    assert len(asyncio.run(journal.turns(attempt_id()))) == 1
    result = played(fake_ports(answer(), journal=journal), attempt=attempt_id(attempt=1))
    assert len(result.turns) == 1
