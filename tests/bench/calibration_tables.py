"""How well a calibrated prediction holds, what each effect is worth, and what a shorter calibration loses.

Run as `python -m tests.bench.calibration_tables OUT.md PROFILE CASES.json...`. Four tables: the cases with the profile;
the same with one effect left out at a time; shapes, sizes and pairs that a fit has not seen; and the profile cut to
what a shorter budget would have measured. Cases are read and never fitted to.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.question.cases import Case, load_case
from planner.question.question import question_of
from planner.validate.validation import measured_step_s
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.calibration.calibration import Calibration, without
from simulator.collectives.cost import CollectiveModel
from simulator.collectives.measured import MeasuredCollectives
from simulator.fitting.calibration_fit import fit_errors
from simulator.fitting.calibrations import Calibrations
from simulator.fitting.operator_fit import fit_attention, fit_matmul
from simulator.legality.rules import is_legal
from topology.catalog.cluster_file import load_cluster
from topology.profile.profile import Profile, read_profile
from topology.rates.groups import GroupShape

GIB = 2.0**30
EFFECTS = {
    "all counted": {},
    "kernels as the datasheet has them": {"operators": False},
    "no host and data time": {"host": False},
    "no contention": {"contention": False},
    "clocks of a rested GPU": {"sustained": False},
    "no copying in and out of FSDP's buffers": {"packing": False},
}
OPERATORS_PER_S = 719 / 122  # of the measurement in examples/profiles: 719 operators in 122 s


def read_cases(files: list[str]) -> list[Case]:
    cases = [load_case(raw) for name in files for raw in json.loads(Path(name).read_text("utf-8"))]
    return [
        c
        for c in cases
        if is_legal(
            question_of(
                c.question.model,
                c.question.cluster,
                c.question.workload,
                framework=c.question.framework,
                runtime=c.question.runtime,
            ).problems(c.plan)
        )
    ]


def estimate(case: Case, calibration: Calibration | None) -> Any:
    scenario = Scenario(
        model=case.question.model,
        cluster=case.question.cluster,
        workload=case.question.workload,
        runtime=case.question.runtime,
        calibration=calibration,
    )
    return estimate_plans(scenario, [case.plan]).estimate(0)


def step_errors(cases: list[Case], predict: Callable[[Case], Any]) -> dict[str, float]:
    """Return signed errors of the step time by case."""
    found = {}
    for case in cases:
        measured, _ = measured_step_s(case)
        if measured is not None:
            found[case.id] = predict(case).step_s.value / measured - 1
    return found


def summary(errors: dict[str, float]) -> str:
    values = np.array(list(errors.values()))
    return f"{np.mean(np.abs(values)):.1%} | {np.mean(values):+.1%} | {values[np.argmax(np.abs(values))]:+.1%}"


def case_lines(cases: list[Case], known: Calibrations) -> list[str]:
    lines = [
        "| case | predicted s | measured s | error | interval | inside | reserved memory | measured / fitted / other |",
        "|---|--:|--:|--:|--:|---|--:|--:|",
    ]
    for case in cases:
        found, (measured, _) = estimate(case, known.on(case.question.cluster)), measured_step_s(case)
        step, sources = found.step_s, found.sources
        peak = case.measured.get("peak_memory_gib")
        rank = case.measured.get("memory_rank") or 0
        reserved = found.memory.reserved_by_stage[rank // (case.plan.gpus // case.plan.pp)]
        memory = f"{reserved / (peak * GIB) - 1:+.1%}" if peak else "fits" if found.memory.fits else "does not fit"
        other = 1 - sources["measured"] - sources["fitted"]
        rest = [
            f"{step.value / measured - 1:+.1%}" if measured else "-",
            f"±{step.high / step.value - 1:.0%}",
            ("yes" if step.low <= measured <= step.high else "no") if measured else "-",
            memory,
            f"{sources['measured']:.0%} / {sources['fitted']:.0%} / {abs(other):.0%}",
        ]
        lines.append(
            f"| {case.id} | {step.value:.4g} | {f'{measured:.4g}' if measured else '-'} | " + " | ".join(rest) + " |"
        )
    return lines


def effect_lines(cases: list[Case], profile: Profile, known: Calibrations) -> list[str]:
    lines = ["| counted | mean absolute error | bias | worst |", "|---|--:|--:|--:|"]
    for name, off in EFFECTS.items():

        def predict(case: Case, off: dict[str, bool] = off) -> Any:
            whole = known.on(case.question.cluster)
            return estimate(case, without(whole, **off) if whole is not None else None)

        lines.append(f"| {name} | {summary(step_errors(cases, predict))} |")
    collectives = Calibrations(replace(profile, operators=(), host=(), contention=(), layers=(), overlap=()))
    plain = step_errors(cases, lambda case: estimate(case, collectives.on(case.question.cluster)))
    lines.append(f"| nothing measured but collectives | {summary(plain)} |")
    memory = defaultdict(list)
    for case in cases:
        peak, found = case.measured.get("peak_memory_gib"), estimate(case, known.on(case.question.cluster)).memory
        if peak and case.plan.pp == 1:
            memory["reserved"].append(abs(found.reserved_bytes / (peak * GIB) - 1))
            memory["allocated"].append(abs(found.peak_bytes.value / (peak * GIB) - 1))
    lines += [
        "",
        f"Reserved memory, cases without a pipeline: mean absolute error {np.mean(memory['reserved']):.1%};",
        f"without the allocator, allocated bytes taken for reserved ones, {np.mean(memory['allocated']):.1%}.",
    ]
    return lines


def unseen_lines(profile: Profile) -> list[str]:
    lines = ["| what | fitted on | predicted | mean absolute error |", "|---|---|--:|--:|"]
    lines += [f"| {e.what} | all but the one | {e.samples} | {e.mean_abs:.1%} |" for e in fit_errors(profile)]
    lines += [*_unseen_widths(profile), *_unseen_sizes(profile)]
    return lines


def _unseen_widths(profile: Profile) -> list[str]:
    """Layers of 3072 and 5120 predicted from those of 2048, 4096 and 8192: no size of theirs was seen."""
    products = [s for s in profile.operators if s.kind == "matmul" and s.regime == "sustained" and not s.invalid]
    unseen = {3072, 5120, 13824, 1536, 2560}

    def new(sample: Any) -> bool:
        return bool(unseen & set(sample.shape.values()))

    curve = fit_matmul([s for s in products if not new(s)], sms=132.0, bytes_per_s=4.25e12, element_bytes=2.0)
    errors = []
    for s in filter(new, products):
        sizes = [np.array([float(s.shape.get(axis, 1))]) for axis in ("m", "n", "k", "batch")]
        errors.append(abs(float(curve.seconds(*sizes, s.direction)[0]) / s.seconds - 1))
    lines = [f"| matmul | widths 2048, 4096, 8192, not 3072 and 5120 | {len(errors)} | {np.mean(errors):.1%} |"]
    attention = [s for s in profile.operators if s.kind == "attention" and s.shape["d"] == 128 and not s.invalid]
    errors = []
    for direction in ("forward", "backward"):
        group = [s for s in attention if s.direction == direction]
        fitted = fit_attention([s for s in group if s.shape["a"] not in {24, 40, 12, 20}])
        for s in group:
            if s.shape["a"] in {24, 40, 12, 20}:
                flops = 4.0 * s.shape["b"] * s.shape["a"] * s.shape["s"] * (s.shape["S"] + 1) / 2 * s.shape["d"]
                flops *= 2.5 if direction == "backward" else 1.0
                values = (flops, s.shape["s"], s.shape["S"], s.shape["b"] * s.shape["a"])
                predicted = fitted.seconds(*(np.array([float(value)]) for value in values))[0]
                errors.append(abs(float(predicted) / s.seconds - 1))
    lines.append(
        f"| attention | 8, 16, 32 and 64 heads, not 12, 20, 24 and 40 | {len(errors)} | {np.mean(errors):.1%} |"
    )
    return lines


def _unseen_sizes(profile: Profile) -> list[str]:
    """Collectives at every second size predicted from the others."""
    if not profile.collectives:
        return []
    cluster = load_cluster("h200x4")
    errors = []
    for op, ranks in dict.fromkeys((s.op, s.ranks) for s in profile.collectives):
        mine = [s for s in profile.collectives if (s.op, s.ranks) == (op, ranks) and s.launch in {"queued", "graph"}]
        sizes = sorted({s.nbytes for s in mine})
        known = set(sizes[::2])
        rest = tuple(s for s in profile.collectives if (s.op, s.ranks) != (op, ranks) or s.nbytes in known)
        model = CollectiveModel(cluster, measured=MeasuredCollectives(rest))
        shape = GroupShape(ranks=ranks, ranks_per_node=ranks)
        for size in sizes[1::2]:
            measured = float(np.median([s.time_s for s in mine if s.nbytes == size]))
            errors.append(abs(float(model.time_s(op, np.array([float(size)]), shape)[0]) / measured - 1))
    return [f"| collectives | every second size | {len(errors)} | {np.mean(errors):.1%} |"]


def budget_lines(cases: list[Case], profile: Profile) -> list[str]:
    lines = [
        "| operators measured | as many as fit into | cases: mean absolute error | bias | worst |",
        "|--:|---|--:|--:|--:|",
    ]
    for seconds in (15, 30, 60, 122):
        count = round(OPERATORS_PER_S * seconds)
        cut = replace(profile, operators=profile.operators[:count])
        known = Calibrations(cut)
        errors = step_errors(cases, lambda case, known=known: estimate(case, known.on(case.question.cluster)))
        lines.append(f"| {min(count, len(profile.operators))} | {seconds} s | {summary(errors)} |")
    bare = Calibrations(replace(profile, layers=()))
    errors = step_errors(cases, lambda case: estimate(case, bare.on(case.question.cluster)))
    lines.append(f"| {len(profile.operators)} | 122 s, and no layers | {summary(errors)} |")
    return lines


def main(out: Path, profile_path: str, files: list[str]) -> None:
    """Write the tables."""
    profile = read_profile(profile_path)
    cases, known = read_cases(files), Calibrations(profile)
    errors = step_errors(cases, lambda case: estimate(case, known.on(case.question.cluster)))
    names = ", ".join(Path(name).name for name in files)
    lines = [
        "# Calibrated predictions",
        "",
        f"Made on {dt.datetime.now(tz=dt.UTC):%Y-%m-%d} by `python -m tests.bench.calibration_tables` with the profile",
        f"`{Path(profile_path).name}` ({len(profile.operators)} operators, {len(profile.layers)} steps of one and two",
        f"layers, {len(profile.collectives)} collectives; driver {profile.driver}) on {names}. No step of full depth was",
        "looked at for the fit. Errors are predicted / measured - 1.",
        "",
        "## Step time and memory",
        "",
        f"Mean absolute error, bias and worst of step time: {summary(errors).replace(' | ', ', ')}.",
        "",
        *case_lines(cases, known),
        "",
        "## What each effect is worth",
        "",
        "One effect left out at a time, nothing fitted again.",
        "",
        *effect_lines(cases, profile, known),
        "",
        "## What a fit has not seen",
        "",
        *unseen_lines(profile),
        "",
        "## Shorter calibrations",
        "",
        "The same profile cut to the operators that a budget would have measured, in the order in which they are measured;",
        "layers, contention and collectives as they are.",
        "",
        *budget_lines(cases, profile),
    ]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("profile")
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    main(options.out, options.profile, options.cases)
