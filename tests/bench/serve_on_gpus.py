"""The executor serving on 1, 2 and more GPUs, predicted first: steps, and requests that arrive, side by side.

    python3 tests/bench/serve_on_gpus.py OUT --budget 240                          8B shapes on 1 and 2 GPUs
    python3 tests/bench/serve_on_gpus.py OUT --model llama3-70b --ranks 2,4        larger ones
    python3 tests/bench/serve_on_gpus.py OUT --profile examples/profiles/h200x2_serving.json   predicted from another
    host's samples python3 tests/bench/serve_on_gpus.py OUT --device cpu                          whether it runs: tiny
    shapes on gloo

Per count of GPUs OUT/tpN has request.json with the prediction, written before anything is started, records as they are
made, and serve.json. OUT/serving_run.md is the table of all: steps, then a closed loop, Poisson arrivals at three rates
of what the prediction says that the engine can do, and bursts at the middle one. A count that fails does not stop the
next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from planner.serving.measured.asked_run import AskedRun, Step, all_steps, asked_run  # noqa: E402 - as above
from planner.serving.measured.samples import add_to_profile  # noqa: E402 - as above
from planner.serving.measured.side_by_side import Compared, load_rows, step_rows  # noqa: E402 - as above
from planner.serving.question.from_flags import ServingFlags, serving_question  # noqa: E402 - after the path
from simulator.serving.deployment import Pool  # noqa: E402 - as above
from simulator.serving.latency import latency  # noqa: E402 - as above
from simulator.serving.server import serve  # noqa: E402 - as above
from simulator.serving.traffic import Lengths, Traffic  # noqa: E402 - as above
from topology import codec  # noqa: E402 - as above

SHARES = (0.3, 0.6, 0.85)  # of the requests a second that a full engine answers
BURSTS = 3.0  # coefficient of variation of the time between arrivals: half of all requests come within a fiftieth of the mean
CLIENTS = 32
LENGTHS = (1024, 128)  # of a prompt, of an answer
LOAD_S, LEAST_REQUESTS = 6.0, 48  # of arrivals at a rate
TINY_STEPS = (Step(phase="decode", batch=2, context=70), Step(phase="prefill", batch=1, context=64))


def main() -> None:
    """Predict everything, then run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for everything")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--cluster", default="h200x4")
    parser.add_argument("--profile", type=Path, help="predict from these samples; without, from the datasheet")
    options = parser.parse_args()
    until = time.monotonic() + options.budget
    tiny = options.device == "cpu"
    counts = [int(count) for count in options.ranks.split(",")]
    model = options.model or ("tiny-llama" if tiny else "llama3-8b")
    runs = {tp: predicted(model, options.cluster, tp, tiny=tiny, profile=options.profile) for tp in counts}
    for tp, run in runs.items():
        folder = options.out / f"tp{tp}"
        folder.mkdir(parents=True, exist_ok=True)
        codec.write_text(folder / "request.json", codec.to_json(run.request(device=options.device)) + "\n")
    for place, tp in enumerate(counts):
        left = until - time.monotonic()
        start(options.out / f"tp{tp}", left / (len(counts) - place))
    found = {tp: report for tp in counts if (report := read(options.out / f"tp{tp}"))}
    source = options.profile.name if options.profile else "the datasheet"
    text = f"# {model} served by the executor on {options.device}, predicted from {source}\n\n" + table(found)
    if not tiny:
        text += with_samples(model, options.cluster, options.out / "profile.json", found)
    codec.write_text(options.out / "serving_run.md", text)
    print(text)


def predicted(model: str, cluster: str, tp: int, *, tiny: bool, profile: Path | None) -> AskedRun:
    """Return what is asked of `tp` GPUs, predicted."""
    most = 4 if tiny else None
    question = serving_question(
        ServingFlags(model=model, cluster=cluster, gpus=tp, engine="meshwright", max_num_seqs=most, profile=profile)
    )
    pool = Pool(tp=tp)
    prompt, answer = (40, 5) if tiny else LENGTHS
    prompts, answers = (Lengths(mean=tokens, low=0.5, high=1.5) for tokens in (prompt, answer))
    closed = Traffic(
        prompt=prompts, output=answers, concurrency=2 if tiny else CLIENTS, requests=6 if tiny else 4 * CLIENTS
    )
    full = replace(closed, concurrency=4 if tiny else 64, requests=40 if tiny else 400)
    most = latency(serve(question.model, question.cluster, question.deployment(pool), full)).requests_per_s
    loads = {f"{closed.concurrency} clients": closed}
    open_loads = [("Poisson", 1.0, share) for share in SHARES] + [("bursts", BURSTS, SHARES[1])]
    # Other requests each time: what is new to libraries counts.
    for seed, (name, shape, share) in enumerate(open_loads[:1] if tiny else open_loads, 1):
        rate = 20.0 if tiny else float(f"{share * most:.2g}")
        count = 5 if tiny else max(LEAST_REQUESTS, int(rate * LOAD_S))
        loads[f"{name}, {rate:g} requests/s"] = Traffic(
            prompt=prompts, output=answers, request_rate=rate, shape=shape, requests=count, seed=seed
        )
    return asked_run(question, pool, steps=TINY_STEPS if tiny else all_steps(), loads=loads)


def with_samples(model: str, cluster: str, profile: Path, found: dict[int, dict]) -> str:
    """Add what was measured to a profile; return how far the same loads are off when predicted again from its
    samples.
    """
    for document in found.values():
        add_to_profile(document, profile)
    lines = [
        "## Loads predicted again from the samples of the runs: steps, sums over ranks, the host's time between steps",
        "",
    ]
    lines += ["| GPUs | load | first token p50 | p95 | a token p50 | output tokens/s |", "|--:|---|--:|--:|--:|--:|"]
    for tp, document in found.items():
        flags = ServingFlags(model=model, cluster=cluster, gpus=tp, engine="meshwright", profile=profile)
        asked_loads = document["request"]["loads"]
        loads = {load["name"]: codec.convert(load["traffic"], Traffic, where="a load") for load in asked_loads}
        again = asked_run(serving_question(flags), Pool(tp=tp), loads=loads)
        asked = document["request"] | {"predicted": codec.to_builtins({"steps": [], "loads": again.seen})}
        for name, rows in load_rows(document | {"request": asked}).items():
            errors = {row.what: row.error for row in rows}
            shown = (errors[what] for what in ("first token p50", "first token p95", "a token p50", "output tokens/s"))
            lines.append(f"| {tp} | {name} | " + " | ".join(f"{error:+.1%}" for error in shown) + " |")
    return "\n".join([*lines, ""]) + "\n"


def start(folder: Path, budget_s: float) -> None:
    """Serve what `folder` asks; whatever happens is in its files."""
    command = [sys.executable, "-m", "executor.serving.run", "--request", str(folder / "request.json")]
    command += ["--out", str(folder), "--budget", f"{budget_s:.0f}"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with (folder / "executor.txt").open("w", encoding="utf-8") as log:
        try:
            subprocess.run(
                command,
                stdout=log,
                stderr=log,
                check=False,
                timeout=budget_s + 5,
                env={**os.environ, "PYTHONPATH": path, "NCCL_NVLS_ENABLE": "0"},
            )
        except subprocess.TimeoutExpired:
            log.write(f"ended after {budget_s + 5:.0f} s\n")


def read(folder: Path) -> dict | None:
    """Return the report of a run, or what its records hold where it left none."""
    try:
        return json.loads((folder / "serve.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def table(found: dict[int, dict]) -> str:
    """Return steps and loads of all counts of GPUs as Markdown."""
    lines = []
    for tp, document in found.items():
        device_name = next((note["device"] for note in document["notes"] if note["kind"] == "versions"), "?")
        lines += [
            f"## {tp} GPU{'s' if tp > 1 else ''}: {device_name}, {document['status']}, {document['seconds']:.0f} s",
            "",
        ]
        lines += [
            f"- {check['name']}: {'right' if check['ok'] else 'WRONG'}, {check['difference']:.1e} "
            f"of {check['tolerance']:.1e} allowed, {check['dtype']}"
            for check in document["checks"]
        ]
        lines += [
            "",
            "| step | all-reduce | predicted ms | measured ms | host ahead ms | error |",
            "|---|---|---|---|---|---|",
        ]
        ahead = {(s["all_reduce"], s["phase"], s["batch"], s["context"]): s["queued_s"] for s in document["steps"]}
        steps = step_rows(document)
        for row, key in zip(steps, _keys(document, steps), strict=True):
            error = f"{row.error:+.1%}" if row.predicted_for else ""
            shown = f"{row.predicted * 1e3:.3f}" if row.predicted_for else ""
            lines.append(
                f"| {row.what} | {row.way} | {shown} | {row.measured * 1e3:.3f} | {ahead[key] * 1e3:.3f} | {error} |"
            )
        for phase in ("go on", "read"):
            chosen = [row for row in steps if row.predicted_for and phase in row.what]
            if chosen:
                lines += [
                    "",
                    f"Steps that {phase}: {mean(abs(row.error) for row in chosen):.1%} in the mean of absolute errors.",
                ]
        lines += _load_lines(document)
        lines += [f"- missing: {line['what']}" for line in document["missing"]]
        if document["failure"]:
            lines.append(f"- failed: {document['failure']['message'][:400]}")
        lines.append("")
    return "\n".join(lines) + "\n"


def _keys(document: dict, rows: list[Compared]) -> list[tuple]:
    """Return the keys of the timed steps in the order of `rows`."""
    keys = [(s["all_reduce"], s["phase"], s["batch"], s["context"]) for s in document["steps"]]
    first = next((row.way for row in rows if row.predicted_for), "")
    return sorted(keys, key=lambda key: key[0] != first)


def _load_lines(document: dict) -> list[str]:
    lines: list[str] = []
    for name, rows in load_rows(document).items():
        lines += ["", f"| {name} | predicted | measured | error |", "|---|---|---|---|"]
        for row in rows:
            scale = 1.0 if row.what.endswith("tokens/s") else 1e3
            unit = "" if scale == 1.0 else " ms"
            lines.append(
                f"| {row.what} | {row.predicted * scale:.4g}{unit} | {row.measured * scale:.4g}{unit} | {row.error:+.1%} |"
            )
        load = next(one for one in document["loads"] if one["name"] == name)
        gaps, reading = load["itl_s"], load["reading"]
        if gaps:
            lines.append(f"| between tokens, mean | | {mean(gaps) * 1e3:.4g} ms | |")
        if reading["steps"]:
            shares = (reading[name] / reading["steps"] for name in ("tokens", "answers"))
            issued, took = (f"{reading[name] / reading['steps'] * 1e3:.4g} ms" for name in ("issued_s", "seconds"))
            lines += [
                "",
                "{} steps read, {:.0f} tokens alongside {:.1f} answers in the mean".format(reading["steps"], *shares),
            ]
            lines[-1] += f": issued after {issued}, done after {took}."
    return [*lines, ""]


if __name__ == "__main__":
    main()
