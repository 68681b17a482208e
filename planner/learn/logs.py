"""Runs in files: a list of cases (JSON), one case per line (JSON Lines), or a table (CSV) whose columns are paths into
a case; and the measurements in a training log: what torchtitan, Megatron-LM and DeepSpeed write about steps.

A log has step times and memory; the case that names it (`measured.log`) has the plan. torchtitan's line is written by
components/metrics.py (`tps` tokens a second and GPU, `memory` what its allocator reserved at most), Megatron-LM's by
megatron/training/training.py (`training_log`, `report_memory`: MB are MiB), DeepSpeed's by utils/timer.py
(`ThroughputTimer`: samples a second of the whole batch, GB are GiB).
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from planner.question.case_words import sectioned
from planner.question.cases import read_cases
from topology import codec
from topology.codec import JsonObject
from topology.errors import BadInput

MOST_LINE = 4096  # characters of a line that are read
MOST_GIB = 1 << 20
SKIPPED = 2  # first steps (which compile, allocate and choose algorithms) that are left out if more follow
MIB, GIB = 1 / 1024, 1.0  # in GiB
COLOR = re.compile(r"\x1b\[[0-9;]*m")
NUMBER = r"[0-9][0-9,]*(?:\.[0-9]+)?"
MOST_ROWS = 100_000


@dataclass(slots=True)
class _Read:
    """Values read so far, by step or report, so that lines of several ranks about one step count once."""

    by_step: dict[int, list[float]] = field(default_factory=dict)
    memory: dict[int, float] = field(default_factory=dict)  # rank (-1 if not stated) -> GiB

    def said(self, step: str, value: str) -> None:
        self.by_step.setdefault(int(step), []).append(_number(value))

    def held(self, rank: str | None, value: str, unit: float) -> None:
        which = int(rank) if rank is not None else -1
        self.memory[which] = max(self.memory.get(which, 0.0), _number(value) * unit)

    def steady(self) -> float:
        """Return the median over steps, without the first ones if there are more."""
        values = [statistics.median(said) for _, said in sorted(self.by_step.items())]
        return statistics.median(values[SKIPPED:] if len(values) > SKIPPED else values)


Line = Callable[[str, _Read], None]
# The text between two words of a line contains no word that begins a match, so a line is scanned once.
_STEP = r"(?:(?!step:|memory:).)*?"
# A framework's line about a step, in whose terms `planner tune` reads it, too: groups are named after their content.
STEP_LINES = {
    "torchtitan": re.compile(
        rf"step:\s*(?P<step>\d+)\s{_STEP}memory:\s*(?P<memory_gib>{NUMBER})GiB"
        rf"{_STEP}tps:\s*(?P<tokens_per_s_per_gpu>{NUMBER})"
    ),
    "megatron-lm": re.compile(
        rf"iteration\s+(?P<step>\d+)/\s*\d+ \|(?:(?!iteration\s+\d).)*?"
        rf"elapsed time per iteration \(ms\):\s*(?P<step_ms>{NUMBER})"
    ),
}
MEGATRON_MEMORY = re.compile(
    r"(?:\[Rank (\d+)\] \()?after \d+ iterations\)? memory \(MB\) \|"
    rf"(?:(?!memory \(MB\)).)*?max reserved: ({NUMBER})"
)
DEEPSPEED = re.compile(
    r"(?:global_step=|(?<!\d)\d+/)(\d+), (?:(?!_step=|\d/).)*?"
    rf"(?:Curr|\b)SamplesPerSec=({NUMBER}), (?:(?!_step=|\d/|SamplesPerSec).)*?MaxMemAllocated=({NUMBER})GB"
)


def _titan(line: str, read: _Read) -> None:
    if found := STEP_LINES["torchtitan"].search(line):
        step, memory, rate = found.groups()
        read.said(step, rate)
        read.held(None, memory, GIB)


def _megatron(line: str, read: _Read) -> None:
    if found := STEP_LINES["megatron-lm"].search(line):
        read.said(*found.groups())
    elif found := MEGATRON_MEMORY.search(line):
        rank, reserved = found.groups()
        read.held(rank, reserved, MIB)


def _deepspeed(line: str, read: _Read) -> None:
    if found := DEEPSPEED.search(line):
        step, rate, memory = found.groups()
        read.said(step, rate)
        read.held(None, memory, GIB)


KINDS: dict[str, Line] = {"torchtitan": _titan, "megatron-lm": _megatron, "deepspeed": _deepspeed}
RESERVED, ALLOCATED = "torch max reserved", "torch max allocated"


def measured_in(text: str, *, where: str, global_batch: float | None) -> JsonObject:
    """Return the `measured` section of a case from the log of its run.

    `global_batch` of the case converts DeepSpeed's samples per second to steps. Raises BadInput for a text without a
    step of any of the three, or with steps of more than one.
    """
    reads = {kind: _Read() for kind in KINDS}
    for line in text.splitlines():
        plain = COLOR.sub("", line[:MOST_LINE])
        for kind, of_line in KINDS.items():
            of_line(plain, reads[kind])
    kinds = [kind for kind, read in reads.items() if read.by_step]
    # DeepSpeed under Megatron's trainer writes both kinds of lines; the iteration is the trainer's measurement.
    if kinds == ["megatron-lm", "deepspeed"]:
        kinds = ["megatron-lm"]
    if len(kinds) != 1:
        raise BadInput(
            f"{where} has steps of {' and '.join(kinds)}" if kinds else f"{where} has no step of a known log",
            why="a log is one run of torchtitan, Megatron-LM or DeepSpeed",
            remedy="give the trainer's own output, from a rank that logs",
        )
    return _measured(kinds[0], reads, where, global_batch)


def _measured(kind: str, reads: dict[str, _Read], where: str, global_batch: float | None) -> JsonObject:
    read = reads[kind]
    steady = read.steady()
    if not 0 < steady < math.inf:
        raise BadInput(f"{where} has steps that took {'no time' if steady == 0 else 'for ever'}")
    if kind == "torchtitan":
        found: JsonObject = {"tokens_per_s_per_gpu": steady}
    elif kind == "megatron-lm":
        found = {"step_s": steady / 1000}
    elif global_batch:
        found = {"step_s": global_batch / steady}
    else:
        raise BadInput(f"{where} has samples a second", why="a step follows from workload.global_batch_size")
    memory, description = read.memory, RESERVED if kind != "deepspeed" else ALLOCATED
    if not memory and kind == "megatron-lm":
        memory, description = reads["deepspeed"].memory, ALLOCATED
    if any(gib > MOST_GIB for gib in memory.values()):
        raise BadInput(f"{where} has a rank with more memory than any GPU")
    held = {rank: gib for rank, gib in memory.items() if gib > 0}
    if held:
        rank = max(held, key=lambda one: held[one])
        found |= {"peak_memory_gib": held[rank], "memory_is": description}
        if rank >= 0:
            found["memory_rank"] = rank
    return found


def with_log(case: JsonObject, folder: Path, where: str) -> JsonObject:
    """Return a case with the measurements of the file that its `measured.log` names; other cases unchanged.

    The file must be in `folder` or below. Raises BadInput for another place, and if the case also states measurements
    itself.
    """
    measured = case.get("measured")
    if not isinstance(measured, dict) or measured.get("log") is None:
        return case
    name = measured["log"]
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise BadInput(f"{where}: measured.log is {name!r}", why="it names a file next to the table or below it")
    said = sorted(key for key, value in measured.items() if key != "log" and value is not None)
    if said:
        raise BadInput(f"{where}: measured has a log and {', '.join(said)}", remedy="leave one of them out")
    workload = case.get("workload")
    batch = workload.get("global_batch_size") if isinstance(workload, dict) else None
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise BadInput(f"{where}: measured.log is {name!r}", why="it leads out of the folder of the table")
    number = float(batch) if isinstance(batch, int | float) and not isinstance(batch, bool) else None
    return {**case, "measured": measured_in(codec.read_text(path), where=str(path), global_batch=number)}


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def read_runs(path: str | Path) -> list[JsonObject]:
    """Return the cases of a file. Raises BadInput, naming the line, for an invalid case.

    A column of a table has the name of its field, `plan.tp` or `measured.log`, or that of the command-line option; an
    empty cell means not stated.
    """
    folder = Path(path).parent
    found = [sectioned(row) for row in _read(str(path))]
    return [with_log(case, folder, f"{path}: {case.get('id', f'case {n}')}") for n, case in enumerate(found, start=1)]


def _read(name: str) -> list[JsonObject]:
    if name.endswith(".csv"):
        rows = islice(codec.parse_csv(codec.read_text(name), where=name), MOST_ROWS)
        return [_case_of_row(row, f"{name}:{line}") for line, row in rows]
    if name.endswith(".jsonl"):
        lines = [line for line in codec.read_text(name).splitlines() if line.strip()][:MOST_ROWS]
        found = [codec.parse_json(line, where=f"{name}:{number}") for number, line in enumerate(lines, start=1)]
        for number, one in enumerate(found, start=1):
            if not isinstance(one, dict):
                raise BadInput(
                    f"{name}:{number} is no case", why="a line is one object with model, cluster, workload, plan"
                )
        return [{"id": f"{name}:{number}", **one} for number, one in enumerate(found, start=1)]
    return list(read_cases(name)[0])


def _case_of_row(row: dict[str, str | None], where: str) -> JsonObject:
    case: JsonObject = {"id": where}
    for column, cell in row.items():
        if cell is None or not cell.strip():
            continue
        *path, last = column.strip().split(".")
        place = case
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise BadInput(f"{where}: column {column} is inside a value of another column")
        place[last] = _value(cell.strip())
    return case


def _value(cell: str) -> Any:
    """Return a number, true, false or null as JSON reads it, all else as text."""
    try:
        found = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    return cell if isinstance(found, dict | list | str) else found
