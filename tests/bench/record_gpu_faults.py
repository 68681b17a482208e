"""Faults of two GPUs, made for real and recorded: `python3 tests/bench/record_gpu_faults.py OUT [WORD...]`; with words,
those faults.

Memory full in warm-up and in step 50, a rank stopped in an NCCL collective, a rank whose host or whose kernels are
slow, two users of one GPU, and what the driver says of clocks and faults meanwhile. No setting of a GPU is changed, and
every run has a budget after which all its processes are ended. Takes about 160 s on two H200. OUT/faults.md has what
`planner apply` would print, OUT/NAME/run.json the reports.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from executor.gpu.monitor import GpuMonitor  # noqa: E402 - the path comes first
from executor.launch.local_ranks import launch  # noqa: E402
from executor.launch.request import Request  # noqa: E402
from executor.run.apply import environment, report, versions  # noqa: E402
from planner.runs.apply_report import lines  # noqa: E402
from simulator.config.model import Model  # noqa: E402
from simulator.config.plan import Plan  # noqa: E402
from simulator.config.runtime import Runtime  # noqa: E402
from simulator.config.workload import Workload  # noqa: E402
from topology import codec  # noqa: E402

BUDGET_S = 40.0
WORKERS = "tests.executor.workers."
MODEL = Model(
    name="eight-layers", family="llama", layers=8, hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=8192, vocab=32768
)  # fmt: skip


def request(*, steps: int = 8, micro_batch: int = 4, collective_s: float = 12.0) -> Request:
    return Request(
        plan=Plan(dp_shard=2, micro_batch_size=micro_batch),
        model=MODEL,
        workload=Workload(seq_len=4096, global_batch_size=2 * micro_batch),
        runtime=Runtime(),
        gpus=(0, 1),
        steps=steps,
        warm_up=2,
        start_timeout_s=30.0,
        collective_timeout_s=collective_s,
    )


def run(
    folder: Path, asked: Request, worker: str, alongside: Callable[[Path], None] | None = None, **variables: str
) -> dict[str, Any]:
    """Run a worker on two ranks; `alongside` is called in a thread with the folder of records."""
    records = folder / "records"
    records.mkdir(parents=True)
    codec.write_text(folder / "request.json", codec.to_json(asked))
    watch = GpuMonitor()
    watch.start()
    if alongside is not None:
        threading.Thread(target=alongside, args=(records,), daemon=True).start()
    done = launch(
        worker,
        [str(folder / "request.json"), str(records)]
        if worker.startswith(WORKERS)
        else [f"--request={folder / 'request.json'}", f"--out={records}"],
        ranks=2,
        budget_s=BUDGET_S,
        grace_s=3.0,
        environment={**environment(asked, records), **variables},
        directory=folder / "logs",
    )
    samples = watch.stop()
    found = report(asked, done, records, [], samples, watch.faults)
    codec.write_text(folder / "run.json", codec.to_json(found) + "\n")
    for trace in records.glob("*.trace.json"):
        trace.unlink()
    return found


def stop_rank_1(records: Path) -> None:
    """Stop rank 1 in its fifth step, and let it go on when the agent has asked it to end, so that it does."""
    end, beat = time.monotonic() + BUDGET_S, records / "rank1.beat"
    while time.monotonic() < end:
        try:
            found = json.loads(beat.read_text())
        except (OSError, ValueError):
            found = {"phase": ""}
        if found["phase"].startswith("step 5"):
            break
        time.sleep(0.02)
    else:
        return
    pid = int(found["pid"])
    os.kill(pid, signal.SIGSTOP)
    while time.monotonic() < end:
        status = Path(f"/proc/{pid}/status")
        pending = re.search(r"^ShdPnd:\s*(\w+)", status.read_text() if status.exists() else "", re.MULTILINE)
        if pending is None or int(pending[1], 16) >> (signal.SIGTERM - 1) & 1:
            break
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def full_in_warm_up(folder: Path) -> dict[str, Any]:
    return run(folder, request(micro_batch=160), "executor.run.worker")


def full_in_step_50(folder: Path) -> dict[str, Any]:
    return run(folder, request(steps=80), f"{WORKERS}growing_worker", GROW_AT="52")


def hung(folder: Path) -> dict[str, Any]:
    return run(folder, request(steps=2000), "executor.run.worker", stop_rank_1)


def slow_host(folder: Path) -> dict[str, Any]:
    return run(folder, request(), f"{WORKERS}slow_worker", SLOW_BY="host")


def slow_kernels(folder: Path) -> dict[str, Any]:
    return run(folder, request(), f"{WORKERS}slow_worker", SLOW_BY="kernels")


def even(folder: Path) -> dict[str, Any]:
    return run(folder, request(steps=100), "executor.run.worker")


FAULTS: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "warm-up": ("a micro batch of 160 sequences of 4,096 tokens, more than a GPU holds", full_in_warm_up),
    "step-50": ("rank 1 keeps 24 GiB more in each step from the fiftieth on", full_in_step_50),
    "hung": ("SIGSTOP to rank 1 in step 5; NCCL's watchdog has 12 s", hung),
    "slow-host": ("rank 1 sleeps 0.3 s before each step", slow_host),
    "slow-kernels": ("rank 1 multiplies matrices of its own before each step", slow_kernels),
    "even": ("nothing: no rank is slow, and the driver has no fault to tell", even),
}


def two_users(folder: Path) -> str:
    """Hold 2 GiB of GPU 0 in another process, and ask for a run there."""
    folder.mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", ("import torch, time; x = torch.empty(2**31, dtype=torch.uint8, device='cuda:0');"
         " print('held', flush=True); time.sleep(60)")],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        if holder.stdout is not None:
            holder.stdout.readline()
        said = []
        for command in (
            f"suggest --model llama3.2-1b --cluster local --gpus 2 --seq-len 2048 --global-batch 8 --out {folder}/plan.json",
            f"apply {folder}/plan.json --dry-run --out {folder}/run",
            f"apply {folder}/plan.json --dry-run --allow-busy --out {folder}/run",
        ):
            done = subprocess.run(
                [sys.executable, "-m", "planner", *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
            )  # fmt: skip
            text = done.stderr if done.returncode else done.stdout
            said.append(
                f"$ planner {command.replace(str(folder), 'DIR')}\n" + "\n".join(text.strip().splitlines()[-6:])
            )
            said.append(f"(exit code {done.returncode})")
        return "\n".join(said)
    finally:
        holder.kill()
        holder.wait()


def main(out: Path, words: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    head = f"# Faults of two GPUs, recorded {datetime.now(UTC):%Y-%m-%d}\n\n{json.dumps(versions())}\n"
    parts = [head]

    def add(name: str, what: str, took_s: float, text: str) -> None:
        parts.append(f"\n## {name}\n\n{what[0].upper()}{what[1:]}. Took {took_s:.0f} s.\n\n```\n{text}\n```\n")
        (out / "faults.md").write_text("".join(parts))
        print(parts[-1], flush=True)

    for name, (what, make) in FAULTS.items():
        if words and name not in words:
            continue
        began = time.monotonic()
        try:
            found = make(out / name)
            text = "\n".join(
                [
                    *lines({**found, "predicted": None}, None),
                    f"exit code {found['exit_code']}, processes left: {len(found['survivors'])}",
                ]
            )
            clocks = [{key: gpu[key] for key in ("gpu", "sm_clock_hz", "power_w", "throttle")} for gpu in found["gpus"]]
            text += f"\nflight records: {found['flight_records']}\nGPUs: {json.dumps(clocks)}"
        except Exception as error:  # noqa: BLE001 - the other faults are still to be recorded
            text = f"{type(error).__name__}: {error}"
        add(name, what, time.monotonic() - began, text)
    if not words or "two-users" in words:
        began = time.monotonic()
        add("two-users", "another process holds 2 GiB of GPU 0", 0.0, two_users(out / "two-users"))
        print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("words", nargs="*", help="only faults whose names have one of these in them")
    options = parser.parse_args()
    main(options.out, options.words)
