"""Choose a sharding option for every operator and a layout for every tensor: the cheapest consistent choice, proved.

Every operator takes one option (`planner.sharding.operators.options`) and every tensor has one layout. A result is
redistributed once from the layout its operator produces to the layout of the tensor, and from there once to each layout
that consumers need, however many consumers share it. Every redistribution has a cost
(`planner.sharding.layouts.redistribution`), so the choice is a flow through a network. Its linear relaxation is nearly
integral: about 8 fractional values among the 19,000 variables of a Llama layer on an 8x8 mesh. Therefore:

    1. solve the relaxation (GLOP); its value is a lower bound of every choice
    2. remove the variables whose reduced cost proves them too expensive, and let CP-SAT choose among the rest
    3. with the ring bytes fixed at that optimum, solve again for the fewest collectives, ring steps and local copies

Step 3 makes the answer one that a person would write down: nothing is cut or moved without a gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Any

from ortools.linear_solver import pywraplp

from planner.sharding.layouts.collectives import FREE, Cost, cost_of
from planner.sharding.layouts.layout import Layout
from planner.sharding.operators.options import ShardingOption
from planner.sharding.problem import ShardingProblem
from planner.sharding.solver.candidates import LayoutCandidates, enumerate_candidates
from topology.errors import Infeasible

MAX_VARIABLES = 400_000
EXACT_BITS = 48  # costs beyond 2**48 units are rounded: the solver computes in doubles
PARAMETERS = "num_workers:1 random_seed:1 max_deterministic_time:20 mip_max_bound:1e15"
_FIRST_ALLOWANCE = 0.01  # of the relaxation's value: variables whose reduced cost is above it are left out at first


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An option for every operator, a layout for every tensor, and the ring bytes of it all in the units of `Cost`."""

    options: tuple[ShardingOption, ...]
    layouts: Mapping[str, Layout]
    ring_cost: int


def choose(problem: ShardingProblem) -> tuple[Choice, LayoutCandidates]:
    """Return the cheapest choice and the candidates it was made from. Raises Infeasible where there is none."""
    candidates = enumerate_candidates(problem)
    return _IntegerProgram(problem, candidates).solve(), candidates


class _IntegerProgram:
    """The integer program: one variable per sharding option, and one per redistribution of a tensor between layouts."""

    def __init__(self, problem: ShardingProblem, candidates: LayoutCandidates) -> None:
        self.problem, self.candidates, self.mesh = problem, candidates, problem.mesh
        self.costs: list[tuple[int, int]] = []  # by variable: (ring bytes, tie breakers), as in `Cost`
        self.rows: list[dict[int, int]] = []  # of the equality constraints: variable -> coefficient
        self.right_hand_sides: list[int] = []
        self.shared_moves: list[tuple[int, int]] = []  # (move, redistribution it is part of)
        self._build()

    def _add_variable(self, cost: Cost, *, late: int = 0, replicated_axes: int = 0) -> int:
        """Add a variable of `cost`. Among equal costs, fewer `late` moves and `replicated_axes` are preferred."""
        ring, count, hops, _, slices = cost
        self.costs.append(
            (ring, (count << 34) + (min(hops, 1 << 20) << 12) + (slices << 5) + (late << 2) + replicated_axes)
        )
        if len(self.costs) > MAX_VARIABLES:
            raise Infeasible(
                "the graph is too large for an exact choice",
                why=f"more than {MAX_VARIABLES:,} alternatives of layouts",
                remedy="pin more tensors, or give a layer instead of the model",
            )
        return len(self.costs) - 1

    def _build(self) -> None:
        problem, candidates, ranks = self.problem, self.candidates, self.mesh.ranks
        self.option_variables = [
            [self._add_variable(cost_of(o.collectives, ranks), replicated_axes=o.replicated_axes) for o in found]
            for found in candidates.options
        ]
        self.layout_variables: dict[str, dict[Layout, list[int]]] = {}
        for variables in self.option_variables:
            self._add_equality(dict.fromkeys(variables, 1), 1)
        made = {operator.result.name: number for number, operator in enumerate(problem.operators)}
        for name in problem.tensors:
            layouts = candidates.layouts[name]
            if name in made:
                self._add_result_moves(name, made[name], layouts)
            else:
                self.layout_variables[name] = {layout: [self._add_variable(FREE)] for layout in layouts}
                self._add_equality({c: 1 for variables in self.layout_variables[name].values() for c in variables}, 1)
            self._add_operand_moves(name)

    def _add_result_moves(self, name: str, number: int, layouts: Sequence[Layout]) -> None:
        """Add the redistributions from the layouts an operator may produce to the layouts its result may have.

        At equal cost, a pending reduction is performed right after the operator, a `set` redistributes its own result,
        and any other tensor keeps the layout it was produced in until a consumer needs another one.
        """
        moves_itself = self.problem.operators[number].text.startswith("set(")
        self.layout_variables[name] = {layout: [] for layout in layouts}
        variables_of: dict[Layout, list[int]] = {}
        for variable, option in zip(self.option_variables[number], self.candidates.options[number], strict=True):
            variables_of.setdefault(option.result, []).append(variable)
        costs = self.candidates.redistributors[name].costs_between(variables_of, layouts)
        for result, variables in variables_of.items():
            row = dict.fromkeys(variables, -1)
            for layout in layouts:
                cost = costs.get((result, layout))
                if cost is not None:
                    stays = result == layout or bool(result.pending) or moves_itself
                    move = self._add_variable(cost, late=0 if stays else 2)
                    row[move] = 1
                    self.layout_variables[name][layout].append(move)
            self._add_equality(row, 0)

    def _add_operand_moves(self, name: str) -> None:
        """Add the redistributions to the layouts that consumers need; one that several consumers need is paid once."""
        consumers = self.candidates.consumers.get(name, [])
        shared: dict[tuple[Layout, Layout, frozenset[str]], int] = {}
        self._add_stage_sends(name)
        for number, operand in consumers:
            redistributor = self.candidates.redistributor_for(name, number)
            variables_of: dict[Layout, list[int]] = {}
            for variable, option in zip(self.option_variables[number], self.candidates.options[number], strict=True):
                variables_of.setdefault(option.operands[operand][1], []).append(variable)
            costs = redistributor.costs_between(self.layout_variables[name], variables_of)
            arrives: dict[Layout, dict[int, int]] = {
                layout: dict.fromkeys(cs, -1) for layout, cs in variables_of.items()
            }
            for layout, variables in self.layout_variables[name].items():
                leaves = dict.fromkeys(variables, -1)
                for wanted in variables_of:
                    cost = costs.get((layout, wanted))
                    if cost is None:
                        continue
                    late = int(wanted != layout)
                    if len(consumers) == 1 or not late:
                        move = self._add_variable(cost, late=late)
                    else:
                        key = (layout, wanted, redistributor.excluded_kinds)
                        if key not in shared:
                            shared[key] = self._add_variable(cost, late=late)
                        move = self._add_variable(FREE)
                        self.shared_moves.append((move, shared[key]))
                    leaves[move] = 1
                    arrives[wanted][move] = 1
                self._add_equality(leaves, 0)
            for row in arrives.values():
                self._add_equality(row, 0)

    def _add_stage_sends(self, name: str) -> None:
        """Add the sends to every other pipeline stage that uses a tensor."""
        stages, tensor = self.problem.stages, self.problem.tensors[name]
        made = [n for n, operator in enumerate(self.problem.operators) if operator.result.name == name]
        if stages is None or not made:
            return
        others = {stages.operator_stages[number] for number, _ in self.candidates.consumers.get(name, [])} - {
            stages.operator_stages[made[0]]
        }
        for layout, variables in self.layout_variables[name].items():
            cost = cost_of(stages.send_collectives(tensor, layout, self.mesh), self.mesh.ranks)
            for _ in others:
                self._add_equality({**dict.fromkeys(variables, -1), self._add_variable(cost): 1}, 0)

    def _add_equality(self, row: dict[int, int], value: int) -> None:
        self.rows.append(row)
        self.right_hand_sides.append(value)

    def solve(self) -> Choice:
        """Return the choice of fewest ring bytes and, among those, of fewest collectives, ring steps and slices."""
        # Integer costs by their common divisor; rounded to coarser units where the solver would not be exact.
        unit = reduce(gcd, (ring for ring, _ in self.costs), 0) or 1
        unit *= max(1, sum(ring for ring, _ in self.costs) // unit >> EXACT_BITS)
        bytes_ = [round(ring / unit) for ring, _ in self.costs]
        bound, reduced = self._solve_relaxation(bytes_)
        allowance = max(1.0, _FIRST_ALLOWANCE * bound)
        while True:  # a variable whose reduced cost exceeds the gap to the bound cannot be in an optimal solution
            found = self._solve_integer(bytes_, [cost <= allowance + 1e-6 for cost in reduced], None)
            if found is not None and found[0] - bound <= allowance:
                break
            if allowance > 2 * sum(bytes_) + 1:
                raise _unsatisfiable()
            allowance = max(allowance * 8, (found[0] - bound) if found else 0.0)
        least = found[0]
        keep = [cost <= least - bound + 1e-6 for cost in reduced]
        tie_broken = self._solve_integer([ties for _, ties in self.costs], keep, (bytes_, least))
        return self._read_choice((tie_broken or found)[1])

    def _solve_relaxation(self, costs: Sequence[int]) -> tuple[float, list[float]]:
        """Return the optimum of the linear relaxation and the reduced cost of every variable."""
        solver = pywraplp.Solver.CreateSolver("GLOP")
        variables = [solver.NumVar(0, solver.infinity(), "") for _ in costs]
        self._add_constraints(solver, variables)
        objective = solver.Objective()
        for variable, cost in zip(variables, costs, strict=True):
            objective.SetCoefficient(variable, cost)
        objective.SetMinimization()
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            raise _unsatisfiable()
        return objective.Value(), [variable.reduced_cost() for variable in variables]

    def _solve_integer(
        self, costs: Sequence[int], keep: Sequence[bool], limit: tuple[Sequence[int], int] | None
    ) -> tuple[int, list[bool]] | None:
        """Return (least cost, value of every variable), or None where there is no solution.

        Variables not in `keep` are zero. `limit` bounds a second cost: (cost by variable, its maximum).
        """
        solver = pywraplp.Solver.CreateSolver("SAT")
        solver.SetSolverSpecificParametersAsString(PARAMETERS)
        variables = [solver.BoolVar("") if kept else solver.IntVar(0, 0, "") for kept in keep]
        self._add_constraints(solver, variables)
        if limit is not None:
            bound = solver.Constraint(-solver.infinity(), limit[1])
            for variable, cost in zip(variables, limit[0], strict=True):
                if cost:
                    bound.SetCoefficient(variable, cost)
        objective = solver.Objective()
        for variable, cost in zip(variables, costs, strict=True):
            if cost:
                objective.SetCoefficient(variable, cost)
        objective.SetMinimization()
        status = solver.Solve()
        if status == pywraplp.Solver.NOT_SOLVED or (status == pywraplp.Solver.FEASIBLE and limit is None):
            raise Infeasible(
                "no proof within the effort set for a choice",
                why=f"{len(variables):,} alternatives of layouts",
                remedy="pin more tensors, or give a layer instead of the model",
            )
        if status not in {pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE}:
            return None
        values = [variable.solution_value() > 0.5 for variable in variables]
        return sum(cost for cost, value in zip(costs, values, strict=True) if value), values

    def _add_constraints(self, solver: Any, variables: Sequence[Any]) -> None:
        for row, value in zip(self.rows, self.right_hand_sides, strict=True):
            constraint = solver.Constraint(value, value)
            for variable, factor in row.items():
                constraint.SetCoefficient(variables[variable], factor)
        for move, shared in self.shared_moves:
            constraint = solver.Constraint(-solver.infinity(), 0)
            constraint.SetCoefficient(variables[move], 1)
            constraint.SetCoefficient(variables[shared], -1)

    def _read_choice(self, values: Sequence[bool]) -> Choice:
        ring = sum(cost for (cost, _), value in zip(self.costs, values, strict=True) if value)
        picked = tuple(
            found[next(n for n, variable in enumerate(variables) if values[variable])]
            for found, variables in zip(self.candidates.options, self.option_variables, strict=True)
        )
        layouts = {
            name: next(layout for layout, variables in places.items() if any(values[c] for c in variables))
            for name, places in self.layout_variables.items()
        }
        return Choice(options=picked, layouts=layouts, ring_cost=ring)


def _unsatisfiable() -> Infeasible:
    return Infeasible(
        "no choice of layouts satisfies what is pinned",
        why="some pinned layout cannot be made, such as a pending sum that nothing leaves pending",
        remedy="leave out a pin",
    )
