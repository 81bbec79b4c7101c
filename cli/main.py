"""The `felix` command. The only place that wires the packages together.

Exit codes: 0 done; 1 failed; 2 wrong use; 3 refused by policy, grant or right; 4 not available now; 5 damage or
tampering found; 6 numbers that do not reconcile; 7 not in the cache; 10 and 20 of `felix audit report`: the logs differ, a log does not
verify; 130 interrupted. docs/cli.md lists them too.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Final, Literal

import typer

from cli import (
    approval,
    audit,
    bench,
    bridge,
    cache,
    demo,
    doctor,
    identity,
    keys,
    log,
    namespace,
    policy,
    queue,
    quota,
    region,
    stream,
    subscription,
    top,
    witness,
)
from cli.output import err
from felix.errors import Code, FelixError
from felix.visible import VisibleFormatter

EXIT_FAILED: Final = 1
EXIT_REFUSED: Final = 3
EXIT_UNAVAILABLE: Final = 4
EXIT_DAMAGED: Final = 5
EXIT_UNRECONCILED: Final = 6
EXIT_NOT_FOUND: Final = cache.EXIT_NOT_FOUND
EXIT_INTERRUPTED: Final = 130

app = typer.Typer(
    name="felix",
    help="A sovereign multi-region data mesh.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(region.app, name="region")
app.add_typer(stream.app, name="stream")
app.add_typer(queue.app, name="queue")
app.add_typer(subscription.app, name="subscription")
app.add_typer(cache.app, name="cache")
app.add_typer(identity.app, name="identity")
app.add_typer(namespace.app, name="namespace")
app.add_typer(quota.app, name="quota")
bridge.app.command("approve")(approval.approve)
bridge.app.command("submit")(approval.submit)
app.add_typer(bridge.app, name="bridge")
app.add_typer(policy.app, name="policy")
app.add_typer(keys.app, name="keys")
app.add_typer(log.app, name="log")
app.add_typer(audit.app, name="audit")
app.add_typer(witness.app, name="witness")
app.add_typer(bench.app, name="bench")
app.command("top")(top.top)
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)


@app.callback()
def options(
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="What is logged to standard error.")
    ] = "warning",
) -> None:
    """Options before the command."""
    handler = logging.StreamHandler(sys.stderr)
    # What strangers send stands in log lines too: one record is one line, and nothing in it is obeyed.
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=log_level.upper())


def exit_code(error: FelixError) -> int:
    """What the process answers with for an error; one that names its own code keeps it."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    if error.code in (Code.RESIDENCY_DENIED, Code.FORBIDDEN, Code.NOT_FOUND_OR_FORBIDDEN, Code.WRONG_REGION):
        return EXIT_REFUSED
    match error.code // 100:
        case 4:
            return EXIT_UNAVAILABLE
        case 5:
            return EXIT_REFUSED
        case 7:
            return EXIT_DAMAGED
        case _:
            return EXIT_FAILED


def main() -> None:
    """Run the command line; errors that Felix raises on purpose become a sentence and an exit code."""
    try:
        app()
    except FelixError as error:
        err.print(f"felix: {error.sentence}", style="bold red")
        if error.hint:
            err.print(f"       {error.hint}")
        err.print(
            f"       ({error.code.name.lower().replace('_', '-')}, {int(error.code)})",
            style="dim",
        )
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        err.print("felix: interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
