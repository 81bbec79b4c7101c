"""The entries of the transactions' journal, and the state that they make up. Pure.

A transaction is committed by its parts and one `Committed` entry behind them; `Applied` says that every part is where it
belongs. Parts without their `Committed` are of a commit that never was. Outcomes are remembered, limited by count and age, so
that a client whose answer was lost gets the same answer again. The time of the newest forgotten outcome is kept, so that a query
about an older transaction is answered with "unknown" instead of a guess.

An entry is a MessagePack array that begins with its kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from felix.errors import CorruptionError

OUTCOMES_MAX: Final = 10_000
"""Committed transactions that a lost answer can be asked for; about 300 bytes each."""
OUTCOME_AGE_MS: Final = 3_600_000
"""A client that was away for longer gets the answer "unknown"."""
FENCES_MAX: Final = 10_000
"""Transactional ids whose newest instance is known. Beyond it one goes of the owner who has the most: what one makes in any number
must not make another's instances old."""
UNKNOWN_OFFSET: Final = -1
"""A part is in its shard, or its stream is gone; where it stands is not known."""
OFFSETS_MAX: Final = 50_000
"""Offsets that one `Applied` names, so that it fits an entry; parts beyond it have an unknown one."""


class Part(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A batch for one shard, as the client encoded it. `index` counts within the transaction."""

    number: int
    index: int
    stream: str
    incarnation: bytes
    shard: int
    batch: bytes


class Acknowledgement(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What a participant applies: `view` names it, `body` is its own."""

    number: int
    index: int
    view: str
    body: bytes


class Committed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The parts before it, `parts` and `acknowledgements` of them, are decided."""

    number: int
    id: bytes
    owner: str
    time_ms: int
    parts: int
    acknowledgements: int


class Applied(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Every part is where it belongs. `offsets` per part: that of its first record where they follow each other, else one for
    each record; UNKNOWN_OFFSET where it is not known."""

    number: int
    offsets: tuple[tuple[int, ...], ...]


class Fenced(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """From now on `epoch` is the instance of this owner's transactional id."""

    owner: str
    transactional_id: str
    epoch: int


class Horizon(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The next number, and the time of the newest outcome that was forgotten."""

    next_number: int
    forgotten_ms: int


Entry = Part | Acknowledgement | Committed | Applied | Fenced | Horizon

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    return _encoder.encode(entry)


def decode(data: bytes) -> Entry:
    """Raises CorruptionError."""
    try:
        entry: Any = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"An entry of the transactions' journal does not decode: {error}.") from error
    assert isinstance(entry, Entry)
    return entry


@dataclass(slots=True)
class Transaction:
    """One that is committed. `offsets` once it is applied; its parts are then let go."""

    committed: Committed
    parts: list[Part] = field(default_factory=list)
    acknowledgements: list[Acknowledgement] = field(default_factory=list)
    offsets: tuple[tuple[int, ...], ...] | None = None

    @property
    def is_applied(self) -> bool:
        return self.offsets is not None


class TransactionState:
    """Committed transactions by id, in the order of their commits, and the newest instances."""

    def __init__(self, *, outcomes_max: int = OUTCOMES_MAX, outcome_age_ms: int = OUTCOME_AGE_MS) -> None:
        self.next_number = 1
        self.forgotten_ms = 0
        self._outcomes_max = outcomes_max
        self._outcome_age_ms = outcome_age_ms
        self._by_id: dict[bytes, Transaction] = {}
        self._by_number: dict[int, Transaction] = {}
        self._loose: dict[int, tuple[list[Part], list[Acknowledgement]]] = {}
        self._fences: dict[str, dict[str, int]] = {}
        self._fence_count = 0
        self._owed: dict[int, Transaction] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, transaction_id: bytes) -> Transaction | None:
        """The committed transaction with this id."""
        return self._by_id.get(transaction_id)

    def epoch(self, owner: str, transactional_id: str) -> int:
        """Of the newest instance; 0 where there was none."""
        return self._fences.get(owner, {}).get(transactional_id, 0)

    @property
    def owed(self) -> list[Transaction]:
        """Committed and not applied, in order."""
        return list(self._owed.values())

    def apply(self, entry: Entry) -> None:
        """Raises CorruptionError where entries do not fit each other."""
        match entry:
            case Part(number):
                self._loose.setdefault(number, ([], []))[0].append(entry)
                self.next_number = max(self.next_number, number + 1)
            case Acknowledgement(number):
                self._loose.setdefault(number, ([], []))[1].append(entry)
                self.next_number = max(self.next_number, number + 1)
            case Committed(number, transaction_id):
                parts, acknowledgements = self._loose.pop(number, ([], []))
                if (len(parts), len(acknowledgements)) != (entry.parts, entry.acknowledgements):
                    raise CorruptionError(
                        f"Transaction {number} was committed with {entry.parts} batches and {entry.acknowledgements} "
                        f"acknowledgements, and its journal has {len(parts)} and {len(acknowledgements)}."
                    )
                held = Transaction(entry, parts, acknowledgements)
                self._by_id[transaction_id] = self._by_number[number] = self._owed[number] = held
                # Numbers only grow: what is loose below belongs to commits that never were.
                for older in [each for each in self._loose if each < number]:
                    del self._loose[older]
                self.next_number = max(self.next_number, number + 1)
            case Applied(number, offsets):
                found = self._owed.pop(number, None)
                if found is not None:
                    found.offsets = offsets
                    found.parts, found.acknowledgements = [], []
                    self._forget(found.committed.time_ms)
            case Fenced(owner, transactional_id, epoch):
                self._fence(owner, transactional_id, epoch)
            case Horizon(next_number, forgotten_ms):
                self.next_number = max(self.next_number, next_number)
                self.forgotten_ms = max(self.forgotten_ms, forgotten_ms)

    def _fence(self, owner: str, transactional_id: str, epoch: int) -> None:
        mine = self._fences.setdefault(owner, {})
        self._fence_count += transactional_id not in mine
        mine.pop(transactional_id, None)
        mine[transactional_id] = epoch
        if self._fence_count > FENCES_MAX:
            # The one unused for longest, of the identity with the most; the same at a replay.
            most = max(self._fences, key=lambda each: len(self._fences[each]))
            held = self._fences[most]
            del held[next(iter(held))]
            if not held:
                del self._fences[most]
            self._fence_count -= 1

    def _forget(self, now_ms: int) -> None:
        """Let go of the oldest outcomes beyond count and age; what is owed stays."""
        while self._by_number:
            number, oldest = next(iter(self._by_number.items()))
            aged = oldest.committed.time_ms + self._outcome_age_ms < now_ms
            if not oldest.is_applied or (len(self._by_number) <= self._outcomes_max and not aged):
                return
            del self._by_number[number]
            self._by_id.pop(oldest.committed.id, None)
            self.forgotten_ms = max(self.forgotten_ms, oldest.committed.time_ms)

    def snapshot(self) -> Iterator[bytes]:
        """Entries that make up this state in an empty one."""
        yield encode(Horizon(self.next_number, self.forgotten_ms))
        for owner, mine in self._fences.items():
            for transactional_id, epoch in mine.items():
                yield encode(Fenced(owner, transactional_id, epoch))
        for number, held in self._by_number.items():
            committed = held.committed
            if held.offsets is None:
                yield from map(encode, held.parts)
                yield from map(encode, held.acknowledgements)
                yield encode(committed)
            else:
                yield encode(msgspec.structs.replace(committed, parts=0, acknowledgements=0))
                yield encode(Applied(number, held.offsets))
