"""The history of runs that `planner apply` made, in one SQLite file in the user's data folder.

The store is a copy; the directory of a run remains the original. A store that cannot be written (full disk, read-only
home) causes a warning and never fails a run. Writers take turns through SQLite's lock; a reader sees complete rows
only. A row has the report as JSON, and in columns what tables and plots need, so that listing runs parses no JSON. The
next writer sets a damaged store aside; one of a newer release stays as it is.
"""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import platformdirs

from planner.io.plan_words import plan_in_words
from planner.runs.run_document import verify_run
from topology import codec
from topology.codec import JsonObject
from topology.errors import BadInput, PlannerError, UserError

SCHEMA_VERSION = 1
LONGEST_PATH = 512  # bytes (SQLite src/os_unix.c: MAX_PATHNAME)
WAIT_S = 10.0  # seconds to wait for another writer; a row is written in milliseconds
MAX_TEXT = 8192  # longest text in a column; a path has at most 4096 characters
MAX_NUMBER = 1e18  # larger than any count, byte or second of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run as a table row. Values that were not measured or not predicted are None, never 0.

    `plan` is the degrees as text; `status` is `finished`, or how the run ended (`out_of_memory`, `failed`, ...);
    `complete` is False if fewer steps were taken than requested. `device` is the name of the GPU, or `cpu`. Peak bytes
    are those allocated on the rank with the most.
    """

    id: str
    taken_at: str  # ISO 8601, UTC
    status: str
    complete: bool
    model: str
    framework: str
    plan: str
    gpus: int
    device: str
    seq_len: int
    global_batch_size: int
    predicted_step_s: float | None
    measured_step_s: float | None
    predicted_peak_bytes: float | None
    measured_peak_bytes: float | None
    measured_tokens_per_s: float | None
    directory: str

    @property
    def step_error(self) -> float | None:
        """Return predicted / measured - 1 of the step; None on a CPU, whose times do not compare with the planned
        GPUs'.
        """
        return None if self.device == "cpu" else _error(self.predicted_step_s, self.measured_step_s)

    @property
    def memory_error(self) -> float | None:
        return _error(self.predicted_peak_bytes, self.measured_peak_bytes)


NAMES = tuple(one.name for one in fields(RunSummary))
_COLUMNS = ", ".join(NAMES)
_TYPES = {str: "TEXT NOT NULL", int: "INTEGER NOT NULL", bool: "INTEGER NOT NULL"}  # the others are numbers or missing
_TABLE = "CREATE TABLE runs ({}, document TEXT NOT NULL)".format(
    ", ".join(
        f"{name} {'TEXT PRIMARY KEY' if name == 'id' else _TYPES.get(kind, 'REAL')}"
        for name, kind in get_type_hints(RunSummary).items()
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedRun:
    """An invalid row of the store. `id` is what `remove` takes: the run's own, or `#` and the row's number."""

    id: str
    why: str


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted and measured else None


def default_path() -> Path:
    """Return the path of the store: `runs.sqlite3` in the user's data folder (XDG_DATA_HOME on Linux)."""
    return platformdirs.user_data_path("meshwright", appauthor=False) / "runs.sqlite3"


# --- reading ----------------------------------------------------------------------------------------------------------


def list_runs(path: str | Path | None = None, *, limit: int | None = None) -> tuple[RunSummary, ...]:
    """Return the kept runs, newest first; empty if there is no store yet. Raises PlannerError when it is broken.

    Invalid rows are left out: see `damaged_runs`.
    """
    runs = [run for run in _rows(path) if isinstance(run, RunSummary)]
    return tuple(runs[:limit])


def damaged_runs(path: str | Path | None = None) -> tuple[DamagedRun, ...]:
    """Return the invalid rows of the store: altered by hand, or written by a faulty version."""
    return tuple(run for run in _rows(path) if isinstance(run, DamagedRun))


def _rows(path: str | Path | None) -> Iterator[RunSummary | DamagedRun]:
    """Yield what every row holds, newest first."""
    place = default_path() if path is None else Path(path)
    if not _has_been_written(place):
        return
    with _reading(place) as store:
        rows = store.execute(
            f"SELECT rowid, {_COLUMNS} FROM runs ORDER BY taken_at DESC, id"  # noqa: S608 - a constant of ours
        ).fetchall()
    for number, *row in rows:
        name = row[0] if isinstance(row[0], str) and row[0].isalnum() else f"#{number}"
        try:
            run = _summary(row)
        except BadInput as error:
            yield DamagedRun(id=name, why=error.why or error.what)
        else:
            yield run if run.id == name else DamagedRun(id=name, why=f"its id is {run.id!r:.40}")


def read_run(run_id: str, path: str | Path | None = None) -> JsonObject:
    """Return the report of a stored run, as in its `run.json`. `run_id` may be a unique prefix of an id.

    Raises BadInput when there is no such run, or several.
    """
    store_path = default_path() if path is None else Path(path)
    rows = []
    if _has_been_written(store_path) and run_id.isalnum():
        with _reading(store_path) as store:
            rows = store.execute(
                "SELECT id, document FROM runs WHERE substr(id, 1, ?) = ? LIMIT 9", (len(run_id), run_id)
            ).fetchall()
    exact = [row for row in rows if row[0] == run_id] or rows
    if len(exact) == 1:
        key, text = exact[0]
        try:
            return verify_run(codec.parse_json(str(text), where=f"run {key}"), where=f"run {key}")
        except UserError as error:
            raise BadInput(
                f"run {key} is damaged",
                why=f"{error.what}: {error.why}" if error.why else error.what,
                remedy=f"planner runs --remove {key}; --add its folder",
            ) from error
    raise BadInput(
        f"{len(exact)} runs begin with {run_id}" if exact else f"there is no run {run_id!r}",
        why=", ".join(row[0] for row in exact),
        remedy="planner runs lists them; or name a run's directory",
    )


# --- writing ----------------------------------------------------------------------------------------------------------


def run_id(document: Mapping[str, Any]) -> str:
    """Return the id of a run: a hash of its content, so that storing it twice makes one row."""
    named = {key: document.get(key) for key in ("taken_at", "plan", "model", "workload", "measured", "status")}
    return hashlib.sha256(codec.to_json(named, indent=None).encode()).hexdigest()[:12]


def save_run(
    document: Mapping[str, Any],
    directory: str | Path,
    path: str | Path | None = None,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> str:
    """Add a run's report to the store and return its id; `directory` is that of the run.

    A damaged store is set aside, `tell` is called with a warning, and a new one is begun. Raises BadInput when the
    report is invalid, PlannerError when the store cannot be written. It is then as it was before.
    """
    store_path = default_path() if path is None else Path(path)
    verify_run(document, where=str(directory))
    key = run_id(document)
    try:
        summary = _row(key, document, str(directory))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadInput(
            f"{directory} holds no report that can be kept", why=f"{type(error).__name__}: {error}"
        ) from error
    _summary(summary)
    row = (*summary, codec.to_json(document, indent=None))
    try:
        store_path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlannerError(f"cannot make {store_path.parent}", why=error.strerror or str(error)) from error
    try:
        _insert(store_path, row)
    except PlannerError as error:
        with codec.locked(store_path):
            if not _damaged(error) or not _unreadable(store_path):
                raise
            tell(f"warning: {error}\n  kept as {codec.set_aside(store_path)}; the list of runs begins anew")
        _insert(store_path, row)
    return key


def _damaged(error: PlannerError) -> bool:
    code = getattr(error.__cause__, "sqlite_errorcode", None)
    return code in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}


def _unreadable(store_path: Path) -> bool:
    """Return whether the store is still damaged: another writer may have begun a new one."""
    try:
        with _opened(store_path, f"{store_path.absolute().as_uri()}?mode=ro") as store:
            return bool(store.execute("PRAGMA quick_check(1)").fetchone() != ("ok",))
    except PlannerError as error:
        return _damaged(error)


def _insert(store_path: Path, row: Sequence[Any]) -> None:
    """Add a row to the store, which is created if it does not exist."""
    marks = ", ".join("?" * len(row))
    with _opened(store_path, f"{store_path.absolute().as_uri()}?mode=rwc") as store:
        store.execute("BEGIN IMMEDIATE")  # one writer at a time; others wait here
        found = store.execute("PRAGMA user_version").fetchone()[0]
        if found == 0:
            store.execute(_TABLE)
            store.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        else:
            _require_readable(found, store_path)
        store.execute(f"INSERT OR REPLACE INTO runs ({_COLUMNS}, document) VALUES ({marks})", row)  # noqa: S608 - constants
        store.execute("COMMIT")


def remove(run_id: str, path: str | Path | None = None) -> str:
    """Remove a run from the store and return its id; its directory stays. `run_id` may be the beginning of only one.

    `#` and a number names a damaged row without an id. Raises BadInput when there is no such run, or several.
    """
    place = default_path() if path is None else Path(path)
    if _has_been_written(place):
        found = [run.id for run in _rows(place) if run_id and run.id.startswith(run_id)]
        found = [run_id] if run_id in found else found
        if len(found) == 1:
            column, value = ("rowid", found[0][1:]) if found[0].startswith("#") else ("id", found[0])
            with _opened(place, f"{place.absolute().as_uri()}?mode=rw") as store:
                _require_readable(store.execute("PRAGMA user_version").fetchone()[0], place)
                store.execute(f"DELETE FROM runs WHERE {column} = ?", (value,))  # noqa: S608 - one of two constants
            return found[0]
        if found:
            raise BadInput(f"{len(found)} runs begin with {run_id}", why=", ".join(found[:8]))
    raise BadInput(f"there is no run {run_id!r}", remedy="planner runs lists them")


def _row(key: str, document: Mapping[str, Any], directory: str) -> tuple[Any, ...]:
    plan, model, workload = document["plan"], document["model"], document["workload"]
    measured, predicted = document.get("measured") or {}, document.get("predicted") or {}
    step = measured.get("step_s") or {}
    peaks = [rank.get("peak_allocated_bytes") for rank in measured.get("memory_by_rank") or ()]
    return (
        key,
        str(document["taken_at"]),
        str(document["status"]),
        int(bool(document.get("complete"))),
        str(model["name"]),
        str(document["runtime"]["name"]),
        plan_in_words(plan),
        _gpus(plan),
        str((document.get("versions") or {}).get("device") or document["device"]),
        int(workload["seq_len"]),
        int(workload["global_batch_size"]),
        (predicted.get("step_s") or {}).get("value"),
        step.get("median"),
        ((predicted.get("memory") or {}).get("peak_bytes") or {}).get("value"),
        max((peak for peak in peaks if peak), default=None),
        measured.get("tokens_per_s"),
        directory,
    )


def _gpus(plan: Mapping[str, Any]) -> int:
    count = 1
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
        count *= int(plan[axis])
    return count


# --- the file ---------------------------------------------------------------------------------------------------------


def _has_been_written(store_path: Path) -> bool:
    """Whether there is a store: a full disk leaves an empty file, which is not one."""
    return store_path.is_file() and store_path.stat().st_size > 0


@contextmanager
def _reading(store_path: Path) -> Iterator[sqlite3.Connection]:
    # The first reader after a writer was killed rolls back its incomplete row, which needs write access.
    mode = "rw" if os.access(store_path, os.W_OK) and os.access(store_path.parent, os.W_OK) else "ro"
    with _opened(store_path, f"{store_path.absolute().as_uri()}?mode={mode}") as store:
        store.execute("PRAGMA query_only = 1")
        _require_readable(store.execute("PRAGMA user_version").fetchone()[0], store_path)
        yield store


@contextmanager
def _opened(store_path: Path, uri: str) -> Iterator[sqlite3.Connection]:
    store = None
    try:
        store = sqlite3.connect(uri, uri=True, timeout=WAIT_S, isolation_level=None)
        store.text_factory = lambda raw: raw.decode("utf-8", errors="replace")  # an invalid row does not hide others
        yield store
    except sqlite3.Error as error:
        long = len(os.fsencode(store_path.absolute())) >= LONGEST_PATH
        raise PlannerError(
            f"the store of runs, {store_path}, cannot be used",
            why=f"SQLite opens paths of less than {LONGEST_PATH} bytes" if long else str(error),
            remedy=f"{'a shorter XDG_DATA_HOME' if long else 'free the disk, or move the file away'}:"
            " runs keep their own directories",
        ) from error
    finally:
        if store is not None:
            store.close()  # rolls back the uncommitted row


def _require_readable(found: int, store_path: Path) -> None:
    if found != SCHEMA_VERSION:
        raise PlannerError(
            f"{store_path} holds runs in schema {found}",
            why=f"this version reads schema {SCHEMA_VERSION}",
            remedy="update meshwright, or move the file away",
        )


def _summary(row: Sequence[Any]) -> RunSummary:
    """Return a row's content. Raises BadInput, with the column, for an invalid row."""
    found = dict(zip(NAMES, row, strict=True))
    where = f"run {found['id']!r:.40}"
    summary = codec.convert({**found, "complete": found["complete"] == 1}, RunSummary, where=where)
    for name in NAMES:
        value = getattr(summary, name)
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise BadInput(f"{where}: {name} has {len(value)} characters", why=f"{name} is longer than {MAX_TEXT}")
        if isinstance(value, (int, float)) and not (math.isfinite(value) and 0 <= value < MAX_NUMBER):
            raise BadInput(f"{where} is damaged", why=f"{name} is {value}")
    return summary
