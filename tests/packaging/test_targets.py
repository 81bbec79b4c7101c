"""What `make test` leaves out runs in another target, and in continuous integration where it is said to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import long_runs
import pytest
import slow_runs

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"


def files_of(variable: str) -> set[Path]:
    """Test files that a variable of the Makefile names by a grep of its own."""
    makefile = (ROOT / "Makefile").read_text()
    (pattern,) = re.findall(
        rf"^{variable} = .*grep -rlE --include='test_\*\.py' '(.*)' tests\)", makefile, re.M
    )
    return {path for path in TESTS.rglob("test_*.py") if re.search(pattern, path.read_text(), re.M)}


@pytest.mark.parametrize(
    ("variable", "names"),
    [("SLOW", ["only_slow"]), ("LONG", ["only_long", "long_runs", "seeded"])],
)
def test_a_target_names_every_file_that_it_is_for(variable: str, names: list[str]) -> None:
    used = re.compile(rf"(@|marks=|= |\[|, )(\w+\.)?({'|'.join(names)})\b")
    using = {path for path in TESTS.rglob("test_*.py") if used.search(path.read_text())} - {Path(__file__)}
    assert using and using <= files_of(variable)


def test_continuous_integration_checks_and_tests_with_every_part() -> None:
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "make check" in commands
    assert "FELIX_REQUIRE_PARTS=1 make test" in commands, "a part that is missing fails it"


def test_what_is_skipped_says_which_target_runs_it() -> None:
    assert f"{slow_runs.SLOW}=1" in (ROOT / "Makefile").read_text()
    assert "make test-slow" in slow_runs.REASON and "make test-long" in str(
        long_runs.only_long.kwargs["reason"]
    )


def test_who_names_files_runs_all_of_them_and_a_run_of_everything_leaves_the_slow_ones_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\ntestpaths = tests\nmarkers = only_slow: x\npythonpath = {TESTS}\n"
    )
    (tmp_path / "conftest.py").write_text(
        "from slow_runs import choose\n\ndef pytest_collection_modifyitems(config, items): choose(config, items)\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(
        "import pytest\nfrom slow_runs import only_slow\n\ndef test_short(): pass\n\n"
        "@pytest.mark.parametrize('case', [1, pytest.param(2, marks=only_slow)])\ndef test_cases(case): pass\n"
    )

    def told(*words: str, **more: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != slow_runs.SLOW} | more
        command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout

    everything = told()
    assert "2 passed, 1 skipped" in everything and slow_runs.REASON in everything, everything
    assert "3 passed" in told("tests")
    for words in ((), ("tests",)):
        assert "1 passed, 2 deselected" in told(*words, **{slow_runs.SLOW: "1"})
