"""Run by SGLang's interpreter: its own arguments on standard input, as JSON, through its own parser and all of its
resolution; what came of them on standard output.

There is no GPU here. The device is said to be a CPU, and the one question that GLM-5.x asks CUDA all the same, how new
the GPU is, is answered as a B300 would.
"""

from __future__ import annotations

import json
import sys

import torch


def main() -> None:
    torch.cuda.get_device_capability = lambda device=None: (10, 3)
    from sglang.srt.server_args import prepare_server_args  # type: ignore[import-not-found,unused-ignore]

    arguments = prepare_server_args([*json.load(sys.stdin), "--device", "cpu"])
    arguments.resolve_once()
    print(json.dumps(arguments.resolved_dict(), default=str))


main()
