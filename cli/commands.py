"""The commands of `felix` by name: what each is for, and the module it stands in, which is imported when it is called.

`felix --help` and completions read this table alone; a command pays for its own imports and for no other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command_from_info, get_command_name
from typer.models import CommandInfo

from cli.command import Command
from cli.values import PlainValues
from felix.collector import collector_paused


class Entry(NamedTuple):
    """The location of a command: `module`, and in it `name`, a `Typer` with subcommands or a function that is a command."""

    module: str
    name: str
    help: str


HIDDEN: Final = "_"
"""Commands that begin so are for programs: `--help` does not list them."""

COMMANDS: Final[dict[str, Entry]] = {
    "region": Entry("cli.region", "app", "Create and run regions."),
    "stream": Entry("cli.stream", "app", "Streams of a region."),
    "queue": Entry("cli.queue", "app", "Queues: jobs for workers, leased, retried and acknowledged."),
    "subscription": Entry("cli.subscription", "app", "Durable subscriptions of a region's streams."),
    "cache": Entry("cli.cache", "app", "Caches: the newest value of every key."),
    "identity": Entry("cli.identity", "app", "Identities and their rights."),
    "namespace": Entry("cli.namespace", "app", "Namespaces whose streams are made by their first use."),
    "quota": Entry("cli.quota", "app", "Limits of tenants and identities, beside what they use."),
    "bridge": Entry("cli.bridge", "app", "Grants between regions, and the agents that carry records over."),
    "policy": Entry("cli.policy", "app", "The residency policy: what may be granted at all."),
    "keys": Entry("cli.keys", "app", "Data keys."),
    "log": Entry("cli.log", "app", "Segment files."),
    "audit": Entry("cli.audit", "app", "Audit logs: verify, show, prove, report."),
    "witness": Entry("cli.witness", "app", "A witness that cosigns the checkpoints of other parties' logs."),
    "bench": Entry("cli.bench", "app", "Measure."),
    "use": Entry("cli.use", "use", "Keep a default region for commands that name none."),
    "top": Entry("cli.top", "top", "Show what goes through a region's broker now."),
    "mesh": Entry("cli.mesh", "mesh", "Draw the mesh: regions, grants, links and their states."),
    "console": Entry("cli.console", "console", "Serve a page that shows the mesh as it is now."),
    "version": Entry("cli.version", "version", "Show the version, as `felix --version` does."),
    "doctor": Entry("cli.doctor", "doctor", "Look at what Felix needs on this machine."),
    "demo": Entry("cli.demo", "demo", "Two regions, one bridge, one report."),
    "completion": Entry(
        "cli.completion", "completion", "Print what a shell needs to complete commands and names."
    ),
    "_complete": Entry("cli.completion", "complete", "What `felix completion` calls."),
}


ELSEWHERE: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "stream": {"publish": ("cli.publish", "publish")},
}
"""Commands of a group whose module is imported for them alone: by group and name, the module and the function."""

ALIASES: Final = {"ls": "list", "rm": "delete"}
GROUP_ALIASES: Final = {("region", "list"): "status", ("region", "ls"): "status"}
"""Of one group alone: regions are listed with their status."""


class Group(PlainValues, TyperGroup):
    """A group of commands, some of which have a short name, too."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or of the one that it is short for."""
        meant = GROUP_ALIASES.get((self.name or "", cmd_name)) or ALIASES.get(cmd_name, cmd_name)
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, meant)


def load(name: str) -> Any:
    """The click command of an entry of `COMMANDS`; imports its module. Raises KeyError."""
    entry = COMMANDS[name]
    found = _found(entry.module, entry.name)
    if isinstance(found, typer.Typer):
        return Group(
            name=name,
            commands=_Subcommands(found.registered_commands, ELSEWHERE.get(name, {})),
            help=entry.help,
            no_args_is_help=True,
            rich_markup_mode=None,
        )
    return _make(CommandInfo(name=name, callback=found))


def _found(module: str, name: str) -> Any:
    with collector_paused():
        return getattr(import_module(module), name)


def _make(info: CommandInfo) -> Any:
    """The click command of one function: its annotations are read now, which takes milliseconds for each."""
    info.cls = Command
    return get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)


class _Subcommands(MutableMapping[str, Any]):
    """The commands of a group by name, each made of its function when it is looked up."""

    def __init__(self, registered: Sequence[CommandInfo], elsewhere: Mapping[str, tuple[str, str]]) -> None:
        self._elsewhere = elsewhere
        self._registered: dict[str, CommandInfo | None] = dict.fromkeys(elsewhere)
        for info in registered:
            assert info.callback is not None
            self._registered[info.name or get_command_name(info.callback.__name__)] = info
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            info = self._registered[name]
            if info is None:
                module, function = self._elsewhere[name]
                info = CommandInfo(name=name, callback=_found(module, function))
            self._made[name] = _make(info)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._registered

    def __iter__(self) -> Iterator[str]:
        return iter(self._registered)

    def __len__(self) -> int:
        return len(self._registered)

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._registered[name]


class _Commands(MutableMapping[str, Any]):
    """The commands by name, each loaded when it is looked up; to list the names loads nothing."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = load(name)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]


class PipeClosed(Exception):
    """No process reads standard output any more."""


class LazyGroup(PlainValues, TyperGroup):
    """The root command: its commands are those of `COMMANDS`, each loaded when it is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands()

    def invoke(self, ctx: Any) -> Any:
        """As typer does; but a broken pipe reaches `main`, where typer would end the process with 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise PipeClosed from error

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list in `--help`, from the table."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, entry.help) for name, entry in COMMANDS.items() if not name.startswith(HIDDEN)]
            )
