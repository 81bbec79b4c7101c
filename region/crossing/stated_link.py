"""A link as its agent asks for it and the source region states it: what it crosses under now, and where it goes on at the destination. Pure.

The source states its shard's own incarnation and history (audit.stream_statement); the truncations that were accepted say which incarnation
lives now; the destination's slot says what landed (region.crossing.link_slot). Who opens an ingest stream asks here (region.crossing.ingest).

Invariant: a link goes on only where the source's history is the one that was read, or where it parts from it by a truncation that was
accepted and that leaves out nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from audit.stream_statement import Span, StreamStatement, cut_of, parts_below
from felix.errors import Code, CorruptionError, RequestError
from felix.messages import OpenIngest
from policy.truncation import Live
from region.crossing.link_slot import LinkRecord, Position


class Incarnations(Protocol):
    """What is asked of `policy.grant.GrantBook`."""

    def incarnations(
        self, grant: str, stream: str, shard: int, incarnation: bytes, begun: Iterable[bytes] = ()
    ) -> tuple[Live, ...]: ...


class StatedLink(NamedTuple):
    """See the module. `book`: as it is now."""

    request: OpenIngest
    statement: StreamStatement
    book: Incarnations

    def check(self) -> None:
        """Raises RequestError where the statement is about something else than the request."""
        request, statement = self.request, self.statement
        claimed = (request.from_region, request.stream, request.shard, request.shards)
        if (statement.region, statement.stream, statement.shard, statement.shards) != claimed:
            raise RequestError(
                f"The stream statement is about shard {statement.shard} of {statement.shards} of {statement.stream} in "
                f"{statement.region}, the request about shard {request.shard} of {request.shards} of {request.stream}."
            )
        if not statement.has_epoch(request.epoch):
            raise RequestError(
                f"{request.from_region} does not state that {request.stream} has an epoch {request.epoch}."
            )

    @property
    def lives(self) -> tuple[Live, ...]:
        """What the shard crossed under, the newest last, if the one that the request names is among them."""
        return self._incarnations(self.request.incarnation)

    def _incarnations(self, begun: bytes) -> tuple[Live, ...]:
        request = self.request
        return self.book.incarnations(
            request.grant, request.stream, request.shard, self.statement.incarnation, (begun,)
        )

    def live(self) -> Live:
        """What the shard crosses under now, by the source's statement and the truncations that were accepted. Of several words that end
        one incarnation the bridge goes by the one that its log has; what landed here is under it, or is refused (`go_on`).

        Raises RequestError where the request names another incarnation.
        """
        request, live = self.request, self.lives[-1]
        if live.incarnation != request.incarnation:
            raise RequestError(
                f"{request.from_region} does not state that {request.stream} has the incarnation "
                f"{request.incarnation.hex()}, nor was a truncation accepted that began it.",
                code=Code.CONFLICT,
                hint="If a truncation was just accepted, its document may still be on its way.",
            )
        return live

    def begin(self, latest_ms: int, old: bytes | None = None) -> LinkRecord:
        """The record of a link of which nothing is held: it begins where the source's log begins, since what was gone before it was granted
        is no gap. `latest_ms`: the latest time that a statement counts as of; `old`: its position as version 0.1 recorded it.

        Raises as `live`, and CorruptionError where `old` cannot be read.
        """
        begun = self._begun(self.live(), latest_ms)
        return begun if old is None else begun._replace(position=Position.decode(old))

    def _begun(self, live: Live, latest_ms: int) -> LinkRecord:
        request, statement = self.request, self.statement
        start = statement.log_start if live.accepted is None else live.accepted.truncation.offset
        return LinkRecord(
            request.from_region, request.stream, live.incarnation, statement.incarnation,
            min(statement.time_ms, latest_ms), 0, 0, Position(start),
        )  # fmt: skip

    def go_on(self, held: LinkRecord, latest_ms: int) -> LinkRecord:
        """The record to go on with behind what the slot holds, `latest_ms` as in `begin`.

        Raises as `live`; CorruptionError(TRUNCATED) where the source's history is not the one that was recorded, CorruptionError(TRUNCATION_UNKNOWN)
        where what landed crossed under a word that is not known, RequestError(CONFLICT) for a statement older than the newest one shown.
        """
        request, statement = self.request, self.statement
        live = self.live()
        if statement.time_ms < min(held.statement_ms, latest_ms):
            raise RequestError(
                f"The statement about {request.stream} is older than the newest one that was shown.",
                code=Code.CONFLICT,
                hint=f"Ask {request.from_region} for a new one; if its clock was set back, wait until it has caught up.",
            )
        begun = self._begun(live, latest_ms)
        if statement.incarnation != held.own:
            # The stream was created again, and the older one's place is free.
            return begun
        self._check_history(held, live)
        if held.live == live.incarnation:
            return held._replace(statement_ms=begun.statement_ms)
        return begun

    def _check_history(self, held: LinkRecord, live: Live) -> None:
        """Raises CorruptionError: TRUNCATED where the source's log is not the one that was read, and nobody accepted that; TRUNCATION_UNKNOWN as `go_on`."""
        request, statement = self.request, self.statement
        region, where = request.from_region, f"shard {request.shard} of {request.stream}"
        read = Span(held.epoch, held.read_to)
        cut = cut_of(statement, (read,)) if held.epoch else None
        shared = held.position.next_offset if cut is None else parts_below(statement, read)
        goes_on = live.accepted.truncation.offset if live.accepted is not None else 0
        if held.live == live.incarnation:
            if cut is not None:
                raise CorruptionError(
                    f"{region} cut {where} back to offset {shared} or further; records up to {held.read_to - 1}, of epoch "
                    f"{held.epoch}, had crossed.",
                    code=Code.TRUNCATED,
                    hint=f"An operator of {region} decides: felix bridge resume {request.grant} --accept-truncation.",
                )
            return
        if all(each.incarnation != held.live for each in self.lives):
            if any(each.incarnation == held.live for each in self._incarnations(held.live)):
                raise RequestError(
                    f"{where} of {region} goes on by another word than the bridge names: what landed here crossed under that.",
                    code=Code.CONFLICT,
                    hint="The bridge tries the other one by itself.",
                )
            raise CorruptionError(
                f"{where} of {region} crossed under a truncation that is not known here any more.",
                code=Code.TRUNCATION_UNKNOWN,
                hint=f"In {region}: felix bridge sign-again {request.grant}.",
            )
        if cut is not None and live.accepted is not None and live.accepted.is_resend:
            raise CorruptionError(
                f"{region} cut {where} back to offset {shared} or further, and then asked for a resend; records up to "
                f"{held.read_to - 1}, of epoch {held.epoch}, had crossed.",
                code=Code.TRUNCATED,
                hint=f"An operator of {region} decides: felix bridge resume {request.grant} --accept-truncation.",
            )
        most = min(held.position.next_offset, shared)
        if goes_on > most:
            raise CorruptionError(
                f"{where} was accepted to go on at offset {goes_on}, and is known here up to {most}: records between would "
                "never cross.",
                code=Code.TRUNCATED,
                hint=f"Accept it at {most}: felix bridge resume {request.grant} --accept-truncation.",
            )
