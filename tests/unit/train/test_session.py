"""Checkpoints and what a restarted trainer does with them."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from agentrl.errors import DataError, UnavailableError
from agentrl.publish.store import DiskWeightStore
from agentrl.recipe.schema import Train
from agentrl.records import StepReport, Version
from agentrl.train.config import WorkerConfig
from agentrl.train.worker.model import load_policy
from agentrl.train.worker.session import Session
from tests.toy_policy import make_batch, make_model

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("policy"), **SMALL)


@contextmanager
def session(folder: Path, run: Path, **changes: Any) -> Iterator[Session]:
    config = WorkerConfig(
        url="",
        token_file="",
        model=str(folder),
        weights=str(run / "weights"),
        checkpoints=str(run / "checkpoints"),
        train=Train(**{"weight_decay": 0.01, "warmup_steps": 2, **changes}),
    )
    opened = Session(config, DiskWeightStore(config.weights))
    with closing(opened):
        yield opened


def train(s: Session, version: int, *, id: int | None = None) -> StepReport:  # noqa: A002
    batch = make_batch(id=version if id is None else id, version=version)
    return s.train("lease", batch, threading.Event())


def stored(run: Path, version: int) -> bytes:
    return (run / "weights" / f"v{version:06d}" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_resumed_run_is_bitwise_the_undisturbed_one(folder: Path, tmp_path: Path, threads: int) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    with session(folder, whole, threads=threads) as s:
        for v in range(3):
            train(s, v)
        expected = torch.get_rng_state()
    for v in range(3):
        with session(folder, broken, threads=threads) as s:
            assert s.version == v
            train(s, v)
    assert torch.equal(expected, torch.get_rng_state())
    for v in (1, 2, 3):
        assert stored(whole, v) == stored(broken, v)


def test_a_version_loads_as_a_model_with_the_original_configuration(folder: Path, tmp_path: Path) -> None:
    with session(folder, tmp_path) as s:
        train(s, 0)
    made, first = (tmp_path / "weights" / v for v in ("v000001", "v000000"))
    assert sorted(p.name for p in made.iterdir()) == sorted(p.name for p in first.iterdir())
    assert (made / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    from safetensors import safe_open

    with safe_open(made / "model.safetensors", "pt") as new, safe_open(first / "model.safetensors", "pt") as old:
        keys = list(new.keys())
        assert sorted(keys) == sorted(old.keys())
    assert any("experts.0.gate_proj" in key for key in keys)  # the published layout, not the fused one
    assert load_policy(str(made)).packed


def test_the_last_answer_is_remembered_for_that_batch_only(folder: Path, tmp_path: Path) -> None:
    with session(folder, tmp_path) as s:
        report = train(s, 0)
    with session(folder, tmp_path) as s:
        assert s.last is not None
        assert s.answer(make_batch(id=0)) == report
        assert s.answer(make_batch(id=1)) is None
        assert s.answer(make_batch(id=0, seed=1)) is None  # same id, other content


def test_goes_back_where_the_run_never_took_the_last_step(folder: Path, tmp_path: Path) -> None:
    plain, other = tmp_path / "plain", tmp_path / "other"
    with session(folder, plain) as s:
        train(s, 0)
        train(s, 1, id=9)
    with session(folder, other) as s:
        train(s, 0)
        train(s, 1, id=1)
    with session(folder, other) as s:
        assert s.version == 2
        train(s, 1, id=9)  # not the batch it trained
        assert s.version == 2
    assert stored(plain, 2) == stored(other, 2)


def test_goes_on_from_published_weights_where_checkpoints_are_gone(folder: Path, tmp_path: Path) -> None:
    with session(folder, tmp_path) as s:
        train(s, 0)
        train(s, 1)
    for file in (tmp_path / "checkpoints").iterdir():
        file.unlink()
    with session(folder, tmp_path) as s:
        assert s.version == 0
        before = stored(tmp_path, 2)
        report = train(s, 2)
        assert report.version == 3
        assert stored(tmp_path, 3) != before
        with pytest.raises(DataError, match="no complete version 7"):
            train(s, 7)


def test_sparse_checkpoints_resume_from_weights_and_the_nearest_moments(folder: Path, tmp_path: Path) -> None:
    with session(folder, tmp_path, checkpoint_every=2) as s:
        for v in range(3):
            train(s, v)
    with session(folder, tmp_path, checkpoint_every=2) as s:
        assert s.version == 2
        assert train(s, 3).version == 4


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with session(folder, tmp_path) as s:
        train(s, 0)
        train(s, 1)
    victim = tmp_path / "checkpoints" / "v000002.pt"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with session(folder, tmp_path) as s:
        assert s.version == 1
    assert str(victim) in capsys.readouterr().err


def test_half_written_checkpoints_are_swept_and_old_ones_go(folder: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "v000009.pt").write_bytes(b"tensors without a record")
    (checkpoints / "v000009.json.tmp").write_bytes(b"{")
    with session(folder, tmp_path, keep_checkpoints=2) as s:
        assert s.version == 0
        for v in range(4):
            train(s, v)
    assert sorted(p.name for p in checkpoints.iterdir()) == [
        "v000003.json",
        "v000003.pt",
        "v000004.json",
        "v000004.pt",
    ]


def test_two_trainers_cannot_share_a_folder(folder: Path, tmp_path: Path) -> None:
    with session(folder, tmp_path), pytest.raises(UnavailableError, match="another trainer"), session(folder, tmp_path):
        pass


def test_recipe_changes_win_over_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    with session(folder, tmp_path, lr=1e-3, warmup_steps=0) as s:
        assert train(s, 0).metrics["lr"] == 1e-3
    with session(folder, tmp_path, lr=1e-4, warmup_steps=0) as s:
        assert train(s, 1).metrics["lr"] == 1e-4


def test_a_batch_of_nonsense_leaves_the_session_usable(folder: Path, tmp_path: Path) -> None:
    with session(folder, tmp_path) as s:
        good = make_batch()
        with pytest.raises(DataError):
            s.train("l", replace(good, trajectories=make_batch(vocabulary=5000).trajectories), threading.Event())
        assert s.version == 0
        assert s.train("l", good, threading.Event()).version == Version(1)


def test_a_laptop_step_takes_no_time_to_speak_of(tmp_path: Path) -> None:
    """32 trajectories of about 200 tokens, 1.2 M parameters, one core: step, weights and checkpoint, CPU seconds."""
    model = make_model(tmp_path / "model")
    spent, waited = [], []
    with session(model, tmp_path / "run") as s:
        for version in range(4):
            batch = make_batch(id=version, version=version, groups=4, siblings=8, lengths=(100, 300))
            cpu, wall = time.process_time(), time.perf_counter()
            s.train("lease", batch, threading.Event())
            spent.append(time.process_time() - cpu)
            waited.append(time.perf_counter() - wall)
    print(f"cpu s {[round(x, 2) for x in spent]}, wall s {[round(x, 2) for x in waited]}")
    assert min(spent) <= 1.5
