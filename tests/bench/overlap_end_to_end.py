"""Training steps of Llama-like blocks, tensor-parallel over all GPUs: our modes, plain DTensor, PyTorch's async TP.

Run as `python3 tests/bench/overlap_end_to_end.py OUT_DIR [--ranks 2] [--budget 240]`. Keeps `end_to_end.jsonl`, and
prints tokens/s of each last. Async TP is reported with the number of fused operators that a step really ran.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from executor.launch.local_ranks import launch  # noqa: E402 - the path comes first
from executor.launch.records import read_records  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", type=float, default=240)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ours-alone", action="store_true", help="without DTensor and async TP, which compile")
    parser.add_argument("--compiled", action="store_true", help="compiled steps alone, in the modes of single sites")
    options = parser.parse_args()
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    records = folder / "end_to_end.jsonl"
    done = launch(
        "tests.bench.overlap_end_to_end_worker",
        [
            str(records),
            f"--seconds={options.budget - 5}",
            f"--tokens={options.tokens}",
            *(["--ours-alone"] if options.ours_alone else []),
            *(["--compiled"] if options.compiled else []),
        ],
        ranks=options.ranks,
        budget_s=options.budget,
        directory=folder / "logs",
    )
    print(f"{done.outcome} after {done.seconds:.0f} s")
    if not done.ok:
        print(done.failure, done.stderr_tail[-3000:])
    if records.exists():
        show(list(read_records(records)))
    return 0


def show(found: list[dict]) -> None:
    for r in found:
        if r["kind"] == "chosen":
            print(f"{r['model']}: " + ", ".join(f"{site} {mode}" for site, mode in r["modes"].items()))
        if r["kind"] == "hidden":
            shares = sorted(r["by_round"])
            print(
                f"{r['model']:12} {'compiled' if r['compiled'] else 'eager':8} hidden {shares[len(shares) // 2]:.2f}, "
                f"by round {shares[0]:.2f} to {shares[-1]:.2f}"
            )
        if r["kind"] in {"missing", "numbers"}:
            print({k: v for k, v in r.items() if k != "kind"})
        if r["kind"] == "step":
            print(
                f"{r['model']:12} {'compiled' if r['compiled'] else 'eager':8} {r['what']:16} {1e3 * r['seconds']:8.2f} ms {r['tokens'] / r['seconds']:9,.0f} tokens/s, "
                f"fused operators of PyTorch in a step: {r['fused']}"
            )


if __name__ == "__main__":
    raise SystemExit(main())
