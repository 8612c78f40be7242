"""What every sandbox backend owes the daemon (`agentrl/sandbox/backends/base.py`), tried on each that works here.

As root the suite runs itself once more as an ordinary user, so that both ways of the namespace backend are held to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from agentrl.errors import AgentRLError, SandboxLost, TaskError, UserError
from agentrl.recipe.schema import Sandbox
from agentrl.records import ExecResult, File, Limits
from agentrl.sandbox.backends import make_backend
from agentrl.sandbox.backends.base import Backend, Box, BoxSpec
from agentrl.sandbox.backends.inside import cgroups

pytestmark = [pytest.mark.live, pytest.mark.skipif(sys.platform != "linux", reason="Linux namespaces")]

T = TypeVar("T")
ROOT = os.getuid() == 0
REPO = Path(__file__).resolve().parents[2]
CPUS = tuple(sorted(os.sched_getaffinity(0)))


class Bench:
    """One backend, its event loop, and boxes that end with the test."""

    def __init__(self, section: Sandbox, state: str) -> None:
        self.section, self.name = section, section.backend
        self.isolates = self.name != "process"
        self.grouped = ROOT and self.isolates  # limits by control groups, not by rlimits and samplers
        self.state = state
        self.runner = asyncio.Runner()
        self.backend: Backend = make_backend(section, state_dir=state)
        self.boxes: list[Box] = []
        self.init = True  # commands are supervised from inside the box
        self._count = 0

    def without_init(self) -> None:
        """As if its image had no Python for our init, which the tests' own scripts need."""
        from agentrl.sandbox.backends.docker import DockerBackend

        assert isinstance(self.backend, DockerBackend)
        self.init = False
        self.backend._bare.update(dict.fromkeys(self.backend._images.values(), 0.0))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def box(self, limits: Limits = Limits(), *, label: str = "contract", **more: Any) -> Box:  # noqa: B008
        self._count += 1
        spec = BoxSpec(id=f"b{os.getpid()}-{self._count}", label=label, limits=limits, trusted=True, **more)
        box = self.run(self.backend.start(spec))
        self.boxes.append(box)
        return box

    def exec(self, box: Box, command: str, timeout_s: float = 20.0, **more: Any) -> ExecResult:
        return self.run(box.exec(command, timeout_s=timeout_s, cpus=more.pop("cpus", ()), **more))

    def clear(self) -> None:
        for box in self.boxes:
            self.run(box.kill())
        self.boxes.clear()


@pytest.fixture(
    scope="module",
    params=[
        *("namespace", "bubblewrap", "process"),
        *(pytest.param(name, marks=pytest.mark.docker) for name in ("docker", "docker exec")),
    ],
)
def whole(request: pytest.FixtureRequest) -> Iterator[Bench]:
    docker = request.param.startswith("docker")
    section = request.getfixturevalue("engine").section() if docker else Sandbox(backend=request.param)
    state = tempfile.mkdtemp(prefix="agentrl-backend-")
    bench = Bench(section, state)
    try:
        bench.run(bench.backend.probe())
    except AgentRLError as e:
        bench.runner.close()
        shutil.rmtree(state, ignore_errors=True)
        pytest.skip(f"{request.param}: {e}")
    if request.param == "docker exec":
        bench.without_init()
    yield bench
    bench.run(bench.backend.aclose())
    bench.runner.close()
    shutil.rmtree(state, ignore_errors=True)


@pytest.fixture
def bench(whole: Bench) -> Iterator[Bench]:
    yield whole
    whole.clear()


def only_isolating(bench: Bench) -> None:
    if not bench.isolates:
        pytest.skip("this backend isolates nothing")


# --- commands ----------------------------------------------------------------------------------------------------


def test_exec_returns_output_and_exit_code(bench: Bench) -> None:
    box = bench.box()
    done = bench.exec(box, "echo out; echo err >&2; exit 3")
    assert (done.exit_code, done.output, done.truncated, done.timed_out, done.oom) == (
        3,
        "out\nerr\n",
        False,
        False,
        False,
    )
    assert bench.exec(box, "kill -TERM $$").exit_code == 143
    assert bench.exec(box, "no-such-program").exit_code == 127
    assert bench.exec(box, "cat").output == ""  # standard input is closed


def test_exec_sees_its_folder_and_environment(bench: Bench) -> None:
    box = bench.box(workdir="/work/deep", env={"GREETING": "hello", "OTHER": "a"})
    assert bench.exec(box, "pwd; echo $GREETING $OTHER", env={"OTHER": "b"}).output == "/work/deep\nhello b\n"
    assert bench.exec(box, "mkdir sub").exit_code == 0
    assert bench.exec(box, "pwd", cwd="/work/deep/sub").output == "/work/deep/sub\n"
    assert bench.exec(box, "true", cwd="/work/absent").exit_code == 126


def test_output_keeps_head_and_tail(bench: Bench) -> None:
    box = bench.box()
    done = bench.exec(box, "echo first; yes filler | head -c 5000000; echo last", output_bytes=1000)
    assert done.truncated
    assert done.total_bytes > 5_000_000
    assert done.output.startswith("first\nfiller")
    assert done.output.endswith("last\n")
    assert len(done.output) < 1100


def test_background_child_does_not_hold_the_result(bench: Bench) -> None:
    box = bench.box()
    done = bench.exec(box, "sleep 50 & echo started")
    assert done.output == "started\n"
    assert done.run_s < 5
    assert bench.exec(box, "pgrep -x sleep | wc -l").output.strip() != "0" or not bench.isolates


def test_background_child_may_go_on_writing(bench: Bench) -> None:
    box = bench.box()
    bench.exec(box, "(for i in 1 2 3 4 5; do sleep 0.02; echo $i || exit; done; echo whole > /work/mark) & true")
    done = bench.exec(box, "for i in $(seq 200); do test -e /work/mark && break; sleep 0.02; done; cat /work/mark")
    assert done.output == "whole\n"


TREE = "setsid sh -c 'echo $$ > /work/one; exec sleep 1000' & (setsid setsid sh -c 'exec sleep 1000' &) ; sleep 1000"


def sleepers(bench: Bench, box: Box) -> int:
    if not bench.isolates:
        return sum("sleep\x001000" in _command(p) for p in Path("/proc").glob("[0-9]*"))
    done = bench.exec(
        box, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -o 'sleep 1000' | grep -c '^sleep'"
    )
    return int(done.output) - 1  # the grep's own shell


def _command(process: Path) -> str:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_text()
    return ""


def test_timeout_kills_the_tree_and_spares_earlier_services(bench: Bench) -> None:
    box = bench.box()
    bench.exec(box, "echo service > /work/s; setsid sleep 2000 >/dev/null 2>&1 & echo $! > /work/pid")
    done = bench.exec(box, f"echo before; {TREE}", timeout_s=0.4)
    assert done.timed_out
    assert done.exit_code is None
    assert done.output == "before\n"
    assert done.run_s < 3
    assert bench.exec(box, "pgrep -f 'sleep 100[0]' || echo none").output == "none\n"
    assert bench.exec(box, "kill -0 $(cat /work/pid) && echo alive").output == "alive\n"


def test_cancel_kills_the_tree(bench: Bench) -> None:
    box = bench.box()

    async def cancelled() -> None:
        task = asyncio.ensure_future(box.exec(f"touch /work/began; {TREE}", timeout_s=60, cpus=()))
        while True:
            with contextlib.suppress(FileNotFoundError):
                await box.get("/work/one", 10)
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    bench.run(cancelled())
    assert bench.exec(box, "pgrep -f 'sleep 100[0]' || echo none").output == "none\n"


def test_commands_run_side_by_side_and_end_apart(bench: Bench) -> None:
    box = bench.box()

    async def both() -> tuple[ExecResult, ExecResult]:
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(
                box.exec("while ! test -e /work/go; do sleep 0.01; done; echo a", timeout_s=20, cpus=())
            )
            short = group.create_task(box.exec("sleep 1000", timeout_s=0.2, cpus=()))
            stopped = await short
            await box.exec("touch /work/go", timeout_s=5, cpus=())
        return slow.result(), stopped

    slow, stopped = bench.run(both())
    assert slow.output == "a\n"
    assert stopped.timed_out


def test_killing_the_supervisor_is_the_commands_own_end(bench: Bench) -> None:
    only_isolating(bench)
    box = bench.box()
    assert bench.exec(box, "kill -9 $PPID; sleep 1000", timeout_s=10).exit_code == 137
    assert bench.exec(box, "kill -9 -1; echo still here", timeout_s=10).exit_code == 137 or not bench.init
    assert bench.exec(box, "{ kill -9 1; kill -STOP 1; } 2>/dev/null; echo ok").output == "ok\n"
    assert bench.exec(box, "pgrep sleep || echo none").output == "none\n"


# --- files -----------------------------------------------------------------------------------------------------


def test_put_and_get(bench: Bench) -> None:
    box = bench.box()
    blob = bytes(range(256)) * 8000
    bench.run(box.put({"/work/a/b.bin": File(data=blob), "/tests/run.sh": File(data=b"echo ran\n", mode=0o755)}))
    assert bench.run(box.get("/work/a/b.bin", 1 << 22)) == blob
    assert bench.run(box.get("/work/a/b.bin", 10)) == blob[:10]
    assert bench.exec(box, "bash /tests/run.sh; stat -c %a /tests/run.sh").output == "ran\n755\n"
    with pytest.raises(FileNotFoundError):
        bench.run(box.get("/work/absent", 10))


def test_put_replaces_whatever_has_the_name(bench: Bench) -> None:
    box = bench.box()
    bench.exec(box, "mkfifo /work/pipe; echo keep > /work/target; ln -s /work/target /work/link")
    with pytest.raises(FileNotFoundError):
        bench.run(box.get("/work/pipe", 10))
    bench.run(box.put({"/work/pipe": File(data=b"1"), "/work/link": File(data=b"2")}))
    assert bench.exec(box, "cat /work/pipe /work/link /work/target").output == "12keep\n"


def test_links_lead_nowhere_outside(bench: Bench, tmp_path: Path) -> None:
    only_isolating(bench)
    secret = tmp_path / "secret"
    secret.write_text("host")
    tmp_path.chmod(0o777)
    box = bench.box()
    for root in ("", "/proc/1/root", "/proc/1/cwd", "/proc/self/root", "/proc/1/task/1/root"):
        bench.exec(box, f"ln -sfn {root}{secret} /work/out; ln -sfn {root}{tmp_path} /work/folder")
        with pytest.raises((FileNotFoundError, AgentRLError)):
            bench.run(box.get("/work/out", 10))
        with contextlib.suppress(AgentRLError):
            bench.run(box.put({"/work/folder/planted": File(data=b"x")}))
        assert [p.name for p in tmp_path.iterdir()] == ["secret"]
    bench.exec(box, f"cd /; rm -rf /work; ln -sfn /proc/1/root{tmp_path} /work")
    bench.exec(box, "echo x > planted; cat secret")
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]


# --- life ------------------------------------------------------------------------------------------------------


def test_reset_forgets_everything(bench: Bench) -> None:
    box = bench.box()
    bench.exec(box, "echo x > /work/a; setsid sleep 3000 >/dev/null 2>&1 & mkdir /work/d")
    if bench.isolates:
        bench.exec(box, "rm -rf /usr/bin/env; echo y > /etc/hostname; echo z > /dev/shm/z")
    bench.run(box.reset())
    assert bench.exec(box, "ls -A /work; pgrep -f 'sleep 300[0]'").output == ""
    if bench.isolates:
        assert bench.exec(box, "test -e /usr/bin/env && ls /dev/shm && cat /etc/hostname").output != "y\n"


def test_sweep_counts_and_kills(bench: Bench) -> None:
    box = bench.box()
    bench.exec(box, "for i in 1 2 3; do setsid sleep 4000 >/dev/null 2>&1 & done")
    assert bench.run(box.sweep()) == 3
    assert bench.run(box.sweep()) == 0
    assert bench.exec(box, "pgrep -f 'sleep 400[0]' || echo none").output == "none\n"


def test_kill_is_idempotent_and_final(bench: Bench) -> None:
    box = bench.box()
    bench.exec(box, "setsid sleep 5000 >/dev/null 2>&1 &")
    bench.run(box.kill())
    bench.run(box.kill())
    with pytest.raises(SandboxLost):
        bench.exec(box, "true")
    assert not any("sleep\x005000" in _command(p) for p in Path("/proc").glob("[0-9]*"))


def test_kill_during_a_command_is_a_lost_sandbox(bench: Bench) -> None:
    box = bench.box()

    async def killed() -> None:
        task = asyncio.ensure_future(box.exec("touch /work/began; sleep 1000", timeout_s=60, cpus=()))
        while True:
            with contextlib.suppress(FileNotFoundError):
                await box.get("/work/began", 10)
                break
        await box.kill()
        with pytest.raises(SandboxLost):
            await task

    bench.run(killed())


OWNER = """
import asyncio, msgspec, sys
from agentrl.recipe.schema import Sandbox
from agentrl.records import Limits
from agentrl.sandbox.backends import make_backend
from agentrl.sandbox.backends.base import BoxSpec
async def main():
    backend = make_backend(msgspec.json.decode(sys.argv[1], type=Sandbox), state_dir=sys.argv[2])
    for n in range(2):
        box = await backend.start(BoxSpec(id=f"orphan{n}", label="orphans", limits=Limits(), trusted=True))
        await box.exec("setsid sleep 6000 >/dev/null 2>&1 & echo", timeout_s=5, cpus=())
    print("ready", flush=True)
    await box.exec("sleep 6000", timeout_s=600, cpus=())
asyncio.run(main())
"""


def test_nothing_outlives_a_killed_owner(bench: Bench) -> None:
    section = msgspec.json.encode(bench.section).decode()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, section, bench.state], stdout=subprocess.PIPE, cwd=REPO, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        children = _descendants(owner.pid) or _with_argument("sleep", "6000")
        assert children
        owner.send_signal(signal.SIGKILL)
    for pid in children:
        _wait_gone(pid)
    bench.run(bench.backend.reap("orphans"))
    if bench.grouped:
        assert not [f for f, _, _ in os.walk("/sys/fs/cgroup") if f.endswith("agentrl-orphans")]
    assert not any("agentrl-backend" in line for line in Path("/proc/self/mounts").read_text().splitlines())
    assert not list(Path(bench.state).rglob("orphan*"))


def _with_argument(*argv: str) -> list[int]:
    """In containers, which are no children of who asked for them."""
    words = "\x00".join([*argv, ""])
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if _command(p) == words]


def _descendants(root: int) -> list[int]:
    from agentrl.sandbox.backends.inside import processes

    return list(processes.descendants(root))


def _wait_gone(pid: int) -> None:
    """A pidfd becomes readable when its process ends; a zombie counts as ended."""
    import select

    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], 10)[0], f"process {pid} outlived its owner"
        finally:
            os.close(fd)


def test_a_dead_launcher_takes_its_boxes_and_is_replaced(bench: Bench) -> None:
    if bench.name != "namespace":
        pytest.skip("this backend has no launcher")
    for kill_janitor in (False, True):
        box = bench.box()
        bench.exec(box, "setsid sleep 8000 >/dev/null 2>&1 & true")
        below = _descendants(os.getpid())
        janitor = next(p for p in below if _parent(p) == os.getpid())
        launcher = next(p for p in below if _parent(p) == janitor)
        os.kill(janitor if kill_janitor else launcher, signal.SIGKILL)
        for pid in below:
            _wait_gone(pid)
        with pytest.raises(SandboxLost):
            bench.exec(box, "true")
    assert bench.exec(bench.box(), "echo new").output == "new\n"


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- limits ----------------------------------------------------------------------------------------------------

HOG = 'python3 -c "b=[]\nwhile True: b.append(bytearray(4<<20))"'


def test_memory_hog_ends_and_the_box_goes_on(bench: Bench) -> None:
    box = bench.box(Limits(memory_mb=96, disk_mb=32))
    done = bench.exec(box, HOG, timeout_s=30)
    assert done.exit_code != 0
    assert done.oom or "MemoryError" in done.output
    assert done.oom or not bench.grouped
    assert not done.timed_out
    assert bench.exec(box, "echo alive").output == "alive\n"
    assert not bench.exec(box, "false").oom


def test_many_small_hogs_end(bench: Bench) -> None:
    """Each below the limit, together above it."""
    box = bench.box(Limits(memory_mb=128, disk_mb=32))
    one = "python3 -c 'import time; b = bytearray(60 << 20); time.sleep(1)'"
    done = bench.exec(box, f"{one} & {one} & {one} & {one} & wait %1 %2 %3 %4", timeout_s=20)
    assert done.oom or bench.grouped  # a control group kills until the rest fits, and the last command may end well
    assert not done.timed_out
    assert bench.exec(box, "echo alive").output == "alive\n"


def test_fork_bomb_is_contained(bench: Bench) -> None:
    only_isolating(bench)
    box = bench.box(Limits(pids=40))
    done = bench.exec(box, "bomb() { bomb | bomb & }; bomb; sleep 1000", timeout_s=1.0)
    assert done.timed_out or done.exit_code
    assert bench.run(box.sweep()) >= 0
    assert bench.exec(box, "echo alive").output == "alive\n"


COUNTER = """
import os, time
made = 0
try:
    while made < 100:
        if os.fork() == 0:
            os.setsid()
            os.closerange(0, 3)
            time.sleep(1000)
        made += 1
except BlockingIOError:
    print("refused")
"""


def test_too_many_processes_cannot_be_made(bench: Bench) -> None:
    only_isolating(bench)
    box = bench.box(Limits(pids=20))
    bench.run(box.put({"/work/count.py": File(data=COUNTER.encode())}))
    assert bench.exec(box, "python3 count.py", timeout_s=10).output == "refused\n"
    assert 10 <= bench.run(box.sweep()) <= 28
    assert bench.exec(box, "echo alive").output == "alive\n"


def test_disk_quota(bench: Bench) -> None:
    only_isolating(bench)
    box = bench.box(Limits(disk_mb=24))
    done = bench.exec(box, "head -c 100M /dev/zero > /work/big; head -c 100M /dev/zero > /usr/big; du -sm /work/big")
    assert "No space" in done.output or "disk limit" in done.output
    bench.run(box.reset())
    assert bench.exec(box, "head -c 10M /dev/zero > /work/big && echo fits").output == "fits\n"


def test_the_daemons_files_fit_on_a_full_disk(bench: Bench) -> None:
    """Or an agent could escape its grade by filling the disk."""
    only_isolating(bench)
    box = bench.box(Limits(disk_mb=8))
    bench.exec(box, "cat /dev/zero > /work/fill; for i in $(seq 20000); do > /work/$i || break; done 2>/dev/null")
    bench.run(box.sweep())
    bench.run(box.put({f"/tests/{i}": File(data=bytes(100_000)) for i in range(30)}))
    assert bench.exec(box, "ls /tests | wc -l").output == "30\n"


def test_what_cannot_be_run_is_data(bench: Bench) -> None:
    box = bench.box()
    assert bench.exec(box, "echo \x00").exit_code == 126
    assert bench.exec(box, "echo " + "x" * 200_000).exit_code == 126
    assert bench.exec(box, "echo \ud800").exit_code == 126
    assert bench.exec(box, "echo é").output == "é\n"
    assert bench.exec(box, "printf '\\xff'").output == "\ufffd"


def test_commands_inherit_no_descriptors(bench: Bench) -> None:
    box = bench.box()
    assert bench.exec(box, "ls /proc/self/fd | wc -l").output == "4\n"  # 0, 1, 2 and the listing's own


def test_open_files_are_limited(bench: Bench) -> None:
    box = bench.box()
    done = bench.exec(box, "python3 -c \"f=[open('/dev/null') for _ in range(10**6)]\" 2>&1 | tail -1")
    assert "Too many open files" in done.output


# --- isolation -------------------------------------------------------------------------------------------------


def test_no_network_but_loopback(bench: Bench) -> None:
    only_isolating(bench)
    box = bench.box()
    script = (
        "import socket\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "c = socket.create_connection(s.getsockname(), 2)\n"
        "print('loopback')\n"
        "try: socket.create_connection(('192.0.2.1', 80), 2)\n"
        "except OSError as e: print('outside', e.errno)\n"
    )
    bench.run(box.put({"/work/net.py": File(data=script.encode())}))
    assert bench.exec(box, "python3 net.py").output == "loopback\noutside 101\n"


def test_host_files_are_hidden_and_safe(bench: Bench, tmp_path: Path) -> None:
    only_isolating(bench)
    (tmp_path / "mine").write_text("host")
    box = bench.box()
    private = f"/root /home /tmp /mnt /srv {REPO} {tmp_path} /etc/ssh /etc/ssl/private"
    seen = bench.exec(box, f"ls -A {private}; grep -q '^root:' /etc/shadow && echo leaked")
    assert "mine" not in seen.output
    assert "pyproject" not in seen.output
    assert "leaked" not in seen.output or bench.name == "docker"  # whose password file is the image's
    marker = f"agentrl-{os.getpid()}"
    bench.exec(box, f"touch /etc/{marker} /usr/{marker} /tmp/{marker} /{marker}; rm -f /usr/bin/env; rm -rf /etc/apt")
    assert not any(Path(p, marker).exists() for p in ("/etc", "/usr", "/tmp", "/"))
    assert Path("/usr/bin/env").exists()
    assert (
        bench.exec(box, "ls -d /sys/fs/cgroup/*; cat /proc/kcore /proc/1/environ 2>&1 | head -c 300; true").exit_code
        == 0
    )


def test_privileges_are_gone(bench: Bench) -> None:
    only_isolating(bench)
    box = bench.box()
    for attempt in (
        "mount -t tmpfs x /mnt",
        "umount /proc",
        "mknod /work/disk b 259 0",
        "echo 1 > /proc/sys/kernel/sysrq",
        "hostname other",
        "chroot / true",
        *(["ls /proc/1/root/", "cat /proc/1/environ"] if bench.init else []),
        "python3 -c 'import ctypes, sys; sys.exit(ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0)' && false",
    ):
        assert bench.exec(box, attempt).exit_code != 0, attempt
    assert "NoNewPrivs:\t1" in bench.exec(box, "cat /proc/self/status").output


def test_boxes_do_not_see_each_other(bench: Bench) -> None:
    only_isolating(bench)
    one, other = bench.box(), bench.box()
    bench.exec(one, "setsid sleep 7000 >/dev/null 2>&1 & ipcmk -M 4096")
    bench.exec(one, "for d in /work /dev /dev/shm /tmp /proc/acpi; do echo x > $d/mine; done")
    assert bench.exec(other, "pgrep -f 'sleep 700[0]' || echo none").output == "none\n"
    assert (
        bench.exec(other, "ls -A /work /dev /dev/shm /tmp /proc/acpi | grep mine; ipcs -m | grep -c 4096").output
        == "0\n"
    )


# --- CPUs ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_commands_run_on_their_cpus(bench: Bench) -> None:
    box = bench.box(cpus=CPUS[:1])
    look = "grep Cpus_allowed_list /proc/self/status | cut -f2"
    for cpu in CPUS[:2]:
        assert bench.exec(box, look, cpus=(cpu,)).output == f"{cpu}\n"
    if bench.grouped:
        assert bench.exec(box, f"taskset -c {CPUS[1]} true", cpus=CPUS[:1]).exit_code != 0


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_a_running_command_can_be_moved(bench: Bench) -> None:
    box = bench.box()
    look = "until test -e /work/go; do sleep 0.01; done; grep Cpus_allowed_list /proc/self/status | cut -f2"

    async def moved() -> ExecResult:
        task = asyncio.ensure_future(box.exec(f"touch /work/began; {look}", timeout_s=20, cpus=CPUS[:1]))
        while True:
            with contextlib.suppress(FileNotFoundError):
                await box.get("/work/began", 10)
                break
        await box.set_cpus(CPUS[1:2])
        await box.put({"/work/go": File(data=b"")})
        return await task

    assert bench.run(moved()).output == f"{CPUS[1]}\n"


# --- other roots, network ----------------------------------------------------------------------------------------


def test_another_root(tmp_path: Path) -> None:
    """A root of our own making: dash and what it is linked to, with a file of its own."""
    root = tmp_path / "root"
    linked = subprocess.run(["ldd", "/bin/dash"], capture_output=True, text=True, check=True).stdout
    for path in ["/bin/dash", *(w for w in linked.split() if w.startswith("/"))]:
        (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path.lstrip("/"))
    (root / "bin/sh").symlink_to("dash")
    (root / "etc").mkdir()
    (root / "etc/release").write_text("mine\n")

    async def use() -> tuple[str, str]:
        backend = make_backend(Sandbox(root=str(root)), state_dir=str(tmp_path / "state"))
        try:
            box = await backend.start(BoxSpec(id=f"r{os.getpid()}", label="contract", limits=Limits()))
            first = await box.exec(
                "read a < /etc/release; echo $a; echo other > /etc/release; echo *", timeout_s=5, cpus=()
            )
            await box.reset()
            second = await box.exec("read a < /etc/release; echo $a; echo /bin/*", timeout_s=5, cpus=(), cwd="/")
            await box.kill()
        finally:
            await backend.aclose()
        return first.output, second.output

    assert asyncio.run(use()) == ("mine\n*\n", "mine\n/bin/dash /bin/sh\n")
    assert (root / "etc/release").read_text() == "mine\n"
    assert not (root / "work").exists()


def test_network_when_asked(bench: Bench) -> None:
    import socket

    box = bench.box(Limits(network=True))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        bench.exec(box, f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo hi >&3", timeout_s=5)
        server.settimeout(5)
        with server.accept()[0] as connection:
            assert connection.recv(10) == b"hi\n"


# --- around ----------------------------------------------------------------------------------------------------


def test_reap_spares_living_boxes(bench: Bench) -> None:
    box = bench.box(label="living")
    assert bench.run(bench.backend.reap()) == 0
    assert bench.run(bench.backend.reap("living")) == 0
    assert bench.exec(box, "echo alive").output == "alive\n"


def test_isolation_is_stated(bench: Bench) -> None:
    assert len(bench.backend.isolation) > 20
    assert "\n" not in bench.backend.isolation


def test_process_backend_refuses_what_is_not_trusted(tmp_path: Path) -> None:
    async def refused() -> None:
        backend = make_backend(Sandbox(backend="process"), state_dir=str(tmp_path))
        await backend.start(BoxSpec(id="b", label="x", limits=Limits()))

    with pytest.raises(TaskError, match="isolates nothing"):
        asyncio.run(refused())


def test_unknown_backend_is_the_users_error() -> None:
    with pytest.raises(UserError, match="no backend named"):
        make_backend(Sandbox(backend="jail"), state_dir="/nowhere")  # type: ignore[arg-type]


def test_owner_names_do_not_repeat() -> None:
    mine = f"{os.getpid()}-{cgroups.start_time(os.getpid())}"
    assert cgroups.owner_lives(mine)
    assert not cgroups.owner_lives(f"{os.getpid()}-1")
    assert not cgroups.owner_lives("garbage")


@pytest.mark.skipif(not ROOT, reason="this is already the ordinary user's run")
@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv")
def test_namespace_boxes_of_an_ordinary_user() -> None:
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    again = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    for python in (sys.executable, shutil.which(version, path="/usr/bin:/usr/local/bin") or ""):
        if python and subprocess.run([*become, python, "-c", again], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip(f"an ordinary user cannot run any {version} here")
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path[1:]]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    base = f"/tmp/agentrl-pytest-{os.getpid()}"
    only = "(namespace or another_root) and not user"
    options = ["-q", "-p", "no:cacheprovider", "-k", only, "--basetemp", base]
    done = subprocess.run(
        [*become, python, "-m", "pytest", *options, str(Path(__file__))],
        cwd=REPO, env=env, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    shutil.rmtree(base, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
