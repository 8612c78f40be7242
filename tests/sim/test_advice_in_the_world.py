"""Advice caused in the simulated world: one thing is wrong there, and it is said; where nothing is, nothing is."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from agentrl.runtime.recent import Recent
from agentrl.runtime.status import Status, picture
from agentrl.scheduler import events as news
from agentrl.scheduler.core import Core
from agentrl.scheduler.policy import Policy
from agentrl.sim import world as sim
from agentrl.sim.clock import run as virtual
from agentrl.tui.advice import advise
from agentrl.wiring.sim import RudeRun

POLICY = Policy(
    steps=12,
    groups=2,
    siblings=4,
    window_groups=6,
    window_attempts=24,
    bound=4,
    retries=6,
    attempt_timeout_s=200.0,
    stall_s=2000.0,
)
LOSS = {"engine-down", "host-down", "failing", "trainer-absent", "quiet", "engine-stuck"}


def told(policy: Policy, rude: dict[str, Any], seed: int = 2) -> set[str]:
    """Names of all advice that somebody who watched the whole run was given."""
    outcome = virtual(RudeRun(seed, policy=policy, rude=replace(sim.KIND, **rude)).play())
    core, recent, past, found = Core(policy), Recent(), deque[Status](maxlen=120), set()
    for now, data, _ in outcome.journal:
        event = news.decode(data)
        recent.heard(now, event, core.handle(event, now), core)
        status = picture(core, now, recent)
        if not past or now - past[-1].now_s >= 1.0:
            past.append(msgspec.structs.replace(status, groups=()))
        found |= {advice.name for advice in advise([*past, status])}
    return found


@pytest.mark.parametrize(
    ("name", "policy", "rude"),
    [
        ("engine-down", {}, {"engine_every_s": 40.0}),
        ("host-down", {}, {"host_every_s": 40.0}),
        ("straggler", {}, {"hang": 0.05}),
        ("failing", {}, {"fail": 0.3}),
        ("trainer-absent", {"steps": 4, "stall_s": 300.0}, {"trainer_every_s": 30.0}),
        ("quiet", {"steps": 4, "stall_s": 300.0}, {"trainer_every_s": 30.0}),
        ("attempts-bound", {"window_attempts": 2}, {}),
        ("widen", {"window_groups": 2, "window_attempts": 64}, {}),
        ("stale", {"bound": 1, "window_groups": 12, "window_attempts": 48}, {}),
        ("near-K", {"bound": 1, "window_groups": 12, "window_attempts": 48}, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said(name: str, policy: dict[str, Any], rude: dict[str, Any]) -> None:
    assert name in told(msgspec.structs.replace(POLICY, **policy), rude)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_kind_world_raises_no_alarm_of_loss(seed: int) -> None:
    assert not told(POLICY, {}, seed) & LOSS
