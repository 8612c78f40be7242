"""The trainer between two batches: which version it holds, what it answered last, and how it gets to another version.

All of it runs on the one thread that owns torch.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch

from agentrl.errors import DataError, UnavailableError
from agentrl.records import Batch, Record, StepReport, Version
from agentrl.train.config import WorkerConfig
from agentrl.train.worker.checkpoint import Answer, Checkpoints
from agentrl.train.worker.model import load_policy
from agentrl.train.worker.step import Learner


class Store(Protocol):
    """What the trainer needs of `agentrl.publish.store.DiskWeightStore`."""

    def path(self, version: Version) -> str: ...

    def adopt(self, folder: str) -> str: ...

    def put(self, version: Version, write: Callable[[str], None], *, extra: dict[str, Any] | None = None) -> str: ...

    def prune(self, keep: int) -> None: ...

    def files(self, version: Version) -> tuple[tuple[str, str, int], ...] | None: ...


class Start(Record):
    """A version to begin with. taken: the run's weights only just came, so checkpoints of it are of another past."""

    version: Version
    taken: bool


class Session:
    """Opening loads the newest checkpoint that reads, or else `start`: a version that the store holds, or None for the
    first of all, made of `config.model`."""

    def __init__(self, config: WorkerConfig, store: Store, start: Start | None = None) -> None:
        torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)
        self._config = config
        self._store = store
        self._checkpoints = Checkpoints(config.checkpoints, config.train.keep_checkpoints)
        first = Version(0) if start is None else start.version
        folder = store.adopt(config.model) if start is None else store.path(first)
        if start is not None and start.taken:
            self._checkpoints.drop_from(first)
        policy = load_policy(folder, device=config.device)
        self._learner = Learner(policy, config.train, temperature=config.temperature, version=first)
        self.last: Answer | None = None
        for version in reversed(self._checkpoints.versions()):
            try:
                self.last = self._checkpoints.load(version, self._learner).answer
                break
            except DataError as exc:  # the one before is as good: the run says which version it expects
                print(f"checkpoint skipped: {exc}", file=sys.stderr, flush=True)  # noqa: T201

    @property
    def version(self) -> Version:
        return self._learner.version

    def close(self) -> None:
        self._checkpoints.close()

    def answer(self, batch: Batch) -> StepReport | None:
        """The report of this very batch, where it was the last one trained."""
        if self.last is not None and self.last.report.batch == batch.id and self.last.digest == digest(batch):
            return self.last.report
        return None

    def train(self, lease: str, batch: Batch, stop: threading.Event) -> StepReport:
        """Step, weights into the store, checkpoint: in this order, each complete before the next begins.

        Abandoned where `stop` was set before the optimizer moved. DataError where `batch.version` cannot be reached.
        The report's seconds hold the step and the weights; its checkpoint, made after it, is not in them.
        """
        began = time.perf_counter()
        if batch.version != self.version:
            self._go_to(batch.version)
        metrics = self._step(batch, stop)
        saved = time.perf_counter()
        self._store.put(self.version, self._learner.policy.save, extra={"batch": batch.id})
        metrics["save_s"] = time.perf_counter() - saved
        seconds = time.perf_counter() - began
        report = StepReport(batch=batch.id, version=self.version, seconds=seconds, metrics=metrics)
        self.last = Answer(digest=digest(batch), lease=lease, report=report)
        if self.version % self._config.train.checkpoint_every == 0:
            self._checkpoints.save(self._learner, self.last)
        return report

    def replaced(self, version: Version) -> None:
        """The store holds other weights of `version` than this session made: another trainer went on with the run."""
        self._checkpoints.drop_from(version)
        self._go_to(version)

    def _step(self, batch: Batch, stop: threading.Event) -> dict[str, float]:
        try:
            return self._learner.step(batch, stop)
        except (MemoryError, RuntimeError) as exc:
            if "memory" not in str(exc) and not isinstance(exc, MemoryError):
                raise
            message = f"batch {batch.id}: no memory for a row of {self._config.train.micro_tokens} tokens: {exc}"
            raise UnavailableError(message, hint="Lower train.micro_tokens.") from exc

    def _go_to(self, version: Version) -> None:
        """To the version the run expects: its checkpoint; or its weights with the moments of the nearest one before."""
        saved = self._checkpoints.versions()
        if version in saved:
            self.last = self._checkpoints.load(version, self._learner).answer
            return
        weights = load_policy(self._store.path(version), device=self._config.device)
        self._learner.policy.model.load_state_dict(weights.model.state_dict())
        before = [v for v in saved if v < version]
        if before:
            self._checkpoints.load(before[-1], self._learner, weights=False)
        else:
            self._learner.forget()
        self._learner.version = version
        self.last = None


def digest(batch: Batch) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(batch)).hexdigest()
