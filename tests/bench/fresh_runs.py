"""A ledger of fresh runs: drawn at random, predicted, written down, run, and never removed.

    python3 tests/bench/fresh_runs.py show --cluster h200x4 --gpus 4 --date 2026-11-22      anywhere: what would be
    drawn python3 tests/bench/fresh_runs.py whole OUT --date 2026-11-22 --budget 450 --calibrate 120     on a machine
    with GPUs python3 tests/bench/fresh_runs.py append OUT --ledger examples/validation/fresh.jsonl   anywhere,
    afterwards python3 tests/bench/fresh_runs.py table                                                 anywhere: writes
    fresh.md

`whole` calibrates as a user would (`planner calibrate`), draws (tests/bench/fresh_draw.py), predicts every run from
datasheets, from a shipped profile of that GPU where `--profile` names one, and from the profile just made, writes the
predictions to OUT/draw.json, and only then runs them, in the order drawn, each in processes of its own
(tests/bench/fresh_pool.py), until the budget is over; what was not reached is said to be not run. The seed is the date
and the number of the draw that day. OUT/rows.jsonl has a line for each run as soon as it ended.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from executor.gpu.state import run_text  # noqa: E402 - the path comes first
from simulator.config.estimate import Estimate  # noqa: E402
from simulator.fitting.calibrations import UNMEASURED, Calibrations  # noqa: E402
from tests.bench.fresh_draw import Drawn, draw, kind, predict, words  # noqa: E402
from tests.bench.fresh_pool import Pool  # noqa: E402
from tests.bench.fresh_table import tables  # noqa: E402
from topology import codec  # noqa: E402
from topology.catalog.cluster_file import load_cluster  # noqa: E402
from topology.catalog.platform import take_gpus  # noqa: E402
from topology.cluster import Cluster  # noqa: E402
from topology.errors import BadInput, PlannerError  # noqa: E402
from topology.probe.from_machine import probe_machine  # noqa: E402
from topology.profile.profile import Profile, read_profile  # noqa: E402
from topology.versions import driver_version  # noqa: E402

LEDGER = ROOT / "examples" / "validation" / "fresh.jsonl"
PAGE = LEDGER.with_suffix(".md")
TABLES = "<!-- Below: fresh_runs.py table -->"
RUNTIMES = ("torchtitan", "meshwright")
LIMIT_S = 75.0  # for one run, compiling included
LEAST_S = 20.0  # with less left no run is started
PACKAGES = ("torch", "triton", "torchtitan", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
DOES_NOT_FIT = {"status": "not run", "cause": "predicted not to fit", "measured": None, "seconds": 0.0}
OUT_OF_TIME = {"status": "not run", "cause": "out of time", "measured": None, "seconds": 0.0}


# --- before anything runs -------------------------------------------------------------------------------------------


def calibrated(out: Path, seconds: float, text: str, runtimes: Sequence[str] = RUNTIMES) -> tuple[Profile | None, str]:
    """Return the profile that `planner calibrate` makes of this machine within `seconds`, and the command."""
    path = out / "profile.json"
    command = ["planner", "calibrate", *(f"--runtime={name}" for name in runtimes), f"--budget={seconds:g}s"]
    command += ["--no-store", "--allow-busy", f"--out={path}", *([f"--text={text}"] if text else [])]
    with (out / "calibrate.log").open("wb") as log:
        try:
            subprocess.run(
                [sys.executable, "-m", *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=seconds + 40,
                check=False,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            )
        except subprocess.TimeoutExpired:
            print("the calibration did not end in time", flush=True)
    print((out / "calibrate.log").read_text(errors="replace")[-2500:], flush=True)
    shown = shlex.join(word.replace(str(out) + "/", "").replace(text, "DIR") if text else word for word in command)
    return (read_profile(path) if path.is_file() else None), shown


def all_predictions(
    runs: list[Drawn], cluster: Cluster, profiles: dict[str, Calibrations], processes: int
) -> list[dict[str, Any]]:
    """Return `predictions` of every run, each run's in one of so many processes (none: here)."""
    work = partial(predictions, cluster=cluster, profiles=profiles)
    if not processes:
        return list(map(work, runs))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(work, runs))


def predictions(drawn: Drawn, cluster: Cluster, profiles: dict[str, Calibrations]) -> dict[str, Any]:
    """Return what is predicted from each source of knowledge; an error of the prediction is one of its results."""
    found: dict[str, Any] = {}
    for name, measured in profiles.items():
        try:
            found[name] = short(predict(drawn, cluster, measured))
        except PlannerError as error:
            found[name] = {"error": str(error)}
    return found


def short(estimate: Estimate) -> dict[str, Any]:
    """Return of a prediction what is compared, and what its step is made of."""
    step, memory = estimate.step_s, estimate.memory
    return {
        "step_s": step.value,
        "step_low_s": step.low,
        "step_high_s": step.high,
        "step_source": str(step.source),
        "reserved_bytes": memory.reserved_bytes,
        "reserved_low_bytes": memory.reserved_low_bytes,
        "reserved_high_bytes": memory.reserved_high_bytes,
        "allocated_bytes": memory.peak_bytes.value,
        "fits": memory.fits,
        "fit": str(memory.fit),
        "capacity_bytes": memory.capacity_bytes,
        "breakdown_s": {name: round(value, 6) for name, value in estimate.breakdown_s.items()},
    }


def host(cluster: Cluster) -> dict[str, Any]:
    """Return what a run took place on. `id` tells hosts apart and says nothing of them."""
    identity = run_text(("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"))
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "id": hashlib.sha256(identity.encode()).hexdigest()[:8] if identity else "",
        "gpu": cluster.slowest_kind.title,
        "gpus": cluster.gpu_count,
        "gpu_memory_bytes": cluster.gpu_memory_bytes,
        "cpus": os.cpu_count(),
        "cpu": cpu_name(),
        "driver": driver_version() or "",
        "python": platform.python_version(),
        "versions": versions,
    }


def cpu_name() -> str:
    """Return the processor's name as Linux has it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def commit() -> str:
    """Return the commit that predicts: of this checkout, or of the file COMMIT where a source tree was carried."""
    carried = ROOT / "COMMIT"
    if carried.is_file():
        return carried.read_text().strip()
    found = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def drawn_document(
    options: argparse.Namespace, cluster: Cluster, profile: Profile | None, made_by: str
) -> dict[str, Any]:
    """Return the draw with its predictions, ready to be written before anything runs."""
    seed = f"{options.date}.{options.number}"
    profiles: dict[str, Calibrations] = {"datasheet": UNMEASURED}
    shipped = read_profile(options.profile) if options.profile else None
    if shipped is not None and shipped.gpu == cluster.slowest_kind.name:
        profiles["shipped"] = Calibrations(shipped)
    if profile is not None:
        profiles["calibrated"] = Calibrations(profile)
    rows = []
    runs = [drawn for drawn, _ in draw(*_drawing(options, cluster))]
    processes = min(len(runs) // 4, (os.cpu_count() or 1) // 2)
    for index, (drawn, predicted) in enumerate(
        zip(runs, all_predictions(runs, cluster, profiles, processes), strict=True)
    ):
        rows.append(
            {
                "id": f"{seed}/{index:02d}",
                "draw": seed,
                "date": options.date,
                "seed": seed,
                "words": words(drawn),
                "kind": kind(drawn),
                "types": drawn.types,
                "model": codec.to_builtins(drawn.model),
                "workload": codec.to_builtins(drawn.workload),
                "plan": codec.to_builtins(drawn.plan),
                "runtime": codec.to_builtins(drawn.runtime),
                "predicted": predicted,
            }
        )
    return {
        "seed": seed,
        "commit": commit(),
        "predicted_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": host(cluster),
        "calibration": made_by,
        "shipped_profile": Path(options.profile).name if "shipped" in profiles else "",
        "command": shlex.join(["fresh_runs.py", *_without_folders(sys.argv[1:])]),
        "runs": rows,
    }


def _drawing(options: argparse.Namespace, cluster: Cluster) -> tuple[Any, ...]:
    seed = f"{options.date}.{options.number}"
    return (
        seed,
        cluster,
        options.count,
        runtimes_of(options),
        options.overlapped,
        options.cut,
        options.least,
        options.savers,
    )


def runtimes_of(options: argparse.Namespace) -> Sequence[str]:
    return tuple(options.runtime or RUNTIMES)


def _without_folders(words_: list[str]) -> list[str]:
    return [Path(word).name if "/" in word else word for word in words_]


# --- runs -----------------------------------------------------------------------------------------------------------


def run_all(document: dict[str, Any], out: Path, options: argparse.Namespace, until: float) -> None:
    """Run what was drawn, in that order, and write a line for each at once."""
    rows = out / "rows.jsonl"
    rows.unlink(missing_ok=True)
    pool, ranks = Pool(options.device), Path(tempfile.mkdtemp(prefix="fresh-runs-"))
    if options.check_start:
        check_start(document, out, options, ranks, pool)
    for row in document["runs"]:
        left = until - time.monotonic()
        if not row["predicted"]["datasheet"].get("fits", True):
            ended = dict(DOES_NOT_FIT)
        elif left < LEAST_S:
            ended = dict(OUT_OF_TIME)
        else:
            ended = pool.run(_request(row, options), ranks / row["id"].replace("/", "_"), min(LIMIT_S, left - 5))
            ended["launch_s"] = pool.launch_s
        with rows.open("a") as file:
            file.write(json.dumps({"id": row["id"], "ran_at": datetime.now(UTC).isoformat(timespec="seconds"), **ended}) + "\n")  # fmt: skip
        _tell(row, ended, left)


def _request(row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return what a rank needs to know of a run."""
    ours_with_contexts = row["runtime"]["name"] != "torchtitan" and row["plan"]["cp"] > 1
    return {
        **{name: row[name] for name in ("model", "workload", "plan", "runtime")},
        "gpus": _ranks(row["plan"]),
        "device": options.device,
        "text": str(Path(options.text).absolute()) if options.text else "",
        # Keys travel while attention runs only at a higher priority (executor/run/apply.py).
        "environment": {"TORCH_NCCL_HIGH_PRIORITY": "1"} if ours_with_contexts else {},
    }


def check_start(document: dict[str, Any], out: Path, options: argparse.Namespace, ranks: Path, pool: Pool) -> None:
    """Run one plan from forked processes and from new interpreters: what is measured must not depend on the start.

    The first drawn with tensor parallelism is taken, which keeps its host busiest. It is no row of the ledger.
    """
    row = next((one for one in document["runs"] if one["plan"]["tp"] > 1), document["runs"][0])
    found: dict[str, Any] = {"id": row["id"], "words": row["words"]}
    for name, some in (("forked", pool), ("interpreters", Pool(options.device, "spawn"))):
        ended = some.run(_request(row, options), ranks / "start", LIMIT_S)
        found[name] = {"launch_s": some.launch_s, "status": ended["status"], "measured": ended["measured"]}
        step = (ended["measured"] or {}).get("step_s")
        print(
            f"started {name}: launch {some.launch_s}, {ended['status']}, step {step} [{ended['seconds']} s]", flush=True
        )
    codec.write_text(out / "start.json", json.dumps(found, indent=1) + "\n")


def _ranks(plan: dict[str, Any]) -> int:
    return int(plan["dp_replicate"] * plan["dp_shard"] * plan["cp"] * plan["tp"] * plan["pp"])


def _tell(row: dict[str, Any], ended: dict[str, Any], left: float) -> None:
    measured = ended["measured"]
    shown = ended["cause"][:160]
    if measured:
        step, reserved = measured["step_s"], measured["reserved_bytes"]
        errors = [
            f"{name} {one['step_s'] / step - 1:+.1%}, memory {one['reserved_bytes'] / reserved - 1 if reserved else 0:+.1%}"
            for name, one in row["predicted"].items()
            if "step_s" in one
        ]
        shown = f"{step:.4f} s, {reserved / 2**30:.1f} GiB, retries {measured['retries']}: {'; '.join(errors)}"
    print(f"== {row['id']} {row['runtime']['name']} {row['words']}: {ended['status']} {shown} [{ended['seconds']} s, {left:.0f} left]", flush=True)  # fmt: skip


# --- the ledger -----------------------------------------------------------------------------------------------------


def ledger_rows(out: Path) -> list[dict[str, Any]]:
    """Return a row for each run drawn; what has no line in rows.jsonl was cut off."""
    document = codec.read_json(out / "draw.json")
    lines = (out / "rows.jsonl").read_text().splitlines() if (out / "rows.jsonl").is_file() else []
    ended = {one["id"]: one for one in map(json.loads, lines)}
    shared = {
        name: document[name] for name in ("commit", "predicted_at", "host", "calibration", "shipped_profile", "command")
    }
    cut_off = {"status": "not run", "cause": "the measuring was cut off", "measured": None, "seconds": 0.0}
    return [{**row, **shared, **ended.get(row["id"], cut_off)} for row in document["runs"]]


def append(out: Path, ledger: Path) -> int:
    """Add a draw to the ledger; return how many rows. Raises BadInput where it has rows of that draw: none is
    replaced.
    """
    fresh = ledger_rows(out)
    known = {row["id"] for row in read_ledger(ledger)}
    twice = sorted(known & {row["id"] for row in fresh})
    if twice:
        raise BadInput(
            f"{ledger} has rows of this draw: {', '.join(twice[:3])}",
            why="what was drawn and run once stays as it is",
            remedy="draw anew: --number, or another --date",
        )
    with ledger.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in fresh)
    return len(fresh)


def read_ledger(ledger: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.is_file() else []


def write_tables(ledger: Path, page: Path) -> None:
    """Write the tables of the last draw into a page, below what somebody wrote of the ledger."""
    above = page.read_text().partition(TABLES)[0] if page.is_file() else "# Fresh runs\n\n"
    codec.write_text(page, f"{above}{TABLES}\n\n{tables(read_ledger(ledger))}\n")


def whole(options: argparse.Namespace) -> None:
    """Calibrate, draw, predict, write, run."""
    until = time.monotonic() + options.budget
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    cluster = probe_machine() if options.device == "cuda" else take_gpus(load_cluster(options.cluster), options.gpus)
    codec.write_text(out / "cluster.json", codec.to_json(cluster) + "\n")
    profile, made_by = None, ""
    if options.calibrate:
        profile, made_by = calibrated(out, options.calibrate, options.text, runtimes_of(options))
    document = drawn_document(options, cluster, profile, made_by)
    codec.write_text(out / "draw.json", json.dumps(document, indent=1) + "\n")
    print(f"{len(document['runs'])} runs drawn and predicted, {until - time.monotonic():.0f} s left", flush=True)
    if options.device == "cpu":
        shrink_all(document)
    run_all(document, out, options, until)


def shrink_all(document: dict[str, Any]) -> None:
    """Make every run one that a CPU takes in a second: a rehearsal, of which nothing is a measurement."""
    from executor.verify.plans import small_model, small_plan, small_workload
    from simulator.config.model import Model
    from simulator.config.plan import Plan
    from simulator.config.workload import Workload

    for row in document["runs"]:
        plan = codec.convert(row["plan"], Plan, where="draw")
        workload = codec.convert(row["workload"], Workload, where="draw")
        model = codec.convert(row["model"], Model, where="draw")
        small = small_model(model, plan)
        if row["runtime"]["name"] == "torchtitan":  # its Llama's heads are as wide as the model makes them
            moe = replace(model.moe, experts=8, experts_per_token=2, ffn=64) if model.moe else None
            small = replace(model, layers=4, hidden=128, heads=8, kv_heads=4, head_dim=16, ffn=256, vocab=4096, moe=moe)
        row["model"] = codec.to_builtins(small)
        row["workload"] = codec.to_builtins(small_workload(plan, workload))
        row["plan"] = codec.to_builtins(small_plan(plan))
        row["runtime"] |= {"compile": False, "param_dtype": "float32", "compute_dtype": "float32"}


def show(options: argparse.Namespace) -> None:
    """Print what would be drawn for a machine."""
    cluster = take_gpus(load_cluster(options.cluster), options.gpus)
    for drawn, estimate in draw(*_drawing(options, cluster)):
        print(f"{drawn.runtime.name:10s} {words(drawn)}: {estimate.step_s.value:.3f} s, {estimate.memory.reserved_bytes / 2**30:.1f} GiB")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("show", "whole", "append", "table"))
    parser.add_argument("out", type=Path, nargs="?", default=Path("fresh"))
    parser.add_argument("--date", default=datetime.now(UTC).date().isoformat())
    parser.add_argument("--number", type=int, default=1, help="of the draw that day")
    parser.add_argument("--count", type=int, default=48, help="runs to draw; time decides how many are run")
    parser.add_argument("--runtime", action="append", choices=RUNTIMES, help="draw from these alone; may be repeated")
    parser.add_argument("--overlapped", type=int, default=0, help="of the runs, how many overlap tensor parallelism")
    parser.add_argument("--cut", type=int, default=0, help="and then with tensor parallelism, stages or experts")
    parser.add_argument("--least", type=float, default=0.0, help="parameters of a model")
    parser.add_argument("--savers", type=float, default=0.0, help="share of runs drawn with memory savers")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds for everything")
    parser.add_argument("--calibrate", type=float, default=120.0, help="seconds of it; 0: none")
    parser.add_argument("--profile", default="", help="a shipped profile, to predict from as well")
    parser.add_argument("--text", default="", help="tokenizer/ and c4_test/ for torchtitan's own loader")
    parser.add_argument("--cluster", default="h200x4", help="for show, and for a rehearsal")
    parser.add_argument("--gpus", type=int, default=4, help="as --cluster")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, shrunken")
    parser.add_argument("--check-start", action="store_true", help="also from new interpreters, one run: to compare")
    parser.add_argument("--ledger", type=Path, default=LEDGER)
    parser.add_argument("--page", type=Path, default=PAGE, help="what is above its line of tables is kept")
    parser.add_argument("--draw", default="", help="print the tables of this one instead, such as 2026-11-28.1")
    options = parser.parse_args()
    if options.what == "show":
        show(options)
    elif options.what == "whole":
        whole(options)
    elif options.what == "append":
        print(f"{append(options.out, options.ledger)} rows added to {options.ledger}")
    elif options.draw:
        print(tables(read_ledger(options.ledger), options.draw))
    else:
        write_tables(options.ledger, options.page)


if __name__ == "__main__":
    main()
