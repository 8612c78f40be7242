"""What the trainer process is told: one JSON file, written by `launch`, readable by its owner only."""

from __future__ import annotations

from agentrl.recipe.schema import Train
from agentrl.records import Record


class WorkerConfig(Record):
    """url: the run's face, `http://127.0.0.1:PORT` or `unix:///path`. model: folder of version 0.

    lease_s: how soon a batch held by a dead trainer is free again; renewed while a step runs. wait_s: one long poll.
    reconnect_s: how long the face may be away. lifeline: end when standard input ends (see agentrl.lifeline).
    remote: the run's disk is not ours; `weights` is a folder of our own, and `model`, if there is such a folder here,
    only saves sending what is the same.
    """

    url: str
    token_file: str
    model: str
    weights: str
    checkpoints: str
    train: Train
    temperature: float = 1.0
    seed: int = 0
    name: str = "trainer"
    device: str = "cpu"
    lease_s: float = 30.0
    wait_s: float = 20.0
    reconnect_s: float = 60.0
    lifeline: bool = True
    remote: bool = False
