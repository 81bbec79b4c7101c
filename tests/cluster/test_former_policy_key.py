"""What a former policy key of another region forbade, and the next one lifted, in a region of several brokers: all judge alike, whoever has the log."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest
from bridge_mesh import POLICIES, until
from cluster.audited import home_of
from cluster.clustered_region import ClusteredRegion, serving
from departures import DAY, terms
from etcd_process import EtcdProcess, etcd_of_each_test
from region_home import make_region
from slow_runs import only_slow

from audit.checkpoint import note_size
from audit.leaf import Kind, decode_leaf
from audit.tile import read_entries
from audit.tile_disk import Folder
from audit.trust import Trust
from audit.verify import verify_log
from cli.region import _note_given_up
from felix.errors import Code, RequestError, TamperError, UnavailableError
from felix.messages import PutDocument
from felix.names import SpiffeId, StreamName
from felix.page import list_documents
from felix.runtime.real import now_ms
from keys.bundle import SignedBundle, decode_bundle, sign_bundle
from keys.key_file import load_signing_key
from keys.signing import SigningKey
from policy.grant import (
    DenyEntry,
    ExportGrant,
    Standing,
    StandingAction,
    sign_deny,
    sign_export,
    sign_standing,
)
from policy.residency import parse_policy, sign_policy
from policy.signed import Purpose, decode_body
from policy.truncation import Truncation
from region.bootstrap import trust_region
from region.governance.changed_keys import ChangedKeys
from region.trust.held_document import document_id
from region.trust.signing_key_leaves import ACTIONS, ROLES, LoggedKey, key_id_of
from region.trust.signing_key_note import SigningKeyNote, decode_note
from region.trust.signing_keys import change_signing_keys

__all__ = ["etcd_of_each_test"]  # the fixture

pytestmark = pytest.mark.etcd

HIGHEST = (1 << 53) - 1


async def trust(region: ClusteredRegion, bundle: SignedBundle) -> None:
    pin = trust_region(region.folder, bundle, now_ms())
    assert pin is not None
    async with region.client(min(region.nodes)) as client:
        await client.request(PutDocument("pin", pin.encode()))
    await all_of(region, lambda governance: governance.bundles.get("eu-west") == bundle.bundle)


async def say(region: ClusteredRegion, key: SigningKey, number: int, *, lifted: bool, at: str) -> None:
    entry = DenyEntry(
        streams="acme/ops/*", peer="*", region="eu-west", sequence=number, at=now_ms(), by="a", lifted=lifted
    )
    async with region.client(at) as client:
        await client.request(PutDocument("deny", sign_deny(entry, key.private_key).encode_file()))


async def accept_truncation(region: ClusteredRegion) -> dict[str, bytes]:
    """us-east grants a stream to eu-west, and accepts a truncation on the link; the word as brokers list it."""
    key = load_signing_key(region.folder.policy_key).private_key
    policy = parse_policy(POLICIES["us-east"], "us-east")
    now = now_ms()
    export = sign_export(terms(not_before=now, expires=now + DAY), policy, key, now)
    cut = Truncation(stream="acme/ops/departures", shard=0, incarnation="0" * 32, epoch=1, offset=5)
    word = Standing(
        grant=decode_body(export, ExportGrant, Purpose.EXPORT).grant,
        action=StandingAction.ACCEPT_TRUNCATION,
        region="us-east",
        sequence=1,
        at=now,
        by="alice",
        truncation=cut,
    )
    standing = sign_standing(word, key)
    async with region.client(min(region.nodes)) as client:
        await client.request(PutDocument("export", export.encode_file()))
        await client.request(PutDocument("standing", standing.encode_file()))
    return {document_id(standing): standing.encode_file()}


async def all_of(region: ClusteredRegion, holds) -> None:  # type: ignore[no-untyped-def]
    await until(
        lambda: all(holds(node.services.governance) for node in region.nodes.values()), "every broker"
    )


async def denied(region: ClusteredRegion, is_denied: bool) -> None:
    await all_of(region, lambda governance: bool(governance.book.denies()) is is_denied)


@pytest.mark.parametrize("brokers", [pytest.param(2, marks=only_slow), 3])
async def test_all_brokers_judge_alike_whoever_has_the_log_and_whatever_they_lost(
    tmp_path: Path, etcd: EtcdProcess, brokers: int
) -> None:
    eu = make_region(tmp_path / "others", "eu-west")
    bundle, former, new = (
        decode_bundle(eu.bundle.read_bytes()),
        load_signing_key(eu.policy_key),
        SigningKey.generate(),
    )
    changed = msgspec.structs.replace(
        bundle.bundle, issued_ms=bundle.bundle.issued_ms + 1, policy_keys=(new.verify_key.public,)
    )
    async with serving(tmp_path, etcd, brokers) as region:
        await trust(region, bundle)
        home = await home_of(region)
        other = next(name for name in region.nodes if name != home)
        await say(region, former, HIGHEST, lifted=False, at=other)
        await denied(region, True)
        await trust(region, sign_bundle(changed, new))
        await denied(region, True)
        await say(region, new, 1, lifted=True, at=other)
        await denied(region, False)
        for lost in (home, other):
            await region.stop(lost)
            await denied(region, False)
            shutil.rmtree(region.folder.root / region.config.of_broker(lost).data / "governance")
            await region.start(lost)
            await denied(region, False)
        await say(region, new, 2, lifted=False, at=other)
        await denied(region, True)


async def test_a_region_of_several_brokers_changes_its_own_keys(tmp_path: Path, etcd: EtcdProcess) -> None:
    """The end is that of the copy of its log that goes furthest, and its brokers go on with the new keys."""

    def policy(revision: int) -> bytes:
        text = POLICIES["us-east"].replace("revision: 1", f"revision: {revision}")
        key = load_signing_key(region.folder.policy_key).private_key
        return sign_policy(parse_policy(text, "us-east"), key).encode_file()

    async def put(revision: int) -> None:
        home = await home_of(region)
        async with region.client(home) as client:
            await client.request(PutDocument("policy", policy(revision)))
        log = region.folder.root / region.config.of_broker(home).data / "audit"
        await until(lambda: revision in policies_of(Folder(log)), "its leaf under a checkpoint")

    def policies_of(log: Folder) -> list[int]:
        size = note_size(log.read("checkpoint") or b"")
        headers = [decode_leaf(data).header for _, data in read_entries(log, 0, size, size)]
        return [header.policy_version for header in headers if header.kind is Kind.POLICY]

    def changes_of(log: Folder) -> list[str]:
        size = note_size(log.read("checkpoint") or b"")
        headers = [decode_leaf(data).header for _, data in read_entries(log, 0, size, size)]
        return sorted(header.action for header in headers if header.action in ACTIONS)

    async with serving(tmp_path, etcd, 3) as region:
        before = region.folder.bundle.read_bytes()
        await put(1)
        accepted = await accept_truncation(region)
        names = sorted(region.nodes)
        for name in names:
            await region.stop(name)
        bundle = change_signing_keys(region.folder, region.config, now_ms()).signed.bundle
        (end,) = bundle.former[-1].ends
        for name in names:
            await region.start(name)
        await put(2)
        home = await home_of(region)
        for name in names:
            # Whichever broker is asked, the one with the log answers.
            async with region.client(name) as client:
                assert await list_documents(client, "truncation") == accepted
        log = Folder(region.folder.root / region.config.of_broker(home).data / "audit")
        assert policies_of(log) == [1, 2] and note_size(log.read("checkpoint") or b"") > end.size
        report = verify_log(log, Trust.of([bundle]), cosignatures_min=0)
        assert report.ok and report.documents == 4, report.findings

        # The command could write no leaf into a log that several brokers have: the one that writes it has, once for each key, over restarts.
        assert changes_of(log) == sorted(ACTIONS)
        for name in names:
            await region.stop(name)
            await region.start(name)
        await put(3)
        home = await home_of(region)
        log = Folder(region.folder.root / region.config.of_broker(home).data / "audit")
        assert changes_of(log) == sorted(ACTIONS)

        # No broker takes up a bundle of before beside its copy of such a log.
        region.folder.bundle.write_bytes(before)
        await region.stop(home)
        with pytest.raises(RequestError, match="gave up the policy key"):
            await region.start(home)


async def test_a_broker_that_hears_from_the_log_that_its_keys_were_given_up_ends_and_takes_nothing(
    tmp_path: Path, etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine was replaced: its data folder is empty, so the start finds no leaf of the change, and its region's folder comes from a backup of before it. The metadata
    store says nothing."""
    monkeypatch.setattr(ChangedKeys, "read_note", lambda _: None)
    async with serving(tmp_path, etcd, 3, 2) as region:
        folder, before = region.folder, tmp_path / "before"
        former = load_signing_key(folder.policy_key)
        shutil.copytree(folder.secrets, before / "secrets")
        shutil.copy(folder.bundle, before)
        await home_of(region)
        await region.stop()
        change_signing_keys(folder, region.config, now_ms())
        after = tmp_path / "after"
        shutil.copytree(folder.secrets, after / "secrets")
        shutil.copy(folder.bundle, after)
        await region.start("b1", "b2")

        def put_back(kept: Path) -> None:
            shutil.copytree(kept / "secrets", folder.secrets, dirs_exist_ok=True)
            shutil.copy(kept / "bundle.json", folder.bundle)

        put_back(before)
        await region.start("b3")
        node = region.nodes["b3"]
        ended = await asyncio.wait_for(node.ended(), 60)
        assert ended.code is Code.CONFIG_INVALID and "gave up the policy key" in ended.sentence
        entry = DenyEntry(
            streams="acme/ops/*", peer="*", region="us-east", sequence=1, at=now_ms(), by="a", lifted=False
        )
        governance = node.services.governance
        with pytest.raises(UnavailableError, match="gave up the policy key"):
            await governance.put(
                SpiffeId("us-east", "acme", "operator", "alice"),
                "deny",
                sign_deny(entry, former.private_key).encode_file(),
            )
        with pytest.raises(UnavailableError, match="gave up the policy key"):
            governance.explain(StreamName.parse("acme/ops/a"), "us-east", "eu-west")
        home = await home_of(region)
        assert home != "b3"
        await region.stop(home)
        assert await home_of(region) not in ("b3", home), "with the others' logs it goes on without b3"
        await region.stop("b3")
        with pytest.raises(RequestError, match="gave up the policy key"):
            await region.start("b3")
        put_back(after)
        await region.start("b3")
        assert not region.nodes["b3"].services.governance.problems

        # Nobody has the bundle of after the change: brokers take keys that were made instead, and the log names these from then on.
        await region.stop()
        put_back(before)
        changed = change_signing_keys(
            folder, region.config, now_ms(), ("policy",), lost_bundle=True
        ).signed.bundle
        changed = change_signing_keys(folder, region.config, now_ms(), lost_bundle=True).signed.bundle
        assert len(changed.former) == 2, "the first call's policy key stands, and the receipt key is made"
        assert change_signing_keys(folder, region.config, now_ms(), lost_bundle=True).signed.bundle == changed
        await region.start("b1", "b2")
        made = [key_id_of(public) for public in (*changed.policy_keys, *changed.receipt_keys)]

        def named() -> list[bytes]:
            logged = region.nodes[home].services.governance.logged.signing_keys
            return [logged[role].key_id for role in ROLES]

        home = await home_of(region)
        await until(lambda: named() == made, "the log names them")


@only_slow
async def test_a_broker_with_a_folder_of_before_that_has_the_log_first_ends_once_one_of_after_is_up(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """It has the log, and would never write the leaves of the change: it knows of none. A broker with the keys of now notes it in the store."""
    async with serving(tmp_path, etcd, 2) as region:
        folder, before, after = region.folder, tmp_path / "before", tmp_path / "after"

        def keep(kept: Path) -> None:
            shutil.copytree(folder.secrets, kept / "secrets")
            shutil.copy(folder.bundle, kept)

        def put_back(kept: Path) -> None:
            shutil.copytree(kept / "secrets", folder.secrets, dirs_exist_ok=True)
            shutil.copy(kept / "bundle.json", folder.bundle)

        def changes_of(name: str) -> list[str]:
            log = Folder(folder.root / region.config.of_broker(name).data / "audit")
            size = note_size(log.read("checkpoint") or b"")
            headers = [decode_leaf(data).header for _, data in read_entries(log, 0, size, size)]
            return sorted(header.action for header in headers if header.action in ACTIONS)

        await home_of(region)
        former = load_signing_key(folder.policy_key)
        keep(before)
        await region.stop()
        bundle = change_signing_keys(folder, region.config, now_ms()).signed.bundle
        keep(after)
        put_back(before)
        await region.start("b2")
        put_back(after)
        await region.start("b1")
        old = region.nodes["b2"]
        ended = await asyncio.wait_for(old.ended(), 60)
        assert ended.code is Code.CONFIG_INVALID and "gave up the policy key" in ended.sentence
        entry = DenyEntry(
            streams="acme/ops/*", peer="*", region="us-east", sequence=HIGHEST, at=now_ms(), by="thief", lifted=False
        )  # fmt: skip
        with pytest.raises(UnavailableError, match="gave up the policy key"):
            await old.services.governance.put(
                SpiffeId("us-east", "acme", "operator", "alice"),
                "deny",
                sign_deny(entry, former.private_key).encode_file(),
            )
        await region.stop("b2")
        put_back(before)
        with pytest.raises(RequestError, match="gave up the policy key"):
            await region.start("b2")
        put_back(after)
        await region.start("b2")
        home = await home_of(region)
        await until(lambda: len(changes_of(home)) == 4, "the log has the leaves of the change")
        log = Folder(folder.root / region.config.of_broker(home).data / "audit")
        report = verify_log(log, Trust.of([bundle]), cosignatures_min=0)
        assert report.ok, report.findings
        await denied(region, False)


async def test_no_broker_starts_with_a_folder_of_before_once_the_command_has_told_the_store(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """The log has no leaf of the change before a broker with the keys of now has it."""
    async with serving(tmp_path, etcd, 2) as region:
        folder, before, after = region.folder, tmp_path / "before", tmp_path / "after"

        def copy(of: Path, to: Path) -> None:
            shutil.copytree(of / "secrets", to / "secrets", dirs_exist_ok=True)
            shutil.copy(of / "bundle.json", to)

        await home_of(region)
        copy(folder.root, before)
        await region.stop()
        change_signing_keys(folder, region.config, now_ms())
        await _note_given_up(folder, region.config)
        copy(folder.root, after)
        copy(before, folder.root)
        for name in ("b1", "b2"):
            with pytest.raises(RequestError, match="gave up the policy key"):
                await region.start(name)
        copy(after, folder.root)
        await region.start("b1", "b2")
        home = await home_of(region)
        logged = region.nodes[home].services.governance.logged
        await until(lambda: len(logged.signing_keys) == 2, "the log has the leaves of the change")
        assert not region.nodes[home].services.governance.problems


@only_slow
async def test_a_broker_without_a_copy_of_the_log_ends_once_its_keys_were_given_up(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    """Three of four brokers have the log. The fourth, on another machine, goes on with a folder of before the change."""
    async with serving(tmp_path, etcd, 4, 3) as region:
        folder = region.folder

        def kept(name: str) -> Path:
            shutil.copytree(folder.secrets, tmp_path / name / "secrets")
            shutil.copy(folder.bundle, tmp_path / name)
            return tmp_path / name

        def put_back(kept: Path) -> None:
            shutil.copytree(kept / "secrets", folder.secrets, dirs_exist_ok=True)
            shutil.copy(kept / "bundle.json", folder.bundle)

        async def note() -> bytes:
            told = await asyncio.to_thread(
                etcd.ctl, "get", "--print-value-only", "/felix/1/us-east/signing_keys/of_log"
            )
            return told.strip().encode()

        async def is_gone() -> bool:
            return not await note()

        await home_of(region)
        await asyncio.to_thread(etcd.ctl, "put", "/felix/1/us-east/signing_keys/of_log", "of a region before")
        await until(is_gone, "what is no note is taken out, as no key was changed")
        before = kept("before")
        await region.stop()
        change_signing_keys(folder, region.config, now_ms())
        after = kept("after")

        put_back(before)
        await region.start("b4")
        assert region.clustered("b4").audit is None or not region.clustered("b4").has_audit_log
        put_back(after)
        await region.start("b1", "b2", "b3")
        fourth = region.nodes["b4"]
        ended = await asyncio.wait_for(fourth.ended(), 60)
        assert ended.code is Code.CONFIG_INVALID and "gave up the policy key" in ended.sentence
        with pytest.raises(UnavailableError, match="gave up the policy key"):
            fourth.services.governance.explain(StreamName.parse("acme/ops/a"), "us-east", "eu-west")
        await region.stop("b4")
        put_back(before)
        with pytest.raises(
            RequestError, match=r"note in the metadata store.*gave up the policy key"
        ) as refused:
            await region.start("b4")
        assert "Where nobody changed these keys" in refused.value.hint
        put_back(after)
        await region.start("b4")

        # Whoever has the store alone stops nobody: neither with a note of his own, nor with an earlier one, and the right one comes back.
        await region.stop()
        first = decode_bundle((before / "bundle.json").read_bytes()).bundle
        change_signing_keys(folder, region.config, now_ms())
        await region.start("b1", "b2", "b3", "b4")
        await home_of(region)
        given_up = key_id_of(decode_bundle((after / "bundle.json").read_bytes()).bundle.policy_keys[0])
        bundle = decode_bundle(folder.bundle.read_bytes()).bundle

        async def is_whole() -> bool:
            try:
                held = decode_note(await note(), bundle).keys["policy"]
            except (RequestError, TamperError):
                return False
            return held.ended == (key_id_of(first.policy_keys[0]), given_up)

        await until(is_whole, "the note of the second change")
        key = load_signing_key(folder.audit_key)
        earlier = {"policy": LoggedKey(given_up, 1, (key_id_of(first.policy_keys[0]),))}
        now = {"policy": LoggedKey(b"k" * 16, 1, (key_id_of(bundle.policy_keys[0]),))}
        for wrong in (
            SigningKeyNote.sign(bundle, now, SigningKey.generate()).encode(),
            SigningKeyNote.sign(bundle, earlier, key).encode(),  # type: ignore[arg-type]
            b"nothing",
        ):
            await asyncio.to_thread(etcd.ctl, "put", "/felix/1/us-east/signing_keys/of_log", wrong.decode())
            await until(is_whole, "the right note again")
        await asyncio.to_thread(etcd.ctl, "del", "/felix/1/us-east/signing_keys/of_log")
        await until(is_whole, "the right note again")
        for node in region.nodes.values():
            governance = node.services.governance
            await until(lambda governance=governance: not governance.problems, "no problem")  # type: ignore[misc]
            assert governance.keys_refusal() is None
