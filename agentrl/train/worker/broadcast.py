"""`python -m agentrl.train.worker.broadcast ADDRESS BACKEND`: rank 0 of the groups in which engines get new weights.

It sends a version as it was saved: the trainer's own weights are already those of the next step. Orders come as JSON
lines on standard input, each with an `id` that its answer carries; it ends with its input. One thread an order.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _new_process_group_helper

_said = threading.Lock()


class Groups:
    """Process groups by name. address: where members meet; backend: gloo or nccl."""

    def __init__(self, address: str, backend: str) -> None:
        self._address = address
        self._backend = backend
        if backend == "gloo":  # it would take the interface of this machine's name, which others may not reach
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface(address))
        self._device = torch.device("cuda" if backend == "nccl" else "cpu")
        self._sockets: dict[str, socket.socket] = {}
        self._groups: dict[str, tuple[Any, Any]] = {}  # with the store, which lives as long
        self._files: dict[str, dict[str, Path]] = {}  # of the last folder: file of each tensor

    def open(self, order: dict[str, Any]) -> int:
        listening = socket.create_server((self._address, 0))
        self._sockets[order["group"]] = listening
        return int(listening.getsockname()[1])

    def join(self, order: dict[str, Any]) -> None:
        """SGLang's members prefix the store with the group's name, and so do we."""
        name, limit = order["group"], timedelta(seconds=order["deadline_s"])
        listening = self._sockets.pop(name)
        port = listening.getsockname()[1]
        store = TCPStore(
            self._address,
            port,
            order["members"],
            is_master=True,
            timeout=limit,
            master_listen_fd=listening.detach(),
        )
        group, _ = _new_process_group_helper(
            order["members"],
            0,
            [],
            dist.Backend(self._backend),
            PrefixStore(name, store),
            group_name=name,
            timeout=limit,
        )
        self._groups[name] = group, store

    def send(self, order: dict[str, Any]) -> None:
        group, _ = self._groups[order["group"]]
        files = self._layout(order["path"])
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for name in order["names"]:
            with safe_open(files[name], framework="pt", device=str(self._device)) as opened:
                group.broadcast([opened.get_tensor(name).contiguous()], options).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def leave(self, order: dict[str, Any]) -> None:
        if listening := self._sockets.pop(order["group"], None):
            listening.close()
        if held := self._groups.pop(order["group"], None):
            held[0].abort() if self._backend == "nccl" else held[0].shutdown()

    def _layout(self, path: str) -> dict[str, Path]:
        if path not in self._files:
            found: dict[str, Path] = {}
            for file in sorted(Path(path).glob("*.safetensors")):
                with safe_open(file, framework="pt") as opened:
                    found |= dict.fromkeys(opened.keys(), file)
            self._files = {path: found}
        return self._files[path]


def _interface(address: str) -> str:
    """The network interface that has it. OSError where none has."""
    numeric = socket.getaddrinfo(address, None)[0][4][0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == numeric for found in addresses):
            return name
    raise OSError(f"{address} is no address of this machine")


def obey(groups: Groups, order: dict[str, Any]) -> None:
    answer: dict[str, Any] = {"id": order["id"]}
    try:
        answer["value"] = getattr(groups, order["do"])(order)
    except Exception as exc:
        answer["error"] = f"{type(exc).__name__}: {exc}"
    with _said:
        print(json.dumps(answer), flush=True)  # noqa: T201


def main() -> None:
    groups = Groups(*sys.argv[1:3])
    for line in sys.stdin:
        threading.Thread(target=obey, args=(groups, json.loads(line)), daemon=True).start()
    os._exit(0)  # not sys.exit: a broadcast that nobody receives would hold it


if __name__ == "__main__":
    main()
