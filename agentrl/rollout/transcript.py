"""One conversation as token ids: append-only, so that what the engine sampled is what is trained on.

Each position is either trainable (the model sampled it: its logprob and policy version are known) or not (a prompt or
an observation). The next prompt is always the whole transcript, so it starts with the previous prompt and reply.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.records import Reply, Span, TurnPayload


class Transcript:
    """Grows by `reply`, then `observe`. Positions index the whole transcript; ranges are half-open."""

    def __init__(self, opening: Sequence[int]) -> None:
        self.tokens: list[int] = list(opening)
        self.trainable: list[bool] = [False] * len(self.tokens)
        self.logprobs: list[float] = [0.0] * len(self.tokens)
        self.spans: list[Span] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def reply(self, sampled: Sampled) -> tuple[int, int]:
        """Append what the model said; the range it takes."""
        start = len(self.tokens)
        self.tokens += sampled.tokens
        self.trainable += [True] * len(sampled.tokens)
        self.logprobs += sampled.logprobs
        self.spans += [Span(start + span.start, start + span.end, span.version) for span in sampled.spans]
        return start, len(self.tokens)

    def observe(self, ids: Sequence[int]) -> int:
        """Append what the world answered; one past its last position."""
        self.tokens += ids
        self.trainable += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        return len(self.tokens)

    @classmethod
    def rebuild(cls, payloads: Sequence[TurnPayload]) -> Transcript:
        """The transcript that these turns recorded. Wants turn 0 first and no gap."""
        transcript = cls(payloads[0].opening)
        for payload in payloads:
            transcript.reply(Sampled.of(payload.reply, payload.logprobs, payload.spans))
            transcript.observe(payload.observed)
        return transcript


class Sampled:
    """One turn's reply, gathered from one or more engine calls: an aborted call's tokens are kept, and the next call
    goes on from them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Span] = []

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, tokens: Sequence[int], logprobs: Sequence[float], spans: Sequence[Span]) -> Sampled:
        sampled = cls()
        sampled.extend(tokens, logprobs, spans)
        return sampled

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], spans: Sequence[Span]) -> None:
        offset = len(self.tokens)
        self.tokens += tokens
        self.logprobs += logprobs
        for span in spans:
            start, end = offset + span.start, offset + span.end
            if self.spans and self.spans[-1].version == span.version:
                start = self.spans.pop().start
            self.spans.append(Span(start, end, span.version))


def flaw(reply: Reply, max_new_tokens: int) -> str:
    """What is wrong with an engine's reply, empty where nothing is. An engine is not trusted with our ledger."""
    count = len(reply.tokens)
    if reply.finish not in ("stop", "length", "abort"):
        return f"finish is {reply.finish!r}"
    if count > max_new_tokens:
        return f"{count} tokens where at most {max_new_tokens} were asked for"
    if count == 0 and reply.finish != "abort":
        return "no tokens"
    if len(reply.logprobs) != count:
        return f"{count} tokens with {len(reply.logprobs)} logprobs"
    if not all(-1e9 < logprob <= 1e-3 for logprob in reply.logprobs):
        return "a logprob that is no log of a probability"
    if any(token < 0 for token in reply.tokens):
        return "a negative token id"
    edges = [0, *(span.end for span in reply.spans)]
    if [span.start for span in reply.spans] != edges[:-1] or edges[-1] != count or sorted(set(edges)) != edges:
        return "version spans that do not cover the tokens"
    return ""
