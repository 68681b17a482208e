"""Run everything that needs GPUs, what a person would miss most first: `sh tests/on_gpus.sh OUT [--budget 900]`.

    python -m tests.on_gpus run OUT --budget 900     on a machine with GPUs; again, it continues
    python -m tests.on_gpus keep OUT                 anywhere: takes the results into examples/validation/gpus.md

OUT/rows.jsonl has a line for each result as soon as it is known. What ended is not run again for the same commit, GPUs
and software; what failed is, with --again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from tests.on_gpus import parts, plans, rows
from tests.on_gpus.parts import Place, Tell
from tests.on_gpus.rows import FAILED, NO_TIME, Machine, Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "examples" / "validation" / "gpus.md"
LEAST_S = 20.0  # plans are begun with this left: each case has a result of its own
# In the order of what a person would miss most: the seconds without which a part is not begun (what it took on one and
# on two GPUs, and a third more), and its most.
PARTS: dict[str, tuple[Callable[[Place, Tell], None], float, float]] = {
    "commands": (parts.commands, 80.0, 240.0),
    "overlap": (parts.overlap, 160.0, 320.0),
    "tune": (parts.tune, 60.0, 110.0),
    "calibrate": (parts.calibrate, 60.0, 110.0),
    "serving": (parts.serving, 60.0, 100.0),
    "sharded modules": (parts.sharded, 60.0, 120.0),
    "faults": (parts.faults, 160.0, 210.0),
    "tests": (parts.marked, 120.0, 400.0),
    "exports": (parts.exports, 150.0, 600.0),
}
PLAN_S = 400.0  # for the plans of one or of two GPUs


def out_of_time(part: str) -> Row:
    """Return the row of a part for which there was no time."""
    return Row(part=part, what="all", result=NO_TIME)


class Results:
    """Results so far, of this machine; `tell` adds one."""

    def __init__(self, path: Path, machine: Machine, *, again: bool) -> None:
        self.path, self.machine = path, machine
        self.entries = rows.read(path)
        unsettled = {NO_TIME, FAILED} if again else {NO_TIME}
        self.settled = {
            (row.part, row.what)
            for found, _, row in rows.latest(self.entries)
            if found == machine and row.result not in unsettled
        }

    def failed(self, part: str) -> bool:
        last = rows.latest(self.entries)
        return any(row.part == part and row.result == FAILED for found, _, row in last if found == self.machine)

    def short(self, part: str) -> bool:
        """Return whether the budget ended before the part did."""
        last = rows.latest(self.entries)
        return any(row.part == part and row.result == NO_TIME for found, _, row in last if found == self.machine)

    def tell(self, row: Row) -> None:
        date = datetime.now(UTC).date().isoformat()
        waited = [entry for entry in self.entries if entry[0] == self.machine and entry[2] == out_of_time(row.part)]
        self.entries = [entry for entry in self.entries if entry not in waited] + [(self.machine, date, row)]
        rows.write(self.path, self.entries)
        found = f"{row.result} {row.said} {row.numbers} {row.step} {row.memory}"
        print(f"{row.part}: {row.what}: {found}".rstrip(), flush=True)


def run(options: argparse.Namespace) -> int:
    """Run what is left; return 1 where something failed."""
    machine, here = this_machine(options.commit)
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / "rows.jsonl", machine, again=options.again)
    until = time.monotonic() + options.budget

    def left() -> float:
        return until - time.monotonic() - 5.0

    def wanted(part: str) -> bool:
        return not options.only or part in options.only.split(",")

    def cases(part: str, every: dict[str, plans.Case]) -> dict[str, plans.Case]:
        return {name: case for name, case in every.items() if (part, name) not in results.settled}

    if wanted("plans"):
        every = plans.ONE if machine.gpus < 2 else {**plans.TWO, **plans.ONE}
        if todo := cases("plans", every):
            plans.run_cases(todo, options.out, min(left(), PLAN_S), here, results.tell)
    if machine.gpus == 1 and wanted("two ranks") and (todo := cases("two ranks", plans.TWO)):
        plans.run_shared(todo, options.out, min(left(), PLAN_S), results.tell)
    for name, (part, least_s, most_s) in PARTS.items():
        folder = options.out / name.replace(" ", "-")
        ended, whose = folder / "ended.txt", repr(machine)
        if ended.is_file() and ended.read_text() == whose and not (options.again and results.failed(name)):
            continue
        if not wanted(name):
            continue
        if left() < least_s:
            results.tell(out_of_time(name))
            continue
        folder.mkdir(exist_ok=True)
        whole = left() >= most_s
        place = Place(out=folder, gpus=machine.gpus, limit_s=min(most_s, left()), whole=whole, text=options.text)
        part(place, results.tell)
        if not results.short(name):
            ended.write_text(whose)
    found = [row for where, _, row in rows.latest(results.entries) if where == machine]
    for result in (FAILED, NO_TIME):
        print(f"{result}: {', '.join(f'{row.part}: {row.what}' for row in found if row.result == result) or 'none'}")
    return int(any(row.result == FAILED for row in found))


def this_machine(commit: str) -> tuple[Machine, plans.Cluster]:
    """Return what results depend on, and the machine as probed."""
    import torch
    import triton

    from topology.probe.from_machine import probe_machine

    here = probe_machine()
    driver = next((item.what for item in here.findings if item.code == "driver"), "driver unknown")
    versions = f"python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}"
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    dirty = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    known = commit or git.stdout.strip() + ("+" if dirty.stdout.strip() else "") or "unknown"
    machine = Machine(
        device=torch.cuda.get_device_name(0),
        gpus=torch.cuda.device_count(),
        driver=driver.removeprefix("driver "),
        versions=versions,
        commit=known,
    )
    return machine, here


def keep(options: argparse.Namespace) -> int:
    """Take results into the page that is kept, and the lines it is made of."""
    lines = options.page.with_suffix(".jsonl")
    whole = rows.kept(rows.read(lines), rows.read(options.out / "rows.jsonl"))
    rows.write(lines, whole)
    options.page.write_text(rows.page(whole), encoding="utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/on_gpus.sh", description=__doc__)
    parser.add_argument("what", choices=("run", "keep"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=900.0, help="seconds for everything")
    parser.add_argument("--only", default="", help="parts, with commas: plans, two ranks, " + ", ".join(PARTS))
    parser.add_argument("--again", action="store_true", help="run what failed once more")
    parser.add_argument("--text", type=Path, help="folder of tokenizer/ and c4_test/, for exports to torchtitan")
    parser.add_argument("--commit", default="", help="of the code, where this is no checkout")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    options.out = options.out.absolute()
    return {"run": run, "keep": keep}[options.what](options)


if __name__ == "__main__":
    raise SystemExit(main())
