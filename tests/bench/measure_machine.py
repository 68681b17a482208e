"""Everything about one machine in one go: probe, doctor, raw samples; prints a table last.

    python tests/bench/measure_machine.py OUT_DIR [--budget 150]

Each piece is a process with a time limit of its own and a log in OUT_DIR; a piece that fails or hangs does not stop the
next. Files: `cluster.json` (as read), `measured_cluster.json` (with measured rates), `measured.json` (raw samples),
`profile.json`, `report.txt`, `report.json`, `raw/*.txt` (what nvidia-smi said), `pieces.json`. Only the standard
library.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RAW = {
    "topo_m": ("nvidia-smi", "topo", "-m"),
    "topo_p2p_r": ("nvidia-smi", "topo", "-p2p", "r"),
    "topo_p2p_w": ("nvidia-smi", "topo", "-p2p", "w"),
    "nvlink_s": ("nvidia-smi", "nvlink", "-s"),
    "nvlink_R": ("nvidia-smi", "nvlink", "-R"),
    "list": ("nvidia-smi", "-L"),
    "performance": ("nvidia-smi", "-q", "-d", "PERFORMANCE,CLOCK,POWER"),
}
RAW_S, PROBE_S, REPORT_S = 8.0, 25.0, 15.0
SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


def piece(name: str, command: Sequence[str], limit_s: float, folder: Path) -> dict[str, Any]:
    """Run a command with a limit; its output goes to `name.out` and `name.err`. Never raises."""
    started = time.monotonic()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    code: int | None = None
    ended = "finished"
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        try:
            process = subprocess.Popen(
                list(command),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        except OSError as error:
            return {"name": name, "ended": str(error), "exit_code": None, "seconds": 0.0}
        try:
            code = process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            ended = "timeout"
            process.send_signal(signal.SIGTERM)  # the planner and the executor end their own children
            try:
                code = process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    return {"name": name, "ended": ended, "exit_code": code, "seconds": round(time.monotonic() - started, 1)}


def run(folder: Path, budget_s: float, *, allow_busy: bool = False) -> list[dict[str, Any]]:
    """Run the pieces in order of worth; return how each ended."""
    end = time.monotonic() + budget_s
    python = [sys.executable, "-m"]
    raw = folder / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    done = []
    busy = ["--allow-busy"] if allow_busy else []

    def left(reserve: float = 0.0) -> float:
        return end - time.monotonic() - reserve

    done.append(
        piece("probe", [*python, "planner", "probe", "--force", f"--out={folder}/cluster.json"], PROBE_S, folder)
    )
    measuring = max(10.0, left(RAW_S + REPORT_S + 10))
    done.append(
        piece(
            "doctor",
            [
                *python,
                "planner",
                "doctor",
                "--measure",
                f"--budget={measuring:.0f}s",
                "--force",
                f"--out={folder}/measured_cluster.json",
                f"--save-measured={folder}/measured.json",
                f"--save-profile={folder}/profile.json",
                *busy,
            ],
            measuring + 15,
            folder,
        )
    )
    if not (folder / "measured.json").is_file() and left(REPORT_S) > 15:
        # The command failed: the executor alone may still measure.
        again = left(REPORT_S)
        command = [
            *python,
            "executor.measure.doctor_worker",
            f"--budget={again - 5:.0f}",
            f"--out={folder}/measured.json",
            *busy,
        ]
        done.append(piece("executor", command, again, folder))
    report = [*python, "planner", "doctor", "--json"]
    report += [f"--measured={folder}/measured.json"] if (folder / "measured.json").is_file() else []
    report += [f"--cluster={folder}/cluster.json"] if (folder / "cluster.json").is_file() else []
    done.append(piece("report", report, REPORT_S, folder))
    for name, command in RAW.items():
        if left() > 1:
            done.append(piece(name, command, min(RAW_S, left()), raw))
    for source, target in (("doctor.out", "report.txt"), ("report.out", "report.json")):
        if (folder / source).is_file():
            (folder / target).write_bytes((folder / source).read_bytes())
    (folder / "pieces.json").write_text(json.dumps(done, indent=1) + "\n")
    return done


def table(folder: Path, done: Sequence[dict[str, Any]]) -> list[str]:
    """Return the summary: how the pieces ended, and every figure that was measured, in GB/s, TFLOP/s and us."""
    lines = ["", "piece                 ended       exit   seconds"]
    lines += [f"{d['name']:<21} {d['ended']:<11} {d['exit_code']!s:<6} {d['seconds']:.1f}" for d in done]
    try:
        measured = json.loads((folder / "measured.json").read_text())
    except (OSError, ValueError) as error:
        return [*lines, f"no measurement: {error}"]
    versions = ", ".join(f"{name} {version}" for name, version in (measured.get("versions") or {}).items())
    lines += ["", f"{', '.join(measured['gpus'])}; driver {measured['driver'] or '?'}; {versions}"]
    lines += _flows(measured["flows"]) + _compute(measured["compute"]) + _collectives(measured["groups"])
    return lines + [f"missing: {what}" for what in measured["missing"]]


def _flows(sets: list[dict[str, Any]]) -> list[str]:
    by_pattern: dict[str, list[tuple[int, list[float], bool]]] = {}
    for each in sets:
        rates = [flow["bytes_per_s"] / 1e9 for flow in each["flows"]]
        wrong = any(flow["correct"] is False for flow in each["flows"])
        by_pattern.setdefault(each["pattern"], []).append((len(rates), rates, wrong))
    lines = ["", "flows                    sets  at once   GB/s each: min  median     max   together (max)"]
    for pattern, found in by_pattern.items():
        rates = sorted(rate for _, some, _ in found for rate in some)
        together = max(sum(some) for _, some, _ in found)
        wrong = "   WRONG BYTES" if any(bad for *_, bad in found) else ""
        lines.append(
            f"{pattern:<24} {len(found):>4}  {found[0][0]:>7} {rates[0]:>16.1f} {rates[len(rates) // 2]:>7.1f}"
            f" {rates[-1]:>7.1f}   {together:>8.1f}{wrong}"
        )
    return lines


def _compute(samples: list[dict[str, Any]]) -> list[str]:
    lines = ["", "GPU   memory TB/s   matmul burst TFLOP/s   sustained   MHz under load   W   limited by"]
    for sample in samples:
        during = sample.get("during") or {}
        cells = [
            f"{(sample.get('memory_bytes_per_s') or 0) / 1e12:>11.2f}",
            f"{(sample.get('burst_flops') or 0) / 1e12:>22.0f}",
            f"{(sample.get('sustained_flops') or 0) / 1e12:>11.0f}",
            f"{(during.get('sm_clock_hz') or 0) / 1e6:>16.0f}",
            f"{during.get('power_w') or 0:>5.0f}",
        ]
        lines.append(f"{sample['gpu']:>3} {' '.join(cells)}   {', '.join(during.get('throttle') or [])}")
    return lines


def _collectives(groups: list[dict[str, Any]]) -> list[str]:
    lines = ["", "op              GPUs       alongside        bytes   graph us   eager/queued us   busbw GB/s   spread"]
    rows: dict[tuple[str, tuple[int, ...], int, int], dict[str, dict[str, Any]]] = {}
    for group in groups:
        sample = group["sample"]
        key = (sample["op"], tuple(group["gpus"]), group["alongside"], sample["nbytes"])
        rows.setdefault(key, {})[sample["launch"]] = group
    for (op, gpus, alongside, nbytes), ways in sorted(rows.items()):
        graph = ways.get("graph")
        loop = ways.get("queued") or ways.get("eager")
        best = min(way["sample"]["time_s"] for way in ways.values())
        share = SHARE.get(op, 0.0) * (len(gpus) - 1) / len(gpus) or 1.0
        loop_text = f"{loop['sample']['time_s'] * 1e6:>17.1f}" if loop else f"{'-':>17}"
        graph_text = f"{graph['sample']['time_s'] * 1e6:>10.1f}" if graph else f"{'-':>10}"
        lines.append(
            f"{op:<15} {','.join(map(str, gpus)):<10} {alongside:>6} {nbytes:>12} {graph_text} {loop_text}"
            f" {share * nbytes / best / 1e9:>12.1f} {(graph or loop)['spread']:>8.0%}"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for everything")
    parser.add_argument("--allow-busy", action="store_true", help="measure though others use the GPUs")
    options = parser.parse_args(argv)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    done = run(folder, options.budget, allow_busy=options.allow_busy)
    for name in ("report.txt",):
        if (folder / name).is_file():
            print((folder / name).read_text(errors="replace"))
    print("\n".join(table(folder, done)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
