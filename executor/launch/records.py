"""Records of a measuring worker (JSON lines on disk), and its deadline.

Each record is flushed when it is written, so a worker that is killed loses at most its last one. Never imports
torch.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from topology.codec import JsonObject, parse_lines, to_builtins
from topology.errors import ProbeError

# Exit codes by which the report distinguishes full memory and wrong numbers from a crash.
OUT_OF_MEMORY = 64
WRONG_NUMBERS = 65


class Recorder:
    """Appends records to a file; without a path (ranks other than 0) it drops them.

    Fields are JSON types or dataclasses. A NaN or infinite number raises ValueError; pass values that may be infinite
    through `nonfinite_as_none`. Raises ProbeError where the file cannot be written.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = path
        with self._write_errors():
            self._file = Path(path).open("a", encoding="utf-8") if path is not None else None  # noqa: SIM115 - closed by close()

    def write(self, kind: str, **fields: Any) -> None:
        if self._file is None:
            return
        line = json.dumps({"kind": kind, **fields}, allow_nan=False, default=to_builtins) + "\n"
        with self._write_errors():
            self._file.write(line)
            self._file.flush()

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            raise ProbeError(
                f"cannot write {self._path}", why=why, remedy="free the disk, or choose another"
            ) from error

    def missing(self, what: str, *, late: bool = False) -> None:
        """Record a missing measurement; `late`: only because no time was left for it."""
        self.write("missing", what=what, **({"late": True} if late else {}))

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # failures to flush were reported at the write
                self._file.close()


def nonfinite_as_none(fields: Mapping[str, Any]) -> JsonObject:
    """Return `fields` with NaN and infinite numbers, which JSON cannot hold, as None."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in fields.items()
    }


def read_records(path: str | Path) -> Iterator[JsonObject]:
    """Yield the records of a file up to the first incomplete line, which a killed worker can leave."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    yield from parse_lines(text)


class Deadline:
    """Seconds left of a budget."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @classmethod
    def since_launch(cls, seconds: float) -> Deadline:
        """Start at the launch of this process: importing torch from a cold disk can take most of a budget."""
        launched = os.environ.get("MESHWRIGHT_LAUNCHED")
        return cls(seconds - (time.monotonic() - float(launched) if launched else 0.0))

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def allows(self, seconds: float) -> bool:
        return self.left_s > seconds


def median_and_spread(values: list[float]) -> tuple[float, float]:
    """Return (median, (90th - 10th percentile) / median)."""
    ordered = sorted(values)
    mid = median(ordered)
    tenth = len(ordered) // 10
    return mid, (ordered[-1 - tenth] - ordered[tenth]) / mid if mid else 0.0
