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
from planner.sharding.problem.problem import ShardingProblem
from planner.sharding.solver.alike import find_alike
from planner.sharding.solver.assignment import Assignment, unsatisfiable
from planner.sharding.solver.candidates import LayoutCandidates, enumerate_candidates, operand_names
from planner.sharding.solver.first_answer import first_answer
from planner.sharding.solver.pricing import pricing_of
from planner.sharding.solver.solvable_program import SolvableProgram
from topology.errors import Infeasible

_FIRST_ALLOWANCE = 0.002  # of the relaxation's value: variables whose reduced cost is above it are left out at first
_SMALLEST_SHARE = 1 / 4096
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
    program = SolvableProgram(candidates)
    end = None if problem.time_limit_s is None else started + problem.time_limit_s
    assignment, bound = _solve_time(program, end) if problem.machine is not None else (_solve_bytes(program), None)
    cost = program.cost_of(assignment)
    return _flat(candidates, assignment, cost, cost if bound is None else min(bound, cost)), candidates


@dataclass(frozen=True, slots=True)
class _Best:
    """The best assignment so far, if any, its cost, and whether none of the program that was built costs less."""

    assignment: Assignment | None
    cost: float
    proved: bool = False


def _solve_time(program: SolvableProgram, end: float | None) -> tuple[Assignment, float]:
    """Return the best assignment found by `end`, and a lower bound of all.

    No better choice has an option or a redistribution that alone costs more than what lies between the bound and the best
    cost: that is left out. Where too much is left, less is tried, which is a proof if the answer turns out close enough.
    """
    first = first_answer(program)
    best = _Best(first, np.inf if first is None else float(program.cost_of(first)))
    bound, share = program.least_options, 1.0
    while share >= _SMALLEST_SHARE:
        spare = best.cost - program.least_options
        if best.assignment is not None and share == 1.0:
            best = _Best(program.prune(spare, best.assignment), best.cost)
        try:
            program.build(spare * share, end)
        except Infeasible:
            if not np.isfinite(spare):
                raise
            if end is not None and monotonic() > end:
                break
            share /= 4
            continue
        found, relaxed = _solve_built(program, best, end, complete=share == 1.0)
        if share == 1.0:
            bound = max(bound, relaxed)
        if found.proved and found.cost - program.least_options <= spare * share:
            bound = found.cost
        improved, best = found.cost < best.cost, found
        over = end is not None and monotonic() > end
        if share == 1.0 or bound == best.cost or over or not improved:
            break
        share = 1.0  # what is to spare is less than it was
    if best.assignment is None:
        raise Infeasible("no answer within the time limit", remedy="a longer limit, or more pinned tensors")
    return best.assignment, min(bound, best.cost)


def _solve_built(program: SolvableProgram, best: _Best, end: float | None, *, complete: bool) -> tuple[_Best, float]:
    """Return the best of what was built or `best`, and the value of the relaxation. Raises Infeasible if `complete`."""

    def left() -> float | None:
        return None if end is None else end - monotonic()

    try:
        relaxed = program.relax(left())
    except Infeasible:
        if complete:
            raise
        return best, 0.0
    if relaxed is None:
        return best, 0.0
    bound, reduced, values = relaxed
    if program.is_integral(values):
        return (_Best(program.read(values), bound, proved=True) if bound <= best.cost else best), bound
    allowance = max(1.0, _FIRST_ALLOWANCE * bound)
    while True:  # a variable whose reduced cost exceeds the gap to the bound cannot be in an optimal solution
        allowance = min(allowance, best.cost - bound + 1.0)
        found = program.choose(program.costs, reduced <= allowance, limit=None, seconds=left())
        if found is not None and found.cost < best.cost:
            best = _Best(found.assignment, found.cost)
        if best.assignment is not None:
            if (found is None or found.proved) and best.cost - bound <= allowance:
                return _Best(best.assignment, best.cost, proved=True), bound
            over = end is not None and monotonic() > end
            if over or (found is not None and not found.proved):
                return best, bound
        elif allowance > 2 * float(np.abs(program.costs).sum()) * program.unit:
            raise unsatisfiable()
        allowance *= 8


def _solve_bytes(program: SolvableProgram) -> Assignment:
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
