"""Whether a log still is the one that another region cosigned. Pure.

A size alone does not tell: a log that was put back to an older copy goes on from there, and may have grown past what was
cosigned of it by the time that it is asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from audit.checkpoint import Checkpoint
from audit.errors import RolledBackError
from audit.merkle import verify_consistency
from audit.note import parse_note
from felix.errors import TamperError


def require_continued(
    cosigned: bytes, current: bytes, proof: Sequence[bytes], *, log: str, witness: str, hint: str
) -> None:
    """`cosigned`: the checkpoint note that the witness remembers; `current`: the log's own, not smaller; `proof`: of consistency
    from the one to the other. `log` and `witness` as the sentence names them.

    No signature is looked at: each note is the word of the side that gave it over its session, and either could stop a link
    by refusing it. Raises RolledBackError where the log is another one, TamperError where a note is none.
    """
    old, new = (Checkpoint.parse(parse_note(note).text) for note in (cosigned, current))
    try:
        verify_consistency(old.size, old.root, new.size, new.root, proof)
    except TamperError as error:
        raise RolledBackError(
            f"{witness} cosigned {old.size} leaves of {log} that are not those which it has now: it was rolled back, and went "
            "on from there.",
            hint=hint,
        ) from error
