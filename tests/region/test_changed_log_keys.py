"""A log's keys are changed: what each signed holds, and no key signs what is another one's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner
from version_0_1 import EGRESS, EU_WEST, US_EAST, lay_out

from audit.checkpoint import Checkpoint, note_size, open_checkpoint
from audit.errors import RolledBackError
from audit.leaf import Header, Kind, Leaf, Side, decode_leaf
from audit.merkle import Tree, leaf_hash
from audit.note import Algorithm, Note, NoteSigner, encode_note, parse_note
from audit.origin import egress_origin, region_origin
from audit.proof import check_proof, prove
from audit.signer_disk import load_signers
from audit.tile import MemoryFiles, bundle_path, encode_bundle, read_entries, tile_path
from audit.tile_disk import Folder
from audit.trail import Trail
from audit.trust import RegionTrust, Trust
from audit.verify import BEFORE_CHANGE, verify_log
from audit.witness import DiskWitnessStore, ForkError, MemoryWitnessStore, Witness
from audit.witness_sqlite import WitnessState, init_witness
from cli.main import app as main_app
from cli.region import app
from felix.errors import FelixError, RequestError, TamperError
from keys.bundle import AuditKey, FormerKeys, KeyEnd, RegionBundle, check_update, decode_bundle, sign_bundle
from keys.key_file import load_ml_dsa_key, load_signing_key, save_ml_dsa_key, save_signing_key
from keys.post_quantum import MlDsaKey
from keys.signing import SigningKey
from region.bootstrap import add_log_keys, issue_identity
from region.config import RegionConfig, load_config
from region.evidence.document_log import DocumentLog
from region.folder import RegionFolder
from region.trust.changed_log_key import unsaid_log_key
from region.trust.log_keys import change_log_keys
from region.trust.signing_key_leaves import key_id_of
from region.trust.signing_keys import change_signing_keys

NOW = 1_900_000_000_000
ISSUED = 1_796_000_000_000
"""before the region's certificate authority expires"""


class Home:
    """The folder of two regions that version 0.1 founded, with logs of both."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = RegionFolder(root / "us-east")
        self.config: RegionConfig = load_config(self.folder.config)
        self.origin = region_origin(self.config.region, self.config.mesh)
        self.log = root / US_EAST

    def bundle(self, region: str = "us-east") -> RegionBundle:
        return decode_bundle((self.root / region / "bundle.json").read_bytes()).bundle

    def trust(self, own: RegionBundle | None = None) -> Trust:
        return Trust.of([own or self.bundle(), self.bundle("eu-west")])

    def signers(self) -> list[NoteSigner]:
        """Whoever holds the files of the log's keys now."""
        found = [NoteSigner.from_key(self.origin, load_signing_key(self.folder.audit_key), Algorithm.ED25519)]
        if self.folder.audit_ml_dsa_key.exists():
            found.append(NoteSigner.from_ml_dsa(self.origin, load_ml_dsa_key(self.folder.audit_ml_dsa_key)))
        return found

    def open(self) -> Trail:
        """As the broker opens its log."""
        return self.open_at(self.log)

    def open_at(self, log: Path) -> Trail:
        signers, own = self.signers(), RegionTrust(self.bundle())
        earlier = own.earlier_keys(self.origin, (each.key for each in signers))
        witnesses = tuple(self.trust().witnesses_for("us-east"))
        return Trail.open(log, signers[0], also=signers[1:], earlier=earlier, witnesses=witnesses)

    async def append(self) -> None:
        trail = self.open()
        await trail.append([key_leaf()])
        trail.close()

    def cosigned(self) -> bytes:
        """eu-west, on this machine, cosigns the newest checkpoint."""
        store, trail = DiskWitnessStore(self.root / "eu-west" / "data" / "witness"), self.open()
        witness = Witness(witness_of("eu-west"), RegionTrust(self.bundle()).logs, store, lambda: NOW)
        note = trail.publish()
        last = witness.last(self.origin)
        proof = [] if last is None else trail.checkpoints.consistency_proof(last.size, note_size(note))
        trail.close()
        witness.cosign(note, proof)
        return note

    def leaves(self) -> list[bytes]:
        size = int((self.log / "checkpoint").read_text().split("\n")[1])
        return [bytes(data) for _, data in read_entries(Folder(self.log), 0, size, size)]


def key_leaf(action: str = "made") -> Leaf:
    header = Header(
        kind=Kind.KEY, side=Side.INGRESS, time_ms=NOW, source_region="us-east", destination_region="us-east",
        key_id=b"k" * 16, action=action,
    )  # fmt: skip
    return Leaf(header)


def forged(origin: str, leaves: list[bytes], signers: list[NoteSigner]) -> MemoryFiles:
    """A log of these leaves, by whoever has these keys."""
    files, tree = dict[str, bytes](), Tree()
    for leaf in leaves:
        tree.add(leaf_hash(leaf))
    assert len(leaves) < 256
    if leaves:
        files[bundle_path(0, len(leaves))] = encode_bundle(leaves)
    for tile in tree.partial_tiles():
        files[tile_path(tile.level, tile.number, tile.width)] = tile.hashes
    text = Checkpoint(origin, len(leaves), tree.root()).text()
    files["checkpoint"] = encode_note(Note(text, tuple(signer.sign(text, NOW // 1000) for signer in signers)))
    return MemoryFiles(files)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    root = lay_out(tmp_path)
    monkeypatch.setenv("FELIX_HOME", str(root))
    found = Home(root)
    add_log_keys(found.folder, found.config, NOW - 1)
    return found


async def test_a_log_goes_on_under_new_keys_and_what_the_old_ones_signed_holds(home: Home) -> None:
    before, was = home.bundle(), len(home.leaves())
    changed = change_log_keys(home.folder, home.config, NOW)
    assert changed.origin == home.origin and changed.size == was + 1
    leaf = decode_leaf(home.leaves()[-1])
    assert (leaf.header.kind, leaf.header.action) == (Kind.KEY, "rotated")
    keys = [key for key in home.bundle().audit_keys if key.name == home.origin]
    assert sorted((key.algorithm, key.from_size, key.to_size) for key in keys if key.to_size is None) == [
        ("ed25519", changed.size, None), ("ml-dsa-44", changed.size, None),
    ]  # fmt: skip
    assert {(key.from_size, key.to_size) for key in keys if key.to_size is not None} == {(0, changed.size)}
    # The last checkpoint of the old keys holds under both bundles, the next one under the new one alone.
    for own in (before, home.bundle()):
        assert verify_log(Folder(home.log), home.trust(own), cosignatures_min=0).ok
    note = (home.log / "checkpoint").read_bytes()
    await home.append()
    report = verify_log(Folder(home.log), home.trust(), cosignatures_min=0, remembered=[note])
    assert report.ok and report.size == changed.size + 1
    assert not verify_log(Folder(home.log), home.trust(before), cosignatures_min=0).ok
    # And again: three keys of each algorithm, one behind the other.
    again = change_log_keys(home.folder, home.config, NOW + 1)
    assert again.size == changed.size + 2
    await home.append()
    assert verify_log(Folder(home.log), home.trust(), cosignatures_min=0, remembered=[note]).ok


async def test_no_key_signs_what_is_another_ones(home: Home) -> None:
    old = home.signers()
    size = change_log_keys(home.folder, home.config, NOW).size
    new, leaves = home.signers(), home.leaves()
    more = [*leaves, encode_of(key_leaf("destroyed"))]
    tried = [
        # Whoever stole the old keys goes on with them, one of them, or both with the new ones' names.
        (more, old), (more, old[:1]), (more, old[1:]), ([*more, more[-1]], old),
        # Whoever has the new ones writes what was before anew.
        (leaves[: size - 1], new), (leaves[:1], new),
    ]  # fmt: skip
    for told, signers in tried:
        files = forged(home.origin, told, signers)
        report = verify_log(files, home.trust(), cosignatures_min=0)
        assert [finding.step for finding in report.findings] == [1]
        assert "may not sign" in report.findings[0].sentence
        with pytest.raises(TamperError, match="may not sign"):
            Witness(
                witness_of("eu-west"), RegionTrust(home.bundle()).logs, MemoryWitnessStore(), lambda: NOW
            ).cosign(files.read("checkpoint") or b"", [])
    # A stolen key beside the right one adds nothing, and takes nothing away.
    both = forged(home.origin, more, [*new, *old])
    opened = home.trust().log(home.origin).open(both.read("checkpoint") or b"")
    assert {by.key for by in opened.signed} == {signer.key for signer in new}
    # What both may sign is one size, and the one that says nothing: a copy that a broker begins with has no leaves, whichever key signs by then.
    for signers in (old, new):
        assert verify_log(forged(home.origin, leaves, signers), home.trust(), cosignatures_min=0).ok
        empty = forged(home.origin, leaves[:0], signers)
        assert home.trust().log(home.origin).open(empty.read("checkpoint") or b"").checkpoint.size == 0
        found = verify_log(empty, home.trust(), cosignatures_min=0).findings
        assert [(each.step, each.name) for each in found] == [(2, BEFORE_CHANGE)]


@pytest.mark.parametrize("changed", ["log keys", "signing keys"])
async def test_a_log_of_before_a_change_of_keys_does_not_verify_by_the_bundle_that_says_so(
    home: Home, tmp_path: Path, changed: str
) -> None:
    """Whole, and nobody who cosigned more is at hand: its own region's bundle says how long it was."""
    home.cosigned()
    shutil.copytree(home.log, tmp_path / "before")
    if changed == "log keys":
        size = change_log_keys(home.folder, home.config, NOW).size
    else:
        await home.append()
        change_signing_keys(home.folder, home.config, NOW, say_again=True)
        size = max(RegionTrust(home.bundle()).named_sizes(home.origin))
    shutil.rmtree(home.root / "eu-west" / "data" / "witness")
    bundles = [
        word
        for name in ("us-east", "eu-west")
        for word in ("--bundle", str(home.root / name / "bundle.json"))
    ]
    for path, code in ((tmp_path / "before", 5), (home.log, 0)):
        said = CliRunner().invoke(main_app, ["audit", "verify", str(path), *bundles, "--cosignatures", "0"])
        assert said.exit_code == code, said.output
        assert (f"keys changed at {size} leaves of it" in " ".join(said.output.split())) == (code == 5)
    for cosignatures in (0, 1):
        report = verify_log(Folder(tmp_path / "before"), home.trust(), cosignatures_min=cosignatures)
        assert [(each.step, each.name) for each in report.findings] == [(2, BEFORE_CHANGE)]


async def test_a_log_of_one_process_that_goes_on_as_copies_says_its_change_once_more(
    home: Home, tmp_path: Path
) -> None:
    """The command's leaf stands in front of the former keys' end, so a broker with the folder of before does not end by it; it ends by the one behind."""
    change_log_keys(home.folder, home.config, NOW)
    key_id = key_id_of(home.signers()[0].key.public)
    for is_said in (False, True):
        trail = home.open()
        logged = DocumentLog.open(trail, tmp_path / "logged")
        assert logged.has_log_key(key_id) is is_said
        owed = unsaid_log_key(home.bundle(), logged.has_log_key)
        assert (owed is None) is is_said
        if owed is not None:
            await logged.append_key(owed.leaf("us-east", NOW))
            trail.publish()
        assert logged.has_log_key(key_id) and not logged.has_log_key(b"other" * 3 + b".")
        logged.save(at_once=True)  # and as the snapshot has it
        trail.close()


def encode_of(leaf: Leaf) -> bytes:
    from audit.leaf import encode_leaf

    return encode_leaf(leaf)


def witness_of(region: str) -> NoteSigner:
    return NoteSigner.from_key(
        f"{region}.acme/witness", SigningKey.from_seed(b"w" * 32), Algorithm.COSIGNATURE
    )


async def test_a_log_at_rest_shows_the_checkpoint_where_its_keys_meet_with_lines_of_both(home: Home) -> None:
    """A witness that has the new bundle takes nothing that the former keys alone have signed: whoever stole them could sign another history up to their end."""
    size = change_log_keys(home.folder, home.config, NOW).size
    own = RegionTrust(home.bundle())
    witness = Witness(witness_of("eu-west"), own.logs, MemoryWitnessStore(), lambda: NOW)
    with pytest.raises(TamperError, match="keys that have ended"):
        witness.cosign((home.log / "checkpoint").read_bytes(), [])
    home.open().close()
    note = (home.log / "checkpoint").read_bytes()
    signed = open_checkpoint(note, own.log_keys(home.origin))
    assert signed.checkpoint.size == size and {by.key.to_size for by in signed.signed} == {size, None}
    assert len(signed.signed) == 4, "of both algorithms"
    witness.cosign(note, [])
    home.open().close()
    assert (home.log / "checkpoint").read_bytes() == note
    assert verify_log(Folder(home.log), home.trust(), cosignatures_min=0).ok


async def test_a_history_is_not_exchanged_under_the_new_keys(home: Home) -> None:
    """The witness stands where the old keys were: whatever the new ones sign must continue that."""
    witness = Witness(
        witness_of("eu-west"), RegionTrust(home.bundle()).logs, MemoryWitnessStore(), lambda: NOW
    )
    home.open().close()
    first = (home.log / "checkpoint").read_bytes()
    witness.cosign(first, [])
    stands = witness.last(home.origin)
    assert stands is not None
    size = change_log_keys(home.folder, home.config, NOW).size
    witness.follow_all(RegionTrust(home.bundle()).logs)
    leaves = home.leaves()
    for told in ([encode_of(key_leaf("destroyed")), *leaves[1:]], [*leaves, *leaves]):
        files = forged(home.origin, told, home.signers())
        with pytest.raises(ForkError, match="does not show that"):
            witness.cosign(files.read("checkpoint") or b"", [])
        report = verify_log(files, home.trust(), cosignatures_min=0, remembered=[first])
        assert not report.ok or told[: stands.size] == leaves[: stands.size]
    await home.append()
    trail = home.open()
    proof = trail.checkpoints.consistency_proof(stands.size, size + 1)
    trail.close()
    assert witness.cosign((home.log / "checkpoint").read_bytes(), proof)
    last = witness.last(home.origin)
    assert last is not None and last.size == size + 1


def test_nobody_takes_the_changed_keys_without_comparing_the_fingerprint(home: Home) -> None:
    held = home.bundle()
    signed = change_log_keys(home.folder, home.config, NOW).signed
    with pytest.raises(TamperError, match="any more, or another one"):
        check_update(held, signed)
    assert held.fingerprint() != signed.bundle.fingerprint()
    # Nor does an end move, or go away.
    key = load_signing_key(home.folder.policy_key)
    for change in ({"to_size": None}, {"to_size": 10**6}, {"from_size": 1}):
        named = [
            msgspec.structs.replace(each, **change)
            if each.to_size is not None and each.algorithm == "ed25519"
            else each
            for each in signed.bundle.audit_keys
            if change != {"to_size": None} or each.to_size is not None
        ]
        later = msgspec.structs.replace(signed.bundle, audit_keys=tuple(named), issued_ms=NOW + 5)
        try:
            moved = sign_bundle(later, key)
        except RequestError as error:
            assert "two keys" in error.sentence
            continue
        with pytest.raises(TamperError, match="any more, or another one"):
            check_update(signed.bundle, moved)


def test_a_bundle_names_one_key_for_a_checkpoint(home: Home) -> None:
    bundle, policy_key = home.bundle(), load_signing_key(home.folder.policy_key)
    (own,) = [key for key in bundle.audit_keys if (key.name, key.algorithm) == (home.origin, "ed25519")]
    other = SigningKey.from_seed(b"o" * 32).verify_key.public
    wrong = [
        AuditKey(home.origin, "log", other),
        AuditKey(home.origin, "log", other, from_size=7),
        AuditKey(home.origin, "log", own.public, from_size=7),
        AuditKey(home.origin, "log", other, from_size=7, to_size=6),
        AuditKey(f"us-east.{bundle.mesh}/witness", "cosigner", other, to_size=6),
    ]
    for key in wrong:
        with pytest.raises(RequestError, match=r"two keys|before it begins|no log"):
            sign_bundle(msgspec.structs.replace(bundle, audit_keys=(*bundle.audit_keys, key)), policy_key)
    ended = tuple(msgspec.structs.replace(key, to_size=7) if key is own else key for key in bundle.audit_keys)
    fits = msgspec.structs.replace(
        bundle, audit_keys=(*ended, AuditKey(home.origin, "log", other, from_size=7))
    )
    assert sign_bundle(fits, policy_key).bundle == fits


def test_a_change_that_was_broken_off_is_finished_by_the_next_call(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("region.trust.log_keys._put_in_place", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            change_log_keys(home.folder, home.config, NOW)
    with pytest.raises(RequestError, match="and no further"):
        home.open()
    leaves = home.leaves()
    changed = change_log_keys(home.folder, home.config, NOW + 1)
    assert changed.size == len(leaves) and home.leaves() == leaves
    home.open().close()
    # Keys that were written and that no bundle names are nobody's; and nobody changes the keys of a log that is open.
    nobodys = SigningKey.generate()
    save_signing_key(nobodys, home.folder.audit_key.with_name(f"new.{home.folder.audit_key.name}"))
    trail = home.open()
    with pytest.raises(RequestError, match="open in another process"):
        change_log_keys(home.folder, home.config, NOW + 2)
    trail.close()
    changed = change_log_keys(home.folder, home.config, NOW + 3)
    assert nobodys.verify_key.public not in {key.public for key in changed.signed.bundle.audit_keys}
    home.open().close()


def test_a_bridges_log_is_changed_alone_and_proofs_of_before_hold(home: Home) -> None:
    origin = egress_origin("us-east", home.config.mesh, BRIDGE_NAME)
    log = Folder(home.root / EGRESS)
    stream, shard, offset = crossed(log)
    proof = prove(log, home.trust(), stream, shard, offset)
    command = ["change-log-keys", "--region", "us-east", "--bridge", BRIDGE_NAME]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 0, answer.output
    keys = [key for key in home.bundle().audit_keys if key.name == origin]
    assert {key.to_size for key in keys} == {
        None,
        int((home.root / EGRESS / "checkpoint").read_text().split("\n")[1]),
    }
    assert all(
        key.to_size is None and not key.from_size
        for key in home.bundle().audit_keys
        if key.name == home.origin
    )
    assert check_proof(proof, home.trust(), cosignatures_min=0).origin == origin
    for files in (log, Folder(home.root / EU_WEST)):
        report = verify_log(files, home.trust(), cosignatures_min=0)
        assert report.version_1 is not None and not report.findings
        assert verify_log(
            files, home.trust(), cosignatures_min=0, accept_version_1=[report.version_1.root]
        ).ok
    shown = CliRunner().invoke(app, ["bundle", "--region", "us-east"])
    assert "leaves" in shown.output
    missing = CliRunner().invoke(app, ["change-log-keys", "--region", "us-east", "--bridge", "elsewhere"])
    assert isinstance(missing.exception, RequestError) and "must be at hand" in str(missing.exception)


def test_a_checkpoint_that_a_person_gives_and_that_is_none_of_the_log_is_refused(home: Home) -> None:
    """Passed over, the keys might end below one that others were shown."""
    before = home.bundle()
    home.folder.audit_key.unlink()
    other = home.root / EGRESS / "checkpoint"
    command = ["change-log-keys", "--region", "us-east", "--lost-keys", "--checkpoint", str(other)]
    answer = CliRunner().invoke(app, command)
    assert isinstance(answer.exception, RequestError) and "has no checkpoint of" in str(answer.exception)
    assert home.bundle() == before
    answer = CliRunner().invoke(app, [*command[:-1], str(home.log / "checkpoint")])
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize(
    "left", ["nothing", "the Ed25519 key", "the ML-DSA key", "others", "what cannot be read"]
)
@pytest.mark.parametrize("whose", ["the region's", "a bridge's"])
async def test_a_log_whose_keys_are_lost_goes_on_under_new_ones_from_its_last_checkpoint(
    home: Home, whose: str, left: str
) -> None:
    """Nothing signs behind that but the new keys; and no command makes keys that nobody believes."""
    bridge = BRIDGE_NAME if whose == "a bridge's" else ""
    origin = egress_origin("us-east", home.config.mesh, bridge) if bridge else home.origin
    log = home.root / (EGRESS if bridge else US_EAST)
    paths = (
        (home.folder.egress_key(bridge), home.folder.egress_ml_dsa_key(bridge))
        if bridge
        else (home.folder.audit_key, home.folder.audit_ml_dsa_key)
    )
    ed25519, ml_dsa = paths
    held, named = home.bundle(), [key for key in home.bundle().audit_keys if key.name == origin]
    with pytest.raises(RequestError, match="are here"):
        change_log_keys(home.folder, home.config, NOW, bridge=bridge, lost_keys=True)
    for path in paths:
        if path is not {"the Ed25519 key": ed25519, "the ML-DSA key": ml_dsa}.get(left):
            path.unlink()
    if left == "what cannot be read":
        ed25519.write_bytes(b"")
        ml_dsa.write_bytes(b"garbage")
    if left == "others":
        save_signing_key(SigningKey.generate(), ed25519)
        save_ml_dsa_key(MlDsaKey.generate(), ml_dsa)
    with pytest.raises(RequestError, match="that are not in") as refused:
        change_log_keys(home.folder, home.config, NOW, bridge=bridge)
    assert "--lost-keys" in refused.value.hint
    if bridge:
        with pytest.raises(RequestError, match="that are not in") as refused:
            issue_identity(home.folder, home.config, "bridge", bridge, ISSUED)
        assert "--lost-keys" in refused.value.hint
    assert home.bundle() == held
    size = checkpoint_size(log)

    command = ["change-log-keys", "--region", "us-east", "--lost-keys"]
    answer = CliRunner().invoke(app, [*command, "--bridge", bridge] if bridge else command)
    assert answer.exit_code == 0, answer.output
    of_log = [key for key in home.bundle().audit_keys if key.name == origin]
    assert {key.to_size for key in of_log if key.public in {each.public for each in named}} == {size}
    assert {key.from_size for key in of_log if key.to_size is None} == {size} and len(of_log) == 4
    if bridge:
        issue_identity(home.folder, home.config, "bridge", bridge, ISSUED)
    own = RegionTrust(home.bundle())
    signers = load_signers(origin, *paths)
    earlier = own.earlier_keys(origin, (each.key for each in signers))
    trail = Trail.open(log, signers[0], also=signers[1:], earlier=earlier)
    if not bridge:
        await trail.append([key_leaf()])
    trail.publish()
    trail.close()
    added = [
        decode_leaf(bytes(data)).header.action
        for _, data in read_entries(Folder(log), 0, checkpoint_size(log), checkpoint_size(log))
    ][size:]
    assert added == ([] if bridge else ["rotated", "made"])
    report = verify_log(Folder(log), home.trust(), cosignatures_min=0)
    assert not report.findings


def lose_keys(home: Home) -> list[NoteSigner]:
    """The keys of the region's own log are gone from the folder; somebody has them."""
    stolen = home.signers()
    home.folder.audit_key.unlink()
    home.folder.audit_ml_dsa_key.unlink()
    return stolen


def test_keys_that_are_lost_end_where_the_log_is_known_to_be_whoever_writes_its_folder(home: Home) -> None:
    held, log = home.folder.bundle.read_bytes(), Folder(home.log)
    last, size, leaves = log.read("checkpoint") or b"", checkpoint_size(home.log), home.leaves()
    stolen = lose_keys(home)

    def refused(match: str, **more: Any) -> None:
        with pytest.raises(FelixError, match=match):
            change_log_keys(home.folder, home.config, NOW, lost_keys=True, **more)
        assert home.folder.bundle.read_bytes() == held and not home.folder.audit_key.exists()

    # A checkpoint over leaves that nobody has; and leaves that are not those under the checkpoint.
    large = Checkpoint(home.origin, 1_000_000, b"r" * 32).text()
    note = encode_note(Note(large, tuple(signer.sign(large, NOW // 1000) for signer in stolen)))
    log.write("checkpoint", note)
    refused("tile")
    log.write("checkpoint", last)
    path = bundle_path(0, size)
    entries = log.read(path) or b""
    log.write(path, encode_bundle([*leaves[:-1], leaves[0]]))
    refused("are not those under")
    log.write(path, entries)
    # An older one ends nothing earlier where anybody remembers a later one, which is put in its place.
    text = Checkpoint(home.origin, 1, leaf_hash(leaves[0])).text()
    older = encode_note(Note(text, tuple(signer.sign(text, NOW // 1000) for signer in stolen)))
    log.write("checkpoint", older)
    log.write("checkpoint.cosigned", older)
    remembered = [b"no note", older, last]
    refused("is older than one of", remembered=remembered)
    log.write("checkpoint", b"torn")
    refused("is older than one of", remembered=remembered)
    log.write("checkpoint", last)
    changed = change_log_keys(home.folder, home.config, NOW, lost_keys=True, remembered=remembered)
    assert changed.size == size
    home.open().close()
    assert home.leaves()[:size] == leaves and len(home.leaves()) == size + 1


def test_a_copy_of_before_ends_no_keys_of_a_log_that_lies_here(home: Home, tmp_path: Path) -> None:
    held, copy = home.folder.bundle.read_bytes(), Folder(tmp_path / "copy")
    leaves, stolen = home.leaves(), lose_keys(home)
    for size, why in ((2, r"tile|are not those under"), (len(leaves), "write-ahead file")):
        # Of before; and a whole one, which is a copy and no log that goes on.
        for path, data in forged(home.origin, leaves[:size], stolen).files.items():
            copy.write(path, data)
        with pytest.raises(FelixError, match=why):
            change_log_keys(home.folder, home.config, NOW, log=copy.path, lost_keys=True)
        assert home.folder.bundle.read_bytes() == held and not home.folder.audit_key.exists()
    assert change_log_keys(home.folder, home.config, NOW, lost_keys=True).size == len(leaves)


@pytest.mark.parametrize("lost", ["audit.pem", "audit.mldsa.pem"])
def test_where_one_of_a_logs_new_keys_is_lost_it_is_said_and_there_is_a_way_on(home: Home, lost: str) -> None:
    with pytest.MonkeyPatch.context() as broken, pytest.raises(ZeroDivisionError):
        broken.setattr("region.trust.log_keys._put_in_place", lambda *_: 1 / 0)
        change_log_keys(home.folder, home.config, NOW)
    home.folder.audit_key.with_name(f"new.{lost}").unlink()
    for _ in range(2):
        with pytest.raises(RequestError, match=r"not in|not all keys") as refused:
            change_log_keys(home.folder, home.config, NOW + 1)
        assert "--lost-keys" in refused.value.hint
    size = len(home.leaves())
    assert change_log_keys(home.folder, home.config, NOW + 2, lost_keys=True).size == size
    home.open().close()


async def test_the_keys_of_an_older_copy_of_a_log_end_nowhere_below_what_others_have_cosigned(
    home: Home, tmp_path: Path
) -> None:
    """It was put back from a backup, and another region on this machine has cosigned more. Where that is of a thief's history, the operator says so."""
    home.open().close()
    shutil.copytree(home.log, tmp_path / "backup")
    for _ in range(3):
        await home.append()
    note = home.cosigned()
    shutil.rmtree(home.log)
    shutil.copytree(tmp_path / "backup", home.log)
    held, leaves = home.folder.bundle.read_bytes(), home.leaves()
    command = ["change-log-keys", "--region", "us-east"]
    refused = CliRunner().invoke(app, command).exception
    assert isinstance(refused, RequestError) and "It is an older copy" in refused.sentence
    assert "--as-it-is" in refused.hint
    assert (home.folder.bundle.read_bytes(), home.leaves()) == (held, leaves)
    assert home.trust().log(home.origin).open(note).checkpoint.size == note_size(note)
    done = CliRunner().invoke(app, [*command, "--as-it-is"])
    assert done.exit_code == 0, done.exception
    home.open().close()


@pytest.mark.parametrize("since", ["log keys", "signing keys"])
async def test_a_whole_folder_of_before_ends_no_keys_where_others_have_cosigned_more(
    home: Home, tmp_path: Path, since: str
) -> None:
    """Bundle, keys and log were put back from one backup, and agree. What was signed since would be nobody's."""
    logs = {key.name for key in home.bundle().audit_keys if key.role == "log"} - {home.origin}
    without = [word for log in sorted(logs) for word in ("--without", log)]
    home.open().close()
    shutil.copytree(home.folder.root, tmp_path / "backup")
    await home.append()
    if since == "log keys":
        change_log_keys(home.folder, home.config, NOW)
    else:
        change_signing_keys(home.folder, home.config, NOW, without=logs, say_again=True)
    await home.append()
    home.cosigned()
    shutil.rmtree(home.folder.root)
    shutil.copytree(tmp_path / "backup", home.folder.root)
    held, leaves = home.folder.bundle.read_bytes(), home.leaves()
    for command in (["change-log-keys"], ["change-signing-keys", "--say-again", *without]):
        refused = CliRunner().invoke(app, [*command, "--region", "us-east"]).exception
        assert isinstance(refused, RequestError)
        assert any(word in refused.sentence for word in ("does not open under", "an older copy")), refused
        assert (home.folder.bundle.read_bytes(), home.leaves()) == (held, leaves)
    home.folder.audit_key.unlink()
    lost = CliRunner().invoke(app, ["change-log-keys", "--lost-keys", "--region", "us-east"]).exception
    assert isinstance(lost, FelixError)
    assert home.folder.bundle.read_bytes() == held
    assert (
        CliRunner()
        .invoke(app, ["change-log-keys", "--lost-keys", "--as-it-is", "--region", "us-east"])
        .exit_code
        == 0
    )


async def test_a_log_of_before_its_keys_were_changed_is_neither_opened_nor_signed(
    home: Home, tmp_path: Path
) -> None:
    """What its keys of now sign there holds nowhere."""
    home.open().close()
    shutil.copytree(home.log, tmp_path / "backup")
    await home.append()
    size = change_log_keys(home.folder, home.config, NOW).size
    shutil.rmtree(home.log)
    shutil.copytree(tmp_path / "backup", home.log)
    with pytest.raises(RolledBackError, match="its keys were changed at"):
        home.open_at(tmp_path / "begun-anew")
    assert not (tmp_path / "begun-anew" / "checkpoint").exists()
    held, leaves = (home.log / "checkpoint").read_bytes(), home.leaves()
    tried: list[Callable[[], object]] = [
        home.open,
        lambda: change_log_keys(home.folder, home.config, NOW + 1),
        lambda: change_log_keys(home.folder, home.config, NOW + 1, as_it_is=True),
        lambda: change_log_keys(home.folder, home.config, NOW + 1, lost_keys=True),
    ]
    for what in tried:
        with pytest.raises(RolledBackError, match=f"its keys were changed at {size}"):
            what()
        assert ((home.log / "checkpoint").read_bytes(), home.leaves()) == (held, leaves)


async def test_keys_end_where_no_leaf_is_that_the_bundle_knows_of(home: Home) -> None:
    """A former policy key ended in more leaves than this copy of the log has."""
    home.open().close()
    key = load_signing_key(home.folder.policy_key)
    end = KeyEnd(home.origin, len(home.leaves()) + 1, b"r" * 32)
    former = FormerKeys(policy_keys=(SigningKey.generate().verify_key.public,), ends=(end,))
    named = msgspec.structs.replace(home.bundle().with_former((former,)), issued_ms=NOW)
    home.folder.bundle.write_bytes(sign_bundle(named, key).encode())
    leaves = home.leaves()
    with pytest.raises(RequestError, match="the bundle says that it had"):
        change_log_keys(home.folder, home.config, NOW + 1)
    assert home.leaves() == leaves and home.bundle() == named


def test_a_log_that_the_bundle_names_no_key_of_is_refused(home: Home) -> None:
    for lost in (False, True):
        with pytest.raises(RequestError, match="names no key that signs the log"):
            change_log_keys(home.folder, home.config, NOW, bridge="typo", log=home.log, lost_keys=lost)


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("step", ["_put_in_place", "_say", "_sign_on", "append_waiting"])
def test_where_lost_keys_were_replaced_the_leaf_comes_wherever_it_was_cut_off(
    home: Home, step: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(home.leaves())
    lose_keys(home)
    with monkeypatch.context() as broken:
        broken.setattr(f"region.trust.log_keys.{step}", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            change_log_keys(home.folder, home.config, NOW, lost_keys=True)
    named = home.bundle()
    if is_lost:
        changed = change_log_keys(home.folder, home.config, NOW + 1, lost_keys=True)
        assert changed.size == size and home.bundle() == named
    else:
        change_log_keys(home.folder, home.config, NOW + 1)
    rotated = [decode_leaf(leaf).header.action for leaf in home.leaves()[size:]]
    assert rotated == ["rotated"] * (1 if is_lost or step == "_put_in_place" else 2)
    with pytest.raises(RequestError, match="are here"):
        change_log_keys(home.folder, home.config, NOW + 2, lost_keys=True)
    home.open().close()


def checkpoint_size(log: Path) -> int:
    return int((log / "checkpoint").read_text().split("\n")[1])


BRIDGE_NAME = "us-east-to-eu-west"


def crossed(log: Folder) -> tuple[str, int, int]:
    """A record that crossed: stream, shard, source offset."""
    size = int(parse_note(log.read("checkpoint") or b"").text.split("\n")[1])
    headers = (decode_leaf(data).header for _, data in read_entries(log, 0, size, size))
    found = next(header for header in headers if header.kind is Kind.INTENT and header.records)
    assert found.first_offset is not None
    return found.stream, found.shard, found.first_offset


def test_an_outside_witness_is_given_the_new_key_in_place_of_the_old_one(tmp_path: Path) -> None:
    folder, origin = tmp_path / "witness", "log.example/1"
    init_witness(folder, "witness.example/w1")
    keys = [
        NoteSigner.from_key(origin, SigningKey.from_seed(bytes([seed]) * 32), Algorithm.ED25519).key
        for seed in (1, 2, 3)
    ]
    post_quantum = NoteSigner.from_ml_dsa(origin, MlDsaKey.generate()).key
    state = WitnessState.open(folder)
    try:
        for key in (*keys[:2], post_quantum):
            assert state.add_log(origin, key)
        assert state.add_log(origin, keys[2], in_place=True)
        assert not state.add_log(origin, keys[2], in_place=True)
        known = state.log(origin)
        assert known is not None and set(known.keys) == {keys[2], post_quantum}
    finally:
        state.close()
