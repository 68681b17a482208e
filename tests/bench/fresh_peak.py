"""What torch has allocated at the fullest moment of a step of a run of the ledger, by where it was asked for.

`python3 tests/bench/fresh_peak.py 2026-11-29.5/11`, on one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from executor.calibrate.layers import own_step
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology import codec

ROOT = Path(__file__).resolve().parents[2]
LEDGER = ROOT / "examples" / "validation" / "fresh.jsonl"
PARTS = {"model": Model, "plan": Plan, "workload": Workload, "runtime": Runtime}
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
STEPS, LINES = 4, 40


def where(event: dict[str, Any]) -> str:
    """Return the executor's frames of an allocation, the innermost first."""
    frames = [frame for frame in event.get("frames", ()) if f"{ROOT}/executor" in frame["filename"]]
    return " < ".join(f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in frames[:3]) or "autograd"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    wanted = parser.parse_args().run
    row = next(row for row in map(json.loads, LEDGER.read_text().splitlines()) if row["id"] == wanted)
    os.environ |= {**ALONE, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    step = own_step(*(codec.convert(row[name], kind, where=name) for name, kind in PARTS.items()), device)
    for _ in range(STEPS):
        step()
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=400000, context="alloc", stacks="python")
    step()
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    live: dict[int, tuple[int, str]] = {}
    used = most = before
    fullest: list[tuple[int, str]] = []
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"], where(event)
            used += event["size"]
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
            used -= event["size"]
        if used > most:
            most, fullest = used, [*live.values()]
    print(f"{row['words']}: {most / 2**30:.3f} GiB, {before / 2**30:.3f} of them before the step")
    for (size, place), count in sorted(Counter(fullest).items(), key=lambda one: -one[0][0] * one[1])[:LINES]:
        print(f"  {count} x {size / 2**30:.4f} GiB  {place}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
