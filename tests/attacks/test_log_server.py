"""A log's owner who serves it over HTTP, and answers as he likes: no answer takes more memory or time than a file of a log, none has somebody else asked."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from attacks.chance import Chance
from attacks.conftest import Tally
from attacks.test_files_without_end import bounded
from audit_log import EGRESS_ORIGIN, Link, trust
from crossing_logs import write_log

from audit.file_size import file_bytes_max
from audit.leaf import Kind
from audit.log_copy_disk import copy_log
from audit.note import NOTE_BYTES_MAX
from audit.spark import http_files
from audit.spark.files import open_files
from audit.spark.http_files import HttpFiles
from audit.tile_disk import Folder
from audit.verify import verify_log
from felix.errors import CorruptionError, FelixError, RequestError, TamperError, UnavailableError

Answer = Callable[[socket.socket, str], None]
"""to one request, by its path"""


@contextmanager
def served(answer: Answer) -> Iterator[str]:
    """A URL where `answer` does. Each connection has one request, as long as the answer says nothing else."""
    listening = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def serve(one: socket.socket) -> None:
        with one, suppress(OSError):
            one.settimeout(20)
            while not ended.is_set():
                asked = b""
                while b"\r\n\r\n" not in asked:
                    if not (part := one.recv(4096)):
                        return
                    asked += part
                answer(one, asked.split(b" ")[1].decode())
                if not getattr(answer, "goes_on", False):
                    return

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/log"
    finally:
        ended.set()
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def plain(body: bytes, *lines: str, status: str = "200 OK") -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *lines, "", "")).encode() + body


def sends(*parts: bytes, endless: bytes = b"", pause_s: float = 0.0) -> Answer:
    def answer(one: socket.socket, path: str) -> None:
        for part in parts:
            one.sendall(part)
        while endless:
            one.sendall(endless)
            time.sleep(pause_s)

    return answer


MANY = bytes(1 << 16)
BOMB = gzip.compress(bytes(32 << 20), 9)
"""32 MiB in 32 kB"""
LONGER: dict[str, Answer] = {
    "no end": sends(plain(b""), endless=MANY),
    "a length of terabytes": sends(plain(b"", f"Content-Length: {1 << 42}"), endless=MANY),
    "chunks without end": sends(
        plain(b"", "Transfer-Encoding: chunked"), endless=b"10000\r\n" + MANY + b"\r\n"
    ),
    "one chunk of terabytes": sends(plain(b"40000000000\r\n", "Transfer-Encoding: chunked"), endless=MANY),
    "a length below nothing": sends(plain(b"", "Content-Length: -1"), endless=MANY),
    "a byte too many": sends(
        plain(bytes(NOTE_BYTES_MAX + 1), f"Content-Length: {NOTE_BYTES_MAX + 1}", "Connection: close")
    ),
}
UNREADABLE: dict[str, Answer] = {
    "less than its length": sends(plain(b"abc", "Content-Length: 4")),
    "chunks that break off": sends(plain(b"10\r\nabc", "Transfer-Encoding: chunked")),
    "no HTTP": sends(b"220 ftp ready\r\n"),
    "nothing": sends(b""),
    "headers without end": sends(b"HTTP/1.1 200 OK\r\n", endless=b"X-A: b\r\n" * 1000),
    "a header line without end": sends(b"HTTP/1.1 200 OK\r\nX-A: ", endless=MANY.replace(b"\0", b"a")),
    "a failure": sends(plain(b"x", "Content-Length: 1", status="503 Service Unavailable")),
    "a part": sends(plain(b"x", "Content-Length: 1", status="206 Partial Content")),
    "what was not asked for": sends(plain(BOMB[:30_000], "Content-Encoding: gzip", "Content-Length: 30000")),
    "a bomb": sends(plain(gzip.compress(bytes(1 << 20)), "Content-Encoding: gzip", "Connection: close")),
    "an odd length": sends(plain(b"10\r\n", "Transfer-Encoding: chunked"), b"zz\r\n" * 9),
}
SLOW: dict[str, Answer] = {
    "a body": sends(plain(b"", "Content-Length: 100000"), endless=b"a", pause_s=0.05),
    "a body to the end of the connection": sends(plain(b""), endless=b"a", pause_s=0.05),
    "headers": sends(b"HTTP/1.1 200 OK\r\n", endless=b"X-A: b\r\n", pause_s=0.05),
    "continuations": sends(endless=b"HTTP/1.1 100 Continue\r\n\r\n", pause_s=0.05),
    "trailers": sends(plain(b"0\r\n", "Transfer-Encoding: chunked"), endless=b"X-A: b\r\n", pause_s=0.05),
}


@pytest.mark.parametrize("what", LONGER)
def test_no_more_is_taken_than_a_file_of_its_kind_has(what: str, tally: Tally) -> None:
    with served(LONGER[what]) as url, bounded(), pytest.raises(TamperError, match="more than"):
        open_files(url).read("checkpoint")
    tally("answers that are too long", 1)


@pytest.mark.parametrize("what", UNREADABLE)
def test_an_answer_that_is_no_file_says_nothing_of_the_log(what: str, tally: Tally) -> None:
    with served(UNREADABLE[what]) as url, bounded(), pytest.raises(UnavailableError):
        open_files(url).read("checkpoint")
    tally("answers that are no file", 1)


@pytest.mark.parametrize("what", SLOW)
def test_a_file_takes_so_long_and_no_longer(what: str, monkeypatch: pytest.MonkeyPatch, tally: Tally) -> None:
    monkeypatch.setattr(http_files, "REQUEST_S", 0.5)
    with served(SLOW[what]) as url, bounded(), pytest.raises(UnavailableError):
        open_files(url).read("checkpoint")
    tally("answers that trickle in", 1)


def test_a_handshake_takes_no_longer_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of an alert that says nothing, one after the other."""
    monkeypatch.setattr(http_files, "REQUEST_S", 0.5)
    listening = socket.create_server(("127.0.0.1", 0))

    def trickle() -> None:
        with suppress(OSError):
            one, _ = listening.accept()
            with one:
                one.sendall(b"\x16\x03\x03\x40\x00")
                while True:
                    one.sendall(b"\x02")
                    time.sleep(0.05)

    threading.Thread(target=trickle, daemon=True).start()
    with listening, bounded(), pytest.raises(UnavailableError):
        open_files(f"https://127.0.0.1:{listening.getsockname()[1]}/log").read("checkpoint")


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 There", "308 There"])
def test_nobody_else_is_asked(status: str, tmp_path: Path) -> None:
    asked: list[str] = []
    (tmp_path / "checkpoint").write_bytes(b"somebody else's")

    def other(one: socket.socket, path: str) -> None:
        asked.append(path)

    with served(other) as elsewhere:
        for where in (elsewhere, (tmp_path / "checkpoint").as_uri(), "/log/tile", "//169.254.169.254/latest"):
            answer = sends(plain(b"", f"Location: {where}", "Content-Length: 0", status=status))
            with served(answer) as url:
                with pytest.raises(RequestError, match="not followed"):
                    open_files(url).read("checkpoint")
                assert open_files(url).names("wal") == []
    assert not asked


def test_a_folder_is_listed_as_far_as_its_page_says() -> None:
    def page(body: bytes) -> list[str]:
        headers = ("Content-Type: text/html; charset=utf-8", f"Content-Length: {len(body)}")
        with served(sends(plain(body, *headers))) as url:
            return open_files(url).names("tile/0/000.p")

    own = b'<a href=\'7\'>7</a> <a class="x" HREF = "9">9</a> <a href="/log/tile/0/000.p/12">12</a>'
    others = b"".join(
        b'<a href="%s">x</a>' % link
        for link in (
            b"../5", b"/log/5", b"http://other/log/tile/0/000.p/5", b"//x/5", b"?C=N;O=D", b"#5", b"a/5", b"",
            b"file:///etc/passwd", b"http://[", b"\xff", b"%2e%2e%2f5", b"%2e%2e", b"%2e/",
        )
    )  # fmt: skip
    assert page(own + others) == ["12", "7", "9"]
    assert page(b'<a href="7">' + b"a" * http_files.LISTING_BYTES_MAX) == []
    with bounded():
        page((b"<a href=" * (http_files.LISTING_BYTES_MAX // 8))[:-1])
        page((b" href='" * (http_files.LISTING_BYTES_MAX // 7))[:-1])


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, link = tmp_path_factory.mktemp("log"), Link()
    leaves = [leaf for leaf in link.agreement() if leaf.header.kind is not Kind.POLICY]
    write_log(path, EGRESS_ORIGIN, [[*leaves] * 130], cosign=True)
    return path


def honest(log: Path, spoil: Callable[[str, bytes | None], bytes | None]) -> Answer:
    def answer(one: socket.socket, path: str) -> None:
        place = log / path.removeprefix("/log/")
        data = spoil(path.removeprefix("/log/"), place.read_bytes() if place.is_file() else None)
        if data is None:
            one.sendall(plain(b"", "Content-Length: 0", status="404 Not Found"))
        else:
            one.sendall(plain(data, f"Content-Length: {len(data)}"))

    answer.goes_on = True  # type: ignore[attr-defined]
    return answer


def test_a_log_that_is_served_verifies_and_is_copied_as_from_its_folder(log: Path, tmp_path: Path) -> None:
    with served(honest(log, lambda _, data: data)) as url:
        files = open_files(url)
        assert isinstance(files, HttpFiles)
        here, there = (verify_log(each, trust(), cosignatures_min=0) for each in (Folder(log), files))
        assert [each.sentence for each in here.findings] == [each.sentence for each in there.findings]
        assert here.size == there.size > 256
        made = copy_log(files, Folder(tmp_path / "copy"), trust())
    assert made.size == here.size
    again = verify_log(Folder(tmp_path / "copy"), trust(), cosignatures_min=0)
    assert [each.sentence for each in again.findings] == [each.sentence for each in here.findings]


def test_other_contents_at_the_second_request_are_refused_or_the_same(
    log: Path, tmp_path: Path, chance: Chance, tally: Tally
) -> None:
    """One file, from some request on: cut, flipped, doubled, gone, another file's."""
    random = chance(20)
    paths = sorted(
        path.relative_to(log).as_posix()
        for path in log.rglob("*")
        if path.is_file() and file_bytes_max(path.relative_to(log).as_posix()) is not None
    )
    whole = (log / "checkpoint").read_bytes()
    for number in range(20):
        chosen, other, begins = random.choice(paths), random.choice(paths), random.choice((0, 1, 1, 2))
        how, seen = random.choice(("cut", "flip", "double", "gone", "other")), 0

        def spoil(path: str, data: bytes | None, chosen: str = chosen, how: str = how, other: str = other, begins: int = begins) -> bytes | None:  # fmt: skip
            nonlocal seen
            if path != chosen or not data:
                return data
            seen += 1
            if seen <= begins:
                return data
            at = random.randrange(len(data))
            return {
                "cut": data[:at],
                "flip": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
                "double": data + data,
                "gone": None,
                "other": (log / other).read_bytes(),
            }[how]

        to = tmp_path / str(number)
        with served(honest(log, spoil)) as url:
            try:
                copy_log(open_files(url), Folder(to), trust())
            except FelixError as error:
                assert isinstance(error, (CorruptionError, RequestError)), error
                assert not (to / "checkpoint").exists()
                continue
        assert (to / "checkpoint").read_bytes() == whole
        assert not verify_log(Folder(to), trust(), cosignatures_min=0).findings or how in (
            "gone",
            "other",
            "cut",
        )
    tally("copies from a server that changes its mind", 20)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://:80/log",
        "https:///log",
        "http://h:99999/l",
        "http://h/l?x",
        "http://h/l\n",
        "http://ü/l",
    ],
)
def test_what_is_no_url_of_a_log_is_refused(url: str) -> None:
    with pytest.raises(RequestError, match="not the URL of a log"):
        open_files(url)
