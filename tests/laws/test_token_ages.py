"""No batch holds a token older than K: what attempts said of their tokens, against the orders, from outside."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from agentrl.records import AttemptId, GroupId, GroupProof, TrajectoryFacts, Version
from agentrl.scheduler import attempts, freshness
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.scheduler.state import State
from agentrl.wiring.sim import draw_policy
from tests.laws.world import World

Plant = Callable[[pytest.MonkeyPatch], None]

MODES = list(
    itertools.product(
        ("async", "sync", "pipelined"),
        ("drop", "wait", "mask"),
        ("continue", "finish", "regenerate", "restart"),
        ("rolling", "all"),
    )
)


def audit(world: World) -> int:
    """Tokens looked at. The first report of an attempt counts, as late and double ones must change nothing."""
    told: dict[AttemptId, tuple[tuple[Version, int], ...]] = {}
    seen = 0
    for _, event, commands in world.log:
        if isinstance(event, news.AttemptEnded):
            told.setdefault(event.facts.attempt, event.facts.versions)
        for batch in (command for command in commands if isinstance(command, orders.TrainOn)):
            floor, counts = batch.version - world.policy.bound, Counter[Version]()
            for attempt in batch.attempts:
                for version, tokens in told[attempt]:
                    if version < floor and not batch.mask:
                        raise AssertionError(
                            f"batch {batch.batch} at version {batch.version}, K {world.policy.bound}: "
                            f"{attempt} brings {tokens} tokens of version {version}"
                        )
                    counts[version] += tokens
            proven: Counter[Version] = Counter()
            for version, tokens in (pair for proof in batch.proofs for pair in proof.tokens):
                assert version >= floor, f"batch {batch.batch} proves tokens of version {version}, floor {floor}"
                proven[version] += tokens
            assert proven == {v: n for v, n in counts.items() if v >= floor}, f"batch {batch.batch}: false histogram"
            assert sum(proof.masked for proof in batch.proofs) == sum(n for v, n in counts.items() if v < floor)
            seen += counts.total()
    return seen


def worlds(mode: str) -> Iterator[World]:
    """One, not yet played, for each combination."""
    for number, (_, stale, in_flight, order) in enumerate(m for m in MODES if m[0] == mode):
        drawn = draw_policy(random.Random(number))
        rounds = 2 * drawn.groups if mode != "async" else 0
        policy = msgspec.structs.replace(
            drawn,
            mode=mode,
            when_stale=stale,
            in_flight=in_flight,
            order=order,
            round_groups=rounds,
            window_groups=max(drawn.window_groups, rounds),
            bound=max(drawn.bound, 2 if rounds else 0),
        )
        yield World(number, trouble=2.0, policy=policy)


def met(world: World) -> Counter[str]:
    """What may make a token older than was thought, and how often it happened."""
    found = Counter(type(event).__name__ for _, event, _ in world.log)
    twice = Counter(news.encode(event) for _, event, _ in world.log if isinstance(event, news.AttemptEnded))
    batches = [order for _, _, said in world.log for order in said if isinstance(order, orders.TrainOn)]
    trained = {attempt for batch in batches for attempt in batch.attempts}
    began = {event.attempt: event.oldest for _, event, _ in world.log if isinstance(event, news.AttemptBegan)}
    older = {attempt for attempt, versions in world.moved.items() if any(v < began.get(attempt, v) for v in versions)}
    found["twice"] = sum(count > 1 for count in twice.values())
    found["late"] = world.core.ledger.late
    found["moved"] = len(world.moved.keys() & trained)
    found["resumed"] = len(world.resumed & trained)
    found["older than it began"] = len(older & trained)
    return found


@pytest.mark.parametrize("mode", ["async", "sync", "pipelined"])
def test_no_token_older_than_K_in_any_mode(mode: str) -> None:
    seen, happened = 0, Counter[str]()
    for world in worlds(mode):
        world.run()
        seen += audit(world)
        happened += met(world)
    assert seen > 0
    everything = {"EngineDown", "SandboxHostDown", "TrainerDown", "Resumed", "AttemptFailed", "EngineLoadFailed"}
    assert everything | {"twice", "late", "moved", "resumed"} <= set(happened)
    assert happened["older than it began"] or mode != "async"  # within a round all engines hold the same


# --- bugs that no law can see: the proof itself is wrong, or what it is made of ---------------------------------------


def a_proof_leaves_out_the_oldest_tokens(patch: pytest.MonkeyPatch) -> None:
    real = freshness.proof

    def proof(group: GroupId, facts: Sequence[TrajectoryFacts], floor: int | None) -> GroupProof:
        made = real(group, facts, floor)
        tokens = made.tokens[1:] or made.tokens
        return msgspec.structs.replace(made, oldest=tokens[0][0], tokens=tokens)

    patch.setattr(freshness, "proof", proof)


def a_finished_conversation_is_as_old_as_it_began(patch: pytest.MonkeyPatch) -> None:
    """Tokens from an engine that was behind, after a move, are taken for those of its first version."""
    real = attempts.ended

    def ended(state: State, event: news.AttemptEnded, now: float) -> None:
        member = state.table.running.get(event.facts.attempt)
        if member is not None and member.oldest is not None:
            versions = tuple((max(v, member.oldest), tokens) for v, tokens in event.facts.versions)
            event = news.AttemptEnded(facts=msgspec.structs.replace(event.facts, versions=versions))
        real(state, event, now)

    patch.setattr(attempts, "ended", ended)


@pytest.mark.parametrize(
    "plant",
    [
        a_proof_leaves_out_the_oldest_tokens,
        a_finished_conversation_is_as_old_as_it_began,
    ],
)
def test_a_planted_bug_fails_the_audit(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for world in worlds("async"):
        try:
            world.run()
            audit(world)
        except AssertionError:
            return
    raise AssertionError("not found out")
