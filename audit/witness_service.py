"""An outside witness's decisions: one request in, one answer out. Blocks on its state; calls must not overlap.

The order of checks, and the status of each, is that of https://c2sp.org/tlog-witness, add-checkpoint:

1. the request is whole (400); 2. the origin is known (404); 3. a trusted key signed, and no trusted key's signature is
bad (403); 4. the old size is not above the checkpoint's (400); 5. it is the one that was cosigned last (409, with that
size); 6. an empty tree has the empty tree's root (422); 7. the proof holds, and is empty where it must be (422); 8. the
checkpoint is stored, durably, unless another was stored meanwhile (409); 9. it is cosigned.

One thing more than the specification: a checkpoint with extension lines is refused (400, after step 3). It does not
recommend them, and a witness would keep and hand on a text that whoever runs a log has chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from audit.merkle import EMPTY_ROOT, verify_consistency
from audit.note import Note, NoteSigner, Verified, encode_note, encode_signatures, parse_note, verify_note
from audit.tree_head import parse_tree_head
from audit.witness_protocol import SIZE_TYPE, decode_request, encode_size
from audit.witness_sqlite import ConflictError, Held, WitnessState
from felix.errors import RequestError, TamperError, UnavailableError

log = logging.getLogger("felix.audit.witness")

TEXT: Final = "text/plain; charset=utf-8"


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    body: bytes
    content_type: str = TEXT


class WitnessService:
    """Answers for one witness."""

    def __init__(
        self, state: WitnessState, now_s: Callable[[], int], *, signers: tuple[NoteSigner, ...] = ()
    ) -> None:
        """`now_s`: POSIX seconds. `signers`: those of the state, unless a test gives others."""
        self._state, self._now_s = state, now_s
        self._signers = signers or state.signers
        self._trouble = ""
        """why it cannot cosign at the moment, as was said"""

    def add_checkpoint(self, body: bytes) -> Answer:
        """Check, store, cosign. Never raises for what a client sent, nor for a disk that does not answer."""
        try:
            answer = self._add_checkpoint(body)
        except UnavailableError as error:
            return self._cannot(error)
        if self._trouble and answer.status == 200:
            self._trouble = ""
            log.warning("checkpoints are cosigned again")
        return answer

    def _cannot(self, error: UnavailableError) -> Answer:
        if error.sentence != self._trouble:
            # Once: each log asks again and again.
            self._trouble = error.sentence
            log.error("%s", error)
        return _refuse(503, error.sentence)

    def _add_checkpoint(self, body: bytes) -> Answer:
        # 1. The request is whole.
        try:
            request = decode_request(body)
            note = parse_note(request.checkpoint)
            head = parse_tree_head(note.text)
        except (RequestError, TamperError) as error:
            return _refuse(400, error.sentence)
        # 2. The origin is known.
        known = self._state.log(head.origin)
        if known is None:
            return _refuse(404, "This witness does not know that log.")
        # 3. A trusted key signed it, and no trusted key's signature is bad.
        try:
            verified = verify_note(note, known.keys)
        except TamperError as error:
            return _refuse(403, error.sentence)
        if head.extensions:
            return _refuse(400, "This witness does not cosign checkpoints with extension lines.")
        # 4. The old size is not above the checkpoint's.
        if request.old > head.size:
            return _refuse(400, f"The old size {request.old} is above the checkpoint's {head.size}.")
        # 5. It is the one that was cosigned last.
        held = known.held
        if request.old != held.size:
            return _conflict(held)
        try:
            # 6. An empty tree has the empty tree's root.
            if head.size == 0 and head.root != EMPTY_ROOT:
                raise TamperError("A tree without leaves has another root.")
            # 7. The proof holds.
            if request.old == 0 and request.proof:
                raise TamperError("From the empty tree on, a proof is empty.")
            verify_consistency(held.size, held.root or EMPTY_ROOT, head.size, head.root, request.proof)
        except TamperError as error:
            log.warning(
                "%s offers %d leaves that do not continue %d: %s", head.origin, head.size, held.size, error
            )
            return _refuse(422, error.sentence)
        # 8. Stored before it is signed: after a crash between the two nothing older can be signed.
        bare = _only(note, verified)
        try:
            if (head.size, head.root) != held:
                self._state.advance(head.origin, held, head.size, head.root, encode_note(bare))
            # 9. Cosigned.
            now_s = self._now_s()
            lines = [signer.cosign(bare.text, now_s) for signer in self._signers]
            self._state.keep_cosigned(
                head.origin, head.size, head.root, encode_note(bare.with_signatures(lines))
            )
        except ConflictError as error:
            return _conflict(error.held)
        return Answer(200, encode_signatures(lines))

    def checkpoint(self, origin_hash: str) -> Answer:
        """The newest cosigned checkpoint of a log, for monitors."""
        try:
            cosigned = self._state.cosigned(origin_hash)
        except UnavailableError as error:
            return self._cannot(error)
        if cosigned is None:
            return _refuse(404, "This witness has cosigned nothing of that log.")
        return Answer(200, cosigned)


def _only(note: Note, verified: list[Verified]) -> Note:
    held = {by.line for by in verified}
    return Note(note.text, tuple(line for line in note.signatures if line in held))


def _refuse(status: int, sentence: str) -> Answer:
    return Answer(status, sentence.encode() + b"\n")


def _conflict(held: Held) -> Answer:
    return Answer(409, encode_size(held.size), SIZE_TYPE)
