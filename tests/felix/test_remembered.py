"""Answers that are remembered: made once while there is room, and never more of them than there is."""

from __future__ import annotations

import pytest

from felix.remembered import ENTRY_BYTES, Remembered, digest_of


def test_an_answer_is_made_once_while_it_is_asked_for() -> None:
    made: list[int] = []
    kept = Remembered[int](20 * ENTRY_BYTES)
    for number in range(1_000):
        for question in (7, number):
            digest = digest_of(b"%d" % question)
            assert kept.ask(digest, lambda q=question: made.append(q) or q, lambda _: 0) == question  # type: ignore[misc, func-returns-value]
        assert kept.bytes_held <= 21 * ENTRY_BYTES
    assert made.count(7) == 1 and len(made) == 1_000


def test_what_is_held_is_bounded_by_its_bytes_and_no_question_is_held() -> None:
    kept = Remembered[bytes](1 << 20)
    for number in range(200):
        question = b"%d" % number + bytes(255_000)
        kept.ask(digest_of(question), lambda: bytes(50_000), len)
        assert kept.bytes_held <= (1 << 20) + 2 * (50_000 + ENTRY_BYTES)
        assert all(len(each) == 32 for each in (*kept._young, *kept._old))


def test_what_raises_is_asked_again_and_parts_are_not_run_together() -> None:
    kept = Remembered[int](1 << 20)

    def fails() -> int:
        raise ValueError

    with pytest.raises(ValueError, match=""):
        kept.ask(b"a" * 32, fails, lambda _: 0)
    assert kept.ask(b"a" * 32, lambda: 1, lambda _: 0) == 1
    assert digest_of(b"ab", b"c") != digest_of(b"a", b"bc") != digest_of("a", b"b", b"c")
