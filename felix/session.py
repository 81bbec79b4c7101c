"""The control stream of a session, both ends of it, without I/O: bytes in, events out, bytes to send kept aside.

Handshake: client hello → challenge → proof → welcome. Identity is proved here, not by TLS client certificates:
TLS has proved the broker to the client; the client's signature over the first two messages and the broker's certificate
proves the client to that broker (docs/wire.md). The transitions are the table below; the code runs on it.

Invariants: nothing but handshake frames is accepted before the session stands, and no more than
HANDSHAKE_BYTES_MAX of them; credit only ever grows; a session that has raised is finished.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from felix.errors import Code, FelixError, ProtocolError, RequestError
from felix.frames import (
    FRAME_HEADER_BYTES,
    HANDSHAKE_BYTES_MAX,
    AppendedBody,
    Credit,
    Frame,
    FrameDecoder,
    FrameType,
    decode_appended,
    decode_credit,
    decode_offsets,
    encode_frame,
)
from felix.identity import NONCE_BYTES, Binding, Proof
from felix.messages import (
    PROTOCOL_VERSIONS,
    Answer,
    Challenge,
    ClientHello,
    Goodbye,
    Handshake,
    Prove,
    Request,
    Welcome,
    decode_answer,
    decode_error,
    decode_goodbye,
    decode_handshake,
    decode_request,
    encode_message,
)

if TYPE_CHECKING:
    from felix.peer import Peer


class State(Enum):
    """States of a session. `*_SENT` are the client's, `AWAIT_*` the broker's."""

    HELLO_SENT = "hello sent"
    PROOF_SENT = "proof sent"
    AWAIT_HELLO = "await hello"
    AWAIT_PROOF = "await proof"
    ESTABLISHED = "established"


TRANSITIONS: Final[dict[tuple[State, type[Handshake]], State]] = {
    (State.AWAIT_HELLO, ClientHello): State.AWAIT_PROOF,
    (State.AWAIT_PROOF, Prove): State.ESTABLISHED,
    (State.HELLO_SENT, Challenge): State.PROOF_SENT,
    (State.PROOF_SENT, Welcome): State.ESTABLISHED,
}
"""The next state for a handshake message received in a state; any other pair is a protocol error."""

_TO_BROKER: Final = frozenset(
    {FrameType.HANDSHAKE, FrameType.REQUEST, FrameType.CREDIT, FrameType.PING, FrameType.PONG}
)
_TO_CLIENT: Final = frozenset(
    {
        FrameType.HANDSHAKE, FrameType.ERROR, FrameType.GOODBYE, FrameType.ANSWER, FrameType.CREDIT,
        FrameType.APPENDED, FrameType.OFFSETS, FrameType.PING, FrameType.PONG,
    }
)  # fmt: skip


class Authenticated(NamedTuple):
    """The client is who it says; the session waits for `ServerSession.welcome`."""

    peer: Peer


class Requested(NamedTuple):
    """A request, to be answered under its correlation id."""

    correlation: int
    request: Request[Any]


class CreditGranted(NamedTuple):
    """The peer may be sent this much in all (bytes since the beginning)."""

    subscription: int
    limit_bytes: int


class Established(NamedTuple):
    """The broker has let the client in."""

    welcome: Welcome
    challenge: Challenge


class Answered(msgspec.Struct, frozen=True):
    correlation: int
    answer: Answer


class Acknowledged(msgspec.Struct, frozen=True, gc=False):
    """One batch is in the log as its stream promises."""

    correlation: int
    appended: AppendedBody


class Refused(NamedTuple):
    """A request or batch was refused; with correlation 0 the session is over."""

    correlation: int
    error: FelixError


class LeaveAsked(NamedTuple):
    """The broker is about to close."""

    goodbye: Goodbye


ServerEvent = Authenticated | Requested | CreditGranted
ClientEvent = Established | Answered | Acknowledged | Refused | CreditGranted | LeaveAsked


class CreditLine(msgspec.Struct):
    """A sender's side of credit: how far it may go, how far it has gone, in bytes since the beginning."""

    limit_bytes: int
    used_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes

    def extend(self, limit_bytes: int) -> None:
        """A grant arrived; an older one than the newest changes nothing."""
        self.limit_bytes = max(self.limit_bytes, limit_bytes)

    def use(self, amount: int) -> None:
        """Invariant: used never passes the limit; the caller asks `left_bytes` first."""
        assert 0 <= amount <= self.left_bytes
        self.used_bytes += amount


class CreditWindow(msgspec.Struct):
    """A receiver's side of credit: what it has granted, what came in, what it has dealt with.

    `granted` = `done` + window: a peer that keeps to it never has more than `window_bytes` on the way or
    waiting here.
    """

    window_bytes: int
    received_bytes: int = 0
    done_bytes: int = 0
    announced_bytes: int = 0

    def __post_init__(self) -> None:
        self.announced_bytes = self.window_bytes

    def receive(self, amount: int) -> None:
        """Raises ProtocolError(CREDIT_EXCEEDED) where the peer sent more than it was granted."""
        self.received_bytes += amount
        if self.received_bytes > self.announced_bytes:
            raise ProtocolError(
                f"{self.received_bytes} bytes were sent where {self.announced_bytes} were granted.",
                code=Code.CREDIT_EXCEEDED,
            )

    def finish(self, amount: int) -> None:
        """`amount` bytes are dealt with and no longer held."""
        self.done_bytes += amount
        assert self.done_bytes <= self.received_bytes

    def announce(self) -> int:
        """The limit to tell the peer now."""
        self.announced_bytes = self.done_bytes + self.window_bytes
        return self.announced_bytes

    @property
    def announcement_due(self) -> bool:
        """True once half the window is dealt with and the peer does not know: fewer frames, no stall."""
        return self.done_bytes + self.window_bytes - self.announced_bytes >= self.window_bytes // 2

    @property
    def held_bytes(self) -> int:
        return self.received_bytes - self.done_bytes


class _Control:
    """The part that both ends share: decoding, the byte limit before authentication, the outgoing bytes."""

    __slots__ = ("_decoder", "_out", "_unproved_bytes", "state")

    def __init__(self, state: State, types: frozenset[FrameType]) -> None:
        self.state = state
        self._decoder = FrameDecoder(types)
        self._out: list[bytes] = []
        self._unproved_bytes = 0

    def take_output(self) -> bytes:
        """Bytes for the peer, once."""
        out = b"".join(self._out)
        self._out.clear()
        return out

    def send(self, data: bytes) -> None:
        """Queue a frame for the control stream."""
        self._out.append(data)

    def _frames(self, data: bytes) -> list[Frame]:
        if self.state is not State.ESTABLISHED:
            self._unproved_bytes += len(data)
            if self._unproved_bytes > HANDSHAKE_BYTES_MAX:
                raise ProtocolError(
                    f"More than {HANDSHAKE_BYTES_MAX} bytes before the handshake was done.",
                    code=Code.FRAME_TOO_LARGE,
                )
        return self._decoder.feed(data)

    @property
    def held_bytes(self) -> int:
        """The received bytes of an incomplete frame."""
        return self._decoder.held_bytes

    def _step(self, message: Handshake) -> None:
        state = TRANSITIONS.get((self.state, type(message)))
        if state is None:
            raise ProtocolError(
                f"A {type(message).__name__} came while the handshake was at {self.state.value!r}.",
                code=Code.STATE,
            )
        self.state = state

    def _require_established(self, frame: Frame) -> None:
        if self.state is not State.ESTABLISHED:
            raise ProtocolError(
                f"A {frame.type.name} frame came while the handshake was at {self.state.value!r}.",
                code=Code.STATE,
            )


class ServerSession(_Control):
    """The broker's end of a control stream.

    `verify` is given the proof and what it must be bound to, and returns who it proves or raises RequestError.
    """

    __slots__ = (
        "_binding",
        "_broker",
        "_leaf_sha256",
        "_mesh",
        "_nonce",
        "_region",
        "_verify",
        "_welcomed",
        "hello",
    )

    def __init__(
        self,
        *,
        region: str,
        mesh: str,
        broker: str,
        nonce: bytes,
        leaf_sha256: bytes,
        verify: Callable[[Proof, Binding], Peer],
    ) -> None:
        """`leaf_sha256`: of the certificate that this broker showed on this connection (port.Connection)."""
        super().__init__(State.AWAIT_HELLO, _TO_BROKER)
        assert len(nonce) == NONCE_BYTES
        self._leaf_sha256 = leaf_sha256
        self._binding: Binding | None = None
        self._region, self._mesh, self._broker = region, mesh, broker
        self._nonce = nonce
        self._verify = verify
        self._welcomed = False
        self.hello: ClientHello | None = None

    @property
    def established(self) -> bool:
        """True once the client has been welcomed."""
        return self._welcomed

    def receive(self, data: bytes, now_ms: int) -> list[ServerEvent]:
        """Raises ProtocolError or RequestError: send it with `messages.encode_error`, then close."""
        events: list[ServerEvent] = []
        for frame in self._frames(data):
            match frame.type:
                case FrameType.REQUEST if self._welcomed:
                    if not frame.correlation:
                        raise ProtocolError("A request without a correlation id.", code=Code.FRAME_MALFORMED)
                    events.append(Requested(frame.correlation, decode_request(frame.body)))
                case FrameType.CREDIT if self._welcomed:
                    events.append(CreditGranted(*decode_credit(frame.body)))
                case FrameType.PING if self._welcomed:
                    self._out.append(encode_frame(FrameType.PONG, frame.body, frame.correlation))
                case FrameType.PONG if self._welcomed:
                    pass
                case FrameType.HANDSHAKE:
                    event = self._handshake(bytes(frame.body), now_ms)
                    if event is not None:
                        events.append(event)
                case _:
                    raise ProtocolError(
                        f"A {frame.type.name} frame came before the session was welcomed.", code=Code.STATE
                    )
        return events

    def _handshake(self, body: bytes, now_ms: int) -> ServerEvent | None:
        message = decode_handshake(memoryview(body))
        self._step(message)
        if isinstance(message, ClientHello):
            version = max(set(message.versions) & set(PROTOCOL_VERSIONS), default=None)
            if version is None:
                raise ProtocolError(
                    f"The client speaks protocol versions {message.versions[:8]}, this broker {PROTOCOL_VERSIONS}.",
                    code=Code.VERSION_UNSUPPORTED,
                    hint="Use a client and a broker of neighbouring releases.",
                )
            if len(message.nonce) != NONCE_BYTES:
                raise ProtocolError(
                    f"A client_hello has a nonce of {NONCE_BYTES} bytes, not {len(message.nonce)}."
                )
            if message.region != self._region:
                raise RequestError(
                    f"This is region {self._region!r}, and the client asked for {message.region!r}.",
                    code=Code.WRONG_REGION,
                    hint="Check the address in the client's profile.",
                )
            self.hello = message
            challenge = Challenge(version, self._region, self._mesh, self._broker, self._nonce, now_ms)
            frame = encode_message(FrameType.HANDSHAKE, challenge)
            self._binding = Binding(body, frame[FRAME_HEADER_BYTES:], self._leaf_sha256)
            self._out.append(frame)
            return None
        assert isinstance(message, Prove)
        assert self._binding is not None
        proof = Proof(message.chain_pem, message.signature)
        return Authenticated(self._verify(proof, self._binding))

    def welcome(self, welcome: Welcome) -> None:
        """Let the authenticated client in."""
        assert self.state is State.ESTABLISHED
        assert not self._welcomed
        self._welcomed = True
        self._out.append(encode_message(FrameType.HANDSHAKE, welcome))


class ClientSession(_Control):
    """The client's end of a control stream.

    `prove` is given the challenge and what the proof is bound to, and returns the proof; the region has been checked before it
    is called, so a client that reached another region signs nothing there.
    """

    __slots__ = ("_challenge", "_hello", "_leaf_sha256", "_prove", "_region")

    def __init__(
        self,
        *,
        region: str,
        software: str,
        nonce: bytes,
        leaf_sha256: bytes,
        prove: Callable[[Challenge, Binding], Proof],
        client: bytes = b"",
    ) -> None:
        """`nonce`: random bytes of this session alone. `leaf_sha256`: of the certificate that TLS verified (port.Connection). `client`: see
        messages.ClientHello."""
        super().__init__(State.HELLO_SENT, _TO_CLIENT)
        assert len(nonce) == NONCE_BYTES
        self._leaf_sha256 = leaf_sha256
        self._region = region
        self._prove = prove
        self._challenge: Challenge | None = None
        frame = encode_message(
            FrameType.HANDSHAKE,
            ClientHello(list(PROTOCOL_VERSIONS), region, nonce, software, client=client),
        )
        self._hello = frame[FRAME_HEADER_BYTES:]
        self._out.append(frame)

    def receive(self, data: bytes) -> list[ClientEvent]:
        """Raises ProtocolError, or RequestError(WRONG_REGION): close the connection."""
        events: list[ClientEvent] = []
        for frame in self._frames(data):
            match frame.type:
                case FrameType.APPENDED:
                    self._require_established(frame)
                    events.append(Acknowledged(frame.correlation, decode_appended(frame.body)))
                case FrameType.OFFSETS:
                    self._require_established(frame)
                    events.append(Acknowledged(frame.correlation, decode_offsets(frame.body)))
                case FrameType.ANSWER:
                    self._require_established(frame)
                    events.append(Answered(frame.correlation, decode_answer(frame.body)))
                case FrameType.CREDIT:
                    self._require_established(frame)
                    events.append(CreditGranted(*decode_credit(frame.body)))
                case FrameType.ERROR:
                    events.append(Refused(frame.correlation, decode_error(frame.body)))
                case FrameType.GOODBYE:
                    events.append(LeaveAsked(decode_goodbye(frame.body)))
                case FrameType.PING:
                    self._out.append(encode_frame(FrameType.PONG, frame.body, frame.correlation))
                case FrameType.PONG:
                    pass
                case _:
                    event = self._handshake(bytes(frame.body))
                    if event is not None:
                        events.append(event)
        return events

    def _handshake(self, body: bytes) -> ClientEvent | None:
        message = decode_handshake(memoryview(body))
        self._step(message)
        if isinstance(message, Challenge):
            if message.region != self._region:
                raise RequestError(
                    f"Asked for region {self._region!r} and reached {message.region!r}; nothing was sent there.",
                    code=Code.WRONG_REGION,
                    hint="Check the addresses in the profile.",
                )
            if message.version not in PROTOCOL_VERSIONS or len(message.nonce) != NONCE_BYTES:
                raise ProtocolError("The broker's challenge is not of this protocol.", code=Code.PROTOCOL)
            self._challenge = message
            proof = self._prove(message, Binding(self._hello, body, self._leaf_sha256))
            self._out.append(encode_message(FrameType.HANDSHAKE, Prove(proof.chain_pem, proof.signature)))
            return None
        assert isinstance(message, Welcome)
        assert self._challenge is not None
        return Established(message, self._challenge)


def grant_frame(subscription: int, limit_bytes: int) -> bytes:
    """A CREDIT frame (see frames.Credit)."""
    return Credit(subscription, limit_bytes).encode()
