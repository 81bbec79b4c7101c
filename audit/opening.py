"""Opening an audit log: its checkpoint, tree and positions, and what a crash left behind them.

Invariants: opening never drops a leaf below a checkpoint: it recovers, or raises CorruptionError (with ROLLED_BACK where the log is shorter than
what was signed); a leaf that cannot be read stays what it is, moves no position, and does not stop the opening. Blocks. Caller: audit.trail.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final, NamedTuple

from audit.checkpoint import Checkpoint, SignedCheckpoint, open_checkpoint
from audit.checkpoint_disk import KeptCheckpoints, LogKeys, check_continues, sign_checkpoint
from audit.errors import VERIFY_HINT, RolledBackError
from audit.leaf import Header, read_header
from audit.merkle import EMPTY_ROOT, TILE_HEIGHT, TILE_WIDTH, Tree, leaf_hash
from audit.note import VerifierKey, encode_note, signs_from
from audit.position import Positions
from audit.range_index import INDEX_PATH, ROW_BYTES, bundle_rows, bundles_indexed, cut_index
from audit.tile import (
    CHECKPOINT_PATH,
    COSIGNED_PATH,
    WAL_FOLDER,
    WITNESSED_PATH,
    TileHashes,
    read_bundle,
    read_entries,
    read_tree,
)
from audit.tile_disk import Folder
from audit.tree_disk import TreeFiles
from audit.unjudged import Unjudged
from audit.wal_disk import Recovery, Torn
from felix.errors import CorruptionError, TamperError
from felix.runtime.port import Clock

log = logging.getLogger("felix.audit.opening")

SNAPSHOT_PATH: Final = "positions"
FOLDERS_ABOVE: Final = 3
"""How many folders above a log's own may be as new as the log: `bridges/NAME/egress` in a region's folder."""


class Opened(NamedTuple):
    """The state of a log that was opened, before its threads run."""

    tree: TreeFiles
    positions: Positions
    snapshot_size: int
    checkpoints: KeptCheckpoints
    torn: Torn | None


class Opening:
    """Recovery, step by step; see `open`."""

    def __init__(
        self,
        folder: Folder,
        keys: LogKeys,
        witnesses: tuple[VerifierKey, ...],
        clock: Clock,
    ) -> None:
        self._folder, self._keys, self._witnesses = folder, keys, witnesses
        self._clock = clock
        self._name = keys.key.name
        self._wal_path = folder.path / WAL_FOLDER
        self._unjudged = Unjudged(self._name)

    def open(
        self, remembered: tuple[bytes, ...], *, copied: bool = False, durable: int | None = None
    ) -> Opened:
        """Recover. The numbers are those of docs/audit.md, "Opening a log". `durable`: so many leaves this process knows to be; fewer are not opened, and what is behind
        them goes."""
        # 1. The newest checkpoint, signed by this log's key.
        signed = self._read_checkpoint(copied=copied)
        checkpoint = signed.checkpoint
        # 2. Its right edge from the tiles gives its root.
        tree = read_tree(self._folder, checkpoint.size)
        if tree.root() != checkpoint.root:
            raise TamperError(
                f"The tiles of {checkpoint.origin} do not give the root of its checkpoint at {checkpoint.size} leaves.",
                hint=VERIFY_HINT,
            )
        # 3. Everything that was cosigned lies below it, with the same roots.
        self._check_remembered(checkpoint, remembered)
        cosigned = self._check_own(COSIGNED_PATH, checkpoint)
        witnessed = self._check_own(WITNESSED_PATH, checkpoint)
        # 4. The leaves of the last, partial bundle are those of the tiles. Where several brokers have copies of the log, one that has not got them
        # begins at the last full bundle: the tree has to come to the checkpoint's root again.
        if copied and not self._has_newest(tree):
            tree = read_tree(self._folder, tree.size // TILE_WIDTH * TILE_WIDTH)
        bundle = self._read_bundle(tree)
        # 5. Positions, from the snapshot and the leaves after it.
        positions, snapshot_size = self._read_positions(tree.size)
        self._mend_index(tree.size)
        # 6. The write-ahead file from the checkpoint on; what lies below it must be the same leaves.
        state = Opened(
            TreeFiles(self._folder, tree, bundle),
            positions,
            snapshot_size,
            KeptCheckpoints(signed, cosigned, witnessed),
            None,
        )
        # What is behind the checkpoint comes from the copies.
        if copied:
            return state
        opened = self._replay(state, bundle, durable)
        self._check_reaches_keys(opened.tree.size)
        return opened

    def _read_checkpoint(self, *, copied: bool) -> SignedCheckpoint:
        data = self._folder.read(CHECKPOINT_PATH)
        if data is not None:
            return self._open(data)
        if self._folder.names(WAL_FOLDER) or self._folder.names("tile") or self._folder.names(COSIGNED_PATH):
            raise RolledBackError(
                f"The audit log {self._name} has leaves and no checkpoint: the file was removed.",
                hint=VERIFY_HINT,
            )
        if not copied:
            self._check_reaches_keys(0)
        signed = sign_checkpoint(
            Checkpoint(self._name, 0, EMPTY_ROOT), self._keys.signers, self._clock.now_ms() // 1000
        )
        # A log that is gone with its folder would be taken for a new one here, and for rolled back by whoever cosigned it.
        for above in list(self._folder.path.parents)[:FOLDERS_ABOVE]:
            with suppress(PermissionError):  # what we may not read we have not made
                self._folder.storage.sync_folder(above)
        self._folder.write(CHECKPOINT_PATH, encode_note(signed.note))
        self._folder.flush()
        return signed

    def _open(self, data: bytes) -> SignedCheckpoint:
        """A checkpoint that the log signed. What witnesses signed does not decide whether it opens: they change their keys as they like."""
        signed = open_checkpoint(data, self._keys.known, self._witnesses)
        if told := signed.told():
            log.warning("%s: %s", self._name, told)
        return signed

    def _check_remembered(self, checkpoint: Checkpoint, remembered: tuple[bytes, ...]) -> None:
        for data in remembered:
            before = self._open(data)
            check_continues(self._folder, checkpoint, before.checkpoint)

    def _check_reaches_keys(self, size: int) -> None:
        """A log of before its keys were changed last: what they sign at a smaller size than where they begin holds nowhere."""
        begin = signs_from(self._keys.earlier)
        if size < begin:
            raise RolledBackError(
                f"The audit log {self._name} has {size} leaves, and its keys were changed at {begin}: it is a copy of before that.",
                hint="Put the log of now in its place, or a later copy of it (felix audit restore). Where there is none: docs/operations.md, When a region's audit log is gone for good.",
            )

    def _check_own(self, path: str, checkpoint: Checkpoint) -> SignedCheckpoint | None:
        own = self._folder.read(path)
        if own is None:
            return None
        cosigned = self._open(own)
        check_continues(self._folder, checkpoint, cosigned.checkpoint)
        return cosigned

    def _has_newest(self, tree: Tree) -> bool:
        """Whether the newest entry bundle, if one is not full, is there as it was signed."""
        try:
            self._read_bundle(tree)
        except TamperError as error:
            log.warning(
                "%s: the newest entry bundle is written again from the other copies: %s",
                self._name,
                error.sentence,
            )
            return False
        return True

    def _read_bundle(self, tree: Tree) -> list[bytes]:
        if not tree.edge[0]:
            return []
        bundle = [bytes(leaf) for leaf in read_bundle(self._folder, tree.size // TILE_WIDTH, tree.size)]
        for at, (leaf, expected) in enumerate(zip(bundle, tree.edge[0], strict=True)):
            if leaf_hash(leaf) != expected:
                number = tree.size // TILE_WIDTH * TILE_WIDTH + at
                raise TamperError(
                    f"Leaf {number} in its entry bundle is not the one in the tree.", hint=VERIFY_HINT
                )
        return bundle

    def _read_positions(self, size: int) -> tuple[Positions, int]:
        positions, start = Positions(), 0
        data = self._folder.read(SNAPSHOT_PATH)
        if data is not None:
            try:
                found, at, last_hash = Positions.decode(data)
                if 0 < at <= size and TileHashes(self._folder, size)(0, at - 1) == last_hash:
                    positions, start = found, at
            except CorruptionError:
                pass  # a shortcut that does not hold is not taken
        for number, leaf in read_entries(self._folder, start, size, size):
            self._apply(positions, number, read_header(leaf))
        return positions, start

    def _apply(self, positions: Positions, number: int, header: Header | None) -> None:
        """A leaf that stands in the log keeps it from being opened for nothing that it says: what cannot be judged moves no position, as
        what cannot be read."""
        try:
            positions.apply(number, header)
        except Exception as error:
            self._unjudged.sentence(error, f"Leaf {number}")
            positions.apply(number, None)

    def _mend_index(self, size: int) -> None:
        full = size >> TILE_HEIGHT
        index = self._folder.read(INDEX_PATH) or b""
        indexed = bundles_indexed(index)
        kept = cut_index(index, full) if indexed else b""
        if kept != index:
            self._folder.write(INDEX_PATH, kept)
        # The last bundle's rows may be torn, so they are written once more; twice does no harm.
        for number in range(max(0, indexed - 1), full) if indexed < full or len(index) % ROW_BYTES else ():
            headers = [read_header(leaf) for leaf in read_bundle(self._folder, number, size)]
            self._folder.append(INDEX_PATH, bundle_rows(number, headers))

    def _replay(self, state: Opened, bundle: list[bytes], durable: int | None) -> Opened:
        """`bundle`: the newest leaves below the checkpoint."""
        size = state.checkpoints.newest.checkpoint.size
        recovery = Recovery(self._wal_path, size, self._folder.storage, durable)
        if size and (not recovery.firsts or recovery.firsts[0] > size):
            raise RolledBackError(
                f"The audit log {self._name} has no write-ahead file that reaches its checkpoint at {size}.",
                hint=VERIFY_HINT,
            )
        bundle_start = size - len(bundle)
        for number, leaf in recovery:
            if number < size:
                if number >= bundle_start and leaf != bundle[number - bundle_start]:
                    raise TamperError(
                        f"Leaf {number} in the write-ahead file is not the one in the tree.", hint=VERIFY_HINT
                    )
                continue
            header = read_header(leaf)
            self._apply(state.positions, number, header)
            state.tree.take(leaf, header)
        if recovery.size < size:
            raise RolledBackError(
                f"The audit log {self._name} ends at leaf {recovery.size}, its checkpoint covers {size}.",
                hint=VERIFY_HINT,
            )
        if durable is not None and recovery.size < durable:
            raise RolledBackError(
                f"The audit log {self._name} ends at leaf {recovery.size}, and {durable} were on its disk: that has lost some.",
                hint=VERIFY_HINT,
            )
        recovery.settle()
        self._folder.flush()
        state.tree.tidy()
        return state._replace(torn=recovery.torn)
