"""Products in chunks that overlap the exchange before or after them: a chunk is computed while the next one is
transferred.

A product whose operand is gathered along an axis that its result keeps may take the gathered rows chunk by chunk; one
whose result is summed over ranks may hand its rows over chunk by chunk. Instead of gathering, ranks may pass their
pieces on around a ring and multiply each as it arrives, or send them to all one after the other; instead of scattering,
sums go around the ring, or to rank after rank. Or the executor's overlapped kernels do both at once, moving pieces by
copy engines. The simulation of the program decides which products are chunked, and in which way; results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from planner.sharding.layouts.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective
from planner.sharding.layouts.layout import Layout, divides_evenly, local_shape
from planner.sharding.operators.operator import Operator
from planner.sharding.plans.plan import OperatorStep, ShardingPlan, TensorMove
from planner.sharding.problem.deadline import NO_DEADLINE, Deadline
from planner.sharding.problem.problem import ShardingProblem

COUNTS = (2, 4, 8)
RING = "ring"  # instead of a number of chunks
BROADCAST_WAY = "broadcast"
KERNELS = ("copy_engine", "fused")  # modes of `executor.overlap`
Chunks = Mapping[str, int | str]  # by result of a product: in how many chunks it runs, or which way
Tried = Mapping[str, Mapping[int | str, float]]  # by result: seconds of the program, by way; 1 is the whole exchange
MAX_TRIALS = 96
GAIN = 0.002  # least relative gain for more instructions


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A product that can run in chunks of `axis`: dim `operand_dim` of `operand`, dim `result_dim` of its result.

    `exchange` is the gather that ends `move`, or the reduction that begins it; `blocks` are the ranks whose rows a
    chunk has. What is gathered may be `shared` with other operators. `kernels` says whether the executor has overlapped
    kernels for it.
    """

    result: str
    axis: str
    operand: str
    operand_dim: int
    result_dim: int
    exchange: str
    move: TensorMove
    blocks: int
    rows: int  # number of rows of a rank's piece, which chunks divide
    shared: bool = False
    kernels: bool = False

    def gathers(self, move: TensorMove) -> bool:
        """Return whether a move ends with a gather that can run in chunks with the product."""
        return self.exchange == ALL_GATHER and self.move is move

    @property
    def collective(self) -> Collective:
        return self.move.steps[-1 if self.exchange == ALL_GATHER else 0].collectives[0]

    def allows(self, way: int | str) -> bool:
        """Return whether the product can run in this number of chunks, or in a named way."""
        if isinstance(way, int):
            return self.rows % way == 0 and self.rows > way
        if way in KERNELS:
            divides = self.exchange != ALL_REDUCE or self.rows % self.collective.group == 0
            return self.kernels and divides and len(self.collective.axes) == 1 and not self.shared
        one, pieces = self.collective, self.exchange in {ALL_GATHER, REDUCE_SCATTER}
        if self.exchange != ALL_GATHER and one.reducer != "sum":
            return False
        if way == RING:  # an all-reduce is a reduce-scatter around the ring, then a gather
            return len(one.axes) == 1 and (pieces or self.rows % one.group == 0)
        return pieces and way == BROADCAST_WAY


def find_sites(
    problem: ShardingProblem, plan: ShardingPlan, products: frozenset[str], linears: Mapping[str, str]
) -> dict[str, Site]:
    """Return by result the products, of those in `products`, that can overlap an exchange.

    `linears` has by result the rows of linear layers.
    """
    before: dict[str, list[TensorMove]] = {}
    after: dict[str, TensorMove] = {}
    for step in plan.steps:
        if isinstance(step, TensorMove) and step.steps:
            if step.consumer:
                before.setdefault(step.consumer, []).append(step)
            else:
                after[step.tensor] = step
    found: dict[str, Site] = {}
    for step in plan.steps:
        if isinstance(step, OperatorStep) and not step.collectives:
            operator = problem.operators[step.operator]
            name = operator.result.name
            if name in products and _is_even(
                problem, step, [*before.get(name, ()), *([after[name]] if name in after else [])]
            ):
                sites = [_gathered(problem, operator, move) for move in before.get(name, ())]
                sites.append(_reduced(problem, operator, step, after[name]) if name in after else None)
                first = next((site for site in sites if site is not None), None)
                if first is not None:
                    gathers = first.exchange == ALL_GATHER
                    kernels = linears.get(name) == first.operand
                    kernels &= first.operand_dim == first.result_dim < len(operator.dims) - 1
                    shared = gathers and _is_used_again(plan, first, step)
                    found[name] = replace(first, shared=shared, kernels=kernels)
    return found


def _is_even(problem: ShardingProblem, step: OperatorStep, moves: Sequence[TensorMove]) -> bool:
    """Return whether all pieces of a product and of its exchanged tensor are equal, as chunks of equal rows require."""
    used = [*step.option.operands, (problem.operators[step.operator].result.name, step.option.result)]
    used += [(move.tensor, layout) for move in moves for layout in (move.source, *(one.after for one in move.steps))]
    return all(
        divides_evenly(size, spec, problem.mesh)
        for name, layout in used
        for size, spec in zip(problem.tensors[name].shape, layout.dims, strict=True)
    )


def _is_used_again(plan: ShardingPlan, site: Site, step: OperatorStep) -> bool:
    """Return whether other steps also use the gathered tensor."""
    use = (site.operand, site.move.target)
    others = (s for s in plan.steps if isinstance(s, OperatorStep) and s is not step)
    moves = (m for m in plan.steps if isinstance(m, TensorMove) and m is not site.move)
    return any(use in s.option.operands for s in others) or any((m.tensor, m.source) == use for m in moves)


def _gathered(problem: ShardingProblem, operator: Operator, move: TensorMove) -> Site | None:
    last = move.steps[-1]
    start = move.steps[-2].after if len(move.steps) > 1 else move.source
    changed = [d for d, (old, new) in enumerate(zip(start.dims, last.after.dims, strict=True)) if old != new]
    if last.kind != ALL_GATHER or len(last.collectives) != 1 or len(changed) != 1:
        return None
    (dim,) = changed
    if any(isinstance(item, int) for item in start.dims[dim]):
        return None
    dims = dict(operator.operands)[move.tensor]
    return _site(problem, operator, move, dims[dim], ALL_GATHER, last.collectives[0].group, start, move.tensor, dim)


def _reduced(problem: ShardingProblem, operator: Operator, step: OperatorStep, move: TensorMove) -> Site | None:
    first, start = move.steps[0], step.option.result
    if first.kind not in {ALL_REDUCE, REDUCE_SCATTER} or len(first.collectives) != 1 or move.source != start:
        return None
    changed = [d for d, (old, new) in enumerate(zip(start.dims, first.after.dims, strict=True)) if old != new]
    if first.kind == REDUCE_SCATTER:
        dim, blocks = changed[0], first.collectives[0].group
        spec = first.after.dims[dim]
    else:
        whole = [d for d, size in enumerate(operator.result.shape) if len(operator.dims[d]) == 1 and size > 1]
        if not whole:
            return None
        dim, blocks = whole[-2] if len(whole) > 1 else whole[-1], 1
        spec = start.dims[dim]
    if any(isinstance(item, int) for item in spec):
        return None
    return _site(
        problem, operator, move, operator.dims[dim], first.kind, blocks, first.after, operator.result.name, dim
    )


def _site(
    problem: ShardingProblem,
    operator: Operator,
    move: TensorMove,
    axes: tuple[str, ...],
    exchange: str,
    blocks: int,
    pieces: Layout,
    tensor: str,
    dim: int,
) -> Site | None:
    """Return the site where one operand and the result have the axis, each in a dim of its own; else None."""
    if len(axes) != 1 or axes[0] in operator.reduced:
        return None
    (axis,) = axes
    holders = [(name, dims.index(axes)) for name, dims in operator.operands if axes in dims]
    mentions = sum(dim_axes.count(axis) for _, dims in operator.operands for dim_axes in dims)
    if len(holders) != 1 or mentions != 1 or axes not in operator.dims:
        return None
    if exchange == ALL_GATHER and holders[0] != (tensor, dim):
        return None
    return Site(
        result=operator.result.name,
        axis=axis,
        operand=holders[0][0],
        operand_dim=holders[0][1],
        result_dim=operator.dims.index(axes),
        exchange=exchange,
        move=move,
        blocks=blocks,
        rows=local_shape(problem.tensors[tensor].shape, pieces, problem.mesh)[dim],
    )


class Ways(Protocol):
    """A product that can overlap its exchange."""

    def allows(self, way: int | str) -> bool:
        """Return whether it can run in this number of chunks, or in a named way."""


def choose_chunks(
    sites: Mapping[str, Ways],
    groups: Sequence[Sequence[str]],
    seconds: Callable[[Chunks], float],
    deadline: Deadline = NO_DEADLINE,
) -> tuple[dict[str, int | str], Tried]:
    """Return the way of each product that overlaps its exchange, chosen group by group to make the program faster, and
    the ways that were tried.

    `seconds` returns the simulated time of the program with given ways, infinite if impossible; all products of a group
    have the same way, and nothing is tried after `deadline`.
    """
    chosen: dict[str, int | str] = {}
    best, trials = seconds(chosen), 0
    every: dict[str, Mapping[int | str, float]] = {}
    for group in groups:
        names = [name for name in group if name in sites]
        times: dict[int | str, float] = {1: best}
        for way in (*COUNTS, RING, BROADCAST_WAY, *KERNELS) if names else ():
            possible = all(sites[name].allows(way) for name in names)
            if trials >= MAX_TRIALS or not possible or deadline.over:
                continue
            trials += 1
            tried = {**chosen, **dict.fromkeys(names, way)}
            times[way] = found = seconds(tried)
            if found < best * (1 - GAIN):
                chosen, best = tried, found
        every |= dict.fromkeys(names, times)
    return chosen, every
