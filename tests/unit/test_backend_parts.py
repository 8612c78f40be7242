"""The parts of the sandbox backends that need no box: bounded output, path mapping, control groups by name."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import File
from agentrl.sandbox.backends.inside import cgroups
from agentrl.sandbox.backends.inside.supervisor import Output
from agentrl.sandbox.backends.process import _Paths


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 60))
def test_output_is_the_first_and_the_last_bytes(chunks: list[bytes], limit: int) -> None:
    whole = b"".join(chunks)
    output = Output(limit)
    for chunk in chunks:
        output.add(chunk)
    head, tail = output.parts
    assert output.total == len(whole)
    assert len(head) + len(tail) == min(limit, len(whole))
    assert whole.startswith(head)
    assert whole.endswith(tail)


def paths() -> _Paths:
    return _Paths(Path("/scratch/b1"), "/work")


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ("cat /work/a.txt", "cat /scratch/b1/work/a.txt"),
        ("cd /work && ls", "cd /scratch/b1/work && ls"),
        ("bash /tests/run.sh > /logs/out", "bash /scratch/b1/tests/run.sh > /scratch/b1/logs/out"),
        ("PATH=/work:$PATH", "PATH=/scratch/b1/work:$PATH"),
        ("ls /workshop /usr/work ./work a/work /work-2", "ls /workshop /usr/work ./work a/work /work-2"),
        ("echo '$HOME/work' ~/work", "echo '$HOME/work' ~/work"),
    ],
)
def test_paths_of_the_box_are_rewritten_where_they_are_names(inside: str, outside: str) -> None:
    assert paths().inward(inside) == outside
    assert paths().outward(outside) == inside


def test_paths_are_learnt_from_files_put() -> None:
    known = paths()
    assert known.inward("cat /data/x /etc/hosts /etc/passwd") == "cat /data/x /etc/hosts /etc/passwd"
    known.learn("/data/x")
    known.learn("/etc/hosts")
    assert known.inward("cat /data/x /etc/hosts /etc/passwd") == (
        "cat /scratch/b1/data/x /scratch/b1/etc/hosts /etc/passwd"
    )


def test_files_are_rewritten_only_as_text() -> None:
    assert paths().file(File(data=b"cd /work\n", mode=0o755)) == File(data=b"cd /scratch/b1/work\n", mode=0o755)
    assert paths().file(File(data=b"\xff/work")) == File(data=b"\xff/work")
    assert paths().host("../../etc/x") == "/scratch/b1/etc/x"


# --- control groups ------------------------------------------------------------------------------------------------

V1 = """\
30 1 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw
34 30 0:31 / {top}/cpuset rw,relatime - cgroup cgroup rw,cpuset
35 30 0:32 / {top}/memory rw,relatime - cgroup cgroup rw,memory
36 30 0:33 /docker/abc {top}/pids rw,relatime - cgroup cgroup rw,pids
37 30 0:34 / {top}/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "30 1 0:28 / {top} rw,relatime - cgroup2 cgroup2 rw\n"


def describe(folder: Path, mounts: str, membership: str) -> tuple[str, str]:
    (folder / "mountinfo").write_text(mounts.format(top=folder))
    (folder / "cgroup").write_text(membership)
    return str(folder / "mountinfo"), str(folder / "cgroup")


def test_version_1_groups_are_made_below_our_own(tmp_path: Path) -> None:
    for name in ("cpuset", "memory/jobs/7", "pids"):
        (tmp_path / name).mkdir(parents=True)
    found = cgroups.detect(*describe(tmp_path, V1, "3:cpuset:/\n4:memory:/jobs/7\n8:pids:/docker/abc\n0::/\n"))
    assert not isinstance(found, str)
    group = found.group("run-1", "b1", "77-123")
    assert found.version == 1
    assert group.cpuset == f"{tmp_path}/cpuset/agentrl-run-1/b1@77-123"
    assert group.memory == f"{tmp_path}/memory/jobs/7/agentrl-run-1/b1@77-123"
    assert group.pids == f"{tmp_path}/pids/agentrl-run-1/b1@77-123"


def test_version_2_needs_its_controllers(tmp_path: Path) -> None:
    own = tmp_path / "user.slice"
    own.mkdir()
    (own / "cgroup.controllers").write_text("cpuset cpu memory pids\n")
    (own / "cgroup.subtree_control").write_text("cpuset memory pids\n")
    files = describe(tmp_path, V2, "0::/user.slice\n")
    found = cgroups.detect(*files)
    assert not isinstance(found, str)
    assert found.version == 2
    assert found.group("r", "b", "1-2").directories == [f"{own}/agentrl-r/b@1-2"]
    (own / "cgroup.controllers").write_text("memory pids\n")
    assert cgroups.detect(*files) == f"{own} lacks the controllers cpuset"


@pytest.mark.parametrize(
    ("mounts", "membership", "groups"),
    [
        (V1, "3:cpuset:/docker/{id}\n4:memory:/docker/{id}\n8:pids:/docker/abc/docker/{id}\n", 3),
        (V2, "0::/system.slice/docker-{id}.scope\n", 1),
    ],
)
def test_a_containers_groups_are_found_by_its_id_only(
    tmp_path: Path, mounts: str, membership: str, groups: int
) -> None:
    name = "0123456789ab" * 5
    for folder in ("cpuset", "memory", "pids"):
        (tmp_path / folder / "docker" / name).mkdir(parents=True)
    (tmp_path / "system.slice" / f"docker-{name}.scope").mkdir(parents=True)
    mountinfo, own = describe(tmp_path, mounts, membership.format(id=name))
    found = cgroups.of_container(own, name, mountinfo)
    assert found is not None
    assert len(found.directories) == groups
    assert all(name in path for path in found.directories)
    assert cgroups.of_container(own, "another", mountinfo) is None
    Path(own).write_text("0::/../elsewhere\n3:cpuset:/..\n")  # we are in a cgroup namespace ourselves
    assert cgroups.of_container(own, name, mountinfo) is None


def test_without_groups_it_says_so(tmp_path: Path) -> None:
    assert cgroups.detect(*describe(tmp_path, "", "")) == "no control groups are mounted"


def test_version_2_limits_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine here has the controllers in version 2: the writes are recorded in place of the kernel's files."""
    written: list[tuple[str, str]] = []
    monkeypatch.setattr(cgroups, "_write", lambda path, text: written.append((os.path.relpath(path, tmp_path), text)))
    group = cgroups.Cgroups(2, *[str(tmp_path)] * 3).group("r", "b", "1-2")
    group.make(memory_bytes=1 << 20, pids=10, cpus=[0, 2])
    assert written == [
        ("agentrl-r/cgroup.subtree_control", "+cpuset +memory +pids"),
        ("agentrl-r/b@1-2/memory.max", "1048576"),
        ("agentrl-r/b@1-2/memory.swap.max", "0"),
        ("agentrl-r/b@1-2/pids.max", "18"),
        ("agentrl-r/b@1-2/cpuset.cpus", "0,2"),
    ]
    group.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
        ("memory.events", "low 0\nhigh 0\nmax 4\noom 1\noom_kill 3\noom_group_kill 0\n"),
    ],
)
def test_oom_kills_are_counted(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    fd = os.open(tmp_path / name, os.O_RDONLY)
    assert cgroups.oom_kills(fd) == 3
    os.close(fd)


def test_reap_removes_what_dead_owners_left(tmp_path: Path) -> None:
    mine = f"{os.getpid()}-{cgroups.start_time(os.getpid())}"
    for box in ("agentrl-a/old@1-0", f"agentrl-a/new@{mine}", "deep/er/agentrl-b/old@1-0", "other/old@1-0"):
        (tmp_path / box).mkdir(parents=True)
    groups = cgroups.Cgroups(2, *[str(tmp_path)] * 3)
    assert groups.reap("b") == 1
    assert groups.reap(None) == 1
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    assert left == ["agentrl-a", f"agentrl-a/new@{mine}", "deep", "deep/er", "other", "other/old@1-0"]
    assert groups.reap(None, ended=mine) == 1


@pytest.mark.parametrize("call", range(6))  # every mkdir of a box's groups: of its run's, then its own, in three
def test_a_box_gets_its_groups_though_another_takes_the_runs_along(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's last box removes what is common to its boxes, at any moment of the next one's start."""
    found = cgroups.detect()
    if isinstance(found, str):
        pytest.skip(found)
    group = found.group(f"test-{os.getpid()}", f"box{call}", "0-0")
    made, mkdir = 0, os.mkdir

    def make(path: str) -> None:
        nonlocal made
        if made == call:
            for directory in group.directories:
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.dirname(directory))  # noqa: PTH106, PTH120
        made += 1
        mkdir(path)

    monkeypatch.setattr(cgroups.os, "mkdir", make)
    try:
        group.make(memory_bytes=1 << 28, pids=8, cpus=())
        assert all(map(os.path.isdir, group.directories))
    finally:
        group.remove()
