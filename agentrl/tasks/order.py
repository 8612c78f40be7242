"""A seeded, endless order over a finite set: every epoch is its own permutation."""

from __future__ import annotations

from random import Random


class EndlessOrder:
    """Pure in (seed, position): skipping ahead costs nothing, and a resumed run sees what it would have seen."""

    def __init__(self, size: int, seed: object) -> None:
        if size < 1:
            raise ValueError("an order needs at least one element")
        self._size = size
        self._seed = seed
        self._position = 0
        self._epoch = -1
        self._permutation: list[int] = []

    def take(self, count: int) -> list[int]:
        taken = [self.at(self._position + offset) for offset in range(count)]
        self._position += count
        return taken

    def skip(self, count: int) -> None:
        self._position += count

    def at(self, position: int) -> int:
        epoch, index = divmod(position, self._size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = list(range(self._size))
            Random(f"{self._seed}/{epoch}").shuffle(self._permutation)
        return self._permutation[index]
