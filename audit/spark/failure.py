"""What Spark ends a report with, in words: no stack of Java or Python for who asked for it. Pure but for the classes that it knows.

A task's exception reaches the driver as text. Of that the last line counts, which names the exception and what it says. Where it is a log that does
not hold, that is a refusal as any other; what else keeps a report from being made says so. Callers: audit.spark.report.
"""

from __future__ import annotations

import re
from typing import Final

import audit.errors
from felix import errors
from felix.errors import Code, CorruptionError, FelixError, TamperError

WORDS_CHARS_MAX: Final = 400
"""Of what Spark says, which may quote a whole plan."""

_RAISED: Final = re.compile(r"(?:\w+\.)*(\w+): (.*)", re.DOTALL)


class ReportFailedError(FelixError):
    """Spark, or the machine, could not make the report. Nothing is said of the logs."""

    default_code = Code.INTERNAL


def in_words(error: Exception) -> FelixError | None:
    """TamperError where a task found that a log does not hold; ReportFailedError for whatever else Spark ended with; None of what is not from Spark."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if not isinstance(error, (PySparkException, Py4JError)):
        return None
    kind, said = _raised(str(error))
    if _is_corruption(kind):
        return TamperError(said)
    words = f"{kind}: {said}" if kind else said
    return ReportFailedError(
        f"No report was made: {words[:WORDS_CHARS_MAX].rstrip('.')}.",
        hint="Where it is a file that could not be read, see to it. Where memory ran out, or a cluster went away, try again with more of it, or with fewer logs.",
    )


def _raised(text: str) -> tuple[str, str]:
    """The name of the exception, where a task raised it, and what it says."""
    lines = [line for line in text.partition("\n\nJVM stacktrace")[0].splitlines() if line.strip()]
    if "Traceback (most recent call last):" in text:
        for at in range(len(lines) - 1, -1, -1):
            if not lines[at][0].isspace() and (found := _RAISED.fullmatch(lines[at])):
                return found[1], found[2]
    return "", lines[0].strip() if lines else "Spark did not say why"


def _is_corruption(name: str) -> bool:
    found = (getattr(module, name, None) for module in (errors, audit.errors))
    return any(isinstance(each, type) and issubclass(each, CorruptionError) for each in found)
