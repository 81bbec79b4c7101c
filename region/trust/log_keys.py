"""Changing the keys of an audit log: the ones before sign up to the log's last checkpoint, new ones from there on. Blocks on the disk.

The bundle says from and up to how many leaves a key signs, so an old key can sign nothing after its end, and a new key nothing
before its start: both may sign only the one checkpoint where they meet, which the old key has signed. Keys of both algorithms
are changed at once: any one of a log's keys suffices for a checkpoint, and a thief who could read one file could read the other.

Order, so that a crash at any step leaves a log that goes on after the next call:

1. the log, which nobody else has open, gets its last checkpoint under the old keys; in a region's own log a KEY leaf before it
   records the change. Where the old keys are lost, they have signed their last, and the leaf stands behind it;
2. the new keys are written beside the old ones; 3. the bundle names both; 4. the new keys take the old ones' place.

Of a log that several brokers have copies of nothing is signed or written here: the old keys end with the largest checkpoint of all copies (region.copied_log), and the leaf is written by the
broker that signs the log next (region.governance.changed_keys). In place of 1, no broker runs; 2.; and before 3 the metadata store says, under the key that ends, that it has ended and which one is next, and no broker runs
still: one that was started in between has been seen, and a later one reads that (region.trust.log_key_store). From then on no broker starts until the change is finished, with the same keys.

Between 3 and 4 neither broker nor agent opens the log (`audit.trust.RegionTrust.earlier_keys`). Callers: cli.region.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import msgspec

from audit.checkpoint import Checkpoint, claimed_size, note_size, notes_of, open_checkpoint
from audit.checkpoint_disk import LogKeys
from audit.cosigned_notes import COSIGNED_PATHS, readable_notes
from audit.errors import RolledBackError
from audit.leaf import Leaf, read_header
from audit.merkle import Tree, leaf_hash
from audit.note import Algorithm, NoteSigner, VerifierKey, parse_note, unbounded
from audit.opening import Opening
from audit.origin import Origin, egress_origin, region_origin
from audit.signer_disk import held_keys, load_signers
from audit.tile import CHECKPOINT_PATH, read_entries
from audit.tile_disk import Folder
from audit.trail import Trail
from audit.trust import RegionTrust
from felix.errors import Code, FelixError, RequestError, TamperError, UnavailableError
from felix.files import PUBLIC, replace_file
from felix.runtime.real import REAL
from keys.bundle import AuditKey, RegionBundle, SignedBundle, decode_bundle, sign_bundle
from keys.key_file import load_ml_dsa_key, load_signing_key, save_ml_dsa_key, save_signing_key
from keys.post_quantum import MlDsaKey
from keys.signing import SigningKey
from region.config import RegionConfig
from region.copied_log import is_copied, measure
from region.folder import RegionFolder
from region.trust.begun_change import changes_bundle, new_path, put_in_place, require_none_begun
from region.trust.changed_log_key import CHANGED_SENTENCE
from region.trust.signing_key_leaves import key_id_of, key_leaf

APPEND_S: Final = 60.0
"""How long the log's disk may take for the leaf."""
_WRITER_HINT: Final = "Stop the broker, or the agent, that writes it."
_OLDER_HINT: Final = (
    "Bring the log from where it is whole (felix audit copy, felix audit restore), and run this again. Where the log here is the right one, and somebody else signed what was cosigned with the keys "
    "that are to end (docs/runbooks/leaked-log-key.md): --as-it-is."
)


class ChangedKeys(NamedTuple):
    """The bundle that names the new keys, of which log, and up to how many leaves the ones before sign."""

    signed: SignedBundle
    origin: str
    size: int
    copies: str = ""
    """by which copies that is so, for a person; empty where the log has none, or a change that was cut off was finished"""


class StoppedRegion(Protocol):
    """The metadata store of a region whose brokers are stopped. Both block, and raise RequestError(CONFLICT) and UnavailableError."""

    def require_stopped(self) -> None:
        """Raises where a broker is alive."""

    def successor(self, own: RegionBundle) -> bytes | None:
        """The key that was said to sign the region's own log next, by a call that was cut off or on another machine; None where nothing was said."""

    def tell_ended(self, own: RegionBundle, key: SigningKey, successor: bytes, *, anew: bool) -> None:
        """Say that this key of the region's own log has ended, and which one signs next; raises where another one was said, unless this begins `anew`."""


NONE_GIVEN: Final[Mapping[str, bytes]] = MappingProxyType({})


class _Files(NamedTuple):
    """A log, and where its keys lie."""

    origin: str
    log: Path
    ed25519: Path
    ml_dsa: Path

    @property
    def new_ed25519(self) -> Path:
        return new_path(self.ed25519)

    @property
    def new_ml_dsa(self) -> Path:
        return new_path(self.ml_dsa)


@changes_bundle
def change_log_keys(
    folder: RegionFolder,
    config: RegionConfig,
    now_ms: int,
    *,
    bridge: str = "",
    log: Path | None = None,
    lost_keys: bool = False,
    remembered: Iterable[bytes] = (),
    copies: Mapping[str, bytes] = NONE_GIVEN,
    without: Collection[str] = (),
    store: StoppedRegion | None = None,
    anew: bool = False,
    as_it_is: bool = False,
) -> ChangedKeys:
    """Give the region's own log, or a bridge's egress log, new keys. `log`: where it lies, if not in this folder. `lost_keys`: the ones before are not here any more, so they
    sign up to the last checkpoint that they have signed; `remembered`: notes of it beside those that lie with the log, which it has to reach. `as_it_is`: it has to reach none of those
    elsewhere: they are of another history, which somebody else signed with the keys that end.

    Of a log that several brokers have copies of: `copies`, the newest checkpoints of brokers whose copies lie elsewhere; `without`: brokers whose copy is gone, or that have none; `store`; `log`
    is one more copy; `anew`: what a call elsewhere has begun is lost, and nobody has begun with it.

    Raises RequestError where there is no such log, where its broker or agent runs (CONFLICT), where a change of the region's signing keys was cut
    off (CONFLICT), where the bundle does not name its keys or has no room; with `lost_keys`, where they are here (CONFLICT); as `region.copied_log.measure`, and where `store` does not answer.
    """
    bundle = decode_bundle(folder.bundle.read_bytes()).bundle
    if not bridge and is_copied(folder, config):
        assert store is not None, "of a log that has copies"
        return _change_copied(
            folder,
            config,
            bundle,
            now_ms,
            store,
            () if as_it_is else tuple(remembered),
            copies,
            without,
            log,
            lost_keys=lost_keys,
            anew=anew,
        )
    if copies or without:
        raise RequestError(
            "No copy of the region's own audit log, as several brokers have it, is here: nothing is asked of other brokers.",
            hint="Run this where a broker has a copy, or name one with --log. For a bridge's log, and one that one broker alone has, leave out --checkpoint BROKER=FILE and --without.",
        )
    files = _files(folder, config, bridge, log)
    ended = [key for key in bundle.audit_keys if _is_of(key, files.origin) and key.to_size is None]
    begun = _finished(files, bundle, ended, now_ms, lost_keys=lost_keys)
    if begun is not None:
        return ChangedKeys(decode_bundle(folder.bundle.read_bytes()), files.origin, begun)
    require_none_begun(folder, bundle)
    new, new_ml_dsa = SigningKey.generate(), MlDsaKey.generate()
    remembered = () if as_it_is else tuple(notes_of(remembered, files.origin))
    _require_all_hold(files, bundle, remembered)
    # A copy that is named with `log` may be of before; what lies in the folder counts as well.
    known = [
        *remembered,
        *_notes_at(Folder(_place(folder, config, bridge))),
        *_notes_at(Folder(files.log)),
    ]
    if lost_keys:
        size = _signed_size(files, bundle, known)
    else:
        begun = max(key.from_size for key in ended)
        if begun and _are_here(files, ended):
            # Where lost keys were replaced, and the call was cut off, their leaf is still owed.
            _say(files, bundle, begun, now_ms)
        size = _end_log(files, bundle, ended, new, now_ms, () if as_it_is else known, as_it_is=as_it_is)
    signed = _signed(folder, files, bundle, ended, size, new, new_ml_dsa, now_ms)
    if lost_keys:
        _require_opens(files, signed.bundle, new, new_ml_dsa, known)
    _write(folder, files, signed, new, new_ml_dsa)
    _say(files, signed.bundle, size, now_ms)
    return ChangedKeys(signed, files.origin, size)


def _signed(
    folder: RegionFolder,
    files: _Files,
    bundle: RegionBundle,
    ended: Collection[AuditKey],
    size: int,
    new: SigningKey,
    new_ml_dsa: MlDsaKey,
    now_ms: int,
) -> SignedBundle:
    """The bundle in which these keys end, and the new ones begin."""
    return sign_bundle(
        msgspec.structs.replace(
            bundle,
            issued_ms=max(now_ms, bundle.issued_ms + 1),
            audit_keys=(
                *(
                    msgspec.structs.replace(key, to_size=size) if key in ended else key
                    for key in bundle.audit_keys
                ),
                AuditKey(files.origin, "log", new.verify_key.public, from_size=size),
                AuditKey(files.origin, "log", new_ml_dsa.public, "ml-dsa-44", from_size=size),
            ),
        ),
        load_signing_key(folder.policy_key),
    )


def _write(
    folder: RegionFolder, files: _Files, signed: SignedBundle, new: SigningKey, new_ml_dsa: MlDsaKey
) -> None:
    """The new keys beside the old ones, the bundle, and the keys in place."""
    _save_beside(files, new, new_ml_dsa)
    replace_file(folder.bundle, signed.encode(), PUBLIC)
    _put_in_place(files)


def _save_beside(files: _Files, new: SigningKey, new_ml_dsa: MlDsaKey) -> None:
    for path in (files.new_ed25519, files.new_ml_dsa):
        # Of a call that did not come as far as the bundle, or the word in the store: nobody knows them.
        path.unlink(missing_ok=True)
    save_signing_key(new, files.new_ed25519)
    save_ml_dsa_key(new_ml_dsa, files.new_ml_dsa)


def _beside(files: _Files, public: bytes | None) -> tuple[SigningKey, MlDsaKey] | None:
    """The new keys that lie beside the old ones, where the Ed25519 one is this; None where they do not."""
    if public is None or not (files.new_ed25519.exists() and files.new_ml_dsa.exists()):
        return None
    new = load_signing_key(files.new_ed25519)
    return (new, load_ml_dsa_key(files.new_ml_dsa)) if new.verify_key.public == public else None


def _change_copied(
    folder: RegionFolder,
    config: RegionConfig,
    bundle: RegionBundle,
    now_ms: int,
    store: StoppedRegion,
    remembered: Collection[bytes],
    copies: Mapping[str, bytes],
    without: Collection[str],
    log: Path | None,
    *,
    lost_keys: bool,
    anew: bool,
) -> ChangedKeys:
    """Of a log that several brokers have copies of. Raises as `change_log_keys`."""
    files = _own_files(folder, config, folder.root)
    ended = [key for key in bundle.audit_keys if _is_of(key, files.origin) and key.to_size is None]
    begun = _begun(bundle, files)
    if begun is not None:
        _finish(files, ended)
        return ChangedKeys(decode_bundle(folder.bundle.read_bytes()), files.origin, begun)
    if not ended:
        raise _not_named(bundle, files)
    _require_held(files, bundle, ended, lost_keys=lost_keys)
    require_none_begun(folder, bundle)
    _require_all_hold(files, bundle, notes_of(remembered, files.origin))
    with ExitStack() as opened:
        last, copies_told = measure(
            folder,
            config,
            bundle,
            files.origin,
            opened,
            given=copies,
            without=without,
            log=log,
            remembered=list(known_checkpoints(files.origin, bundle, remembered)),
            sizes=list(RegionTrust(bundle).named_sizes(files.origin)),
        )
        store.require_stopped()
        key = _word_key(files, ended)
        told = None if key is None else store.successor(bundle)
        # A call that was cut off behind its word goes on with the keys that this names.
        new, new_ml_dsa = _beside(files, told) or (SigningKey.generate(), MlDsaKey.generate())
        # All that may be refused for what is in this folder is refused before anything is told.
        signed = _signed(folder, files, bundle, ended, last.size, new, new_ml_dsa, now_ms)
        if new.verify_key.public != told:
            _save_beside(files, new, new_ml_dsa)
        if key is not None:
            store.tell_ended(bundle, key, new.verify_key.public, anew=anew)
            _require_stopped_still(store)
        replace_file(folder.bundle, signed.encode(), PUBLIC)
        _put_in_place(files)
    return ChangedKeys(signed, files.origin, last.size, copies_told)


def _word_key(files: _Files, ended: Collection[AuditKey]) -> SigningKey | None:
    """What signs the word in the store; None where it is lost. It may be here where the key of the other algorithm is not."""
    with suppress(FelixError, OSError):
        key = load_signing_key(files.ed25519)
        if any(key.verify_key.public == each.public for each in ended):
            return key
    return None


def _require_stopped_still(store: StoppedRegion) -> None:
    """A broker that was started meanwhile is seen here, and a later one sees what was told. Raises as `StoppedRegion`."""
    try:
        store.require_stopped()
    except (RequestError, UnavailableError) as error:
        told = "The metadata store says already that the log's key has ended: no broker starts before this has been run again, and has ended well."
        raise type(error)(error.sentence, code=error.code, hint=f"{error.hint} {told}".strip()) from error


def _require_held(files: _Files, bundle: RegionBundle, ended: list[AuditKey], *, lost_keys: bool) -> None:
    """Raises RequestError(CONFLICT) where the keys that are to end are not here, or are, and are said to be lost."""
    is_held = _are_here(files, ended)
    if is_held and lost_keys:
        raise _are_not_lost(files, "they are told of in the metadata store before they end")
    if not is_held and not lost_keys:
        raise _not_here(files, bundle)


def _finished(
    files: _Files, bundle: RegionBundle, ended: list[AuditKey], now_ms: int, *, lost_keys: bool
) -> int | None:
    """Where the keys begin of a call that was cut off, which is finished by this; None: there was none. Raises RequestError where one of its keys is lost, the bundle names
    none of the log, or `lost_keys` are here."""
    begun = _begun(bundle, files)
    if begun is not None:
        _finish(files, ended)
        _say(files, bundle, begun, now_ms)
        return begun
    if not ended:
        raise _not_named(bundle, files)
    if not lost_keys or not _are_here(files, ended):
        return None
    begun = max(key.from_size for key in ended)
    if not begun or not _say(files, bundle, begun, now_ms):
        raise _are_not_lost(files, "they sign the log's last checkpoint before they end")
    return begun


def _finish(files: _Files, ended: list[AuditKey]) -> None:
    """Put the keys of a change that was cut off in place. Raises RequestError(CONFLICT) where one is lost."""
    _put_in_place(files)
    if not _are_here(files, ended):
        raise RequestError(
            f"A change of the keys of the log {files.origin} that was cut off is finished, and not all keys that it made are in {files.ed25519.parent}.",
            code=Code.CONFLICT,
            hint="Put them there from where they are. Where one is lost: --lost-keys.",
        )


def _not_named(bundle: RegionBundle, files: _Files) -> RequestError:
    return RequestError(
        f"The bundle of {bundle.region} names no key that signs the log {files.origin} now.",
        code=Code.NOT_FOUND,
    )


def _are_not_lost(files: _Files, why: str) -> RequestError:
    return RequestError(
        f"The keys of the log {files.origin} are here: {files.ed25519.parent} has them.",
        code=Code.CONFLICT,
        hint=f"Run this without --lost-keys: {why}.",
    )


def _not_here(files: _Files, bundle: RegionBundle) -> RequestError:
    return RequestError(
        f"The bundle of {bundle.region} names keys of the log {files.origin} that are not in {files.ed25519.parent}.",
        code=Code.CONFLICT,
        hint="Put them there from a backup. Where they are lost: --lost-keys; they sign up to the log's last checkpoint then.",
    )


def _say(files: _Files, bundle: RegionBundle, size: int, now_ms: int) -> bool:
    """Have a region's own log say that other keys sign from `size` on: those before were lost, and could sign no leaf of it. False where it says so, or is a bridge's."""
    public = load_signing_key(files.ed25519).verify_key.public
    if Origin.parse(files.origin).bridge is not None or _has_rotated(files, public, size):
        return False
    _sign_on(files, bundle, public, now_ms)
    return True


def _files(folder: RegionFolder, config: RegionConfig, bridge: str, log: Path | None) -> _Files:
    if bridge:
        origin = egress_origin(config.region, config.mesh, bridge)
        lies = log or _place(folder, config, bridge)
        files = _Files(origin, lies, folder.egress_key(bridge), folder.egress_ml_dsa_key(bridge))
    else:
        files = _own_files(folder, config, lies := log or _place(folder, config, bridge))
    if not lies.is_dir() or Folder(lies).read(CHECKPOINT_PATH) is None:
        raise RequestError(
            f"There is no audit log at {lies}: its keys end with its last checkpoint, so it must be at hand.",
            code=Code.NOT_FOUND,
            hint="Where an agent runs on another machine, bring its log here, or name the folder with --log. Where a bridge's log is lost, issue a bridge of another name (felix identity issue).",
        )
    return files


def _own_files(folder: RegionFolder, config: RegionConfig, log: Path) -> _Files:
    return _Files(region_origin(config.region, config.mesh), log, folder.audit_key, folder.audit_ml_dsa_key)


def _is_of(key: AuditKey, origin: str) -> bool:
    return (key.role, key.name) == ("log", origin)


def _begun(bundle: RegionBundle, files: _Files) -> int | None:
    """Where the new keys begin that the bundle names already, and that do not lie in place yet."""
    if not files.new_ed25519.exists():
        return None
    public = load_signing_key(files.new_ed25519).verify_key.public
    return next(
        (key.from_size for key in bundle.audit_keys if _is_of(key, files.origin) and key.public == public),
        None,
    )


def _end_log(
    files: _Files,
    bundle: RegionBundle,
    ended: list[AuditKey],
    new: SigningKey,
    now_ms: int,
    remembered: Iterable[bytes],
    *,
    as_it_is: bool,
) -> int:
    """The log's last checkpoint under the keys of before; its size. Raises RequestError(CONFLICT) where it does not reach what is known of it: an older copy would end the keys below what
    others have cosigned, and that would hold nowhere any more."""
    if not _are_here(files, ended):
        raise _not_here(files, bundle)
    reached = tuple(note for _, note in _holding(files.origin, bundle, remembered))
    known = 0 if as_it_is else max(RegionTrust(bundle).named_sizes(files.origin), default=0)
    try:
        return _sign_on(files, bundle, new.verify_key.public, now_ms, reached, known)
    except RolledBackError as error:
        raise RequestError(
            f"{error.sentence} It is an older copy of the log, or another history of it was cosigned.",
            code=Code.CONFLICT,
            hint=_OLDER_HINT,
        ) from error


def _sign_on(
    files: _Files,
    bundle: RegionBundle,
    new: bytes,
    now_ms: int,
    reached: Iterable[bytes] = (),
    known: int = 0,
) -> int:
    """A checkpoint over all that the log has, under the keys that lie in place; its size. In a region's own log the last leaf says which key signs from then on. Raises
    RolledBackError where it does not continue each of the notes `reached`, or has not `known` leaves."""
    signers = load_signers(files.origin, files.ed25519, files.ml_dsa)
    own = RegionTrust(bundle)
    earlier = own.earlier_keys(files.origin, (signer.key for signer in signers))
    trail = Trail.open(files.log, signers[0], also=signers[1:], earlier=earlier, cosigned=reached)
    try:
        if known and (size := note_size(trail.publish())) < known:
            raise RolledBackError(
                f"The log {files.origin} has {size:,} leaves, and the bundle says that it had {known:,}."
            )
        if files.origin == region_origin(bundle.region, bundle.mesh):
            leaf = key_leaf(bundle.region, now_ms, "", "rotated", key_id_of(new), CHANGED_SENTENCE)
            append_waiting(trail, leaf)
        return note_size(trail.publish())
    finally:
        trail.close()


def _are_here(files: _Files, named: list[AuditKey]) -> bool:
    """Whether the folder has these keys, and no others. One that cannot be read is not here."""
    return held_keys(files.origin, files.ed25519, files.ml_dsa) == {key.public for key in named}


def _require_all_hold(files: _Files, bundle: RegionBundle, remembered: Collection[bytes]) -> None:
    """Raises RequestError(CONFLICT) where a note that others remember of the log does not open under this bundle: it is of before a change of the log's keys, as in a folder that was put back,
    and what was signed since would hold nowhere."""
    # What a key signed beyond its end is of no bundle of before: this one names the key, and its end.
    keys = unbounded(RegionTrust(bundle).log_keys(files.origin))
    held = {note for _, note in _opening(keys, remembered)}
    if lost := [claimed_size(note) for note in remembered if note not in held]:
        raise RequestError(
            f"A checkpoint of {max(lost):,} leaves is known of the log {files.origin} which does not open under bundle.json here: the file is of before a change of the log's keys, or it is of another history.",
            code=Code.CONFLICT,
            hint="Put bundle.json, secrets/ and the log of now into the folder; regions that trust this one have the bundle (trusted/REGION.json). Where somebody else signed what was cosigned "
            "(docs/runbooks/leaked-log-key.md): --as-it-is.",
        )


def _signed_size(files: _Files, bundle: RegionBundle, remembered: Iterable[bytes]) -> int:
    """Of a log whose keys are lost: how many leaves it has under the largest checkpoint that is known of it. What it has behind them is under the new keys' first one.

    Whoever writes the log's folder has no say in it: raises TamperError where the leaves are not those under that checkpoint, RequestError(CONFLICT) where the bundle
    says that the log was larger.
    """
    log = Folder(files.log)
    lock = log.lock(hint=_WRITER_HINT)
    try:
        checkpoints = known_checkpoints(files.origin, bundle, remembered)
        last = max(checkpoints, key=lambda each: each.size, default=None)
        known = max(RegionTrust(bundle).named_sizes(files.origin), default=0)
        if last is None or last.size < known:
            raise RequestError(
                f"The largest checkpoint at hand of the log {files.origin} has {0 if last is None else last.size:,} leaves, and the bundle says that it had {known:,}.",
                code=Code.CONFLICT,
                hint="Name a later one with --checkpoint, or bring the log from where it is whole.",
            )
        tree = Tree()
        for _, data in read_entries(log, 0, last.size, last.size):
            tree.add(leaf_hash(data))
        if (tree.size, tree.root()) != (last.size, last.root):
            raise TamperError(
                f"The first {last.size:,} leaves in {files.log} are not those under the largest checkpoint that is known of the log {files.origin}.",
                hint="Bring the log from where it is whole (felix audit copy, felix audit restore), and run this again. Nothing was changed.",
            )
        lying = known_checkpoints(files.origin, bundle, [log.read(CHECKPOINT_PATH) or b""])
        if next((each.size for each in lying), -1) < last.size:
            raise RequestError(
                f"The checkpoint in {files.log} is older than one of {last.size:,} leaves that is known of the log {files.origin}, or is none of it.",
                code=Code.CONFLICT,
                hint=f"Put the later one in its place ({files.log / CHECKPOINT_PATH}), from a copy of the log, a witness or the file that --checkpoint names, and run this again.",
            )
        return last.size
    finally:
        lock.release()


def _require_opens(
    files: _Files, bundle: RegionBundle, new: SigningKey, new_ml_dsa: MlDsaKey, remembered: Iterable[bytes]
) -> None:
    """Raises what keeps the log from being opened under these keys and this bundle, before anything says that they are its keys. `remembered`: it has to reach each of these
    that holds."""
    signers = (
        NoteSigner.from_key(files.origin, new, Algorithm.ED25519),
        NoteSigner.from_ml_dsa(files.origin, new_ml_dsa),
    )
    earlier = RegionTrust(bundle).earlier_keys(files.origin, (signer.key for signer in signers))
    log = Folder(files.log)
    lock = log.lock(hint=_WRITER_HINT)
    try:
        Opening(log, LogKeys(signers, earlier), (), REAL.clock).open(
            tuple(note for _, note in _holding(files.origin, bundle, remembered))
        )
    finally:
        lock.release()


def known_checkpoints(origin: str, bundle: RegionBundle, notes: Iterable[bytes]) -> Iterator[Checkpoint]:
    """Those of these notes that the log's keys in this bundle have signed, each as far as it signs."""
    return (checkpoint for checkpoint, _ in _holding(origin, bundle, notes))


def _holding(origin: str, bundle: RegionBundle, notes: Iterable[bytes]) -> Iterator[tuple[Checkpoint, bytes]]:
    return _opening(RegionTrust(bundle).log_keys(origin), notes)


def _opening(keys: tuple[VerifierKey, ...], notes: Iterable[bytes]) -> Iterator[tuple[Checkpoint, bytes]]:
    for note in notes:
        with suppress(TamperError):
            yield open_checkpoint(note, keys).checkpoint, note


def _has_rotated(files: _Files, public: bytes, size: int) -> bool:
    """Whether the leaf of the change to this key stands before `size`, where the key begins, or behind."""
    log = Folder(files.log)
    end = Checkpoint.parse(parse_note(log.read(CHECKPOINT_PATH) or b"").text).size
    headers = (read_header(data) for _, data in read_entries(log, max(0, size - 1), end, end))
    return any(header is not None and header.key_id == key_id_of(public) for header in headers)


def _notes_at(log: Folder) -> list[bytes]:
    """The checkpoints that lie with a log: its last one, and those that others cosigned."""
    return list(readable_notes(log, (CHECKPOINT_PATH, *COSIGNED_PATHS)))


def _place(folder: RegionFolder, config: RegionConfig, bridge: str) -> Path:
    """Where the log lies that brokers, or the bridge's agent, write."""
    if bridge:
        return folder.bridge(bridge) / "egress"
    paths = [folder.root / data / "audit" for data in config.data_folders]
    return next((path for path in paths if path.is_dir()), paths[0])


def append_waiting(trail: Trail, leaf: Leaf) -> None:
    """Append a leaf, and wait until it is durable. Blocks. Raises UnavailableError, and as the log does."""
    done, failed = threading.Event(), list[Exception]()

    def ended(_: int, error: Exception | None) -> None:
        failed.extend([error] if error is not None else [])
        done.set()

    # Whoever runs the command hears of a full disk at once.
    trail.end_waiting()
    trail.append_nowait([leaf], ended)
    if not done.wait(APPEND_S):
        raise UnavailableError(f"The audit log {trail.key.name} was not synced within {APPEND_S:.0f} s.")
    if failed:
        raise failed[0]


def _put_in_place(files: _Files) -> None:
    put_in_place((files.ml_dsa, files.ed25519))
