import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from agentrl.errors import DataError, UserError
from agentrl.recipe.schema import Train
from agentrl.records import Batch, Verdict, Version
from agentrl.runtime.masking import masked
from agentrl.train.batching.advantage import advantages
from agentrl.train.batching.pack import pack
from agentrl.train.worker.model import Policy, load_policy
from agentrl.train.worker.step import Abandoned, Learner
from tests.toy_policy import make_batch, make_model, trajectory

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("policy"), **SMALL)


def learner(folder: Path, **changes: Any) -> Learner:
    return Learner(load_policy(str(folder)), Train(**changes), temperature=1.0, version=Version(0))


def weights(of: Learner) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in of.policy.model.state_dict().items()}


def gradients(of: Learner, batch: Batch) -> list[torch.Tensor]:
    of.step(batch, threading.Event())
    return [p.grad.clone() for p in of.policy.model.parameters() if p.grad is not None]


def plain_logits(model: torch.nn.Module, tokens: tuple[int, ...]) -> torch.Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def same_as_alone(policy: Policy, tmp: Path, vocabulary: int) -> None:
    """Packed logits against transformers' own attention, one document at a time."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tmp, dtype=torch.float32, attn_implementation="eager").eval()
    rng = random.Random(1)
    made = [trajectory(rng, member=i, length=n, vocabulary=vocabulary) for i, n in enumerate((50, 9, 33, 2, 71))]
    with torch.no_grad():
        for row in pack(made, [1.0] * 5, 120):
            whole = [plain_logits(reference, made[d].tokens) for d in row.documents]
            expected = torch.log_softmax(torch.cat(whole)[torch.from_numpy(row.predict)], -1)
            actual = torch.log_softmax(policy.logits(row), -1)
            assert (actual - expected).abs().max() < 1e-5


def test_packed_forward_equals_each_document_alone(folder: Path) -> None:
    policy = load_policy(str(folder))
    assert policy.packed
    same_as_alone(policy, folder, 512)


def test_other_families_load_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    ).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path))
    assert policy.packed
    same_as_alone(policy, tmp_path, 97)


@pytest.mark.filterwarnings("ignore")
def test_a_recurrent_model_runs_its_documents_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=1)).save_pretrained(
        tmp_path
    )
    policy = load_policy(str(tmp_path))
    assert not policy.packed
    same_as_alone(policy, tmp_path, 61)


def test_gradient_does_not_depend_on_the_packing(folder: Path) -> None:
    batch = make_batch(groups=3, siblings=4)
    one_row = gradients(learner(folder), batch)
    many_rows = gradients(learner(folder, micro_tokens=64), batch)
    for a, b in zip(one_row, many_rows, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_gradient_equals_a_loop_over_single_trajectories(folder: Path) -> None:
    same_as_a_loop(folder, make_batch(groups=2, siblings=3))


def test_masked_tokens_train_nothing_and_their_rewards_count(folder: Path) -> None:
    """One trajectory is too old altogether: nothing of it trains, its group's baseline still holds its reward."""
    rng, floor = random.Random(3), Version(4)
    ages = ((3, 4), (4, 5), (3,), (5,))
    old = [
        trajectory(rng, member=i, reward=float(i % 2), length=40, versions=versions) for i, versions in enumerate(ages)
    ]
    kept = [masked(t, floor) for t in old]
    for before, after in zip(old, kept, strict=True):
        versions = {i: s.version for s in before.spans for i in range(s.start, s.end)}
        assert after.trainable == tuple(k and versions[i] >= floor for i, k in enumerate(before.trainable))
    assert sum(sum(t.trainable) for t in kept) < sum(sum(t.trainable) for t in old)
    assert not any(kept[2].trainable)
    assert list(advantages(kept, "group_norm")) == list(advantages(old, "group_norm"))
    same_as_a_loop(folder, replace(make_batch(), trajectories=tuple(kept)))


def same_as_a_loop(folder: Path, batch: Batch) -> None:
    mine = gradients(learner(folder, clip_norm=1e9), batch)
    model = load_policy(str(folder)).model
    total = sum(sum(t.trainable) for t in batch.trajectories)
    loss = torch.zeros(())
    for t, advantage in zip(batch.trajectories, advantages(batch.trajectories, "group_norm"), strict=True):
        logp = torch.log_softmax(plain_logits(model, t.tokens), -1)
        for i in (i for i, trained in enumerate(t.trainable) if trained):
            r = torch.exp(logp[i - 1, t.tokens[i]] - t.logprobs[i])
            if 0.2 < r < 4.0:
                loss = loss - r * float(advantage) / total
    loss.backward()
    for a, p in zip(mine, model.parameters(), strict=True):
        expected = torch.zeros_like(a) if p.grad is None else p.grad
        torch.testing.assert_close(a, expected, rtol=1e-3, atol=1e-6)


def test_rewarded_tokens_become_likelier(folder: Path) -> None:
    of = learner(folder, lr=1e-3)
    batch = make_batch(groups=2, siblings=4)

    def mean_logp(rewarded: bool) -> float:
        chosen = [t for t in batch.trajectories if (t.verdict.reward == 1.0) == rewarded]
        rows = pack(chosen, [1.0] * len(chosen), 8192)
        with torch.no_grad():
            logp = [torch.log_softmax(of.policy.logits(r), -1)[range(len(r.target)), r.target] for r in rows]
        return float(torch.cat(logp).mean())

    before = mean_logp(True), mean_logp(False)
    for version in range(8):
        of.step(replace(batch, version=Version(version)), threading.Event())
    assert mean_logp(True) > before[0] + 0.2
    assert mean_logp(False) < before[1]


def test_metrics_say_what_they_mean(folder: Path) -> None:
    of = learner(folder)
    rng = random.Random(5)
    with torch.no_grad():
        exact = []
        for member, reward in enumerate((0.0, 1.0)):
            t = trajectory(rng, member=member, reward=reward, length=60, versions=(0, 7))
            logp = torch.log_softmax(plain_logits(of.policy.model, t.tokens), -1)
            # the engine agrees on its own version's tokens, and is off by 0.25 on the other's
            offset = {i: 0.25 * (s.version == 7) for s in t.spans for i in range(s.start, s.end)}
            lp = tuple(float(logp[i - 1, t.tokens[i]]) - offset[i] if k else 0.0 for i, k in enumerate(t.trainable))
            exact.append(replace(t, logprobs=lp))
    batch = replace(make_batch(), trajectories=tuple(exact))
    metrics = of.step(batch, threading.Event())
    assert metrics["logprob_gap_max"] < 1e-5
    assert metrics["logprob_gap_all_max"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["same_version_tokens"] < metrics["trainable_tokens"] == sum(sum(t.trainable) for t in exact)
    assert metrics["ratio_max"] == pytest.approx(1.284, abs=1e-3)
    assert metrics["mask_share"] == 0.0
    assert metrics["reward_mean"] == 0.5
    assert 0 < metrics["entropy"] <= 6.2384  # ln 512
    assert metrics["packing_efficiency"] == 1.0
    assert of.version == 1


def test_tokens_outside_the_band_are_counted(folder: Path) -> None:
    batch = make_batch()
    far = tuple(replace(t, logprobs=tuple(-20.0 * k for k in t.trainable)) for t in batch.trajectories)
    of = learner(folder)
    metrics = of.step(replace(batch, trajectories=far), threading.Event())
    assert metrics["mask_share"] == 1.0
    assert metrics["grad_norm"] == 0.0


def test_a_uniform_group_is_measured_and_moves_nothing(folder: Path) -> None:
    of = learner(folder)
    before = weights(of)
    batch = make_batch(groups=1)
    even = tuple(replace(t, verdict=Verdict(reward=1.0)) for t in batch.trajectories)
    metrics = of.step(replace(batch, trajectories=even), threading.Event())
    assert metrics["grad_norm"] == 0.0
    assert metrics["informative"] == 0.0
    assert metrics["trainable_tokens"] > 0
    assert all(torch.equal(before[k], v) for k, v in weights(of).items())


def test_an_abandoned_step_changes_nothing(folder: Path) -> None:
    of = learner(folder)
    before = weights(of)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Abandoned):
        of.step(make_batch(), stop)
    assert of.version == 0
    assert all(torch.equal(before[k], v) for k, v in weights(of).items())


def test_bad_batches_are_refused_and_change_nothing(folder: Path) -> None:
    of = learner(folder)
    before = weights(of)
    for bad, said in (
        (make_batch(version=3), "holds 0"),
        (make_batch(vocabulary=4000), "vocabulary of 512"),
    ):
        with pytest.raises(DataError, match=said):
            of.step(bad, threading.Event())
    assert all(torch.equal(before[k], v) for k, v in weights(of).items())


def test_folders_that_are_no_model_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        load_policy(str(tmp_path))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UserError, match="cannot be loaded"):
        load_policy(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be loaded"):
        load_policy(str(tmp_path))
