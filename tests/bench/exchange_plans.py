"""Plans of two GPUs with FSDP's exchanges by copy engines and by NCCL, in turn, as `planner apply` runs them.

`python3 -m tests.bench.exchange_plans OUT_DIR [--budget 90]` writes `rows.jsonl` and a report a plan, and prints
numbers, steps and peak memory, predicted and measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from simulator.config.plan import COPY_ENGINE, FSDP_EXCHANGES, Plan
from tests.on_gpus import plans, rows
from tests.on_gpus.__main__ import this_machine
from tests.on_gpus.rows import OK, Row

BASES = {
    "FSDP": plans.PLAIN["FSDP"],
    "FSDP, compiled": plans.COMPILED["FSDP, compiled"],
    "CP all-gather": plans.PLAIN["CP all-gather"],
    "FSDP, 4,096 tokens": plans.Case(plan=Plan(dp_shard=2), batch=2),
    "FSDP, blocks recomputed, two micro batches": plans.Case(
        plan=Plan(dp_shard=2, recompute="full", micro_batch_size=1), batch=4
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=90.0)
    options = parser.parse_args()
    cases = {
        f"{name}, {word}": replace(base, plan=base.plan.with_(fsdp_exchange=word))
        for name, base in BASES.items()
        for word in (COPY_ENGINE, *FSDP_EXCHANGES[:1])
    }
    machine, here = this_machine("")
    found: list[Row] = []

    def tell(row: Row) -> None:
        found.append(row)
        rows.write(options.out / "rows.jsonl", [(machine, "", one) for one in found])
        print(f"{row.what}: {row.result} {row.said} {row.numbers} {row.step}".rstrip(), flush=True)

    options.out.mkdir(parents=True, exist_ok=True)
    plans.run_cases(cases, options.out, options.budget - 5.0, here, tell)
    for path in sorted(options.out.glob("plans-*/run.json")):
        report = json.loads(path.read_text())
        measured, predicted = report.get("measured") or {}, report.get("predicted") or {}
        memory = predicted.get("memory") or {}
        peaks = [rank.get("peak_reserved_bytes") for rank in measured.get("memory_by_rank") or ()]
        print(
            json.dumps(
                {
                    "plan": path.parent.name,
                    "measured_s": measured.get("step_s"),
                    "reserved": peaks,
                    "predicted": memory.get("reserved_bytes"),
                }
            ),
            flush=True,
        )
    return 0 if all(row.result == OK for row in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
