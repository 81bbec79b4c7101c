"""What a region says of keys that it destroyed: one KEY leaf for each, in its own audit log, once the key is gone for good.

A destroyed key has a record in the metadata store (region.metadata.destroyed_keys), written before the key goes or with it. Steps, each resumed by the next
look after a crash:

1. the record stands; 2. the key is destroyed, at every broker of the region that may have it; 3. the record says how long the audit log is; 4. the leaf is
appended, and durable; 5. the record names the leaf.

Invariants:
- no leaf before step 2 is done for good: no broker has the wrapped key any more, or a root key that a copy elsewhere could be unwrapped with;
- no second leaf: after a crash between 3 and 5 the log is searched from where the record says;
- a record without a leaf is looked at until it has one, and keeps no other one from its leaf.

One event loop; what blocks is a thread's work. One per broker; the one that has the audit log writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from audit.leaf import Header, Kind, Leaf, Side, read_header
from audit.trail import Trail
from felix.errors import FelixError, RequestError, UnavailableError
from felix.messages import KeyState as KeyShown
from felix.names import StreamName
from felix.news import News
from felix.tasks import end_tasks
from keys.hierarchy import KeyState
from keys.keyring import Keyring
from region.cluster.key_rotation import KeyRotation
from region.metadata.destroyed_keys import DestroyedKeys, Held
from region.metadata.records import DeletedStream, DestroyedKey

log = logging.getLogger("felix.region.erasure")

DESTROYED: Final = "destroyed"
"""The action of the leaf."""
DESTROYING: Final = "destroying"
"""What `felix keys list` shows of a key without its leaf: some broker may have it still."""
AGAIN_S: Final = 2.0
"""How often is looked at what has no leaf yet: a broker that was down has started, or the audit log takes leaves again."""
WAIT_S: Final = 3.0
"""How long whoever deletes a stream waits for the leaf. Brokers that run have destroyed the key within milliseconds."""
LEAVES_SHOWN: Final = 3
"""Leaves that a sentence names."""


class Destruction(Protocol):
    """How keys go, in a region of one broker (`KeyringDestruction`) or of several (`SharedDestruction`)."""

    @property
    def ledger(self) -> DestroyedKeys:
        """The records."""
        ...

    def owes(self) -> bool:
        """Whether something is left to do: a key without its leaf, or the logs of a deleted stream that were open still."""
        ...

    async def carry_out(self) -> list[Held]:
        """Destroy what is to be destroyed here; the records whose keys are gone for good and that have no leaf. Raises FelixError."""
        ...

    async def begin_roots(self, by: str) -> list[bytes]:
        """Begin to destroy the roots that rotations retired; their ids. Raises RequestError(CONFLICT), and what reaching store and provider raises."""
        ...

    def holding(self, held: Held) -> tuple[str, ...]:
        """The brokers that may have the key still."""
        ...

    def is_foreign(self, held: Held) -> bool:
        """Whether the record is known to be no broker's: its key is in use."""
        ...


class KeyringDestruction:
    """Of a region of one broker. `marks`: the deleted streams, by incarnation. `is_closed`: whether a stream's logs are closed: nothing is
    sealed or opened any more."""

    def __init__(
        self,
        keyring: Keyring,
        ledger: DestroyedKeys,
        marks: Callable[[], Mapping[str, DeletedStream]],
        is_closed: Callable[[StreamName, str], Awaitable[bool]],
    ) -> None:
        self._keyring, self.ledger = keyring, ledger
        self._marks, self._is_closed = marks, is_closed
        self._is_open = False

    def owes(self) -> bool:
        """As `Destruction`."""
        return self._is_open or bool(self.ledger.without_leaf())

    async def carry_out(self) -> list[Held]:
        """As `Destruction`."""
        marks, self._is_open = self._marks(), False
        for entry in await asyncio.to_thread(self._keyring.live_streams):
            mark = marks.get(entry.incarnation.hex())
            name = StreamName.parse(entry.stream)
            if mark is None or mark.name != entry.stream:
                continue
            if not await self._is_closed(name, mark.incarnation):
                self._is_open = True
                continue
            record = DestroyedKey(
                key=entry.key_id.hex(),
                level="stream",
                stream=entry.stream,
                incarnation=mark.incarnation,
                by=mark.by,
                at_ms=self._keyring.now_ms(),
            )
            await self.ledger.add(record)
            await asyncio.to_thread(self._keyring.destroy, name, entry.incarnation)
        gone = []
        for held in self.ledger.without_leaf():
            key = bytes.fromhex(held.record.key)
            if held.record.level == "root":
                try:
                    await asyncio.to_thread(self._keyring.destroy_root, key)
                except RequestError as error:
                    # In use: no broker wrote that record. It gets no leaf, and the others theirs.
                    log.error(
                        "%s What the metadata store says of it was written by something other than Felix.",
                        error.sentence,
                    )
                    continue
            if self._keyring.state_of(key) is KeyState.DESTROYED:
                gone.append(held)
        return gone

    async def begin_roots(self, by: str) -> list[bytes]:
        """As `Destruction`. A root that a rotation retired wraps nothing: the rotation is one step."""
        roots = await asyncio.to_thread(self._keyring.retired_roots)
        for root in roots:
            await self.ledger.add(
                DestroyedKey(key=root.hex(), level="root", by=by, at_ms=self._keyring.now_ms())
            )
        return roots

    def holding(self, held: Held) -> tuple[str, ...]:
        """None: what is destroyed is destroyed here."""
        return ()

    def is_foreign(self, held: Held) -> bool:
        """As `Destruction`: the active root, or the key of a stream without a mark of its deletion."""
        record = held.record
        if self._keyring.state_of(bytes.fromhex(record.key)) is not KeyState.ACTIVE:
            return False
        return record.level == "root" or record.incarnation not in self._marks()


class SharedDestruction:
    """Of a region of several brokers. Each of them destroys what it has as it follows the store (region.cluster.key_rotation)."""

    def __init__(self, rotation: KeyRotation) -> None:
        self._rotation = rotation
        self.ledger = rotation.ledger

    def owes(self) -> bool:
        """As `Destruction`."""
        return bool(self.ledger.without_leaf())

    async def carry_out(self) -> list[Held]:
        """As `Destruction`. A record of a key that is in use, or that no deletion left, is another's work than a broker's: it gets no leaf."""
        gone = []
        for held in self.ledger.without_leaf():
            if self.is_foreign(held) or self.holding(held) or self._rotation.is_known(held.record):
                continue
            if await self._rotation.is_marked(held.record):
                gone.append(held)
        return gone

    async def begin_roots(self, by: str) -> list[bytes]:
        """As `Destruction`."""
        return await self._rotation.destroy_retired_roots(by)

    def holding(self, held: Held) -> tuple[str, ...]:
        """As `Destruction`."""
        return self._rotation.holding(held.created, held.record.key)

    def is_foreign(self, held: Held) -> bool:
        """As `Destruction`."""
        return self._rotation.is_foreign(held)


class Erasure:
    """One per broker. `is_home`: whether this broker writes the region's audit log."""

    def __init__(
        self,
        destruction: Destruction,
        trail: Trail,
        region: str,
        clock_ms: Callable[[], int],
        is_home: Callable[[], bool] = lambda: True,
    ) -> None:
        self._destruction, self._trail, self._region = destruction, trail, region
        self._clock_ms, self._is_home = clock_ms, is_home
        self._looking = asyncio.Lock()
        self._begun = self._ended = 0
        self._wake = asyncio.Event()
        self._news = News()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on."""
        self._wake.set()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="erasure")

    async def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None

    def look_soon(self) -> None:
        """A stream was deleted, or a record changed."""
        self._wake.set()
        self._news.tell()

    async def look(self) -> None:
        """Destroy what is to be destroyed here, and write what leaves are due. Raises FelixError; what was not done is looked at again. Not to be
        cancelled while the log is open: a leaf may be on its way to it, and the next look would not find it there yet."""
        async with self._looking:
            self._begun = number = self._begun + 1
            try:
                failed: FelixError | None = None
                for held in await self._destruction.carry_out():
                    if not self._is_home():
                        break
                    try:
                        await self._write(held)
                    except UnavailableError:
                        # The store or the log is away, for all of them.
                        raise
                    except FelixError as error:
                        failed = failed or error
                if failed is not None:
                    raise failed
            finally:
                self._ended = number
                self._news.tell()

    async def _looked(self) -> None:
        """Wait for a look that begins from now on, WAIT_S at most: what it waits for itself may take longer, and whoever asks may go."""
        begun = self._begun
        self._wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._news.until(lambda: self._ended > begun)

    async def destroy_retired_roots(self, by: str) -> str:
        """Destroy the root keys that rotations retired. A sentence for a person. Raises as `Destruction.begin_roots`."""
        roots = await self._destruction.begin_roots(by)
        if not roots:
            return "There is no retired root key."
        what = (
            f"Retired root key {roots[0].hex()} is"
            if len(roots) == 1
            else f"{len(roots)} retired root keys are"
        )
        keys = [root.hex() for root in roots]
        said = await self._settled(keys)
        copies = "copies of key files and backups from before the rotation open nothing any more."
        if holding := self._holding(keys):
            return (
                f"{what} to be destroyed, and not gone yet at {', '.join(holding)}: a broker that is down does it at its next start, and one that runs says in "
                f"its log what keeps it from it. felix keys list says destroyed once the leaf in the audit log stands: then {copies}"
            )
        if len(self._leaves(keys)) < len(keys):
            return f"{what} destroyed{said} Then {copies}"
        return f"{what} destroyed{said} C{copies[1:]}"

    async def stream_deleted(self, mark: DeletedStream) -> str:
        """What became of the key of a stream that was deleted, as a sentence for a person; empty where it had none."""
        await self._looked()
        keys = [mark.key] if mark.key else [
            held.record.key
            for held in self._destruction.ledger.all()
            if held.record.incarnation == mark.incarnation
        ]  # fmt: skip
        if not keys:
            return ""
        return f"Its key {keys[0]} is destroyed{await self._settled(keys)}"

    def shown(self, stream: str = "") -> list[KeyShown]:
        """The keys that were destroyed, with the roots, for a listing; of a key that is in use no record counts."""
        return [
            KeyShown(
                bytes.fromhex(record.key),
                record.level,
                DESTROYING if record.leaf is None else DESTROYED,
                record.at_ms,
                record.stream,
                -1,
                -1,
            )
            for record in (
                held.record
                for held in self._destruction.ledger.all()
                if not self._destruction.is_foreign(held)
            )
            if not stream or record.stream in ("", stream)
        ]

    async def _settled(self, keys: list[str]) -> str:
        """How far the leaves of these are, after WAIT_S at most; the end of a sentence."""
        self._wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._news.until(lambda: len(self._leaves(keys)) == len(keys))
        if len(found := self._leaves(keys)) == len(keys):
            return f", and {_named(found)} so."
        if holding := self._holding(keys):
            return (
                f", but at {', '.join(holding)}, which may have it until it has started and reached the metadata store. The leaf in the audit log follows "
                "then; felix keys list says destroyed once it stands."
            )
        return " or about to be: felix keys list says destroyed once its leaf in the audit log stands."

    def _leaves(self, keys: list[str]) -> list[int]:
        """The leaves of these that stand, ascending."""
        found = map(self._destruction.ledger.find, keys)
        return sorted(held.record.leaf for held in found if held is not None and held.record.leaf is not None)

    def _holding(self, keys: list[str]) -> list[str]:
        """The brokers that may have one of these still."""
        found = map(self._destruction.ledger.find, keys)
        left = [held for held in found if held is not None and held.record.leaf is None]
        return sorted({name for held in left for name in self._destruction.holding(held)})

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if self._destruction.owes() else None):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self.look()
                continue
            except FelixError as error:
                log.warning("destroyed keys are not in the audit log yet: %s", error)
            except Exception:
                # A mistake of ours: what is owed is looked at again all the same.
                log.exception("destroying keys failed")
            await asyncio.sleep(AGAIN_S)
            self._wake.set()

    async def _write(self, held: Held) -> None:
        """Steps 3 to 5."""
        ledger = self._destruction.ledger
        record, found = held.record, None
        if record.since is None:
            record = msgspec.structs.replace(record, since=self._trail.status().durable)
            held = await ledger.swap(held, record)
            if held.record != record:
                return
        else:
            found = await asyncio.to_thread(_find_leaf, self._trail, record)
        if found is None:
            found = await self._trail.append([Leaf(self._header(record))])
        await ledger.swap(held, msgspec.structs.replace(record, leaf=found))

    def _header(self, record: DestroyedKey) -> Header:
        return Header(
            kind=Kind.KEY,
            side=Side.INGRESS,
            time_ms=self._clock_ms(),
            source_region=self._region,
            destination_region=self._region,
            stream=record.stream,
            incarnation=bytes.fromhex(record.incarnation),
            actor=record.by,
            action=DESTROYED,
            key_id=bytes.fromhex(record.key),
        )


def _named(leaves: list[int]) -> str:
    """What says that keys are destroyed; without the last word of the sentence."""
    shown = ", ".join(map(str, leaves[:LEAVES_SHOWN]))
    if len(leaves) == 1:
        return f"leaf {shown} of the audit log says"
    more = f" and {len(leaves) - LEAVES_SHOWN:,} more" if len(leaves) > LEAVES_SHOWN else ""
    return f"leaves {shown}{more} of the audit log say"


def _find_leaf(trail: Trail, record: DestroyedKey) -> int | None:
    """The leaf of a destroyed key, where the log has it. Blocks. Raises AuditUnavailableError, TamperError."""
    key = bytes.fromhex(record.key)
    for index, data in trail.leaves(record.since or 0):
        header = read_header(data)
        if (
            header is not None
            and (header.kind, header.action) == (Kind.KEY, DESTROYED)
            and header.key_id == key
        ):
            return index
    return None
