"""Write results: JSON on standard output, warnings and progress on standard error, text made safe for a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from planner.io.printable import printable
from topology import codec
from topology.errors import BadInput, PlannerError, shortened
from topology.redact import redact
from topology.units import in_mib

SCHEMA_VERSION = 1

_listener: Callable[[str], None] | None = None


def emit_json(document: Any) -> None:
    """Print one JSON document on standard output."""
    print(codec.to_json(document))


def warn(text: str) -> None:
    """Print a line on standard error."""
    print(printable(shortened(text)), file=sys.stderr)


@contextmanager
def redacted(on: bool) -> Iterator[None]:
    """Remove everything that identifies the machine from what is printed inside, if `on`; see `topology.redact`."""
    if not on:
        yield
        return
    streams = sys.stdout, sys.stderr
    held = StringIO(), StringIO()
    sys.stdout, sys.stderr = held
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream, text in zip(streams, held, strict=True):
            print(redact(text.getvalue()), end="", file=stream)


def require_room(folder: Path, least_bytes: int, what: str) -> None:
    """Make a folder for results, and check before anything is measured that its disk has room for `what`.

    Raises BadInput where it cannot be made or written, PlannerError where less than `least_bytes` are free.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise BadInput(f"cannot write {folder}", why=error.strerror or str(error), remedy="--out elsewhere") from error
    if free < least_bytes:
        raise PlannerError(
            f"there are {in_mib(free)} free for {folder}",
            why=f"{what} take up to {in_mib(least_bytes)}",
            remedy="free the disk, or --out elsewhere",
        )


def attempt(write: Callable[[], object]) -> PlannerError | None:
    """Call `write` and return its error, to be raised later: an answer is shown even if its file cannot be written."""
    try:
        write()
    except PlannerError as error:
        return error
    return None


@contextmanager
def progress_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Pass progress lines inside to `listener`, for a process without a terminal."""
    global _listener  # noqa: PLW0603 - like standard error, there is one for the process
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def progress(text: str) -> None:
    """Show a progress line on standard error if it is a terminal, or pass it to the listener."""
    if _listener is not None:
        _listener(printable(text))
    elif sys.stderr.isatty():
        print(f"\r\033[K{printable(text)}", end="", file=sys.stderr, flush=True)


def early_answer(text: str) -> None:
    """Show preliminary results on standard error if it is a terminal; they stay above the answer."""
    if _listener is None and sys.stderr.isatty():
        end_progress()
        print(printable(text), file=sys.stderr, flush=True)


def end_progress() -> None:
    """Clear the progress line."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
