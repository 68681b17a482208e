"""Where each rank is, written twice a second, so that a hang can be given a name.

When one rank stops, all others wait for it in a collective and are the ones that time out: the first to complain is
never the one to blame. The beat of a stopped process ends. A rank that lives but is stuck has entered fewer collectives
of a group than the others of that group: a GPU's ranks wait in a synchronisation far from the collective, so where they
stand proves nothing, but what they have entered does. Only the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

PERIOD_S = 0.5
STALE_S = 4 * PERIOD_S
# Frames of these files are a rank that waits for others; of the second kind only where they are the innermost.
WAITING = ("distributed_c10d.py", "_functional_collectives.py", "rendezvous.py")
WAITING_INNERMOST = ("pipelining/schedules.py", "pipelining/stage.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A rank's last word. `written` is the file's time, in seconds since the epoch.

    `entered` counts the collectives that it has entered, by group; a group's key is the same on all its ranks.
    `telling`: where it stands says whether it waits. On a GPU the host may be held up by a full queue, anywhere.
    `ended`: it left by itself, with an error of its own or because others kept it waiting too long.
    """

    rank: int
    pid: int
    phase: str
    where: str
    waiting: bool
    written: float
    entered: Mapping[str, int] = field(default_factory=dict)
    telling: bool = True
    ended: bool = False


class Heartbeat:
    """Writes the beat of this rank until the process ends or it is closed; `phase` says what it is doing in words.

    `entered` is asked at each beat, from another thread; it is set when there are groups to count.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.phase = "starting"
        self.entered: Callable[[], Mapping[str, int]] = dict
        self.telling = True
        self._ended = False
        self._over = threading.Event()
        self._path = folder / f"rank{rank}.beat"
        self._main = threading.main_thread().ident or 0
        self._write()
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def end(self) -> None:
        """Say that this rank leaves, so that its silence is no riddle."""
        self._ended = True
        self._write()

    def close(self) -> None:
        """Write no more: this rank has come to the end of the run and goes on to another."""
        self._over.set()

    def enter(self, phase: str) -> None:
        self.phase = phase
        self._write()

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            self._write()

    def _write(self) -> None:
        where, waiting = place_of(sys._current_frames().get(self._main))  # noqa: SLF001 - the only view of another thread's stack
        said = {
            "pid": os.getpid(),
            "phase": self.phase,
            "where": where,
            "waiting": waiting,
            "entered": dict(self.entered()),
            "telling": self.telling,
            "ended": self._ended,
        }
        # Two threads write; each has a file of its own to rename, so no reader sees half of one.
        fresh = self._path.with_suffix(f".{threading.get_ident()}")
        fresh.write_text(json.dumps(said), encoding="utf-8")
        fresh.replace(self._path)


def place_of(frame: FrameType | None) -> tuple[str, bool]:
    """Return the innermost line of ours on a stack, and whether the stack waits for other ranks below it."""
    waiting, innermost = frame is not None and frame.f_code.co_filename.endswith(WAITING_INNERMOST), ""
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
                    entered={str(group): int(count) for group, count in said["entered"].items()},
                    telling=bool(said["telling"]),
                    ended=bool(said["ended"]),
                )
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return beats


def suspects(beats: Sequence[Beat], ranks: int) -> list[str]:
    """Return, one line each, the ranks that kept the others waiting, or nothing when none stands out."""
    if not beats:
        return ["no rank got as far as its first line"] if ranks else []
    here = {beat.rank for beat in beats}
    said = [f"rank {rank} never started" for rank in range(ranks) if rank not in here]
    newest = max(beat.written for beat in beats)
    said += [
        f"rank {beat.rank} (pid {beat.pid}) stopped answering {newest - beat.written:.0f} s before the others, in"
        f" {beat.phase}" + (f" at {beat.where}" if beat.where else "")
        for beat in beats
        if newest - beat.written > STALE_S and not beat.ended
    ]
    if said:
        return said
    late = _behind(beats)
    if late:
        return [
            f"rank {beat.rank} (pid {beat.pid}) was in {beat.phase} at {beat.where or 'an unknown line'} and had not"
            f" entered a collective that {others} of its group waited in"
            for beat, others in late
        ]
    if any(beat.waiting for beat in beats):
        return [
            f"rank {beat.rank} (pid {beat.pid}) was in {beat.phase} at {beat.where or 'an unknown line'}"
            " while others waited for it"
            for beat in beats
            if not beat.waiting and beat.telling
        ]
    return []


def _behind(beats: Sequence[Beat]) -> list[tuple[Beat, int]]:
    """Return ranks that have entered fewer collectives of a group than others of it, and how many those others are.

    A rank that is itself inside a collective of another group is late only because it waits: it is left out, unless
    nobody else is late.
    """
    ahead: dict[int, int] = {}
    for group in {group for beat in beats for group in beat.entered}:
        counts = {beat.rank: beat.entered[group] for beat in beats if group in beat.entered}
        most = max(counts.values())
        for rank, count in counts.items():
            if count < most:
                others = sum(other > count for other in counts.values())
                ahead[rank] = max(ahead.get(rank, 0), others)
    late = [(beat, ahead[beat.rank]) for beat in beats if beat.rank in ahead]
    return [(beat, others) for beat, others in late if not beat.waiting] or late
