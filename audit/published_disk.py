"""What of an open log is in its tree and under its checkpoints: tiles and bundles, the checkpoint over them, and the snapshot of positions.

Invariants: tiles and bundles are durable, names included, before the checkpoint that covers them; a checkpoint is only written over the leaves that
it was signed for. Blocks; one thread at a time, but for `size` and `lacks_newest`. Caller: audit.trail's publisher, which decides when.
"""

from __future__ import annotations

from typing import Final

from audit.checkpoint import Checkpoint, SignedCheckpoint
from audit.checkpoint_disk import CheckpointFiles, LogKeys, sign_checkpoint
from audit.errors import VERIFY_HINT, RolledBackError
from audit.leaf import Header
from audit.merkle import TILE_WIDTH
from audit.opening import SNAPSHOT_PATH, Opened
from audit.position import Positions
from audit.tile_disk import Folder
from audit.wal_disk import Wal

SNAPSHOT_LEAVES: Final = 16_384
"""Opening reads at most about so many leaves for the positions after a crash."""


class PublishedTree:
    """The tree of one open log."""

    def __init__(
        self,
        folder: Folder,
        keys: LogKeys,
        checkpoints: CheckpointFiles,
        wal: Wal | None,
        state: Opened,
    ) -> None:
        self._folder, self._keys, self._checkpoints, self._wal = folder, keys, checkpoints, wal
        self.tree = state.tree
        self._positions = Positions.decode(state.positions.encode(0, b""))[0]
        self._snapshot_size = state.snapshot_size
        self.lacks_newest = state.tree.size < checkpoints.newest.size
        """Whether this copy lacks the leaves of its newest entry bundle"""

    @property
    def size(self) -> int:
        """How many leaves the tree has."""
        return self.tree.size

    @property
    def uncovered(self) -> int:
        """How many of them no checkpoint covers."""
        return max(0, self.tree.size - self._checkpoints.newest.size)

    def take(self, leaf: bytes, header: Header | None) -> None:
        """One leaf into the tree. Raises RolledBackError where it is not the one under the checkpoint; OSError as `TreeFiles.take`."""
        self._positions.apply(self.tree.size, header)
        self.tree.take(leaf, header)
        if self.lacks_newest and self.tree.size == self._checkpoints.newest.size:
            # The leaves of the newest bundle came from the copies again.
            self._check_root(self._checkpoints.newest)
            self.tree.write_edge()
            self.lacks_newest = False

    def write_full(self) -> None:
        """What `take` found no room for. Raises OSError."""
        self.tree.write_full()

    def sign(self, now_s: int) -> SignedCheckpoint:
        """A checkpoint of all that is in the tree, which is durable then. POSIX seconds."""
        self.tree.write_edge()
        checkpoint = Checkpoint(self._keys.key.name, self.tree.size, self.tree.root())
        return sign_checkpoint(checkpoint, self._keys.signers, now_s)

    def write(self, signed: SignedCheckpoint) -> None:
        """Keep what `sign` gave, and remove what it makes superfluous."""
        self._checkpoints.write(signed)
        self.tree.tidy()
        if self._wal is not None:
            self._wal.remove_below(self.tree.size // TILE_WIDTH * TILE_WIDTH)
        if self.tree.size - self._snapshot_size >= SNAPSHOT_LEAVES:
            self.write_snapshot()

    def write_signed_elsewhere(self, signed: SignedCheckpoint) -> None:
        """Keep what another broker has signed. Raises RolledBackError where it is not over exactly these leaves."""
        self._check_root(signed.checkpoint)
        self.tree.write_edge()
        self.write(signed)

    def _check_root(self, checkpoint: Checkpoint) -> None:
        if (checkpoint.size, checkpoint.root) != (self.tree.size, self.tree.root()):
            raise RolledBackError(
                f"The leaves of {self._keys.key.name} here differ from what was signed at {checkpoint.size} leaves.",
                hint=VERIFY_HINT,
            )

    def write_snapshot(self) -> None:
        """Keep the positions, where a checkpoint covers the whole tree."""
        size = self._checkpoints.newest.size
        if size == self.tree.size and size > self._snapshot_size:
            self._folder.write(SNAPSHOT_PATH, self._positions.encode(size, self.tree.last_leaf_hash))
            self._snapshot_size = size
