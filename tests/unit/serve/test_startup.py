"""What SGLang's log says of its start, and which SGLang is refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import pytest

from agentrl.errors import UnavailableError
from agentrl.hosts.local import LocalHost
from agentrl.serve.startup import follow, phase, require_sglang

HEAD = "[2026-12-01 01:40:35] server_args={'model_path': '/m', 'load_format': 'auto'}"
LINES: list[tuple[str, tuple[str, float | None] | None]] = [
    ("warnings.warn(", None),
    (HEAD, ("starts its processes", None)),
    ("[2026-12-01 01:41:00 TP0] Load weight begin. avail mem=270.00 GB", ("loads weights", None)),
    (
        "Loading safetensors checkpoint shards:   0% Completed | 0/4\r"
        "Loading safetensors checkpoint shards:  25% Completed | 1/4",
        ("loads weights", 0.25),
    ),
    ("[2026-12-01 01:42:00 TP0] Load weight end. elapsed=10.1 s", ("weights are loaded", None)),
    ("[2026-12-01 01:42:01 TP0] Memory pool end. avail mem=40.00 GB", ("KV cache is there", None)),
    ("[2026-12-01 01:42:02 TP0] Capture cuda graph begin. This can take minutes.", ("captures graphs", None)),
    ("Capturing batches (bs=64 avail_mem=39.1 GB):  50%|#####     | 4/8", ("captures graphs", 0.5)),
    ("[2026-12-01 01:43:02 TP0] Capture cuda graph end. Time elapsed: 60.0 s.", ("graphs are captured", None)),
    ("INFO:     Uvicorn running on http://127.0.0.1:30000", ("listens", None)),
    ("[2026-12-01 01:43:10] The server is fired up and ready to roll!", ("ready", None)),
]


@pytest.mark.parametrize("count", range(1, len(LINES) + 1))
def test_the_last_line_that_says_something_counts(count: int) -> None:
    log = "\n".join(line for line, _ in LINES[:count])
    assert phase(log) == LINES[count - 1][1]
    assert phase(f"{log}\nsomething else\n\n") == LINES[count - 1][1]


class Told:
    """A host whose log grows with each look; also hears what is told of it. `end` is set with the last line."""

    name = "h1"

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = iter(texts)
        self.heard: list[tuple[str, str, float | None]] = []
        self.end = asyncio.Event()

    async def run(self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"") -> tuple[int, str]:
        text = next(self._texts, None)
        if text is None:
            self.end.set()
            raise UnavailableError("h1 cannot be reached")
        return 0, text

    def __call__(self, who: str, what: str, share: float | None = None) -> None:
        self.heard.append((who, what, share))


def test_each_change_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.serve.startup._EVERY_S", 0.001)

    async def check() -> None:
        host = Told([LINES[0][0], LINES[1][0], LINES[1][0], LINES[3][0]])
        following = asyncio.create_task(follow(host, "log", "e0 on h1", host))  # type: ignore[arg-type]
        await host.end.wait()
        following.cancel()
        assert host.heard == [("e0 on h1", "starts its processes", None), ("e0 on h1", "loads weights", 0.25)]

    asyncio.run(check())


def test_an_interpreter_without_sglang_is_named() -> None:
    with pytest.raises(UnavailableError, match=rf"{sys.executable} has no sglang .*sglang") as caught:
        asyncio.run(require_sglang(LocalHost(), sys.executable))
    assert "engines.python" in caught.value.hint


@pytest.mark.parametrize(("found", "refused"), [("0.5.19", True), ("0.5.20", False), ("0.5.23.post1", False)])
def test_a_version_that_is_too_old_is_named_with_those_that_are_not(found: str, refused: bool) -> None:
    host = Told([f"a warning\n{found}\n"])
    if not refused:
        asyncio.run(require_sglang(host, "/py"))  # type: ignore[arg-type]
        return
    with pytest.raises(UnavailableError, match=f"h1: /py has sglang {found}; supported is 0.5.20 and later"):
        asyncio.run(require_sglang(host, "/py"))  # type: ignore[arg-type]
