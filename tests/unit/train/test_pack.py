import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentrl.records import Span, Version
from agentrl.train.batching.pack import efficiency, first_fit_decreasing, pack
from tests.toy_policy import trajectory

lengths_and_limit = st.tuples(st.lists(st.integers(2, 60), max_size=20), st.integers(8, 80))


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60))
def test_first_fit_decreasing_places_each_once_and_never_overfills(sizes: list[int], capacity: int) -> None:
    bins = first_fit_decreasing(sizes, capacity)
    assert sorted(i for members in bins for i in members) == list(range(len(sizes)))
    for members in bins:
        assert sum(sizes[i] for i in members) <= capacity or len(members) == 1
    half_full = sum(sum(sizes[i] for i in members) * 2 <= capacity for members in bins)
    assert half_full <= 1  # two of them would have been one


@given(lengths_and_limit, st.integers(0, 9))
def test_every_trainable_token_lands_exactly_once_with_its_facts(case: tuple[list[int], int], seed: int) -> None:
    lengths, limit = case
    rng = random.Random(seed)
    made = [trajectory(rng, member=i, length=n, versions=(3, 4)) for i, n in enumerate(lengths)]
    weights = [float(i + 1) for i in range(len(made))]
    seen: list[tuple[object, ...]] = []
    for row in pack(made, weights, limit):
        assert row.bounds[0] == 0
        assert row.bounds[-1] == len(row.tokens) == len(row.positions)
        assert len(row.tokens) <= limit or len(row.documents) == 1
        for d, start, end in zip(row.documents, row.bounds[:-1], row.bounds[1:], strict=True):
            assert tuple(row.tokens[start:end]) == made[d].tokens
            assert row.positions[start:end].tolist() == list(range(end - start))
            for i in np.flatnonzero((row.predict >= start) & (row.predict < end)):
                facts = (x[i].item() for x in (row.target, row.rollout, row.advantage, row.version))
                seen.append((d, int(row.predict[i]) + 1 - start, *facts))
    expected = []
    for d, t in enumerate(made):
        for span in t.spans:
            for i in range(span.start, span.end):
                logprob = float(np.float32(t.logprobs[i]))
                expected.append((d, i, t.tokens[i], logprob, weights[d], span.version))
    assert sorted(seen) == expected


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_full_at_the_lengths_agents_have(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [min(4000, max(60, int(rng.lognormvariate(6.5, 0.8)))) for _ in range(128)]
    rows = pack([trajectory(rng, member=i, length=n) for i, n in enumerate(lengths)], [1.0] * 128, 8192)
    assert len(rows) == -(-sum(lengths) // 8192)  # as few as there can be
    full = sorted(len(row.tokens) for row in rows)[1:]
    assert sum(full) / (8192 * len(full)) >= 0.95
    assert 0 < efficiency(rows) <= 1


def test_contradictions_are_named() -> None:
    good = trajectory(random.Random(0), group=2, member=5, length=40)
    first = good.spans[0]
    for bad in (
        replace(good, trainable=good.trainable[:-1]),
        replace(good, logprobs=good.logprobs[1:]),
        replace(good, spans=good.spans[1:]),
        replace(good, spans=(Span(first.start - 1, first.end, Version(0)), *good.spans[1:])),
        replace(good, logprobs=tuple(float("nan") if t else 0.0 for t in good.trainable)),
        replace(good, logprobs=tuple(0.5 if t else 0.0 for t in good.trainable)),
        replace(good, trainable=(True, *good.trainable[1:]), spans=(Span(0, 1, Version(0)), *good.spans)),
        replace(good, tokens=(), trainable=(), logprobs=(), spans=()),
    ):
        with pytest.raises(ValueError, match=r"g2\.m5\.t0"):
            pack([bad], [1.0], 100)
