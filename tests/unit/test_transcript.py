"""Laws of the transcript: it only grows, every token is accounted for, and a resumed one equals the original."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import Reply, Span, TurnPayload, Version
from agentrl.rollout.transcript import Sampled, Transcript, flaw
from tests.builders import turn_payload

ids = st.lists(st.integers(0, 500), max_size=8)


@st.composite
def sampled(draw: st.DrawFn) -> Sampled:
    """A reply gathered over several calls, whose engine changed its weights now and then."""
    gathered = Sampled()
    for _ in range(draw(st.integers(1, 3))):
        tokens = draw(st.lists(st.integers(0, 500), min_size=1, max_size=8))
        cuts = sorted({0, len(tokens), *draw(st.lists(st.integers(0, len(tokens)), max_size=2))})
        first = gathered.spans[-1].version if gathered.spans else 0
        spans = [Span(a, b, Version(first + i)) for i, (a, b) in enumerate(pairwise(cuts))]
        gathered.extend(tokens, [-0.5] * len(tokens), spans)
    return gathered


conversation = st.lists(st.tuples(sampled(), ids), min_size=1, max_size=5)


@given(opening=ids, turns=conversation)
def test_it_only_grows_and_accounts_for_every_token(opening: list[int], turns: list[tuple[Sampled, list[int]]]) -> None:
    transcript = Transcript(opening)
    for reply, observed in turns:
        before = list(transcript.tokens)
        start, end = transcript.reply(reply)
        assert transcript.tokens[:start] == before
        assert transcript.tokens[start:end] == reply.tokens
        assert transcript.observe(observed) == len(transcript) == end + len(observed)
    assert len(transcript.tokens) == len(transcript.trainable) == len(transcript.logprobs)
    covered = [position for span in transcript.spans for position in range(span.start, span.end)]
    assert covered == [position for position, mine in enumerate(transcript.trainable) if mine]
    assert all(
        (logprob == 0.0) != mine for logprob, mine in zip(transcript.logprobs, transcript.trainable, strict=True)
    )


@given(opening=st.lists(st.integers(0, 500), min_size=1, max_size=8), turns=conversation)
def test_a_resumed_transcript_equals_the_original(opening: list[int], turns: list[tuple[Sampled, list[int]]]) -> None:
    transcript = Transcript(opening)
    payloads = []
    for index, (reply, observed) in enumerate(turns):
        payload = msgspec.structs.replace(
            turn_payload(index),
            opening=tuple(opening) if index == 0 else (),
            reply=tuple(reply.tokens),
            logprobs=tuple(reply.logprobs),
            spans=tuple(reply.spans),
            observed=tuple(observed),
        )
        payloads.append(msgspec.msgpack.decode(msgspec.msgpack.encode(payload), type=TurnPayload))
        transcript.reply(reply)
        transcript.observe(observed)
    rebuilt = Transcript.rebuild(payloads)
    assert vars(rebuilt) == vars(transcript)


@given(reply=sampled())
def test_what_is_gathered_is_a_reply_without_a_flaw(reply: Sampled) -> None:
    whole = Reply(
        tokens=tuple(reply.tokens),
        logprobs=tuple(reply.logprobs),
        spans=tuple(reply.spans),
        finish="stop",
        prompt_tokens=1,
        cached_tokens=0,
        rank=0,
    )
    assert flaw(whole, 100) == ""
    assert all(a.version < b.version for a, b in pairwise(reply.spans))
