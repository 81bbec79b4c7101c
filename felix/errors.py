"""Errors, sorted by who must act on them.

Every error carries a stable `Code` (it crosses the wire as a number, see docs/errors.md), a sentence that
says what happened and why, and where there is one, what to do next. Four families, by who must act:

- `RequestError`      the caller: a wrong name, no right, too large;
- `UnavailableError` no one is at fault: retry, `retry_after_ms` says how soon;
- `ProtocolError`     the peer is broken: the session ends;
- `CorruptionError`   the operator: stop, and look where it says.

Packages add their own below these (`ResidencyError`, `KeyScopeError` …). `assert` states our own
mistakes only; bytes from a peer or a disk always raise one of these.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Code(IntEnum):
    """Stable numbers of errors on the wire. A number is never reused; a new meaning gets a new number."""

    # 1xx  the peer broke the protocol; the session ends
    PROTOCOL = 100
    FRAME_TOO_LARGE = 101
    FRAME_UNKNOWN = 102
    FRAME_MALFORMED = 103
    VERSION_UNSUPPORTED = 104
    HANDSHAKE_TIMEOUT = 105
    CREDIT_EXCEEDED = 106
    STATE = 107

    # 2xx  identity and rights
    IDENTITY_REFUSED = 200
    IDENTITY_EXPIRED = 201
    WRONG_REGION = 202
    NOT_FOUND_OR_FORBIDDEN = 203
    FORBIDDEN = 204

    # 3xx  the request cannot be carried out as it stands
    INVALID = 300
    NAME_INVALID = 301
    ALREADY_EXISTS = 302
    NOT_FOUND = 303
    BATCH_TOO_LARGE = 304
    BATCH_MALFORMED = 305
    OFFSET_OUT_OF_RANGE = 306
    SEQUENCE_GAP = 307
    PRODUCER_FENCED = 308
    CONFIG_INVALID = 309
    UNSUPPORTED = 310
    CONFLICT = 311
    OFFSET_MISMATCH = 312
    CONSUMER_FENCED = 313
    LEASE_LOST = 314
    TRANSACTION_ABORTED = 315
    TRANSACTION_FENCED = 316
    TRANSACTION_UNKNOWN = 317

    # 4xx  not now; try again
    UNAVAILABLE = 400
    LIMIT_SESSIONS = 401
    LIMIT_SUBSCRIPTIONS = 402
    LIMIT_RATE = 403
    LIMIT_MEMORY = 404
    DISK_FULL = 405
    SHARD_STOPPED = 406
    NOT_LEADER = 407
    SHUTTING_DOWN = 408
    TIMEOUT = 409
    DISCONNECTED = 410
    LIMIT_STREAMS = 411
    LIMIT_STORED = 412
    LIMIT_OPEN = 413
    SERVED_ELSEWHERE = 415
    STANDBY = 416

    # 5xx  residency: policy, grants, bridges
    RESIDENCY_DENIED = 500
    GRANT_MISSING = 501
    GRANT_INVALID = 502
    GRANT_EXPIRED = 503
    GRANT_NOT_YET = 504
    GRANT_REVOKED = 505
    GRANT_MISMATCH = 506
    LOOP_REFUSED = 507
    BUDGET_EXHAUSTED = 508
    TRANSFORM_FAILED = 509
    POSITION_GAP = 510
    PAUSED = 511
    ENVELOPE_INVALID = 512
    NOT_APPROVED = 513
    OUTSIDE_TERMS = 514

    # 6xx  keys
    KEY_UNKNOWN = 600
    KEY_SCOPE = 601
    KEY_DESTROYED = 602
    KEY_PROVIDER = 603
    KEY_EXHAUSTED = 604

    # 7xx  damage
    CORRUPTION = 700
    TAMPERED = 701
    AUDIT_UNAVAILABLE = 702
    ROLLED_BACK = 703
    TRUNCATED = 704
    TRUNCATION_UNKNOWN = 705

    # 9xx  our own
    INTERNAL = 900


class FelixError(Exception):
    """Base of every error Felix raises on purpose.

    `code` is stable; `sentence` is for a person; `hint`, where given, says what to do next;
    `retry_after_ms`, where given, says how soon a retry may succeed.
    """

    default_code: Code = Code.INTERNAL
    told: bool = False
    """True where a peer said it: sentence and hint are the peer's words then."""

    def __init__(
        self,
        sentence: str,
        *,
        code: Code | None = None,
        hint: str = "",
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.code = self.default_code if code is None else code
        self.hint = hint
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        return f"{self.sentence} {self.hint}".rstrip()


class RequestError(FelixError):
    """The caller must change the request; the same request will fail again."""

    default_code = Code.INVALID


class AddressInUseError(RequestError):
    """Another socket of this machine has the address that was to be listened at. `transport` is UDP or TCP."""

    default_code = Code.CONFIG_INVALID

    def __init__(self, address: str, transport: str) -> None:
        super().__init__(
            f"Cannot listen on {address} ({transport}): another process of this machine does.",
            hint="Choose another address or port, or stop the process that uses this one.",
        )
        self.address = address
        self.transport = transport


class OffsetMismatchError(RequestError):
    """The log of a shard does not end where a conditional publish expects it; nothing was appended.

    `log_end` is where it ended when the broker looked; -1 where the broker did not say.
    """

    default_code = Code.OFFSET_MISMATCH

    def __init__(self, sentence: str, *, hint: str = "", log_end: int = -1) -> None:
        super().__init__(sentence, hint=hint)
        self.log_end = log_end


class UnavailableError(FelixError):
    """Nothing is wrong with the request; it can be tried again after `retry_after_ms`."""

    default_code = Code.UNAVAILABLE


class NotLeaderError(UnavailableError):
    """Another broker of the region leads the stream, or nobody does at the moment; nothing was done.

    `stream` is what was asked for, empty where the request concerns none; `leader` the broker that leads, `address` (`host:port`) where
    clients reach it: both empty where nobody is known to; `epoch` that of the leader, 0 where unknown.
    """

    default_code = Code.NOT_LEADER

    def __init__(
        self,
        sentence: str,
        *,
        hint: str = "",
        retry_after_ms: int | None = None,
        stream: str = "",
        leader: str = "",
        address: str = "",
        epoch: int = 0,
    ) -> None:
        super().__init__(sentence, hint=hint, retry_after_ms=retry_after_ms)
        self.stream = stream
        self.leader = leader
        self.address = address
        self.epoch = epoch


class ProtocolError(FelixError):
    """The peer sent what the protocol forbids; the session ends."""

    default_code = Code.PROTOCOL


class CorruptionError(FelixError):
    """Stored or received bytes are not what was written. The sentence says where."""

    default_code = Code.CORRUPTION


class TamperError(CorruptionError):
    """Evidence does not hold: a signature, a seal, a hash or a proof. The sentence says which."""

    default_code = Code.TAMPERED


class LaterReleaseError(TamperError):
    """What was signed as it is has a field or a value that only a later release knows. It does not verify here, and nobody changed it: it is no refusal of its signer."""

    default_code = Code.VERSION_UNSUPPORTED


LATER_RELEASE: Final = "Where nothing damaged it, a later release of Felix made it than the one that says so, which has no name for that: upgrade whoever says so."


WHY_CHARS_MAX: Final = 200


def why_undecoded(error: object) -> str:
    """What a decoder says of bytes, at most WHY_CHARS_MAX of it: it quotes a field's name, which whoever wrote the bytes chose, and which may be as long as they are."""
    told = str(error)
    return told if len(told) <= WHY_CHARS_MAX else f"{told[:WHY_CHARS_MAX]}…"


def of_later_release(reason: object) -> str:
    """What to do where bytes that have their checksum or signature do not decode for this reason: a field or a value is in them that this release has no name for. Else nothing."""
    told = str(reason)
    return LATER_RELEASE if "unknown field" in told or "Invalid enum value" in told else ""


def error_for(
    code: int, sentence: str, hint: str = "", retry_after_ms: int | None = None, log_end: int = -1
) -> FelixError:
    """The error that a peer's numeric answer stands for. Unknown numbers fall back on their hundred."""
    if code == Code.OFFSET_MISMATCH:
        return OffsetMismatchError(sentence, hint=hint, log_end=log_end)
    try:
        known = Code(code)
    except ValueError:
        known = Code.INTERNAL
        sentence = f"{sentence} (code {code}, unknown to this version)"
    family: type[FelixError]
    match code // 100:
        case 1:
            family = ProtocolError
        case 2 | 3 | 5 | 6:
            family = RequestError
        case 4:
            family = UnavailableError
        case 7 if known is Code.AUDIT_UNAVAILABLE:
            family = UnavailableError
        case 7:
            family = CorruptionError
        case _:
            family = FelixError
    return family(sentence, code=known, hint=hint, retry_after_ms=retry_after_ms)


def protocol_breach(sentence: str, code: Code = Code.STATE) -> ProtocolError:
    """A violation of the protocol by the broker, as its client says it."""
    return ProtocolError(
        sentence, code=code, hint="The broker is broken or of another release; the session was ended."
    )
