"""Where a link goes on at its destination, by what the source states and what its slot holds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from audit.stream_statement import Epoch, StreamStatement
from felix.errors import Code, CorruptionError, FelixError, RequestError
from felix.messages import OpenIngest
from policy.truncation import Accepted, Live, Truncation, chain
from region.crossing.link_slot import LinkRecord, Position
from region.crossing.stated_link import StatedLink

REGION, STREAM = "us-east", "acme/ops/flights"
OWN = b"o" * 16
LATEST_MS = 5_000
HELD = LinkRecord(REGION, STREAM, OWN, OWN, 1_000, epoch=2, read_to=120, position=Position(120))


def accepted_at(offset: int) -> Accepted:
    return Accepted(
        Truncation(stream=STREAM, shard=0, incarnation=OWN.hex(), epoch=3, offset=offset), REGION, 900
    )


class Book:
    """With a truncation that was accepted, or none."""

    def __init__(self, accepted: Accepted | None) -> None:
        self._accepted = {} if accepted is None else {accepted.truncation.incarnation: [accepted]}

    def incarnations(
        self, grant: str, stream: str, shard: int, incarnation: bytes, begun: Iterable[bytes] = ()
    ) -> tuple[Live, ...]:
        return chain(incarnation, self._accepted, REGION, begun)


def stated(
    *, own: bytes = OWN, time_ms: int = 2_000, cut_at: int = 150, accepted: Accepted | None = None
) -> StatedLink:
    """Epoch 2 of the source's log stands up to `cut_at`, where epoch 3 began."""
    live = own if accepted is None else accepted.incarnation
    return StatedLink(
        OpenIngest("grant", REGION, STREAM, 0, 1, live, 3, b"", b"", b""),
        StreamStatement(
            region=REGION,
            stream=STREAM,
            incarnation=own,
            shards=1,
            shard=0,
            log_start=7,
            log_end=200,
            epochs=(Epoch(2, 0), Epoch(3, cut_at)),
            time_ms=time_ms,
        ),
        Book(accepted),
    )


def test_a_new_link_begins_where_the_sources_log_begins_and_at_the_latest_time_that_counts() -> None:
    assert stated().begin(LATEST_MS) == LinkRecord(REGION, STREAM, OWN, OWN, 2_000, 0, 0, Position(7))
    assert stated(time_ms=9_000).begin(LATEST_MS).statement_ms == LATEST_MS
    old = Position(44)
    assert stated().begin(LATEST_MS, old.encode()).position == old


def test_a_link_goes_on_behind_what_landed_and_one_of_a_stream_that_was_made_again_begins() -> None:
    assert stated().go_on(HELD, LATEST_MS) == HELD._replace(statement_ms=2_000)
    again = stated(own=b"n" * 16)
    assert again.go_on(HELD, LATEST_MS) == again.begin(LATEST_MS)


@pytest.mark.parametrize(
    ("link", "error", "code"),
    [
        (stated(time_ms=999), RequestError, Code.CONFLICT),
        (stated(cut_at=110), CorruptionError, Code.TRUNCATED),
        (stated(cut_at=110, accepted=accepted_at(115)), CorruptionError, Code.TRUNCATED),
    ],
    ids=["an older statement", "a log that was cut", "a truncation that leaves records out"],
)
def test_another_history_is_refused(link: StatedLink, error: type[FelixError], code: Code) -> None:
    with pytest.raises(error) as refused:
        link.go_on(HELD, LATEST_MS)
    assert refused.value.code is code


@pytest.mark.parametrize("instead", [None, accepted_at(108)])
def test_what_crossed_under_a_word_that_is_not_known_any_more_is_for_the_source_to_sign_again(
    instead: Accepted | None,
) -> None:
    """Whether or not another one was accepted instead."""
    held = HELD._replace(live=accepted_at(110).incarnation, epoch=3, read_to=115, position=Position(115))
    with pytest.raises(CorruptionError, match="not known here any more") as refused:
        stated(cut_at=110, accepted=instead).go_on(held, LATEST_MS)
    assert refused.value.code is Code.TRUNCATION_UNKNOWN
    assert refused.value.hint == "In us-east: felix bridge sign-again grant."
    assert stated(cut_at=110, accepted=accepted_at(110)).go_on(held, LATEST_MS).live == held.live


def test_where_a_truncation_was_accepted_it_goes_on_there() -> None:
    accepted = accepted_at(110)
    link = stated(cut_at=110, accepted=accepted)
    assert link.go_on(HELD, LATEST_MS) == LinkRecord(
        REGION, STREAM, accepted.incarnation, OWN, 2_000, 0, 0, Position(110)
    )
    unaccepted = link._replace(book=Book(None))
    with pytest.raises(RequestError) as refused:
        unaccepted.live()
    assert refused.value.code is Code.CONFLICT


def test_a_statement_about_another_shard_or_epoch_says_nothing() -> None:
    stated().check()
    for statement in ({"stream": "acme/ops/bags"}, {"shards": 2}, {"epochs": (Epoch(2, 0),)}):
        whole = stated().statement
        fields = {name: getattr(whole, name) for name in whole.__struct_fields__} | statement
        with pytest.raises(RequestError):
            stated()._replace(statement=StreamStatement(**fields)).check()
