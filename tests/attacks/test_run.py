"""`make attack` plays rounds until its time is over, adds up what was tried, and names what broke with its seed (run.py, tallies.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from attacks import run
from attacks.chance import SEED, Chance
from attacks.claims import STATEMENTS
from attacks.conftest import Plan
from attacks.tallies import Outcome, Phase, Tried, claims, decode, encode, tried
from slow_runs import only_slow

DRAWN = """
def test_drawn(chance, tally):
    number = chance(7).randrange(1 << 30)
    with open({seen!r}, "a") as seen:
        print(number, file=seen)
    tally("numbers", 1)

def test_not_drawn(tally):
    tally("others", 1)
"""
# Without what these tests do not use, and what takes its time to start.
OPTIONS = tuple(
    word
    for name in ("cacheprovider", "asyncio", "hypothesispytest", "timeout")
    for word in ("-p", f"no:{name}")
)

ROOT = Path(__file__).parents[2]


class Folder:
    """Attacks of this test's own, and what is said of them."""

    def __init__(self, root: Path) -> None:
        self.tests = root / "more-attacks"
        self.tests.mkdir()
        (self.tests / "conftest.py").write_text("from attacks.conftest import *\n")
        self.root, self.workers = root, "0"
        self.seen = root / "seen"
        self.said: list[str] = []

    @property
    def options(self) -> tuple[str, ...]:
        return (*OPTIONS, "--rootdir", str(self.root), "-n", self.workers)

    def write(self, text: str, name: str = "test_mine.py") -> None:
        (self.tests / name).write_text(text.format(seen=str(self.seen)))

    def attack(self, *, minutes: float = 60, rounds_max: int = 2) -> int:
        return run.attack(
            [str(self.tests)],
            minutes=minutes,
            first_seed=40,
            options=self.options,
            rounds_max=rounds_max,
            say=self.said.append,
        )

    def play(self, *, plan: Plan | None = None, is_over: Callable[[], bool] = lambda: False) -> run.Round:
        return run.play([str(self.tests)], 40, plan, options=self.options, is_over=is_over)

    def lines(self, word: str) -> list[str]:
        return [line for line in self.said if word in line]


def is_alive(process: Path) -> bool:
    """Whether this folder of /proc is of a process that still runs."""
    try:
        return process.joinpath("stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    monkeypatch.chdir(tmp_path)
    # As `make attack` has it: what is started imports what this process does.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / part) for part in (".", "tests")))
    yield Folder(tmp_path)


def test_without_a_seed_a_test_draws_what_it_always_draws_and_with_one_something_else() -> None:
    assert Chance(None)(75).random() == Random(75).random()
    assert Chance(None)("75 3").random() == Random("75 3").random()
    assert Chance("1")(75).random() == Chance("1")(75).random()
    assert len({Chance(seed)(own).random() for seed in (None, "1", "2") for own in (75, 76)}) == 6


@only_slow
def test_what_draws_is_repeated_with_other_seeds_and_all_rounds_are_added_up(folder: Folder) -> None:
    folder.workers = "2"
    folder.write(DRAWN)
    assert folder.attack() == 0
    numbers = [int(number) for number in folder.seen.read_text().split()]
    assert numbers == [seed(7).randrange(1 << 30) for seed in (Chance(None), Chance("40"), Chance("41"))]
    (row,) = folder.lines("test_mine.py")
    assert row.split(maxsplit=3)[1:] == ["4", "held", "3 numbers, 1 others"]
    assert folder.lines("seeds 40 to 41")


def test_what_broke_is_named_with_its_seed_below_the_whole_table(folder: Folder) -> None:
    folder.write(
        f"import os\n{DRAWN}".replace(
            "    tally", "    assert os.environ.get(SEED) != '41'\n    tally", 1
        ).replace("SEED", repr(SEED))
    )
    assert folder.attack() == 1
    assert folder.lines("BROKE: ") == [
        "BROKE: FELIX_ATTACK_SEED=41 python -m pytest more-attacks/test_mine.py::test_drawn"
    ]
    assert all(folder.lines(statement.says) for statement in STATEMENTS)


def test_what_broke_in_the_first_round_is_named_without_a_seed(folder: Folder) -> None:
    folder.write("import pytest\n\n@pytest.fixture\ndef broken():\n    1 / 0\n\ndef test_b(broken): pass\n")
    assert folder.attack() == 1
    assert folder.lines("BROKE: ") == ["BROKE: python -m pytest more-attacks/test_mine.py::test_b"]


@pytest.mark.parametrize(
    ("text", "said"), [("import nothing_of_this_name\n", "pytest ended with"), ("", "no test ran")]
)
def test_a_round_that_tells_nothing_is_no_success(folder: Folder, text: str, said: str) -> None:
    folder.write(text)
    assert folder.attack() == 1
    assert folder.lines(f"the first round: {said}")


def test_without_time_everything_is_played_once(folder: Folder) -> None:
    folder.write(DRAWN)
    assert folder.attack(minutes=0, rounds_max=9) == 0
    assert len(folder.seen.read_text().split()) == 1


def test_a_test_that_would_not_end_in_time_is_not_begun(folder: Folder) -> None:
    folder.write(DRAWN)
    late = "more-attacks/test_mine.py::test_drawn"
    played = folder.play(plan=Plan(time.time() + 3_600, {late: 7_200}))
    assert {test.test.partition("::")[2]: test.outcome for test in played.tests} == {
        "test_drawn": Outcome.SKIPPED,
        "test_not_drawn": Outcome.HELD,
    }
    assert not folder.seen.exists() and not played.problem


def test_what_hangs_is_stopped_with_its_processes_and_named(folder: Folder) -> None:
    """It ignores interrupts, and so does what it started."""
    folder.workers = "1"
    folder.write("""
import signal, subprocess, time

def test_hangs():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "3000"])
    with open({seen!r}, "w") as seen:
        print(child.pid, file=seen, flush=True)
    time.sleep(3000)
""")
    played = folder.play(is_over=lambda: folder.seen.exists() and folder.seen.read_text().endswith("\n"))
    assert [test.outcome for test in played.tests] == [Outcome.STOPPED]
    child = Path("/proc") / folder.seen.read_text().strip()
    if Path("/proc/self").exists():
        while is_alive(child):
            time.sleep(0.05)
    bad = [line.text for line in run.summary([played], 1) if line.is_bad]
    assert "STOPPED: FELIX_ATTACK_SEED=40 python -m pytest more-attacks/test_mine.py::test_hangs" in bad
    assert "the round of seed 40: it was stopped, since the time was over" in bad


def test_a_test_begins_where_twice_its_longest_time_is_left() -> None:
    def of(seconds: float, *, draws: bool = True, outcome: Outcome = Outcome.HELD) -> run.Round:
        tests = [Tried("a", outcome, seconds, (), draws), Tried("b", Outcome.HELD, 1, (), draws)]
        return run.Round(None, tests, "")

    seconds = run.left_for([of(10), of(30), of(20)])
    assert seconds == {"a": 60, "b": 2}
    assert run.fitting(seconds, 60) == ["a", "b"] and run.fitting(seconds, 59) == ["b"]
    assert run.fitting(seconds, 1) == []
    assert run.left_for([of(10, draws=False)]) == {}
    assert run.left_for([of(10), of(0, outcome=Outcome.SKIPPED)])["a"] == 20


def test_a_cell_of_the_table_counts_the_tests_that_tried_it() -> None:
    path = "tests/attacks/test_f13_store_administrator.py"
    held, broke = (Tried(f"{path}::{each}", each, 1, (), False) for each in (Outcome.HELD, Outcome.BROKE))
    good, bad = claims([held, held]), claims([held, broke])
    assert any("store administrator (2 held)" in line.text for line in good)
    assert not any(line.is_bad for line in good)
    assert any("store administrator (1 held, 1 BROKE)" in line.text and line.is_bad for line in bad)


def test_a_record_that_was_cut_off_is_read_up_to_there() -> None:
    phases = [
        Phase("a", "began"), Phase("b", "began"), Phase("a", "setup", "passed", 1.0),
        Phase("a", "call", "passed", 2.0, (("cases", 3),), draws=True), Phase("a", "teardown", "passed", 3.0),
    ]  # fmt: skip
    record = b"".join(map(encode, phases))
    assert decode(record) == phases
    assert tried(phases) == [
        Tried("a", Outcome.HELD, 6.0, (("cases", 3),), True),
        Tried("b", Outcome.STOPPED, 0.0, (), False),
    ]
    for cut in range(len(record) - 1):
        assert decode(record[:cut]) == phases[: record[:cut].count(b"\n")]
