"""The catalog's live mirror: what a broker asks at every request, without I/O.

The mirror loads the region's records and follows the store's watch. It is never more than the watch's delay
behind (milliseconds), says at which revision it is, and says when it is cut off.

Invariants:
- after `start`, each record is as it was at `revision` or, right after a load, newer; `revision` only grows, unless
  the store itself was put back;
- a deletion is never missed: after a watch that cannot be resumed, everything is loaded again and compared,
  and what is gone is reported as gone;
- while the store is away the mirror keeps what it knows. Losing metadata removes nothing from it;
- a record that cannot be read grants nothing: rights count as none, a policy as none. A stream, a subscription and a quota keep
  their last readable record: the data of the one is still there, and no limit is more than any. `faults` names each.

Used by the broker; one per process. Callbacks run in the event loop, right after the change is visible, and
must return quickly. They belong to one loop: no locks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from felix.errors import FelixError
from felix.names import SpiffeId, StreamName
from felix.news import News
from felix.quota import QuotaLimits, Scope
from felix.runtime.port import Runtime
from felix.runtime.real import REAL
from felix.settings import NamespaceSettings
from policy.access import Right, parse_rights
from region.metadata.following import Follower
from region.metadata.port import MetadataStore
from region.metadata.records import (
    DeletedStream,
    DocumentKind,
    Keys,
    Policy,
    PolicyPointer,
    Rights,
    Side,
    Stream,
    Subscription,
    decode,
    decode_stream,
    decode_subscription,
)
from region.metadata.transaction import Change, Entry, Event

_log = logging.getLogger(__name__)

Section = Literal[
    "streams",
    "deleted",
    "subscriptions",
    "rights",
    "grants",
    "revocations",
    "denies",
    "policy",
    "trusted",
    "pins",
    "signing_keys",
    "quotas",
    "namespaces",
]
_SECTIONS: Final = (
    "streams",
    "deleted",
    "subscriptions",
    "rights",
    "grants",
    "revocations",
    "denies",
    "policy",
    "trusted",
    "pins",
    "signing_keys",
    "quotas",
    "namespaces",
)


@dataclass(frozen=True, slots=True)
class MirrorChange:
    """One record changed. `name`: the key below its section, such as `acme/ops/crew` or `export/g-17`.
    `is_gone`: deleted. `revision`: of the store; several changes of one transaction share it."""

    section: Section
    name: str
    is_gone: bool
    revision: int


class CatalogMirror:
    """Start with `start`, end with `close`; the store stays open."""

    def __init__(self, store: MetadataStore, region: str, runtime: Runtime = REAL) -> None:
        self._store = store
        self._keys = Keys(region)
        self._raw: dict[str, Entry] = {}
        self._streams: dict[StreamName, Stream] = {}
        self._rights: dict[SpiffeId, tuple[Right, ...]] = {}
        self._deleted: dict[str, DeletedStream] = {}
        self._subscriptions: dict[str, Subscription] = {}
        self._subscriptions_of: dict[str, dict[str, Subscription]] = {}
        self._quotas: dict[tuple[Scope, str], QuotaLimits] = {}
        self._namespaces: dict[str, NamespaceSettings] = {}
        self._policy: Policy | None = None
        self._faults: dict[str, str] = {}
        self._callbacks: list[Callable[[MirrorChange], None]] = []
        self._revision = 0
        self._news = News()
        self._follower = Follower(
            "The region's catalog",
            store,
            self._keys.prefix,
            runtime.random,
            revision=lambda: self._revision,
            load=self._reload,
            apply=self._apply,
            loads_after_each=True,
        )

    # What the broker asks

    @property
    def revision(self) -> int:
        """The store's revision that the mirror has caught up with; 0 before `start`."""
        return self._revision

    @property
    def is_current(self) -> bool:
        """False while the mirror is cut off from the store: what it answers may be out of date."""
        return self._follower.is_current

    @property
    def faults(self) -> Mapping[str, str]:
        """Records that cannot be read, by key, with the reason. For `felix region status`."""
        return MappingProxyType(self._faults)

    @property
    def streams(self) -> Mapping[StreamName, Stream]:
        """Every stream of the region."""
        return MappingProxyType(self._streams)

    @property
    def deleted_streams(self) -> Mapping[str, DeletedStream]:
        """Marks of explicit deletions, by incarnation: only their data may be removed."""
        return MappingProxyType(self._deleted)

    def deletions(self) -> dict[str, int]:
        """The revision of each mark of a deletion, by incarnation."""
        return {
            incarnation: self._raw[self._keys.deleted(incarnation)].mod_revision
            for incarnation in self._deleted
        }

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        """Durable subscriptions, by `tenant/namespace/stream/name`."""
        return MappingProxyType(self._subscriptions)

    def subscriptions_of(self, stream: str) -> Mapping[str, Subscription]:
        """Durable subscriptions of one stream, by name."""
        return MappingProxyType(self._subscriptions_of.get(stream, {}))

    @property
    def policy(self) -> Policy | None:
        """The signed residency policy in force. None allows nothing."""
        return self._policy

    def rights(self, identity: SpiffeId) -> tuple[Right, ...]:
        """What an identity may do; nothing where it is unknown."""
        return self._rights.get(identity, ())

    def document(self, kind: DocumentKind, side: Side, document_id: str) -> bytes | None:
        """A grant's, revocation's or denial's signed bytes, or None."""
        entry = self._raw.get(self._keys.document(kind, side, document_id))
        return None if entry is None else entry.value

    def documents(self, kind: DocumentKind, side: Side) -> dict[str, bytes]:
        """All of one kind and side by id. Copies: for changes and listings, not for each request."""
        return self._under(f"{kind}/{side}/")

    def rights_table(self) -> dict[str, list[str]]:
        """All rights as texts, by identity. A copy: for changes, not for each request."""
        return {str(identity): [str(right) for right in rights] for identity, rights in self._rights.items()}

    def trusted_revision(self, region: str) -> int:
        """The revision at which a region's bundle was written; 0 where there is none."""
        entry = self._raw.get(self._keys.trusted(region))
        return 0 if entry is None else entry.mod_revision

    def trusted(self) -> dict[str, bytes]:
        """Bundles of other regions' authorities, by region."""
        return self._under("trusted/")

    def pin_revision(self, region: str) -> int:
        """The revision at which a region's pin was written; 0 where there is none."""
        entry = self._raw.get(self._keys.pin(region))
        return 0 if entry is None else entry.mod_revision

    def pins(self) -> dict[str, bytes]:
        """This region's pins of other regions' bundles, by region."""
        return self._under("pins/")

    @property
    def signing_keys(self) -> Entry | None:
        """What the region's audit log says of its policy and receipt keys, as somebody wrote it here: a signed note (region.trust.signing_key_note)."""
        return self._raw.get(self._keys.signing_keys())

    @property
    def quotas(self) -> Mapping[tuple[Scope, str], QuotaLimits]:
        """Limits of tenants, by name, and of identities, by SPIFFE id, that have some of their own."""
        return MappingProxyType(self._quotas)

    @property
    def namespaces(self) -> Mapping[str, NamespaceSettings]:
        """Settings of namespaces, by `tenant/namespace`."""
        return MappingProxyType(self._namespaces)

    def _under(self, section: str) -> dict[str, bytes]:
        prefix = self._keys.prefix + section
        found = sorted(key for key in self._raw if key.startswith(prefix))
        return {key.removeprefix(prefix): self._raw[key].value for key in found}

    # Following

    def on_change(self, callback: Callable[[MirrorChange], None]) -> Callable[[], None]:
        """Call `callback` after each change; answers a function that ends it. Register before `start` to be told
        of everything, what was there already included."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    async def start(self) -> None:
        """Load everything, then follow in the background. Raises UnavailableError."""
        await self._follower.start()

    async def close(self) -> None:
        """Stop following."""
        await self._follower.close()

    @property
    def advanced(self) -> asyncio.Event:
        """Set at the next change. To wait for a condition without missing a change: take this event, check the condition, then
        wait for the event.
        """
        return self._news.following

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds that only a change can bring about. Bound it with a timeout."""
        await self._news.until(holds)

    async def wait_for(self, revision: int) -> None:
        """Wait until the mirror has seen `revision`, such as one's own write's. Bound it with a timeout."""
        await self.until(lambda: self._revision >= revision)

    async def _reload(self) -> None:
        snapshot = await self._store.load(self._keys.prefix)
        present = {entry.key: entry for entry in snapshot.entries if self._section(entry.key)}
        events = [Event(key, None) for key in self._raw if key not in present]
        events += [
            Event(key, entry)
            for key, entry in present.items()
            if (old := self._raw.get(key)) is None
            or old.mod_revision != entry.mod_revision
            or old.value != entry.value
        ]
        # Before callbacks ask by it.
        self._follower.is_current = True
        self._apply(Change(snapshot.revision, tuple(events)), forced=True)

    def _section(self, key: str) -> Section | None:
        head = key.removeprefix(self._keys.prefix).split("/", 1)[0]
        for section in _SECTIONS:
            if head == section:
                return section
        return None

    def _apply(self, change: Change, *, forced: bool = False) -> None:
        """Take over a change. What a page of a load already showed in a newer state is passed over."""
        told: list[MirrorChange] = []
        for event in change.events:
            section = self._section(event.key)
            if section is None:
                continue
            held = self._raw.get(event.key)
            if not forced and held is not None and held.mod_revision >= change.revision:
                continue
            if event.entry is None:
                if self._raw.pop(event.key, None) is None:
                    continue
            else:
                self._raw[event.key] = event.entry
            name = event.key.removeprefix(f"{self._keys.prefix}{section}/")
            self._take(section, name, event.key, event.entry)
            told.append(MirrorChange(section, name, event.entry is None, change.revision))
        if any(one.section == "policy" for one in told):
            self._take_policy()
        self._revision = change.revision
        self._news.tell()
        for one in told:
            for callback in tuple(self._callbacks):
                try:
                    callback(one)
                except Exception:
                    # Another user's mistake must not stop the mirror: revocations come through it.
                    _log.exception("A callback of the catalog's mirror failed")

    def _take(self, section: Section, name: str, key: str, entry: Entry | None) -> None:
        """Decode a record into the map that answers for it."""
        self._faults.pop(key, None)
        try:
            match section:
                case "streams":
                    stream_name = StreamName.parse(name)
                    if entry is None:
                        self._streams.pop(stream_name, None)
                    else:
                        self._streams[stream_name] = decode_stream(entry.value, key, entry.mod_revision)
                case "deleted":
                    self._deleted.pop(name, None)
                    if entry is not None:
                        self._deleted[name] = decode(entry.value, DeletedStream, key)
                case "subscriptions":
                    stream, _, own = name.rpartition("/")
                    if entry is None:
                        self._subscriptions.pop(name, None)
                        held = self._subscriptions_of.get(stream, {})
                        held.pop(own, None)
                        if not held:
                            self._subscriptions_of.pop(stream, None)
                    else:
                        made = decode_subscription(entry.value, key, entry.mod_revision)
                        self._subscriptions[name] = made
                        self._subscriptions_of.setdefault(stream, {})[own] = made
                case "rights":
                    identity = SpiffeId.parse("spiffe://" + name)
                    self._rights.pop(identity, None)
                    if entry is not None:
                        texts = decode(entry.value, Rights, key).rights
                        self._rights[identity] = tuple(
                            right for text in texts for right in parse_rights(text)
                        )
                case "quotas":
                    scope: Scope = "identity" if "/" in name else "tenant"
                    holder = (scope, f"spiffe://{name}" if scope == "identity" else name)
                    if entry is None:
                        self._quotas.pop(holder, None)
                    else:
                        if scope == "identity":
                            SpiffeId.parse(holder[1])
                        else:
                            StreamName.parse(f"{name}/a/a")
                        limits = decode(entry.value, QuotaLimits, key)
                        limits.check(scope)
                        self._quotas[holder] = limits
                case "namespaces":
                    self._namespaces.pop(name, None)
                    if entry is not None:
                        self._namespaces[name] = decode(entry.value, NamespaceSettings, key)
                case _:
                    pass
        except FelixError as error:
            self._faults[key] = str(error)
            _log.error("%s: %s", key, error)

    def _take_policy(self) -> None:
        self._policy = None
        pointer_key = self._keys.policy_pointer()
        self._faults.pop(pointer_key, None)
        pointer = self._raw.get(pointer_key)
        if pointer is None:
            return
        try:
            version = decode(pointer.value, PolicyPointer, pointer_key).version
        except FelixError as error:
            self._faults[pointer_key] = str(error)
            _log.error("%s", error)
            return
        document = self._raw.get(self._keys.policy_version(version))
        if document is None:
            self._faults[pointer_key] = f"Policy version {version} is in force but its document is missing."
            _log.error("%s", self._faults[pointer_key])
            return
        self._policy = Policy(version, document.value)
