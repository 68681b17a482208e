"""What a part of the command found, kept as JSON lines, and the table made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

OK, FAILED, NOT_RUN, NO_TIME = "ok", "failed", "not run", "no time"
ALL = "all"  # of a part, where none of its results is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What results depend on. `gpus` is how many there are, `commit` that of the code."""

    device: str
    gpus: int
    driver: str
    versions: str
    commit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    `result` is OK, FAILED, NOT_RUN (which needs what is not here) or NO_TIME; `said` is why, or figures. `numbers` are
    differences from one process or float64 with what is allowed; `step` and `memory`, of the rank that needs most, are
    what was predicted and measured.
    """

    part: str
    what: str
    result: str
    said: str = ""
    numbers: str = ""
    step: str = ""
    memory: str = ""
    seconds: float = 0.0


def compared(predicted: Mapping[str, float], measured: float, unit: float = 1.0) -> str:
    """Return a prediction with its range, what was measured, both in `unit`, and how far apart they are."""
    value, low, high = (predicted[name] / unit for name in ("value", "low", "high"))
    measured /= unit
    inside = "" if low <= measured <= high else ", outside"
    return f"{value:.3g} ({low:.3g} to {high:.3g}), {measured:.3g}: {value / measured - 1:+.1%}{inside}"


def read(path: Path) -> list[tuple[Machine, str, Row]]:
    """Return (machine, date, row) of each line of a file; none where there is no file."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        found.append((Machine(**entry["machine"]), entry["date"], Row(**entry["row"])))
    return found


def write(path: Path, entries: Iterable[tuple[Machine, str, Row]]) -> None:
    """Replace a file."""
    lines = [json.dumps({"machine": asdict(m), "date": date, "row": asdict(row)}) + "\n" for m, date, row in entries]
    path.write_text("".join(lines), encoding="utf-8")


def latest(entries: Sequence[tuple[Machine, str, Row]]) -> list[tuple[Machine, str, Row]]:
    """Return the last line of each (machine, part, what), in the order in which they first appeared."""
    found = {(machine, row.part, row.what): (machine, date, row) for machine, date, row in entries}
    return list(found.values())


def kept(old: Sequence[tuple[Machine, str, Row]], new: Sequence[tuple[Machine, str, Row]]) -> list:
    """Return what is kept: each row of `new` that was run takes the place of what older code left of it on as many GPUs
    of the same device; what there was no time for stands only where nothing older does, and a part for which there was
    none only until it has run.
    """

    def same(machine: Machine, row: Row) -> tuple[str, int, str, str]:
        return machine.device, machine.gpus, row.part, row.what

    known = {same(machine, row) for machine, _, row in old}
    fresh = [entry for entry in latest(new) if entry[2].result != NO_TIME or same(entry[0], entry[2]) not in known]
    renewed = {same(machine, row) for machine, _, row in fresh}
    renewed |= {same(machine, replace(row, what=ALL)) for machine, _, row in fresh if row.result != NO_TIME}
    return [*(entry for entry in old if same(entry[0], entry[2]) not in renewed), *fresh]


def page(entries: Sequence[tuple[Machine, str, Row]]) -> str:
    """Return a table for each kind of machine as Markdown, and what has not run there."""
    lines = [
        "# What runs on GPUs",
        "",
        "`sh tests/on_gpus.sh OUT`, then `python -m tests.on_gpus keep OUT`, which writes this page. Plans are those of",
        "`tests/on_gpus/plans.py`, run as `planner apply` runs them. Numbers: the largest difference of a gradient from one",
        "process in float64 (allowed), then in the plan's types, then the worst of the kernels that were compared on their own, as a",
        "part of what is allowed. Step (s) and peak memory (GiB): predicted from datasheets, its 80 % range, measured. Where one GPU",
        "is shared by two ranks, over gloo, numbers are checked and times mean nothing.",
        "",
    ]
    if entries and max(machine.gpus for machine, _, _ in entries) < 2:
        lines += [
            "No machine with two GPUs has run it: plans over NCCL and NVLink, their times, and what says so below are open.",
            "",
        ]
    for gpus, device in dict.fromkeys((machine.gpus, machine.device) for machine, _, _ in entries):
        mine = [entry for entry in entries if (entry[0].gpus, entry[0].device) == (gpus, device)]
        ran = [entry for entry in mine if entry[2].result in {OK, FAILED}]
        bad = sum(row.result == FAILED for _, _, row in ran)
        made = dict.fromkeys(f"driver {machine.driver}, {machine.versions}" for machine, _, _ in mine)
        lines += [
            f"## {gpus} x {device}",
            "",
            f"{'; '.join(made)}. {len(ran) - bad} ok, {bad} failed, {len(mine) - len(ran)} not run.",
            "",
            "| part | what | result | numbers | step | memory | took s | date, commit |",
            "|---|---|---|---|---|---|--:|---|",
        ]
        for machine, date, row in ran:
            result = row.result + (f": {row.said}" if row.said else "")
            took = f"{row.seconds:.0f}" if row.seconds else ""
            cells = (row.part, row.what, result, row.numbers, row.step, row.memory, took, f"{date}, {machine.commit}")
            lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "/") for cell in cells) + " |")
        lines.append("")
        left: dict[str, list[str]] = {}
        for _, _, row in mine:
            if row.result not in {OK, FAILED}:
                left.setdefault(row.said or "there was no time", []).append(f"{row.part}: {row.what}")
        lines += [f"- Not run, {why}: {'; '.join(what)}." for why, what in left.items()]
        lines += [""] if left else []
    return "\n".join(lines)
