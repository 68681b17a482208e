"""The records of a run's ranks, read from their JSON lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from executor.launch.records import read_records
from topology.codec import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A timed step of a rank. Times in seconds, `device_s` by CUDA events (None without a GPU)."""

    seconds: float
    device_s: float | None
    ended_at: float | None  # epoch seconds
    sm_clock_hz: float | None
    loss: float
    gradient_norm: float


@dataclass(frozen=True, slots=True)
class RankRecords:
    """The records of one rank, in order."""

    entries: tuple[JsonObject, ...] = field(default=())

    @classmethod
    def read(cls, path: Path) -> RankRecords:
        return cls(tuple(read_records(path)))

    @property
    def kinds(self) -> set[str]:
        return {entry["kind"] for entry in self.entries}

    def of(self, *kinds: str) -> list[JsonObject]:
        """Return the records of the given kinds, without the field for the kind."""
        chosen = (entry for entry in self.entries if entry["kind"] in kinds)
        return [{key: value for key, value in entry.items() if key != "kind"} for entry in chosen]

    @property
    def steps(self) -> list[StepRecord]:
        return [
            StepRecord(
                seconds=entry["seconds"],
                device_s=entry.get("device_seconds"),
                ended_at=entry.get("ended_at"),
                sm_clock_hz=entry.get("sm_clock_hz"),
                loss=entry["loss"],
                gradient_norm=entry["gradient_norm"],
            )
            for entry in self.of("step")
        ]

    @property
    def peak_memory(self) -> dict[str, int]:
        """Return the largest value of each peak in bytes over timed steps, or over all records if none was timed."""
        peaks: dict[str, int] = {}
        for entry in self.of("step") or self.entries:
            for key, value in entry.items():
                if key.startswith("peak_") or key == "retries":
                    peaks[key] = max(peaks.get(key, 0), value)
        return peaks


def first_record(ranks: Iterable[RankRecords], kind: str) -> JsonObject | None:
    """Return the first record of a kind, from the first rank that has one."""
    return next((entry for rank in ranks for entry in rank.of(kind)), None)
