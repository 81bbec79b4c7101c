"""Which cosigned checkpoints of a log are kept: each that says of its cosigners what no larger one does. Pure.

Who cosigned is a *party*, a region or an outside witness, with the algorithm of its key: a party that names many keys is still one, and a note
without somebody's ML-DSA-44 line does not stand for one with it. A note is *whole* that has every line of the log itself which its size asks for: who brings
one chooses its lines. Invariants of what `keep` gives:

- of each note that goes in, one of no smaller tree comes out that all of its cosigners have cosigned. So a quorum, of whichever parties, that one
  note had is still had by one of no fewer leaves;
- one party that cosigns or does not, with either algorithm or both, makes of n notes 4n at most, whatever its keys are called;
- what is not whole takes no place of what is: it is kept where there is room, and where no note says the same;
- there are `at_most` of them. Six parties with one algorithm have 63 sets, so nothing is let go of below. Beyond it goes the smallest of those that the fewest
  have cosigned; never the newest that a party has cosigned, nor the newest that so many have, as long as those fit.

Callers: audit.checkpoint_disk (what the log itself keeps), audit.cosigned_notes (what a copy keeps).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from audit.note import Algorithm

T = TypeVar("T")
Cosigner = tuple[str, Algorithm | bytes]
"""A party, and of what algorithm the key is that it cosigned with; of a key that is not known, its id. Under no name the log itself, which signs with
one or both."""


@dataclass(frozen=True, slots=True)
class Cosigned(Generic[T]):
    """A note, for comparing. Size in leaves."""

    size: int
    by: frozenset[Cosigner]
    note: T
    is_whole: bool = True
    """it has every line of the log itself that one of its size has"""

    @property
    def parties(self) -> frozenset[str]:
        return parties(self.by)


def parties(by: Iterable[Cosigner]) -> frozenset[str]:
    """Who they are, each once, without the log itself."""
    return frozenset(party for party, _ in by if party)


def party_of(name: str, origin: str) -> str:
    """Who stands behind a witness's key of this name, for a log of this origin: everything of a region of the log's mesh is called
    `<region>.<mesh>/…` (keys.bundle), and is that region; any other name is a witness of its own."""
    domain, slash, _ = name.partition("/")
    region, dot, mesh = domain.partition(".")
    own_mesh = origin.partition("/")[0].partition(".")[2]
    return domain if slash and region and dot and mesh == own_mesh else name


def keep(found: Iterable[Cosigned[T]], at_most: int) -> list[Cosigned[T]]:
    """Those that are kept, the largest first; of equals the one that was given first."""
    kept = list[Cosigned[T]]()
    for each in sorted(found, key=lambda each: (not each.is_whole, -each.size, -len(each.by))):
        if each.parties and not any(each.size <= other.size and each.by <= other.by for other in kept):
            kept.append(each)
    whole = [each for each in kept if each.is_whole]
    while len(whole) > at_most:
        gone = least(whole) or min(whole[1:], key=_weight)
        whole = [each for each in whole if each is not gone]
    others = [each for each in kept if not each.is_whole]
    return sorted((*whole, *others[: at_most - len(whole)]), key=lambda each: -each.size)


def least(kept: Sequence[Cosigned[T]]) -> Cosigned[T] | None:
    """The one that goes first. None where each is the newest of a party or of so many."""
    held = set[int]()
    at_least, seen = 0, set[str]()
    for at, each in sorted(enumerate(kept), key=lambda item: -item[1].size):
        who = each.parties
        if len(who) > at_least or not who <= seen:
            held.add(at)
        at_least, seen = max(at_least, len(who)), seen | who
    return min((each for at, each in enumerate(kept) if at not in held), key=_weight, default=None)


def _weight(each: Cosigned[T]) -> tuple[int, int]:
    return len(each.parties), each.size
