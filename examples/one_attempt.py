"""One attempt, token by token: the real turn loop against a scripted engine and a sandbox in memory.

    python examples/one_attempt.py

Shows what a trajectory is made of: which tokens the model sampled, and which version of the policy sampled them. The
engine takes new weights between the two turns, so the trajectory holds two versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

from agentrl.records import AttemptId, GroupId, Place, Sampling, Task, TaskId, Trajectory, Version
from agentrl.rollout.attempt import Order, Ports, play
from agentrl.sim.memory import MemoryJournal, MemorySandboxHost, MemoryVerifier
from agentrl.sim.scripted import ByteTemplate, Meanwhile, MovablePlacement, Say, ScriptedEngine

TEMPLATE = ByteTemplate()
CALL = "<tool_call>shell\n<arg_key>command</arg_key>\n<arg_value>add pear</arg_value>\n</tool_call>"


async def attempt() -> Trajectory:
    engine = ScriptedEngine("e0")

    def swap() -> None:
        engine.version = Version(1)

    engine.script.extend(
        [
            Say((*TEMPLATE.encode(CALL), TEMPLATE.OBSERVATION)),
            Meanwhile(swap, Say((*TEMPLATE.encode("done"), TEMPLATE.END))),
        ]
    )
    numbers, seconds = count(), count()
    ports = Ports(
        engines={"e0": engine},
        placement=MovablePlacement(Place("e0", 0)),
        sandboxes=MemorySandboxHost(),
        verifier=MemoryVerifier(),
        journal=MemoryJournal(),
        template=TEMPLATE,
        clock=lambda: float(next(seconds)),
        new_rid=lambda: f"{next(numbers):032x}",
    )
    order = Order(
        attempt=AttemptId(GroupId(0), 0, 0),
        task=Task(id=TaskId("remember"), kind="example", instruction="pear", root="examples"),
        sampling=Sampling(max_new_tokens=200),
        context_tokens=1_000,
        max_turns=4,
        label="example",
    )
    return await play(order, ports)


def told(trajectory: Trajectory) -> Iterator[str]:
    yield f"{trajectory.attempt}: reward {trajectory.verdict.reward}, stopped because {trajectory.stop}"
    for turn in trajectory.turns:
        [version] = {span.version for span in trajectory.spans if turn.start <= span.start < turn.end}
        yield f"  turn {turn.index}: tokens {turn.start} to {turn.end}, by version {version}: {turn.command or 'done'}"
        yield f"    {turn.cached_tokens} of {turn.prompt_tokens} prompt tokens were cached"
    facts = trajectory.facts
    yield f"  {facts.tokens} tokens, {facts.generated} of them trainable, oldest version {facts.oldest}"


if __name__ == "__main__":
    for line in told(asyncio.run(attempt())):
        print(line)
