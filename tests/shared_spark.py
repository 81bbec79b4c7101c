"""The process's Spark session in place of those that programs open: for tests of what they do with it, not of its start."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

from audit.spark import report, session
from cli.main import main


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
