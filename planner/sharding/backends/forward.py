"""A plan's steps as instructions on two streams: kernels on a rank's own pieces, and exchanges between ranks.

A buffer is a tensor in one layout. Every instruction waits for the events of what it reads, so a gather runs beside a
product that does not need it. What a step computes or exchanges is recorded as a `Work`, from which the backward pass is
derived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from planner.sharding.backends.chunks import Site
from planner.sharding.backends.phases import Phase, phases
from planner.sharding.frontends.rules.statement import Statement
from planner.sharding.layouts.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER
from planner.sharding.layouts.layout import DimSpec, Layout, divides_evenly, local_shape
from planner.sharding.layouts.mesh import Mesh
from planner.sharding.layouts.redistribution import RedistributionStep
from planner.sharding.plans.plan import OperatorStep, ShardingPlan, TensorMove
from planner.sharding.problem.problem import ShardingProblem
from simulator.config.runtime import ELEMENT_BYTES
from simulator.program.program import COMM, COMPUTE, CodeWriter
from simulator.sharded.program import Buffer, Exchange, Kernel
from topology.errors import Infeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one instruction does: reads and writes buffers, by a kernel or an exchange.

    `step` is the operator's step that a kernel belongs to; `share` is its part of that operator's time, and `chunk` the axis
    of which it has one in so many parts. It begins when the buffers in `after` are written, besides those that it reads.
    """

    do: Kernel | Exchange
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    step: OperatorStep | None = None
    share: float = 1.0
    chunk: tuple[str, int] = ("", 1)
    after: tuple[str, ...] = ()


@dataclass(slots=True)
class Writer:
    """Writes instructions, and keeps what each does and which event says that a buffer is there."""

    mesh: Mesh
    code: CodeWriter = field(default_factory=CodeWriter)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)
    _made: dict[str, tuple[str, str]] = field(default_factory=dict)  # buffer -> stream that made it, event after it
    _waited: set[tuple[str, str]] = field(default_factory=set)

    def add_buffer(self, name: str, buffer: Buffer) -> str:
        self.buffers[name] = buffer
        return name

    def add(self, work: Work) -> None:
        """Write the instruction of `work` on its stream, after what it reads."""
        stream = COMM if isinstance(work.do, Exchange) else COMPUTE
        for name in (*work.reads, *work.after):
            made = self._made.get(name)
            if made is not None and made[0] != stream and (stream, made[1]) not in self._waited:
                self._waited.add((stream, made[1]))
                self.code.wait(stream, made[1])
        if isinstance(work.do, Exchange):
            read, written = self.buffers[work.reads[0]], self.buffers[work.writes[0]]
            size = prod((written if work.do.kind == ALL_GATHER else read).local) * ELEMENT_BYTES[read.dtype]
            op = {PERMUTE: "send_recv"}.get(work.do.kind, work.do.kind)
            group = "world" if work.do.kind == PERMUTE else self.mesh.group_name(work.do.axes)
            self.code.collective(op, group, size, reads=work.reads, writes=work.writes)
        else:
            first = self.buffers[work.writes[0]]
            self.code.launch(work.writes[0], first.local, first.dtype, reads=work.reads, writes=work.writes)
        event = self.code.record(stream)
        for name in work.writes:
            self._made[name] = (stream, event)
        self.works.append(work)


@dataclass(slots=True)
class ForwardWriter:
    """Writes the forward pass of a plan. `versions` has the buffer of every tensor in every layout it is in."""

    problem: ShardingProblem
    plan: ShardingPlan
    statements: Mapping[str, Statement]
    out: Writer
    chunks: Mapping[str, tuple[Site, int | str]] = field(
        default_factory=dict
    )  # by result: products that run in so many chunks
    versions: dict[tuple[str, Layout], str] = field(default_factory=dict)

    def write(self) -> None:
        """Write all steps. Raises Infeasible where a rank's pieces are not equal, or stages are given."""
        if self.problem.stages is not None or self.problem.routed:
            raise Infeasible("pipeline stages and routed tokens are not run by this back end", remedy="leave them out")
        for name in self.problem.inputs:
            self._version(name, self.plan.choice.layouts[name])
        for step in self.plan.steps:
            if isinstance(step, TensorMove):
                self._move(step)
            else:
                self._operator(step)

    def _version(self, tensor: str, layout: Layout) -> str:
        """Return the buffer of `tensor` in `layout`, a new one where there is none yet."""
        key = (tensor, layout)
        if key not in self.versions:
            number = sum(name == tensor for name, _ in self.versions)
            about = self.problem.tensors[tensor]
            self.versions[key] = self.out.add_buffer(
                f"{tensor}.{number}" if number else tensor,
                describe(tensor, about.shape, about.dtype, layout, self.out.mesh),
            )
        return self.versions[key]

    def _move(self, move: TensorMove) -> None:
        here, steps = move.source, move.steps
        site, _ = self.chunks.get(move.consumer, (None, 1))
        if site is not None and site.exchange == ALL_GATHER and site.move is move:
            steps = steps[:-1]  # the last one runs in chunks, with the product
        for step in steps:
            if (move.tensor, step.after) not in self.versions:
                source = self._version(move.tensor, here)
                target = self._version(move.tensor, step.after)
                self.out.add(Work(do=primitive(step, here, source, self.out.mesh), reads=(source,), writes=(target,)))
            here = step.after

    def _operator(self, step: OperatorStep) -> None:
        operator = self.problem.operators[step.operator]
        statement = self.statements[operator.result.name]
        if operator.result.name in self.chunks:
            site, count = self.chunks[operator.result.name]
            if isinstance(count, str):
                self._around_ring(step, statement, site)
            else:
                self._chunked(step, statement, site, count)
            return
        operands = {name: self.versions[name, layout] for name, layout in step.option.operands}
        result = self._version(operator.result.name, step.option.result)
        if not step.collectives:
            kernel = Kernel(
                op=statement.op,
                args=_bound(statement.args, operands),
                kwargs=_bound(statement.kwargs, operands),
                index=statement.index,
            )
            self.out.add(Work(do=kernel, reads=tuple(operands.values()), writes=(result,), step=step))
            return
        for phase in phases(statement, operator, step):
            self._phase(phase, step, operands, result)

    def _chunked(self, step: OperatorStep, statement: Statement, site: Site, count: int) -> None:
        """Write a product in chunks: every chunk is gathered before it, or reduced after it, beside the others' products."""
        gathers = site.exchange == ALL_GATHER
        moves, name = site.move.steps, step.option.result
        needed = dict(step.option.operands)
        start = needed[site.operand]
        if gathers:
            start = moves[-2].after if len(moves) > 1 else site.move.source
        source = self.versions[site.operand, start]
        taken = [
            self._part(
                source,
                f"{source}.{site.result}.{n}",
                start,
                site.operand_dim,
                count,
                (1 if gathers else site.blocks, n),
            )
            for n in range(count)
        ]
        ready = taken
        if gathers:
            ready = [self._exchanged(part, moves[-1], start, site.operand_dim, count) for part in taken]
        others = {n: self.versions[n, at] for n, at in needed.items() if n != site.operand}
        made = []
        for number, part in enumerate(ready):
            operands = {**others, site.operand: part}
            kernel = Kernel(
                op=statement.op, args=_bound(statement.args, operands), kwargs=_bound(statement.kwargs, operands)
            )
            target = self._part_buffer(site.result, f"{site.result}.{number}", name, site.result_dim, count)
            reads = tuple(operands[n] for n, _ in step.option.operands)
            self.out.add(Work(do=kernel, reads=reads, writes=(target,), step=step, chunk=(site.axis, count)))
            made.append(target if gathers else self._exchanged(target, moves[0], name, site.result_dim, count))
        if gathers and self._is_used_again(site, needed[site.operand], step):
            self._join(ready, site.operand, needed[site.operand], site.operand_dim, site.blocks)
        self._join(
            made, site.result, name if gathers else moves[0].after, site.result_dim, site.blocks if gathers else 1
        )

    def _around_ring(self, step: OperatorStep, statement: Statement, site: Site) -> None:
        """Write a product of pieces that ranks pass on: after step s, a rank has that of the rank s after it in the group."""
        last, needed = site.move.steps[-1], dict(step.option.operands)
        (axis,) = last.collectives[0].axes
        ranks = last.collectives[0].group
        start = site.move.steps[-2].after if len(site.move.steps) > 1 else site.move.source
        result = step.option.result
        dims = tuple((*spec, axis) if d == site.result_dim else spec for d, spec in enumerate(result.dims))
        others = {n: self.versions[n, at] for n, at in needed.items() if n != site.operand}
        passes = Exchange(kind=PERMUTE, axes=self.out.mesh.names, source=_next_ranks(axis, self.out.mesh))
        pieces, made = [self.versions[site.operand, start]], []
        for number in range(ranks):
            if number:
                piece = self._part_buffer(site.operand, f"{pieces[0]}.{site.result}.ring{number}", start, 0, 1)
                self.out.add(Work(do=passes, reads=(pieces[-1],), writes=(piece,)))
                pieces.append(piece)
            operands = {**others, site.operand: pieces[-1]}
            kernel = Kernel(
                op=statement.op, args=_bound(statement.args, operands), kwargs=_bound(statement.kwargs, operands)
            )
            name, layout = f"{site.result}.ring{number}", Layout(dims, result.pending)
            target = self._part_buffer(site.result, name, layout, 0, 1)
            reads = tuple(operands[n] for n, _ in step.option.operands)
            self.out.add(Work(do=kernel, reads=reads, writes=(target,), step=step, chunk=(site.axis, ranks)))
            made.append(target)
        if self._is_used_again(site, needed[site.operand], step):
            self._join(pieces, site.operand, needed[site.operand], site.operand_dim, axis)
        self._join(made, site.result, result, site.result_dim, axis)

    def _is_used_again(self, site: Site, layout: Layout, step: OperatorStep) -> bool:
        others = (s for s in self.plan.steps if isinstance(s, OperatorStep) and s is not step)
        moves = (m for m in self.plan.steps if isinstance(m, TensorMove) and m is not site.move)
        return any((site.operand, layout) in s.option.operands for s in others) or any(
            m.tensor == site.operand and m.source == layout for m in moves
        )

    def _part_buffer(self, tensor: str, name: str, layout: Layout, dim: int, count: int) -> str:
        about = self.problem.tensors[tensor]
        shape = tuple(size // count if d == dim else size for d, size in enumerate(about.shape))
        return self.out.add_buffer(name, describe(tensor, shape, about.dtype, layout, self.out.mesh))

    def _part(self, source: str, name: str, layout: Layout, dim: int, count: int, which: tuple[int, int]) -> str:
        """Write the kernel that takes one chunk: of every one of `which[0]` blocks, part `which[1]` of `count`."""
        part = self._part_buffer(self.out.buffers[source].tensor, name, layout, dim, count)
        blocks, number = which
        kernel = Kernel(op="take_chunk", args=({"tensor": source}, dim, blocks, count, number))
        self.out.add(Work(do=kernel, reads=(source,), writes=(part,)))
        return part

    def _exchanged(self, part: str, step: RedistributionStep, before: Layout, dim: int, count: int) -> str:
        after = self._part_buffer(self.out.buffers[part].tensor, f"{part}.moved", step.after, dim, count)
        self.out.add(Work(do=primitive(step, before, part, self.out.mesh), reads=(part,), writes=(after,)))
        return after

    def _join(self, parts: Sequence[str], tensor: str, layout: Layout, dim: int, blocks: int | str) -> None:
        """Write the kernel that puts chunks together, each with rows of `blocks` blocks; or pieces from around a mesh axis."""
        target = self._version(tensor, layout)
        op = "join_ring" if isinstance(blocks, str) else "join_chunks"
        kernel = Kernel(op=op, args=([{"tensor": part} for part in parts], dim, blocks))
        self.out.add(Work(do=kernel, reads=tuple(parts), writes=(target,)))

    def _phase(self, phase: Phase, step: OperatorStep, operands: dict[str, str], result: str) -> None:
        """Write one part of an operator that exchanges statistics: a kernel, or the reduction of its result."""
        name = result if not phase.name else f"{result}.{phase.name}"
        if phase.name and phase.layout is not None:
            self.out.add_buffer(name, describe(name, phase.shape, phase.dtype, phase.layout, self.out.mesh))
        reads = tuple(operands.get(one) or f"{result}.{one}" for one in phase.reads)
        if phase.reduce:
            axes = tuple(step.collectives[0].axes)
            do: Kernel | Exchange = Exchange(kind=ALL_REDUCE, axes=axes, reducer=phase.reduce)
        else:
            bound = dict(zip(phase.reads, reads, strict=True))
            do = Kernel(op=phase.op, args=_bound(phase.args, bound))
        self.out.add(Work(do=do, reads=reads, writes=(name,), step=step, share=phase.share))


def _bound(arguments: Any, buffers: Mapping[str, str]) -> Any:
    """Return arguments with the names of tensors replaced by those of buffers."""
    if isinstance(arguments, dict):
        if "tensor" in arguments:
            return {"tensor": buffers[arguments["tensor"]]}
        return {key: _bound(value, buffers) for key, value in arguments.items()}
    if isinstance(arguments, tuple):
        return tuple(_bound(one, buffers) for one in arguments)
    return [_bound(one, buffers) for one in arguments] if isinstance(arguments, list) else arguments


def describe(
    tensor: str, shape: Sequence[int], dtype: str, layout: Layout, mesh: Mesh, *, gradient: bool = False
) -> Buffer:
    """Return the buffer of a tensor in a layout. Raises Infeasible where ranks' pieces differ in size."""
    for size, spec in zip(shape, layout.dims, strict=True):
        if not divides_evenly(size, spec, mesh):
            raise Infeasible(
                f"{tensor}: {size} elements over {' '.join(map(str, spec))} are not equal pieces",
                why="this back end runs equal pieces",
                remedy="another placement, or a size that divides",
            )
    return Buffer(
        tensor=tensor,
        shape=tuple(shape),
        dtype=dtype,
        dims=layout.dims,
        local=local_shape(shape, layout, mesh),
        pending=dict(layout.pending),
        gradient=gradient,
    )


def primitive(step: RedistributionStep, before: Layout, buffer: str, mesh: Mesh) -> Kernel | Exchange:
    """Return what a primitive does to a rank's piece in `buffer`."""
    after = step.after
    reducer = step.collectives[0].reducer if step.collectives else ""
    if step.kind == PERMUTE:
        return Exchange(kind=PERMUTE, axes=mesh.names, source=permuted_from(before, after, mesh))
    changed = _changed(before, after)
    lost = [(d, added) for d, (old, new) in changed if (added := _added(new, old))[1]]
    gained = [(d, added) for d, (old, new) in changed if (added := _added(old, new))[1]]
    if step.kind == "slice":
        parts = [[d, blocks, list(axes)] for d, (blocks, axes) in gained]
        return Kernel(op="shard", args=({"tensor": buffer}, *parts))
    if step.kind == ALL_REDUCE:
        axes = tuple(axis for axis, _ in before.pending if axis not in dict(after.pending))
        return Exchange(kind=ALL_REDUCE, axes=axes, reducer=reducer)
    if step.kind == ALL_GATHER:
        ((dim, (blocks, axes)),) = lost
        return Exchange(kind=ALL_GATHER, axes=axes, dim=dim, blocks=blocks)
    ((to_dim, (to_blocks, axes)),) = gained
    if step.kind == REDUCE_SCATTER:
        return Exchange(kind=REDUCE_SCATTER, axes=axes, dim=to_dim, blocks=to_blocks, reducer=reducer)
    assert step.kind == ALL_TO_ALL  # noqa: S101 - there are no other primitives
    ((dim, (blocks, axes)),) = lost
    return Exchange(kind=ALL_TO_ALL, axes=axes, dim=dim, blocks=blocks, to_dim=to_dim, to_blocks=to_blocks)


def _next_ranks(axis: str, mesh: Mesh) -> tuple[int, ...]:
    """Return by rank the next one along a mesh axis; the first comes after the last."""
    at = mesh.names.index(axis)
    stride, size = prod(mesh.shape[at + 1 :]), mesh.shape[at]
    places = ((rank, rank // stride % size) for rank in range(mesh.ranks))
    return tuple(rank + ((place + 1) % size - place) * stride for rank, place in places)


def _changed(before: Layout, after: Layout) -> list[tuple[int, tuple[DimSpec, DimSpec]]]:
    both = zip(before.dims, after.dims, strict=True)
    return [(dim, pair) for dim, pair in enumerate(both) if pair[0] != pair[1]]


def _added(less: DimSpec, more: DimSpec) -> tuple[int, tuple[str, ...]]:
    """Return the blocks before the mesh axes that `more` has innermost beyond `less`, and those axes; none if it has not."""
    kept = {item for item in less if isinstance(item, str)}
    axes = tuple(item for item in more if isinstance(item, str) and item not in kept)
    if not axes or more[len(more) - len(axes) :] != axes:
        return 1, ()
    return prod(item for item in more[: len(more) - len(axes)] if isinstance(item, int)), axes


def permuted_from(before: Layout, after: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Return by rank the one that has, before a permute, the piece it has after it. Raises Infeasible if none is found.

    A piece is known by the indices of its mesh axes in every dim; what is pending stays where it is unless axes swap.
    """
    places = [dict(zip(mesh.names, at, strict=True)) for at in product(*(range(n) for n in mesh.shape))]

    def piece(layout: Layout, at: Mapping[str, int]) -> tuple[Any, ...]:
        numbers = []
        for spec in layout.dims:
            number = 0
            for item in spec:
                if isinstance(item, str):
                    number = number * mesh.size(item) + at[item]
            numbers.append(number)
        return (*numbers, *(at[axis] for axis, _ in layout.pending))

    free_before = [n for n in mesh.names if n not in before.axes() | {a for a, _ in before.pending}]
    free_after = [n for n in mesh.names if n not in after.axes() | {a for a, _ in after.pending}]
    holders: dict[tuple[Any, ...], list[int]] = {}
    for rank, at in enumerate(places):
        holders.setdefault(piece(before, at), []).append(rank)
    source = []
    for at in places:
        candidates = holders.get(piece(after, at), [])
        copy = 0
        for name in free_after:
            copy = copy * mesh.size(name) + at[name]
        if not candidates or (free_before and copy >= len(candidates)):
            raise Infeasible("a permute whose pieces do not match", remedy="fewer mesh axes")
        source.append(candidates[copy if len(candidates) > 1 else 0])
    if sorted(source) != list(range(mesh.ranks)):
        raise Infeasible("a permute that is none of ranks", remedy="fewer mesh axes")
    return tuple(source)
