"""The answers of `planner suggest` and `planner estimate` as text: a sentence with the answer, a table, the reasons,
how to start it, and then what it is based on. The first of these fit a screen of 80 columns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.explain.plan_answer import PlanAnswer
from planner.explain.tables import (
    basis_lines,
    changed_lines,
    cluster_line,
    flip_text,
    memory_line,
    model_line,
    parts_line,
    print_lines,
    runtime_line,
    search_line,
    vendor_text,
    workload_line,
)
from planner.io.figures import change_text, count_text, gib_text, interval_text, last_digit_s, rate_text, seconds_text
from planner.io.grids import console, grid
from planner.io.plan_words import (
    approach_text,
    degrees_text,
    differences_text,
    plan_in_words,
    plan_settings,
    policy_text,
    short_degrees,
    special_text,
)
from planner.io.printable import printable
from planner.question.question import Question
from planner.search.fixes import memory_text
from planner.search.result import TIED, GpuCountRow, MayFit, RankedPlan, SearchResult, places
from simulator.config.estimate import SURE, Estimate, Fit, chance
from simulator.config.plan import Plan
from topology.units import two_digits

NARROW, NARROWEST = 70, 54  # columns below which the table of plans has fewer columns
LEAST_GAIN = 0.01  # least gain, as a share of the step, for which a plan that may not fit is mentioned


def print_search(result: SearchResult, *, out: str | None) -> None:
    """Print the answer of `planner suggest`."""
    best, question = result.plans[0], result.question
    sentences = [answer_sentence(best), question_line(question, best.plan)]
    likely = [one for one in result.likely if one.faster >= LEAST_GAIN]
    if result.may_fit is not None and likely:
        sentences.append(may_fit_sentence(result.may_fit, best))
    if best.fixes:
        sentences.append(f"No plan surely fits. Of #1: {memory_text(best.estimate, best.fixes, best.plan.gpus)}.")
    print_lines(console(), sentences, hanging="")
    print()
    print_plans(result.plans, question, likely)
    print_gpu_counts(result.by_gpus)
    why = [f"#{ranked.rank:<8} {ranked.lost_because}" for ranked in result.plans[1:]]
    flips: dict[str, list[str]] = {}
    for ranked in result.plans:
        for flip in ranked.flips:
            flips.setdefault(vendor_text(flip_text(flip), question.cluster), []).append(f"#{ranked.rank}")
    print()
    print_lines(console(), [*why, *run_lines(best.plan, question, out), *_other_batch_lines(result)])
    if best.cost_per_million_tokens is not None and not result.by_gpus:
        print_lines(console(), [f"cost      {best.cost_per_million_tokens:.3g} per million tokens, at the given price"])
    print()
    notes = [f"note      [{problem.grade}] {problem.message}" for problem in best.problems]
    flip_lines = [f"flip      {', '.join(ranks)}: {'each ' * (len(ranks) > 1)}{text}" for text, ranks in flips.items()]
    print_lines(console(), [*flip_lines, ""] if flip_lines else [])
    lines = [*notes, *question_lines(question), *assumed_lines(result.assumed)]
    basis = basis_lines(best.estimate, best.method, question, best.plan.gpus)
    lines += [parts_line(best.estimate), memory_line(best.estimate), *basis]
    print_lines(console(), [*lines, f"searched  {search_line(result)}"])


def print_estimate(found: PlanAnswer) -> None:
    """Print the answer of `planner estimate` for one plan."""
    case, question, plan, estimate = found.case, found.case.question, found.case.plan, found.estimate
    problems = [f"{problem.grade!s:9} {problem.message}" for problem in found.problems]
    asked = [f"plan      {degrees_text(plan)}; {policy_text(plan)}", *changed_lines(case.changed)]
    if estimate is None or found.method is None:
        print_lines(console(), ["Not legal: nothing to estimate.", *problems, f"case      {case.id}", *asked])
        print_lines(console(), [*question_lines(question), *assumed_lines(case.assumed)])
        return
    memory = memory_text(estimate, found.fixes, plan.gpus)
    rates = f"{rate_text(estimate)} tokens/s/GPU, MFU {estimate.mfu:.0%}"
    tokens = tokens_text(estimate, plan)
    step = f"about {interval_text(estimate.step_s)} a step of {tokens} tokens"
    sentence = f"{_capital(approach_text(plan))}: {step}, {rates}."
    print_lines(console(), [sentence, f"Memory {memory}."], hanging="")
    print()
    setting = [*problems, batch_line(plan, question), order_line(plan, question)]
    print_lines(console(), [f"case      {case.id}", *asked, *setting])
    print_lines(console(), [parts_line(estimate), memory_line(estimate)])
    print()
    basis = basis_lines(estimate, found.method, question, plan.gpus)
    print_lines(console(), [*question_lines(question), *assumed_lines(case.assumed), *basis])


# --- sentences --------------------------------------------------------------------------------------------------------


def answer_sentence(best: RankedPlan) -> str:
    """Return the sentence with the answer: the plan, its step time, and its memory."""
    memory = best.estimate.memory
    needs = f"{gib_text(memory.reserved_bytes)} GiB of {gib_text(memory.capacity_bytes)}"
    if memory.fit is not Fit.YES:
        needs += f": {memory.verdict}"
    settings = (
        f", recompute {best.plan.recompute}"
        if best.plan.recompute != "none" and not best.plan.recompute_per_stage
        else ""
    )
    step = f"about {interval_text(best.estimate.step_s)} a step of {tokens_text(best.estimate, best.plan)} tokens"
    return f"Use {approach_text(best.plan)}{settings}: {step}, {needs}."


def tokens_text(estimate: Estimate, plan: Plan) -> str:
    """Return the tokens of a step to two digits: `4.2M`, `33k`."""
    return count_text(estimate.tokens_per_gpu * plan.gpus)


def may_fit_sentence(found: MayFit, best: RankedPlan) -> str:
    """Return a sentence on the fastest plan that may fit: its gain over the first, which surely fits, and the
    differences.
    """
    plan, memory = found.plan, found.estimate.memory
    if approach_text(plan) == approach_text(best.plan):
        what = f"The same with {differences_text(best.plan, plan)}"
    else:
        what = f"{_capital(approach_text(plan))} ({plan_settings(plan)})"
    needs = f"{gib_text(memory.reserved_bytes)} GiB of {gib_text(memory.capacity_bytes)}"
    return (
        f"{what} would take {found.faster:.0%} less time and is {chance(found.fit_probability)} likely to fit: {needs}."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def question_line(question: Question, plan: Plan) -> str:
    """Return the question in a line: model, batch, machine, software."""
    workload, cluster = question.workload, question.cluster
    sequences = f"{workload.global_batch_size:,} sequence{'s' * (workload.global_batch_size > 1)}"
    return (
        f"{question.model.name}, {sequences} of {workload.seq_len:,} tokens a step,"
        f" on {plan.gpus:,} x {cluster.slowest_kind.title} ({cluster.name}) in {question.framework.title}."
    )


def batch_line(plan: Plan, question: Question) -> str:
    """Return how micro batches make up the global batch, by gradient accumulation."""
    workload = question.workload
    turns = plan.micro_batches(workload.global_batch_size)
    kind = "micro batches" if plan.pp > 1 else "accumulated micro batches"
    ranks = f"{plan.data_parallel:,} data-parallel ranks x " if plan.data_parallel > 1 else ""
    each = f"{turns} {kind} x " if turns > 1 else ""
    size = f"{plan.micro_batch_size} sequence{'s' * (plan.micro_batch_size > 1)}"
    if not ranks and not each:
        return f"batch     {size} at once"
    return f"batch     {workload.global_batch_size:,} = {ranks}{each}{size}"


def order_line(plan: Plan, question: Question) -> str:
    """Return a sentence on which rank runs on which GPU."""
    if not plan.placement or plan.placement == tuple(range(plan.gpus)):
        return "order     ranks in the order of the GPUs"
    order = f"rank by rank: {', '.join(map(str, plan.placement[:16]))}" + (", ..." if plan.gpus > 16 else "")
    return f"order     GPUs {order}" + (" (CUDA_VISIBLE_DEVICES)" if question.cluster.node_count == 1 else "")


def run_lines(plan: Plan, question: Question, out: str | None) -> list[str]:
    """Return lines on how to start a plan: micro batches, the order of the GPUs, and commands."""
    start = f"planner export {out or 'plan.json'} --to {question.framework.tools.export}"
    saved = f"saved     {out}" if out else None
    save = "" if out else "add --out plan.json, then: "
    lines = [batch_line(plan, question), order_line(plan, question), saved, f"start     {save}{start}"]
    return [line for line in lines if line]


# --- tables -----------------------------------------------------------------------------------------------------------


def _other_batch_lines(result: SearchResult) -> list[str]:
    other = result.other_batch
    if other is None:
        return []
    rate = f"about {two_digits(other.tokens_per_s_per_gpu)} tokens/s/GPU ({change_text(other.gain)}), fits"
    said = f"--global-batch {other.global_batch_size}, which the GPUs divide: {plan_in_words(other.plan)}"
    return [f"instead   {said}, {rate}"]


def print_plans(plans: Sequence[RankedPlan], question: Question, likely: Sequence[MayFit] = ()) -> None:
    """Print the ranked plans in at most 80 columns, tied ones marked, and below them the `likely` faster ones."""
    # A narrow screen has room only for the plans and the figures that decide.
    width = console().width
    left_out = {"tok/s/GPU", "MFU"} if width < NARROW else set()
    left_out |= {"micro", "recompute"} if width < NARROWEST else set()
    last_s = min(last_digit_s(ranked.estimate.step_s) for ranked in plans)
    unit = seconds_text(0.0, last_s).split()[1]
    headings = [
        one
        for one in ("#", "plan", "micro", "recompute", f"step {unit}", "tok/s/GPU", "MFU", "GiB", "fits")
        if one not in left_out
    ]
    table = grid(headings, text=("#", "plan", "micro", "recompute"))
    for column in table.columns:
        column.no_wrap = column.header != "plan"
    marks = places(plans)
    others = [one for one in likely if all(one.plan != listed.plan for listed in plans)]
    shown: list[tuple[str, RankedPlan | MayFit]] = [*zip(marks, plans, strict=True), *(("?", one) for one in others)]
    for mark, row in shown:
        plan, estimate = row.plan, row.estimate
        settings = special_text(plan)
        recompute = (
            f"{len(set(plan.recompute_per_stage))} kinds by stage" if plan.recompute_per_stage else plan.recompute
        )
        cells = {
            "#": mark,
            "plan": short_degrees(plan) + (f"; {settings}" if settings else ""),
            "micro": f"{plan.micro_batches(question.workload.global_batch_size)} x {plan.micro_batch_size}",
            "recompute": recompute,
            f"step {unit}": seconds_text(estimate.step_s.value, last_s).split()[0],
            "tok/s/GPU": rate_text(estimate),
            "MFU": f"{estimate.mfu:.0%}",
            "GiB": gib_text(estimate.memory.reserved_bytes),
            "fits": fits_text(estimate),
        }
        table.add_row(*(cells[heading] for heading in headings))
    console().print(table)
    legend = [f"= {TIED}"] if any("=" in mark for mark in marks) else []
    legend += ["? faster than #1, but may not fit"] if others else []
    print_lines(console(), legend)


def fits_text(estimate: Estimate) -> str:
    """Return whether a plan fits, as a word or a probability."""
    memory = estimate.memory
    return {Fit.YES: "yes", Fit.NO: "no"}.get(memory.fit) or chance(memory.fit_probability)


def _chance_text(probability: float | None) -> str:
    """Return as a word how certainly the best plan on a number of GPUs fits."""
    return "-" if probability is None else "yes" if probability >= SURE else chance(probability)


def print_gpu_counts(rows: Sequence[GpuCountRow]) -> None:
    """Print the best plan for each number of GPUs, if several were compared."""
    if not rows:
        return
    print()
    has_cost = any(row.cost_per_million_tokens is not None for row in rows)
    cost = ["cost / M tokens"] if has_cost else []
    table = grid(("GPUs", "step s", "tok/s/GPU", "GiB", "fits", *cost, "plan"), text=("plan",))
    for row in rows:
        if row.plan is None or row.step_s is None:
            table.add_row(str(row.gpus), *["-"] * (4 + has_cost), printable(row.problem))
            continue
        cost = [f"{row.cost_per_million_tokens:.3g}"] if row.cost_per_million_tokens is not None else []
        table.add_row(
            str(row.gpus),
            two_digits(row.step_s),
            two_digits(row.tokens_per_s_per_gpu or 0.0),
            gib_text(row.reserved_bytes or 0.0),
            _chance_text(row.fit_probability),
            *cost,
            short_degrees(row.plan),
        )
    console().print(table)


# --- what the answer rests on -----------------------------------------------------------------------------------------


def question_lines(question: Question) -> list[str]:
    """Return the question, line by line."""
    return [
        f"cluster   {cluster_line(question.cluster)}",
        f"model     {model_line(question.model)}",
        f"workload  {workload_line(question.workload)}",
        f"runtime   {runtime_line(question.runtime, question.software)}",
    ]


DEFAULT = re.compile(r"(?:runtime\.|plan\.)?(\w+) = (.+) \(([^()]+ default)\)")


DEFAULT_WORDS = {
    "param_dtype": "parameters in {}",
    "compute_dtype": "compute in {}",
    "reduce_dtype": "gradients reduced in {}",
    "optimizer": "optimizer {}",
}


def _default_words(name: str, value: str) -> str:
    if name == "compile":
        return "compiled" if value == "True" else "not compiled"
    return DEFAULT_WORDS.get(name, f"{name.replace('_', ' ')} {{}}").format(value)


def assumed_parts(assumed: Sequence[str]) -> list[str]:
    """Return the assumptions, each once, with the defaults of a runtime together."""
    defaults: dict[str, list[str]] = {}
    others = []
    for line in dict.fromkeys(assumed):
        match = DEFAULT.fullmatch(line)
        if match:
            name, value, whose = match.groups()
            defaults.setdefault(whose, []).append(_default_words(name, value))
        else:
            others.append(line)
    return [*others, *(f"{whose}s: {', '.join(values)}" for whose, values in defaults.items())]


def assumed_lines(assumed: Sequence[str]) -> list[str]:
    """Return one line with all assumptions; no line without any."""
    parts = assumed_parts(assumed)
    return [f"assumed   {'; '.join(parts)}"] if parts else []
