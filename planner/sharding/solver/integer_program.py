"""The choice as an integer program: a variable per option of an operator, per layout of a tensor, and per
redistribution.

For every class of tensors there are two networks of redistributions: from the layouts that its operator produces to the
layout that the tensor has, and from there to the layouts that its consumers need. One unit flows from an option into
one layout, and from there to every consumer. A redistribution that several consumers need is paid once for the forward
pass and once for the backward pass; or once for both, if memory allows the copy to be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import gcd, log2, prod

import numpy as np
from numpy.typing import NDArray

from planner.sharding.layouts.collectives import ALL_REDUCE, Collective
from planner.sharding.layouts.layout import Layout, local_shape
from planner.sharding.layouts.redistribution import tie_of
from planner.sharding.solver.candidates import LayoutCandidates
from planner.sharding.solver.move_times import MoveTimes
from planner.sharding.solver.pricing import TimePricing
from planner.sharding.solver.sparse_rows import Integers, Numbers, SparseRows
from simulator.config.runtime import ELEMENT_BYTES
from topology.errors import Infeasible

Pairs = tuple[str, int, int, int]  # redistributions: passing, result or use; class of tensors; class and operand
MAX_VARIABLES = 400_000
EXACT_BITS = 48  # costs beyond 2**48 units are rounded, since solvers compute in doubles


class IntegerProgram:
    """The program of all candidates; costs in picoseconds on a machine, else in ring bytes with ties broken."""

    def __init__(self, candidates: LayoutCandidates) -> None:
        self.candidates, self.problem = candidates, candidates.problem
        self.mesh, self.timed = self.problem.mesh, isinstance(candidates.pricing, TimePricing)
        self.move_times = (
            MoveTimes(self.mesh, candidates.pricing, candidates.deadline, self.problem.hidden_share)
            if isinstance(candidates.pricing, TimePricing)
            else None
        )
        self.memory_unit = 1.0
        self.allowed: Mapping[Pairs, NDArray[np.bool_]] = {}
        self.layout_lists: list[list[Layout]] = []
        self._clear()
        self.members = candidates.equivalence.members()
        self.tensor_members = candidates.equivalence.tensor_members()
        self._producers, self._consumers = self.problem.graph.producers, self.problem.graph.consumers
        self._describe()

    def _clear(self) -> None:
        self._costs: list[Integers] = []
        self._ties: list[Integers] = []
        self._count = 0
        self.equal, self.most = SparseRows(), SparseRows()
        self.kept: list[tuple[int, int, Layout, float]] = []  # variable, class, layout of the copy, its bytes

    def build(self, allowed: Mapping[Pairs, NDArray[np.bool_]] | None = None) -> None:
        """Make the variables and rows; for redistributions in `allowed`, only the pairs of layouts listed there.

        Raises Infeasible for more than MAX_VARIABLES.
        """
        self.allowed = allowed or {}
        self._clear()
        self._build()
        self.costs = np.concatenate([np.zeros(0, dtype=np.int64), *self._costs])
        self.ties = np.concatenate([np.zeros(0, dtype=np.int64), *self._ties])
        # Integer costs divided by their common divisor; rounded to coarser units where the solver would not be exact.
        self.unit = reduce(gcd, (int(c) for c in np.unique(self.costs)), 0) or 1
        self.unit *= max(1, int(np.abs(self.costs).sum()) // self.unit >> EXACT_BITS)
        self.costs = np.rint(self.costs / self.unit)

    # --- what is built

    def _add(self, costs: Sequence[int] | Integers, ties: Sequence[int] | Integers | None = None) -> Integers:
        """Add variables and return their numbers."""
        new = np.arange(self._count, self._count + len(costs), dtype=np.int64)
        self._count += len(costs)
        if self._count > MAX_VARIABLES:
            raise Infeasible(
                "the graph is too large for an exact choice",
                why=f"more than {MAX_VARIABLES:,} alternatives of layouts",
                remedy="pin more tensors, or give a layer instead of the model",
            )
        self._costs.append(np.asarray(costs, dtype=np.int64))
        self._ties.append(np.zeros(len(costs), dtype=np.int64) if ties is None else np.asarray(ties, dtype=np.int64))
        return new

    def _describe(self) -> None:
        """Compute all costs, before any variable is made."""
        pricing, problem, equivalence = self.candidates.pricing, self.problem, self.candidates.equivalence
        self.option_costs: list[Integers] = []
        self.option_ties: list[list[int]] = []
        tensors = dict(problem.tensors)
        for found, same in zip(self.candidates.options, self.members, strict=True):
            operator = problem.operators[same[0]]
            back = operator.result.name in problem.differentiated
            inside = [pricing.collectives(option.collectives, duals=back) for option in found]
            gradients = sum(name in problem.differentiated for name, _ in operator.operands) if back else 0
            work = pricing.operators(operator, found, tensors, gradients=gradients)
            costs = [cost[0] + own for cost, own in zip(inside, work, strict=True)]
            self.option_costs.append(np.array(costs, dtype=np.int64) * len(same))
            self.option_ties.append([tie_of(cost) + o.replicated_axes for cost, o in zip(inside, found, strict=True)])
        self.layout_lists = []
        self.layout_costs: list[Integers] = []  # cost of a tensor in each of its layouts
        self.producer: list[int | None] = []
        self.consumers: list[list[tuple[int, int]]] = []
        for name, *_ in self.tensor_members:
            self.layout_lists.append(self._possible_layouts(name))
            self.producer.append(equivalence.operators[self._producers[name]] if name in self._producers else None)
            self.consumers.append(sorted({(equivalence.operators[n], p) for n, p in self._consumers.get(name, ())}))
            self.layout_costs.append(self._gradient_costs(len(self.layout_costs)))
        self._prepare_moves()

    def _gradient_costs(self, each: int) -> Integers:
        """Return the cost of reducing a parameter's gradient, by layout: every rank has the gradient of its own
        copy.
        """
        names, layouts, pricing = self.tensor_members[each], self.layout_lists[each], self.candidates.pricing
        costs = np.zeros(len(layouts), dtype=np.int64)
        name = names[0]
        if name in self.problem.differentiated and name in self.problem.graph.parameters:
            for number, layout in enumerate(layouts):
                copies = tuple(axis for axis in self.mesh.names if axis not in layout.axes())
                if self.mesh.size(copies) > 1:
                    shape, dtype = (
                        local_shape(self.problem.tensors[name].shape, layout, self.mesh),
                        self.problem.tensors[name].dtype,
                    )
                    reduction = Collective(
                        kind=ALL_REDUCE,
                        mesh_dim=self.mesh.group_name(copies),
                        axes=copies,
                        group=self.mesh.size(copies),
                        dtype=dtype,
                        local_in=shape,
                        local_out=shape,
                        tensor=name,
                        reducer="sum",
                    )
                    costs[number] = pricing.collectives((reduction,))[0] * len(names)
        return costs

    def _prepare_moves(self) -> None:
        """Register all layouts with the times of redistributions."""
        if self.move_times is None:
            return
        for each, (made, uses) in enumerate(zip(self.producer, self.consumers, strict=True)):
            name = self.tensor_members[each][0]
            found = dict.fromkeys([*self.layout_lists[each], *self.candidates.layouts[name]])
            found |= dict.fromkeys(self.results_of(made)[0] if made is not None else ())
            for use in uses:
                found |= dict.fromkeys(self.needs_of(*use)[0])
            self.move_times.prepare(self.problem.tensors[name], self.candidates.redistributor_for(name), found)

    def _build(self) -> None:
        self.options: list[Integers] = []
        for costs, ties in zip(self.option_costs, self.option_ties, strict=True):
            self.options.append(self._add(costs, ties))
            self.equal.add([self.options[-1]], [1], 1)
        self.layouts: list[Integers] = []  # by class of tensors, one variable a layout; none where `passing`
        for each, (made, uses) in enumerate(zip(self.producer, self.consumers, strict=True)):
            if made is not None and self.passing(each):
                self.layouts.append(np.zeros(0, dtype=np.int64))
                self._add_direct_moves(each, made, uses[0])
                continue
            layouts = self.layout_lists[each]
            variables = self._add(self.layout_costs[each])
            self.layouts.append(variables)
            if made is None:
                self.equal.add([variables], [1], 1)
            else:
                self._add_result_moves(each, made, layouts, variables)
            self._add_stage_sends(self.tensor_members[each][0], layouts, variables)
            self._add_operand_moves(each, uses, layouts, variables)
        self._tie_gradients()
        self._limit_memory()

    def passing(self, each: int) -> bool:
        """Return whether a class of tensors goes from its operator to one consumer, so that its layout in between is
        free.
        """
        name, graph = self.tensor_members[each][0], self.problem.graph
        fixed = name in self.problem.pins or name in graph.outputs or name in graph.gradients.values()
        plain = self.timed and not fixed and self.problem.stages is None and len(self.consumers[each]) == 1
        saved = self.problem.memory is not None and self._is_saved(name)
        return plain and not saved and self.producer[each] is not None

    def _add_direct_moves(self, each: int, made: int, use: tuple[int, int]) -> None:
        results, makers = self.results_of(made)
        needed, users = self.needs_of(*use)
        costs, ties = self.move_costs(each, results, needed, self.members[use[0]][0])
        count = len(self.tensor_members[each])
        numbers = self._add_network(costs * count, ties, ("passing", each, *use))
        self.equal.add_flows(numbers, [self.options[made][made_by] for made_by in makers])
        self.equal.add_flows(numbers.T, [self.options[use[0]][needed_by] for needed_by in users])

    def _possible_layouts(self, name: str) -> list[Layout]:
        """Return the layouts that a tensor may have; on a machine, results of the graph are not left pending."""
        found, graph = self.candidates.layouts[name], self.problem.graph
        fixed = name in self.problem.pins or name in self.problem.input_layouts
        parameter = next((p for p, gradient in graph.gradients.items() if gradient == name and not fixed), None)
        if parameter is not None:  # it has the layout of its parameter
            first = self.tensor_members[self.candidates.equivalence.tensors[parameter]][0]
            found = list(dict.fromkeys([*found, *self.candidates.layouts[first]]))
        if self.timed and not fixed and (name in graph.outputs or name in graph.parameters):
            whole = Layout(((),) * len(self.problem.tensors[name].shape))
            return [layout for layout in found if not layout.pending] or [whole]
        if name in graph.gradients.values() and not fixed:
            return [layout for layout in found if not layout.pending] or found
        return found

    def move_costs(
        self, each: int, sources: Sequence[Layout], targets: Sequence[Layout], operator: int | None = None
    ) -> tuple[Numbers, Integers]:
        """Return costs and tie breakers of all pairs of layouts; infinite without a path."""
        name = self.tensor_members[each][0]
        redistributor = self.candidates.redistributor_for(name, operator)
        if self.move_times is not None:
            duals = name in self.problem.differentiated
            times = self.move_times.between(self.problem.tensors[name], redistributor, sources, targets, duals=duals)
            return times, np.zeros(times.shape, dtype=np.int64)
        return redistributor.costs_between(sources, targets)

    def results_of(self, each: int) -> tuple[list[Layout], list[Integers]]:
        """Return the layouts that a class of operators may produce, and the options that produce each."""
        found: dict[Layout, list[int]] = {}
        for number, option in enumerate(self.candidates.options[each]):
            found.setdefault(option.result, []).append(number)
        return list(found), [np.array(numbers, dtype=np.int64) for numbers in found.values()]

    def needs_of(self, each: int, position: int) -> tuple[list[Layout], list[Integers]]:
        """Return the layouts in which a class of operators may need an operand, and the options that need each."""
        found: dict[Layout, list[int]] = {}
        for number, option in enumerate(self.candidates.options[each]):
            found.setdefault(option.operands[position][1], []).append(number)
        return list(found), [np.array(numbers, dtype=np.int64) for numbers in found.values()]

    def _add_result_moves(self, each: int, made: int, layouts: Sequence[Layout], variables: Integers) -> None:
        """Add the redistributions from the layouts an operator may produce to the layouts its result may have.

        At equal cost, a pending reduction is performed right after the operator, a `set` redistributes its own result,
        and any other tensor keeps the layout it was produced in until a consumer needs another one.
        """
        count = len(self.tensor_members[each])
        moves_itself = self.problem.operators[self.members[made][0]].text.startswith("set(")
        results, options = self.results_of(made)
        costs, ties = self.move_costs(each, results, layouts)
        late = np.array([[int(r != t and not r.pending and not moves_itself) for t in layouts] for r in results])
        ties = ties + (late << 3 if late.size else 0)
        numbers = self._add_network(costs * count, ties, ("result", each, made, 0))
        self.equal.add_flows(numbers, [self.options[made][made_by] for made_by in options])
        self.equal.add_flows(numbers.T, list(variables[:, None]))

    def _add_network(self, costs: Numbers, ties: Integers, pairs: Pairs, *, priced: bool = True) -> Integers:
        """Add a variable for every pair that has a path and is allowed; return their numbers, -1 for the others."""
        numbers = np.full(costs.shape, -1, dtype=np.int64)
        finite = np.isfinite(costs)
        if pairs in self.allowed:
            finite &= self.allowed[pairs]
        own = np.rint(costs[finite]).astype(np.int64) if priced else np.zeros(int(finite.sum()), dtype=np.int64)
        numbers[finite] = self._add(own, ties[finite])
        return numbers

    def _add_operand_moves(
        self,
        each: int,
        uses: Sequence[tuple[int, int]],
        layouts: Sequence[Layout],
        variables: Integers,
    ) -> None:
        """Add the redistributions to the layouts that consumers need; one that several consumers need is paid once."""
        count = len(self.tensor_members[each])
        shared: dict[tuple[int, Layout, frozenset[str], bool], int] = {}
        by_phase: dict[tuple[int, Layout], dict[bool, tuple[int, int]]] = {}
        for consumer, position in uses:
            number = self.members[consumer][0]
            backward = self.is_backward(number)
            needed, options = self.needs_of(consumer, position)
            costs, ties = self.move_costs(each, layouts, needed, number)
            late = np.array([[int(layout != need) for need in needed] for layout in layouts])
            pairs = ("use", each, consumer, position)
            if len(uses) == 1:
                numbers = self._add_network(costs * count, ties + (late << 2), pairs)
            else:
                numbers = self._add_network(costs, np.zeros(costs.shape, int), pairs, priced=False)
                excluded = self.candidates.redistributor_for(self.tensor_members[each][0], number).excluded_kinds
                movers, payers = [], []
                for i, j in np.argwhere((numbers >= 0) & (late > 0)):
                    key = (int(i), needed[j], excluded, backward)
                    if key not in shared:
                        tie = int(ties[i, j]) + (1 << 2)
                        cost = round(float(costs[i, j]) * count)
                        shared[key] = int(self._add([cost], [tie])[0])
                        by_phase.setdefault((int(i), needed[j]), {})[backward] = (shared[key], cost)
                    movers.append(numbers[i, j])
                    payers.append(shared[key])
                self.most.add_pairs(np.array(movers, dtype=np.int64), np.array(payers, dtype=np.int64))
            self.equal.add_flows(numbers, list(variables[:, None]))
            self.equal.add_flows(numbers.T, [self.options[consumer][needed_by] for needed_by in options])
        self._keep_copies(each, by_phase)

    def _keep_copies(self, each: int, by_phase: dict[tuple[int, Layout], dict[bool, tuple[int, int]]]) -> None:
        """Let the backward pass use the copy made by the forward pass, at the memory of keeping it."""
        name, count = self.tensor_members[each][0], len(self.tensor_members[each])
        for (_, need), phases in by_phase.items():
            if len(phases) == 2:
                (forward, _), (backward, cost) = phases[False], phases[True]
                (kept,) = self._add([-cost], [0])  # what the backward pass would pay for the move is refunded
                for move in (forward, backward):
                    self.most.add([np.array([kept]), np.array([move])], [1, -1], 0)
                self.kept.append((int(kept), each, need, self.copy_bytes(name, need) * count))

    def _add_stage_sends(self, name: str, layouts: Sequence[Layout], variables: Integers) -> None:
        """Add the sends to every other pipeline stage that uses a tensor."""
        stages, producers = self.problem.stages, self._producers
        if stages is None or name not in producers:
            return
        users = {stages.operator_stages[number] for number, _ in self._consumers.get(name, ())}
        others = users - {stages.operator_stages[producers[name]]}
        for layout, variable in zip(layouts, variables, strict=True):
            found = stages.send_collectives(self.problem.tensors[name], layout, self.mesh)
            cost = self.candidates.pricing.collectives(found)
            for _ in others:
                send = self._add([cost[0]], [tie_of(cost)])
                self.equal.add([send, np.array([variable])], [1, -1], 0)

    def tied_gradients(self) -> list[tuple[int, int]]:
        """Return pairs of classes: parameters, and their gradients, which need the same layout for the update."""
        graph, equivalence = self.problem.graph, self.candidates.equivalence
        fixed = {**self.problem.pins, **self.problem.input_layouts}
        found = {
            (equivalence.tensors[name], equivalence.tensors[gradient]): None
            for name, gradient in graph.gradients.items()
            if name in graph.parameters and gradient not in fixed
        }
        return list(found)

    def _tie_gradients(self) -> None:
        for pair in self.tied_gradients():
            mine, other = (dict(zip(self.layout_lists[e], self.layouts[e], strict=True)) for e in pair)
            for layout in {**mine, **other}:
                sides = [np.array([side[layout]] if layout in side else [], dtype=np.int64) for side in (mine, other)]
                self.equal.add(sides, [1, -1], 0)

    def copy_bytes(self, name: str, layout: Layout) -> float:
        """Return the bytes of a rank's piece."""
        tensor = self.problem.tensors[name]
        return float(prod(local_shape(tensor.shape, layout, self.mesh)) * ELEMENT_BYTES[tensor.dtype])

    def _limit_memory(self) -> None:
        """Limit the memory when the backward pass begins: parameters with their state, saved results, kept copies."""
        limit = self.problem.memory
        if limit is None:
            return
        columns, factors = [], []
        for each, names in enumerate(self.tensor_members):
            held = [self.held_bytes(names[0], layout) * len(names) for layout in self.layout_lists[each]]
            if any(held):
                columns.append(self.layouts[each])
                factors.append(np.array(held))
        for kept, _, _, nbytes in self.kept:
            columns.append(np.array([kept]))
            factors.append(np.array([nbytes]))
        self.memory_unit = 2.0 ** round(log2(max(1.0, limit.limit_bytes)))  # a power of two, so that bytes stay exact
        self.most.add(columns, [f / self.memory_unit for f in factors], limit.counted_bytes / self.memory_unit)

    def held_bytes(self, name: str, layout: Layout) -> float:
        """Return the bytes that a rank holds of a tensor when the backward pass begins."""
        limit, graph = self.problem.memory, self.problem.graph
        if limit is None:
            return 0.0
        own = self.copy_bytes(name, layout)
        if name in graph.parameters:
            elements = own / ELEMENT_BYTES[self.problem.tensors[name].dtype]
            return own + elements * self.problem.state_bytes(name)
        return own if self._is_saved(name) else 0.0

    def _is_saved(self, name: str) -> bool:
        """Return whether the backward pass uses a tensor that exists when it begins and whose memory is counted."""
        if self.problem.memory is not None and not self.problem.memory.counts_saved:
            return False
        if name in self.problem.differentiated:  # an operator saves its operands for its own backward pass
            readers = (self.problem.operators[number] for number, _ in self._consumers.get(name, ()))
            return any(not reader.is_view for reader in readers)
        start, made = self.problem.graph.backward_start, self._producers.get(name)
        if start is None or (made is not None and made >= start):
            return False
        return any(number >= start for number, _ in self._consumers.get(name, ()))

    def is_backward(self, number: int) -> bool:
        """Return whether an operator recomputes its copies, unless they are kept; without a limit all are kept."""
        start = self.problem.graph.backward_start
        return start is not None and number >= start and self.problem.memory is not None
