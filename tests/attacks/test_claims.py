"""docs/claims.md says what the table says, and the table names tests that there are. `make attack` prints it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from attacks.claims import CELLS, PARTIES, STATEMENTS, Verdict, render
from attacks.conftest import Tally

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "claims.md"
BEGIN = "<!-- the table: tests/attacks/claims.py -->\n"


def test_every_statement_stands_against_every_party() -> None:
    assert set(CELLS) == {(statement.key, party) for statement in STATEMENTS for party in PARTIES}


def test_every_cell_that_does_not_say_can_names_a_test_that_there_is(tally: Tally) -> None:
    for (statement, party), cell in CELLS.items():
        assert cell.tests or cell.verdict is Verdict.CAN, f"{statement}, {party}: nothing tries it"
        for test in cell.tests:
            path = TESTS / test
            assert path.is_file(), f"{statement}, {party}: there is no {test}"
            assert re.search(r"^(async )?def test_", path.read_text(), re.MULTILINE), f"{test} holds no test"
    tally("cells, each tried or with its reason", len(CELLS))


def test_the_page_says_what_the_table_says() -> None:
    page = PAGE.read_text()
    assert BEGIN in page
    assert page.split(BEGIN)[1] == render(), "write it anew: PYTHONPATH=tests python -m attacks.write_claims"


@pytest.mark.parametrize("party", PARTIES)
def test_every_party_is_described(party: str) -> None:
    assert PARTIES[party]
