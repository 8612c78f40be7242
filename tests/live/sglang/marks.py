"""When the tests of this folder run."""

from __future__ import annotations

import os

import pytest

from tests.engines import SGLANG_PYTHON

needs_sglang = [
    pytest.mark.live,
    pytest.mark.sglang,
    pytest.mark.timeout(600),  # SGLang imports for 25 s alone on two cores, for minutes beside other work
    pytest.mark.skipif(SGLANG_PYTHON not in os.environ, reason=f"{SGLANG_PYTHON} is not set: make test-sglang"),
]
