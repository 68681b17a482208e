"""What a measuring worker writes and how it keeps to its time: JSON lines on disk, and a deadline.

Each record is flushed when it is made: a worker that is killed leaves all but its last. Only the standard library.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

# How a rank ends that has something to say, so that its report can tell a full memory or a wrong number from a crash.
OUT_OF_MEMORY = 64
WRONG_NUMBERS = 65


class Recorder:
    """Appends records to a file; without a path (ranks other than 0) it drops them.

    A rate or a time that is no number is a mistake of ours and raises; a difference may be infinite (`finite`).
    """

    def __init__(self, path: str | Path | None) -> None:
        self._file = Path(path).open("a", encoding="utf-8") if path is not None else None  # noqa: SIM115 - closed by close()

    def write(self, kind: str, **fields: Any) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps({"kind": kind, **fields}, allow_nan=False) + "\n")
        self._file.flush()

    def missing(self, what: str) -> None:
        self.write("missing", what=what)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with numbers that JSON has no word for as None."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in fields.items()
    }


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; a line cut short by a kill ends it."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            return
        if isinstance(record, dict):
            yield record


class Deadline:
    """Seconds left of a budget."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @classmethod
    def since_launch(cls, seconds: float) -> Deadline:
        """Count from when our launcher started this process: importing torch cold can take most of a budget."""
        launched = os.environ.get("MESHWRIGHT_LAUNCHED")
        return cls(seconds - (time.monotonic() - float(launched) if launched else 0.0))

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def has(self, seconds: float) -> bool:
        return self.left_s > seconds


def middle(values: list[float]) -> tuple[float, float]:
    """Return (median, (90th - 10th percentile) / median)."""
    ordered = sorted(values)
    mid = median(ordered)
    tenth = len(ordered) // 10
    return mid, (ordered[-1 - tenth] - ordered[tenth]) / mid if mid else 0.0
