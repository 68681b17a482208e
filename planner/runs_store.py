"""Every run that `planner apply` made, in one SQLite file under the user's data folder: the history that calibration
and the explorer read.

The store is a copy. The run's own directory stays the truth, so a store that cannot be written (a full disk, a
read-only home) costs a warning and never a run. Writers take turns through SQLite's own lock; a reader sees a row whole
or not at all. Rows hold the report as JSON, and beside it what tables and plots need, so that listing parses nothing.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from topology import codec
from topology.errors import BadInput, PlannerError

SCHEMA_VERSION = 1
WAIT_S = 10.0  # for another writer; a row is written in milliseconds

_TABLE = """
CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    taken_at TEXT NOT NULL,
    status TEXT NOT NULL,
    complete INTEGER NOT NULL,
    model TEXT NOT NULL,
    framework TEXT NOT NULL,
    plan TEXT NOT NULL,
    gpus INTEGER NOT NULL,
    device TEXT NOT NULL,
    seq_len INTEGER NOT NULL,
    global_batch_size INTEGER NOT NULL,
    predicted_step_s REAL,
    measured_step_s REAL,
    predicted_peak_bytes REAL,
    measured_peak_bytes REAL,
    measured_tokens_per_s REAL,
    directory TEXT NOT NULL,
    document TEXT NOT NULL
)
"""
_COLUMNS = (
    "id, taken_at, status, complete, model, framework, plan, gpus, device, seq_len, global_batch_size, predicted_step_s,"
    " measured_step_s, predicted_peak_bytes, measured_peak_bytes, measured_tokens_per_s, directory"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run as a row of a table. What was not measured or not predicted is None, never 0.

    `plan` is its degrees in words; `status` is `finished`, or how the run ended (`out_of_memory`, `failed`, ...);
    `complete` is False where fewer steps were taken than asked for. `device` is a GPU's name, or `cpu`. Peak bytes are
    those allocated on the fullest rank.
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
        """Return predicted / measured - 1 of the step."""
        return _error(self.predicted_step_s, self.measured_step_s)

    @property
    def memory_error(self) -> float | None:
        return _error(self.predicted_peak_bytes, self.measured_peak_bytes)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted and measured else None


def default_path() -> Path:
    """Return where the store lies: `runs.sqlite3` in the user's data folder (XDG_DATA_HOME on Linux)."""
    return platformdirs.user_data_path("meshwright", appauthor=False) / "runs.sqlite3"


# --- reading ----------------------------------------------------------------------------------------------------------


def list_runs(path: str | Path | None = None, *, limit: int | None = None) -> tuple[RunSummary, ...]:
    """Return the kept runs, newest first; nothing where there is no store yet. Raises PlannerError when it is broken."""
    place = default_path() if path is None else Path(path)
    if not place.is_file():
        return ()
    with _reading(place) as store:
        rows = store.execute(
            f"SELECT {_COLUMNS} FROM runs ORDER BY taken_at DESC, id LIMIT ?",  # noqa: S608 - a constant of ours
            (-1 if limit is None else limit,),
        ).fetchall()
    return tuple(_summary(row) for row in rows)


def read_run(run_id: str, path: str | Path | None = None) -> dict[str, Any]:
    """Return the whole report of a kept run, as in its `run.json`. `run_id` may be the beginning of only one id.

    Raises BadInput when there is no such run, or several.
    """
    place = default_path() if path is None else Path(path)
    rows = []
    if place.is_file() and run_id.isalnum():
        with _reading(place) as store:
            rows = store.execute(
                "SELECT id, document FROM runs WHERE substr(id, 1, ?) = ? LIMIT 9", (len(run_id), run_id)
            ).fetchall()
    exact = [row for row in rows if row[0] == run_id] or rows
    if len(exact) == 1:
        document = codec.parse_json(exact[0][1], where=f"run {exact[0][0]}")
        if isinstance(document, dict):
            return document
    raise BadInput(
        f"{len(exact)} runs begin with {run_id}" if exact else f"there is no run {run_id!r}",
        why=", ".join(row[0] for row in exact),
        remedy="planner runs lists them; or name a run's directory",
    )


# --- writing ----------------------------------------------------------------------------------------------------------


def run_id(document: Mapping[str, Any]) -> str:
    """Return the id of a run: what it measured, hashed, so that keeping it twice keeps it once."""
    named = {key: document.get(key) for key in ("taken_at", "plan", "model", "workload", "measured", "status")}
    return hashlib.sha256(codec.to_json(named, indent=None).encode()).hexdigest()[:12]


def keep(document: Mapping[str, Any], directory: str | Path, path: str | Path | None = None) -> str:
    """Add a run's report to the store and return its id; `directory` is where the run itself lies.

    Raises PlannerError when the store cannot be written. It is then as it was before.
    """
    place = default_path() if path is None else Path(path)
    key = run_id(document)
    row = (*_row(key, document, str(directory)), codec.to_json(document, indent=None))
    marks = ", ".join("?" * len(row))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlannerError(f"cannot make {place.parent}", why=error.strerror or str(error)) from error
    with _opened(place, f"{place.absolute().as_uri()}?mode=rwc") as store:
        store.execute("BEGIN IMMEDIATE")  # one writer at a time; the other waits here
        found = store.execute("PRAGMA user_version").fetchone()[0]
        if found == 0:
            store.execute(_TABLE)
            store.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        else:
            _require_readable(found, place)
        store.execute(f"INSERT OR REPLACE INTO runs ({_COLUMNS}, document) VALUES ({marks})", row)  # noqa: S608 - constants of ours
        store.execute("COMMIT")
    return key


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
        plan_words(plan),
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


def plan_words(plan: Mapping[str, Any]) -> str:
    """Return a plan's degrees, leaving out what is 1 or none: `pp 2 x dp_shard 4, 1F1B, micro batch 2`."""
    degrees = [
        f"{axis} {plan[axis]}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep") if plan[axis] > 1
    ]
    words = [" x ".join(degrees) or "one GPU"]
    words += [str(plan["schedule"])] if plan.get("schedule") and plan["pp"] > 1 else []
    words += [f"{plan['virtual_stages']} stages a rank"] if plan["virtual_stages"] > 1 else []
    words += [f"recompute {plan['recompute']}"] if plan["recompute"] != "none" else []
    words += [f"overlap {plan['tp_overlap']}"] if plan["tp_overlap"] != "none" else []
    return ", ".join([*words, f"micro batch {plan['micro_batch_size']}"])


# --- the file ---------------------------------------------------------------------------------------------------------


@contextmanager
def _reading(place: Path) -> Iterator[sqlite3.Connection]:
    # Whoever reads first after a writer was killed undoes its half-written row, which takes the right to write.
    mode = "rw" if os.access(place, os.W_OK) and os.access(place.parent, os.W_OK) else "ro"
    with _opened(place, f"{place.absolute().as_uri()}?mode={mode}") as store:
        store.execute("PRAGMA query_only = 1")
        _require_readable(store.execute("PRAGMA user_version").fetchone()[0], place)
        yield store


@contextmanager
def _opened(place: Path, uri: str) -> Iterator[sqlite3.Connection]:
    store = None
    try:
        store = sqlite3.connect(uri, uri=True, timeout=WAIT_S, isolation_level=None)
        yield store
    except sqlite3.Error as error:
        raise PlannerError(
            f"the store of runs, {place}, cannot be used",
            why=str(error),
            remedy="free the disk, or move the file away: runs keep their own directories",
        ) from error
    finally:
        if store is not None:
            store.close()  # undoes what was not committed


def _require_readable(found: int, place: Path) -> None:
    if found != SCHEMA_VERSION:
        raise PlannerError(
            f"{place} holds runs in schema {found}",
            why=f"this version reads schema {SCHEMA_VERSION}",
            remedy="update meshwright, or move the file away",
        )


def _summary(row: tuple[Any, ...]) -> RunSummary:
    names = [name.strip() for name in _COLUMNS.split(",")]
    fields = dict(zip(names, row, strict=True))
    return RunSummary(**{**fields, "complete": bool(fields["complete"])})
