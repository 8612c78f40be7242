import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentrl.records import Trajectory, Verdict
from agentrl.train.batching.advantage import advantages
from tests.toy_policy import trajectory

rewards_by_group = st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=8), max_size=6)


def attempts(groups: list[list[float]]) -> list[Trajectory]:
    rng = random.Random(0)
    return [
        trajectory(rng, group=g, member=m, reward=r, length=12)
        for g, rewards in enumerate(groups)
        for m, r in enumerate(rewards)
    ]


@given(rewards_by_group, st.randoms(use_true_random=False))
def test_each_group_is_centred_scaled_and_alone(groups: list[list[float]], rng: random.Random) -> None:
    flat = attempts(groups)
    rng.shuffle(flat)  # siblings need not be neighbours
    norm, centre = advantages(flat, "group_norm"), advantages(flat, "group_center")
    for g, rewards in enumerate(groups):
        mine = [i for i, t in enumerate(flat) if t.attempt.group == g]
        if len(set(rewards)) == 1:
            assert not norm[mine].any()
            assert not centre[mine].any()
        else:
            assert np.mean(norm[mine]) == pytest.approx(0, abs=1e-12)
            assert np.std(norm[mine]) == pytest.approx(1)
            np.testing.assert_allclose(centre[mine], [flat[i].verdict.reward - np.mean(rewards) for i in mine])


def test_a_rounding_error_is_not_a_difference() -> None:
    assert not advantages(attempts([[0.3, 0.1 + 0.2, 0.3]]), "group_norm").any()


def test_an_ungraded_attempt_is_refused_by_name() -> None:
    ungraded = trajectory(random.Random(0), group=3, member=1, length=12)
    with pytest.raises(ValueError, match=r"g3\.m1\.t0"):
        advantages([replace(ungraded, verdict=Verdict(reward=None))], "group_norm")
