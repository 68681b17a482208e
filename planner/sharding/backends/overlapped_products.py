"""Write a product with the exchange before or after it, in one of the ways of `chunks.py`.

4            in chunks of rows, each gathered before it or reduced after it
ring         ranks pass their pieces on, and multiply each as it arrives; or pass sums on, and add their own part
broadcast    rank after rank sends its piece to all; or all send their parts to rank after rank, which adds them
a mode       one kernel of `executor.overlap`: copies by copy engines, or tiles that wait for what arrives
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.sharding.backends.chunks import BROADCAST_WAY, KERNELS, RING, Site
from planner.sharding.backends.works import Work, Writer, bound, describe, next_ranks, primitive
from planner.sharding.layouts.collectives import ALL_GATHER, ALL_REDUCE, BROADCAST, PERMUTE, REDUCE
from planner.sharding.layouts.layout import Layout
from planner.sharding.layouts.redistribution import RedistributionStep
from planner.sharding.ops.aten import Statement
from planner.sharding.plans.plan import OperatorStep
from planner.sharding.problem.problem import ShardingProblem
from simulator.overlap.modes import GATHER, SCATTER
from simulator.sharded.program import OVERLAPPED, Exchange, Kernel


class Forward(Protocol):
    """The interface of what writes a forward pass (`forward.py`): `versions` has the buffer of every tensor in each of
    its layouts.
    """

    problem: ShardingProblem
    out: Writer
    versions: dict[tuple[str, Layout], str]
    suffix: str

    def version(self, tensor: str, layout: Layout) -> str:
        """Return the buffer of a tensor in a layout."""


def write_overlapped(forward: Forward, step: OperatorStep, statement: Statement, site: Site, way: int | str) -> None:
    """Write a product in one of the ways that `site` allows."""
    product = _Product(forward, step, statement, site)
    if isinstance(way, int):
        product.in_chunks(way)
    elif way in KERNELS:
        product.as_kernel(way)
    elif site.exchange == ALL_GATHER:
        {RING: product.around_ring, BROADCAST_WAY: product.by_broadcasts}[way]()
    else:
        {RING: product.sums_around_ring, BROADCAST_WAY: product.by_reductions}[way]()


@dataclass(frozen=True, slots=True)
class _Product:
    forward: Forward
    step: OperatorStep
    statement: Statement
    site: Site

    @property
    def operands(self) -> dict[str, Layout]:
        return dict(self.step.option.operands)

    @property
    def start(self) -> Layout:
        """Return the operand's layout before the last gather."""
        steps = self.site.move.steps
        return steps[-2].after if len(steps) > 1 else self.site.move.source

    @property
    def exchange(self) -> RedistributionStep:
        """Return the gather at the end of the move before the product, or the reduction at the beginning of the move
        after it.
        """
        return self.site.move.steps[-1 if self.site.exchange == ALL_GATHER else 0]

    def in_chunks(self, count: int) -> None:
        """Gather every chunk before its product, or reduce it after that, during the products of other chunks."""
        site, name = self.site, self.step.option.result
        gathers = site.exchange == ALL_GATHER
        start = self.start if gathers else self.operands[site.operand]
        source = self.forward.versions[site.operand, start]
        blocks = 1 if gathers else site.blocks
        taken = [self._part(source, f"{source}.{site.result}.{n}", start, count, (blocks, n)) for n in range(count)]
        ready = [self._exchanged(part, start, site.operand_dim, count) for part in taken] if gathers else taken
        made = []
        for number, part in enumerate(ready):
            target = self._multiplied(part, f"{site.result}.chunk{number}", name, count)
            made.append(target if gathers else self._exchanged(target, name, site.result_dim, count))
        if gathers and site.shared:
            self._join(ready, site.operand, self.operands[site.operand], site.operand_dim, site.blocks)
        after = name if gathers else self.exchange.after
        self._join(made, site.result, after, site.result_dim, site.blocks if gathers else 1)

    def around_ring(self) -> None:
        """Multiply pieces that ranks pass on: after step s, a rank has the piece of the rank s after it in the
        group.
        """
        site, result = self.site, self.step.option.result
        (axis,), ranks = self.exchange.collectives[0].axes, self.exchange.collectives[0].group
        layout = _with_axis(result, site.result_dim, axis)
        pieces, made = [self.forward.versions[site.operand, self.start]], []
        for number in range(ranks):
            if number:
                piece = self._buffer(site.operand, f"{pieces[0]}.{site.result}.ring{number}", self.start)
                self._pass_on(axis, pieces[-1], piece)
                pieces.append(piece)
            made.append(self._multiplied(pieces[-1], f"{site.result}.ring{number}", layout, 1, parts=ranks))
        if site.shared:
            self._join(pieces, site.operand, self.operands[site.operand], site.operand_dim, axis)
        self._join(made, site.result, result, site.result_dim, axis)

    def sums_around_ring(self) -> None:
        """Pass sums on: at step s a rank adds its part of the rows of the rank s + 1 after it, and last that of its own
        rows.
        """
        site, after = self.site, self.exchange.after
        (axis,), ranks = self.exchange.collectives[0].axes, self.exchange.collectives[0].group
        at = self.operands[site.operand]
        source, done = self.forward.versions[site.operand, at], self.forward.version(site.result, after)
        if site.exchange == ALL_REDUCE:
            after = _with_axis(after, site.result_dim, axis)
            done = self._buffer(site.result, f"{site.result}.scattered", after)
        rows = _with_axis(at, site.operand_dim, axis)
        total = ""
        for number in range(ranks):
            part = self._buffer(site.operand, f"{source}.{site.result}.ring{number}", rows)
            taking = Kernel(op="take_ring", args=({"tensor": source}, site.operand_dim, axis, number + 1))
            self.forward.out.add(Work(do=taking, reads=(source,), writes=(part,)))
            made = self._multiplied(part, f"{site.result}.ring{number}", after, 1, parts=ranks)
            if total:
                arrived = self._buffer(site.result, f"{site.result}.arrived{number}", after)
                self._pass_on(axis, total, arrived)
                last = number == ranks - 1
                target = done if last else self._buffer(site.result, f"{site.result}.sum{number}", after)
                adding = Kernel(op="aten.add.Tensor", args=({"tensor": arrived}, {"tensor": made}))
                self.forward.out.add(Work(do=adding, reads=(arrived, made), writes=(target,)))
                made = target
            total = made
        if site.exchange == ALL_REDUCE:
            self._gathered(done)

    def by_broadcasts(self) -> None:
        """Send every rank's piece to all, and multiply it while the next one is sent."""
        site, result = self.site, self.step.option.result
        axes, ranks = self.exchange.collectives[0].axes, self.exchange.collectives[0].group
        source = self.forward.versions[site.operand, self.start]
        pieces = []
        for root in range(ranks):
            name = f"{source}.{site.result}.from{root}"
            pieces.append(self._part_buffer(site.operand, name, self.exchange.after, site.operand_dim, ranks))
            do = Exchange(kind=BROADCAST, axes=axes, root=root)
            self.forward.out.add(Work(do=do, reads=(source,), writes=(pieces[-1],)))
        made = [
            self._multiplied(piece, f"{site.result}.from{root}", result, ranks) for root, piece in enumerate(pieces)
        ]
        if site.shared:
            self._join(pieces, site.operand, self.operands[site.operand], site.operand_dim, 1)
        self._join(made, site.result, result, site.result_dim, 1)

    def by_reductions(self) -> None:
        """Multiply the rows of one rank after another, and add all parts on that rank during the next one's product."""
        site, after = self.site, self.exchange.after
        one = self.exchange.collectives[0]
        at = self.operands[site.operand]
        source = self.forward.versions[site.operand, at]
        total: tuple[str, ...] = ()
        for root in range(one.group):
            part = self._part(source, f"{source}.{site.result}.to{root}", at, one.group, (1, root))
            made = self._multiplied(part, f"{site.result}.to{root}", self.step.option.result, one.group)
            last = root == one.group - 1
            name = f"{site.result}.sum{root}"
            target = self.forward.version(site.result, after) if last else self._buffer(site.result, name, after)
            do = Exchange(kind=REDUCE, axes=one.axes, reducer=one.reducer, root=root)
            self.forward.out.add(Work(do=do, reads=(made, *total), writes=(target,)))
            total = (target,)

    def as_kernel(self, mode: str) -> None:
        """Write product and exchange as one kernel of the executor; for an all-reduce only its first half, then a
        gather.
        """
        site, one = self.site, self.exchange.collectives[0]
        (axis,) = one.axes
        gathers = site.exchange == ALL_GATHER
        at = {**self.operands, site.operand: self.start} if gathers else self.operands
        operands = tuple(self.forward.versions[name, at[name]] for name in self._names())
        result = self.step.option.result if gathers else self.exchange.after
        kind = GATHER if gathers else SCATTER
        more = {"mode": mode, "axes": list(one.axes), "dim": site.operand_dim}
        do = Kernel(op=f"{OVERLAPPED}{kind}", args=tuple({"tensor": name} for name in operands), kwargs=more)
        target = self.forward.version(site.result, result)
        if site.exchange != ALL_REDUCE:
            self.forward.out.add(Work(do=do, reads=operands, writes=(target,), step=self.step))
            return
        rows = _with_axis(result, site.result_dim, axis)
        scattered = self._buffer(site.result, f"{site.result}.scattered", rows)
        self.forward.out.add(Work(do=do, reads=operands, writes=(scattered,), step=self.step))
        self._gathered(scattered)

    def _gathered(self, scattered: str) -> None:
        """Write the gather of a sum whose rows are scattered: the second half of an all-reduce."""
        site = self.site
        gather = Exchange(kind=ALL_GATHER, axes=self.exchange.collectives[0].axes, dim=site.result_dim)
        target = self.forward.version(site.result, self.exchange.after)
        self.forward.out.add(Work(do=gather, reads=(scattered,), writes=(target,)))

    def _names(self) -> tuple[str, ...]:
        x, weight = self.statement.args[:2]
        return x["tensor"], weight["tensor"]

    def _multiplied(self, operand: str, name: str, layout: Layout, count: int, *, parts: int = 0) -> str:
        """Write the product of one part of the operand; return its buffer, one of `count` along the rows."""
        site = self.site
        operands = {n: self.forward.versions[n, at] for n, at in self.operands.items() if n != site.operand}
        operands[site.operand] = operand
        do = Kernel(
            op=self.statement.op,
            args=bound(self.statement.args, operands),
            kwargs=bound(self.statement.kwargs, operands),
        )
        target = self._part_buffer(site.result, name, layout, site.result_dim, count)
        reads = tuple(operands[n] for n, _ in self.step.option.operands)
        chunk = (site.axis, parts or count)
        self.forward.out.add(Work(do=do, reads=reads, writes=(target,), step=self.step, chunk=chunk))
        return target

    def _pass_on(self, axis: str, source: str, target: str) -> None:
        mesh = self.forward.out.mesh
        do = Exchange(kind=PERMUTE, axes=mesh.names, source=next_ranks(axis, mesh))
        self.forward.out.add(Work(do=do, reads=(source,), writes=(target,)))

    def _buffer(self, tensor: str, name: str, layout: Layout) -> str:
        return self._part_buffer(tensor, name, layout, 0, 1)

    def _part_buffer(self, tensor: str, name: str, layout: Layout, dim: int, count: int) -> str:
        about = self.forward.problem.tensors[tensor]
        shape = tuple(size // count if d == dim else size for d, size in enumerate(about.shape))
        out = self.forward.out
        return out.add_buffer(name + self.forward.suffix, describe(tensor, shape, about.dtype, layout, out.mesh))

    def _part(self, source: str, name: str, layout: Layout, count: int, which: tuple[int, int]) -> str:
        """Write the kernel that takes one chunk: part `which[1]` of `count` of every one of `which[0]` blocks."""
        out, dim = self.forward.out, self.site.operand_dim
        part = self._part_buffer(out.buffers[source].tensor, name, layout, dim, count)
        blocks, number = which
        do = Kernel(op="take_chunk", args=({"tensor": source}, dim, blocks, count, number))
        out.add(Work(do=do, reads=(source,), writes=(part,)))
        return part

    def _exchanged(self, part: str, before: Layout, dim: int, count: int) -> str:
        out, one = self.forward.out, self.exchange
        after = self._part_buffer(out.buffers[part].tensor, f"{part}.moved", one.after, dim, count)
        out.add(Work(do=primitive(one, before, part, out.mesh), reads=(part,), writes=(after,)))
        return after

    def _join(self, parts: Sequence[str], tensor: str, layout: Layout, dim: int, blocks: int | str) -> None:
        """Write the kernel that joins parts, each with rows of `blocks` ranks, or pieces from around a mesh axis."""
        target = self.forward.version(tensor, layout)
        op = "join_ring" if isinstance(blocks, str) else "join_chunks"
        do = Kernel(op=op, args=([{"tensor": part} for part in parts], dim, blocks))
        self.forward.out.add(Work(do=do, reads=tuple(parts), writes=(target,)))


def _with_axis(layout: Layout, dim: int, axis: str) -> Layout:
    """Return the layout with one dim sharded over one more axis, whose pending sum is done."""
    dims = tuple((*spec, axis) if d == dim else spec for d, spec in enumerate(layout.dims))
    return Layout(dims, tuple((name, how) for name, how in layout.pending if name != axis))
