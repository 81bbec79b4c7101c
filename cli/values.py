"""Values of the command line that are what their parameter wants already: text, defaults, choices. These need no conversion.

typer converts each value with pydantic, which takes longer to load than most commands take to run. It is left to the values that
need it, such as a number or a path that was typed.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

_PLAIN: Final = (str, int, float, bool)
"""Types whose values a program has as they are; what was typed is always text."""


class PlainValues:
    """Base of commands and groups, before typer's: their parameters, and `--help`, convert only what needs it."""

    params: list[Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.of(self.params)

    @staticmethod
    def of(parameters: list[Any]) -> list[Any]:
        """The same parameters, which convert only what needs it from now on."""
        for parameter in parameters:
            parameter._runtime_param = Unconverted()
        return parameters

    def get_help_option(self, ctx: Any) -> Any:
        """`--help`, as typer makes it."""
        found = super().get_help_option(ctx)  # type: ignore[misc]
        if found is not None:
            found._runtime_param = Unconverted()
        return found


class Unconverted:
    """In the place of typer's conversion of one parameter, until a value comes that needs it."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value for the command. Raises what typer does, where it is not what the parameter wants."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        if is_as_wanted(value, param.type_descriptor.annotation):
            return list(value) if isinstance(value, tuple) else value
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def is_as_wanted(value: object, annotation: Any) -> bool:
    """Whether a value is of the annotation's type, so that a conversion would give the same. False where that is not sure. Pure."""
    origin = get_origin(annotation)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(annotation)
    if origin in (Union, UnionType):
        kinds = [each for each in get_args(annotation) if each is not NoneType]
        return len(kinds) == 1 and is_as_wanted(value, kinds[0])
    if origin is list:
        (kind,) = get_args(annotation)
        return isinstance(value, list | tuple) and all(is_as_wanted(each, kind) for each in value)
    return annotation in _PLAIN and type(value) is annotation
