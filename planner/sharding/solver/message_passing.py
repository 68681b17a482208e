"""Message passing between operators and tensors: a lower bound of all choices, and of each alternative's cost above it.

The choice is a labelling of a graph: an operator's label is its option, a tensor's its layout, and a redistribution is
the cost of a pair of labels. Sequential reweighted message passing (Kolmogorov, Convergent tree-reweighted message
passing for energy minimization, IEEE PAMI 28, 2006) raises a lower bound of it sweep by sweep. After costs have been
moved along the messages, the remaining cost of a label or a pair is a lower bound of what it adds to the bound. Those
that exceed the best known answer are in no better one, and are left out before anything is solved exactly.

A redistribution that several consumers share is paid once: each gets a share of its cost, so that the sum over its
users never exceeds the cost. A memory limit is a price for held bytes (a Lagrange multiplier), also for copies that the
forward pass makes and the backward pass uses again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.sharding.solver.integer_program import Pairs
from planner.sharding.solver.solvable_program import Assignment, SolvableProgram
from planner.sharding.solver.sparse_rows import Integers, Numbers

NO_PATH = 1e15  # picoseconds that stand for an impossible pair: more than any answer costs
Labels = tuple[int, ...]  # by node


@dataclass(slots=True)
class _Ends:
    """The labels of one end of an edge, in groups with equal edge costs."""

    node: int
    groups: Integers
    order: Integers = field(init=False)
    starts: Integers = field(init=False)

    def __post_init__(self) -> None:
        self.order = np.argsort(self.groups, kind="stable")
        sorted_groups = self.groups[self.order]
        self.starts = np.flatnonzero(np.concatenate([[True], np.diff(sorted_groups) != 0]))

    def least(self, values: Numbers) -> Numbers:
        """Return the least of `values` (one per label) in every group."""
        return np.minimum.reduceat(values[self.order], self.starts)


@dataclass(slots=True)
class _Edge:
    """Costs of pairs of groups of labels; messages by group, to the later node (`down`) and to the earlier one
    (`up`).
    """

    ends: tuple[_Ends, _Ends]  # earlier node, later node
    costs: Numbers  # the edge's share of a shared redistribution
    key: Pairs
    swapped: bool  # whether the first end is the second in the program's matrices
    down: Numbers = field(init=False)
    up: Numbers = field(init=False)

    def __post_init__(self) -> None:
        self.down = np.zeros(self.costs.shape[1])
        self.up = np.zeros(self.costs.shape[0])

    def message(self, sweep: int) -> Numbers:
        return self.down if sweep == 0 else self.up

    @property
    def shares(self) -> Numbers:
        """The costs from the tensor's layouts to those that are needed."""
        return self.costs.T if self.swapped else self.costs

    def add(self, change: Numbers) -> None:
        self.costs = self.costs + (change.T if self.swapped else change)


@dataclass(slots=True)
class _Shared:
    """The edges from one tensor to its consumers, which share the cost of redistributions.

    `columns` are the indices of their layouts among all that any of them needs. If the forward and the backward pass
    need the same layout, its copy is made twice, or kept at the price of its memory; both passes together pay the
    lesser.
    """

    costs: Numbers  # from layouts of the tensor to all that are needed
    nbytes: Numbers  # bytes of a copy in each of these
    edges: list[_Edge] = field(default_factory=list)
    columns: list[Integers] = field(default_factory=list)
    phases: list[int] = field(default_factory=list)  # by edge: 1 where its consumer is in the backward pass
    _total: Numbers = field(init=False)  # the most that all consumers pay

    def start(self, price: float) -> None:
        """Share all costs equally."""
        self.reprice(price)
        for edge, columns in zip(self.edges, self.columns, strict=True):
            shares = np.where(self.costs[:, columns] < NO_PATH, 1.0, NO_PATH)
            edge.costs = shares.T if edge.swapped else shares
        self.fit_shares()

    def reprice(self, price: float) -> None:
        """Set the price of a byte that is kept."""
        users = [np.zeros(self.costs.shape[1], dtype=bool) for _ in (0, 1)]
        for columns, phase in zip(self.columns, self.phases, strict=True):
            users[phase][columns] = True
        both = users[0] & users[1]
        self._total = self.costs + np.where(both, np.minimum(self.costs, price * self.nbytes), 0.0)

    def reshare(self, spare: Sequence[Numbers]) -> None:
        """Take the unused part of every share (`spare`, by edge), and divide it equally."""
        pool = np.zeros(self.costs.shape)
        users = np.zeros(self.costs.shape[1])
        taken = []
        possible = self.costs < NO_PATH
        for edge, columns, over in zip(self.edges, self.columns, spare, strict=True):
            taken.append(np.where(possible[:, columns], np.minimum(over, edge.shares), 0.0))
            pool[:, columns] += taken[-1]
            users[columns] += 1
        pool /= users
        for edge, columns, less in zip(self.edges, self.columns, taken, strict=True):
            edge.add(np.where(possible[:, columns], pool[:, columns] - less, 0.0))
        self.fit_shares()

    def fit_shares(self) -> None:
        """Scale all shares to the total, and those of one pass to at most the redistribution's cost."""
        sums = np.zeros((2, *self.costs.shape))
        count = np.zeros((2, self.costs.shape[1]))
        for edge, columns, phase in zip(self.edges, self.columns, self.phases, strict=True):
            sums[phase][:, columns] += edge.shares
            count[phase][columns] += 1
        every = np.maximum(sums.sum(0), 1e-300)
        forward = np.minimum(sums[0] / every * self._total, self.costs)
        backward = np.where(count[1] > 0, np.minimum(self._total - forward, self.costs), 0.0)
        wanted = np.stack([np.where(count[0] > 0, self._total - backward, 0.0), backward])
        possible = self.costs < NO_PATH
        for edge, columns, phase in zip(self.edges, self.columns, self.phases, strict=True):
            had, now = sums[phase][:, columns], wanted[phase][:, columns]
            scaled = np.where(had > 0, edge.shares * (now / np.maximum(had, 1e-300)), now / count[phase][columns])
            edge.add(np.where(possible[:, columns], scaled - edge.shares, 0.0))


@dataclass(slots=True)
class MessagePassing:
    """The graph of a program's labels. Nodes are classes of operators, followed by classes of tensors with labels."""

    program: SolvableProgram
    nodes: list[Numbers] = field(default_factory=list)
    held: list[Numbers | None] = field(default_factory=list)
    edges: list[_Edge] = field(default_factory=list)
    bound: float = -np.inf
    price: float = 0.0  # of a held byte, in picoseconds: set by `reprice`
    _order: list[int] = field(default_factory=list)
    _of_tensor: dict[int, int] = field(default_factory=dict)
    _ways: list[tuple[list[_Edge], list[_Edge]]] = field(default_factory=list)  # by node: edges to earlier, to later
    _shared: list[_Shared] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._add_nodes()
        for each, (made, uses) in enumerate(zip(self.program.producer, self.program.consumers, strict=True)):
            self.program.candidates.deadline.check()
            self._add_tensor(each, made, uses)
        self._add_ties()
        self._ways = [([], []) for _ in self.nodes]
        for edge in self.edges:
            self._ways[edge.ends[0].node][1].append(edge)
            self._ways[edge.ends[1].node][0].append(edge)

    def _add_nodes(self) -> None:
        program = self.program
        places: list[tuple[float, int]] = []
        for each, costs in enumerate(program.option_costs):
            self.nodes.append(costs.astype(np.float64))
            self.held.append(None)
            places.append((float(program.members[each][0]), each))
        for each, layouts in enumerate(program.layout_lists):
            made, uses = program.producer[each], program.consumers[each]
            if made is not None and program.passing(each):
                continue
            self._of_tensor[each] = len(self.nodes)
            before = program.members[made][0] + 0.5 if made is not None else -0.5
            if made is None and uses:
                before = min(program.members[user][0] for user, _ in uses) - 0.5
            places.append((before, len(self.nodes)))
            name, count = program.tensor_members[each][0], len(program.tensor_members[each])
            held = np.array([program.held_bytes(name, layout) * count for layout in layouts])
            self.nodes.append(program.layout_costs[each].astype(np.float64))
            self.held.append(held if held.any() else None)
        self._order = [node for _, node in sorted(places)]

    def _add_tensor(self, each: int, made: int | None, uses: Sequence[tuple[int, int]]) -> None:
        program, count = self.program, len(self.program.tensor_members[each])
        if made is not None and program.passing(each):
            ((consumer, position),) = uses
            costs = program.move_costs(
                each, program.results_of(made)[0], program.needs_of(consumer, position)[0], program.members[consumer][0]
            )[0]
            key = ("passing", each, consumer, position)
            self._add_edge(self._results(made), self._needs(consumer, position), costs * count, key)
            return
        layouts = program.layout_lists[each]
        own = _Ends(self._of_tensor[each], np.arange(len(layouts)))
        if made is not None:
            costs = program.move_costs(each, program.results_of(made)[0], layouts)[0]
            self._add_edge(self._results(made), own, costs * count, ("result", each, made, 0))
        needs = [program.needs_of(consumer, position)[0] for consumer, position in uses]
        numbers = {layout: n for n, layout in enumerate(dict.fromkeys(at for found in needs for at in found))}
        users = [program.members[consumer][0] for consumer, _ in uses]
        if not uses:
            return
        whole = np.minimum(program.move_costs(each, layouts, list(numbers), users[0])[0] * count, NO_PATH)
        name = program.tensor_members[each][0]
        shared = _Shared(whole, np.array([program.copy_bytes(name, layout) * count for layout in numbers]))
        columns = [np.array([numbers[layout] for layout in found]) for found in needs]
        for (consumer, position), at in zip(uses, columns, strict=True):
            key = ("use", each, consumer, position)
            edge = self._add_edge(own, self._needs(consumer, position), whole[:, at], key)
            shared.edges.append(edge)
            shared.columns.append(at)
            shared.phases.append(int(program.is_backward(program.members[consumer][0])))
        if len(uses) > 1:
            shared.start(self.price)
            self._shared.append(shared)

    def _results(self, made: int) -> _Ends:
        return _Ends(made, _groups(len(self.nodes[made]), self.program.results_of(made)[1]))

    def _needs(self, consumer: int, position: int) -> _Ends:
        return _Ends(consumer, _groups(len(self.nodes[consumer]), self.program.needs_of(consumer, position)[1]))

    def _add_ties(self) -> None:
        program = self.program
        for each, other in program.tied_gradients():
            first, second = program.layout_lists[each], program.layout_lists[other]
            costs = np.array([[0.0 if a == b else np.inf for b in second] for a in first])
            ends = [_Ends(self._of_tensor[t], np.arange(len(program.layout_lists[t]))) for t in (each, other)]
            self._add_edge(ends[0], ends[1], costs, ("tie", each, other, 0))

    def _add_edge(self, first: _Ends, second: _Ends, costs: Numbers, key: Pairs) -> _Edge:
        place = {node: at for at, node in enumerate(self._order)}
        costs = np.minimum(costs, NO_PATH)
        swapped = place[first.node] > place[second.node]
        ends = (second, first) if swapped else (first, second)
        self.edges.append(_Edge(ends, np.ascontiguousarray(costs.T) if swapped else costs, key, swapped))
        return self.edges[-1]

    # --- sweeps

    def _own(self, node: int) -> Numbers:
        held = self.held[node]
        return self.nodes[node] if held is None or not self.price else self.nodes[node] + self.price * held

    def _marginal(self, node: int) -> Numbers:
        """Return the costs of a node's labels, messages included."""
        earlier, later = self._ways[node]
        total = self._own(node).copy()
        for edge in earlier:
            total += edge.down[edge.ends[1].groups]
        for edge in later:
            total += edge.up[edge.ends[0].groups]
        return total

    def sweep(self) -> float:
        """Send messages to later nodes and back; return the bound."""
        for way in (0, 1):
            bound = 0.0
            for node in self._order if way == 0 else reversed(self._order):
                total = self._marginal(node)
                earlier, later = self._ways[node]
                on, back = (later, earlier) if way == 0 else (earlier, later)
                share = 1.0 / max(len(on), len(back), 1)
                bound += (1.0 - share * len(on)) * float(total.min())
                for edge in on:
                    mine = edge.ends[way]
                    incoming = edge.up if way == 0 else edge.down
                    costs = edge.costs if way == 0 else edge.costs.T
                    value = mine.least(share * total) - incoming
                    edge.message(way)[:] = (value[:, None] + costs).min(axis=0)
        self.bound = bound - self._limit()
        return self.bound

    def _limit(self) -> float:
        memory = self.program.problem.memory
        return 0.0 if memory is None else self.price * memory.counted_bytes

    def reprice(self, price: float) -> None:
        """Set the price of a held byte, in picoseconds."""
        self.price = price
        for shared in self._shared:
            shared.reprice(price)
            shared.fit_shares()

    def reshare(self) -> None:
        """Let consumers that would not use a shared redistribution give their share of it to the others."""
        pairs = self._left_of_pairs()
        for shared in self._shared:
            shared.reshare([pairs[edge.key] for edge in shared.edges])

    # --- what follows

    def above(self) -> dict[Pairs, Numbers]:
        """Return a lower bound of what every pair costs above the bound, after a sweep (which ends with messages to
        earlier nodes).
        """
        totals = [self._marginal(node) for node in range(len(self.nodes))]
        extra = [np.zeros(len(costs)) for costs in self.nodes]
        left: dict[int, Numbers] = {}
        for number, edge in enumerate(self.edges):
            later = edge.ends[1]
            earlier_edges, later_edges = self._ways[later.node]
            share = 1.0 / max(len(earlier_edges), len(later_edges), 1)
            own = edge.costs - edge.up[:, None] - edge.down[None, :]
            left[number] = own + later.least(share * totals[later.node])[None, :]
            extra[later.node] += share * totals[later.node] + own.min(axis=0)[later.groups]
        for node, total in enumerate(totals):
            earlier_edges, later_edges = self._ways[node]
            rest = 1.0 - len(earlier_edges) / max(len(earlier_edges), len(later_edges), 1)
            extra[node] += rest * (total - total.min())
        found: dict[Pairs, Numbers] = {}
        for number, edge in enumerate(self.edges):
            by_label = np.maximum(
                edge.ends[0].least(extra[edge.ends[0].node])[:, None],
                edge.ends[1].least(extra[edge.ends[1].node])[None, :],
            )
            pair = np.maximum(np.maximum(left[number], by_label), 0.0)
            found[edge.key] = pair.T if edge.swapped else pair
        return found

    def _left_of_pairs(self) -> dict[Pairs, Numbers]:
        """Return by edge what remains of each pair's cost together with that of the later node's label."""
        found = {}
        for edge in self.edges:
            later = edge.ends[1]
            share = 1.0 / max(*map(len, self._ways[later.node]), 1)
            pair = edge.costs - edge.up[:, None] - edge.down[None, :]
            pair = np.maximum(pair + later.least(share * self._marginal(later.node))[None, :], 0.0)
            found[edge.key] = pair.T if edge.swapped else pair
        return found

    def decoded(self) -> Labels:
        """Return labels chosen in order, each given the earlier choices and the messages about the rest."""
        taken = [0] * len(self.nodes)
        for node in self._order:
            earlier, later = self._ways[node]
            total = self._own(node).copy()
            for edge in later:
                total += edge.up[edge.ends[0].groups]
            for edge in earlier:
                total += edge.costs[edge.ends[0].groups[taken[edge.ends[0].node]]][edge.ends[1].groups]
            taken[node] = int(np.argmin(total))
        return tuple(taken)

    def assignment(self, labels: Labels) -> Assignment:
        program = self.program
        options = labels[: len(program.members)]
        layouts = tuple(
            found[labels[self._of_tensor[each]]] if each in self._of_tensor else program.between(each, options)
            for each, found in enumerate(program.layout_lists)
        )
        return Assignment(options=options, layouts=layouts)


def _groups(size: int, members: Sequence[Integers]) -> Integers:
    found = np.zeros(size, dtype=np.int64)
    for number, group in enumerate(members):
        found[group] = number
    return found
