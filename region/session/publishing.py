"""A publish stream: batches in, acknowledgements out on the control stream.

The broker reads a batch's header and checks its sums; it never looks into a record. Every batch is counted
against the session's publish credit until it is in the log (or refused), so what a session can make the broker
hold is bounded by its window.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from felix.batch import FLAG_SEALED, PRODUCER_ID_MAX, decode_batch
from felix.errors import Code, FelixError, NotLeaderError, ProtocolError, RequestError, UnavailableError
from felix.frames import (
    CONTROL_BYTES_MAX,
    FRAME_HEADER_BYTES,
    AppendedBody,
    Frame,
    FrameDecoder,
    FrameType,
    decode_condition,
)
from felix.messages import OpenPublisher, PublisherOpened, decode_request
from felix.names import StreamName
from felix.settings import NO_VIEWS, QueueSettings, Views
from policy.access import Verb
from region.broker import Broker
from region.limits.quota import Meter
from region.log.producers import BATCHES_IN_FLIGHT_MAX
from region.log.shard import Appended
from region.ports import Publishing
from region.streams.hosted import ELSEWHERE_RETRY_MS, HostedStream

PUBLISH_WINDOW_BYTES: Final = 8 << 20
"""Publish credit of one session: covers a fast path's delay. Taken from the broker's budget with the first publisher, so
that sessions which only read cost none. A tenant whose rate pays less in a second keeps to the smaller one."""


_VIEWS: Final = {"queue": Views(queue=QueueSettings())}


class PublishStream:
    """One client-opened unidirectional stream."""

    __slots__ = (
        "_acks",
        "_broker",
        "_decoder",
        "_incarnation",
        "_meter",
        "_partial",
        "_refusal",
        "_refused",
        "_request_held",
        "_rests_on_commits",
        "_session",
        "_stream",
        "name",
    )

    def __init__(self, broker: Broker, session: Publishing, refusal: FelixError | None = None) -> None:
        """`refusal`: what the opening of this stream is answered with, where the session has too many."""
        self._broker = broker
        self._session = session
        self._refusal = refusal
        self._partial = 0
        self._request_held = 0
        self._refused = False
        self._decoder = FrameDecoder(frozenset({FrameType.REQUEST, FrameType.BATCH, FrameType.CONDITIONAL}))
        self._stream: HostedStream | None = None
        self._incarnation = b""
        self._acks = True
        self._meter: Meter | None = None
        self._rests_on_commits = False
        self.name: StreamName | None = None

    def data(self, data: bytes, end: bool) -> None:
        for frame in self._decoder.feed(data):
            if self._refused:
                return  # what was sent without waiting for the answer
            if frame.type is FrameType.REQUEST:
                self._open(frame)
            else:
                self._batch(frame)
        self._hold_partial()
        if end:
            self._decoder.finish()
            self._session.end_role(self)
            self.closed()

    def _hold_partial(self) -> None:
        """A batch counts against the credit while it comes in, not only once it is whole."""
        held = self._decoder.held_bytes
        # Until it is opened, a request is expected, which needs no credit.
        request = min(held, FRAME_HEADER_BYTES + CONTROL_BYTES_MAX) if self.name is None else 0
        if request != self._request_held:
            self._session.hold_request(request - self._request_held)
            self._request_held = request
        held -= request
        if held != self._partial:
            change, self._partial = held - self._partial, held
            self._session.hold_partial(change)

    def _open(self, frame: Frame) -> None:
        request = decode_request(frame.body)
        if self.name is not None or not isinstance(request, OpenPublisher):
            raise ProtocolError("A publish stream begins with one OpenPublisher.", code=Code.STATE)
        session = self._session
        try:
            if self._refusal is not None:
                raise self._refusal
            if request.acks not in ("all", "none"):
                raise RequestError(f"acks is {request.acks!r}.", hint="Use all or none.")
            name = StreamName.parse(request.stream)
            assert session.identity is not None
            self._broker.require(session.identity, Verb.PUBLISH, name)
            stream = self._broker.use_stream(name, Verb.PUBLISH, _VIEWS.get(request.made_as, NO_VIEWS))
            self._broker.require_led(stream, commits=True)
            self._meter = meter = session.meter_of(name.tenant)
            session.reserve_publishing(wide=meter.publish_rate >= PUBLISH_WINDOW_BYTES)
        except (RequestError, UnavailableError) as error:
            session.refuse(frame.correlation, error)
            session.end_role(self)
            self._refused = True
            self.closed()
            return
        self.name, self._stream, self._incarnation = name, stream, stream.incarnation
        self._acks = request.acks == "all"
        self._rests_on_commits = stream.rests_on_commits
        session.answer(
            frame.correlation, PublisherOpened(stream.shard_count, stream.incarnation, BATCHES_IN_FLIGHT_MAX)
        )

    def _batch(self, frame: Frame) -> None:
        if self.name is None:
            raise ProtocolError("A batch came before its publisher was opened.", code=Code.STATE)
        session = self._session
        size = FRAME_HEADER_BYTES + len(frame.body)
        session.publish_window.receive(size)
        expected_offset, body = None, frame.body
        if frame.type is FrameType.CONDITIONAL:
            expected_offset, body = decode_condition(body)
        if self._stream is None:
            # Its right was taken away, or the stream is gone: batches that were on their way are answered one by one.
            self._finish(frame.correlation, size, 0, 0.0, _closed())
            return
        meter = self._meter
        assert meter is not None
        try:
            batch = decode_batch(body)
            if batch.header.flags & FLAG_SEALED:
                raise RequestError(
                    "A producer's batch is not sealed; the broker seals.", code=Code.BATCH_MALFORMED
                )
            if batch.header.producer_id > PRODUCER_ID_MAX:
                raise RequestError(
                    "A producer id of more than 63 bits is the broker's own.", code=Code.BATCH_MALFORMED
                )
            if batch.header.is_bridged:
                raise RequestError(
                    "A producer's batch says that a bridge brought it; the broker says that.",
                    code=Code.BATCH_MALFORMED,
                )
            log = self._stream.shard(batch.header.shard)
            if self._stream.incarnation != self._incarnation:
                raise _elected_anew(self.name)
            refusal = meter.refusal(size)
            if refusal is not None:
                raise refusal
            records = batch.header.records
            throttle = meter.published(size, records)
            due_s = 0.0
            if throttle is not None:
                due_s = asyncio.get_running_loop().time() + throttle.wait_s
                session.throttled(throttle)
            done = partial(self._finish, frame.correlation, size, records, due_s)
            tracing = self._broker.tracing
            log.append_nowait(
                batch,
                done if tracing is None else tracing.around(str(self.name), batch, done),
                expected_offset=expected_offset,
            )
        except FelixError as error:
            self._finish(frame.correlation, size, 0, 0.0, error)

    def _finish(
        self, correlation: int, size: int, records: int, due_s: float, result: Appended | FelixError
    ) -> None:
        """`records`: as many as were charged; `due_s`: when the credit goes back, where a rate is used up."""
        session = self._session
        window = session.publish_window
        if isinstance(result, FelixError):
            result = self._broker.refusal_of_append(result)
        elif not self._rests_on_commits:
            # In the log, and perhaps not in that of whoever leads by now.
            result = self._broker.fence() or result
        if records and self._meter is not None and isinstance(result, FelixError):
            self._meter.not_published(size, records)
            due_s = 0.0
        session.finish_batch(size, due_s)
        if session.ended:
            return
        if isinstance(result, FelixError):
            assert self.name is not None, "batches come behind OpenPublisher"
            session.refuse(correlation, named(self.name, result))
            session.send_publish_credit()
        elif self._acks:
            body = AppendedBody(result.base_offset, result.append_time_ms, window.announce(), result.offsets)
            session.send_control(body.encode(correlation))
        elif window.announcement_due:
            session.send_publish_credit()

    @property
    def meter(self) -> Meter | None:
        """What is published is charged to it."""
        return self._meter

    def pump(self) -> None: ...

    def rights_changed(self) -> None:
        session = self._session
        if self.name is None or self._stream is None:
            return
        assert session.identity is not None
        if not self._broker.allows(session.identity, Verb.PUBLISH, self.name) or self._stream.deleted:
            self._stream = None

    def closed(self) -> None:
        self._stream = None
        self._session.hold_request(-self._request_held)
        self._request_held = 0
        partial, self._partial = self._partial, 0
        self._session.publisher_closed(self, partial)


def named(name: StreamName, error: FelixError) -> FelixError:
    """The refusal of a batch, which says of which stream nobody leads here any more: whoever sent it then asks who does, and does not try it here
    again. A batch that was under way when its leader was deposed is refused by the log, which knows no name."""
    if error.code is not Code.NOT_LEADER or isinstance(error, NotLeaderError):
        return error
    return NotLeaderError(
        error.sentence, hint=error.hint, retry_after_ms=ELSEWHERE_RETRY_MS, stream=str(name)
    )


def _elected_anew(name: StreamName) -> NotLeaderError:
    """Of an ephemeral stream, which begins again with each election."""
    return NotLeaderError(
        f"{name} began anew after this publisher was opened.",
        hint="Open it again, as the SDK does by itself.",
        retry_after_ms=ELSEWHERE_RETRY_MS,
        stream=str(name),
    )


def _closed() -> RequestError:
    return RequestError(
        "This publisher was closed: the right to publish was taken away, or the stream is gone.",
        code=Code.NOT_FOUND_OR_FORBIDDEN,
        hint="Ask the region's operator for the right, then open the publisher again.",
    )
