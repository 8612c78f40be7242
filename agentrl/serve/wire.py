"""What an engine answers, checked: nothing that it says is believed before it is consistent with what was asked.

Pure. `Nonsense` says what was wrong; the client adds which engine said it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, TypeVar

import msgspec

from agentrl.records import EngineInfo, RankLoad, Reply, Sampling, Span, Version

OLDEST_SGLANG = (0, 5, 20)  # /ready since 0.5.20, version spans per token since 0.5.19

B = TypeVar("B", bound=msgspec.Struct)


class Nonsense(Exception):
    """The engine's answer contradicts the request, itself, or its documented shape."""


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None


class _Meta(msgspec.Struct):
    id: str
    finish_reason: _Finish
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None  # absent where the request was aborted before it ran
    cached_tokens: int = 0
    dp_rank: int | None = None
    output_token_logprobs: list[tuple[float, int, Any]] = []
    queue_time: float | None = None
    forward_entry_time: float | None = None
    prefill_finished_time: float | None = None
    e2e_latency: float | None = None


class _Generated(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


class _Load(msgspec.Struct):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int


class _Loads(msgspec.Struct):
    loads: list[_Load]


class ModelInfo(msgspec.Struct):
    model_path: str
    weight_version: str | None = None


class _State(msgspec.Struct):
    effective_max_running_requests_per_dp: int = 0


class ServerInfo(msgspec.Struct):
    """The part of /server_info that is used. engine is set by the embedded engine only."""

    version: str
    engine: str = "sglang"
    port: int = 0
    served_model_name: str | None = None
    context_length: int | None = None
    max_req_input_len: int | None = None
    vocab_size: int | None = None
    max_total_num_tokens: int = 0
    max_running_requests: int | None = None
    internal_states: list[_State] = []
    disable_overlap_schedule: bool = False
    speculative_num_draft_tokens: int | None = None
    tp_size: int = 1

    @property
    def embedded(self) -> bool:
        return self.engine != "sglang"

    @property
    def in_flight(self) -> int:
        """Tokens of a request that one scheduler step may have sampled and not yet counted when weights change."""
        if self.embedded or self.disable_overlap_schedule:
            return 0
        return self.speculative_num_draft_tokens or 1


class Checksum(msgspec.Struct):
    per_engine_checksum: str | None = None


class Update(msgspec.Struct):
    success: bool
    message: str = ""


def decode(raw: bytes, kind: type[B]) -> B:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise Nonsense(f"{exc} in {raw[:120]!r}") from exc


def error_message(raw: bytes) -> str:
    """The message of a refusal: `{"error": {"message": ...}}`, or whatever text there is."""
    try:
        body = msgspec.json.decode(raw)
        error = body.get("error", body.get("message"))
        return str(error.get("message") if isinstance(error, dict) else error)
    except (msgspec.MsgspecError, AttributeError, UnicodeDecodeError):
        return raw[:200].decode(errors="replace")


def version_of(text: str | None) -> Version:
    if text is None or not text.isascii() or not text.isdigit():
        raise Nonsense(f"weight_version {text!r} is not a number (was it started with --weight-version?)")
    return Version(int(text))


def reply(raw: bytes, rid: str, prompt: Sequence[int], sampling: Sampling, rank: int, vocab: int | None) -> Reply:
    """The answer of /generate as a Reply whose lengths, ids and spans are known to fit together and the request."""
    got = decode(raw, _Generated)
    meta, tokens = got.meta_info, got.output_ids
    logprobs = [entry[0] for entry in meta.output_token_logprobs]
    prompt_tokens = len(prompt) if meta.prompt_tokens is None else meta.prompt_tokens
    for wrong, what in (
        (meta.id != rid, f"the answer is for rid {meta.id!r}"),
        (meta.finish_reason.type not in ("stop", "length", "abort"), f"finish_reason {meta.finish_reason.type!r}"),
        (not tokens and meta.finish_reason.type != "abort", "no token, and not aborted"),
        (len(tokens) > sampling.max_new_tokens, f"{len(tokens)} tokens, {sampling.max_new_tokens} were asked for"),
        (meta.completion_tokens not in (None, len(tokens)), f"completion_tokens {meta.completion_tokens}"),
        (len(logprobs) != len(tokens), f"{len(tokens)} tokens but {len(logprobs)} logprobs"),
        ([e[1] for e in meta.output_token_logprobs] != tokens, "the logprobs are of other tokens"),
        (not all(math.isfinite(lp) and lp <= 1e-4 for lp in logprobs), "a logprob is not finite or above zero"),
        (any(t < 0 or (vocab is not None and t >= vocab) for t in tokens), f"a token outside of 0..{vocab}"),
        (prompt_tokens != len(prompt), f"prompt_tokens {prompt_tokens}, {len(prompt)} were sent"),
        (not 0 <= meta.cached_tokens <= prompt_tokens, f"cached_tokens {meta.cached_tokens}"),
        (meta.dp_rank not in (None, rank), f"dp_rank {meta.dp_rank}, asked for {rank}"),
    ):
        if wrong:
            raise Nonsense(what)
    queue_s, prefill_s, decode_s = _times(meta)
    return Reply(
        tokens=tuple(tokens),
        logprobs=tuple(min(lp, 0.0) for lp in logprobs),
        spans=_spans(meta, len(tokens)),
        finish=meta.finish_reason.type,
        prompt_tokens=prompt_tokens,
        cached_tokens=meta.cached_tokens,
        rank=rank,
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
    )


def _spans(meta: _Meta, count: int) -> tuple[Span, ...]:
    spans = [s for s in meta.weight_versions or () if s.end > s.start]
    edges = [0, *(s.end for s in spans)]
    if [s.start for s in spans] != edges[:-1] or edges[-1] != count:
        shown = [(s.start, s.end, s.version) for s in spans]
        raise Nonsense(f"weight_versions {shown} do not cover {count} tokens without gaps")
    return tuple(Span(s.start, s.end, version_of(s.version)) for s in spans)


def never_newer(spans: Sequence[Span], sent: Version, in_flight: int) -> tuple[Span, ...]:
    """The spans with each mark moved `in_flight` tokens back in time, so that no token is called newer than it is.

    SGLang's overlapped scheduler leaves the step in flight uncounted when it pauses in place: its tokens come from the
    old weights and are marked as the new ones'. A mark before the first token is not shown; `sent`, the version held
    when the request was sent, stands in for it.
    """
    if not in_flight or not spans:
        return tuple(spans)
    known = [Span(0, 0, sent), *spans] if sent < spans[0].version else list(spans)
    ends = [min(span.end + in_flight, spans[-1].end) for span in known[:-1]] + [spans[-1].end]
    starts = [0, *ends[:-1]]
    moved = (Span(start, end, span.version) for start, end, span in zip(starts, ends, known, strict=True))
    return tuple(span for span in moved if span.end > span.start)


def _times(meta: _Meta) -> tuple[float, float, float]:
    queue = max(0.0, meta.queue_time or 0.0)
    prefill = max(0.0, (meta.prefill_finished_time or 0.0) - (meta.forward_entry_time or 0.0))
    if not meta.prefill_finished_time or not meta.forward_entry_time:
        prefill = 0.0
    return queue, prefill, max(0.0, (meta.e2e_latency or 0.0) - queue - prefill)


def info(server: ServerInfo, model: ModelInfo) -> EngineInfo:
    if not server.embedded and release(server.version) < OLDEST_SGLANG:
        oldest = ".".join(map(str, OLDEST_SGLANG))
        raise Nonsense(f"SGLang {server.version} is too old: {oldest} is the first with all that is needed")
    ranks = max(1, len(server.internal_states))
    slots = sum(state.effective_max_running_requests_per_dp for state in server.internal_states)
    return EngineInfo(
        kind="embedded" if server.embedded else "sglang",
        software=server.version,
        version=version_of(model.weight_version),
        ranks=ranks,
        slots=slots or server.max_running_requests or 1,
        context_tokens=server.context_length or server.max_req_input_len or 0,
        kv_tokens=server.max_total_num_tokens * ranks,
    )


def release(version: str) -> tuple[int, ...]:
    """`0.5.20.post1` -> (0, 5, 20); of `0.5.23+cu126` nothing behind the plus."""
    return tuple(int("".join(takewhile(str.isdigit, part)) or 0) for part in version.split(".")[:3])


def loads(raw: bytes) -> list[RankLoad]:
    rows = sorted(decode(raw, _Loads).loads, key=lambda load: load.dp_rank)
    if [row.dp_rank for row in rows] != list(range(len(rows))):
        raise Nonsense(f"/v1/loads lists the ranks {[row.dp_rank for row in rows]}")
    return [
        RankLoad(
            rank=row.dp_rank,
            running=row.num_running_reqs,
            waiting=row.num_waiting_reqs,
            kv_used_tokens=row.num_used_tokens,
            kv_total_tokens=row.max_total_num_tokens,
        )
        for row in rows
    ]


def generated_tokens(raw: bytes) -> int:
    """Of /metrics. SGLang counts a request's tokens in the first at its end, in the second while it runs."""
    ended = running = 0.0
    lines = [line for line in raw.decode(errors="replace").splitlines() if line.startswith("sglang:")]
    if not lines:
        raise Nonsense("/metrics has nothing of SGLang's (was it started with --enable-metrics?)")
    for line in lines:  # neither is there before the first token
        if line.startswith("sglang:generation_tokens_total"):
            ended += _sample(line)
        elif line.startswith("sglang:realtime_tokens_total") and 'mode="decode"' in line:
            running += _sample(line)
    return int(max(ended, running))


def _sample(line: str) -> float:
    try:
        return float(line.rpartition(" ")[2])
    except ValueError as exc:
        raise Nonsense(f"/metrics: {line[:120]!r}") from exc
