"""What one witness was asked about one log, and when it is asked again. Pure; times in ms of any clock that does not go back.

An answer counts for what the log then shows: a line of each key that the witness is known by. While it lacks one, the witness is asked about the same
checkpoint again after a pause that doubles up to PAUSE_MS_MAX (of a region's own witness, REGION_PAUSE_MS_MAX), and about another checkpoint at once. Callers: audit.submission, bridge.region_log.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from audit.note import Note, VerifierKey, parse_note
from felix.errors import FelixError, TamperError

PAUSE_MS: Final = 3_000
"""After the first answer about a checkpoint that lacked something; doubled with each further one."""
PAUSE_MS_MAX: Final = 60_000
REGION_PAUSE_MS_MAX: Final = 12_000
"""Of a witness that refuses a log until its people have compared a bundle with the log's new keys: nothing says when that was, and of a log at rest the checkpoint stays the same."""


class Asked:
    """One witness, one log. A checkpoint is named by its note's text."""

    __slots__ = ("_again_ms", "_brought", "_error", "_pause_ms", "_pause_ms_max", "_text")

    def __init__(self, pause_ms_max: int = PAUSE_MS_MAX) -> None:
        self._pause_ms_max = pause_ms_max
        self._brought = ""
        self._text = ""
        """the checkpoint about which the last answer lacked something"""
        self._error: FelixError | None = None
        self._pause_ms = self._again_ms = 0

    def failure(self, text: str, now_ms: int) -> FelixError | None:
        """What the answer about this checkpoint lacked, as long as it is too early to ask again."""
        is_early = text == self._text and now_ms < self._again_ms
        return self._error if is_early else None

    def failed(self, text: str, error: FelixError, now_ms: int) -> None:
        """The answer about this checkpoint does not count, or not whole."""
        self._pause_ms = min(self._pause_ms_max, 2 * self._pause_ms) if text == self._text else PAUSE_MS
        self._text, self._error, self._again_ms = text, error, now_ms + self._pause_ms

    def was_brought(self, text: str) -> bool:
        """Whether a whole answer about this checkpoint was brought, and taken."""
        return text == self._brought

    def brought(self, text: str) -> None:
        """The log took a whole answer about this checkpoint. Whether it stands there, the log shows at the next look."""
        self._brought = text

    def stands(self) -> None:
        """All lines stand in the log."""
        self._brought, self._text, self._error = "", "", None


def answered_note(data: bytes, text: str, log: str, witness: str) -> Note:
    """The note that a witness answered with. `log` and `witness` as the sentence names them. Raises TamperError where it gave none, or one of another checkpoint than it was
    asked about."""
    if not data:
        raise TamperError(f"{witness} was asked to cosign {log}, and answered without a cosignature.")
    note = parse_note(data)
    if note.text != text:
        raise TamperError(f"{witness} was asked to cosign {log}, and answered with another checkpoint.")
    return note


def name_keys(keys: Iterable[VerifierKey]) -> str:
    """These keys for a person: name, key id and algorithm."""
    kinds = ((key, "ML-DSA-44" if key.algorithm.is_post_quantum else "Ed25519") for key in keys)
    return " and ".join(f"{key.name}+{key.key_id.hex()} ({kind})" for key, kind in kinds)
