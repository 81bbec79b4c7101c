"""The process's Spark session in place of those that programs open: for tests of what they do with it, not of its start."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import pytest

from audit.spark import report, session
from cli.main import main

SLOW_WORKER: Final = "Python worker failed to connect back"
"""Spark's own word where a Python worker takes more than ten seconds to start, which no setting makes longer. On a busy machine that happens; the
query ends, and whoever runs it starts it again."""
STARTS_MAX: Final = 15
"""Of five in a row none was in time on two processors that ten others wanted, too."""


def run_to_end(start: Callable[[], Any]) -> Any:
    """A streaming query that `start` starts, once it has ended; started again from its checkpoint where Spark gave its worker up."""
    for left in reversed(range(STARTS_MAX)):
        query = start()
        try:
            query.awaitTermination()
        except Exception as error:
            if SLOW_WORKER not in str(error) or not left:
                raise
        else:
            return query
    raise AssertionError("a query ends, or raises")


@contextmanager
def shared_session(spark: Any, **environment: str) -> Iterator[None]:
    """Inside, `open_session` gives `spark`, and leaves it running; Python in it, and here, sees these variables."""

    def open_session(*_: Any, **__: Any) -> AbstractContextManager[Any]:
        return nullcontext(spark)

    with pytest.MonkeyPatch.context() as patch:
        for module in (session, report):
            patch.setattr(module, "open_session", open_session)
        for name, value in environment.items():
            patch.setenv(name, value)
            patch.setitem(spark.sparkContext.environment, name, value)
        yield


def report_command(spark: Any, home: str | os.PathLike[str], *words: str) -> tuple[int, str, str]:
    """`felix audit report WORDS` in this process: how it ended, what it printed, and what it said on standard error."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with shared_session(spark), pytest.MonkeyPatch.context() as patch:
        patch.setenv("FELIX_HOME", str(home))
        patch.setattr(sys, "argv", ["felix", "audit", "report", *words])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        with pytest.raises(SystemExit) as end:
            main()
    assert isinstance(end.value.code, int)
    for stream in (out, err):
        stream.seek(0)
    return end.value.code, out.read(), err.read().replace("\n", " ")
