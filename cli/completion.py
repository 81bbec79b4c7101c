"""`felix completion`: what a shell proposes while somebody types: commands, options, choices, and names that exist.

The scripts call `felix _complete -- WORDS` and get one proposal a line, with its help behind a tab. Whatever goes wrong
there is silent: a shell has no place for it. Names that only a broker knows are asked of one that runs on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from typer.core import TyperArgument, TyperGroup, TyperOption

from cli.process import read_state
from cli.setting import choose_region, connect, known_regions, run
from felix.errors import FelixError
from felix.messages import ListDocuments
from felix.visible import visible
from region.folder import RegionFolder

ASK_TIMEOUT_S: Final = 1.0
"""After a longer wait, the user would have typed the name."""

_BASH: Final = """\
_felix_complete() {
    local IFS=$'\\n'
    COMPREPLY=($(felix _complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null | cut -f1))
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == */ ]] && compopt -o nospace
    return 0
}
complete -o default -F _felix_complete felix
"""
_ZSH: Final = """\
#compdef felix
_felix() {
    local -a found
    local line
    for line in "${(@f)$(felix _complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        [[ -n $line ]] && found+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}")
    done
    if (( ${#found} )); then _describe felix found; else _files; fi
}
compdef _felix felix
"""
_FISH: Final = """\
complete -c felix -a '(felix _complete -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'
"""
SCRIPTS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

Proposal = tuple[str, str]
"""A proposed value and its description, which may be empty."""


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell.")]) -> None:
    """Print the script that lets a shell complete commands, options and names."""
    print(SCRIPTS[shell], end="")


def complete(
    words: Annotated[
        list[str] | None, typer.Argument(help="What is typed, the last word unfinished.")
    ] = None,
) -> None:
    """Print what may stand in place of the last word; for the scripts of `felix completion`."""
    try:
        for value, told in proposals(root_command(), words or [""]):
            print(f"{visible(value)}\t{visible(told)}")
    except (FelixError, OSError):
        return


def root_command() -> Any:
    """The command `felix` itself."""
    from cli.main import app

    return typer.main.get_command(app)


def proposals(root: Any, words: Sequence[str]) -> list[Proposal]:
    """Proposals for the last word, in order. Raises FelixError if names are needed and cannot be read."""
    *before, last = words
    command, path, option, given, named = root, [], None, 0, {}
    for word in before:
        if option is not None:
            named[option.name], option = word, None
        elif word.startswith("-") and word != "-":
            option = _option(command, word)
        elif isinstance(command, TyperGroup):
            if word not in command.commands:
                return []
            command = command.commands[word]
            path.append(word)
        else:
            given += 1
    if option is not None:
        found = _values(option, path, named, last)
    elif last.startswith("-"):
        found = _options(command)
    elif isinstance(command, TyperGroup):
        found = _commands(command)
    else:
        arguments = [each for each in command.params if isinstance(each, TyperArgument)]
        if not arguments or (given >= len(arguments) and arguments[-1].nargs == 1):
            return []
        found = _values(arguments[min(given, len(arguments) - 1)], path, named, last)
    return [(value, told) for value, told in found if value.startswith(last)]


def _option(command: Any, word: str) -> Any:
    """The option that this word is, where it takes a value; else None."""
    for each in command.params:
        if isinstance(each, TyperOption) and word in each.opts and not each.is_flag:
            return each
    return None


def _options(command: Any) -> Iterator[Proposal]:
    for each in command.params:
        if isinstance(each, TyperOption) and not each.hidden:
            for word in (*each.opts, *each.secondary_opts):
                if word.startswith("--"):
                    yield word, each.help or ""
    yield "--help", "Show what the command does."


def _commands(group: Any) -> Iterator[Proposal]:
    from cli.commands import COMMANDS

    for name in group.commands:
        if name.startswith("_"):
            continue
        # The root's commands are not loaded for their help.
        yield (
            name,
            COMMANDS[name].help
            if not group.name or group.name == "felix"
            else group.commands[name].get_short_help_str(80),
        )


# -- values ----------------------------------------------------------------------------------------------


def _values(parameter: Any, path: list[str], named: dict[str, str], last: str) -> Iterator[Proposal]:
    if parameter.type_descriptor.choices is not None:
        yield from ((str(getattr(each, "value", each)), "") for each in parameter.type_descriptor.choices)
        return
    if parameter.name == "what":
        yield "stream", ""
        return
    source = _SOURCES.get((path[0], parameter.name)) or _SOURCES.get(("", parameter.name))
    if source is not None and (path[-1], parameter.name) != ("init", "name"):
        yield from ((name, "") for name in source(named.get("region", ""), last))


def _regions(_region: str, _last: str) -> list[str]:
    return known_regions()


def _identities(region: str, _last: str) -> list[str]:
    folder = RegionFolder.of(choose_region(region))
    return sorted(path.stem for path in folder.identities.glob("*.pem"))


def _streams(kind: str) -> Callable[[str, str], list[str]]:
    """Names of streams, or of those that are queues or caches."""

    async def ask(region: str, prefix: str) -> list[str]:
        async with asyncio.timeout(ASK_TIMEOUT_S), connect(region) as client:
            found = [state async for state in client.list_streams(prefix)]
        return sorted(each.stream for each in found if not kind or getattr(each.views, kind) is not None)

    return lambda region, prefix: _asked(region, lambda: ask(region, prefix))


def _grants(region: str, _last: str) -> list[str]:
    async def ask() -> list[str]:
        async with asyncio.timeout(ASK_TIMEOUT_S), connect(region) as client:
            page = await client.request(ListDocuments("export"))
        return sorted(page.documents)

    return _asked(region, ask) + sorted(str(path) for path in Path().glob("*.grant"))


def _asked(region: str, ask: Callable[[], Any]) -> list[str]:
    """The broker's answer, if it runs on this machine: a prompt should not wait for a remote one."""
    if read_state(RegionFolder.of(choose_region(region)).broker_pid) is None:
        return []
    try:
        found: list[str] = run(ask())
    except (FelixError, TimeoutError):
        return []
    return found


_SOURCES: Final[dict[tuple[str, str], Callable[[str, str], list[str]]]] = {
    ("", "region"): _regions,
    ("", "identity"): _identities,
    ("", "stream"): _streams(""),
    ("region", "name"): _regions,
    ("use", "name"): _regions,
    ("stream", "name"): _streams(""),
    ("queue", "name"): _streams("queue"),
    ("cache", "name"): _streams("cache"),
    ("bridge", "name"): _streams(""),
    ("bridge", "grant"): _grants,
    ("bridge", "to"): _regions,
    ("bridge", "from_"): _regions,
}
"""Where values come from, by command group (empty: any) and parameter."""
