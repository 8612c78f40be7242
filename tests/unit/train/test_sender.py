"""The sender of weights and a group of members without an engine: what was saved arrives, and who fails is named."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentrl.errors import DeadlineError, UnavailableError
from agentrl.serve.staging import tensors
from agentrl.train.sender import SenderProcess

MEMBER = """
import sys, json
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper
port, rank, group, wanted = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
limit = timedelta(seconds=60)
store = dist.TCPStore("127.0.0.1", port, 3, is_master=False, timeout=limit)
members, _ = _new_process_group_helper(
    3, rank, [], dist.Backend("gloo"), dist.PrefixStore(group, store), group_name=group, timeout=limit
)
options = dist.BroadcastOptions()
for name, dtype, shape in wanted:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    members.broadcast([tensor], options).wait()
    print(name, tensor.float().sum().item(), flush=True)
"""


def run(check: Callable[[SenderProcess], Coroutine[Any, Any, None]], log: Path) -> None:
    async def main() -> None:
        sender = SenderProcess(address="127.0.0.1", backend="gloo", log=log)
        try:
            await check(sender)
        finally:
            await sender.aclose()

    asyncio.run(main())


def test_every_member_gets_every_tensor_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    save_file({"b": torch.full((2, 3), 2.0), "a": torch.ones(5, dtype=torch.bfloat16)}, tmp_path / "1.safetensors")
    save_file({"c": torch.full((4,), 0.5)}, tmp_path / "2.safetensors")
    found = tensors(tmp_path)
    assert {(t.name, t.dtype, t.shape, t.bytes) for t in found} == {
        ("a", "bfloat16", (5,), 10),
        ("b", "float32", (2, 3), 24),
        ("c", "float32", (4,), 16),
    }
    wanted = "[" + ",".join(f'["{t.name}", "{t.dtype}", {list(t.shape)}]' for t in found) + "]"

    async def check(sender: SenderProcess) -> None:
        port = await sender.open("g", deadline_s=60)
        argv = [[sys.executable, "-c", MEMBER, str(port), str(rank), "g", wanted] for rank in (1, 2)]
        members = [await asyncio.create_subprocess_exec(*one, stdout=subprocess.PIPE) for one in argv]
        await sender.join("g", 3, deadline_s=60)
        await sender.send("g", str(tmp_path), [tensor.name for tensor in found], deadline_s=60)
        sums = {"a": 5.0, "b": 12.0, "c": 2.0}
        for member in members:
            out, _ = await member.communicate()
            assert out.decode().split("\n")[:-1] == [f"{tensor.name} {sums[tensor.name]}" for tensor in found]
        with pytest.raises(UnavailableError, match="send: KeyError: 'z'"):
            await sender.send("g", str(tmp_path), ["z"], deadline_s=60)
        await sender.leave("g")
        with pytest.raises(UnavailableError, match="send: KeyError: 'g'"):
            await sender.send("g", str(tmp_path), ["a"], deadline_s=60)

    run(check, tmp_path / "log")


def test_members_that_do_not_come_and_a_sender_that_dies(tmp_path: Path) -> None:
    async def check(sender: SenderProcess) -> None:
        await sender.open("g", deadline_s=60)
        with pytest.raises((DeadlineError, UnavailableError), match="join"):
            await sender.join("g", 2, deadline_s=1)
        process = sender._process
        assert process is not None
        await sender.open("h", deadline_s=60)
        joining = asyncio.create_task(sender.join("h", 2, deadline_s=60))
        process.kill()
        with pytest.raises(UnavailableError, match="ended with code -9"):
            await joining
        assert await sender.open("g", deadline_s=60) > 0  # another one

    run(check, tmp_path / "log")
