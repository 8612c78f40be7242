"""The client against servers that answer nonsense, too late, or not at all: one typed error that names the engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from agentrl.errors import AgentRLError, DataError, DeadlineError, EngineLost
from agentrl.records import Sampling, Version, WeightsManifest
from agentrl.serve import staging, wire
from agentrl.serve.sglang import SGLangEngine
from tests.engines import free_port, write_weights

RID = uuid.uuid4().hex
PROMPT = [1, 2, 3]
SAMPLING = Sampling(max_new_tokens=4)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    write_weights(tmp_path / "v1", {"w": (2, 3)})
    return tmp_path / "v1"


def good() -> dict[str, Any]:
    return {
        "output_ids": [7, 8],
        "meta_info": {
            "id": RID,
            "finish_reason": {"type": "stop", "matched": 8},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 2,
            "weight_version": "5",
            "weight_versions": [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}],
            "output_token_logprobs": [[-0.5, 7, None], [-1.5, 8, None]],
            "dp_rank": 0,
            "queue_time": 0.25,
            "forward_entry_time": 10.0,
            "prefill_finished_time": 10.5,
            "e2e_latency": 1.0,
        },
    }


def read(body: Any) -> Any:
    return wire.reply(json.dumps(body).encode(), RID, PROMPT, SAMPLING, 0, 512)


def test_a_good_answer_is_read_whole() -> None:
    reply = read(good())
    assert (reply.tokens, reply.logprobs, reply.finish) == ((7, 8), (-0.5, -1.5), "stop")
    assert [(s.start, s.end, s.version) for s in reply.spans] == [(0, 1, 4), (1, 2, 5)]
    assert (reply.queue_s, reply.prefill_s, reply.decode_s) == (0.25, 0.5, 0.25)


def test_an_answer_of_a_request_that_never_ran() -> None:
    body = good() | {"output_ids": []}
    meta = body["meta_info"]
    for absent in ("prompt_tokens", "cached_tokens", "queue_time", "forward_entry_time", "prefill_finished_time"):
        del meta[absent]
    meta |= {"finish_reason": {"type": "abort"}, "completion_tokens": 0, "output_token_logprobs": []}
    meta["weight_versions"] = [{"version": "5", "start": 0, "end": 0}]
    reply = read(body)
    assert (reply.tokens, reply.spans, reply.finish, reply.prompt_tokens) == ((), (), "abort", 3)


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "another rid": {"id": "x"},
    "unknown finish": {"finish_reason": {"type": "tired"}},
    "no finish": {"finish_reason": None},
    "fewer logprobs": {"output_token_logprobs": [[-0.5, 7, None]]},
    "logprobs of other tokens": {"output_token_logprobs": [[-0.5, 7, None], [-1.5, 9, None]]},
    "positive logprob": {"output_token_logprobs": [[0.5, 7, None], [-1.5, 8, None]]},
    "null logprob": {"output_token_logprobs": [[None, 7, None], [-1.5, 8, None]]},
    "wrong count": {"completion_tokens": 3},
    "other prompt": {"prompt_tokens": 4},
    "more cached than sent": {"cached_tokens": 4},
    "other rank": {"dp_rank": 1},
    "no spans": {"weight_versions": None},
    "gap in spans": {"weight_versions": [{"version": "4", "start": 1, "end": 2}]},
    "spans too short": {"weight_versions": [{"version": "4", "start": 0, "end": 1}]},
    "overlap": {"weight_versions": [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 1, "end": 2}]},
    "version in words": {"weight_versions": [{"version": "default", "start": 0, "end": 2}]},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_not_believed(name: str) -> None:
    body = good()
    body["meta_info"] |= CONTRADICTIONS[name]
    with pytest.raises(wire.Nonsense):
        read(body)


@pytest.mark.parametrize("tokens", [[7, 8, 9, 10, 11], [7, 512], [7, -1], [7, "8"], [], None])
def test_tokens_that_cannot_be_are_not_believed(tokens: Any) -> None:
    body = good()
    body["output_ids"] = tokens
    if isinstance(tokens, list):
        body["meta_info"] |= {
            "output_token_logprobs": [[-1.0, t, None] for t in tokens],
            "completion_tokens": len(tokens),
            "weight_versions": [{"version": "1", "start": 0, "end": len(tokens)}],
        }
    with pytest.raises(wire.Nonsense):
        read(body)


def test_sglang_that_is_too_old_is_refused() -> None:
    model = wire.ModelInfo(model_path="m", weight_version="0")
    with pytest.raises(wire.Nonsense, match="too old"):
        wire.info(wire.ServerInfo(version="0.5.19.post1"), model)
    assert wire.info(wire.ServerInfo(version="0.5.23"), model).kind == "sglang"


# --- over a socket ---

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[tuple[SGLangEngine, list[str]]]:
    """An HTTP server that answers every path with `answer`, and the paths it was asked for."""
    seen: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        return await answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    engine = SGLangEngine("e7", f"http://127.0.0.1:{port}", "t")
    engine._version = Version(0)
    try:
        yield engine, seen
    finally:
        await engine.aclose()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 200),
        (b"<html>hello</html>", 200),
        (b"null", 200),
        (b"[]", 200),
        (b'{"output_ids": [1]}', 200),
        (b"\xff\xfe\x00", 200),
        (b"no", 500),
        (b'{"error": {"message": "shutting down"}}', 503),
        (b"", 404),
    ],
)
def test_garbage_is_an_engine_lost(body: bytes, status: int, weights: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status)

    async def check() -> None:
        async with server(answer) as (engine, _):
            for call in (
                lambda: engine.info(deadline_s=5),
                lambda: engine.generate(RID, PROMPT, SAMPLING, rank=0, deadline_s=5),
                lambda: engine.loads(deadline_s=5),
                lambda: engine.generated_tokens(deadline_s=5),
                lambda: engine.swap(str(weights), Version(1), deadline_s=5),
            ):
                with pytest.raises(EngineLost, match="e7 at http"):
                    await call()

    asyncio.run(check())


def test_an_engine_that_has_made_nothing_yet_counts_no_token() -> None:
    assert wire.generated_tokens(b'# HELP x\nsglang:page_size{tp_rank="0"} 1.0\n') == 0
    with pytest.raises(wire.Nonsense, match="enable-metrics"):
        wire.generated_tokens(b"# HELP x\nprocess_cpu_seconds 1.0\n")


def test_a_connection_that_breaks_is_sent_once() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def check() -> None:
        async with server(answer) as (engine, seen):
            with pytest.raises(EngineLost):
                await engine.generate(RID, PROMPT, SAMPLING, rank=0, deadline_s=5)
            assert seen == ["/generate"]

    asyncio.run(check())


def test_silence_is_a_deadline_and_the_request_is_aborted() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/generate":
            await asyncio.Event().wait()
        return web.Response()

    async def check() -> None:
        async with server(answer) as (engine, seen):
            with pytest.raises(DeadlineError, match=r"e7.*0\.1 s"):
                await engine.generate(RID, PROMPT, SAMPLING, rank=0, deadline_s=0.1)
            assert seen == ["/generate", "/abort_request"]

    asyncio.run(check())


def test_a_cancelled_call_aborts_even_if_cancelled_twice() -> None:
    begun, aborting = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/generate":
            begun.set()
            await asyncio.Event().wait()
        aborting.set()
        await asyncio.sleep(0)
        return web.Response()

    async def check() -> None:
        async with server(answer) as (engine, seen):
            call = asyncio.ensure_future(engine.generate(RID, PROMPT, SAMPLING, rank=0, deadline_s=30))
            await begun.wait()
            call.cancel()
            await aborting.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert seen == ["/generate", "/abort_request"]

    asyncio.run(check())


def test_a_dead_port_is_an_engine_lost() -> None:
    async def check() -> None:
        engine = SGLangEngine("e7", f"http://127.0.0.1:{free_port()}", "t")
        try:
            with pytest.raises(EngineLost, match="e7"):
                await engine.info(deadline_s=10)
            with pytest.raises(DeadlineError):
                await engine.info(deadline_s=0.01)
        finally:
            await engine.aclose()

    asyncio.run(check())


def test_a_load_that_fails_still_continues(weights: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/update_weights_from_disk":
            return web.json_response({"success": False, "message": "no such file"}, status=400)
        return web.Response()

    async def check() -> None:
        async with server(answer) as (engine, seen):
            with pytest.raises(DataError, match="no such file"):
                await engine.swap(str(weights), Version(1), deadline_s=5)
            assert seen == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]

    asyncio.run(check())


def test_a_request_made_during_a_swap_carries_the_new_version(weights: Path) -> None:
    loading, go = asyncio.Event(), asyncio.Event()
    keys: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/update_weights_from_disk":
            loading.set()
            await go.wait()
            return web.json_response({"success": True})
        if request.path == "/generate":
            keys.append((await request.json())["extra_key"])
        return web.Response(status=200, body=b"{}")

    async def check() -> None:
        async with server(answer) as (engine, seen):
            swap = asyncio.ensure_future(engine.swap(str(weights), Version(1), deadline_s=5))
            await loading.wait()
            call = asyncio.ensure_future(engine.generate(RID, PROMPT, SAMPLING, rank=0, deadline_s=5))
            with pytest.raises(DeadlineError, match="weights still load"):
                await engine.generate(RID, PROMPT, SAMPLING, rank=0, deadline_s=0.01)
            go.set()
            await asyncio.wait([swap, call])
            assert isinstance(call.exception(), EngineLost)  # this server generates nothing
            assert isinstance(swap.exception(), EngineLost)  # nor does it know its version
            assert keys == ["1"]
            assert seen.index("/continue_generation") < seen.index("/generate")

    asyncio.run(check())


def test_a_refusal_is_our_bug_and_is_not_retried() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "Duplicate request ID"}}, status=400)

    async def check() -> None:
        async with server(answer) as (engine, seen):
            with pytest.raises(AgentRLError, match="Duplicate") as caught:
                await engine.generate(RID, PROMPT, SAMPLING, rank=0, deadline_s=5)
            assert not isinstance(caught.value, EngineLost)
            assert seen == ["/generate"]

    asyncio.run(check())


# --- staging ---


def published(folder: Path, version: int = 3) -> Path:
    (folder / "model.safetensors").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    manifest = WeightsManifest(version=Version(version), files=(("model.safetensors", digest, 7),))
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    return folder


def test_staging_reads_what_the_manifest_lists(tmp_path: Path) -> None:
    assert staging.verify(str(published(tmp_path)), Version(3)) == 7


@pytest.mark.parametrize("damage", ["changed", "missing", "other version", "bad manifest", "no folder", "no weights"])
def test_staging_names_what_is_wrong(tmp_path: Path, damage: str) -> None:
    folder = published(tmp_path)
    version = Version(4 if damage == "other version" else 3)
    if damage == "changed":
        (folder / "model.safetensors").write_bytes(b"weighty")
    elif damage in ("missing", "no weights"):
        (folder / "model.safetensors").unlink()
    elif damage == "bad manifest":
        (folder / "manifest.json").write_text("{")
    if damage == "no weights":
        (folder / "manifest.json").unlink()
    if damage == "no folder":
        folder = folder / "absent"
    with pytest.raises(DataError, match=str(folder)):
        staging.verify(str(folder), version)


class Slow(staging.Here):
    """Weights that are on their way for longer than anybody would wait for an answer."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()

    async def bring(self, path: str, version: Version) -> str:
        await self.arrived.wait()
        return path


def test_weights_may_be_longer_on_their_way_than_an_answer(weights: Path) -> None:
    async def check() -> None:
        folders = Slow()
        engine = SGLangEngine("e7", "http://127.0.0.1:1", "t", folders=folders)
        staged = asyncio.create_task(engine.stage(str(weights), Version(1), deadline_s=0.0))
        await asyncio.sleep(0)
        folders.arrived.set()
        assert await staged >= 0.0
        await engine.aclose()

    asyncio.run(check())
