"""The process's Spark session, for the reports of `make ordinary`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """A session of its own."""
    pytest.importorskip("pyspark")
    from audit.spark.java import JavaError, find_java
    from audit.spark.session import open_session

    try:
        find_java()
    except JavaError as error:
        pytest.skip(f"no Java that Spark can use: {error}")
    with open_session("local[2]", small=True) as session:
        yield session
