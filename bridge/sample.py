"""A sample of what would cross: records read as the agent reads them, judged as it judges them, and sent nowhere.

Nothing here opens an egress log, writes a leaf or reaches a destination. Values are shown, so a sample is for people in the
source region. `judge` is pure; `sample_as_bridge` reads sealed batches under a grant that holds, with the link's own
secrets, so pseudonyms are the real ones; `sample_as_reader` reads as a subscriber with a right of its own, for a grant
that is not in force yet, and its pseudonyms are made with a key that is thrown away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from bridge.agent_files import load_files, region_profile
from bridge.config import BridgeConfig, paths_of
from bridge.crossing import LOOP, NO_BRIDGE, ONWARD, PATH_UNKNOWN, compile_terms, open_sealed
from bridge.wire import SealedBatch, SealedFeed
from felix.batch import Record, decode_header
from felix.client import RegionClient
from felix.connection import RegionConnection
from felix.errors import Code, ProtocolError, RequestError
from felix.messages import (
    DescribeStream,
    GetDataKey,
    GetLinkSecret,
    ListDocuments,
    ShardState,
    StreamState,
)
from felix.names import StreamName
from felix.provenance import PATH_HEADER, parse_path
from felix.runtime.real import REAL
from felix.steps import finished
from keys.envelope import DataKey
from keys.handoff import HandoffScope, open_data_key
from keys.link import SECRET_BYTES, LinkSecrets, LinkSecretScope, open_link_secrets
from policy.absent import Absent, absent_fields
from policy.grant import ExportGrant, RefusalKind, check_path, open_export
from policy.signed import SignedDocument
from policy.terms import GrantTerms
from policy.transform import FieldOutcome, Transform

SAMPLE_RECORDS_MAX: Final = 10_000
"""A sample is for people to look at."""
SAMPLE_TIMEOUT_S: Final = 30.0
_CREDIT_BYTES: Final = 4 << 20


DataKeyOf = Callable[[bytes], Awaitable[DataKey]]


class SampledRecord(NamedTuple):
    """One record. `outcome` is crosses, withheld or filtered; fields are JSON texts, before and after."""

    shard: int
    offset: int
    outcome: str
    reason: str
    fields: tuple[FieldOutcome, ...]
    key_before: bytes | None
    key_after: bytes | None
    headers: dict[str, bytes]


class SampledField(NamedTuple):
    """What happens to one field: in how many records, and in one of them as JSON text (`after` is empty where it does not cross)."""

    path: str
    action: str
    records: int
    before: str
    after: str


class Sample(NamedTuple):
    """A sample of one stream under one grant. `is_exact`: hashes and pseudonyms are those that would cross."""

    grant: str
    stream: str
    destination_region: str
    destination_stream: str
    records: tuple[SampledRecord, ...]
    is_exact: bool
    absent: tuple[Absent, ...] = ()
    """fields that the grant names and none of these records has"""

    def count(self, outcome: str) -> int:
        """How many records have this outcome."""
        return sum(record.outcome == outcome for record in self.records)

    def fields(self) -> list[SampledField]:
        """Each field with what happens to it, by path; the example is of one record, where possible one that crosses and has a value."""
        shown: dict[tuple[str, str], tuple[int, int, FieldOutcome]] = {}
        for record in self.records:
            for each in record.fields:
                worth = 2 * (record.outcome == "crosses") + (each.before not in ("", "null"))
                count, best, example = shown.get((each.path, each.action), (0, -1, each))
                if worth > best:
                    best, example = worth, each
                shown[each.path, each.action] = (count + 1, best, example)
        return [
            SampledField(path, action, count, example.before, example.after or "")
            for (path, action), (count, _, example) in sorted(shown.items())
        ]


def judge(
    shard: int,
    records: Iterable[Record],
    grant_id: str,
    terms: GrantTerms,
    transform: Transform,
    bridged: Container[int] | None = None,
) -> list[SampledRecord]:
    """What would become of each record. `bridged`: offsets of those that a bridge brought; None: whoever reads cannot know, and takes each
    record's path as a bridge's."""
    found = []
    for record in records:
        key = None if record.key is None else bytes(record.key)
        strayed = _strayed(record, grant_id, terms, bridged is None or record.offset in bridged)
        if strayed is not None:
            found.append(
                SampledRecord(shard, record.offset, "withheld", ": ".join(strayed), (), key, None, {})
            )
            continue
        plan = transform.plan(record.key, record.headers, record.payload)
        found.append(
            SampledRecord(
                shard, record.offset, plan.outcome, plan.reason, plan.fields, key, plan.key, plan.headers
            )
        )
    return found


def _strayed(record: Record, grant_id: str, terms: GrantTerms, is_bridged: bool) -> tuple[str, str] | None:
    value = record.headers.get(PATH_HEADER)
    if value is None:
        return None
    if not is_bridged:
        return PATH_UNKNOWN, NO_BRIDGE
    try:
        refusal = check_path(grant_id, terms, parse_path(value))
    except RequestError as error:
        return LOOP, error.sentence
    if refusal is None:
        return None
    return (LOOP if refusal.kind is RefusalKind.LOOP else ONWARD), refusal.sentence


async def sample_as_reader(
    client: RegionClient, grant_id: str, terms: GrantTerms, count: int, stream: str = ""
) -> Sample:
    """The newest `count` records of the stream, read under the client's own right to subscribe.

    `stream` is needed where the grant names several. Raises what the region refuses it with.
    """
    name = _stream_of(terms, stream)
    _check_count(count)
    secrets = LinkSecrets(REAL.random.randbytes(SECRET_BYTES), REAL.random.randbytes(SECRET_BYTES))
    transform = compile_terms(terms, secrets)
    state = await client.describe_stream(name)
    found: list[SampledRecord] = []
    payloads: list[bytes] = []
    for shard, first, left in shares_of(state.state, count):
        subscription = client.stream(name).subscribe(start=first, shards=[shard])
        with suppress(TimeoutError):
            async with asyncio.timeout(SAMPLE_TIMEOUT_S):
                async for record in subscription:
                    found += judge(shard, [record], grant_id, terms, transform)
                    payloads.append(bytes(record.payload))
                    left -= 1
                    if not left:
                        break
    return _sample(grant_id, name, terms, found, payloads, False)


async def sample_as_bridge(
    config: BridgeConfig, base: Path, grant_id: str, count: int, stream: str = ""
) -> Sample:
    """The newest `count` records, read as the agent of this configuration reads them, under a grant that holds.

    Raises what the source region refuses it with, RequestError where there is no such grant.
    """
    _check_count(count)
    files = await asyncio.to_thread(load_files, config, paths_of(config, base))
    bundle = files.bundles[config.source]
    profile = region_profile(
        bundle, config.source_addresses, config.source_server_name, files.identity, config.engine
    )
    connection = RegionConnection(profile)
    await connection.open()
    try:
        export = await _export(connection, grant_id, {config.source: bundle.policy_keys})
        terms = export.terms
        name = _stream_of(terms, stream)
        state = await connection.request(DescribeStream(name))
        secret = await connection.request(GetLinkSecret(grant_id, name, files.handoff.public.encoded))
        terms_hash = bytes.fromhex(export.terms_hash)
        bridge = files.identity.spiffe_id
        scope = LinkSecretScope(
            config.source, StreamName.parse(name), state.incarnation, grant_id, terms_hash, bridge
        )
        transform = compile_terms(terms, open_link_secrets(secret.sealed, scope, files.handoff))
        keys: dict[bytes, DataKey] = {}

        async def data_key(key_id: bytes) -> DataKey:
            if key_id not in keys:
                answer = await connection.request(
                    GetDataKey(grant_id, name, key_id, files.handoff.public.encoded)
                )
                handoff = HandoffScope(
                    key_id, config.source, StreamName.parse(name), answer.incarnation, answer.shard,
                    answer.epoch, grant_id, terms_hash, bridge,
                )  # fmt: skip
                keys[key_id] = open_data_key(answer.sealed, handoff, files.handoff)
            return keys[key_id]

        found: list[SampledRecord] = []
        payloads: list[bytes] = []
        for shard, first, left in shares_of(state.state, count):
            bridged: set[int] = set()
            records = await _read_shard(
                connection, name, grant_id, state, shard, first, left, data_key, bridged
            )
            found += judge(shard, records, grant_id, terms, transform, bridged)
            payloads += [bytes(record.payload) for record in records]
        return _sample(grant_id, name, terms, found, payloads, True)
    finally:
        await connection.close()


async def _read_shard(
    connection: RegionConnection,
    name: str,
    grant_id: str,
    state: StreamState,
    shard: int,
    first: int,
    count: int,
    data_key: DataKeyOf,
    bridged: set[int],
) -> list[Record]:
    """`bridged` gets the offsets of the batches that a bridge brought."""
    link = connection.link
    if link is None:
        raise ProtocolError("The session with the source was lost.", code=Code.DISCONNECTED)
    arrived = asyncio.Event()
    feed = await SealedFeed.open(
        link,
        name,
        grant_id,
        shard=shard,
        offset=first,
        incarnation=state.incarnation,
        credit_bytes=_CREDIT_BYTES,
        arrived=arrived,
    )
    found: list[Record] = []
    last = first + count
    try:
        async with asyncio.timeout(SAMPLE_TIMEOUT_S):
            while len(found) < count:
                arrived.clear()
                item = feed.take_nowait()
                if item is None:
                    await arrived.wait()
                elif isinstance(item, SealedBatch):
                    key = await data_key(decode_header(item.body).key_id)
                    opened = finished(open_sealed(item.body, key))
                    feed.consumed(item.frame_bytes)
                    records: Sequence[Record] = opened.records or ()
                    if opened.header.is_bridged:
                        bridged.update(record.offset for record in records)
                    found += [record for record in records if first <= record.offset < last]
                    if opened.header.next_offset >= last:
                        break
                elif item.next_offset >= last:
                    break
    except TimeoutError:
        pass
    finally:
        feed.close()
    return found


async def _export(
    connection: RegionConnection, grant_id: str, trusted: dict[str, tuple[bytes, ...]]
) -> ExportGrant:
    page = await connection.request(ListDocuments("export", "", 500))
    data = page.documents.get(grant_id)
    if data is None:
        raise RequestError(
            f"{connection.profile.region} shows this bridge no grant {grant_id[:40]}.",
            code=Code.GRANT_MISSING,
            hint="List them with `felix bridge list`.",
        )
    return open_export(SignedDocument.parse(data), trusted)


def _stream_of(terms: GrantTerms, stream: str) -> str:
    if not terms.wildcard:
        return terms.stream
    if not stream or not terms.pattern.matches(StreamName.parse(stream)):
        raise RequestError(f"The grant is for {terms.stream}: name one of these streams.")
    return stream


def _check_count(count: int) -> None:
    if not 0 < count <= SAMPLE_RECORDS_MAX:
        raise RequestError(f"A sample has 1 to {SAMPLE_RECORDS_MAX} records, not {count}.")


def shares_of(shards: Sequence[ShardState], count: int) -> list[tuple[int, int, int]]:
    """Shard, first offset and number of records: the newest ones, shared out over the shards that have any.

    What a short shard leaves of its share goes to longer ones: `count` records are read where the stream has so many.
    """
    held = {shard.shard: shard.high_watermark - shard.log_start for shard in shards}
    ends = {shard.shard: shard.high_watermark for shard in shards}
    shares, left = [], count
    shortest_first = sorted((shard for shard, records in held.items() if records > 0), key=held.__getitem__)
    for at, shard in enumerate(shortest_first):
        share = min(-(-left // (len(shortest_first) - at)), held[shard])
        if share:
            shares.append((shard, ends[shard] - share, share))
        left -= share
    return sorted(shares)


def _sample(
    grant_id: str,
    stream: str,
    terms: GrantTerms,
    records: list[SampledRecord],
    payloads: list[bytes],
    is_exact: bool,
) -> Sample:
    destination = str(terms.destination_of(StreamName.parse(stream)))
    absent = absent_fields(terms.transform, payloads)
    return Sample(grant_id, stream, terms.to_region, destination, tuple(records), is_exact, absent)
