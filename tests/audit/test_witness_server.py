"""An outside witness over real HTTP, case by case from the text of c2sp.org/tlog-witness; and what happens to its state."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from witness_certificate import certificate
from witness_logs import NAME, NOW_S, Log, Running, body, post, serving

from audit.merkle import EMPTY_ROOT
from audit.note import Algorithm, Note, NoteSigner, encode_note, parse_note, parse_signatures, verify_note
from audit.tree_head import TreeHead
from audit.witness_admission import parse_clients
from audit.witness_protocol import REQUEST_BYTES_MAX, AddCheckpoint, decode_request, encode_request
from audit.witness_server import HEAD_BYTES_MAX, ServerLimits
from audit.witness_service import WitnessService
from audit.witness_sqlite import WitnessState, init_witness
from felix.errors import Code, CorruptionError, RequestError, UnavailableError
from keys.signing import SigningKey

SECRET = b"SSN-078-05-1120"


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path / "w", Log()) as running:
        yield running


def cosigned(running: Running, reply: bytes, checkpoint: bytes) -> set[Algorithm]:
    """Verify an answer as the specification says a client may: as lines of the note. The algorithms that cosigned."""
    text = parse_note(checkpoint).text
    keys = [signer.key for signer in running.state.signers]
    verified = verify_note(Note(text, parse_signatures(reply)), keys)
    assert all(by.time_s == NOW_S for by in verified)
    return {by.key.algorithm for by in verified}


def test_first_grown_and_same_checkpoints_are_cosigned_with_both_algorithms(witness: Running) -> None:
    log, old = Log(), 0
    for size in (1, 5, 5, 64, 300, 1000):
        reply = post(witness.port, log.request(old, size))
        assert reply.status == 200, reply
        assert cosigned(witness, reply.body, log.note(size)) == {Algorithm.COSIGNATURE, Algorithm.ML_DSA_44}
        old = size


def test_an_empty_tree_is_cosigned_and_its_first_leaves_need_no_proof(witness: Running) -> None:
    log = Log()
    assert post(witness.port, body(0, [], log.note(0))).status == 200
    assert post(witness.port, body(0, [], log.note(3))).status == 200


def test_another_old_size_is_a_conflict_that_names_the_right_one(witness: Running) -> None:
    log = Log()
    assert post(witness.port, log.request(2, 5))[:1] == (409,)
    assert post(witness.port, log.request(0, 5)).status == 200
    for old in (0, 4):
        reply = post(witness.port, log.request(old, 9))
        assert (reply.status, reply.content_type, reply.body) == (409, "text/x.tlog.size", b"5\n")
    # Without a proof, too: a client asks for the size with an old size of zero.
    assert post(witness.port, body(0, [], log.note(9))).body == b"5\n"
    assert post(witness.port, log.request(5, 9)).status == 200
    # A rollback is a conflict, or an old size that is too large.
    assert post(witness.port, log.request(0, 5)).body == b"9\n"
    assert post(witness.port, body(9, [], log.note(5))).status == 400


def test_a_proof_that_does_not_hold_is_unprocessable(witness: Running) -> None:
    log, fork = Log(), Log(word=b"fork")
    assert post(witness.port, log.request(0, 5)).status == 200
    proof = log.proof(5, 9)
    for wrong in (
        body(5, [], log.note(9)),
        body(5, proof[:-1], log.note(9)),
        body(5, [*proof, proof[0]], log.note(9)),
        body(5, proof[::-1], log.note(9)),
        body(5, [b"x" * 32] * len(proof), log.note(9)),
        body(5, fork.proof(5, 9), fork.note(9)),
        body(5, log.proof(4, 9), log.note(9)),
        body(5, proof, log.note(5)),
        body(5, [], fork.note(5)),
    ):
        assert post(witness.port, wrong).status == 422
    assert post(witness.port, body(5, proof, log.note(9))).status == 200


def test_from_the_empty_tree_on_a_proof_is_empty(witness: Running) -> None:
    log = Log()
    assert post(witness.port, body(0, [b"x" * 32], log.note(5))).status == 422
    assert post(witness.port, body(0, [b"x" * 32], log.note(0))).status == 422
    text = TreeHead(log.origin, 0, b"x" * 32).text()
    assert post(witness.port, body(0, [], encode_note(Note(text, (log.signer.sign(text),))))).status == 422
    assert sha256(b"").digest() == EMPTY_ROOT


def test_an_unknown_origin_is_not_found(witness: Running) -> None:
    stranger = Log("stranger.example/log")
    assert post(witness.port, stranger.request(0, 3)).status == 404


def test_a_checkpoint_that_no_trusted_key_signed_is_forbidden(witness: Running) -> None:
    log, other = Log(), Log(seed=9)
    assert post(witness.port, body(0, [], other.note(3))).status == 403
    text = log.head(3).text()
    good, bad = log.signer.sign(text), log.signer.sign(log.head(4).text())
    # A trusted key's line that does not verify makes the note malformed, whatever else signed it.
    assert post(witness.port, body(0, [], encode_note(Note(text, (good, bad))))).status == 403
    assert post(witness.port, body(0, [], encode_note(Note(text, (bad,))))).status == 403
    strange = other.signer.sign(text)
    assert post(witness.port, body(0, [], encode_note(Note(text, (strange, good))))).status == 200


def test_a_log_may_sign_with_ml_dsa_and_have_several_keys(tmp_path: Path) -> None:
    log = Log()
    with serving(tmp_path / "w") as witness:
        assert post(witness.port, log.request(0, 3)).status == 404
        assert witness.state.add_log(log.origin, log.quantum.key)
        assert post(witness.port, log.request(0, 3)).status == 403, "signed with the other key alone"
        text = log.head(3).text()
        note = encode_note(Note(text, (log.quantum.sign(text, 5),)))
        assert post(witness.port, body(0, [], note)).status == 200
        assert witness.state.add_log(log.origin, log.signer.key)
        assert not witness.state.add_log(log.origin, log.signer.key)
        assert post(witness.port, log.request(3, 7)).status == 200


def malformed() -> list[bytes]:
    log = Log()
    note = log.note(5)
    hash_ = b"A" * 43 + b"=\n"
    return [
        b"",
        note,
        b"old 0\n" + note,
        b"\n" + note,
        b"old\n\n" + note,
        b"old  0\n\n" + note,
        b"old 00\n\n" + note,
        b"old 01\n\n" + note,
        b"old -1\n\n" + note,
        b"old +1\n\n" + note,
        b"old 0x1\n\n" + note,
        b"old 99999999999999999999\n\n" + note,
        b"OLD 0\n\n" + note,
        b" old 0\n\n" + note,
        b"old 0\r\n\r\n" + note,
        b"size 0\n\n" + note,
        "old \u0661\n\n".encode() + note,
        b"old 1\nAAAA\n\n" + note,
        b"old 1\n" + b"A" * 42 + b"B=\n\n" + note,
        b"old 1\n" + b" " + hash_ + b"\n" + note,
        b"old 1\n" + hash_ * 64 + b"\n" + note,
        b"old 0\n\n" + note[:-1],
        b"old 0\n\n" + note.partition(b"\n\n")[0],
        b"old 0\n\n" + note.replace(b"\n5\n", b"\n05\n"),
        b"old 0\n\n" + note.replace(b"\n5\n", b"\n\x015\n"),
        b"old 0\n\n\n" + note,
        b"old 6\n\n" + note,
    ]


@pytest.mark.parametrize("data", malformed(), ids=range(len(malformed())))
def test_a_malformed_request_is_bad(witness: Running, data: bytes) -> None:
    assert post(witness.port, data).status == 400
    assert witness.state.log(Log().origin) is not None
    assert witness.state.log(Log().origin).held.size == 0  # type: ignore[union-attr]


def test_extension_lines_and_lines_of_strangers_are_not_kept_nor_handed_on(witness: Running) -> None:
    log = Log()
    head = log.head(3)._replace(extensions=(SECRET.decode(),))
    note = Note(head.text(), (log.signer.sign(head.text()),))
    reply = post(witness.port, body(0, [], encode_note(note)))
    assert reply.status == 400 and b"extension" in reply.body
    text = log.head(3).text()
    stranger = NoteSigner.from_key(SECRET.decode(), SigningKey.from_seed(b"s" * 32), Algorithm.ED25519)
    note = Note(text, (log.signer.sign(text), stranger.sign(text)))
    reply = post(witness.port, body(0, [], encode_note(note)))
    assert reply.status == 200 and SECRET not in reply.body
    served = post(witness.port, b"", f"/{sha256(log.origin.encode()).hexdigest()}/checkpoint", "GET").body
    held = witness.state.folder.state.read_bytes()
    assert SECRET not in served and SECRET not in held


def test_monitors_read_the_newest_checkpoint_with_the_signatures_of_log_and_witness(witness: Running) -> None:
    log = Log()
    path = f"/{sha256(log.origin.encode()).hexdigest()}/checkpoint"
    assert post(witness.port, b"", path, "GET").status == 404
    answered = [post(witness.port, log.request(old, new)).body for old, new in ((0, 3), (3, 9))]
    reply = post(witness.port, b"", path, "GET")
    assert reply.status == 200
    note = parse_note(reply.body)
    keys = [signer.key for signer in witness.state.signers]
    assert note.text == log.head(9).text()
    assert len(verify_note(note, [log.signer.key, *keys])) == 3
    assert set(parse_signatures(answered[1])) < set(note.signatures), "the very ones that were returned"


def test_heads_alone_are_asked_for_and_the_connection_goes_on(witness: Running) -> None:
    log = Log()
    reply = post(witness.port, log.request(0, 3))
    path = f"/{sha256(log.origin.encode()).hexdigest()}/checkpoint"
    whole = post(witness.port, b"", path, "GET").body
    connection = http.client.HTTPConnection("127.0.0.1", witness.port, timeout=30)
    for asked, status, size in ((path, 200, len(whole)), ("/add-checkpoint", 405, None)):
        connection.request("HEAD", asked)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (status, b"")
        assert size is None or answer.getheader("Content-Length") == str(size)
    connection.request("POST", "/add-checkpoint", log.request(3, 3))
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, reply.body)
    connection.close()


def test_other_paths_and_methods_and_a_prefix(tmp_path: Path) -> None:
    with serving(tmp_path / "w", Log(), prefix="/a/witness") as witness:
        assert post(witness.port, Log().request(0, 1), "/a/witness/add-checkpoint").status == 200
        for path, method, status in (
            ("/add-checkpoint", "POST", 404),
            ("/a/witness/add-checkpoint", "GET", 405),
            ("/a/witness/sign-subtree", "POST", 404),
            ("/", "GET", 404),
            (f"/a/witness/{'0' * 64}/checkpoint", "POST", 405),
            (f"/a/witness/{'0' * 64}/checkpoint", "GET", 404),
            (f"/a/witness/../{'0' * 64}/checkpoint", "GET", 404),
        ):
            assert post(witness.port, b"", path, method).status == status, path


def test_a_connection_serves_request_after_request(witness: Running) -> None:
    log = Log()
    connection = http.client.HTTPConnection("127.0.0.1", witness.port, timeout=30)
    for old in range(5):
        connection.request("POST", "/add-checkpoint", log.request(old, old + 1))
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()
    connection.close()


def raw(port: int, data: bytes) -> bytes:
    """Send bytes, read until the witness ends the connection."""
    with socket.create_connection(("127.0.0.1", port), 30) as sock:
        sock.sendall(data)
        out = b""
        while chunk := sock.recv(65_536):
            out += chunk
        return out


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST /add-checkpoint HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (REQUEST_BYTES_MAX + 1), 413),
        (b"POST /add-checkpoint HTTP/1.1\r\nContent-Length: 9999999999999\r\n\r\n", 400),
        (b"POST /add-checkpoint HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /add-checkpoint HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (b"POST /add-checkpoint HTTP/1.1\r\n\r\n", 411),
        (b"POST /add-checkpoint HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * (2 * HEAD_BYTES_MAX) + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nname : value\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: a\nContent-Length: 5\r\n\r\nhello", 400),
        (b"GET / HTTP/1.1\r\nX: a\rContent-Length: 5\r\n\r\nhello", 400),
        (b"POST /add-checkpoint HTTP/1.1\r\nContent-Length: \x0b5\r\n\r\nhello", 400),
        (b"GET /\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 400),
        (b"\x16\x03\x01" + b"\xff" * 100 + b"\r\n\r\n", 400),
    ],
)
def test_what_is_no_bounded_http_request_is_refused_and_the_connection_ends(
    witness: Running, data: bytes, status: int
) -> None:
    answer = raw(witness.port, data)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:80]
    assert post(witness.port, Log().request(0, 1)).status == 200


def test_slow_and_idle_clients_are_let_go_and_connections_are_bounded(tmp_path: Path) -> None:
    limits = ServerLimits(connections=6, connections_of_one=4, request_s=0.5, idle_s=0.5)
    with serving(tmp_path / "w", Log(), limits=limits) as witness:
        assert raw(witness.port, b"") == b"", "idle: let go without a word"
        assert raw(witness.port, b"POST /add-ch").startswith(b"HTTP/1.1 408 ")
        half = b"POST /add-checkpoint HTTP/1.1\r\nContent-Length: 100\r\n\r\nold"
        assert raw(witness.port, half).startswith(b"HTTP/1.1 408 ")
        held = [socket.create_connection(("127.0.0.1", witness.port), 30) for _ in range(8)]
        answers = []
        for sock in held:
            answers.append(sock.recv(100))
            sock.close()
        assert sum(answer.startswith(b"HTTP/1.1 503 ") for answer in answers) == 4
        assert post(witness.port, Log().request(0, 1)).status == 200


def closed(sock: socket.socket) -> bool:
    """Whether the server has closed it."""
    sock.settimeout(0.1)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


def asked_over_tls(port: int, address: str) -> int:
    """The status of an answer to a client at this address; 0 where it is let in no more."""
    context = ssl._create_unverified_context()
    connection = http.client.HTTPSConnection(
        "127.0.0.1", port, timeout=10, context=context, source_address=(address, 0)
    )
    try:
        connection.request("GET", f"/{'0' * 64}/checkpoint")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def asked_over_tls_until_let_in(port: int, address: str) -> int:
    """The status of an answer to a client whose connections before it have ended, as the server gets to know in its own time."""
    return next(status for status in iter(lambda: asked_over_tls(port, address), None) if status)


@pytest.fixture(params=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """`felix witness serve` runs on uvloop where it is there."""
    made: Callable[[], asyncio.AbstractEventLoop] = pytest.importorskip(request.param).new_event_loop
    return made


NewLoop = Callable[[], asyncio.AbstractEventLoop]


def test_connections_count_before_their_handshake_is_done(tmp_path: Path, new_loop: NewLoop) -> None:
    limits = ServerLimits(connections=6, connections_of_one=4, request_s=1.0)
    with serving(
        tmp_path / "w", Log(), limits=limits, tls=certificate(tmp_path), new_loop=new_loop
    ) as witness:
        held = [socket.create_connection(("127.0.0.1", witness.port), 30) for _ in range(40)]
        held[0].sendall(b"\x16\x03\x01")
        assert sum(not closed(each) for each in held) == 4
        assert asked_over_tls(witness.port, "127.0.0.1") == 0
        assert asked_over_tls(witness.port, "127.0.0.2") == 404, "nobody has them all"
        for each in held:
            each.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b"", "no handshake in time"
            each.close()
        for _ in range(50):
            assert asked_over_tls_until_let_in(witness.port, "127.0.0.1") == 404


@pytest.mark.parametrize("named", [False, True])
def test_strangers_who_have_all_connections_keep_no_client_out(
    tmp_path: Path, new_loop: NewLoop, named: bool
) -> None:
    limits = ServerLimits(connections=32, connections_of_one=8, connections_of_clients=4)
    clients = parse_clients(["127.0.9.0/24"]) if named else ()
    with serving(
        tmp_path / "w", Log(), limits=limits, tls=certificate(tmp_path), new_loop=new_loop, clients=clients
    ) as witness:
        strangers = [f"127.0.{at % 4}.{at}" for at in range(1, 65)]
        held = [
            socket.create_connection(("127.0.0.1", witness.port), 30, source_address=(each, 0))
            for each in strangers
        ]
        for _ in range(20):
            assert asked_over_tls(witness.port, "127.0.9.9") == 404
        assert sum(not closed(each) for each in held) >= (28 if named else 20)
        for each in held:
            each.close()


def test_a_connection_counts_until_the_other_end_has_closed_it(tmp_path: Path, new_loop: NewLoop) -> None:
    limits = ServerLimits(connections_of_one=2, request_s=1.0)
    with serving(
        tmp_path / "w", Log(), limits=limits, tls=certificate(tmp_path), new_loop=new_loop
    ) as witness:
        held = []
        for _ in range(2):
            sock = socket.create_connection(("127.0.0.1", witness.port), 30)
            held.append(ssl._create_unverified_context().wrap_socket(sock))
            held[-1].sendall(b"nonsense\r\n\r\n")
            assert held[-1].recv(100).startswith(b"HTTP/1.1 400 ")
        # They do not answer that the server closes.
        assert asked_over_tls(witness.port, "127.0.0.1") == 0
        for each in held:
            each.settimeout(10)
            with contextlib.suppress(OSError):
                while each.recv(100):
                    pass
            each.close()
        for _ in range(100):
            if (status := asked_over_tls(witness.port, "127.0.0.1")) == 404:
                break
        assert status == 404


def at_once(port: int, requests: list[bytes]) -> list[tuple[int, int]]:
    """Send all of them at one moment. Whether each was of an even or odd place, and its status."""
    gate, replies = threading.Barrier(len(requests)), list[tuple[int, int]]()

    def submit(at: int, data: bytes) -> None:
        gate.wait(30)
        replies.append((at % 2, post(port, data).status))

    threads = [threading.Thread(target=submit, args=each) for each in enumerate(requests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return replies


def test_of_two_clients_with_different_roots_for_one_size_exactly_one_wins(tmp_path: Path) -> None:
    rounds = 10
    with serving(tmp_path / "w") as witness:
        for number in range(rounds):
            one = Log(f"log.example/{number}")
            two = Log(f"log.example/{number}", word=b"fork")
            witness.state.add_log(one.origin, one.signer.key)
            assert post(witness.port, one.request(0, 0)).status == 200
            replies = at_once(witness.port, [log.request(0, 7) for log in (one, two)] * 3)
            won = {which for which, status in replies if status == 200}
            assert len(replies) == 6 and len(won) == 1, "no root but one was cosigned for that size"
            held = witness.state.log(one.origin)
            assert held is not None and held.held.root == (one, two)[won.pop()].head(7).root


def test_two_processes_on_one_state_cannot_store_two_roots(tmp_path: Path) -> None:
    """The transaction keeps it, also without the lock and the one worker thread."""
    log, fork = Log(), Log(word=b"fork")
    init_witness(tmp_path / "w", NAME)
    one, two = WitnessState.open(tmp_path / "w"), WitnessState.open(tmp_path / "w")
    one.add_log(log.origin, log.signer.key)
    start = two.log(log.origin)
    assert start is not None
    one.advance(log.origin, start.held, 7, log.head(7).root, b"")
    with pytest.raises(Exception, match="has 7 leaves"):
        two.advance(log.origin, start.held, 7, fork.head(7).root, b"")
    one.close()
    two.close()


# -- the state -----------------------------------------------------------------------------------------


def test_what_was_cosigned_holds_after_a_restart(tmp_path: Path) -> None:
    log = Log()
    with serving(tmp_path / "w", log) as witness:
        assert post(witness.port, log.request(0, 5)).status == 200
    with serving(tmp_path / "w") as witness:
        assert post(witness.port, body(0, [], Log(word=b"fork").note(7))).body == b"5\n"
        assert post(witness.port, log.request(5, 9)).status == 200


def test_one_process_serves(tmp_path: Path) -> None:
    with serving(tmp_path / "w"), pytest.raises(RequestError, match="another process"):
        WitnessState.open(tmp_path / "w", serve=True)


def test_a_lost_exchanged_or_older_state_is_refused(tmp_path: Path) -> None:
    folder, log = tmp_path / "w", Log()
    init_witness(folder, NAME)
    shutil.copytree(folder, tmp_path / "at-first")
    with serving(folder, log) as witness:
        assert post(witness.port, log.request(0, 5)).status == 200
    state = folder / "state.db"
    kept = state.read_bytes()

    def refused(match: str) -> None:
        with pytest.raises(CorruptionError, match=match) as caught:
            WitnessState.open(folder, serve=True)
        assert caught.value.code is Code.ROLLED_BACK and "new witness" in str(caught.value.hint)

    state.unlink()
    refused("is lost")
    state.write_bytes(b"")
    refused("cannot be read")
    state.write_bytes(kept[:4096])
    refused("cannot be read")
    shutil.copy(tmp_path / "at-first" / "state.db", state)
    refused("older one was put back")
    init_witness(tmp_path / "other", NAME)
    shutil.copy(tmp_path / "other" / "state.db", state)
    refused("not of the witness")
    state.write_bytes(kept)
    shutil.copy(tmp_path / "other" / "ed25519.pem", folder / "ed25519.pem")
    refused("with these keys")


def test_a_crash_between_the_two_ids_does_not_lock_the_witness_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "w"
    init_witness(folder, NAME)

    def fail(*args: object) -> None:
        raise OSError(5, "power cut")

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr("audit.witness_sqlite.replace_file", fail)
            with pytest.raises(OSError, match="power cut"):
                WitnessState.open(folder, serve=True)
    WitnessState.open(folder, serve=True).close()


def test_a_witness_is_made_once(tmp_path: Path) -> None:
    init_witness(tmp_path / "w", NAME)
    assert (tmp_path / "w" / "state.db").stat().st_mode & 0o077 == 0
    with pytest.raises(RequestError, match="not empty"):
        init_witness(tmp_path / "w", NAME)
    init_witness(tmp_path / "w #1?mode=ro", NAME)
    WitnessState.open(tmp_path / "w #1?mode=ro", serve=True).close()
    with pytest.raises(RequestError, match="is not the folder of a witness"):
        WitnessState.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


_KILLED = """
import os, signal, sys
from pathlib import Path
from audit.note import NoteSigner
from audit.witness_service import WitnessService
from audit.witness_sqlite import WitnessState

state = WitnessState.open(Path(sys.argv[1]), serve=True)
def die(message):
    os.kill(os.getpid(), signal.SIGKILL)
dying = tuple(NoteSigner(signer.key, die) for signer in state.signers)
WitnessService(state, lambda: 1, signers=dying).add_checkpoint(sys.stdin.buffer.read())
"""


def test_killed_between_storing_and_signing_it_signs_nothing_else_for_that_size(tmp_path: Path) -> None:
    folder, log, fork = tmp_path / "w", Log(), Log(word=b"fork")
    with serving(folder, log) as witness:
        assert post(witness.port, log.request(0, 5)).status == 200
    process = subprocess.run(
        [sys.executable, "-c", _KILLED, str(folder)],
        input=log.request(5, 9),
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL
    with serving(folder) as witness:
        assert post(witness.port, log.request(5, 9)).body == b"9\n", "it was stored"
        assert post(witness.port, body(9, [], fork.note(9))).status == 422
        assert post(witness.port, body(5, fork.proof(5, 9), fork.note(9))).status == 409
        # The log itself gets its cosignature: the same checkpoint once more, from its own size.
        assert post(witness.port, log.request(9, 9)).status == 200


# -- the codec -----------------------------------------------------------------------------------------

HASHES = st.lists(st.binary(min_size=32, max_size=32), max_size=63).map(tuple)


@given(st.integers(0, 2**63 - 1), HASHES, st.binary(max_size=300))
def test_requests_go_round(old: int, proof: tuple[bytes, ...], checkpoint: bytes) -> None:
    request = AddCheckpoint(old, proof, checkpoint)
    assert decode_request(encode_request(request)) == request
    assert encode_request(request) == body(old, list(proof), checkpoint)


@given(
    st.binary(max_size=300), st.sampled_from([b"", b"old 1\n", b"old 1\n\n", b"old 1\n" + b"A" * 43 + b"=\n"])
)
def test_arbitrary_bytes_are_a_request_or_refused(data: bytes, before: bytes) -> None:
    try:
        request = decode_request(before + data)
    except RequestError:
        return
    assert encode_request(request) == before + data


class FullDisk(sqlite3.Connection):
    """What changes something finds no room, as long as `is_full`."""

    is_full = True

    def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:
        if FullDisk.is_full and sql.startswith(("UPDATE", "COMMIT")):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return super().execute(sql, *parameters)  # type: ignore[arg-type]


def full_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "audit.witness_sqlite._connect",
        lambda path: sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=FullDisk),
    )


def test_one_that_starts_on_a_full_disk_is_not_told_to_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_witness(tmp_path / "w", NAME)
    full_state(tmp_path / "w", monkeypatch)
    monkeypatch.setattr(FullDisk, "is_full", True)
    with pytest.raises(UnavailableError, match="is full") as caught:
        WitnessState.open(tmp_path / "w", serve=True)
    assert caught.value.code is Code.DISK_FULL
    monkeypatch.setattr(FullDisk, "is_full", False)
    WitnessState.open(tmp_path / "w", serve=True).close()


class FailingDisk(sqlite3.Connection):
    """The disk fails what begins so."""

    fails: tuple[str, ...] = ()

    def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:
        if sql.startswith(FailingDisk.fails or "-"):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return super().execute(sql, *parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("fails", ["SELECT", "UPDATE", "COMMIT", "BEGIN"])
def test_a_disk_that_fails_for_a_moment_is_not_taken_for_a_lost_state_and_cosigns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    init_witness(tmp_path / "w", NAME)
    monkeypatch.setattr(
        "audit.witness_sqlite._connect",
        lambda path: sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, factory=FailingDisk
        ),
    )
    monkeypatch.setattr(FailingDisk, "fails", (fails,))
    with pytest.raises(UnavailableError) as caught:
        WitnessState.open(tmp_path / "w", serve=True)
    assert caught.value.code is Code.UNAVAILABLE
    monkeypatch.setattr(FailingDisk, "fails", ())
    state, log = WitnessState.open(tmp_path / "w", serve=True), Log()
    state.add_log(log.origin, log.signer.key)
    service = WitnessService(state, lambda: NOW_S)
    assert service.add_checkpoint(log.request(0, 3)).status == 200
    if fails != "SELECT":
        monkeypatch.setattr(FailingDisk, "fails", (fails,))
        assert service.add_checkpoint(log.request(3, 7)).status == 503
        monkeypatch.setattr(FailingDisk, "fails", ())
    held = state.log(log.origin)
    assert held is not None and held.held.size == 3
    assert service.add_checkpoint(log.request(3, 7)).status == 200
    state.close()


def test_a_full_disk_cosigns_nothing_is_told_once_and_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    init_witness(tmp_path / "w", NAME)
    full_state(tmp_path / "w", monkeypatch)
    monkeypatch.setattr(FullDisk, "is_full", False)
    state, log = WitnessState.open(tmp_path / "w", serve=True), Log()
    state.add_log(log.origin, log.signer.key)
    service = WitnessService(state, lambda: NOW_S)
    assert service.add_checkpoint(log.request(0, 3)).status == 200
    monkeypatch.setattr(FullDisk, "is_full", True)
    with caplog.at_level(logging.INFO, logger="felix.audit.witness"):
        for _ in range(5):
            answer = service.add_checkpoint(log.request(3, 7))
            assert (answer.status, b"is full" in answer.body) == (503, True)
        held = state.log(log.origin)
        assert held is not None
        assert held.held.size == 3
        monkeypatch.setattr(FullDisk, "is_full", False)
        assert service.add_checkpoint(log.request(3, 7)).status == 200
    assert len(caplog.records) == 2
    state.close()


@pytest.mark.parametrize("fails", ["SELECT", "UPDATE", "COMMIT", "BEGIN"])
def test_a_disk_that_does_not_answer_cosigns_nothing_is_told_once_and_goes_on_by_itself(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    init_witness(tmp_path / "w", NAME)
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *where, **how: connect(*where, **{**how, "factory": FailingDisk})
    )
    state, log = WitnessState.open(tmp_path / "w", serve=True), Log()
    state.add_log(log.origin, log.signer.key)
    service = WitnessService(state, lambda: NOW_S)
    assert service.add_checkpoint(log.request(0, 3)).status == 200
    monkeypatch.setattr(FailingDisk, "fails", (fails,))
    with caplog.at_level(logging.INFO, logger="felix.audit.witness"):
        for _ in range(5):
            answer = service.add_checkpoint(log.request(3, 7))
            assert (answer.status, b"cannot be used now: disk I/O error" in answer.body) == (503, True)
        monkeypatch.setattr(FailingDisk, "fails", ())
        assert service.add_checkpoint(log.request(3, 7)).status == 200
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 2, said
    state.close()


class UnreadableDisk(sqlite3.Connection):
    """The disk does not read, so often; SQLite calls that damage."""

    times = 0

    def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:
        if UnreadableDisk.times and sql.startswith("SELECT"):
            UnreadableDisk.times -= 1
            error = sqlite3.DatabaseError("database disk image is malformed")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        return super().execute(sql, *parameters)  # type: ignore[arg-type]


def test_a_disk_that_cannot_read_for_a_moment_is_not_taken_for_a_damaged_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init_witness(tmp_path / "w", NAME)
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *where, **how: connect(*where, **{**how, "factory": UnreadableDisk})
    )
    monkeypatch.setattr(UnreadableDisk, "times", 1)
    state, log = WitnessState.open(tmp_path / "w", serve=True), Log()
    state.add_log(log.origin, log.signer.key)
    service = WitnessService(state, lambda: NOW_S)
    assert service.add_checkpoint(log.request(0, 3)).status == 200
    monkeypatch.setattr(UnreadableDisk, "times", 1)
    assert service.add_checkpoint(log.request(3, 7)).status == 503
    assert service.add_checkpoint(log.request(3, 7)).status == 200
    state.close()
    # For as long as it does not give the file to anybody, that is why.
    monkeypatch.setattr(UnreadableDisk, "times", 1_000)
    monkeypatch.setattr("audit.witness_sqlite._reads", lambda path: False)
    with pytest.raises(UnavailableError, match="cannot be used now"):
        WitnessState.open(tmp_path / "w", serve=True)
    monkeypatch.setattr("audit.witness_sqlite._reads", lambda path: True)
    with pytest.raises(CorruptionError, match="cannot be read"):
        WitnessState.open(tmp_path / "w", serve=True)
