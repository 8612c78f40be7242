"""Group-relative advantages: how much better an attempt did than its siblings. Pure.

A group whose siblings all earned the same reward says nothing about which behaviour was better: its advantages are
exactly zero, so that no gradient leaks out of a rounding error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.records import GroupId, Trajectory

Kind = Literal["group_norm", "group_center"]

_SPREAD = 1e-6  # rewards closer than this, relative to their size, are the same reward


def advantages(trajectories: Sequence[Trajectory], kind: Kind) -> NDArray[np.float64]:
    """One figure per trajectory, in order; siblings are those with the same `attempt.group`.

    group_center: reward minus the group's mean. group_norm: that over the group's (population) standard deviation.
    ValueError where a trajectory has no finite reward.
    """
    rewards = np.array([_reward(t) for t in trajectories], dtype=np.float64)
    members: dict[GroupId, list[int]] = {}
    for i, trajectory in enumerate(trajectories):
        members.setdefault(trajectory.attempt.group, []).append(i)
    out = np.zeros(len(trajectories))
    for indices in members.values():
        out[indices] = _relative(rewards[indices], kind)
    return out


def _relative(rewards: NDArray[np.float64], kind: Kind) -> NDArray[np.float64]:
    scale = float(np.abs(rewards).max())
    if float(np.ptp(rewards)) <= _SPREAD * max(1.0, scale):
        return np.zeros_like(rewards)
    centred: NDArray[np.float64] = rewards - rewards.mean()
    return centred / centred.std() if kind == "group_norm" else centred


def _reward(trajectory: Trajectory) -> float:
    reward = trajectory.verdict.reward
    if reward is None or not np.isfinite(reward):
        raise ValueError(f"attempt {trajectory.attempt} has no reward ({reward}): it may not be in a batch")
    return reward
