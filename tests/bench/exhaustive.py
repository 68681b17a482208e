"""The bound that a search prints, against costing every legal plan one by one: slow, and without any of its shortcuts.

Run as `python tests/bench/exhaustive.py OUT.md`. The search screens columns, merges ranks that are alike, shares blocks
and stops at its bound; here `estimate_plans`, which does none of that, is asked about every plan in turn.
"""

from __future__ import annotations

import datetime as dt
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from planner.frameworks import framework_named
from planner.inputs import cluster_of
from planner.search import default_runtime, suggest
from simulator.closed_form import estimate_plans
from simulator.hf_config import load_model
from simulator.workload import Workload
from tests.planner.every_plan import enumerate_candidates

QUESTIONS = (
    ("llama3-8b", "dgx-h100", 64, 512, "torchtitan"),
    ("llama3-70b", "dgx-h100", 64, 512, "torchtitan"),
    ("gpt3-175b", "dgx-a100", 4096, 3072, "megatron-lm"),
    ("mixtral-8x7b", "dgx-h100", 64, 512, "megatron-lm"),
)
CHUNK = 2048


def main(out: Path) -> None:
    """Write the table."""
    lines = [
        "# The printed bound against an exhaustive run",
        "",
        f"Made on {dt.datetime.now(tz=dt.UTC):%Y-%m-%d} by `python tests/bench/exhaustive.py {out}`.",
        "",
        "| question | legal plans | bound printed, s | least of all legal plans, s | search, CPU s | exhaustive, CPU s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, machine, gpus, batch, which in QUESTIONS:
        model, cluster = load_model(name), cluster_of(machine, gpus)
        workload, framework = Workload(seq_len=4096, global_batch_size=batch), framework_named(which)
        runtime = default_runtime(framework)
        started = time.process_time()
        found = suggest(model, cluster, workload, framework=framework, gpus=gpus, simulate=False)
        searched = time.process_time() - started
        started = time.process_time()
        everything = enumerate_candidates(model, cluster, workload, framework, gpus=gpus, runtime=runtime)
        least = np.inf
        for start in range(0, len(everything), CHUNK):
            plans = everything.plans(start, start + CHUNK)
            table = estimate_plans(model, cluster, workload, plans, runtime)
            least = min(least, float(np.where(table.fits, table.step_s, np.inf).min()))
        spent = time.process_time() - started
        lines.append(
            f"| {name}, {gpus} GPUs of {machine}, {which} | {len(everything):,} | {found.search.bound_s:.6f} | {least:.6f} "
            f"| {searched:.1f} | {spent:.0f} |"
        )
        print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
