"""`felix cache` against a running region: what is printed, as text and as JSON, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.command_mesh import Said, felix_command
from ports import claim_port

NAME = "acme/web/flags"


class Home:
    def __init__(self, path: Path) -> None:
        self.path = path

    def felix(self, *words: str, code: int = 0, stdin: bytes = b"") -> Said:
        return felix_command(self.path, *words, code=code, stdin=stdin)

    def cache(self, *words: str, code: int = 0, stdin: bytes = b"") -> Said:
        return self.felix("cache", words[0], NAME, *words[1:], code=code, stdin=stdin)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("cache"))
    listen = f"127.0.0.1:{claim_port()}"
    home.felix("region", "init", "us-east", "--mesh", "acme", "--listen", listen, "--health", "none")
    home.felix("region", "up", "us-east", "--detach")
    try:
        yield home
    finally:
        home.felix("region", "down", "us-east")


def test_a_cache_from_create_to_drop(home: Home) -> None:
    said = home.cache("create", "--size", "4MiB", "--ttl", "12h", "--eviction", "refuse")
    assert "4MiB" in said.out and "refuse" in said.out
    assert "version 1" in home.cache("put", "mode", "dark", "--ttl", "forever").out
    assert home.cache("get", "mode").out == "dark"
    found = json.loads(home.cache("get", "mode", "--json").out)
    assert (found["value"], found["version"], found["ttl"]) == ("dark", 1, None)
    home.cache("put", "raw", "--file", "-", stdin=b"\xff\x00")
    assert json.loads(home.cache("get", "raw", "--json").out)["value"] == {"base64": "/wA="}
    assert home.cache("incr", "visits", "--by", "5").out == "5\n"
    assert json.loads(home.cache("incr", "visits", "--json").out)["value"] == 6
    assert "version 5" in home.cache("cas", "mode", "light", "--version", "1").out
    rows = [json.loads(line) for line in home.cache("scan", "--json").out.splitlines()]
    assert [row["key"] for row in rows] == ["mode", "raw", "visits"]
    assert "visits" in home.cache("scan", "v").out
    told = [json.loads(line) for line in home.cache("watch", "--until-ready", "--json").out.splitlines()]
    assert [row["change"] for row in told] == ["put", "put", "put", "ready"]
    home.cache("delete", "raw")
    resumed = home.cache("watch", "--resume", told[-1]["position"], "--count", "1").out
    assert resumed.split()[0] == "deleted" and "raw" in resumed
    stats = json.loads(home.cache("stats", "--json").out)
    assert (stats["keys"], stats["deletes"]) == (2, 1)
    assert "hit ratio" in home.cache("stats").out
    assert NAME in home.felix("cache", "list").out
    assert (
        json.loads(home.felix("cache", "list", "--json").out)["items"][0]["views"]["cache"]["eviction"]
        == "refuse"
    )
    said = home.cache("alter", "--size", "2MiB", "--ttl", "none").out
    assert "2MiB per shard, eviction refuse, ttl none" in " ".join(said.split())
    assert (
        json.loads(home.cache("alter", "--eviction", "lru", "--json").out)["views"]["cache"]["bytes_max"]
        == 2 << 20
    )
    home.cache("alter", code=2)
    home.cache("drop", "--yes")
    assert NAME not in home.felix("cache", "list").out


def test_what_is_not_there_or_not_as_expected_has_its_exit_code(home: Home) -> None:
    home.cache("create")
    home.cache("put", "a", "1")
    assert "is not in" in home.cache("get", "b", code=7).err
    home.cache("delete", "b", code=7)
    assert "nothing was put" in home.cache("cas", "a", "2", "--version", "0", code=7).err
    home.cache("put", "word", "x")
    assert "The value 'x' is no number" in home.cache("incr", "word", code=2).err
    home.cache("put", "word", "")
    assert home.cache("get", "word").out == ""
    home.cache("put", "a", code=2)
    home.cache("put", "a", "1", "--ttl", "soon", code=2)
    home.cache("watch", "--resume", "nonsense", code=2)
    home.felix("cache", "get", "acme/web/nothing", "a", code=3)
    home.felix("stream", "create", "acme/web/plain")
    assert "no cache" in home.felix("cache", "get", "acme/web/plain", "a", code=1).err
    assert "no cache" in home.felix("cache", "alter", "acme/web/plain", "--ttl", "1h", code=1).err
    assert "no cache" in home.felix("cache", "drop", "acme/web/plain", "--yes", code=1).err
    home.felix("cache", "create", "acme/web/other", "--eviction", "sometimes", code=2)
    home.cache("drop", "--yes")
