"""Whether services really serve: an answer with the right token and the right name, never an open port alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from agentrl.errors import AgentRLError, UserError
from agentrl.recipe.schema import Engines
from agentrl.records import Record, SandboxHostStatus
from agentrl.sandbox.client import SandboxClient
from agentrl.serve.launch import attach_engine
from agentrl.wiring.services import Part, Serving

_ANSWER_S = 10.0


class EngineReport(Record):
    """What one engine proved. serves: it is the one that was started, and would serve now; else detail says why not."""

    name: str
    host: str
    url: str
    pid: int
    log: str
    serves: bool
    detail: str = ""
    version: int = -1
    ranks: int = 0
    slots: int = 0
    running: int = 0
    waiting: int = 0
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0


async def engines(serving: Serving, section: Engines) -> list[EngineReport]:
    token = token_of_service(serving)
    section = msgspec.structs.replace(section, admin_timeout_s=min(section.admin_timeout_s, _ANSWER_S))
    return list(await asyncio.gather(*(_engine(part, token, section) for part in serving.parts)))


async def _engine(part: Part, token: str, section: Engines) -> EngineReport:
    said = EngineReport(name=part.name, host=part.host, url=part.url, pid=part.pid, log=part.log, serves=False)
    try:
        engine, info = await attach_engine(part.name, part.url, token, section)
    except AgentRLError as exc:
        return _changed(said, detail=str(exc))
    try:
        server = await engine.server_info(deadline_s=_ANSWER_S)
        if server.served_model_name != part.served_name:
            return _changed(said, detail=f"another server answers there ({server.served_model_name!r})")
        loads = await engine.loads(deadline_s=_ANSWER_S)
        return _changed(
            said,
            serves=await engine.ready(deadline_s=_ANSWER_S),
            detail="",
            version=info.version,
            ranks=info.ranks,
            slots=info.slots,
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            kv_used_tokens=sum(load.kv_used_tokens for load in loads),
            kv_total_tokens=sum(load.kv_total_tokens for load in loads),
        )
    except AgentRLError as exc:
        return _changed(said, detail=str(exc))
    finally:
        await engine.aclose()


async def daemons(serving: Serving) -> list[SandboxHostStatus]:
    """UnavailableError or DeadlineError of the first that does not answer to its token."""
    return list(await asyncio.gather(*(_daemon(serving, part) for part in serving.parts)))


async def _daemon(serving: Serving, part: Part) -> SandboxHostStatus:
    client = client_of(serving, part)
    try:
        return await client.status(deadline_s=_ANSWER_S)
    finally:
        await client.aclose()


def client_of(serving: Serving, part: Part) -> SandboxClient:
    return SandboxClient(part.url, token_of_service(serving), name=part.name)


def token_of_service(serving: Serving) -> str:
    """Blocking. UserError where it is not ours to read."""
    try:
        return Path(serving.token_file).read_text().strip()
    except OSError as exc:
        raise UserError(f"{serving.token_file}: {exc.strerror}", hint="ask whoever started the service") from exc


def _changed(report: EngineReport, **changes: object) -> EngineReport:
    return msgspec.structs.replace(report, **changes)
