"""For tests of documents' leaves: an audit log on a disk in memory, and the record of which documents are in it."""

from __future__ import annotations

from pathlib import Path

from audit_log import log_signer

from audit.trail import Trail
from felix.storage.memory import MemoryDisk
from region.evidence.document_log import DocumentLog

LOG = Path("/data/audit")


def opened(disk: MemoryDisk) -> tuple[Trail, DocumentLog]:
    files = disk.mount()
    files.make_folder(LOG)
    trail = Trail.open(LOG, log_signer(), files=files)
    return trail, DocumentLog.open(trail, LOG.parent / "documents-logged")
