"""Revenue per country and hour, from a stream of orders, by a streaming query that may be ended anywhere.

    python revenue.py FOLDER

Publishes a day of orders, then lets Spark add up what it has not seen yet. The sums and the query's checkpoint stay in
FOLDER: run it again, and the next day is added. Exits with 6 if the sums are not those of the orders in the stream.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import felix.spark
import felix.sync
from audit.spark.session import open_session

STREAM = "acme/payments/web-orders"
COUNTRIES = ("DE", "FR", "IE", "NL", "US")
ORDERS = 5_000
MISMATCH = 6


def cents_of(number: int) -> int:
    return 500 + number * 37 % 9_500


def publish_a_day() -> int:
    """The orders of the day behind those in the stream; how many there are in all."""
    with felix.sync.connect("us-east") as region:
        if STREAM not in [state.stream for state in region.list_streams(STREAM)]:
            region.create_stream(STREAM, shards=2)
        first = sum(shard.high_watermark for shard in region.describe_stream(STREAM).state)
        day = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=first // ORDERS)
        with region.stream(STREAM).publisher() as publisher:
            for number in range(first, first + ORDERS):
                order = {
                    "country": COUNTRIES[number * number % 7 % len(COUNTRIES)],
                    "cents": cents_of(number),
                    "at": (day + timedelta(seconds=17 * (number - first))).isoformat(),
                }
                publisher.send(json.dumps(order).encode(), key=b"%d" % number)
    return first + ORDERS


def add_up(folder: Path) -> None:
    """Add what is in the stream and was not added yet."""

    def upsert(sums: Any, _batch: int) -> None:
        """The new value of each sum that changed: a micro-batch that Spark repeats writes the same again."""
        rows = [tuple(row) for row in sums.collect()]
        with sqlite3.connect(folder / "revenue.sqlite") as table:
            table.executemany("INSERT OR REPLACE INTO revenue VALUES (?, ?, ?, ?)", rows)

    with open_session(small=True) as spark:
        felix.spark.register(spark)
        orders = (
            spark.readStream.format("felix")
            .option("region", "us-east")
            .option("stream", STREAM)
            .option("startingOffsets", "earliest")
            .option("maxRecordsPerTrigger", ORDERS // 2)
            .schema("value binary")
            .load()
        )
        sums = spark.sql(
            """
            SELECT o.country, date_format(window(o.at, '1 hour').start, 'yyyy-MM-dd HH:mm') AS hour,
                   count(*) AS orders, sum(o.cents) AS cents
            FROM (
                SELECT from_json(cast(value AS string), 'country string, cents bigint, at timestamp') AS o FROM {orders}
            )
            GROUP BY ALL
            """,
            orders=orders,
        )
        writer = sums.writeStream.outputMode("update").foreachBatch(upsert)
        writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    with sqlite3.connect(folder / "revenue.sqlite") as table:
        table.execute(
            "CREATE TABLE IF NOT EXISTS revenue "
            "(country TEXT, hour TEXT, orders INT, cents INT, PRIMARY KEY (country, hour))"
        )
    published = publish_a_day()
    add_up(folder)
    with sqlite3.connect(folder / "revenue.sqlite") as table:
        print("country  orders       revenue  best hour")
        for country, orders, cents, best in table.execute(
            "SELECT country, sum(orders), sum(cents), (SELECT hour FROM revenue AS other WHERE other.country = "
            "revenue.country ORDER BY cents DESC LIMIT 1) FROM revenue GROUP BY country ORDER BY country"
        ):
            print(f"{country:7}  {orders:6}  {cents / 100:12,.2f}  {best}")
        found = table.execute("SELECT sum(orders), sum(cents) FROM revenue").fetchone()
    expected = (published, sum(map(cents_of, range(published))))
    print(
        f"{found[0]} orders, {found[1] / 100:,.2f}; in the stream: {expected[0]} orders, {expected[1] / 100:,.2f}"
    )
    return 0 if tuple(found) == expected else MISMATCH


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "revenue-state")))
