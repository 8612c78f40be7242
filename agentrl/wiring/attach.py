"""Somebody else's run: found by its folder, its URL or its recipe's name, and talked to through its HTTP face."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import tomli

from agentrl.errors import AgentRLError, DeadlineError, UnavailableError, UserError
from agentrl.ports import Progress
from agentrl.records import AttemptId, Record, Version

RUNS = Path("runs")
_ANSWER_S = 10.0
_OVER = "the run is over or was killed; start it again with `agentrl run RECIPE --run-dir FOLDER`"


class LiveRun(Record):
    """Where a run's face is. That it answers with this token is what proves that it lives.

    remote: the run's folder is on another machine; `folder` is one of ours, for what a trainer keeps.
    """

    folder: str
    url: str
    token: str
    remote: bool = False

    @property
    def named(self) -> str:
        return self.url if self.remote else self.folder


class Versions(Record):
    """What the trainer and each engine hold."""

    version: Version
    engines: dict[str, Version]

    def lacking(self, version: Version) -> list[str]:
        return sorted(name for name, held in self.engines.items() if held < version)


def find_run(target: str, *, runs: Path = RUNS) -> LiveRun:
    """target: a run's folder, or the URL in its file `url`. UserError where there is none, UnavailableError where
    that folder's run is not live."""
    if is_url(target):
        for file in sorted(runs.glob("*/url")):
            if file.read_text().strip() == target.rstrip("/"):
                return _opened(file.parent)
        raise UserError(f"{target}: no run below {runs}/ has this URL", hint="name the run's folder instead")
    folder = Path(target)
    if not (folder / "recipe.toml").is_file():
        raise UserError(f"{folder}: no run here (recipe.toml is missing)", hint="name a run's folder, e.g. runs/local")
    return _opened(folder)


def is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def token_in(file: Path) -> str:
    """UserError where there is none."""
    hint = "copy the file `token` of the run's folder here"
    try:
        token = file.read_text().strip()
    except OSError as exc:
        raise UserError(f"{file}: {exc.strerror}", hint=hint) from exc
    if not token.isascii() or not token.isprintable() or not token:
        raise UserError(f"{file}: holds no token", hint=hint)
    return token


def remote_run(url: str, token: str, name: str, *, runs: Path = RUNS) -> LiveRun:
    """A run whose folder is on another machine. name: its recipe's. Our own folder for it, not made yet, is the same
    whenever this machine attaches to that run."""
    folder = runs / f"{name}-{hashlib.sha256(token.encode()).hexdigest()[:8]}"
    return LiveRun(folder=str(folder), url=url.rstrip("/"), token=token, remote=True)


def newest_run(name: str, *, runs: Path = RUNS) -> LiveRun:
    """The newest run of the recipe called `name` that has an address. UnavailableError where there is none."""
    found = [file for file in runs.glob("*/url") if _name_of(file.parent) == name]
    if not found:
        raise UnavailableError(
            f"no run of recipe {name} is live below {runs}/",
            hint="start one with `agentrl run RECIPE --set train.embedded=false`, or name it with --attach",
        )
    return _opened(max(found, key=lambda file: file.stat().st_mtime).parent)


def _name_of(folder: Path) -> str:
    with suppress(OSError, tomli.TOMLDecodeError):
        return str(tomli.loads((folder / "recipe.toml").read_text()).get("name", ""))
    return ""


def _opened(folder: Path) -> LiveRun:
    try:
        url, token = ((folder / name).read_text().strip() for name in ("url", "token"))
    except FileNotFoundError as exc:
        raise UnavailableError(f"{folder}: not live ({exc.filename} is missing)", hint=_OVER) from exc
    except OSError as exc:
        raise UserError(f"{exc.filename}: {exc.strerror}", hint="ask whoever started the run") from exc
    return LiveRun(folder=str(folder), url=url, token=token)


class FaceClient:
    """Use as `async with FaceClient(run) as face`. Calls raise UnavailableError where nobody answers, UserError where
    the token is refused: then another run has that address by now."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._session: aiohttp.ClientSession | None = None

    def move(self, run: LiveRun) -> None:
        """What is asked from now on is asked of `run`."""
        self._run = run

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._session is not None:
            await self._session.close()

    async def status(self) -> dict[str, Any]:
        return dict(await self._get("/v1/status"))

    async def versions(self) -> Versions:
        said = await self._get("/v1/versions")
        return Versions(version=Version(said["version"]), engines={k: Version(v) for k, v in said["engines"].items()})

    async def recipe(self) -> str:
        """The run's resolved recipe, TOML."""
        return (await self._answer("GET", "/v1/recipe")).decode()

    async def pause(self, on: bool) -> None:
        """No new attempts and batches until it is off again."""
        await self._ask("POST", "/v1/pause", {"on": on})

    async def drain(self) -> None:
        """An end soon that leaves a resumable run."""
        await self._ask("POST", "/v1/drain")

    async def life(self, attempt: AttemptId) -> dict[str, Any]:
        """A runtime.status.Life."""
        return dict(await self._get(f"/v1/attempts/{attempt.group}/{attempt.member}/{attempt.attempt}"))

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """{"now", "event", "commands"} as they happen, until the run is over. The first item is empty: the stream is
        open, so that who asks something now misses nothing that happens afterwards."""
        try:
            async with self._asking("GET", "/v1/events", timeout=aiohttp.ClientTimeout(total=None)) as answer:
                self._check(answer.status, await answer.read() if answer.status != 200 else b"")
                yield {}
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        yield json.loads(line[6:])
        except (aiohttp.ClientError, OSError) as exc:
            raise self._gone(exc) from exc

    async def _get(self, path: str) -> Any:
        return await self._ask("GET", path)

    async def _ask(self, method: str, path: str, value: Any = None) -> Any:
        body = await self._answer(method, path, value)
        try:
            return json.loads(body)
        except ValueError as exc:
            raise AgentRLError(f"{self._run.url}{path}: the answer is not JSON", hint="is it a run's address?") from exc

    async def _answer(self, method: str, path: str, value: Any = None) -> bytes:
        try:
            timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
            async with self._asking(method, path, json=value, timeout=timeout) as answer:
                body = await answer.read()
        except TimeoutError as exc:
            raise DeadlineError(f"{self._run.url}{path}: no answer within {_ANSWER_S:g} s") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise self._gone(exc) from exc
        self._check(answer.status, body)
        return body

    def _check(self, status: int, body: bytes) -> None:
        if status == 401 and self._run.remote:
            hint = "the file `token` of that run's folder is the one to copy here"
            raise UserError(f"{self._run.url}: the run there has another token", hint=hint)
        if status == 401:
            raise UnavailableError(f"{self._run.folder}: another run has its address {self._run.url}", hint=_OVER)
        if status != 200:
            said = body[:200].decode(errors="replace")
            raise AgentRLError(f"{self._run.url}: HTTP {status}: {said}", hint="is it a run of this version?")

    def _gone(self, exc: BaseException) -> UnavailableError:
        return UnavailableError(f"{self._run.named}: not live (nobody answers at {self._run.url}: {exc})", hint=_OVER)

    def _asking(self, method: str, path: str, **more: Any) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        assert self._session is not None, "FaceClient is used as a context manager"
        headers = {"Authorization": f"Bearer {self._run.token}"}
        return self._session.request(method, self._run.url + path, headers=headers, **more)


async def until_live(
    face: FaceClient, wanted: Version | None, *, deadline_s: float, progress: Progress | None = None
) -> tuple[Versions, bool]:
    """Waits until every engine holds `wanted` (None: what the trainer holds now), or the deadline; what they hold
    then, and whether all hold it. Waits on the run's own events."""
    versions = await face.versions()
    target = versions.version if wanted is None else wanted
    with suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            async for said in face.events():
                if not said or said["event"]["type"] in ("EngineLoaded", "EngineUp", "EngineDown"):
                    versions = await face.versions()
                    if progress is not None:
                        lacking = versions.lacking(target)
                        share = 1.0 - len(lacking) / max(1, len(versions.engines))
                        progress(f"v{target}", f"{len(lacking)} engines to come: {', '.join(lacking[:4])}", share)
                if versions.engines and not versions.lacking(target):
                    return versions, True
    return versions, bool(versions.engines) and not versions.lacking(target)
