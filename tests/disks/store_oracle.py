"""What an embedded metadata store has to hold, by what its writers were told (store_writer.py)."""

from __future__ import annotations

from collections.abc import Iterable


class Oracle:
    """`take` the journal's lines in order. Raises AssertionError with the line where something does not hold:

    - what was done is there after every start, what was refused is not, and what is in doubt is there as a whole or not at all;
    - revisions only grow; a watcher sees each change that was done once, and none that was refused.
    """

    def __init__(self) -> None:
        self.done = self.refused = self.unknown = self.opened_again = self.starts = 0
        self.number = 0
        """of the last change that was begun"""
        self._revision = 0
        self._state: dict[str, tuple[int, bool]] = {}
        self._maybe: dict[int, tuple[str, bool]] = {}
        """what may have been made since: key, and whether it goes"""
        self._has: dict[str, int] = {}
        self._seen_revision = self._loaded = 0
        self._seen: dict[int, int] = {}
        self._unseen: dict[int, int] = {}
        self._refused_ones: set[int] = set()

    def take(self, lines: Iterable[str]) -> None:
        for line in lines:
            try:
                self._take(line.split())
            except AssertionError as error:
                raise AssertionError(f"{line.strip()}: {error}") from error

    def _take(self, words: list[str]) -> None:
        match words:
            case ["has", key, number]:
                self._has[key] = int(number)
            case ["start", revision]:
                self._start(int(revision))
            case ["begin", number, key, how]:
                self.number = int(number)
                self._maybe[self.number] = key, how == "-"
            case ["done", number, revision]:
                assert int(revision) > self._revision, "the revision went back"
                self._revision = int(revision)
                # A watcher may have heard of it before its writer did.
                if int(number) in self._maybe or self._seen.get(self._revision) != int(number):
                    self._happened(int(number))
                if self._revision > self._seen_revision:
                    self._unseen[self._revision] = int(number)
                elif self._revision > self._loaded:
                    assert self._seen.get(self._revision) == int(number), "a watcher missed it"
                self.done += 1
            case ["refused", number]:
                del self._maybe[int(number)]
                self._refused_ones.add(int(number))
                self.refused += 1
            case ["unknown", _]:
                self.unknown += 1
            case ["seen", revision, number]:
                assert int(revision) > self._seen_revision, "seen twice, or out of order"
                missed = [each for each in self._unseen if each < int(revision)]
                assert not missed, f"a watcher missed {missed}"
                self._seen_revision = int(revision)
                self._seen[self._seen_revision] = int(number)
                assert int(number) not in self._refused_ones, "it was refused"
                done = self._unseen.pop(int(revision), int(number))
                assert done == int(number), f"{done} was done"
                if int(number) in self._maybe:
                    self._happened(int(number))
            case ["loaded", revision]:
                self._seen_revision = self._loaded = int(revision)
                self._unseen = {at: each for at, each in self._unseen.items() if at > int(revision)}
            case ["open"]:
                self.opened_again += 1
            case _:
                pass

    def _happened(self, number: int) -> None:
        key, goes = self._maybe.pop(number)
        # What was in doubt may be seen after what came after it.
        for each, is_gone in ((key, goes), ("/last", False)):
            if number > self._state.get(each, (0, False))[0]:
                self._state[each] = number, is_gone

    def _start(self, revision: int) -> None:
        self.starts += 1
        found, self._has = self._has, {}
        assert revision >= self._revision, f"revision {self._revision} was acknowledged"
        last = found.get("/last", 0)
        assert not self._refused_ones & set(found.values()), (
            f"refused: {self._refused_ones & set(found.values())}"
        )
        done = self._state.get("/last", (0, False))[0]
        assert last >= done, f"{done} was done"
        expected = {key: number for key, (number, is_gone) in self._state.items() if not is_gone}
        for number, (key, goes) in sorted(self._maybe.items()):
            # Of those in doubt, any may have happened; what the store has says which.
            if number > last:
                continue
            if found.get(key) == number:
                expected[key] = number
            elif goes and key not in found:
                expected.pop(key, None)
        expected["/last"] = last
        if last in self._maybe:
            key, goes = self._maybe[last]
            assert (key not in found) if goes else found.get(key) == last, f"{last} is there in part"
        if last == 0:
            expected.pop("/last")
        assert found == expected, (
            f"there: {sorted(found.items() - expected.items())}, and not {sorted(expected.items() - found.items())}"
        )
        self._state = {key: (number, False) for key, number in found.items()}
        self._maybe, self._unseen, self._seen = {}, {}, {}
        self._revision, self._seen_revision, self._loaded = revision, 0, 0
