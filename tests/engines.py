"""Engines for tests: small random checkpoints, processes that serve them, and a plain forward pass to compare with."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import subprocess
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from agentrl.hosts.local import LocalHost
from agentrl.recipe.load import load
from agentrl.recipe.schema import Engines
from agentrl.records import EngineInfo, Reply, Sampling, Version
from agentrl.serve.command import Command
from agentrl.serve.launch import start_engine
from agentrl.serve.sglang import SGLangEngine

VOCAB = 512
CONTEXT = 2048
TOKEN = "a-token-for-tests"
SGLANG_PYTHON = "AGENTRL_SGLANG_PYTHON"
"""The interpreter of an environment with SGLang (`make test-sglang`); unset: the `sglang` tests are skipped."""
SGLANG_RECIPE = Path(__file__).parents[1] / "recipes" / "local-sglang.toml"


def make_checkpoint(folder: Path, seed: int, **changes: Any) -> Path:
    """A GLM-4-MoE checkpoint with random weights wide enough that its distributions are far from uniform."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_intermediate_size": 96,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
        "max_position_embeddings": CONTEXT,
        "use_qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    }
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**{**shape, **changes}))
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.08, generator=noise)
    model.save_pretrained(folder)
    return folder


def write_weights(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A safetensors file of zeros; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, file)
    return file


torch.set_num_threads(1)  # the machine is shared with the engine under test


@cache
def plain_model(folder: Path) -> Any:
    from transformers import Glm4MoeForCausalLM

    return Glm4MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def plain_logits(folder: Path, tokens: Sequence[int], continued: tuple[Path, int] | None = None) -> torch.Tensor:
    """Logits after every token. continued: (folder, position) of weights that take over there, on the old ones' KV."""
    ids = torch.tensor([list(tokens)])
    if continued is None:
        return torch.as_tensor(plain_model(folder)(ids).logits[0])
    after, at = continued
    first = plain_model(folder)(ids[:, :at], use_cache=True)
    with warnings.catch_warnings():  # newer transformers call the argument `cache`
        warnings.simplefilter("ignore", FutureWarning)
        second = plain_model(after)(ids[:, at:], past_key_values=first.past_key_values)
    return torch.cat([first.logits[0], second.logits[0]])


def logprob_gap(
    reply: Reply,
    prompt: Sequence[int],
    folder: Path,
    continued: tuple[Path, int] | None = None,
    temperature: float = 1.0,
) -> float:
    """Largest difference between the engine's log-probabilities and those of a plain forward pass."""
    logits = plain_logits(folder, [*prompt, *reply.tokens], continued)[len(prompt) - 1 : -1]
    expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(reply.tokens)[:, None])[:, 0]
    return float((expected - torch.tensor(reply.logprobs)).abs().max())


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@dataclass
class Served:
    """A running engine. holds: the checkpoint that it serves now."""

    url: str
    first: Path
    second: Path
    info: EngineInfo
    holds: Path
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def other(self) -> Path:
        return self.second if self.holds == self.first else self.first


@asynccontextmanager
async def client(served: Served) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine("e0", served.url, TOKEN)
    try:
        await engine.info(deadline_s=10)
        yield engine
    finally:
        await engine.aclose()


def ask(
    engine: SGLangEngine, prompt: Sequence[int], new: int = 8, *, rank: int = 0, rid: str = "", **sampling: Any
) -> Coroutine[Any, Any, Reply]:
    return engine.generate(
        rid or uuid.uuid4().hex, prompt, Sampling(max_new_tokens=new, **sampling), rank=rank, deadline_s=60
    )


async def until(condition: Callable[[], Coroutine[Any, Any, bool]], deadline_s: float = 20.0) -> None:
    """Another process's state has no event to wait for: ask again and again."""
    async with asyncio.timeout(deadline_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(kind: str, folder: Path, first: Path, second: Path) -> Iterator[Served]:
    """Start an engine of `kind` on `first`, as version 0."""
    serving = serve_sglang if kind == "sglang" else serve_embedded
    with serving(folder, first, second) as served:
        yield served


@contextmanager
def serve_embedded(folder: Path, first: Path, second: Path) -> Iterator[Served]:
    port = free_port()
    (folder / "token").write_text(TOKEN)
    command = Command(
        engines=Engines(slots=8, kv_tokens=16_384, ranks=2),
        name="e0",
        model_path=str(first),
        version=Version(0),
        context_tokens=CONTEXT,
        run_dir=str(folder),
        token_file=str(folder / "token"),
        served_name="test",
    ).argv(port)
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        info = asyncio.run(_await_ready(url, process, 60.0))
        yield Served(url=url, first=first, second=second, info=info, holds=first)
    finally:
        process.terminate()
        process.wait(timeout=60)
        assert process.stdin is not None
        process.stdin.close()


def sglang_engines(**changes: Any) -> Engines:
    """The recipe's section that runs SGLang on this machine, with the interpreter that the environment names."""
    section = load(SGLANG_RECIPE).engines
    sizes = {"slots": 8, "kv_tokens": 16_384}
    return msgspec.structs.replace(section, python=os.environ[SGLANG_PYTHON], **sizes | changes)


@contextmanager
def serve_sglang(folder: Path, first: Path, second: Path, **changes: Any) -> Iterator[Served]:
    """Through a host, whose guard lets no process of SGLang's outlive us. changes: of the recipe's engines."""
    (folder / "token").write_text(TOKEN)
    with asyncio.Runner() as runner:
        engine, info, process = runner.run(
            start_engine(
                LocalHost(),
                sglang_engines(**changes),
                name="e0",
                model_path=str(first),
                version=Version(0),
                context_tokens=CONTEXT,
                run_dir=str(folder),
                token_file=str(folder / "token"),
            )
        )
        runner.run(engine.aclose())
        try:
            yield Served(url=engine.url, first=first, second=second, info=info, holds=first)
        finally:
            runner.run(process.stop())


async def _await_ready(url: str, process: subprocess.Popen[bytes], deadline_s: float) -> EngineInfo:
    from agentrl.errors import InfraError

    engine = SGLangEngine("e0", url, TOKEN)

    async def serves() -> bool:
        assert process.poll() is None, "the engine's process ended; see engine.log"
        try:
            return await engine.ready(deadline_s=5)
        except InfraError:
            return False

    try:
        await until(serves, deadline_s)
        return await engine.info(deadline_s=10)
    finally:
        await engine.aclose()
