"""Conversations as tokens: the teacher's, and the policy's own. Prompts, parsing and observations are the toolkit's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer
from transformers import Glm4MoeForCausalLM

from agentrl.rollout.actions import Malformed, Run, Submit, parse
from agentrl.rollout.observation import SYSTEM
from agentrl.rollout.template import ChatTemplate
from tiny import model as policy
from tiny.demos import FINAL, Demonstration
from tiny.tokenizer import CALL_BEGIN, CALL_END
from tiny.world import Room, World

MAX_TURNS = 8
MAX_NEW = 64
PARSE_LIMIT = 3
_WIDTH = 4  # boxes that work at once

T = TypeVar("T")


class Attempt(msgspec.Struct):
    """tokens and trainable have equal length; trainable marks what the model said."""

    kind: str
    tokens: list[int] = []
    trainable: list[bool] = []
    reward: float = 0.0
    turns: int = 0
    malformed: int = 0

    def say(self, ids: Sequence[int]) -> None:
        self.tokens += ids
        self.trainable += [True] * len(ids)
        self.turns += 1

    def hear(self, ids: Sequence[int]) -> None:
        self.tokens += ids
        self.trainable += [False] * len(ids)


class Speech:
    """Text to tokens and back, by the files of the model's folder."""

    def __init__(self, folder: Path) -> None:
        self._template = ChatTemplate.from_folder(folder)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.stops = self._template.stop_ids

    def begin(self, kind: str, instruction: str) -> Attempt:
        attempt = Attempt(kind)
        attempt.hear(self._template.opening(SYSTEM, instruction))
        return attempt

    def script(self, kind: str, shown: Demonstration) -> Attempt:
        attempt = self.begin(kind, shown.instruction)
        for command, output in shown.turns:
            self._say(attempt, f"{CALL_BEGIN}{command}{CALL_END}<|observation|>")
            self.answer(attempt, output)
        self._say(attempt, f"{FINAL}<|user|>")
        return attempt

    def _say(self, attempt: Attempt, text: str) -> None:
        attempt.say(self._tokenizer.encode(text).ids)

    def answer(self, attempt: Attempt, observation: str) -> None:
        attempt.hear(self._template.observation(observation, after=attempt.tokens[-1]))

    def read(self, reply: Sequence[int]) -> Run | Submit | Malformed:
        return parse(self._template.decode(reply), cut=reply[-1] not in self.stops)


async def play(
    model: Glm4MoeForCausalLM, speech: Speech, world: World, problems: Sequence[tuple[str, int]]
) -> list[Attempt]:
    """One attempt at each problem, in step: sample all open ones, run their commands, go on."""
    async with contextlib.AsyncExitStack() as stack:
        rooms = [await stack.enter_async_context(world.room(kind, seed)) for kind, seed in problems]
        attempts = [speech.begin(room.task.kind, room.task.instruction) for room in rooms]
        going = list(zip(attempts, rooms, strict=True))
        for _ in range(MAX_TURNS):
            replies = policy.sample(model, [attempt.tokens for attempt, _ in going], speech.stops, MAX_NEW)
            steps = [_turn(speech, *pair, reply) for pair, reply in zip(going, replies, strict=True)]
            goes_on = await _some_at_once(steps)
            going = [pair for pair, open_ in zip(going, goes_on, strict=True) if open_]
            if not going:
                break
        rewards = await _some_at_once([room.reward() for room in rooms])
    for attempt, reward in zip(attempts, rewards, strict=True):
        attempt.reward = reward
    return attempts


async def _turn(speech: Speech, attempt: Attempt, room: Room, reply: list[int]) -> bool:
    """Whether the conversation goes on."""
    attempt.say(reply)
    match speech.read(reply):
        case Run(command=command):
            speech.answer(attempt, await room.run(command))
        case Malformed(reason=reason):
            attempt.malformed += 1
            speech.answer(attempt, reason)
        case _:
            return False
    return attempt.malformed < PARSE_LIMIT


async def _some_at_once(jobs: Sequence[Coroutine[None, None, T]]) -> list[T]:
    gate = asyncio.Semaphore(_WIDTH)

    async def one(job: Coroutine[None, None, T]) -> T:
        async with gate:
            return await job

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(job)) for job in jobs]
    return [task.result() for task in tasks]
