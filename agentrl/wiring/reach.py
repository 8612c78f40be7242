"""The run that somebody means, on this machine or another, and a way to its face that stays open."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from agentrl.errors import UnavailableError, UserError
from agentrl.wiring.attach import LiveRun, find_run, is_url, newest_run, remote_run, token_in

_BEHIND_SSH = re.compile(r"(?:(?P<user>[^@:/\s]+)@)?(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*):(?!//)(?P<folder>[^\s:]+)")


Look = Callable[[], Awaitable[LiveRun]]
"""Where the run is now: one that was resumed has another address. UserError or UnavailableError where it is nowhere."""


@asynccontextmanager
async def reached(attach: str | None, name: str, *, token_file: Path | None, url: str | None) -> AsyncIterator[LiveRun]:
    """As `way`, of the run that is there now. url: where a folder's run is reached instead of where it says."""
    async with way(attach, name, token_file=token_file) as look:
        run = await look()
        yield run if url is None else msgspec.structs.replace(run, url=url.rstrip("/"))


@asynccontextmanager
async def way(attach: str | None, name: str, *, token_file: Path | None) -> AsyncIterator[Look]:
    """attach: a folder, a URL, [USER@]HOST:FOLDER of a machine behind SSH; None: the newest run of the recipe `name`.
    token_file: with a URL of another machine's run.

    One error that says what is wrong: UserError or UnavailableError.
    """
    if token_file is not None:
        if attach is None or not is_url(attach):
            raise UserError("--token-file goes with the URL of a run", hint="a run's folder holds its token already")
        yield _there(remote_run(attach, token_in(token_file), name))
    elif attach is not None and (behind := behind_ssh(attach)):
        async with _behind_ssh(*behind, name) as look:
            yield look
    else:

        async def here() -> LiveRun:
            return newest_run(name) if attach is None else find_run(attach)

        yield here


def behind_ssh(attach: str) -> tuple[str, str, str] | None:
    """User, host and folder of [USER@]HOST:FOLDER; None where it is none."""
    found = _BEHIND_SSH.fullmatch(attach)
    return (found["user"] or "", found["host"], found["folder"]) if found else None


def _there(run: LiveRun) -> Look:
    async def look() -> LiveRun:
        return run

    return look


@asynccontextmanager
async def _behind_ssh(user: str, address: str, folder: str, name: str) -> AsyncIterator[Look]:
    """Address and token are read there; its face is reached through a forwarded port."""
    try:
        from agentrl.hosts.ssh import SshHost  # asyncssh is an extra
    except ImportError as exc:
        raise UserError(f"{address}: SSH needs asyncssh", hint="pip install 'agentrl[hosts]'") from exc
    host = SshHost(address, user=user)

    async def look() -> LiveRun:
        try:
            url, token = [(await host.read(f"{folder}/{file}")).decode().strip() for file in ("url", "token")]
        except FileNotFoundError as exc:
            hint = "start it there with `agentrl run`, and name its folder there"
            raise UnavailableError(f"{address}:{folder}: no run is live there ({exc})", hint=hint) from exc
        here = await host.reach(url.removeprefix("http://"))
        return remote_run(f"http://{here}", token, name)

    try:
        await host.open()
        yield look
    finally:
        await host.aclose()
