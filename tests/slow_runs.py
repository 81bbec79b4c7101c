"""What `make test-slow` runs and `make test` does not: tests that take long and say little more than a shorter one that `make test` has.

`.ci/run` runs `make test` alone, within 25 minutes on a slow machine; both run before a release. Whoever names files or folders to pytest runs all that stands in them.
"""

from __future__ import annotations

import os

import pytest

SLOW = "FELIX_SLOW"
"""Set by `make test-slow`: of what pytest collects, only these tests run."""
IS_SLOW = SLOW in os.environ
REASON = "make test-slow runs this"

only_slow = pytest.mark.only_slow
"""A test, or a parameter's value by `pytest.param(..., marks=only_slow)`. Its file imports this: that is how the Makefile finds it."""


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave in `items` what this run runs; in a run of everything, skip what `make test-slow` runs."""
    slow = [item for item in items if item.get_closest_marker(only_slow.name)]
    if IS_SLOW:
        others = [item for item in items if not item.get_closest_marker(only_slow.name)]
        config.hook.pytest_deselected(items=others)
        items[:] = slow
    elif config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        for item in slow:
            item.add_marker(pytest.mark.skip(reason=REASON))
