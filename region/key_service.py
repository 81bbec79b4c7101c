"""The region's keys, as operators list and rotate them; whatever happens to one is a KEY leaf."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from audit.leaf import Header, Kind, Leaf, Side
from audit.trail import Trail
from felix.bounded import BoundedMap
from felix.errors import RequestError
from felix.messages import KeyState
from felix.names import SpiffeId, StreamName
from keys.keyring import Keyring, RootRotation
from keys.shared import RegionKeys

RECORDED_MAX: Final = 16_384
"""KEY leaves that are remembered: one that is asked again comes within seconds."""


class Rotation(Protocol):
    """Rotating a region's keys, of one broker (`KeyringRotation`) or of several (region.cluster.key_rotation)."""

    async def rotate_data(self, stream: StreamName | None) -> str:
        """The next batch of every shard gets a fresh data key. A sentence for a person."""
        ...

    async def rotate_root(self) -> RootRotation:
        """A new root key wraps every stream key."""
        ...


class KeyringRotation:
    """Of a region of one broker. The keyring blocks, so threads work on it."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring

    async def rotate_data(self, stream: StreamName | None) -> str:
        """As `Rotation` says."""
        ended = await asyncio.to_thread(self._keyring.rotate_data, stream)
        return f"{ended} data keys ended; the next batch of each shard takes a fresh one."

    async def rotate_root(self) -> RootRotation:
        """As `Rotation` says. Raises as `Keyring.rotate_root`."""
        return await asyncio.to_thread(self._keyring.rotate_root)


class KeyService:
    """One per broker."""

    def __init__(
        self,
        keyring: RegionKeys,
        rotation: Rotation,
        trail: Trail,
        region: str,
        clock_ms: Callable[[], int],
    ) -> None:
        self._keyring, self._rotation = keyring, rotation
        self._trail, self._region, self._clock_ms = trail, region, clock_ms
        self._recorded: BoundedMap[tuple[str, str, bytes], bool] = BoundedMap(RECORDED_MAX)

    async def list(self, stream: str) -> list[KeyState]:
        """Keys by level, without secrets."""
        name = StreamName.parse(stream) if stream else None
        found = await asyncio.to_thread(self._keyring.list, name)
        return [
            KeyState(key.key_id, key.level, key.state.value, key.at_ms, key.stream, key.shard, key.epoch)
            for key in found
        ]

    async def rotate(self, actor: SpiffeId, level: str, stream: str) -> str:
        """Rotate data keys or the root key, and write KEY leaves. Returns a sentence for a person."""
        if level == "data":
            return await self._rotation.rotate_data(StreamName.parse(stream) if stream else None)
        if level != "root" or stream:
            raise RequestError("Rotate data keys (of one stream or all), or the root key.")
        rotation = await self._rotation.rotate_root()
        for key_id, action in ((rotation.new_root, "made"), (rotation.old_root, "rotated")):
            await self.record(actor, key_id, action)
        done = f"A new root key wraps {rotation.stream_keys} stream keys; no data was touched."
        if not rotation.behind:
            return done
        return (
            f"{done} Keep the old root key, {rotation.old_root.hex()}, for now: the copies of {', '.join(rotation.behind)} may be under it still. They follow "
            "once they run and reach the metadata store; rotate the root again then: it makes no other one while a broker is behind."
        )

    def know(self, leaves: Iterable[Header]) -> None:
        """These KEY leaves stand in the log, written by another broker: asked again, they are not written twice."""
        for header in leaves:
            self._recorded.put((header.actor, header.action, header.key_id), True)

    async def record(self, actor: SpiffeId, key_id: bytes, action: str) -> None:
        """Write a KEY leaf, and wait until it is durable. Of several brokers, one that was written a moment ago and is asked again is not
        written twice. Raises UnavailableError where the log cannot be written."""
        if self._trail.copied and self._recorded.look((str(actor), action, key_id)):
            return
        header = Header(
            kind=Kind.KEY,
            side=Side.INGRESS,
            time_ms=self._clock_ms(),
            source_region=self._region,
            destination_region=self._region,
            actor=str(actor),
            action=action,
            key_id=key_id,
        )
        await self._trail.append([Leaf(header)])
        self.know([header])
