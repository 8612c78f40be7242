"""A random tiny policy in the GLM-4-MoE layout, batches for it, and the run's HTTP face with nothing behind it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from agentrl import wire
from agentrl.records import (
    AttemptId,
    Batch,
    GroupId,
    GroupProof,
    Span,
    StepReport,
    Stop,
    TaskId,
    Trajectory,
    Verdict,
    Version,
)


def make_model(folder: Path, *, seed: int = 0, **sizes: int) -> Path:
    import torch
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    Glm4MoeForCausalLM(Glm4MoeConfig(**(shape | sizes))).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"note": "stands for the tokenizer"}')
    return folder


def trajectory(
    rng: random.Random,
    *,
    group: int = 0,
    member: int = 0,
    reward: float = 0.0,
    length: int = 200,
    vocabulary: int = 512,
    versions: Sequence[int] = (0,),
    prompt: Sequence[int] = (),
) -> Trajectory:
    """A prompt, then replies of 4 to 24 tokens with observations between them; each reply has one of `versions`."""
    tokens = list(prompt) or [rng.randrange(vocabulary) for _ in range(max(1, length // 4))]
    trainable = [False] * len(tokens)
    spans = []
    while len(tokens) < length:
        reply = min(rng.randint(4, 24), length - len(tokens))
        spans.append(Span(len(tokens), len(tokens) + reply, Version(versions[len(spans) % len(versions)])))
        seen = min(rng.randint(3, 20), length - len(tokens) - reply)
        tokens += [rng.randrange(vocabulary) for _ in range(reply + seen)]
        trainable += [True] * reply + [False] * seen
    return Trajectory(
        attempt=AttemptId(GroupId(group), member, 0),
        task=TaskId(f"toy-{group}"),
        kind="toy",
        tokens=tuple(tokens),
        trainable=tuple(trainable),
        logprobs=tuple(-rng.uniform(5.0, 7.5) if t else 0.0 for t in trainable),
        spans=tuple(spans),
        turns=(),
        stop=Stop.SUBMITTED,
        verdict=Verdict(reward=reward),
        began_s=0.0,
        ended_s=1.0,
    )


def make_batch(
    *,
    id: int = 0,  # noqa: A002
    version: int = 0,
    groups: int = 2,
    siblings: int = 4,
    lengths: tuple[int, int] = (30, 60),
    vocabulary: int = 512,
    seed: int = 0,
) -> Batch:
    rng = random.Random(f"{seed}-{id}")
    made = [
        trajectory(
            rng,
            group=g,
            member=m,
            reward=float(rng.random() < 0.5) if m > 1 else float(m),  # never uniform
            length=rng.randint(*lengths),
            vocabulary=vocabulary,
            versions=(version,),
        )
        for g in range(groups)
        for m in range(siblings)
    ]
    proofs = tuple(
        GroupProof(group=GroupId(g), oldest=Version(version), tokens=((Version(version), 1),)) for g in range(groups)
    )
    return Batch(id=id, version=Version(version), bound=4, proofs=proofs, trajectories=tuple(made))


class Face:
    """Serves `/v1/trainer/*` as a run would: batch i for version i, one lease, idempotent acks, over after `steps`."""

    def __init__(self, steps: int, make: Callable[[int], Batch], token: str = "secret") -> None:
        self.steps = steps
        self.version = 0
        self.reports: list[StepReport] = []
        self.claims: list[wire.ClaimRequest] = []
        self.renewals = 0
        self.changed = asyncio.Condition()
        self.hold_ack = False  # an ack is received but never answered or counted: the kill between save and ack
        self.acks_seen = 0
        self.idle = False  # no batch, ever
        self._make = make
        self._token = token
        self._lease = ""

    @asynccontextmanager
    async def serve(self, port: int = 0) -> Any:
        app = web.Application(client_max_size=2**28)
        app.add_routes(
            [web.post(wire.CLAIM, self._claim), web.post(wire.RENEW, self._renew), web.post(wire.ACK, self._ack)]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(condition)

    def expire(self) -> None:
        self._lease = ""

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _claim(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {self._token}":
            return _refuse(401, "wrong token")
        ask = msgspec.json.decode(await request.read(), type=wire.ClaimRequest)
        self.claims.append(ask)
        await self._notify()
        if self.version >= self.steps:
            return _refuse(410, "the run is over")
        if ask.version != self.version:
            return _refuse(409, f"the run expects version {self.version}", expected=self.version)
        if self.idle:
            await asyncio.sleep(ask.wait_s)
            return web.Response(status=204)
        self._lease = f"lease-{len(self.claims)}"
        claim = wire.Claim(lease=self._lease, batch=self._make(self.version))
        return web.Response(body=msgspec.msgpack.encode(claim), content_type=wire.MSGPACK)

    async def _renew(self, request: web.Request) -> web.Response:
        ask = msgspec.json.decode(await request.read(), type=wire.RenewRequest)
        if ask.lease != self._lease:
            return _refuse(410, "the lease is gone")
        self.renewals += 1
        await self._notify()
        return web.json_response({})

    async def _ack(self, request: web.Request) -> web.Response:
        ack = msgspec.json.decode(await request.read(), type=wire.Ack)
        self.acks_seen += 1
        await self._notify()
        if self.hold_ack:
            await asyncio.Event().wait()
        if any(r.batch == ack.report.batch for r in self.reports):
            return web.json_response({})
        if ack.lease != self._lease:
            return _refuse(410, "the lease is gone")
        self.reports.append(ack.report)
        self.version = ack.report.version
        await self._notify()
        return web.json_response({})


def _refuse(status: int, message: str, expected: int | None = None) -> web.Response:
    error = {"message": message} | ({} if expected is None else {"expected": expected})
    return web.json_response({"error": error}, status=status)
