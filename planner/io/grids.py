"""The terminal and its tables: without lines, text aligned left and folded, numbers aligned right and never folded."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from planner.io.printable import printable


def grid(
    headings: Sequence[str], rows: Iterable[Sequence[str]] = (), *, text: Collection[str] | None = None, gap: int = 1
) -> Table:
    """Return a table of `rows`; `text` are the headings of text columns, by default the first. `gap` is the space
    between columns.

    Cells are made safe for a terminal by `printable`.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    words = set(headings[:1]) if text is None else text
    for heading in headings:
        left = heading in words
        table.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for row in rows:
        table.add_row(*map(printable, row))
    return table


def console() -> Console:
    """Return a console for standard output that does not interpret markup; without colours off a terminal or with
    NO_COLOR.
    """
    plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))
    return Console(
        file=sys.stdout,
        markup=False,
        highlight=False,
        emoji=False,
        no_color=plain,
        color_system=None if plain else "auto",
    )
