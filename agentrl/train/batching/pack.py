"""Trajectories to rows: documents laid end to end, none cut, no padding. Pure.

A row is one forward and backward pass. `bounds` marks where each document begins, so that attention stays inside a
document; position ids restart there. A trajectory longer than the row limit gets a row of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.records import Trajectory

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """T tokens of D documents, N of them trainable. Arrays are parallel within [T] and within [N].

    documents: [D] indices into the packed sequence of trajectories. bounds: [D+1], from 0 to T.
    predict: [N] positions whose next token is trainable, ascending. target: [N] that next token.
    rollout, advantage, version: [N] of the target: the engine's logprob, its trajectory's advantage, its policy.
    pure: [N] false where the engine went on, after a swap, over a KV cache that other weights had filled.
    """

    documents: tuple[int, ...]
    bounds: tuple[int, ...]
    tokens: Ints
    positions: Ints
    predict: Ints
    target: Ints
    rollout: Floats
    advantage: Floats
    version: Ints
    pure: Bools

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(int(n) for n in np.diff(self.bounds))


def pack(trajectories: Sequence[Trajectory], advantage: Sequence[float], micro_tokens: int) -> list[Row]:
    """Every trainable token of every trajectory lands in exactly one row. Rows hold at most `micro_tokens`.

    ValueError names the attempt whose arrays contradict one another.
    """
    if len(advantage) != len(trajectories):
        raise ValueError(f"{len(advantage)} advantages for {len(trajectories)} trajectories")
    for trajectory in trajectories:
        _check(trajectory)
    bins = first_fit_decreasing([len(t.tokens) for t in trajectories], micro_tokens)
    return [_row(tuple(members), trajectories, advantage) for members in bins]


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `sizes` by bin: the largest first, each into the first bin with room. Ties fall by index.

    >>> first_fit_decreasing([5, 3, 4, 2], 7)
    [[0, 3], [2, 1]]
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        b = next((b for b, free in enumerate(room) if free >= sizes[i]), None)
        if b is None:
            bins.append([i])
            room.append(capacity - sizes[i])
        else:
            bins[b].append(i)
            room[b] -= sizes[i]
    return bins


def efficiency(rows: Sequence[Row]) -> float:
    """Share of a [rows, longest row] rectangle that holds tokens: what padded rows would have kept."""
    if not rows:
        return 1.0
    sizes = [len(row.tokens) for row in rows]
    return sum(sizes) / (len(sizes) * max(sizes))


def _row(members: tuple[int, ...], trajectories: Sequence[Trajectory], advantage: Sequence[float]) -> Row:
    chosen = [trajectories[i] for i in members]
    lengths = [len(t.tokens) for t in chosen]
    tokens = np.concatenate([np.array(t.tokens, dtype=np.int64) for t in chosen])
    trained = np.flatnonzero(np.concatenate([np.array(t.trainable, dtype=bool) for t in chosen]))
    return Row(
        documents=members,
        bounds=(0, *(int(b) for b in np.cumsum(lengths))),
        tokens=tokens,
        positions=np.concatenate([np.arange(n, dtype=np.int64) for n in lengths]),
        predict=trained - 1,
        target=tokens[trained],
        rollout=np.concatenate([np.array(t.logprobs, dtype=np.float32) for t in chosen])[trained],
        advantage=np.repeat(np.array([advantage[i] for i in members], dtype=np.float32), lengths)[trained],
        version=np.concatenate([_versions(t) for t in chosen])[trained],
        pure=np.concatenate([_pure(t) for t in chosen])[trained],
    )


def _versions(trajectory: Trajectory) -> Ints:
    versions = np.full(len(trajectory.tokens), -1, dtype=np.int64)
    for span in trajectory.spans:
        versions[span.start : span.end] = span.version
    return versions


def _pure(trajectory: Trajectory) -> Bools:
    """A span that follows another without an observation between was sampled by the same request."""
    pure = np.ones(len(trajectory.tokens), dtype=np.bool_)
    for before, span in itertools.pairwise(trajectory.spans):
        if before.end == span.start:
            pure[span.start : span.end] = False
    return pure


def _check(trajectory: Trajectory) -> None:
    n = len(trajectory.tokens)
    if n == 0 or len(trajectory.trainable) != n or len(trajectory.logprobs) != n:
        raise ValueError(
            f"attempt {trajectory.attempt}: {n} tokens, {len(trajectory.trainable)} mask entries, "
            f"{len(trajectory.logprobs)} logprobs"
        )
    trainable = np.array(trajectory.trainable, dtype=bool)
    if trainable[0]:
        raise ValueError(f"attempt {trajectory.attempt}: its first token is trainable, and nothing predicts it")
    if not np.array_equal(_versions(trajectory) >= 0, trainable):
        raise ValueError(f"attempt {trajectory.attempt}: version spans do not cover exactly the trainable tokens")
    logprobs = np.array(trajectory.logprobs)[trainable]
    if not np.isfinite(logprobs).all() or (logprobs > 1e-4).any():
        raise ValueError(f"attempt {trajectory.attempt}: an engine logprob is not a logarithm of a probability")
