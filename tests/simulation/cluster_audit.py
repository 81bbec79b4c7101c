"""A shard of the simulated cluster as an audit log: its leader signs checkpoints over the leaves that are committed, and a checkpoint is committed
itself, to the log beside, before it is shown (0112). Whoever leads next begins with the newest one (19, R13).

A model of region.evidence.audit_log around the real cores: leaves are the records, a root is what they say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from simulation.cluster_checks import BrokenError

from region.cluster.records import ShardId
from region.log.point import LogPoint
from region.replication.core import ReplicaCore
from region.replication.messages import Frame

if TYPE_CHECKING:
    from simulation.cluster_world import ClusterWorld, Machine

AUDIT_STREAM: Final = "felix/system/audit"
LEAVES, CHECKPOINTS = 0, 1
CHECKPOINT_BYTES: Final = 100


class Checkpoint(NamedTuple):
    """`size` leaves, and what they say."""

    size: int
    root: int


def root(frames: list[Frame]) -> int:
    """Of leaves, in their order."""
    return hash(tuple((frame.end, frame.body) for frame in frames))


class AuditHome:
    """Each leader's part in signing."""

    def __init__(self, world: ClusterWorld, shard: ShardId) -> None:
        self.world, self.shard = world, shard

    def look(self, machine: Machine) -> None:
        """Where this broker leads: sign what was committed since the last checkpoint."""
        core = machine.cores.get(self.shard)
        if core is None or not core.leader.may_append():
            return
        leaves = machine.disk.log(self.shard, LEAVES).below(signed_up_to(core))
        last = self._newest(machine)
        if last.size > len(leaves) or root(leaves[: last.size]) != last.root:
            raise BrokenError(f"19: {machine.name} has {len(leaves)} leaves, and {last} was signed")
        if len(leaves) == last.size:
            return
        made = Checkpoint(len(leaves), root(leaves))
        end = machine.disk.log(self.shard, CHECKPOINTS).end
        frame = Frame(core.leader.epoch, LogPoint(end.offset + 1), CHECKPOINT_BYTES, made)
        self.world.write(machine, self.shard, CHECKPOINTS, (frame,))

    def _newest(self, machine: Machine) -> Checkpoint:
        """Signed here or by a leader before; perhaps it is not committed yet."""
        for frame in reversed(machine.disk.log(self.shard, CHECKPOINTS).frames):
            if isinstance(frame.body, Checkpoint):
                return frame.body
        return Checkpoint(0, root([]))

    def committed(self, shard: ShardId, number: int, frames: list[Frame]) -> None:
        """These frames are committed, so checkpoints among them may be shown: each is one of what is committed of the leaves."""
        if (shard, number) != (self.shard, CHECKPOINTS):
            return
        leaves = self.world.checks.committed.get((shard, LEAVES), [])
        for frame in frames:
            if isinstance(frame.body, Checkpoint):
                size = frame.body.size
                if size > len(leaves) or root(leaves[:size]) != frame.body.root:
                    raise BrokenError(f"19: {frame.body} is shown, and {len(leaves)} leaves are committed")
                self.world.counts["checkpoints"] += 1


def signed_up_to(core: ReplicaCore) -> LogPoint:
    """Only what is committed is signed."""
    return core.replica.logs[LEAVES].commit
