"""The steps of runs, from the records that their first ranks write while they run (`executor.run.rank_records`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from topology.codec import JsonObject
from topology.units import GIB
from ui.charts.row_types import StepPoint

# What is drawn of a step: its name, and its title with a unit.
QUANTITIES = {"loss": "loss", "step": "step time, s", "clock": "SM clock, MHz", "memory": "peak memory, GiB"}


def points_of(records: str, run: str) -> list[StepPoint]:
    """Return the recorded quantities of each timed step. The last line may be incomplete; lines that are not records
    are left out.
    """
    whole = records[: records.rfind("\n") + 1].splitlines()
    steps = [found for line in whole if (found := _record(line)).get("kind") == "step"]
    return [
        {"run": run, "step": number, "quantity": name, "value": value}
        for number, record in enumerate(steps, 1)
        for name, value in _values(record).items()
    ]


def _record(line: str) -> JsonObject:
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _values(record: Mapping[str, Any]) -> dict[str, float]:
    clock = record.get("sm_clock_hz")
    memory = record.get("peak_allocated_bytes") or record.get("peak_resident_bytes")  # of a process on CPUs
    known = {
        "loss": record.get("loss"),
        "step": record.get("seconds"),
        "clock": clock / 1e6 if isinstance(clock, int | float) else None,
        "memory": memory / GIB if isinstance(memory, int | float) else None,
    }
    return {name: float(value) for name, value in known.items() if isinstance(value, int | float)}
