"""Choose a sharding option for every operator and a layout for every tensor: the cheapest consistent choice, proved.

Every operator takes one option (`planner.sharding.operators.options`) and every tensor has one layout. A result is
redistributed once from the layout its operator produces to the layout of the tensor, and from there once to each layout
that consumers need, however many consumers share it. Every redistribution has a cost
(`planner.sharding.layouts.redistribution`), so the choice is a flow through a network (`integer_program.py`), whose linear
relaxation is nearly integral. Therefore:

    1. a first answer, operator by operator (`first_answer.py`)
    2. solve the relaxation (HiGHS); its value is a lower bound of every choice
    3. remove the variables whose reduced cost proves them too expensive, and let CP-SAT choose among the rest

With a time limit, the best answer so far is returned with its bound. Where ring bytes are counted, a last step fixes them
at the optimum and solves again for the fewest collectives, ring steps and local copies, which makes the answer one that a
person would write down: nothing is cut or moved without a gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np

from planner.sharding.layouts.layout import Layout
from planner.sharding.operators.options import ShardingOption
from planner.sharding.problem import ShardingProblem
from planner.sharding.solver.alike import find_alike
from planner.sharding.solver.candidates import LayoutCandidates, enumerate_candidates, operand_names
from planner.sharding.solver.first_answer import first_answer
from planner.sharding.solver.integer_program import Assignment, IntegerProgram, unsatisfiable
from planner.sharding.solver.pricing import pricing_of
from topology.errors import Infeasible

_FIRST_ALLOWANCE = 0.002  # of the relaxation's value: variables whose reduced cost is above it are left out at first
FOLDED_POLICIES = frozenset({"min_time", "min_ring_bytes"})  # those under which layers that are alike are placed alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An option for every operator, a layout for every tensor, and what it all costs.

    `cost` is in units of `Cost`: picoseconds, or ring bytes of a rank times the ranks. No choice costs less than `bound`.
    """

    options: tuple[ShardingOption, ...]
    layouts: Mapping[str, Layout]
    cost: int
    bound: float
    kept: frozenset[tuple[str, Layout]] | None = None  # copies that stay until the backward pass; None: all

    @property
    def gap(self) -> float:
        """Return by how much the best choice may be cheaper, relative to this one."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0


def choose(problem: ShardingProblem) -> tuple[Choice, LayoutCandidates]:
    """Return the cheapest choice and the candidates it was made from. Raises Infeasible where there is none."""
    started = monotonic()
    pricing = pricing_of(problem.mesh, problem.machine)
    fixed = {**problem.input_layouts, **problem.pins}
    fold = problem.policy in FOLDED_POLICIES and not problem.schedule and problem.stages is None
    candidates = enumerate_candidates(problem, pricing, find_alike(problem.graph, fixed, fold=fold))
    program = IntegerProgram(candidates)
    end = None if problem.time_limit_s is None else started + problem.time_limit_s
    assignment, bound = _solve_time(program, end) if problem.machine is not None else (_solve_bytes(program), None)
    cost = program.cost_of(assignment)
    return _flat(candidates, assignment, cost, cost if bound is None else min(bound, cost)), candidates


def _solve_time(program: IntegerProgram, end: float | None) -> tuple[Assignment, float]:
    """Return the best assignment found by `end`, and a lower bound of all."""

    def left() -> float | None:
        return None if end is None else end - monotonic()

    best = first_answer(program)
    best_cost = np.inf if best is None else float(program.cost_of(best))
    spare = best_cost - program.least_options
    if best is not None:  # no better choice has an option or a move that alone costs what is to spare
        best = program.prune(spare, best)
    program.build(spare)
    relaxed = program.relax(left())
    if relaxed is None:
        if best is None:
            raise Infeasible("no answer within the time limit", remedy="a longer limit, or more pinned tensors")
        return best, program.least_options
    bound, reduced, values = relaxed
    if program.is_integral(values):
        return program.read(values), bound
    allowance = max(1.0, _FIRST_ALLOWANCE * bound)
    while True:  # a variable whose reduced cost exceeds the gap to the bound cannot be in an optimal solution
        allowance = min(allowance, best_cost - bound + 1.0)
        found = program.choose(program.costs, reduced <= allowance, limit=None, seconds=left())
        if found is not None and found.cost < best_cost:
            best, best_cost = found.assignment, found.cost
        if best is not None:
            if (found is None or found.proved) and best_cost - bound <= allowance:
                return best, best_cost
            over = end is not None and monotonic() > end
            if over or (found is not None and not found.proved):
                return best, bound
        elif allowance > 2 * float(np.abs(program.costs).sum()) * program.unit:
            raise unsatisfiable()
        allowance *= 8


def _solve_bytes(program: IntegerProgram) -> Assignment:
    """Return the assignment of fewest ring bytes and, among those, of fewest collectives, ring steps and slices."""
    program.build()
    relaxed = program.relax(None)
    if relaxed is None:
        raise unsatisfiable()
    bound, reduced, _ = relaxed
    allowance = max(1.0, 0.01 * bound)
    while True:
        found = program.choose(program.costs, reduced <= allowance + 1e-6, limit=None)
        if found is not None and not found.proved:
            raise Infeasible(
                "no proof within the effort set for a choice",
                why=f"{len(program.costs):,} alternatives of layouts",
                remedy="pin more tensors, or give a layer instead of the model",
            )
        if found is not None and found.cost - bound <= allowance:
            break
        if allowance > 2 * float(program.costs.sum()) * program.unit + 1:
            raise unsatisfiable()
        allowance = max(allowance * 8, (found.cost - bound) if found else 0.0)
    keep = reduced <= found.cost - bound + max(1e-6, 1e-9 * abs(bound))
    tie_broken = program.choose(program.ties, keep, limit=(program.costs, found.cost))
    return (tie_broken or found).assignment


def _flat(candidates: LayoutCandidates, found: Assignment, cost: int, bound: float) -> Choice:
    """Return the choice for every operator and tensor, given it for their classes."""
    problem, alike = candidates.problem, candidates.alike
    options = []
    for number, each in enumerate(alike.operators):
        option = candidates.options[each][found.options[each]]
        operator = problem.operators[number]
        names = operand_names(problem, number)
        if tuple(name for name, _ in option.operands) != tuple(names):
            option = replace(
                option,
                operands=tuple((name, at) for name, (_, at) in zip(names, option.operands, strict=True)),
                collectives=tuple(replace(one, tensor=operator.result.name) for one in option.collectives),
            )
        options.append(option)
    layouts = {name: found.layouts[each] for name, each in alike.tensors.items()}
    members = alike.tensor_members()
    kept = frozenset((name, layout) for each, layout in found.kept for name in members[each])
    return Choice(
        options=tuple(options),
        layouts=layouts,
        cost=cost,
        bound=bound,
        kept=None if problem.memory is None else kept,
    )
