"""What the state of an outside witness has to hold, by what its writers were told (witness_writer.py)."""

from __future__ import annotations

from collections.abc import Iterable


class Oracle:
    """`take` the journal's lines in order. Raises AssertionError with the line where something does not hold: the size of a log never falls below one that was stored, also
    by a start; and what is stored was asked for. (What was refused may stand: nothing was cosigned for it, and who asks next starts from it.)"""

    def __init__(self) -> None:
        self.done = self.refused = self.starts = 0
        self.number = 0
        self._sizes: dict[str, int] = {}
        self._asked: dict[str, set[int]] = {}
        self._has: dict[str, int] = {}
        self._began = "", 0

    def take(self, lines: Iterable[str]) -> None:
        for line in lines:
            try:
                self._take(line.split())
            except AssertionError as error:
                raise AssertionError(f"{line.strip()}: {error}") from error

    def _take(self, words: list[str]) -> None:
        match words:
            case ["has", origin, size]:
                self._has[origin] = int(size)
            case ["start"]:
                self.starts += 1
                for origin in self._sizes:
                    self._found(origin, self._has.get(origin, 0))
                self._has = {}
            case ["begin", number, origin, size]:
                self.number, self._began = int(number), (origin, int(size))
                self._asked.setdefault(origin, {0}).add(int(size))
            case ["done", _]:
                self.done += 1
                origin, stored = self._began
                self._sizes[origin] = stored
            case ["refused", _]:
                self.refused += 1
            case ["conflict", _, size]:
                self._found(self._began[0], int(size))
            case _:
                pass

    def _found(self, origin: str, size: int) -> None:
        assert size >= self._sizes.get(origin, 0), f"{origin} had {self._sizes[origin]} leaves"
        assert size in self._asked[origin], f"nobody asked for {size} of {origin}"
        self._sizes[origin] = size
