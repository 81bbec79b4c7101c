"""The context of a command: the home folder, the region, and the identity that it uses."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

import felix
from cli.exits import BY_SIGNAL
from felix.collector import collector_paused
from felix.errors import Code, RequestError
from felix.files import PUBLIC, replace_file
from felix.profile import HOME_VARIABLE, felix_home
from region.folder import RegionFolder

if TYPE_CHECKING:
    from region.config import RegionConfig

REGION_VARIABLE: Final = "FELIX_REGION"
READER_LOOK_S: Final = 0.25
"""How long a command outlives the reader of its output at most; a look costs a system call."""
DEFAULT_FILE: Final = "default-region"
"""In the home folder: the name that `felix use` keeps."""
FILE_BYTES_MAX: Final = 16 << 20
"""Of a file that a user names. Proofs are the longest that others send, 8 MiB; and a file of a terabyte takes no room on the disk of who sends it."""

RegionOption = Annotated[
    str,
    typer.Option(
        "--region",
        "-r",
        help=f"The region; else ${REGION_VARIABLE}, else that of `felix use`, else the only one.",
    ),
]
RegionArgument = Annotated[
    str, typer.Argument(metavar="[REGION]", help="The region, as with --region.", show_default=False)
]
"""For commands about a region itself, which take its name either way (`one_of`)."""
IdentityOption = Annotated[
    str, typer.Option("--as", help="Come as this identity of the region (default: operator).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

T = TypeVar("T")


def known_regions() -> list[str]:
    """Regions that have a folder in the home folder."""
    home = felix_home()
    return sorted(path.parent.name for path in home.glob("*/profile.json")) if home.is_dir() else []


def default_region() -> str:
    """The region that `felix use` keeps; empty where there is none. Where FELIX_REGION is set, that one counts."""
    try:
        return (felix_home() / DEFAULT_FILE).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def set_default_region(region: str) -> None:
    """Keep it, or with an empty one, keep none. Raises OSError."""
    path = felix_home() / DEFAULT_FILE
    if region:
        replace_file(path, f"{region}\n".encode(), PUBLIC)
    else:
        path.unlink(missing_ok=True)


def preferred_region() -> str:
    """The region that the user set for all commands: FELIX_REGION, else what `felix use` keeps; empty where neither is."""
    return os.environ.get(REGION_VARIABLE, "") or default_region()


def one_of(argument: str, option: str) -> str:
    """The region that a command was given, as an argument or with --region; empty where it was given none. Raises RequestError where they differ."""
    if argument and option and argument != option:
        raise RequestError(
            f"{argument} and --region {option} are two regions.", hint="Name the region once, either way."
        )
    return argument or option


def choose_region(given: str = "") -> str:
    """The region a command is about. Raises RequestError where it is not clear."""
    chosen = given or preferred_region()
    known = known_regions()
    if chosen:
        if chosen in known:
            return chosen
        hint = f"Make it with: felix region init {chosen} --mesh MESH, or set FELIX_HOME."
        if not given:
            source = REGION_VARIABLE if os.environ.get(REGION_VARIABLE) else "`felix use`"
            hint = f"{source} says so. Name another with --region, or set {HOME_VARIABLE}."
        raise RequestError(
            f"There is no region {chosen!r} in {felix_home()}, which has {', '.join(known) or 'none'}.",
            code=Code.NOT_FOUND,
            hint=hint,
        )
    if len(known) == 1:
        return known[0]
    if not known:
        raise RequestError(
            f"There is no region in {felix_home()}.",
            code=Code.NOT_FOUND,
            hint="Make one with: felix region init us-east --mesh acme.",
        )
    raise RequestError(
        f"There are several regions: {', '.join(known)}.",
        hint=f"Say which with --region, keep one with `felix use {known[0]}`, or set {REGION_VARIABLE}.",
    )


def folder_of(region: str) -> tuple[RegionFolder, RegionConfig]:
    """A region's folder and configuration, for commands that work on its files."""
    from region.config import load_config

    folder = RegionFolder.of(choose_region(region))
    return folder, load_config(folder.config)


def connect(region: str, identity: str = "") -> felix.RegionClient:
    """A client of the region, not yet open."""
    with collector_paused():
        return felix.connect(choose_region(region), identity=identity or None, wait_for_broker=False)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, on uvloop where it is there."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


class Stop(asyncio.Event):
    """Set once a signal has asked the process to end; `again` by the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.again = asyncio.Event()
        self.number = 0
        """of the first signal"""

    def ask(self, number: int) -> None:
        """A signal came."""
        if self.is_set():
            self.again.set()
            return
        self.number = number
        self.set()

    @property
    def exit_code(self) -> int:
        """Of a command that it has ended."""
        return BY_SIGNAL + self.number


def stop_signals() -> Stop:
    """Set by SIGINT, SIGTERM, or SIGHUP of a terminal that goes away, from now on. Create it before the process reports that it serves."""
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.ask, number)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        loop.add_signal_handler(signal.SIGHUP, stop.ask, signal.SIGHUP)
    return stop


def read_file(path: Path, what: str, bytes_max: int | None = FILE_BYTES_MAX) -> bytes:
    """A file that the user named, which may be a pipe or a device. `bytes_max`: None for what the region's own machines write. Raises RequestError."""
    try:
        with path.open("rb") as file:
            data = file.read(-1 if bytes_max is None else bytes_max + 1)
    except OSError as error:
        raise RequestError(
            f"{what} {path} cannot be read: {error.strerror or error}.", code=Code.NOT_FOUND
        ) from error
    if bytes_max is not None and len(data) > bytes_max:
        raise RequestError(
            f"{what} {path} has more than {bytes_max} bytes, and none has.",
            code=Code.CONFIG_INVALID,
            hint="Look which file it is: it was not read.",
        )
    return data


@asynccontextmanager
async def reader_watched() -> AsyncIterator[None]:
    """Around work that prints what comes: BrokenPipeError once no process reads standard output, also while nothing comes."""
    work = asyncio.current_task()
    assert work is not None
    try:
        poller = select.poll()
        poller.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        yield  # standard output is no file here
        return
    left = False

    async def watch() -> None:
        nonlocal left
        # With no events asked for, the kernel tells of errors and ends alone.
        while not poller.poll(0):  # noqa: ASYNC110 - the kernel is asked, no event of ours
            await asyncio.sleep(READER_LOOK_S)
        left = True
        work.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if left:
            raise BrokenPipeError from None
        raise
    finally:
        watching.cancel()
