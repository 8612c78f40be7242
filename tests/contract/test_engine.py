"""What every `ports.Engine` must do. The embedded engine always, real SGLang where its environment is named.

One process per kind serves the whole module; tests leave it unpaused and say through `served.holds` what it serves.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import AgentRLError, DataError, DeadlineError, EngineLost
from agentrl.records import LoadReport, Version
from agentrl.serve.sglang import SGLangEngine
from tests.engines import (
    VOCAB,
    Served,
    ask,
    client,
    logprob_gap,
    make_checkpoint,
    plain_logits,
    prompt_of,
    serve,
    until,
)
from tests.live.sglang.marks import needs_sglang

pytestmark = pytest.mark.live

EXACT = 3e-5  # float32 against a plain forward pass, hundreds of tokens
SLACK = 8  # tokens of a known prefix that a block-wise cache may compute again


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return make_checkpoint(folder / "first", 1), make_checkpoint(folder / "second", 2)


@pytest.fixture(
    scope="module",
    params=["embedded", pytest.param("sglang", marks=needs_sglang)],
)
def served(
    request: pytest.FixtureRequest, checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serve(request.param, tmp_path_factory.mktemp(request.param), *checkpoints) as running:
        yield running


async def running(engine: SGLangEngine) -> int:
    return sum(load.running for load in await engine.loads(deadline_s=10))


async def swap(engine: SGLangEngine, served: Served, folder: Path) -> LoadReport:
    version = Version(next(served.versions))
    report = await engine.swap(str(folder), version, deadline_s=60)
    served.holds = folder
    assert report.version == version
    return report


# --- identity ---


def test_it_proves_what_it_is(served: Served) -> None:
    async def check() -> None:
        async with client(served) as engine:
            info = await engine.info(deadline_s=10)
            assert info.ranks >= 1
            assert info.slots == 8 * info.ranks
            assert info.context_tokens == 2048
            assert info.kv_tokens >= 16_384
            assert await engine.ready(deadline_s=10)
            loads = await engine.loads(deadline_s=10)
            assert [load.rank for load in loads] == list(range(info.ranks))
            assert all(load.kv_total_tokens >= load.kv_used_tokens >= 0 for load in loads)

    asyncio.run(check())


def test_a_wrong_token_is_turned_away(served: Served) -> None:
    async def check() -> None:
        engine = SGLangEngine("e0", served.url, "wrong")
        try:
            with pytest.raises(EngineLost, match="401"):
                await engine.info(deadline_s=10)
        finally:
            await engine.aclose()

    asyncio.run(check())


# --- generation ---


def test_logprobs_are_those_of_a_plain_forward_pass(served: Served) -> None:
    """Many lengths at once, more than there are slots: batching and chunking change nothing."""

    async def check() -> None:
        prompts = [prompt_of(n, seed=1000 + n) for n in (1, 2, 3, 17, 64, 65, 200, 333, 600, 90, 5)]
        async with client(served) as engine:
            replies = await asyncio.gather(*(ask(engine, p, 20) for p in prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            assert (len(reply.tokens), reply.finish, reply.prompt_tokens) == (20, "length", len(prompt))
            assert logprob_gap(reply, prompt, served.holds) < EXACT

    asyncio.run(check())


def test_temperature_divides_the_logits(served: Served) -> None:
    async def check() -> None:
        prompt = prompt_of(30, seed=70)
        async with client(served) as engine:
            reply = await ask(engine, prompt, 20, temperature=0.7)
        assert logprob_gap(reply, prompt, served.holds, temperature=0.7) < EXACT

    asyncio.run(check())


def test_greedy_takes_the_likeliest_and_stops_where_told(served: Served) -> None:
    async def check() -> None:
        prompt = prompt_of(40, seed=71)
        async with client(served) as engine:
            free = await ask(engine, prompt, 12, temperature=0.0)
            stop = free.tokens[5]
            stopped = await ask(engine, prompt, 12, temperature=0.0, stop_token_ids=(stop,))
        likeliest = plain_logits(served.holds, [*prompt, *free.tokens])[len(prompt) - 1 : -1].argmax(-1)
        assert list(free.tokens) == likeliest.tolist()
        end = free.tokens.index(stop) + 1
        assert stopped.tokens == free.tokens[:end]
        assert stopped.finish == "stop"

    asyncio.run(check())


def test_top_p_leaves_only_the_likeliest(served: Served) -> None:
    async def check() -> None:
        prompt = prompt_of(40, seed=72)
        async with client(served) as engine:
            reply = await ask(engine, prompt, 40, top_p=0.3)
        probabilities = plain_logits(served.holds, [*prompt, *reply.tokens])[len(prompt) - 1 : -1].softmax(-1)
        for row, token in zip(probabilities, reply.tokens, strict=True):
            assert float(row[row > row[token]].sum()) < 0.3 + 1e-4

    asyncio.run(check())


@pytest.mark.parametrize("prompt", [[], [VOCAB], [1, -1], [1] * 2048, [1] * 2040])
def test_what_cannot_be_computed_is_refused(served: Served, prompt: list[int]) -> None:
    async def check() -> None:
        async with client(served) as engine:
            with pytest.raises(AgentRLError, match=r"answered 400|outside of 0"):
                await ask(engine, prompt, 16)
            assert (await ask(engine, [1], 1)).finish == "length"

    asyncio.run(check())


def test_a_rid_in_use_is_refused(served: Served) -> None:
    async def check() -> None:
        rid = uuid.uuid4().hex
        async with client(served) as engine, asyncio.TaskGroup() as group:
            first = group.create_task(ask(engine, prompt_of(20, 1), 1900, rid=rid))
            await until(lambda: _is(running(engine), 1))
            with pytest.raises(AgentRLError, match="Duplicate"):
                await ask(engine, prompt_of(20, 1), 4, rid=rid)
            await engine.abort(rid, deadline_s=10)
            await first

    asyncio.run(check())


# --- prefix reuse ---


def test_the_next_turn_reuses_the_last(served: Served) -> None:
    async def check() -> None:
        async with client(served) as engine:
            history, known = prompt_of(150, seed=80), 0
            for turn in range(3):
                reply = await ask(engine, history, 30)
                assert reply.cached_tokens >= known - 1 - SLACK
                assert logprob_gap(reply, history, served.holds) < EXACT
                history = [*history, *reply.tokens]
                known = len(history)
                history += prompt_of(25, seed=81 + turn)

    asyncio.run(check())


def test_siblings_share_their_prompt_and_ranks_share_nothing(served: Served) -> None:
    async def check() -> None:
        async with client(served) as engine:
            prompt = prompt_of(200, seed=90)
            first = await ask(engine, prompt, 8)
            siblings = await asyncio.gather(*(ask(engine, prompt, 8) for _ in range(6)))
            assert first.cached_tokens == 0
            assert all(s.cached_tokens >= len(prompt) - 1 - SLACK for s in siblings)
            assert all(logprob_gap(s, prompt, served.holds) < EXACT for s in siblings)
            for rank in range(1, served.info.ranks):
                elsewhere = await ask(engine, prompt, 8, rank=rank)
                assert (elsewhere.cached_tokens, elsewhere.rank) == (0, rank)

    asyncio.run(check())


def test_siblings_that_come_together_prefill_once(served: Served) -> None:
    if served.info.kind == "sglang":
        pytest.skip("SGLang caches a prompt once it is computed: those that come before that compute it too")

    async def check() -> None:
        async with client(served) as engine:
            prompt = prompt_of(400, seed=91)
            siblings = await asyncio.gather(*(ask(engine, prompt, 8) for _ in range(8)))
            computed_whole = sum(s.cached_tokens < len(prompt) - 1 - SLACK for s in siblings)
            assert computed_whole == 1

    asyncio.run(check())


# --- abort, pause ---


def test_abort_returns_what_there_is(served: Served) -> None:
    async def check() -> None:
        rid, prompt = uuid.uuid4().hex, prompt_of(50, seed=100)
        async with client(served) as engine, asyncio.TaskGroup() as group:
            before = await engine.generated_tokens(deadline_s=10)
            call = group.create_task(ask(engine, prompt, 1900, rid=rid))
            await until(lambda: _is(running(engine), 1))
            await engine.abort(rid, deadline_s=10)
            reply = await call
            assert reply.finish == "abort"
            assert len(reply.tokens) < 1900
            assert logprob_gap(reply, prompt, served.holds) < EXACT
            resumed = await ask(engine, [*prompt, *reply.tokens], 4)
            assert resumed.cached_tokens >= len(prompt) + len(reply.tokens) - 1 - SLACK
            assert await engine.generated_tokens(deadline_s=10) >= before + len(reply.tokens)

    asyncio.run(check())


def test_a_cancelled_call_frees_the_engine(served: Served) -> None:
    async def check() -> None:
        async with client(served) as engine:
            call = asyncio.ensure_future(ask(engine, prompt_of(50, seed=101), 1900))
            await until(lambda: _is(running(engine), 1))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: _is(running(engine), 0))

    asyncio.run(check())


def test_a_deadline_frees_the_engine(served: Served) -> None:
    async def check() -> None:
        async with client(served) as engine:
            await engine.pause(deadline_s=10)
            try:
                with pytest.raises(DeadlineError, match="e0"):
                    await engine.generate(uuid.uuid4().hex, [1, 2, 3], sampling(1900), rank=0, deadline_s=0.2)
            finally:
                await engine.resume(deadline_s=10)
            await until(lambda: _is(running(engine), 0))
            assert (await ask(engine, [1, 2, 3], 2)).finish == "length"
            await until(lambda: _is(running(engine), 0), deadline_s=2.0)  # nor did it come to run after the pause

    asyncio.run(check())


def test_pause_in_place_holds_everything(served: Served) -> None:
    async def check() -> None:
        prompt = prompt_of(60, seed=102)
        async with client(served) as engine, asyncio.TaskGroup() as group:
            call = group.create_task(ask(engine, prompt, 400))
            await until(lambda: _is(running(engine), 1))
            await engine.pause(deadline_s=10)
            held = group.create_task(ask(engine, prompt, 4))
            assert not await engine.ready(deadline_s=10)
            before = await engine.generated_tokens(deadline_s=10)
            assert await engine.generated_tokens(deadline_s=10) == before
            assert not call.done()
            assert not held.done()
            await engine.resume(deadline_s=10)
            reply = await call
            assert len(reply.tokens) == 400
            assert logprob_gap(reply, prompt, served.holds) < EXACT
            assert (await held).finish == "length"
            assert await engine.ready(deadline_s=10)

    asyncio.run(check())


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_the_other_pause_modes(served: Served, mode: str) -> None:
    """Not in the port (yet), but on the wire: abort ends what runs, retract computes it again and loses no token."""

    async def check() -> None:
        prompt = prompt_of(60, seed=103)
        async with client(served) as engine, asyncio.TaskGroup() as group:
            call = group.create_task(ask(engine, prompt, 400))
            await until(lambda: _is(running(engine), 1))
            await engine._ok("POST", "/pause_generation", {"mode": mode}, 20)
            if mode == "abort":
                assert (await call).finish == "abort"
            await engine.resume(deadline_s=10)
            reply = await call
            assert len(reply.tokens) == 400 or mode == "abort"
            assert logprob_gap(reply, prompt, served.holds) < EXACT

    asyncio.run(check())


def test_a_request_aborted_before_it_ran(served: Served) -> None:
    async def check() -> None:
        rid = uuid.uuid4().hex
        async with client(served) as engine, asyncio.TaskGroup() as group:
            fillers = [group.create_task(ask(engine, prompt_of(20, i), 1500)) for i in range(8)]
            await until(lambda: _is(running(engine), 8))
            queued = group.create_task(ask(engine, prompt_of(30, 9), 4, rid=rid))
            await until(lambda: _waiting(engine, 1))
            await engine.abort(rid, deadline_s=10)
            reply = await queued
            assert (reply.finish, reply.tokens, reply.prompt_tokens, reply.cached_tokens) == ("abort", (), 30, 0)
            for call in fillers:
                call.cancel()

    asyncio.run(check())


# --- weights ---


def test_swap_in_place_marks_each_token_with_its_version(served: Served) -> None:
    """Tokens before the mark come from the old weights, those after from the new ones on the old KV: proved by the
    log-probabilities, which agree with a plain forward pass only if the mark is at exactly the right token."""

    async def check() -> None:
        prompts = [prompt_of(n, seed=n + 110) for n in (40, 75, 130)]
        async with client(served) as engine, asyncio.TaskGroup() as group:
            old, new = served.holds, served.other
            before = (await engine.info(deadline_s=10)).version
            calls = [group.create_task(ask(engine, p, 600)) for p in prompts]
            await until(lambda: _is(running(engine), 3))
            await engine.stage(str(new), Version(before + 1), deadline_s=30)
            report = await swap(engine, served, new)
            assert report.pause_s < 20
            assert report.lost_tokens == 0
            for prompt, call in zip(prompts, calls, strict=True):
                reply = await call
                assert len(reply.tokens) == 600
                assert [s.version for s in reply.spans] == [before, report.version]
                mark = reply.spans[0].end
                assert logprob_gap(reply, prompt, old, continued=(new, len(prompt) + mark - 1)) < EXACT

    asyncio.run(check())


def test_regenerate_ends_what_runs_and_holds_back_what_comes(served: Served) -> None:
    """What is in flight ends as aborted, its tokens counted as lost; a call made meanwhile is of the new version."""

    async def check() -> None:
        async with client(served) as engine, asyncio.TaskGroup() as group:
            calls = [group.create_task(ask(engine, prompt_of(50, seed=n + 140), 1500)) for n in range(2)]
            await until(lambda: _is(running(engine), 2))
            version = Version(next(served.versions))
            changing = group.create_task(
                engine.swap(str(served.other), version, deadline_s=60, regenerate=True, grace_s=0.0)
            )
            await asyncio.sleep(0)
            late = group.create_task(ask(engine, prompt_of(50, seed=150), 8))
            report = await changing
            served.holds = served.other
            replies = [await call for call in calls]
            assert {reply.finish for reply in replies} == {"abort"}
            assert report.lost_tokens == sum(len(reply.tokens) for reply in replies)
            assert [span.version for span in (await late).spans] == [version]

    asyncio.run(check())


def test_regenerate_waits_its_grace_for_what_ends_by_itself(served: Served) -> None:
    async def check() -> None:
        async with client(served) as engine, asyncio.TaskGroup() as group:
            call = group.create_task(ask(engine, prompt_of(50, seed=160), 60))
            await until(lambda: _is(running(engine), 1))
            version = Version(next(served.versions))
            report = await engine.swap(str(served.other), version, deadline_s=120, regenerate=True, grace_s=60.0)
            served.holds = served.other
            assert (await call).finish == "length"
            assert report.lost_tokens == 0

    asyncio.run(check())


def test_history_of_other_weights_is_never_reused(served: Served) -> None:
    async def check() -> None:
        prompt = prompt_of(120, seed=120)
        async with client(served) as engine:
            await ask(engine, prompt, 8)
            assert (await ask(engine, prompt, 8)).cached_tokens > 100
            report = await swap(engine, served, served.other)
            reply = await ask(engine, prompt, 8, temperature=0.0)
            assert reply.cached_tokens == 0
            assert [span.version for span in reply.spans] == [report.version]
            assert logprob_gap(reply, prompt, served.holds) < EXACT
            assert (await engine.info(deadline_s=10)).version == report.version

    asyncio.run(check())


def test_equal_weights_have_equal_checksums(served: Served) -> None:
    async def check() -> None:
        async with client(served) as engine:
            folders = [served.holds, served.other, served.holds]
            sums = [(await swap(engine, served, folder)).checksum for folder in folders]
            assert sums[0] == sums[2] != sums[1]
            assert sums[0]

    asyncio.run(check())


def test_a_swap_that_is_cancelled_leaves_it_serving(served: Served) -> None:
    async def check() -> None:
        async with client(served) as engine:
            version = Version(next(served.versions))
            call = asyncio.ensure_future(engine.swap(str(served.holds), version, deadline_s=30))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await engine.ready(deadline_s=10)
            assert (await ask(engine, [1, 2, 3], 4)).finish == "length"

    asyncio.run(check())


@pytest.mark.parametrize("damage", ["absent", "empty", "truncated", "half"])
def test_damaged_weights_change_nothing(served: Served, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "v"
    if damage != "absent":
        shutil.copytree(served.other, folder)
        file = folder / "model.safetensors"
        size = {"empty": 0, "truncated": file.stat().st_size - 1000, "half": file.stat().st_size // 2}[damage]
        with file.open("rb+") as handle:
            handle.truncate(size)

    async def check() -> None:
        prompt = prompt_of(50, seed=130)
        async with client(served) as engine:
            version = (await engine.info(deadline_s=10)).version
            with pytest.raises(DataError, match=r"e0.*refused"):
                await engine.swap(str(folder), Version(next(served.versions)), deadline_s=60)
            assert (await engine.info(deadline_s=10)).version == version
            reply = await ask(engine, prompt, 12)
            assert [span.version for span in reply.spans] == [version]
            assert logprob_gap(reply, prompt, served.holds) < EXACT

    asyncio.run(check())


def sampling(new: int) -> Any:
    from agentrl.records import Sampling

    return Sampling(max_new_tokens=new)


async def _is(value: Coroutine[Any, Any, int], wanted: int) -> bool:
    return await value == wanted


async def _waiting(engine: SGLangEngine, wanted: int) -> bool:
    return sum(load.waiting for load in await engine.loads(deadline_s=10)) == wanted
