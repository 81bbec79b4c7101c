"""How far the region's own audit log has been signed, where several brokers have copies of it: by the copies that lie here, and the checkpoints of those that do not. Blocks on the disk.

A checkpoint that anybody was shown stands in the folder of a broker (`audit.checkpoint_disk`): so the largest of all copies' checkpoints is no smaller than any that was shown. Nothing is
believed of a copy but what the leaves here confirm: the one that goes furthest is read from its first leaf, and each other checkpoint, and whatever else is known of the log, is of the same
tree. So no key ends behind leaves that nobody has, and of two histories none is chosen. Caller: region.trust.log_keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, NamedTuple

from audit.checkpoint import Checkpoint, open_checkpoint
from audit.cosigned_notes import COSIGNED_PATHS, readable_notes
from audit.merkle import Tree, leaf_hash
from audit.tile import CHECKPOINT_PATH, COPIED_PATH, read_entries
from audit.tile_disk import Folder
from audit.trust import RegionTrust
from felix.errors import Code, CorruptionError, RequestError, TamperError
from keys.bundle import RegionBundle
from region.config import RegionConfig
from region.folder import AUDIT, RegionFolder

NO_AUDIT: Final = "no-audit"
"""That of a broker of several which has not got it: a log that nothing is ever written to, and that nobody takes for the region's."""
LEAD_LEAVES_MAX: Final = 16_384
"""How many leaves one copy may have more than every other: four checkpoints of a busy log (audit.trail). A leaf is on two copies before it is signed, and what is signed is in the files of each
within a second; more is a copy that others were kept from, or that somebody has written who has the log's key."""
_STOP_HINT: Final = "Stop the region's brokers, all of them, and run this again."


class CopyNote(NamedTuple):
    """The newest checkpoint of a broker's copy. `broker`: as a sentence names it; `files`: where it lies here, if it does."""

    broker: str
    checkpoint: Checkpoint
    files: Folder | None


class Measured(NamedTuple):
    """`last`: the largest checkpoint of the log. `copies`: what it was measured by, for a person."""

    last: Checkpoint
    copies: str


def is_copied(folder: RegionFolder, config: RegionConfig) -> bool:
    """Whether brokers have copies of the log: by those that lie here. Where several brokers have none here, they may have; the metadata store says (region.trust.log_key_store)."""
    here = [path for data in config.data_folders if (path := folder.root / data / AUDIT).is_dir()]
    return any(Folder(path).read(COPIED_PATH) is not None for path in here) or (
        not here and config.cluster is not None
    )


def measure(
    folder: RegionFolder,
    config: RegionConfig,
    bundle: RegionBundle,
    origin: str,
    opened: ExitStack,
    *,
    given: Mapping[str, bytes],
    without: Collection[str],
    log: Path | None,
    remembered: Iterable[Checkpoint],
    sizes: Iterable[int],
) -> Measured:
    """How far the log was signed. No broker opens a copy that lies here until `opened` ends.

    `given`: the newest checkpoints of brokers whose copies lie elsewhere. `without`: brokers whose copy is gone, or that have none. `log`: one more copy. `remembered`: checkpoints that others
    know of it; `sizes`: how many leaves it had at least. Raises RequestError where a broker's copy is neither here nor given (NOT_FOUND), a broker is running or no copy goes as far as the log
    is known to (CONFLICT), TamperError where two copies are of two histories, or leaves are not those under their checkpoint.
    """
    notes = [
        *_here(folder, config, bundle, origin, opened, given, without),
        *_given(config, bundle, origin, given),
    ]
    if log is not None:
        notes.append(
            CopyNote(
                str(log),
                _checkpoint(str(log), Folder(log).read(CHECKPOINT_PATH) or b"", bundle, origin),
                Folder(log),
            )
        )
    here = [each for each in notes if each.files is not None]
    if not here:
        raise RequestError(
            f"No copy of the audit log {origin} is here: its keys end with its last checkpoint, and the leaves under that must be at hand.",
            code=Code.NOT_FOUND,
            hint="Run this where a broker has a copy, or name one with --log (felix audit copy).",
        )
    furthest = max(here, key=lambda each: each.checkpoint.size)
    size = furthest.checkpoint.size
    largest = max(notes, key=lambda each: each.checkpoint.size)
    if largest.checkpoint.size > size:
        raise RequestError(
            f"The copy of {largest.broker} goes further than those here: it has a checkpoint of {largest.checkpoint.size:,} leaves, and the largest here is of {size:,}.",
            code=Code.CONFLICT,
            hint="Run this on that broker's machine, with the checkpoints of the others, or bring its copy here and name it with --log (felix audit copy).",
        )
    second = sorted(each.checkpoint.size for each in notes)[-2:][0]
    if size - second > LEAD_LEAVES_MAX:
        raise RequestError(
            f"The copy of {furthest.broker} has a checkpoint of {size:,} leaves, and none of the others one of more than {second:,}: copies of a log that is well are not that far apart.",
            code=Code.CONFLICT,
            hint="Start the brokers, wait until all have the log, and stop them. Where that copy may have been written by a thief of the key: look at it (felix audit show), put its folder aside, and leave it out "
            "(--without). Where the others are gone: --without them.",
        )
    others = [CopyNote("what others know of the log", each, None) for each in remembered]
    others += [known for each in here for known in _cosigned(each, bundle, origin)]
    known = max((*(each.checkpoint.size for each in others), *sizes), default=0)
    if known > size:
        raise RequestError(
            f"The audit log {origin} is known to have had {known:,} leaves, and no copy here has a checkpoint of more than {size:,}.",
            code=Code.CONFLICT,
            hint="Start the brokers that have the others, wait until felix region status tells of no trouble, and stop them: whoever goes on with the log signs all that is committed. Where nobody has "
            "these leaves any more: docs/runbooks/leaked-log-key.md.",
        )
    assert furthest.files is not None
    _require_one_tree(furthest.files, furthest.checkpoint, [*notes, *others])
    asked = {each.broker for each in notes}
    unasked = [broker for broker, _ in _brokers(config) if _called(broker) not in asked]
    told = "; ".join(
        f"{each.broker}: {each.checkpoint.size:,} leaves, {'its copy here' if each.files else 'as given'}"
        for each in notes
    )
    return Measured(
        furthest.checkpoint,
        f"{told}. " + (f"Not asked: {', '.join(unasked)}." if unasked else "None was left out."),
    )


def _called(broker: str) -> str:
    return f"broker {broker}"


def _here(
    folder: RegionFolder,
    config: RegionConfig,
    bundle: RegionBundle,
    origin: str,
    opened: ExitStack,
    given: Mapping[str, bytes],
    without: Collection[str],
) -> Iterator[CopyNote]:
    missing = []
    for broker, data in _brokers(config):
        root = folder.root / data
        files = Folder(root / AUDIT)
        note = files.read(CHECKPOINT_PATH) if broker not in without and files.path.is_dir() else None
        if note is not None:
            if files.read(COPIED_PATH) is None:
                raise RequestError(
                    f"The audit log {files.path} is not one of the copies yet: broker {broker} has not begun with that.",
                    code=Code.CONFLICT,
                    hint="Start the region's brokers, wait until felix region status says that the log is copied, and stop them.",
                )
            lock = files.lock(hint=_STOP_HINT)
            opened.callback(lock.release)
            # Once more, now that nobody writes it.
            note = files.read(CHECKPOINT_PATH) or b""
            yield CopyNote(_called(broker), _checkpoint(_called(broker), note, bundle, origin), files)
        elif broker not in given and broker not in without and not (root / NO_AUDIT).is_dir():
            missing.append(broker)
    if missing:
        raise RequestError(
            f"How far the copies of the audit log go that brokers {', '.join(missing)} have is not known here: what is signed behind the keys' end counts for nothing.",
            code=Code.NOT_FOUND,
            hint=f"Once they have stopped, bring the file {AUDIT}/{CHECKPOINT_PATH} of each one's data folder: --checkpoint {missing[0]}=FILE. Where a broker has no copy, or it is gone: "
            f"--without {missing[0]}.",
        )


def _cosigned(copy: CopyNote, bundle: RegionBundle, origin: str) -> Iterator[CopyNote]:
    """What others have cosigned, as it lies with a copy here: no more than its checkpoint has, unless that was put back to an older one."""
    keys = RegionTrust(bundle).log_keys(origin)
    assert copy.files is not None
    for note in readable_notes(copy.files, COSIGNED_PATHS):
        # What is none of this log, or of a key beyond its end, says nothing; whoever opens the copy says so.
        with suppress(TamperError):
            checkpoint = open_checkpoint(note, keys).checkpoint
            yield CopyNote(f"what was cosigned, beside the copy of {copy.broker},", checkpoint, None)


def _brokers(config: RegionConfig) -> Iterator[tuple[str, str]]:
    if config.cluster is None:
        raise RequestError(
            f"Several brokers have copies of the audit log of {config.region}, and region.yaml names none of them.",
            code=Code.CONFIG_INVALID,
            hint="Put back cluster: in region.yaml, with all brokers, and metadata: with its etcd.",
        )
    return zip((each.id for each in config.cluster.brokers), config.data_folders, strict=True)


def _given(
    config: RegionConfig, bundle: RegionBundle, origin: str, given: Mapping[str, bytes]
) -> Iterator[CopyNote]:
    known = {broker for broker, _ in _brokers(config)}
    for broker, note in given.items():
        if broker not in known:
            raise RequestError(
                f"{config.region} has no broker {broker}.",
                code=Code.NOT_FOUND,
                hint=f"Those that cluster.brokers names: {', '.join(sorted(known))}.",
            )
        yield CopyNote(_called(broker), _checkpoint(_called(broker), note, bundle, origin), None)


def _checkpoint(broker: str, note: bytes, bundle: RegionBundle, origin: str) -> Checkpoint:
    keys = RegionTrust(bundle).log_keys(origin)
    try:
        return open_checkpoint(note, keys).checkpoint
    except TamperError as error:
        raise TamperError(
            f"The checkpoint of {broker} is none of the audit log {origin} under the keys in this folder's bundle. {error.sentence}",
            hint="Where its keys were changed since, this folder is of before: run this with the newest one. Else keep it, it shows who signed it, and leave that broker's copy out (--without).",
        ) from error


def _require_one_tree(files: Folder, last: Checkpoint, notes: Iterable[CopyNote]) -> None:
    """The leaves are those under `last`, and each other checkpoint is of the same tree. Raises TamperError."""
    due: dict[int, list[CopyNote]] = {}
    for each in notes:
        due.setdefault(each.checkpoint.size, []).append(each)
    why, tree = "", Tree()
    _compare(tree, due.pop(0, []), last)
    try:
        for _, data in read_entries(files, 0, last.size, last.size):
            tree.add(leaf_hash(data))
            if tree.size in due:
                _compare(tree, due.pop(tree.size), last)
    except CorruptionError as error:
        if isinstance(error, _TwoHistoriesError):
            raise
        why = f" {error.sentence}"
    if why or (tree.size, tree.root()) != (last.size, last.root):
        raise TamperError(
            f"The leaves in {files.path} are not those under its checkpoint of {last.size:,} leaves.{why}",
            hint="Keep that folder. Where the broker's leaves are damaged: move it aside, start the brokers, which bring them, and stop them. Where somebody else has signed that checkpoint: --without and the broker's "
            "name leaves its copy out. Nothing was changed.",
        )


def _compare(tree: Tree, notes: Iterable[CopyNote], last: Checkpoint) -> None:
    for each in notes:
        if each.checkpoint.size != last.size and tree.root() != each.checkpoint.root:
            raise _two_histories(each, last)
        if each.checkpoint.size == last.size and each.checkpoint.root != last.root:
            raise _two_histories(each, last)


class _TwoHistoriesError(TamperError):
    """Somebody signed two."""


def _two_histories(each: CopyNote, last: Checkpoint) -> TamperError:
    return _TwoHistoriesError(
        f"The checkpoint of {each.checkpoint.size:,} leaves of {each.broker} is of another history of the audit log {last.origin} than the copy here that goes furthest, or that copy's leaves are "
        "not its own.",
        hint="Run felix audit verify on each copy, and keep both: somebody has signed another history (docs/audit.md). Nothing was changed.",
    )
