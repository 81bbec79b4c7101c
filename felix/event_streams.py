"""The event streams of one session: the frames that the broker sends to its subscriptions, each on a stream of its own.

A stream says first which subscription it is of. Its frames are kept until that subscription is claimed, which may be a moment later: the answer that names
it comes on the control stream.

Invariants:
- frames of a subscription reach its sink in order, those that came before it was claimed first;
- what is kept unclaimed is bounded by the credit that the subscriptions under way gave.

Used by felix.link alone.
"""

from __future__ import annotations

from typing import Final, Protocol

from felix.errors import Code, FelixError, protocol_breach
from felix.frames import Frame, FrameDecoder, FrameType
from felix.messages import Subscribed, decode_answer

UNCLAIMED_SLACK_BYTES: Final = 1 << 16
"""Above the credit given: notices, which cost none."""

_EVENT_TYPES: Final = frozenset({FrameType.ANSWER, FrameType.BATCH, FrameType.GAP, FrameType.ERROR})


class EventSink(Protocol):
    """Where an event stream's frames go (felix.subscription)."""

    def event(self, frame: Frame) -> None:
        """Raises ProtocolError where the frame breaks the protocol: the link ends."""

    def event_end(self, error: FelixError | None) -> None:
        """The stream is over; `error` is what the broker said, None where it said nothing."""


class _EventStream:
    """One event stream: its decoder, and its frames until a subscription claims them."""

    __slots__ = ("decoder", "dropped", "ended", "held", "sink", "subscription")

    def __init__(self) -> None:
        self.decoder = FrameDecoder(_EVENT_TYPES)
        self.subscription = 0
        self.sink: EventSink | None = None
        self.held: list[Frame] = []
        self.ended = False
        self.dropped = False


class EventStreams:
    """See the module."""

    __slots__ = ("_forgotten", "_sinks", "_streams", "_subscribing_bytes")

    def __init__(self) -> None:
        self._streams: dict[int, _EventStream] = {}
        self._sinks: dict[int, EventSink] = {}
        self._forgotten: set[int] = set()
        self._subscribing_bytes = 0

    @property
    def has_readers(self) -> bool:
        """Whether a subscription waits for frames."""
        return bool(self._sinks)

    def subscribing(self, credit_bytes: int) -> None:
        """A subscription is asked for with so much credit; taken back, as a negative number, once it was answered."""
        self._subscribing_bytes += credit_bytes

    def claim(self, subscription: int, sink: EventSink) -> None:
        """Send this subscription's frames to `sink`: those already received at once, later ones as they arrive. Raises what the sink does."""
        self._sinks[subscription] = sink
        for stream in list(self._streams.values()):
            if stream.subscription == subscription and stream.sink is None and not stream.dropped:
                stream.sink = sink
                held, stream.held = stream.held, []
                _deliver(sink, held)
                if stream.ended:
                    self._end(stream)

    def forget(self, subscription: int) -> None:
        """Nothing of this subscription is wanted any more; stragglers are dropped."""
        self._sinks.pop(subscription, None)
        seen = [stream for stream in self._streams.values() if stream.subscription == subscription]
        for stream in seen:
            _drop(stream)
        if not seen:
            self._forgotten.add(subscription)

    def receive(self, stream_id: int, data: bytes, end: bool) -> None:
        """Bytes of one event stream. Raises ProtocolError where they break the protocol."""
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = _EventStream()
        frames = [] if stream.dropped else stream.decoder.feed(data)
        if not stream.subscription and frames:
            self._name(stream, frames.pop(0))
        if stream.dropped:
            if end:
                del self._streams[stream_id]
            return
        if stream.sink is not None:
            _deliver(stream.sink, frames)
        elif frames:
            stream.held += frames
        if stream.sink is None:
            unclaimed = sum(
                len(frame.body) for each in self._streams.values() if each.sink is None for frame in each.held
            )
            if unclaimed > self._subscribing_bytes + UNCLAIMED_SLACK_BYTES:
                raise protocol_breach(
                    "An event stream carried more than its subscription asked for.", Code.CREDIT_EXCEEDED
                )
        if end:
            stream.decoder.finish()
            stream.ended = True
            if stream.sink is not None:
                self._end(stream)

    def reset(self, stream_id: int) -> None:
        """The broker gave the stream up."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None and stream.sink is not None:
            self._sinks.pop(stream.subscription, None)
            stream.sink.event_end(None)

    def clear(self) -> None:
        """The session is over; its subscriptions hear that from the link."""
        self._streams.clear()
        self._sinks.clear()

    def _name(self, stream: _EventStream, first: Frame) -> None:
        answer = decode_answer(first.body) if first.type is FrameType.ANSWER else None
        if not isinstance(answer, Subscribed):
            raise protocol_breach("An event stream does not begin with whose it is.")
        stream.subscription = answer.subscription
        if answer.subscription in self._forgotten:
            self._forgotten.discard(answer.subscription)
            _drop(stream)
            return
        stream.sink = self._sinks.get(answer.subscription)

    def _end(self, stream: _EventStream) -> None:
        for stream_id, each in list(self._streams.items()):
            if each is stream:
                del self._streams[stream_id]
        sink = self._sinks.pop(stream.subscription, None)
        if sink is not None:
            sink.event_end(None)


def _drop(stream: _EventStream) -> None:
    # It stays known until its end, so that late frames on it are not mistaken for those of a new stream.
    stream.dropped = True
    stream.sink = None
    stream.held.clear()


def _deliver(sink: EventSink, frames: list[Frame]) -> None:
    for frame in frames:
        sink.event(frame)
