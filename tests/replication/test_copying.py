"""A follower's side of a copy: what it asks, what it takes, and when the next question goes."""

from __future__ import annotations

from region.log.origin import Origin
from region.log.point import LogPoint
from region.replication.copying import COPY_MS, Collect, Copying, Piece, Replace
from region.replication.origin import Beginning, Closed, encode_beginning
from region.replication.wire import OriginAsked, OriginTold, PieceAsked, PieceTold

ORIGIN = OriginAsked(7, "07" * 8, 3, 11, 1)
CLOSED = (Closed(0, 2, 5), Closed(40, 0, 3))
BEGINNING = Beginning(Origin(LogPoint(60)), (), CLOSED)


def asked_of(wanted: PieceAsked | Replace | None) -> PieceAsked:
    assert isinstance(wanted, PieceAsked)
    return wanted


def collecting(now: int = 0) -> tuple[Copying, PieceAsked]:
    """One that has asked for the first piece."""
    copying = Copying("a", ORIGIN, now)
    job = copying.take(OriginTold(ORIGIN, encode_beginning(BEGINNING)), LogPoint(60))
    assert isinstance(job, Collect)
    return copying, asked_of(copying.go_on(job, now))


def test_segments_come_piece_by_piece_and_the_next_is_asked_for_once_the_disk_has_one() -> None:
    copying, asked = collecting()
    files: dict[int, bytes] = {}
    for base, generation, position, data in (
        (0, 2, 0, b"abc"),
        (0, 2, 3, b"de"),
        (40, 0, 0, b"xyz"),
    ):
        assert asked == (*ORIGIN, base, generation, position)
        told = PieceTold(asked, data)
        assert copying.awaits("a", told)
        piece = copying.take(told, LogPoint(60))
        assert isinstance(piece, Piece)
        assert not copying.awaits("a", told), "sent twice by the network"
        assert copying.go_on(Piece(piece.closed, piece.position, data), 0) is None, "of a copy before"
        files[base] = files.get(base, b"") + piece.data
        wanted = copying.go_on(piece, 0)
        if isinstance(wanted, PieceAsked):
            asked = wanted
    assert wanted == Replace(BEGINNING)
    assert files == {0: b"abcde", 40: b"xyz"}


def test_a_log_that_was_not_compacted_is_begun_at_once() -> None:
    copying = Copying("a", ORIGIN, 0)
    beginning = Beginning(Origin(LogPoint(60)), ())
    assert copying.take(OriginTold(ORIGIN, encode_beginning(beginning)), LogPoint(0)) == Replace(beginning)


def test_only_the_answer_to_the_last_question_counts_and_from_who_was_asked() -> None:
    copying, asked = collecting()
    assert not copying.awaits("b", PieceTold(asked, b"abc"))
    assert not copying.awaits("a", OriginTold(ORIGIN, b""))
    for other in (
        asked._replace(ask=10),
        asked._replace(epoch=8),
        asked._replace(generation=3),
        asked._replace(position=1),
    ):
        assert not copying.awaits("a", PieceTold(other, b"abc"))


def test_a_copy_comes_to_nothing_where_a_segment_is_gone_or_the_log_begins_below_what_is_committed() -> None:
    for data in (b"", b"abcdef"):
        copying, asked = collecting()
        assert copying.take(PieceTold(asked, data), LogPoint(60)) is None
    for payload in (b"", encode_beginning(BEGINNING)):
        assert Copying("a", ORIGIN, 0).take(OriginTold(ORIGIN, payload), LogPoint(61)) is None


def test_it_is_late_while_the_leader_does_not_answer_and_not_while_the_disk_is_at_it() -> None:
    copying, asked = collecting(now=5_000)
    assert not copying.is_late(5_000 + COPY_MS) and copying.is_late(5_001 + COPY_MS)
    piece = copying.take(PieceTold(asked, b"abc"), LogPoint(60))
    assert isinstance(piece, Piece)
    assert not copying.is_late(100 * COPY_MS)
    asked_of(copying.go_on(piece, 100 * COPY_MS))
    assert copying.is_late(101 * COPY_MS + 1)
