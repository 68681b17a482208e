"""Choose a sharding option for every operator and a layout for every tensor: the cheapest consistent choice, proved.

Every operator takes one option (`planner.sharding.operators.options`) and every tensor has one layout. A result is
redistributed once from the layout its operator produces to the layout of the tensor, and from there once to each layout
that consumers need, however many consumers share it. Every redistribution has a cost
(`planner.sharding.layouts.redistribution`), so the choice is a flow through a network (`integer_program.py`), whose
linear relaxation is nearly integral. There are many alternatives, so a bound comes first (`by_messages.py`), and only
what it does not rule out is built and solved.

With a time limit, the best answer so far is returned with its bound. Where ring bytes are counted, a last step fixes
them at the optimum and solves again for the fewest collectives, ring steps and local copies, so that nothing is divided
or moved without a gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.sharding.layouts.layout import Layout
from planner.sharding.operators.options import ShardingOption
from planner.sharding.problem.deadline import NO_DEADLINE, Deadline
from planner.sharding.problem.problem import ShardingProblem
from planner.sharding.solver.by_messages import solve_by_messages
from planner.sharding.solver.candidates import LayoutCandidates, enumerate_candidates, operand_names
from planner.sharding.solver.equivalence import find_equivalent
from planner.sharding.solver.first_answer import first_answer, on_all_axes, with_one_axis
from planner.sharding.solver.pricing import TimePricing, pricing_of
from planner.sharding.solver.solvable_program import Assignment, SolvableProgram
from topology.errors import Infeasible

FOLDED_POLICIES = frozenset({"min_time", "min_ring_bytes"})  # policies that place equivalent layers alike


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An option for every operator, a layout for every tensor, and the total cost.

    `cost` is in units of `Cost`: picoseconds, or ring bytes of a rank times the ranks. No choice costs less than
    `bound`. `held_bytes` are the bytes that a memory limit counts.
    """

    options: tuple[ShardingOption, ...]
    layouts: Mapping[str, Layout]
    cost: int
    bound: float
    kept: frozenset[tuple[str, Layout]] | None = None  # copies that stay until the backward pass; None: all
    held_bytes: float = 0.0

    @property
    def gap(self) -> float:
        """Return by how much, relative, the best choice may be cheaper than this one."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0


def choose(problem: ShardingProblem) -> tuple[Choice, LayoutCandidates]:
    """Return the cheapest choice and the candidates it was made from. Raises Infeasible if there is none."""
    deadline = problem.deadline
    first = _first(problem)
    listing = deadline if first is not None else NO_DEADLINE  # without an answer, the first one may take any time
    try:
        choice, candidates = _best(problem, deadline, listing)
    except Infeasible:
        if first is None or not deadline.over:
            raise
        return first
    if first is not None and first[0].cost < choice.cost:
        better, own = first
        return replace(better, bound=max(better.bound, min(choice.bound, float(better.cost)))), own
    return choice, candidates


def _first(problem: ShardingProblem) -> tuple[Choice, LayoutCandidates] | None:
    """Return an immediate answer, if there is a time limit and one is found (`first_answer.py`)."""
    pricing = pricing_of(problem.mesh, problem.machine)
    plain = not problem.schedule and problem.stages is None and not problem.routed
    if (
        problem.deadline == NO_DEADLINE
        or len(problem.mesh.names) < 2
        or not isinstance(pricing, TimePricing)
        or not plain
    ):
        return None
    try:
        easy, _ = _best(with_one_axis(problem), NO_DEADLINE, NO_DEADLINE)
    except Infeasible:
        return None
    equivalence = find_equivalent(problem.graph, {**problem.input_layouts, **problem.pins}, fold=False)
    found = first_answer(problem, pricing, equivalence, easy.options, dict(easy.layouts), easy.cost)
    kept = None if easy.kept is None else frozenset((n, on_all_axes(at, problem.mesh)) for n, at in easy.kept)
    choice = Choice(
        options=found.options,
        layouts=found.layouts,
        cost=found.cost,
        bound=found.bound,
        kept=kept,
        held_bytes=easy.held_bytes,
    )
    return choice, found.candidates


def _best(problem: ShardingProblem, deadline: Deadline, listing: Deadline) -> tuple[Choice, LayoutCandidates]:
    """Return the best choice that is found by `deadline`. Raises Infeasible if none is, or if the candidates are not
    listed by `listing`.
    """
    pricing = pricing_of(problem.mesh, problem.machine)
    fixed = {**problem.input_layouts, **problem.pins}
    fold = problem.policy in FOLDED_POLICIES and not problem.schedule and problem.stages is None
    candidates = enumerate_candidates(problem, pricing, find_equivalent(problem.graph, fixed, fold=fold), listing)
    program = SolvableProgram(candidates)
    assignment, bound = solve_by_messages(program, deadline)
    cost = program.cost_of(assignment)
    if problem.hidden_share:  # its full cost has no proved bound
        plain = SolvableProgram(replace(candidates, problem=replace(problem, hidden_share=0.0)))
        cost, bound = plain.cost_of(assignment), 0.0
    held = 0.0 if problem.memory is None else program.held(assignment)
    return replace(_flat(candidates, assignment, cost, min(bound, cost)), held_bytes=held), candidates


def _flat(candidates: LayoutCandidates, found: Assignment, cost: int, bound: float) -> Choice:
    """Return the choice for every operator and tensor from that for their classes."""
    problem, equivalence = candidates.problem, candidates.equivalence
    options = []
    for number, each in enumerate(equivalence.operators):
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
    layouts = {name: found.layouts[each] for name, each in equivalence.tensors.items()}
    members = equivalence.tensor_members()
    kept = frozenset((name, layout) for each, layout in found.kept for name in members[each])
    return Choice(
        options=tuple(options),
        layouts=layouts,
        cost=cost,
        bound=bound,
        kept=None if problem.memory is None else kept,
    )
