"""Which folders of a region may lie on disks of their own, each with the file that remembers it (felix.storage.begun): whoever begins something there, or moves or signs what is there, asks first. Blocks.

Callers: region.startup, region.evidence.copying_audit_log; `felix region to-cluster` and `reconcile`.
"""

from __future__ import annotations

from felix.storage.begun import SUFFIX, BegunFolder
from felix.storage.disk import PRIVATE_FILES, SHARED_FILES
from felix.storage.port import Files
from region.config import RegionConfig
from region.folder import AUDIT, STREAMS, RegionFolder

_GONE = "Where it is lost for good: docs/operations.md, When a region's audit log is gone for good."


def begun_folders(
    folder: RegionFolder, config: RegionConfig, files: Files = PRIVATE_FILES, evidence: Files = SHARED_FILES
) -> list[BegunFolder]:
    """The outermost first. Of one of several brokers the metadata store knows the data folder, and others have copies of the audit log: where they have not, `begun_log` is asked, too."""
    data = folder.root / config.data
    streams, memory = data / STREAMS, data / f"{STREAMS}{SUFFIX}"
    if config.cluster is not None:
        up = f"felix region up {config.region} --broker {config.broker} --replace-folder"
        lost = f"Where it is lost for good, move {data} aside, and have its copies made anew: {up} (docs/clusters.md, A data folder is lost)."
        return [BegunFolder(files, streams, memory, lost)]
    empty = f"Where it is lost for good, and streams are to begin empty: remove {memory}."
    return [
        BegunFolder(files, data, folder.root / f"data{SUFFIX}", _GONE, frozenset({STREAMS, AUDIT})),
        BegunFolder(files, streams, memory, empty),
        begun_log(folder, config, evidence),
    ]


def begun_log(folder: RegionFolder, config: RegionConfig, evidence: Files = SHARED_FILES) -> BegunFolder:
    """Of the region's audit log, where one broker writes it alone: that of `config`."""
    data = folder.root / config.data
    return BegunFolder(evidence, data / AUDIT, data / f"{AUDIT}{SUFFIX}", _GONE)
