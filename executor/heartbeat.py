"""Where each rank is, written twice a second, so that a hang can be given a name.

When one rank stops, all others wait for it in a collective and are the ones that time out: the first to complain is
never the one to blame. The beat of a stopped process ends; a rank that is stuck outside of communication says so by the
line it stands on. Only the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PERIOD_S = 0.5
STALE_S = 4 * PERIOD_S
# Frames of these files are a rank that waits for others.
WAITING = ("distributed_c10d.py", "_functional_collectives.py", "rendezvous.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A rank's last word. `written` is the file's time, in seconds since the epoch."""

    rank: int
    pid: int
    phase: str
    where: str
    waiting: bool
    written: float


class Heartbeat:
    """Writes the beat of this rank until the process ends; `phase` says what it is doing in words."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.phase = "starting"
        self._path = folder / f"rank{rank}.beat"
        self._main = threading.main_thread().ident or 0
        self._write()
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def enter(self, phase: str) -> None:
        self.phase = phase
        self._write()

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_S)
            self._write()

    def _write(self) -> None:
        where, waiting = place_of(sys._current_frames().get(self._main))  # noqa: SLF001 - the only view of another thread's stack
        text = json.dumps({"pid": os.getpid(), "phase": self.phase, "where": where, "waiting": waiting})
        # Two threads write; each has a file of its own to rename, so no reader sees half of one.
        fresh = self._path.with_suffix(f".{threading.get_ident()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self._path)


def place_of(frame: FrameType | None) -> tuple[str, bool]:
    """Return the innermost line of ours on a stack, and whether the stack waits for other ranks below it."""
    waiting, innermost = False, ""
    while frame is not None:
        name = frame.f_code.co_filename
        waiting = waiting or name.endswith(WAITING)
        if not innermost and f"{os.sep}executor{os.sep}" in name and not name.endswith("heartbeat.py"):
            innermost = f"executor/{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return innermost, waiting


def read_beats(folder: Path, ranks: int) -> list[Beat]:
    """Return the last beats of those ranks that left one."""
    beats = []
    for rank in range(ranks):
        path = folder / f"rank{rank}.beat"
        try:
            said, written = json.loads(path.read_text(encoding="utf-8")), path.stat().st_mtime
            beats.append(
                Beat(
                    rank=rank,
                    pid=int(said["pid"]),
                    phase=str(said["phase"]),
                    where=str(said["where"]),
                    waiting=bool(said["waiting"]),
                    written=written,
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return beats


def suspects(beats: Sequence[Beat], ranks: int) -> list[str]:
    """Return, one line each, the ranks that kept the others waiting, or nothing when none stands out."""
    if not beats:
        return ["no rank got as far as its first line"] if ranks else []
    here = {beat.rank for beat in beats}
    said = [f"rank {rank} never started" for rank in range(ranks) if rank not in here]
    newest = max(beat.written for beat in beats)
    for beat in beats:
        silent = newest - beat.written
        if silent > STALE_S:
            said.append(
                f"rank {beat.rank} (pid {beat.pid}) stopped answering {silent:.0f} s before the others, in {beat.phase}"
                + (f" at {beat.where}" if beat.where else "")
            )
    if not said and any(beat.waiting for beat in beats):
        said = [
            f"rank {beat.rank} (pid {beat.pid}) was in {beat.phase} at {beat.where or 'an unknown line'}"
            " while others waited for it"
            for beat in beats
            if not beat.waiting
        ]
    return said
