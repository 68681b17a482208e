"""Learn how far measurements lie from predictions, whole sources at a time: writes
simulator/calibration/intervals.json.

    python tests/bench/learn_intervals.py CASES.json … [--calibrated PROFILE=CASES.json]… [--held-out CASES.json]…
    [--judged DRAW]… [--keep FACTORS]… [--only FACTORS] [--out FILE]

CASES are case files; a source is what a case's `source` names up to the first `@`, `:`, `,` or `(`. `--calibrated`
files are predicted with a profile of the very host too, and so are the runs of examples/validation/apply_*.json. The
draws of examples/validation/fresh.jsonl are a source each, from datasheets and, where the profile made on their host is
shipped, calibrated. Draws that `--judged` names (by default the last; `none`) are judged and not learned from, and so
are `--held-out` files. `--keep` leaves factors as they are shipped, where predictions were made with their rows in
view; `--only` learns one kind of uncalibrated steps, from CASES alone, or speeds of hosts, from the draws alone, and
leaves all else. What the factors mean: `simulator/calibration/intervals.py`. Memory is learned twice, from sums and
from the allocator's replay.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


from planner.question.cases import Case, load_case  # noqa: E402 - the path comes first
from planner.question.question import Question, question_of  # noqa: E402
from planner.validate.validation import GIB, compared_bytes, measured_step_s  # noqa: E402
from simulator.analytical.estimates import EstimateTable  # noqa: E402
from simulator.calibration.intervals import Factors, IntervalTable, Measured, interval_table, step_factors  # noqa: E402
from simulator.columns.plan_table import Floats  # noqa: E402
from simulator.config.model import Model  # noqa: E402
from simulator.config.plan import Plan  # noqa: E402
from simulator.config.workload import Workload  # noqa: E402
from simulator.fitting.calibrations import Calibrations  # noqa: E402
from simulator.legality.frameworks import framework_of_runtime  # noqa: E402
from simulator.memory.estimate import with_replay  # noqa: E402
from tests.bench.fresh_draw import runtime_of  # noqa: E402
from tests.short_models import shortened  # noqa: E402
from topology.catalog.cluster_file import load_cluster  # noqa: E402
from topology.codec import convert  # noqa: E402
from topology.errors import PlannerError  # noqa: E402
from topology.profile.profile import read_profile  # noqa: E402

LEVEL = 0.8
MEMORY = ("memory", "replayed memory")  # from sums, and from the allocator's replay
HOSTS = ("host", "measured host")  # speeds of hosts
PARTS = frozenset({*MEMORY, *HOSTS})
MANY = 8  # sources from which their rows, each source's as one, say more of a range than a mean and a spread do
WAITS = 0.1  # of a step: predicted waits below say little of hosts
SLOWER, SLOW = 1.5, 2.0  # factors of a host's time: runs that would not wait with the second say nothing of hosts
BY_HOST = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, SLOWER, 1.7, SLOW, 2.5, 3.0)
SLICED = "2026-12-01T16:30"  # until then the executor multiplied float32 experts by slices of tensors
GAPS = 0.02  # of a step, that a GPU idles between kernels without a wait for the host
# Runs of our executor on hosts whose layers of it were in the profile they were predicted from; the second part of the
# last ran on another host.
OWN = (("apply_2xH200_fresh", "runs", "h200x2_fresh"), ("apply_2xH200_next", "runs", "h200x2_next"))
OWN_ELSEWHERE = ("apply_2xH200_next", "regret2", "h200x2_next")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measurement over its prediction, and what the prediction rests on. Of a host's speed a run gives a range, from
    `ratio` to `most`. `by_host`: steps with hosts of the factors BY_HOST, over the predicted one.
    """

    source: str
    basis: str
    ratio: float
    shares: dict[str, float]
    most: float | None = None
    by_host: tuple[float, ...] = (1.0,) * len(BY_HOST)
    architecture: str = ""  # of its GPUs
    runtime: str = ""
    gpus: int = 1
    host: float = 0.0
    calibrated: bool = False
    host_measured: bool = False
    asked_before: float | None = None  # the ratio to what was predicted before the run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=Path)
    parser.add_argument("--calibrated", action="append", default=[], help="PROFILE=CASES")
    parser.add_argument("--held-out", action="append", default=[], type=Path)
    parser.add_argument("--judged", action="append", default=[])
    parser.add_argument("--keep", action="append", default=[], choices=sorted(interval_table().factors))
    parser.add_argument("--only", choices=("low_precision", "node", "nodes", "hosts"))
    parser.add_argument("--out", type=Path, default=ROOT / "simulator/calibration/intervals.json")
    asked = parser.parse_args()
    if asked.only:
        relearn(asked)
        return

    with_memory = not {*MEMORY} <= {*asked.keep}
    found = fresh_rows(memory=with_memory)
    judged = {draw: found.pop(draw) for draw in asked.judged or list(found)[-1:] if draw != "none"}
    rows = [row for of_draw in found.values() for row in of_draw]
    steps, memory = rows_of(cases(asked.cases), None, memory=with_memory)
    calibrated: list[Row] = []
    for pair in asked.calibrated:
        profile, file = pair.split("=", 1)
        calibrated += rows_of(cases([Path(file)]), Calibrations(read_profile(profile)), memory=False)[0]
    for name, part, profile in (*OWN, OWN_ELSEWHERE):
        measured = Calibrations(read_profile(ROOT / f"examples/profiles/{profile}.json"))
        calibrated += rows_of(own_runs(name, part), measured, memory=False)[0]
    steps += [row for row in rows if row.basis not in PARTS and not row.calibrated]
    factors = learned_factors(
        steps,
        memory + [row for row in rows if row.basis in MEMORY],
        calibrated + [row for row in rows if row.calibrated],
        [row for row in rows if row.basis in HOSTS],
    )
    factors |= {name: interval_table().factors[name] for name in asked.keep}
    held_out = {
        name: share for draw, of_draw in judged.items() for name, share in of_kinds(draw, of_draw, factors).items()
    }
    if asked.held_out:
        other_steps, other_memory = rows_of(cases(asked.held_out), None)
        held_out |= {
            "other files, step": held(other_steps, factors),
            "other files, memory": held(other_memory, factors),
        }
    write(asked, measured_on(steps), factors, held_out)


def relearn(asked: argparse.Namespace) -> None:
    """Learn the factors that `--only` names anew."""
    known = interval_table()
    if asked.only == "hosts":
        waited = [row for of_draw in fresh_rows(memory=False).values() for row in of_draw if row.basis in HOSTS]
        learned = {kind: learned_factors([], [], [], waited)[kind] for kind in HOSTS}
    else:
        steps = rows_of(cases(asked.cases), None, memory=False)[0]
        learned = {
            asked.only: learned_factors([row for row in steps if row.basis == asked.only], [], [], [])[asked.only]
        }
    command = f"python tests/bench/learn_intervals.py {' '.join(path.name for path in asked.cases)} --only {asked.only}"
    found = replace(known, command=f"{known.command}; {command}", factors=known.factors | learned)
    asked.out.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    print(table(found))


def measured_on(steps: list[Row]) -> Measured:
    return Measured(
        architectures=tuple(sorted({row.architecture for row in steps})),
        runtimes=tuple(sorted({row.runtime for row in steps})),
        gpus=max(row.gpus for row in steps),
    )


def of_kinds(draw: str, rows: list[Row], factors: dict[str, Factors]) -> dict[str, float]:
    """Return the shares of a draw that its ranges hold, by what was predicted."""
    plain = [row for row in rows if row.basis not in PARTS]
    kinds = {
        "datasheets": [row for row in plain if not row.calibrated],
        "calibrated": [row for row in plain if row.calibrated],
        **{kind: [row for row in rows if row.basis == kind] for kind in (*MEMORY, *HOSTS)},
    }
    for kind in ("datasheets", "calibrated"):
        before = [replace(row, ratio=row.asked_before) for row in kinds[kind] if row.asked_before is not None]
        kinds[f"{kind}, as predicted before the runs"] = before
    return {f"draw {draw}, {kind}": held(some, factors) for kind, some in kinds.items() if some}


def write(asked: argparse.Namespace, known: Measured, factors: dict[str, Factors], held_out: dict[str, float]) -> None:
    found = IntervalTable(
        made_on=datetime.now(UTC).date().isoformat(),
        command=f"python tests/bench/learn_intervals.py {' '.join(path.name for path in asked.cases)}"
        + "".join(f" --calibrated {'='.join(Path(one).name for one in pair.split('='))}" for pair in asked.calibrated)
        + "".join(f" --held-out {path.name}" for path in asked.held_out)
        + "".join(f" --judged {draw}" for draw in asked.judged)
        + "".join(f" --keep {name}" for name in asked.keep),
        measured_on=known,
        factors=factors,
        held_out={name: round(share, 2) for name, share in held_out.items()},
    )
    asked.out.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    print(table(found))


# --- rows -----------------------------------------------------------------------------------------------------------


def cases(files: Iterable[Path]) -> Iterator[tuple[str, Case]]:
    for file in files:
        for raw in json.loads(file.read_text("utf-8")):
            try:
                yield re.split(r"[@:(,]| Figure", raw["source"])[0].strip(), load_case(raw)
            except PlannerError as error:
                print(f"{raw['id']} left out: {str(error)[:90]}", file=sys.stderr)


def own_runs(name: str, part: str) -> Iterator[tuple[str, Case]]:
    """Yield finished runs of the executor; those whose allocator was full say nothing of the step."""
    for run in json.loads((ROOT / f"examples/validation/{name}.json").read_text("utf-8"))[part]:
        if run["status"] != "finished" or run["measured"].get("allocator_retries"):
            continue
        short = re.fullmatch(r"(.*?)(?:-(\d+)-layers)?", run["model"])
        assert short is not None
        data = {
            "model": "llama3-8b",
            "cluster": {"gpu": "h200-sxm", "gpus_per_node": 2, "nodes": 1, "interconnect": "nvswitch"},
            "workload": {"seq_len": run["seq_len"], "global_batch_size": run["global_batch_size"]},
            "plan": run["plan"],
            "runtime": {"name": "meshwright", "compile": run["compile"]},
            "measured": {"step_s": statistics.median(run["measured"]["step_s"])},
        }
        case = load_case(data)
        yield (
            f"{name} {part}",
            replace(
                case, question=replace(case.question, model=shortened(short[1], int(short[2]) if short[2] else None))
            ),
        )


def rows_of(
    found: Iterable[tuple[str, Case]], measured: Calibrations | None, *, memory: bool = True
) -> tuple[list[Row], list[Row]]:
    """Return the rows of step time, and of memory if asked for."""
    steps, held_bytes = [], []
    for source, case in found:
        step, _ = measured_step_s(case)
        peak = case.measured.get("peak_memory_gib")
        if step is None and not peak:
            continue
        calibration = measured.on(case.question.cluster) if measured is not None else None
        asked = replace(case.question, calibration=calibration)
        try:
            answer = asked.estimate([case.plan])
        except PlannerError as error:
            print(f"{case.id} left out: {str(error)[:90]}", file=sys.stderr)
            continue
        estimate, basis = answer.estimate(0), answer.basis[0]
        if step is not None:
            by_host, _ = with_hosts(answer)
            steps.append(
                Row(
                    source=source,
                    basis=basis,
                    ratio=step / estimate.step_s.value,
                    shares=estimate.sources,
                    **of_what(asked, case.plan),
                    host=estimate.breakdown_s["host"] / estimate.step_s.value,
                    by_host=tuple(by_host / estimate.step_s.value),
                    calibrated=calibration is not None,
                    host_measured=answer.host_measured(0),
                )
            )
        if peak and memory:
            replayed = with_replay(asked, case.plan, estimate)
            for kind, one in zip(MEMORY, (estimate, replayed), strict=True):
                predicted, _ = compared_bytes(case, one.memory)
                held_bytes.append(Row(source=source, basis=kind, ratio=peak * GIB / predicted, shares={}))
    return steps, held_bytes


def of_what(question: Question, plan: Plan) -> dict[str, Any]:
    kind = question.cluster.slowest_kind
    return {"architecture": kind.architecture, "runtime": question.runtime.name, "gpus": plan.gpus}


@cache
def of_draw(number: int) -> Calibrations | None:
    """Return what the profile made on a draw's host gives, if it is shipped."""
    profiles = list((ROOT / "examples/profiles").glob(f"*_draw{number}.json"))
    return Calibrations(read_profile(profiles[0])) if profiles else None


def fresh_rows(*, memory: bool = True) -> dict[str, list[Row]]:
    """Return the rows of every draw: steps from datasheets and calibrated, waits for hosts, memory."""
    found: dict[str, list[Row]] = defaultdict(list)
    for run, question, plan in fresh_runs():
        source, measured = f"draw {run['draw']}", run["measured"]
        rows = found[run["draw"]]
        estimates = {"datasheet": (question.estimate([plan]), False)}
        number = len(found)
        if (calibrations := of_draw(number)) is not None:
            known = calibrations.on(question.cluster)
            estimates["calibrated"] = (replace(question, calibration=known).estimate([plan]), True)
        for kind, (answer, calibrated) in estimates.items():
            estimate, before = answer.estimate(0), run["predicted"].get(kind, {}).get("step_s")
            by_host, waits_s = with_hosts(answer)
            rows.append(
                Row(
                    source=source,
                    basis=answer.basis[0],
                    ratio=measured["step_s"] / estimate.step_s.value,
                    shares=estimate.sources,
                    **of_what(question, plan),
                    host=estimate.breakdown_s["host"] / estimate.step_s.value,
                    by_host=tuple(by_host / estimate.step_s.value),
                    calibrated=calibrated,
                    host_measured=answer.host_measured(0),
                    asked_before=measured["step_s"] / before if before else None,
                )
            )
            if waits_s[BY_HOST.index(SLOW)] > WAITS * by_host[BY_HOST.index(SLOW)]:
                least, most = host_speed(waits_s, measured)
                basis = HOSTS[answer.host_measured(0)]
                rows.append(Row(source=source, basis=basis, ratio=least, most=most, shares={}))
        estimate = estimates["datasheet"][0].estimate(0)
        if memory and measured["reserved_bytes"]:
            for basis, one in zip(MEMORY, (estimate, with_replay(question, plan, estimate)), strict=True):
                ratio = measured["reserved_bytes"] / one.memory.reserved_bytes
                rows.append(Row(source=source, basis=basis, ratio=ratio, shares={}))
    return found


def with_hosts(answer: EstimateTable) -> tuple[Floats, Floats]:
    """Return a plan's steps and its waits for the host, seconds, with hosts of the factors BY_HOST."""
    account = answer.with_hosts([0], BY_HOST)
    return account.total_s, account.parts_s["host"]


def host_speed(waits_s: Floats, measured: dict[str, Any]) -> tuple[float, float]:
    """Return the least and the most factor of the host's time with which a run is predicted to wait as long as rank 0's
    GPU idled; between kernels it idles for GAPS of a step in any case.
    """
    profiled = measured["profiled"]
    idled_s = measured["step_s"] * profiled["idle_s"] / profiled["wall_s"]
    grown = np.maximum.accumulate(waits_s) + 1e-9 * np.arange(len(BY_HOST))  # a wait of nothing has no inverse
    least, most = np.interp([idled_s - GAPS * measured["step_s"], idled_s], grown, BY_HOST)
    return float(least), float(most)


def fresh_runs() -> Iterator[tuple[dict[str, Any], Question, Plan]]:
    """Yield the measured rows of the ledger, each with its question."""
    for line in (ROOT / "examples/validation/fresh.jsonl").read_text("utf-8").splitlines():
        run = json.loads(line)
        if run["status"] != "ok":
            continue
        plan, runtime = convert(run["plan"], Plan, where="plan"), runtime_of(run)
        if plan.tp > 1 and "ring" in plan.tp_overlap:  # a mode that the executor has no more
            continue
        wide_experts = run["model"]["moe"] and runtime.activation_dtype == "float32" and runtime.name == "meshwright"
        if wide_experts and run["ran_at"] < SLICED:  # a way to multiply that the executor has no more
            continue
        question = question_of(
            convert(run["model"], Model, where="model"),
            load_cluster("h200x4" if "H200" in run["host"]["gpu"] else "dgx-h100"),
            convert(run["workload"], Workload, where="workload"),
            framework=framework_of_runtime(runtime.name),
            runtime=runtime,
            gpus=plan.gpus,
        )
        yield run, question, plan


# --- factors --------------------------------------------------------------------------------------------------------


def learned_factors(steps: list[Row], memory: list[Row], calibrated: list[Row], waits: list[Row]) -> dict[str, Factors]:
    groups = {basis: [row for row in steps if row.basis == basis] for basis in ("node", "nodes", "low_precision")}
    groups |= {"calibrated": calibrated} | {kind: [row for row in waits if row.basis == kind] for kind in HOSTS}
    groups |= {kind: [row for row in memory if row.basis == kind] for kind in MEMORY}
    shipped = interval_table().factors  # of what is refused today, and so has no rows
    factors = {basis: together(rows) if rows else shipped[basis] for basis, rows in groups.items()}
    for basis, rows in groups.items():
        if not rows:
            continue
        sources = sorted({row.source for row in rows})
        left_out = {
            source: held(
                [row for row in rows if row.source == source],
                factors | {basis: together([row for row in rows if row.source != source])},
            )
            for source in sources
            if len(sources) > 2
        }
        factors[basis] = replace(
            factors[basis],
            left_out={source: round(share, 2) for source, share in left_out.items()},
            coverage=round(statistics.mean(left_out.values()), 2) if left_out else None,
        )
    return factors


def together(rows: list[Row]) -> Factors:
    """Return the prediction interval of a row of a source nobody has seen: `simulator/calibration/intervals.py`.

    Steps that wait for their hosts, or may, do not count: how far speeds of hosts are off is learned by itself.
    """
    by_source: dict[str, list[float]] = defaultdict(list)
    mosts: dict[str, list[float]] = defaultdict(list)
    for row in (row for row in rows if max(row.host, row.by_host[BY_HOST.index(SLOWER)] - 1) < WAITS):
        by_source[row.source].append(math.log(row.ratio))
        mosts[row.source].append(math.log(row.most or row.ratio))
    k, counted = len(by_source), sum(map(len, by_source.values()))
    if k >= MANY:
        low, high = pooled(list(mosts.values()))[0], pooled(list(by_source.values()))[1]
        return Factors(low=round(low, 3), high=round(high, 3), sources=k, rows=counted, coverage=None, left_out={})
    means = np.array([np.mean(values) for values in by_source.values()])
    within = float(np.mean([np.var(values) for values in by_source.values() if len(values) > 1] or [0.0]))
    between = float(np.var(means, ddof=1))
    half = stats.t.ppf((1 + LEVEL) / 2, k - 1) * math.sqrt(between * (1 + 1 / k) + within)
    low, high = (math.exp(float(means.mean()) + sign * half) for sign in (-1, 1))
    return Factors(low=round(low, 3), high=round(high, 3), sources=k, rows=counted, coverage=None, left_out={})


def pooled(sources: list[list[float]]) -> tuple[float, float]:
    """Return the quantiles of a row of any source, each source's rows counting as one."""
    values = np.concatenate(sources)
    weights = np.concatenate([np.full(len(one), 1 / len(one) / len(sources)) for one in sources])
    order = np.argsort(values)
    below = np.cumsum(weights[order]) - weights[order] / 2
    low, high = (math.exp(float(np.interp((1 + sign * LEVEL) / 2, below, values[order]))) for sign in (-1, 1))
    return low, high


def held(rows: list[Row], factors: dict[str, Factors]) -> float:
    """Return the share of rows inside the range that the product gives them."""
    inside = []
    for row in rows:
        if row.basis in PARTS:
            low, high = factors[row.basis].low, factors[row.basis].high
            inside.append(low <= (row.most or row.ratio) and row.ratio <= high)
        else:
            low, high = step_factors(
                row.basis,
                row.shares,
                host=row.host,
                by_host=partial(np.interp, xp=BY_HOST, fp=row.by_host),
                calibrated=row.calibrated,
                factors=factors,
                host_measured=row.host_measured,
            )
            inside.append(low <= row.ratio <= high)
    return statistics.mean(inside)


def table(found: IntervalTable) -> str:
    lines = ["| rests on | sources | rows | low | high | held, source left out |", "|---|--:|--:|--:|--:|--:|"]
    for basis, one in found.factors.items():
        lines.append(f"| {basis} | {one.sources} | {one.rows} | {one.low} | {one.high} | {percent(one.coverage)} |")
    lines += ["", "| rests on | source | held by factors of the others |", "|---|---|--:|"]
    lines += [f"| {b} | {s} | {percent(v)} |" for b, one in found.factors.items() for s, v in one.left_out.items()]
    return "\n".join([*lines, "", *(f"held out, {name}: {percent(share)}" for name, share in found.held_out.items())])


def percent(share: Any) -> str:
    return "-" if share is None else f"{share:.0%}"


if __name__ == "__main__":
    main()
