"""Seconds of one decode step of one 8-GPU engine, from bytes, FLOPs and links (roofline), for two topologies.

tp8     one request and KV domain over 8 GPUs. Weights are split, the latent KV is not: every GPU holds and reads all
        of it, so the pool is one GPU's share of memory, and each layer pays two all-reduces.
dp8ep8  8 ranks, each with its own KV pool and a full copy of attention; experts are spread over the GPUs and all ranks
        step together, paced by the slowest, with two all-to-alls a layer.

    step = ( max over ranks of max(attention bytes / bandwidth, attention FLOPs / peak)
             + max(touched expert bytes / bandwidth, expert FLOPs / peak) + links ) * (1 + drafts) + work on CPUs
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from agentrl.records import Record
from agentrl.sim.fleet.constants import (
    B300,
    CHUNK_TOKENS,
    CHUNK_TOKENS_DP,
    GLM_5_2,
    INDEX_BYTES_PER_KEY,
    SLOTS_DP,
    SLOTS_TP,
    STAGE_BYTES_S,
    SWAP_FIXED_S,
    Efficiency,
    Gpu,
    ModelSpec,
)

Topology = Literal["tp8", "dp8ep8"]
_BYTES = {"bf16": 2.0, "fp8": 1.0}


@dataclass(slots=True)
class Work:
    """What one rank asks of a step: sequences that decode, their context tokens in all, and a prefill chunk."""

    running: int = 0
    context: float = 0.0
    chunk: float = 0.0  # tokens of the chunk; 0: none
    chunk_context: float = 0.0  # mean context of its tokens


class Costs(Protocol):
    """What an engine needs to know of its hardware. accepted: tokens of one sequence per step; chunk: prefill tokens
    of one rank per step; slots and pool_tokens: of one rank."""

    ranks: int
    slots: int
    pool_tokens: float
    accepted: float
    chunk: float
    headroom: float

    def step(self, works: Sequence[Work], slowdown: float) -> tuple[float, float]:
        """(seconds of a step now, further seconds for each step as contexts grow)."""
        ...

    def stage_s(self) -> float: ...

    def swap_s(self) -> float: ...


class Serving(Record):
    """The choices of one serving stack. mtp: drafted tokens per step, 0 for none. slots: of one rank, 0 for the
    topology's own. offload: a host cache tier whose reads never come (its cost without its use)."""

    topology: Topology = "dp8ep8"
    kv_dtype: Literal["bf16", "fp8"] = "fp8"
    weights_dtype: Literal["bf16", "fp8"] = "fp8"
    mtp: int = 3
    offload: bool = False
    slots: int = 0
    gpus: int = 8
    efficiency: Efficiency = Efficiency()


class Roofline:
    """`Costs` of GLM-5.2 on B300 by default. Pure; numbers that never change are worked out once."""

    def __init__(self, serving: Serving, model: ModelSpec = GLM_5_2, gpu: Gpu = B300) -> None:
        self.serving, self.model, self.gpu = serving, model, gpu
        eff, per_param = serving.efficiency, _BYTES[serving.weights_dtype]
        self._tp = serving.topology == "tp8"
        self.ranks = 1 if self._tp else serving.gpus
        self.slots = serving.slots or (SLOTS_TP if self._tp else SLOTS_DP)
        self.chunk = float(CHUNK_TOKENS if self._tp else CHUNK_TOKENS_DP)
        self.headroom = eff.headroom
        self.queries = serving.mtp + 1  # tokens of one sequence that a step computes
        self.accepted = sum(eff.accept**i for i in range(self.queries))

        split = serving.gpus
        attention_split = split if self._tp else 1
        self._bandwidth = gpu.hbm_bytes_s * eff.hbm
        peak = gpu.fp8_flops if serving.weights_dtype == "fp8" else gpu.bf16_flops
        self._peak = peak * eff.flops
        self._link = gpu.nvlink_bytes_s * eff.nvlink
        self._skew = 1.0 if self._tp else eff.expert_skew

        attention = model.layers * model.attention_params
        self._attention_bytes = attention * per_param / attention_split
        self._routed_bytes = model.routed_params * per_param / split
        self._resident_bytes = model.resident_params * per_param / split
        self.weight_bytes = self._attention_bytes + self._routed_bytes + self._resident_bytes
        active = model.moe_layers * model.top_k * model.expert_params + model.resident_params
        self._missed = math.log1p(-model.top_k / model.experts)  # log chance that one token leaves an expert out
        self._expert_flops = 2.0 * active / split
        self._attention_flops = 2.0 * attention / attention_split
        per_pair = 2.0 * model.heads * (model.latent + model.value_latent) * model.layers
        self._pair_flops = per_pair / attention_split  # one query against one selected token
        indexers = model.layers / model.index_every
        self._index_flops = 2.0 * model.index_heads * model.index_dim * indexers  # against one token of the context
        self._topk = float(model.index_topk)
        self._index_bytes = INDEX_BYTES_PER_KEY * indexers
        self._latent_bytes = model.latent * _BYTES[serving.kv_dtype] * model.layers
        self.kv_bytes = self._latent_bytes + self._index_bytes
        self.pool_tokens = float(int((gpu.hbm_bytes * eff.memory - self.weight_bytes) / self.kv_bytes))

    def step(self, works: Sequence[Work], slowdown: float) -> tuple[float, float]:
        attention, slope, tokens, most = 0.0, 0.0, 0.0, 0
        for work in works:
            seconds, growth = self._attend(work)
            if seconds > attention:
                attention, slope = seconds, growth
            most = max(most, work.running)
            tokens += work.running * self.queries + work.chunk
        eff = self.serving.efficiency
        busy = attention + self._experts(tokens) + self._links(tokens)
        drafts = self.serving.mtp / self.model.layers
        on_cpu = (eff.step_s + self.serving.mtp * eff.draft_s + most * eff.sequence_s) * slowdown
        seconds = busy * (1 + drafts) + on_cpu + self._offload(works)
        return seconds * eff.derate, slope * (1 + drafts) * eff.derate

    def _attend(self, work: Work) -> tuple[float, float]:
        """Attention of one rank, and how much longer it takes one step later."""
        if not work.running and not work.chunk:
            return 0.0, 0.0
        topk, queries = self._topk, self.queries
        read, flops, growth = self._attention_bytes, 0.0, 0.0
        if work.running:
            mean = work.context / work.running
            chosen = min(mean, topk) * queries * work.running
            read += chosen * self._latent_bytes + work.context * self._index_bytes
            flops += chosen * self._pair_flops + work.context * queries * self._index_flops
            growth = work.running * self.accepted
        if work.chunk:
            chosen = min(work.chunk_context, topk) * work.chunk
            flops += chosen * self._pair_flops + work.chunk_context * work.chunk * self._index_flops
        flops += (work.running * queries + work.chunk) * self._attention_flops
        memory_s, compute_s = read / self._bandwidth, flops / self._peak
        if memory_s >= compute_s:
            return memory_s, growth * self._index_bytes / self._bandwidth
        return compute_s, growth * queries * self._index_flops / self._peak

    def _experts(self, tokens: float) -> float:
        touched = 1.0 - math.exp(tokens * self._missed)  # expected share of experts that some token picks
        read = touched * self._routed_bytes + self._resident_bytes
        return max(read / self._bandwidth, tokens * self._expert_flops / self._peak) * self._skew

    def _links(self, tokens: float) -> float:
        model, eff, gpus = self.model, self.serving.efficiency, self.serving.gpus
        across = (gpus - 1) / gpus
        if self._tp:
            moved = 2.0 * tokens * model.hidden * 2.0 * across  # ring all-reduce of BF16 activations
            return 2.0 * model.layers * (eff.all_reduce_s + moved / self._link)
        moved = tokens / gpus * model.top_k * model.hidden * across * 1.5  # mean of FP8 dispatch and BF16 combine
        return 2.0 * model.moe_layers * (eff.all_to_all_s + moved / self._link)

    def _offload(self, works: Sequence[Work]) -> float:
        """Write-through of new KV to host memory, in the step's way: the most loaded GPU decides."""
        if not self.serving.offload:
            return 0.0
        fresh = max(work.running * self.accepted + work.chunk for work in works)
        return self.serving.efficiency.offload_s + fresh * self.kv_bytes / self.gpu.host_bytes_s

    def stage_s(self) -> float:
        """One version's weights to the node's memory while it serves."""
        return self.model.total_params * _BYTES[self.serving.weights_dtype] / STAGE_BYTES_S

    def swap_s(self) -> float:
        """The pause: staged weights from host memory into all GPUs at once."""
        return SWAP_FIXED_S + self.weight_bytes / self.gpu.host_bytes_s


class Flat:
    """`Costs` of textbook queues: `slots_busy` servers of one token per second each, shared evenly by all who decode.

    Prefill is free and memory is endless.
    """

    def __init__(self, servers: int, *, token_s: float = 1.0, slots: int = 1 << 30, ranks: int = 1) -> None:
        self.ranks = ranks
        self.slots = slots
        self.pool_tokens = 1e15
        self.accepted = 1.0
        self.chunk = 1e15
        self.headroom = 0.0
        self._servers = servers
        self._token_s = token_s

    def step(self, works: Sequence[Work], slowdown: float) -> tuple[float, float]:
        busiest = max(work.running for work in works)
        return self._token_s * slowdown * max(1.0, busiest / self._servers), 0.0

    def stage_s(self) -> float:
        return 0.0

    def swap_s(self) -> float:
        return 0.0
