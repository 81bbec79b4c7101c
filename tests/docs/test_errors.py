"""docs/errors.md has every code once, with its number, under its hundred."""

import re
from pathlib import Path

from felix.errors import Code, error_for

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
ROW = re.compile(r"^\| `([A-Z_]+)` \| (\d{3}) \| (.+) \| (.+) \|$", re.M)


def test_every_code_is_described_once_with_its_number() -> None:
    rows = [(name, int(number)) for name, number, _, _ in ROW.findall(PAGE)]
    assert rows == [(code.name, int(code)) for code in Code]


def test_codes_stand_under_their_hundred() -> None:
    for section in re.split(r"^## (?=\d)", PAGE, flags=re.M)[1:]:
        numbers = {int(number) // 100 for _, number, _, _ in ROW.findall(section)}
        assert numbers == {int(section[0])}


def test_families_are_those_of_the_code() -> None:
    families = dict(re.findall(r"^\| `(\w+Error)` \| ([\d, ]+) \|", PAGE, re.M))
    for name, hundreds in families.items():
        for hundred in hundreds.split(", "):
            assert type(error_for(int(hundred) * 100, "")).__name__ == name
