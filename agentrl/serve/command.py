"""Command lines of engines. Pure: what `agentrl serve up --dry-run` prints is what is started.

No token is in them: every user of a machine can read them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from agentrl.recipe.schema import Engines
from agentrl.records import Version

LOOPBACK = "127.0.0.1"
SGLANG_ENV = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else /health times out while paused
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, kw_only=True)
class Command:
    """What one engine is to be. Paths are its machine's. first_gpu: the lowest of its GPUs there."""

    engines: Engines
    name: str
    model_path: str
    version: Version
    context_tokens: int
    run_dir: str
    token_file: str
    served_name: str
    python: str = sys.executable
    first_gpu: int = 0

    @property
    def log(self) -> str:
        return f"{self.run_dir}/logs/{self.name}.log"

    @property
    def config_file(self) -> str:
        """YAML that holds SGLang's token (`sglang_config`)."""
        return f"{self.run_dir}/{self.name}.sglang.yaml"

    @property
    def interpreter(self) -> str:
        return self.engines.python or self.python if self.engines.kind == "sglang" else self.python

    @property
    def env(self) -> dict[str, str]:
        """`engines.env` wins over ours."""
        return {**SGLANG_ENV, **self.engines.env} if self.engines.kind == "sglang" else {}

    def argv(self, port: int) -> list[str]:
        return self._sglang(port) if self.engines.kind == "sglang" else self._embedded(port)

    def _common(self, port: int) -> list[str]:
        return [
            *("--model-path", self.model_path),
            *("--host", LOOPBACK),
            *("--port", str(port)),
            *("--served-model-name", self.served_name),
            *("--weight-version", str(self.version)),
            *("--context-length", str(self.context_tokens)),
            *("--dtype", self.engines.dtype),
        ]

    def _embedded(self, port: int) -> list[str]:
        return [
            *(self.interpreter, "-m", "agentrl.serve.embedded"),
            *("--api-key-file", self.token_file),
            *self._common(port),
            *("--ranks", str(self.engines.ranks)),
            *("--slots", str(self.engines.slots)),
            *("--kv-tokens", str(self.engines.kv_tokens)),
            *("--threads", str(self.engines.threads)),
        ]

    def _sglang(self, port: int) -> list[str]:
        """SGLang >= 0.5.22. `engines.args` come last, so they win; a CPU needs `--device cpu --attention-backend
        torch_native` there."""
        engines = self.engines
        return [
            *(self.interpreter, "-m", "sglang.launch_server"),
            *("--config", self.config_file),
            *self._common(port),
            *_parallel(engines, self.first_gpu),
            *("--max-running-requests", str(engines.slots * engines.ranks)),
            *_memory(engines),
            *_speculation(engines),
            "--skip-tokenizer-init",  # token in, token out
            "--enable-metrics",
            "--enable-metrics-for-all-schedulers",
            *engines.args,
        ]


def sglang_config(token: str) -> bytes:
    """SGLang takes its key from the command line, which every user of a machine can read, or from this file."""
    return json.dumps({"api-key": token}).encode()


def _parallel(engines: Engines, first_gpu: int) -> list[str]:
    """Ranks are SGLang's attention data parallelism: each has its own requests and KV, all share the experts."""
    return [
        *_flag("--tp-size", engines.split if engines.split > 1 else 0),
        *_flag("--attn-dp-size", engines.ranks if engines.ranks > 1 else 0),
        *_flag("--ep-size", engines.experts_over),
        *_flag("--base-gpu-id", first_gpu),
    ]


def _memory(engines: Engines) -> list[str]:
    return [
        *_flag("--max-total-tokens", engines.kv_tokens),
        *_flag("--kv-cache-dtype", engines.kv_dtype if engines.kv_dtype != "auto" else ""),
        *_flag("--mem-fraction-static", engines.memory_share),
        *_flag("--chunked-prefill-size", engines.prefill_tokens),
    ]


def _speculation(engines: Engines) -> list[str]:
    """A chain, not a tree: with top-k 1 SGLang verifies the guesses and one token more."""
    if not engines.draft_tokens:
        return []
    return [
        *("--speculative-algorithm", "EAGLE"),
        *("--speculative-num-steps", str(engines.draft_tokens)),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(engines.draft_tokens + 1)),
    ]


def _flag(name: str, value: str | float) -> list[str]:
    """Nothing where the value says nothing."""
    return [name, str(value)] if value else []
