"""Sentences of what is wrong, as many as an answer has room for. Some repeat what others have written, into the metadata store or beside a log: none of that may keep
all the rest from being told. Pure. Caller: region.session.requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SENTENCE_MAX: Final = 2_000
"""characters of one sentence"""
TOLD_BYTES_MAX: Final = 48 * 1024
"""of all sentences of one kind, in UTF-8: with three kinds, a little more than half of what one answer may take"""


def told(sentences: Sequence[str]) -> list[str]:
    """The first ones, each cut to `SENTENCE_MAX`; a last one says how many there was no room for."""
    found, left_bytes = list[str](), TOLD_BYTES_MAX
    for sentence in sentences:
        short = sentence if len(sentence) <= SENTENCE_MAX else f"{sentence[: SENTENCE_MAX - 1]}…"
        left_bytes -= len(short.encode(errors="replace"))
        if left_bytes < 0:
            found.append(f"{len(sentences) - len(found):,} more are not told here.")
            break
        found.append(short)
    return found
