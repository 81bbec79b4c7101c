"""Random shards of an egress log, lawful and not, and an oracle that counts offset by offset whether each is accounted for once.

`draw` makes one shard's leaves, in order: batches with records withheld, in one part or several; gaps; ACKs; renewals that announce
again what had no ACK. About half of the shards have one move of somebody who would have records counted that never crossed, or none where
some did: a grant that nobody signed; a WITHHELD or GAP inside a batch; a beginning inside a batch, below an ACK, under the same grant; a range of
which one record is listed; an ACK for what was announced again. Whether the move broke anything is the oracle's to say, not the
move's: `is_lawful` is written from docs/decisions/0075, with a set of offsets for each range, and imports nothing of the product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Final

SIGNED: Final = ("first", "second")
"""Grants that both regions signed; any other is invented."""
INVENTED: Final = "invented"


@dataclass(frozen=True)
class Said:
    """One leaf, as far as it accounts for offsets. `envelope`: of INTENT and ACK."""

    kind: str
    grant: str
    first: int
    last: int
    offsets: tuple[int, ...] = ()
    envelope: str = ""
    part: int = 0
    parts: int = 1


# -- the oracle ----------------------------------------------------------------------------------------


UNLAWFUL: Final = "unlawful"
OPEN: Final = "open"
SETTLED: Final = "settled"


def is_lawful(leaves: list[Said]) -> bool:
    """Whether every offset is accounted for once, and every ACK answers a batch that counts. A batch at the end may be cut off."""
    return judged(leaves) != UNLAWFUL


def judged(leaves: list[Said]) -> str:
    """Whether it is lawful; and if so, whether everything that was announced has its answer."""
    live: list[tuple[set[int], str, str]] = []
    """what accounts for offsets: these, the grant, the envelope (of a gap: none), in order"""
    answered: set[str] = set()
    moved: dict[str, tuple[int, int]] = {}
    """envelopes without records that account for nothing"""
    carried = {leaf.envelope for leaf in leaves if leaf.kind == "intent" and leaf.offsets}
    under, at, unanswered = "", 0, False
    while at < len(leaves):
        leaf = leaves[at]
        accounted = set[int]().union(*(offsets for offsets, _, _ in live))
        following = max(accounted, default=-1) + 1
        spans = {envelope: (min(each), max(each)) for each, _, envelope in live if envelope} | moved
        if leaf.kind == "ack":
            if not _answers(leaf, spans, answered):
                return UNLAWFUL
            at += 1
            continue
        batch, end = [leaf], at + 1
        if leaf.kind == "withheld" or leaf.offsets:
            # A batch: what is withheld, and then one envelope's parts; nothing between them but answers to others.
            while end < len(leaves) and not _is_whole(batch):
                if leaves[end].kind != "ack":
                    batch.append(leaves[end])
                elif not _answers(leaves[end], spans, answered):
                    return UNLAWFUL
                end += 1
            if not _is_whole(batch):
                # The log's end cuts it off: so far it must be one.
                begins = _begins(leaf, under, following, live, moved, answered)
                return OPEN if begins and _is_cut(batch) else UNLAWFUL
            intents = [each for each in batch if each.kind == "intent"]
            listed = sorted(offset for each in batch for offset in each.offsets)
            if not _is_one(batch) or listed != (whole := list(range(leaf.first, intents[-1].last + 1))):
                return UNLAWFUL
            unit = (set(whole), leaf.grant, intents[0].envelope)
        elif leaf.kind in ("gap", "elsewhere"):
            unit = (set(range(leaf.first, leaf.last + 1)), leaf.grant, "")
        else:
            below = any(leaf.first <= max(offsets) and name in answered for offsets, _, name in live)
            below |= any(leaf.first <= last and name in answered for name, (_, last) in moved.items())
            known = {name for _, _, name in live} | moved.keys()
            if leaf.last >= following or below or leaf.envelope in known or leaf.grant not in SIGNED:
                return UNLAWFUL
            moved[leaf.envelope] = (leaf.first, leaf.last)
            under, at = leaf.grant, end
            continue
        if leaf.kind == "elsewhere" and leaf.grant == under and leaf.first < following:
            # What another bridge brought: whole ranges that this one announced, and had no answer for.
            inside = [each for each in live if leaf.first <= min(each[0]) <= leaf.last]
            ends = [
                *((max(each[0]), each[2]) for each in live),
                *((last, name) for name, (_, last) in moved.items()),
            ]
            if (
                leaf.grant not in SIGNED
                or leaf.first not in {min(offsets) for offsets, _, _ in inside}
                or any(max(offsets) > leaf.last for offsets, _, _ in inside)
                or any(last >= leaf.first and name in answered for last, name in ends)
            ):
                return UNLAWFUL
            gone = {envelope for _, _, envelope in inside}
            gone |= {envelope for envelope, (_, last) in moved.items() if leaf.first <= last <= leaf.last}
            unanswered |= not carried.isdisjoint(gone)
            live = sorted(
                [*(each for each in live if each not in inside), unit], key=lambda each: min(each[0])
            )
            moved = {envelope: span for envelope, span in moved.items() if envelope not in gone}
            under, at = leaf.grant, end
            continue
        if not _begins(leaf, under, following, live, moved, answered):
            return UNLAWFUL
        if leaf.first < following:
            gone = {envelope for offsets, _, envelope in live if min(offsets) >= leaf.first}
            gone |= {envelope for envelope, (_, last) in moved.items() if last >= leaf.first}
            unanswered |= not carried.isdisjoint(gone)
            live = [each for each in live if min(each[0]) < leaf.first]
            moved = {envelope: span for envelope, span in moved.items() if envelope not in gone}
        live.append(unit)
        under, at = leaf.grant, end
    due = {envelope for _, _, envelope in live if envelope} | moved.keys()
    # Records that were announced again have no answer: that they had not arrived is the destination's word.
    return OPEN if unanswered or due - answered else SETTLED


def _answers(ack: Said, spans: dict[str, tuple[int, int]], answered: set[str]) -> bool:
    """Whether this ACK answers something that counts, and is the first to do so."""
    if ack.envelope in answered or spans.get(ack.envelope) != (ack.first, ack.last):
        return False
    answered.add(ack.envelope)
    return True


def _is_whole(batch: list[Said]) -> bool:
    last = batch[-1]
    return last.kind != "withheld" and (last.kind != "intent" or last.part == last.parts - 1)


def _is_cut(batch: list[Said]) -> bool:
    return all(each.kind in ("withheld", "intent") and each.grant == batch[0].grant for each in batch)


def _is_one(batch: list[Said]) -> bool:
    """Withheld leaves, then one envelope's parts, in order, under one grant, over one range."""
    intents = [each for each in batch if each.kind == "intent"]
    held = batch[: len(batch) - len(intents)]
    first, last = batch[0].first, intents[-1].last if intents else -1
    return (
        bool(intents)
        and all(each.kind == "withheld" and first <= each.first and each.last <= last for each in held)
        and len({each.grant for each in batch}) == 1
        and len({each.envelope for each in intents}) == 1
        and [each.part for each in intents] == list(range(intents[0].parts))
        and intents[0].first == first
        and all(b.first == a.last + 1 for a, b in pairwise(intents))
    )


def _begins(
    leaf: Said,
    under: str,
    following: int,
    live: list[tuple[set[int], str, str]],
    moved: dict[str, tuple[int, int]],
    answered: set[str],
) -> bool:
    """Whether a range may begin where this one does."""
    if leaf.grant not in SIGNED:
        return False
    if leaf.first == following or not live:
        return True
    if leaf.grant == under:
        return False
    if leaf.first > following:
        return True
    behind = [each for each in live if max(each[0]) >= leaf.first]
    ends = [*((max(each[0]), each[2]) for each in live), *((last, name) for name, (_, last) in moved.items())]
    return (
        min(behind[0][0]) == leaf.first
        and behind[0][1] != leaf.grant
        and not any(last >= leaf.first and envelope in answered for last, envelope in ends)
    )


# -- what is drawn -------------------------------------------------------------------------------------


class _Agent:
    """Writes one shard's leaves as an agent does, and knows what it may do next."""

    def __init__(self, random: Random, name: str, takeovers: bool) -> None:
        self.random, self.name, self.takeovers = random, name, takeovers
        self.leaves: list[Said] = []
        self.grant = SIGNED[0]
        self.batches: list[tuple[int, int, str]] = []
        """first, last and envelope of what was announced, since what was announced again is forgotten"""
        self.answered: set[str] = set()
        self.gone: list[Said] = []
        """ACKs that must not come any more"""
        self.following = 0
        self.envelopes = 0

    def envelope(self) -> str:
        self.envelopes += 1
        return f"{self.name} {self.envelopes}"

    def batch(self) -> None:
        first, count = self.following, self.random.randint(1, 4)
        last, envelope = first + count - 1, self.envelope()
        held = [at for at in range(first, last + 1) if self.random.random() < 0.2]
        cross = [at for at in range(first, last + 1) if at not in held]
        if held and self.random.random() < 0.5:
            self.leaves.append(Said("withheld", self.grant, first, last, tuple(held[:1])))
            held = held[1:]
        if held:
            self.leaves.append(Said("withheld", self.grant, first, last, tuple(held)))
        if len(cross) > 1 and self.random.random() < 0.4:
            cut = self.random.randrange(1, len(cross))
            low, high = tuple(cross[:cut]), tuple(cross[cut:])
            self.leaves.append(Said("intent", self.grant, first, low[-1], low, envelope, 0, 2))
            self.leaves.append(Said("intent", self.grant, low[-1] + 1, last, high, envelope, 1, 2))
        else:
            self.leaves.append(Said("intent", self.grant, first, last, tuple(cross), envelope))
        self.batches.append((first, last, envelope))
        self.following = last + 1

    def gap(self) -> None:
        first, last, envelope = self.following, self.following + self.random.randint(0, 3), self.envelope()
        self.leaves.append(Said("gap", self.grant, first, last))
        self.leaves.append(Said("intent", self.grant, first, last, (), envelope))
        self.batches.append((first, last, envelope))
        self.following = last + 1

    def acks(self, count: int | None = None) -> None:
        """The oldest that wait for an answer, all of them or so many."""
        for first, last, envelope in [each for each in self.batches if each[2] not in self.answered][:count]:
            self.leaves.append(Said("ack", self.grant, first, last, (), envelope))
            self.answered.add(envelope)

    def renew(self, first: int | None = None) -> None:
        """Under the other grant from where the destination stands: some of what was announced had not arrived."""
        self.grant = next(grant for grant in SIGNED if grant != self.grant)
        waiting = [each for each in self.batches if each[2] not in self.answered]
        if first is None:
            first = self.random.choice([*(each[0] for each in waiting), self.following])
        self.gone += [Said("ack", self.grant, *each[:2], (), each[2]) for each in waiting if each[0] >= first]
        self.batches = [each for each in self.batches if each[0] < first]
        self.following = first
        self.batch()

    def taken_over(self) -> None:
        """Another bridge brought some of what was announced, perhaps more, and this one goes on behind that, under the same grant."""
        waiting = [each for each in self.batches if each[2] not in self.answered]
        first = self.random.choice([*(each[0] for each in waiting), self.following])
        more = self.following + self.random.randint(0, 3)
        last = self.random.choice([*(each[1] for each in waiting if each[0] >= first), more])
        self.leaves.append(Said("elsewhere", self.grant, first, last))
        over = [each for each in waiting if first <= each[0] <= last]
        self.gone += [Said("ack", self.grant, *each[:2], (), each[2]) for each in over]
        self.batches = [each for each in self.batches if each not in over]
        self.following = max(self.following, last + 1)

    # What is tried

    def interrupt(self) -> None:
        """A WITHHELD or GAP that begins within what was announced, and under another grant or one that nobody signed."""
        first = self.random.randrange(self.following + 1) if self.following else 0
        last = first + self.random.randint(0, 4)
        grant = self.random.choice((INVENTED, INVENTED, *SIGNED))
        if self.random.random() < 0.5:
            kind = "elsewhere" if self.takeovers and self.random.random() < 0.5 else "gap"
            self.leaves.append(Said(kind, grant, first, last))
        else:
            listed = [at for at in range(first, last + 1) if self.random.random() < 0.6] or [first]
            self.leaves.append(Said("withheld", grant, first, last, tuple(listed)))
            if self.random.random() < 0.5:
                cross = tuple(at for at in range(first, last + 1) if at not in listed)
                self.leaves.append(Said("intent", grant, first, last, cross, self.envelope()))
        self.following = max(self.following, last + 1)

    def bury(self) -> None:
        """A long range of which one record is withheld, and a GAP that goes on somewhere in it."""
        first, count = self.following, self.random.randint(2, 8)
        at, last = first + self.random.randrange(count), first + count - 1
        self.leaves.append(Said("withheld", self.grant, first, last, (at,)))
        self.leaves.append(Said("gap", self.grant, self.random.randint(first, last), last))
        self.following = last + 1

    def go_back(self) -> None:
        """Begin again anywhere, under any grant."""
        self.grant = self.random.choice((*SIGNED, INVENTED))
        self.following = self.random.randrange(self.following + 1)
        self.batch()

    def answer_late(self) -> None:
        if self.gone:
            self.leaves.append(self.random.choice(self.gone))

    def change(self) -> None:
        """One leaf left out, twice, in another place, under another grant or over another range."""
        if not self.leaves:
            return
        at = self.random.randrange(len(self.leaves))
        leaf = self.leaves[at]
        match self.random.randrange(6):
            case 0:
                del self.leaves[at]
            case 1:
                self.leaves.insert(self.random.randint(at, len(self.leaves)), leaf)
            case 2:
                self.leaves.insert(self.random.randrange(len(self.leaves)), self.leaves.pop(at))
            case 3:
                self.leaves[at] = replace(leaf, grant=self.random.choice((*SIGNED, INVENTED)))
            case 4:
                first = max(0, leaf.first + self.random.randint(-2, 2))
                last = max(first, leaf.last + self.random.randint(-2, 2))
                fits = tuple(each for each in leaf.offsets if first <= each <= last)
                if fits or not leaf.offsets:
                    self.leaves[at] = replace(leaf, first=first, last=last, offsets=fits)
            case 5:
                offsets = tuple(
                    each for each in range(leaf.first, leaf.last + 1) if self.random.random() < 0.7
                )
                if leaf.offsets and offsets:
                    self.leaves[at] = replace(leaf, offsets=offsets)


def draw(random: Random, name: str, *, takeovers: bool = False) -> list[Said]:
    """One shard's leaves. Its last ones are a batch and all ACKs that are due. `takeovers`: another bridge carries the shard now and then."""
    agent, moves = _Agent(random, name, takeovers), random.randint(2, 7)
    at = random.randrange(moves) if random.random() < 0.5 else -1
    agent.batch()
    for move in range(moves):
        if move == at:
            random.choice((agent.interrupt, agent.bury, agent.go_back, agent.answer_late, agent.change))()
            continue
        chosen = random.random()
        if chosen < 0.5:
            agent.batch()
        elif chosen < 0.6:
            agent.gap()
        elif chosen < 0.75:
            agent.acks(random.randint(1, 3))
        elif takeovers and chosen < 0.87:
            agent.taken_over()
        else:
            agent.renew()
    agent.batch()
    agent.acks()
    return agent.leaves
