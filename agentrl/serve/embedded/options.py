"""What the engine process is told: typed, checked, and the same names as the flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """ranks: data-parallel ranks, each with `slots` running requests and `kv_tokens` of KV."""

    model_path: str
    host: str = "127.0.0.1"
    port: int = 0
    api_key_file: str = ""
    served_model_name: str = ""  # whoever starts the engine puts a nonce here and asks for it in /server_info
    weight_version: str = "0"
    ranks: int = 1
    slots: int = 32
    kv_tokens: int = 65_536
    threads: int = 1
    dtype: str = "float32"
    context_length: int = 1024
    prefill_tokens: int = 512  # prompt tokens computed between two decode steps
    random_seed: int = 0
    drain_s: float = 2.0  # how long SIGTERM waits for running requests

    @property
    def api_key(self) -> str:
        return Path(self.api_key_file).read_text().strip() if self.api_key_file else ""


def parse(argv: Sequence[str]) -> Options:
    """Exits with 2 and a message where a flag is wrong, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m agentrl.serve.embedded", description="A small CPU engine with SGLang's HTTP interface."
    )
    for field in msgspec.structs.fields(Options):
        flag = "--" + field.name.replace("_", "-")
        kind = {"int": int, "float": float}.get(str(field.type), str) if isinstance(field.type, str) else field.type
        if field.default is msgspec.NODEFAULT:
            parser.add_argument(flag, type=kind, required=True)
        else:
            parser.add_argument(flag, type=kind, default=field.default)
    options = Options(**vars(parser.parse_args(argv)))
    for name in ("ranks", "slots", "kv_tokens", "threads", "context_length", "prefill_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.context_length < 8:
        parser.error("--context-length must be at least 8")
    if options.host not in LOOPBACK:
        parser.error(f"--host {options.host}: this engine serves the loopback interface only")
    if options.dtype not in ("float32", "bfloat16"):
        parser.error(f"--dtype {options.dtype}: float32 or bfloat16")
    if not 0 <= options.port < 65_536:
        parser.error(f"--port {options.port}: 0 to 65535")
    return options
