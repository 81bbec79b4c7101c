"""`make attack`: every attack once, then those that draw random cases again and again, each round with another seed, until the time is over.

    PYTHONPATH=.:tests python -m attacks.run --minutes 20 --workers 6

The first round is that of `make test`, and is played whole however short the time is. A test begins in a later round only if twice the longest that it took
fits into the time that is left. What does not end a minute after that is stopped, and counts as broken.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec
from attacks.chance import SEED
from attacks.conftest import PLAN, RECORD, SCALE, Plan
from attacks.tallies import Line, Outcome, Tried, claims, counts, decode, tried

TESTS = "tests/attacks"
ALLOWANCE = 2
"""times the longest that a test took: the machine may be busier"""
FIRST_ROUND_MAX_S = 3_600
"""The first round takes some minutes on two cores. What takes an hour hangs."""
GRACE_S = 60
"""after the end of the time, for a test that takes longer than ever, and for what tests leave to be stopped"""
START_S = 10
"""for pytest to start its processes, and to end them"""
STOP_S = 20
"""for pytest to end its processes once it is told to"""
ASK_S = 0.2
SEEDS_MAX = 1 << 32
NOTHING_RAN = 5
"""pytest's exit status"""


class Round(NamedTuple):
    """What was tried with one seed."""

    seed: int | None
    """none: what `make test` tries"""
    tests: list[Tried]
    problem: str
    """why it tells less than it should; empty: it does not"""


def play(
    tests: Iterable[str],
    seed: int | None,
    plan: Plan | None,
    *,
    options: Sequence[str],
    is_over: Callable[[], bool],
) -> Round:
    """Run pytest over these. Where the time is over before it has ended, it is stopped with all that it started."""
    with tempfile.TemporaryDirectory(prefix="felix-attack-") as folder:
        record = Path(folder) / "record"
        record.touch()
        environment = {**os.environ, RECORD: str(record), SCALE: "1"}
        for name in (SEED, PLAN):
            environment.pop(name, None)
        if seed is not None:
            environment[SEED] = str(seed)
        if plan is not None:
            written = Path(folder) / "plan"
            written.write_bytes(msgspec.json.encode(plan))
            environment[PLAN] = str(written)
        command = [sys.executable, "-m", "pytest", "-q", "--dist", "loadfile", *options, *tests]
        # A group of its own: a test's processes are stopped with it.
        with subprocess.Popen(command, env=environment, start_new_session=True) as pytest:
            try:
                while pytest.poll() is None and not is_over():
                    time.sleep(ASK_S)
                was_stopped = pytest.poll() is None
            finally:
                stop(pytest)
        found = tried(decode(record.read_bytes()))
    problem = ""
    if was_stopped:
        problem = "it was stopped, since the time was over"
    elif pytest.returncode not in (0, 1):
        problem = (
            "no test ran" if pytest.returncode == NOTHING_RAN else f"pytest ended with {pytest.returncode}"
        )
    elif pytest.returncode == 1 and not any(each.outcome is Outcome.BROKE for each in found):
        problem = "pytest ended with 1, and named no test"
    return Round(seed, found, problem)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End it and all of its group: first as Ctrl-C does, so that tests put away what they made."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def left_for(rounds: Iterable[Round]) -> dict[str, float]:
    """The tests that draw, and the seconds that each must have before it begins."""
    longest: dict[str, float] = {}
    for each in rounds:
        for test in each.tests:
            if test.draws and test.outcome is not Outcome.SKIPPED:
                longest[test.test] = max(longest.get(test.test, 0.0), test.seconds)
    return {test: ALLOWANCE * seconds for test, seconds in longest.items()}


def fitting(seconds: Mapping[str, float], left_s: float) -> list[str]:
    """Which of them may begin."""
    return [test for test, needed in seconds.items() if needed <= left_s]


def summary(rounds: Sequence[Round], took_s: float) -> list[Line]:
    """What was tried in all rounds, the table of claims, and how to repeat what broke."""
    tests = [test for each in rounds for test in each.tests]
    seeds = [str(each.seed) for each in rounds if each.seed is not None]
    drawn = f", and {len(seeds)} of what draws (seeds {seeds[0]} to {seeds[-1]})" if seeds else ""
    first = "one round of everything" if rounds else "no round was played to its end"
    lines = [
        _title("what the attacks tried"),
        Line(f"{first}{drawn}: {int(took_s) // 60} min {int(took_s) % 60} s"),
        *counts(tests),
        _title("what the evidence states, and against whom (docs/claims.md)"),
        *claims(tests),
    ]
    if late := sum(test.outcome is Outcome.SKIPPED for each in rounds[1:] for test in each.tests):
        lines.append(
            Line(f"\n{late} tests of later rounds were not begun: they would not have ended in time")
        )
    broken = [line for each in rounds for line in _broken(each)]
    return [*lines, _title("what broke"), *broken] if broken else lines


def _title(text: str) -> Line:
    return Line(f"\n{f' {text} ':=^120}")


def _broken(played: Round) -> list[Line]:
    """What broke in this round, and the command that repeats it."""
    seed = "" if played.seed is None else f"{SEED}={played.seed} "
    lines = [
        Line(f"{test.outcome}: {seed}python -m pytest {shlex.quote(test.test)}", is_bad=True)
        for test in played.tests
        if test.outcome in (Outcome.BROKE, Outcome.STOPPED)
    ]
    if played.problem:
        name = "the first round" if played.seed is None else f"the round of seed {played.seed}"
        lines.append(Line(f"{name}: {played.problem}", is_bad=True))
    return lines


def attack(
    tests: Sequence[str],
    *,
    minutes: float,
    first_seed: int,
    options: Sequence[str],
    rounds_max: int | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Play rounds until the time is over, and print what was tried. Returns the exit status: 0 if all held."""
    rounds, was_interrupted = list[Round](), False
    began = time.time()
    end = began + 60 * minutes
    try:
        rounds.append(
            play(tests, None, None, options=options, is_over=lambda: time.time() > began + FIRST_ROUND_MAX_S)
        )
        while rounds_max is None or len(rounds) <= rounds_max:
            seconds = left_for(rounds)
            chosen = fitting(seconds, end - time.time() - START_S)
            seed = (first_seed + len(rounds) - 1) % SEEDS_MAX
            if not chosen or rounds[-1].problem:
                break
            say(f"\nround {len(rounds) + 1}, {SEED}={seed}: {len(chosen)} of {len(seconds)} tests that draw")
            plan = Plan(end, seconds)
            played = play(chosen, seed, plan, options=options, is_over=lambda: time.time() > end + GRACE_S)
            if not played.problem and all(test.outcome is Outcome.SKIPPED for test in played.tests):
                break
            rounds.append(played)
    except KeyboardInterrupt:
        was_interrupted = True
    for line in summary(rounds, time.time() - began):
        say(line.text)
    if was_interrupted:
        say("\ninterrupted: the last round is not counted")
    return 1 if was_interrupted or any(_broken(each) for each in rounds) else 0


def interrupt(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C."""
    raise KeyboardInterrupt


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Tries every attack on the evidence, for some minutes.")
    parser.add_argument("--minutes", type=float, default=20, help="what draws is repeated for so long")
    parser.add_argument("--workers", default="6", help="test processes side by side")
    parser.add_argument("tests", nargs="*", default=[TESTS])
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(SEEDS_MAX))
    return attack(told.tests, minutes=told.minutes, first_seed=seed, options=("-n", told.workers))


if __name__ == "__main__":
    sys.exit(main())
