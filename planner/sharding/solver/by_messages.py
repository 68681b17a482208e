"""The assignment of least cost: a bound by messages, and an exact solution of what the bound does not rule out.

1. sweeps of messages raise a lower bound, and the labels they suggest are answers (`message_passing.py`)
2. from time to time the pairs that cost least above the bound are solved exactly, for a better answer and a better
   bound
3. when few pairs cost no more than the best answer, these are solved exactly, which proves the optimum

With a memory limit, held bytes have a price (a Lagrange multiplier), which is raised until the answer fits and then
lowered while it does. The best answer so far and its bound are available at any moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from planner.sharding.problem.deadline import Deadline
from planner.sharding.solver.integer_program import Pairs
from planner.sharding.solver.message_passing import NO_PATH, MessagePassing
from planner.sharding.solver.solvable_program import Assignment, SolvableProgram, unsatisfiable
from planner.sharding.solver.sparse_rows import Numbers
from topology.errors import Infeasible

_FEW = 20_000  # number of pairs that are solved in less time than further sweeps take
_CHEAPEST = (4_000, 20_000)  # numbers of pairs that are solved for an answer, one after the other
_CHEAPEST_S = 30.0  # seconds for that, if they are not solved at once
_MANY = 250_000  # number of pairs beyond which nothing is solved exactly
_SWEEPS = 10  # sweeps between two counts of the remaining pairs
_MAX_SWEEPS = 2000
_STALE = 2e-6  # relative rise of the bound in a sweep below which sweeps stop
_PRICES = 12  # prices tried for a byte
_PRICED_SWEEPS = 8
_PRICING_SHARE = 0.3  # share of the time for finding the price of a byte


@dataclass(slots=True)
class _Search:
    program: SolvableProgram
    graph: MessagePassing
    deadline: Deadline
    best: Assignment | None = None
    cost: float = np.inf
    bound: float = 0.0
    above: dict[Pairs, Numbers] = field(default_factory=dict)  # lower bound of what each pair costs above `base`
    base: float = 0.0  # the bound to which `above` belongs
    pair_s: float = 0.0  # seconds of solving per pair, the most so far

    @property
    def proved(self) -> bool:
        return self.cost - self.bound < 1.0

    @property
    def over(self) -> bool:
        return self.deadline.over

    def offer(self, assignment: Assignment) -> bool:
        """Keep an assignment if it is better than the best; return whether memory allows it."""
        fits = self.program.fits(assignment)
        if fits:
            assignment = self.program.with_kept_copies(assignment)
            try:
                cost = self.program.cost_of(assignment)
            except Infeasible:
                return True
            if cost < self.cost:
                self.best, self.cost = assignment, cost
        return fits

    def sweep(self, number: int) -> bool:
        """Send messages in both directions `number` times; return whether the resulting assignment fits memory."""
        fits = True
        for at in range(number):
            found = self.graph.sweep()
            if at % 2 or at == number - 1 or self.best is None:
                fits = self.offer(self.graph.assignment(self.graph.decoded()))
            if found > self.bound:
                self.bound = found
                if at == number - 1 or self.over:
                    self.above, self.base = self.graph.above(), found
            if self.proved or self.over:
                break
            if at % 2:
                self.graph.reshare()
        return fits

    def find_price(self) -> None:
        """Raise the price of held bytes until the answer fits, and find the lowest such price."""
        memory = self.program.problem.memory
        if memory is None or self.sweep(_PRICED_SWEEPS) or self.proved:
            return
        soon = self.deadline.sooner(_PRICING_SHARE * self.deadline.left_s)
        low, high = 0.0, np.inf
        self.graph.reprice(0.01 * self.bound / memory.limit_bytes)
        for _ in range(_PRICES):
            if self.sweep(_PRICED_SWEEPS):
                high = self.graph.price
            else:
                low = self.graph.price
            if self.over or self.proved:
                return
            if high < 1.02 * low or soon.over:
                break
            self.graph.reprice((low + high) / 2 if np.isfinite(high) else 4 * low)
        self.graph.reprice(high if np.isfinite(high) else self.graph.price)

    def solve_cheapest(self) -> None:
        """Solve exactly the pairs that cost least above the bound: an answer without proof."""
        every = np.concatenate([np.zeros(0), *(values.ravel() for values in self.above.values())])
        for most in _CHEAPEST:
            number = min(most, self._affordable())
            least = np.partition(every, number)[:number] if len(every) > number else every
            if not len(least):
                break
            spare = min(float(least.max()), self.cost - self.base)
            if not self._solve(spare, self.deadline.sooner(_CHEAPEST_S)) or self.proved or len(every) <= most:
                break

    def solve_rest(self, most: int) -> bool:
        """Solve exactly the pairs that may be in a better answer, if these are at most `most`; return whether it was
        done.
        """
        spare = self.cost - self.base
        if not np.isfinite(spare) or self._number(spare) > min(most, self._affordable()):
            return False
        return self._solve(spare, self.deadline)

    def break_ties(self) -> None:
        """Among the answers of least cost, take the one with fewest collectives, ring steps and slices."""
        self.program.build(self._allowed(self.cost - self.base))
        relaxed = self.program.relax()
        if relaxed is not None:
            bound, reduced, _ = relaxed
            keep = reduced <= self.cost - bound + max(1e-6, 1e-9 * abs(bound))
            self.best = self.program.with_fewest_steps(keep, self.cost) or self.best

    def _allowed(self, spare: float) -> dict[Pairs, NDArray[np.bool_]]:
        return {pairs: values <= spare + 1 for pairs, values in self.above.items()}

    def _number(self, spare: float) -> int:
        return sum(int((values <= spare + 1).sum()) for values in self.above.values())

    def _affordable(self) -> int:
        """Return how many pairs can be solved in the remaining time, as far as is known."""
        left = self.deadline.left_s / self.pair_s if self.pair_s else np.inf
        return int(min(_MANY, left))

    def _solve(self, spare: float, deadline: Deadline) -> bool:
        """Solve the pairs that cost at most `spare` above `base`; return whether the solver finished."""
        started, number = monotonic(), self._number(spare)
        found = self._least_of_pairs(spare, deadline)
        self.pair_s = max(self.pair_s, (monotonic() - started) / max(number, _CHEAPEST[0]))
        if found is None:
            return False
        self.bound = max(self.bound, min(found, self.base + spare, self.cost))  # what was left out costs more
        return True

    def _least_of_pairs(self, spare: float, deadline: Deadline) -> float | None:
        """Return a lower bound of the pairs that cost at most `spare` above `base`, or None if the time is over."""
        program = self.program
        try:
            program.build(self._allowed(spare))
            relaxed = None if deadline.over else program.relax(deadline)
        except Infeasible:
            return np.inf  # nothing better is left
        if relaxed is None:
            return None
        bound, reduced, values = relaxed
        if program.is_integral(values):
            self.offer(program.read(values))
            return bound
        if bound >= self.cost - 1:
            return bound
        # a variable whose reduced cost exceeds the gap to the bound cannot be in an optimal solution
        found, least = program.branch_and_bound(reduced <= self.cost - bound + 1.0, deadline)
        if found is not None:
            self.offer(found)
        return max(bound, least)


def solve_by_messages(program: SolvableProgram, deadline: Deadline) -> tuple[Assignment, float]:
    """Return the best assignment found before `deadline`, and a lower bound of all. Raises Infeasible if there
    is none.
    """
    if program.least_held() > program.most_held():
        raise unsatisfiable(program.problem.memory)
    search = _Search(program, MessagePassing(program), deadline)
    search.offer(search.graph.assignment(search.graph.decoded()))
    search.find_price()
    if program.problem.memory is not None and not search.proved and not search.over:
        search.solve_cheapest()
    for looks in range(_MAX_SWEEPS // _SWEEPS):
        before = search.graph.bound  # at the present price of memory
        search.sweep(_SWEEPS)
        if search.proved or search.over or search.solve_rest(_FEW):
            break
        if search.bound > NO_PATH / 2:
            raise unsatisfiable(program.problem.memory)
        stale = search.graph.bound - before < _SWEEPS * _STALE * search.bound
        if stale or looks % 4 == 3:
            search.solve_cheapest()
        if search.proved or search.over or search.solve_rest(_FEW):
            break
        if stale:
            search.solve_rest(_MANY)
            break
    if search.best is None:
        deadline.check()
        raise unsatisfiable(program.problem.memory)
    if not program.timed and search.proved:
        search.break_ties()
        search.bound = search.cost  # bytes are whole numbers
    return search.best, min(search.bound, search.cost)
