"""The Spark data source `felix_audit`: one audit log as rows, one row per leaf, verified where it is read.

    felix.spark.register(spark)
    leaves = spark.read.format("felix_audit").option("path", "/data/audit/us-east").load()

Columns: `log` (the origin), `leaf_index`, `audit.leaf.LEAF_COLUMNS`, `batch_sha256`. Options:

- `path`      the log's folder, or a URL that fsspec opens. Needed.
- `entries`   `true`: a column `entries`, the leaf's record entries as an array of structs. Off by default:
              sums over leaves must not drag 68 bytes per record along.
- `tampered`  `fail` (the default): the first leaf that does not hold ends the job. `rows`: such a leaf becomes a row
              whose column `problem` says what is wrong, so that one run finds them all. So does one of which, by a mistake of ours,
              no row can be made.
- `size`      how many leaves to read; by default what the checkpoint says. The report gives the size it verified.
- `bundles`   entry bundles per partition.
- `roots`     what each bundle hashes to (`audit.bundle_roots`), in base64: the report gives what it held to the checkpoint.
- `trust`     whose keys are trusted, as `audit.trust.Trust.encode` gives it. Without it, receipts are compared with their
              leaves, and their signatures are not checked.

What is verified here, in the executors: each leaf decodes; its RFC 6962 hash is the one in its level-0 tile; each
full level-0 tile hashes to its place in level 1 (with `roots`, each tile to the hash given); each receipt agrees with its leaf. What is left for the driver: levels 1 and up, the root, the
signature (`audit.spark.verification`). Reading without the driver's part shows damage, not forgery.

Executors import this module by name: `audit.spark.session` ships the packages where the master is not local.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from audit.bundle_roots import root_over
from audit.checkpoint import Checkpoint
from audit.keys_in_log import KeysInLog, keys_of_log
from audit.leaf import (
    ENTRY_COLUMNS,
    LEAF_COLUMNS,
    Header,
    Kind,
    Leaf,
    Side,
    decode_leaf,
    iter_entries,
    leaf_row,
)
from audit.merkle import HASH_BYTES, TILE_WIDTH, leaf_hash, split_hashes
from audit.note import parse_note
from audit.position import LinkShard
from audit.receipt import differences, read_unverified
from audit.spark.files import open_files, read_checkpoint
from audit.tile import Files, bundle_path, read_bundle, read_tile, tile_path
from audit.trust import Trust
from audit.unclean_leaf import told
from audit.unjudged import Unjudged
from felix.errors import CorruptionError, RequestError, TamperError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

FORMAT: Final = "felix_audit"
BUNDLES_PER_PARTITION: Final = 16
"""4,096 leaves: some tenths of a second to verify, so that a task costs more than its start."""

PLACE_COLUMNS: Final = (("log", "string"), ("leaf_index", "bigint"))
BATCH_COLUMNS: Final = (("batch_sha256", "string"), ("receipt_leaf", "bigint"), ("receipt_ms", "bigint"))
"""SHA-256 of the packed entries of a whole batch, all its leaves together, in the row of its last leaf. Both sides of a
link have the same one, however each cut the batch into leaves; in the row of an egress ACK what its receipt says. Null where the batch's leaves are not all in one
partition, one after the other: then nobody has added them up yet. In the row of an egress ACK also which leaf of the destination's log
its receipt says that the arrival begins with, and when (ms, by the destination's clock) it says that it was signed."""
OPEN_BATCHES_MAX: Final = 1_024
"""Batches whose first leaves were read and whose last is to come. An append writes the leaves of a batch without a
break, so there is one, or as many as bridges write at a time."""
_OPTIONS: Final = ("path", "entries", "tampered", "size", "bundles", "roots", "trust")


class Settings(NamedTuple):
    """The options, read and checked."""

    path: str
    entries: bool
    as_rows: bool
    size: int | None
    bundles: int
    roots: bytes
    trust: Trust | None


def read_options(options: Mapping[str, str]) -> Settings:
    """Raises RequestError naming the option and what was expected."""
    given = {name.lower(): value for name, value in options.items()}
    unknown = sorted(set(given) - set(_OPTIONS))
    if unknown:
        raise RequestError(f"{FORMAT} has no option {unknown[0]!r}; it has {', '.join(_OPTIONS)}.")
    if not given.get("path"):
        raise RequestError(f"{FORMAT} needs the option 'path': the folder or URL of one audit log.")
    tampered = given.get("tampered", "fail")
    if tampered not in ("fail", "rows"):
        raise RequestError(f"The option 'tampered' is {tampered!r}; expected fail or rows.")
    entries = given.get("entries", "false").lower()
    if entries not in ("true", "false"):
        raise RequestError(f"The option 'entries' is {entries!r}; expected true or false.")
    return Settings(
        given["path"],
        entries == "true",
        tampered == "rows",
        _count("size", given["size"], 0) if "size" in given else None,
        _count("bundles", given.get("bundles", str(BUNDLES_PER_PARTITION)), 1),
        _roots(given.get("roots", "")),
        Trust.decode(given["trust"]) if given.get("trust") else None,
    )


def _roots(text: str) -> bytes:
    try:
        roots = b64decode(text, validate=True)
    except ValueError as error:
        raise RequestError(f"The option 'roots' is not base64: {error}.") from error
    if len(roots) % HASH_BYTES:
        raise RequestError(f"The option 'roots' is no row of {HASH_BYTES}-byte hashes.")
    return roots


def _count(name: str, text: str, least: int) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise RequestError(f"The option {name!r} is {text!r}; expected a number, {least} or more.")
    return int(text)


def columns(settings: Settings) -> list[tuple[str, str]]:
    """The columns, with Spark SQL types, that these settings give."""
    chosen = [*PLACE_COLUMNS, *LEAF_COLUMNS, *BATCH_COLUMNS]
    if settings.entries:
        fields = ",".join(f"{name}:{kind}" for name, kind in ENTRY_COLUMNS)
        chosen.append(("entries", f"array<struct<{fields}>>"))
    if settings.as_rows:
        chosen.append(("problem", "string"))
    return chosen


def check_columns(schema: StructType, settings: Settings) -> None:
    """Raises RequestError where a schema asks for no column, whose Arrow batches have no rows either, or for one that these settings do not give:
    it would be empty in each row."""
    known = [name for name, _ in columns(settings)]
    if not schema.names:
        raise RequestError(f"The schema asks for no column of {FORMAT}; it has {', '.join(known)}.")
    unknown = sorted(set(schema.names) - set(known))
    if unknown:
        raise RequestError(f"{FORMAT} has no column {unknown[0]!r} here; it has {', '.join(known)}.")


class Found(NamedTuple):
    """A leaf as it was found: `leaf` is None where it cannot be read; `problem` is None where it holds."""

    leaf_index: int
    leaf: Leaf | None
    problem: str | None


def check_bundle(
    files: Files, bundle: int, size: int, keys: KeysInLog | None = None, root: bytes = b""
) -> Iterator[Found]:
    """The leaves of one entry bundle of a log of `size` leaves, each checked against its tile.

    `root`: what the tile must hash to; without it, what level 1 says where the tile is full. Signatures of receipts are checked
    where there are `keys` of the log.
    """
    first = bundle * TILE_WIDTH
    width = min(TILE_WIDTH, size - first)
    try:
        tile = read_tile(files, 0, bundle, size)
        if not root and width == TILE_WIDTH:
            at = bundle % TILE_WIDTH * HASH_BYTES
            root = read_tile(files, 1, bundle // TILE_WIDTH, size)[at : at + HASH_BYTES]
        if root and root_over(split_hashes(tile)) != root:
            raise TamperError(
                f"The tile {tile_path(0, bundle, width)} does not hash to its place in level 1: a tile was changed."
            )
    except CorruptionError as error:
        yield Found(first, None, f"Leaves {first} to {first + width - 1}: {error.sentence}")
        return
    try:
        leaves = read_bundle(files, bundle, size)
    except CorruptionError as error:
        yield Found(first, None, f"Leaves {first} to {first + width - 1}: {error.sentence}")
        return
    for position, data in enumerate(leaves):
        index = first + position
        if leaf_hash(data) != tile[position * HASH_BYTES : (position + 1) * HASH_BYTES]:
            yield Found(
                index,
                None,
                f"Leaf {index} in {bundle_path(bundle, width)} is not what was logged: "
                "its hash is not the one in the tree.",
            )
            continue
        try:
            leaf = decode_leaf(data)
            problem = _receipt_problem(index, leaf, keys)
        except CorruptionError as error:
            yield Found(index, None, f"Leaf {index} cannot be read: {error.sentence}")
            continue
        except Exception as error:
            yield Found(index, None, _unjudged.sentence(error, f"Leaf {index}"))
            continue
        yield Found(index, leaf, problem)


_unjudged: Final = Unjudged(FORMAT)


def _receipt_problem(index: int, leaf: Leaf, keys: KeysInLog | None) -> str | None:
    header = leaf.header
    if header.kind is not Kind.ACK or header.side is not Side.EGRESS:
        return None
    if not header.receipt:
        return f"Leaf {index}: an ACK without a receipt."
    try:
        receipt = (
            read_unverified(header.receipt) if keys is None else keys.open_receipt(header.receipt, index)
        )
        unlike = differences(receipt, header)
    except CorruptionError as error:
        return f"Leaf {index}: {error.sentence}"
    return f"Leaf {index}: its receipt says another {unlike[0]} than the leaf." if unlike else None


def _keys(files: Files, checkpoint: Checkpoint, trust: Trust) -> KeysInLog:
    """The keys of the log, as of this checkpoint; whether it is cosigned is not asked here."""
    return keys_of_log(
        trust, checkpoint, files, dict.fromkeys(trust.regions, checkpoint.size), checkpoint.size
    )


class BatchDigests:
    """Adds up the entries of batches that stand in several leaves. Fed with leaves in order."""

    def __init__(self) -> None:
        self._open: dict[tuple[object, ...], tuple[int, Any]] = {}

    def take(self, leaf: Leaf) -> str | None:
        """The batch's digest where this is its last leaf, and all others were taken before."""
        header = leaf.header
        if header.kind is not Kind.INTENT and (
            header.kind is not Kind.ACK or header.side is not Side.INGRESS
        ):
            return None
        if header.parts == 1:
            return sha256(leaf.entries).hexdigest()
        key = (header.kind, LinkShard.of(header), header.incarnation, header.envelope_sha256)
        part, state = (0, sha256()) if header.part == 0 else self._open.pop(key, (-1, None))
        if part != header.part or state is None:
            return None
        state.update(leaf.entries)
        if header.part == header.parts - 1:
            return state.hexdigest()
        if len(self._open) >= OPEN_BATCHES_MAX:
            self._open.pop(next(iter(self._open)))
        self._open[key] = (header.part + 1, state)
        return None


def _told(header: Header) -> tuple[str | None, int | None, int | None]:
    """What the receipt in an egress ACK says of the records, of the leaf and of the time; None where it cannot be read, which is a problem of its own,
    or says nothing of single records."""
    try:
        receipt = read_unverified(header.receipt)
    except TamperError:
        return None, None, None
    return receipt.entries_sha256.hex() or None, receipt.ingress_index, receipt.time_ms


def _row(origin: str, found: Found, settings: Settings, batches: BatchDigests) -> dict[str, Any]:
    row: dict[str, Any] = {"log": origin, "leaf_index": found.leaf_index}
    if found.leaf is not None:
        header = found.leaf.header
        row |= leaf_row(found.leaf)
        row |= told(header)
        if header.kind is Kind.ACK and header.side is Side.EGRESS:
            row["batch_sha256"], row["receipt_leaf"], row["receipt_ms"] = _told(header)
        else:
            row["batch_sha256"] = batches.take(found.leaf)
        if settings.entries:
            row["entries"] = [entry._asdict() for entry in iter_entries(found.leaf)]
    if settings.as_rows:
        row["problem"] = found.problem
    return row


def _judged(origin: str, found: Found, settings: Settings, batches: BatchDigests) -> dict[str, Any]:
    """The row of a leaf, or of what could not be made of it."""
    try:
        return _row(origin, found, settings, batches)
    except Exception as error:
        return _unlisted(origin, found.leaf_index, error, settings)


def _unlisted(origin: str, leaf_index: int, error: Exception, settings: Settings) -> dict[str, Any]:
    problem = _unjudged.sentence(error, f"Leaf {leaf_index}")
    if not settings.as_rows:
        raise TamperError(f"{origin}: {problem}") from error
    return {"log": origin, "leaf_index": leaf_index, "problem": problem}


def _batch(rows: list[dict[str, Any]], schema: pa.Schema, settings: Settings) -> pa.RecordBatch:
    """The rows; one with a value that its column has no room for as what could not be made of its leaf."""
    try:
        return _arrow(rows, schema)
    except Exception:
        return _arrow([_fitting(row, schema, settings) for row in rows], schema)


def _fitting(row: dict[str, Any], schema: pa.Schema, settings: Settings) -> dict[str, Any]:
    try:
        _arrow([row], schema)
    except Exception as error:
        return _unlisted(row["log"], row["leaf_index"], error, settings)
    return row


def _arrow(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    arrays = [pa.array([row.get(field.name) for row in rows], type=field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class BundleRange(InputPartition):
    """The entry bundles `first` to before `end` of the first `size` leaves under a checkpoint. `roots`: what each of them hashes to, in order; empty
    where nothing says so."""

    def __init__(self, checkpoint: Checkpoint, size: int, first: int, end: int, roots: bytes = b"") -> None:
        super().__init__((first, end))
        self.checkpoint = checkpoint
        self.size = size
        self.first = first
        self.end = end
        self.roots = roots

    def root(self, bundle: int) -> bytes:
        """What this bundle hashes to; empty where nothing says so."""
        at = (bundle - self.first) * HASH_BYTES
        return self.roots[at : at + HASH_BYTES]


class AuditReader(DataSourceReader):
    """Plans partitions over entry bundles and reads them."""

    def __init__(self, settings: Settings, schema: StructType) -> None:
        self._settings = settings
        self._schema = schema

    def partitions(self) -> Sequence[BundleRange]:
        """One partition per `bundles` entry bundles. Raises RequestError where there is no log."""
        path = self._settings.path
        note = parse_note(read_checkpoint(open_files(path), path))
        checkpoint = Checkpoint.parse(note.text)
        size = checkpoint.size if self._settings.size is None else self._settings.size
        if size > checkpoint.size:
            raise RequestError(f"{path} has {checkpoint.size} leaves; {size} were asked for.")
        return self.plan(checkpoint, size)

    def plan(self, checkpoint: Checkpoint, size: int) -> Sequence[BundleRange]:
        """The partitions of so many leaves of the log with this checkpoint."""
        bundles, step, roots = -(-size // TILE_WIDTH), self._settings.bundles, self._settings.roots
        ranges = [
            BundleRange(
                checkpoint,
                size,
                first,
                min(first + step, bundles),
                roots[first * HASH_BYTES : (first + step) * HASH_BYTES],
            )
            for first in range(0, bundles, step)
        ]
        # Spark plans an empty log as one partition without bundles.
        return ranges or [BundleRange(checkpoint, size, 0, 0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One Arrow batch per entry bundle."""
        assert isinstance(partition, BundleRange)
        from pyspark.sql.pandas.types import to_arrow_schema

        settings = self._settings
        schema = to_arrow_schema(self._schema, timezone="UTC")
        files, batches, origin = open_files(settings.path), BatchDigests(), partition.checkpoint.origin
        keys = None if settings.trust is None else _keys(files, partition.checkpoint, settings.trust)
        for bundle in range(partition.first, partition.end):
            rows = []
            checked = check_bundle(files, bundle, partition.size, keys, partition.root(bundle))
            for found in checked:
                if found.problem is not None and not settings.as_rows:
                    raise TamperError(f"{origin}: {found.problem}")
                rows.append(_judged(origin, found, settings, batches))
            yield _batch(rows, schema, settings)


def read_rows(spark: SparkSession, logs: Sequence[tuple[Checkpoint, Settings]]) -> DataFrame:
    """The rows of several logs, as far as these checkpoints, read with the same columns. As of the format, and planned here: Spark would start
    processes of Python for each log, to make its reader and to ask for its partitions; and a log's name is that of the checkpoint that was
    verified, whatever the one says that stands there by now."""
    from pyspark.sql.types import StructType

    columns_sql = _ddl(logs[0][1])
    kind = StructType.fromDDL(columns_sql)
    assert isinstance(kind, StructType)
    readers = [(checkpoint, AuditReader(settings, kind)) for checkpoint, settings in logs]
    parts = [
        (reader, part) for checkpoint, reader in readers for part in reader.plan(checkpoint, checkpoint.size)
    ]

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                reader, part = parts[number]
                yield from reader.read(part)

    return spark.range(0, len(parts), 1, len(parts)).mapInArrow(read, columns_sql)


def _ddl(settings: Settings) -> str:
    return ", ".join(f"`{name}` {kind}" for name, kind in columns(settings))


def register(spark: SparkSession) -> None:
    """Make `format("felix_audit")` known to a session. An entry point: `felix.spark` calls it."""
    spark.dataSource.register(AuditSource)


class AuditSource(DataSource):
    """`spark.read.format("felix_audit")`; options in the module's docstring."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> str:
        """The columns, as Spark SQL."""
        return _ddl(read_options(self.options))

    def reader(self, schema: StructType) -> AuditReader:
        """A reader of the columns in `schema`, by name. Raises RequestError naming an option, or a column that there is not."""
        settings = read_options(self.options)
        check_columns(schema, settings)
        return AuditReader(settings, schema)
