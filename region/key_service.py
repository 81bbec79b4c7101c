"""The region's keys, as operators list and rotate them; whatever happens to one is a KEY leaf."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from audit.leaf import Header, Kind, Leaf, Side
from audit.trail import Trail
from felix.errors import Code, RequestError
from felix.messages import KeyState
from felix.names import SpiffeId, StreamName
from keys.keyring import Keyring
from keys.shared import RegionKeys


class KeyService:
    """One per broker."""

    def __init__(self, keyring: RegionKeys, trail: Trail, region: str, clock_ms: Callable[[], int]) -> None:
        self._keyring, self._trail, self._region, self._clock_ms = keyring, trail, region, clock_ms

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
            name = StreamName.parse(stream) if stream else None
            ended = await asyncio.to_thread(self._keyring.rotate_data, name)
            return f"{ended} data keys ended; the next batch of each shard takes a fresh one."
        if level != "root" or stream:
            raise RequestError("Rotate data keys (of one stream or all), or the root key.")
        if not isinstance(self._keyring, Keyring):
            raise RequestError("Several brokers do not rotate their root key yet.", code=Code.UNSUPPORTED)
        rotation = await asyncio.to_thread(self._keyring.rotate_root)
        for key_id, action in ((rotation.new_root, "made"), (rotation.old_root, "rotated")):
            await self.record(actor, key_id, action)
        return f"A new root key wraps {rotation.stream_keys} stream keys; no data was touched."

    async def record(self, actor: SpiffeId, key_id: bytes, action: str) -> None:
        """Write a KEY leaf, and wait until it is durable. Raises UnavailableError where the log cannot be written."""
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
