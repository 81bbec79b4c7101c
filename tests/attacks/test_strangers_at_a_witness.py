"""Strangers at an outside witness: what is public, sent again and again, and connections that end at once. None of it writes more than a few lines, nor syncs, nor signs."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks.conftest import Tally
from witness_logs import NAME, NOW_S, Log, body, post, serving

from audit.note import NoteSigner
from audit.witness_service import AGAIN_S, TOLD_S, Answer, WitnessService
from audit.witness_sqlite import WitnessState, init_witness

TRIES = 300


class Desk:
    """A witness's service, its clock, and how often it signed and stored."""

    def __init__(self, state: WitnessState, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state, self.now_s, self.counts = state, NOW_S, Counter[str]()

        def counting(signer: NoteSigner) -> NoteSigner:
            def sign(message: bytes) -> bytes:
                self.counts["signed"] += 1
                return signer.sign_message(message)

            return NoteSigner(signer.key, sign)

        kept = state.keep_cosigned

        def keep(*what: Any) -> None:
            self.counts["stored"] += 1
            kept(*what)

        monkeypatch.setattr(state, "keep_cosigned", keep)
        self.service = WitnessService(state, lambda: self.now_s, signers=tuple(map(counting, state.signers)))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    init_witness(tmp_path / "w", NAME)
    state = WitnessState.open(tmp_path / "w", serve=True)
    log = Log()
    state.add_log(log.origin, log.signer.key)
    yield Desk(state, monkeypatch)
    state.close()


def test_a_checkpoint_that_is_sent_again_is_neither_signed_nor_stored_again(desk: Desk, tally: Tally) -> None:
    log = Log()
    first = desk.service.add_checkpoint(log.request(0, 5))
    assert first.status == 200
    assert desk.counts == {"signed": 2, "stored": 1}
    for _ in range(TRIES):
        assert desk.service.add_checkpoint(log.request(5, 5)) == first
    assert desk.counts == {"signed": 2, "stored": 1}
    desk.now_s += AGAIN_S
    later = desk.service.add_checkpoint(log.request(5, 5))
    assert later.status == 200 and later.body != first.body, "what it states is of now again"
    assert desk.service.add_checkpoint(log.request(5, 9)).status == 200
    assert desk.service.add_checkpoint(log.request(5, 5)).status == 409, "what was given is no way back"
    assert desk.counts == {"signed": 6, "stored": 3}
    tally("checkpoints sent again", TRIES)


def test_a_clock_that_is_set_back_gives_nothing_of_a_later_time(desk: Desk) -> None:
    log = Log()
    first = desk.service.add_checkpoint(log.request(0, 5))
    desk.now_s -= 100
    assert desk.service.add_checkpoint(log.request(5, 5)).body != first.body


def test_nothing_is_given_again_that_was_not_stored(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()

    def fail(*_: Any) -> None:
        raise OSError("no disk")

    with monkeypatch.context() as patched:
        patched.setattr(desk.state, "keep_cosigned", fail)
        with pytest.raises(OSError, match="no disk"):
            desk.service.add_checkpoint(log.request(0, 5))
    assert desk.service.add_checkpoint(log.request(5, 5)).status == 200
    assert desk.counts == {"signed": 4, "stored": 1}


def test_wrong_proofs_write_a_few_lines_and_hide_no_fork(
    desk: Desk, caplog: pytest.LogCaptureFixture, tally: Tally
) -> None:
    log, fork = Log(), Log(word=b"fork")
    assert desk.service.add_checkpoint(log.request(0, 5)).status == 200
    junk = [body(5, [b"x" * 32], log.note(5)), body(5, [b"x" * 32], log.note(9)), body(5, [], log.note(9))]
    with caplog.at_level(logging.INFO, logger="felix.audit.witness"):
        for at in range(TRIES):
            assert desk.service.add_checkpoint(junk[at % len(junk)]).status == 422
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 10 and all("whether the log or a stranger is not known" in each for each in said)
        caplog.clear()
        for _ in range(TRIES):
            assert desk.service.add_checkpoint(body(5, [], fork.note(5))).status == 422
        forks = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert len(forks) == len(caplog.records) == 2
        assert fork.note(5).decode() in forks[0].getMessage(), "the log signed both: this is the evidence"
        caplog.clear()
        desk.now_s += TOLD_S
        assert desk.service.add_checkpoint(junk[0]).status == 422
        assert f"({TRIES - 10} more like it were not told)" in caplog.records[0].getMessage()
    tally("proofs that do not hold, by strangers", TRIES)
    tally("second roots of one size, by the log", TRIES)


def test_a_log_that_signs_forks_hides_no_fork_of_another(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever runs one log that a witness knows gives it up, so that nobody is told of what another one signs in that minute."""
    given_up, other = (Log(f"log.example/{each}") for each in "ab")
    forks = {each: Log(each.origin, word=b"fork") for each in (given_up, other)}
    for each in forks:
        desk.state.add_log(each.origin, each.signer.key)
        assert desk.service.add_checkpoint(each.request(0, 5)).status == 200
    with caplog.at_level(logging.INFO, logger="felix.audit.witness"):
        for each, times in ((given_up, TRIES), (other, 1)):
            for _ in range(times):
                assert desk.service.add_checkpoint(body(5, [], forks[each].note(5))).status == 422
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3 and forks[other].note(5).decode() in said[-1], "this is the evidence"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_who_is_gone_when_the_answer_is_there_leaves_no_line(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tally: Tally
) -> None:
    new_loop = pytest.importorskip(loop).new_event_loop
    gone, decided = threading.Event(), threading.Semaphore(0)
    add = WitnessService.add_checkpoint

    def slow(self: WitnessService, data: bytes) -> Answer:
        gone.wait(30)
        decided.release()
        return add(self, data)

    monkeypatch.setattr(WitnessService, "add_checkpoint", slow)
    request = Log().request(0, 1)
    sent = b"POST /add-checkpoint HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(request) + request
    with (
        caplog.at_level(logging.WARNING),
        serving(tmp_path / "w", Log(), new_loop=new_loop) as witness,
    ):
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", witness.port), 30) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.sendall(sent)
                # Read whole by the server before the connection is reset.
                time.sleep(0.05)
        gone.set()
        for _ in range(20):
            assert decided.acquire(timeout=30)
        assert post(witness.port, Log().request(1, 2)).status == 200
        assert not [record.getMessage() for record in caplog.records]
    tally("connections that were reset while it was decided", 20)
