"""`python -m agentrl.train.worker --config-file F`: puts the trainer process together, as `wiring` does for a run.

Exit codes: 0 the run is over, 130 told to stop, else as the error tree says.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import msgspec

from agentrl.errors import AgentRLError, UserError
from agentrl.publish.store import DiskWeightStore
from agentrl.train.config import WorkerConfig
from agentrl.train.worker.main import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m agentrl.train.worker")
    parser.add_argument("--config-file", required=True, help="JSON, see agentrl.train.config.WorkerConfig")
    try:
        asyncio.run(run(_config(parser.parse_args().config_file), DiskWeightStore))
    except AgentRLError as exc:
        print(f"trainer: error: {exc}\n  {exc.hint}".rstrip(), file=sys.stderr, flush=True)  # noqa: T201
        return exc.exit_code
    except asyncio.CancelledError:
        return 130
    return 0


def _config(path: str) -> WorkerConfig:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=WorkerConfig)
    except OSError as exc:
        raise UserError(f"{path}: cannot be read: {exc.strerror}") from exc
    except msgspec.MsgspecError as exc:
        raise UserError(f"{path}: {exc}", hint="See agentrl.train.config.WorkerConfig.") from exc


if __name__ == "__main__":
    code = main()
    # not sys.exit: it would wait for a step that hangs, and all that matters is complete on disk or absent
    sys.stderr.flush()
    os._exit(code)
