"""An operator who signs documents for ever, whatever happens, and notes which of them were taken: each has one leaf in the region's audit log."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import felix
from audit.leaf import decode_leaf
from audit.tile import read_entries
from audit.tile_disk import Folder
from audit.trust import Trust
from audit.verify import verify_log
from felix.errors import FelixError
from felix.messages import PutDocument
from keys.key_file import load_signing_key
from policy.grant import DenyEntry, sign_deny
from region.config import load_config
from region.folder import RegionFolder
from region.trust.trusted_bundles import own_bundle

PAUSE_S: Final = 0.2
AGAIN_S: Final = 0.2
"""Who was refused asks again after so long, for the same document."""
WAIT_S: Final = 120.0
"""Longest wait for something that must happen; only a failing run waits this long."""


class AuditLoad:
    """Of one region; the documents deny that streams cross which nobody has."""

    def __init__(self, folder: RegionFolder) -> None:
        self.taken: list[bytes] = []
        """SHA-256 of each document that was taken"""
        self._folder = folder
        self._config = load_config(folder.config)
        self._key = load_signing_key(folder.policy_key).private_key
        self._refused = Counter[str]()
        self._work: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        refused = ", ".join(f"{number} {name}" for name, number in sorted(self._refused.items()))
        return f"{len(self.taken)} documents taken; refused: {refused or 'nothing'}"

    @asynccontextmanager
    async def going_on(self, region: felix.RegionClient) -> AsyncIterator[None]:
        """Until the block ends."""
        self._work = asyncio.ensure_future(self._sign(region))
        try:
            yield
        finally:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    async def goes_on(self, number: int) -> None:
        """So many more are taken."""
        enough = len(self.taken) + number
        async with asyncio.timeout(WAIT_S):
            while len(self.taken) < enough:
                if self._work is not None and self._work.done():
                    self._work.result()
                await asyncio.sleep(0.02)

    async def check(self, copies: Sequence[Path]) -> None:
        """Each copy of the log, a folder, verifies and has one leaf of each document that was taken, once it has caught up."""
        said = ""
        try:
            async with asyncio.timeout(WAIT_S):
                while said := await asyncio.to_thread(self._missing, copies):  # noqa: ASYNC110 - no event is set for it
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise AssertionError(said) from None

    def _missing(self, copies: Sequence[Path]) -> str:
        trust = Trust.of([own_bundle(self._folder, self._config)])
        for copy in copies:
            log = Folder(copy)
            report = verify_log(log, trust, cosignatures_min=0)
            assert report.ok, (copy, report.findings)
            leaves = Counter(
                leaf.header.document_sha256
                for leaf in (decode_leaf(each) for _, each in read_entries(log, 0, report.size, report.size))
            )
            counts = [leaves[digest] for digest in self.taken]
            assert max(counts, default=0) < 2, f"a document has {max(counts)} leaves in {copy}"
            if missing := counts.count(0):
                return f"{missing} documents of {len(counts)} have no leaf in {copy}, which has {report.size} leaves"
        return ""

    async def _sign(self, region: felix.RegionClient) -> None:
        number = 0
        while True:
            number += 1
            now = time.time_ns() // 1_000_000
            entry = DenyEntry(
                streams=f"acme/none/s{number}",
                peer="*",
                region=self._config.region,
                sequence=now,
                at=now,
                by=f"spiffe://{self._config.region}.{self._config.mesh}/operator/operator",
                reason="of a play",
            )
            body = sign_deny(entry, self._key).encode_file()
            while True:
                try:
                    await region.connection.request(PutDocument("deny", body))
                    break
                except FelixError as error:
                    self._refused[error.code.name] += 1
                    await asyncio.sleep(AGAIN_S)
            self.taken.append(hashlib.sha256(body).digest())
            await asyncio.sleep(PAUSE_S)
