"""Attention over a sequence divided over ranks: keys and values travel around a ring instead of being gathered.

Every rank has a piece of the queries, and the keys and values of the same rows. It attends to its own, then to those of
the previous rank, and so on, while the next ones are transferred; the results are combined by their log-sum-exp, and no
rank has all keys (Liu et al., arXiv 2310.01889). It is one kernel of the executor; in its backward pass keys, values
and their gradients travel around once more. Under a causal mask a rank leaves out keys after its queries, so the last
rank takes longest, and its time is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose, prod, sqrt

import numpy as np

from planner.sharding.backends.chunks import RING
from planner.sharding.backends.works import Work, Writer
from planner.sharding.layouts.collectives import ALL_GATHER
from planner.sharding.layouts.layout import Layout, divides_evenly
from planner.sharding.operators.work import backward_s
from planner.sharding.ops.aten import Statement
from planner.sharding.plans.plan import OperatorStep, ShardingPlan, TensorMove
from planner.sharding.problem.problem import ShardingProblem
from planner.sharding.solver.pricing import TimePricing
from simulator.config.runtime import ELEMENT_BYTES
from simulator.kernels.operators import Work as KernelWork
from simulator.kernels.operators import WorkKind
from simulator.kernels.roofline import Roofline
from simulator.sharded.program import RING_ATTENTION, Buffer, Kernel

_DIMS = 4  # sequences, heads, rows, width


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSite:
    """Attention whose keys and values are gathered by `moves` along their rows, over the mesh axis of its queries."""

    result: str
    moves: tuple[TensorMove, TensorMove]
    axis: str
    start: Layout  # layouts of keys and values before they are gathered
    rows: int
    result_dim: int = _DIMS - 2

    def allows(self, way: int | str) -> bool:
        return way == RING

    def gathers(self, move: TensorMove) -> bool:
        """Return whether a move ends with a gather that the ring can replace."""
        return move in self.moves


def find_rings(
    problem: ShardingProblem, plan: ShardingPlan, statements: Mapping[str, Statement]
) -> dict[str, RingSite]:
    """Return by result the attention that can use a ring."""
    moves: dict[str, list[TensorMove]] = {}
    for step in plan.steps:
        if isinstance(step, TensorMove) and step.steps and step.consumer:
            moves.setdefault(step.consumer, []).append(step)
    found: dict[str, RingSite] = {}
    for step in plan.steps:
        if isinstance(step, OperatorStep) and not step.collectives:
            statement = statements[problem.operators[step.operator].result.name]
            if statement.op == "attention":
                site = _site(problem, plan, step, statement, moves.get(statement.result, []))
                found |= {} if site is None else {statement.result: site}
    return found


def _site(
    problem: ShardingProblem, plan: ShardingPlan, step: OperatorStep, statement: Statement, moves: list[TensorMove]
) -> RingSite | None:
    names, causal, scale = [one["tensor"] for one in statement.args[0]], statement.args[1], statement.args[2]
    if len(set(names)) != 3 or len(names) != 3:
        return None
    shapes = [problem.tensors[name].shape for name in names]
    plain = scale is None or isclose(float(scale), 1 / sqrt(shapes[0][-1]))
    if not plain or any(len(shape) != _DIMS for shape in shapes) or (causal and shapes[0][2] != shapes[1][2]):
        return None
    q = dict(step.option.operands)[names[0]]
    own = [move for name in names[1:] for move in moves if move.tensor == name and move.steps[-1].kind == ALL_GATHER]
    if len(own) != 2 or len(q.dims[2]) != 1:
        return None
    axis = str(q.dims[2][0])
    starts = [move.steps[-2].after if len(move.steps) > 1 else move.source for move in own]
    for move, start in zip(own, starts, strict=True):
        gathered = Layout(tuple(() if d == 2 else spec for d, spec in enumerate(start.dims)), start.pending)
        if start.dims[2] != (axis,) or move.steps[-1].after != gathered or _is_used_again(plan, move, step):
            return None
        if not all(
            divides_evenly(*cut, problem.mesh)
            for cut in zip(problem.tensors[move.tensor].shape, start.dims, strict=True)
        ):
            return None
    even = all(divides_evenly(*cut, problem.mesh) for cut in zip(shapes[0], q.dims, strict=True))
    rows = shapes[0][2] // problem.mesh.size(axis)
    alike = starts[0] == starts[1]
    return (
        RingSite(result=statement.result, moves=(own[0], own[1]), axis=axis, start=starts[0], rows=rows)
        if even and alike
        else None
    )


def _is_used_again(plan: ShardingPlan, move: TensorMove, step: OperatorStep) -> bool:
    """Return whether another step uses what is gathered for this one."""
    use = (move.tensor, move.target)
    others = (one for one in plan.steps if one is not step and one is not move)
    return any(
        use in one.option.operands if isinstance(one, OperatorStep) else (one.tensor, one.source) == use
        for one in others
    )


def write_ring(
    out: Writer, step: OperatorStep, statement: Statement, site: RingSite, operands: Mapping[str, str], result: str
) -> None:
    """Write attention around a ring, of queries, and of keys and values before they are gathered, by tensor."""
    reads = tuple(operands[one["tensor"]] for one in statement.args[0])
    args = (*({"tensor": name} for name in reads), statement.args[1])
    do = Kernel(op=RING_ATTENTION, args=args, kwargs={"axes": [site.axis]})
    out.add(Work(do=do, reads=reads, writes=(result,), step=step))


def ring_seconds(
    do: Kernel,
    buffers: Mapping[str, Buffer],
    product: KernelWork,
    roofline: Roofline,
    pricing: TimePricing,
    *,
    backward: bool,
) -> float:
    """Return the time of attention around a ring, or of its backward pass; `product` is that of all keys at once.

    A piece of keys and values is a hop, and in the backward pass their gradients, in float32, are another.
    """
    axes = tuple(do.kwargs["axes"])
    ranks = pricing.mesh.size(axes)
    sizes = [_bytes(buffers[one["tensor"]]) for one in do.args[:3]]
    part = replace(product, flops=product.flops / ranks, bytes=sum(sizes) + sizes[0], n=product.n / ranks)
    dtype = buffers[do.args[0]["tensor"]].dtype
    wide = max(1.0, ELEMENT_BYTES["f32"] / ELEMENT_BYTES[dtype])

    def seconds(nbytes: float) -> float:
        return float(pricing.seconds("send_recv", axes, np.array([nbytes]))[0])

    one = float(np.asarray(backward_s(part, 3, roofline) if backward else roofline.seconds(part)).item())
    own = one / 2 if do.args[3] else one
    hop = seconds(sizes[1] + sizes[2])
    more = seconds(wide * (sizes[1] + sizes[2])) if backward else 0.0
    moved = (ranks + 1) * wide * (sizes[1] + sizes[2] + sizes[0] if backward else sizes[0]) + sizes[1] + sizes[2]
    added = KernelWork(kind=WorkKind.MOVE, name="elementwise", bytes=moved, launches=float(ranks))
    turns = max(own, hop) + (ranks - 2) * max(one, hop + more) + one + 2 * more
    return turns + float(np.asarray(roofline.seconds(added)).item())


def _bytes(buffer: Buffer) -> float:
    return float(prod(buffer.local) * ELEMENT_BYTES[buffer.dtype])
