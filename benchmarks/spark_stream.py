"""Rows per second out of a stream into Spark, beside the plain SDK subscriber, in the same run.

    python benchmarks/spark_stream.py [RECORDS] [PAYLOAD_BYTES]

A region of its own on loopback, one stream of two shards, everything on this machine. The SDK's subscriber takes whole
batches and their payloads; Spark reads in two tasks into a sink that drops rows (`noop`), JVM warm, its planning and the tasks'
connections included. The median of three rounds that take turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import felix.spark
import felix.sync
from audit.spark.session import open_session

STREAM = "acme/bench/rows"
ROUNDS = 3


def rate(records: int, work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return records / (time.perf_counter() - began)


def main(records: int, payload_bytes: int) -> None:
    from region_process import BrokerProcess, fixed_region

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["FELIX_HOME"] = str(home)
        broker = BrokerProcess(fixed_region(home), home)
        try:
            broker.wait()
            with felix.sync.connect("us-east") as region:
                region.create_stream(STREAM, shards=2)
                with region.stream(STREAM).publisher() as publisher:
                    publisher.send_many(
                        (b"%-*d" % (payload_bytes, number) for number in range(records)),
                        (b"%d" % number for number in range(records)),
                    )

                def subscribe() -> None:
                    left = records
                    with region.stream(STREAM).subscribe("earliest") as subscription:
                        while left:
                            left -= len(subscription.next_batch().payloads())

                with open_session("local[2]") as spark:
                    felix.spark.register(spark)

                    def read(schema: str) -> Callable[[], None]:
                        reader = (
                            spark.read.format("felix").option("region", "us-east").option("stream", STREAM)
                        )
                        frame = (reader.schema(schema) if schema else reader).load()
                        return lambda: frame.write.format("noop").mode("append").save()

                    ways = {
                        "SDK": subscribe,
                        "Spark, value": read("value binary"),
                        "Spark, all columns": read(""),
                    }
                    found: dict[str, list[float]] = {name: [] for name in ways}
                    read("")()
                    for _ in range(ROUNDS):
                        for name, work in ways.items():
                            found[name].append(rate(records, work))
            base = statistics.median(found["SDK"])
            for name, rates in found.items():
                middle = statistics.median(rates)
                print(f"{name:20} {middle:12,.0f} rows/s  {middle / base:6.2f} of the SDK")
        finally:
            broker.terminate()


if __name__ == "__main__":
    main(*(int(text) for text in (sys.argv[1:3] + ["2000000", "100"][len(sys.argv) - 1 :])))
