"""When the tests of this folder run."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.engines import SGLANG_PYTHON, sglang_engines

needs_sglang = [
    pytest.mark.live,
    pytest.mark.sglang,
    pytest.mark.timeout(600),  # SGLang imports for 25 s alone on two cores, for minutes beside other work
    pytest.mark.skipif(SGLANG_PYTHON not in os.environ, reason=f"{SGLANG_PYTHON} is not set: make test-sglang"),
]


def two_ranks(**changes: Any) -> dict[str, Any]:
    """Changes of the recipe's engines for attention DP over two processes, a core for each."""
    cores = "|".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])
    return {"ranks": 2, "env": {**sglang_engines().env, "SGLANG_CPU_OMP_THREADS_BIND": cores}, **changes}
