"""What a link's session begins with: what the source and the destination say of the shard, held to the egress log.

What either no longer has, and what the log has not been told, gets its GAP leaf here. Invariant: a link whose source or destination has lost what
crossed does not begin again by itself. Caller: bridge.link_session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

from audit.crossed import OffsetSet, crossed_before
from audit.leaf import GapKind, Header, Kind, Leaf, Side
from audit.stream_statement import Cut, StreamStatement, cut_of, open_statement
from audit.trail import Trail
from bridge.crossing import gap_leaf
from bridge.ledger import ShardAccount
from bridge.link import Announced
from bridge.link_context import Link, LinkContext, LinkMemory
from bridge.plan import PlannedLink
from felix.errors import Code, CorruptionError, ProtocolError, UnavailableError
from felix.messages import (
    LOGGED_UNTOLD,
    CutState,
    DescribeStream,
    GetStreamStatement,
    IngestOpened,
    StreamState,
)
from policy.truncation import TRUNCATIONS_MAX, Accepted, Live, chain, other_chain

log = logging.getLogger("felix.bridge.link_opening")

EPOCHS_MAX: Final = 63
"""Beginnings of epochs that are told apart in what another bridge brought: as many as the ledger remembers (bridge.ledger.SPANS_MAX)."""


class SourceShard(NamedTuple):
    """What the source states that a shard is, as signed and as read; and what it crossed under, the newest last."""

    signed: bytes
    statement: StreamStatement
    lives: tuple[Live, ...]
    accepted: Mapping[str, tuple[Accepted, ...]]
    """what the last follows from"""

    @property
    def live(self) -> Live:
        """What it crosses under now."""
        return self.lives[-1]

    @property
    def begins_at(self) -> int:
        """The source offset at which that begins: the log's start, or where a truncation was accepted."""
        accepted = self.live.accepted
        return self.statement.log_start if accepted is None else accepted.truncation.offset


class _Between(NamedTuple):
    """Offsets that this log does not account for, below those with which the shard goes on by what was accepted."""

    incarnation: bytes
    """which ended there"""
    first: int


class LinkOpening:
    """Of one session; the calls come in the order of the methods."""

    def __init__(self, link: Link, context: LinkContext, memory: LinkMemory) -> None:
        self._link, self._context, self._memory = link, context, memory
        self._source: SourceShard | None = None
        self._between: _Between | None = None

    @property
    def source(self) -> SourceShard:
        """What `take_statement` took."""
        assert self._source is not None
        return self._source

    async def describe(self) -> StreamState:
        row = self._link.row
        stream = await self._context.source.connection().request(DescribeStream(row.stream))
        if row.shard >= len(stream.state):
            raise ProtocolError(f"The source does not describe shard {row.shard} of {row.stream}.")
        self._link.take_shard(stream, stream.state[row.shard])
        return stream

    def log_old_incarnation(self) -> None:
        """What was not read of an incarnation that is gone, as far as is known, gets its GAP leaf."""
        context, row = self._context, self._link.row
        lives = {each.incarnation for each in self.source.lives}
        for incarnation, account in context.ledger.incarnations(self._link.link_shard).items():
            high = self._memory.high.get(incarnation, 0)
            if incarnation not in lives and account.accounted_to < high:
                self._memory.alarm = (
                    f"{row.stream} was made anew; offsets {account.accounted_to} to {high - 1} of the old one "
                    "were never read."
                )
                log.error("%s", self._memory.alarm)
                self._memory.stats.gaps += high - account.accounted_to
                template = self._template(incarnation)
                leaf = gap_leaf(
                    template, GapKind.INCARNATION, account.accounted_to, high - 1, context.clock_ms()
                )
                context.append([leaf], lambda index, error: None)

    async def take_statement(self, row: PlannedLink, stream: StreamState) -> None:
        """Take what the source signs that the shard is. Raises TamperError, UnavailableError where it was made anew meanwhile."""
        source = self._context.source
        answer = await source.connection().request(GetStreamStatement(row.grant, row.stream, row.shard))
        statement = open_statement(answer.statement, source.trust.receipt_keys)
        said = (statement.region, statement.stream, statement.shard)
        if said != (source.region, row.stream, row.shard):
            raise ProtocolError(f"The source stated what another shard is: {said}.", code=Code.TAMPERED)
        if statement.incarnation != stream.incarnation:
            raise UnavailableError(f"{row.stream} was made anew while the link opened.", retry_after_ms=50)
        lives = self._lives(statement.incarnation, row)
        self._source = SourceShard(answer.statement, statement, lives, row.accepted)

    def _lives(self, incarnation: bytes, row: PlannedLink) -> tuple[Live, ...]:
        """What the shard crossed under, by what was accepted, by what has leaves and by what the destination refused; the newest last."""
        begun, source = self._context.ledger.incarnations(self._link.link_shard), self._context.source.region
        lives = chain(incarnation, row.accepted, source, begun)
        if lives[-1].incarnation not in self._memory.not_there:
            return lives
        other = other_chain(lives, row.accepted, source, begun, self._memory.not_there)
        if not other:
            self._memory.not_there.clear()
        return other or lives

    async def crossed_before(self, trail: Trail) -> OffsetSet | None:
        """After a resend: what crossed before it, by the egress log; None where there was none. Reads the whole log, on another thread."""
        lives = self.source.lives
        if not any(each.accepted is not None and each.accepted.is_resend for each in lives):
            return None
        name = self._link.link_shard.shard_name

        def find() -> OffsetSet:
            return crossed_before((data for _, data in trail.leaves()), name, lives)

        return await asyncio.to_thread(find)

    def check_source(self) -> None:
        """Raises CorruptionError(TRUNCATED) where the source no longer has what was read of it, after the GAP leaf of that; TRUNCATION_UNKNOWN where it crossed on under a word
        that does not count any more. Where it was accepted on behalf of another bridge, which carried further, that the shard goes on, this one goes on with it."""
        source, ledger, live = self.source, self._context.ledger, self.source.live
        for each in reversed(source.lives):
            account = ledger.shard(self._link.link_shard, each.incarnation)
            if account is not None and account.read:
                break
        else:
            return
        cut = cut_of(source.statement, account.read)
        if each is not live:
            # It was accepted that the link goes on, and it has not begun to: no later than where the histories part. Where another bridge carried below what this one read,
            # this log may know none of the epochs that the source has: then the word says where they part, and the destination holds the source to what it took since.
            knows = any(source.statement.has_epoch(span.epoch) for span in account.read)
            most = account.accounted_to
            if cut is not None and (knows or live.accepted is None):
                most = min(cut.offset, most)
            goes_on = cut is None or live.accepted is None or not live.accepted.is_resend
            if source.begins_at <= most and goes_on:
                return
            if cut is None:
                # Another bridge carried what lies between, and was stopped: the destination knows, and passes over nothing that it has not.
                self._require_known()
                self._between = _Between(each.incarnation, most)
                return
            most = min(cut.offset, account.accounted_to)
            cut = Cut(source.statement.epoch_at(most), most)
        if cut is None:
            return
        self._require_known()
        row, last = self._link.row, account.accounted_to - 1
        said = (
            f"{row.stream} shard {row.shard} was cut back to offset {cut.offset}, where its epoch {cut.epoch} begins: offsets "
            f"{cut.offset} to {last}, the newest of epoch {account.read[-1].epoch}, had been announced, and are not there as they crossed."
        )
        raise self._truncated(said, each.incarnation, account, cut)

    @property
    def goes_back_to(self) -> int:
        """Where the link goes on if only the destination knows that offsets are lacking there, or that the source was cut back: what this log read and got answered, and
        the source still has, does not cross again."""
        if self._between is not None:
            return self._between.first
        source, context, shard = self.source, self._context, self._link.link_shard
        account = context.ledger.shard(shard, source.live.incarnation)
        if account is None or not account.read or cut_of(source.statement, account.read) is not None:
            return source.statement.log_start
        open_from = (
            each.first_offset
            for each in context.open_trail().positions.unanswered(shard)
            if each.incarnation == source.live.incarnation
        )
        return max(source.statement.log_start, min([account.read[-1].read_to, *open_from]))

    def _require_known(self) -> None:
        """Raises CorruptionError(TRUNCATION_UNKNOWN) where the log has leaves of this history of the stream under a word that does not count any more: its region gave up the key that
        signed it, or a store lost it. There is nothing to accept: that would begin another history than the one that landed."""
        source, row, derived = self.source, self._link.row, self._context.derived
        known = {word.incarnation for words in source.accepted.values() for word in words}
        known.add(source.statement.incarnation)
        for incarnation in self._context.ledger.incarnations(self._link.link_shard):
            ended: bytes | None = incarnation
            for _ in range(TRUNCATIONS_MAX):
                if ended is None or ended in known:
                    break
                ended = derived.get(ended)
            if incarnation not in known and ended in known:
                self._memory.cut = None
                self._memory.truncation = f"{row.stream} shard {row.shard} crossed under a truncation that was accepted, or a resend, which does not count any more."
                raise CorruptionError(
                    self._memory.truncation,
                    code=Code.TRUNCATION_UNKNOWN,
                    hint=f"In {self._context.source.region}: felix bridge sign-again {row.grant}.",
                )

    def check_own_log(self, opened: IngestOpened) -> None:
        """Raises CorruptionError(ROLLED_BACK) where this bridge brought more than its log announced, under whichever grant: its log was put back. A leaf of what another one
        brought would hide that."""
        context, row, shard = self._context, self._link.row, self._link.link_shard
        account = context.ledger.shard(shard, self.source.live.incarnation)
        announced = 0 if account is None else account.accounted_to
        if opened.brought <= announced:
            context.brought_more.pop(shard, None)
            return
        error = context.brought_more[shard] = CorruptionError(
            f"{row.destination_region} says that this bridge brought offsets of {row.stream} shard {row.shard} up to {opened.brought - 1}, and the egress log accounts for those below "
            f"{announced}: it was rolled back.",
            code=Code.ROLLED_BACK,
            hint=f"Restore the log's newest copy; nothing crosses to {row.destination_region} until then. Without one, make a new bridge with a log of its own. Or another agent works with this "
            "bridge's identity: find out which.",
        )
        raise error

    def check_destination(self, trail: Trail, opened: IngestOpened) -> None:
        """Raises CorruptionError(TRUNCATED) where the destination no longer has what it gave receipts for, (ROLLED_BACK) where it has it, and its audit log lacks the leaves."""
        source = self.source
        last, at = trail.positions.last_ack(self._link.link_shard), opened.position
        account = self._context.ledger.shard(self._link.link_shard, source.live.incarnation)
        received = 0
        if last is not None and last.incarnation == source.live.incarnation:
            received = last.last_offset + 1
        had, row = max(opened.logged, received), self._link.row
        # Receipts are given once their leaves are durable: a destination's log that has fewer was put back, whoever else has forgotten what it had, and whatever others brought since.
        logged = min(
            (each for each in (opened.logged, opened.brought) if each != LOGGED_UNTOLD), default=received
        )
        lacks_leaves = logged < received
        if had <= at:
            if lacks_leaves:
                raise CorruptionError(
                    f"{row.destination_region} gave receipts for {row.stream} shard {row.shard} up to offset {received - 1}, and its audit log has what lies below {logged}: the log was rolled back.",
                    code=Code.ROLLED_BACK,
                    hint=f"Have {row.destination_region} restore its log's newest copy; nothing crosses until then. Where there is none, docs/operations.md says how to go on.",
                )
            return
        said = (
            f"{row.destination_region} had {row.stream} shard {row.shard} up to offset {had - 1}, and now has what lies below "
            f"{at}: {row.destination_stream} was deleted there, restored from an older copy, or lost records."
        )
        if lacks_leaves:
            # Whoever accepts that decides about more than records.
            said += f" Its audit log was rolled back with them: it has what lies below {logged}, and there are receipts for more."
        cut = Cut(source.statement.epoch_at(at), at)
        raise self._truncated(said, source.live.incarnation, account, cut)

    def log_elsewhere(self, trail: Trail, opened: IngestOpened) -> None:
        """Offsets that this log knows nothing of, and the destination says that it has: another bridge brought them, or it is not so.
        The GAP leaf says whose word it is, and the report holds the ingress log to it. Where another bridge brought a part of what this
        one announced, or the destination goes back into what this one has as a gap, it begins where that batch or gap does: none counts
        in part (`audit.accounting`). Under the grant that this log accounts for, it takes the place of what this bridge announced and another one brought.

        Raises UnavailableError where that goes further than the source, RequestError(CONFLICT) where it would cut in two what was announced under this grant."""
        source, context, row = self.source, self._context, self._link.row
        if self._between is not None:
            self._log_brought(self._between.incarnation, self._between.first, source.begins_at)
        account = context.ledger.shard(self._link.link_shard, source.live.incarnation)
        position, live = opened.position, source.live.incarnation
        announced = [
            each for each in trail.positions.unanswered(self._link.link_shard) if each.incarnation == live
        ]
        if account is None:
            known = source.begins_at
        elif account.grant_id != row.grant:
            known = account.known_to(position, announced)
        elif opened.brought == LOGGED_UNTOLD:
            # A destination that is further, and does not say whose work that is, is refused (bridge.link).
            return
        else:
            known = account.brought_from(position, opened.brought, announced)
        if position <= known:
            return
        if position > source.statement.log_end:
            raise UnavailableError(
                f"{row.destination_region} says that it has {row.stream} shard {row.shard} up to offset {position - 1}, and the log of {source.statement.region} ended at "
                f"{source.statement.log_end} when the link opened.",
                retry_after_ms=1_000,
            )
        self._log_brought(live, known, position)

    def _log_brought(self, incarnation: bytes, first: int, end: int) -> None:
        """By another bridge, as the destination says. A leaf for each of the source's newest epochs there, by its statement, to which the destination held what it took: else this log could not say where
        histories part that part below what this bridge reads itself."""
        template = msgspec.structs.replace(
            self._template(incarnation),
            sentence=f"{self._link.row.destination_region} says that it has them; this bridge did not bring them.",
        )
        starts = [
            each.first_offset for each in self.source.statement.epochs if first < each.first_offset < end
        ]
        bounds, leaves = [first, *starts[-EPOCHS_MAX:], end], list[Leaf]()
        for at, after in pairwise(bounds):
            # The earliest range may be of many epochs: of the last of these.
            epoch = self.source.statement.epoch_at(after - 1)
            of_epoch = msgspec.structs.replace(template, source_epoch=epoch)
            leaves.append(gap_leaf(of_epoch, GapKind.ELSEWHERE, at, after - 1, self._context.clock_ms()))
        self._context.append(leaves, lambda index, error: None)

    def _truncated(
        self, said: str, incarnation: bytes, account: ShardAccount | None, cut: Cut
    ) -> CorruptionError:
        """The link stops until an operator decides: alarm, GAP leaf (once), and the error that ends the session. What this log does not
        account for, another bridge carried, and this one's log has nothing to say of it."""
        context, row = self._context, self._link.row
        self._memory.truncation = said
        self._memory.cut = CutState(self.source.live.incarnation, cut.epoch, cut.offset)
        last = -1 if account is None else account.accounted_to - 1
        if account is not None and cut.offset <= last and (cut.offset, last) not in account.truncated:
            log.error("link %s %s/%d: %s", row.grant, row.stream, row.shard, said)
            self._memory.stats.gaps += last + 1 - cut.offset
            template = msgspec.structs.replace(
                self._template(incarnation),
                source_epoch=account.read[-1].epoch if account.read else 0,
                sentence=said,
            )
            leaf = gap_leaf(template, GapKind.TRUNCATION, cut.offset, last, context.clock_ms())
            context.append([leaf], lambda index, error: None)
        return CorruptionError(
            said,
            code=Code.TRUNCATED,
            hint="Put the newest copy back; or go on from there, which the logs of both regions will say: felix bridge "
            f"resume {row.grant} --accept-truncation.",
        )

    def first_epoch(self, trail: Trail) -> int:
        """The epoch of what is likely to be sent first; `_deal` opens anew where it is another."""
        source = self.source
        account = self._context.ledger.shard(self._link.link_shard, source.live.incarnation)
        first = account.accounted_to if account is not None else source.begins_at
        first = min([first, *(found.first_offset for found in self.unanswered(trail))])
        return source.statement.epoch_at(first)

    def unanswered(self, trail: Trail, opened: IngestOpened | None = None) -> list[Announced]:
        """INTENTs of this grant and incarnation without an ACK; with what the destination opened, those that it can still answer: what another bridge brought has no receipt for
        this one."""
        live = self.source.live.incarnation
        found = [
            Announced(each.first_offset, each.last_offset, each.envelope_sha256)
            for each in trail.positions.unanswered(self._link.link_shard)
            if each.incarnation == live and each.grant_id == self._link.row.grant
        ]
        if opened is None or opened.brought == LOGGED_UNTOLD:
            return found
        return [each for each in found if not opened.brought <= each.first_offset < opened.position]

    def _template(self, incarnation: bytes) -> Header:
        row, context = self._link.row, self._context
        assert row.export is not None
        return Header(
            kind=Kind.GAP,
            side=Side.EGRESS,
            time_ms=context.clock_ms(),
            source_region=context.source.region,
            destination_region=row.destination_region,
            bridge=str(context.bridge),
            stream=row.stream,
            destination_stream=row.destination_stream,
            shard=row.shard,
            incarnation=incarnation,
            grant_id=row.grant,
            terms_hash=bytes.fromhex(row.export.terms_hash),
        )

    def goes_back(self) -> bool:
        """Whether the shard crosses under another incarnation by now: a resend was asked for."""
        source = self.source
        if self._link.row.accepted == source.accepted:
            return False
        lives = self._lives(source.statement.incarnation, self._link.row)
        return lives[-1].incarnation != source.live.incarnation
