"""Everything a trainer needs to go on as if it had never died: weights, moments, random state, and its last answer.

One version is two files: `v000003.pt` (tensors) and `v000003.json` (facts, with the checksum of the first). The second
is written last, so a checkpoint exists exactly when it is complete. Loading is `weights_only`: no code runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
from pathlib import Path

import msgspec
import torch

from agentrl.errors import DataError, UnavailableError
from agentrl.records import Record, StepReport, Version
from agentrl.train.worker.step import Learner


class Answer(Record):
    """The last step. digest: of the batch's content, so that another batch under the same id is not taken for it."""

    digest: str
    lease: str
    report: StepReport


class Facts(Record):
    version: Version
    sha256: str
    answer: Answer | None


class Checkpoints:
    """A folder of checkpoints, owned by one process at a time. Opening removes what a dead writer left half done."""

    def __init__(self, folder: str, keep: int) -> None:
        self._folder = Path(folder)
        self._keep = keep
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UnavailableError(f"{folder}: another trainer works here", hint="End it first.") from None
        for left in [*self._folder.glob("*.tmp"), *self._unfinished()]:
            left.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process have the folder; the end of this one does it too."""
        os.close(self._lock)

    def versions(self) -> list[Version]:
        """Complete ones, ascending."""
        return sorted(Version(int(p.stem[1:])) for p in self._folder.glob("v*.json"))

    def save(self, learner: Learner, answer: Answer | None) -> None:
        """Durable when it returns; then the oldest beyond `keep` go. UnavailableError where the disk is full."""
        buffer = io.BytesIO()
        torch.save(_state(learner), buffer)
        data = buffer.getbuffer()
        facts = Facts(version=learner.version, sha256=hashlib.sha256(data).hexdigest(), answer=answer)
        tensors, record = self._paths(learner.version)
        record.unlink(missing_ok=True)  # the version is absent while its tensors are replaced
        _replace(tensors, data)
        _replace(record, msgspec.json.encode(facts))
        for old in self.versions()[: -self._keep]:
            for path in reversed(self._paths(old)):
                path.unlink(missing_ok=True)

    def drop_from(self, version: Version) -> None:
        """Remove those of `version` and of all after it."""
        for late in [v for v in self.versions() if v >= version]:
            for path in reversed(self._paths(late)):
                path.unlink(missing_ok=True)

    def facts(self, version: Version) -> Facts:
        """DataError where the record does not read."""
        path = self._paths(version)[1]
        try:
            return msgspec.json.decode(path.read_bytes(), type=Facts)
        except (OSError, msgspec.MsgspecError) as exc:
            raise DataError(f"{path}: not a checkpoint record: {exc}", hint=f"Delete {path} to fall back.") from exc

    def load(self, version: Version, learner: Learner, *, weights: bool = True) -> Facts:
        """Put the learner where it was. weights=False: only the optimizer's moments and the random state.

        DataError names the damaged file; the learner is then unchanged.
        """
        facts, path = self.facts(version), self._paths(version)[0]
        try:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != facts.sha256:
                raise DataError(f"{path}: checksum does not match its record", hint=f"Delete {path} to fall back.")
            state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        except OSError as exc:
            raise DataError(f"{path}: cannot be read: {exc}", hint=f"Delete {path} to fall back.") from exc
        if weights:
            learner.policy.model.load_state_dict(state["model"])
            learner.version = version
        # moments from the checkpoint, learning rate and decay from the recipe of today
        groups = learner.optimizer.state_dict()["param_groups"]
        learner.optimizer.load_state_dict({"state": state["moments"], "param_groups": groups})
        torch.set_rng_state(state["rng"])
        return facts

    def _paths(self, version: Version) -> tuple[Path, Path]:
        stem = self._folder / f"v{version:06d}"
        return stem.with_suffix(".pt"), stem.with_suffix(".json")

    def _unfinished(self) -> list[Path]:
        return [p for p in self._folder.glob("v*.pt") if not p.with_suffix(".json").exists()]


def _state(learner: Learner) -> dict[str, object]:
    return {
        "model": learner.policy.model.state_dict(),
        "moments": learner.optimizer.state_dict()["state"],
        "rng": torch.get_rng_state(),
    }


def _replace(path: Path, data: bytes | memoryview) -> None:
    """Durable and whole, or as before."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        _sync_folder(path.parent)
    except OSError as exc:
        temporary.unlink(missing_ok=True)
        hint = "Free space, or lower train.keep_checkpoints."
        raise UnavailableError(f"{path}: cannot be written: {exc.strerror or exc}", hint=hint) from exc


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
