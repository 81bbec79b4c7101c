"""The `felix` command. The only place that wires the packages together.

What a command needs is imported when it is called (cli.commands). How it may end stands in cli.exits, and in docs/cli.md.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import stat
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer

from cli.commands import LazyGroup, PipeClosed
from cli.exits import BY_SIGNAL, EXIT_FAILED, EXIT_HUNG_UP, EXIT_INTERRUPTED, exit_code
from cli.form import DATA_FORMS, read_off
from felix import __version__
from felix.errors import Code, FelixError
from felix.storage.port import has_failed, is_full
from felix.visible import VisibleFormatter, spelled_out, visible

app = typer.Typer(
    name="felix",
    cls=LazyGroup,
    help="A sovereign multi-region data mesh.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"felix {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="What is logged to standard error.")
    ] = "warning",
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""
    handler = logging.StreamHandler(sys.stderr)
    # What strangers send stands in log lines too: one record is one line, and nothing in it is obeyed.
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=log_level.upper())


def _say(
    sentence: str,
    hint: str,
    name: str,
    number: int,
    ended: int,
    retry_after_ms: int | None = None,
    listed: Sequence[object] = (),
) -> None:
    """A failure on standard error: for people, or as an object where the output is one. `listed`: what the sentence lists, each on a line of
    its own."""
    if read_off(sys.argv[1:]) in DATA_FORMS:
        from cli.output import error_line

        sys.stderr.buffer.write(error_line(sentence, hint, name, number, ended, retry_after_ms) + b"\n")
        return
    from cli.output import err

    # A background process writes this to its log, and the command that started it reads it there (cli.process.last_words).
    # What stands in a line may be somebody's text, and begins no line of its own.
    err.print(f"felix: {sentence.partition(chr(10))[0] if listed else sentence}", style="bold red")
    for each in listed:
        err.print(f"  {each}", style="red")
    if hint:
        err.print(f"       {hint}")
    err.print(f"       ({name}, {number})", style="dim")


def _about_home(error: OSError) -> str:
    """What to do where the file that failed is in the folder that Felix keeps its state in."""
    from felix.profile import felix_home

    home = felix_home()
    if not isinstance(error.filename, str) or not Path(error.filename).is_relative_to(home):
        return ""
    return f"Felix keeps its state in {home}. Make that a folder that you can write to, or set FELIX_HOME to another one."


def _is_stdout_full() -> bool:
    """Whether it is standard output that has no room: what is no file has said so itself."""
    out = sys.stdout.fileno()
    return not stat.S_ISREG(os.fstat(out).st_mode) or os.fstatvfs(out).f_bavail == 0


def _leave_stdout() -> None:
    """No process reads standard output any more: buffered output is dropped, so that Python's shutdown prints no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush_if_read() -> None:
    """Standard output may be the terminal that has gone, or a file."""
    try:
        sys.stdout.flush()
    except OSError:
        _leave_stdout()


def _take_closed_streams() -> None:
    """Where the caller closed a standard stream, as `>&-` does, it is /dev/null. Else the next file that is opened, a socket or a log of the broker, gets
    its number: what is printed would be written into that, and libuv ends a process whose sockets have such a number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def main(command: typer.Typer = app) -> None:
    """Run a command line, `felix` where none is given. Every error that has a reason outside this program becomes a sentence and an exit code."""
    _take_closed_streams()
    ended_by = int(signal.SIGINT)

    def terminate(number: int, _frame: FrameType | None) -> None:
        """SIGTERM, and SIGHUP of a terminal that goes away, end a command as Ctrl-C does, so that it stops what it started."""
        nonlocal ended_by
        ended_by = number
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        # What it was started to ignore stays ignored, as under nohup.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, terminate)
    try:
        ended = command(standalone_mode=False)
        sys.stdout.flush()
    except FelixError as error:
        ended = exit_code(error)
        is_data = read_off(sys.argv[1:]) in DATA_FORMS
        # A peer's words are not laid out: nothing of them stands where ours do.
        told = str if is_data or not error.told else spelled_out
        name = error.code.name.lower().replace("_", "-")
        mistakes = getattr(error, "mistakes", ())
        listed = mistakes if len(mistakes) > 1 else ()
        _say(
            told(error.sentence), told(error.hint), name, int(error.code), ended, error.retry_after_ms, listed
        )
    except typer.TyperException as error:
        ended = error.exit_code
        show = getattr(error, "show", None)
        if read_off(sys.argv[1:]) in DATA_FORMS:
            _say(error.format_message(), "", "usage", int(Code.INVALID), ended)
        elif show is not None:
            said = StringIO()
            show(said)
            sys.stderr.write(visible(said.getvalue(), keep="\n"))
    except typer.Abort:
        ended = EXIT_FAILED
        _say("Nothing was done.", "", "aborted", int(Code.INVALID), ended)
    except KeyboardInterrupt:
        ended = EXIT_INTERRUPTED
    except (BrokenPipeError, PipeClosed):
        # The reader, `head` perhaps, has what it wanted: that is how a pipe ends, and nothing failed.
        _leave_stdout()
        ended = 0
    except OSError as error:
        ended = EXIT_FAILED
        where, hint = f"{error.filename}: " if error.filename else "", _about_home(error)
        if is_full(error):
            if not where and _is_stdout_full():
                where = "Standard output: "
            else:
                hint = "Make room on the disk that this command writes to."
        elif has_failed(error):
            hint = "The disk did not do what it was asked to. Look at it (dmesg, SMART), then run the same command again."
        _say(f"{where}{error.strerror or error}.", hint, "system", error.errno or 0, ended)
        _leave_stdout()
    # Python looks for cycles once more at its end, in everything that was imported: nothing of it has to be found.
    gc.freeze()
    if ended == EXIT_INTERRUPTED and ended_by != signal.SIGINT:
        ended = BY_SIGNAL + ended_by
    if ended == EXIT_HUNG_UP:
        _flush_if_read()
    sys.exit(ended if isinstance(ended, int) else 0)


if __name__ == "__main__":
    main()
