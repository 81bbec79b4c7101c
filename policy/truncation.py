"""Truncations that an operator accepted, and resends: where a link goes on, below what it had dealt with. Pure.

A link that finds the history of its source cut back, or its destination behind what was acknowledged, stops. The source
decides that it goes on, and signs where: a `Standing` with the action `accept-truncation` and a `Truncation`. From there
on the link's records cross under a *derived incarnation*: positions, leaves and proofs of both sides start again at the accepted
offset, under the same rules as those of any stream.

An operator of the source goes back in the same way for what stayed: a `Standing` with the action `resend`. Under the
derived incarnation that it begins, records that crossed before stay, and the destination refuses them (audit.crossed).

Invariants: what is accepted ends one incarnation and begins one, which nothing else derives; the chain from the stream's
own incarnation to the one that lives follows from the signed documents, in whatever order they came, and from what crossed: of several
words that end one incarnation that one holds under which something crossed, else the one that the source signed first. A word of the
destination, which could accept a truncation that nobody found, holds only where something crossed under it by an earlier version.
Callers: policy.grant (collects them), bridge and region.crossing.ingest (cross under them), cli.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from felix.context import bind
from felix.names import StreamName
from policy.terms import Number

TRUNCATIONS_MAX: Final = 64
"""Accepted for one shard under one grant. Beyond that it takes a new stream, or somebody who looks after the disks."""

Incarnation = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]


class Truncation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`incarnation` (hex), under which the shard crossed so far, ends; it goes on from source offset `offset`.

    `epoch` is the source's epoch that begins there, or was current where the destination lost records; 0 of a
    resend.
    """

    stream: str
    shard: Number
    incarnation: Incarnation
    epoch: Number
    offset: Number

    def __post_init__(self) -> None:
        # A region can sign any number of truncations, and every listing of documents checks each one.
        StreamName.parse(self.stream)


class Accepted(NamedTuple):
    """A truncation, who accepted it, and when (ms since the Unix epoch); or a resend, which lost nothing."""

    truncation: Truncation
    region: str
    at: int
    is_resend: bool = False

    @property
    def incarnation(self) -> bytes:
        """The derived incarnation that begins: 16 bytes of SHA-256 over all of it."""
        cut = self.truncation
        ended = bytes.fromhex(cut.incarnation)
        purpose = "resend" if self.is_resend else "accepted-truncation"
        message = bind(purpose, cut.stream, cut.shard, ended, cut.epoch, cut.offset, self.region, self.at)
        return hashlib.sha256(message).digest()[:16]

    @property
    def ended(self) -> bytes:
        """The incarnation that ends."""
        return bytes.fromhex(self.truncation.incarnation)

    @property
    def truncated_at(self) -> int | None:
        """From where on the source's records are others than those that crossed; None: they are all the same."""
        return None if self.is_resend else self.truncation.offset


class Live(NamedTuple):
    """The incarnation that a shard crosses under, and where it begins: None where that is the stream's own."""

    incarnation: bytes
    accepted: Accepted | None


def said_first(accepted: Accepted) -> tuple[int, str, bool, int, int]:
    """Of several words that end one incarnation the least was signed first; of two of one instant always the same one."""
    cut = accepted.truncation
    return accepted.at, accepted.region, accepted.is_resend, cut.epoch, cut.offset


def chain(
    incarnation: bytes, accepted: Mapping[str, Sequence[Accepted]], source: str, begun: Iterable[bytes] = ()
) -> tuple[Live, ...]:
    """From the stream's own incarnation to the one that lives now, which is the last.

    `accepted`: the words by the incarnation (hex) that each ends, those signed first before others. `source`: the region of which a
    word begins another one. `begun`: under which incarnations something crossed, the newest last: no later word, nor one of an
    earlier date, makes that another history.
    """
    held = _words_of(begun, accepted, source)
    found = [Live(incarnation, None)]
    while len(found) <= TRUNCATIONS_MAX:
        ended = found[-1].incarnation.hex()
        following = held.get(ended) or _word_of(source, accepted.get(ended, ()))
        if following is None:
            break
        found.append(Live(following.incarnation, following))
    return tuple(found)


def other_chain(
    lives: Sequence[Live],
    accepted: Mapping[str, Sequence[Accepted]],
    source: str,
    begun: Container[bytes],
    refused: Container[bytes],
) -> tuple[Live, ...]:
    """Another chain than `lives`, the last of which the destination refused, as it did all of `refused`: what landed there may have crossed
    under another word, which another bridge went by. Empty where there is none.

    What `begun` says that this bridge carried under a word is not left for another word, nor for one of the destination.
    """
    held = next((live.incarnation for live in reversed(lives) if live.incarnation in begun), None)
    words: Mapping[str, Sequence[Accepted]] = accepted
    if held is not None:
        words = {ended: [word for word in said if word.region == source] for ended, said in accepted.items()}
    every = _ends(held or lives[0].incarnation, words, source)
    following = next((end for end in every if end not in refused), None)
    return () if following is None else chain(lives[0].incarnation, accepted, source, (following,))


def _ends(incarnation: bytes, accepted: Mapping[str, Sequence[Accepted]], source: str) -> tuple[bytes, ...]:
    """Every incarnation that may live now, by one word or another; those of words that were signed first before others, and no more than
    TRUNCATIONS_MAX."""
    found: list[bytes] = []
    left = [(incarnation, 0)]
    while left and len(found) < TRUNCATIONS_MAX:
        at, length = left.pop()
        words = accepted.get(at.hex(), ()) if length < TRUNCATIONS_MAX else ()
        if _word_of(source, words) is None:
            found.append(at)
        left += [(word.incarnation, length + 1) for word in reversed(words[:TRUNCATIONS_MAX])]
    return tuple(found)


def _word_of(source: str, words: Sequence[Accepted]) -> Accepted | None:
    """The first of them that the source signed."""
    return next((word for word in words if word.region == source), None)


def _words_of(
    begun: Iterable[bytes], accepted: Mapping[str, Sequence[Accepted]], source: str
) -> dict[str, Accepted]:
    """By the incarnation (hex) that each ends, the words that lead to what has begun. Empty where there is no choice."""
    if all(len(words) == 1 and words[0].region == source for words in accepted.values()):
        return {}
    by = {word.incarnation: word for words in accepted.values() for word in words}
    held: dict[str, Accepted] = {}
    for incarnation in begun:
        for _ in range(TRUNCATIONS_MAX):
            word = by.get(incarnation)
            if word is None:
                break
            held[word.truncation.incarnation] = word
            incarnation = word.ended
    return held
