"""Writers of the data source `felix`: rows of a task, published by an idempotent producer.

A task publishes its rows in their order and answers once all of them are acknowledged as the stream's durability says. A
log takes nothing back: what a task published stays when the task or the job fails afterwards, and a repeated task
publishes again. Within one attempt nothing is doubled, whatever happens to the connection.

Exactly once needs the stream's help: where it has deduplication, each record carries a message id made of the query, the
micro-batch, the partition, the row's place in it and what the row holds, so that a repeated task is recognised record by
record. That holds if the repeated task has the same rows in the same order, and comes within the stream's window. Where it
has others, or in another order, these are new records: doubled at worst. Without the row's contents in its id, a row that
takes another's place would be taken for a repetition, and be lost. An id that a row brings itself, in its headers, is left as
it is.

The SDK sends a record with an id to the shard that its key says or, without a key, its id: a repetition reaches the shard
that remembers it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from audit.spark.stream_access import RegionThread
from audit.spark.stream_columns import Row, rows_of
from audit.spark.stream_options import WriteOptions
from felix.batch import MESSAGE_ID_HEADER, encode_headers
from felix.errors import Code, FelixError
from felix.publisher import Publisher

if TYPE_CHECKING:
    import pyarrow as pa

_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"
"""Local properties that Spark gives to the tasks of a micro-batch (org.apache.spark.sql.execution.streaming); the query's id
stays over restarts from one checkpoint."""

MESSAGE_ID_DIGEST_BYTES: Final = 24
"""In hex it stays within the 64 bytes of a message id; no two rows meet by chance."""
_PLACE: Final = Struct(">QQQ")

log = logging.getLogger("felix.spark")


@dataclass(frozen=True, slots=True)
class Published(WriterCommitMessage):
    """What one task published: records, of which those that the stream knew already count too."""

    records: int


def publish_rows(options: WriteOptions, id_prefix: str, batches: Iterator[pa.RecordBatch]) -> Published:
    """Publish the rows of one task, in order; returns once all are acknowledged.

    `id_prefix` begins the message ids, should the stream remember them. Raises what the broker refuses, and RequestError
    where a row makes no record; what was published before stays.
    """
    with RegionThread(options.access) as thread:
        client, name = thread.client, options.access.stream
        deduplication = thread.run(client.describe_stream(name)).views.deduplication
        records = 0

        async def begin() -> Publisher:
            publisher = client.stream(name).publisher(compress=options.compress)
            await publisher.open()
            return publisher

        publisher = thread.run(begin())
        for batch in batches:
            rows = list(rows_of(batch))
            if deduplication is not None:
                rows = identified(rows, id_prefix, records)
            records += len(rows)
            # Waits while the publisher's buffer is full: Spark gives the next batch when there is room for it.
            thread.run(_send(publisher, rows))
        thread.run(publisher.close())
    if deduplication is not None and records > deduplication.ids_max:
        log.warning(
            "A task published %d records into %s, whose shards remember %d message ids each: were it repeated, the first "
            "ones could be doubled",
            records,
            name,
            deduplication.ids_max,
        )
    return Published(records)


def identified(rows: Sequence[Row], prefix: str, first: int) -> list[Row]:
    """The rows with message ids, which count from `first`; those that bring an id of their own keep it."""
    begun = blake2b(prefix.encode(), digest_size=MESSAGE_ID_DIGEST_BYTES)
    found = []
    for number, row in enumerate(rows, first):
        headers = row.headers or {}
        if MESSAGE_ID_HEADER not in headers:
            digest = begun.copy()
            digest.update(_PLACE.pack(number, len(row.key or b""), len(row.value)))
            for part in (row.key or b"", row.value, encode_headers(dict(sorted(headers.items())))):
                digest.update(part)
            row = row._replace(headers=headers | {MESSAGE_ID_HEADER: digest.hexdigest().encode()})
        found.append(row)
    return found


async def _send(publisher: Publisher, rows: Sequence[Row]) -> None:
    for value, key, headers in rows:
        await publisher.send(value, key, headers)


def _task() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "rows are written by tasks"
    return context


class BatchWriter(DataSourceArrowWriter):
    """`df.write`. Made on the driver; its copies in the tasks share the id of the write."""

    def __init__(self, options: WriteOptions, write_id: str) -> None:
        self._options = options
        self._write_id = write_id

    @classmethod
    def of(cls, options: WriteOptions) -> BatchWriter:
        """With the id that the job names, else one of its own."""
        return cls(options, options.write_id or uuid4().hex)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        """Publish the rows of one task."""
        return publish_rows(self._options, f"{self._write_id}/{_task().partitionId()}", iterator)


class StreamingWriter(DataSourceStreamArrowWriter):
    """`df.writeStream`. A micro-batch that is repeated after a restart has the ids that it had."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        """Publish the rows of one task of one micro-batch."""
        task = _task()
        query, batch = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_ID)
        if not query or not batch:
            raise FelixError(
                "Spark does not say which query and micro-batch this task belongs to.",
                code=Code.UNSUPPORTED,
                hint="Use a trigger of micro-batches (processingTime, availableNow).",
            )
        return publish_rows(
            self._options, f"{self._options.write_id or query}/{batch}/{task.partitionId()}", iterator
        )
