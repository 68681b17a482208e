"""Four questions on four GPUs: `tune` with six trials, then the truth, as many plans as there is time for.

    python3 tests/bench/tune_on_gpus.py whole OUT --budget 400                      on a machine with four GPUs
    python3 tests/bench/tune_on_gpus.py whole OUT --budget 300 --device cpu --tiny  a rehearsal on gloo, two ranks
    python3 tests/bench/tune_on_gpus.py command OUT --budget 120                    planner tune itself, on a machine
    with GPUs python3 tests/bench/tune_on_gpus.py table OUT > examples/tune/gpus.md           anywhere, afterwards

The shapes are of no shipped model and nothing was adjusted on them. Predictions come from a shipped profile of another
host with such GPUs. For each question OUT/rows.jsonl gets a line with all candidates as predicted, before anything
runs; a line for each of tune's trials as it ends; and a line for each plan of the truth: tune's best once more, the ten
best predicted and five random legal ones, those that tune has measured last. Every start has a time limit, and each
question an equal part of the time that is left. `table` replays the rivals from what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from planner.io.plan_words import plan_in_words  # noqa: E402
from planner.question.question import Question, question_of  # noqa: E402 - the path comes first
from planner.tune.candidates import Candidate, Candidates, candidates_of, in_order  # noqa: E402
from planner.tune.choice import best_of  # noqa: E402
from planner.tune.loop import Limits, tune  # noqa: E402
from planner.tune.runners.recorded_trials import Recorded, RecordedQuestion  # noqa: E402
from planner.tune.trials import Chosen, Status, Trial  # noqa: E402
from simulator.config.estimate import SURE  # noqa: E402
from simulator.config.model import MixtureOfExperts, Model  # noqa: E402
from simulator.config.runtime import Runtime  # noqa: E402
from simulator.config.workload import Workload  # noqa: E402
from simulator.fitting.calibration_fit import calibrated  # noqa: E402
from simulator.fitting.calibrations import UNMEASURED  # noqa: E402
from topology import codec  # noqa: E402
from topology.catalog.cluster_file import load_cluster  # noqa: E402
from topology.catalog.platform import take_gpus  # noqa: E402
from topology.profile.profile import read_profile  # noqa: E402

PROFILE = ROOT / "examples" / "profiles" / "h200x4.json"
PROFILED = "h200x4"  # the cluster of PROFILE
TRIALS = 6
BEST, RANDOM = 10, 5
TUNE_S = 75.0  # for the trials of one question
LEAST_S = 30.0  # with less left, no question begins
DENSE = Model(
    name="dense", family="llama", layers=14, hidden=2304, heads=18, kv_heads=6, head_dim=128, ffn=6400, vocab=40960
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One question: what is trained, and on how much."""

    model: Model
    workload: Workload


QUESTIONS = {
    "dense, small batch": Asked(model=DENSE, workload=Workload(seq_len=1792, global_batch_size=8)),
    "dense, large batch": Asked(
        model=replace(DENSE, layers=10, hidden=1792, heads=14, kv_heads=7, ffn=4864),
        workload=Workload(seq_len=1280, global_batch_size=96),
    ),
    "long context": Asked(
        model=replace(DENSE, layers=6, hidden=2560, heads=20, kv_heads=4, ffn=7168),
        workload=Workload(seq_len=28672, global_batch_size=2),
    ),
    "experts": Asked(
        model=replace(
            DENSE,
            name="experts",
            layers=8,
            hidden=1792,
            heads=14,
            kv_heads=7,
            moe=MixtureOfExperts(experts=24, experts_per_token=4, ffn=896),
        ),
        workload=Workload(seq_len=1536, global_batch_size=32),
    ),
}


def tiny(asked: Asked) -> Asked:
    """Return a question that a processor answers in seconds."""
    moe = asked.model.moe and replace(asked.model.moe, experts=4, experts_per_token=2, ffn=32)
    small = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 256}
    batch = min(8, asked.workload.global_batch_size)
    return Asked(model=replace(asked.model, **small, moe=moe), workload=Workload(seq_len=64, global_batch_size=batch))


def question(asked: Asked, gpus: int, name: str, *, wide: bool) -> Question:
    """Return a question to our executor on GPUs of cluster `name`, calibrated by the shipped profile where that is of
    it; `wide` computes in float32.
    """
    cluster = take_gpus(load_cluster(name), gpus)
    types = {"param_dtype": "float32", "compute_dtype": "float32"} if wide else {}
    return question_of(
        asked.model,
        cluster,
        asked.workload,
        framework="meshwright",
        runtime=Runtime(name="meshwright", **types),
        calibration=calibrated(read_profile(PROFILE), cluster) if name == PROFILED else UNMEASURED.on(cluster),
    )


def whole(options: argparse.Namespace) -> None:
    """Answer the questions in turn, until the budget ends."""
    from tests.bench.fresh_pool import Pool

    end = time.monotonic() + options.budget
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.questions or list(QUESTIONS)
    asked = {name: tiny(QUESTIONS[name]) if options.tiny else QUESTIONS[name] for name in names}
    gpus = options.gpus or (2 if options.device == "cpu" else 4)
    plans = predicted(asked, gpus, options.cluster, wide=options.device == "cpu")
    for name in asked:
        first = plans[name].plans[0]
        row = {
            "question": name,
            "kind": "candidates",
            "gpus": gpus,
            "cluster": options.cluster,
            "legal": plans[name].legal,
        }
        append(options.out, row | {"candidates": codec.to_builtins(plans[name].plans)})
        print(f"{name}: {len(plans[name])} candidates, fastest {first.estimate.step_s.value:.4f} s", flush=True)
    pool = Pool(options.device)
    for number, (name, one) in enumerate(asked.items()):
        left = end - time.monotonic()
        share = left / (len(asked) - number)
        if share < LEAST_S:
            append(options.out, {"question": name, "kind": "left out", "cause": f"{left:.0f} s were left"})
            continue
        answer(name, one, plans[name], pool, options, time.monotonic() + share)
    append(options.out, {"kind": "end", "left_s": round(end - time.monotonic(), 1)})


def predicted(asked: dict[str, Asked], gpus: int, cluster: str, *, wide: bool) -> dict[str, Candidates]:
    """Return the candidates of every question, found in processes at the same time: they take seconds each."""
    with ProcessPoolExecutor(max_workers=min(len(asked), os.cpu_count() or 1)) as workers:
        waiting = {name: workers.submit(_predicted, one, gpus, cluster, wide=wide) for name, one in asked.items()}
        return {name: one.result(timeout=120) for name, one in waiting.items()}


def _predicted(asked: Asked, gpus: int, cluster: str, *, wide: bool) -> Candidates:
    return candidates_of(question(asked, gpus, cluster, wide=wide), fastest=80)


def answer(name: str, one: Asked, plans: Candidates, pool: Any, options: argparse.Namespace, until: float) -> None:
    """Tune, then measure the truth, and append every trial when it is known."""
    from tests.bench.tune_pool import PoolTrials

    def record(kind: str, trial: Trial) -> None:
        row = plans.row(trial.key)
        words = plan_in_words(codec.to_builtins(plans.plans[row].plan)) if row is not None else ""
        append(options.out, {"question": name, "kind": kind, "words": words, **codec.to_builtins(trial)})
        shown = f"{trial.step_s:.4f} s" if trial.step_s else f"{trial.status.value} {trial.cause[:120]}"
        print(f"{name}: {kind}: {words}: {shown}, took {trial.seconds:.1f} s", flush=True)

    slug = name.replace(",", "").replace(" ", "-")
    runner = PoolTrials(
        pool=pool, model=one.model, workload=one.workload, folder=options.out / slug, limit_s=options.limit
    )
    began = time.monotonic()
    view = tune(
        plans,
        runner,
        Limits(budget_s=min(TUNE_S, 0.6 * (until - began)), trials=TRIALS),
        unknown_machine=options.device == "cpu",
        record=lambda trial: record("tune", trial),
    )
    spent = time.monotonic() - began
    row = {"question": name, "kind": "tuned", "seconds": round(spent, 1), "reason": view.reason}
    append(options.out, row | {"better_exists_probability": view.outlook.probability})
    best = best_of(plans, view.trials)
    tried = [row for trial in view.trials if (row := plans.row(trial.key)) is not None]
    for batch in truth_batches(plans, None if best is None else best.row, tried, runner):
        left = until - time.monotonic()
        if left < 12.0:
            break
        for trial in runner.run([(plans.plans[row], _asked(plans, row)) for row in batch], left):
            record("truth", trial)


def _asked(plans: Candidates, row: int) -> Chosen:
    said = plans.plans[row].estimate.step_s
    return Chosen(row=row, why="truth", predicted_s=(said.value, said.low, said.high))


def truth_batches(plans: Candidates, tuned: int | None, tried: list[int], runner: Any) -> list[list[int]]:
    """Return the plans of the truth by mesh: tune's best, the fastest predicted, random ones, those tried before
    last.
    """
    sure = [row for row, one in enumerate(plans.plans) if one.estimate.memory.fit_probability >= SURE]
    draw = random.Random(len(plans))
    others = draw.sample(sure[BEST:], min(RANDOM, len(sure[BEST:])))
    fresh = [row for row in (*sure[:BEST], *others) if row not in tried]
    wanted = list(dict.fromkeys([*([tuned] if tuned is not None else []), *fresh, *sure[:BEST]]))
    batches: list[list[int]] = []
    for row in wanted:
        for batch in batches:
            if runner.shares_start(plans.plans[batch[0]], plans.plans[row]) and len(batch) < 6:
                batch.append(row)
                break
        else:
            batches.append([row])
    return batches


def append(out: Path, row: dict[str, Any]) -> None:
    """Append a row; what is written stays, whatever comes after."""
    with (out / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()


def command(options: argparse.Namespace) -> None:
    """Run `planner tune` as a person would: our executor's trials with their numbers checked, on all GPUs of this
    machine.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    small = ["--model", "tiny-llama", "--cluster", "h200x4", "--gpus", "2", "--seq-len", "64", "--global-batch", "8"]
    real = ["--model", "llama3.2-1b", "--cluster", "local", "--seq-len", "2048", "--global-batch", "32"]
    words = [*(small if options.device == "cpu" else [*real, f"--profile={PROFILE}"]), f"--device={options.device}"]
    words += [f"--budget={options.budget:g}s", "--trials=6", "--trial-limit=60s", "--allow-busy", "--json"]
    words += [f"--state={options.out / 'state.jsonl'}", f"--html={options.out / 'report.html'}", "--force"]
    with (options.out / "answer.json").open("wb") as answer_, (options.out / "log.txt").open("wb") as log:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "planner", "tune", *words],
                stdout=answer_,
                stderr=log,
                timeout=options.budget + 90,
                check=False,
                cwd=options.out,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            )
            print(f"exit code {done.returncode}")
        except subprocess.TimeoutExpired:
            print("it did not end in time")
    print((options.out / "log.txt").read_text(errors="replace")[-3000:])


# --- afterwards -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One question as measured: the truth as a question to replay, and tune's trials on the GPUs."""

    name: str
    truth: RecordedQuestion
    trials: tuple[Trial, ...]
    seconds: float
    reason: str


def read_answers(out: Path) -> list[Answered]:
    """Return the questions of OUT/rows.jsonl of which two plans of the truth were measured."""
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    found = []
    for name in dict.fromkeys(row["question"] for row in rows if "question" in row):
        mine = [row for row in rows if row.get("question") == name]
        listed = next(row for row in mine if row["kind"] == "candidates")
        plans = [codec.convert(one, Candidate, where=name) for one in listed["candidates"]]
        # What was measured for the truth goes before tune's own trial of the same plan.
        measured = [*(row for row in mine if row["kind"] == "tune"), *(row for row in mine if row["kind"] == "truth")]
        truth = {row["key"]: row for row in measured if row["status"] != "out_of_time"}
        trials = tuple(_trial(row) for row in mine if row["kind"] == "tune")
        tuned = next((row for row in mine if row["kind"] == "tuned"), {"seconds": 0.0, "reason": "not run"})
        if sum(row["step_s"] is not None for row in truth.values()) < 2:
            continue
        kept = [one for one in plans if one.key in truth]
        recorded = {
            key: Recorded(step_s=row["step_s"], reserved_bytes=row.get("reserved_bytes"), status=Status(row["status"]))
            for key, row in truth.items()
        }
        question_ = RecordedQuestion(
            name=name,
            ids=(),
            question=question(QUESTIONS[name], listed["gpus"], listed.get("cluster", PROFILED), wide=False),
            candidates=in_order(kept, legal=listed["legal"]),
            recorded=recorded,
        )
        found.append(
            Answered(name=name, truth=question_, trials=trials, seconds=tuned["seconds"], reason=tuned["reason"])
        )
    return found


def _trial(row: dict[str, Any]) -> Trial:
    return codec.convert(
        {key: value for key, value in row.items() if key not in {"question", "kind", "words"}}, Trial, where="rows"
    )


def table(options: argparse.Namespace) -> None:
    """Print what tune found and the truth, and the rivals replayed from it."""
    from tests.bench.tune_rivals import COUNTS, METHODS, curves

    answers = read_answers(options.out)
    print(
        "| question | plans measured | truth's best s | tune's best, measured again s | regret | trials | seconds | stop |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|---|")
    for one in answers:
        timed = [trial for trial in one.trials if trial.step_s]
        least = one.truth.best_s
        if not timed:
            print(
                f"| {one.name} | {len(one.truth.recorded)} | {least:.4f} | none | | {len(one.trials)} | | {one.reason} |"
            )
            continue
        best = min(timed, key=lambda trial: trial.step_s or 0.0)
        again = one.truth.recorded.get(best.key)
        step = again.step_s if again is not None and again.step_s else best.step_s
        print(
            f"| {one.name} | {len(one.truth.recorded)} | {least:.4f} | {step:.4f} | {step / least - 1:.1%} "
            f"| {len(one.trials)} | {one.seconds:.0f} | {one.reason} |"
        )
    print()
    print(f"| question | method | {' | '.join(f'after {count}' for count in COUNTS)} |")
    print(f"|---|---|{'--:|' * len(COUNTS)}")
    for one in answers:
        found = curves(one.truth)
        for method in METHODS:
            print(f"| {one.name} | {method} | {' | '.join(f'{found[method][count]:.1%}' for count in COUNTS)} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("whole", "command", "table"))
    parser.add_argument("out", type=lambda text: Path(text).resolve())
    parser.add_argument("--budget", type=float, default=400.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cluster", default=PROFILED, help="that predicts: without a profile, but for this one")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds for one plan")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--questions", action="append", choices=list(QUESTIONS))
    options = parser.parse_args()
    {"whole": whole, "command": command, "table": table}[options.what](options)


if __name__ == "__main__":
    main()
