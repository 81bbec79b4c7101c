"""Changing a region's policy key, its receipt key, or both: the ones before sign nothing any more, and count in each log up to where it was then. Blocks on
the disk.

Where a key ended stands in the bundle, log by log (keys.bundle.FormerKeys):

- of the logs of other regions that this one trusts: how far it has cosigned each, by what the witness of a broker remembers in its data folder;
- of its own logs: their last checkpoint.

Whoever has the former key can put nothing below that: the region would have to cosign, or sign, another history.

Order, so that a crash at any step leaves a region that goes on after the next call:

1. what the logs' ends are is read; 2. the new keys are written beside the old ones, and beside the bundle the one that names them, and where the old ones ended;
3. in a region's own log that one process writes KEY leaves record the change; 4. that bundle takes the place of the one before, and 5. the new keys that of theirs.

Between 3 and 5 no broker starts (`require_of_now`), and the next call goes on with what was written: the ends stay those of 1. Before 3 it begins anew.

A folder of before the change, put back beside a log that has its leaves, is refused here as by brokers: the keys ended where they ended then, and what a thief signed
meanwhile must not count because they are ended once more. The bundle of that change says where; other regions have it. Callers: cli.region, region.startup.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from audit.checkpoint import Checkpoint, SignedCheckpoint, claimed_size, notes_of, open_checkpoint
from audit.leaf import Kind, read_header
from audit.merkle import Tree, leaf_hash
from audit.note import parse_note
from audit.origin import Origin, region_origin
from audit.signer_disk import load_signers
from audit.tile import CHECKPOINT_PATH, COPIED_PATH, read_entries
from audit.tile_disk import Folder
from audit.trail import Trail
from audit.trust import RegionTrust
from audit.witness import DiskWitnessStore
from felix.errors import Code, FelixError, RequestError, TamperError
from felix.files import PUBLIC, replace_file
from keys.bundle import FORMER_MAX, FormerKeys, KeyEnd, RegionBundle, SignedBundle, decode_bundle, sign_bundle
from keys.key_file import load_signing_key, save_signing_key
from keys.signing import SigningKey
from policy.signed import key_id
from region.config import RegionConfig
from region.folder import RegionFolder
from region.trust.begun_change import (
    changes_bundle,
    has_begun,
    holds_key_of_now,
    is_in_place,
    new_path,
    put_in_place,
    require_none_begun,
    signing_key_path,
    written,
)
from region.trust.begun_change import planned as planned_change
from region.trust.bundle_room import require_room
from region.trust.held_document import digest_of
from region.trust.log_keys import append_waiting
from region.trust.signing_key_leaves import (
    NEVER_CHANGED,
    ROLES,
    STALE_HINT,
    LoggedKey,
    LoggedKeys,
    Role,
    former_keys,
    key_id_of,
    keys_of_now,
    stale_key,
    take,
    unlogged,
)
from region.trust.trust_store import believed_bundles, described, kept_words
from region.trust.trusted_bundles import pinned_bundles

_NEWER_HINT: Final = (
    "Put the bundle.json of that change into the folder, and run this again: it says where the keys ended. Regions and auditors that trust this one have it (trusted/REGION.json); "
    "the secrets of then are not needed. Where nobody has it: --lost-bundle, and what these keys signed counts up to the checkpoints that are given with --checkpoint alone."
)

_BESIDE_HINT: Final = (
    "The bundle of that change lies beside it, new.bundle.json; the keys that it names do not (new.policy.pem, new.receipt.pem). Put these there and run this again, which finishes the change. "
    "Where they are lost: put new.bundle.json in the place of bundle.json, and run this again, which makes others."
)

_FINISHED: Final = "A change that was cut off is finished by this: the keys are those that were made then. Where they are to be changed once more, run it again."

_GONE_HINT: Final = (
    "Run this where the broker has the audit log, or bring a copy of the log (felix audit copy) and name its folder with --log. Where the log is gone, or was never "
    "written: --without {log}. Where nobody has the log at hand, and the keys cannot wait: --lost-bundle, and what these keys signed counts up to the checkpoints that are given "
    "with --checkpoint alone."
)
_RAISED_HINT: Final = (
    "Run this where the broker has the audit log, or bring a copy of the log (felix audit copy) and name its folder with --log. Where the log is gone, or was never "
    "written: --without {log}."
)


class ChangedSigningKeys(NamedTuple):
    """The bundle that names the new keys, and where the ones before ended. `left_out`: of which logs nothing is said, or less than this folder has, and why."""

    signed: SignedBundle
    ends: tuple[KeyEnd, ...]
    left_out: tuple[str, ...] = ()


@changes_bundle
def change_signing_keys(
    folder: RegionFolder,
    config: RegionConfig,
    now_ms: int,
    roles: Iterable[Role] = ROLES,
    *,
    checkpoints: Iterable[bytes] = (),
    without: Iterable[str] = (),
    drop_earliest: int = 0,
    lost_bundle: bool = False,
    log: Path | None = None,
    remembered: Iterable[bytes] = (),
    say_again: bool = False,
) -> ChangedSigningKeys:
    """Give the region new keys of these roles. Its brokers, and the agents whose logs lie in the folder, are stopped.

    `checkpoints`: the last ones of logs that lie elsewhere; of other regions' logs, as this one cosigned them. `without`: logs where nothing that the former keys signed
    counts. `drop_earliest`: of so many of the earliest changes the former keys are named no more, and count for nothing. `lost_bundle`, which called again makes no further keys until the log has the first call's: the log says that the keys of this
    bundle were given up, or is not at hand, and nobody has the bundle of the last change; what they signed counts up to the `checkpoints` that are given, and nowhere else.
    `log`: a copy of the region's own log, on a machine that has none: it says which keys are those of now, and where they end. `remembered`: notes of the
    region's own log that others on this machine have cosigned: the log, or its copy, is refused where it is shorter than one of these, or than what else is known of it. `say_again`: what brokers keep of this region's words without a leaf holds nothing up; it is to be said again. What another region does
    stops no change: of a log of its that cannot be taken nothing is said (`left_out`). Raises RequestError where one of the own logs is not at hand, is being written or has
    two histories (CONFLICT), where the folder is of before a change, or the bundle has no room; then nothing was written.
    """
    bundle = decode_bundle(folder.bundle.read_bytes()).bundle
    roles = [role for role in ROLES if role in set(roles)]
    chosen = roles
    if has_begun(folder, bundle) or is_in_place(folder, bundle):
        return _finish(folder, decode_bundle(folder.bundle.read_bytes()), roles)
    assert chosen, "at least one key is changed"
    given = [_given(folder, bundle, note) for note in checkpoints]
    without, instead = set(without), keys_made_instead(folder)
    known = {end.log for end in given}.union(without)
    with ExitStack() as opened:
        own = _copied_log(log, bundle) if log is not None else _own_log(folder, config, bundle, opened)
        if own is None and not lost_bundle:
            _require_gone(bundle, without, _GONE_HINT)
        if own is not None and not lost_bundle:
            _require_whole(own, bundle, given, remembered)
        contents = own.contents() if own is not None else None
        logged = {} if contents is None else contents.keys
        if lost_bundle:
            chosen = [role for role in chosen if not _was_made_instead(bundle, role, logged, instead)]
            if not chosen:
                return _stands(folder, bundle, roles)
        stale = stale_key(bundle, logged, instead)
        if (
            stale
            and (planned := planned_change(folder)) is not None
            and _is_last(planned.bundle, bundle, logged)
        ):
            _record(own, planned.bundle, logged, now_ms, instead)
            return _finish(folder, planned, roles)
        if stale and not lost_bundle:
            plan = written(folder)
            is_here = plan is not None and not stale_key(plan.bundle, logged, instead)
            raise RequestError(stale, code=Code.CONFLICT, hint=_BESIDE_HINT if is_here else _NEWER_HINT)
        if contents is not None and not stale and "policy" in chosen and not say_again:
            _require_leaves(folder, config, bundle, contents.documents)
        for role in {*chosen, "policy"}:
            _require_in_place(folder, bundle, role, logged if role in chosen else {})
        earlier = _without_earliest(bundle, drop_earliest)
        new = {role: SigningKey.generate() for role in chosen}
        is_lost = lost_bundle and (bool(stale) or own is None)
        if is_lost:
            measured, unread = list[KeyEnd](), list[str]()
        else:
            measured, unread = _cosigned_ends(folder, config, without)
            measured += [log.end() for log in _own_logs(folder, config, bundle, known, own, opened)]
        ends, forked = _largest(measured, given, bundle.region)
        former = FormerKeys(
            policy_keys=bundle.policy_keys if "policy" in new else (),
            receipt_keys=bundle.receipt_keys if "receipt" in new else (),
            ends=ends,
        )
        changed = msgspec.structs.replace(
            bundle.with_former((*earlier, former)),
            issued_ms=max(now_ms, bundle.issued_ms + 1),
            **{f"{role}_keys": (key.verify_key.public,) for role, key in new.items()},
        )
        if (is_lost and own is None) or stale_key(changed, logged, instead):
            instead = instead.union(key_id_of(key.verify_key.public) for key in new.values())
        left_out = (*unread, *forked, *_unsaid(folder, bundle, ends, without, (*unread, *forked)))
        # All that may be refused was refused, before anything is written.
        require_room(changed, dropped=drop_earliest, dealt=None if contents is None else contents.regions)
        signed = sign_bundle(changed, new.get("policy") or load_signing_key(folder.policy_key))
        for role in ROLES:
            # Of a call that did not come as far as the log: nobody knows them.
            new_path(signing_key_path(folder, role)).unlink(missing_ok=True)
        for role, key in new.items():
            save_signing_key(key, new_path(signing_key_path(folder, role)))
        if instead:
            replace_file(
                folder.lost_bundle, "".join(f"{key.hex()}\n" for key in sorted(instead)).encode(), PUBLIC
            )
        replace_file(new_path(folder.bundle), signed.encode(), PUBLIC)
        _record(own, changed, logged, now_ms, instead)
    return _put_in_place(folder, signed)._replace(left_out=left_out)


@changes_bundle
def raise_ends(
    folder: RegionFolder,
    config: RegionConfig,
    now_ms: int,
    *,
    checkpoints: Iterable[bytes] = (),
    without: Iterable[str] = (),
    back: int = 1,
    log: Path | None = None,
    remembered: Iterable[bytes] = (),
) -> ChangedSigningKeys:
    """Have the keys that ended last count up to where other regions' logs are cosigned by now, and own logs as their given checkpoints say: what was on its way when
    they ended has its leaf behind the end. A log of which nothing was said is added.

    `back`: of which change the keys are, 1 for the last, 2 for the one before; keys of an earlier one count no further than those of each one after it, and no further than
    now where one of these counts for nothing. Whoever has the former keys and one of those logs' keys may have put something there meanwhile. `log` and
    `remembered`: as with a change. Raises RequestError where no key ended, nothing goes further, the region's own log is not at hand (NOT_FOUND) unless it is one of `without`, or the
    folder is of before a change that its log has (CONFLICT).
    """
    bundle = decode_bundle(folder.bundle.read_bytes()).bundle
    require_none_begun(folder, bundle)
    if not bundle.former:
        raise RequestError(f"No policy or receipt key of {bundle.region} has ended.", code=Code.NOT_FOUND)
    if not 1 <= back <= len(bundle.former):
        raise RequestError(
            f"The bundle of {bundle.region} names former keys of {len(bundle.former)} changes; there is no change {back}, counted from the last.",
            code=Code.NOT_FOUND,
        )
    at = len(bundle.former) - back
    last = bundle.former[at]
    following = [
        each
        for each in bundle.former[at + 1 :]
        if (each.policy_keys and last.policy_keys) or (each.receipt_keys and last.receipt_keys)
    ]
    given, without = [_given(folder, bundle, note) for note in checkpoints], set(without)
    with ExitStack() as opened:
        own = _copied_log(log, bundle) if log is not None else _own_log(folder, config, bundle, opened)
        if own is None:
            _require_gone(bundle, without, _RAISED_HINT)
        contents = None if own is None else _require_newest(folder, bundle, own, given, remembered)
    cosigned, unread = _cosigned_ends(folder, config, without)
    measured, forked = _largest(cosigned, given, bundle.region)
    left_out = [*unread, *forked]
    ends = {end.log: end for end in last.ends}
    for found in measured:
        limits = [limit for each in following if (limit := each.end_in(found.log)) is not None]
        if len(limits) < len(following):
            left_out.append(
                f"The keys after these count for nothing in {found.log}, so these count there no further than now."
            )
            continue
        end = min((found, *limits), key=lambda each: each.size)
        held = ends.setdefault(end.log, end)
        if held.size == end.size and held.root != end.root:
            left_out.append(f"{_two_roots(end.log, end.size)} Its end stays as it is.")
        if end.size > held.size:
            ends[end.log] = end
    raised_ends = tuple(ends[log] for log in sorted(ends))
    if raised_ends == last.ends:
        raise RequestError(
            " ".join(("No log is cosigned further than where the keys ended.", *left_out)),
            code=Code.CONFLICT,
            hint="A log of this region is raised by its last checkpoint, with --checkpoint.",
        )
    changed = msgspec.structs.replace(last, ends=raised_ends)
    raised = bundle.with_former((*bundle.former[:at], changed, *bundle.former[at + 1 :]))
    raised = msgspec.structs.replace(raised, issued_ms=max(now_ms, bundle.issued_ms + 1))
    require_room(raised, at, held=last.ends, dealt=None if contents is None else contents.regions)
    signed = sign_bundle(raised, load_signing_key(folder.policy_key))
    replace_file(folder.bundle, signed.encode(), PUBLIC)
    return ChangedSigningKeys(signed, raised_ends, tuple(left_out))


def _was_made_instead(
    bundle: RegionBundle, role: Role, logged: LoggedKeys, instead: Collection[bytes]
) -> bool:
    """Whether an earlier call made the key of now in place of a lost one, and the log, as far as it is at hand, has no leaf of it yet: one more would be a change that nobody asked for."""
    public = keys_of_now(bundle, role)[0]
    last, key_id = logged.get(role, NEVER_CHANGED), key_id_of(public)
    return key_id in instead and key_id != last.key_id and key_id not in last.ended


def _stands(folder: RegionFolder, bundle: RegionBundle, roles: Iterable[Role]) -> ChangedSigningKeys:
    """What an earlier call made in place of lost keys. Raises RequestError(CONFLICT) where these do not lie here."""
    for role in roles:
        _require_in_place(folder, bundle, role, {})
    said = (
        f"These keys of {bundle.region} were made in place of lost ones before, and no log here has a leaf of them yet: none were made now. Start the brokers, which write it. A log in which "
        "they count for too little is raised with --raise-ends --checkpoint FILE, beside the region's log or a copy of it (--log). Where these keys, too, are to end: change them once the log has their leaf, beside it or a copy of it (--log)."
    )
    signed = decode_bundle(folder.bundle.read_bytes())
    return _put_in_place(folder, signed)._replace(left_out=(said,))


def _require_newest(
    folder: RegionFolder,
    bundle: RegionBundle,
    own: _OwnLog,
    given: Iterable[KeyEnd],
    remembered: Iterable[bytes],
) -> _Contents:
    """What the region's own log has. Raises RequestError(CONFLICT) where that is a change of keys that the bundle is of before, or the log is not whole."""
    _require_whole(own, bundle, given, remembered)
    contents = own.contents()
    if stale := stale_key(bundle, contents.keys, keys_made_instead(folder)):
        raise RequestError(stale, code=Code.CONFLICT, hint=_NEWER_HINT)
    return contents


def _require_whole(
    own: _OwnLog, bundle: RegionBundle, given: Iterable[KeyEnd], remembered: Iterable[bytes]
) -> None:
    """Raises RequestError(CONFLICT) where the region's own log, or this copy of it, has fewer leaves than it is known to have: of what it lacks, it says no change of keys."""
    size = own.end().size
    known = max(_known_sizes(own.origin, bundle, given, remembered), default=0)
    if size < known:
        raise RequestError(
            f"The audit log {own.files.path} has {size:,} leaves, and is known to have had {known:,}: it is an older copy, and what it lacks may say that these keys were given up.",
            code=Code.CONFLICT,
            hint="Copy the log once more, from the broker that has it (felix audit copy), and name that with --log. Where the larger checkpoint is of another history of the log "
            "(docs/audit.md), --lost-bundle changes the keys by the log as it is here.",
        )


def _known_sizes(
    origin: str, bundle: RegionBundle, given: Iterable[KeyEnd], remembered: Iterable[bytes]
) -> Iterator[int]:
    """How many leaves a log had, by checkpoints that are at hand and by what the bundle says of its keys."""
    yield from (end.size for end in given if end.log == origin)
    yield from RegionTrust(bundle).named_sizes(origin)
    # Under whichever keys: a folder of before a change of the log's keys has not the bundle that names them.
    yield from map(claimed_size, notes_of(remembered, origin))


def keys_made_instead(folder: RegionFolder) -> frozenset[bytes]:
    """The ids of keys that take the place of whichever ones the log names last: the bundle of these was lost. Blocks."""
    try:
        return frozenset(map(bytes.fromhex, folder.lost_bundle.read_text().split()))
    except (FileNotFoundError, ValueError):
        return frozenset()


def require_of_now(
    own: RegionBundle, receipt_key: SigningKey, logged: LoggedKeys, instead: Collection[bytes] = ()
) -> None:
    """Raises RequestError(CONFIG_INVALID) where a broker has a receipt key that its region's bundle does not name, as nobody takes what it signs; or a bundle of before a
    change of keys that the region's audit log has, or made from one of before it. `instead`: `keys_made_instead`."""
    if stale := stale_key(own, logged, instead):
        raise RequestError(stale, code=Code.CONFIG_INVALID, hint=STALE_HINT)
    if receipt_key.verify_key.public in own.receipt_keys:
        return
    has_ended = any(receipt_key.verify_key.public in keys.receipt_keys for keys in own.former)
    raise RequestError(
        f"The receipt key in this folder is one that {own.region} gave up."
        if has_ended
        else f"The receipt key in this folder is none that the bundle of {own.region} names.",
        code=Code.CONFIG_INVALID,
        hint="Put receipt.pem and bundle.json of one and the same time into the region's folder, the newest; where a change was cut off, run felix region "
        "change-signing-keys again.",
    )


def _is_last(planned: RegionBundle, before: RegionBundle, logged: LoggedKeys) -> bool:
    """Whether the log names no other change since that of this plan was begun: one that was made later may have left the plan behind in a backup of the folder."""
    of_plan, of_before = ({*each.policy_keys, *each.receipt_keys} for each in (planned, before))
    known = {key_id_of(public) for public in (*of_plan, *of_before)}
    known |= {
        key_id_of(public) for keys in before.former for public in (*keys.policy_keys, *keys.receipt_keys)
    }
    return all(not each.key_id or each.key_id in known for each in logged.values())


def _finish(folder: RegionFolder, signed: SignedBundle, roles: Iterable[Role]) -> ChangedSigningKeys:
    """Put a change that was cut off in place. Raises RequestError(CONFLICT), once that is done, where keys of other `roles` are to be changed, too."""
    finished, last = _put_in_place(folder, signed), signed.bundle.former[-1]
    for role in ROLES:
        if not holds_key_of_now(folder, signed.bundle, role):
            raise RequestError(
                f"A change that was cut off is finished, and the {role} key that it made is not here: {signing_key_path(folder, role)} holds the one of before.",
                code=Code.CONFLICT,
                hint=f"Put it there from where it is. Where it is lost: run this again, beside the log of {signed.bundle.region}, which makes another.",
            )
    done = [role for role in ROLES if (last.policy_keys if role == "policy" else last.receipt_keys)]
    if others := [role for role in roles if role not in done]:
        raise RequestError(
            f"A change of the {' and the '.join(done)} key of {signed.bundle.region} that was cut off is finished. The {' and the '.join(others)} key is still that of before.",
            code=Code.CONFLICT,
            hint="Run this again, which changes it.",
        )
    return finished._replace(left_out=(_FINISHED,))


def _put_in_place(folder: RegionFolder, signed: SignedBundle) -> ChangedSigningKeys:
    replace_file(folder.bundle, signed.encode(), PUBLIC)
    _move_new(folder)
    new_path(folder.bundle).unlink(missing_ok=True)
    return ChangedSigningKeys(signed, signed.bundle.former[-1].ends if signed.bundle.former else ())


def _move_new(folder: RegionFolder) -> None:
    put_in_place(signing_key_path(folder, role) for role in ROLES)


def _record(
    own: _OwnLog | None, bundle: RegionBundle, logged: LoggedKeys, now_ms: int, instead: Collection[bytes]
) -> None:
    """Have the region's own log say of the change what it does not say yet. One of which several brokers have copies is written by them."""
    if own is not None and own.trail is not None:
        for said in unlogged(bundle, logged, instead):
            append_waiting(own.trail, said.leaf(bundle.region, now_ms))


def _require_in_place(folder: RegionFolder, bundle: RegionBundle, role: Role, logged: LoggedKeys) -> None:
    """Raises RequestError where the folder has another key than the bundle names, unless the log or the bundle says that it was given up: then the one of now is lost."""
    path = signing_key_path(folder, role)
    public = load_signing_key(path).verify_key.public
    if public in keys_of_now(bundle, role):
        return
    # In a log of which several brokers have copies the leaf comes later than the bundle.
    if public not in former_keys(bundle, role) and (
        role not in logged or key_id_of(public) not in logged[role].ended
    ):
        raise RequestError(
            f"The bundle of {bundle.region} names another {role} key than {path} holds.", code=Code.CONFLICT
        )


def _end(signed: SignedCheckpoint) -> KeyEnd:
    checkpoint = signed.checkpoint
    return KeyEnd(checkpoint.origin, checkpoint.size, checkpoint.root)


def _without_earliest(bundle: RegionBundle, dropped: int) -> tuple[FormerKeys, ...]:
    """The former keys that the next bundle names besides those that end now. Raises RequestError where there are not so many, or no room is left."""
    if not 0 <= dropped <= len(bundle.former):
        raise RequestError(
            f"The bundle of {bundle.region} names the former keys of {len(bundle.former)} changes, not of {dropped}."
        )
    kept = bundle.former[dropped:]
    if len(kept) >= FORMER_MAX:
        raise RequestError(
            f"The bundle of {bundle.region} names the former keys of {len(kept)} changes: there is no room for one more.",
            code=Code.CONFLICT,
            hint="--drop-earliest 1 makes room: what the keys of the earliest change signed counts for nothing then.",
        )
    return kept


def _two_roots(log: str, size: int) -> str:
    return f"Two roots are known of the first {size:,} leaves of {log}: somebody wrote another history of it, see docs/audit.md."


def _largest(
    found: Iterable[KeyEnd], given: Iterable[KeyEnd], region: str
) -> tuple[tuple[KeyEnd, ...], list[str]]:
    """Of each log the largest, in the order of their names; of one without leaves nothing is said. Of a log of which two roots of one size are known only what was given
    counts, and where nothing was, another region's log is left out: the sentences say which. Raises RequestError(CONFLICT) where that is one of this `region`'s, or both were given.
    """
    given = tuple(given)
    by_log: dict[str, list[KeyEnd]] = {}
    for end in (*found, *given):
        by_log.setdefault(end.log, []).append(end)
    ends, left_out = [], []
    for log, known in sorted(by_log.items()):
        said = [end for end in given if end.log == log]
        size = _forked_at(known)
        if size is not None and _forked_at(said) is None and said:
            left_out.append(f"{_two_roots(log, size)} The checkpoint that was given is taken.")
            known = said
        elif size is not None and (said or Origin.parse(log).region == region):
            raise RequestError(
                _two_roots(log, size),
                code=Code.CONFLICT,
                hint=f"Give the checkpoint that holds with --checkpoint, or say --without {log}.",
            )
        elif size is not None:
            left_out.append(
                f"{_two_roots(log, size)} What the keys signed there counts for nothing, until --raise-ends --checkpoint FILE says how far."
            )
            continue
        largest = max(known, key=lambda end: end.size)
        ends += [largest] if largest.size else []
    return tuple(ends), left_out


def _forked_at(ends: Iterable[KeyEnd]) -> int | None:
    """The size, if any, of which these ends of one log have two roots."""
    roots: dict[int, bytes] = {}
    return next((end.size for end in ends if roots.setdefault(end.size, end.root) != end.root), None)


class _Contents(NamedTuple):
    """What the region's own log says of its keys, the SHA-256 of the documents that have a leaf, and the regions that a leaf names."""

    keys: LoggedKeys
    documents: frozenset[bytes]
    regions: frozenset[str]


class _OwnLog(NamedTuple):
    """One of the region's own logs, as it lies here. `trail`: of one that one process writes."""

    origin: str
    bundle: RegionBundle
    note: bytes
    files: Folder
    trail: Trail | None

    def end(self) -> KeyEnd:
        """Its last checkpoint; of one that one process writes, over all that it has."""
        note = self.note if self.trail is None else self.trail.publish()
        return _end(open_checkpoint(note, RegionTrust(self.bundle).log_keys(self.origin)))

    def contents(self) -> _Contents:
        """Reads all of it, and holds it to its last checkpoint. Raises TamperError."""
        files = self.files if self.trail is None else self.trail.files
        end, tree = self.end(), Tree()
        found, documents, regions = dict[Role, LoggedKey](), set[bytes](), set[str]()
        for _, data in read_entries(files, 0, end.size, end.size):
            tree.add(leaf_hash(data))
            header = read_header(data)
            if header is None:
                continue
            regions.update((header.source_region, header.destination_region))
            if header.document_sha256:
                documents.add(header.document_sha256)
            elif header.kind is Kind.KEY:
                take(found, header.action, header.key_id, header.time_ms)
        if (tree.size, tree.root()) != (end.size, end.root):
            raise TamperError(
                f"The leaves in {self.files.path} are not those under its checkpoint: somebody has changed or lost some of them.",
                hint="What it says of the region's keys counts for nothing. Bring the log, or a copy of it, from elsewhere (felix audit copy), and see what felix audit verify says of this one.",
            )
        return _Contents(found, frozenset(documents), frozenset(regions))


def _own_log(
    folder: RegionFolder, config: RegionConfig, bundle: RegionBundle, opened: ExitStack
) -> _OwnLog | None:
    """The region's own log, opened until `opened` ends; of several brokers' copies the one that goes furthest. None: it has no checkpoint here."""
    origin, keys = region_origin(bundle.region, bundle.mesh), (folder.audit_key, folder.audit_ml_dsa_key)
    logs = [
        log
        for data in config.data_folders
        if (path := folder.root / data / "audit").is_dir()
        and (log := _open_log(path, origin, keys, bundle, opened)) is not None
    ]
    return max(logs, key=lambda log: log.end().size, default=None)


def _copied_log(path: Path, bundle: RegionBundle) -> _OwnLog:
    """A copy of the region's own log. Raises RequestError(NOT_FOUND) where there is none."""
    note = Folder(path).read(CHECKPOINT_PATH) if path.is_dir() else None
    if note is None:
        raise RequestError(f"{path} is no copy of a log: it has no checkpoint.", code=Code.NOT_FOUND)
    return _OwnLog(region_origin(bundle.region, bundle.mesh), bundle, note, Folder(path), None)


def _require_leaves(
    folder: RegionFolder, config: RegionConfig, bundle: RegionBundle, logged: Collection[bytes]
) -> None:
    """Raises RequestError(CONFLICT) where a broker keeps what the region said under its policy key of now, and the log has no leaf of that: behind the key's end it gets none.
    Other regions' words hold nothing up."""
    keys = set(map(key_id, bundle.policy_keys))
    words = {
        described(word): None
        for data in config.data_folders
        for word in kept_words(folder.root / data / "governance")
        if word.region == bundle.region and word.key in keys and digest_of(word) not in logged
    }
    if words:
        raise RequestError(
            f"{bundle.region} has said what its audit log has no leaf of yet: {', '.join(words)}. Once the key has ended, it gets none.",
            code=Code.CONFLICT,
            hint="Start the brokers, all of them, wait until felix audit show has it, and stop them. Where that takes too long: --say-again; it stays in force where it is kept, no "
            "other region is told, and felix region status asks for it to be said again under the new key.",
        )


def _require_gone(bundle: RegionBundle, without: Collection[str], hint: str) -> None:
    """Raises RequestError(NOT_FOUND) where the region's own log is not here, unless there is none: its checkpoint says nothing of the keys."""
    origin = region_origin(bundle.region, bundle.mesh)
    if origin not in without:
        raise RequestError(
            f"The audit log of {bundle.region} is not here, which says whether the keys in this folder are those of now: where they were changed since, they would end once "
            "more, and nobody would know where the ones after them ended.",
            code=Code.NOT_FOUND,
            hint=hint.format(log=origin),
        )


def _unsaid(
    folder: RegionFolder,
    bundle: RegionBundle,
    ends: Iterable[KeyEnd],
    without: Collection[str],
    said: Iterable[str],
) -> list[str]:
    """A sentence for each region that is trusted here and has logs of which nothing was said where the keys ended, nor `said` why."""
    known, said, sentences = {end.log for end in ends}.union(without), " ".join(said), list[str]()
    for path in sorted(folder.trusted.glob("*.json")):
        try:
            other = decode_bundle(path.read_bytes()).bundle
        except FelixError:
            continue  # it stops no change
        logs = dict.fromkeys(key.name for key in other.audit_keys if key.role == "log")
        missing = [log for log in logs if log not in known and log not in said]
        if missing and other.region != bundle.region:
            sentences.append(
                f"Nothing here says how far {bundle.region} has cosigned {', '.join(missing)}: what the keys signed there counts for nothing. Where there is something to count, "
                f"--raise-ends adds it, on the machine of a broker that has cosigned the log, or with --checkpoint and a checkpoint that {bundle.region} has cosigned."
            )
    return sentences


def _own_logs(
    folder: RegionFolder,
    config: RegionConfig,
    bundle: RegionBundle,
    known: set[str],
    own: _OwnLog | None,
    opened: ExitStack,
) -> list[_OwnLog]:
    """The region's own log and its bridges' logs, but for the known ones, opened until `opened` ends. Raises RequestError(NOT_FOUND) where one has no checkpoint here."""
    found = []
    origins = dict.fromkeys(key.name for key in bundle.audit_keys if key.role == "log")
    for origin in origins:
        if origin in known:
            continue
        bridge, log = Origin.parse(origin).bridge, own
        if bridge is not None:
            path = folder.bridge(bridge.name) / "egress"
            keys = (folder.egress_key(bridge.name), folder.egress_ml_dsa_key(bridge.name))
            log = _open_log(path, origin, keys, bundle, opened) if path.is_dir() else None
        if log is None:
            raise RequestError(
                f"The log {origin} is not here: what the keys signed counts up to its last checkpoint.",
                code=Code.NOT_FOUND,
                hint=f"Give that checkpoint's file with --checkpoint, or say --without {origin} where the log is gone, or was never written.",
            )
        found.append(log)
    return found


def _open_log(
    path: Path, origin: str, keys: tuple[Path, Path], bundle: RegionBundle, opened: ExitStack
) -> _OwnLog | None:
    """A log that lies here. None: it has no checkpoint."""
    log = Folder(path)
    note = log.read(CHECKPOINT_PATH)
    if note is None or log.read(COPIED_PATH) is not None:
        return None if note is None else _OwnLog(origin, bundle, note, log, None)
    try:
        signers = load_signers(origin, *keys)
    except RequestError as error:
        is_own = Origin.parse(origin).bridge is None
        raise RequestError(
            f"{error.sentence} It signs the log {origin}.",
            code=error.code,
            hint="Put it there from a backup. Where it is lost: "
            + (
                f"name the log's folder as a copy is named (--log {path}), and give the log other keys then (felix region change-log-keys --lost-keys)."
                if is_own
                else f"give the log's last checkpoint (--checkpoint {path / CHECKPOINT_PATH}), and the log other keys then (felix region change-log-keys --lost-keys --bridge)."
            ),
        ) from error
    earlier = RegionTrust(bundle).earlier_keys(origin, (signer.key for signer in signers))
    trail = Trail.open(path, signers[0], also=signers[1:], earlier=earlier)
    opened.callback(trail.close)
    return _OwnLog(origin, bundle, note, log, trail)


def _cosigned_ends(
    folder: RegionFolder, config: RegionConfig, without: set[str]
) -> tuple[list[KeyEnd], list[str]]:
    """How far the brokers whose data folders lie here have cosigned other regions' logs; and of each note that is of no use, why."""
    found, unread = [], []
    for data in config.data_folders:
        root = folder.root / data
        path = root / "witness"
        # Bundles come by the store, too: what this folder trusts may be earlier than what its broker goes by, or nothing.
        trusts = [
            RegionTrust(bundle)
            for bundles in (pinned_bundles(folder), believed_bundles(root / "governance"))
            for bundle in bundles.values()
        ]
        for note in DiskWitnessStore(path).notes() if path.is_dir() else ():
            origin = "a log"
            try:
                origin = Checkpoint.parse(parse_note(note).text).origin
                if origin not in without:
                    found.append(_end(_opened(note, origin, trusts)))
            except TamperError as error:
                unread.append(
                    f"What {path} has cosigned of {origin} is left out: {error.sentence} "
                    "Where nothing else says how far this region has cosigned the log, what the keys signed there counts for nothing; once the right bundle is trusted "
                    f"(felix region trust), --raise-ends adds it. Where nothing there is to count: --without {origin}."
                )
    return found, unread


def _opened(note: bytes, origin: str, trusts: Iterable[RegionTrust]) -> SignedCheckpoint:
    """A note under the keys of the log that one of these bundles names. Raises TamperError."""
    why = TamperError("No bundle that is trusted here names that log.")
    for trust in trusts:
        if any(key.name == origin for key in trust.logs):
            try:
                return open_checkpoint(note, trust.log_keys(origin))
            except TamperError as error:
                why = TamperError(f"It does not open under the bundle that is trusted here. {error.sentence}")
    raise why


def _given(folder: RegionFolder, bundle: RegionBundle, note: bytes) -> KeyEnd:
    """A checkpoint that somebody brought: of an own log, or of another region's, cosigned by this one. Raises RequestError, TamperError."""
    origin = Checkpoint.parse(parse_note(note).text).origin
    own = RegionTrust(bundle)
    region = Origin.parse(origin).region
    if region == own.region:
        return _end(open_checkpoint(note, own.log_keys(origin)))
    other = pinned_bundles(folder).get(region)
    if other is None:
        raise RequestError(
            f"{region} is not trusted here, whose log {origin} is.",
            code=Code.NOT_FOUND,
            hint=f"felix region trust FILE --region {bundle.region}, with the bundle of {region}",
        )
    signed = open_checkpoint(note, RegionTrust(other).log_keys(origin), own.witnesses)
    if not signed.cosigned:
        raise RequestError(
            f"The checkpoint of {origin} is not cosigned by {own.region}.",
            hint="The key ends where this region has cosigned the log: nobody can put a leaf below that.",
        )
    return _end(signed)
