"""One Spark session, one report of five days and one region for the whole folder: starting each takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crossing_logs import Made, five_days, trust, write_world
from spark.lineage_endpoint import Again, Endpoint
from spark_region import SparkRegion, spark_region

from audit.spark.report import run_report
from felix.errors import UnavailableError


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_world(tmp_path_factory.mktemp("five-days"), five_days())


@pytest.fixture(scope="session")
def five(spark: Any, logs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Made:
    out = tmp_path_factory.mktemp("report") / "out"
    return Made(logs, run_report(logs, out, trust=trust(), session=spark))


@pytest.fixture(scope="session")
def again(spark: Any, logs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Again:
    """The same logs in another order, by another clock, in another time zone, and to somebody who does not take the lineage."""
    out, server = tmp_path_factory.mktemp("again") / "out", Endpoint(503)
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Pacific/Auckland")
    try:
        with pytest.raises(UnavailableError) as told:
            run_report(
                [str(path) for path in reversed(logs)], out, trust=trust(), session=spark, openlineage_url=server.url,
                clock=lambda: 0.0,
            )  # fmt: skip
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
        server.close()
    return Again(out, told.value, server.bodies)


@pytest.fixture(scope="session")
def region(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkRegion]:
    with spark_region(tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.fixture(scope="session")
def thousand(region: SparkRegion) -> str:
    """A stream of the numbers 0 to 999 in two shards, in many small batches."""
    name = region.stream()
    region.publish(name, 0, 1000, batch_records=37)
    return name
