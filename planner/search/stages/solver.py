"""Assign layers and recompute modes to the stages of one pipeline with CP-SAT, and choose its overlap and placement.

Given are the degrees, the schedule and the micro batch. Decided together, under the memory of every rank, are the
option (`planner.search.stages.options`) of each rank and the setting of the whole pipeline (overlap mode of each
communication, placement on an irregular node). With x one-hot over the options of a rank and y one-hot over the slowest
option, the step is linear in x and y except for maxima:

    step = device(y) + max(late(y), bubble + first(y)) + before(y) + max optimizer(x)      host and bubble as `HostTime`
    bubble = sums over x of the other ranks' passes, by the schedule's formula (`simulator.pipeline.stages.bubble_s`)

1F1B and GPipe sum over the other ranks; looped schedules take, for each pass, the larger of that and the slowest rank's
share; zero-bubble schedules subtract weight gradients, whose maximum then needs constraints from both sides. For every
schedule of `simulator.pipeline.schedules.SCHEDULES` the model is exact, unless a profile has clocks that rise in idle
moments: they are taken as those of the slowest rank, and only the bound of `planner.search.stages.bounds` holds. Layers
on several stages of a rank are spread evenly; uneven ones are left to the simulation.

Costs are integers, in units of 2^-34 of the value to beat; the rounding error is subtracted from the reported bound.
Before CP-SAT runs, `planner.search.stages.bounds` removes options that no better assignment uses; often none remain,
and the solver is not loaded. It runs on one thread with a fixed seed and a limit in its own deterministic time, so that
the answer depends neither on a clock nor on the number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.search.stages.bounds import PrunedOptions, prune_options
from planner.search.stages.options import CostedPlans, Pipeline, RankOptions, build_pipeline, stage_freedom
from simulator.closed_form.estimates import estimate_plans
from simulator.closed_form.screening import Screening
from simulator.columns.plan_table import Floats
from simulator.config.plan import Plan
from simulator.legality.frameworks import Framework
from simulator.pipeline.schedules import SPLIT_BACKWARD

RESOLUTION = 2.0**34  # units of the value to beat
EFFORT = 4.0  # deterministic seconds for one pipeline
PARAMETERS = "num_workers:1 random_seed:1 max_deterministic_time:{effort} linearization_level:2 mip_max_bound:1e15"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSolution:
    """The best assignment found, and its step in seconds; `plan` is None where none beats the cutoff.

    Steps exclude what a nearly full allocator is expected to cost (`simulator.closed_form.allocator`). No assignment
    takes less than `bound_s`. `has_room` says whether any fits into memory, and `solver` whether CP-SAT ran.
    """

    plan: Plan | None
    step_s: float
    bound_s: float
    solver: bool
    has_room: bool = True

    @property
    def gap(self) -> float:
        """How far below `step_s` the optimum may be, relative."""
        return max(0.0, 1 - self.bound_s / self.step_s) if np.isfinite(self.step_s) and self.step_s > 0 else 0.0


def solve_stages(
    screening: Screening,
    framework: Framework,
    costs: CostedPlans,
    numbers: Sequence[int],
    recomputes: Sequence[str],
    *,
    cutoff_s: float = float("inf"),
    effort: float = EFFORT,
) -> StageSolution:
    """Return the best assignment of layers and recompute modes to the stages of one pipeline, over all its settings.

    `numbers` index the plans of `costs` that are the settings of this pipeline. `recomputes` are the modes to choose
    from where the framework allows one per stage; otherwise the plan's mode is kept. Only steps below `cutoff_s` count.
    """
    freedom = stage_freedom(framework, costs.plans[numbers[0]], screening.scenario.model, recomputes)
    if not freedom.any:
        return StageSolution(plan=None, step_s=cutoff_s, bound_s=0.0, solver=False)
    settings, bound, has_room = [], cutoff_s, False
    for number in numbers:
        pipeline = build_pipeline(screening, costs, number, freedom, cutoff_s)
        if pipeline is None:
            continue
        has_room = True
        pruned = prune_options(pipeline, cutoff_s)
        bound = min(bound, pruned.bound_s)
        if len(pruned.options):
            settings.append((pipeline, pruned))
    if not settings:
        return StageSolution(plan=None, step_s=cutoff_s, bound_s=cutoff_s, solver=False, has_room=has_room)
    plan, proved = _solve_settings(settings, cutoff_s, effort)
    bound = proved if screening.scenario.gpu_calibration is None else bound
    if plan is None:
        return StageSolution(plan=None, step_s=cutoff_s, bound_s=min(cutoff_s, bound), solver=True)
    table = estimate_plans(screening.scenario, [plan], counted=False)
    step = float(table.step_s[0] - table.breakdown_s["allocator"][0]) if table.fits[0] else float("inf")
    if step >= cutoff_s:
        return StageSolution(plan=None, step_s=cutoff_s, bound_s=min(cutoff_s, bound), solver=True)
    return StageSolution(plan=plan, step_s=step, bound_s=min(step, bound), solver=True)


Setting = tuple[Pipeline, PrunedOptions]


def _solve_settings(settings: Sequence[Setting], cutoff_s: float, effort: float) -> tuple[Plan | None, float]:
    """Return (the best plan below the cutoff that CP-SAT finds, or None; a lower bound of all in seconds)."""
    model = _IntegerProgram(settings, cutoff_s)
    found = model.solve(effort)
    if found is None:
        return None, cutoff_s if model.exhausted else model.bound_s
    number, rows = found
    pipeline, pruned = settings[number]
    return pipeline.plan_with(pruned.options.take(rows)), model.bound_s


class _IntegerProgram:
    """The integer program of one pipeline in all its settings."""

    def __init__(self, settings: Sequence[Setting], cutoff_s: float) -> None:
        # This front end of CP-SAT takes linear constraints, and does not load pandas as the other one does.
        from ortools.linear_solver import pywraplp  # noqa: PLC0415 - a tenth of a second that only pipelines need

        self.solver = pywraplp.Solver.CreateSolver("SAT")
        self.settings = settings
        self.plan = settings[0][0].plan
        options = [pruned.options for _, pruned in settings]
        largest = max(
            float((o.device_s + o.host_before_s + o.host_late_s.clip(0) + o.optimizer_s).max()) for o in options
        )
        largest += 4 * self.plan.pp * max(float(o.seconds.max()) for o in options)
        self.scale = RESOLUTION / (cutoff_s if np.isfinite(cutoff_s) else largest)
        self.max_units = float(np.ceil(largest * self.scale))
        # Half a unit for every coefficient that is not zero: three passes of every rank, weighed by at most three.
        self.rounding = 8 * self.plan.pp + 16
        self.selected: list[Any] = []  # by row of all settings together: whether the rank has this option
        self.slowest: dict[int, Any] = {}  # by row: whether it is the slowest
        self.setting_of_row = np.repeat(np.arange(len(settings)), [len(o) for o in options])
        self.rows = RankOptions(
            **{f.name: np.concatenate([getattr(o, f.name) for o in options]) for f in fields(RankOptions)}
        )
        self.exhausted, self.bound_s = False, 0.0
        self._add_choices()
        self._add_slowest_order()
        self._add_dense_layers()
        objective = (
            self._sum(self.slowest, self.rows.device_s) + self._host_and_bubble_units() + self._optimizer_units()
        )
        if np.isfinite(cutoff_s):
            self.solver.Add(objective <= RESOLUTION)
        self.solver.Minimize(objective)

    def solve(self, effort: float) -> tuple[int, NDArray[np.intp]] | None:
        """Return (setting, its rows, one per rank) of the best solution, or None if there is none."""
        solver = self.solver
        solver.SetSolverSpecificParametersAsString(PARAMETERS.format(effort=effort))
        status = solver.Solve()
        self.exhausted = status == solver.INFEASIBLE
        if status not in {solver.OPTIMAL, solver.FEASIBLE}:
            return None
        self.bound_s = max(0.0, (solver.Objective().BestBound() - self.rounding) / self.scale)
        chosen = [row for row, selected in enumerate(self.selected) if selected.solution_value() > 0.5]
        number = int(self.setting_of_row[chosen[0]])
        return number, np.array(chosen) - int(np.searchsorted(self.setting_of_row, number))

    # --- decisions

    def _add_choices(self) -> None:
        """Every rank has one option, all of the same setting; one of them is the slowest."""
        solver, rows = self.solver, self.rows
        setting_variables = [solver.BoolVar(f"setting{w}") for w in range(len(self.settings))]
        solver.Add(solver.Sum(setting_variables) == 1)
        can_be_slowest = np.concatenate([pruned.slowest for _, pruned in self.settings])
        for row in range(len(rows)):
            self.selected.append(solver.BoolVar(f"holds{row}"))
            if can_be_slowest[row]:
                self.slowest[row] = solver.BoolVar(f"slowest{row}")
                solver.Add(self.slowest[row] <= self.selected[row])
        for w, setting in enumerate(setting_variables):
            for rank in range(self.plan.pp):
                rows_of_rank = np.nonzero((self.setting_of_row == w) & (rows.rank == rank))[0]
                solver.Add(solver.Sum([self.selected[row] for row in rows_of_rank]) == setting)
        solver.Add(solver.Sum(list(self.slowest.values())) == 1)
        counts = [float(count) * selected for count, selected in zip(rows.layers, self.selected, strict=True)]
        solver.Add(solver.Sum(counts) == self.settings[0][0].layers)

    def _add_slowest_order(self) -> None:
        """No rank has an option slower than the slowest: a running sum over the possible slowest, in order."""
        solver = self.solver
        for w, (_, pruned) in enumerate(self.settings):
            start = int(np.searchsorted(self.setting_of_row, w))
            can_be_slowest = sorted(
                (row for row in self.slowest if self.setting_of_row[row] == w), key=lambda r: -pruned.order[r - start]
            )
            by_order = sorted(range(len(pruned.order)), key=lambda row: -pruned.order[row])
            so_far, at = None, 0
            for row in by_order:
                while at < len(can_be_slowest) and pruned.order[can_be_slowest[at] - start] >= pruned.order[row]:
                    later = solver.IntVar(0, 1, f"slower{w},{at}")
                    solver.Add(
                        later
                        == (
                            so_far + self.slowest[can_be_slowest[at]]
                            if so_far is not None
                            else self.slowest[can_be_slowest[at]]
                        )
                    )
                    so_far, at = later, at + 1
                if so_far is None:
                    solver.Add(self.selected[start + row] == 0)
                else:
                    solver.Add(self.selected[start + row] <= so_far)

    def _add_dense_layers(self) -> None:
        """Leading dense layers are on the first stages, in order, as many as those stages have layers."""
        solver, rows, leading = self.solver, self.rows, self.settings[0][0].leading_dense_layers
        if not leading:
            return
        solver.Add(solver.Sum([float(d) * h for d, h in zip(rows.dense, self.selected, strict=True) if d]) == leading)
        earlier: list[Any] = []  # terms of the first-stage layers of earlier ranks
        max_earlier = 0.0
        for rank in range(self.plan.pp):
            rows_of_rank = np.nonzero(rows.rank == rank)[0]
            before = solver.Sum(earlier) if earlier else solver.Sum([])
            for row in rows_of_rank:
                selected, first_stage, dense = (
                    self.selected[row],
                    int(rows.first_stage_layers[row]),
                    int(rows.dense[row]),
                )
                if dense < first_stage:  # all leading dense layers are placed up to this rank
                    solver.Add(before >= float(leading - dense) * selected)
                if dense > 0:  # and enough of them are not placed before it
                    solver.Add(before <= float(leading - dense) + max_earlier * (1 - selected))
            earlier += [float(rows.first_stage_layers[row]) * self.selected[row] for row in rows_of_rank]
            max_earlier += float(rows.first_stage_layers[rows_of_rank].max(initial=0))

    # --- costs, in units

    def _units(self, seconds: Floats) -> NDArray[np.float64]:
        return np.rint(np.asarray(seconds) * self.scale)

    def _sum(self, chosen: Mapping[int, Any], seconds: Floats) -> Any:
        units = self._units(seconds)
        return self.solver.Sum([float(units[row]) * literal for row, literal in chosen.items() if units[row]])

    def _new_variable(self, name: str) -> Any:
        return self.solver.IntVar(0, self.max_units, name)

    def _optimizer_units(self) -> Any:
        """Return the optimizer of the rank that takes longest over it."""
        largest = self._new_variable("update")
        for rank in range(self.plan.pp):
            rows_of_rank = {int(row): self.selected[row] for row in np.nonzero(self.rows.rank == rank)[0]}
            self.solver.Add(largest >= self._sum(rows_of_rank, self.rows.optimizer_s))
        return largest

    def _host_and_bubble_units(self) -> Any:
        """Return `HostTime.seconds` and the bubble together: a late host catches up during the bubble."""
        solver, rows, slowest = self.solver, self.rows, self.slowest
        bubble = self._bubble_units()
        if self.settings[0][0].synchronizes:
            return self._sum(slowest, rows.host_before_s + rows.host_late_s) + bubble
        host_and_bubble = self._new_variable("host and bubble")
        solver.Add(host_and_bubble >= self._sum(slowest, rows.host_before_s + rows.host_late_s))
        solver.Add(host_and_bubble >= self._sum(slowest, rows.host_before_s + rows.host_first_s) + bubble)
        return host_and_bubble

    def _bubble_units(self) -> Any:
        """Return the bubble by the formula of the schedule, as `simulator.pipeline.stages.bubble_s`."""
        solver, rows, stages = self.solver, self.rows, self.plan.virtual_stages
        schedule = self.plan.schedule or ""
        if stages == 1 and schedule not in SPLIT_BACKWARD:
            return self._sum_of_others(rows.seconds)
        forward, input_s, weight = (values / stages for values in (rows.forward, rows.input_s, rows.weight_s))
        if schedule not in SPLIT_BACKWARD:
            return (
                self._larger_of_others("forward", forward)
                + self._larger_of_others("input", input_s)
                + self._larger_of_others("weight", weight)
            )
        exact = [self._exact_larger_of_others(name, v) for name, v in (("F", forward), ("I", input_s), ("W", weight))]
        idle = self._new_variable("bubble")
        if schedule == "ZBVZeroBubble":
            longest = self._new_variable("longest")
            for part in exact:
                solver.Add(longest >= part)
            return 3.0 * longest - exact[0] - exact[1] - exact[2]
        twice = 2.0 if schedule == "DualPipeV" else 1.0
        solver.Add(idle >= exact[0] + twice * exact[1] - exact[2])
        return idle

    def _sum_of_others(self, seconds: Floats) -> Any:
        """Return the sum over all ranks but the slowest."""
        return self._sum(dict(enumerate(self.selected)), seconds) - self._sum(self.slowest, seconds)

    def _larger_of_others(self, name: str, seconds: Floats) -> Any:
        """Return an upper bound of the larger of `_sum_of_others` and as much as if all ranks were like the slowest.

        Minimisation makes it tight where less of it costs less.
        """
        larger = self._new_variable(name)
        self.solver.Add(larger >= self._sum_of_others(seconds))
        self.solver.Add(larger >= self._sum(self.slowest, (self.plan.pp - 1) * seconds))
        return larger

    def _exact_larger_of_others(self, name: str, seconds: Floats) -> Any:
        """Return exactly that larger value, for where more of it costs less."""
        if self.plan.virtual_stages == 1:
            return self._sum_of_others(seconds)
        larger, which = self._larger_of_others(name, seconds), self.solver.BoolVar(f"{name} of others")
        self.solver.Add(larger <= self._sum_of_others(seconds) + self.max_units * (1 - which))
        self.solver.Add(larger <= self._sum(self.slowest, (self.plan.pp - 1) * seconds) + self.max_units * which)
        return larger
