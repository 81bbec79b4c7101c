"""`felix stream publish`, and the lines of `felix queue put`: records from the lines of a file or a pipe, as they come.

A line is published as soon as it is read, and read only once the one before it has room: the publisher's buffer is the bound.
However it ends (end of input, an invalid line, a signal, a refusal), what was read as whole lines is published first where
it can be, and the command says how much is acknowledged, up to which offset, and with which line to go on.
"""

from __future__ import annotations

import asyncio
import base64
import signal
import sys
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any, Final, NamedTuple, Self

import msgspec
import typer

import felix
from cli.exits import UnwritableError
from cli.lines import (
    InputReader,
    InvalidLineError,
    Line,
    LineParser,
    LineSplitter,
    LongLine,
)
from cli.output import counted, note, out, print_json, progress
from cli.setting import IdentityOption, JsonOption, RegionOption, connect, run
from felix.batch import BATCH_BYTES_MAX
from felix.errors import Code, FelixError, RequestError
from felix.publisher_core import PublishProgress
from policy.quantity import Duration

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RUNS_MAX: Final = 1_024
"""Places in the input where line numbers and records drift apart (blank, skipped), before the old ones are forgotten."""

NOTHING: Final = PublishProgress(0, 0, 0, {})


@dataclass(slots=True)
class Tally:
    """The outcome of the lines.

    - `line` is the last line that is dealt with: given to the publisher, blank, or skipped;
    - `runs` are (record, line): from that record on, lines and records follow each other until the next run.
    """

    line: int
    records: int = 0
    size: int = 0
    blank: int = 0
    invalid: int = 0
    cut_bytes: int = 0
    progress: PublishProgress = NOTHING
    runs: list[tuple[int, int]] = field(default_factory=list)

    def publish(self, number: int, size: int, publisher: felix.Publisher) -> None:
        """Line `number` is a record now. What stands before the first record without acknowledgement is not asked for any more."""
        if not self.runs or self.runs[-1][1] - self.runs[-1][0] != number - self.records:
            self.runs.append((self.records, number))
            if len(self.runs) > RUNS_MAX:
                del self.runs[: self._run(publisher.progress.contiguous)]
        self.records += 1
        self.size += size
        self.line = number

    @property
    def next_line(self) -> int:
        """The first line whose record is not acknowledged; the one after the last that is dealt with, where all are."""
        record = self.progress.contiguous
        if record >= self.records:
            return self.line + 1
        first, line = self.runs[self._run(record)]
        return line + record - first

    def _run(self, record: int) -> int:
        return bisect_right(self.runs, (record, sys.maxsize)) - 1


class SkippedLines:
    """The file of `--skip-invalid`: one JSON object for each line that was left out, with its number, reason and text."""

    def __init__(self, path: Path) -> None:
        """Raises UnwritableError where it cannot be written."""
        self._path = path
        try:
            self._file: IO[bytes] = path.open("ab", buffering=0)
        except OSError as error:
            raise self._refused(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, invalid: InvalidLineError, line: Line) -> None:
        """Raises UnwritableError where it cannot be written: then the line is not skipped."""
        row: dict[str, Any] = {"line": invalid.number, "reason": invalid.why}
        data = line.head if isinstance(line, LongLine) else line
        try:
            row["text"] = data.decode()
        except UnicodeDecodeError:
            row["base64"] = base64.b64encode(data).decode()
        if isinstance(line, LongLine):
            row["bytes"] = line.size
        whole = memoryview(msgspec.json.encode(row) + b"\n")
        try:
            while whole:
                whole = whole[self._file.write(whole) :]
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> UnwritableError:
        return UnwritableError(
            f"{self._path}, for lines that are left out, cannot be written: {error.strerror or error}.",
            hint="Give --skip-invalid another file.",
        )


def publish(
    name: Annotated[str, typer.Argument(help="tenant/namespace/name, as in acme/ops/departures.")],
    file: Annotated[
        Path | None, typer.Option(help="One record a line; standard input, as it comes, if left out.")
    ] = None,
    key_field: Annotated[str, typer.Option(help="The JSON field that becomes the record's key.")] = "",
    message_id: Annotated[
        str, typer.Option(help="The JSON field that becomes the record's message id, for deduplication.")
    ] = "",
    skip_invalid: Annotated[
        Path | None,
        typer.Option(
            help="Go on after a line that cannot be published; it is added to this file, with its number and the reason."
        ),
    ] = None,
    from_line: Annotated[
        int, typer.Option(min=1, help="Leave out the lines before this one, as after an end that named it.")
    ] = 1,
    acks: Annotated[str, typer.Option(help="all or none.")] = "all",
    compress: Annotated[
        bool, typer.Option(help="Compress batches with zstd, where they get smaller.")
    ] = False,
    level: Annotated[int, typer.Option(min=1, max=19, help="With --compress: the level of zstd.")] = 1,
    linger: Annotated[
        str,
        typer.Option(
            help="How long a batch that is not full waits for more, as in 5ms. Default: not at all."
        ),
    ] = "",
    expect_offset: Annotated[
        int | None,
        typer.Option(help="All lines as one batch, and only where the log of its shard ends at this offset."),
    ] = None,
    shard: Annotated[
        int | None, typer.Option(help="With --expect-offset: which shard. Else the keys say it.")
    ] = None,
    region: RegionOption = "",
    identity: IdentityOption = "",
    json: JsonOption = False,
) -> None:
    """Publish records, one a line, as they come, and wait until all are acknowledged."""
    if acks not in ("all", "none"):
        raise RequestError(f"acks is {acks!r}.", hint="Use all or none.")
    if shard is not None and expect_offset is None:
        raise RequestError("--shard goes with --expect-offset.", hint="Else keys choose the shard, or turns.")
    if expect_offset is not None and acks == "none":
        raise RequestError("A condition needs an answer.", hint="Leave --acks none away.")
    settings: dict[str, Any] = {
        "acks": acks,
        "compress": level if compress else 0,
        "linger_ms": int(Duration.parse(linger)) if linger else 0,
    }
    publish_lines(
        name,
        file,
        LineParser(key_field, message_id),
        settings,
        condition=None if expect_offset is None else Condition(shard, expect_offset),
        skip_invalid=skip_invalid,
        from_line=from_line,
        region=region,
        identity=identity,
        as_json=json,
    )


class Condition(NamedTuple):
    """All lines as one batch, and only where the log of its shard ends at `offset`. `shard`: None where keys say it."""

    shard: int | None
    offset: int


def publish_lines(
    name: str,
    file: Path | None,
    parser: LineParser,
    settings: dict[str, Any],
    *,
    region: str,
    identity: str,
    condition: Condition | None = None,
    skip_invalid: Path | None = None,
    from_line: int = 1,
    noun: str = "record",
    as_json: bool = False,
) -> None:
    """Publish the lines of a file, or of standard input as they come, and say how far that came, however it ended.

    `settings` are those of a publisher. Raises FelixError, and typer.Exit where a signal ended it.
    """
    if file is None and sys.stdin is None:
        raise RequestError("There is no standard input.", hint="Give it a pipe, or name a file with --file.")
    try:
        source = file.open("rb") if file else sys.stdin.buffer
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}.", code=Code.NOT_FOUND) from error
    with source:
        skipped = SkippedLines(skip_invalid) if skip_invalid else None
        work = LinePublishing(parser, skipped, from_line, noun)
        began = time.monotonic()
        ended: int | None = None
        failed = True
        try:
            if condition is None:
                run(work.publish_all(source, connect(region, identity), name, settings))
            else:
                run(work.publish_batch(source, connect(region, identity), name, settings, *condition))
            failed, ended = False, work.signal
        finally:
            if skipped is not None:
                skipped.__exit__(None, None, None)
            if work.opened:
                said = Summary(name, work.tally, time.monotonic() - began, ended, failed, skip_invalid, noun)
                said.show(as_json=as_json)
    if ended is not None:
        raise typer.Exit(128 + ended)


class LinePublishing:
    """One run of the command: lines in, records out. `tally` says how far it came, whatever ended it."""

    def __init__(
        self,
        parser: LineParser,
        skipped: SkippedLines | None = None,
        from_line: int = 1,
        noun: str = "record",
    ) -> None:
        self._parser = parser
        self._noun = noun
        self._skipped = skipped
        self._from_line = from_line
        self.tally = Tally(0)
        self.opened = False
        self.signal: int | None = None
        """The signal that ended it, if one did."""

    async def publish_all(
        self, source: IO[bytes], region: felix.RegionClient, name: str, settings: dict[str, Any]
    ) -> None:
        """Publish every line, as it comes. Raises FelixError; `tally` holds in any case."""
        refused: list[FelixError] = []
        with InputReader(source) as reader, self._signals(reader):
            async with region:
                publisher = region.stream(name).publisher(
                    **settings, on_refused=lambda refusal: refused.append(refusal.error)
                )
                try:
                    await publisher.open()
                    self.opened = True
                    await self._give(reader, publisher, refused)
                    await publisher.flush()
                except FelixError:
                    # What was given before it ends is to be in the log, so that it is clear where to go on.
                    with suppress(FelixError):
                        await publisher.flush()
                    raise
                except asyncio.CancelledError:
                    if self.signal is None:
                        raise
                finally:
                    publisher.abort()
                    self.tally.progress = publisher.progress

    async def _give(self, reader: InputReader, publisher: felix.Publisher, refused: list[FelixError]) -> None:
        tally, parse = self.tally, self._parser.parse
        with progress(counted=False) as bar:
            task = bar.add_task("publishing", total=None)
            async for lines in self._lines(reader):
                for number, line in lines:
                    try:
                        record = parse(number, line)
                        if record is None:
                            tally.blank += 1
                            tally.line = number
                            continue
                        try:
                            await publisher.send(record.payload, record.key, record.headers)
                        except RequestError as error:
                            # `send` raises what an earlier batch was refused with, too: that is no fault of this line.
                            if error.code is not Code.BATCH_TOO_LARGE or refused:
                                raise
                            raise InvalidLineError(
                                number, f"is too large: {error.sentence}".rstrip(".")
                            ) from error
                    except InvalidLineError as error:
                        self._skip(error, line)
                        continue
                    tally.publish(number, len(record.payload), publisher)
                bar.update(task, description=f"publishing: {counted(tally.records, self._noun)}")

    def _skip(self, error: InvalidLineError, line: Line) -> None:
        if self._skipped is None:
            raise error
        self._skipped.write(error, line)
        self.tally.invalid += 1
        self.tally.line = error.number

    async def _lines(self, reader: InputReader) -> AsyncIterator[Iterator[tuple[int, Line]]]:
        """Whole lines with their numbers, read by read, from `from_line` on. Raises RequestError where there is no such line."""
        splitter, number = LineSplitter(), 0
        while True:
            data = await reader.read()
            if not data and reader.stopped:
                self.tally.cut_bytes = splitter.pending_bytes
                return
            lines = splitter.feed(data) if data else splitter.finish()
            first = number + 1
            number += len(lines)
            if number >= self._from_line:
                skip = max(0, self._from_line - first)
                yield zip(range(first + skip, number + 1), lines[skip:], strict=True)
            else:
                self.tally.line = number
            if not data:
                if number + 1 < self._from_line:
                    raise RequestError(
                        f"There is no line {self._from_line}: the input has {number:,}.",
                        hint="Lines are counted from 1, blank ones too.",
                    )
                return

    async def publish_batch(
        self,
        source: IO[bytes],
        region: felix.RegionClient,
        name: str,
        settings: dict[str, Any],
        shard: int | None,
        expected_offset: int,
    ) -> None:
        """Publish all lines as one batch, where the log of its shard ends at `expected_offset`. Raises FelixError."""
        records: list[felix.NewRecord] = []
        tally = self.tally
        with InputReader(source) as reader, self._signals(reader):
            async with region, region.stream(name).publisher(**settings) as publisher:
                async for lines in self._lines(reader):
                    for number, line in lines:
                        try:
                            record = self._parser.parse(number, line)
                        except InvalidLineError as error:
                            self._skip(error, line)
                            continue
                        if record is None:
                            tally.blank += 1
                            tally.line = number
                            continue
                        tally.publish(number, len(record.payload), publisher)
                        records.append(record)
                        if tally.size > BATCH_BYTES_MAX:
                            raise RequestError(
                                f"The lines up to {number} have more than {BATCH_BYTES_MAX:,} bytes, and one batch may not.",
                                code=Code.BATCH_TOO_LARGE,
                                hint="Publish fewer lines at once, or without --expect-offset.",
                            )
                self.opened = True
                if reader.stopped:
                    return  # a part of the lines is not what was to be published
                if not records:
                    raise RequestError("There is no line to publish.")
                try:
                    await publisher.publish_batch(records, shard, expected_offset=expected_offset)
                finally:
                    tally.progress = publisher.progress

    @contextmanager
    def _signals(self, reader: InputReader) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP end the reading, and a second one the waiting too.

        What the process was started to ignore stays ignored (SIGINT in the background of a shell, SIGHUP under nohup).
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def ask(number: int) -> None:
            again = self.signal is not None
            self.signal = number
            reader.stop()
            if again or not self.opened:
                task.cancel()
            elif self.tally.records:
                note(
                    f"{signal.Signals(number).name}: waiting until what was read is acknowledged; once more to give it up"
                )

        taken = [each for each in SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
        for number in taken:
            loop.add_signal_handler(number, ask, number)
        try:
            yield
        except asyncio.CancelledError:
            if self.signal is None:
                raise
            if not self.opened:
                note("ended before anything was published")
        finally:
            for number in taken:
                loop.remove_signal_handler(number)


@dataclass(frozen=True, slots=True)
class Summary:
    """The command's last message, however it ended."""

    stream: str
    tally: Tally
    seconds: float
    signal: int | None = None
    failed: bool = False
    skip_file: Path | None = None
    noun: str = "record"

    def show(self, *, as_json: bool) -> None:
        """On standard output; on standard error where that cannot be written, so that it is not lost."""
        try:
            if as_json:
                print_json(self.row())
            else:
                for line in self.lines():
                    out.print(line)
        except (OSError, SystemExit):  # rich ends the process where a pipe is broken
            for line in self.lines():
                note(line)
            raise

    def row(self) -> dict[str, object]:
        """The same as an object."""
        come, tally = self.tally.progress, self.tally
        return {
            "stream": self.stream,
            "records": come.acknowledged,
            "unacknowledged": tally.records - come.acknowledged,
            "bytes": tally.size,
            "seconds": self.seconds,
            "offsets": {str(shard): offset for shard, offset in sorted(come.offsets.items())},
            "blank": tally.blank,
            "invalid": tally.invalid,
            "next_line": tally.next_line,
            "ended": signal.Signals(self.signal).name if self.signal else "error" if self.failed else "end",
        }

    def lines(self) -> list[str]:
        """The same as sentences."""
        come, tally = self.tally.progress, self.tally
        whole = come.acknowledged == tally.records
        rate = f": {come.acknowledged / max(self.seconds, 1e-9):,.0f} a second" if whole else ""
        count = f"{counted(come.acknowledged, self.noun)} ({tally.size:,} bytes)" if whole else (
            f"{come.acknowledged:,} of {counted(tally.records, self.noun)} acknowledged"
        )  # fmt: skip
        said = [f"{count} in {self.seconds:.1f} s{rate}"]
        if come.offsets:
            said.append("  acknowledged: " + ", ".join(
                f"shard {shard} through offset {offset}" for shard, offset in sorted(come.offsets.items())
            ))  # fmt: skip
        if tally.blank:
            said.append(f"  {counted(tally.blank, 'blank line')} left out")
        if tally.invalid:
            said.append(f"  {counted(tally.invalid, 'invalid line')} in {self.skip_file}")
        if tally.cut_bytes:
            said.append(
                f"  the first {tally.cut_bytes:,} bytes of line {tally.line + 1} came without its end: not published"
            )
        if self.failed or self.signal is not None:
            later = come.acknowledged - come.contiguous
            again = f"; {counted(later, f'later {self.noun}')} acknowledged already" if later else ""
            said.append(f"  go on with --from-line {tally.next_line}{again}")
        return said
