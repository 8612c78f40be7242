"""When a batch was where: in order for every group, in every mode, also where everything fails; told to metrics, the
report and the trace."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from agentrl.records import AttemptId, Place, Turn
from agentrl.runtime.moments import Moments, Timeline
from agentrl.runtime.telemetry import Telemetry
from agentrl.scheduler import events as news
from agentrl.wiring.sim import draw_policy
from agentrl.wiring.story import read_story
from tests.laws.world import World
from tests.recordings import RECIPE, recorded


def times(moments: Moments) -> list[float]:
    steps = (moments.step_began_s, moments.step_ended_s, moments.publish_began_s, moments.live_s)
    return [max(moments.ready_s.values()), moments.dispatched_s, *(at for at in steps if at is not None)]


class Timed(World):
    """Its timeline hears each event after the core; groups are known to be ready by their last attempt's end."""

    def __init__(self, seed: int, mode: str, trouble: float) -> None:
        drawn = draw_policy(random.Random(seed))
        rounds = 2 * drawn.groups if mode != "async" else 0
        policy = msgspec.structs.replace(
            drawn,
            mode=mode,
            round_groups=rounds,
            window_groups=max(drawn.window_groups, rounds),
            bound=max(drawn.bound, 2),
            auto=False,
        )
        super().__init__(seed, trouble=trouble, policy=policy)
        self.timeline = Timeline()
        self.ended: dict[AttemptId, float] = {}

    def give(self, event: news.Event) -> None:
        super().give(event)
        if isinstance(event, news.AttemptEnded):
            self.ended.setdefault(event.facts.attempt, self.now)
        now, heard, commands = self.log[-1]
        self.timeline.heard(now, heard, commands, self.core)


@pytest.mark.parametrize("mode", ["async", "sync", "pipelined"])
@pytest.mark.parametrize("trouble", [0.0, 1.0])
def test_ready_then_dispatched_then_trained_then_published(mode: str, trouble: float) -> None:
    for seed in range(3):
        world = Timed(seed, mode, trouble)
        world.run()
        assert world.timeline.batches
        for moments in world.timeline.batches.values():
            assert all(a <= b for a, b in pairwise(times(moments))), moments
            for group, ready in moments.ready_s.items():
                assert ready in {at for attempt, at in world.ended.items() if attempt.group == group}
        if world.core.finished is not None and world.core.finished.outcome == "done":
            assert all(moments.live_s is not None for moments in world.timeline.batches.values())


def test_a_round_goes_live_at_once_and_its_steps_end_one_by_one() -> None:
    world = Timed(1, "pipelined", 0.0)
    world.run()
    first, second = (world.timeline.batches[batch] for batch in (0, 1))
    assert first.step_ended_s is not None
    assert second.step_ended_s is not None
    assert first.step_ended_s < second.step_ended_s <= (first.publish_began_s or 0.0)
    assert (first.publish_began_s, first.live_s) == (second.publish_began_s, second.live_s)


def test_a_report_has_them(tmp_path: Path) -> None:
    recorded(tmp_path)
    story = read_story(tmp_path)
    for step in story.steps:
        assert [name for name, _ in step.moments] == [
            *("dispatched_s", "step_began_s", "step_ended_s", "publish_began_s", "live_s")
        ]
        told = [at for _, at in step.moments]
        assert all(at is not None for at in told)
        assert all(a <= b for a, b in pairwise([max(at for _, at in step.ready), *told]))  # type: ignore[type-var]
        assert len(step.ready) == story.batch_groups


@pytest.mark.parametrize("in_flight", ["restart", "continue"])
def test_what_new_weights_cost_is_counted_for_each_publication(tmp_path: Path, in_flight: str) -> None:
    """Each attempt has sampled ten tokens when it begins; those that start over at a swap have lost them."""
    drawn = draw_policy(random.Random(3))
    policy = msgspec.structs.replace(drawn, in_flight=in_flight, mode="async", round_groups=0, auto=False)

    class Told(World):
        def give(self, event: news.Event) -> None:
            if isinstance(event, news.AttemptBegan) and event.attempt in self.core.table.running:
                telemetry.turn(event.attempt, TURN)
                self.sampled = getattr(self, "sampled", 0) + 10
            super().give(event)
            now, heard, commands = self.log[-1]
            telemetry.heard(now, heard, commands, self.core)

    world = Told(3, trouble=0.0, policy=policy)
    telemetry = Telemetry(tmp_path, {}, lambda: world.now, order=policy.order, in_flight=in_flight)
    world.run()
    summary = telemetry.summary(world.core, world.now)
    telemetry.close()
    by_version = [publication["lost_tokens"] for publication in summary["publications"]]
    assert sum(by_version) == summary["tokens"]["lost"] <= 10 * world.core.ledger.restarted
    assert (summary["tokens"]["lost"] > 0) == (in_flight == "restart")


TURN = Turn(
    index=0, start=5, end=15, observed_end=20, place=Place("e0", 0), prompt_tokens=5, cached_tokens=0, reusable_tokens=0
)


def test_a_report_says_what_was_lost_under_which_strategy(tmp_path: Path) -> None:
    from agentrl.report.page import figures

    recorded(tmp_path, recipe=RECIPE + '[publish]\nin_flight = "regenerate"\n')
    lines = [{"step": step, "tokens": {"lost": 30 * step}, "logprob_gap": {"mean": None}} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")
    story = read_story(tmp_path)
    assert story.lost == {1: 30, 2: 60}
    assert figures(story)["tokens lost to new weights (regenerate)"] == "90, 45 a step"
