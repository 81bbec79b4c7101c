"""Submitting a log's checkpoints to outside witnesses: a thread for each, so that none waits for another.

Each thread looks at what the log offers, once a second and when told to, and asks its witness to cosign it; what comes
back is verified and kept on the log's checkpoint. A witness that fails is asked again after a pause that doubles up to a
minute; one whose answer left the log without a line of any of its keys is asked again about that checkpoint at the same pace, and about the next one at once
(audit.asked). Nothing here holds up the log, and nothing of it is on an event loop.

Invariants: all witnesses are shown the same checkpoint (audit.checkpoint_disk, `offer`); what a witness answers counts only where
a line of each of its keys stands in the log afterwards; a line that somebody else brought does not stand for another key's; a witness that has more leaves than the log ever checkpointed says that the log was rolled back,
or lies: it is reported, and asked again only rarely. Callers: bridge.agent, region.startup.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Final, NamedTuple

from audit.asked import Asked, name_keys
from audit.lag import Lag
from audit.note import Note, Verified, encode_note, parse_note, verify_note
from audit.trail import Trail
from audit.tree_head import parse_tree_head
from audit.witness_client import Behind, Cosigned, WitnessClient, WitnessTarget
from audit.witness_protocol import AddCheckpoint
from felix.errors import FelixError, TamperError
from felix.runtime.port import Runtime
from felix.runtime.real import REAL

log = logging.getLogger("felix.audit.submission")

POLL_S: Final = 1.0
PAUSE_S: Final = 1.0
"""After the first failure; doubled with each further one."""
PAUSE_S_MAX: Final = 60.0
WITNESSES_MAX: Final = 16
"""Of one log: a thread each."""
_STOP_S: Final = 5.0


class SubmissionStatus(NamedTuple):
    """How far one witness is; for `status` and metrics."""

    witness: str
    url: str
    size: int
    """leaves of the log that it has cosigned with each of its keys, as the log shows"""
    lag_ms: int
    """for how long there has been a leaf that it has not cosigned"""
    failures: int
    """since the log last had all that was asked for"""
    sentence: str
    """what went wrong last, empty where nothing did"""


class _HalfCosignedError(TamperError):
    """The witness answered, and the log still has no line of one of its keys."""


class Submission:
    """One log's checkpoints to one witness. `start`, then `stop`."""

    def __init__(
        self,
        trail: Trail,
        target: WitnessTarget,
        *,
        poll_s: float = POLL_S,
        pause_s: float = PAUSE_S,
        runtime: Runtime = REAL,
    ) -> None:
        self._trail, self._target, self._runtime = trail, target, runtime
        self._client: WitnessClient | None = None
        self._poll_s, self._pause_s = poll_s, pause_s
        self._lag = Lag()
        self._known = 0
        """leaves that the witness says it has cosigned, or has shown by a line of any key"""
        self._asked = Asked()
        self._size = 0
        self._failures = 0
        self._sentence = ""
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"witness-{target.url}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._trail.checkpoints.trust_witnesses(self._target.keys)
        self._thread.start()

    def stop(self) -> None:
        """End, also a call that is under way. Blocks for some seconds at most. Safe to call twice."""
        self._stopping = True
        self._wake.set()
        if self._client is not None:
            self._client.cancel()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def wake(self) -> None:
        """Look at once what the log offers."""
        self._wake.set()

    def status(self) -> SubmissionStatus:
        """Where it is. Does not block."""
        now_ms = self._now_ms()
        self._lag.update(now_ms, self._size, self._trail.status().durable)
        name = self._target.keys[0].name
        return SubmissionStatus(
            name, self._target.url, self._size, self._lag.ms(now_ms), self._failures, self._sentence
        )

    def _now_ms(self) -> int:
        return int(self._runtime.clock.monotonic() * 1000)

    def _run(self) -> None:
        self._known = max(
            (
                held.checkpoint.size
                for held in self._trail.checkpoints.cosigned()
                if self._is_by_it(held.cosigned)
            ),
            default=0,
        )
        while not self._stopping:
            pause_s = self._poll_s
            try:
                if self.submit():
                    self._failures, self._sentence = 0, ""
            except _HalfCosignedError as error:
                # What it does sign of the next checkpoint is worth having at once.
                self._failed(error.sentence)
            except FelixError as error:
                pause_s = self._failed(error.sentence)
            except Exception as error:
                log.exception("submitting to %s failed", self._target.url)
                pause_s = self._failed(str(error))
            self._lag.update(self._now_ms(), self._size, self._trail.status().durable)
            self._wake.wait(pause_s)
            self._wake.clear()

    def _failed(self, sentence: str) -> float:
        self._failures += 1
        if sentence != self._sentence and not self._stopping:
            log.warning(
                "the witness %s has not cosigned %s: %s", self._target.url, self._trail.key.name, sentence
            )
        self._sentence = sentence
        # Spread, so that many logs do not come back to a witness at one moment.
        pause_s = min(PAUSE_S_MAX, self._pause_s * float(2 ** min(self._failures - 1, 10)))
        return pause_s * (0.5 + self._runtime.random.random() / 2)

    def _is_by_it(self, cosigned: Iterable[Verified]) -> bool:
        return any(by.key in self._target.keys for by in cosigned)

    def submit(self) -> bool:
        """One look. True where there is nothing left to ask: the offered checkpoint has a line of each of this witness's keys, or another broker shows it. False where it is
        too early to ask again for lines that the last answer left out. Raises FelixError, OSError."""
        keys = self._target.keys
        self._size = self._trail.checkpoints.size_cosigned_by(keys)
        if self._trail.follows:
            return True
        for _ in range(3):
            offered = self._trail.checkpoints.offer(at_least=self._known)
            note = parse_note(offered)
            size = parse_tree_head(note.text).size
            if not size:
                return True
            if self._trail.checkpoints.is_cosigned_by(offered, keys):
                self._asked.stands()
                return True
            if self._known > size:
                claimed, self._known = self._known, self._size
                raise TamperError(
                    f"The witness {self._target.url} has cosigned {claimed} leaves of {self._trail.key.name}, whose "
                    f"newest checkpoint has {size}: the log was rolled back, or the witness is wrong."
                )
            if self._asked.failure(note.text, self._now_ms()) is not None:
                return False
            proof = (
                self._trail.checkpoints.consistency_proof(self._known, size) if 0 < self._known < size else []
            )
            # Made here, so that a certificate that cannot be read is a failure like others: shown, and tried again.
            self._client = self._client or WitnessClient(self._target)
            answer = self._client.add_checkpoint(AddCheckpoint(self._known, tuple(proof), offered))
            if isinstance(answer, Behind):
                # Another start, another size: once more from what it has.
                self._known = answer.size
                continue
            self._keep(note, answer)
            self._known = size
            self._size = self._trail.checkpoints.size_cosigned_by(keys)
            self._require_lines(note.text, offered)
            return True
        raise TamperError(f"The witness {self._target.url} names another size each time it is asked.")

    def _require_lines(self, text: str, offered: bytes) -> None:
        if lacking := self._trail.checkpoints.lacking(offered, self._target.keys):
            error = _HalfCosignedError(
                f"The witness {self._target.url} answered, and {self._trail.key.name} has no line that holds of {name_keys(lacking)}, which is configured as its key."
            )
            self._asked.failed(text, error, self._now_ms())
            raise error

    def _keep(self, note: Note, answer: Cosigned) -> None:
        # Its answer, in which nobody else has a word: one bad line is a witness that is not what it is taken for.
        verified = verify_note(Note(note.text, answer.signatures), self._target.keys)
        lines = [by.line for by in verified if by.time_s]
        self._trail.add_cosigned(encode_note(note.with_signatures(lines)))


class Submissions:
    """One log's checkpoints to all its outside witnesses."""

    def __init__(self, trail: Trail, targets: Iterable[WitnessTarget], runtime: Runtime = REAL) -> None:
        self._all = [Submission(trail, target, runtime=runtime) for target in targets]
        assert len(self._all) <= WITNESSES_MAX

    def start(self) -> None:
        """Begin with all of them."""
        for each in self._all:
            each.start()

    def stop(self) -> None:
        """End all of them. Blocks for some seconds at most."""
        for each in self._all:
            each.wake()
        threads = [threading.Thread(target=each.stop, daemon=True) for each in self._all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_STOP_S)

    def status(self) -> list[SubmissionStatus]:
        """Each witness, in the order of the configuration."""
        return [each.status() for each in self._all]
