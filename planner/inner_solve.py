"""What is combinatorial inside one pipeline, decided by CP-SAT: layers to stages, recomputation by stage, and what all share.

Given are the degrees, the schedule and the micro batch. To decide are, jointly and under the memory of every rank: which
alternative (`planner.stage_options`) each rank holds, and in which of several `settings` the whole pipeline runs (overlap
mode of each communication, placement on an irregular node). With x one-hot over the alternatives of a rank, y one-hot over
who is the slowest, the step is linear in them but for maxima:

    step = alone(y) + max(late(y), bubble + first(y)) + before(y) + largest update(x)      host and bubble as `HostTime`
    bubble = sums over x of the other ranks' passes, by the schedule's formula (`simulator.stages.bubble_s`)

1F1B and GPipe sum the others; looped schedules take the larger of that and the slowest rank's own for each pass; zero-bubble
ones subtract weight gradients, whose maximum is then stated from both sides. So for every schedule of
`planner.frameworks.SCHEDULES` the model is exact; but where a profile has clocks that rise in idle moments, they are taken
as those of the slowest rank alone, and only the bound is true. Layers on several stages of a rank are spread evenly: what
uneven ones would cost is no sum, and left to the simulation.

Costs are whole multiples of 2^-34 of the value to beat, rounded to the nearest; what rounding may have hidden is taken
off the printed bound. Before CP-SAT sees anything, `planner.stage_bounds` fixes alternatives that no better filling uses;
often none are left and the solver is not even loaded. It runs on one thread with a fixed seed and a limit in its own
deterministic time, so that the answer depends on no clock and no number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.costs import cost_table
from planner.frameworks import Framework
from planner.stage_bounds import ZERO_BUBBLE, Remaining, remaining
from planner.stage_options import Options, Pipeline, Priced, freedom, pipeline
from simulator.plan import Plan
from simulator.plan_table import Floats
from simulator.screening import Screening

RESOLUTION = 2.0**34  # units of the value to beat
EFFORT = 4.0  # deterministic seconds for one pipeline
PARAMETERS = "num_workers:1 random_seed:1 max_deterministic_time:{effort} linearization_level:2 mip_max_bound:1e15"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The best filling found, in seconds of a step; `plan` is None where nothing is less than what was to be beaten.

    Steps are without what a nearly full allocator is expected to cost (`simulator.allocator`). No filling takes less than
    `bound_s`; `room` says whether memory left any, and `solver` whether CP-SAT was asked at all.
    """

    plan: Plan | None
    step_s: float
    bound_s: float
    solver: bool
    room: bool = True

    @property
    def gap(self) -> float:
        """How far the best there is may be below `step_s`, relative."""
        return max(0.0, 1 - self.bound_s / self.step_s) if np.isfinite(self.step_s) and self.step_s > 0 else 0.0


def solve(
    screening: Screening,
    framework: Framework,
    costs: Priced,
    settings: Sequence[int],
    recomputes: Sequence[str],
    *,
    cutoff_s: float = float("inf"),
    effort: float = EFFORT,
) -> Solved:
    """Return the best filling, in the best of `settings`, of one pipeline.

    `settings` are the numbers in `costs` of plans of one pipeline that differ in what all its stages share.
    `recomputes` are the modes to choose from where the framework can tell stages apart; else a plan's own is kept. Only
    steps below `cutoff_s` count.
    """
    free = freedom(framework, costs.plans[settings[0]], recomputes)
    if not free.any:
        return Solved(plan=None, step_s=cutoff_s, bound_s=0.0, solver=False)
    worlds, bound, room = [], cutoff_s, False
    for number in settings:
        pipe = pipeline(screening, costs, number, free, cutoff_s)
        if pipe is None:
            continue
        room = True
        left = remaining(pipe, cutoff_s)
        bound = min(bound, left.bound_s)
        if len(left.options):
            worlds.append((pipe, left))
    if not worlds:
        return Solved(plan=None, step_s=cutoff_s, bound_s=cutoff_s, solver=False, room=room)
    filled, proved = _solved(worlds, cutoff_s, effort)
    bound = proved if screening.profile is None else bound
    if filled is None:
        return Solved(plan=None, step_s=cutoff_s, bound_s=min(cutoff_s, bound), solver=True)
    table = cost_table(
        screening.model, screening.cluster, screening.workload, [filled], screening.runtime, screening.profile
    )
    step = float(table.step_s[0] - table.breakdown_s["allocator"][0]) if table.fits[0] else float("inf")
    if step >= cutoff_s:
        return Solved(plan=None, step_s=cutoff_s, bound_s=min(cutoff_s, bound), solver=True)
    return Solved(plan=filled, step_s=step, bound_s=min(step, bound), solver=True)


World = tuple[Pipeline, Remaining]


def _solved(worlds: Sequence[World], cutoff_s: float, effort: float) -> tuple[Plan | None, float]:
    """Return (the best filling that CP-SAT finds below the cutoff or None, seconds that none is below)."""
    model = _Model(worlds, cutoff_s)
    found = model.solve(effort)
    if found is None:
        return None, cutoff_s if model.exhausted else model.bound_s
    number, rows = found
    pipe, left = worlds[number]
    return pipe.filled(left.options.take(rows)), model.bound_s


class _Model:
    """The integer program of one pipeline in several settings."""

    def __init__(self, worlds: Sequence[World], cutoff_s: float) -> None:
        # A tenth of a second to load, which only finalists that are pipelines need; this front end of CP-SAT takes linear
        # constraints, and loads none of the packages for data frames that the other one does.
        from ortools.linear_solver import pywraplp  # noqa: PLC0415

        self.solver = pywraplp.Solver.CreateSolver("SAT")
        self.worlds = worlds
        self.plan = worlds[0][0].plan
        every = [left.options for _, left in worlds]
        largest = max(float((o.alone + o.before + o.late.clip(0) + o.update).max()) for o in every)
        largest += 4 * self.plan.pp * max(float(o.seconds.max()) for o in every)
        self.scale = RESOLUTION / (cutoff_s if np.isfinite(cutoff_s) else largest)
        self.most = float(np.ceil(largest * self.scale))
        # Half a unit for every coefficient that is not zero: three passes of every rank, weighed by at most three.
        self.rounding = 8 * self.plan.pp + 16
        self.holds: list[Any] = []  # one a row of all worlds together: whether the rank holds it
        self.slowest: dict[int, Any] = {}  # row: whether it is the slowest
        self.world = np.repeat(np.arange(len(worlds)), [len(o) for o in every])
        self.rows = Options(**{f.name: np.concatenate([getattr(o, f.name) for o in every]) for f in fields(Options)})
        self.exhausted, self.bound_s = False, 0.0
        self._choices()
        self._order()
        self._dense_layers()
        objective = self._sum(self.slowest, self.rows.alone) + self._host_and_bubble() + self._update()
        if np.isfinite(cutoff_s):
            self.solver.Add(objective <= RESOLUTION)
        self.solver.Minimize(objective)

    def solve(self, effort: float) -> tuple[int, NDArray[np.intp]] | None:
        """Return (which setting, its rows, a row a rank) of the best solution, or None without any."""
        solver = self.solver
        solver.SetSolverSpecificParametersAsString(PARAMETERS.format(effort=effort))
        status = solver.Solve()
        self.exhausted = status == solver.INFEASIBLE
        if status not in {solver.OPTIMAL, solver.FEASIBLE}:
            return None
        self.bound_s = max(0.0, (solver.Objective().BestBound() - self.rounding) / self.scale)
        chosen = [row for row, holds in enumerate(self.holds) if holds.solution_value() > 0.5]
        number = int(self.world[chosen[0]])
        return number, np.array(chosen) - int(np.searchsorted(self.world, number))

    # --- what is decided

    def _choices(self) -> None:
        """Every rank holds one alternative, all of the same setting; one of them is the slowest."""
        solver, rows = self.solver, self.rows
        settings = [solver.BoolVar(f"setting{w}") for w in range(len(self.worlds))]
        solver.Add(solver.Sum(settings) == 1)
        may = np.concatenate([left.slowest for _, left in self.worlds])
        for row in range(len(rows)):
            self.holds.append(solver.BoolVar(f"holds{row}"))
            if may[row]:
                self.slowest[row] = solver.BoolVar(f"slowest{row}")
                solver.Add(self.slowest[row] <= self.holds[row])
        for w, setting in enumerate(settings):
            for rank in range(self.plan.pp):
                mine = np.nonzero((self.world == w) & (rows.rank == rank))[0]
                solver.Add(solver.Sum([self.holds[row] for row in mine]) == setting)
        solver.Add(solver.Sum(list(self.slowest.values())) == 1)
        counts = [float(count) * holds for count, holds in zip(rows.count, self.holds, strict=True)]
        solver.Add(solver.Sum(counts) == self.worlds[0][0].layers)

    def _order(self) -> None:
        """No rank holds what is slower than the slowest: a running sum over who may be, slowest first."""
        solver = self.solver
        for w, (_, left) in enumerate(self.worlds):
            start = int(np.searchsorted(self.world, w))
            may = sorted((row for row in self.slowest if self.world[row] == w), key=lambda r: -left.order[r - start])
            by_order = sorted(range(len(left.order)), key=lambda row: -left.order[row])
            so_far, at = None, 0
            for row in by_order:
                while at < len(may) and left.order[may[at] - start] >= left.order[row]:
                    later = solver.IntVar(0, 1, f"slower{w},{at}")
                    solver.Add(
                        later == (so_far + self.slowest[may[at]] if so_far is not None else self.slowest[may[at]])
                    )
                    so_far, at = later, at + 1
                if so_far is None:
                    solver.Add(self.holds[start + row] == 0)
                else:
                    solver.Add(self.holds[start + row] <= so_far)

    def _dense_layers(self) -> None:
        """Dense layers of the beginning lie on the first stages, as many as those have room for, in order."""
        solver, rows, leading = self.solver, self.rows, self.worlds[0][0].leading
        if not leading:
            return
        solver.Add(solver.Sum([float(d) * h for d, h in zip(rows.dense, self.holds, strict=True) if d]) == leading)
        room: list[Any] = []  # terms of the layers on first stages of earlier ranks
        most = 0.0
        for rank in range(self.plan.pp):
            mine = np.nonzero(rows.rank == rank)[0]
            before = solver.Sum(room) if room else solver.Sum([])
            for row in mine:
                holds, early, dense = self.holds[row], int(rows.early[row]), int(rows.dense[row])
                if dense < early:  # nothing is left of them after it
                    solver.Add(before >= float(leading - dense) * holds)
                if dense > 0:  # and so much is left before it
                    solver.Add(before <= float(leading - dense) + most * (1 - holds))
            room += [float(rows.early[row]) * self.holds[row] for row in mine]
            most += float(rows.early[mine].max(initial=0))

    # --- what it costs, in units

    def _units(self, seconds: Floats) -> NDArray[np.float64]:
        return np.rint(np.asarray(seconds) * self.scale)

    def _sum(self, chosen: Mapping[int, Any], seconds: Floats) -> Any:
        units = self._units(seconds)
        return self.solver.Sum([float(units[row]) * literal for row, literal in chosen.items() if units[row]])

    def _var(self, name: str) -> Any:
        return self.solver.IntVar(0, self.most, name)

    def _update(self) -> Any:
        """The optimizer of the rank that takes longest over it."""
        largest = self._var("update")
        for rank in range(self.plan.pp):
            mine = {int(row): self.holds[row] for row in np.nonzero(self.rows.rank == rank)[0]}
            self.solver.Add(largest >= self._sum(mine, self.rows.update))
        return largest

    def _host_and_bubble(self) -> Any:
        """`HostTime.seconds` and the bubble: a late host waits through the bubble."""
        solver, rows, slowest = self.solver, self.rows, self.slowest
        bubble = self._bubble()
        if self.worlds[0][0].synchronizes:
            return self._sum(slowest, rows.before + rows.late) + bubble
        both = self._var("host and bubble")
        solver.Add(both >= self._sum(slowest, rows.before + rows.late))
        solver.Add(both >= self._sum(slowest, rows.before + rows.first) + bubble)
        return both

    def _bubble(self) -> Any:
        """The schedule's formula, see `simulator.stages.bubble_s`, over what the other ranks take in each pass."""
        solver, rows, stages = self.solver, self.rows, self.plan.virtual_stages
        schedule = self.plan.schedule or ""
        if stages == 1 and schedule not in ZERO_BUBBLE:
            return self._others(rows.seconds)
        forward, input_s, weight = (values / stages for values in (rows.forward, rows.input_s, rows.weight_s))
        if schedule not in ZERO_BUBBLE:
            return self._larger("forward", forward) + self._larger("input", input_s) + self._larger("weight", weight)
        exact = [self._exactly(name, v) for name, v in (("F", forward), ("I", input_s), ("W", weight))]
        idle = self._var("bubble")
        if schedule == "ZBVZeroBubble":
            longest = self._var("longest")
            for part in exact:
                solver.Add(longest >= part)
            return 3.0 * longest - exact[0] - exact[1] - exact[2]
        twice = 2.0 if schedule == "DualPipeV" else 1.0
        solver.Add(idle >= exact[0] + twice * exact[1] - exact[2])
        return idle

    def _others(self, seconds: Floats) -> Any:
        """What all ranks but the slowest take."""
        return self._sum(dict(enumerate(self.holds)), seconds) - self._sum(self.slowest, seconds)

    def _larger(self, name: str, seconds: Floats) -> Any:
        """The larger of that and as much as if all were like the slowest; from above, where less costs less."""
        larger = self._var(name)
        self.solver.Add(larger >= self._others(seconds))
        self.solver.Add(larger >= self._sum(self.slowest, (self.plan.pp - 1) * seconds))
        return larger

    def _exactly(self, name: str, seconds: Floats) -> Any:
        """The same, from both sides: where more of it costs less."""
        if self.plan.virtual_stages == 1:
            return self._others(seconds)
        larger, which = self._larger(name, seconds), self.solver.BoolVar(f"{name} of others")
        self.solver.Add(larger <= self._others(seconds) + self.most * (1 - which))
        self.solver.Add(larger <= self._sum(self.slowest, (self.plan.pp - 1) * seconds) + self.most * which)
        return larger
