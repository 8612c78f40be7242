"""Continuous batching: which requests run, what each step computes, and what a pause or new weights do to them.

Single-threaded and without I/O: `loop.py` calls it from one thread, tests call it directly. All data-parallel ranks
share one forward pass; their slots, KV budgets and prefix caches are separate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Literal

import msgspec
import torch
from torch import Tensor

from agentrl.serve.embedded.model import Kv, Model
from agentrl.serve.embedded.options import Options
from agentrl.serve.embedded.prefix import PrefixCache
from agentrl.serve.embedded.request import Request, now
from agentrl.serve.embedded.sampling import Sampler
from agentrl.serve.embedded.weights import Weights

BLOCK_TOKENS = 4
PauseMode = Literal["abort", "retract", "in_place"]


class RankLoad(msgspec.Struct, frozen=True):
    running: int
    waiting: int
    used_tokens: int  # reserved by running requests and held by the prefix cache


class Counters(msgspec.Struct):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    requests: int = 0
    aborted: int = 0
    retracted: int = 0


class Rank:
    """One data-parallel rank: its queue, what it runs, its share of KV."""

    def __init__(self, kv: Kv, kv_tokens: int) -> None:
        self.kv = kv
        self.kv_tokens = kv_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.cache = PrefixCache(kv_tokens // BLOCK_TOKENS, BLOCK_TOKENS)
        self.pool = kv.pool(kv_tokens // BLOCK_TOKENS, BLOCK_TOKENS)
        self.reserved = 0
        self.counters = Counters()

    def load(self) -> RankLoad:
        used = self.reserved + self.cache.used * BLOCK_TOKENS
        return RankLoad(running=len(self.running), waiting=len(self.waiting), used_tokens=used)

    def admit(self, request: Request, row: int) -> None:
        """Give it a row and whatever prefix is held; the last prompt token is always computed, for its logits."""
        self.running.append(request)
        self.reserved += request.reserve
        blocks = self.cache.match(request.namespace, request.tokens[:-1])
        request.row, request.computed = row, len(blocks) * BLOCK_TOKENS
        if blocks:
            self.kv.restore(row, self.pool, blocks)
        if not request.entered:
            request.entered = now()
            request.cached = request.computed
            self.counters.prompt_tokens += request.prompt_tokens
            self.counters.cached_tokens += request.cached
        self.cache.shrink((self.kv_tokens - self.reserved) // BLOCK_TOKENS)

    def keep(self, request: Request) -> None:
        """Hold what a request has computed so far for whoever comes with the same beginning."""
        fresh = self.cache.insert(request.namespace, request.tokens[: request.computed])
        if fresh:
            self.kv.save(request.row, self.pool, fresh, BLOCK_TOKENS)

    def release(self, request: Request) -> None:
        self.running.remove(request)
        self.reserved -= request.reserve
        self.cache.shrink((self.kv_tokens - self.reserved) // BLOCK_TOKENS)
        request.row, request.computed = -1, 0

    def computes_for(self, request: Request) -> bool:
        """Whether a running request is about to compute more of this one's prefix than is held: worth waiting for."""
        ahead = [r for r in self.running if r.missing > 1 and r.namespace == request.namespace]
        if not ahead:
            return False
        want = (len(self.cache.match(request.namespace, request.tokens[:-1])) + 1) * BLOCK_TOKENS
        start = request.tokens[:want]
        return want < len(request.tokens) and any(r.tokens[:want] == start for r in ahead)


class Core:
    def __init__(self, model: Model, options: Options) -> None:
        self.model = model
        self.options = options
        self.version = options.weight_version
        self.kv = Kv(model.config, model.dtype, rows=options.ranks * options.slots, context=options.context_length)
        self.ranks = [Rank(self.kv, options.kv_tokens) for _ in range(options.ranks)]
        self.paused = False
        self._live: dict[str, Request] = {}
        self._sampler = Sampler(options.random_seed)
        self._batch: _Batch | None = None
        self._turn = 0
        self._quiet: deque[Callable[[], None]] = deque()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute something, so that the first request does not pay for what torch sets up on first use."""
        logits = self.model.prefill(self.kv, [(0, [0, 0], 0)])
        self.model.decode(self.kv, logits.argmax(-1), torch.tensor([0]), torch.tensor([2]))

    # --- requests ---

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return not self.paused and bool(self._live)

    @property
    def idle(self) -> bool:
        return not self._live

    def next_rank(self) -> int:
        self._turn = (self._turn + 1) % len(self.ranks)
        return self._turn

    def submit(self, request: Request) -> None:
        """ValueError where the rid is in use."""
        if request.rid in self._live:
            raise ValueError(f"Duplicate request ID detected: {request.rid}")
        request.marks.append((0, self.version))
        self._live[request.rid] = request
        self.ranks[request.rank].waiting.append(request)
        self.ranks[request.rank].counters.requests += 1

    def abort(self, rid: str) -> None:
        request = self._live.get(rid)
        if request is not None:
            request.abort()
            self._end(request)

    def abort_all(self) -> None:
        for rid in list(self._live):
            self.abort(rid)

    # --- administration, between two steps ---

    def pause(self, mode: PauseMode) -> None:
        self.paused = True
        self._act_if_quiet()
        if mode == "abort":
            self.abort_all()
        elif mode == "retract":
            for rank in self.ranks:
                for request in reversed(list(rank.running)):
                    rank.release(request)
                    request.retractions += 1
                    rank.counters.retracted += 1
                    rank.waiting.appendleft(request)
            self._batch = None

    def resume(self) -> None:
        self.paused = False

    def when_quiet(self, action: Callable[[], None]) -> None:
        """Run `action` when no request computes: now if paused or idle, else once what runs has ended; nothing is
        admitted meanwhile."""
        self._quiet.append(action)
        self._act_if_quiet()

    def _act_if_quiet(self) -> None:
        if self.paused or not any(rank.running for rank in self.ranks):
            while self._quiet:
                self._quiet.popleft()()

    def swap(self, weights: Weights, version: str | None) -> None:
        """The next step computes with `weights`. Running requests keep their KV and begin a new version span."""
        self.model.weights = weights
        if version is not None and version != self.version:
            self.version = version
            for request in self._live.values():
                request.marks.append((request.generated, version))

    def flush(self) -> bool:
        """Forget every held prefix; refused while requests run."""
        if any(rank.running for rank in self.ranks):
            return False
        for rank in self.ranks:
            rank.cache.clear()
        return True

    # --- the step ---

    def step(self) -> None:
        """Admit, compute a bounded amount of prompt, then one token for every request that has its prompt."""
        self._admit()
        self._prefill()
        if self._batch is None:
            self._batch = self._gather()
        if self._batch is not None:
            self._decode(self._batch)
        self._act_if_quiet()

    def _admit(self) -> None:
        if self._quiet:
            return
        for rank in self.ranks:
            if not rank.waiting:
                continue
            later: list[Request] = []
            while rank.waiting and len(rank.running) < self.options.slots:
                request = rank.waiting.popleft()
                if rank.computes_for(request):
                    later.append(request)
                elif rank.reserved + request.reserve > rank.kv_tokens:
                    rank.waiting.appendleft(request)
                    break
                else:
                    rank.admit(request, self._free_row())
                    self._batch = None
            rank.waiting.extendleft(reversed(later))

    def _free_row(self) -> int:
        taken = {request.row for rank in self.ranks for request in rank.running}
        return next(row for row in range(len(taken) + 1) if row not in taken)

    def _prefill(self) -> None:
        budget = self.options.prefill_tokens
        parts: list[tuple[int, list[int], int]] = []
        done: list[tuple[int, Request]] = []
        for request in (r for rank in self.ranks for r in rank.running):
            if request.missing < 2 or budget < 1:
                continue
            start, count = request.computed, min(request.missing, budget)
            budget -= count
            parts.append((request.row, request.tokens[start : start + count], start))
            request.computed += count
            if not request.missing:
                done.append((len(parts) - 1, request))
        if not parts:
            return
        self._batch = None
        logits = self.model.prefill(self.kv, parts)
        if done:
            finished = [request for _, request in done]
            self._accept(finished, *self._sampler.sample(logits[[index for index, _ in done]], finished))
            for request in finished:
                if request.finish is None:
                    self.ranks[request.rank].keep(request)

    def _decode(self, batch: _Batch) -> None:
        logits = self.model.decode(self.kv, batch.tokens, batch.rows, batch.positions)
        for request in batch.requests:
            request.computed += 1
        tokens, logprobs = self._sampler.sample(logits, batch.requests)
        batch.tokens = tokens
        batch.positions += 1
        self._accept(batch.requests, tokens, logprobs)

    def _accept(self, requests: list[Request], tokens: Tensor, logprobs: Tensor) -> None:
        at = 0.0
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                request.abort("the model's logits are not finite", 500)
                self._end(request, poisoned=True)
                continue
            if not request.prefilled:
                at = at or now()
                request.prefilled = at
            request.append(token, logprob)
            self.ranks[request.rank].counters.generation_tokens += 1
            if request.finish is not None:
                self._end(request)

    def _end(self, request: Request, *, poisoned: bool = False) -> None:
        rank = self.ranks[request.rank]
        if request.row < 0:
            rank.waiting.remove(request)
        else:
            if poisoned:
                self.kv.wipe(request.row)
            else:
                rank.keep(request)
            rank.release(request)
            self._batch = None
        if request.finish is not None and request.finish["type"] == "abort":
            rank.counters.aborted += 1
        del self._live[request.rid]
        request.on_end(request)

    def _gather(self) -> _Batch | None:
        """Close the gaps between rows, then lay out the requests that decode."""
        running = sorted((r for rank in self.ranks for r in rank.running), key=lambda r: r.row)
        for request in reversed(running):
            free = self._free_row()
            if request.row < free:
                break
            self.kv.move(request.row, free, request.computed)
            request.row = free
        ready = sorted((r for r in running if r.missing == 1), key=lambda r: r.row)
        return _Batch(ready) if ready else None


class _Batch:
    """The requests that decode together until one comes or goes, in the order of their rows."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.rows = torch.tensor([request.row for request in requests])
        self.tokens = torch.tensor([request.tokens[-1] for request in requests])
        self.positions = torch.tensor([request.computed for request in requests])
