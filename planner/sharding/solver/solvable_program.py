"""Solves integer programs: by HiGHS, and by CP-SAT for the fewest steps among answers of equal cost; decodes their
values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix

from planner.sharding.layouts.layout import Layout
from planner.sharding.problem.deadline import NO_DEADLINE, Deadline
from planner.sharding.problem.problem import MemoryLimit
from planner.sharding.solver.integer_program import IntegerProgram
from planner.sharding.solver.sparse_rows import Numbers
from topology.errors import Infeasible
from topology.units import GIB

_RELATIVE_GAP = 1e-9
_INFEASIBLE = 2  # status of scipy.optimize.milp


@dataclass(frozen=True, slots=True)
class Assignment:
    """The option of every class of operators, by its index, and the layout of every class of tensors.

    Without a memory limit, all copies are kept.
    """

    options: tuple[int, ...]
    layouts: tuple[Layout, ...]
    kept: frozenset[tuple[int, Layout]] = frozenset()  # copies of tensors that are kept until the backward pass


def unsatisfiable(memory: MemoryLimit | None = None) -> Infeasible:
    if memory is not None:
        return Infeasible(
            f"no choice of layouts fits {memory.limit_bytes / GIB:.3g} GiB of memory",
            why="parameters with their state, and what the backward pass saves, are larger however they are sharded",
            remedy="a larger limit, more ranks, or fewer tokens",
        )
    return Infeasible(
        "no choice of layouts satisfies what is pinned",
        why="some pinned layout cannot be made, such as a pending sum that nothing leaves pending",
        remedy="leave out a pin",
    )


class SolvableProgram(IntegerProgram):
    """Solves integer programs built by `IntegerProgram`."""

    def relax(self, deadline: Deadline = NO_DEADLINE) -> tuple[float, Numbers, Numbers] | None:
        """Return the optimum of the linear relaxation, reduced costs and values; None if time runs out.

        Raises Infeasible if there is no solution.
        """
        width = self._count
        if not width:
            return 0.0, np.zeros(0), np.zeros(0)
        scale = max(1.0, float(self.costs.max(initial=0)) / 1e5)
        left = deadline.left_s
        options = {} if left == np.inf else {"time_limit": max(0.01, left)}
        result = linprog(
            self.costs / scale,
            A_ub=self.most.matrix(width),
            b_ub=self.most.sides or None,
            A_eq=self.equal.matrix(width),
            b_eq=self.equal.sides,
            bounds=(0, None),
            method="highs",
            options=options,
        )
        if result.status == 1:
            return None
        if result.status != 0:
            raise unsatisfiable(self.problem.memory)
        scale *= self.unit
        return float(result.fun) * scale, np.asarray(result.lower.marginals) * scale, np.asarray(result.x)

    def is_integral(self, values: Numbers) -> bool:
        return bool(np.all(np.abs(values - np.rint(values)) < 1e-6))

    def with_fewest_steps(self, keep: NDArray[np.bool_], cost: float) -> Assignment | None:
        """Return the solution with the smallest `ties` among those of `cost` whose variables are all in `keep`; None if
        it is not found.

        By CP-SAT, which is exact for `ties` that encode collectives, ring steps and slices as digits of one number.
        """
        model = cp_model.CpModel()
        kept = np.flatnonzero(keep)
        variables = [model.new_bool_var("") for _ in kept]
        for rows, exact in ((self.equal, True), (self.most, False)):
            matrix = rows.matrix(self._count)
            if matrix is None:
                continue
            reduced = csr_matrix(matrix[:, kept])
            for row, side in enumerate(rows.sides):
                span = slice(reduced.indptr[row], reduced.indptr[row + 1])
                both = zip(reduced.data[span], reduced.indices[span], strict=True)
                total = sum(int(factor) * variables[column] for factor, column in both)
                if span.start != span.stop:
                    model.add(total == int(side) if exact else total <= int(side))
                elif exact and side:
                    return None
        paid = sum(int(self.costs[k]) * v for k, v in zip(kept, variables, strict=True) if self.costs[k])
        model.add(paid <= round(cost / self.unit))
        model.minimize(sum(int(self.ties[k]) * v for k, v in zip(kept, variables, strict=True) if self.ties[k]))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 1
        solver.parameters.max_deterministic_time = 20
        if solver.solve(model) not in {cp_model.OPTIMAL, cp_model.FEASIBLE}:
            return None
        values = np.zeros(self._count)
        values[kept] = [float(solver.boolean_value(variable)) for variable in variables]
        return self.read(values)

    def branch_and_bound(self, keep: NDArray[np.bool_], deadline: Deadline) -> tuple[Assignment | None, float]:
        """Return the cheapest solution found by `deadline` whose variables are all in `keep`, and a lower bound.

        By HiGHS, whose linear relaxations are nearly integral here; without a solution the bound is infinite.
        """
        kept = np.flatnonzero(keep)
        constraints = []
        for rows, exact in ((self.equal, True), (self.most, False)):
            matrix = rows.matrix(self._count)
            if matrix is not None:
                sides = np.array(rows.sides)
                constraints.append(LinearConstraint(matrix[:, kept], sides if exact else -np.inf, sides))
        scale = max(1.0, float(self.costs.max(initial=0)) / 1e5)
        options = {"mip_rel_gap": _RELATIVE_GAP}
        if deadline.end != np.inf:
            options["time_limit"] = max(0.01, deadline.left_s)
        result = milp(
            self.costs[kept] / scale,
            constraints=constraints,
            integrality=np.ones(len(kept)),
            bounds=Bounds(0, 1),
            options=options,
        )
        scale *= self.unit
        if result.status == _INFEASIBLE:
            return None, np.inf
        bound = -np.inf if result.mip_dual_bound is None else float(result.mip_dual_bound) * scale
        if result.x is None:
            return None, bound
        values = np.zeros(self._count)
        values[kept] = np.rint(result.x)
        return self.read(values), np.inf if result.status == 0 else bound

    def read(self, values: Numbers) -> Assignment:
        """Return the assignment encoded by integral values."""
        options = tuple(int(np.argmax(values[variables])) for variables in self.options)
        return Assignment(
            options=options,
            layouts=tuple(
                found[int(np.argmax(values[variables]))] if len(variables) else self.between(each, options)
                for each, (found, variables) in enumerate(zip(self.layout_lists, self.layouts, strict=True))
            ),
            kept=frozenset((each, need) for variable, each, need, _ in self.kept if values[variable] > 0.5),
        )

    def between(self, each: int, options: Sequence[int]) -> Layout:
        """Return the layout of a tensor passed from one operator to another: as made, except pending sums."""
        made, ((consumer, position),) = self.producer[each], self.consumers[each]
        need = self.candidates.options[consumer][options[consumer]].operands[position][1]
        result = need if made is None else self.candidates.options[made][options[made]].result
        return need if result.pending else result

    def cost_of(self, assignment: Assignment) -> int:
        """Return the cost of an assignment, in the unit of `Cost`, with redistributions counted as in the program."""
        total = sum(int(costs[o]) for costs, o in zip(self.option_costs, assignment.options, strict=True))
        for each, (made, uses) in enumerate(zip(self.producer, self.consumers, strict=True)):
            count, home = len(self.tensor_members[each]), assignment.layouts[each]
            if self.layout_costs[each].any():
                total += int(self.layout_costs[each][self.layout_lists[each].index(home)])
            if made is not None:
                result = self.candidates.options[made][assignment.options[made]].result
                total += self._one_move(each, result, home, None) * count
            paid: set[tuple[Layout, frozenset[str], bool]] = set()
            for consumer, position in uses:
                number = self.members[consumer][0]
                need = self.candidates.options[consumer][assignment.options[consumer]].operands[position][1]
                excluded = self.candidates.redistributor_for(self.tensor_members[each][0], number).excluded_kinds
                backward = self.is_backward(number)
                if backward and (each, need) in assignment.kept and (need, excluded, False) in paid:
                    continue
                if need != home and (need, excluded, backward) not in paid:
                    paid.add((need, excluded, backward))
                    total += self._one_move(each, home, need, number) * count
            name = self.tensor_members[each][0]
            stages = self.problem.stages
            if stages is not None and made is not None:
                users = {stages.operator_stages[number] for number, _ in self._consumers.get(name, ())}
                sends = stages.send_collectives(self.problem.tensors[name], home, self.mesh) if users else ()
                others = users - {stages.operator_stages[self._producers[name]]}
                total += self.candidates.pricing.collectives(sends)[0] * len(others)
        return total

    def held(self, assignment: Assignment) -> float:
        """Return the bytes that a rank holds at the beginning of the backward pass, without copies kept for it."""
        both = zip(self.tensor_members, assignment.layouts, strict=True)
        return sum(self.held_bytes(names[0], layout) * len(names) for names, layout in both)

    def least_held(self) -> float:
        """Return the bytes that a rank holds at least."""
        both = zip(self.tensor_members, self.layout_lists, strict=True)
        return sum(min(self.held_bytes(names[0], at) for at in layouts) * len(names) for names, layouts in both)

    def most_held(self) -> float:
        return np.inf if self.problem.memory is None else self.problem.memory.counted_bytes

    def fits(self, assignment: Assignment) -> bool:
        return self.problem.memory is None or self.held(assignment) <= self.most_held()

    def with_kept_copies(self, assignment: Assignment) -> Assignment:
        """Return the assignment that keeps copies for the backward pass, those that save most time per byte first, as
        far as they fit.
        """
        if self.problem.memory is None or assignment.kept:
            return assignment
        found = []
        for each, uses in enumerate(self.consumers):
            home, name, count = assignment.layouts[each], self.tensor_members[each][0], len(self.tensor_members[each])
            phases: dict[Layout, set[bool]] = {}
            for consumer, position in uses:
                need = self.candidates.options[consumer][assignment.options[consumer]].operands[position][1]
                phases.setdefault(need, set()).add(self.is_backward(self.members[consumer][0]))
            for need, where in phases.items():
                saved = self.move_costs(each, [home], [need])[0][0, 0] * count
                if len(where) == 2 and need != home and saved > 0:
                    nbytes = self.copy_bytes(name, need) * count
                    found.append((saved / nbytes, nbytes, each, need))
        left, kept = self.most_held() - self.held(assignment), []
        for _, nbytes, each, need in sorted(found, key=lambda one: -one[0]):
            if nbytes <= left:
                left -= nbytes
                kept.append((each, need))
        return replace(assignment, kept=frozenset(kept))

    def _one_move(self, each: int, source: Layout, target: Layout, operator: int | None) -> int:
        if source == target:
            return 0
        cost = self.move_costs(each, [source], [target], operator)[0][0, 0]
        if not np.isfinite(cost):
            raise unsatisfiable()
        return round(float(cost))
