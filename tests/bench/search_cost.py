"""What a search costs: seconds of the whole command, cold, and its memory, by model, GPUs and layers.

Run as `python tests/bench/search_cost.py OUT.md`. Each row is a process of its own; CPU seconds are user and system
together, which is what a machine that does nothing else takes in wall time on one core.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = (
    ("llama3-8b", "dgx-h100", 8, None),
    ("llama3-70b", "dgx-h100", 64, None),
    ("llama3-70b", "dgx-h100", 512, None),
    ("llama3-405b", "dgx-h100", 16384, 2048),
    ("deepseek-v3", "dgx-h100", 2048, None),
    ("gpt3-175b", "dgx-a100", 4096, 3072),
    ("llama3-8b", "dgx-h100", 64, None),
    ("llama3-8b", "dgx-h100", 512, None),
    ("llama3-8b", "dgx-h100", 4096, None),
)
LAYERS = (16, 32, 64, 128, 256)  # of Llama-3 8B, on 128 GPUs
# Modules are compiled at the first start, as an installation does, whatever this shell says.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def measure(model: str, cluster: str, gpus: int, batch: int | None) -> dict:
    """Return one answer's search account, with the process's seconds and memory."""
    command = [sys.executable, "-m", "planner", "suggest", "--model", model, "--cluster", cluster, "--gpus", str(gpus)]
    command += ["--json"] + (["--global-batch", str(batch)] if batch else [])
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, cwd=ROOT, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)})
        _, status, used = os.wait4(process.pid, 0)
        out.seek(0)
        answer = json.load(out) if status == 0 else {"search": {}}
    return {
        **answer["search"],
        "wall_s": time.monotonic() - started,
        "cpu_s": used.ru_utime + used.ru_stime,
        "mib": used.ru_maxrss / 1024,
    }


def row(name: str, gpus: int, layers: int, r: dict) -> str:
    return (
        f"| {name} | {gpus:,} | {layers} | {r['legal']:,} | {r['fitting']:,} | {r['costed']:,} | {r['simulated']} "
        f"| {r['status']}, gap {r['gap']:.1%} | {r['cpu_s']:.1f} | {r['wall_s']:.1f} | {r['mib']:.0f} |"
    )


def main(out: Path) -> None:
    """Write the table."""
    sys.path.insert(0, str(ROOT))
    from simulator.config.hf_config import load_model

    head = "| model | GPUs | layers | legal plans | fit or may | costed whole | simulated | answer | CPU s | wall s | MiB |"
    rule = "|---|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|"
    made = f"Made on {dt.datetime.now(tz=dt.UTC):%Y-%m-%d} by `python tests/bench/search_cost.py {out}`, Python"
    lines = [
        "# What a search costs",
        "",
        made,
        f"{platform.python_version()}, {os.cpu_count()} cores; cold start, imports and simulation of the finalists",
        f"included, modules compiled. Load at the start {os.getloadavg()[0]:.0f}: where other work ran at the same time wall time is no bound, and CPU",
        "time itself is inflated by shared caches. torchtitan's space, 8 sequences a GPU unless stated.",
        "",
        head,
        rule,
    ]
    measure(*QUESTIONS[0])  # compiles
    for model, cluster, gpus, batch in QUESTIONS:
        lines.append(row(f"{model} on {cluster}", gpus, load_model(model).layers, measure(model, cluster, gpus, batch)))
        print(lines[-1], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for layers in LAYERS:
            config = json.loads((ROOT / "simulator" / "models" / "llama3-8b.json").read_text())
            config["num_hidden_layers"] = layers
            path = Path(folder) / f"llama3-8b-{layers}.json"
            path.write_text(json.dumps(config))
            lines.append(row(f"llama3-8b with {layers} layers", 128, layers, measure(str(path), "dgx-h100", 128, None)))
            print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    main(options.out)
