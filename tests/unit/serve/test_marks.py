"""Version marks of an engine that counts the step in flight to the weights that came after it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import Span, Version
from agentrl.serve.wire import never_newer


def spans_of(labels: list[int]) -> list[Span]:
    edges = [0, *(i for i in range(1, len(labels)) if labels[i] != labels[i - 1]), len(labels)]
    return [Span(a, b, Version(labels[a])) for a, b in itertools.pairwise(edges)]


def labels_of(spans: tuple[Span, ...]) -> list[int]:
    return [span.version for span in spans for _ in range(span.start, span.end)]


@given(runs=st.lists(st.integers(1, 12), min_size=1, max_size=4), in_flight=st.integers(0, 4), early=st.data())
def test_no_token_is_called_newer_than_it_is(runs: list[int], in_flight: int, early: st.DataObject) -> None:
    """truth: version 3 when the request was sent, one more at each swap. The engine marks each swap early by a part of
    the step in flight, or not at all where the request had none."""
    truth = [3 + index for index, run in enumerate(runs) for _ in range(run)]
    shown = list(truth)
    for at in (i for i in range(1, len(truth)) if truth[i] != truth[i - 1]):
        for back in range(1, early.draw(st.integers(0, in_flight)) + 1):
            if at - back >= 0:
                shown[at - back] = max(shown[at - back], truth[at])
    told = labels_of(never_newer(spans_of(shown), Version(3), in_flight))
    assert len(told) == len(truth)
    assert told == sorted(told)
    assert all(said <= true for said, true in zip(told, truth, strict=True))


def test_without_overlap_nothing_is_moved() -> None:
    spans = (Span(0, 4, Version(1)), Span(4, 9, Version(2)))
    assert never_newer(spans, Version(0), 0) == spans


def test_one_step_of_one_token() -> None:
    spans = (Span(0, 4, Version(1)), Span(4, 9, Version(2)))
    assert never_newer(spans, Version(1), 1) == (Span(0, 5, Version(1)), Span(5, 9, Version(2)))


def test_a_mark_before_the_first_token_is_not_shown_and_still_counts() -> None:
    assert never_newer((Span(0, 3, Version(2)),), Version(1), 1) == (Span(0, 1, Version(1)), Span(1, 3, Version(2)))
    assert never_newer((), Version(1), 1) == ()
