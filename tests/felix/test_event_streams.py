"""The frames of subscriptions, from the streams on which they come to who claimed them."""

import pytest

from felix.errors import Code, FelixError, ProtocolError
from felix.event_streams import UNCLAIMED_SLACK_BYTES, EventStreams
from felix.frames import Frame, FrameType, encode_frame
from felix.messages import Subscribed, encode_message

STREAM = 3
SUBSCRIPTION = 7


class _Sink:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.is_over = False

    def event(self, frame: Frame) -> None:
        self.bodies.append(bytes(frame.body))

    def event_end(self, error: FelixError | None) -> None:
        self.is_over = True


def named() -> bytes:
    return encode_message(FrameType.ANSWER, Subscribed(SUBSCRIPTION, "orders", bytes(16), {}), 1)


def batch(body: bytes) -> bytes:
    return encode_frame(FrameType.BATCH, body)


def test_frames_that_came_before_their_subscription_was_claimed_come_first() -> None:
    streams, sink = EventStreams(), _Sink()
    streams.receive(STREAM, named() + batch(b"one"), False)
    streams.claim(SUBSCRIPTION, sink)
    streams.receive(STREAM, batch(b"two"), True)
    assert sink.bodies == [b"one", b"two"] and sink.is_over and not streams.has_readers


def test_a_stream_that_ended_before_it_was_claimed_ends_with_the_claim() -> None:
    streams, sink = EventStreams(), _Sink()
    streams.receive(STREAM, named() + batch(b"one"), True)
    streams.claim(SUBSCRIPTION, sink)
    assert sink.bodies == [b"one"] and sink.is_over


def test_what_nobody_claims_is_bounded_by_the_credit_that_was_asked_for() -> None:
    streams = EventStreams()
    streams.subscribing(100)
    streams.receive(STREAM, named() + batch(bytes(UNCLAIMED_SLACK_BYTES + 100)), False)
    streams.subscribing(-100)
    with pytest.raises(ProtocolError) as caught:
        streams.receive(STREAM, batch(b"x"), False)
    assert caught.value.code is Code.CREDIT_EXCEEDED


@pytest.mark.parametrize("is_known", [True, False], ids=["its stream had come", "its stream comes later"])
def test_frames_of_a_subscription_that_was_forgotten_are_dropped(is_known: bool) -> None:
    streams, sink = EventStreams(), _Sink()
    if is_known:
        streams.receive(STREAM, named(), False)
        streams.claim(SUBSCRIPTION, sink)
    streams.forget(SUBSCRIPTION)
    streams.receive(STREAM, (b"" if is_known else named()) + batch(b"late"), True)
    assert sink.bodies == [] and not sink.is_over


def test_a_stream_that_does_not_say_whose_it_is_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolError):
        EventStreams().receive(STREAM, batch(b"whose?"), False)


def test_a_reset_ends_the_subscription() -> None:
    streams, sink = EventStreams(), _Sink()
    streams.receive(STREAM, named(), False)
    streams.claim(SUBSCRIPTION, sink)
    streams.reset(STREAM)
    assert sink.is_over and not streams.has_readers
