"""What a run was, as far as its journal tells: steps, the bank's filling, lengths, where a trajectory's time went."""

from __future__ import annotations

from agentrl.records import Record

STAGES = (
    *("opening", "queue", "prefill", "decode", "lane_wait", "tool", "verifying", "other"),
    *("siblings", "bank", "training", "publication"),
)
"""Of one trained trajectory, from its start to its weights being live on every engine.

lane_wait: for lanes, of opening, commands and verifying. other: none of these clocks had it (retries, the network, our
own loop, the journal). siblings: done, the group is not. bank: the group is ready and not in a batch."""


class StepStory(Record):
    """Times in seconds of the run's clock. ages: groups by age. tokens: trained, by age. masked: too old to train."""

    step: int
    at_s: float
    interval_s: float
    waited_s: float
    train_s: float
    ages: tuple[tuple[int, int], ...]
    tokens: tuple[tuple[int, int], ...]
    masked: int
    reward: float  # mean over the trajectories of its batch
    generated: int  # tokens that the model sampled for them
    ready: tuple[tuple[int, float], ...] = ()  # (group, when it was complete)
    moments: tuple[tuple[str, float | None], ...] = ()  # in order of time, dispatch to live; None: not yet


class Sample(Record):
    """The run at one moment."""

    at_s: float
    bank: int
    attempts: int
    places: int


class Rate(Record):
    """What became of finished trajectories whose group's story is over. age: mean of the trained, in versions."""

    bucket: str
    trained: int
    stale: int
    dropped: int
    completion: float | None
    freshness: float | None
    age: float


class Lengths(Record):
    """Tokens of whole trajectories. dropped: ended ones of groups that were dropped."""

    completed: tuple[int, ...] = ()
    trained: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


class Story(Record):
    name: str
    outcome: str
    elapsed_s: float
    batch_groups: int
    bound: int
    in_flight: str
    window_groups: int
    steps: tuple[StepStory, ...]
    samples: tuple[Sample, ...]  # in order of time
    lengths: Lengths
    stages: dict[str, float]  # STAGES: mean seconds of a trained trajectory; empty where none was
    gaps: tuple[tuple[int, float], ...]  # (step, mean |trainer's - engine's logprob|), where it was measured
    waited_s: float
    watched_s: float
    length_ratio: float | None
    rates: dict[str, tuple[Rate, ...]]  # by length, reward, turns and kind of task
    lost: dict[int, int]  # step -> tokens given up since the one before because weights changed
    counts: dict[str, int]  # groups admitted, trained, dropped by reason; attempts started, retried, restarted

    @property
    def idle(self) -> float:
        """The trainer's share of time spent waiting, from the first batch on."""
        return self.waited_s / self.watched_s if self.watched_s else 0.0

    @property
    def per_minute(self) -> float:
        """Trained trajectories per minute."""
        return 60 * len(self.lengths.trained) / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def reward(self) -> tuple[float, float]:
        """Mean of the first and of the last fifth of the steps; zeros where there are none."""
        few = max(1, len(self.steps) // 5)
        first, last = self.steps[:few], self.steps[-few:]
        return _mean([s.reward for s in first]), _mean([s.reward for s in last])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
