"""What a cluster promises, looked at after every step of a core, at every commit, and at the end. Numbers are those of the invariants of the
cluster's design; docs/decisions/0083 says which of them are not of level one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Final

from audit.unclean_leaf import UncleanElection
from region.cluster.membership import is_replaced
from region.cluster.records import ShardId, ShardRecord, decode_controller, decode_shard
from region.log.point import LogPoint
from region.metadata.transaction import Entry
from region.replication.core import ReplicaCore
from region.replication.leader import IN_FLIGHT_BYTES_MAX, IN_FLIGHT_GROUPS_MAX, Phase
from region.replication.messages import Append as AppendMessage
from region.replication.messages import Frame
from region.replication.ready import Outcome, Ready, Received, SwapAnswered, Tick
from region.replication.standing import RECORDS_MAX

if TYPE_CHECKING:
    from simulation.cluster_world import Append, Client, ClusterWorld, Machine


OPERATOR: Final = "operator"
"""The name that an operator's transactions are made under."""


class BrokenError(AssertionError):
    """A promise was broken. Its text begins with the number of the invariant."""

    seed: int = -1


class Checks:
    """Of one run. `committed`: per log, all that was ever committed, in order; what was trimmed stays in it. `committed_in`: the epoch in
    which each of these frames was."""

    def __init__(self, world: ClusterWorld) -> None:
        self.world = world
        self.committed: dict[tuple[ShardId, int], list[Frame]] = {}
        self.committed_in: dict[tuple[ShardId, int], list[int]] = {}
        self.leaders: dict[tuple[ShardId, int], tuple[str, int]] = {}
        self.told: dict[tuple[ShardId, int], LogPoint] = {}
        """per log, the highest end that a holder of a lease could have told a reader"""
        self.answered: dict[tuple[str, int], tuple[int, LogPoint]] = {}
        self._before: dict[int, tuple[LogPoint, LogPoint]] = {}
        self._fence = 0
        self._phase = Phase.IDLE
        self._folders: dict[str, str] = {}
        self._ill: dict[tuple[str, ShardId], int] = {}
        """copies that were lost, by the registration under which they were"""
        self._unclean: dict[ShardId, int] = {}
        """the last epoch whose leader was let lead although it may lack what was committed"""
        self._lossy: set[ShardId] = set()
        """of which nobody has begun to lead since"""
        self._newest: dict[int, int] = {}
        """per log of such a shard, the newest epoch that it had before the step"""

    # -- after each step -------------------------------------------------------------------------------

    def before(self, shard: ShardId, core: ReplicaCore) -> None:
        if shard in self._unclean:
            self._newest = {number: log.history.last.epoch for number, log in core.replica.logs.items()}
        self._before = {number: (log.commit, log.start) for number, log in core.replica.logs.items()}
        self._fence = core.replica.fence.epoch
        self._phase = core.leader.phase

    def after(self, machine: Machine, shard: ShardId, core: ReplicaCore, ready: Ready, event: object) -> None:
        replica, leader = core.replica, core.leader
        if replica.fence.epoch < self._fence:
            raise BrokenError(f"4: {machine.name} forgot epoch {self._fence}")
        if (
            ready.write
            and isinstance(event, Received)
            and isinstance(event.message, AppendMessage)
            and event.message.epoch < self._fence
        ):
            raise BrokenError(
                f"4: {machine.name} took frames of epoch {event.message.epoch}, knowing {self._fence}"
            )
        for cut in ready.truncate:
            if cut.point < self._before[cut.log][0] and not self._may_lose(shard, cut.log):
                raise BrokenError(
                    f"6: {machine.name} cut log {cut.log} at {cut.point}, below its commit point"
                )
        for number, log in replica.logs.items():
            commit, start = self._before[number]
            if log.commit < commit and not self._may_lose(shard, number):
                raise BrokenError(f"5: the commit point of {machine.name} fell from {commit} to {log.commit}")
            if not (log.start <= log.commit <= log.end and log.durable <= log.end):
                raise BrokenError(f"the ends of {machine.name} are out of order: {log}")
            if log.start > start and log.start > log.commit:
                raise BrokenError(f"17: {machine.name} trimmed above its commit point")
            if log.commit > commit:
                self._on_commit(machine, shard, core, number, log.commit)
        if leader.phase is not self._phase:
            if leader.phase is Phase.ELECTED:
                self._on_election(machine, shard, core)
            elif leader.phase is Phase.SERVING:
                self._holds_all(machine, shard, "serves")
        if type(event) is SwapAnswered and event.outcome is Outcome.APPLIED:
            for number in replica.logs:
                if known := self.committed.get((shard, number)):
                    self._held_by_members(machine, shard, core, number, known, "changed the record")
        if leader.leads:
            self._bounded(machine, core)
            if leader.may_answer(self.world.local(machine)):
                self._on_answer(machine, shard, core)

    def _may_lose(self, shard: ShardId, number: int) -> bool:
        """Whether a log is of before a leader was let lead that may lack what was committed."""
        return shard in self._unclean and self._newest[number] < self._unclean[shard]

    def left_out(self, machine: Machine, core: ReplicaCore) -> None:
        """A tick that a core at rest is not given would ask for nothing, and not for what was forgiven because it came late either."""
        now, twin = self.world.local(machine), deepcopy(core)
        twin.leader._ticked_ms = now
        ready = twin.step(Tick(), now)
        if ready != Ready() or twin.rests_until_ms != core.rests_until_ms:
            raise BrokenError(f"{machine.name} rests until {core.rests_until_ms}, and has to do: {ready}")

    def _on_election(self, machine: Machine, shard: ShardId, core: ReplicaCore) -> None:
        key = (shard, core.leader.epoch)
        me = (machine.name, machine.registration)
        if self.leaders.setdefault(key, me) != me:
            raise BrokenError(f"1: epoch {core.leader.epoch} is led by {me} and was by {self.leaders[key]}")
        self.world.counts["epochs"] += 1
        if shard in self._lossy and core.leader.epoch >= self._unclean[shard]:
            self._lossy.discard(shard)
            self._is_what_there_is(machine, shard, core)
        self._holds_all(machine, shard, f"was elected for epoch {core.leader.epoch}")

    def _is_what_there_is(self, machine: Machine, shard: ShardId, core: ReplicaCore) -> None:
        """What this copy lacks is lost, as the operator was told."""
        for number in core.replica.logs:
            log, key = machine.disk.log(shard, number), (shard, number)
            known = self.committed.get(key, [])
            held = {frame.end: frame for frame in log.frames}
            count = next(
                (
                    at
                    for at, frame in enumerate(known)
                    if frame.end > log.start and held.get(frame.end) != frame
                ),
                len(known),
            )
            self.world.counts["lost"] += len(known) - count
            del known[count:]
            del self.committed_in.get(key, [])[count:]

    def _given_up(self, shard: ShardId, epoch: int) -> None:
        """From now on nothing of before `epoch` counts."""
        self._unclean[shard] = epoch
        self._lossy.add(shard)
        for key in [key for key in self.told if key[0] == shard]:
            del self.told[key]
        names = {client.name for client in self.world.clients if client.shard == shard}
        self.answered = {asked: point for asked, point in self.answered.items() if asked[0] not in names}
        for reader in self.world.readers:
            if reader.shard == shard:
                reader.forget()

    def _holds_all(self, machine: Machine, shard: ShardId, what: str) -> None:
        """2: whoever is elected has everything that was committed before its epoch, whoever committed it. (A broker may hear of its
        election when the next one leads and commits.)"""
        epoch = machine.cores[shard].leader.epoch
        for number in machine.cores[shard].replica.logs:
            log = machine.disk.log(shard, number)
            known = self.committed.get((shard, number), [])
            before = bisect_left(self.committed_in.get((shard, number), []), epoch)
            if self._differs(log.frames, log.start, known[:before]):
                raise BrokenError(f"2: {machine.name} {what} and lacks of log {number} what was committed")

    def _on_commit(
        self, machine: Machine, shard: ShardId, core: ReplicaCore, number: int, point: LogPoint
    ) -> None:
        key = (shard, number)
        known = self.committed.setdefault(key, [])
        end = known[-1].end if known else LogPoint(0)
        log = machine.disk.log(shard, number)
        mine = [frame for frame in log.frames if self._before[number][0] < frame.end <= point]
        for frame in mine:
            if frame.end <= end:
                at = self.index(known, frame)
                if at < 0 or known[at] != frame:
                    raise BrokenError(f"3: {machine.name} committed {frame}, and another one stands there")
        new = [frame for frame in mine if frame.end > end]
        if not new:
            return
        known.extend(new)
        if core.leader.commits and core.leader.epoch < self._unclean.get(shard, 0):
            raise BrokenError(
                f"R12: {machine.name} commits in epoch {core.leader.epoch}, and what it has was given up"
            )
        epochs = self.committed_in.setdefault(key, [])
        epochs.extend([max(core.replica.fence.epoch, epochs[-1] if epochs else 0)] * len(new))
        self.world.counts["committed"] += len(new)
        if self.world.audit is not None:
            self.world.audit.committed(shard, number, new)
        if self.world.transactions is not None:
            self.world.transactions.committed(shard, number, new)
        self._held_by_members(machine, shard, core, number, known, "committed")

    @staticmethod
    def index(known: list[Frame], frame: Frame) -> int:
        """Where what is committed has a frame with this end; -1: nowhere yet."""
        low, high = 0, len(known)
        while low < high:
            middle = (low + high) // 2
            if known[middle].end < frame.end:
                low = middle + 1
            else:
                high = middle
        return low if low < len(known) else -1

    def _held_by_members(
        self, machine: Machine, shard: ShardId, core: ReplicaCore, number: int, known: list[Frame], what: str
    ) -> None:
        """7, 8: what is committed is on the disk of every member of the record as it stands, and these are enough. Not while the store is an older
        one: what it has then is of another time."""
        if self.world.is_reconciling:
            return
        record = self.world.record(shard)
        if (
            what == "committed"
            and core.leader.commits
            and record.epoch == core.leader.epoch
            and (len(record.isr) + self._left_unread(shard, core, record) < record.min or record.elr)
        ):
            raise BrokenError(
                f"8: {machine.name} committed with {record.isr}, {record.elr} and min {record.min}"
            )
        for member, registration in record.members().items():
            other = self.world.by_name[member]
            if (
                is_replaced(self.world.node(member), registration)
                or self._is_replaced(other)
                or registration <= self._ill.get((member, shard), 0)
            ):
                continue
            log = other.disk.log(shard, number)
            if self._differs(log.stable, log.start, known):
                raise BrokenError(
                    f"7: {machine.name} {what}; {member} has not on its disk what is committed up to {known[-1].end}; {record.isr}, {record.elr}"
                )

    def _left_unread(self, shard: ShardId, core: ReplicaCore, record: ShardRecord) -> int:
        """How many ill copies have left the set by their brokers' own word, which the leader has not read yet. What it commits meanwhile they had
        on their disks, and acknowledged under the start that it counts, before they were lost: that a copy is lost later takes no commit back."""
        standing = core.leader.standing
        if standing is None:
            return 0
        return sum(
            member not in record.members() and registration <= self._ill.get((member, shard), 0)
            for member, registration in standing.record.isr.items()
        )

    @staticmethod
    def _differs(frames: list[Frame], start: LogPoint, known: list[Frame]) -> bool:
        """Whether a log lacks something of what was committed. Frames that are equal at one end are equal before it, for each stands on
        the one before: an epoch has one leader (1), and a follower takes frames where its log ends (F2)."""
        if not known or known[-1].end <= start:
            return False
        last = known[-1]
        low, high = 0, len(frames)
        while low < high:
            middle = (low + high) // 2
            if frames[middle].end < last.end:
                low = middle + 1
            else:
                high = middle
        return low == len(frames) or frames[low] != last

    def _on_answer(self, machine: Machine, shard: ShardId, core: ReplicaCore) -> None:
        """5, 9: what a holder of a lease tells readers without a commit never goes back."""
        for number, log in core.replica.logs.items():
            key = (shard, number)
            if log.commit < self.told.get(key, log.commit):
                raise BrokenError(
                    f"9: {machine.name} tells an end of {log.commit}, and {self.told[key]} was told before"
                )
            self.told[key] = log.commit

    def _bounded(self, machine: Machine, core: ReplicaCore) -> None:
        """21."""
        leader = core.leader
        if leader.standing is not None and len(leader.standing.all) > RECORDS_MAX + 1:
            raise BrokenError(f"21: {machine.name} holds {len(leader.standing.all)} records that may stand")
        for follower in leader.followers.values():
            for log in follower.logs.values():
                if len(log.flight) > IN_FLIGHT_GROUPS_MAX or log.flight_bytes > 2 * IN_FLIGHT_BYTES_MAX:
                    raise BrokenError(f"21: {machine.name} has {len(log.flight)} groups in flight")

    # -- each transaction ------------------------------------------------------------------------------

    def _stated(self, shard: ShardId, record: ShardRecord, before: Mapping[str, Entry | None]) -> None:
        """What was given up is told to the audit log, by the transaction that gave it up."""
        key = next((key for key in before if key.startswith(self.world.keys.unclean)), "")
        entry = self.world.store.entries.get(key)
        if entry is None:
            raise BrokenError(f"nothing says that {shard} was given up in epoch {record.unclean}")
        said = UncleanElection.decode(entry.value, key)
        if (said.incarnation, said.shard, said.epoch, said.leader) != (*shard, record.unclean, record.leader):
            raise BrokenError(f"{said} is not what {record} says")

    def wrote(self, client: str, before: Mapping[str, Entry | None]) -> None:
        """13, 15: of what a client's transaction wrote, as it happens, whenever that is."""
        keys, entries = self.world.keys, self.world.store.entries
        for key, old_entry in before.items():
            new_entry = entries.get(key)
            if not key.startswith(keys.shards) or old_entry is None or new_entry is None:
                continue
            old, new = decode_shard(old_entry.value, key), decode_shard(new_entry.value, key)
            self._can_be_read(keys.shard_of(key), new)
            if new.unclean > old.unclean:
                self._given_up(keys.shard_of(key), new.unclean)
                self._stated(keys.shard_of(key), new, before)
            left = client == old.leader and not new.leader and client not in new.members()
            if (
                (old.epoch, old.leader, old.replicas) != (new.epoch, new.leader, new.replicas)
                and not left
                and client != OPERATOR
            ):
                told = entries.get(keys.controller)
                holder = "" if told is None else decode_controller(told.value, told.key).broker
                if holder != client:
                    raise BrokenError(
                        f"13: {client} changed {old} to {new}, and the controller is {holder or 'nobody'}"
                    )
            if old.target and not new.target and new.replicas != old.replicas:
                self.world.counts["moves done"] += 1
                in_sync = min(len(old.isr.keys() & set(old.replicas)), len(new.replicas))
                # A move that changes only who leads waits for that one alone.
                anew = set(new.replicas) != set(old.replicas)
                if len(new.isr) < in_sync or (anew and new.isr.keys() < set(new.replicas)):
                    raise BrokenError(
                        f"15: a move left {new.isr} in sync of {new.replicas}, and there were {old.isr}"
                    )

    def _can_be_read(self, shard: ShardId, record: ShardRecord) -> None:
        """14: a copy that its broker cannot read, and has said so of, is not led while there are others."""
        machine = self.world.by_name.get(record.leader)
        if (
            machine is not None
            and machine.up
            and shard in machine.disk.damaged
            and record.isr.get(machine.name) == machine.registration
            and len(record.members()) > 1
        ):
            raise BrokenError(f"14: {machine.name} leads {record}, and cannot read its copy")

    # -- what the world tells --------------------------------------------------------------------------

    def acknowledged(self, client: Client, append: Append) -> None:
        """2: what a client is told stands among what is committed."""
        self.answered[(client.name, append.number)] = (append.log, append.point)

    def alarmed(self, machine: Machine, shard: ShardId, alarm: str) -> None:
        if "committed" in alarm:
            raise BrokenError(f"6: {machine.name}: {alarm}")
        if "went back" in alarm and not self.world.counts["stores back"]:
            raise BrokenError(f"10: {machine.name}: {alarm}")
        if "has lost" in alarm and not any(
            self._is_replaced(each) or (each.name, shard) in self._ill
            for each in self.world.machines
            if alarm.startswith(f"{each.name} ")
        ):
            raise BrokenError(f"14: {alarm}")

    def replaced(self, machine: Machine) -> None:
        """What this broker had is gone, as far as it was not copied again since."""
        self._folders[machine.name] = machine.disk.file.folder

    def is_ill(self, machine: Machine, shard: ShardId) -> None:
        """What this broker had of a shard is gone, or cannot be read, as far as it was not copied again since."""
        self._ill[machine.name, shard] = machine.disk.file.registration

    def _is_replaced(self, machine: Machine) -> bool:
        """Whether the broker's folder is not the one that the store knows of: its members' entries are of the folder that was."""
        return machine.name in self._folders and (not machine.registration or not machine.up)

    def may_replace(self, machine: Machine) -> bool:
        """Whether somebody else has what this broker has: more loss than that no rule can make good. At most one folder, or copy, in a run."""
        if (
            not machine.up
            or self._folders
            or self._ill
            or any(fault.what == "store back" for fault in self.world.scene.faults)
        ):
            return False
        others = [each for each in self.world.machines if each is not machine]
        for shard in self.world.shards:
            record = self.world.record(shard)
            if machine.name in record.members() and not any(
                each.up and each.name in record.isr for each in others
            ):
                return False
        return True

    def somebody_has_all(self, shard: ShardId, record: ShardRecord) -> bool:
        """Whether a member is left that can lead by rule: where folders were replaced, perhaps none is."""
        if record.leader and not record.yielded:
            return True
        for member, registration in record.members().items():
            node = self.world.by_name[member].view.nodes.get(member)
            if node is not None and not is_replaced(node, registration):
                return True
        return False

    # -- the end ---------------------------------------------------------------------------------------

    def finish(self) -> None:
        """All is served: what was promised is there, once, in one order."""
        for shard in self.world.shards:
            found = self.world.leader_of(shard)
            if found is None:
                continue
            machine, core = found
            seen: set[object] = set()
            for number in core.replica.logs:
                known = self.committed.get((shard, number), [])
                log = machine.disk.log(shard, number)
                held = {frame.end: frame for frame in log.frames}
                for frame in known:
                    if frame.end > log.start and held.get(frame.end) != frame:
                        raise BrokenError(f"2: {frame} was committed and is not in the leader's log")
                    if frame.body in seen:
                        raise BrokenError(f"11: {frame.body} is committed twice")
                    seen.add(frame.body)
                epochs = [frame.epoch for frame in log.frames]
                if epochs != sorted(epochs):
                    raise BrokenError(f"10: epochs fall in log {number} of {machine.name}: {epochs}")
                for name in self.world.record(shard).replicas:
                    other = self.world.by_name[name].disk.log(shard, number)
                    start = max(log.start, other.start)
                    if [frame for frame in other.frames if frame.end > start] != [
                        frame for frame in log.frames if frame.end > start
                    ]:
                        raise BrokenError(f"3: log {number} of {name} differs from that of {machine.name}")
        for (name, number), (log_number, point) in self.answered.items():
            shard = next(client.shard for client in self.world.clients if client.name == name)
            known = self.committed.get((shard, log_number), [])
            if not any(frame.end == point and frame.body == (name, number) for frame in known):
                raise BrokenError(f"2: {name} was told that {number} stands at {point}, and it does not")
        for producer in self.world.producers:
            producer.finish()
        if self.world.transactions is not None:
            self.world.transactions.finish(self.world.vacant())
        if self.world.offload is not None:
            self.world.offload.finish()
