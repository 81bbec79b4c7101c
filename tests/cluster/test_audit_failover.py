"""The audit log of a region of three brokers that are processes: its home is killed, or stands still for longer than its lease, in the middle of
documents and renewals. What was answered has its leaf, once, in every broker's copy; and every checkpoint that anybody was shown is of
one history.

FELIX_FAULT_ROUNDS (`make faults ROUNDS=n`): how often each of both happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from hashlib import sha256
from itertools import count
from pathlib import Path

import pytest
from cluster.processes import process_of, running, several
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from etcd_process import etcd_binary
from region_peer import client, until

import felix
from audit.checkpoint import note_size, open_checkpoint
from audit.leaf import Header, Kind, read_header
from audit.merkle import EMPTY_ROOT, Tree, leaf_hash
from audit.origin import region_origin
from audit.tile import read_entries
from audit.tile_disk import Folder
from audit.trust import RegionTrust, Trust
from audit.verify import verify_log
from felix.connection import RegionConnection
from felix.errors import FelixError
from felix.messages import GetCheckpoint, PutDocument, RenewIdentity
from felix.runtime.real import now_ms
from keys.key_file import load_signing_key
from policy.grant import DenyEntry, sign_deny
from region.bootstrap import issue_identity
from region.config import load_config
from region.folder import RegionFolder
from region.session.renewal import KEY_ID_BYTES
from region.trust.trusted_bundles import own_bundle

NAMES = ("b1", "b2", "b3")
LEASE_S = 2
DAY = 86_400_000
ROUNDS = int(os.environ.get("FELIX_FAULT_ROUNDS", "1"))
IDENTITIES = 20 * ROUNDS
"""Each certificate is renewed 16 times by one broker at most."""
GOES_ON = 5
"""Answers after a fault, before the next one."""


class Told:
    """What was answered, and what was shown."""

    def __init__(self) -> None:
        self.documents: list[bytes] = []
        self.keys: list[bytes] = []
        self.notes: set[bytes] = set()

    @property
    def answers(self) -> int:
        return len(self.documents) + len(self.keys)


async def put_documents(operator: felix.RegionClient, folder: RegionFolder, told: Told) -> None:
    """Put one after the other; each until it is answered."""
    key, number = load_signing_key(folder.policy_key).private_key, 0
    while True:
        number += 1
        entry = DenyEntry(
            streams=f"acme/ops/s{number}", peer="*", region="us-east", sequence=number, at=now_ms(), by="ops"
        )
        body = sign_deny(entry, key).encode_file()
        while True:
            with contextlib.suppress(FelixError):
                await operator.request(PutDocument("deny", body))
                break
            await asyncio.sleep(0.05)
        told.documents.append(sha256(body).digest())
        await asyncio.sleep(0.02)


async def renew(folder: RegionFolder, told: Told) -> None:
    """Renew identities, each with one key until it is answered."""
    for number in count():
        name = f"orders{number % IDENTITIES}"
        connection = RegionConnection(felix.load_profile("us-east", identity=name, home=folder.root.parent))
        key = ec.generate_private_key(ec.SECP256R1())
        made = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, SHA256())
        public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        await connection.open()
        try:
            while True:
                with contextlib.suppress(FelixError):
                    await connection.request(RenewIdentity(made.public_bytes(Encoding.DER)))
                    break
                await asyncio.sleep(0.05)
        finally:
            await connection.close()
        told.keys.append(sha256(public).digest()[:KEY_ID_BYTES])
        await asyncio.sleep(0.1)


async def watch(folder: RegionFolder, told: Told) -> None:
    """Collect what the brokers show, and what stands in their folders."""
    bridge = RegionConnection(felix.load_profile("us-east", identity="watcher", home=folder.root.parent))
    await bridge.open()
    try:
        while True:
            with contextlib.suppress(FelixError, TimeoutError):
                async with asyncio.timeout(1):
                    told.notes.add((await bridge.request(GetCheckpoint())).checkpoint)
            for name in NAMES:
                with contextlib.suppress(FileNotFoundError):
                    told.notes.add((log_of(folder, name).path / "checkpoint").read_bytes())
            await asyncio.sleep(0.1)
    finally:
        await bridge.close()


def log_of(folder: RegionFolder, name: str) -> Folder:
    return Folder(folder.root / load_config(folder.config).of_broker(name).data / "audit")


async def home_of(operator: felix.RegionClient) -> str:
    while True:
        with contextlib.suppress(FelixError):
            found = [each.broker for each in (await operator.describe()).brokers if each.has_audit_log]
            if found:
                return found[0]
        await asyncio.sleep(0.05)


async def kill(folder: RegionFolder, name: str) -> Callable[[], Awaitable[None]]:
    """What comes back waits until its parent has started it again."""
    pid = process_of(folder, name)
    os.kill(pid, signal.SIGKILL)
    return lambda: until(lambda: process_of(folder, name) not in (0, pid), 60)


async def pause(folder: RegionFolder, name: str) -> Callable[[], Awaitable[None]]:
    """It stands still, for longer than its lease: until what comes back lets it go on as if it were home."""
    pid = process_of(folder, name)
    os.kill(pid, signal.SIGSTOP)

    async def go_on() -> None:
        os.kill(pid, signal.SIGCONT)

    return go_on


async def more(told: Told, *work: asyncio.Future[None]) -> None:
    wanted = (len(told.documents) + GOES_ON, len(told.keys) + 1)
    async with asyncio.timeout(120):
        while len(told.documents) < wanted[0] or len(told.keys) < wanted[1]:
            for each in work:
                if each.done():
                    each.result()
            await asyncio.sleep(0.02)


def headers_of(log: Folder, size: int) -> list[Header]:
    found = [read_header(leaf) for _, leaf in read_entries(log, 0, size, size)]
    assert None not in found
    return [each for each in found if each is not None]


def judge(folder: RegionFolder, told: Told) -> None:
    """Every copy verifies, has what was answered once, and all that was shown is of one history."""
    trust = Trust.of([own_bundle(folder, load_config(folder.config))])
    logs = {name: log_of(folder, name) for name in NAMES}
    notes = {name: (log.path / "checkpoint").read_bytes() for name, log in logs.items()}
    assert len(set(map(note_size, notes.values()))) == 1, notes
    for log in logs.values():
        report = verify_log(log, trust, cosignatures_min=0)
        assert report.ok, report.findings
    size = note_size(notes["b1"])
    leaves = [bytes(leaf) for _, leaf in read_entries(logs["b1"], 0, size, size)]
    for log in logs.values():
        assert [bytes(leaf) for _, leaf in read_entries(log, 0, size, size)] == leaves
    headers = headers_of(logs["b1"], size)
    documents = Counter(each.document_sha256 for each in headers if each.kind is Kind.DENY_ENTRY)
    keys = Counter(each.key_id for each in headers if each.kind is Kind.KEY)
    assert all(documents[each] == 1 for each in told.documents)
    assert all(keys[each] == 1 for each in told.keys)
    assert set(documents.values()) | set(keys.values()) == {1}, "a leaf stands twice"
    tree, roots = Tree(), {0: EMPTY_ROOT}
    for number, leaf in enumerate(leaves, 1):
        tree.add(leaf_hash(leaf))
        roots[number] = tree.root()
    origin = region_origin("us-east", "acme")
    keys_of_log = tuple(
        key for key in RegionTrust(own_bundle(folder, load_config(folder.config))).logs if key.name == origin
    )
    for note in told.notes:
        shown = open_checkpoint(note, keys_of_log).checkpoint
        assert roots[shown.size] == shown.root, f"a checkpoint of {shown.size} leaves is of another history"


@pytest.mark.etcd
@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="signals of Linux")
async def test_the_log_outlives_every_home_in_one_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if etcd_binary() is None:
        pytest.skip("no etcd")
    # Founded some time ago, so that there can be identities that are due for renewal.
    monkeypatch.setattr("region_home.now_ms", lambda: now_ms() - 60 * DAY)
    folder = several(tmp_path, len(NAMES), lease=f"{LEASE_S}s")
    config = load_config(folder.config)
    told, pauses = Told(), list[float]()
    issue_identity(folder, config, "operator", "operator", now_ms())
    issue_identity(folder, config, "bridge", "watcher", now_ms())
    renewed = [
        issue_identity(folder, config, "client", f"orders{number}", now_ms() - 25 * DAY)
        for number in range(IDENTITIES)
    ]
    async with running(folder), client(folder) as operator:
        for identity in renewed:
            await operator.put_rights(str(identity.spiffe_id), ["publish acme/ops/orders"])
        work = [
            asyncio.ensure_future(each)
            for each in (put_documents(operator, folder, told), renew(folder, told), watch(folder, told))
        ]
        try:
            await more(told, *work)
            for fault in (kill, pause) * ROUNDS:
                home = await home_of(operator)
                began = time.monotonic()
                repair = await fault(folder, home)
                try:
                    await more(told, *work)
                    pauses.append(time.monotonic() - began)
                finally:
                    await repair()
                await more(told, *work)
        finally:
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        await home_of(operator)

        def settled() -> bool:
            sizes = {note_size((log_of(folder, name).path / "checkpoint").read_bytes()) for name in NAMES}
            return len(sizes) == 1 and sizes.pop() >= told.answers

        await until(settled, 60)
    judge(folder, told)
    print(f"{told.answers} answers, {len(told.notes)} checkpoints; from each fault to more answers: {pauses}")
