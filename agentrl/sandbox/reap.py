"""What dead daemons left on this machine, removed: `python -m agentrl.sandbox.reap`, for hosts that are reached by SSH.

`Order` as JSON on standard input, `Answer` on standard output. Sandboxes of living daemons are not touched.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec

from agentrl.errors import AgentRLError
from agentrl.recipe import schema
from agentrl.records import Record
from agentrl.sandbox.backends import make_backend

ORDER_S = 10


class Order(Record):
    """label: of one run; None: of all. state_dir: of a daemon, existing or not."""

    sandbox: schema.Sandbox
    state_dir: str
    label: str | None = None


class Answer(Record):
    removed: int = 0
    error: str = ""
    hint: str = ""


async def reap(order: Order) -> int:
    """How many sandboxes."""
    backend = make_backend(order.sandbox, state_dir=order.state_dir)
    try:
        return await backend.reap(order.label)
    finally:
        await backend.aclose()


def main() -> None:
    signal.alarm(ORDER_S)  # whoever asks may be cut off before all of it is here
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    signal.alarm(0)
    try:
        answer = Answer(removed=asyncio.run(reap(order)))
    except AgentRLError as exc:
        answer = Answer(error=str(exc), hint=exc.hint)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
