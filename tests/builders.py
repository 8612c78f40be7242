"""What many tests need: a valid one of each noun, from the one or two facts that the test is about."""

from __future__ import annotations

import itertools
from typing import Any

from agentrl.records import (
    AttemptId,
    GroupId,
    Place,
    Sampling,
    Span,
    Stop,
    Task,
    TaskId,
    Trajectory,
    Turn,
    TurnPayload,
    Verdict,
    Version,
)
from agentrl.rollout.order import Order, Ports
from agentrl.sim.memory import MemoryJournal, MemorySandboxHost, MemoryVerifier
from agentrl.sim.scripted import Act, ByteTemplate, MovablePlacement, Say, ScriptedEngine

TEMPLATE = ByteTemplate()
_numbers = itertools.count()


def attempt_id(group: int = 1, member: int = 0, attempt: int = 0) -> AttemptId:
    return AttemptId(GroupId(group), member, attempt)


def task(instruction: str = "done", **changes: Any) -> Task:
    return Task(**{"id": TaskId("t"), "kind": "k", "instruction": instruction, "root": "/tasks/t", **changes})


def order(**changes: Any) -> Order:
    defaults: dict[str, Any] = {
        "attempt": attempt_id(),
        "task": task(),
        "sampling": Sampling(max_new_tokens=400),
        "context_tokens": 4_000,
        "max_turns": 8,
        "label": "test",
        "system": "S",
        "move_timeout_s": 5.0,
    }
    return Order(**defaults | changes)


def call(command: str) -> Say:
    """A reply that calls the shell, ended by the token that opens an observation."""
    return Say((*TEMPLATE.encode(call_text(command)), TEMPLATE.OBSERVATION))


def call_text(command: str) -> str:
    return f"<tool_call>shell\n<arg_key>command</arg_key>\n<arg_value>{command}</arg_value>\n</tool_call>"


def answer(text: str = "done") -> Say:
    return Say((*TEMPLATE.encode(text), TEMPLATE.END))


def fake_ports(*script: Act, **changes: Any) -> Ports:
    """Two engines, e0 with the script, e1 with nothing to say; one memory sandbox host."""
    ticks = itertools.count()
    defaults: dict[str, Any] = {
        "engines": {"e0": ScriptedEngine("e0", script), "e1": ScriptedEngine("e1", version=1)},
        "placement": MovablePlacement(Place("e0", 0)),
        "sandboxes": MemorySandboxHost(),
        "verifier": MemoryVerifier(),
        "journal": MemoryJournal(),
        "template": TEMPLATE,
        "clock": lambda: float(next(ticks)),
        "new_rid": lambda: f"{next(_numbers):032x}",
    }
    return Ports(**defaults | changes)


def turn_payload(index: int = 0, *, start: int = 5, reply: int = 4, observed: int = 3, version: int = 0) -> TurnPayload:
    end = start + reply
    return TurnPayload(
        turn=Turn(
            index=index,
            start=start,
            end=end,
            observed_end=end + observed,
            place=Place("e0", 0),
            prompt_tokens=start,
            cached_tokens=0,
            reusable_tokens=0,
            command="true",
        ),
        opening=tuple(range(start)) if index == 0 else (),
        reply=tuple(range(reply)),
        logprobs=(-0.5,) * reply,
        spans=(Span(0, reply, Version(version)),),
        observed=tuple(range(observed)),
    )


def trajectory(attempt: AttemptId | None = None, *, reward: float = 1.0, reply: int = 4) -> Trajectory:
    payload = turn_payload(reply=reply, observed=0)
    tokens = (*payload.opening, *payload.reply)
    start = len(payload.opening)
    return Trajectory(
        attempt=attempt or attempt_id(),
        task=TaskId("t"),
        kind="k",
        tokens=tokens,
        trainable=(False,) * start + (True,) * reply,
        logprobs=(0.0,) * start + payload.logprobs,
        spans=(Span(start, start + reply, Version(0)),),
        turns=(payload.turn,),
        stop=Stop.SUBMITTED,
        verdict=Verdict(reward=reward),
        began_s=0.0,
        ended_s=1.0,
    )
