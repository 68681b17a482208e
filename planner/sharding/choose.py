"""Which layouts for what is not pinned: the cheapest consistent choice for a whole graph, with a proof.

Every operator takes one option (`planner.sharding.rule`), every tensor has one layout. A result is brought from what its
operator leaves to the tensor's layout once; from there to what a consumer needs once for each layout needed, however many
consumers share it. All of that has a price per pair of layouts (`planner.sharding.redistribute`), so the choice is a flow
through a network, and almost one with integral vertices: its linear relaxation leaves few fractions (about 8 of 19,000
variables for a Llama layer on 8x8). Therefore:

    1. solve the relaxation (GLOP); its value bounds every choice from below
    2. drop what the reduced costs prove too expensive, let CP-SAT choose among the rest
    3. with the bytes fixed at that optimum, choose again by number of collectives, ring steps and local copies

The third step is what makes answers those that a person would write down: fewest collectives for the same bytes, nothing
cut or moved for no gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import gcd
from typing import Any

from planner.sharding.collectives import FREE, Cost, cost_of
from planner.sharding.follow import followed, settled
from planner.sharding.layout import Items, Layout, fits
from planner.sharding.operator import Operator
from planner.sharding.problem import Problem
from planner.sharding.redistribute import Redistributor
from planner.sharding.rule import Option, lifted, may_pend, options, projected
from planner.sharding.schedule import Schedule
from topology.errors import Infeasible

MAX_VARIABLES = 400_000
PARAMETERS = "num_workers:1 random_seed:1 max_deterministic_time:20 mip_max_bound:1e15"
_WORTH_FIXING = 0.01  # of the relaxation's value: what costs more than that above it is left out first


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An option for every operator and a layout for every tensor; `bound` says the bytes that no choice is below."""

    options: tuple[Option, ...]
    layouts: Mapping[str, Layout]
    cost: Cost
    proved: bool


def choose(problem: Problem) -> tuple[Choice, Network]:
    """Return the cheapest choice and the network it was made in. Raises Infeasible where there is none."""
    graph = network(problem)
    return _Program(problem, graph).solved(), graph


@dataclass(slots=True)
class Network:
    """All that may be chosen: options by operator, layouts by tensor, and who needs what of a tensor."""

    options: list[list[Option]]
    layouts: dict[str, list[Layout]]
    moves: dict[str, Redistributor]
    limited: dict[tuple[str, int], Redistributor] = field(default_factory=dict)  # by operand of scheduled operators
    uses: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # tensor: (operator, operand) of consumers

    def to_operand(self, name: str, operator: int) -> Redistributor:
        """Return what brings the tensor `name` to `operator`."""
        return self.limited.get((name, operator), self.moves[name])


def network(problem: Problem) -> Network:
    """Return the alternatives of `problem`. Raises Infeasible where an operator has none."""
    mesh, tensors = problem.mesh, problem.tensors
    known = {**problem.given, **problem.pins}
    special = _special(problem)
    pending = may_pend(problem.operators, problem.given, mesh)
    chosen = [options(o, tensors, mesh, pending=pending, special=special) for o in problem.operators]
    if problem.policy == "follow_weights":
        chosen = followed(problem, chosen)
    elif problem.policy is None:
        chosen = settled(problem, chosen)
    uses: dict[str, list[tuple[int, int]]] = {}
    needed: dict[str, set[Layout]] = {name: set() for name in tensors}
    for number, (operator, found) in enumerate(zip(problem.operators, chosen, strict=True)):
        names = [name for name, _ in found[0].operands]
        for operand, name in enumerate(names):
            uses.setdefault(name, []).append((number, operand))
            needed[name] |= {option.operands[operand][1] for option in found}
        needed[operator.result.name] |= {option.result for option in found}
    layouts = {
        name: [known[name]] if name in known else sorted(needed[name], key=repr) or [Layout(((),) * len(t.shape))]
        for name, t in tensors.items()
    }
    shared: dict[tuple[tuple[int, ...], str, frozenset[str]], Redistributor] = {}

    def redistributor(name: str, without: frozenset[str]) -> Redistributor:
        tensor = tensors[name]
        key = (tensor.shape, tensor.dtype, without)
        if key not in shared:
            shared[key] = Redistributor(tensor.shape, tensor.dtype, mesh, without=without)
        shared[key].allow([*layouts[name], *needed[name]])
        return shared[key]

    moves = {name: redistributor(name, frozenset()) for name in tensors}
    graph = Network(options=chosen, layouts=layouts, moves=moves, uses=uses)
    for number, operator in enumerate(problem.operators):
        ways = problem.schedule.get(operator.result.name, Schedule())
        for name, _ in operator.operands:
            own = problem.schedule.get(name, Schedule())
            without = (ways.without if ways.kind != "stay" else frozenset()) | (
                own.without if own.kind == "stay" else frozenset()
            )
            if without:
                graph.limited[name, number] = redistributor(name, without)
    return graph


def _special(problem: Problem) -> dict[str, frozenset[tuple[int, Items]]]:
    """Return cuts with whole blocks or uneven ones that are given somewhere, and where operators carry them."""
    mesh = problem.mesh
    found: dict[str, set[tuple[int, Items]]] = {name: set() for name in problem.tensors}
    for name, layout in {**problem.given, **problem.pins}.items():
        for dim, items in enumerate(layout.dims):
            size = problem.tensors[name].shape[dim]
            if any(isinstance(item, int) for item in items) or not fits(size, items, mesh):
                found[name].add((dim, items))

    def carry(
        source: str, dims: Sequence[Sequence[str]], target: str, wanted: Sequence[Sequence[str]], o: Operator
    ) -> None:
        for dim, items in list(found[source]):
            parts = lifted(items, tuple(dims[dim]), o.sizes, mesh) or {}
            for position, other in enumerate(wanted):
                if set(other) & set(parts):
                    cut = projected(tuple(other), o.sizes, parts, mesh)
                    if cut:
                        found[target].add((position, cut))

    for _ in range(2):  # there and back
        for operator in problem.operators:
            for name, dims in operator.operands:
                carry(name, dims, operator.result.name, operator.dims, operator)
        for operator in reversed(problem.operators):
            for name, dims in operator.operands:
                carry(operator.result.name, operator.dims, name, dims, operator)
    return {name: frozenset(cuts) for name, cuts in found.items()}


class _Program:
    """The integer program over a network: one-hot options, and flows from layout to layout of every tensor."""

    def __init__(self, problem: Problem, graph: Network) -> None:
        self.problem, self.graph, self.mesh = problem, graph, problem.mesh
        self.columns: list[tuple[int, int]] = []  # (bytes, the rest) of every variable, in whole units
        self.rows: list[dict[int, int]] = []  # equal to the right-hand side beside it
        self.right: list[int] = []
        self.shares: list[tuple[int, int]] = []  # (flow, use): a flow needs its use
        self._state()
        self.unit = reduce(gcd, (ring for ring, _ in self.columns), 0) or 1

    def _column(self, cost: Cost, *, late: int = 0, idle: int = 0) -> int:
        """Add a variable. `late` and `idle` break ties: where a tensor is moved, what an operator repeats."""
        ring, count, hops, _, slices = cost
        self.columns.append((ring, (count << 34) + (min(hops, 1 << 20) << 12) + (slices << 5) + (late << 2) + idle))
        if len(self.columns) > MAX_VARIABLES:
            raise Infeasible(
                "the graph is too large for an exact choice",
                why=f"more than {MAX_VARIABLES:,} alternatives of layouts",
                remedy="pin more tensors, or give a layer instead of the model",
            )
        return len(self.columns) - 1

    def _state(self) -> None:
        problem, graph, ranks = self.problem, self.graph, self.mesh.ranks
        self.option = [[self._column(cost_of(o.inside, ranks), idle=o.idle) for o in found] for found in graph.options]
        self.place: dict[str, dict[Layout, list[int]]] = {}
        for columns in self.option:
            self._equal(dict.fromkeys(columns, 1), 1)
        made = {operator.result.name: number for number, operator in enumerate(problem.operators)}
        for name in problem.tensors:
            layouts = graph.layouts[name]
            if name in made:
                self._made(name, made[name], layouts)
            else:
                self.place[name] = {layout: [self._column(FREE)] for layout in layouts}
                self._equal({c: 1 for columns in self.place[name].values() for c in columns}, 1)
            self._used(name)

    def _made(self, name: str, number: int, layouts: Sequence[Layout]) -> None:
        """From what the operator leaves to the tensor's layout.

        At equal price a pending reduction is made at once, a `set` moves its tensor itself, and any other tensor stays as
        it was left until an operator needs it elsewhere.
        """
        moves_itself = self.problem.operators[number].text.startswith("set(")
        self.place[name] = {layout: [] for layout in layouts}
        left: dict[Layout, list[int]] = {}
        for column, option in zip(self.option[number], self.graph.options[number], strict=True):
            left.setdefault(option.result, []).append(column)
        for result, columns in left.items():
            row = dict.fromkeys(columns, -1)
            for layout in layouts:
                price = self.graph.moves[name].cost(result, layout)
                if price is not None:
                    stays = result == layout or bool(result.pending) or moves_itself
                    flow = self._column(price, late=0 if stays else 2)
                    row[flow] = 1
                    self.place[name][layout].append(flow)
            self._equal(row, 0)

    def _used(self, name: str) -> None:
        """From the tensor's layout to what consumers need; a layout that several need is made once."""
        uses = self.graph.uses.get(name, [])
        shared: dict[tuple[Layout, Layout, frozenset[str]], int] = {}
        for number, operand in uses:
            moves = self.graph.to_operand(name, number)
            needing: dict[Layout, list[int]] = {}
            for column, option in zip(self.option[number], self.graph.options[number], strict=True):
                needing.setdefault(option.operands[operand][1], []).append(column)
            arrives: dict[Layout, dict[int, int]] = {layout: dict.fromkeys(cs, -1) for layout, cs in needing.items()}
            for layout, columns in self.place[name].items():
                leaves = dict.fromkeys(columns, -1)
                for wanted in needing:
                    price = moves.cost(layout, wanted)
                    if price is None:
                        continue
                    late = int(wanted != layout)
                    if len(uses) == 1 or not late:
                        flow = self._column(price, late=late)
                    else:
                        key = (layout, wanted, moves.without)
                        if key not in shared:
                            shared[key] = self._column(price, late=late)
                        flow = self._column(FREE)
                        self.shares.append((flow, shared[key]))
                    leaves[flow] = 1
                    arrives[wanted][flow] = 1
                self._equal(leaves, 0)
            for row in arrives.values():
                self._equal(row, 0)

    def _equal(self, row: dict[int, int], value: int) -> None:
        self.rows.append(row)
        self.right.append(value)

    def solved(self) -> Choice:
        """Return the best choice: least bytes first, then what is tidier."""
        bytes_ = [ring // self.unit for ring, _ in self.columns]
        bound, reduced = self._relaxed(bytes_)
        allowance = max(1.0, _WORTH_FIXING * bound)
        while True:  # what the reduced costs rule out costs more than the answer, so the answer is the best of all
            found = self._integral(bytes_, [price <= allowance + 1e-6 for price in reduced], None)
            if found is not None and found[0] - bound <= allowance:
                break
            if allowance > 2 * sum(bytes_) + 1:
                raise Infeasible(
                    "no choice of layouts satisfies what is pinned",
                    why="some pinned layout cannot be made, such as a pending sum that nothing leaves pending",
                    remedy="leave out a pin",
                )
            allowance = max(allowance * 8, (found[0] - bound) if found else 0.0)
        least = found[0]
        kept = [price <= least - bound + 1e-6 for price in reduced]
        tidier = self._integral([rest for _, rest in self.columns], kept, (bytes_, least))
        values = (tidier or found)[1]
        return self._choice(values, least * self.unit)

    def _relaxed(self, costs: Sequence[int]) -> tuple[float, list[float]]:
        """Return the relaxation's value and every variable's reduced cost."""
        from ortools.linear_solver import pywraplp  # noqa: PLC0415 - a tenth of a second

        solver = pywraplp.Solver.CreateSolver("GLOP")
        variables = [solver.NumVar(0, solver.infinity(), "") for _ in costs]
        self._constrain(solver, variables)
        objective = solver.Objective()
        for variable, cost in zip(variables, costs, strict=True):
            objective.SetCoefficient(variable, cost)
        objective.SetMinimization()
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            raise Infeasible(
                "no choice of layouts satisfies what is pinned",
                why="some pinned layout cannot be made, such as a pending sum that nothing leaves pending",
                remedy="leave out a pin",
            )
        return objective.Value(), [variable.reduced_cost() for variable in variables]

    def _integral(
        self, costs: Sequence[int], keep: Sequence[bool], limit: tuple[Sequence[int], int] | None
    ) -> tuple[int, list[bool]] | None:
        """Return (least cost, the values) with only `keep` in play and at most `limit` of another cost, or None."""
        from ortools.linear_solver import pywraplp  # noqa: PLC0415 - as above

        solver = pywraplp.Solver.CreateSolver("SAT")
        solver.SetSolverSpecificParametersAsString(PARAMETERS)
        variables = [solver.BoolVar("") if kept else solver.IntVar(0, 0, "") for kept in keep]
        self._constrain(solver, variables)
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
        if solver.Solve() != pywraplp.Solver.OPTIMAL:
            return None
        values = [variable.solution_value() > 0.5 for variable in variables]
        return sum(cost for cost, value in zip(costs, values, strict=True) if value), values

    def _constrain(self, solver: Any, variables: Sequence[Any]) -> None:
        for row, value in zip(self.rows, self.right, strict=True):
            constraint = solver.Constraint(value, value)
            for column, factor in row.items():
                constraint.SetCoefficient(variables[column], factor)
        for flow, use in self.shares:
            constraint = solver.Constraint(-solver.infinity(), 0)
            constraint.SetCoefficient(variables[flow], 1)
            constraint.SetCoefficient(variables[use], -1)

    def _choice(self, values: Sequence[bool], ring: int) -> Choice:
        picked = tuple(
            found[next(n for n, column in enumerate(columns) if values[column])]
            for found, columns in zip(self.graph.options, self.option, strict=True)
        )
        layouts = {
            name: next(layout for layout, columns in places.items() if any(values[c] for c in columns))
            for name, places in self.place.items()
        }
        return Choice(options=picked, layouts=layouts, cost=(ring, 0, 0, 0, 0), proved=True)
