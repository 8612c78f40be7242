"""What an engine says of its time, set against what the call took by our clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import Place, Reply, Span, Version
from agentrl.rollout.generation import Generation

SECONDS = st.floats(0, 1e6)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=4))
def test_parts_never_come_to_more_than_the_whole(calls: list[tuple[float, float, float, float]]) -> None:
    """However wrong: the engine's clock may have been set while it worked. What fits is taken as it is."""
    place = Place("e0", 0)
    generation = Generation(place=place, began_s=0.0)
    for seconds, queue, prefill, decode in calls:
        before = generation.queue_s
        reply = Reply(
            tokens=(1,),
            logprobs=(-0.1,),
            spans=(Span(0, 1, Version(0)),),
            finish="stop",
            prompt_tokens=1,
            cached_tokens=0,
            rank=0,
            queue_s=queue,
            prefill_s=prefill,
            decode_s=decode,
        )
        generation.add(reply, place, 0, seconds)
        if 0 < queue + prefill + decode <= seconds:
            assert generation.queue_s == before + queue
    parts = generation.queue_s + generation.prefill_s + generation.decode_s
    assert parts <= generation.engine_s * (1 + 1e-9) + 1e-6
