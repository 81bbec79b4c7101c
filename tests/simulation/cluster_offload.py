"""A shard of the simulated cluster whose closed segments lie in a store, for all of its copies (0128).

Lists, pointers and what is deleted are those of region.log.shared_offload, over a store in memory; the pointer stands in the shard's record and is
moved by the product's transaction. Modelled are the turns of a leader and of a follower (region.log.maintenance, region.replication.host), each
step of which comes a while after the last one, whoever leads by then. A segment is so many offsets, the same on each copy, and its object says what
stands in it. A copy lets its own file of it go at once.

What is promised (24): the list in force is there, with each object that it names, which has what is committed; and what a copy let go of, it names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Final

import msgspec
from simulation.cluster_checks import BrokenError
from simulation.store_model import Answer, Found

from felix.errors import FelixError
from region.cluster.mirror import entries_of
from region.cluster.records import ShardId
from region.cluster.transactions import Refusal, change
from region.log import fsspec_store
from region.log.directory import shard_place
from region.log.offload import ListPointer, Offloaded, OffloadList, object_name, object_url
from region.log.segment import SegmentHeader, ShardIdentity
from region.log.shared_offload import SharedLists, delete_orphans, delete_unlisted
from region.metadata.transaction import TransactResult

if TYPE_CHECKING:
    from simulation.cluster_world import ClusterWorld, Machine

RECORDS: Final = 0
SEGMENT: Final = 5
"""Offsets of a segment."""
DELAYS_MS: Final = (5, 40, 200, 1_500)
"""Of an upload, of a list that is written, of what is deleted."""
IDENTITY: Final = ShardIdentity("us-east", "acme/test/orders0", bytes(16), 0)
BASE: Final = f"memory://simulated-cluster/{shard_place(IDENTITY)}"
LISTS: Final = SharedLists(shard_place(IDENTITY), lambda purpose, data: hashlib.sha256(data).digest())


class Change:
    """A pointer that is moved, or was: its answer may be lost."""

    def __init__(
        self, before: OffloadList, old: ListPointer | None, new: OffloadList, pointer: ListPointer
    ) -> None:
        self.before, self.old, self.new, self.pointer = before, old, new, pointer


class Turns:
    """A leader's part, in one epoch of one process."""

    def __init__(self, offload: Offload, machine: Machine, epoch: int) -> None:
        self.offload, self.machine, self.epoch = offload, machine, epoch
        self.world = offload.world
        self.led_from = machine.disk.log(offload.shard, RECORDS).end.offset
        self.listed: OffloadList | None = None
        self.pointer: ListPointer | None = None
        self.change: Change | None = None
        self.is_busy = False
        self._looked_for_orphans = False

    @property
    def leads(self) -> bool:
        """Whether this process takes itself for the leader of this epoch still."""
        core = self.machine.cores.get(self.offload.shard)
        return core is not None and core.leader.epoch == self.epoch and core.leader.commits

    def turn(self) -> None:
        """What one turn does, from its beginning."""
        self.is_busy = True
        view, shard = self.machine.view, self.offload.shard
        pointer = view.shards[shard].offloaded
        if self.change is not None and self.change.pointer == pointer:
            self._in_force(self.change)
        elif self.listed is None or pointer != self.pointer:
            self._later(lambda: self._go_on_from(pointer))
        else:
            self._upload(self.listed)

    def _later(self, happens: Callable[[], None]) -> None:
        self.world.on(self.machine, self.offload.random.choice(DELAYS_MS), happens)

    def _end(self) -> None:
        self.is_busy = False

    def _go_on_from(self, pointer: ListPointer | None) -> None:
        """Step 1."""
        self.listed = None
        try:
            known = LISTS.read(pointer)
        except FelixError:
            # By its view's pointer, which may have been moved since.
            self._end()
            return
        disk, own = self.machine.disk, self.offload.marks(self.machine)
        end = self.led_from
        if pointer is not None and pointer.epoch == self.epoch:
            end = disk.log(self.offload.shard, RECORDS).end.offset
        taken = known.taken_over(own.values(), end)
        if (taken, self.epoch) == (known, pointer.epoch if pointer else self.epoch):
            self.listed, self.pointer = taken, pointer
            self._upload(taken)
        else:
            self._publish(known, pointer, taken)

    def _upload(self, listed: OffloadList) -> None:
        """Step 2."""
        offload, log = self.offload, self.machine.disk.log(self.offload.shard, RECORDS)
        core = self.machine.cores[offload.shard]
        known = {one.base_offset for one in listed.segments} | offload.marks(self.machine).keys()
        commit = core.replica.logs[RECORDS].commit.offset
        bases = [
            base
            for base in range(-(-log.start.offset // SEGMENT) * SEGMENT, commit - SEGMENT + 1, SEGMENT)
            if base not in known
        ]
        contents = [offload.content(self.machine, base) for base in bases]
        less = listed.less(log.start.offset)

        def uploaded() -> None:
            entries = []
            for base, content in zip(bases, contents, strict=True):
                url = object_url(BASE, object_name(base, self.epoch))
                fsspec_store.put_bytes(content, url)
                entries.append(offload.entry(base, url, content))
            self.world.counts["uploads"] += len(entries)
            new = less.more(entries)
            if new.segments != listed.segments:
                self._publish(listed, self.pointer, new)
            else:
                self._delete_orphans()

        if bases:
            self._later(uploaded)
        else:
            uploaded()

    def _publish(self, before: OffloadList, old: ListPointer | None, new: OffloadList) -> None:
        """Step 3: the list, then the pointer to it."""
        self.listed = None

        def write() -> None:
            pointer = LISTS.write(new, BASE, self.epoch)
            self.change = Change(before, old, new, pointer)
            self._wrote(self.change)
            self._later(point)

        def point() -> None:
            assert self.change is not None
            self._point_to(self.change)

        self._later(write)

    def _wrote(self, change: Change) -> None:
        """Nothing is deleted yet."""

    def _point_to(self, wanted: Change) -> None:
        machine, shard = self.machine, self.offload.shard
        view, client = machine.view, machine.client
        record = view.shards[shard]
        assert client is not None
        if not self.leads or record.epoch != self.epoch:
            self._end()
            return
        after = msgspec.structs.replace(record, offloaded=wanted.pointer)
        made = change(view, shard, machine.name, record, view.revision_of(view.keys.shard(shard)), after)
        if isinstance(made, Refusal):
            self._end()
            return

        key = view.keys.shard(shard)

        def answered(answer: Answer) -> None:
            if isinstance(answer, TransactResult) and answer.succeeded:
                view.absorb(entries_of(made, answer), answer.revision)
                self._in_force(wanted)
            else:
                client.read((key,), self.world.within(machine, met))

        def met(answer: Answer) -> None:
            """What was written, or what it met instead."""
            if isinstance(answer, Found):
                view.absorb(answer.entries, answer.revision)
            if view.shards[shard].offloaded == wanted.pointer:
                self._in_force(wanted)
            else:
                self._end()

        client.transact(made.compares, made.writes, self.world.within(machine, answered))

    def _in_force(self, done: Change) -> None:
        """Step 5, and 4: the own files may go."""
        self.world.counts["lists"] += 1
        self.listed, self.pointer = done.new, done.pointer
        self.offload.mark(self.machine, done.new)

        def delete() -> None:
            delete_unlisted(done.before, done.old, done.new)
            self.change = None
            self._delete_orphans()
            self.offload.look()

        self._later(delete)

    def _delete_orphans(self) -> None:
        if not self._looked_for_orphans and self.listed is not None and self.pointer is not None:
            self._looked_for_orphans = True
            self.world.counts["orphans"] += delete_orphans(self.listed, self.pointer, (BASE,))
            self.offload.look()
        self._end()


class Offload:
    """All of one run."""

    def __init__(self, world: ClusterWorld, shard: ShardId) -> None:
        self.world, self.shard = world, shard
        self.random = Random(f"offload {world.seed}")
        self._turns: dict[str, tuple[int, Turns]] = {}
        for name in fsspec_store.list_names(BASE):
            fsspec_store.delete(object_url(BASE, name))

    def tick(self, machine: Machine) -> None:
        """A turn of this broker, where one is due."""
        core = machine.cores.get(self.shard)
        if core is None or self.shard not in machine.view.shards or self.random.random() < 0.5:
            return
        if core.leader.may_append():
            life, turns = self._turns.get(machine.name, (-1, None))
            if turns is None or life != machine.life or turns.epoch != core.leader.epoch:
                turns = Turns(self, machine, core.leader.epoch)
                self._turns[machine.name] = (machine.life, turns)
            if not turns.is_busy:
                turns.turn()
        elif not core.leader.leads and core.follower.placed and not core.replica.copying:
            self._follow(machine)

    def _follow(self, machine: Machine) -> None:
        """A copy goes by the list of its own leader's epoch."""
        core, pointer = machine.cores[self.shard], machine.view.shards[self.shard].offloaded
        if pointer is None or pointer.epoch != core.follower.epoch:
            return
        try:
            listed = LISTS.read(pointer)
        except FelixError:
            return  # another one is in force by now
        self.mark(machine, listed)

    # -- what a copy has -------------------------------------------------------------------------------

    def marks(self, machine: Machine) -> dict[int, Offloaded]:
        """The segments whose own files this copy let go of, by base offset."""
        return machine.disk.offloaded.setdefault(self.shard, {})

    def mark(self, machine: Machine, listed: OffloadList) -> None:
        commit = machine.cores[self.shard].replica.logs[RECORDS].commit.offset
        marks = self.marks(machine)
        for one in listed.segments:
            if one.next_offset <= commit:
                marks[one.base_offset] = one

    def content(self, machine: Machine, base: int) -> bytes:
        """What stands in a segment of this copy."""
        frames = machine.disk.log(self.shard, RECORDS).frames
        return repr(
            [(frame.end, frame.body) for frame in frames if base < frame.end.offset <= base + SEGMENT]
        ).encode()

    def entry(self, base: int, url: str, content: bytes) -> Offloaded:
        header = SegmentHeader(IDENTITY, base, 0, 0, b"").encode()
        return Offloaded(url, header, base + SEGMENT, len(content), 0, hashlib.sha256(content).hexdigest())

    # -- what is looked at -----------------------------------------------------------------------------

    def look(self) -> None:
        """Something was deleted in the store."""
        pointer = self.world.record(self.shard).offloaded
        if pointer is None:
            return
        try:
            listed = LISTS.read(pointer)
        except FelixError as error:
            raise BrokenError(f"24: the list in force is not there: {error}") from error
        there = set(fsspec_store.list_names(BASE))
        for one in listed.segments:
            if one.url.rpartition("/")[2] not in there:
                raise BrokenError(f"24: {one.url} is not there, and {pointer.url} names it")
        bases = {one.base_offset for one in listed.segments}
        for machine in self.world.machines:
            start = max(listed.start, machine.disk.log(self.shard, RECORDS).start.offset)
            for base, one in self.marks(machine).items():
                if one.next_offset > start and base not in bases:
                    raise BrokenError(
                        f"24: {machine.name} let go of {base}, and {pointer.url} does not name it"
                    )

    def finish(self) -> None:
        """What is in the store is what is committed."""
        self.look()
        found = self.world.leader_of(self.shard)
        pointer = self.world.record(self.shard).offloaded
        if found is None or pointer is None:
            return
        machine, _ = found
        for one in LISTS.read(pointer).segments:
            if one.base_offset >= machine.disk.log(self.shard, RECORDS).start.offset:
                content = self.content(machine, one.base_offset)
                if fsspec_store.get_bytes(one.url) != content or one.sha256 != _sha256(content):
                    raise BrokenError(f"24: {one.url} is not what is committed")
                self.world.counts["offloaded"] += 1


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
