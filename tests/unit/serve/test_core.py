"""Batching without a process: what is admitted, what it costs, and that nothing is left behind."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch

from agentrl.serve.embedded.core import BLOCK_TOKENS, Core
from agentrl.serve.embedded.model import Model
from agentrl.serve.embedded.options import Options
from agentrl.serve.embedded.request import Request, SamplingParams
from agentrl.serve.embedded.weights import ModelConfig, Weights, read
from tests.engines import make_checkpoint, plain_logits, prompt_of

CONTEXT = 128
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("core"), 3, **SHAPE)


@pytest.fixture(scope="module")
def weights(folder: Path) -> tuple[ModelConfig, Weights]:
    config = ModelConfig.read(str(folder))
    return config, read(str(folder), config, torch.float32)


def core_of(weights: tuple[ModelConfig, Weights], **options: int) -> Core:
    settings = Options(model_path="", context_length=CONTEXT, **options)
    return Core(Model(*weights, torch.float32, CONTEXT), settings)


def request(ended: list[Request], prompt: list[int], new: int = 8, rank: int = 0, namespace: str = "0") -> Request:
    number = random.Random(repr((prompt, new, rank, len(ended)))).getrandbits(128)
    params = SamplingParams(max_new_tokens=new)
    return Request(f"{number:032x}", prompt, params, rank=rank, namespace=namespace, on_end=ended.append)


def run(core: Core, steps: int = 2000) -> None:
    for _ in range(steps):
        if not core.busy:
            return
        with torch.inference_mode():
            core.step()
    raise AssertionError("the core makes no progress")


def nothing_left(core: Core) -> None:
    assert core.idle
    for rank in core.ranks:
        assert (rank.reserved, rank.running, len(rank.waiting)) == (0, [], 0)
        assert rank.cache.limit == rank.cache.blocks


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_ends_with_every_request_answered(weights: tuple[ModelConfig, Weights], seed: int) -> None:
    """Submits, aborts, pauses and swaps at random moments: each request ends once, tokens and logprobs fit, no leak."""
    rng = random.Random(seed)
    core = core_of(weights, ranks=2, slots=3, kv_tokens=200, prefill_tokens=16)
    ended: list[Request] = []
    sent: list[Request] = []
    prompts = [prompt_of(40, seed=s) for s in range(3)]
    with torch.inference_mode():
        for tick in range(120):
            choice = rng.random()
            if choice < 0.3:
                prompt = rng.choice(prompts)[: rng.randint(1, 40)] + prompt_of(rng.randint(0, 20), rng.random())
                sent.append(request(ended, prompt, rng.randint(1, 30), rng.randint(0, 1), str(core.version)))
                sent[-1].rid = f"{tick:032x}"
                core.submit(sent[-1])
            elif choice < 0.35 and sent:
                core.abort(rng.choice(sent).rid)
            elif choice < 0.40:
                core.pause(rng.choice(["abort", "retract", "in_place"]))
            elif choice < 0.5:
                core.resume()
            elif choice < 0.53:
                core.swap(core.model.weights, str(tick))
            if core.busy:
                core.step()
            used = [r.reserved + r.cache.used * BLOCK_TOKENS for r in core.ranks]
            assert all(tokens <= 200 for tokens in used)
            rows = [r.row for rank in core.ranks for r in rank.running]
            assert len(rows) == len(set(rows))
        core.resume()
    run(core)
    nothing_left(core)
    assert sorted(r.rid for r in ended) == sorted(r.rid for r in sent)
    for r in ended:
        assert len(r.tokens) - r.prompt_tokens == r.generated <= r.sampling.max_new_tokens
        spans = r.version_spans()
        assert [s["start"] for s in spans] == [0, *(s["end"] for s in spans)][: len(spans)]
        assert (spans[-1]["end"] if spans else 0) == r.generated


def test_mixed_batches_compute_what_one_plain_pass_does(weights: tuple[ModelConfig, Weights], folder: Path) -> None:
    core = core_of(weights, ranks=2, slots=3, kv_tokens=400, prefill_tokens=16)
    ended: list[Request] = []
    for index in range(14):
        shared = prompt_of(30, seed=index % 3)
        core.submit(request(ended, shared + prompt_of(index, seed=50 + index), 12, index % 2))
    run(core)
    assert len(ended) == 14
    for r in ended:
        logits = plain_logits(folder, r.tokens)[r.prompt_tokens - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(r.tokens[r.prompt_tokens :])[:, None])[:, 0]
        assert float((expected - torch.tensor(r.logprobs)).abs().max()) < 1e-5
    assert sum(rank.counters.cached_tokens for rank in core.ranks) > 0


def test_a_request_that_waits_for_kv_gets_it(weights: tuple[ModelConfig, Weights]) -> None:
    core = core_of(weights, slots=4, kv_tokens=64)
    ended: list[Request] = []
    for index in range(4):
        core.submit(request(ended, prompt_of(20, seed=index), 30))
    with torch.inference_mode():
        core.step()
    assert (len(core.ranks[0].running), len(core.ranks[0].waiting)) == (1, 3)
    run(core)
    assert len(ended) == 4
    nothing_left(core)


def test_poisoned_weights_fail_requests_and_leave_no_trace(weights: tuple[ModelConfig, Weights]) -> None:
    _, good = weights
    core = core_of(weights, slots=2, kv_tokens=64)
    ended: list[Request] = []
    prompt = prompt_of(20, seed=5)
    bad = read_with_nan(good)
    core.swap(bad, "1")
    core.submit(request(ended, prompt))
    run(core)
    assert ended[0].finish is not None
    assert ended[0].finish["status_code"] == 500
    core.swap(good, "2")
    core.submit(request(ended, prompt))
    run(core)
    assert ended[1].finish == {"type": "length", "length": 8}


def read_with_nan(good: Weights) -> Weights:
    return msgspec.structs.replace(good, norm=torch.full_like(good.norm, float("nan")))


def test_an_update_without_a_pause_waits_for_what_runs(weights: tuple[ModelConfig, Weights]) -> None:
    core = core_of(weights, slots=1, kv_tokens=64)
    ended: list[Request] = []
    core.submit(request(ended, prompt_of(5, 1), 8))
    core.submit(request(ended, prompt_of(5, 2), 9))
    with torch.inference_mode():
        core.step()
    done: list[int] = []
    core.when_quiet(lambda: (core.swap(core.model.weights, "1"), done.append(len(ended)))[0])
    assert done == []
    run(core)
    assert done == [1]  # after the first, before the second
    assert [s["version"] for r in ended for s in r.version_spans()] == ["0", "1"]
