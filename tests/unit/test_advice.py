"""Each advice by causing it, one by one: a healthy run with one thing changed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agentrl.recipe.schema import Recipe
from agentrl.records import Version
from agentrl.runtime.status import DownStatus, RankStatus, Status
from agentrl.scheduler.sizing import Limit
from agentrl.tui.advice import Advice, advise
from scripts.recipe_reference import sections
from tests import scenes
from tests.scenes import NOW, engine, group, host, steps


def changed(**more: Any) -> Status:
    return msgspec.structs.replace(scenes.healthy(), **more)


WAITING: dict[str, Any] = {"trainer": "ready", "trainer_for_s": 40.0, "bank": 0}
IDLE = steps(10, interval_s=40.0, waited_s=20.0, train_s=8.0)
FULL = tuple(engine(f"e{i}", 42, running=64) for i in range(3))
SPARE = tuple(engine(f"e{i}", 42, running=20) for i in range(3))

FULL_RANK = RankStatus(
    rank=1, conversations=40, running=20, waiting=12, slots=32, kv_used_tokens=254_000, kv_total_tokens=262_144
)

ALARMS = {
    "draining": changed(draining=True),
    "paused": changed(paused=True),
    "engine-down": changed(down=(DownStatus(name="e1", kind="engine", at_s=NOW - 12, reason="it ended with code 9"),)),
    "host-down": scenes.lost_host(),
    "link-down": changed(
        down=(
            DownStatus(name="e1", kind="engine", at_s=NOW - 12, reason="host gpu2 is lost: timed out", link="gpu2"),
            DownStatus(name="gpu2", kind="sandbox host", at_s=NOW - 11, reason="host gpu2 is lost", link="gpu2"),
        )
    ),
    "failing": changed(failing=4, last_fault="g7.m1.t0: h0 does not answer"),
    "loop-lag": changed(loop_lag_s=1.24),
    "trainer-slow": changed(trainer_for_s=90.0),
    "trainer-absent": changed(trainer="absent", trainer_for_s=25.0, bank=8),
    "straggler": scenes.straggler(),
    "quiet": changed(quiet_s=320.0, blockers="no task is offered"),
}

HINTS = {
    "engine-bound": changed(recent=IDLE, engines=FULL, attempts=192),
    "attempts-bound": changed(recent=IDLE, engines=SPARE, attempts=192),
    "widen": changed(recent=IDLE, engines=SPARE, places_used=24),
    "trainer-bound": scenes.trainer_bound(),
    "narrow": changed(recent=steps(10, interval_s=40.0, waited_s=0.1, train_s=40.0, age=3), bank=17),
    "kv": changed(engines=(engine("e0", 42, ranks=(FULL_RANK,)), engine("e1", 42))),
    "lane": changed(sandboxes=(host("h0", verify=20),)),
    "stale": changed(dropped={"stale": 40}),
    "near-K": changed(recent=steps(10, interval_s=40.0, waited_s=2.0, train_s=8.0, age=4)),
    "short-bias": changed(length_ratio=0.71),
}

FIGURES = {
    "engine-down": ("e1", "12 s", "code 9"),
    "host-down": ("h1", "33 s"),
    "link-down": ("gpu2", "12 s", "engines e1 and its sandboxes", "timed out"),
    "failing": ("4 attempts", "g7.m1.t0"),
    "loop-lag": ("1.2 s",),
    "trainer-slow": ("90 s", "8.8 s"),
    "trainer-absent": ("25 s",),
    "straggler": ("g335.m7.t0", "312 s", "e0/1", "h0", "7 of 8"),
    "quiet": ("320 s", "no task is offered"),
    "engine-bound": ("192 of 192",),
    "attempts-bound": ("192 conversations", "60 of 192"),
    "widen": ("24 groups",),
    "trainer-bound": ("15 groups", "8"),
    "narrow": ("17 groups",),
    "kv": ("e0/1", "97 %", "12 requests"),
    "lane": ("verify", "h0", "16 places", "20 wait", "6.0 s", "10 CPUs"),
    "stale": ("40 of 352",),
    "near-K": ("4.0", "K is 4"),
    "short-bias": ("0.71",),
}


def named(found: list[Advice]) -> list[str]:
    return [advice.name for advice in found]


def test_a_healthy_run_needs_none() -> None:
    assert advise([scenes.healthy()]) == []
    assert advise([]) == []


@pytest.mark.parametrize("name", ALARMS)
def test_an_alarm(name: str) -> None:
    [first, *_] = advise([ALARMS[name]])
    assert (first.name, first.alarm) == (name, True)
    assert all(figure in first.saw for figure in FIGURES.get(name, ())), first.saw
    assert first.change


@pytest.mark.parametrize("name", HINTS)
def test_a_hint(name: str) -> None:
    [first] = advise([HINTS[name]])
    assert (first.name, first.alarm) == (name, False)
    assert all(figure in first.saw for figure in FIGURES[name]), first.saw
    assert first.change
    assert first.key


def test_an_engine_that_hangs_in_a_phase() -> None:
    def at(now: float) -> Status:
        stuck = engine("e1", 41, phase="swapping to v42")
        return changed(now_s=now, engines=(engine("e0", 42), stuck), version=Version(42))

    assert advise([at(0.0), at(30.0)]) == []
    assert named(advise([at(0.0), at(30.0), at(75.0)])) == ["engine-stuck"]
    assert "75 s" in advise([at(0.0), at(75.0)])[0].saw
    assert advise([at(0.0), changed(now_s=50.0), at(75.0)]) == []


def test_no_hint_while_an_alarm_is_on() -> None:
    both = msgspec.structs.replace(HINTS["kv"], paused=True)
    assert named(advise([both])) == ["paused"]


def test_no_hint_before_there_are_steps_to_draw_it_from() -> None:
    assert advise([msgspec.structs.replace(HINTS["kv"], recent=scenes.healthy().recent[:4])]) == []


def test_a_run_that_is_over_needs_no_advice() -> None:
    assert advise([changed(outcome="done", paused=True)]) == []


def test_a_wait_is_no_straggler_while_siblings_take_as_long() -> None:
    usual = tuple(group(331 + i, 4, slow_s=25.0) for i in range(4))
    assert advise([changed(**WAITING, groups=usual)]) == []


def test_a_queue_that_most_conversations_stand_in_is_the_bottleneck() -> None:
    """However short each wait is. More conversations would only queue there."""
    short = tuple(msgspec.structs.replace(lane, wait_s_mean=0.2) for lane in host("h0", verify=80).lanes)
    crowded = msgspec.structs.replace(
        HINTS["attempts-bound"], sandboxes=(msgspec.structs.replace(host("h0"), lanes=short),)
    )
    [hint] = advise([crowded])
    assert (hint.name, hint.key) == ("lane", "sandbox.lanes.verify")
    assert "80 of 192 conversations" in hint.saw


def test_one_picture_that_is_unlike_the_others_changes_no_hint() -> None:
    usual, odd = HINTS["attempts-bound"], msgspec.structs.replace(HINTS["attempts-bound"], attempts=20)
    assert named(advise([usual] * 20 + [odd])) == ["attempts-bound"]
    assert named(advise([odd] * 20 + [usual])) == []


@pytest.mark.parametrize("name", ["widen", "narrow", "attempts-bound", "near-K"])
def test_a_window_that_sets_itself_needs_no_advice(name: str) -> None:
    limit = Limit(of="W", name="fresh", value=31.4, said="the oldest 2 % of groups see 0.51 W/B versions, K is 4")
    fixed = msgspec.structs.replace(HINTS[name], window_limits=(limit,))
    assert named(advise([fixed])) == [name]
    if "window.groups" in advise([fixed])[0].key and name != "near-K":
        assert '"auto" would make it 31' in advise([fixed])[0].change
    assert name not in named(advise([msgspec.structs.replace(fixed, auto_window=True)]))


def test_a_window_that_is_as_wide_as_is_of_use_is_not_to_be_widened() -> None:
    limit = Limit(of="W", name="filled", value=24.3, said="192 conversations, a group takes 1.4 of their lives")
    assert advise([msgspec.structs.replace(HINTS["widen"], window_limits=(limit,))]) == []


@pytest.mark.parametrize("status", [*ALARMS.values(), *HINTS.values()], ids=[*ALARMS, *HINTS])
def test_every_key_is_one_of_the_recipe(status: Status) -> None:
    known = {f"{where.strip('`[]')}.{name}" for where, kind in sections(Recipe, "") for name in kind.__struct_fields__}
    for advice in advise([status]):
        for key in advice.key.split(", ") if advice.key else ():
            assert key in known
