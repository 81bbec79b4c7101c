"""What attacks tried and how it ended, test by test and round by round, and the lines that say so. Values in, values out.

conftest.py makes a Phase of each report of pytest, and run.py reads them from a file, one line each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

import msgspec
from attacks.claims import CELLS, NAMES, PARTIES, STATEMENTS, Verdict

BEGAN = "began"
FOLDER = "attacks/"


class Phase(msgspec.Struct, frozen=True):
    """What pytest said of a test: that it began, or how its setup, call or teardown ended."""

    test: str
    when: str
    outcome: str = ""
    seconds: float = 0.0
    tally: tuple[tuple[str, int], ...] = ()
    """what was tried, and how often; of the call"""
    draws: bool = False
    """whether it draws random cases"""


def encode(phase: Phase) -> bytes:
    """One line of a record."""
    return msgspec.json.encode(phase) + b"\n"


def decode(record: bytes) -> list[Phase]:
    """The phases of a record. What follows the last newline was not written to its end, and is left out."""
    whole, _, _ = record.rpartition(b"\n")
    return [msgspec.json.decode(line, type=Phase) for line in whole.splitlines()]


class Outcome(StrEnum):
    """How a test ended."""

    HELD = "held"
    BROKE = "BROKE"
    SKIPPED = "skipped"
    STOPPED = "STOPPED"
    """it began, and was stopped half way"""


class Tried(NamedTuple):
    """A test, once."""

    test: str
    outcome: Outcome
    seconds: float
    """setup and teardown, too"""
    tally: tuple[tuple[str, int], ...]
    draws: bool

    @property
    def path(self) -> str:
        """Its file."""
        return self.test.partition("::")[0]


def tried(phases: Iterable[Phase]) -> list[Tried]:
    """Each test of a round once, in the order in which they began."""
    by_test: dict[str, list[Phase]] = defaultdict(list)
    for phase in phases:
        by_test[phase.test].append(phase)
    return [_ended(test, found) for test, found in by_test.items()]


def _ended(test: str, phases: list[Phase]) -> Tried:
    outcomes = {phase.outcome for phase in phases}
    if "failed" in outcomes:
        outcome = Outcome.BROKE
    elif not any(phase.when == "teardown" for phase in phases):
        outcome = Outcome.STOPPED
    else:
        outcome = Outcome.SKIPPED if "skipped" in outcomes else Outcome.HELD
    return Tried(
        test,
        outcome,
        sum(phase.seconds for phase in phases),
        tuple(each for phase in phases if phase.when == "call" for each in phase.tally),
        any(phase.draws for phase in phases),
    )


class Line(NamedTuple):
    """A line of the summary, and whether it tells of something that broke."""

    text: str
    is_bad: bool = False


def counts(tests: Iterable[Tried]) -> list[Line]:
    """What was tried, file by file, over all rounds."""
    outcomes: dict[str, Counter[Outcome]] = defaultdict(Counter)
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for each in tests:
        outcomes[each.path][each.outcome] += 1
        for what, number in each.tally:
            rows[each.path][what] += number
    lines = []
    for path, found in sorted(outcomes.items()):
        said = ", ".join(f"{found[each]} {each}" for each in Outcome if found[each] or each is Outcome.HELD)
        named = ", ".join(f"{number:,} {what}" for what, number in sorted(rows[path].items()))
        lines.append(Line(f"{path.rpartition('/')[2]:<42} {said:<18} {named}", _is_bad(found)))
    return lines


def claims(tests: Iterable[Tried]) -> list[Line]:
    """The table of docs/claims.md: each statement, against whom it stands how, and how many tests of this folder tried that in all rounds."""
    outcomes: dict[str, Counter[Outcome]] = defaultdict(Counter)
    for each in tests:
        outcomes[FOLDER + each.path.rpartition("/")[2]][each.outcome] += 1
    lines = []
    for statement in STATEMENTS:
        lines.append(Line(statement.says))
        for verdict in Verdict:
            said, is_bad = [], False
            for party in PARTIES:
                cell = CELLS[statement.key, party]
                if cell.verdict is not verdict:
                    continue
                found = sum((outcomes[path] for path in set(cell.tests)), Counter[Outcome]())
                ran = {each: found[each] for each in Outcome if each is not Outcome.SKIPPED and found[each]}
                numbers = ", ".join(f"{number} {outcome}" for outcome, number in ran.items())
                said.append(f"{NAMES[party]} ({numbers})" if numbers else NAMES[party])
                is_bad = is_bad or _is_bad(found)
            lines.append(Line(f"    {verdict:<9} {', '.join(said) or 'nobody'}", is_bad))
    return lines


def _is_bad(found: Counter[Outcome]) -> bool:
    return bool(found[Outcome.BROKE] or found[Outcome.STOPPED])
