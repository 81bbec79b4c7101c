"""What a region's decisions must not forget: revocations that were in force and the newest residency policy, beside the log.

The metadata store is where brokers read them; whoever administers it could take a revocation away, or put an older policy back. The
documents are signed by the regions, so a broker that has once believed one keeps a copy in its data folder and goes on believing it,
also after a restart. Files only ever come: one per revocation, and one policy that is replaced by its successors.

Invariants: nothing is believed because it stands here; the grant book and the policy's own check verify it again. `keep_*` returns
at once and writes in a thread of its own; what could not be written is said in the log and tried again at the next start of what knows it.
"""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from felix.files import replace_file

log = logging.getLogger("felix.region.governance")

_REVOCATION: Final = ".revocation"
_POLICY: Final = "policy"


class Remembered(NamedTuple):
    """Signed documents as they came: revocations, and the newest policy."""

    revocations: list[bytes]
    policy: bytes | None


class Memory:
    """One broker's copies. `folder` is made with the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="governance")
        self._kept: set[str] = set()

    def load(self) -> Remembered:
        """What is kept. Blocking."""
        paths = sorted(self._folder.glob(f"*{_REVOCATION}"))
        self._kept |= {path.name for path in paths}
        revocations = [path.read_bytes() for path in paths]
        policy = self._folder / _POLICY
        return Remembered(revocations, policy.read_bytes() if policy.exists() else None)

    def keep_revocation(self, document: bytes) -> None:
        """Keep a revocation that this broker believes. One that is kept already is not written again."""
        # Named by its content: what the store calls it is the store's administrator's choice.
        name = hashlib.sha256(document).hexdigest() + _REVOCATION
        if name not in self._kept:
            self._kept.add(name)
            self._writer.submit(self._write, name, document)

    def keep_policy(self, document: bytes) -> None:
        """Keep the policy that is in force, in place of the one before."""
        self._writer.submit(self._write, _POLICY, document)

    def _write(self, name: str, document: bytes) -> None:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            replace_file(self._folder / name, document)
        except OSError as error:
            log.error("%s could not be kept in %s: %s", name, self._folder, error)

    def close(self) -> None:
        """Finish what is being written. Blocking."""
        self._writer.shutdown()
