"""Read files that users give us as typed objects, and write them back. All user files are read here.

Inputs are data: nothing here can run code, follow a reference or grow without bound. A document larger than
`MAX_BYTES`, or nested deeper than the decoder's limit, is refused; unknown keys are an error, never dropped. Writing is
atomic: a reader sees the old file or the new one, never half of either.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import os
import platform
import re
import stat
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from topology.errors import BadInput, NewerSchema, PlannerError
from topology.units import MIB, in_mib

MAX_BYTES = 32 * MIB
MOST_NAMED = 20  # known keys that an error names
LOCK_WAIT_S = 30.0  # to wait for another writer; merging and writing a file takes well under a second

T = TypeVar("T")

# A JSON object: read and not yet checked, or about to be written.
JsonObject = dict[str, Any]


def read_text(path: str | Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Return a file's text. Raises BadInput when it is missing, too large, binary, or not UTF-8."""
    path = Path(path)
    try:
        # Opening a named pipe waits for a writer, for ever if there is none. A shell's <(command) has one.
        if stat.S_ISFIFO(path.stat().st_mode) and not str(path).startswith(("/dev/", "/proc/self/fd/")):
            raise BadInput(f"{path} is a named pipe", remedy="pass a file, or - for standard input")
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise BadInput(f"cannot read {path}", why=error.strerror or str(error), remedy="check the path") from error
    except ValueError as error:  # a NUL character in the path
        raise BadInput(f"cannot read {str(path)[:80]!r}", why=str(error), remedy="check the path") from error
    if len(raw) > max_bytes:
        raise BadInput(f"{path} is larger than {in_mib(max_bytes)}", remedy="pass a smaller file")
    if raw.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")):
        raise BadInput(
            f"{path} is a pickle or an archive",
            why="loading one can run code, so it is never opened",
            remedy="export the data as JSON",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is not UTF-8 text", why=str(error), remedy="check that it is the file you meant"
        ) from error


def read_path_or_stdin(name: str | Path) -> tuple[str, str]:
    """Return (text, name for error messages) of a file given on the command line, or of standard input for `-`."""
    if str(name) != "-":
        return read_text(name), str(name)
    text = sys.stdin.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise BadInput(f"standard input is larger than {in_mib(MAX_BYTES)}", remedy="pass a smaller file")
    return text, "standard input"


def read_json(path: str | Path) -> Any:
    """Return a JSON file as plain data (dict, list, str, int, float, bool, None). Raises BadInput."""
    return parse_json(read_text(path), where=str(path))


def parse_json(text: str, *, where: str) -> Any:
    """Return JSON text as plain data. Raises BadInput on syntax errors, NaN, or nesting too deep to read."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadInput(
            f"{where} is not valid JSON", why=str(error), remedy="check that it is the file you meant, and whole"
        ) from error


def parse_lines(text: str) -> Iterator[JsonObject]:
    """Yield the objects of JSON lines up to the first that is not whole, which a killed writer can leave."""
    for line in text.splitlines():
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError):
            return
        if isinstance(record, dict):
            yield record


def convert(data: Any, kind: type[T], *, where: str, others: bool = False) -> T:
    """Return plain `data` as an object of the dataclass `kind`.

    Types are strict, keys that `kind` does not have are an error (with `others` they are left out), and the message
    names the path to the value.
    """
    try:
        value = msgspec.convert(data, kind, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        what = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()
        raise BadInput(
            f"{where} is not a valid {what}", why=str(error), remedy="correct it there, or make the file again"
        ) from error
    kept = msgspec.to_builtins(value)
    unknown = [] if others else list(_dropped(data, kept, "$"))
    if unknown:
        known = [f"$.{key}" for key in kept]
        near = [found[0] for path in unknown[:8] if (found := get_close_matches(path, known, n=1, cutoff=0.7))]
        top = all(path.count(".") == 1 for path in unknown)
        raise BadInput(
            f"{where} has {'unknown keys' if len(unknown) > 1 else 'an unknown key'}: {', '.join(unknown[:8])}",
            why="a misspelt key would otherwise be ignored silently",
            remedy=f"remove or rename {'them' if len(unknown) > 1 else 'it'}"
            + (f"; known: {', '.join(known)}" if top and len(known) <= MOST_NAMED else "")
            + (f"; did you mean {', '.join(near)}?" if near else ""),
        )
    return value


def to_builtins(value: Any) -> Any:
    """Return dataclasses, tuples and enums as plain JSON data, keys in declaration order."""
    return msgspec.to_builtins(value)


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """Return `value` as JSON text. Floats that JSON cannot hold (nan, inf) become null."""
    encoded = msgspec.json.encode(value)
    text = msgspec.json.format(encoded, indent=indent) if indent is not None else encoded
    return text.decode()


def parse_csv(text: str, *, where: str) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Yield (line, cells by column) of CSV text with a heading; a missing cell is None. Raises BadInput, naming the
    line.
    """
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            if None in row:
                raise BadInput(f"{where}: line {reader.line_num} has more cells than the table has columns")
            yield reader.line_num, row
    except csv.Error as error:
        raise BadInput(f"{where}: line {reader.line_num} is not CSV", why=str(error)) from error


def fingerprint(value: Any) -> str:
    """Return a stable 16-digit hash of `value`'s content: equal content, equal fingerprint, on any machine."""
    canonical = msgspec.json.encode(msgspec.to_builtins(value), order="sorted")
    return hashlib.sha256(canonical).hexdigest()[:16]


def write_text(path: str | Path, text: str) -> None:
    """Write `text` atomically: to a temporary file next to `path`, flushed to disk, then renamed over it.

    The file keeps its permissions, a new one gets those of the umask. What earlier writers of this file left when they
    were killed is removed. A device, or a pipe that is read, is written to. Raises BadInput when the place cannot be
    written.
    """
    path = Path(path)
    temporary = path.with_name(f"{_temporary_prefix(path)}{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        if path.exists() and not path.is_file():
            _write_in_place(path, text)
            return
        _make_folders(path.parent)
        _remove_abandoned(path)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(_mode(path))
        temporary.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"cannot write {str(path)[:200]}", why=why, remedy="choose another path") from error
    finally:
        _remove(temporary)


def is_file(name: str | Path) -> bool:
    """Return whether a name is that of a file; False also for a name that no file can have, which Path.is_file of
    Python before 3.14 refuses.
    """
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long, or a NUL character in it
        return False


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, unless it is there. Raises BadInput where it cannot be made."""
    try:
        _make_folders(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"cannot make the folder {str(path)[:200]}", why=why, remedy="choose another path") from error


def _make_folders(path: Path) -> None:
    """Make a folder and those above it. Raises OSError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except RecursionError:  # hundreds of folders in each other
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(path)) from None


def _write_in_place(path: Path, text: str) -> None:
    """Write to a device or a pipe. Opening a pipe that nobody reads fails instead of waiting for a reader."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "w", encoding="utf-8") as file:
        os.set_blocking(file.fileno(), True)
        file.write(text)


def _temporary_prefix(path: Path) -> str:
    """Return how names of temporary files for `path` begin on this host: process ids count on one host only."""
    host = hashlib.sha256(platform.node().encode()).hexdigest()[:6]
    return f".{os.fsdecode(os.fsencode(path.name)[:80])}.{host}."  # names may have 255 bytes


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of `path` whose writers have ended."""
    import psutil  # noqa: PLC0415 - for who writes files

    pattern = re.compile(re.escape(_temporary_prefix(path)) + r"(\d{1,9})\.[0-9a-f]{8}")
    with os.scandir(path.parent) as entries:
        found = [(entry, pattern.fullmatch(entry.name)) for entry in entries if entry.name.startswith(".")]
    for entry, match in found:
        if match and not psutil.pid_exists(int(match[1])):
            _remove(Path(entry.path))


def _remove(path: Path) -> None:
    """Remove a file if it is there and may be removed."""
    with suppress(OSError, ValueError):
        path.unlink()


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold the lock of `path` against other processes, to read a file and write it back without losing what they add.

    The operating system frees the lock of a process that is killed. Raises PlannerError when it cannot be had.
    """
    import filelock  # noqa: PLC0415 - for who writes files that others write, too

    path = Path(path)
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_WAIT_S)
    try:
        _make_folders(path.parent)
        lock.acquire()
    except filelock.Timeout as error:
        raise PlannerError(
            f"{path} is being written by another process",
            why=f"its lock was not free for {LOCK_WAIT_S:.0f} s",
            remedy="try again when that process has ended",
        ) from error
    except OSError as error:
        raise PlannerError(f"cannot write in {path.parent}", why=error.strerror or str(error)) from error
    try:
        yield
    finally:
        lock.release()


def set_aside(path: str | Path) -> Path:
    """Rename a file that cannot be used so that nothing is lost, and return its name: `x.json.damaged-1`."""
    path = Path(path)
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    try:
        path.replace(aside)
    except OSError as error:
        raise PlannerError(f"cannot move {path} aside", why=error.strerror or str(error)) from error
    return aside


def _mode(path: Path) -> int:
    """Return the permissions a file at `path` has, or would get from an ordinary open."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)  # the only way to read it
    os.umask(mask)
    return 0o666 & ~mask


def _dropped(given: Any, kept: Any, path: str) -> Iterator[str]:
    """Yield the path of every key of `given` that its decoded form does not have."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in kept:
                yield from _dropped(value, kept[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(given, (list, tuple)) and isinstance(kept, (list, tuple)):
        for index, (value, other) in enumerate(zip(given, kept, strict=False)):
            yield from _dropped(value, other, f"{path}[{index}]")


def require_schema(document: Any, newest: int, *, where: str, remedy: str = "update meshwright") -> None:
    """Raise NewerSchema if a newer release wrote `document`, whose keys may be unknown, BadInput if its
    `schema_version` is no whole number from 1. Whether there has to be one, its type says.
    """
    found = document.get("schema_version", newest) if isinstance(document, dict) else newest
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise BadInput(f"{where} has no readable schema_version", why=f"found {found!r}", remedy="make the file again")
    if found > newest:
        by = document.get("tool_version")
        made = f"was made by meshwright {by[:40]}," if isinstance(by, str) else "is"
        raise NewerSchema(f"{where} {made} in schema {found}", why=f"this release reads up to {newest}", remedy=remedy)
