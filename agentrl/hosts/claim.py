"""A role of a machine is one run's at a time. Who holds it is a process there, and the kernel is the judge.

    python -m agentrl.hosts.claim RUN_DIR ROLE...    holds the roles while it lives; exit code 1: one is another's
    python -m agentrl.hosts.claim --who RUN ROLE...  who holds each of them, as soon as RUN has all or another has one

A role is an abstract Unix socket: the first to bind it has it, on the whole machine and for all of its users, until
that process is gone, however it ended. It runs under a guard with a lease, as engines do.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import PurePosixPath

import msgspec

from agentrl.errors import UnavailableError
from agentrl.ports import Host, Process
from agentrl.records import Record

IN_USE = "wait until that is over, end it, or use it: engines.attach, sandbox.attach"
_TAKEN = 1
_ANSWER_S = 20.0
_PAUSE_S = 0.01


class Holder(Record):
    """run: the name of its folder there."""

    run: str
    pid: int
    user: str


async def claim(host: Host, run_dir: str, roles: Sequence[str]) -> Process:
    """Makes these roles of the host ours until the process is stopped. UnavailableError names who has one already."""
    module, run = [host.python, "-m", "agentrl.hosts.claim"], PurePosixPath(run_dir).name
    process = await host.start([*module, run_dir, *roles], log=f"{run_dir}/claim.log", label=f"{run}.claim")
    try:
        code, said = await host.run([*module, "--who", run, *roles], timeout_s=2 * _ANSWER_S)
        if code:
            raise UnavailableError(f"{host.name}: cannot be claimed for this run: {said.strip()[-300:]}")
        held = dict(zip(roles, msgspec.json.decode(said, type=list[Holder | None]), strict=True))
        for role, holder in held.items():
            if holder is not None and holder.run != run:
                raise UnavailableError(f"{host.name}: in use: {has(holder, role)}", hint=IN_USE)
    except BaseException:
        await process.stop()
        raise
    return process


def has(holder: Holder, role: str) -> str:
    return f"{holder.run} has its {role} there (process {holder.pid} of {holder.user})"


def hold(run: str, roles: Sequence[str]) -> int:
    """Tells everybody who asks, for ever. Returns only where a role is another's."""
    with contextlib.ExitStack() as stack:
        asked = stack.enter_context(selectors.DefaultSelector())
        for role in sorted(roles):  # all runs in one order: of two that want the same roles one gets them all
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                listener.bind(_address(role))
            except OSError:
                return _TAKEN
            listener.listen(16)
            asked.register(listener, selectors.EVENT_READ, listener)
        me = msgspec.json.encode(Holder(run=run, pid=os.getpid(), user=pwd.getpwuid(os.getuid()).pw_name))
        while True:
            for key, _ in asked.select():
                with contextlib.suppress(OSError), key.data.accept()[0] as caller:
                    caller.send(me, socket.MSG_DONTWAIT)


def who(run: str, roles: Sequence[str]) -> list[Holder | None]:
    """As soon as this run holds all, or another run one of them; ours may just be starting. TimeoutError where neither
    comes about."""
    ends = time.monotonic() + _ANSWER_S
    while time.monotonic() < ends:
        held = [_holder(role) for role in roles]
        if all(held) or any(holder is not None and holder.run != run for holder in held):
            return held
        time.sleep(_PAUSE_S)
    raise TimeoutError(f"nobody holds {', '.join(roles)} within {_ANSWER_S:g} s")


def _holder(role: str) -> Holder | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError), socket.socket(socket.AF_UNIX) as holder:
        holder.settimeout(_ANSWER_S)
        holder.connect(_address(role))
        return msgspec.json.decode(holder.recv(4096), type=Holder)
    return None


def _address(role: str) -> str:
    return f"\0agentrl-claim-{role}"


def main(words: Sequence[str]) -> int:
    first, *roles = words
    if first != "--who":
        return hold(PurePosixPath(first).name, roles)
    json.dump(msgspec.to_builtins(who(roles[0], roles[1:])), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
