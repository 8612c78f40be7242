"""One generation request while it is in the engine, and the answer it ends with, in the shapes of SGLang."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

Meta = dict[str, Any]

_SINCE = time.time() - time.monotonic()


def now() -> float:
    """Seconds since 1970, by a clock that nobody sets: what lies between two readings has passed."""
    return _SINCE + time.monotonic()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of SGLang's sampling parameters that this engine computes; any other name is refused, not ignored.

    temperature 0 is greedy. ignore_eos means all stop tokens, as in SGLang; the model's own are not known here.
    The last three belong to text, which this engine never sees.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] | None = None
    n: int = 1
    ignore_eos: bool = False
    no_stop_trim: bool = True
    skip_special_tokens: bool = False
    spaces_between_special_tokens: bool = True

    def problem(self) -> str:
        """What is wrong with the values; empty where nothing is."""
        if self.max_new_tokens < 1:
            return f"max_new_tokens must be at least 1, got {self.max_new_tokens}"
        if not 0.0 <= self.temperature < float("inf"):
            return f"temperature must be finite and not negative, got {self.temperature}"
        if not 0.0 < self.top_p <= 1.0:
            return f"top_p must be in (0, 1], got {self.top_p}"
        if self.n != 1:
            return f"n must be 1, got {self.n}"
        return ""


class Request:
    """Owned by the step loop. tokens: prompt, then what was sampled. computed: how many have their KV in `row`."""

    __slots__ = (
        "cached",
        "computed",
        "entered",
        "finish",
        "logprobs",
        "marks",
        "namespace",
        "on_end",
        "prefilled",
        "prompt_tokens",
        "rank",
        "received",
        "retractions",
        "rid",
        "row",
        "sampling",
        "stops",
        "tokens",
    )

    def __init__(
        self,
        rid: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        rank: int,
        namespace: str,
        on_end: Callable[[Request], None],
    ) -> None:
        self.rid = rid
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.sampling = sampling
        self.stops = frozenset(() if sampling.ignore_eos else sampling.stop_token_ids or ())
        self.rank = rank
        self.namespace = namespace
        self.on_end = on_end
        self.logprobs: list[float] = []
        self.marks: list[tuple[int, str]] = []  # (index of the first output token, weight version)
        self.finish: Meta | None = None
        self.row = -1
        self.computed = 0
        self.cached = 0
        self.retractions = 0
        self.received = now()
        self.entered = self.prefilled = 0.0

    @property
    def generated(self) -> int:
        return len(self.logprobs)

    @property
    def missing(self) -> int:
        """Tokens whose KV is not computed. One: the newest token, which the next decode step takes."""
        return len(self.tokens) - self.computed

    @property
    def reserve(self) -> int:
        """KV tokens it may come to need."""
        return self.prompt_tokens + self.sampling.max_new_tokens

    def append(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stops:
            self.finish = {"type": "stop", "matched": token}
        elif self.generated >= self.sampling.max_new_tokens:
            self.finish = {"type": "length", "length": self.generated}

    def abort(self, message: str = "Aborted", status: int | None = None) -> None:
        self.finish = {"type": "abort", "message": message, "status_code": status, "err_type": None}

    def version_spans(self) -> list[Meta]:
        ends = [start for start, _ in self.marks[1:]] + [self.generated]
        return [
            {"version": version, "start": start, "end": end}
            for (start, version), end in zip(self.marks, ends, strict=True)
            if end > start
        ]

    def answer(self, dp_rank: int | None, *, logprobs: bool) -> Meta:
        """The body of the HTTP answer. A request that never ran says nothing of its prompt, as in SGLang."""
        ended = now()
        meta: Meta = {
            "id": self.rid,
            "finish_reason": self.finish,
            "completion_tokens": self.generated,
            "weight_version": self.marks[-1][1],
            "weight_versions": self.version_spans(),
            "num_retractions": self.retractions,
            "dp_rank": dp_rank,
            "request_received_ts": self.received,
            "request_finished_ts": ended,
            "e2e_latency": ended - self.received,
        }
        if logprobs:
            sampled = zip(self.logprobs, self.tokens[self.prompt_tokens :], strict=True)
            meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in sampled]
            meta["output_token_logprobs_length"] = self.generated
        if self.entered:
            decode_s = ended - self.prefilled if self.prefilled else 0.0
            meta |= {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached,
                "cached_tokens_details": {"device": self.cached, "host": 0} if self.cached else None,
                "queue_time": self.entered - self.received,
                "forward_entry_time": self.entered,
                "prefill_finished_time": self.prefilled,
                "first_token_latency": self.prefilled - self.received if self.prefilled else None,
                "decode_throughput": (self.generated - 1) / decode_s if decode_s > 0 and self.generated > 1 else 0.0,
            }
        return {"output_ids": self.tokens[self.prompt_tokens :], "meta_info": meta}
