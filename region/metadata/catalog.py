"""The catalog: a region's streams, rights, signed documents and quotas, over the metadata store.

Every write is a compare-and-swap on the revision that was read: no writer overwrites a value that it has not seen. Code that
needs an answer at each request asks the `mirror` instead, which does no I/O.

Invariants:
- a stream's incarnation id never changes, and no two streams have the same;
- a stream's record goes only together with a `deleted/<incarnation>` mark: missing metadata by itself never
  deletes data;
- signed documents are kept as the bytes that were signed. The catalog does not verify them; the code that acts on one does,
  because a metadata administrator must not be able to forge one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Final

import msgspec

from felix.errors import Code, CorruptionError, FelixError, RequestError, UnavailableError
from felix.names import SpiffeId, StreamName
from felix.quota import NO_LIMITS, QuotaLimits
from felix.settings import NamespaceSettings
from region.metadata.destroyed_keys import remove_made_up
from region.metadata.port import MetadataStore, OutcomeUnknownError
from region.metadata.records import (
    INCARNATION_BYTES,
    DeletedStream,
    DestroyedKey,
    Document,
    DocumentKind,
    Keys,
    Policy,
    PolicyPointer,
    Rights,
    Side,
    Stream,
    StreamConfig,
    Subscription,
    canonical_rights,
    check_stream_config,
    check_stream_update,
    decode,
    decode_stream,
    decode_subscription,
    encode,
    encode_subscription,
)
from region.metadata.transaction import Absent, Compare, Delete, Entry, ModRevision, Put, Write

log = logging.getLogger("felix.region.catalog")

_SWAPS_MAX: Final = 16
"""Tries of a compare-and-swap against other writers of the same record."""


class StreamsFullError(UnavailableError):
    """There are as many streams of this prefix (`acme/`, `acme/ops/`) as there may be."""

    default_code = Code.LIMIT_STREAMS

    def __init__(self, prefix: str, count: int) -> None:
        super().__init__(f"There are {count} streams {prefix}…, as many as there may be.")
        self.prefix, self.count = prefix, count


class _Keyed(msgspec.Struct, frozen=True):
    """Which key the record of a stream's key is of (keys.stream_key): 16 bytes in hex."""

    key: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]


def _key_of(sealed_by: Entry | None) -> str:
    """Empty where there is no record of a stream's key, or one that no broker wrote."""
    if sealed_by is None:
        return ""
    try:
        return msgspec.json.decode(sealed_by.value, type=_Keyed).key
    except msgspec.MsgspecError:
        return ""


class Catalog:
    """A region's catalog. Methods raise UnavailableError where the store cannot answer."""

    def __init__(self, store: MetadataStore, region: str) -> None:
        self.store = store
        self.keys = Keys(region)
        self._counting = asyncio.Lock()
        """One stream after the other is made where they are counted: each needs the count to stay as it is."""

    # Streams

    async def create_stream(
        self,
        name: StreamName,
        config: StreamConfig,
        *,
        incarnation: bytes,
        created_ms: int,
        most: Mapping[str, int] | None = None,
    ) -> Stream:
        """Create a stream; `incarnation`: 16 fresh random bytes. `most`: of streams of several brokers, how many there may be whose names begin so
        (`acme/`), however many brokers make some at once. Raises RequestError(ALREADY_EXISTS,
        CONFIG_INVALID), StreamsFullError, UnavailableError while the store is known to have gone back: what is created in it would go with it. Safe to
        try again with the same incarnation where the first answer was lost."""
        check_stream_config(name, config)
        if len(incarnation) != INCARNATION_BYTES:
            raise RequestError(f"An incarnation id has {INCARNATION_BYTES} bytes, not {len(incarnation)}.")
        key = self.keys.stream(name)
        stream = Stream(name=str(name), incarnation=incarnation.hex(), created_ms=created_ms, config=config)
        value = self._encode_stream(stream)
        compares: list[Compare] = [
            Absent(key),
            Absent(self.keys.deleted(stream.incarnation)),
            Absent(self.keys.frozen()),
        ]
        revision = 0
        with suppress(OutcomeUnknownError):
            if most:
                async with self._counting:
                    revision = await self._create_counted(name, compares, Put(key, value), most)
            else:
                result = await self.store.transact(compares, [Put(key, value)])
                revision = result.revision if result.succeeded else 0
        if not revision:
            found = await self.store.get(key)
            if found is None and await self.store.get(self.keys.frozen()) is not None:
                raise UnavailableError(
                    f"The stream {name} was not created: the metadata store went back to an earlier state.",
                    hint="`felix region status` says how the region is reconciled; create it then.",
                )
            if found is None or decode_stream(found.value, key, 0).incarnation != stream.incarnation:
                raise RequestError(
                    f"The stream {name} already exists."
                    if found
                    else f"The stream {name} could not be created: it was created or deleted at the same moment.",
                    code=Code.ALREADY_EXISTS if found else Code.CONFLICT,
                    hint="Describe it to see its settings." if found else "Try again.",
                )
            return decode_stream(found.value, key, found.mod_revision)
        return msgspec.structs.replace(stream, revision=revision)

    async def _create_counted(
        self, name: StreamName, compares: Sequence[Compare], put: Put, most: Mapping[str, int]
    ) -> int:
        """The revision of the new stream, 0 where something else than the count stood against it. Whoever makes a stream of a tenant whose streams are
        counted writes the tenant's key `made`, so the count that was read still holds where that key is as it was before."""
        guard = self.keys.made(name.tenant)
        for _ in range(_SWAPS_MAX):
            before = await self.store.get(guard)
            for prefix, count_max in most.items():
                count = len((await self.store.load(self.keys.prefix + "streams/" + prefix)).entries)
                if count >= count_max and await self.store.get(put.key) is None:
                    raise StreamsFullError(prefix, count)
            unchanged = ModRevision(guard, 0 if before is None else before.mod_revision)
            result = await self.store.transact([*compares, unchanged], [put, Put(guard, str(name).encode())])
            if result.succeeded:
                return result.revision
            if await self.store.get(guard) == before:
                return 0
        raise _contended(guard)

    async def describe_stream(self, name: StreamName) -> Stream:
        """Raises RequestError(NOT_FOUND)."""
        entry = await self.store.get(self.keys.stream(name))
        if entry is None:
            raise _no_stream(name)
        return decode_stream(entry.value, entry.key, entry.mod_revision)

    async def list_streams(self, prefix: str = "") -> list[Stream]:
        """Streams whose name starts with `prefix`, as in `acme/` or `acme/payments/or`, in order of name."""
        found = await self.store.load(self.keys.prefix + "streams/" + prefix)
        return [decode_stream(entry.value, entry.key, entry.mod_revision) for entry in found.entries]

    async def update_stream(self, name: StreamName, config: StreamConfig) -> Stream:
        """Change a stream's settings; number of shards and memory-or-disk stay. Raises RequestError(NOT_FOUND,
        CONFIG_INVALID)."""
        key = self.keys.stream(name)

        def change(entry: Entry | None) -> bytes:
            if entry is None:
                raise _no_stream(name)
            old = decode_stream(entry.value, key, entry.mod_revision)
            check_stream_update(name, old.config, config)
            return self._encode_stream(msgspec.structs.replace(old, config=config))

        value, revision = await self._swap(key, change)
        return decode_stream(value, key, revision)

    async def alter_stream(
        self, name: StreamName, incarnation: str, change: Callable[[StreamConfig], StreamConfig]
    ) -> Stream:
        """Change the settings as they are when they are changed: of two that alter different ones, both count.

        `incarnation` is hex. Raises as `update_stream`, and RequestError(CONFLICT) for another incarnation.
        """
        key = self.keys.stream(name)

        def altered(entry: Entry | None) -> bytes:
            if entry is None:
                raise _no_stream(name)
            old = decode_stream(entry.value, key, entry.mod_revision)
            if old.incarnation != incarnation:
                raise RequestError(f"The stream {name} was created anew meanwhile.", code=Code.CONFLICT)
            config = change(old.config)
            check_stream_update(name, old.config, config)
            return self._encode_stream(msgspec.structs.replace(old, config=config))

        value, revision = await self._swap(key, altered)
        return decode_stream(value, key, revision)

    async def delete_stream(
        self, name: StreamName, *, incarnation: str = "", deleted_ms: int, by: str = ""
    ) -> DeletedStream:
        """Delete a stream, with its key where that stands here, and leave the mark that lets brokers remove its data, and the record from which that
        key gets its leaf. With `incarnation` (hex), only that one. `by`: who asks (SPIFFE id). Raises RequestError(NOT_FOUND, CONFLICT)."""
        key = self.keys.stream(name)
        for _ in range(_SWAPS_MAX):
            entry = await self.store.get(key)
            if entry is None:
                raise _no_stream(name)
            stream = decode_stream(entry.value, key, entry.mod_revision)
            if incarnation and stream.incarnation != incarnation:
                raise RequestError(
                    f"The stream {name} is not the one you mean: it was deleted and created again.",
                    code=Code.CONFLICT,
                    hint="Describe it, then delete it with its present incarnation.",
                )
            incarnation = stream.incarnation
            sealed_by = await self.store.get(self.keys.stream_key(incarnation))
            mark = DeletedStream(
                name=str(name), incarnation=incarnation, deleted_ms=deleted_ms, by=by, key=_key_of(sealed_by)
            )
            mark_key = self.keys.deleted(incarnation)
            compares: list[Compare] = [
                ModRevision(key, entry.mod_revision),
                ModRevision(
                    self.keys.stream_key(incarnation), 0 if sealed_by is None else sealed_by.mod_revision
                ),
            ]
            writes: list[Write] = [Delete(key), Put(mark_key, encode(mark))]
            if sealed_by is not None:
                writes.append(Delete(sealed_by.key))
            if mark.key:
                await remove_made_up(self.store, self.keys.destroyed_key(mark.key), compares[-1])
                compares.append(Absent(self.keys.destroyed_key(mark.key)))
                destroyed = DestroyedKey(
                    key=mark.key,
                    level="stream",
                    stream=mark.name,
                    incarnation=incarnation,
                    by=by,
                    at_ms=deleted_ms,
                )
                writes.append(Put(self.keys.destroyed_key(mark.key), encode(destroyed)))
            try:
                result = await self.store.transact(compares, writes)
            except OutcomeUnknownError:
                if await self.store.get(mark_key) is None:
                    raise
                return mark
            if result.succeeded:
                return mark
        raise _contended(key)

    async def deleted_streams(self) -> list[DeletedStream]:
        """Marks of explicitly deleted streams."""
        found = await self.store.load(self.keys.prefix + "deleted/")
        return [decode(entry.value, DeletedStream, entry.key) for entry in found.entries]

    @staticmethod
    def _encode_stream(stream: Stream) -> bytes:
        fields = msgspec.structs.asdict(stream)
        del fields["revision"]
        return msgspec.json.encode(fields)

    # Durable subscriptions

    async def create_subscription(self, subscription: Subscription) -> Subscription:
        """Raises RequestError(ALREADY_EXISTS). Safe to try again with the same id where the first answer was lost."""
        key = self.keys.subscription(StreamName.parse(subscription.stream), subscription.name)
        revision = await self._put(key, encode_subscription(subscription), 0)
        return msgspec.structs.replace(subscription, revision=revision)

    async def move_subscription(self, subscription: Subscription, incarnation: str) -> Subscription:
        """From now on it counts the records of another incarnation (hex). Raises RequestError(CONFLICT, NOT_FOUND)."""
        key = self.keys.subscription(StreamName.parse(subscription.stream), subscription.name)

        def change(entry: Entry | None) -> bytes:
            held = None if entry is None else decode_subscription(entry.value, key, entry.mod_revision)
            if held is None or held.id != subscription.id:
                raise _no_subscription(subscription.stream, subscription.name)
            return encode_subscription(msgspec.structs.replace(held, incarnation=incarnation))

        value, revision = await self._swap(key, change)
        return decode_subscription(value, key, revision)

    async def alter_subscription(
        self, subscription: Subscription, change: Callable[[Subscription], Subscription]
    ) -> Subscription:
        """Change it as it is when it is changed. Raises RequestError(CONFLICT, NOT_FOUND), and what `change` does."""
        key = self.keys.subscription(StreamName.parse(subscription.stream), subscription.name)

        def altered(entry: Entry | None) -> bytes:
            held = None if entry is None else decode_subscription(entry.value, key, entry.mod_revision)
            if held is None or held.id != subscription.id:
                raise _no_subscription(subscription.stream, subscription.name)
            return encode_subscription(change(held))

        value, revision = await self._swap(key, altered)
        return decode_subscription(value, key, revision)

    async def delete_subscription(self, subscription: Subscription) -> int:
        """Only this one, not another that was made under its name since. Answers the revision. Raises
        RequestError(NOT_FOUND)."""
        key = self.keys.subscription(StreamName.parse(subscription.stream), subscription.name)
        for _ in range(_SWAPS_MAX):
            entry = await self.store.get(key)
            if (
                entry is None
                or decode_subscription(entry.value, key, entry.mod_revision).id != subscription.id
            ):
                raise _no_subscription(subscription.stream, subscription.name)
            result = await self.store.transact([ModRevision(key, entry.mod_revision)], [Delete(key)])
            if result.succeeded:
                return result.revision
        raise _contended(key)

    async def subscriptions(self, stream: str = "") -> list[Subscription]:
        """Of one stream, or of all."""
        found = await self.store.load(self.keys.prefix + "subscriptions/" + (f"{stream}/" if stream else ""))
        return [decode_subscription(entry.value, entry.key, entry.mod_revision) for entry in found.entries]

    # Rights

    async def rights(self, identity: SpiffeId) -> tuple[str, ...]:
        """An identity's rights; none where it is unknown."""
        entry = await self.store.get(self.keys.rights(identity))
        return () if entry is None else decode(entry.value, Rights, entry.key).rights

    async def list_rights(self) -> dict[SpiffeId, tuple[str, ...]]:
        """Every identity that has an entry, in order. One that cannot be read gives nobody a right, and is left out: the mirror's `faults` name it."""
        prefix = self.keys.prefix + "rights/"
        found = dict[SpiffeId, tuple[str, ...]]()
        for entry in (await self.store.load(prefix)).entries:
            with suppress(FelixError):
                identity = SpiffeId.parse("spiffe://" + entry.key.removeprefix(prefix))
                found[identity] = decode(entry.value, Rights, entry.key).rights
        return found

    async def change_rights(
        self, identity: SpiffeId, *, add: Sequence[str] = (), remove: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Add and take away rights (what is in both is taken away); answers what the identity has now, in order."""
        key = self.keys.rights(identity)
        added = set(canonical_rights(identity, add)) - set(canonical_rights(identity, remove))

        def change(entry: Entry | None) -> bytes:
            old = () if entry is None else decode(entry.value, Rights, key).rights
            kept = set(old) - set(canonical_rights(identity, remove))
            return encode(Rights(canonical_rights(identity, (*kept, *added))))

        value, _ = await self._swap(key, change)
        return decode(value, Rights, key).rights

    async def set_rights(
        self, identity: SpiffeId, rights: Sequence[str], held: Sequence[str] | None = None
    ) -> tuple[str, ...]:
        """Replace an identity's rights, also where what stands there cannot be read. `held`: raises RequestError(CONFLICT) where it has neither these nor `rights`."""
        new = canonical_rights(identity, rights)

        def change(entry: Entry | None) -> bytes:
            _require_held(identity, entry, held, new)
            return encode(Rights(new))

        await self._swap(self.keys.rights(identity), change)
        return new

    async def delete_rights(self, identity: SpiffeId, held: Sequence[str] | None = None) -> bool:
        """Remove an identity's entry; False where there was none. `held`: as of `set_rights`."""
        return await self._remove(
            self.keys.rights(identity), lambda entry: _require_held(identity, entry, held, ())
        )

    # Grants, revocations, denials

    async def put_document(
        self, kind: DocumentKind, side: Side, document_id: str, document: bytes, *, revision: int = 0
    ) -> Document:
        """Write signed bytes. `revision`: the one that is replaced; 0 where there must be none. The same bytes
        again are no error. Raises RequestError(ALREADY_EXISTS, CONFLICT)."""
        key = self.keys.document(kind, side, document_id)
        return Document(document_id, document, await self._put(key, document, revision))

    async def document(self, kind: DocumentKind, side: Side, document_id: str) -> Document | None:
        """One document, or None."""
        entry = await self.store.get(self.keys.document(kind, side, document_id))
        return None if entry is None else Document(document_id, entry.value, entry.mod_revision)

    async def list_documents(self, kind: DocumentKind, side: Side) -> list[Document]:
        """All of one kind and side, in order of id."""
        prefix = self.keys.document(kind, side, "x").removesuffix("x")
        found = await self.store.load(prefix)
        return [
            Document(entry.key.removeprefix(prefix), entry.value, entry.mod_revision)
            for entry in found.entries
        ]

    async def delete_document(self, kind: DocumentKind, side: Side, document_id: str) -> bool:
        """False where there was none."""
        return await self._remove(self.keys.document(kind, side, document_id))

    # Policy

    async def policy(self) -> Policy | None:
        """The policy in force; None where there is none, which allows nothing. Raises CorruptionError where its
        document is missing."""
        entry = await self.store.get(self.keys.policy_pointer())
        if entry is None:
            return None
        version = decode(entry.value, PolicyPointer, entry.key).version
        policy = await self.policy_version(version)
        if policy is None:
            # Pointer and document are written together and versions are not deleted by us.
            raise CorruptionError(
                f"Policy version {version} is in force but its document is not in the metadata store.",
                hint="Put a policy into force again; until then nothing may cross.",
            )
        return policy

    async def policy_version(self, version: int) -> Policy | None:
        """A policy of the past or the present: audit leaves name its version."""
        entry = await self.store.get(self.keys.policy_version(version))
        return None if entry is None else Policy(version, entry.value)

    async def put_policy(self, version: int, document: bytes, *, unbelieved: int = 0) -> None:
        """Put a signed policy into force. Versions only grow, but for one that the caller does not believe (`unbelieved`), which gives way to any. Raises
        RequestError(CONFLICT). The same again is no error."""
        pointer_key, key = self.keys.policy_pointer(), self.keys.policy_version(version)
        for _ in range(_SWAPS_MAX):
            entry = await self.store.get(pointer_key)
            current = 0 if entry is None else decode(entry.value, PolicyPointer, pointer_key).version
            if version == current and await self.policy_version(version) == Policy(version, document):
                return
            if version <= current and current != unbelieved:
                raise RequestError(
                    f"Policy version {version} cannot come into force: version {current} already is.",
                    code=Code.CONFLICT,
                    hint=f"Give the changed policy version {current + 1} and sign it again.",
                )
            compares: list[Compare] = [ModRevision(pointer_key, 0 if entry is None else entry.mod_revision)]
            writes: list[Write] = [
                Put(pointer_key, encode(PolicyPointer(version))),
                Put(key, document),
            ]
            try:
                if (await self.store.transact(compares, writes)).succeeded:
                    return
            except OutcomeUnknownError:
                if await self.policy() != Policy(version, document):
                    raise
                return
        raise _contended(pointer_key)

    # Trusted regions, quotas

    async def put_trusted(self, region: str, bundle: bytes, *, revision: int = 0) -> int:
        """Trust another region's authorities; `revision` as in put_document. Answers the new revision."""
        return await self._put(self.keys.trusted(region), bundle, revision)

    async def put_pin(self, region: str, pin: bytes, *, revision: int = 0) -> int:
        """Pin another region's bundle; `revision` as in put_document. Answers the new revision."""
        return await self._put(self.keys.pin(region), pin, revision)

    async def put_signing_keys(self, note: bytes, *, revision: int) -> int:
        """Write what the audit log says of the region's policy and receipt keys; `revision` as in put_document. Answers the new revision."""
        return await self._put(self.keys.signing_keys(), note, revision)

    async def delete_signing_keys(self, revision: int) -> bool:
        """Take out what was written at this revision. False where something else stands there by now."""
        key = self.keys.signing_keys()
        return (await self.store.transact([ModRevision(key, revision)], [Delete(key)])).succeeded

    async def put_log_keys(self, words: bytes, *, revision: int) -> int:
        """Write which keys of the region's own audit log have ended; `revision` as in put_document. Answers the new revision."""
        return await self._put(self.keys.log_keys(), words, revision)

    async def trusted(self) -> dict[str, bytes]:
        """Bundle by region."""
        return await self._opaque("trusted/")

    async def delete_trusted(self, region: str) -> bool:
        """False where there was none."""
        return await self._remove(self.keys.trusted(region))

    async def change_quota(
        self, holder: str | SpiffeId, by: QuotaLimits, unset: Sequence[str] = ()
    ) -> QuotaLimits:
        """Set the limits that `by` names, of a tenant or an identity, and take away those in `unset`; answers what it has
        now. Raises RequestError(CONFIG_INVALID)."""
        key = self.keys.quota(holder)
        scope = "identity" if isinstance(holder, SpiffeId) else "tenant"

        def change(entry: Entry | None) -> bytes:
            old = NO_LIMITS if entry is None else decode(entry.value, QuotaLimits, key)
            new = old.changed(by, list(unset))
            new.check(scope)
            return encode(new)

        value, _ = await self._swap(key, change)
        return decode(value, QuotaLimits, key)

    async def put_namespace(self, namespace: str, settings: NamespaceSettings) -> int:
        """Set a namespace's settings, checked by the caller. Answers the revision."""
        return (await self._swap(self.keys.namespace(namespace), lambda _: encode(settings)))[1]

    async def delete_namespace(self, namespace: str) -> bool:
        """False where there were none."""
        return await self._remove(self.keys.namespace(namespace))

    async def delete_quota(self, holder: str | SpiffeId) -> bool:
        """False where there was none."""
        return await self._remove(self.keys.quota(holder))

    # Compare and swap

    async def _opaque(self, section: str) -> dict[str, bytes]:
        prefix = self.keys.prefix + section
        found = await self.store.load(prefix)
        return {entry.key.removeprefix(prefix): entry.value for entry in found.entries}

    async def _swap(self, key: str, change: Callable[[Entry | None], bytes]) -> tuple[bytes, int]:
        """Read, change, write if nobody wrote in between; else again. Answers value and revision.

        `change` must give the same for what it gave before, so that a lost answer can be tried again.
        """
        lost: OutcomeUnknownError | None = None
        for _ in range(_SWAPS_MAX):
            entry = await self.store.get(key)
            value = change(entry)
            if entry is not None and entry.value == value:
                return value, entry.mod_revision
            try:
                result = await self.store.transact(
                    [ModRevision(key, 0 if entry is None else entry.mod_revision)], [Put(key, value)]
                )
            except OutcomeUnknownError as error:
                if lost is not None:
                    raise
                lost = error
                continue
            if result.succeeded:
                return value, result.revision
        raise _contended(key)

    async def _put(self, key: str, value: bytes, revision: int) -> int:
        try:
            result = await self.store.transact([ModRevision(key, revision)], [Put(key, value)])
            if result.succeeded:
                return result.revision
        except OutcomeUnknownError:
            entry = await self.store.get(key)
            if entry is None or entry.value != value:
                raise
        entry = await self.store.get(key)
        if entry is not None and entry.value == value:
            return entry.mod_revision
        if entry is not None and not revision:
            raise RequestError(
                f"The metadata record {key} already exists.",
                code=Code.ALREADY_EXISTS,
                hint="Read it, then replace it by its revision.",
            )
        raise RequestError(
            f"The metadata record {key} was changed since revision {revision}.",
            code=Code.CONFLICT,
            hint="Read it again before replacing it.",
        )

    async def _remove(self, key: str, require: Callable[[Entry], None] = lambda _: None) -> bool:
        """False where there is nothing. `require`: raises where what is there is not to go."""
        for _ in range(_SWAPS_MAX):
            entry = await self.store.get(key)
            if entry is None:
                return False
            require(entry)
            if (await self.store.transact([ModRevision(key, entry.mod_revision)], [Delete(key)])).succeeded:
                return True
        raise _contended(key)


def _require_held(
    identity: SpiffeId, entry: Entry | None, held: Sequence[str] | None, new: tuple[str, ...]
) -> None:
    """Raises RequestError(CONFLICT) where an identity has neither the rights that a change was chosen by, nor those that it leads to. What cannot be read gives none,
    as in `list_rights`."""
    if held is None:
        return
    has: tuple[str, ...] = ()
    with suppress(FelixError):
        has = () if entry is None else decode(entry.value, Rights, entry.key).rights
    if has not in (canonical_rights(identity, held), new):
        raise RequestError(
            f"The rights of {identity} were changed meanwhile.",
            code=Code.CONFLICT,
            hint="Read them again before replacing them.",
        )


def _no_stream(name: StreamName) -> RequestError:
    return RequestError(
        f"There is no stream {name}.", code=Code.NOT_FOUND, hint="List the streams, or create it."
    )


def _no_subscription(stream: str, name: str) -> RequestError:
    return RequestError(
        f"There is no subscription {name} of {stream}.",
        code=Code.NOT_FOUND,
        hint="List the subscriptions of the stream, or create it.",
    )


def _contended(key: str) -> RequestError:
    return RequestError(
        f"The metadata record {key} was changed by others {_SWAPS_MAX} times while this change was tried.",
        code=Code.CONFLICT,
        hint="Try again.",
    )
