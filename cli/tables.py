"""How tables fit: columns as wide as they must be, sentences in lines, and rows as blocks where a table would be too wide. Pure.

Invariant: no figure, no id and no other word is ever cut or broken; only text breaks, and only where it has blanks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

TEXT_COLUMNS_MIN: Final = 16
"""In a narrower column a sentence has one word per line, which is unreadable."""
EDGE_COLUMNS: Final = 3
"""Width between two columns: a blank, a line, a blank. One less at both ends of a row together."""
INDENT: Final = "  "

Row = Sequence[Text]


def fitted(title: str, columns: Sequence[str], rows: Sequence[Row], width: int | None) -> RenderableType:
    """A table of at most `width` columns (None: as wide as it is), or blocks. Names of columns that end in `#` are of figures.

    Where no column has a name, each row is a name and a value.
    """
    names = [column.rstrip("#") for column in columns]
    if not any(names):
        return fields(title, [(row[0].plain, row[1]) for row in rows], width)
    figures = [column.endswith("#") for column in columns]
    wanted = [max(_widths(name, [row[at] for row in rows])) for at, name in enumerate(names)]
    least = [_least(name, [row[at] for row in rows], is_figure=figures[at]) for at, name in enumerate(names)]
    edges = EDGE_COLUMNS * len(columns) - 1
    if width is not None and sum(least) + edges > width:
        return blocks(title, names, rows, width)
    made = Table(title=title or None, title_justify="left", header_style="bold", pad_edge=False)
    given = wanted if width is None else _share(least, wanted, width - edges)
    for name, is_figure, columns_given in zip(names, figures, given, strict=True):
        made.add_column(name, justify="right" if is_figure else "left", width=columns_given, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def blocks(title: str, names: Sequence[str], rows: Sequence[Row], width: int) -> Text:
    """Each row as lines of a name and a value, empty values left out, an empty line between two rows."""
    made = Text(f"{title}\n", style="italic") if title else Text()
    made = Text.assemble(made)
    for number, row in enumerate(rows):
        if number:
            made.append("\n")
        made.append(
            _lines([(name, cell) for name, cell in zip(names, row, strict=True) if cell.plain], width)
        )
    made.rstrip()
    return made


def fields(title: str, rows: Sequence[tuple[str, Text]], width: int | None) -> Text:
    """Names and values, a line each; a long value goes on below itself."""
    made = Text.assemble((f"{title}\n", "bold") if title else "")
    made.append(_lines(rows, width))
    made.rstrip()
    return made


def _lines(rows: Sequence[tuple[str, Text]], width: int | None) -> Text:
    room = max((cell_len(name) for name, _ in rows), default=0) + 2
    made = Text()
    for name, value in rows:
        free = None if width is None else max(TEXT_COLUMNS_MIN, width - room - len(INDENT))
        wrapped = _wrapped(value, free)
        if free is not None and any(cell_len(line.plain) > free for line in wrapped):
            # A word that does not fit beside its name stands below it, whole.
            made.append(f"{INDENT}{name}\n", "bold")
            for line in wrapped:
                made.append(2 * INDENT)
                made.append_text(line)
                made.append("\n")
            continue
        for number, line in enumerate(wrapped):
            label = f"{name:<{room}}" if not number else " " * room
            made.append(INDENT)
            made.append(label, "bold" if not number else "")
            made.append_text(line)
            made.append("\n")
    return made


def _wrapped(value: Text, width: int | None) -> list[Text]:
    """The value's lines, broken at blanks alone, whichever: a word that is longer than a line keeps it for itself, and the terminal goes on at its left edge, where names stand.
    What goes on is indented: else a long line would look like two of the value's."""
    found: list[Text] = []
    for line in value.split("\n", allow_blank=True):
        if width is None or cell_len(line.plain) <= width:
            found.append(line)
            continue
        begin = last = 0
        goes_on = Text()
        for at, character in enumerate([*line.plain, " "]):
            if not character.isspace():
                continue
            if cell_len(goes_on.plain) + cell_len(line.plain[begin:at]) > width and last > begin:
                found.append(goes_on + line[begin:last])
                begin, goes_on = last + 1, Text(INDENT)
            last = at
        found.append(goes_on + line[begin:])
    return found or [Text()]


def _widths(name: str, cells: Sequence[Text]) -> list[int]:
    lines = [line for cell in cells for line in cell.plain.split("\n")]
    return [cell_len(name), *(cell_len(line) for line in lines)]


def _least(name: str, cells: Sequence[Text], *, is_figure: bool) -> int:
    """The narrowest that breaks no word, and no figure, which may have a unit behind a blank."""
    header = max((cell_len(word) for word in name.split()), default=0)
    found = [header]
    for cell in cells:
        for line in cell.plain.split("\n"):
            if is_figure:
                found.append(cell_len(line))
            elif " " in line:
                found.append(min(TEXT_COLUMNS_MIN, cell_len(line)))
                found += [cell_len(word) for word in line.split()]
            else:
                found.append(cell_len(line))
    return max(found)


def _share(least: Sequence[int], wanted: Sequence[int], room: int) -> list[int]:
    """Widths from the narrowest that will do to what is wanted, as far as there is room; the widest give way first."""
    given = list(least)
    spare = room - sum(given)
    while spare > 0:
        growing = [at for at in range(len(given)) if given[at] < wanted[at]]
        if not growing:
            break
        for at in growing:
            if spare:
                given[at] += 1
                spare -= 1
    return given
