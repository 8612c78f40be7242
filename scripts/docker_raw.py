"""What Docker itself costs on this machine, by its SDK and nothing of ours: the figures to hold the backend against.

python scripts/docker_raw.py IMAGE [REPEATS]      DOCKER_HOST names the engine
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import docker

CROWD, THREADS = 32, 4


def timed(what: str, act: Callable[[], object], repeats: int) -> None:
    ms = []
    for n in range(repeats + 3):
        began = time.perf_counter()
        act()
        if n >= 3:  # warm-up
            ms.append(1e3 * (time.perf_counter() - began))
    ms.sort()
    say(f"{what:44}{statistics.median(ms):9.1f}{ms[int(0.9 * (len(ms) - 1))]:9.1f}{ms[0]:9.1f}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


class Raw:
    def __init__(self, image: str) -> None:
        self.client: Any = docker.APIClient(
            base_url=os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"), max_pool_size=THREADS
        )
        self.image = image
        self.made: list[str] = []

    def start(self) -> str:
        config = self.client.create_host_config(network_mode="none", mem_limit="512m", pids_limit=128, init=True)
        made = self.client.create_container(self.image, ["/bin/sleep", "1000"], host_config=config)["Id"]
        self.client.start(made)
        self.made.append(made)
        return str(made)

    def remove(self, made: str) -> None:
        self.client.remove_container(made, force=True, v=True)
        self.made.remove(made)

    def exec(self, made: str) -> None:
        one = self.client.exec_create(made, ["/bin/sh", "-c", "echo hi"])["Id"]
        assert self.client.exec_start(one) == b"hi\n"
        assert self.client.exec_inspect(one)["ExitCode"] == 0

    def reset(self) -> None:
        """By a fresh container, after 20 MB were written."""
        self.remove(self.made[-1])
        self.start()


def main(image: str, repeats: int) -> None:
    raw = Raw(image)
    say(f"raw docker, image {image}\n{'ms':44}{'median':>9}{'p90':>9}{'best':>9}")
    try:
        timed("create and start", raw.start, repeats)
        timed("remove", lambda: raw.remove(raw.made[0]), repeats)
        made = raw.start()
        timed("exec (create, start, inspect)", lambda: raw.exec(made), repeats)
        timed("reset: remove, create and start", raw.reset, repeats)
        timed("update cpuset_cpus", lambda: raw.client.update_container(raw.made[-1], cpuset_cpus="0"), repeats)
        with ThreadPoolExecutor(THREADS) as threads:
            began = time.perf_counter()
            crowd = list(threads.map(lambda _: raw.start(), range(CROWD)))
            started = time.perf_counter()
            list(threads.map(raw.exec, crowd))
            ran = time.perf_counter()
        starts, execs = CROWD / (started - began), CROWD / (ran - started)
        say(f"{CROWD} by {THREADS} threads: {starts:.1f} starts/s, {execs:.0f} execs/s")
    finally:
        for one in list(raw.made):
            raw.remove(one)
        raw.client.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
