"""Carries out what `region.reconciliation` plans, on a metadata store. No broker of the region runs.

A run that did not end leaves the region frozen: nothing is placed or elected until another one has ended.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from felix.runtime.port import Runtime
from region import reconciliation
from region.cluster.audit_home import AuditHome
from region.cluster.mirror import ClusterMirror
from region.cluster.records import ELECTION_CHARS
from region.cluster.registry import EXPIRY_SLACK_MS
from region.cluster.transactions import Reason, Refusal, Transaction, batches
from region.evidence.document_log import LASTING
from region.metadata.catalog import Catalog
from region.metadata.port import MetadataStore
from region.reconciliation import FolderReport, Plan

ASKED_AGAIN: Final = Transaction((), ())
_HINTS: Final = {
    Reason.NO_REPORT: "On the machine that has it: `felix region reconcile {region} --save FILE`; then name the file here with --report. If it will "
    "not come back: --without BROKER. If it was drained and retired since the backup: --retired BROKER.",
    Reason.OLD_FOLDER: "Put its newest folder back. A file of --save that is older than the broker's last start: make it again. Where all folders are of a backup, "
    "restore a snapshot of the store that was saved before the first of them was copied.",
}


class Reconciler:
    """One run. `note`: told what is waited for. `open` first, `close` in the end."""

    def __init__(
        self,
        store: MetadataStore,
        region: str,
        runtime: Runtime,
        note: Callable[[str], None],
    ) -> None:
        self._store = store
        self._region = region
        self._runtime = runtime
        self._note = note
        self._mirror = ClusterMirror(store, region, runtime)

    def _hint(self, reason: Reason) -> str:
        return _HINTS.get(reason, "").replace("{region}", self._region)

    async def open(self) -> None:
        """Read what the store has, and wait until no broker is alive in it. Raises UnavailableError(SERVED_ELSEWHERE) where one stays so, CorruptionError
        of a record that cannot be read."""
        await self._mirror.start()
        view = self._mirror.view
        if view.unreadable:
            key, why = sorted(view.unreadable.items())[0]
            raise CorruptionError(f"{key} in the metadata store cannot be read: {why}.")
        if not view.alive:
            return
        # An etcd that was put back counts each lease from its beginning.
        wait_ms = max(each.lease_ms for each in view.alive.values()) + EXPIRY_SLACK_MS
        self._note(
            f"{', '.join(sorted(view.alive))} stood as alive in the backup: their leases end within {wait_ms / 1_000:.0f} s"
        )
        try:
            async with asyncio.timeout(wait_ms / 1_000):
                await self._mirror.until(lambda: not view.alive)
        except TimeoutError:
            broker, alive = sorted(view.alive.items())[0]
            raise UnavailableError(
                f"Broker {broker} is alive on {alive.host}.",
                code=Code.SERVED_ELSEWHERE,
                hint="Stop every broker of the region first; its folder may change while it runs.",
            ) from None

    @property
    def is_empty(self) -> bool:
        """Whether the store knows no broker of the region."""
        return not self._mirror.view.nodes

    async def close(self) -> None:
        """Follow the store no more."""
        await self._mirror.close()

    async def plan(
        self,
        reports: Mapping[str, FolderReport],
        expected: Iterable[str],
        without: Collection[str],
        retired: Collection[str] = (),
        configured: Collection[str] = (),
    ) -> Plan:
        """What is to be written, and what an operator should know before. `configured`: the brokers that region.yaml names. Raises RequestError(CONFLICT)
        where too little was heard."""
        for report in reports.values():
            if report.region != self._region:
                raise RequestError(
                    f"The folder of {report.broker} is of region {report.region}, not of {self._region}."
                )
        catalog = Catalog(self._store, self._region)
        streams = {stream.incarnation: stream for stream in await catalog.list_streams()}
        entry = await self._store.get(self._mirror.view.keys.audit_home)
        stored = None if entry is None else AuditHome.of(entry)
        audit = self._audit_home(reports, stored)
        if audit is not None and (leaves := audit.stream) is not None:
            streams[leaves.incarnation] = leaves
        deleted = {stream.incarnation for stream in await catalog.deleted_streams()}
        made = reconciliation.reconcile(
            self._mirror.view,
            streams,
            deleted,
            reports,
            expected,
            without=without,
            retired=retired,
            configured=configured,
            audit_before=None if audit is None else audit.before,
            election=lambda: self._runtime.random.randbytes(ELECTION_CHARS // 2).hex(),
        )
        if isinstance(made, Refusal):
            raise RequestError(made.sentence, code=Code.CONFLICT, hint=self._hint(made.reason))
        if audit is not None and audit != stored:
            made.audit_home, made.audit_revision = audit.encode(), 0 if entry is None else entry.mod_revision
            made.notes.append(
                "The store does not say where the region's audit log is: that is put back as the folders know it."
            )
        if sentence := await self._documents(reports):
            made.notes.append(sentence)
        return made

    async def write(self, plan: Plan) -> None:
        """Carry it out. Raises UnavailableError, and RequestError(CONFLICT) where somebody else wrote meanwhile: then it is to be planned anew."""
        view = self._mirror.view
        if (made := reconciliation.freeze(view, min(plan.nodes, default="b1"), plan)) is not None:
            await self._commit(made)
        for made in reconciliation.brokers(view, plan):
            await self._commit(made)
        if (made := reconciliation.audit_home(view, plan)) is not None:
            await self._commit(made)
        for _, made in batches(reconciliation.shards(view, plan), ASKED_AGAIN):
            await self._commit(made)
        for made in reconciliation.retired(view, plan):
            await self._commit(made)
        await self._commit(reconciliation.thaw(view))

    async def _commit(self, made: Transaction) -> None:
        result = await self._mirror.commit(made)
        if result is None or not result.succeeded:
            raise RequestError(
                "The metadata store was changed meanwhile, or did not answer: the region is not reconciled yet.",
                code=Code.CONFLICT,
                hint="Stop every broker of the region, and reconcile again.",
            )

    def _audit_home(self, reports: Mapping[str, FolderReport], stored: AuditHome | None) -> AuditHome | None:
        """Where the audit log is, as store and folders say. Raises RequestError(CONFLICT) where store and folders differ."""
        told = {f"broker {broker}": report.audit for broker, report in reports.items() if report.audit}
        if stored is not None:
            told[f"the store ({self._mirror.view.keys.audit_home})"] = stored.encode()
        homes = {what: AuditHome.decode(what, who) for who, what in told.items()}
        if not homes:
            return None
        # Some may not have heard yet that the log on one disk has copies now, and an older store does not know it.
        for what, home in homes.items():
            if all(other == what or home.continues(other) for other in homes):
                return home
        raise RequestError(
            "Which stream has the region's audit log is said differently: "
            + "; ".join(f"by {who}: {what}" for who, what in sorted(told.items()))
            + ".",
            code=Code.CONFLICT,
            hint="Where a folder is another region's, or a new one, put the right one back. Where the store was changed, delete its key: "
            "reconciling puts it back.",
        )

    async def _documents(self, reports: Mapping[str, FolderReport]) -> str:
        """The signed documents that the audit log has behind the last one that the store has."""
        logged = max((report.audit_log.documents for report in reports.values()), key=len, default={})
        prefix = self._mirror.view.keys.prefix
        stored = set[str]()
        for section in ("grants", "revocations", "denies", "policy/versions"):
            found = await self._store.load(f"{prefix}{section}/")
            stored |= {hashlib.sha256(entry.value).hexdigest() for entry in found.entries}
        since: list[str] = []
        for digest, kind in logged.items():
            since = [] if digest in stored else [*since, kind]
        if not since:
            return ""
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(since).items()))
        lasting = {kind.name for kind in LASTING}
        again = (
            "those that forbid are in force again once a broker starts"
            if lasting & set(since)
            else "none of them forbids"
        )
        return (
            f"The audit log has {len(since)} signed documents that are newer than those in the store ({counts}): {again}; grants and policies have "
            "to be put in again (`felix bridge approve`, `felix policy apply`)."
        )
