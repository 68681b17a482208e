"""How results leave: JSON on standard output, warnings on standard error, and text made safe for a terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1


def printable(text: str) -> str:
    """Return `text` with control characters escaped: names come from files, and a terminal obeys what it is sent."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def emit_json(document: Any) -> None:
    """Print one JSON document on standard output."""
    from topology import codec  # noqa: PLC0415 - keeps `--help` light

    print(codec.to_json(document))


def warn(text: str) -> None:
    """Print a line on standard error."""
    print(printable(text), file=sys.stderr)


def progress(text: str) -> None:
    """Show a passing state on standard error, when a person is there to see it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{printable(text)}", end="", file=sys.stderr, flush=True)


def end_progress() -> None:
    """Clear the progress line."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def console() -> Console:
    """Return a console for standard output: plain where it is no terminal or NO_COLOR is set, never reading markup."""
    from rich.console import Console as RichConsole  # noqa: PLC0415 - keeps `--help` light

    plain = not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))
    return RichConsole(
        file=sys.stdout,
        markup=False,
        highlight=False,
        emoji=False,
        no_color=plain,
        color_system=None if plain else "auto",
    )
