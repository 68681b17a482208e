"""Plans predicted, then run: every row of the list by `planner apply`, predicted beside measured.

Run as `python3 tests/bench/apply_plans.py OUT_DIR [--cluster h200x4] [--budget 540] [--only NAME,...]` on a machine with
the GPUs. Plan files are written before anything runs, so no prediction can know its measurement. Prints a table last;
keeps `results.json`, and of each run what `planner apply` writes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from planner.plan_file import plan_file, save_plan  # noqa: E402 - the path comes first
from simulator.closed_form import estimate_plans  # noqa: E402
from simulator.hf_config import load_model  # noqa: E402
from simulator.plan import Plan  # noqa: E402
from simulator.runtime import Runtime  # noqa: E402
from simulator.workload import Workload  # noqa: E402
from topology.cluster_file import load_cluster  # noqa: E402

# name: model, sequence length, global batch, plan, compiled
PLANS: dict[str, tuple[str, int, int, Plan, bool]] = {
    "1b-fsdp4": ("llama3.2-1b", 4096, 16, Plan(dp_shard=4, micro_batch_size=4), False),
    "8b-fsdp4": ("llama3-8b", 8192, 4, Plan(dp_shard=4), False),
    "8b-fsdp4-full": ("llama3-8b", 8192, 4, Plan(dp_shard=4, recompute="full"), False),
    "8b-fsdp4-selop": ("llama3-8b", 8192, 4, Plan(dp_shard=4, recompute="selective-op"), False),
    "8b-tp2-fsdp2": ("llama3-8b", 8192, 2, Plan(tp=2, sequence_parallel=True, dp_shard=2), False),
    "8b-pp2-fsdp2": ("llama3-8b", 8192, 8, Plan(pp=2, dp_shard=2, schedule="1F1B"), False),
    "8b-cp4": ("llama3-8b", 32768, 1, Plan(cp=4, recompute="full"), False),
    "1b-ddp4": ("llama3.2-1b", 4096, 16, Plan(dp_replicate=4, micro_batch_size=4), False),
    "8b-hsdp": ("llama3-8b", 4096, 4, Plan(dp_replicate=2, dp_shard=2), False),
    "8b-fsdp4-compiled": ("llama3-8b", 8192, 4, Plan(dp_shard=4), True),
}


def write_plan(name: str, cluster_name: str, folder: Path) -> Path:
    """Predict one plan and save it; the plan file holds the prediction."""
    model_name, seq_len, batch, plan, compiled = PLANS[name]
    model, cluster = load_model(model_name), load_cluster(cluster_name)
    workload, runtime = Workload(seq_len=seq_len, global_batch_size=batch), Runtime(compile=compiled)
    estimate = estimate_plans(model, cluster, workload, [plan], runtime).estimate(0)
    content = plan_file(
        plan=plan,
        estimate=estimate,
        model=model,
        cluster=cluster,
        workload=workload,
        runtime=runtime,
        framework="torchtitan",
    )
    path = folder / f"{name}.plan.json"
    save_plan(content, path, force=True)
    return path


def run(name: str, plan: Path, folder: Path, budget_s: float) -> dict:
    """Apply one plan in a process of its own; return what it reported, or how it ended."""
    command = [sys.executable, "-m", "planner", "apply", str(plan), "--device", "cuda", "--steps", "6"]
    command += ["--budget", f"{budget_s:.0f}s", "--out", str(folder / name), "--json", "--allow-busy"]
    started = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=budget_s + 40, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "exit_code": None, "error": "timeout", "seconds": budget_s + 40}
    row = {"name": name, "exit_code": done.returncode, "seconds": round(time.monotonic() - started, 1)}
    try:
        row["document"] = json.loads(done.stdout)
    except ValueError:
        row["error"] = done.stderr[-1500:]
    return row


def main() -> None:
    """Predict all, run all while time lasts, print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--cluster", default="h200x4")
    parser.add_argument("--budget", type=float, default=540.0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in PLANS if not options.only or name in options.only.split(",")]
    plans = {name: write_plan(name, options.cluster, options.out) for name in names}
    end = time.monotonic() + options.budget
    rows = []
    for name in names:
        left = end - time.monotonic()
        if left < 45:
            rows.append({"name": name, "error": "not run: out of time"})
            continue
        rows.append(run(name, plans[name], options.out, min(90.0, left - 20)))
        print(
            name, rows[-1].get("exit_code"), rows[-1].get("seconds"), str(rows[-1].get("error", ""))[-600:], flush=True
        )
        (options.out / "results.json").write_text(json.dumps(rows, indent=1))
    for row in rows:
        comparison = (row.get("document") or {}).get("comparison") or {}
        print(row["name"], row.get("exit_code"), json.dumps(comparison)[:700])


if __name__ == "__main__":
    main()
