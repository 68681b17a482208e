"""A whole training run: its days, money and energy, and the number of GPUs for a deadline or a budget.

More GPUs finish sooner and cost more, since each of them does less. So the cheapest number within a deadline is the
smallest that meets it, and the fastest within a budget the largest that it pays for. Numbers are tried by doubling, and
then between the last two; the batch is unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from planner.io.inputs import read_cluster
from planner.question.cases import DEFAULT_CLUSTER
from planner.question.flags import Flags
from planner.question.goal import Goal
from planner.question.question import Question
from planner.search.answer import answer, search_question
from planner.search.deadline import NOT_EXPLAINED, NOT_TRIED, deadline_of, left_s, over
from planner.search.gpu_counts import objective_value
from planner.search.result import SearchResult
from planner.search.run_failures import run_time
from planner.search.search import SearchOptions, explained
from planner.search.sizes import MAX_GPUS, min_gpus_for_state, most_gpus
from simulator.bounds.screening import Screening
from simulator.config.estimate import Interval
from simulator.config.plan import Plan
from simulator.fitting.calibrations import UNMEASURED, Calibrations
from topology.cluster import GpuKind
from topology.errors import Infeasible, UserError

HOUR_S, DAY_S = 3600.0, 86400.0
MOST_GPUS = 1 << 17  # largest number tried
BETWEEN = (1.25, 1.5, 1.75)  # numbers tried between the last two, as multiples of the smaller
USELESS = 2  # numbers in a row without a shorter run or, above the budget, a cheaper one, after which the search ends


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """A run of `steps` steps on `gpus` GPUs; if there is no plan, `problem` gives the reason and the rest is empty.

    `steps_s` are its steps alone. All else is of the whole time, with failures, restarts and checkpoints, which come
    every `checkpoint_interval_s` of steps; `lost_s` is time without useful steps, `goodput` the share of the time with
    them, and `waiting` the share in which more nodes are out than there are spares, whose hours are among `gpu_hours`.
    Ranges hold 80 %. `energy_j` is that of the GPUs at `power_w` each, the limit of their datasheet: hosts, network and
    cooling are not in it. The cost is in the currency of the price given.
    """

    gpus: int
    plan: Plan | None = None
    steps: float = 0.0
    days: Interval | None = None
    gpu_hours: Interval | None = None
    cost: Interval | None = None
    steps_s: Interval | None = None
    goodput: Interval | None = None
    checkpoint_interval_s: Interval | None = None
    lost_s: Interval | None = None
    checkpoint_bytes: float = 0.0
    failures: float = 0.0
    waiting: float = 0.0
    assumed: tuple[str, ...] = ()
    power_w: float = 0.0
    power_source: str = ""
    energy_j: float | None = None
    problem: str = ""

    @property
    def seconds(self) -> float:
        """How long it is expected to take: infinite without a plan."""
        return math.inf if self.days is None else self.days.value * DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAnswer:
    """The plan for a whole run, the run itself, and the runs on all numbers of GPUs tried, in order."""

    result: SearchResult
    goal: Goal
    run: WholeRun
    curve: tuple[WholeRun, ...] = ()


def answer_run(
    flags: Flags,
    framework: str | None,
    options: SearchOptions,
    goal: Goal,
    *,
    measured: Calibrations = UNMEASURED,
    progress: Callable[[str], None] | None = None,
) -> RunAnswer:
    """Return the best plan for a whole run: on the numbers of GPUs that `flags` name, or on the one that the goal
    needs.

    Raises Infeasible (exit 3) where no number tried meets the goal, and errors of the named inputs.
    """
    numbers = flags.gpus or ()
    if len(numbers) < 2 and not goal.seeks_count:
        result = answer(flags, framework, options, measured=measured, progress=progress)
        return RunAnswer(result=result, goal=goal, run=whole_run(result, goal))
    question, assumed = search_question(flags, framework, measured)
    # The batch is the question's for all numbers of GPUs; otherwise they would not train the same model.
    fixed = replace(flags, global_batch=question.workload.global_batch_size)

    deadline = deadline_of(options.time_limit_s)

    def search(gpus: int) -> SearchResult:
        if counts.results and over(deadline):
            raise Infeasible(NOT_TRIED)
        quick = replace(options, reasons=False, time_limit_s=left_s(deadline))
        return answer(replace(fixed, gpus=(gpus,)), framework, quick, measured=measured, progress=progress)

    most = most_gpus(question.cluster, lambda n: read_cluster(flags.cluster or DEFAULT_CLUSTER, n, gpu=flags.gpu))
    counts = Counts(question=question, goal=goal, search=search, most=most if most < MAX_GPUS else MOST_GPUS)
    found = compare_counts(counts, numbers, options.objective) if numbers else seek_count(counts)
    late = (NOT_EXPLAINED,) if over(deadline) else ()
    result = found.result if late else explained(found.result, options)
    said = [*result.assumed, *late, *assumed, *_uneven(counts)]
    return replace(found, result=replace(result, assumed=tuple(dict.fromkeys(said))))


def whole_run(result: SearchResult, goal: Goal) -> WholeRun:
    """Return the run by the best plan of `result`."""
    best = result.plans[0]
    return _run_of(result.question, goal, best.plan, best.estimate.step_s)


def runs_of_counts(result: SearchResult, goal: Goal) -> tuple[WholeRun, ...]:
    """Return the runs on all numbers of GPUs that a result compares, with the range of its first plan's step."""
    first = result.plans[0].estimate.step_s
    rows = [(row.plan, row.step_s) for row in result.by_gpus]
    return tuple(
        _run_of(result.question, goal, plan, first.at(step_s)) for plan, step_s in rows if plan and step_s is not None
    )


def _run_of(question: Question, goal: Goal, plan: Plan, step: Interval) -> WholeRun:
    gpus = plan.gpus
    steps = goal.tokens / question.workload.tokens_per_step
    alone = step.at(steps * step.value)
    time = run_time(question, goal, gpus, alone)
    days = time.total_s.at(time.total_s.value / DAY_S)
    paid = gpus + goal.spare_nodes * question.cluster.gpus_per_node
    gpu_hours = days.at(days.value * paid * DAY_S / HOUR_S)
    kind, price = question.cluster.slowest_kind, goal.gpu_price_per_hour
    return WholeRun(
        gpus=gpus,
        plan=plan,
        steps=steps,
        days=days,
        gpu_hours=gpu_hours,
        cost=None if price is None else gpu_hours.at(gpu_hours.value * price),
        steps_s=alone,
        goodput=time.goodput,
        checkpoint_interval_s=time.checkpoint_interval_s,
        lost_s=time.lost_s,
        checkpoint_bytes=time.checkpoint_bytes,
        failures=time.failures,
        waiting=time.waiting,
        assumed=time.assumed,
        power_w=kind.power_w,
        power_source=_power_source(kind),
        energy_j=gpu_hours.value * HOUR_S * kind.power_w if kind.power_w else None,
    )


def _power_source(kind: GpuKind) -> str:
    return kind.sources.get("power_w", "not stated") if kind.power_w else ""


def _uneven(counts: Counts) -> list[str]:
    """Say which of the compared numbers of GPUs do not divide the batch, if any."""
    batch = counts.question.workload.global_batch_size
    odd = [str(gpus) for gpus in sorted(counts.results) if gpus < batch and batch % gpus]
    if not odd or len(counts.results) < 2:
        return []
    numbers = ", ".join(odd)
    return [f"{batch:,} sequences a step on every number of GPUs, and {numbers} do not divide them (--global-batch)"]


@dataclass(slots=True)
class Counts:
    """Searches for the best plan on one number of GPUs after the other, up to `most`: all of a stated cluster."""

    question: Question
    goal: Goal
    search: Callable[[int], SearchResult]
    most: int = MOST_GPUS
    results: dict[int, SearchResult] = field(default_factory=dict)
    runs: dict[int, WholeRun] = field(default_factory=dict)

    def run(self, gpus: int) -> WholeRun:
        """Return the run on a number of GPUs."""
        if gpus not in self.runs:
            self.runs[gpus] = self._run(gpus)
        return self.runs[gpus]

    def _run(self, gpus: int) -> WholeRun:
        try:
            self.results[gpus] = self.search(gpus)
            return whole_run(self.results[gpus], self.goal)
        except (Infeasible, UserError) as error:
            return WholeRun(gpus=gpus, problem=error.what)

    @property
    def more_nodes(self) -> str:
        """Return the remedy of a larger cluster, where it is the stated one that ends the numbers tried."""
        if self.most == MOST_GPUS:
            return ""
        return f", or more nodes (--cluster states {self.question.cluster.node_count}, of {self.most} GPUs)"

    def answer(self, gpus: int) -> RunAnswer:
        curve = tuple(self.runs[count] for count in sorted(self.runs))
        return RunAnswer(result=self.results[gpus], goal=self.goal, run=self.runs[gpus], curve=curve)


def compare_counts(counts: Counts, numbers: tuple[int, ...], objective: str) -> RunAnswer:
    """Return the best of some numbers of GPUs: by the goal where it seeks a number, else by the objective.

    Raises Infeasible where none has a plan, or none meets the goal.
    """
    runs = [counts.run(number) for number in sorted(set(numbers))]
    if counts.goal.seeks_count:
        return counts.answer(_choose(counts, runs).gpus)
    possible = [run for run in runs if not run.problem]
    if not possible:
        raise Infeasible(
            f"no plan for {counts.question.model.name} on any of {', '.join(str(run.gpus) for run in runs)} GPUs",
            why="; ".join(f"{run.gpus} GPUs: {run.problem}" for run in runs),
            remedy="other numbers of GPUs, or --gpus min",
        )
    return counts.answer(min(possible, key=lambda run: _value(counts, run, objective)).gpus)


def _value(counts: Counts, run: WholeRun, objective: str) -> float:
    return objective_value(counts.results[run.gpus].plans[0].estimate, objective)


def seek_count(counts: Counts) -> RunAnswer:
    """Return the run on the cheapest number of GPUs within the deadline, or the soonest that the budget pays for.

    Raises Infeasible where no number tried does.
    """
    if before := _double(counts):
        size = counts.question.cluster.gpus_per_node
        for factor in BETWEEN:
            between = round(before * factor)
            if between <= counts.most and (between < size or between % size == 0):
                counts.run(between)
    return counts.answer(_choose(counts, list(counts.runs.values())).gpus)


def _double(counts: Counts) -> int | None:
    """Try twice as many GPUs while a deadline is missed, or a budget is kept: return the number before the last.

    None where that does not happen before more GPUs stop to help.
    """
    until_met = counts.goal.deadline_s is not None
    met_before: bool | None = None
    best, useless = float("inf"), 0
    numbers, least = _numbers(counts)
    for before, number in pairwise([0, *numbers]):
        if number < least:
            met_before = False  # too few at the peak of their arithmetic
            continue
        run = counts.run(number)
        if run.problem:
            useless += bool(counts.results)  # too many for the batch, after some that worked
        else:
            met = _meets(counts.goal, run)
            if met == until_met and met_before is (not until_met):
                return before
            if met and until_met:
                return None  # the first number that works
            value = run.seconds if until_met or met else run.seconds * run.gpus
            useless = 0 if value < best else useless + 1
            met_before, best = met, min(best, value)
        if useless >= USELESS:
            return None
    return None


def _numbers(counts: Counts) -> tuple[list[int], int]:
    """Return numbers of GPUs, each twice the one before, from the first that may hold the model's state; and the
    smallest number that meets the deadline at the peak rate of its arithmetic.

    The last is all that there are. Raises Infeasible if the deadline takes more than those.
    """
    question, goal, most = counts.question, counts.goal, counts.most
    in_time = 1
    if goal.deadline_s is not None:
        flops = question.model.training_flops_per_token(question.workload.seq_len, causal=True) * goal.tokens
        peak = Screening(question).peak_flops
        in_time = math.ceil(flops / peak / goal.deadline_s)
        if in_time > most:
            raise Infeasible(
                f"no number of GPUs tried ends {goal.tokens:.3g} tokens within {goal.deadline_s / DAY_S:.3g} days",
                why=f"at the peak of their arithmetic that takes {in_time:,} GPUs; up to {most:,} are tried",
                remedy=f"a later deadline, or fewer tokens{counts.more_nodes}",
            )
    size = question.cluster.gpus_per_node
    numbers = [1 << power for power in range(size.bit_length()) if 1 << power < size]
    numbers += [size << power for power in range(most.bit_length()) if size << power < most]
    numbers.append(most)
    holds = min_gpus_for_state(Screening(question))
    first = max((at for at, number in enumerate(numbers) if number <= holds), default=0)
    return numbers[first:] if holds <= most else numbers[-1:], in_time


def _meets(goal: Goal, run: WholeRun) -> bool:
    in_time = goal.deadline_s is None or run.seconds <= goal.deadline_s
    paid = goal.budget is None or run.cost is None or run.cost.value <= goal.budget
    return not run.problem and in_time and paid


def _choose(counts: Counts, runs: list[WholeRun]) -> WholeRun:
    """Return the cheapest run that meets a deadline, or the soonest within a budget alone. Raises Infeasible."""
    goal = counts.goal
    met = [run for run in runs if _meets(goal, run)]
    if met:
        return min(met, key=lambda run: (run.seconds * (run.gpus if goal.deadline_s is not None else 1), run.gpus))
    possible = [run for run in runs if not run.problem]
    if not possible:
        problems = "; ".join(f"{run.gpus} GPUs: {run.problem}" for run in runs[-3:])
        raise Infeasible(
            f"no plan for {counts.question.model.name} on the numbers of GPUs tried",
            why=problems,
            remedy=f"{_relaxed(goal)} or fewer tokens, so that fewer GPUs are enough{counts.more_nodes}",
        )
    soonest, cheapest = (
        min(possible, key=lambda run: run.seconds),
        min(possible, key=lambda run: run.seconds * run.gpus),
    )
    wanted = [] if goal.deadline_s is None else [f"{goal.deadline_s / DAY_S:.4g} days"]
    wanted += [] if goal.budget is None else [f"a budget of {goal.budget:,.0f}"]
    ends = [f"the soonest takes {_end(soonest)}"]
    if cheapest is not soonest:
        ends.append(f"the cheapest {_end(cheapest)}")
    raise Infeasible(
        f"no number of GPUs tried ends {goal.tokens:.3g} tokens within {' and '.join(wanted)}",
        why="; ".join(ends),
        remedy=f"{_relaxed(goal)}, fewer tokens, or a larger --global-batch, which more GPUs can share"
        + counts.more_nodes
        + ("; or a longer --time-limit: not all were tried" if any(run.problem == NOT_TRIED for run in runs) else ""),
    )


def _relaxed(goal: Goal) -> str:
    """Return what of a goal may be relaxed, in words."""
    wanted = {"a later deadline": goal.deadline_s, "a larger budget": goal.budget}
    return ", ".join(words for words, stated in wanted.items() if stated is not None)


def _end(run: WholeRun) -> str:
    gpus = f"{run.gpus} GPU{'s' * (run.gpus > 1)}"
    return f"{run.seconds / DAY_S:.3g} days on {gpus}" + ("" if run.cost is None else f" for {run.cost.value:,.0f}")
