"""Plans predicted, then run: every plan of a set by `planner apply`, predicted beside measured in one table.

    python3 tests/bench/apply_plans.py predict OUT --set h200x2     anywhere, before anything runs
    python3 tests/bench/apply_plans.py run OUT --budget 400         on a machine with the GPUs; no prediction can know it
    python3 tests/bench/apply_plans.py table OUT > table.md         anywhere

OUT holds a plan file and a run's directory for each plan. What there is no time for is said to be not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from planner.plan_file import plan_file, save_plan  # noqa: E402 - the path comes first
from simulator.closed_form import estimate_plans  # noqa: E402
from simulator.hf_config import load_model  # noqa: E402
from simulator.model import Model  # noqa: E402
from simulator.plan import Plan  # noqa: E402
from simulator.runtime import Runtime  # noqa: E402
from simulator.workload import Workload  # noqa: E402
from topology.cluster_file import load_cluster  # noqa: E402
from topology.platform import take_gpus  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Asked:
    model: str
    seq_len: int
    batch: int
    plan: Plan
    compiled: bool = False
    layers: int | None = None  # as many of the model's layers as fit


SP = {"sequence_parallel": True}
PLANS: dict[str, dict[str, Asked]] = {
    "h200x4": {
        "1b-fsdp4": Asked(model="llama3.2-1b", seq_len=4096, batch=16, plan=Plan(dp_shard=4, micro_batch_size=4)),
        "8b-fsdp4": Asked(model="llama3-8b", seq_len=8192, batch=4, plan=Plan(dp_shard=4)),
        "8b-fsdp4-full": Asked(model="llama3-8b", seq_len=8192, batch=4, plan=Plan(dp_shard=4, recompute="full")),
        "8b-fsdp4-selop": Asked(
            model="llama3-8b", seq_len=8192, batch=4, plan=Plan(dp_shard=4, recompute="selective-op")
        ),
        "8b-tp2-fsdp2": Asked(model="llama3-8b", seq_len=8192, batch=2, plan=Plan(tp=2, dp_shard=2, **SP)),
        "8b-pp2-fsdp2": Asked(model="llama3-8b", seq_len=8192, batch=8, plan=Plan(pp=2, dp_shard=2, schedule="1F1B")),
        "8b-cp4": Asked(model="llama3-8b", seq_len=32768, batch=1, plan=Plan(cp=4, cp_method="ring", recompute="full")),
        "8b-cp4-gather": Asked(
            model="llama3-8b", seq_len=32768, batch=1, plan=Plan(cp=4, cp_method="all_gather", recompute="full")
        ),
        "1b-ddp4": Asked(model="llama3.2-1b", seq_len=4096, batch=16, plan=Plan(dp_replicate=4, micro_batch_size=4)),
        "8b-hsdp": Asked(model="llama3-8b", seq_len=4096, batch=4, plan=Plan(dp_replicate=2, dp_shard=2)),
        "8b-fsdp4-compiled": Asked(model="llama3-8b", seq_len=8192, batch=4, plan=Plan(dp_shard=4), compiled=True),
    },
    "h200x2": {
        "3b-cp2-ring": Asked(
            model="llama3.2-3b", seq_len=32768, batch=1, plan=Plan(cp=2, cp_method="ring", recompute="full")
        ),
        "3b-cp2-gather": Asked(
            model="llama3.2-3b", seq_len=32768, batch=1, plan=Plan(cp=2, cp_method="all_gather", recompute="full")
        ),
        # The same again, to be run with TORCH_NCCL_HIGH_PRIORITY=0: what the priority of hops is worth.
        "3b-cp2-ring-normal": Asked(
            model="llama3.2-3b", seq_len=32768, batch=1, plan=Plan(cp=2, cp_method="ring", recompute="full")
        ),
        "3b-tp2": Asked(model="llama3.2-3b", seq_len=8192, batch=2, plan=Plan(tp=2, micro_batch_size=2, **SP)),
        "3b-tp2-compiled": Asked(
            model="llama3.2-3b", seq_len=8192, batch=2, plan=Plan(tp=2, micro_batch_size=2, **SP), compiled=True
        ),
        "moe-ep2": Asked(
            model="qwen3-30b-a3b", layers=8, seq_len=4096, batch=8, plan=Plan(dp_shard=2, ep=2, micro_batch_size=2)
        ),
        "3b-tp2-fused": Asked(
            model="llama3.2-3b",
            seq_len=8192,
            batch=2,
            plan=Plan(tp=2, micro_batch_size=2, tp_overlap="fused", **SP),
        ),
        "8b-pp2": Asked(model="llama3-8b", seq_len=4096, batch=8, plan=Plan(pp=2, schedule="1F1B")),
        "1b-ddp2": Asked(model="llama3.2-1b", seq_len=4096, batch=8, plan=Plan(dp_replicate=2, micro_batch_size=4)),
        "8b-pp2-interleaved": Asked(
            model="llama3-8b",
            seq_len=4096,
            batch=8,
            plan=Plan(pp=2, virtual_stages=2, schedule="Interleaved1F1B"),
        ),
        "3b-fsdp2": Asked(model="llama3.2-3b", seq_len=8192, batch=2, plan=Plan(dp_shard=2)),
        "1b-fsdp2-compiled": Asked(
            model="llama3.2-1b", seq_len=4096, batch=8, plan=Plan(dp_shard=2, micro_batch_size=4), compiled=True
        ),
        "8b-pp2-zbv": Asked(
            model="llama3-8b", seq_len=4096, batch=8, plan=Plan(pp=2, virtual_stages=2, schedule="ZBVZeroBubble")
        ),
    },
}


def model_of(asked: Asked) -> Model:
    model = load_model(asked.model)
    if asked.layers is None:
        return model
    return replace(model, name=f"{model.name}-{asked.layers}-layers", layers=asked.layers)


def write_plan(name: str, asked: Asked, machine: str, folder: Path) -> None:
    """Predict one plan and save it; the plan file holds the prediction."""
    model, cluster = model_of(asked), take_gpus(load_cluster("h200x4"), int(machine.rpartition("x")[2]))
    workload = Workload(seq_len=asked.seq_len, global_batch_size=asked.batch)
    runtime = Runtime(compile=asked.compiled)
    estimate = estimate_plans(model, cluster, workload, [asked.plan], runtime).estimate(0)
    content = plan_file(
        plan=asked.plan,
        estimate=estimate,
        model=model,
        cluster=cluster,
        workload=workload,
        runtime=runtime,
        framework="torchtitan",
    )
    save_plan(content, folder / f"{name}.plan.json", force=True)


def predict(folder: Path, machine: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, asked in PLANS[machine].items():
        write_plan(name, asked, machine, folder)
    (folder / "set.json").write_text(json.dumps({"machine": machine, "names": list(PLANS[machine])}))


def apply(name: str, folder: Path, budget_s: float, steps: int) -> dict[str, Any]:
    """Apply one plan in a process of its own; return how it ended."""
    command = [sys.executable, "-m", "planner", "apply", str(folder / f"{name}.plan.json"), "--device", "cuda"]
    command += ["--steps", str(steps), "--budget", f"{budget_s:.0f}s", "--out", str(folder / name), "--allow-busy"]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=budget_s + 40, check=False
        )
    except subprocess.TimeoutExpired:
        return {"name": name, "exit_code": None, "said": "did not end", "seconds": budget_s + 40}
    said = (done.stdout + done.stderr)[-3000:]
    return {"name": name, "exit_code": done.returncode, "said": said, "seconds": time.monotonic() - started}


def run(folder: Path, budget_s: float, steps: int, only: str) -> None:
    """Run all while time lasts."""
    end = time.monotonic() + budget_s
    names = [n for n in json.loads((folder / "set.json").read_text())["names"] if not only or n in only.split(",")]
    rows = []
    for name in names:
        left = end - time.monotonic()
        if left < 35:
            rows.append({"name": name, "exit_code": None, "said": "not run: out of time"})
            continue
        rows.append(apply(name, folder, min(100.0, left - 8), steps))
        (folder / "ended.json").write_text(json.dumps(rows, indent=1))
        print(f"== {name} exit {rows[-1]['exit_code']} {rows[-1]['seconds']:.0f} s", flush=True)
        print(rows[-1]["said"], flush=True)


def table(folder: Path) -> None:
    """Print the table as Markdown, from the runs' own reports."""
    heads = (
        "plan", "predicted s", "measured s", "spread", "error", "inside 80 % interval", "tokens/s/GPU",
        "reserved predicted GiB", "measured GiB", "error", "gradients off by, float64", "in its types (allowed)",
    )  # fmt: skip
    print("| " + " | ".join(heads) + " |")
    print("|---" + "|--:" * (len(heads) - 1) + "|")
    step_errors, memory_errors = [], []
    for name in json.loads((folder / "set.json").read_text())["names"]:
        path = folder / name / "run.json"
        document = json.loads(path.read_text()) if path.is_file() else {"measured": {}}
        step = document["measured"].get("step_s")
        if not step:
            print(f"| {name} | {document.get('status', 'not run')} |" + " |" * (len(heads) - 2))
            continue
        predicted, measured = document["predicted"], document["measured"]
        interval = predicted["step_s"]
        error = interval["value"] / step["median"] - 1
        reserved = max(rank["peak_reserved_bytes"] for rank in measured["memory_by_rank"])
        memory = predicted["memory"]["reserved_bytes"] / reserved - 1
        step_errors.append(abs(error))
        memory_errors.append(abs(memory))
        types = document.get("verified_types")
        narrow = "loss only" if types and not types["gradients_compared"] else ""
        if types and types["gradients_compared"]:
            narrow = f"{types['gradient']:.1e} ({types['allowed']:.1e})"
        inside = "yes" if interval["low"] <= step["median"] <= interval["high"] else "no"
        cells = (
            name,
            f"{interval['value']:.3f}",
            f"{step['median']:.3f}",
            f"{step['spread']:.1%}",
            f"{error:+.1%}",
            inside,
            f"{measured['tokens_per_s_per_gpu']:,.0f}",
            f"{predicted['memory']['reserved_bytes'] / 2**30:.1f}",
            f"{reserved / 2**30:.1f}",
            f"{memory:+.1%}",
            f"{document['verified']['gradient']:.1e}",
            narrow,
        )
        print("| " + " | ".join(cells) + " |")
    if step_errors:
        print(
            f"\nMean absolute error: step {sum(step_errors) / len(step_errors):.1%}, memory"
            f" {sum(memory_errors) / len(memory_errors):.1%} over {len(step_errors)} plans."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "run", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--set", choices=tuple(PLANS), default="h200x2")
    parser.add_argument("--budget", type=float, default=400.0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    if options.what == "predict":
        predict(options.out, options.set)
    elif options.what == "run":
        run(options.out, options.budget, options.steps, options.only)
    else:
        table(options.out)


if __name__ == "__main__":
    main()
