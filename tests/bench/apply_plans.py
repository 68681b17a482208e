"""Plans predicted, then run: every plan of a set by our executor, predicted and measured in one table.

    python3 tests/bench/apply_plans.py predict OUT --set h200x2 --profile P      anywhere, before anything runs
    python3 tests/bench/apply_plans.py run OUT --budget 400 --pack FILE          on a machine with the GPUs
    python3 tests/bench/apply_plans.py table OUT > table.md                      anywhere
    python3 tests/bench/apply_plans.py whole OUT --set h200x2-fresh --profile P --calibrate 100 --budget 260

`whole` is what a user does on a new machine: operators, and few layers of the executor's own runtime, are measured
there and take the place of those that another host's profile holds, every plan is predicted from that and written, then
run. Hosts differ by 10 % a launch, and the machine that is lent changes.

OUT holds a plan file and a run's directory for each plan (tests/bench/plan_sets.py); the plan file has the prediction,
and nothing that is run can change it. Plans of as many ranks share processes (`executor.run.apply_many`). What there is
no time for is said to be not run. `--pack` keeps reports and traces in one archive.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from executor.run.apply_many import Run, read_run, run_many  # noqa: E402 - the path comes first
from executor.verify.plans import small_model, small_plan, small_workload  # noqa: E402
from planner.calibrate.agenda import Wanted, agenda_for  # noqa: E402
from planner.calibrate.calibrate_process import calibrate  # noqa: E402
from planner.calibrate.layer_runs import typical_steps  # noqa: E402
from planner.io.plan_words import plan_in_words  # noqa: E402
from planner.question.plan_file import PlanFile, load_plan, plan_file, save_plan  # noqa: E402
from planner.question.question import question_of  # noqa: E402
from planner.runs.planned_run import PlannedRun, cpu_run, cuda_run, job_run  # noqa: E402
from planner.runs.run_report import load_run  # noqa: E402
from simulator.fitting import calibration_fit  # noqa: E402
from tests.bench.plan_sets import AXES, SETS, Asked, plans  # noqa: E402
from topology import codec  # noqa: E402
from topology.catalog.cluster_file import load_cluster  # noqa: E402
from topology.catalog.platform import take_gpus  # noqa: E402
from topology.cluster import Cluster  # noqa: E402
from topology.errors import PlannerError  # noqa: E402
from topology.health.diagnose import diagnose  # noqa: E402
from topology.probe.from_machine import probe_machine  # noqa: E402
from topology.profile.profile import Profile, read_profile  # noqa: E402
from topology.profile.store import merge  # noqa: E402

WARM_UP = 2


# --- before ---------------------------------------------------------------------------------------------------------


def write_plan(name: str, asked: Asked, cluster: Cluster, profile: Profile | None, folder: Path) -> None:
    """Predict one plan and save it; the plan file holds the prediction."""
    known = calibration_fit.calibrated(profile, cluster)
    question = question_of(
        asked.network, cluster, asked.workload, framework="meshwright", runtime=asked.runtime, calibration=known
    )
    content = plan_file(question, asked.plan, question.estimate([asked.plan]).estimate(0))
    save_plan(content, folder / f"{name}.plan.json", force=True)


def predict(folder: Path, name: str, profile_path: str, top: int) -> None:
    """Write a plan file for each plan of the set, and the list of them."""
    folder.mkdir(parents=True, exist_ok=True)
    profile = read_profile(profile_path) if profile_path else None
    listed = {}
    for label, asked in plans(name, take_gpus(load_cluster("h200x4"), SETS[name]), profile, top):
        # A plan for fewer GPUs than the machine has: the others are idle.
        cluster = take_gpus(load_cluster("h200x4"), asked.plan.gpus)
        write_plan(label, asked, cluster, profile, folder)
        listed[label] = {"traced": asked.traced}
        print(label, plan_in_words(codec.to_builtins(asked.plan)), flush=True)
    (folder / "set.json").write_text(json.dumps({"set": name, "profile": profile_path, "plans": listed}, indent=1))


# --- a new machine --------------------------------------------------------------------------------------------------


def calibrated(folder: Path, options: argparse.Namespace) -> str:
    """Measure this host within the budget; return the path of the profile with its layers instead of another host's."""
    base, count = read_profile(options.profile), SETS[options.set]
    rehearsal = options.device == "cpu"
    agenda = agenda_for(
        Wanted(steps=tuple(typical_steps("meshwright", count)), everything=True),
        take_gpus(load_cluster("h200x4"), count),
        None,
        gpus=count,
        budget_s=options.calibrate,
        collectives=False,
        stand_in=rehearsal,
    )
    folder.mkdir(parents=True, exist_ok=True)
    found = calibrate(
        agenda.jobs(),
        range(count),
        budget_s=options.calibrate,
        machine="the machine that runs the plans",
        gpu="cpu" if rehearsal else base.gpu,
        records=folder / "calibration.jsonl",
        command=f"apply_plans.py whole --set {options.set} --calibrate {options.calibrate:g}",
        device=options.device,
        allow_busy=True,
    )
    print(
        f"{len(found.operators)} samples of operators, {len(found.layers)} of layers; missing: {'; '.join(found.missing) or 'nothing'}",
        flush=True,
    )
    for sample in found.layers:
        clock = (sample.conditions.mean_sm_clock_hz or 0.0) / 1e9
        what = f"{plan_in_words(sample.plan)}, {sample.model['name']}, {sample.model['layers']}"
        print(f"{what}: {sample.step_s:.4f} s at {clock:.2f} GHz", flush=True)
    path = folder / "profile.json"
    # A rehearsal measures a processor, of which nothing goes into a GPU's profile.
    whole = base if rehearsal else merge(replace(base, layers=()), found)
    codec.write_text(path, codec.to_json(whole) + "\n")
    return str(path)


# --- on the machine -------------------------------------------------------------------------------------------------


def requests(folder: Path, only: str, steps: int, budget_s: float, device: str) -> list[Run]:
    """Write a request for each plan as `planner apply` would, after its checks of machine and health."""
    listed = json.loads((folder / "set.json").read_text())["plans"]
    runs = []
    here = probe_machine() if device == "cuda" else None
    for name, extra in listed.items():
        if only and name not in only.split(","):
            continue
        content = load_plan(folder / f"{name}.plan.json")
        if here is not None:
            request = checked(content, here).request(steps=steps, budget_s=budget_s, own_table=False)
        else:
            request = on_cpu(content)
        request |= {"profile": extra["traced"], "collective_timeout_s": 40.0, "warm_up": WARM_UP}
        out = folder / name
        out.mkdir(exist_ok=True)
        path = out / "request.json"
        path.write_text(codec.to_json(request))
        try:
            runs.append(read_run(path, out))
        except PlannerError as error:
            print(f"== {name} cannot be run: {error}", flush=True)
    return runs


def checked(content: PlanFile, here: Cluster) -> PlannedRun:
    """Return the run that `planner apply --allow-busy` would make; what speaks against it is only printed here."""
    try:
        return cuda_run(content, here, diagnose(here), allow_busy=True)
    except PlannerError as error:
        print(f"warning: {error}", flush=True)
        return job_run(content)


def on_cpu(content: PlanFile) -> dict[str, Any]:
    """Return a small stand-in of a plan's run on gloo processes: a rehearsal, which measures nothing."""
    question = cpu_run(
        replace(
            content,
            plan=small_plan(content.plan),
            model=small_model(content.model, content.plan),
            workload=small_workload(content.plan, content.workload),
        ),
        None,
    )
    return {**question.request(steps=2, budget_s=60, own_table=False), "predicted": codec.to_builtins(content.estimate)}


def run(folder: Path, options: argparse.Namespace) -> None:
    """Run all while time lasts; archive what they left after each start of processes."""
    began = time.monotonic()
    runs = requests(folder, options.only, options.steps, options.budget, options.device)
    ended: list[dict[str, Any]] = []

    def reported(made: Run, document: dict[str, Any]) -> None:
        step = document["measured"]["step_s"] or {}
        value = ((document["predicted"] or {}).get("step_s") or {}).get("value")
        peaks = [rank.get("peak_reserved_bytes", 0) for rank in document["measured"]["memory_by_rank"]]
        ended.append(
            {
                "name": made.out.name,
                "status": document["status"],
                "step_s": step.get("median"),
                "spread": step.get("spread"),
                "predicted_s": value,
                "reserved_gib": max(peaks, default=0) / 2**30,
                "seconds": document["seconds"],
                "failure": str((document["failure"] or {}).get("message", ""))[-300:],
            }
        )
        (folder / "ended.json").write_text(json.dumps(ended, indent=1))
        row = ended[-1]
        error = f"{row['predicted_s'] / row['step_s'] - 1:+.1%}" if row["step_s"] and row["predicted_s"] else ""
        shown = f"{row['step_s'] or 0:.4f} s  predicted {row['predicted_s'] or 0:.4f}  {error}"
        print(
            f"== {row['name']} {row['status']} {shown} reserved {row['reserved_gib']:.1f} GiB, took {row['seconds']:.0f} s,"
            f" {time.monotonic() - began:.0f} s since the start {row['failure']}",
            flush=True,
        )
        if options.pack:
            pack(folder, Path(options.pack))

    run_many(runs, options.budget, reported)


ARCHIVED = (".json", ".jsonl", ".txt")


def pack(folder: Path, archive: Path) -> None:
    """Put reports, records and traces into one archive."""
    fresh = archive.with_suffix(".part")
    with tarfile.open(fresh, "w:gz", compresslevel=3) as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix in ARCHIVED and "ranks" not in path.parts:
                tar.add(path, arcname=str(path.relative_to(folder)))
    fresh.replace(archive)


# --- after ----------------------------------------------------------------------------------------------------------

HEADS = (
    "plan", "predicted s", "measured s", "spread", "error", "inside 80 % interval", "tokens/s/GPU",
    "reserved predicted GiB", "measured GiB", "error", "gradients off by, float64", "in its types (allowed)",
    "SM clock GHz (lowest)", "slowed by",
)  # fmt: skip


def table(folder: Path) -> None:
    """Print the tables as Markdown, from the runs' own reports."""
    listed = json.loads((folder / "set.json").read_text())
    documents = {name: _document(folder / name / "run.json") for name in listed["plans"]}
    print("| " + " | ".join(HEADS) + " |")
    print("|---" + "|--:" * (len(HEADS) - 1) + "|")
    step_errors, memory_errors = [], []
    for name, document in documents.items():
        step = document["measured"].get("step_s")
        if not step:
            print(f"| {name} | {document.get('status', 'not run')} |" + " |" * (len(HEADS) - 2))
            continue
        predicted, measured = document["predicted"], document["measured"]
        interval = predicted["step_s"]
        error = interval["value"] / step["median"] - 1
        reserved = max(rank["peak_reserved_bytes"] for rank in measured["memory_by_rank"])
        memory = predicted["memory"]["reserved_bytes"] / reserved - 1
        step_errors.append(error)
        memory_errors.append(memory)
        types = document.get("verified_types")
        in_types = "loss only" if types and not types["gradients_compared"] else ""
        if types and types["gradients_compared"]:
            in_types = f"{types['gradient']:.1e} ({types['allowed']:.1e})"
        cells = (
            name,
            f"{interval['value']:.3f}",
            f"{step['median']:.3f}",
            f"{step['spread']:.1%}",
            f"{error:+.1%}",
            "yes" if interval["low"] <= step["median"] <= interval["high"] else "no",
            f"{measured['tokens_per_s_per_gpu']:,.0f}",
            f"{predicted['memory']['reserved_bytes'] / 2**30:.1f}",
            f"{reserved / 2**30:.1f}",
            f"{memory:+.1%}",
            f"{document['verified']['gradient']:.1e}",
            in_types,
            *clocks(document),
        )
        print("| " + " | ".join(cells) + " |")
    if step_errors:
        print(f"\n{_summary('step', step_errors)}; {_summary('memory', memory_errors)}; {len(step_errors)} plans.")
    if listed["set"] in AXES:
        terms(folder, list(documents))
    else:
        regrets(documents)


def clocks(document: dict[str, Any]) -> tuple[str, str]:
    """Return the median clock of the slowest GPU while steps were timed, with the lowest seen, and why GPUs were
    slow.
    """
    gpus = document.get("gpus") or []
    slowest = min(
        (gpu["sm_clock_hz"] for gpu in gpus if gpu["sm_clock_hz"]), key=lambda one: one["median"], default=None
    )
    shown = f"{slowest['median'] / 1e9:.2f} ({slowest['lowest'] / 1e9:.2f})" if slowest else ""
    return shown, ", ".join(sorted({reason for gpu in gpus for reason in gpu["throttle"]}))


def _document(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {"measured": {}}


def _summary(what: str, errors: list[float]) -> str:
    mean = sum(abs(error) for error in errors) / len(errors)
    return f"Mean absolute error of {what} {mean:.1%} (bias {sum(errors) / len(errors):+.1%}, worst {max(errors, key=abs):+.1%})"


def terms(folder: Path, names: list[str]) -> None:
    """Print where predicted and measured part, in milliseconds a step: of the rank that computes longest, profiled."""
    rows = []
    for name in names:
        if not (folder / name / "run.json").is_file():
            continue
        answer = load_run(str(folder / name)).answer(None)
        if answer["terms"]:
            rows.append((name, {term["name"]: term for term in answer["terms"]}, answer["blame"]))
    if not rows:
        return
    heads = list(rows[0][1])
    print("\n| plan | " + " | ".join(f"{head}, predicted / measured ms" for head in heads) + " | blamed |")
    print("|---" + "|--:" * len(heads) + "|---|")
    for name, found, blame in rows:
        cells = [f"{found[head]['predicted_s'] * 1e3:.0f} / {found[head]['measured_s'] * 1e3:.0f}" for head in heads]
        print(f"| {name} | " + " | ".join(cells) + f" | {blame or ''} |")


def regrets(documents: dict[str, dict[str, Any]]) -> None:
    """Print, for each question, what the planner's first choice cost over the best that was run."""
    print("\n| question | plans run | first choice s | best s | which | regret |")
    print("|---|--:|--:|--:|---|--:|")
    for topic in dict.fromkeys(name.rpartition("-")[0] for name in documents):
        steps = {
            name: document["measured"]["step_s"]["median"]
            for name, document in documents.items()
            if name.rpartition("-")[0] == topic and document["measured"].get("step_s")
        }
        first = documents[f"{topic}-1"]
        if not steps or f"{topic}-1" not in steps:
            print(f"| {topic} | {len(steps)} | {first.get('status', 'not run')} | | | |")
            continue
        best = min(steps, key=steps.__getitem__)
        which = plan_in_words(documents[best]["plan"])
        regret = steps[f"{topic}-1"] / steps[best] - 1
        print(
            f"| {topic} | {len(steps)} | {steps[f'{topic}-1']:.3f} | {steps[best]:.3f} | {best}: {which} | {regret:.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "run", "table", "whole"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--set", choices=tuple(SETS), default="h200x2")
    parser.add_argument("--profile", default="", help="a profile of that machine; without one datasheets predict")
    parser.add_argument("--top", type=int, default=11, help="plans for each question of a regret set")
    parser.add_argument("--budget", type=float, default=400.0)
    parser.add_argument("--calibrate", type=float, default=100.0, help="seconds for this host's layers, in `whole`")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--pack", default="")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, shrunken")
    options = parser.parse_args()
    if options.what == "predict":
        predict(options.out, options.set, options.profile, options.top)
    elif options.what == "run":
        run(options.out, options)
    elif options.what == "whole":
        predict(options.out, options.set, calibrated(options.out, options), options.top)
        run(options.out, options)
    else:
        table(options.out)


if __name__ == "__main__":
    main()
