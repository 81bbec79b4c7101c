"""What the parts of a broker ask of a session, and a session of its parts; so that they need not know each other.

Layers, each importing only what stands before it: streams, budget, metrics → broker → governance → export → delivery,
publishing, ingest, exchange → views → requests → session → node. A session is the top; what is below sees it through these ports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from felix.errors import FelixError
from felix.messages import Answer, Goodbye, ReaderTraffic
from felix.names import SpiffeId
from felix.peer import Peer
from felix.session import CreditWindow
from region.limits.quota import Account, Meter, Throttle


class LiveSession(Protocol):
    """What the broker requires of every session, of whichever identity."""

    identity: SpiffeId | None
    ended: bool

    @property
    def subscription_count(self) -> int:
        """Subscriptions that are open."""

    @property
    def heard_at(self) -> float:
        """When the client's last datagram came, in seconds of the monotonic clock."""

    def superseded(self) -> None:
        """A newer session of the same identity takes this one's place: end it."""

    def rights_changed(self) -> None:
        """Rights, grants or streams changed: end what is no longer allowed."""

    def fail(self, error: FelixError) -> None:
        """Tell the peer what is wrong, then close."""

    def settle_delivery(self) -> int:
        """Charge the delivery budget with what really waits now, and return it."""

    def pump(self) -> None:
        """Send what every subscription may now."""

    def traffic(self) -> Iterable[ReaderTraffic]:
        """What every subscription has been sent, and what it waits for."""

    def is_charged_to(self, accounts: Collection[Account]) -> bool:
        """Whether anything of it counts for one of these."""

    def quotas_changed(self) -> None:
        """Limits changed: sessions that wait for a rate check again."""

    def leave(self, goodbye: Goodbye) -> None:
        """Tell the client that the broker is about to stop."""


class DeliverySink(Protocol):
    """What a subscription asks of the session that it delivers through."""

    @property
    def identity(self) -> SpiffeId | None: ...

    @property
    def ended(self) -> bool: ...

    def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None:
        """Bytes of whole frames on a stream that the broker opened."""

    def may_send(self) -> bool:
        """True while the connection and the broker's delivery budget take more."""

    def settle_delivery(self) -> int: ...

    def throttled(self, throttle: Throttle) -> None:
        """Tell the client why it is slow."""

    def drop_subscription(self, number: int) -> None:
        """The subscription has ended by itself."""


class Publishing(Protocol):
    """What a publish stream asks of its session."""

    identity: SpiffeId | None
    ended: bool
    publish_window: CreditWindow

    def answer(self, correlation: int, answer: Answer) -> None: ...

    def refuse(self, correlation: int, error: FelixError) -> None: ...

    def send_control(self, data: bytes) -> None: ...

    def send_publish_credit(self) -> None: ...

    def meter_of(self, tenant: str) -> Meter:
        """What a use of this tenant's streams is charged to. Raises UnavailableError(LIMIT_SESSIONS)."""

    def finish_batch(self, size: int, due_s: float) -> None:
        """A batch is dealt with: its credit goes back, now (0) or at this time of the loop's clock."""

    def throttled(self, throttle: Throttle) -> None:
        """Tell the client why it is slow."""

    def reserve_publishing(self, *, wide: bool) -> None:
        """Take the publish window out of the broker's budget, with the first publisher; the large one only where it is asked
        for. Raises UnavailableError."""

    def publisher_closed(self, role: Role, partial: int) -> None:
        """A publisher is gone, and `partial` bytes of a batch with it; with the last one the window goes back."""

    def hold_request(self, change: int) -> None:
        """Count the bytes of a request that is not whole. Raises UnavailableError(LIMIT_MEMORY)."""

    def hold_partial(self, change: int) -> None:
        """Count the bytes of an incomplete batch against the window. Raises ProtocolError(CREDIT_EXCEEDED)."""

    def end_role(self, role: Role) -> None: ...


class Ingesting(Protocol):
    """What an ingest stream asks of its session."""

    identity: SpiffeId | None
    peer: Peer | None
    ended: bool

    def send(self, stream_id: int, data: bytes, *, end: bool = False) -> None: ...

    def hold_request(self, change: int) -> None:
        """Count the bytes of a request that is not whole. Raises UnavailableError(LIMIT_MEMORY)."""

    def meter_for(self, stream: str) -> Meter:
        """What a use of this stream is charged to: its tenant and the session's identity; the identity alone where there is
        no such stream, or no right to it. Raises UnavailableError(LIMIT_SESSIONS)."""

    def widen(self) -> None:
        """A grant lets this session bring in records: it has the full windows from now on."""

    def end_role(self, role: Role) -> None: ...

    def fail(self, error: FelixError) -> None:
        """Tell the client what it did wrong, and end the session."""


class Exchanging(Ingesting, Protocol):
    """What an exchange asks of its session."""

    def may_send(self) -> bool:
        """True while the connection and the broker's delivery budget take more."""

    def throttled(self, throttle: Throttle) -> None:
        """Tell the client why it is slow."""

    def settle_delivery(self) -> int:
        """Charge the delivery budget with what really waits now, and return it."""


class Role(Protocol):
    """What one client-opened stream is."""

    @property
    def meter(self) -> Meter | None:
        """What its use of a stream is charged to; None where it uses none."""

    def data(self, data: bytes, end: bool) -> None:
        """The stream's next bytes."""

    def pump(self) -> None:
        """The connection takes more: send what waits."""

    def rights_changed(self) -> None:
        """The client's rights have changed; end what they no longer allow."""

    def closed(self) -> None:
        """The connection is gone, or the peer gave the stream up; release what is held."""
