"""What the engine says of itself, in SGLang's shapes. Read from the event loop while the step loop runs: each figure is
true of some moment, not all of the same one."""

from __future__ import annotations

import time
from importlib import metadata
from typing import Any

import torch

from agentrl.serve.embedded.core import Core
from agentrl.serve.embedded.options import Options

Body = dict[str, Any]


def loads(core: Core, options: Options) -> Body:
    rows = [
        {
            "dp_rank": number,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_used_tokens": load.used_tokens,
            "num_total_tokens": load.used_tokens,
            "max_total_num_tokens": options.kv_tokens,
            "max_running_requests": options.slots,
            "token_usage": load.used_tokens / options.kv_tokens,
        }
        for number, load in enumerate(rank.load() for rank in core.ranks)
    ]
    return {"timestamp": time.time(), "loads": rows}


def model_info(core: Core, options: Options, model_path: str) -> Body:
    """model_path: of the weights that are served now."""
    return {
        "model_path": model_path,
        "served_model_name": options.served_model_name or options.model_path,
        "is_generation": True,
        "weight_version": core.version,
        "load_format": "auto",
        "model_type": core.model.config.model_type,
        "architectures": core.model.config.architectures,
    }


def server_info(core: Core, options: Options) -> Body:
    state = {"effective_max_running_requests_per_dp": options.slots, "max_total_num_tokens": options.kv_tokens}
    return {
        "engine": "agentrl.serve.embedded",
        "version": metadata.version("agentrl"),
        "served_model_name": options.served_model_name or options.model_path,
        "host": options.host,
        "port": options.port,
        "dp_size": options.ranks,
        "dtype": options.dtype,
        "context_length": options.context_length,
        "vocab_size": core.model.config.vocab_size,
        "max_running_requests": options.slots * options.ranks,
        "max_total_num_tokens": options.kv_tokens,
        "torch_threads": torch.get_num_threads(),
        "internal_states": [state] * options.ranks,
    }


def metrics(core: Core) -> str:
    """Prometheus text, one series for each rank."""
    lines: list[str] = []
    loads = [rank.load() for rank in core.ranks]
    counters = [rank.counters for rank in core.ranks]
    for kind, name, figures in (
        ("gauge", "num_running_reqs", [load.running for load in loads]),
        ("gauge", "num_queue_reqs", [load.waiting for load in loads]),
        ("gauge", "kv_used_tokens", [load.used_tokens for load in loads]),
        ("counter", "prompt_tokens_total", [c.prompt_tokens for c in counters]),
        ("counter", "cached_tokens_total", [c.cached_tokens for c in counters]),
        ("counter", "generation_tokens_total", [c.generation_tokens for c in counters]),
        ("counter", "num_requests_total", [c.requests for c in counters]),
        ("counter", "num_aborted_requests_total", [c.aborted for c in counters]),
        ("counter", "num_retracted_requests_total", [c.retracted for c in counters]),
    ):
        lines.append(f"# TYPE sglang:{name} {kind}")
        lines += [f'sglang:{name}{{dp_rank="{rank}"}} {figure}' for rank, figure in enumerate(figures)]
    return "\n".join(lines) + "\n"
