"""A Spark driver of its own, to be killed: one stream into Parquet files and into a table by upsert, from two checkpoints.

    python two_sinks.py HOME STREAM FOLDER (run | drain)

`run` goes on until it is killed; `drain` takes what is there and ends.
"""

from __future__ import annotations

import faulthandler
import signal
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import felix.spark
from audit.spark import session

PAUSE_S = 0.3


def upsert(table: Path, rows: Any, batch: int) -> None:
    """Rows by what names them. A repeated micro-batch writes what stands there already."""
    found = [(row["shard"], row["offset"], row["text"], batch) for row in rows.collect()]
    with sqlite3.connect(table) as database:
        database.executemany(
            "INSERT INTO records VALUES (?, ?, ?, ?, 1) ON CONFLICT (shard, place) DO UPDATE SET times = times + 1",
            found,
        )
    # Written, and not yet in the checkpoint: where a kill makes Spark repeat the whole micro-batch.
    time.sleep(PAUSE_S)


def main(home: str, stream: str, folder: Path, mode: str) -> None:
    table = folder / "table.sqlite"
    with sqlite3.connect(table) as database:
        database.execute(
            "CREATE TABLE IF NOT EXISTS records "
            "(shard INT, place INT, text TEXT, batch INT, times INT, PRIMARY KEY (shard, place))"
        )
    with session.open_session("local[2]", small=True) as spark:
        felix.spark.register(spark)
        draining = mode == "drain"
        trigger: dict[str, Any] = (
            {"availableNow": True} if draining else {"processingTime": "100 milliseconds"}
        )

        def start(name: str, writer: Any) -> Any:
            return writer.option("checkpointLocation", str(folder / name)).trigger(**trigger).start()

        rows = (
            spark.readStream.format("felix")
            .options(
                region="us-east", home=home, stream=stream, identity="analyst", startingOffsets="earliest"
            )
            .option("maxRecordsPerTrigger", 100_000 if draining else 300)
            .load()
            .selectExpr("shard", "offset", "cast(value as string) as text")
        )
        files = rows.writeStream.format("parquet").option("path", str(folder / "out"))
        upserts = rows.writeStream.foreachBatch(lambda frame, batch: upsert(table, frame, batch))
        try:
            # One after the other: each starts Python processes of its own, which a busy machine need not do at once.
            first = start("files", files)
            while first.isActive and first.lastProgress is None:
                time.sleep(0.1)
            for query in (first, start("upserts", upserts)):
                query.awaitTermination()
        except Exception as error:
            # Read here: what Spark says of it is gone with the session. The other one may go on in a shared session.
            for query in spark.streams.active:
                query.stop()
            sys.exit(f"a query ended: {error}")


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
