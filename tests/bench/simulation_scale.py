"""What a simulated step costs by GPUs, stages and micro batches, written to examples/validation/simulation_scale.*.

    python -m tests.bench.simulation_scale [--out DIR]

llama3-405b on dgx-h100, tensor parallel 8, context parallel 2. Each row runs in a process of its own, so that its
memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from simulator.analytical.scenario import Scenario

ROWS = [
    (256, 16, 16),
    (1024, 16, 16),
    (4096, 16, 32),
    (16384, 4, 64),
    (16384, 8, 64),
    (16384, 16, 32),
    (16384, 16, 64),
    (16384, 16, 128),
]


def one(gpus: int, stages: int, micro_batches: int) -> dict[str, float | int | str]:
    """Simulate one row in this process."""
    from simulator.config.hf_config import load_model
    from simulator.config.plan import Plan
    from simulator.config.runtime import Runtime
    from simulator.config.workload import Workload
    from simulator.lowering.simulation import simulate_plan
    from topology.catalog.clusters import cluster

    model, machine = load_model("llama3-405b"), cluster("dgx-h100", gpus=gpus)
    plan = Plan(dp_shard=gpus // (16 * stages), tp=8, sequence_parallel=True, cp=2, pp=stages, schedule="1F1B")
    workload = Workload(seq_len=8192, global_batch_size=micro_batches * plan.dp_shard)
    started = time.process_time()
    got = simulate_plan(Scenario(model=model, cluster=machine, workload=workload, runtime=Runtime()), plan, spans=False)
    seconds = time.process_time() - started
    return {
        "gpus": gpus,
        "stages": stages,
        "micro_batches": micro_batches,
        "detail": str(got.detail),
        "classes": len(got.run.folding.classes),
        "instructions": sum(len(c.code.instructions) for c in got.run.folding.classes),
        "cpu_s": round(seconds, 2),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "simulated_step_s": round(got.run.step_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("examples/validation"))
    parser.add_argument("--row", type=int)
    asked = parser.parse_args()
    if asked.row is not None:
        print(json.dumps(one(*ROWS[asked.row])))
        return
    command = [sys.executable, "-m", "tests.bench.simulation_scale", "--row"]
    rows = [
        json.loads(subprocess.run([*command, str(n)], capture_output=True, text=True, check=True).stdout)
        for n in range(len(ROWS))
    ]
    (asked.out / "simulation_scale.json").write_text(
        json.dumps({"cpus": os.cpu_count(), "rows": rows}, indent=2) + "\n"
    )
    names = list(rows[0])
    lines = [
        "# What a simulated step costs",
        "",
        "`python -m tests.bench.simulation_scale`: llama3-405b on dgx-h100, tp 8, cp 2, 1F1B, sequences of 8192 tokens;",
        f"CPU seconds of one process on a shared host with {os.cpu_count()} CPUs, analytical model, lowering, folding and engine together.",
        "",
        "| " + " | ".join(names) + " |",
        "|" + "---|" * len(names),
        *("| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows),
    ]
    (asked.out / "simulation_scale.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
