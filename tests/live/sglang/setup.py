"""Makes `.venv-sglang`: real SGLang on a CPU without a GPU, AMX or a build of its kernels. About 1.6 GB.

    python tests/live/sglang/setup.py

The released wheel runs unchanged. What it imports and never calls on a CPU is answered by `standin/`, which a `.pth`
file puts last on the environment's path. Done once: a stamp says that nothing is to be done.
Where pip would bring a CUDA build of torch (it works too), name another: TORCH="torch==2.13.0 --index-url URL".
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
STANDIN = HERE / "standin"
ENVIRONMENT = HERE.parents[2] / ".venv-sglang"
PYTHON = ENVIRONMENT / "bin" / "python"
STAMP = ENVIRONMENT / "ready"
LONGEST_S = 1_800

# torch first, so that nothing after it brings another; SGLang without its requirements, most of which are GPU packages
TORCH = shlex.split(os.environ.get("TORCH", "torch==2.13.0"))
BARE = ["--no-deps", "sglang==0.5.23", "xgrammar==0.2.7", "compressed-tensors==0.18.0"]
NEEDED = [
    "numpy",
    "transformers==5.19.0",
    "tokenizers==0.23.2",
    "aiohttp",
    "requests",
    "fastapi",
    "uvicorn",
    "uvloop",
    "orjson",
    "msgspec",
    "pyzmq",
    "psutil",
    "setproctitle",
    "tqdm",
    "pillow",
    "prometheus-client",
    "python-multipart",
    "packaging",
    "pydantic",
    "einops",
    "IPython",
    "xxhash",
    "zstandard",
    "regex",
    "partial_json_parser",
    "interegular",
    "watchfiles",
    "distro",
    "easydict",
    "pybase64",
    "dill",
    "loguru",
    "jsonschema",
    "openai==2.8.0",
    "sentencepiece==0.2.1",
    "gguf",
    "tiktoken",
    "soundfile",
    "apache-tvm-ffi==0.1.11",
    "llguidance>=1.7.6,<2",
]
STEPS = (("torch", TORCH), ("SGLang", BARE), ("what SGLang imports", NEEDED))
PROOF = "import sglang.srt.entrypoints.http_server as server, sglang; print('SGLang', sglang.__version__, 'imports')"


def main() -> int:
    wanted = _digest()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return 0
    began = time.monotonic()
    if sys.version_info[:2] != (3, 11):
        print(f"setup: tried on Python 3.11 only, this is {sys.version.split()[0]}", file=sys.stderr)
    print(f"setup: {ENVIRONMENT}", flush=True)
    if not PYTHON.exists():
        venv.create(ENVIRONMENT, with_pip=True)
    for what, packages in STEPS:
        print(f"setup: {what} ...", flush=True)
        if not _run("-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages, what=what):
            return 1
    _link_standin()
    print("setup: proof ...", flush=True)
    if not _run("-c", PROOF, what="importing SGLang"):
        return 1
    STAMP.write_text(wanted)
    print(f"setup: done in {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _run(*arguments: str, what: str) -> bool:
    """Whether it went well; otherwise says what did not. Only then are pip's remarks on missing GPU packages shown."""
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [str(PYTHON), *arguments], env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"setup: {what}: not done within {LONGEST_S} s", file=sys.stderr)
        return False
    if done.returncode:
        print(f"{done.stdout}{done.stderr}setup: {what} failed with code {done.returncode}", file=sys.stderr)
        print("setup: remove .venv-sglang and try again once the cause above is gone", file=sys.stderr)
    return done.returncode == 0


def _link_standin() -> None:
    [packages] = ENVIRONMENT.glob("lib/python*/site-packages")
    (packages / "agentrl_standin.pth").write_text(f"{STANDIN}\nimport agentrl_standin\n")


def _digest() -> str:
    """Of this file, which holds the versions, the torch asked for, and where the stand-ins lie."""
    return hashlib.sha256(f"{Path(__file__).read_text()}{TORCH}{STANDIN}".encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
