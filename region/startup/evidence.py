"""The region's audit log as a broker opens it: the log itself where it is here, or one that stays empty; and what the region cosigns."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from audit.copied_disk import become_copied
from audit.submission import Submissions
from audit.trail import Trail
from audit.witness import DiskWitnessStore, Witness
from keys.bundle import SignedBundle
from region.begun_folders import begun_log
from region.cluster.audit_home import Before
from region.clustered import Clustered
from region.copied_log import NO_AUDIT
from region.evidence.opening import open_evidence
from region.evidence.witness_memory import WitnessMemory
from region.folder import AUDIT
from region.metadata.records import Stream
from region.startup.ground import Ground
from region.startup.metadata import Metadata, why_not
from region.trust.trusted_bundles import trusted_files


@dataclass(frozen=True, slots=True)
class Evidence:
    """`cosigned`: the memory of what `witness` signed of other logs; `submissions`: of the own log to outside witnesses."""

    trail: Trail
    witness: Witness
    cosigned: WitnessMemory
    submissions: Submissions
    copied: Stream | None
    """the stream that has the log's leaves, where several brokers have copies of it"""
    before: Before | None
    """where such a log was before, if on one broker's disk"""
    trusted: list[SignedBundle]
    """other regions' bundles in the region's folder"""


async def open_audit_log(ground: Ground, metadata: Metadata) -> Evidence:
    """Open the log, and remember the disks that had what is theirs. Raises as `region.evidence.opening.open_evidence`, and where the log's disk is not mounted."""
    folder, config, runtime, machine, stack = (
        ground.folder, ground.config, ground.runtime, ground.machine, ground.stack,
    )  # fmt: skip
    clustered = metadata.clustered
    cosigned = WitnessMemory(
        metadata.store, config.region, DiskWitnessStore(ground.data / "witness", machine.evidence), runtime
    )
    copied = None if clustered is None else clustered.member.audit.stream
    is_here = clustered is None or copied is not None or clustered.has_audit_log
    before = None if clustered is None else clustered.member.audit.before
    if before is not None and before.broker == config.broker:
        await asyncio.to_thread(
            become_copied, ground.data / AUDIT, before.size, bytes.fromhex(before.root), machine.evidence
        )
    if is_here and clustered is not None and copied is None:
        # Nobody else has it.
        ground.begun.append(begun_log(folder, config, machine.evidence))
        await asyncio.to_thread(ground.begun[-1].require)
    witness, trail = await asyncio.to_thread(
        open_evidence,
        folder,
        config,
        ground.own,
        cosigned,
        lambda: _why_not_write(metadata, clustered),
        lambda: "" if _is_beginning_alone(clustered) else _why_not_write(metadata, clustered),
        name=AUDIT if is_here else NO_AUDIT,
        files=machine.evidence,
        runtime=runtime,
        copied=copied is not None,
    )
    stack.push_async_callback(asyncio.to_thread, trail.close)
    for each in ground.begun:
        await asyncio.to_thread(each.remember, runtime.random)
    witnesses = config.audit.witnesses if is_here else ()
    submissions = Submissions(trail, [each.target(folder.root) for each in witnesses], runtime)
    # One note is to have the cosignatures of them all, and of the regions that bridges may lead to.
    trusted = await asyncio.to_thread(trusted_files, folder)
    known = {*metadata.mirror.trusted(), *(signed.bundle.region for signed in trusted)}
    trail.checkpoints.expect_cosigners(len(known) + len(config.audit.witnesses))
    submissions.start()
    stack.push_async_callback(asyncio.to_thread, submissions.stop)
    return Evidence(trail, witness, cosigned, submissions, copied, before, trusted)


def _is_beginning_alone(clustered: Clustered | None) -> bool:
    """Whether the log is on this disk alone, and this broker was not alive yet: what stands there without a checkpoint, after a kill, is read at the start."""
    return (
        clustered is not None
        and clustered.has_audit_log
        and clustered.member.audit.stream is None
        and clustered.member.is_beginning
    )


def _why_not_write(metadata: Metadata, clustered: Clustered | None) -> str:
    """Why nothing may be appended now; empty where it may. Also asked from other threads."""
    if clustered is not None and not clustered.has_audit_log:
        home = clustered.audit_home
        if not home:
            return "No broker leads the region's audit log"
        return f"The region's audit log is written by broker {home}"
    return why_not(metadata.registered)
