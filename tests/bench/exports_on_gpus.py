"""Exports run as they stand: torchtitan and DeepSpeed, four plans each (two on one GPU), compared with the prediction.

    python3 tests/bench/exports_on_gpus.py prepare OUT                 anywhere: saves, exports and predicts
    python3 tests/bench/exports_on_gpus.py run OUT --budget 220        on a machine with such GPUs
    python3 tests/bench/exports_on_gpus.py all OUT --text TEXT --budget 560 examples/validation/exports_4xH200.md
    the three at once python3 tests/bench/exports_on_gpus.py table OUT examples/validation/exports_4xH200.md
    anywhere, afterwards

Every plan is asked for, saved and exported with the commands a user types; what then runs is the command that the
export names, in its folder, with the options appended that it says no plan decides: tokenizer, data and steps.
DeepSpeed needs a program: `deepspeed_program.py` next to this file. OUT/rows.jsonl has a line for each plan as soon as
it ended, OUT/ID.log what the tool printed. `prepare` needs no GPU; OUT may be copied to the machine that runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "bench" / "deepspeed_program.py"
MODELS = ROOT / "simulator" / "models"
STEPS, WARM_UP = 7, 3
LIMIT_S = 80.0  # for one plan, start included
LEAST_S = 30.0  # with less left nothing is started
TITAN_LINE = re.compile(r"step:\s*(\d+)\s+loss:\s*([\d.-]+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)")
PREDICTED = "predicted.json"
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")

# id: (target, flags of `planner estimate`), by how many GPUs there are
PLANS_BY_GPUS: dict[int, dict[str, tuple[str, str]]] = {
    4: {
        "titan-fsdp": ("torchtitan@0.2.2", "--model llama3-8b --seq-len 4096 --global-batch 8 --micro-batch 2 --dp-shard 4 --recompute full"),
        "titan-fsdp-tp-compiled": ("torchtitan@0.2.2", "--model llama3-8b --seq-len 8192 --global-batch 8 --micro-batch 2 --dp-shard 2 --tp 2 --recompute full --compile"),
        "titan-fsdp-pp": ("torchtitan@0.2.2", "--model llama3-8b --seq-len 4096 --global-batch 16 --micro-batch 1 --dp-shard 2 --pp 2 --schedule 1F1B --recompute full"),
        "titan-fsdp-cp": ("torchtitan@0.2.2", "--model llama3-8b --seq-len 16384 --global-batch 4 --micro-batch 1 --dp-shard 2 --cp 2 --recompute full"),
        "deepspeed-zero2": ("deepspeed", "--model llama3.2-1b --seq-len 4096 --global-batch 16 --micro-batch 2 --dp-replicate 4 --zero 2"),
        "deepspeed-zero1-tp": ("deepspeed", "--model llama3.2-1b --seq-len 4096 --global-batch 16 --micro-batch 2 --dp-replicate 2 --zero 1 --tp 2"),
        "deepspeed-zero3-full": ("deepspeed", "--model llama3-8b --seq-len 4096 --global-batch 8 --micro-batch 2 --dp-replicate 4 --zero 3 --recompute full"),
        "deepspeed-zero3": ("deepspeed", "--model llama3.2-1b --seq-len 4096 --global-batch 16 --micro-batch 2 --dp-replicate 4 --zero 3"),
    },
    2: {
        "titan-fsdp-compiled": ("torchtitan@0.2.2", "--model llama3-8b --seq-len 4096 --global-batch 4 --micro-batch 2 --dp-shard 2 --recompute full --compile"),
        "titan-tp": ("torchtitan@0.2.2", "--model llama3-8b --seq-len 4096 --global-batch 2 --micro-batch 2 --tp 2 --recompute full --param-dtype bfloat16"),
        "titan-pp": ("torchtitan@0.2.2", "--model llama3-8b --seq-len 4096 --global-batch 8 --micro-batch 1 --pp 2 --schedule 1F1B --recompute full --param-dtype bfloat16"),
        "titan-cp": ("torchtitan@0.2.2", "--model llama3-8b --seq-len 16384 --global-batch 1 --micro-batch 1 --cp 2 --recompute full"),
        "deepspeed-zero2": ("deepspeed", "--model llama3.2-1b --seq-len 4096 --global-batch 8 --micro-batch 2 --dp-replicate 2 --zero 2"),
        "deepspeed-tp": ("deepspeed", "--model llama3.2-1b --seq-len 4096 --global-batch 8 --micro-batch 2 --tp 2 --zero 0"),
        "deepspeed-zero3-full": ("deepspeed", "--model llama3-8b --seq-len 4096 --global-batch 4 --micro-batch 2 --dp-replicate 2 --zero 3 --recompute full"),
        "deepspeed-zero3": ("deepspeed", "--model llama3.2-1b --seq-len 4096 --global-batch 8 --micro-batch 2 --dp-replicate 2 --zero 3"),
    },
    1: {
        "deepspeed-one": ("deepspeed", "--model llama3.2-1b --seq-len 4096 --global-batch 4 --micro-batch 2 --zero 0"),
        "titan-one": ("torchtitan@0.2.2", "--model llama3-8b --seq-len 4096 --global-batch 1 --micro-batch 1 --recompute full --param-dtype bfloat16"),
        "titan-one-compiled": ("torchtitan@0.2.2", "--model llama3-8b --seq-len 4096 --global-batch 1 --micro-batch 1 --recompute full --param-dtype bfloat16 --compile"),
        "deepspeed-one-full": ("deepspeed", "--model llama3.2-1b --seq-len 4096 --global-batch 2 --micro-batch 2 --zero 0 --recompute full"),
    },
}  # fmt: skip


def planner(*words: str) -> str:
    """Return what a command of the planner prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "planner", *words], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"planner {shlex.join(words)}: {done.stderr.strip()}")
    return done.stdout


def prepare(name: str, gpus: int, out: Path, profile: str) -> None:
    """Save and export a plan, and write down what is predicted of it."""
    target, flags = PLANS_BY_GPUS[gpus][name]
    framework = target.partition("@")[0]
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    plan = str(folder / "plan.json")
    words = [*shlex.split(flags), "--cluster=h200x4", f"--gpus={gpus}", f"--framework={framework}"]
    predicted = {"datasheet": json.loads(planner("estimate", *words, "--json", f"--out={plan}", "--force"))}
    if profile:
        predicted["profile"] = json.loads(planner("estimate", *words, "--json", f"--profile={profile}"))
    file = "torchtitan.toml" if framework == "torchtitan" else "deepspeed.json"
    planner("export", plan, f"--to={target}", f"--out={folder / file}", "--force")
    shown = {}
    for source, answer in predicted.items():
        estimate = (answer[0] if isinstance(answer, list) else answer)["estimate"]
        shown[source] = {
            "step_s": estimate["step_s"],
            "reserved_bytes": estimate["memory"]["reserved_bytes"],
        }
    row = {"id": name, "gpus": gpus, "target": target, "flags": flags, "predicted": shown}
    (folder / PREDICTED).write_text(json.dumps(row, indent=1) + "\n")


def command_of(row: dict[str, Any], folder: Path, text: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command that the export names, with what no plan decides, and its environment."""
    target, flags = row["target"], row["flags"]
    exported = (folder / ("torchtitan.toml" if target.startswith("torchtitan") else "deepspeed.json")).read_text()
    line = next(part for part in re.split(r"\n|\",?\n", exported) if "to run: " in part).partition("to run: ")[2]
    words = shlex.split(line.rstrip('",'))
    environment = dict(word.split("=", 1) for word in words[: next(i for i, w in enumerate(words) if "=" not in w)])
    command = words[len(environment) :]
    asked = dict(zip(*[iter(shlex.split(flags.replace("--compile", "")))] * 2, strict=True))
    if target.startswith("torchtitan"):
        command += [f"--model.hf_assets_path={text / 'tokenizer'}", "--training.dataset=c4_test"]
        command += [f"--training.dataset_path={text / 'c4_test'}", f"--training.steps={STEPS}", "--metrics.log_freq=1"]
        return command, environment
    where = command.index("YOUR_PROGRAM.py")
    command[where : where + 1] = [str(PROGRAM), f"--model={MODELS / (asked['--model'] + '.json')}"]
    command += [f"--seq-len={asked['--seq-len']}", f"--steps={STEPS}", f"--tp={asked.get('--tp', 1)}"]
    return [*command, *(["--checkpoint"] if asked.get("--recompute") == "full" else [])], environment


def run(row: dict[str, Any], out: Path, text: Path, limit_s: float) -> dict[str, Any]:
    """Run an export; return how it ended, the median step after warm-up in seconds, and the fullest rank's bytes."""
    folder = out / row["id"]
    command, environment = command_of(row, folder, text)
    began = time.monotonic()
    log = out / f"{row['id']}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "4", **environment},
        )  # fmt: skip
        try:
            code: int | str = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = f"ended after {limit_s:.0f} s"
        finally:
            for kind in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, kind)
                    process.wait(timeout=10)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
    said = ESCAPES.sub("", log.read_text(errors="replace"))
    found = titan_figures(said, row) if row["target"].startswith("torchtitan") else deepspeed_figures(said)
    cut = isinstance(code, str) and limit_s < LIMIT_S  # by the budget, not by the plan's own limit
    status = "ok" if code == 0 and found else "not run" if cut else "failed"
    tail = [] if status == "ok" else said.strip().splitlines()[-25:]
    return {"status": status, "code": code, "measured": found, "seconds": time.monotonic() - began, "tail": tail,
            "command": shlex.join(command).replace(str(ROOT) + "/", "").replace(str(text), "TEXT")}  # fmt: skip


def titan_figures(said: str, row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the figures of torchtitan's own lines: tokens a second a GPU, and memory of the fullest rank that
    speaks.
    """
    asked = dict(zip(*[iter(shlex.split(row["flags"].replace("--compile", "")))] * 2, strict=True))
    lines = [(int(step), loss, float(memory), float(tps.replace(",", ""))) for step, loss, memory, tps in TITAN_LINE.findall(said)]  # fmt: skip
    steady = [tps for step, _, _, tps in lines if step > WARM_UP]
    if not steady:
        return None
    tokens = int(asked["--seq-len"]) * int(asked["--global-batch"])
    return {
        "step_s": tokens / row["gpus"] / statistics.median(steady),
        "reserved_bytes": max(line[2] for line in lines) * 2**30,
        "losses": [float(line[1]) for line in lines if float(line[1]) > 0][:: max(1, len(lines) // STEPS)],
    }


def deepspeed_figures(said: str) -> dict[str, Any] | None:
    """Return what `deepspeed_program.py` printed."""
    for line in said.splitlines():
        if line.startswith('{"steps_s"'):
            found: dict[str, Any] = json.loads(line)
            return {"step_s": statistics.median(found["steps_s"][WARM_UP:]), **found}
    return None


def run_all(options: argparse.Namespace) -> None:
    until = time.monotonic() + options.budget
    out: Path = options.out
    rows = [json.loads(path.read_text()) for path in sorted(out.glob(f"*/{PREDICTED}"))]
    every = list(PLANS_BY_GPUS[rows[0]["gpus"]])
    in_turns = sorted(every, key=lambda name: every.index(name) % 4)  # both frameworks, should time run out
    order = [*options.first, *(name for name in in_turns if name not in options.first)]
    for row in sorted(rows, key=lambda row: order.index(row["id"])):
        left = until - time.monotonic()
        if left < LEAST_S:
            row.update(status="not run", code="out of time", measured=None)
        else:
            row.update(run(row, out, options.text.absolute(), min(LIMIT_S, left - 5)))
        with (out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        figures = row["measured"] or {}
        print(row["id"], row["status"], figures.get("step_s"), figures.get("reserved_bytes"), row["predicted"], *row.get("tail", ())[-8:], sep="\n  ", flush=True)  # fmt: skip


def table(options: argparse.Namespace) -> None:
    """Write the rows as a table, below what somebody wrote above its heading."""
    rows = [json.loads(line) for line in (options.out / "rows.jsonl").read_text().splitlines()]
    lines = [
        "| export | plan | step, predicted from datasheets | measured s | memory, predicted | measured GiB |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        predicted, measured = row["predicted"]["datasheet"], row["measured"]
        if not measured:
            lines.append(f"| {row['target']} | `{row['flags']}` | | {row['status']}: {row['code']} | | |")
            continue
        step, memory = predicted["step_s"], predicted["reserved_bytes"]
        lines.append(
            f"| {row['target']} | `{row['flags']}` | {step['value']:.3f} ({step['low']:.3f} to {step['high']:.3f}), "
            f"{step['value'] / measured['step_s'] - 1:+.1%} | {measured['step_s']:.3f} | {memory / 2**30:.1f}, "
            f"{memory / measured['reserved_bytes'] - 1:+.1%} | {measured['reserved_bytes'] / 2**30:.1f} |"
        )
    mark = "<!-- Below: exports_on_gpus.py table -->"
    above = options.page.read_text().partition(mark)[0] if options.page.is_file() else ""
    options.page.write_text(f"{above}{mark}\n\n" + "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "table", "all"))
    parser.add_argument("out", type=Path)
    parser.add_argument("page", type=Path, nargs="?", default=Path("exports_on_gpus.md"))
    parser.add_argument("--budget", type=float, default=220.0, help="seconds for everything")
    parser.add_argument("--profile", default="", help="a measured profile, to predict from as well")
    parser.add_argument("--text", type=Path, default=Path(), help="folder of tokenizer/ and c4_test/, for torchtitan")
    parser.add_argument("--first", nargs="*", default=[], help="for run: plans before all others, in this order")
    parser.add_argument("--gpus", type=int, default=4, choices=tuple(PLANS_BY_GPUS), help="for prepare")
    options = parser.parse_args()
    if options.what in {"prepare", "all"}:
        for name in PLANS_BY_GPUS[options.gpus]:
            prepare(name, options.gpus, options.out, options.profile)
    if options.what in {"run", "all"}:
        run_all(options)
    if options.what in {"table", "all"}:
        table(options)


if __name__ == "__main__":
    main()
