"""The HTTP face: the subset of SGLang's native API that agentrl uses, with its shapes and its refusals."""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from agentrl.errors import AgentRLError
from agentrl.serve.embedded import facts
from agentrl.serve.embedded import weights as checkpoints
from agentrl.serve.embedded.core import BLOCK_TOKENS, PauseMode
from agentrl.serve.embedded.loop import StepLoop
from agentrl.serve.embedded.options import Options
from agentrl.serve.embedded.request import Request, SamplingParams

OPEN_PATHS = frozenset({"/health", "/health_generate", "/ready", "/metrics"})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
B = TypeVar("B", bound=msgspec.Struct)


class GenerateBody(msgspec.Struct, kw_only=True):
    input_ids: list[int]
    sampling_params: SamplingParams = SamplingParams()
    rid: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    stream: bool = False
    routed_dp_rank: int | None = None
    extra_key: str | None = None


class AbortBody(msgspec.Struct):
    rid: str = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct):
    mode: PauseMode = "abort"


class UpdateBody(msgspec.Struct):
    model_path: str
    weight_version: str | None = None
    flush_cache: bool = True
    load_format: str | None = None


class StageBody(msgspec.Struct):
    model_path: str


class CheckBody(msgspec.Struct):
    action: str = "checksum"


class Refusal(Exception):
    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def reply(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


async def body_of(request: web.Request, kind: type[B]) -> B:
    raw = await request.read()
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.MsgspecError as exc:
        raise Refusal(str(exc)) from exc


class Server:
    """Routes and their handlers. `close` waits for what runs, at most `drain_s`."""

    def __init__(self, loop: StepLoop, options: Options, weights: checkpoints.Weights, launch: str) -> None:
        self.loop = loop
        self.core = loop.core
        self.options = options
        self.launched = {"launch_command": launch, "startup_time": time.time()}
        self.weights = weights
        self.model_path = options.model_path
        self.staged: tuple[str, checkpoints.Weights] | None = None
        self.open: dict[str, asyncio.Task[Any]] = {}
        self.draining = False
        self._key = options.api_key.encode()
        self._loading = asyncio.Lock()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=64 * 2**20)
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/abort_request", self.abort_request),
                web.post("/pause_generation", self.pause_generation),
                web.post("/continue_generation", self.continue_generation),
                web.post("/update_weights_from_disk", self.update_weights_from_disk),
                web.post("/stage_weights", self.stage_weights),
                web.route("*", "/flush_cache", self.flush_cache),
                web.route("*", "/weights_checker", self.weights_checker),
                web.get("/v1/loads", self.loads),
                web.get("/model_info", self.model_info),
                web.get("/server_info", self.server_info),
                web.get("/ready", self.ready),
                web.get("/health", self.health),
                web.get("/health_generate", self.health),
                web.get("/metrics", self.metrics),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if self._key and request.path not in OPEN_PATHS and not hmac.compare_digest(given, b"Bearer " + self._key):
            return reply({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except Refusal as exc:
            return reply({"error": {"message": str(exc)}}, exc.status)

    # --- generation ---

    async def generate(self, http: web.Request) -> web.Response:
        body = await body_of(http, GenerateBody)
        self._check(body)
        rid = body.rid or uuid.uuid4().hex
        rank = self.core.next_rank() if body.routed_dp_rank is None else body.routed_dp_rank

        def submit(answer: Callable[[Request], None]) -> None:
            self.core.submit(
                Request(
                    rid,
                    body.input_ids,
                    body.sampling_params,
                    rank=rank,
                    namespace=body.extra_key or "",
                    on_end=answer,
                )
            )

        if rid in self.open:
            raise Refusal(f"Duplicate request ID detected: {rid}")
        task = asyncio.current_task()
        assert task is not None
        self.open[rid] = task
        try:
            request: Request = await self.loop.call_back(submit)
        except asyncio.CancelledError:
            self.loop.post(lambda: self.core.abort(rid))  # the client went away
            raise
        finally:
            del self.open[rid]
        if request.finish and request.finish.get("status_code"):
            raise Refusal(request.finish["message"], request.finish["status_code"])
        return reply(request.answer(rank if self.options.ranks > 1 else None, logprobs=body.return_logprob))

    def _check(self, body: GenerateBody) -> None:
        options, config = self.options, self.core.model.config
        prompt, new = len(body.input_ids), body.sampling_params.max_new_tokens
        if self.draining:
            raise Refusal("The server is shutting down", 503)
        if problem := body.sampling_params.problem():
            raise Refusal(problem)
        if body.stream or body.logprob_start_len != -1:
            raise Refusal("stream and logprob_start_len are not supported by the embedded engine")
        if body.routed_dp_rank is not None and not 0 <= body.routed_dp_rank < options.ranks:
            raise Refusal(f"routed_dp_rank={body.routed_dp_rank} out of range [0, {options.ranks})")
        if not body.input_ids:
            raise Refusal("input_ids is empty")
        if min(body.input_ids) < 0 or max(body.input_ids) >= config.vocab_size:
            raise Refusal(f"input_ids hold a token outside of the vocabulary of {config.vocab_size}")
        limit = min(options.context_length, options.kv_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
        if prompt >= limit:
            raise Refusal(f"The input ({prompt} tokens) is longer than the model's context length ({limit} tokens).")
        if prompt + new > limit:
            raise Refusal(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
                f"total of {prompt + new} tokens: {prompt} tokens from the input and {new} tokens for the completion."
            )

    async def abort_request(self, http: web.Request) -> web.Response:
        body = await body_of(http, AbortBody)
        await self.loop.call(self.core.abort_all if body.abort_all else lambda: self.core.abort(body.rid))
        return web.Response()

    # --- pause and weights ---

    async def pause_generation(self, http: web.Request) -> web.Response:
        body = await body_of(http, PauseBody)
        await self.loop.call(lambda: self.core.pause(body.mode))
        return reply({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: web.Request) -> web.Response:
        await self.loop.call(self.core.resume)
        return reply({"message": "Generation continued successfully.", "status": "ok"})

    async def _read(self, path: str) -> checkpoints.Weights:
        try:
            return await asyncio.to_thread(checkpoints.read, path, self.core.model.config, self.core.model.dtype)
        except AgentRLError as exc:
            raise Refusal(f"Failed to load weights: {exc}") from exc

    async def stage_weights(self, http: web.Request) -> web.Response:
        """Not in SGLang: read and check a version ahead of its update, so that the update is only the switch."""
        body = await body_of(http, StageBody)
        async with self._loading:
            weights = await self._read(body.model_path)
            self.staged = (body.model_path, weights)
        return reply({"success": True, "message": "staged", "checksum": weights.checksum})

    async def update_weights_from_disk(self, http: web.Request) -> web.Response:
        body = await body_of(http, UpdateBody)
        async with self._loading:
            staged, self.staged = self.staged, None
            try:
                ahead = staged is not None and staged[0] == body.model_path
                weights = staged[1] if staged and ahead else await self._read(body.model_path)
            except Refusal as exc:
                return reply({"success": False, "message": str(exc), "num_paused_requests": 0}, 400)
            flushed: bool = await self.loop.call_back(lambda answer: self._switch(weights, body, answer))
            self.weights, self.model_path = weights, body.model_path
        if not flushed:
            message = "Weights were updated, but the cache was not flushed because requests are running."
            return reply({"success": False, "message": message, "num_paused_requests": 0}, 400)
        return reply({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    def _switch(self, weights: checkpoints.Weights, body: UpdateBody, answer: Callable[[bool], None]) -> None:
        def act() -> None:
            self.core.swap(weights, body.weight_version)
            answer(self.core.flush() if body.flush_cache else True)

        self.core.when_quiet(act)

    async def flush_cache(self, http: web.Request) -> web.Response:
        if await self.loop.call(self.core.flush):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed: requests are running.\n", status=400)

    async def weights_checker(self, http: web.Request) -> web.Response:
        body = await body_of(http, CheckBody)
        if body.action != "checksum":
            raise Refusal(f"action {body.action!r} is not supported by the embedded engine")
        one = {"checksums": self.weights.checksums, "per_gpu_checksum": self.weights.checksum}
        ranks = [one | {"dp_rank": rank} for rank in range(self.options.ranks)]
        return reply({"success": True, "message": "ok", "ranks": ranks, "per_engine_checksum": self.weights.checksum})

    # --- what it says of itself ---

    async def loads(self, http: web.Request) -> web.Response:
        return reply(facts.loads(self.core, self.options))

    async def model_info(self, http: web.Request) -> web.Response:
        return reply(facts.model_info(self.core, self.options, self.model_path))

    async def server_info(self, http: web.Request) -> web.Response:
        return reply(facts.server_info(self.core, self.options) | self.launched)

    async def ready(self, http: web.Request) -> web.Response:
        return web.Response(status=503 if self.core.paused or self.draining else 200)

    async def health(self, http: web.Request) -> web.Response:
        return web.Response(status=503 if self.draining else 200)

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(text=facts.metrics(self.core))

    async def drain(self) -> None:
        """No new requests; those that run get `drain_s`, then they are aborted and answered as such."""
        self.draining = True
        await self.loop.call(self.core.resume)
        if self.open:
            await asyncio.wait(self.open.values(), timeout=self.options.drain_s)
        await self.loop.call(self.core.abort_all)
