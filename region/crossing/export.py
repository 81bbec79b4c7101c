"""Where sealed records go out to a bridge: the source's half of a crossing.

Two checks, in two places, and both must pass: `SealedReader` asks for the grant on every read of ciphertext,
`data_key` asks for it again before a key is handed over. A broker never opens what it hands out here, and never
learns where it goes.

A compacted stream is not exported. What a bridge announced in its egress log it must be able to send again, byte for
byte, until the destination has answered; compaction may have changed the batches by then.

Also the board of links: what agents last said about themselves, for `felix bridge status`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec.structs import replace

from audit.stream_statement import Epoch, StreamStatement, sign_statement
from felix.bounded import BoundedMap
from felix.errors import Code, FelixError, RequestError
from felix.frames import FrameType, frame_header
from felix.messages import (
    DataKeySealed,
    GetDataKey,
    GetLinkSecret,
    GetStreamStatement,
    LinkSecretSealed,
    LinkState,
    StreamStated,
)
from felix.names import SpiffeId, StreamName
from keys.handoff import scope_of, seal_data_key
from keys.hybrid import HybridPublicKey
from keys.link import LinkSecretScope, seal_link_secrets
from keys.shared import RegionKeys
from keys.signing import SigningKey
from policy.grant import Allowed
from policy.terms import pseudonym_scope
from region.broker import Broker
from region.governance.service import Governance
from region.log.ring import Entry
from region.log.shard import ShardLog
from region.streams.hosted import HostedStream

LINKS_MAX: Final = 10_000
"""Link shards on the board, per agent: each reports its own, and none can take the place of another's. Then the one that was reported longest ago goes: its link has
ended."""
BRIDGES_MAX: Final = 1_000
"""Agents on the board. Then the one goes that reported longest ago: bridges come and go under other names."""


class SealedReader:
    """One subscription of a bridge, under one export grant."""

    def __init__(
        self,
        governance: Governance,
        bridge: SpiffeId,
        stream: StreamName,
        grant_id: str,
        hosted: Callable[[], HostedStream | None],
    ) -> None:
        self._governance = governance
        self._hosted = hosted
        self._bridge = bridge
        self._stream = stream
        self._grant_id = grant_id

    def check(self) -> Allowed:
        """Raises the refusal, which is then also a DENY leaf."""
        allowed = self._governance.check_export(self._bridge, self._grant_id, self._stream, "read")
        hosted = self._hosted()
        if hosted is not None and hosted.compacts:
            raise RequestError(
                f"{self._stream} is compacted: what was announced as crossing could not be sent again as it was.",
                code=Code.UNSUPPORTED,
                hint="Grant a stream that is not compacted, and compact at the destination.",
            )
        return allowed

    def refusal(self) -> FelixError | None:
        """Why the subscription may not go on, if it may not."""
        try:
            self.check()
        except FelixError as error:
            return error
        return None

    async def read(self, shard: ShardLog, offset: int, max_bytes: int) -> list[Entry]:
        """Frames with batches as they stand on disk. The grant is asked for before and after the wait."""
        self.check()
        entries = await shard.read_sealed(offset, max_bytes)
        self.check()
        return [
            replace(entry, data=b"".join((frame_header(FrameType.BATCH, len(entry.data)), entry.data)))
            for entry in entries
        ]


class ExportService:
    """One per broker."""

    def __init__(
        self, broker: Broker, governance: Governance, keyring: RegionKeys, receipt_key: SigningKey
    ) -> None:
        self._broker = broker
        self._governance = governance
        self._keyring = keyring
        self._receipt_key = receipt_key
        self._links: BoundedMap[str, BoundedMap[tuple[str, str, int], LinkState]] = BoundedMap(BRIDGES_MAX)

    def reader(self, bridge: SpiffeId, stream: StreamName, grant_id: str) -> SealedReader:
        """For a subscription that asks for sealed batches. Raises the refusal."""
        self._broker.refuse_reserved(stream.tenant)
        reader = SealedReader(
            self._governance, bridge, stream, grant_id, partial(self._broker.streams.get, stream)
        )
        reader.check()
        hosted = self._broker.streams.get(stream)
        if hosted is not None and hosted.ephemeral:
            raise RequestError(
                f"{stream} is ephemeral: nothing of it is kept, so what crossed could not be proved.",
                code=Code.UNSUPPORTED,
                hint="Grant a durable stream.",
            )
        return reader

    async def data_key(self, bridge: SpiffeId, request: GetDataKey) -> DataKeySealed:
        """The data key of batches of a granted stream, sealed to the bridge. Raises the refusal, KeyUnknownError."""
        stream = StreamName.parse(request.stream)
        self._broker.refuse_reserved(stream.tenant)
        self._governance.check_export(bridge, request.grant, stream, "take a data key")
        hosted = self._broker.stream(stream)
        self._broker.require_led(hosted)
        recipient = HybridPublicKey(request.public_key)
        # A derived key follows from where it seals: asked for another place, it is another key, which opens nothing.
        key = await asyncio.to_thread(
            self._keyring.opening_key, stream, hosted.incarnation, request.shard, request.epoch, request.key
        )
        # The grant is for the stream as it is: what an earlier one of its name held was deleted.
        if key.stream != stream or key.incarnation != self._broker.stream(stream).incarnation:
            raise self._governance.denied(
                RequestError(f"Data key {request.key.hex()} is not one of {stream}.", code=Code.KEY_SCOPE),
                actor=bridge,
                action="take a data key",
                stream=str(stream),
                grant_id=request.grant,
            )
        # Asked again: it may have been revoked while the keyring was waited for.
        allowed = self._governance.check_export(bridge, request.grant, stream, "take a data key")
        scope = scope_of(key, grant_id=allowed.grant, terms_hash=allowed.terms_hash, bridge=bridge)
        sealed = seal_data_key(key, scope, recipient)
        return DataKeySealed(sealed, self._broker.region, str(stream), key.incarnation, key.shard, key.epoch)

    async def link_secret(self, bridge: SpiffeId, request: GetLinkSecret) -> LinkSecretSealed:
        """The secrets of one grant on one stream, sealed to the bridge. Raises the refusal."""
        stream = StreamName.parse(request.stream)
        allowed = self._governance.check_export(bridge, request.grant, stream, "take the link's secrets")
        recipient = HybridPublicKey(request.public_key)
        hosted = self._broker.stream(stream)
        self._broker.require_led(hosted)
        secrets = await asyncio.to_thread(
            self._keyring.link_secrets,
            stream,
            hosted.incarnation,
            allowed.grant,
            allowed.terms_hash,
            pseudonym_scope(allowed.terms),
        )
        self._governance.check_export(bridge, request.grant, stream, "take the link's secrets")
        scope = LinkSecretScope(
            self._broker.region, stream, hosted.incarnation, allowed.grant, allowed.terms_hash, bridge
        )
        return LinkSecretSealed(seal_link_secrets(secrets, scope, recipient))

    async def stream_statement(self, bridge: SpiffeId, request: GetStreamStatement) -> StreamStated:
        """The signed statement of a granted stream's shard. Raises the refusal, or UnavailableError if the shard does not
        serve.
        """
        stream = StreamName.parse(request.stream)
        self._broker.refuse_reserved(stream.tenant)
        self._governance.check_export(bridge, request.grant, stream, "take a stream statement")
        hosted = self._broker.stream(stream)
        self._broker.require_led(hosted)
        shard = hosted.shard(request.shard)
        # An agent that has the statement gets no record of an epoch that it does not name, as long as this broker runs.
        await shard.begin_due_epoch()
        # Signed is what a leader says: another one may have been elected while this waited.
        self._broker.require_led(hosted)
        statement = StreamStatement(
            region=self._broker.region,
            stream=str(stream),
            incarnation=hosted.incarnation,
            shards=hosted.shard_count,
            shard=request.shard,
            log_start=shard.log_start_offset,
            log_end=max(shard.synced_offset, shard.log_start_offset),
            epochs=tuple(Epoch(start.epoch, start.start_offset) for start in shard.epochs.starts),
            time_ms=self._broker.clock_ms(),
        )
        return StreamStated(sign_statement(statement, self._receipt_key))

    # -- the board of links ----------------------------------------------------------------------------

    def report(self, bridge: SpiffeId, links: list[LinkState]) -> None:
        """Take what an agent says about its links. Raises RequestError(FORBIDDEN) for anybody but a bridge of this region,
        and for another's links."""
        if bridge.kind != "bridge" or bridge.region != self._broker.region:
            raise RequestError(
                f"{bridge} cannot report links; a bridge of {self._broker.region} can.", code=Code.FORBIDDEN
            )
        for link in links:
            if link.bridge != str(bridge):
                raise RequestError(f"{bridge} cannot report for another bridge.", code=Code.FORBIDDEN)
        if not links:
            return
        board = self._links.use(str(bridge))
        if board is None:
            board = BoundedMap(LINKS_MAX)
            self._links.put(str(bridge), board)
        for link in links:
            board.put((link.grant, link.stream, link.shard), link)

    def links(self) -> list[LinkState]:
        """All links, by grant, stream and shard."""
        found = (link for board in self._links.values() for link in board.values())
        return sorted(found, key=lambda link: (link.grant, link.stream, link.shard, link.bridge))
