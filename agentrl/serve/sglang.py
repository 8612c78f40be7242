"""The engine client: SGLang's native HTTP API, and the embedded engine's, which is the same.

Every call ends by its deadline. A call is sent at most once: only a connection that was refused before anything was
sent is tried again. Who cancels a generation or runs out of time has it aborted on the engine too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from agentrl.errors import AgentRLError, DataError, DeadlineError, EngineLost, EngineTorn
from agentrl.finish import finish
from agentrl.records import EngineInfo, LoadReport, RankLoad, Reply, Sampling, Version
from agentrl.serve import staging, wire
from agentrl.serve.broadcast import Broadcast

T = TypeVar("T")

ABORT_S = 2.0  # how long a cancelled caller waits for the abort to be taken
REFUSED_RETRY_S = (0.05, 0.2, 0.5)


class SGLangEngine:
    """`ports.Engine` over HTTP. One per engine process; `aclose` ends its connections.

    request_timeout_s and admin_timeout_s cap what a caller's own deadline allows for a generation and for each step of
    a pause, load or continue. namespace: of cached histories, for an engine that serves more than one run in its life:
    version 3 of one is not version 3 of another. checksums: ask for the weights' checksum after each swap; on a large
    model that is work for its GPUs. folders: how weights get to its machine; default: it is this one. broadcast: new
    weights go to its GPUs directly instead; closed with the client.
    """

    def __init__(
        self,
        name: str,
        url: str,
        token: str,
        *,
        request_timeout_s: float = 120.0,
        admin_timeout_s: float = 60.0,
        namespace: str = "",
        checksums: bool = True,
        folders: staging.Folders | None = None,
        broadcast: Broadcast | None = None,
    ) -> None:
        self._name = name
        self._url = url.rstrip("/")
        self._token = token
        self._request_timeout_s = request_timeout_s
        self._admin_timeout_s = admin_timeout_s
        self._checksums = checksums
        self._folders = folders or staging.Here()
        self._broadcast = broadcast
        self._split = 1
        self._namespace = namespace
        self._session: aiohttp.ClientSession | None = None
        self._closed = False
        self._version: Version | None = None  # what the engine last proved, or was last told, to hold
        self._settled = asyncio.Event()  # clear while a swap makes the version uncertain
        self._settled.set()
        self._open = 0  # our own /generate calls that the engine has not answered
        self._quiet = asyncio.Event()  # set while there are none
        self._quiet.set()
        self._lost_tokens = 0  # partial tokens of the calls that the running swap aborted
        self._embedded = False
        self._paused = False
        self._unwanted: list[str] = []  # rids aborted while it was paused
        self._in_flight = 0
        self._holds = ""  # the folder of its weights
        self._vocab: int | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def url(self) -> str:
        return self._url

    # --- what it is and how it does ---

    async def info(self, *, deadline_s: float) -> EngineInfo:
        known, end = self._version, time.monotonic() + deadline_s
        server = await self.server_info(deadline_s=deadline_s)
        model = await self._get("/model_info", wire.ModelInfo, end - time.monotonic())
        found = self._sane(lambda: wire.info(server, model))
        self._embedded, self._in_flight = server.embedded, server.in_flight
        self._holds, self._split = model.model_path, server.tp_size
        self._vocab = server.vocab_size or await self._folders.vocabulary(self._holds)
        if self._version == known:  # else a swap ended meanwhile and knows better
            self._version = found.version
        return found

    async def server_info(self, *, deadline_s: float) -> wire.ServerInfo:
        """For whoever started the process and wants to know that it is the one that answers."""
        return await self._get("/server_info", wire.ServerInfo, deadline_s)

    async def ready(self, *, deadline_s: float) -> bool:
        status, _ = await self._send("GET", "/ready", None, deadline_s)
        return status == 200

    async def loads(self, *, deadline_s: float) -> list[RankLoad]:
        raw = await self._ok("GET", "/v1/loads?include=core", None, deadline_s)
        return self._sane(lambda: wire.loads(raw))

    async def generated_tokens(self, *, deadline_s: float) -> int:
        raw = await self._ok("GET", "/metrics", None, deadline_s)
        return self._sane(lambda: wire.generated_tokens(raw))

    # --- generation ---

    async def generate(
        self, rid: str, tokens: Sequence[int], sampling: Sampling, *, rank: int, deadline_s: float
    ) -> Reply:
        limit_s = min(deadline_s, self._request_timeout_s)
        started = time.monotonic()
        sent = await self._know_version(limit_s)
        self._refuse_unknown(tokens)
        body = {
            "rid": rid,
            "input_ids": list(tokens),
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "stop_token_ids": list(sampling.stop_token_ids),
                # SGLang calls all stop tokens "eos": ignoring it, it would ignore those that we name as well
                "ignore_eos": not sampling.stop_token_ids,
                "no_stop_trim": True,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
            "stream": False,
            "routed_dp_rank": rank,
            # history computed by other weights is never reused: the version names the cache's namespace
            "extra_key": f"{self._namespace}{sent}",
        }
        self._open += 1
        self._quiet.clear()
        try:
            raw = await self._ok("POST", "/generate", body, limit_s - (time.monotonic() - started))
        except (asyncio.CancelledError, DeadlineError):
            await finish(self._abort_quietly(rid))
            raise
        finally:
            self._open -= 1
            if not self._open:
                self._quiet.set()
        reply = self._sane(lambda: wire.reply(raw, rid, tokens, sampling, rank, self._vocab))
        reply = msgspec.structs.replace(reply, spans=wire.never_newer(reply.spans, sent, self._in_flight))
        if reply.finish == "abort":
            self._lost_tokens += len(reply.tokens)
        return reply

    def _refuse_unknown(self, tokens: Sequence[int]) -> None:
        """SGLang does not look, and ends at the first token that its model does not know."""
        if tokens and self._vocab is not None and not 0 <= min(tokens) <= max(tokens) < self._vocab:
            raise AgentRLError(
                f"engine {self._name} at {self._url}: not sent, a token is outside of 0..{self._vocab - 1}",
                hint="Is it the tokenizer of this model?",
            )

    async def _know_version(self, deadline_s: float) -> Version:
        """A paused engine would hold the request anyway; sent after the swap it carries the new version's key."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._settled.wait()
        except TimeoutError as exc:
            raise DeadlineError(
                f"engine {self._name} at {self._url}: weights still load after {deadline_s:g} s"
            ) from exc
        if self._version is None:
            return (await self.info(deadline_s=deadline_s)).version
        return self._version

    async def abort(self, rid: str, *, deadline_s: float) -> None:
        """While paused it is kept for later: SGLang's HTTP process holds requests that its scheduler does not know yet,
        forgets to tell it of the abort, and takes no second one for the same rid."""
        if self._paused:
            self._unwanted.append(rid)
        else:
            await self._ok("POST", "/abort_request", {"rid": rid}, deadline_s)

    async def _abort_quietly(self, rid: str) -> None:
        """Best effort: an engine that cannot be reached has lost the request, and one that is closed drops it."""
        try:
            await self.abort(rid, deadline_s=ABORT_S)
        except (EngineLost, DeadlineError):
            return

    # --- pause and weights ---

    async def pause(self, *, deadline_s: float) -> None:
        await self._pause("in_place", deadline_s)

    async def _pause(self, mode: str, deadline_s: float) -> None:
        self._paused = True
        await self._ok("POST", "/pause_generation", {"mode": mode}, min(deadline_s, self._admin_timeout_s))

    async def resume(self, *, deadline_s: float) -> None:
        await self._ok("POST", "/continue_generation", {}, min(deadline_s, self._admin_timeout_s))
        self._paused = False
        unwanted, self._unwanted = self._unwanted, []
        await asyncio.gather(*(self._abort_quietly(rid) for rid in unwanted))

    async def stage(self, path: str, version: Version, *, deadline_s: float) -> float:
        started = time.monotonic()
        if self._broadcast is not None:
            await staging.Here().bring(path, version)
            await asyncio.to_thread(staging.fits, path, self._holds, complete=False)
            await self._broadcast.join(self._post, self._split, deadline_s=min(deadline_s, self._admin_timeout_s))
            return time.monotonic() - started
        there = await self._folders.bring(path, version)  # which ends by itself where it makes no progress
        if self._embedded:
            await self._load("/stage_weights", {"model_path": there}, deadline_s)
        return time.monotonic() - started

    async def swap(
        self, path: str, version: Version, *, deadline_s: float, regenerate: bool = False, grace_s: float = 0.0
    ) -> LoadReport:
        end = time.monotonic() + deadline_s
        self._lost_tokens = 0
        # a cancelled swap must still not leave the engine paused
        pause_s = await finish(self._swap_paused(path, version, end, regenerate, grace_s))
        found = await self.info(deadline_s=end - time.monotonic())
        if found.version != version:
            raise self._lost(f"holds version {found.version} after version {version} was loaded")
        checksum = await self._checksum(end - time.monotonic()) if self._checksums else ""
        lost = self._lost_tokens if regenerate else 0
        return LoadReport(version=version, stage_s=0.0, pause_s=pause_s, lost_tokens=lost, checksum=checksum)

    async def _look_at(self, path: str, version: Version, deadline_s: float) -> str:
        """The version's folder on the engine's machine; DataError where the engine could not take it."""
        try:
            async with asyncio.timeout(deadline_s):
                # the first version is the user's: it may hold what our trainer does not write, such as a draft layer
                complete = self._version not in (None, 0)
                there = await self._folders.find(path, version)
                await self._folders.fits(there, self._holds, complete=complete)
                return there
        except DataError as exc:
            raise DataError(f"engine {self._name} at {self._url} was refused it: {exc}", hint=exc.hint) from exc
        except TimeoutError as exc:
            raise DeadlineError(f"{path}: not read within {deadline_s:.1f} s", hint="Is the disk slow?") from exc

    async def _checksum(self, deadline_s: float) -> str:
        raw = await self._ok("POST", "/weights_checker", {"action": "checksum"}, deadline_s)
        return self._sane(lambda: wire.decode(raw, wire.Checksum)).per_engine_checksum or ""

    async def _swap_paused(self, path: str, version: Version, end: float, regenerate: bool, grace_s: float) -> float:
        """Look, pause, load, continue; seconds between the last three. Continues whatever the load does.

        While `_settled` is clear no new call is sent. SGLang's abort mode ends what runs and pauses nothing; with our
        calls held back nothing is left to pause.
        """
        self._settled.clear()
        torn = False
        try:
            there = path if self._broadcast else await self._look_at(path, version, end - time.monotonic())
            began = time.monotonic()
            if regenerate:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await self._quiet.wait()
                began = time.monotonic()
            await self._pause("abort" if regenerate else "in_place", end - began)
            await self._take(there, version, end)
            self._version = version
        except EngineTorn:
            torn = True  # nothing shall be sampled from it
            raise
        finally:
            # its own time: a load that took all of the deadline is no reason to stay paused
            try:
                if not torn:
                    await self.resume(deadline_s=self._admin_timeout_s)
            finally:
                self._settled.set()
        return time.monotonic() - began

    async def _take(self, there: str, version: Version, end: float) -> None:
        if self._broadcast is None:
            body = {"model_path": there, "flush_cache": False, "weight_version": str(version)}
            await self._load("/update_weights_from_disk", body, end - time.monotonic())
            return
        await self._broadcast.join(
            self._post, self._split, deadline_s=min(end - time.monotonic(), self._admin_timeout_s)
        )
        await self._broadcast.update(self._post, there, version, deadline_s=end - time.monotonic())

    async def _post(self, path: str, body: dict[str, Any], deadline_s: float) -> None:
        await self._ok("POST", path, body, deadline_s)

    async def _load(self, path: str, body: dict[str, Any], deadline_s: float) -> None:
        """A 400 here means that the folder was refused and the old weights serve on."""
        status, raw = await self._send("POST", path, body, min(deadline_s, self._admin_timeout_s))
        if status == 400:
            raise DataError(
                f"engine {self._name} at {self._url} refused {body['model_path']}: {wire.error_message(raw)}",
                hint="It still serves the version before; publish this one again.",
            )
        self._check(status, raw, path)
        self._sane(lambda: wire.decode(raw, wire.Update))

    async def aclose(self) -> None:
        self._closed = True  # first: closing takes a moment, in which others may still call
        if self._broadcast is not None:
            await self._broadcast.aclose()
        if self._session is not None:
            await self._session.close()

    # --- HTTP ---

    async def _get(self, path: str, kind: type[wire.B], deadline_s: float) -> wire.B:
        raw = await self._ok("GET", path, None, deadline_s)
        return self._sane(lambda: wire.decode(raw, kind))

    async def _ok(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> bytes:
        status, raw = await self._send(method, path, body, deadline_s)
        self._check(status, raw, path)
        return raw

    def _check(self, status: int, raw: bytes, path: str) -> None:
        if status == 200:
            return
        said = f"{path} answered {status}: {wire.error_message(raw)}"
        if status == 400:  # it works and refuses: asking again would not help
            raise AgentRLError(f"engine {self._name} at {self._url}: {said}", hint="This is a bug in the caller.")
        raise self._lost(said)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> tuple[int, bytes]:
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(deadline_s):
                return await self._connect_and_send(method, path, data)
        except TimeoutError as exc:
            raise DeadlineError(
                f"engine {self._name} at {self._url}: {path} did not answer within {deadline_s:.1f} s",
                hint="See the engine's log.",
            ) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise self._lost(f"{path}: {exc or type(exc).__name__}") from exc

    async def _connect_and_send(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        if self._session is None and not self._closed:
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=None),
                # uvicorn closes idle connections after 5 s; reusing one at that moment would lose the call
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
            )
        for pause_s in (*REFUSED_RETRY_S, None):
            if self._closed or self._session is None:
                raise aiohttp.ClientConnectionError("it was given up")
            try:
                async with self._session.request(method, self._url + path, data=data) as response:
                    return response.status, await response.read()
            except aiohttp.ClientConnectorError:
                if pause_s is None:
                    raise
                await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    def _sane(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except wire.Nonsense as exc:
            raise self._lost(f"answered nonsense: {exc}") from exc

    def _lost(self, what: str) -> EngineLost:
        return EngineLost(f"engine {self._name} at {self._url}: {what}", hint="See the engine's log.")
