"""An outside witness's decisions: one request in, one answer out. Blocks on its state; calls must not overlap.

The order of checks, and the status of each, is that of https://c2sp.org/tlog-witness, add-checkpoint:

1. the request is whole (400); 2. the origin is known (404); 3. a trusted key signed, and no trusted key's signature is
bad (403); 4. the old size is not above the checkpoint's (400); 5. it is the one that was cosigned last (409, with that
size); 6. an empty tree has the empty tree's root (422); 7. the proof holds, and is empty where it must be (422); 8. the
checkpoint is stored, durably, unless another was stored meanwhile (409); 9. it is cosigned.

Anybody can send a log's public checkpoint once more, or with a proof that does not hold. So the same checkpoint within AGAIN_S gets the lines that it got, without another signature and another sync, and
of what does not hold a few lines a minute are logged: neither the log's file nor the disk's time is a stranger's to use up.

One thing more than the specification: a checkpoint with extension lines is refused (400, after step 3). It does not
recommend them, and a witness would keep and hand on a text that whoever runs a log has chosen.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from audit.merkle import EMPTY_ROOT, verify_consistency
from audit.note import Note, NoteSigner, Verified, encode_note, encode_signatures, parse_note, verify_note
from audit.tree_head import TreeHead, parse_tree_head
from audit.witness_protocol import SIZE_TYPE, decode_request, encode_size
from audit.witness_sqlite import ConflictError, Held, WitnessState
from felix.errors import RequestError, TamperError, UnavailableError

log = logging.getLogger("felix.audit.witness")

TEXT: Final = "text/plain; charset=utf-8"
AGAIN_S: Final = 5
"""For so long the cosignatures of a checkpoint are given again: what they state was true then, and a log that lost an answer asks at once."""
_GIVEN_MAX: Final = 1_024
"""Answers that are remembered for that, of 3.5 KB each."""
TOLD_S: Final = 60
_PROOFS_TOLD_MAX: Final = 10
_FORKS_TOLD_MAX: Final = 2
"""Lines of each kind in that time: of proofs in all, of forks by each log. One of a fork has the note, of 27 KB at most."""


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    body: bytes
    content_type: str = TEXT


class FewLines:
    """So many lines of one kind are logged in `TOLD_S`; the others are counted, and the next line has their number."""

    def __init__(self, most: int) -> None:
        self._most, self._begun_s = most, 0
        self._told = self._left_out = 0

    def more(self, now_s: int) -> str | None:
        """None where no line is logged now; else what to add to it."""
        if not 0 <= now_s - self._begun_s < TOLD_S:
            self._begun_s, self._told = now_s, 0
        if self._told >= self._most:
            self._left_out += 1
            return None
        self._told += 1
        left_out, self._left_out = self._left_out, 0
        return f" ({left_out} more like it were not told)" if left_out else ""


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
        self._given: OrderedDict[tuple[str, Held], tuple[int, bytes]] = OrderedDict()
        """the newest answers, by checkpoint: when (POSIX seconds), and the lines; only what was stored before it was given"""
        self._proofs = FewLines(_PROOFS_TOLD_MAX)
        self._forks: dict[str, FewLines] = {}
        """by log, of those that the witness knows: one that signs forks hides those of no other"""

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
            self._tell(head, held, _only(note, verified))
            return _refuse(422, error.sentence)
        # 8. Stored before it is signed: after a crash between the two nothing older can be signed.
        bare, offered = _only(note, verified), Held(head.size, head.root)
        if offered == held and (given := self._given_again(head.origin, held)):
            return Answer(200, given)
        try:
            if offered != held:
                self._state.advance(head.origin, held, head.size, head.root, encode_note(bare))
            # 9. Cosigned.
            now_s = self._now_s()
            lines = [signer.cosign(bare.text, now_s) for signer in self._signers]
            self._state.keep_cosigned(
                head.origin, head.size, head.root, encode_note(bare.with_signatures(lines))
            )
        except ConflictError as error:
            return _conflict(error.held)
        answer = encode_signatures(lines)
        self._remember(head.origin, offered, now_s, answer)
        return Answer(200, answer)

    def _given_again(self, origin: str, held: Held) -> bytes:
        """The lines of an answer about this checkpoint that is not old; empty where there is none."""
        given_s, lines = self._given.get((origin, held), (0, b""))
        return lines if 0 <= self._now_s() - given_s < AGAIN_S else b""

    def _remember(self, origin: str, held: Held, now_s: int, lines: bytes) -> None:
        self._given[origin, held] = now_s, lines
        self._given.move_to_end((origin, held))
        if len(self._given) > _GIVEN_MAX:
            self._given.popitem(last=False)

    def _tell(self, head: TreeHead, held: Held, note: Note) -> None:
        """Log a request about a known log, signed by it, that does not continue what was cosigned. Two roots of one size are the log's doing; a proof is whoever's who sent it."""
        if head.size == held.size and head.root != held.root and held.root is not None:
            forks = self._forks.setdefault(head.origin, FewLines(_FORKS_TOLD_MAX))
            if (more := forks.more(self._now_s())) is not None:
                log.error(
                    "%s signed two roots for %d leaves; one is cosigned, and this is the other: %s%s",
                    head.origin, head.size, encode_note(note).decode(), more,
                )  # fmt: skip
        elif (more := self._proofs.more(self._now_s())) is not None:
            log.warning(
                "somebody sent a proof for %s that does not lead from the %d leaves cosigned to %d; whether the log or a stranger is not known%s",
                head.origin, held.size, head.size, more,
            )  # fmt: skip

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
