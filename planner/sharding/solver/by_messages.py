"""The assignment of least time: a bound by messages, and an exact solution of what the bound does not rule out.

    1. sweeps of messages raise a lower bound, and labels taken by them are answers (`message_passing.py`)
    2. from time to time the pairs that cost least above the bound are solved exactly, for a better answer
    3. where few pairs cost no more than the best answer, those are solved exactly, which proves the best

With a limit of memory, held bytes have a price, which is raised until the answer fits and then lowered as far as it does.
The best answer so far and its bound are there at any moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from planner.sharding.solver.assignment import Assignment, unsatisfiable
from planner.sharding.solver.integer_program import Pairs
from planner.sharding.solver.message_passing import NO_PATH, MessagePassing
from planner.sharding.solver.solvable_program import SolvableProgram
from planner.sharding.solver.sparse_rows import Numbers
from topology.errors import Infeasible

_FEW = 8_000  # pairs: solved in less time than more sweeps take
_CHEAPEST = (6_000, 30_000)  # pairs that are solved for an answer, one number after the other
_CHEAPEST_S = 8.0  # seconds for that, where they do not solve at once
_MANY = 250_000  # pairs, beyond which nothing is solved exactly
_SWEEPS = 10  # between looks at what is left
_MAX_SWEEPS = 2000
_STALE = 2e-6  # relative rise of the bound in a sweep below which it is left
_PRICES = 12  # tried for a byte
_PRICED_SWEEPS = 20
_FIRST_ALLOWANCE = 0.002  # of the relaxation's value: variables whose reduced cost is above it are left out at first


@dataclass(slots=True)
class _Search:
    program: SolvableProgram
    graph: MessagePassing
    end: float | None
    best: Assignment | None = None
    cost: float = np.inf
    bound: float = 0.0
    above: dict[Pairs, Numbers] = field(default_factory=dict)  # what pairs cost above the bound at least

    @property
    def proved(self) -> bool:
        return self.cost - self.bound < 1.0

    @property
    def over(self) -> bool:
        return self.end is not None and monotonic() > self.end

    def offer(self, assignment: Assignment) -> bool:
        """Take an assignment that is better than the best, if it can be; return whether memory allows it."""
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
        """Send messages there and back `number` times; return whether the assignment that they mean fits memory."""
        fits = True
        for at in range(number):
            found = self.graph.sweep()
            if at % 2 or at == number - 1 or self.best is None:
                fits = self.offer(self.graph.assignment(self.graph.decoded()))
            if found > self.bound:
                self.bound = found
                if at == number - 1 or self.over:
                    self.above = self.graph.above()
            if self.proved or self.over:
                break
            if at % 2:
                self.graph.reshare()
        return fits

    def find_price(self) -> None:
        """Raise the price of held bytes until what is taken fits, and look for the lowest that does."""
        memory = self.program.problem.memory
        if memory is None or self.sweep(_PRICED_SWEEPS) or self.proved:
            return
        low, high = 0.0, np.inf
        self.graph.price = 0.01 * self.bound / memory.limit_bytes
        for _ in range(_PRICES):
            if self.sweep(_PRICED_SWEEPS):
                high = self.graph.price
            else:
                low = self.graph.price
            if self.over or self.proved:
                return
            if high < 1.02 * low:
                break
            self.graph.price = (low + high) / 2 if np.isfinite(high) else 4 * low
        self.graph.price = high if np.isfinite(high) else self.graph.price

    def solve_cheapest(self) -> None:
        """Solve exactly the pairs that cost least above the bound: an answer, and no proof."""
        every = np.concatenate([values.ravel() for values in self.above.values()])
        end = self.end
        for most in _CHEAPEST:
            least = np.partition(every, most)[:most] if len(every) > most else every
            self.end = min(monotonic() + _CHEAPEST_S, np.inf if end is None else end)
            done = self._solve(min(float(least.max()), self.cost - self.bound))
            self.end = end
            if done is None or len(every) <= most:
                break

    def solve_rest(self, most: int) -> bool:
        """Solve exactly what may be in a better answer, if that is at most `most` pairs; return whether it was done."""
        if not np.isfinite(self.cost) or self._number(self.cost - self.bound) > most:
            return False
        proof = self._solve(self.cost - self.bound)
        if proof is not None:
            self.bound = max(self.bound, min(proof, self.cost))
        return proof is not None

    def _number(self, spare: float) -> int:
        return sum(int((values <= spare + 1).sum()) for values in self.above.values())

    def _solve(self, spare: float) -> float | None:
        """Solve the pairs that cost at most `spare` above the bound; return a bound of those, or None for none."""
        allowed: dict[Pairs, NDArray[np.bool_]] = {pairs: values <= spare + 1 for pairs, values in self.above.items()}
        program = self.program
        try:
            program.build(allowed)
            relaxed = program.relax(self._left())
        except Infeasible:
            return self.cost if np.isfinite(self.cost) else None  # nothing better is left
        if relaxed is None:
            return None
        bound, reduced, values = relaxed
        if program.is_integral(values):
            self.offer(program.read(values))
            return bound
        if bound >= self.cost - 1:
            return self.cost
        return self._choose(bound, reduced)

    def _choose(self, bound: float, reduced: Numbers) -> float:
        """Let CP-SAT choose among variables of ever larger reduced cost; return a bound of what was built."""
        program, allowance = self.program, max(1.0, _FIRST_ALLOWANCE * bound)
        most = 2 * float(np.abs(program.costs).sum()) * program.unit
        while (
            not self.over
        ):  # a variable whose reduced cost exceeds the gap to the bound cannot be in an optimal solution
            allowance = min(allowance, self.cost - bound + 1.0)
            found = program.choose(program.costs, reduced <= allowance, limit=None, seconds=self._left())
            if found is not None:
                self.offer(found.assignment)
            if (found is None or found.proved) and self.cost - bound <= allowance:
                return self.cost
            if allowance > most or (found is not None and not found.proved):
                break
            allowance *= 8
        return bound

    def _left(self) -> float | None:
        return None if self.end is None else self.end - monotonic()


def solve_by_messages(program: SolvableProgram, end: float | None) -> tuple[Assignment, float]:
    """Return the best assignment found by the time `end`, and a lower bound of all. Raises Infeasible where there is none."""
    search = _Search(program, MessagePassing(program), end)
    if program.least_held() > program.most_held():
        raise unsatisfiable(program.problem.memory)
    search.find_price()
    for looks in range(_MAX_SWEEPS // _SWEEPS):
        before = search.graph.bound  # at the price of memory that is asked now
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
        if search.over:
            raise Infeasible("no answer within the time limit", remedy="a longer limit, or more pinned tensors")
        raise unsatisfiable(program.problem.memory)
    return search.best, min(search.bound, search.cost)
