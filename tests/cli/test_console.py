"""`felix console`: who gets what from its server, and its page in a real browser, at two widths, by keyboard, with hostile names."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

import pytest
from chromium import Chromium
from region_home import make_region, running

import felix
from cli.console_server import EVENTS_WAITING_MAX, HOST, KEYS_MAX, VIEWERS_MAX, ConsoleServer, Page
from cli.console_view import ROWS_MAX, encode_view, view_of
from cli.mesh_map import Survey
from cli.top import Sample
from felix.messages import (
    AuditLog,
    CacheTraffic,
    Cosigner,
    Denial,
    GrantSummary,
    KnownRegion,
    LinkState,
    MeshPage,
    ReaderTraffic,
    RegionState,
    StreamTraffic,
)
from felix.runtime.real import now_ms
from region.bootstrap import issue_identity
from region.config import load_config

NOW = 1_800_000_000_000
HOSTILE = (
    '<script>window.bad=1</script><img src=x onerror="window.bad=1">&lt;b&gt; "\'`${1} \u202edetrever\x1b[31m'
)
LONG = "x" * 250
NAMES = ("us-east", HOSTILE, LONG)


def hostile(region: str, others: tuple[str, ...]) -> Survey:
    """A region whose every text is hostile; a broker would not take such names, but whoever speaks its protocol can say them."""
    known = [KnownRegion(name, HOSTILE, HOSTILE, HOSTILE) for name in others]
    grants = [
        GrantSummary(f"{number} {HOSTILE}", HOSTILE, one, other, "active", LONG, HOSTILE, NOW)
        for number, (one, other) in enumerate((one, other) for one in others for other in others)
    ]
    links = [
        LinkState(
            grants[1].grant, HOSTILE, 0, others[0], others[1], HOSTILE, HOSTILE, HOSTILE, reported_ms=NOW
        )
    ]
    sample = Sample(
        1.0,
        RegionState(region, HOSTILE, HOSTILE, 0, {}),
        [StreamTraffic(HOSTILE, 1), StreamTraffic(LONG, 1)],
        [ReaderTraffic("queue", HOSTILE, "q " + HOSTILE, HOSTILE, waits=HOSTILE)],
        [],
        links,
        [CacheTraffic("c " + HOSTILE, 1, 1, 1)],
    )
    logs = [AuditLog(HOSTILE, True, 1, b"r" * 32, 1, [Cosigner(HOSTILE, NOW), Cosigner(LONG)])]
    return Survey(
        region, "", NOW, sample, MeshPage(known, grants, [Denial(HOSTILE, HOSTILE, LONG, HOSTILE, NOW)], logs)
    )


def page() -> Page:
    return Page.of((files("cli") / "console.html").read_text(encoding="utf-8"))


def view(*surveys: Survey) -> bytes:
    return encode_view(view_of(surveys, surveys, NOW))


@asynccontextmanager
async def serving() -> AsyncIterator[ConsoleServer]:
    server = ConsoleServer(page())
    await server.start(0)
    try:
        yield server
    finally:
        await server.close()


async def asked(server: ConsoleServer, line: str, *headers: str, host: str = "") -> tuple[int, str]:
    """One request; status, and all of the answer."""
    reader, writer = await asyncio.open_connection(HOST, server.port)
    host = host or f"{HOST}:{server.port}"
    writer.write("\r\n".join((f"{line} HTTP/1.1", f"Host: {host}", *headers, "", "")).encode())
    async with asyncio.timeout(120):
        answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split()[1]), answer


def ticket(server: ConsoleServer) -> str:
    return f"Authorization: Bearer {server.url.partition('#')[2]}"


async def key_of(server: ConsoleServer) -> str:
    status, answer = await asked(server, "POST /session", ticket(server))
    assert status == 200
    return f"Authorization: Bearer {json.loads(answer.partition('{')[1] + answer.partition('{')[2])['key']}"


@asynccontextmanager
async def viewer(server: ConsoleServer, key: str) -> AsyncIterator[asyncio.StreamReader]:
    """An open event stream, its head read; a small receive window, so that one who does not read is noticed."""
    reader, writer = await asyncio.open_connection(HOST, server.port, limit=4096)
    writer.write(f"GET /events HTTP/1.1\r\nHost: {HOST}:{server.port}\r\n{key}\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    try:
        yield reader
    finally:
        writer.close()


async def test_the_page_is_for_its_own_name_and_origin_and_runs_nothing_but_itself() -> None:
    async with serving() as server:
        status, answer = await asked(server, "GET /")
        assert status == 200 and "<script>" in answer
        policy = re.findall(r"Content-Security-Policy: (.*)\r", answer)[0]
        assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
        assert "Access-Control" not in answer and "no-store" in answer
        for wrong in ("evil.example", f"evil.example:{server.port}", HOST, f"{HOST}:1"):
            assert (await asked(server, "GET /", host=wrong))[0] == 421
        assert (await asked(server, "POST /session", ticket(server), "Origin: http://evil.example"))[0] == 403
        assert (await asked(server, "GET /", "Origin: null"))[0] == 403
        assert (await asked(server, "GET /", "Host: again"))[0] == 400
        assert (await asked(server, "POST /session", "Content-Length: 5"))[0] == 413
        assert (await asked(server, "GET /", "X: " + "y" * 20_000))[0] == 431
        assert (await asked(server, "PUT /"))[0] == 405 and (await asked(server, "GET /../etc/passwd"))[
            0
        ] == 404


async def test_a_ticket_works_once_and_events_take_a_key() -> None:
    async with serving() as server:
        first = ticket(server)
        assert (await asked(server, "GET /events", first))[0] == 401, "a ticket is no key"
        key = await key_of(server)
        assert (await asked(server, "POST /session", first))[0] == 401
        for wrong in (
            "Authorization: Bearer ",
            "Authorization: Basic x",
            "X: y",
            "Authorization: Bearer \u00e4",
        ):
            assert (await asked(server, "POST /session", wrong))[0] == 401
            assert (await asked(server, "GET /events", wrong))[0] == 401
        assert (await asked(server, "POST /session", ticket(server)))[0] == 200, "there is a new one"
        for _ in range(KEYS_MAX):
            await key_of(server)
        assert (await asked(server, "GET /events", key))[0] == 401, "the oldest key is forgotten"


async def test_viewers_are_bounded_and_who_does_not_read_is_dropped() -> None:
    async with serving() as server:
        key = await key_of(server)
        assert not server.watched.is_set()
        async with viewer(server, key) as reader, viewer(server, key) as slow:
            server.publish(b'{"n": 1}')
            assert await reader.readuntil(b"\n\n") == b'data: {"n": 1}\n\n'
            await slow.readuntil(b"\n\n")
            # 1 MiB each: more than the kernel takes for the slow one.
            for _ in range(40):
                server.publish(b"x" * (1 << 20))
                async with asyncio.timeout(120):
                    await reader.readexactly(len(b"data: \n\n") + (1 << 20))
                if server.dropped:
                    break
            assert server.dropped == 1 and EVENTS_WAITING_MAX < 40
            assert server.watched.is_set()
            others = [viewer(server, key) for _ in range(VIEWERS_MAX - 1)]
            for each in others:
                await each.__aenter__()
            assert (await asked(server, "GET /events", key))[0] == 503
            for each in others:
                await each.__aexit__(None, None, None)
        async with asyncio.timeout(120):
            while server.watched.is_set():  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0.01)


def test_a_view_hides_nothing_and_is_bounded() -> None:
    text = view(hostile("us-east", NAMES)).decode()
    assert "\\\\u202e" in text and "\\\\x1b[31m" in text and "\u202e" not in text
    many = Sample(0.0, RegionState("r", "m", "b", 0, {}), [StreamTraffic(f"a/b/{n}", 1) for n in range(ROWS_MAX + 5)], [], [], [])  # fmt: skip
    made = view_of([], [Survey("r", "", NOW, many)], NOW)
    assert len(made.streams) == ROWS_MAX and made.totals["streams"] == ROWS_MAX + 5


@pytest.mark.browser
async def test_the_page_in_a_browser_at_two_widths_by_keyboard_with_hostile_names(tmp_path: Path) -> None:
    async with serving() as server:
        surveys = (hostile("us-east", NAMES), Survey(HOSTILE, HOSTILE), Survey("ap-south", "Nobody listens."))
        server.publish(view(*surveys))
        await asyncio.to_thread(look, server, tmp_path)


def look(server: ConsoleServer, folder: Path) -> None:
    browser = Chromium(folder)
    try:
        browser.resize(1400)
        browser.open(server.url)
        browser.wait("document.querySelector('#crossings td') && document.querySelector('svg')")
        assert browser.run("location.hash") == "", "the ticket leaves the address bar"
        for width in (1400, 400):
            browser.resize(width)
            browser.wait(f"document.querySelector('svg').viewBox.baseVal.width <= {width}")
            assert browser.run(
                "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            ), f"wider than {width}"
            small = (
                "[...document.querySelectorAll('td')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
            )
            assert browser.run(small) == 0, "a cell's text is cut"
            browser.picture(Path(os.environ.get("FELIX_PICTURES", folder)) / f"console-{width}.png")
        assert_text(browser)
        assert_keyboard(browser)
        # A reload keeps the session; the link that was used opens nothing elsewhere.
        browser.reload()
        browser.wait("document.querySelector('#crossings td')")
        browser.run("sessionStorage.clear()")
        browser.reload()
        browser.wait("document.getElementById('notice').hidden === false")
        assert "works once" in browser.run("document.getElementById('notice').textContent")
        assert not browser.said, browser.said
    finally:
        browser.close()


def assert_text(browser: Chromium) -> None:
    """What was written by others is text: all of it there, none of it markup, none of it run."""
    assert browser.run("typeof window.bad") == "undefined"
    assert browser.run("document.querySelectorAll('main img, main script, main b').length") == 0
    text = browser.run("document.querySelector('main').textContent")
    assert '<script>window.bad=1</script><img src=x onerror="window.bad=1">&lt;b&gt;' in text and LONG in text
    assert "\\u202edetrever\\x1b[31m" in text and "\u202e" not in text
    for section in ("crossings", "logs", "streams", "queues", "caches", "denials"):
        assert browser.run(f"document.querySelectorAll('#{section} tbody tr').length") > 0, section
    with pytest.raises(RuntimeError):
        browser.run("document.body.innerHTML = '<p>x</p>'")
    browser.said.clear()  # the browser says that it refused


def assert_keyboard(browser: Chromium) -> None:
    """Everything that a mouse can do: pause, filter, go to a region's rows, and see where one is."""
    rows = "document.querySelectorAll('#crossings tbody tr').length"
    everything = browser.run(rows)
    for _ in range(40):
        browser.press("Tab")
        if browser.run("(document.activeElement.getAttribute('data-key') || '') === 'region us-east'"):
            break
    assert browser.run("document.activeElement.getAttribute('aria-label')").startswith("us-east")
    assert browser.run("document.activeElement.matches(':focus-visible')")
    browser.press("Enter")
    assert browser.run("document.getElementById('filter').value") == "us-east"
    assert 0 < browser.run(rows) < everything
    browser.press("Escape")
    assert browser.run(rows) == everything
    browser.press("/")
    for letter in "nothing has this":
        browser.press(letter)
    assert browser.run("document.getElementById('crossings').textContent") == "None with these words."
    browser.press("Escape")
    assert browser.run(rows) == everything
    browser.press("p")
    assert browser.run("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
    browser.press("p")
    assert browser.run("document.getElementById('said').textContent") == "live"


async def test_the_command_serves_an_observer_what_its_region_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FELIX_HOME", str(tmp_path))
    folder = make_region(tmp_path, "us-east")
    issue_identity(folder, load_config(folder.config), "client", "watcher", now_ms())
    words = (sys.executable, "-m", "cli.main", "console", "--as", "watcher")
    async with running(folder), felix.connect("us-east") as operator:
        await operator.create_stream("acme/ops/crew")
        refused = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
        assert b"may not describe" in (await refused.communicate())[1] and refused.returncode == 3
        await operator.put_rights("spiffe://us-east.acme/client/watcher", ["observe acme/*/*"])
        serving = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE)
        assert serving.stderr is not None
        try:
            async with asyncio.timeout(120):
                said = ""
                while "#" not in said:
                    said = (await serving.stderr.readline()).decode()
                port, given = re.findall(r"127\.0\.0\.1:(\d+)/#(\S+)", said)[0]
                server = ConsoleServer(page())
                server.port, server._ticket = int(port), given
                async with viewer(server, await key_of(server)) as reader:
                    event = json.loads((await reader.readuntil(b"\n\n")).removeprefix(b"data: "))
        finally:
            serving.send_signal(signal.SIGTERM)
            await serving.communicate()
    assert [row["figures"]["stream"] for row in event["streams"]] == ["acme/ops/crew"]
    assert event["map"]["regions"][0]["state"] == "up" and event["logs"][0]["log"]["own"]
    assert serving.returncode == 0
