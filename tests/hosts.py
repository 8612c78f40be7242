"""Machines behind SSH, all on this one: each has its own address, sshd, host key, pid 1, home and /tmp.

    with Network() as network:            # a switch, this machine plugged into it, and a user's ~/.ssh
        h1, h2 = network.add("h1"), network.add("h2")
        network.env                       # HOME for whoever is to find that user's ~/.ssh: `ssh h1` works under it
        h1.cut(); h1.mend()               # its cable
        h1.end(); h1.start()              # its power; its home stays
        h1.path("/tmp/x")                 # that file, seen from here

Everything hangs on processes that die with the test's main thread (start them from there), and namespaces die with
their processes: a killed test leaves nothing. Needs root and Debian's openssh-server; `require()` skips with
the reason.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil
import pytest

_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_TOOLS = ("sshd", "ssh-keygen", "ip", "setpriv", "unshare", "nsenter")
_HIDDEN = ("/tmp/", "/home/", "/run/")
_SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_SSHD_CONFIG = """
HostKey /run/machine/host_key
AuthorizedKeysFile /run/machine/authorized_keys
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
PidFile none
Subsystem sftp internal-sftp
"""
# pid 1 of a machine. sshd is not exec'ed: somebody must bury orphans.
_BOOT = """
set -e
mount -t tmpfs none /home; mkdir "/home/$3"; mount --bind "$1/home" "/home/$3"
[ -z "$4" ] || mount -t tmpfs -o "size=$4" none "/home/$3"
mount --bind "$1/passwd" /etc/passwd
mount -t tmpfs none /run; mkdir /run/sshd /run/machine
mount --bind "$1" /run/machine; mount -t tmpfs none /tmp
ip link set lo up; echo booted; read -r _
ip address add "$2/24" dev eth0; ip link set eth0 up; echo plugged
"$0" -D -e -f /run/machine/sshd_config; exit $?
"""


def require() -> None:
    """Skip where there cannot be such machines."""
    if os.geteuid():
        pytest.skip("machines behind SSH need root, to make network namespaces")
    hidden = [path for path in (sys.prefix, __file__) if path.startswith(_HIDDEN)]
    if hidden:
        pytest.skip(f"machines behind SSH have {', '.join(_HIDDEN)} of their own, and would not see {hidden[0]}")
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_SBIN) is None]
    if missing:
        pytest.skip(f"machines behind SSH need {', '.join(missing)} (apt-get install openssh-server iproute2)")
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], check=False, capture_output=True)
    if tried.returncode:
        pytest.skip(f"machines behind SSH need namespaces: {tried.stderr.decode().strip()}")


class Machine:
    """One machine, of user root, whose home is /home/NAME. `folder`: what it keeps over `end` and `start`."""

    def __init__(self, network: Network, name: str, address: str, folder: Path, disk: str) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self._network = network
        self._disk = disk
        self._boot: subprocess.Popen[str] | None = None
        (folder / "home").mkdir(parents=True)
        (folder / "passwd").write_text(
            f"root:x:0:0:root:/home/{name}:/bin/bash\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        )
        (folder / "authorized_keys").write_text((network.ssh / "id_ed25519.pub").read_text())
        (folder / "sshd_config").write_text(_SSHD_CONFIG)
        self.new_key()

    @property
    def pid(self) -> int:
        """A process of its namespaces."""
        assert self._boot is not None, f"{self.name} is not running"
        return self._boot.pid

    @property
    def home(self) -> Path:
        """Its user's home, seen from here."""
        return self.path(f"/home/{self.name}")

    def path(self, there: str) -> Path:
        return Path(f"/proc/{self.pid}/root{there}")

    def start(self) -> None:
        """Returns when its sshd listens."""
        command = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        inside = (
            "sh",
            "-c",
            _BOOT,
            shutil.which("sshd", path=_SBIN),
            str(self.folder),
            self.address,
            self.name,
            self._disk,
        )
        with (self.folder / "sshd.log").open("ab") as log:
            self._boot = subprocess.Popen(
                [*_DIES_WITH_US, *command, *map(str, inside)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PATH": _SBIN},
            )
        self._expect("booted")
        self._network.plug_in(self)
        assert self._boot.stdin is not None
        print(file=self._boot.stdin, flush=True)
        self._expect("plugged")
        self._until_listening()

    def end(self) -> None:
        """Power off, whatever runs there."""
        if self._boot is not None:
            self._boot.kill()
            self._boot.communicate()
            self._boot = None
            self._network.unplug(self)

    def cut(self) -> None:
        """From now on packets are lost, silently, both ways."""
        self._network.switch(f"link set {self.name} down")

    def mend(self) -> None:
        self._network.switch(f"link set {self.name} up")

    def new_key(self, *, known: bool = True) -> None:
        """Another host key, from its next start on. known: the user knows it already."""
        key = self.folder / "host_key"
        key.unlink(missing_ok=True)
        _keygen(key)
        if known:
            self._network.know(self)

    def processes(self) -> list[psutil.Process]:
        """All that run there, with its pid 1."""
        found = []
        for process in psutil.process_iter():
            with suppress(OSError):
                if Path(f"/proc/{process.pid}/ns/net").readlink() == Path(f"/proc/{self.pid}/ns/net").readlink():
                    found.append(process)
        return found

    def run(self, *argv: str) -> str:
        """A command there, past its sshd; its output."""
        enter = ("nsenter", "--target", str(self.pid), "--net", "--mount")
        return subprocess.run([*enter, *argv], check=True, capture_output=True, text=True, timeout=60).stdout

    def accepted(self) -> list[str]:
        """Whence its logins came, oldest first."""
        lines = (self.folder / "sshd.log").read_text().splitlines()
        return [line.split(" from ")[1].split()[0] for line in lines if line.startswith("Accepted publickey")]

    def _expect(self, said: str) -> None:
        assert self._boot is not None
        assert self._boot.stdout is not None
        if self._boot.stdout.readline().strip() != said:
            raise AssertionError(f"{self.name} did not start: {(self.folder / 'sshd.log').read_text()}")

    def _until_listening(self) -> None:
        """sshd does not tell when it listens; so it is asked."""
        ends = time.monotonic() + 30
        while True:
            try:
                socket.create_connection((self.address, 22), timeout=1).close()
                return
            except OSError as exc:
                assert self._boot is not None
                if self._boot.poll() is not None or time.monotonic() > ends:
                    log = (self.folder / "sshd.log").read_text()
                    raise AssertionError(f"{self.name} did not start ({exc}): {log}") from exc
                time.sleep(0.005)


class Network:
    """A switch with its own subnet, and the files of a user who may log in everywhere."""

    def __init__(self) -> None:
        require()
        self._subnet, self._claim = _claim_subnet()
        self.folder = Path(tempfile.gettempdir(), f"agentrl-net-{self._subnet}")
        shutil.rmtree(self.folder, ignore_errors=True)  # of a test that was killed
        self.ssh = self.folder / "user" / ".ssh"
        self.ssh.mkdir(parents=True, mode=0o700)
        _keygen(self.ssh / "id_ed25519")
        (self.ssh / "known_hosts").touch()
        self.machines: dict[str, Machine] = {}
        self._switch = subprocess.Popen(
            [*_DIES_WITH_US, "unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE
        )
        assert self._switch.stdout is not None
        self._switch.stdout.read(1)
        here = f"agt{self._switch.pid}"
        _ip(f"link add {here} type veth peer name uplink netns {self._switch.pid}")
        self.switch("link add br0 type bridge", "link set br0 up", "link set uplink master br0", "link set uplink up")
        _ip(f"address add {self.address}/24 dev {here}", f"link set {here} up")

    @property
    def address(self) -> str:
        """Of this machine, as the others reach it."""
        return f"{self._subnet}.254"

    @property
    def env(self) -> dict[str, str]:
        return {"HOME": str(self.ssh.parent)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for machine in self.machines.values():
            machine.end()
        self._switch.kill()
        self._switch.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._claim.close()

    def add(self, name: str, *, disk: str = "") -> Machine:
        """A running machine, known to the user, whose ~/.ssh/config calls its address `name` (1 to 12 characters).
        disk: size of its home, e.g. "16m"; then it is lost at `end`."""
        address = f"{self._subnet}.{len(self.machines) + 1}"
        machine = self.machines[name] = Machine(self, name, address, self.folder / name, disk)
        self.configure(f"Host {name}\n  HostName {address}\n  User root")
        machine.start()
        return machine

    def configure(self, lines: str) -> None:
        """More of the user's ~/.ssh/config. The first word on a host counts."""
        with (self.ssh / "config").open("a") as file:
            file.write(f"{lines}\n")

    def know(self, machine: Machine) -> None:
        """The user knows its key, and no other of it."""
        key = " ".join((machine.folder / "host_key.pub").read_text().split()[:2])
        lines = [line for line in self._known() if line.split()[0] != machine.address]
        (self.ssh / "known_hosts").write_text("\n".join([*lines, f"{machine.address} {key}", ""]))

    def forget(self, machine: Machine) -> None:
        lines = [line for line in self._known() if line.split()[0] != machine.address]
        (self.ssh / "known_hosts").write_text("\n".join([*lines, ""]))

    def plug_in(self, machine: Machine) -> None:
        port, number = machine.name, int(machine.address.rpartition(".")[2])
        self.switch(
            f"link add {port} type veth peer name eth0 address 02:00:00:00:00:{number:02x} netns {machine.pid}",
            f"link set {port} master br0",
            f"link set {port} up",
        )

    def unplug(self, machine: Machine) -> None:
        """The kernel does it too, some time after the machine's end."""
        with suppress(AssertionError):
            self.switch(f"link delete {machine.name}")

    def switch(self, *commands: str) -> None:
        """`ip` commands at the switch."""
        _ip(*commands, enter=("nsenter", "--target", str(self._switch.pid), "--net"))

    def _known(self) -> list[str]:
        return (self.ssh / "known_hosts").read_text().splitlines()


def _ip(*commands: str, enter: tuple[str, ...] = ()) -> None:
    done = subprocess.run(
        [*enter, shutil.which("ip", path=_SBIN) or "ip", "-batch", "-"],
        input="\n".join(commands),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"ip {commands}: {done.stderr}"


def _keygen(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=60)


def _claim_subnet() -> tuple[str, socket.socket]:
    """The first three numbers of a /24 that no other network of tests on this machine has, while the socket lives."""
    for third in range(256):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0agentrl-tests-10.213.{third}")
        except OSError:
            claim.close()
            continue
        return f"10.213.{third}", claim
    raise AssertionError("256 networks are up")
