"""torchtitan on the plans that our executor has run, and an exported plan run by torchtitan as it stands.

    python3 tests/bench/beside_torchtitan.py steps OUT.json --plans DIR --only 3b-fsdp2,... --budget 120
    python3 tests/bench/beside_torchtitan.py export OUT.json --toml FILE --text DIR --gpus 2 --budget 120

`steps`: torchtitan's own Trainer and `train_step` (`executor.measure.torchtitan`) under plan files of
`tests/bench/apply_plans.py predict`, with random tokens as our executor has them; a plan's time is that of a whole step
on its slowest rank. `--ours` has our executor take steps of the same plan in the same processes, in turns with
torchtitan, so that both see one clock; `--kernels` adds what the GPU spent in each kernel of one profiled step.
`export`: `torchrun -m torchtitan.train --job.config_file FILE`, the file as `planner export` wrote it; what no plan
decides (tokenizer, data set, number of steps) is on the command line. Needs torchtitan==0.2.2.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

WARM_UP = 3
# What torchtitan 0.2.2 prints of a step (components/metrics.py).
LOGGED = re.compile(r"step:\s*(\d+)\s.*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)")


def steps(options: argparse.Namespace) -> None:
    """Start one process a GPU, which run `worker`."""
    names = [name for name in options.only.split(",") if name]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={options.gpus}", "--max-restarts=0", str(Path(__file__)), "worker", str(options.out)]
    command += ["--plans", str(options.plans), "--only", ",".join(names), "--budget", str(options.budget)]
    command += [
        f"--steps={options.steps}",
        *(["--ours"] if options.ours else []),
        *(["--kernels"] if options.kernels else []),
    ]
    log = options.out.with_suffix(".log")
    with log.open("wb") as file:
        try:
            subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=options.budget + 20, check=False)
        except subprocess.TimeoutExpired:
            print("torchtitan did not end in time", flush=True)
    if options.out.is_file():
        print(options.out.read_text(), flush=True)
    else:
        print(log.read_text(errors="replace")[-3000:], flush=True)


def worker(options: argparse.Namespace) -> None:
    """Time torchtitan's steps under each plan, on this rank among the others."""
    import torch
    import torch.distributed as dist

    from executor.calibrate.layers import own_step
    from executor.measure.torchtitan import titan_step
    from planner.question.plan_file import load_plan

    until = time.monotonic() + options.budget
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rows: list[dict[str, Any]] = []
    for name in options.only.split(","):
        left = torch.tensor(float(until - time.monotonic()))
        dist.all_reduce(left, dist.ReduceOp.MIN)
        if left.item() < 15:
            rows.append({"name": name, "status": "not run: out of time"})
            continue
        content = load_plan(options.plans / f"{name}.plan.json")
        row: dict[str, Any] = {"name": name, "predicted_s": content.estimate.step_s.value}
        began = time.monotonic()
        try:
            shape = (content.model, content.plan, content.workload)
            makers = {"torchtitan": lambda: titan_step(*shape, content.runtime, device)}
            if options.ours:
                # First: torchtitan leaves torch another order of attention kernels than it found.
                ours = replace(content.runtime, name="meshwright")
                makers = {"ours": lambda: own_step(*shape, ours, device), **makers}
            for who, make in makers.items():
                step = make()
                times = [timed(torch, dist, device, step) for _ in range(WARM_UP + options.steps)][WARM_UP:]
                row[who] = {"step_s": median(times), "all": times}
                row[who]["reserved_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
                if options.kernels:
                    row[who]["kernels"] = kernels(torch, device, step)
                step = None
                forget(torch)
            row["status"] = "ok"
        except Exception as error:  # noqa: BLE001 - somebody else's framework fails in any way it likes
            row["status"] = f"{type(error).__name__}: {str(error)[:300]}"
            step = None
            forget(torch)
        rows.append({**row, "seconds": time.monotonic() - began})
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(rows, indent=1))
        failed = torch.tensor(float(row["status"] != "ok"))
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed.item():
            break  # ranks may stand at different collectives
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(rows, indent=1))
    os._exit(0)  # torchtitan's groups are not ours to leave in order


def forget(torch: Any) -> None:
    """Give back what the last steps held."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.compiler.reset()


def kernels(torch: Any, device: Any, step: Any) -> list[dict[str, Any]]:
    """Return the GPU's seconds in each kernel of one step, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize(device)
    spent: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent.setdefault(event.name[:160], []).append(event.device_time_total * 1e-6)
    rows = [{"kernel": name, "count": len(times), "seconds": sum(times)} for name, times in spent.items()]
    return sorted(rows, key=lambda row: -row["seconds"])[:60]


def timed(torch: Any, dist: Any, device: Any, step: Any) -> float:
    """Return the seconds of one step on the slowest rank, from one synchronisation to the next."""
    torch.cuda.synchronize(device)
    dist.barrier()
    begin = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def export(options: argparse.Namespace) -> None:
    """Run the exported file as it stands, and keep what torchtitan printed of its steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={options.gpus}", "--max-restarts=0", "--local-ranks-filter=0"]
    command += ["-m", "torchtitan.train", f"--job.config_file={options.toml}"]
    command += [f"--model.hf_assets_path={options.text / 'tokenizer'}", "--training.dataset=c4_test"]
    command += [f"--training.dataset_path={options.text / 'c4_test'}", f"--training.steps={options.steps + WARM_UP}"]
    command += ["--metrics.log_freq=1", "--metrics.disable_color_printing", "--job.dump_folder=/tmp/titan_out"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "4"}
    environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as torchtitan's run_train.sh has it
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=options.budget,
            check=False,
        )
        log, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        log, code = (error.stdout or b"").decode(errors="replace"), None
    options.out.with_suffix(".log").write_text(log[-200_000:])
    logged = [(int(a), float(b), float(c.replace(",", ""))) for a, b, c in LOGGED.findall(log)]
    row: dict[str, Any] = {"command": shlex.join(command), "exit_code": code, "steps": logged}
    if len(logged) > WARM_UP:
        rates = [tps for _, _, tps in logged[WARM_UP:]]
        row |= {"tokens_per_s_per_gpu": median(rates), "reserved_gib": max(memory for _, memory, _ in logged)}
    options.out.write_text(json.dumps(row, indent=1))
    print(json.dumps({key: value for key, value in row.items() if key != "command"}), flush=True)
    if code != 0:
        print(log[-3000:], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("steps", "worker", "export"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--plans", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--toml", type=Path)
    parser.add_argument("--text", type=Path, help="a folder with tokenizer/ and c4_test/")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ours", action="store_true", help="steps: our executor too, in the same processes")
    parser.add_argument("--kernels", action="store_true", help="steps: seconds of each kernel of one profiled step")
    parser.add_argument("--budget", type=float, default=120.0)
    options = parser.parse_args()
    {"steps": steps, "worker": worker, "export": export}[options.what](options)


if __name__ == "__main__":
    main()
