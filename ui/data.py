"""What the pages show, asked of the same functions as the command line asks.

Nothing is decided here. Quick answers are cached by what was asked; searches and simulations run as jobs (`ui.jobs`).
Cached values are frozen, so they are shared between sessions as they are (`cache_resource`) instead of being copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from topology.errors import PlannerError
from ui import jobs, panels
from ui.charts.look import GIB, seconds
from ui.state import LISTED, Question, linked_choice, plan_name, results, source_of

if TYPE_CHECKING:
    from planner.cases import Case
    from planner.legality import Problem
    from planner.search import RankedPlan, SearchResult
    from simulator.estimate import Estimate
    from simulator.model import Model
    from simulator.plan import Plan
    from simulator.simulation import Simulated
    from topology.cluster import Cluster
    from topology.health import Health
    from ui.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A plan put together by hand: the case it makes, what the rules say, and its estimate where it is legal."""

    case: Case
    problems: tuple[Problem, ...]
    estimate: Estimate | None


# --- quick ------------------------------------------------------------------------------------------------------------


@st.cache_resource(max_entries=32, show_spinner=False)
def cluster(choice: str, gpus: int | None = None, gpu: str | None = None) -> Cluster:
    """Return what `planner probe --from` and `planner suggest --cluster` read. Raises PlannerError."""
    from planner.inputs import cluster_of  # noqa: PLC0415 - the first page loads only what it shows

    return cluster_of(source_of(choice), gpus, gpu=gpu)


@st.cache_resource(max_entries=32, show_spinner=False)
def model(choice: str) -> Model:
    from simulator.hf_config import load_model  # noqa: PLC0415 - as above

    return load_model(source_of(choice))


@st.cache_resource(max_entries=32, show_spinner=False)
def health(_cluster: Cluster, key: str) -> Health:
    """Return what `planner doctor` says of a cluster without measuring it. `key` is its fingerprint."""
    from topology.health import diagnose  # noqa: PLC0415 - as above

    del key
    return diagnose(_cluster)


def what_if(question: Question, flags: dict[str, Any], *, gpus: int, like: Plan | None = None) -> WhatIf:
    """Return what `planner estimate` answers to the flags of a plan. Raises PlannerError.

    Where the flags are those of the plan `like`, what no flag can say (recomputation stage by stage) is kept too.
    """
    from planner.cases import case_from_flags  # noqa: PLC0415 - as above
    from planner.commands.estimate import answer  # noqa: PLC0415 - as above

    case = case_from_flags(
        model=question.model_source,
        cluster=question.cluster_source,
        gpus=gpus,
        gpu=question.gpu,
        seq_len=question.seq_len,
        global_batch=question.global_batch,
        plan=flags,
        runtime={
            "name": "pytorch" if question.framework == "any" else question.framework,
            "compile": question.compile or None,
            "param_dtype": None,
        },
    )
    if like is not None:
        case = replace(case, plan=_with_unsaid(case.plan, like))
    problems, estimate = answer(case, None)
    return WhatIf(case=case, problems=problems, estimate=estimate)


def _with_unsaid(plan: Plan, like: Plan) -> Plan:
    """Return the plan with what no flag says taken from another one, as far as it still applies."""
    if plan.cp == like.cp:
        plan = replace(plan, cp_method=like.cp_method)
    if plan.ep == like.ep:
        plan = replace(plan, capacity_factor=like.capacity_factor)
    if plan.layers_per_stage == like.layers_per_stage and plan.recompute == like.recompute:
        plan = replace(plan, recompute_per_stage=like.recompute_per_stage)
    return plan


def rate_curves(result: SearchResult, plans: tuple[Plan, ...], quantity: str) -> list[dict[str, Any]]:
    """Return step seconds of `plans` where the network or NVLink is slower or faster than it is, factors 1/4 to 4.

    The same scaled clusters as the flip points are found on (`planner.flips`).
    """
    from planner.costs import cost_table  # noqa: PLC0415 - as above
    from planner.flips import KNOBS  # noqa: PLC0415 - as above

    knob = next(knob for knob in KNOBS if knob.quantity == quantity)
    now = knob.now(result.cluster)
    factors = [2.0 ** (exponent / 4) for exponent in range(-8, 9)]
    machines = [knob.scale(result.cluster, factor) for factor in factors]
    asked = [(factor, machine, plan) for factor, machine in zip(factors, machines, strict=True) for plan in plans]
    table = cost_table(
        result.model,
        result.cluster,
        result.workload,
        [plan for _, _, plan in asked],
        result.runtime,
        each_on=[machine for _, machine, _ in asked],
    )
    return [
        {"rate": now * factor, "plan": plan_name(plan), "step_s": float(table.step_s[row])}
        for row, (factor, _, plan) in enumerate(asked)
    ]


def knobs(result: SearchResult) -> list[tuple[str, float]]:
    """Return the link rates that can be turned on this machine: what, and what it is now in bytes/s."""
    from planner.flips import KNOBS  # noqa: PLC0415 - as above

    found = [(knob.quantity, knob.now(result.cluster)) for knob in KNOBS]
    return [(q, now) for q, now in found if now > 0 and not (q.startswith("network") and result.cluster.node_count < 2)]


# --- long -------------------------------------------------------------------------------------------------------------


def search(question: Question) -> SearchResult:
    """Return what `planner suggest` answers, or show progress and end the page. Raises PlannerError."""

    def work(progress: jobs.Progress) -> SearchResult:
        from planner.commands.suggest import Task, answer  # noqa: PLC0415 - as above

        return answer(
            model=question.model_source,
            cluster=question.cluster_source,
            gpu=question.gpu,
            gpus=str(question.gpus) if question.gpus else None,
            task=Task.TRAIN,
            seq_len=question.seq_len,
            global_batch=question.global_batch,
            framework=question.framework,
            objective=question.objective,
            top=LISTED,
            all_variants=False,
            runtime={"compile": question.compile or None, "param_dtype": None},
            bounds={},
            profile=None,
            progress=progress,
        )

    result: SearchResult = jobs.ask(
        "search", question.key, work, title="Searching all legal plans", meanwhile=lambda: _last_plans(question)
    )
    return result


def known_plans(question: Question, result: SearchResult) -> list[tuple[str, Estimate]]:
    """Return the plans of an earlier answer that are legal and fit in another question too, costed for it, best first."""
    from ui.rows import changed_flags, degrees_of  # noqa: PLC0415 - as above

    gpus = question.gpus or cluster(question.cluster, None, question.gpu).gpu_count
    found = []
    for ranked in result.plans:
        flags = changed_flags(ranked.plan, degrees_of(ranked.plan), ranked.plan.recompute)
        try:
            again = what_if(question, flags, gpus=gpus, like=ranked.plan)
        except PlannerError:
            continue
        if again.estimate is not None and again.estimate.memory.fits and again.case.plan.gpus == gpus:
            found.append((plan_name(again.case.plan), again.estimate))
    return sorted(found, key=lambda pair: pair[1].step_s.value)


def _last_plans(question: Question) -> None:
    """Show, while a search runs, what the plans of the last answer cost now: an answer within a second or two."""
    last = results().get("answer")
    found = known_plans(question, last[0]) if last else []
    if not found:
        return
    panels.section(
        "Meanwhile", "The plans of the last answer, costed for this question. The search may find better ones."
    )
    st.dataframe(
        [
            {
                "plan": name,
                "step": seconds(estimate.step_s.value),
                "tokens/s/GPU": f"{estimate.tokens_per_s_per_gpu:,.0f}",
                "MFU": f"{estimate.mfu:.1%}",
                "GiB": f"{estimate.memory.reserved_bytes / GIB:.1f}",
            }
            for name, estimate in found
        ],
        hide_index=True,
        width="stretch",
    )


def simulated(question: Question, result: SearchResult, ranked: RankedPlan) -> Simulated:
    """Return the simulated step of a plan, as `planner trace` writes it, or show progress and end the page."""

    def work(progress: jobs.Progress) -> Simulated:
        from simulator.simulation import simulate_plan  # noqa: PLC0415 - as above

        return simulate_plan(
            result.model, result.cluster, result.workload, ranked.plan, result.runtime, progress=progress
        )

    key = f"{question.key} {plan_name(ranked.plan)}"
    found: Simulated = jobs.ask("timeline", key, work, title="Simulating the step")
    return found


def chosen(result: SearchResult, name: str) -> RankedPlan:
    """Return the plan of the answer with this name, the best where there is none."""
    return next((ranked for ranked in result.plans if plan_name(ranked.plan) == name), result.plans[0])


# --- kept runs --------------------------------------------------------------------------------------------------------


def runs() -> tuple[Any, ...]:
    """Return the runs that `planner apply` kept on this machine, newest first. Raises PlannerError."""
    from planner.runs_store import list_runs  # noqa: PLC0415 - as above

    return list_runs(limit=500)


@st.cache_resource(max_entries=4, show_spinner=False)
def validation_rows(path: str, changed: float) -> tuple[dict[str, Any], ...]:
    """Return the compared rows of a file that `planner validate --json` wrote. `changed` is its modification time."""
    from topology import codec  # noqa: PLC0415 - as above

    del changed
    document = codec.read_json(Path(path))
    rows = document["rows"] if isinstance(document, dict) else []
    return tuple(row for row in rows if row.get("predicted") and not row.get("skipped"))


def plan_file_text(result: SearchResult, ranked: RankedPlan) -> str:
    """Return the plan file that `planner suggest --out` would write for this plan."""
    from planner.plan_file import plan_file  # noqa: PLC0415 - as above
    from topology import codec  # noqa: PLC0415 - as above

    content = plan_file(
        plan=ranked.plan,
        estimate=ranked.estimate,
        model=result.model,
        cluster=result.cluster,
        workload=result.workload,
        runtime=result.runtime,
        framework=result.framework.name,
    )
    return codec.to_json(content) + "\n"


def frame(asked: Question) -> None:
    """Find the answer that a page is about to show, and let a menu choose one of its plans."""
    result = search(asked)
    names = [plan_name(ranked.plan) for ranked in result.plans]
    name = linked_choice("Plan", names, names[0], "plan", "The best first; every page shows this one.")
    results()["answer"] = (result, chosen(result, name))


def answer() -> tuple[SearchResult, RankedPlan]:
    """Return the answer and the chosen plan that the frame found before it ran the page."""
    found: tuple[SearchResult, RankedPlan] = results()["answer"]
    return found


def question() -> Question:
    """Return the question that the frame read from the sidebar."""
    asked: Question = results()["question"]
    return asked


# --- traces and files -------------------------------------------------------------------------------------------------


def columns_of(found: Simulated, key: str) -> Timeline:
    """Return the spans of a simulated step as columns, worked out once a session."""
    from ui.timeline import timeline  # noqa: PLC0415 - as above

    kept: dict[str, Timeline] = results().setdefault("columns", {})
    if key not in kept:
        kept.clear()  # one at a time: a long trace has tens of megabytes
        kept[key] = timeline(found.run.trace)
    return kept[key]


def trace_text(found: Simulated) -> str:
    """Return the trace file that `planner trace --out` would write."""
    from simulator.chrome import to_chrome  # noqa: PLC0415 - as above
    from topology import codec  # noqa: PLC0415 - as above

    return codec.to_json(to_chrome(found.run.trace), indent=None)


def export_targets() -> tuple[Any, ...]:
    """Return the tools that plans can be written for; none where this version has no exporters."""
    if find_spec("planner.export") is None:
        return ()
    return tuple(import_module("planner.export.registry").TARGETS)


def exported(result: SearchResult, ranked: RankedPlan, target: Any) -> Any:
    """Return the file that `planner export --to` would write. Raises Infeasible where the tool has no such plan."""
    job = import_module("planner.export.job").Job(
        name=result.model.name,
        plan=ranked.plan,
        model=result.model,
        cluster=result.cluster,
        workload=result.workload,
        runtime=result.runtime,
        framework=result.framework.name,
    )
    return import_module("planner.export.registry").export(job, target)
