"""Every overlap mode compared with cuBLAS alone, NCCL then cuBLAS, and PyTorch's fused operators, on the GPUs at hand.

Run as `python3 tests/bench/overlap_table.py OUT_DIR [--ranks 2] [--stages check,parts,table,sums,norms] [--budget
300]`. Each stage is a launch of its own with its share of the time, so one that fails costs only itself. Numbers are
checked against float64 before anything is timed. Keeps `overlap.jsonl` and `overlap.json`, and prints the table last.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from executor.launch.local_ranks import launch  # noqa: E402 - the path comes first
from executor.launch.records import read_records  # noqa: E402

SHARE = {
    "check": 1.5,
    "check_modes": 0.6,
    "check_sums": 0.3,
    "check_many": 0.3,
    "captured": 0.3,
    "parts": 0.3,
    "host": 0.1,
    "table": 1.5,
    "sums": 1.0,
    "norms": 0.3,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", default="check,parts,table,sums,norms")
    parser.add_argument("--budget", type=float, default=300)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--rows", default="", help="numbers of rows in the table, such as 2048,8192; default: all")
    parser.add_argument("--operations", default="", help="operations in the table; default: all")
    parser.add_argument("--modes", default="", help="modes to check; default: all")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on one GPU, for the stage check only")
    options = parser.parse_args()
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    records = folder / "overlap.jsonl"
    end = time.monotonic() + options.budget
    stages = options.stages.split("+")
    for number, group in enumerate(stages):
        left = sum(_share(later) for later in stages[number:])
        seconds = (end - time.monotonic()) * _share(group) / left
        arguments = [
            str(records),
            f"--seconds={seconds - 4}",
            f"--stages={group}",
            f"--iterations={options.iterations}",
        ]
        arguments += [f"--modes={options.modes}"] if options.modes else []
        arguments += [f"--rows={options.rows}"] if options.rows else []
        arguments += [f"--operations={options.operations}"] if options.operations else []
        arguments += ["--share-gpu"] if options.share_gpu else []
        done = launch(
            "tests.bench.overlap_worker", arguments, ranks=options.ranks, budget_s=seconds, directory=folder / "logs"
        )
        print(f"{group}: {done.outcome} after {done.seconds:.0f} s of {seconds:.0f}", flush=True)
        if not done.ok:
            print(done.failure, done.stderr_tail[-3000:], flush=True)
    found = list(read_records(records))
    (folder / "overlap.json").write_text(json.dumps(found, indent=0) + "\n")
    show(found)
    return 0


def _share(group: str) -> float:
    return sum(SHARE[stage] for stage in group.split(","))


def show(found: list[dict]) -> None:
    checks = [r for r in found if r["kind"] == "check"]
    for bad in [r for r in checks if not r["ok"]]:
        print("WRONG", {k: v for k, v in bad.items() if k not in {"kind", "ok"}})
    print(f"{sum(r['ok'] for r in checks)} of {len(checks)} checks right")
    for r in found:
        if r["kind"] == "host":
            print("host us", " | ".join(f"{name} {1e6 * value:.0f}" for name, value in r["seconds"].items()))
        if r["kind"] in {"missing", "copy", "signal"}:
            print({k: v for k, v in r.items() if k != "kind"})
        if r["kind"] == "shape":
            s = r["seconds"]
            base = min(s["cublas"], s["triton"])
            print(
                f"{r['operation'][:12]:12} {r['name']:10} {r['rows']:6}x{r['columns']:5}x{r['depth']:5} "
                + " ".join(f"{n} {v * 1e6:.0f}" for n, v in s.items())
                + " eff "
                + " ".join(f"{n}={base / v:.3f}" for n, v in s.items() if n not in {"cublas", "triton", "collective"})
            )
        if r["kind"] == "all_reduce":
            s = r["seconds"]
            best = sorted((n for n in s if n.startswith("own ")), key=s.get)[:3]
            print(
                "all_reduce",
                r["how"],
                r["bytes"],
                " ".join(f"{n} {s[n] * 1e6:.1f}" for n in s if not n.startswith("own ")),
                "| best",
                ", ".join(f"{n} {s[n] * 1e6:.1f}" for n in best),
            )
        if r["kind"] == "norm":
            print("norm", r["rows"], r["columns"], " ".join(f"{n} {v * 1e6:.1f}" for n, v in r["seconds"].items()))


if __name__ == "__main__":
    raise SystemExit(main())
