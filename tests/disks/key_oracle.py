"""What a key file has to hold, by what its writers were told (key_writer.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

REGION: Final = "us-east"


class Oracle:
    """`take` the journal's lines in order. Raises AssertionError with the line where something does not hold:

    - each key that was given out can be used after every start, unless its stream was destroyed, or that is in doubt; its secret is the same;
    - what was refused is not there once anything was done after it.
    """

    def __init__(self) -> None:
        self.done = self.refused = self.opened_again = self.starts = 0
        self.number = 0
        self._keys: dict[str, tuple[str, str]] = {}
        """given out, by id: secret and stream"""
        self._has: dict[str, tuple[str, str]] = {}
        self._began: list[str] = []
        self._doubtful: list[list[str]] = []
        """what was refused, or not answered, since something was done"""
        self._destroyed: set[str] = set()

    def take(self, lines: Iterable[str]) -> None:
        for line in lines:
            try:
                self._take(line.split())
            except AssertionError as error:
                raise AssertionError(f"{line.strip()}: {error}") from error

    def _take(self, words: list[str]) -> None:
        match words:
            case ["has", key, secret, stream]:
                self._has[key] = secret, stream
            case ["start"]:
                self._start()
            case ["begin", number, *what]:
                self.number, self._began = int(number), what
            case ["done", _, *made]:
                self.done += 1
                if made:
                    self._keys[made[0]] = made[1], self._began[1]
                elif self._began[0] == "destroy":
                    self._destroy(self._began[1])
                self._began, self._doubtful = [], []
            case ["refused", _]:
                self.refused += 1
                self._doubtful.append(self._began)
                self._began = []
            case ["open"]:
                self.opened_again += 1
                self._doubtful = []
            case ["lost", key]:
                raise AssertionError(f"{key} was given out")
            case _:
                pass

    def _destroy(self, stream: str) -> None:
        self._destroyed.add(stream)
        self._keys = {key: value for key, value in self._keys.items() if value[1] != stream}

    def _start(self) -> None:
        self.starts += 1
        found, self._has = self._has, {}
        doubtful, self._doubtful = [*self._doubtful, self._began], []
        self._began = []
        for what in doubtful:
            if what[:1] == ["destroy"] and not any(stream == what[1] for _, stream in found.values()):
                self._destroy(what[1])
        lost = [key for key, value in self._keys.items() if found.get(key) != value]
        assert not lost, f"given out, and not there, or another: {lost}"
        more = {key: value for key, value in found.items() if key not in self._keys}
        assert not self._destroyed & {stream for _, stream in found.values()}, "it was destroyed"
        asked = [what[1] for what in doubtful if what[:1] == ["key"]]
        assert all(stream in asked for _, stream in more.values()), f"nobody was given {more}"
        self._keys = found
