"""For attacks: how many cases to try, and what was tried, counted and printed at the end.

Each file here takes one finding, or one claim, and tries to break it with the keys and the place of the party that
would gain. `FELIX_ATTACK_SCALE` multiplies the random cases (1 in `make test`, more in `make attack`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable

import pytest
from attacks.claims import CELLS, NAMES, PARTIES, STATEMENTS, Verdict

SCALE = "FELIX_ATTACK_SCALE"
TALLY = "tally"

Tally = Callable[[str, int], None]


@pytest.fixture(scope="session")
def attack_scale() -> int:
    """How many times the quick number of random cases are tried."""
    return max(1, int(os.environ.get(SCALE, "1")))


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Tally:
    """Say what was tried and how often: `tally("envelopes refused", 812)`. It is printed at the end of the run."""

    def count(what: str, number: int) -> None:
        assert number > 0, f"nothing was tried: {what}"
        record_property(TALLY, (what, number))

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was tried, file by file."""
    rows: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    outcomes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            path, _, _ = report.nodeid.partition("::")
            if "attacks/" not in path or report.when != "call":
                continue
            outcomes[path][outcome == "failed"] += 1
            for name, value in report.user_properties:
                if name == TALLY:
                    rows[path][value[0]] += value[1]
    if not outcomes:
        return
    terminalreporter.section("what the attacks tried")
    for path in sorted(outcomes):
        held, broke = outcomes[path]
        counts = ", ".join(f"{number:,} {what}" for what, number in sorted(rows[path].items()))
        verdict = f"{held} held" + (f", {broke} BROKE" if broke else "")
        terminalreporter.write_line(f"{path.rpartition('/')[2]:<36} {verdict:<18} {counts}", red=bool(broke))
    terminalreporter.section("what the evidence states, and against whom (docs/claims.md)")
    for statement in STATEMENTS:
        terminalreporter.write_line(statement.says)
        for verdict_ in Verdict:
            names = [NAMES[party] for party in PARTIES if CELLS[statement.key, party].verdict is verdict_]
            terminalreporter.write_line(f"    {verdict_:<9} {', '.join(names) or 'nobody'}")
