"""What a run tells Prometheus, what the dashboard asks for, how late the loop is, and trackers of experiments."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentrl.errors import UnavailableError
from agentrl.recipe.schema import Recipe, Telemetry
from agentrl.records import GroupId, GroupProof, Stop, TaskId, TrajectoryFacts, Verdict, Version
from agentrl.runtime.lag import LoopLag
from agentrl.runtime.metrics import Metrics
from agentrl.runtime.rates import Rates
from agentrl.runtime.status import Status
from agentrl.scheduler import commands as orders
from agentrl.scheduler import events as news
from agentrl.sim.clock import VirtualLoop
from agentrl.sim.clock import run as virtual
from agentrl.wiring.trackers import Shown, scalars, trackers
from tests import builders, scenes
from tests.builders import attempt_id

ROOT = Path(__file__).parents[2]
LINE: dict[str, Any] = {
    "step": 7,
    "reward_mean": 0.5,
    "interval_s": 9.0,
    "batch_wait_s": 2.0,
    "train_s": 3.0,
    "publish_s": 1.0,
    "age": {"max": 2, "mean": 0.5, "histogram": {"0": 3}},
    "logprob_gap": {"mean": 0.01, "max": None},
    "metrics": {"loss": 0.25},
}


def facts(group: int, *, tokens: int, turns: int, reward: float, oldest: int) -> TrajectoryFacts:
    return TrajectoryFacts(
        attempt=attempt_id(group),
        reward=reward,
        tokens=tokens,
        generated=tokens // 2,
        versions=((Version(oldest), tokens // 2),),
        turns=turns,
        stop=Stop.SUBMITTED,
    )


def rates() -> Rates:
    """One short group trained at version 5, one long one dropped as stale, one of another kind given up."""
    found = Rates()
    for number, (kind, tokens) in enumerate((("ls", 100), ("ls", 9_000), ("find", 100))):
        task, start = TaskId(f"t{number}"), attempt_id(number)
        found.heard(news.TaskOffered(task=task, kind=kind), [])
        begin = orders.StartAttempt(attempt=start, task=task, place=scenes.turn(0).place, host="h0", deadline_s=9.0)
        found.heard(news.Tick(), [begin])
        found.ended(facts(number, tokens=tokens, turns=3, reward=1.0, oldest=3))
    proof = GroupProof(group=GroupId(0), oldest=Version(3), tokens=((Version(3), 1),))
    cut = orders.TrainOn(batch=0, version=Version(5), bound=4, proofs=(proof,), attempts=(attempt_id(0),))
    drops = [orders.DropGroup(group=GroupId(g), reason=why, attempts=()) for g, why in ((1, "stale"), (2, "failed"))]
    found.heard(news.Tick(), [cut, *drops])
    found.heard(news.Tick(), [cut])  # given again: counted once
    return found


def told(status: Status) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value."""
    metrics = Metrics(lambda: status, rates(), lambda: [LINE], lambda: {"generated": 9, "wasted": 2})
    metrics.turn(scenes.turn(1))
    verdict = Verdict(reward=1.0, verify_s=0.2, queue_s=0.1)
    metrics.ended(msgspec.structs.replace(builders.trajectory(), open_s=0.5, open_wait_s=4.0, verdict=verdict))
    families = text_string_to_metric_families(metrics.now()().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_the_figures_are_those_of_the_picture() -> None:
    found = told(scenes.lost_host())
    assert found["agentrl_trainer_state", (("state", "ready"),)] == 1
    assert found["agentrl_trainer_state", (("state", "stepping"),)] == 0
    assert found["agentrl_ready_groups", ()] == 6
    assert found["agentrl_host_up", (("host", "h1"),)] == 0
    assert found["agentrl_host_up", (("host", "h0"),)] == 1
    assert found["agentrl_lane_queued", (("host", "h0"), ("lane", "reset"))] == 14
    assert found["agentrl_groups_total", (("what", "stale"),)] == 2
    assert found["agentrl_engine_running", (("engine", "e0"), ("rank", "1"))] == 15
    assert found["agentrl_tokens_total", (("what", "generated"),)] == 9
    assert found["agentrl_step_reward_mean", ()] == 0.5
    assert found["agentrl_logprob_gap", (("which", "mean"),)] == 0.01
    assert ("agentrl_logprob_gap", (("which", "max"),)) not in found
    assert found["agentrl_turn_seconds_sum", (("part", "tool"),)] == 3.0
    assert found["agentrl_attempt_seconds_sum", (("part", "open_wait"),)] == 4.0


def test_what_became_of_finished_work() -> None:
    found = told(scenes.healthy())

    def count(by: str, bucket: str, what: str) -> float:
        return found["agentrl_finished_total", (("bucket", bucket), ("by", by), ("what", what))]

    assert [count("length", "≤ 256", what) for what in ("trained", "stale", "dropped")] == [1, 0, 1]
    assert [count("length", "≤ 16384", what) for what in ("trained", "stale", "dropped")] == [0, 1, 0]
    assert [count("kind", "ls", what) for what in ("trained", "stale", "dropped")] == [1, 1, 0]
    assert count("turns", "≤ 4", "trained") == 1
    assert count("reward", "1", "stale") == 1
    assert found["agentrl_trained_ages_total", (("bucket", "≤ 256"), ("by", "length"))] == 2
    [(_, short), (_, long)] = rates().of("length")
    assert (short.completion, short.freshness, short.age) == (0.5, 1.0, 2.0)
    assert (long.completion, long.freshness) == (0.0, 0.0)


def asked() -> Iterator[str]:
    """Every metric that a query of the dashboard names."""
    for panel in json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield from re.findall(r"agentrl_\w+", target["expr"])


def test_the_dashboard_asks_for_what_exists_and_for_all_of_it() -> None:
    names = {name for name, _ in told(scenes.lost_host())}
    assert set(asked()) <= names
    told_of = {name.removesuffix(end) for name in asked() for end in ("_sum", "_bucket", "_count", "")}
    unasked = {n for n in names if not n.endswith(("_created", "_sum", "_bucket", "_count"))} - told_of
    assert unasked <= {"agentrl_engine_slots"}


# --- the event loop's lag ---------------------------------------------------------------------------------------------


def test_a_loop_that_is_blocked_is_late_by_that_much() -> None:
    async def main() -> None:
        loop, said = asyncio.get_running_loop(), list[float]()
        assert isinstance(loop, VirtualLoop)
        lag = LoopLag(said.append)
        watching = asyncio.ensure_future(lag.watch(lambda event: None))

        def block() -> None:
            loop._instant.now += 1.5  # a callback that takes so long

        await asyncio.sleep(1.0)
        assert lag.worst_s == pytest.approx(0.0, abs=1e-6)
        loop.call_soon(block)
        await asyncio.sleep(3.0)
        assert lag.worst_s == pytest.approx(1.5, abs=0.26)
        await asyncio.sleep(12.0)
        assert lag.worst_s == pytest.approx(0.0, abs=1e-6)
        assert max(said) == pytest.approx(1.5, abs=0.26)
        watching.cancel()

    virtual(main())


# --- trackers ---------------------------------------------------------------------------------------------------------


def recipe(**telemetry: Any) -> Recipe:
    return Recipe(name="t", telemetry=Telemetry(**telemetry))


def test_none_is_opened_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert trackers(recipe(), tmp_path) == []


def test_figures_by_name() -> None:
    assert dict(scalars(LINE)) == {
        "step": 7,
        "reward_mean": 0.5,
        "interval_s": 9.0,
        "batch_wait_s": 2.0,
        "train_s": 3.0,
        "publish_s": 1.0,
        "age/max": 2,
        "age/mean": 0.5,
        "age/histogram/0": 3,
        "logprob_gap/mean": 0.01,
        "metrics/loss": 0.25,
    }


@pytest.mark.parametrize(("package", "asked_for"), [("tensorboard", {"tensorboard": True}), ("wandb", {"wandb": "p"})])
def test_a_missing_package_is_named_with_its_extra(
    package: str, asked_for: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=f"telemetry.{package}: the package {package} is not installed") as error:
        trackers(recipe(**asked_for), tmp_path)
    assert f"agentrl[{package}]" in error.value.hint


def test_tensorboard_is_given_each_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    people: list[dict[str, Any]] = []
    shown = Shown(people.append, trackers(recipe(tensorboard=True), tmp_path))
    for step in (1, 2):
        shown(LINE | {"step": step, "reward_mean": float(step)})
    shown.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.tensor_proto.float_val[0]) for e in read.Tensors("reward_mean")] == [(1, 1.0), (2, 2.0)]
    assert "metrics/loss" in read.Tags()["tensors"]
    assert len(people) == 2


def test_a_tracker_that_fails_is_no_reason_to_lose_a_run(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def step(self, line: object) -> None:
            raise OSError("no space left")

        def close(self) -> None: ...

    people: list[dict[str, Any]] = []
    Shown(people.append, [Broken()])(LINE)
    assert people == [LINE]
    assert "Broken did not take step 7: no space left" in caplog.text
