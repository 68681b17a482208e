"""The highest MFU that published runs reached on each machine, for `simulator/calibration/published_mfu.json`.

Run as `python tests/bench/published_mfu.py simulator/calibration/published_mfu.json FILE...` over case files of
published runs. MFU is counted as predictions count it, from the step time that a row states or implies; a row is kept
if none of the same GPUs, number of them, software and data type is higher. Runs that train adapters are left out: MFU
counts the FLOPs of training all weights.
"""

import argparse
import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.question.cases import load_case
from planner.validate.validation import measured_step_s
from topology.errors import PlannerError


def reached(file: Path) -> Iterator[dict[str, Any]]:
    """Yield what the rows of a file reached; rows that state no step time, or cannot be read, are left out."""
    for data in json.loads(file.read_text("utf-8")):
        if data["runtime"].get("adapter"):
            continue
        try:
            case = load_case(data)
            step_s, _ = measured_step_s(case)
            estimate = case.question.estimate([case.plan]).estimate(0)
        except PlannerError:
            continue
        kind = case.question.cluster.slowest_kind
        if step_s and kind is not None:
            yield {
                "architecture": kind.architecture,
                "peak_flops": estimate.peak_flops,
                "gpus": case.plan.gpus,
                "mfu": round(estimate.mfu * estimate.step_s.value / step_s, 3),
                "parameters": case.question.model.parameters,
                "runtime": data["runtime"]["name"],
                "source": data["id"],
            }


def main(out: Path, files: list[Path]) -> None:
    """Write the highest of each machine, sorted."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for file in files for row in reached(file)):
        key = tuple(row[name] for name in ("architecture", "peak_flops", "gpus", "runtime"))
        best[key] = max(best.get(key, row), row, key=lambda one: one["mfu"])
    rows = ",\n".join(json.dumps(best[key]) for key in sorted(best))
    command = f"python tests/bench/published_mfu.py {out} {' '.join(file.name for file in files)}"
    head = f'"made_on": "{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}",\n"command": "{command}"'
    out.write_text(f'{{{head},\n"rows": [\n{rows}\n]}}\n', "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    asked = parser.parse_args()
    main(asked.out, asked.files)
