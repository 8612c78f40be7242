"""What only containers have: a crowd of them, hostile commands, engines that hang and die, images."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from agentrl.errors import AgentRLError, SandboxLost, TaskError, UnavailableError, UserError
from agentrl.recipe.schema import Docker, Sandbox
from agentrl.records import Blame, ExecResult, File, Lane, Limits
from agentrl.sandbox import images
from agentrl.sandbox.backends import container as containers
from agentrl.sandbox.backends.base import Box, BoxSpec
from agentrl.sandbox.backends.docker import DockerBackend, DockerBox
from agentrl.sandbox.client import RemoteSandbox, SandboxClient
from agentrl.sandbox.cpusets import parse_cpus
from agentrl.tasks import harbor
from agentrl.tasks.images import tag_of
from agentrl.tasks.verifier import HarborVerifier
from tests import dockerd
from tests.contract.sandboxes import Daemon, rid, task
from tests.dockerd import BUSYBOX, PYTHON, Engine

pytestmark = [pytest.mark.live, pytest.mark.docker]

T = TypeVar("T")
QUICK_S = 2.0  # of a call to an engine that is stopped


class Bench:
    def __init__(self, section: Sandbox, folder: Path) -> None:
        self.runner = asyncio.Runner()
        self.backend = DockerBackend(section.docker, image=section.image, state_dir=str(folder))
        self._count = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def spec(self, limits: Limits = Limits(), **more: Any) -> BoxSpec:  # noqa: B008
        self._count += 1
        return BoxSpec(id=f"d{self._count}", label="live", limits=limits, **more)

    def settle(self) -> None:
        """Until no container is being made in advance or removed."""

        async def done() -> None:
            while tasks := [*self.backend.pool.in_advance, *self.backend.pool.removals]:
                await asyncio.gather(*tasks)

        self.run(done())

    def box(self, limits: Limits = Limits(), **more: Any) -> Box:  # noqa: B008
        return self.run(self.backend.start(self.spec(limits, **more)))

    def exec(self, box: Box, command: str, timeout_s: float = 20.0, **more: Any) -> ExecResult:
        return self.run(box.exec(command, timeout_s=timeout_s, cpus=more.pop("cpus", ()), **more))

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.run(self.backend.aclose())
        self.runner.close()


@pytest.fixture
def bench(engine: Engine, tmp_path: Path) -> Iterator[Bench]:
    with Bench(engine.section(), tmp_path) as made:
        yield made
    assert not engine.containers()


# --- a crowd -----------------------------------------------------------------------------------------------------

BOXES, COMMANDS, PACKAGES = 64, 500, 3
LOOK = "grep Cpus_allowed_list /proc/self/status | cut -f2"
SPAN = "date +%s%N; make -j8 >/dev/null 2>&1; sleep 0.05; date +%s%N"  # the detector calls it heavy


@pytest.mark.timeout(300)
def test_a_crowd_on_its_lanes(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 sandboxes, 500 commands: each on its lane's CPUs as seen from inside, never more heavy ones than their cap."""
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    caps = {"lanes": {"package": PACKAGES, "command": 8}, "max_live": BOXES}
    spans: list[tuple[int, int]] = []

    async def work(client: SandboxClient, boxes: list[RemoteSandbox], cpus: dict[Lane, set[int]], number: int) -> None:
        heavy = number % 25 == 0
        box = boxes[number % BOXES]
        result = await box.exec(SPAN if heavy else LOOK, timeout_s=60, request_id=rid())
        assert result.lane is (Lane.PACKAGE if heavy else Lane.COMMAND)
        if heavy:
            began, ended = map(int, result.output.split())
            spans.append((began, ended))
        else:
            assert set(parse_cpus(result.output.strip())) == cpus[Lane.COMMAND]

    async def crowd(client: SandboxClient) -> None:
        boxes = await asyncio.gather(
            *(client.open(task(), label="a", lease_s=300, request_id=rid()) for _ in range(BOXES))
        )
        status = await client.status(deadline_s=30)
        assert status.live == BOXES <= len(engine.containers())
        cpus = {lane.lane: set(lane.cpus) for lane in status.lanes}
        await asyncio.gather(*(work(client, boxes, cpus, number) for number in range(COMMANDS)))
        for lane in (Lane.VERIFY, Lane.PACKAGE):
            result = await boxes[0].exec(LOOK, timeout_s=20, request_id=rid(), lane=lane)
            assert set(parse_cpus(result.output.strip())) == cpus[lane]
        await asyncio.gather(*(box.close() for box in boxes))
        assert (await client.status(deadline_s=30)).live == 0

    async def main(daemon: Daemon) -> None:
        async with daemon.client() as client:
            await crowd(client)

    with Daemon(tmp_path, "docker", sandbox=caps, queue_timeout_s=240.0) as daemon:
        asyncio.run(main(daemon))
    assert len(spans) == COMMANDS // 25
    assert max(sum(began <= at < ended for began, ended in spans) for at, _ in spans) <= PACKAGES
    assert not engine.containers()


# --- hostile commands (fork bombs, memory and disk hogs, orphans: tests/contract/test_backend.py) ------------------


def test_a_gigabyte_of_output_is_counted_and_not_kept(bench: Bench) -> None:
    box = bench.box()
    done = bench.exec(box, "echo first; head -c 1G /dev/zero; echo; echo last", timeout_s=100, output_bytes=1000)
    assert done.total_bytes == (1 << 30) + len("first\n\nlast\n")
    assert len(done.output) < 1100
    assert done.output.startswith("first\n")
    assert done.output.endswith("last\n")


CLONE3 = (
    "import ctypes as c; l = c.CDLL(None, use_errno=True); l.syscall(435, 0, 0); exit(c.get_errno() == 38)"  # absent
)


def test_no_way_to_the_engine_the_init_or_the_network(bench: Bench) -> None:
    box = bench.box()
    for attempt in (
        "ls -A /run/agentrl | grep .",  # the init's code and socket
        "grep -q agentrl /proc/self/mountinfo && grep -o ' /run/agentrl[^ ]*' /proc/self/mountinfo | grep code",
        "ls /var/run/docker.sock /run/docker.sock",
        "cat /proc/1/environ /proc/1/root/etc/hostname",
        "unshare -Ur true",
        "unshare -r mount -t tmpfs x /mnt",
        "python3 -c 'import socket; socket.create_connection((\"192.0.2.1\", 80), 2)'",
        f"python3 -c '{CLONE3}'",
    ):
        assert bench.exec(box, attempt).exit_code != 0, attempt
    seen = bench.exec(
        box, "python3 -c 'import threading as t; x = t.Thread(target=print, args=(1,)); x.start()'; ls /sys"
    )
    assert seen.output == "1\n"


def test_a_box_sees_nothing_of_the_one_before_it(bench: Bench) -> None:
    one = bench.box()
    bench.exec(
        one, "echo mine | tee /work/mine /usr/mine /dev/shm/mine; ipcmk -M 4096; setsid sleep 9000 >/dev/null 2>&1 &"
    )
    bench.exec(one, "echo x > /etc/hosts; rm -rf /bin; nohup nc -l 127.0.0.1 9 &")
    bench.run(one.kill())
    other = bench.box(env={"A": "b"})
    assert isinstance(one, DockerBox)
    assert isinstance(other, DockerBox)
    assert one.home is other.home
    look = (
        "ls -A /work /dev/shm; ls /usr/mine; ipcs -m | grep -c 4096; pgrep sleep; grep -c localhost /etc/hosts; echo $A"
    )
    assert bench.exec(other, f"{{ {look}; }} 2>/dev/null").output == "/dev/shm:\n\n/work:\n0\n2\nb\n"


def test_tests_are_there_only_for_grading(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in an image that has no Python."""
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    folder = task_folder(tmp_path / "t", f"FROM {PYTHON}\nWORKDIR /work\n")

    async def grade(client: SandboxClient, image: str) -> None:
        asked = msgspec.structs.replace(harbor.load(folder), image=image)
        box = await client.open(asked, label="a", lease_s=60, request_id=rid())
        probe = await box.exec(
            "find /tests /logs -type f 2>/dev/null; find / -name test.sh 2>/dev/null; true",
            timeout_s=20,
            request_id=rid(),
        )
        assert probe.output == ""
        await box.exec(
            "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt", timeout_s=20, request_id=rid()
        )
        verdict = await HarborVerifier().grade(asked, box, request_id=rid())
        assert (verdict.reward, verdict.blame) == (0.0, None)
        await box.exec("echo done > /work/answer", timeout_s=20, request_id=rid())
        assert (await HarborVerifier().grade(asked, box, request_id=rid())).reward == 1.0
        await box.close()

    with Daemon(tmp_path / "d", "docker") as daemon:
        daemon.run(lambda client: grade(client, PYTHON))
        daemon.run(lambda client: grade(client, BUSYBOX))


TEST_SH = """#!/bin/sh
[ "$(cat /work/answer)" = done ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""


def task_folder(folder: Path, dockerfile: str, toml: str = "") -> Path:
    for name, text in {
        "task.toml": toml,
        "instruction.md": "Do it.",
        "environment/Dockerfile": dockerfile,
        "environment/data.txt": "data\n",
        "tests/test.sh": TEST_SH,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


# --- the daemon and the engine die -------------------------------------------------------------------------------


@pytest.mark.parametrize("image", [PYTHON, BUSYBOX])
def test_gc_leaves_nothing_of_a_killed_daemon(
    image: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    state = tmp_path / "runs" / "gone" / "sandbox"
    daemon = Daemon(tmp_path, "docker", sandbox={"image": image}, state_dir=str(state))

    async def leave(client: SandboxClient) -> None:
        for _ in range(2):
            box = await client.open(task(), label="a", lease_s=60, request_id=rid())
            await box.exec("setsid sleep 9000 >/dev/null 2>&1 &", timeout_s=20, request_id=rid())
        assert daemon.process
        daemon.process.kill()

    with daemon:
        daemon.run(leave)
    (tmp_path / "r.toml").write_text(
        f'name = "gone"\n[sandbox]\nbackend = "docker"\nimage = "{image}"\n[sandbox.docker]\nurl = "{engine.url}"\n'
    )
    agentrl = Path(sys.executable).with_name("agentrl")
    done = subprocess.run(
        [agentrl, "sandbox", "gc", "r.toml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not engine.containers()
    assert not list(tmp_path.rglob("agentrl-*"))
    assert "sleep 9000" not in subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout


def test_an_engine_that_hangs_holds_up_new_boxes_only(engine: Engine, tmp_path: Path) -> None:
    with Bench(engine.section(call_timeout_s=QUICK_S, warm=1), tmp_path) as bench:
        box = bench.box()
        engine.pause()
        try:
            assert bench.exec(box, "echo works").output == "works\n"
            bench.run(box.reset())
            bench.run(box.kill())
            bench.box()  # in the same container
            with pytest.raises(UnavailableError, match="said nothing for 2 s") as caught:
                bench.box(Limits(pids=77))
            assert caught.value.blame is Blame.INFRA
        finally:
            engine.go_on()
        assert bench.exec(bench.box(Limits(pids=77)), "echo again").output == "again\n"
    assert not engine.containers()


def test_a_dead_engine_is_named_and_what_runs_goes_on(tmp_path: Path) -> None:
    with dockerd.engine() as mine:
        with Bench(mine.section(), tmp_path / "s") as bench:
            box, bare = bench.box(), bench.box(image=BUSYBOX)
            mine.kill()
            assert bench.exec(box, "echo works").output == "works\n"
            with pytest.raises(SandboxLost):
                bench.exec(bare, "echo gone")
            with pytest.raises(UnavailableError, match="no engine at"):
                bench.box(Limits(pids=77))
            bench.run(box.kill())
            with pytest.raises(UnavailableError, match="no engine at"):
                bench.run(bare.kill())
        mine.start()
        with Bench(mine.section(), tmp_path / "other") as other:
            other.run(other.backend.reap())
        assert not mine.containers(agentrl_run="live")


def test_no_engine_is_one_clear_error(tmp_path: Path) -> None:
    section = Sandbox(image="x", docker=Docker(url=f"unix://{tmp_path}/no.sock"))
    named = pytest.raises(UnavailableError, match=r"no engine at unix://.*/no.sock: .*No such file")
    with Bench(section, tmp_path) as bench, named:
        bench.run(bench.backend.probe())
    with pytest.raises(UserError, match="not on this machine"):
        DockerBackend(Docker(url="tcp://10.0.0.1:2375"), image="", state_dir=str(tmp_path))


# --- images ------------------------------------------------------------------------------------------------------

DOCKERFILE = f"""\
ARG BASE={PYTHON}
FROM $BASE
ARG WHO=world
ENV GREETING="hello $WHO"
WORKDIR /srv/app
COPY --chmod=644 data.txt ./
RUN echo built > built && useradd -m somebody
USER somebody
ENTRYPOINT ["/bin/false"]
"""


def test_an_image_of_atask_folder(bench: Bench, engine: Engine, tmp_path: Path) -> None:
    folder = task_folder(tmp_path / "t", DOCKERFILE.replace("--chmod=644 ", ""))
    asked = harbor.load(folder, images=True)
    assert (asked.image, asked.files, asked.setup) == (tag_of(folder / "environment"), (), ())
    settings = engine.section().docker
    bench.run(images.build(settings, folder / "environment", asked.image, timeout_s=100))
    assert bench.run(images.missing(settings, [asked.image, PYTHON, "absent"])) == ["absent"]
    box = bench.box(image=asked.image, workdir=asked.workdir)
    assert (
        bench.exec(box, "pwd; cat data.txt built; echo $GREETING; id -u").output
        == "/srv/app\ndata\nbuilt\nhello world\n0\n"
    )
    (folder / "environment" / "data.txt").write_text("other")
    assert harbor.load(folder, images=True).image != asked.image


def test_a_build_that_fails_says_where_and_why(engine: Engine, tmp_path: Path) -> None:
    settings = engine.section().docker
    for dockerfile, said in (
        (f"FROM {PYTHON}\nRUN echo before; exit 3\n", "returned a non-zero code: 3"),
        ("FROM no-such/base:1\n", "no-such/base"),
    ):
        folder = task_folder(tmp_path / str(len(dockerfile)), dockerfile)
        with pytest.raises(AgentRLError, match=said) as caught:
            asyncio.run(images.build(settings, folder / "environment", "agentrl-task:x", timeout_s=60))
        assert str(folder) in str(caught.value)
        assert caught.value.hint


def test_an_absent_image_is_one_clear_error(engine: Engine, bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="No such image: other/image") as caught:
        bench.box(image="other/image")
    assert "docker pull" in caught.value.hint
    named = pytest.raises(UnavailableError, match="No such image: recipe/image")
    with Bench(engine.section("recipe/image"), tmp_path / "r") as recipes, named:
        recipes.run(recipes.backend.probe())


def test_an_image_without_a_shell_is_its_tasks_fault(bench: Bench, engine: Engine, tmp_path: Path) -> None:
    client = engine.client()
    client.import_image_from_data(_tar_of(tmp_path), repository="agentrl-test/empty", tag="latest")
    client.close()
    with pytest.raises(TaskError, match="no /bin/sh"):
        bench.box(image="agentrl-test/empty:latest")


def _tar_of(folder: Path) -> bytes:
    (folder / "root").mkdir()
    (folder / "root" / "file").write_text("x")
    return subprocess.run(["tar", "-C", str(folder / "root"), "-c", "."], capture_output=True, check=True).stdout


# --- around ------------------------------------------------------------------------------------------------------


def test_cpus_without_the_right_to_write_control_groups(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the engine then, as for an ordinary user of the docker group."""
    monkeypatch.setattr(containers, "_handles", lambda pid, made: ([], True))
    box = bench.box(cpus=(0,))
    assert bench.exec(box, LOOK).output == "0\n"
    assert bench.exec(box, LOOK, cpus=(1,)).output == "1\n"
    bench.run(box.set_cpus((0,)))
    assert bench.exec(box, LOOK).output == "0\n"


def test_idle_containers_stay_below_their_cap(engine: Engine, tmp_path: Path) -> None:
    with Bench(engine.section(warm=2), tmp_path) as bench:

        async def wave() -> None:
            boxes = await asyncio.gather(*(bench.backend.start(bench.spec()) for _ in range(5)))
            await asyncio.gather(*(box.kill() for box in boxes))

        bench.run(wave())
        bench.settle()
        assert len(engine.containers()) == 2
        bench.run(bench.box(Limits(pids=99)).kill())
        bench.settle()
        assert len(engine.containers()) == 2
    assert not engine.containers()


def test_a_cancelled_start_leaves_nothing(bench: Bench, engine: Engine) -> None:
    async def cancel(after_s: float) -> None:
        starting = asyncio.ensure_future(bench.backend.start(bench.spec()))
        await asyncio.wait([starting], timeout=after_s)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if starting.done() and not starting.cancelled() and not starting.exception():
            await starting.result().kill()

    for after_s in (0.0, 0.02, 0.1, 0.2, 0.3):
        bench.run(cancel(after_s))
    bench.settle()
    assert {c["State"] for c in engine.containers()} <= {"running"}  # idle ones


def test_files_arrive_where_python_is_not(bench: Bench) -> None:
    box = bench.box(image=BUSYBOX)
    blob = bytes(range(256)) * 4000
    bench.run(box.put({"/work/a/b c.bin": File(data=blob), "/tests/run.sh": File(data=b"echo ran\n", mode=0o755)}))
    assert bench.run(box.get("/work/a/b c.bin", 1 << 21)) == blob
    assert bench.exec(box, "/tests/run.sh; stat -c %a /tests/run.sh").output == "ran\n755\n"
    assert "images without Python (1) by docker exec" in bench.backend.isolation
    assert bench.exec(box, "touch /etc/x").exit_code != 0
