"""Requests between the brokers of a region, over their links (region.replication.links): asked, answered, or refused.

Both ends of a link are brokers of this region, which the link has proved; whoever serves a request still checks what it says.

Invariants: a request is answered once, or fails with UnavailableError(DISCONNECTED) where the link went down, was not there, or ASK_S passed:
then its outcome is unknown, and asking again is for the asker to make harmless; at most ASKED_MAX of one peer are under way here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec

from felix.errors import Code, FelixError, ProtocolError, UnavailableError, error_for
from felix.news import News
from felix.tasks import TaskSet
from region.replication.links import PeerLinks
from region.replication.wire import ASK_BYTES_MAX, Answered, Asked

log = logging.getLogger("felix.region.peer_requests")

ASK_S: Final = 30.0
"""A peer that has not answered by then is not well; whatever waits asks again."""
ASKED_MAX: Final = 256
"""Requests of one peer that are carried out at once; more are refused, and asked again."""

AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)


class PeerRequest(msgspec.Struct, frozen=True, tag_field="ask"):
    """Something that a broker asks another one."""


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """Why a request was not carried out."""

    code: int
    sentence: str
    hint: str = ""
    retry_after_ms: int | None = None


_Serve = Callable[[str, Any], Awaitable[msgspec.Struct]]


class PeerRequests:
    """Of one broker. On the event loop."""

    def __init__(self, own: str) -> None:
        """`own`: this broker's id."""
        self.own = own
        self.links: PeerLinks
        """set before anything is asked"""
        self.news = News()
        """told whenever a link came up or went down"""
        self._listeners: list[Callable[[], None]] = []
        self._number = 0
        self._open: dict[tuple[str, int], asyncio.Future[bytes]] = {}
        self._serves: dict[str, tuple[type[PeerRequest], _Serve]] = {}
        self._tasks = TaskSet()
        self._under_way: Counter[str] = Counter()

    def serve(self, request: type[PeerRequest], handler: _Serve) -> None:
        """Have `handler(peer, request)` carry out requests of this type; what it raises is the refusal."""
        self._serves[str(request.__struct_config__.tag)] = request, handler

    def on_linked(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a link came up."""
        self._listeners.append(listener)

    def is_up(self, peer: str) -> bool:
        """Whether a link stands to this broker; it always reaches itself."""
        return peer == self.own or self.links.is_up(peer)

    def clock_ahead_ms(self, peer: str) -> int | None:
        """How far this broker's clock is ahead of a peer's, in ms; None where that is not known (yet)."""
        return 0 if peer == self.own else self.links.ahead_of(peer)

    def apart(self) -> dict[str, tuple[int, str]]:
        """The brokers that are alive and to which no link stands: for how long (ms), and why, where this broker knows."""
        return self.links.apart()

    async def ask(
        self, peer: str, request: PeerRequest, answer: type[AnswerT], *, timeout_s: float = ASK_S
    ) -> AnswerT:
        """Ask a broker, which may be this one. Raises its refusal, and UnavailableError(DISCONNECTED) as the module says."""
        self._number += 1
        key = peer, self._number
        body = msgspec.msgpack.encode(request)
        assert len(body) <= ASK_BYTES_MAX, type(request).__name__
        if peer == self.own:
            # As at a peer: it is carried out also where nobody waits for the answer any more. What is appended by then is in no log yet, and whoever
            # asked again meanwhile would append it once more.
            carrying = self._tasks.begin(self._carry_out(peer, body))
            carrying.add_done_callback(_heard)
            try:
                async with asyncio.timeout(timeout_s):
                    told = await asyncio.shield(carrying)
            except TimeoutError:
                raise _lost(peer) from None
            return msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=answer)
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._open[key] = waiting
        try:
            if not self.links.request(peer, Asked(self._number, body)):
                raise _lost(peer)
            async with asyncio.timeout(timeout_s):
                found = await waiting
        except TimeoutError:
            raise _lost(peer) from None
        finally:
            self._open.pop(key, None)
        if found[:1] == b"\0":
            refusal = msgspec.msgpack.decode(found[1:], type=Refusal)
            raise error_for(refusal.code, refusal.sentence, refusal.hint, refusal.retry_after_ms)
        return msgspec.msgpack.decode(found[1:], type=answer)

    def linked(self, peer: str, up: bool) -> None:
        """For `PeerLinks`."""
        if not up:
            for (asked, _), waiting in list(self._open.items()):
                if asked == peer and not waiting.done():
                    waiting.set_exception(_lost(peer))
        self.news.tell()
        for listener in self._listeners if up else ():
            listener()

    def requested(self, peer: str, message: Asked | Answered) -> None:
        """For `PeerLinks`."""
        if isinstance(message, Answered):
            waiting = self._open.get((peer, message.number))
            if waiting is not None and not waiting.done():
                waiting.set_result(message.body)
            return
        if self._under_way[peer] >= ASKED_MAX:
            error = UnavailableError(
                f"{ASKED_MAX} requests of broker {peer} are under way.", retry_after_ms=100
            )
            self._refuse(peer, message.number, error)
            return
        self._under_way[peer] += 1
        self._tasks.begin(self._answer(peer, message))

    async def _answer(self, peer: str, asked: Asked) -> None:
        try:
            body = b"\1" + msgspec.msgpack.encode(await self._carry_out(peer, asked.body))
            if len(body) > ASK_BYTES_MAX:
                raise UnavailableError(
                    f"The answer to broker {peer} would have {len(body)} bytes; {ASK_BYTES_MAX} fit.",
                    code=Code.LIMIT_MEMORY,
                )
            # An answer that is not sent is one that was lost.
            self.links.request(peer, Answered(asked.number, body))
        except FelixError as error:
            self._refuse(peer, asked.number, error)
        except Exception as error:
            log.exception("a request of broker %s failed", peer)
            self._refuse(
                peer,
                asked.number,
                FelixError(f"Broker {self.own} failed: {type(error).__name__}.", code=Code.INTERNAL),
            )
        finally:
            self._under_way[peer] -= 1

    async def _carry_out(self, peer: str, body: bytes) -> msgspec.Struct:
        try:
            tag = msgspec.msgpack.decode(body, type=_Tagged).ask
            request, handler = self._serves[tag]
            asked = msgspec.msgpack.decode(body, type=request)
        except (msgspec.MsgspecError, KeyError) as error:
            raise ProtocolError(
                f"Broker {peer} asks what broker {self.own} does not know: {error}.",
                hint="Use neighbouring releases on all brokers of a region.",
            ) from error
        return await handler(peer, asked)

    def _refuse(self, peer: str, number: int, error: FelixError) -> None:
        refusal = Refusal(int(error.code), error.sentence, error.hint, error.retry_after_ms)
        self.links.request(peer, Answered(number, b"\0" + msgspec.msgpack.encode(refusal)))

    async def close(self) -> None:
        """Carry out no more."""
        await self._tasks.end()


class _Tagged(msgspec.Struct):
    ask: str


def _heard(task: asyncio.Task[msgspec.Struct]) -> None:
    """Whoever asked has been told, or waits no more."""
    if not task.cancelled():
        task.exception()


def _lost(peer: str) -> UnavailableError:
    return UnavailableError(
        f"Broker {peer} did not answer: no link to it stands, or it was lost.",
        code=Code.DISCONNECTED,
        retry_after_ms=200,
    )
