"""A log submits its checkpoints to outside witnesses over real HTTP: cosigned, catching up, failing, lying, stopping."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from audit_log import Link, log_signer
from witness_certificate import certificate
from witness_logs import Log, Running, post, serving

from audit.checkpoint import open_checkpoint
from audit.lag import Lag
from audit.leaf import Leaf
from audit.note import Algorithm, VerifierKey, encode_note, parse_note
from audit.submission import Submission, Submissions, SubmissionStatus
from audit.trail import Trail, TrailSettings
from audit.witness_client import Behind, Cosigned, WitnessClient, WitnessTarget, check_url
from audit.witness_protocol import AddCheckpoint
from felix.errors import FelixError, RequestError, TamperError, UnavailableError

BRISK = TrailSettings(checkpoint_interval_ms=20)


def keys(running: Running) -> tuple[VerifierKey, ...]:
    return tuple(signer.key for signer in running.state.signers)


def target(running: Running) -> WitnessTarget:
    return WitnessTarget(f"http://127.0.0.1:{running.port}", keys(running))


def append(trail: Trail, leaves: int = 1, leaf: Leaf | None = None) -> None:
    ended = threading.Event()
    trail.append_nowait([leaf or Link().grant()] * leaves, lambda index, error: ended.set())
    assert ended.wait(30)


def until(true: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + 60
    while not true():
        assert time.monotonic() < limit, what
        time.sleep(0.02)


@contextmanager
def witnessed_log(folder: Path, leaves: int) -> Iterator[tuple[Trail, Running]]:
    """A log of so many leaves, all checkpointed, and a witness that takes it."""
    with (
        closing(Trail.open(folder / "log", log_signer(), settings=BRISK)) as trail,
        serving(folder / "w") as running,
    ):
        running.state.add_log(trail.key.name, trail.key)
        append(trail, leaves)
        trail.publish()
        yield trail, running


@contextmanager
def submitting(trail: Trail, *targets: WitnessTarget) -> Iterator[Submissions]:
    submissions = Submissions(trail, targets)
    for each in submissions._all:
        each._poll_s = each._pause_s = 0.05
    submissions.start()
    try:
        yield submissions
    finally:
        submissions.stop()


def test_checkpoints_are_cosigned_by_all_witnesses_as_the_log_grows(tmp_path: Path) -> None:
    log = Log(log_signer().key.name)
    with (
        closing(Trail.open(tmp_path / "log", log_signer(), settings=BRISK)) as trail,
        serving(tmp_path / "w1") as one,
        serving(tmp_path / "w2", name="witness.example/w2") as two,
    ):
        for running in (one, two):
            running.state.add_log(log.origin, log_signer().key)
        trail.checkpoints.expect_cosigners(2)
        with submitting(trail, target(one), target(two)) as submissions:
            for size in (1, 2, 5, 300):
                append(trail, size - trail.status().durable)
                until(lambda: all(each.size == size for each in submissions.status()), f"{size} leaves")  # noqa: B023
        both = open_checkpoint(trail.checkpoint(), trail.keys, (*keys(one), *keys(two)))
        assert {by.key for by in both.cosigned} == {*keys(one), *keys(two)}, "one note has them all"
        assert both.checkpoint.size == 300
        assert [each.lag_ms for each in submissions.status()] == [0, 0]
    with closing(Trail.open(tmp_path / "log", log_signer(), settings=BRISK)) as trail:
        assert trail.status().checkpoint == 300, (
            "a log opens with cosignatures of witnesses that it is not told of"
        )


def test_a_log_catches_up_with_a_witness_that_knows_another_size(tmp_path: Path) -> None:
    with witnessed_log(tmp_path, leaves=3) as (trail, running):
        first = Submission(trail, target(running))
        trail.checkpoints.trust_witnesses(keys(running))
        first.submit()
        append(trail, 4)
        trail.publish()
        # As after a restart: it begins by asking with an old size of zero.
        second = Submission(trail, target(running))
        second.submit()
        assert running.state.logs()[0].held.size == 7
        second.submit()


def test_a_witness_is_asked_for_lines_that_somebody_else_left_out_and_for_none_that_it_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, call = list[AddCheckpoint](), WitnessClient.add_checkpoint

    def counted(client: WitnessClient, request: AddCheckpoint) -> Cosigned | Behind:
        asked.append(request)
        return call(client, request)

    with witnessed_log(tmp_path, leaves=3) as (trail, running):
        submission = Submission(trail, target(running))
        trail.checkpoints.trust_witnesses(keys(running))
        # A stranger was first, and brings the log the Ed25519 line alone.
        note = parse_note(trail.checkpoints.offer())
        answer = WitnessClient(target(running)).add_checkpoint(AddCheckpoint(0, (), encode_note(note)))
        assert isinstance(answer, Cosigned)
        trail.add_cosigned(
            encode_note(note.with_signatures(line for line in answer.signatures if len(line.data) < 1000))
        )
        monkeypatch.setattr(WitnessClient, "add_checkpoint", counted)
        submission.submit()
        (held,) = trail.checkpoints.cosigned()
        assert {by.key for by in held.cosigned} == set(keys(running)) and len(keys(running)) == 2
        assert len(asked) == 2, "it has cosigned that size already"
        submission.submit()
        Submission(trail, target(running)).submit()
        assert len(asked) == 2


@pytest.mark.parametrize("is_former", [False, True])
def test_a_key_that_gives_no_line_is_a_failure_and_is_asked_for_at_a_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_former: bool
) -> None:
    """The network takes the ML-DSA-44 line out of each answer; or a key is configured that the witness had before."""
    asked, call, now = list[AddCheckpoint](), WitnessClient.add_checkpoint, [0]

    def stripped(client: WitnessClient, request: AddCheckpoint) -> Cosigned | Behind:
        asked.append(request)
        answer = call(client, request)
        if is_former or isinstance(answer, Behind):
            return answer
        return Cosigned(tuple(line for line in answer.signatures if len(line.data) < 1000))

    monkeypatch.setattr(WitnessClient, "add_checkpoint", stripped)
    monkeypatch.setattr(Submission, "_now_ms", lambda self: now[0])
    monkeypatch.setattr("audit.checkpoint_disk.ROUND_MS", 0)
    with witnessed_log(tmp_path, leaves=3) as (trail, running):
        former = VerifierKey(keys(running)[0].name, Algorithm.COSIGNATURE, log_signer().key.public)
        lacking = former if is_former else keys(running)[1]
        held = [key for key in keys(running) if key != lacking]
        submission = Submission(trail, WitnessTarget(target(running).url, (*held, lacking)))
        trail.checkpoints.trust_witnesses((*held, lacking))
        for now[0] in range(0, 600_000, 1_000):
            if len(asked) == 14:
                break
            said = ""
            try:
                assert not submission.submit(), "too early, and nothing is well meanwhile"
            except TamperError as error:
                said = error.sentence
            assert not said or lacking.key_id.hex() in said
        assert now[0] > 500_000, "once a minute, after a while"
        assert submission.status().size == 0 and submission.status().lag_ms >= 0
        (kept,) = trail.checkpoints.cosigned()
        assert {by.key for by in kept.cosigned} == set(held), "what it gives is worth having"
        append(trail, 4)
        trail.publish()
        with pytest.raises(TamperError):
            submission.submit()
        assert trail.checkpoints.cosigned()[0].checkpoint.size == 7, "also of the next checkpoint, at once"


def test_lines_that_the_network_takes_out_are_shown_until_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strips, call = [True], WitnessClient.add_checkpoint

    def stripped(client: WitnessClient, request: AddCheckpoint) -> Cosigned | Behind:
        answer = call(client, request)
        if not strips[0] or isinstance(answer, Behind):
            return answer
        return Cosigned(tuple(line for line in answer.signatures if len(line.data) > 1000))

    monkeypatch.setattr(WitnessClient, "add_checkpoint", stripped)
    monkeypatch.setattr("audit.asked.PAUSE_MS", 50)
    with witnessed_log(tmp_path, leaves=3) as (trail, running), submitting(trail, target(running)) as all_of:
        until(lambda: all_of.status()[0].failures > 2, "it is asked again, and each answer is a failure")
        status = all_of.status()[0]
        assert status.size == 0 and status.lag_ms > 0 and "(Ed25519)" in status.sentence
        strips[0] = False
        until(lambda: all_of.status()[0].size == 3, "it has both lines")
        until(lambda: not all_of.status()[0].failures, "and nothing is wrong")
        assert not all_of.status()[0].lag_ms and not all_of.status()[0].sentence


def test_a_witness_that_has_more_than_the_log_is_reported_and_asked_again_later(tmp_path: Path) -> None:
    """The log was put back to an earlier copy; its own key signs another history."""
    with witnessed_log(tmp_path, leaves=9) as (trail, running):
        trail.checkpoints.trust_witnesses(keys(running))
        Submission(trail, target(running)).submit()
        with closing(Trail.open(tmp_path / "again", log_signer(), settings=BRISK)) as shorter:
            append(shorter, 4, Link().deny())
            shorter.publish()
            shorter.checkpoints.trust_witnesses(keys(running))
            submission = Submission(shorter, target(running))
            with pytest.raises(
                TamperError, match=r"cosigned 9 leaves .* checkpoint has 4: the log was rolled back"
            ):
                submission.submit()
            append(shorter, 5)
            shorter.publish()
            with pytest.raises(FelixError, match="422"):
                submission.submit()
            assert not shorter.checkpoints.cosigned()


def test_a_witness_that_is_away_costs_the_log_nothing_and_its_lag_is_shown(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    stranger = VerifierKey("w.example/1", Algorithm.COSIGNATURE, log_signer().key.public)
    with closing(Trail.open(tmp_path / "log", log_signer(), settings=BRISK)) as trail:
        away = WitnessTarget(f"http://127.0.0.1:{port}", (stranger,))
        with serving(tmp_path / "w") as running, submitting(trail, away, target(running)) as submissions:
            running.state.add_log(trail.key.name, trail.key)
            append(trail, 2)
            until(lambda: submissions.status()[1].size == 2, "the other witness is not held up")
            until(lambda: submissions.status()[0].failures > 1, "it is tried again")
            status = submissions.status()[0]
            assert isinstance(status, SubmissionStatus) and status.size == 0 and status.lag_ms > 0
            assert "does not answer" in status.sentence


@contextmanager
def answering(answer: bytes, *, trickle: bool = False, at_once: int = 0) -> Iterator[int]:
    """A witness that says what it likes, as slowly as it likes behind the first `at_once` bytes."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)

        def serve() -> None:
            while not ended.is_set():
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    continue
                with sock:
                    sock.settimeout(5)
                    try:
                        sock.recv(1 << 20)
                        sock.sendall(answer[:at_once])
                        for at in range(at_once, len(answer)):
                            if not trickle:
                                sock.sendall(answer)
                                break
                            sock.sendall(answer[at : at + 1])
                            if ended.wait(0.1):
                                break
                        sock.shutdown(socket.SHUT_WR)
                        while sock.recv(65_536):
                            pass
                    except OSError:
                        continue

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            thread.join(30)


def reply(status: bytes, body: bytes, kind: bytes = b"text/plain") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s" % (
        status,
        kind,
        len(body),
        body,
    )


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", UnavailableError),
        (b"\xff" * 200, UnavailableError),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000, UnavailableError),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, UnavailableError),
        (reply(b"200 OK", b""), TamperError),
        (reply(b"200 OK", b"hello\n"), TamperError),
        (reply(b"200 OK", b"x" * 200_000), TamperError),
        (reply(b"409 Conflict", b"5\n"), RequestError),
        (reply(b"409 Conflict", b"05\n", b"text/x.tlog.size"), RequestError),
        (reply(b"409 Conflict", b"\xff\n", b"text/x.tlog.size"), RequestError),
        (reply(b"301 Moved\r\nLocation: http://127.0.0.1:1/", b""), RequestError),
        (reply(b"404 Not Found", b"\x1b[2J"), RequestError),
        (reply(b"503 Busy", b""), UnavailableError),
    ],
)
def test_what_a_witness_says_is_bounded_and_never_believed_unread(
    answer: bytes, error: type[FelixError]
) -> None:
    with answering(answer) as port:
        client = WitnessClient(WitnessTarget(f"http://127.0.0.1:{port}", ()))
        with pytest.raises(error) as caught:
            client.add_checkpoint(AddCheckpoint(0, (), b""), 5.0)
        assert "\x1b" not in str(caught.value)


def test_an_answer_that_trickles_ends_with_the_call(tmp_path: Path) -> None:
    with answering(reply(b"200 OK", b"x" * 10_000), trickle=True) as port:
        client = WitnessClient(WitnessTarget(f"http://127.0.0.1:{port}", ()))
        begun = time.monotonic()
        with pytest.raises(UnavailableError):
            client.add_checkpoint(AddCheckpoint(0, (), b""), 1.0)
        assert time.monotonic() - begun < 60, "a byte each 100 ms would take a quarter of an hour"


@pytest.mark.parametrize(
    "head", [b"Connection: close\r\nContent-Length: 10000", b"Connection: close", b"X: y"]
)
def test_a_body_that_trickles_ends_with_the_call(head: bytes) -> None:
    """Once the headers are read, the socket of a connection that is to be closed is not the connection's any more."""
    answer = b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n"
    with answering(answer + b"x" * 10_000, trickle=True, at_once=len(answer)) as port:
        client = WitnessClient(WitnessTarget(f"http://127.0.0.1:{port}", ()))
        begun = time.monotonic()
        with pytest.raises(UnavailableError):
            client.add_checkpoint(AddCheckpoint(0, (), b""), 1.0)
        assert time.monotonic() - begun < 60, "a byte each 100 ms would take a quarter of an hour"


@pytest.mark.parametrize("at_once", [0, 10_000])
def test_stopping_ends_a_call_that_is_under_way(tmp_path: Path, at_once: int) -> None:
    answer = reply(b"200 OK\r\nConnection: close", b"x" * 10_000)
    with (
        answering(answer, trickle=True, at_once=min(at_once, len(answer) - 10_000)) as port,
        closing(Trail.open(tmp_path / "log", log_signer(), settings=BRISK)) as trail,
    ):
        append(trail)
        trail.publish()
        submissions = Submissions(trail, [WitnessTarget(f"http://127.0.0.1:{port}", (log_signer().key,))])
        submissions.start()
        time.sleep(0.3)
        submissions.stop()
        assert not any(each._thread.is_alive() for each in submissions._all)


def test_cosignatures_of_other_keys_or_other_checkpoints_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("audit.checkpoint_disk.ROUND_MS", 0)
    with (
        closing(Trail.open(tmp_path / "log", log_signer(), settings=BRISK)) as trail,
        serving(tmp_path / "w") as running,
    ):
        running.state.add_log(trail.key.name, trail.key)
        append(trail)
        trail.publish()
        wrong = VerifierKey(keys(running)[0].name, Algorithm.COSIGNATURE, log_signer().key.public)
        trail.checkpoints.trust_witnesses([wrong])
        with pytest.raises(TamperError, match="no signature of a known key"):
            Submission(trail, WitnessTarget(target(running).url, (wrong,))).submit()
        assert not trail.checkpoints.cosigned()
        # Its answer for another checkpoint of this log, replayed.
        other = post(running.port, b"old 1\n\n" + trail.checkpoint())
        append(trail)
        trail.publish()
        with answering(reply(b"200 OK", other.body)) as port:
            trail.checkpoints.trust_witnesses(keys(running))
            with pytest.raises(TamperError, match="does not hold"):
                Submission(trail, WitnessTarget(f"http://127.0.0.1:{port}", keys(running))).submit()
        assert not trail.checkpoints.cosigned()


def test_the_client_reads_both_answers(tmp_path: Path) -> None:
    log = Log()
    with serving(tmp_path / "w", log) as running:
        client = WitnessClient(target(running))
        assert isinstance(client.add_checkpoint(AddCheckpoint(0, (), log.note(5))), Cosigned)
        assert client.add_checkpoint(AddCheckpoint(0, (), log.note(7))) == Behind(5)
        with pytest.raises(RequestError, match="422"):
            client.add_checkpoint(AddCheckpoint(5, (), log.note(7)))


def test_a_witness_over_tls_is_asked_where_its_certificate_leads_to_the_named_authority(
    tmp_path: Path,
) -> None:
    log = Log()
    with serving(tmp_path / "w", log, tls=certificate(tmp_path)) as running:
        url, request = f"https://127.0.0.1:{running.port}", AddCheckpoint(0, (), log.note(5))
        with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
            WitnessClient(WitnessTarget(url, ())).add_checkpoint(request)
        with pytest.raises(RequestError, match="cannot be read"):
            WitnessClient(WitnessTarget(url, (), tmp_path / "missing.pem"))
        client = WitnessClient(WitnessTarget(url, (), tmp_path / "cert.pem"))
        assert isinstance(client.add_checkpoint(request), Cosigned)


@pytest.mark.parametrize(
    "url", ["", "witness.example", "ftp://w.example", "http://", "http://w.example:0/", "http://w.example:x/",
            "http://a@w.example/", "http://w.example/?x", "http://w.example/#x", "http://w\u00e4.example/", "http://" + "x" * 2000]
)  # fmt: skip
def test_what_is_no_submission_prefix_is_refused(url: str) -> None:
    with pytest.raises(RequestError):
        check_url(url)


def test_lag_is_since_when_it_has_been_behind() -> None:
    lag = Lag()
    lag.update(1_000, 5, 5)
    assert lag.ms(2_000) == 0
    lag.update(2_000, 5, 6)
    lag.update(3_000, 5, 9)
    assert lag.ms(4_000) == 2_000
    lag.update(5_000, 6, 9)
    assert lag.ms(5_500) == 500, "what was waited for first is there; the rest has been waited for since"
    lag.update(6_000, 9, 9)
    assert lag.ms(9_000) == 0
