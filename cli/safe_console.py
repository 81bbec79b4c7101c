"""The console that sentences and tables for people are printed on: rich's, for text that somebody else wrote."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from cli.form import chosen
from felix.visible import is_visible, visible


class SafeConsole(Console):
    """A console for text from outside: no markup, no emoji codes, and nothing that a terminal would obey.

    Styles are ours: they come as `Text`, `style=` or a table's own. A string that is printed is one line.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich prints, strings as plain text; a line is broken on a terminal's standard error alone, so that it can be copied."""
        if chosen.is_data and not self.stderr:
            chosen.sentences += [str(each) for each in objects if isinstance(each, str | Text)]
            return
        shown = [Text(visible(each)) if isinstance(each, str) else each for each in objects]
        if not (self.stderr and self.is_terminal) and all(isinstance(each, Text) for each in shown):
            options.setdefault("soft_wrap", True)
        super().print(*shown, **options)

    def on_broken_pipe(self) -> None:
        """cli.main decides the exit code of a process whose output is not read; rich would exit with 1."""
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of anything printed, each without a character that a terminal would obey."""
        for segment in super().render(renderable, options):
            # Control segments are rich's own (move the cursor, clear a line): data never makes one.
            if segment.control or segment.text == "\n" or is_visible(segment.text):
                yield segment
            else:
                yield Segment(visible(segment.text, keep="\n"), segment.style)
