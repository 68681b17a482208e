"""The state of each rank, written twice a second, so that the rank that causes a hang can be identified.

When one rank stops, all others wait for it in a collective, and the ranks that time out are not the cause. A process
that stopped writes no more heartbeats. A rank that runs but is stuck has entered fewer collectives of a group than the
other ranks of that group. The stack alone does not tell on a GPU, where ranks wait in a synchronisation far from the
collective. Only the standard library.
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
# A stack with a frame of these files waits for other ranks; for the second tuple only if the frame is the innermost.
WAITING = ("distributed_c10d.py", "_functional_collectives.py", "rendezvous.py")
WAITING_INNERMOST = ("pipelining/schedules.py", "pipelining/stage.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRecord:
    """The last heartbeat of a rank. `written` is the file's modification time, in seconds since the epoch.

    `entered` counts the collectives that the rank has entered, by group; a group's key is the same on all its ranks.
    `stack_tells_waiting` is False on a GPU, where the host can block anywhere on a full launch queue, so the stack does
    not show whether the rank waits for others. `exited`: the process ended by itself, with an error or a timeout.
    """

    rank: int
    pid: int
    phase: str
    where: str
    waiting: bool
    written: float
    entered: Mapping[str, int] = field(default_factory=dict)
    stack_tells_waiting: bool = True
    exited: bool = False


class Heartbeat:
    """Writes this rank's heartbeat from a thread until the process ends or `close` is called.

    `phase` describes what the rank is doing. `entered` is called for each heartbeat, from that thread; set it when the
    process groups exist.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.phase = "starting"
        self.entered: Callable[[], Mapping[str, int]] = dict
        self.stack_tells_waiting = True
        self._exited = False
        self._closed = threading.Event()
        self._path = folder / f"rank{rank}.beat"
        self._main = threading.main_thread().ident or 0
        self._write()
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def mark_exited(self) -> None:
        """Record that this rank exits by itself, so that missing heartbeats are not taken as a hang."""
        self._exited = True
        self._write()

    def close(self) -> None:
        """Stop writing: this run has ended and the process starts another."""
        self._closed.set()

    def set_phase(self, phase: str) -> None:
        self.phase = phase
        self._write()

    def _run(self) -> None:
        while not self._closed.wait(PERIOD_S):
            self._write()

    def _write(self) -> None:
        where, waiting = locate_stack(sys._current_frames().get(self._main))  # noqa: SLF001 - the only view of another thread's stack
        fields = {
            "pid": os.getpid(),
            "phase": self.phase,
            "where": where,
            "waiting": waiting,
            "entered": dict(self.entered()),
            "telling": self.stack_tells_waiting,
            "ended": self._exited,
        }
        # Two threads write, each to its own file that it renames afterwards, so readers never see a partial file.
        fresh = self._path.with_suffix(f".{threading.get_ident()}")
        fresh.write_text(json.dumps(fields), encoding="utf-8")
        fresh.replace(self._path)


def locate_stack(frame: FrameType | None) -> tuple[str, bool]:
    """Return the innermost line of this package on a stack, and whether the stack waits for other ranks."""
    waiting, innermost = frame is not None and frame.f_code.co_filename.endswith(WAITING_INNERMOST), ""
    while frame is not None:
        name = frame.f_code.co_filename
        waiting = waiting or name.endswith(WAITING)
        if not innermost and f"{os.sep}executor{os.sep}" in name and not name.endswith("heartbeat.py"):
            innermost = f"executor/{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return innermost, waiting


def read_heartbeats(folder: Path, ranks: int) -> list[HeartbeatRecord]:
    """Return the last heartbeat of each rank that wrote any."""
    beats = []
    for rank in range(ranks):
        path = folder / f"rank{rank}.beat"
        try:
            fields, written = json.loads(path.read_text(encoding="utf-8")), path.stat().st_mtime
            beats.append(
                HeartbeatRecord(
                    rank=rank,
                    pid=int(fields["pid"]),
                    phase=str(fields["phase"]),
                    where=str(fields["where"]),
                    waiting=bool(fields["waiting"]),
                    written=written,
                    entered={str(group): int(count) for group, count in fields["entered"].items()},
                    stack_tells_waiting=bool(fields["telling"]),
                    exited=bool(fields["ended"]),
                )
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return beats


def find_suspects(beats: Sequence[HeartbeatRecord], ranks: int) -> list[str]:
    """Return a line for each rank that kept the others waiting; empty if none can be identified."""
    if not beats:
        return ["no rank got as far as its first line"] if ranks else []
    here = {beat.rank for beat in beats}
    found = [f"rank {rank} never started" for rank in range(ranks) if rank not in here]
    newest = max(beat.written for beat in beats)
    found += [
        f"rank {beat.rank} (pid {beat.pid}) stopped answering {newest - beat.written:.0f} s before the others, in"
        f" {beat.phase}" + (f" at {beat.where}" if beat.where else "")
        for beat in beats
        if newest - beat.written > STALE_S and not beat.exited
    ]
    if found:
        return found
    late = _ranks_behind(beats)
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
            if not beat.waiting and beat.stack_tells_waiting
        ]
    return []


def _ranks_behind(beats: Sequence[HeartbeatRecord]) -> list[tuple[HeartbeatRecord, int]]:
    """Return ranks that have entered fewer collectives of a group than other members, and the number of those members.

    A rank that is itself waiting in a collective of another group is late only for that reason: it is left out, unless
    no other rank is late.
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
