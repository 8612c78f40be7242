"""A Docker engine of the tests' own, started by hand: no service manager, no registry, no bridge, nothing shared with
an engine that may run here. Needs root and Debian's docker.io; the images come from `tests/live/docker/images.sh`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from agentrl.recipe.schema import Docker, Sandbox

CACHE = Path(os.environ.get("AGENTRL_DOCKER_CACHE", Path.home() / ".cache" / "agentrl-docker"))
PYTHON, BUSYBOX = "agentrl-test/python:latest", "agentrl-test/busybox:latest"
_SCRIPT = Path(__file__).parent / "live" / "docker" / "images.sh"
_START_S = 60.0


class Engine:
    """`pid` is dockerd's; its containerd is a child."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def start(self) -> None:
        argv = [
            "dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none", "--ip-forward=false",
            "--storage-driver=overlay2", f"--data-root={self.folder}/data", f"--exec-root={self.folder}/exec",
            f"--host={self.url}", f"--pidfile={self.folder}/docker.pid", "--exec-opt=native.cgroupdriver=cgroupfs",
        ]  # fmt: skip
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"dockerd does not start: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        import docker

        try:
            self.client().close()
        except docker.errors.DockerException:
            return False
        return True

    def client(self) -> Any:
        """The SDK's; whoever asks closes it."""
        import docker

        return docker.APIClient(base_url=self.url, timeout=60)

    def section(self, image: str = PYTHON, **docker: Any) -> Sandbox:
        return Sandbox(backend="docker", image=image, docker=Docker(url=self.url, network="host", **docker))

    def containers(self, **labels: str) -> list[dict[str, Any]]:
        filters = {"label": [f"{key.replace('_', '.')}={value}" for key, value in labels.items()] or ["agentrl.owner"]}
        client = self.client()
        try:
            found: list[dict[str, Any]] = client.containers(all=True, filters=filters)
            return found
        finally:
            client.close()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL. Its containerd dies with it; the containers do not. The names of both go, or a successor takes a
        zombie for a containerd that lives."""
        assert self._process
        self._process.kill()
        self._process.wait()
        for name in ("docker.pid", "exec/containerd/containerd.pid"):
            (self.folder / name).unlink(missing_ok=True)

    def end(self) -> None:
        """SIGTERM: it stops its containerd. Nothing of it stays mounted."""
        assert self._process
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(_START_S)
        finally:
            self._end_left_over()
            for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
                if line.split()[1].startswith(str(self.folder)):
                    subprocess.run(["umount", "-l", line.split()[1]], check=False)

    def _end_left_over(self) -> None:
        """Shims of an engine that was killed name its folder, and the containers are their children."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.folder) in " ".join(process.cmdline()):
                    for one in (*process.children(recursive=True), process):
                        one.kill()


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """Started, with both images. Skips with the reason where this machine cannot have one."""
    if os.getuid() != 0:
        pytest.skip("docker: starting an engine needs root")
    if not shutil.which("dockerd"):
        pytest.skip("docker: no dockerd here (Debian: apt-get install docker.io)")
    made = subprocess.run([str(_SCRIPT), str(CACHE)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"docker: no images: {made.stderr.strip()[-200:]}")
    folder = Path(tempfile.mkdtemp(prefix="agentrl-dockerd-"))
    running = Engine(folder)
    try:
        running.start()
        client = running.client()
        for name in (PYTHON, BUSYBOX):
            client.import_image_from_file(str(CACHE / f"{name.split('/')[1].split(':')[0]}.tar"), *name.split(":"))
        client.close()
        yield running
    finally:
        running.end()
        shutil.rmtree(folder, ignore_errors=True)
