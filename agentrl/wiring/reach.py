"""The run that somebody means, on this machine or another, and a way to its face that stays open."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from agentrl.errors import UnavailableError, UserError
from agentrl.wiring.attach import LiveRun, find_run, is_url, newest_run, remote_run, token_in

_BEHIND_SSH = re.compile(r"(?:(?P<user>[^@:/\s]+)@)?(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*):(?!//)(?P<folder>[^\s:]+)")


@asynccontextmanager
async def reached(attach: str | None, name: str, *, token_file: Path | None, url: str | None) -> AsyncIterator[LiveRun]:
    """attach: a folder, a URL, [USER@]HOST:FOLDER of a machine behind SSH; None: the newest run of the recipe `name`.
    token_file: with a URL of another machine's run. url: where a folder's run is reached instead of where it says.

    One error that says what is wrong: UserError or UnavailableError.
    """
    if token_file is not None:
        if attach is None or not is_url(attach):
            raise UserError("--token-file goes with --attach URL", hint="a run's folder holds its token already")
        yield remote_run(attach, token_in(token_file), name)
    elif attach is not None and (behind := _BEHIND_SSH.fullmatch(attach)):
        async with _behind_ssh(behind["user"] or "", behind["host"], behind["folder"], name) as run:
            yield run
    else:
        run = newest_run(name) if attach is None else find_run(attach)
        yield run if url is None else msgspec.structs.replace(run, url=url.rstrip("/"))


@asynccontextmanager
async def _behind_ssh(user: str, address: str, folder: str, name: str) -> AsyncIterator[LiveRun]:
    """Address and token are read there; its face is reached through a forwarded port."""
    try:
        from agentrl.hosts.ssh import SshHost  # asyncssh is an extra
    except ImportError as exc:
        raise UserError(f"{address}: SSH needs asyncssh", hint="pip install 'agentrl[hosts]'") from exc
    host = SshHost(address, user=user)
    try:
        await host.open()
        try:
            url, token = [(await host.read(f"{folder}/{file}")).decode().strip() for file in ("url", "token")]
        except FileNotFoundError as exc:
            hint = "start it there with `agentrl run`, and name its folder there"
            raise UnavailableError(f"{address}:{folder}: no run is live there ({exc})", hint=hint) from exc
        here = await host.reach(url.removeprefix("http://"))
        yield remote_run(f"http://{here}", token, name)
    finally:
        await host.aclose()
