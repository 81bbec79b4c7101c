"""A change of signing keys is cut off, and its plan lies beside the bundle: until it is finished, nothing else signs the bundle, and nothing that was named is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from version_0_1 import EGRESS, US_EAST, lay_out

from audit.checkpoint import Checkpoint
from audit.note import parse_note
from audit.origin import egress_origin, region_origin
from audit.signer_disk import load_signers
from audit.tile import COPIED_PATH, bundle_path, encode_bundle, read_entries
from audit.tile_disk import Folder
from audit.trail import Trail
from audit.trust import RegionTrust, Trust
from audit.verify import verify_log
from felix.errors import Code, RequestError, TamperError
from keys.bundle import RegionBundle, decode_bundle
from keys.key_file import load_signing_key, save_ml_dsa_key, save_signing_key
from keys.post_quantum import MlDsaKey
from keys.signing import SigningKey
from region.bootstrap import add_log_keys, issue_identity
from region.config import RegionConfig, load_config
from region.evidence.witness_key import change_witness_key
from region.folder import RegionFolder
from region.trust import begun_change
from region.trust.log_keys import change_log_keys
from region.trust.signing_keys import change_signing_keys, raise_ends

NOW = 1_796_000_000_000
BRIDGE = "us-east-to-eu-west"
STEPS = ("_record", "_put_in_place", "_move_new")
"""of the change: cut off before its leaves, behind them, and with its bundle in place"""
Writer = Callable[[RegionFolder, RegionConfig], object]
WRITERS: dict[str, Writer] = {
    "log keys": lambda folder, config: change_log_keys(folder, config, NOW + 5),
    "a bridge's log keys": lambda folder, config: change_log_keys(folder, config, NOW + 5, bridge=BRIDGE),
    "a bridge": lambda folder, config: issue_identity(folder, config, "bridge", "another", NOW + 5),
    "missing log keys": lambda folder, config: add_log_keys(folder, config, NOW + 5),
    "the witness's key": lambda folder, config: change_witness_key(folder, config, NOW + 5),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RegionFolder:
    home = lay_out(tmp_path)
    monkeypatch.setenv("FELIX_HOME", str(home))
    return RegionFolder(home / "us-east")


def bundle_of(folder: RegionFolder) -> RegionBundle:
    return decode_bundle(folder.bundle.read_bytes()).bundle


def change(folder: RegionFolder, config: RegionConfig, now_ms: int) -> None:
    # Version 0.1 kept a revocation that has no leaf.
    change_signing_keys(folder, config, now_ms, say_again=True)


def cut_off(folder: RegionFolder, config: RegionConfig, step: str) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(f"region.trust.signing_keys.{step}", lambda *_: 1 / 0)
        change(folder, config, NOW)


def logs_of(folder: RegionFolder) -> dict[str, tuple[Path, Path, Path]]:
    """The region's logs by origin, with their keys."""
    return {
        region_origin("us-east", "acme"): (
            folder.root.parent / US_EAST, folder.audit_key, folder.audit_ml_dsa_key,
        ),
        egress_origin("us-east", "acme", BRIDGE): (
            folder.root.parent / EGRESS, folder.egress_key(BRIDGE), folder.egress_ml_dsa_key(BRIDGE),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("what", WRITERS)
def test_nothing_else_signs_the_bundle_before_the_change_is_finished(
    folder: RegionFolder, what: str, step: str
) -> None:
    config, write = load_config(folder.config), WRITERS[what]
    if what != "missing log keys":
        add_log_keys(folder, config, NOW - 1)
    cut_off(folder, config, step)
    held, logs = (
        folder.bundle.read_bytes(),
        [Folder(log).read("checkpoint") for log, *_ in logs_of(folder).values()],
    )
    with pytest.raises(RequestError, match="was cut off") as refused:
        write(folder, config)
    assert refused.value.code is Code.CONFLICT and "felix region change-signing-keys" in refused.value.hint
    assert folder.bundle.read_bytes() == held
    assert logs == [Folder(log).read("checkpoint") for log, *_ in logs_of(folder).values()]

    change(folder, config, NOW + 10)
    write(folder, config)
    own = bundle_of(folder)
    assert len(own.former) == 1
    trust = Trust.of(
        [own, decode_bundle((folder.root.parent / "eu-west" / "bundle.json").read_bytes()).bundle]
    )
    for origin, (path, ed25519, ml_dsa) in logs_of(folder).items():
        signers = load_signers(origin, ed25519, ml_dsa)
        earlier = RegionTrust(own).earlier_keys(origin, (signer.key for signer in signers))
        trail = Trail.open(path, signers[0], also=signers[1:], earlier=earlier)
        trail.publish()
        trail.close()
        assert not verify_log(Folder(path), trust, cosignatures_min=0).findings, origin
    if what == "a bridge":
        assert egress_origin("us-east", "acme", "another") in {key.name for key in own.audit_keys}


def test_ends_are_not_raised_before_a_later_change_is_finished(folder: RegionFolder) -> None:
    config = load_config(folder.config)
    change(folder, config, NOW - 5)
    for step in STEPS:
        cut_off(folder, config, step)
        with pytest.raises(RequestError, match="was cut off"):
            raise_ends(folder, config, NOW + 5)
        change(folder, config, NOW + 10)


def test_an_identity_is_renewed_meanwhile(folder: RegionFolder) -> None:
    config = load_config(folder.config)
    add_log_keys(folder, config, NOW - 1)
    cut_off(folder, config, "_put_in_place")
    issue_identity(folder, config, "bridge", BRIDGE, NOW)
    issue_identity(folder, config, "operator", "operator", NOW)


def test_what_a_finished_change_has_left_beside_holds_nothing_up(folder: RegionFolder) -> None:
    config = load_config(folder.config)
    cut_off(folder, config, "_put_in_place")
    plan = folder.bundle.with_name(f"new.{folder.bundle.name}")
    left = plan.read_bytes()
    change(folder, config, NOW + 10)
    plan.write_bytes(left)  # of a backup
    change_log_keys(folder, config, NOW + 20)


def test_a_log_is_not_opened_with_a_key_that_the_bundle_does_not_name(folder: RegionFolder) -> None:
    """Nobody would take its checkpoints, and no later key could follow on them."""
    config = load_config(folder.config)
    add_log_keys(folder, config, NOW - 1)
    for origin, (_, ed25519, ml_dsa) in logs_of(folder).items():
        for path in (ed25519, ml_dsa):
            aside = path.rename(path.with_suffix(".aside"))
            if path == ml_dsa:
                save_ml_dsa_key(MlDsaKey.generate(), path)
            else:
                save_signing_key(SigningKey.generate(), path)
            keys = [signer.key for signer in load_signers(origin, ed25519, ml_dsa)]
            with pytest.raises(RequestError, match="does not name a key") as refused:
                RegionTrust(bundle_of(folder)).earlier_keys(origin, keys)
            assert refused.value.code is Code.CONFIG_INVALID and "change-log-keys" in refused.value.hint
            aside.replace(path)


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_plan_whose_keys_are_lost_holds_up_what_signs_the_bundle_and_the_next_change_makes_others(
    folder: RegionFolder, is_copied: bool
) -> None:
    """secrets/ of a backup beside a folder of now: the log says already that the keys in it were given up."""
    config = load_config(folder.config)
    add_log_keys(folder, config, NOW - 1)
    cut_off(folder, config, "_put_in_place")
    plan = folder.bundle.with_name(f"new.{folder.bundle.name}")
    lost = decode_bundle(plan.read_bytes()).bundle
    for path in (folder.policy_key, folder.receipt_key):
        path.with_name(f"new.{path.name}").unlink()
    for what, write in WRITERS.items():
        if what != "missing log keys":  # none is missing
            with pytest.raises(RequestError, match="was cut off"):
                write(folder, config)
    with pytest.raises(RequestError) as refused:
        change(folder, config, NOW + 10)
    assert "put new.bundle.json in the place of bundle.json" in refused.value.hint
    # Moved or copied: the keys in the folder are those that were given up, so nothing is finished by this.
    if is_copied:
        shutil.copy(plan, folder.bundle)
    else:
        plan.replace(folder.bundle)
    change(folder, config, NOW + 10)
    own = bundle_of(folder)
    assert [keys.policy_keys for keys in own.former][1:] == [lost.policy_keys] and len(own.former) == 2
    for write in WRITERS.values():
        write(folder, config)


def test_a_change_that_was_cut_off_as_its_plan_was_removed_is_not_made_once_more(
    folder: RegionFolder,
) -> None:
    config = load_config(folder.config)
    change(folder, config, NOW)
    plan = folder.bundle.with_name(f"new.{folder.bundle.name}")
    plan.write_bytes(folder.bundle.read_bytes())
    finished = change_signing_keys(folder, config, NOW + 10, say_again=True)
    assert finished.signed.encode() == plan.with_name("bundle.json").read_bytes() and not plan.exists()
    assert len(bundle_of(folder).former) == 1 and "those that were made then" in finished.left_out[0]
    change(folder, config, NOW + 20)
    assert len(bundle_of(folder).former) == 2


@pytest.mark.parametrize("step", STEPS)
def test_a_key_that_a_change_that_was_cut_off_was_not_about_is_not_said_to_be_changed(
    folder: RegionFolder, step: str
) -> None:
    config, before = load_config(folder.config), bundle_of(folder)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(f"region.trust.signing_keys.{step}", lambda *_: 1 / 0)
        change_signing_keys(folder, config, NOW, ["receipt"], say_again=True)
    if step != "_record":  # nothing was told yet, and the change begins anew
        with pytest.raises(RequestError, match="The policy key is still that of before") as refused:
            change(folder, config, NOW + 10)
        assert refused.value.code is Code.CONFLICT and bundle_of(folder).policy_keys == before.policy_keys
        assert bundle_of(folder).receipt_keys != before.receipt_keys
    change(folder, config, NOW + 20)
    assert bundle_of(folder).policy_keys != before.policy_keys


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("step", STEPS[1:])
@pytest.mark.parametrize("lost", ["policy", "receipt"])
def test_where_one_of_the_new_keys_is_lost_the_change_says_so_and_the_next_call_makes_another(
    folder: RegionFolder, lost: str, step: str, is_copied: bool
) -> None:
    config = load_config(folder.config)
    if is_copied:
        # Brokers write its leaves, and have written none of this change.
        Folder(folder.root.parent / US_EAST).write(COPIED_PATH, b"")
    cut_off(folder, config, step)
    path = folder.policy_key if lost == "policy" else folder.receipt_key
    path.with_name(f"new.{path.name}").unlink()
    if is_copied and step == "_put_in_place":
        change(folder, config, NOW + 10)  # nothing was told yet, and it begins anew
    else:
        with pytest.raises(RequestError, match=f"the {lost} key that it made is not here"):
            change(folder, config, NOW + 10)
    change(folder, config, NOW + 20)
    own = bundle_of(folder)
    assert load_signing_key(folder.policy_key).verify_key.public in own.policy_keys
    assert load_signing_key(folder.receipt_key).verify_key.public in own.receipt_keys
    assert len(own.former) == 2


@pytest.mark.parametrize("step", STEPS[:2])
@pytest.mark.parametrize("of", ["own", "bridge"])
def test_where_a_logs_key_is_lost_beside_a_change_that_was_cut_off_there_is_a_way_on(
    folder: RegionFolder, of: str, step: str
) -> None:
    """The change needs the log, whose key is lost; and the key's change waits for that one."""
    config, bridge = load_config(folder.config), BRIDGE if of == "bridge" else ""
    add_log_keys(folder, config, NOW - 1)
    cut_off(folder, config, step)
    log = folder.root.parent / (EGRESS if bridge else US_EAST)
    (folder.egress_key(BRIDGE) if bridge else folder.audit_key).unlink()
    with pytest.raises(RequestError, match="was cut off"):
        change_log_keys(folder, config, NOW + 5, bridge=bridge, lost_keys=True)
    if not (bridge and step == "_put_in_place"):  # then nothing is asked of the bridge's log any more
        with pytest.raises(RequestError, match=r"does not exist\. It signs the log") as refused:
            change(folder, config, NOW + 10)
        assert (f"--checkpoint {log / 'checkpoint'}" if bridge else f"--log {log}") in refused.value.hint
    given = [(log / "checkpoint").read_bytes()] if bridge else []
    change_signing_keys(
        folder, config, NOW + 20, say_again=True, checkpoints=given, log=None if bridge else log
    )
    change_log_keys(folder, config, NOW + 30, bridge=bridge, lost_keys=True)
    own = bundle_of(folder)
    assert load_signing_key(folder.policy_key).verify_key.public in own.policy_keys
    assert len(own.former) == 1


def test_of_two_commands_that_change_the_bundle_at_once_the_second_is_refused(
    folder: RegionFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it names would be lost as the first one puts its bundle in place."""
    config, refused = load_config(folder.config), dict[str, RequestError]()
    add_log_keys(folder, config, NOW - 1)

    def meanwhile(*_: object) -> None:
        for what, write in WRITERS.items():
            with pytest.raises(RequestError, match="Another command changes") as found:
                write(folder, config)
            refused[what] = found.value

    monkeypatch.setattr("region.trust.signing_keys._require_whole", meanwhile)
    change(folder, config, NOW)
    assert refused.keys() == WRITERS.keys()
    assert all(error.code is Code.CONFLICT for error in refused.values())
    for write in WRITERS.values():
        write(folder, config)


def test_a_copy_whose_leaves_were_changed_says_nothing_of_the_keys(
    folder: RegionFolder, tmp_path: Path
) -> None:
    """Who can write the copy, and has no key, takes out that the keys of this folder were given up."""
    config = load_config(folder.config)
    before = {path: path.read_bytes() for path in (folder.bundle, folder.policy_key, folder.receipt_key)}
    change(folder, config, NOW)
    copy = tmp_path / "copy"
    shutil.copytree(folder.root.parent / US_EAST, copy)
    files, held = Folder(copy), parse_checkpoint(copy)
    leaves = [bytes(data) for _, data in read_entries(files, 0, held.size, held.size)]
    hidden = [leaf for leaf in leaves if b"-key-" not in leaf]
    assert len(hidden) < len(leaves) < 256
    for path, data in before.items():
        path.write_bytes(data)
    with pytest.raises(RequestError, match="gave up the policy key"):
        change_signing_keys(folder, config, NOW + 10, log=copy, say_again=True)
    files.write(bundle_path(0, held.size), encode_bundle([*hidden, *hidden][: held.size]))
    with pytest.raises(TamperError, match="are not those under its checkpoint"):
        change_signing_keys(folder, config, NOW + 10, log=copy, say_again=True)
    assert folder.bundle.read_bytes() == before[folder.bundle]


def parse_checkpoint(log: Path) -> Checkpoint:
    return Checkpoint.parse(parse_note(Folder(log).read("checkpoint") or b"").text)


@pytest.mark.parametrize("what", ["log keys", "a bridge's log keys", "the witness's key", "signing keys"])
def test_of_keys_that_were_given_up_nothing_is_left_and_the_next_ones_have_their_names_durably(
    folder: RegionFolder, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, told = load_config(folder.config), list[str]()
    add_log_keys(folder, config, NOW - 1)
    keys = [
        folder.audit_key, folder.audit_ml_dsa_key, folder.egress_key(BRIDGE), folder.egress_ml_dsa_key(BRIDGE),
        folder.witness_key, folder.witness_ml_dsa_key, folder.policy_key, folder.receipt_key,
    ]  # fmt: skip
    # Of writers that were killed: each is a copy of the key.
    left = [path.with_name(f".{path.name}.{number}.0a1b2c3d.new") for number, path in enumerate(keys)]
    for path, copy in zip(keys, left, strict=True):
        shutil.copy2(path, copy)
    move, sync = begun_change._move, begun_change.sync_folder
    monkeypatch.setattr(begun_change, "_move", lambda new, old: (told.append(old.name), move(new, old)))
    monkeypatch.setattr(begun_change, "sync_folder", lambda path: (told.append("synced"), sync(path)))
    writers = {**WRITERS, "signing keys": lambda folder, config: change(folder, config, NOW + 5)}
    before = {path: path.read_bytes() for path in keys}
    writers[what](folder, config)
    changed = [path for path in keys if path.read_bytes() != before[path]]
    assert len(changed) == 2 and sorted(told[:2]) == sorted(path.name for path in changed)
    assert set(told[2:]) == {"synced"} and len(told) > 2
    held = {path.read_bytes() for path in folder.root.rglob("*") if path.is_file() and path not in left}
    for path in changed:
        assert before[path] not in held
        copies = [copy for copy in left if copy.name.startswith(f".{path.name}.")]
        assert copies and not any(copy.exists() for copy in copies), path
