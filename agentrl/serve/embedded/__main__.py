"""The engine process. SIGTERM, or the end of whoever started it, drains and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shlex
import signal
import stat
import sys
import traceback

import torch
from aiohttp import web

from agentrl import lifeline
from agentrl.errors import AgentRLError, UserError
from agentrl.serve.embedded import weights as checkpoints
from agentrl.serve.embedded.core import Core
from agentrl.serve.embedded.loop import StepLoop
from agentrl.serve.embedded.model import Model
from agentrl.serve.embedded.options import Options, parse
from agentrl.serve.embedded.server import Server


def main() -> int:
    options = parse(sys.argv[1:])
    torch.set_num_threads(options.threads)
    try:
        return asyncio.run(serve(options))
    except AgentRLError as exc:
        print(f"error: {exc} {exc.hint}", file=sys.stderr)  # noqa: T201
        return exc.exit_code
    except OSError as exc:
        print(f"error: {options.host}:{options.port}: {exc}", file=sys.stderr)  # noqa: T201
        return 3


async def serve(options: Options) -> int:
    end = asyncio.Event()
    crashes: list[BaseException] = []

    def on_crash(exc: BaseException) -> None:
        crashes.append(exc)
        end.set()

    events = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        events.add_signal_handler(number, end.set)
    if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        lifeline.install(end.set)
    config = checkpoints.ModelConfig.read(options.model_path)
    if options.context_length > config.max_position_embeddings:
        raise UserError(
            f"--context-length {options.context_length}: the model in {options.model_path} was made for "
            f"{config.max_position_embeddings}",
            hint="Lower model.context_tokens.",
        )
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    weights = await asyncio.to_thread(checkpoints.read, options.model_path, config, dtype)
    core = Core(Model(config, weights, dtype, options.context_length), options)
    await asyncio.to_thread(core.warm_up)
    gc.freeze()  # torch's half a million objects need no looking at ever again
    loop = StepLoop(core, on_crash)
    server = Server(loop, options, weights, shlex.join([sys.executable, *sys.argv]))
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    loop.start()
    try:
        await runner.setup()
        site = web.TCPSite(runner, options.host, options.port)
        await site.start()
        print(f"serving {options.model_path} on {options.host}:{options.port}", file=sys.stderr, flush=True)  # noqa: T201
        await end.wait()
        if not crashes:
            await server.drain()
    finally:
        with contextlib.suppress(asyncio.TimeoutError):
            await runner.cleanup()
        loop.close()
    for exc in crashes:
        traceback.print_exception(exc)
    return 1 if crashes else 0


if __name__ == "__main__":
    sys.exit(main())
