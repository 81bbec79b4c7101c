"""How commands end: the exit codes, each with its one meaning, and which of them an error is."""

from __future__ import annotations

from typing import Final

from felix.errors import Code, FelixError, LaterReleaseError, RequestError, UnavailableError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
"""A word, an option or a value that is wrong; also what a broker says of a value."""
EXIT_REFUSED: Final = 3
EXIT_UNAVAILABLE: Final = 4
EXIT_DAMAGED: Final = 5
EXIT_UNRECONCILED: Final = 6
EXIT_NOT_FOUND: Final = 7
"""Of caches: the key is not there, or not as it was expected."""
EXIT_VERSION_1: Final = 13
"""Of the evidence: nothing is wrong, and records crossed in leaves of version 1 that were not accepted. As `audit.spark.report` has it."""
BY_SIGNAL: Final = 128
"""And the signal's number, as shells have it."""
EXIT_HUNG_UP: Final = 129
EXIT_INTERRUPTED: Final = 130
EXIT_TERMINATED: Final = 143

_WRONG_VALUES: Final = (Code.INVALID, Code.NAME_INVALID)
_REFUSED: Final = (
    Code.RESIDENCY_DENIED,
    Code.FORBIDDEN,
    Code.NOT_FOUND_OR_FORBIDDEN,
    Code.WRONG_REGION,
)


class UnwritableError(RequestError):
    """What a command writes, on standard output or into a file, cannot be written: the disk is full, say."""

    exit_code: Final = EXIT_FAILED


def exit_code(error: FelixError) -> int:
    """The exit code for an error; an error that names its own code keeps it."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    if error.code in _REFUSED:
        return EXIT_REFUSED
    # Of a setting that was given as an option, the broker says CONFIG_INVALID; of a file, this process does.
    if error.code in _WRONG_VALUES or (error.code is Code.CONFIG_INVALID and error.told):
        return EXIT_USAGE
    if isinstance(error, LaterReleaseError):
        return EXIT_DAMAGED  # it does not verify here
    if isinstance(error, UnavailableError):
        return EXIT_UNAVAILABLE  # whatever is in the way, as another process that has the folder
    match error.code // 100:
        case 4:
            return EXIT_UNAVAILABLE
        case 5:
            return EXIT_REFUSED
        case 7:
            return EXIT_DAMAGED
        case _:
            return EXIT_FAILED
