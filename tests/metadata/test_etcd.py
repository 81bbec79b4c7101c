"""What only the etcd store must stand: members that die, hang or move, TLS, credentials, compaction."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aetcd import rpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from etcd_process import EtcdProcess, etcd, running_members
from hanging_disk import hanging_disk, why_no_disk
from ports import claim_port

from felix.errors import Code, RequestError, UnavailableError
from region.metadata.etcd import (
    REQUEST_MS_MAX,
    EtcdConfig,
    EtcdStore,
    EtcdTls,
    _Answers,
    known_bad_version,
)
from region.metadata.port import CompactedError, OutcomeUnknownError
from region.metadata.transaction import Delete, Entry, ModRevision, Put

__all__ = ["etcd"]  # the fixture, by its name

pytestmark = pytest.mark.etcd
PATIENCE_S = 120
DISK_S = 30
"""Without a comparison of revisions a watch stays where a disk hangs for as long as that does."""


@asynccontextmanager
async def proxy(target: str) -> AsyncIterator[tuple[str, asyncio.Server, list[asyncio.StreamWriter]]]:
    """A TCP relay in front of an etcd member, so that one of two ways to it can be cut."""
    host, port = target.split("://")[1].split(":")
    writers: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward = await asyncio.open_connection(host, int(port))
        writers.extend((writer, onward))
        await asyncio.gather(copy(reader, onward), copy(onward_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", server, writers
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def until_it_answers(store: EtcdStore, key: str) -> Entry | None:
    """Read as a patient caller does: again, as long as the store says that it is away."""
    while True:
        try:
            return await store.get(key)
        except UnavailableError:
            await asyncio.sleep(0.05)


async def test_a_dead_endpoint_is_passed_over(etcd: EtcdProcess) -> None:
    dead = f"http://127.0.0.1:{claim_port()}"
    async with await EtcdStore.open(EtcdConfig((dead, etcd.endpoint))) as store:
        assert (await store.transact([], [Put("/a", b"1")])).succeeded
        assert list(await store.versions()) == [etcd.endpoint]


async def test_requests_watches_and_leases_move_to_another_endpoint(etcd: EtcdProcess) -> None:
    async with (
        proxy(etcd.endpoint) as (address, server, writers),
        await EtcdStore.open(EtcdConfig((address, etcd.endpoint))) as store,
    ):
        first = (await store.transact([], [Put("/move/0", b"")])).revision
        lease = await store.grant(2_000)
        changes = store.watch("/move/", first)
        async with aclosing(changes), asyncio.timeout(PATIENCE_S):
            seen = [(await anext(changes)).revision]
            assert len(writers) == 2, "everything so far went by way of the relay"
            server.close()
            for writer in writers:
                writer.transport.abort()
            # A read moves on by itself; a write caught in the cut would be told that its outcome is open.
            assert await store.get("/move/0") is not None
            written = [first] + [
                (await store.transact([], [Put(f"/move/{number}", b"")])).revision for number in range(1, 6)
            ]
            while len(seen) < len(written):
                seen.append((await anext(changes)).revision)
        assert seen == written
        await lease.renew()
        assert not lease.lost.is_set()


@pytest.mark.fault
async def test_a_killed_etcd_is_reported_with_its_endpoints_and_used_again_once_it_is_back(
    tmp_path: Path,
) -> None:
    process = EtcdProcess(tmp_path)
    process.start()
    try:
        async with await EtcdStore.open(EtcdConfig((process.endpoint,), request_ms=500)) as store:
            await store.transact([], [Put("/a", b"1")])
            lease = await store.grant(2_000)
            process.kill()
            with pytest.raises(UnavailableError) as caught:
                await store.get("/a")
            assert process.endpoint in caught.value.hint and caught.value.retry_after_ms
            with pytest.raises(UnavailableError):
                await store.transact([], [Put("/a", b"2")])
            async with asyncio.timeout(PATIENCE_S):
                await lease.lost.wait()
            assert "No renewal reached the metadata store" in lease.reason
            await asyncio.to_thread(process.start)
            async with asyncio.timeout(PATIENCE_S):
                entry = await until_it_answers(store, "/a")
            assert entry is not None and entry.value == b"1"
            assert (await store.transact([], [Put("/a", b"3")])).succeeded
    finally:
        process.stop()


@pytest.mark.fault
async def test_a_hanging_etcd_leaves_a_writes_outcome_open_and_a_read_unavailable(tmp_path: Path) -> None:
    process = EtcdProcess(tmp_path)
    process.start()
    try:
        async with await EtcdStore.open(EtcdConfig((process.endpoint,), request_ms=500)) as store:
            await store.transact([], [Put("/a", b"1")])
            process.freeze()
            with pytest.raises(OutcomeUnknownError, match="may have happened or not") as caught:
                await store.transact([], [Put("/a", b"2")])
            assert process.endpoint in caught.value.hint
            with pytest.raises(UnavailableError, match="no answer in"):
                await store.get("/a")
            process.thaw()
            async with asyncio.timeout(PATIENCE_S):
                entry = await until_it_answers(store, "/a")
            assert entry is not None and entry.value in (b"1", b"2")
    finally:
        process.stop()


def members_of(etcd: Sequence[EtcdProcess]) -> EtcdConfig:
    return EtcdConfig(tuple(each.endpoint for each in etcd))


async def first_write(store: EtcdStore, key: str) -> int:
    """Written once, as soon as members that were just started have elected a leader. At which revision."""
    while True:
        try:
            written = await store.transact([ModRevision(key, 0)], [Put(key, b"")])
            if written.succeeded:
                return written.revision
            # One before, whose answer was lost.
            entry = await store.get(key)
            assert entry is not None
            return entry.mod_revision
        except UnavailableError:
            await asyncio.sleep(0.05)


@pytest.mark.fault
@pytest.mark.parametrize("at", range(3))
async def test_a_watch_leaves_a_member_that_hangs_and_misses_nothing(tmp_path: Path, at: int) -> None:
    with running_members(tmp_path) as etcd:
        hangs, others = etcd[at], [each for each in etcd if each is not etcd[at]]
        async with (
            await EtcdStore.open(members_of([hangs, *others])) as store,
            await EtcdStore.open(members_of(others)) as other,
            asyncio.timeout(PATIENCE_S),
        ):
            written = [await first_write(other, "/hang/0")]
            changes = store.watch("/hang/", written[0])
            async with aclosing(changes):
                seen = [(await anext(changes)).revision]
                hangs.freeze()
                # Nothing else asks the member that hangs: the watch finds it out alone.
                for number in range(1, 4):
                    written.append(await first_write(other, f"/hang/{number}"))
                    seen.append((await anext(changes)).revision)
                hangs.thaw()
                written.append(await first_write(other, "/hang/last"))
                seen.append((await anext(changes)).revision)
            assert seen == written


@pytest.mark.fault
@pytest.mark.parametrize("at", range(3))
async def test_a_watch_leaves_a_member_whose_disk_hangs_and_misses_nothing(tmp_path: Path, at: int) -> None:
    """It answers what it is asked of itself, and hears of nothing new."""
    if reason := why_no_disk():
        pytest.skip(reason)
    with hanging_disk(tmp_path / f"e{at}" / "data") as disk, running_members(tmp_path) as etcd:
        others = [each for each in etcd if each is not etcd[at]]
        async with (
            await EtcdStore.open(members_of([etcd[at], *others])) as store,
            await EtcdStore.open(members_of(others)) as other,
            asyncio.timeout(PATIENCE_S),
        ):
            written = [await first_write(other, "/disk/0")]
            # Whichever took the first connection, while they elected their leader.
            store._current = 0
            changes = store.watch("/disk/", written[0])
            async with aclosing(changes):
                seen = [(await anext(changes)).revision]
                try:
                    disk.hang()
                    async with asyncio.timeout(DISK_S):
                        for number in range(1, 4):
                            written.append(await first_write(other, f"/disk/{number}"))
                            seen.append((await anext(changes)).revision)
                    # In the end its process may stand still as a whole.
                    left = store._endpoints[0]
                    assert not left.watches and (left.is_behind or left.silent_since_ms)
                finally:
                    disk.go_on()
                written.append(await first_write(other, "/disk/last"))
                seen.append((await anext(changes)).revision)
                while store._endpoints[0].is_behind:  # noqa: ASYNC110 - no event is set for it
                    await asyncio.sleep(0.05)
            assert seen == written


@pytest.mark.fault
async def test_a_member_that_hangs_is_named_and_used_again_once_it_goes_on(tmp_path: Path) -> None:
    with running_members(tmp_path) as etcd:
        first, second = etcd[:2]
        async with (
            await EtcdStore.open(members_of([first, second])) as store,
            asyncio.timeout(PATIENCE_S),
        ):
            await first_write(store, "/used/0")
            lease = await store.grant(60_000)
            for hangs, number in ((first, 1), (second, 2)):
                hangs.freeze()
                await store.get("/used/0")
                await lease.renew()
                await first_write(store, f"/used/{number}")
                while list(store.silent_members()) != [hangs.endpoint]:  # noqa: ASYNC110 - no event is set for it
                    await asyncio.sleep(0.05)
                hangs.thaw()
                while store.silent_members():  # noqa: ASYNC110 - the same
                    await asyncio.sleep(0.05)


@pytest.mark.fault
async def test_a_write_does_not_wait_for_a_member_that_a_watch_found_to_hang(tmp_path: Path) -> None:
    with running_members(tmp_path) as etcd:
        # Else it would wait for so long.
        config = replace(members_of(etcd), request_ms=REQUEST_MS_MAX)
        async with await EtcdStore.open(config) as store, asyncio.timeout(REQUEST_MS_MAX // 2 / 1_000):
            changes = store.watch("/write/", await first_write(store, "/write/0"))
            async with aclosing(changes):
                await anext(changes)
                watching = asyncio.ensure_future(anext(changes))
                # Whichever it is: the first ones may not have answered while they elected their leader, and writes may have gone on from it since.
                (watched,) = (at for at, each in enumerate(store._endpoints) if each.watches)
                store._current = watched
                etcd[watched].freeze()
                with pytest.raises(OutcomeUnknownError):
                    await store.transact([], [Put("/write/1", b"")])
                written = await first_write(store, "/write/2")
                assert (await watching).revision <= written


class _Quiet:
    """A watch at a member that is there, and that says no more than `answers`: an older etcd need not say how far an idle one is."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[object] = asyncio.Queue()
        self.asked = asyncio.Semaphore(0)

    async def read(self) -> object:
        return await self.answers.get()

    async def write(self, request: object) -> None:
        self.asked.release()


async def test_a_quiet_watch_stays_at_a_member_that_answers_other_questions(etcd: EtcdProcess) -> None:
    async with await EtcdStore.open(EtcdConfig((etcd.endpoint,))) as store, asyncio.timeout(PATIENCE_S):
        await store.get("/quiet")
        watch = _Quiet()
        answering = asyncio.ensure_future(_Answers(store._endpoints[0], watch).next())
        for _ in range(3):
            await watch.asked.acquire()
        assert not answering.done()
        said = rpc.WatchResponse(watch_id=1)
        watch.answers.put_nowait(said)
        assert await answering is said


async def test_a_deletion_at_the_compacted_revision_itself_is_not_passed_over(etcd: EtcdProcess) -> None:
    """etcd would start a watch at exactly the compacted revision and keep silent about the deletion there."""
    async with await EtcdStore.open(EtcdConfig((etcd.endpoint,))) as store:
        await store.transact([], [Put("/edge", b"")])
        gone = (await store.transact([], [Delete("/edge")])).revision
        await store.transact([], [Put("/edge/other", b"")])
        await asyncio.to_thread(etcd.ctl, "compact", str(gone))
        changes = store.watch("/edge", gone)
        with pytest.raises(CompactedError):
            async with asyncio.timeout(PATIENCE_S):
                await anext(changes)


async def test_a_watch_that_was_cut_off_while_history_was_compacted_says_so(etcd: EtcdProcess) -> None:
    async with (
        proxy(etcd.endpoint) as (address, server, writers),
        await EtcdStore.open(EtcdConfig((address,))) as store,
        await EtcdStore.open(EtcdConfig((etcd.endpoint,))) as other,
    ):
        first = (await other.transact([], [Put("/cut/a", b"")])).revision
        changes = store.watch("/cut/", first)
        await anext(changes)
        port = server.sockets[0].getsockname()[1]
        server.close()
        for writer in writers:
            writer.transport.abort()
        await other.transact([], [Delete("/cut/a")])
        last = (await other.transact([], [Put("/cut/b", b"")])).revision
        await asyncio.to_thread(etcd.ctl, "compact", str(last))
        host, etcd_port = etcd.endpoint.split("://")[1].split(":")

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            onward_reader, onward = await asyncio.open_connection(host, int(etcd_port))

            async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
                while data := await source.read(65_536):
                    target.write(data)
                target.close()

            await asyncio.gather(copy(reader, onward), copy(onward_reader, writer), return_exceptions=True)

        again = await asyncio.start_server(relay, "127.0.0.1", port)
        with pytest.raises(CompactedError):
            async with asyncio.timeout(PATIENCE_S):
                await anext(changes)
        again.close()


def certificate(folder: Path) -> EtcdTls:
    """An authority and one certificate for 127.0.0.1, good for both ends."""
    now = datetime.now(UTC)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])

    def build(name: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(ca_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + timedelta(hours=1))
        )

    ca = build(ca_name, ca_key.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=None), critical=True
    )
    leaf = build(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "etcd")]), key.public_key()
    ).add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
    )
    tls = EtcdTls(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    assert tls.authority and tls.certificate and tls.key
    tls.authority.write_bytes(ca.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    tls.certificate.write_bytes(leaf.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    tls.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return tls


async def test_tls_both_ways_and_no_other_authority(tmp_path: Path) -> None:
    tls = certificate(tmp_path)
    process = EtcdProcess(
        tmp_path,
        f"--cert-file={tls.certificate}",
        f"--key-file={tls.key}",
        f"--trusted-ca-file={tls.authority}",
        "--client-cert-auth",
        scheme="https",
    )
    process.start()
    try:
        async with await EtcdStore.open(EtcdConfig((process.endpoint,), tls=tls)) as store:
            assert (await store.transact([], [Put("/a", b"1")])).succeeded
            assert await store.versions()
        (tmp_path / "other").mkdir()
        other = certificate(tmp_path / "other")
        for wrong in (other, EtcdTls(authority=tls.authority)):
            async with await EtcdStore.open(
                EtcdConfig((process.endpoint,), tls=wrong, request_ms=500)
            ) as store:
                with pytest.raises(UnavailableError, match="metadata store"):
                    await store.get("/a")
    finally:
        process.stop()


async def test_credentials_wrong_missing_narrow_and_run_out(tmp_path: Path) -> None:
    process = EtcdProcess(tmp_path)
    process.start()
    try:

        def prepare() -> None:
            process.ctl("user", "add", "root:root-secret")
            process.ctl("user", "grant-role", "root", "root")
            process.ctl("user", "add", "broker:secret")
            process.ctl("role", "add", "felix")
            process.ctl("role", "grant-permission", "felix", "--prefix=true", "readwrite", "/felix/1/")
            process.ctl("user", "grant-role", "broker", "felix")
            process.ctl("auth", "enable")

        await asyncio.to_thread(prepare)
        one = (process.endpoint,)
        async with await EtcdStore.open(EtcdConfig(one, user="broker", password="secret")) as store:
            first = (await store.transact([], [Put("/felix/1/a", b"1")])).revision
            changes = store.watch("/felix/1/", first)
            async with asyncio.timeout(PATIENCE_S), aclosing(changes):
                assert (await anext(changes)).revision == first
            for refused in (store.get("/other"), store.transact([], [Put("/other", b"")])):
                with pytest.raises(RequestError, match="does not let this broker") as caught:
                    await refused
                assert caught.value.code is Code.FORBIDDEN
            store._endpoints[0].token = "one.that.ran.out"
            assert (await store.transact([], [Put("/felix/1/a", b"2")])).succeeded, "with a new token"
        async with await EtcdStore.open(EtcdConfig(one, user="broker", password="wrong")) as store:
            with pytest.raises(RequestError, match="refused the user 'broker'") as caught:
                await store.get("/felix/1/a")
            assert caught.value.code is Code.IDENTITY_REFUSED
        async with await EtcdStore.open(EtcdConfig(one)) as store:
            with pytest.raises(RequestError, match="asks for credentials"):
                await store.get("/felix/1/a")
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"endpoints": ()}, "No etcd endpoint"),
        ({"endpoints": ("etcd-0",)}, "'etcd-0' is not an etcd endpoint"),
        ({"endpoints": ("http://etcd-0:70000",)}, "is not an etcd endpoint"),
        ({"endpoints": ("http://a:1", "https://b:1")}, "mix http and https"),
        ({"endpoints": ("http://a:1",), "tls": EtcdTls()}, "endpoints are http"),
        ({"endpoints": ("https://a:1",), "tls": EtcdTls(key=Path("k"))}, "needs its key"),
        ({"endpoints": ("https://a:1",), "user": "u"}, "a user and a password"),
        ({"endpoints": ("https://a:1",), "request_ms": 1}, "out of bounds"),
    ],
)
def test_a_wrong_configuration_is_refused(config: dict[str, object], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as caught:
        EtcdConfig(**config)  # type: ignore[arg-type]
    assert caught.value.code is Code.CONFIG_INVALID


async def test_a_missing_tls_file_is_named_and_a_password_never_shown() -> None:
    config = EtcdConfig(("https://a:1",), tls=EtcdTls(Path("/nowhere/ca.pem")), user="u", password="hush")
    assert "hush" not in repr(config)
    with pytest.raises(RequestError, match=r"/nowhere/ca\.pem"):
        await EtcdStore.open(config)


def test_versions_that_lose_consistency_are_named() -> None:
    for version in ("3.5.0", "3.5.1", "3.5.2", "3.5.2-rc.1"):
        sentence = known_bad_version(version)
        assert sentence is not None and version in sentence and "Upgrade" in sentence
    for version in ("3.4.0", "3.5.3", "3.5.10", "3.5.21", "3.6.0", "13.5.1", ""):
        assert known_bad_version(version) is None
