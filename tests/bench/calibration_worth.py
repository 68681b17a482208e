"""What each measurement of a calibration is worth: error of predicted steps against seconds of calibration.

    python tests/bench/calibration_worth.py replay OUT.md --profile PROFILE --cases CASES.json... --draw 2026-11-22.3
    python tests/bench/calibration_worth.py gpu OUT --model llama3.2-1b --seq-len 4096 --global-batch 16 --budget 120
    python tests/bench/calibration_worth.py table OUT.md --runs OUT                             anywhere, after gpu

`replay` takes a profile that holds more than its runs need, orders its samples as `planner calibrate` would for the
runs (planner/calibrate/choose.py), and predicts the runs from the first of them: seconds are those that the order
expects. `gpu` runs `planner calibrate` for a question on this machine, then the plans that could win, each in processes
of its own (tests/bench/fresh_pool.py); `table` cuts that profile at the seconds at which samples were complete. Runs
are only ever predicted, never fitted to.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from planner.calibrate.agenda import STARTING_S  # noqa: E402 - the path comes first
from planner.calibrate.choose import Knowledge, Measurement, in_order, targets_of_steps  # noqa: E402
from planner.calibrate.layer_runs import NARROW  # noqa: E402
from planner.calibrate.measurements import (  # noqa: E402
    OPERATORS_AT_ONCE,
    PossibleMeasurements,
    layers_in_words,
    messages,
    ops_of,
    own_effects,
)
from planner.calibrate.planned_step import PlannedStep  # noqa: E402
from planner.calibrate.terms import terms_of  # noqa: E402
from planner.question.cases import load_case, read_cases  # noqa: E402
from planner.validate.validation import measured_step_s  # noqa: E402
from simulator.calibration.items import CollectiveItem, ContentionItem, LayerItem, OperatorItem  # noqa: E402
from simulator.config.model import Model  # noqa: E402
from simulator.config.plan import Plan  # noqa: E402
from simulator.config.workload import Workload  # noqa: E402
from simulator.fitting.calibration_fit import calibrated  # noqa: E402
from tests.bench.fresh_draw import runtime_of  # noqa: E402
from topology import codec  # noqa: E402
from topology.catalog.cluster_file import load_cluster  # noqa: E402
from topology.cluster import Cluster  # noqa: E402
from topology.errors import PlannerError  # noqa: E402
from topology.profile.profile import Profile, read_profile  # noqa: E402

LEDGER = ROOT / "examples" / "validation" / "fresh.jsonl"
POINTS_S = (5, 10, 15, 20, 30, 45, 60, 90, 120)
GPUS = 4
RUN_S = 75.0  # for one plan, compiling included

Runs = list[tuple[PlannedStep, float]]  # and their measured steps in seconds


def runs_of_cases(files: Sequence[str]) -> Runs:
    """Return the cases of files that say what a step took."""
    found: Runs = []
    for raw in (raw for name in files for raw in read_cases(name)[0]):
        try:
            case = load_case(raw)
        except PlannerError:
            continue
        measured, _ = measured_step_s(case)
        q = case.question
        if measured is not None:
            found.append((PlannedStep(model=q.model, plan=case.plan, workload=q.workload, runtime=q.runtime), measured))
    return found


def runs_of_rows(rows: Sequence[dict[str, Any]]) -> Runs:
    """Return those of the ledger's rows that were measured."""
    return [(step_of(row), float(row["measured"]["step_s"])) for row in rows if row["status"] == "ok"]


def step_of(row: dict[str, Any]) -> PlannedStep:
    return PlannedStep(
        model=codec.convert(row["model"], Model, where="row"),
        plan=codec.convert(row["plan"], Plan, where="row"),
        workload=codec.convert(row["workload"], Workload, where="row"),
        runtime=runtime_of(row),
    )


# --- what a profile holds, as measurements --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A measurement that was made, and its samples, by the field of the profile that holds them."""

    measurement: Measurement
    samples: dict[str, tuple[Any, ...]]


def recorded(profile: Profile, possible: PossibleMeasurements) -> Iterator[Recorded]:
    """Yield the samples of a profile as the measurements that gave them."""
    pairs: dict[str, list[Any]] = {}
    for sample in profile.layers:
        shape = {name: value for name, value in sample.model.items() if name != "layers"}
        pairs.setdefault(codec.fingerprint((shape, sample.plan, sample.workload, sample.runtime)), []).append(sample)
    for samples in pairs.values():
        first = samples[0]
        plan = codec.convert(first.plan, Plan, where="profile")
        parts = {name: getattr(first, name) for name in ("model", "plan", "workload", "runtime")}
        item = codec.convert(
            {**parts, "ranks": plan.gpus, "counts": sorted({sample.layers for sample in samples})},
            LayerItem,
            where="profile",
        )
        for one in possible.layers([item], narrow=item.model.hidden <= NARROW["hidden"]):
            yield Recorded(measurement=one, samples={"layers": tuple(samples)})
    alone = [sample for sample in profile.operators if sample.regime == "sustained"]
    for start in range(0, len(alone), OPERATORS_AT_ONCE):
        some = tuple(alone[start : start + OPERATORS_AT_ONCE])
        items = [
            OperatorItem(kind=s.kind, name=s.name, shape=s.shape, dtype=s.dtype, direction=s.direction) for s in some
        ]
        burst = tuple(s for s in profile.operators if s.regime == "burst") if not start else ()
        yield Recorded(measurement=possible.operators(f"operators {start}", items), samples={"operators": some + burst})
    for op, ranks in dict.fromkeys((s.op, s.ranks) for s in profile.collectives):
        mine = tuple(s for s in profile.collectives if (s.op, s.ranks) == (op, ranks))
        item = CollectiveItem(op=op, ranks=ranks, sizes=tuple(sorted({s.nbytes for s in mine})))
        yield Recorded(measurement=possible.collective(item), samples={"collectives": mine})
    for sample in profile.contention:
        item = ContentionItem(
            compute=sample.compute, shape=sample.shape, dtype=sample.dtype, op=sample.op, nbytes=sample.nbytes
        )
        yield Recorded(measurement=possible.pair(item), samples={"contention": (sample,)})


def with_only(profile: Profile, parts: Sequence[Recorded]) -> Profile:
    """Return the profile with the samples of `parts` alone."""
    lists: dict[str, tuple[Any, ...]] = dict.fromkeys(profile.sample_lists(), ())
    for part in parts:
        for name, samples in part.samples.items():
            lists[name] += samples
    return replace(profile, **lists, overlap_rates={})  # type: ignore[arg-type]  # lists by name


def in_chosen_order(profile: Profile, runs: Runs, cluster: Cluster) -> list[tuple[float, Recorded]]:
    """Return (seconds when it is complete, measurement) in the order in which a calibration for `runs` takes them."""
    steps = [step for step, _ in runs]
    terms = terms_of(
        [step.plan for step in steps],
        [step.runtime for step in steps],
        ops_of([messages(step, cluster) for step in steps]),
    )
    rows, _ = own_effects(steps, cluster, terms, None)
    parts = list(recorded(profile, PossibleMeasurements(cluster, GPUS, terms)))
    by_id = {id(part.measurement): part for part in parts}
    chosen = in_order(
        [part.measurement for part in parts],
        targets_of_steps(rows),
        Knowledge.of_nothing(len(terms)),
        gpus=GPUS,
        budget_s=1e6,
        everything=True,
    )
    seconds, found = STARTING_S, []
    for one in chosen:
        seconds += one.measurement.seconds * min(one.measurement.ranks, GPUS) / GPUS
        found.append((seconds, by_id[id(one.measurement)]))
    return found


# --- errors ---------------------------------------------------------------------------------------------------------


def errors(profile: Profile | None, runs: Runs, cluster: Cluster) -> list[float]:
    """Return predicted / measured - 1 of every run that can be predicted."""
    known = calibrated(profile, cluster) if profile is not None and any(profile.sample_lists().values()) else None
    found = []
    for step, measured in runs:
        try:
            _, seconds = own_effects([step], cluster, [], known)
        except PlannerError:
            continue
        found.append(float(seconds[0]) / measured - 1)
    return found


def row(label: str, samples: int, off: Sequence[float]) -> str:
    values = np.array(off)
    worst = values[np.argmax(np.abs(values))]
    return f"| {label} | {samples} | {np.mean(np.abs(values)):.1%} | {np.median(np.abs(values)):.1%} | {np.mean(values):+.1%} | {worst:+.1%} |"  # fmt: skip


def curve(cut: Callable[[float], Profile], whole: Profile, runs: Runs, cluster: Cluster) -> list[str]:
    """Return the table of errors over seconds; `cut` gives the profile as it was after so many."""
    lines = [
        "| seconds | samples | steps: mean error | median | bias | worst |",
        "|--:|--:|--:|--:|--:|--:|",
        row("0", 0, errors(None, runs, cluster)),
    ]
    for label, part in [*((f"{s}", cut(s)) for s in POINTS_S), ("all", whole)]:
        count = sum(map(len, part.sample_lists().values()))
        if count:
            lines.append(row(label, count, errors(part, runs, cluster)))
    return lines


def replay(options: argparse.Namespace) -> None:
    """Write the table of a profile that was measured in another order."""
    profile, cluster = read_profile(options.profile), load_cluster(options.cluster)
    runs = runs_of_cases(options.cases)
    if options.draw:
        rows = [json.loads(line) for line in LEDGER.read_text("utf-8").splitlines()]
        runs += runs_of_rows([one for one in rows if one["draw"] == options.draw])
    order = in_chosen_order(profile, runs, cluster)

    def cut(seconds: float) -> Profile:
        return with_only(profile, [part for at, part in order if at <= seconds])

    names = ", ".join(
        [*(Path(name).name for name in options.cases), *([f"draw {options.draw}"] if options.draw else [])]
    )
    lines = [
        f"## {Path(options.profile).name}, replayed",
        "",
        f"Made on {dt.datetime.now(tz=dt.UTC):%Y-%m-%d} by `{command()}`: {len(runs)} runs ({names}) of {cluster.name}.",
        f"Seconds are expected ones, {STARTING_S:.0f} of them for processes to start.",
        "",
        *curve(cut, profile, runs, cluster),
        "",
        "Taken first: "
        + "; ".join(f"{part.measurement.name} ({at:.0f} s)" for at, part in order[: options.first])
        + ".",
    ]
    write(options.out, lines)


# --- on GPUs --------------------------------------------------------------------------------------------------------


def gpu(options: argparse.Namespace) -> None:
    """Calibrate for a question, then run the plans that could win it."""
    from tests.bench.fresh_pool import Pool

    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    question = [f"--model={options.model}", f"--seq-len={options.seq_len}", f"--global-batch={options.global_batch}"]
    asked = [*question, f"--framework={options.framework}", f"--budget={options.budget:g}s"]
    words = ["planner", "calibrate", *asked, "--no-store", "--allow-busy", f"--out={out / 'profile.json'}", "--json"]
    if options.device == "cpu":
        words += ["--device=cpu", f"--gpus={options.gpus}"]
    with (out / "calibrate.json").open("wb") as answer, (out / "calibrate.log").open("wb") as log:
        subprocess.run(
            [sys.executable, "-m", *words],
            stdout=answer,
            stderr=log,
            timeout=options.budget + 90,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
    print((out / "calibrate.log").read_text(errors="replace")[-6000:], flush=True)
    agenda = json.loads((out / "calibrate.json").read_text())
    pool, rows = Pool(options.device), []
    for number, one in enumerate(agenda["questions"]):
        request = {
            **one,
            "gpus": step_of(one).plan.gpus,
            "device": options.device,
            "text": options.text,
            "environment": {},
        }
        with tempfile.TemporaryDirectory() as folder:
            ended = pool.run(request, Path(folder) / str(number), RUN_S)
        rows.append({**one, **ended})
        step_s = (ended["measured"] or {}).get("step_s")
        print(f"{layers_in_words(step_of(one).plan)}: {ended['status']} {step_s} {ended['cause'][:200]}", flush=True)
        (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(options: argparse.Namespace) -> None:
    """Write the table of what `gpu` measured."""
    profile, cluster = read_profile(options.runs / "profile.json"), load_cluster(options.cluster)
    rows = [json.loads(line) for line in (options.runs / "rows.jsonl").read_text().splitlines()]
    runs = runs_of_rows(rows)

    def cut(seconds: float) -> Profile:
        return profile.with_samples(lambda samples: [s for s in samples if s.at_s is not None and s.at_s <= seconds])

    best = min(measured for _, measured in runs)
    lines = [
        f"## {profile.machine}, measured in this order",
        "",
        f"Made on {dt.datetime.now(tz=dt.UTC):%Y-%m-%d} by `{command()}`: {len(runs)} plans of one question, run after the",
        f"calibration; {profile.gpu}, driver {profile.driver}. Seconds are those at which samples were complete.",
        "",
        *curve(cut, profile, runs, cluster),
        "",
        "| plan | measured s | over the best |",
        "|---|--:|--:|",
        *(
            f"| {layers_in_words(step.plan)} | {s:.4f} | {s / best - 1:+.1%} |"
            for step, s in sorted(runs, key=lambda r: r[1])
        ),
    ]
    write(options.out, lines)


def write(out: Path, lines: Sequence[str]) -> None:
    """Add a section to a page, in the place of one with the same heading."""
    page = out.read_text("utf-8") if out.is_file() else f"# {__doc__.splitlines()[0]}\n"
    head, mark, rest = page.partition(lines[0] + "\n")
    after = rest.partition("\n## ")[2] if mark else ""
    kept = head.rstrip() + "\n\n" + ("## " + after.strip() + "\n\n" if after else "")
    codec.write_text(out, kept + "\n".join(lines) + "\n")


def command() -> str:
    return " ".join(
        ["python tests/bench/calibration_worth.py", *(Path(w).name if "/" in w else w for w in sys.argv[1:])]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("replay", "gpu", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--profile", default="examples/profiles/h200x4.json")
    parser.add_argument("--cases", nargs="*", default=[])
    parser.add_argument("--draw", default="", help="of the ledger")
    parser.add_argument("--cluster", default="h200x4")
    parser.add_argument("--first", type=int, default=12, help="measurements that are named")
    parser.add_argument("--runs", type=Path, help="what gpu wrote")
    parser.add_argument("--model", default="llama3.2-1b")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--framework", default="torchtitan")
    parser.add_argument("--budget", type=float, default=120.0)
    parser.add_argument("--text", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=2, help="of a rehearsal on a CPU")
    options = parser.parse_args()
    {"replay": replay, "gpu": gpu, "table": table}[options.what](options)


if __name__ == "__main__":
    main()
