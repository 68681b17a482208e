"""The backward pass of a written forward pass: every instruction in reverse, with exchanges replaced by their duals.

The gradient of a buffer has a layout that follows from the buffer's own: sharded dims are sharded alike; over a mesh
axis on which the buffer has copies, every rank has the gradient of its own copy, and their sum is pending; over a mesh
axis on which the buffer itself is a pending sum, all ranks have the same gradient. Every exchange has one dual then,
and pending gradients are right whatever the placements are:

    forward                              backward
    slice       copies to shards         shards to a pending sum: zeros elsewhere
    all-gather  shards to copies         reduce-scatter
    all-reduce  pending to copies        all-reduce
    reduce-scatter  pending to shards    all-gather
    all-to-all, permute                  the same back
    broadcast   a piece to copies        reduction to the piece's rank

(Xu et al., GSPMD, arXiv 2105.04663, section 3.6, has the duals; JAX states the rule for types of cotangents.) A
kernel's backward is that of its operator on the rank's own pieces.

Gradients of outputs are given whole: over the axes of its copies such a gradient is not pending but the same on all
ranks, and stays so through kernels that all ranks of an axis run alike. An all-gather's dual is a slice of it then, an
all-reduce's is nothing. Where it meets a pending gradient, or a kernel of pieces, each rank takes an equal share of it
as its own.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf

import msgspec

from planner.sharding.backends.works import Work, Writer, primitive
from planner.sharding.layouts.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    PERMUTE,
    REDUCE,
    REDUCE_SCATTER,
)
from planner.sharding.layouts.layout import Layout, Mesh, local_shape
from planner.sharding.layouts.redistribution import RedistributionStep, Redistributor
from simulator.sharded.program import Buffer, Exchange, Kernel
from topology.errors import Infeasible

FLOATS = frozenset(("f64", "f32", "bf16", "f16", "c64", "c128"))  # what has gradients
# Operators without gradients: comparisons, and maxima that only keep exponentials in range.
_NOT_DIFFERENTIATED = ("row_max", "attention.max", "not_equal", "topk_indices", "detach")


@dataclass(slots=True)
class BackwardWriter:
    """Writes the backward pass of the works in `out`. `gradients` has those found so far, by buffer."""

    out: Writer
    wanted: Mapping[str, Layout]  # buffers of inputs whose gradients are requested, with the final layout of each
    gradients: dict[str, str] = field(default_factory=dict)  # the sum so far, by buffer
    finished: dict[str, str] = field(default_factory=dict)  # by buffer in `wanted`, if a gradient reaches it
    _needed: set[str] = field(default_factory=set)
    _counts: dict[str, int] = field(default_factory=dict)
    _reduced: dict[str, tuple[str, int]] = field(default_factory=dict)  # sums so far, and how many ranks are to come

    def write(self, outputs: Sequence[str]) -> tuple[str, ...]:
        """Write the backward pass that starts from gradients of `outputs`; return the buffers of these gradients.

        Raises Infeasible if an operator on the way has no gradient.
        """
        # The backward pass runs micro batches in order, and their shared part at the end.
        works = sorted(self.out.works, key=lambda work: -work.micro_batch if work.micro_batch >= 0 else -inf)
        self._find_needed(works)
        seeds = []
        if not self._needed.intersection(outputs):
            raise Infeasible(
                "no result depends on anything that a gradient is asked of", remedy="a parameter among inputs"
            )
        for name in outputs:
            if name not in self._needed:  # expert numbers, or an unchanged input: its gradient is not used
                seeds.append(self._part(name, whole=self._copied(name)))
                continue
            seeds.append(self._contribution(name, whole=self._copied(name)))
            self._add_up(name, seeds[-1])
        first_use: dict[str, int] = {}
        for number, work in enumerate(works):
            for name in work.reads:
                first_use.setdefault(name, number)
        staged = self.out.stage is not None
        for number, work in reversed(list(enumerate(works))):
            self.out.stage, self.out.micro_batch = work.stage if staged else None, work.micro_batch
            if any(name in self.gradients for name in work.writes) and any(r in self._needed for r in work.reads):
                if isinstance(work.do, Exchange):
                    self._exchange(work, work.do)
                elif work.do.op == "shard":
                    self._unshard(work)
                else:
                    self._kernel(work)
            for name in work.reads:  # as soon as it is complete, so that its reduction overlaps what follows
                reached = name in self.gradients and name not in self.finished
                if name in self.wanted and first_use[name] == number and reached:
                    self.finished[name] = self._finish(name, self.wanted[name])
        for name, layout in self.wanted.items():  # a result that is an unchanged input, and that nothing reads
            if name in self.gradients and name not in self.finished:
                self.out.stage, self.out.micro_batch = 0 if staged else None, -1
                self.finished[name] = self._finish(name, layout)
        return tuple(seeds)

    def _find_needed(self, works: Sequence[Work]) -> None:
        """Find the buffers on a path from the inputs whose gradients are wanted."""
        self._needed = set(self.wanted)
        for work in works:
            passes = not (isinstance(work.do, Kernel) and work.do.op.startswith(_NOT_DIFFERENTIATED))
            maximum = isinstance(work.do, Exchange) and work.do.reducer in {"max", "min", "product"}
            if passes and not maximum and any(name in self._needed for name in work.reads):
                self._needed |= {n for n in work.writes if self.out.buffers[n].dtype in FLOATS}

    def _contribution(self, name: str, whole: Container[str] = ()) -> str:
        """Return a new buffer for a part of the gradient of buffer `name`; it may be all of it."""
        gradient = self._part(name, whole)
        self.gradients.setdefault(name, gradient)
        return gradient

    def _part(self, name: str, whole: Container[str] = ()) -> str:
        """Return a new buffer for a part of a gradient; over the axes in `whole` it is the same on all ranks."""
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        pending = {axis: "sum" for axis in self._copied(name) if axis not in whole}
        return self.out.add_buffer(f"{name}.grad{number or ''}", replace_buffer(self.out.buffers[name], pending))

    def _copied(self, name: str) -> tuple[str, ...]:
        """Return the mesh axes on which a buffer has copies."""
        about = self.out.buffers[name]
        return tuple(axis for axis in self.out.mesh.names if axis not in _axes(about) and axis not in about.pending)

    def _whole(self, name: str) -> frozenset[str]:
        """Return the mesh axes on which buffer `name` has copies whose gradient is the same on all ranks rather than
        pending.
        """
        return frozenset(self._copied(name)) - set(self.out.buffers[self.gradients[name]].pending)

    def _incoming(self, name: str, pending: Container[str]) -> str:
        """Return the gradient of buffer `name`, pending over the axes in `pending` on which the buffer has copies."""
        axes = [axis for axis in self._copied(name) if axis in pending and axis in self._whole(name)]
        if axes:
            self.gradients[name] = self._shared_out(self.gradients[name], axes)
        return self.gradients[name]

    def _shared_out(self, gradient: str, axes: Sequence[str]) -> str:
        """Write each rank's equal share of a gradient that is the same on all ranks of `axes`."""
        about, share = self.out.buffers[gradient], f"{gradient}.share"
        self.out.add_buffer(share, replace_buffer(about, {**about.pending, **dict.fromkeys(axes, "sum")}))
        kernel = Kernel(op="aten.mul.Scalar", args=({"tensor": gradient}, 1 / self.out.mesh.size(axes)))
        self.out.add(Work(do=kernel, reads=(gradient,), writes=(share,)))
        return share

    def _add_up(self, name: str, part: str) -> None:
        """Add `part` to the gradient of buffer `name`, if there is one already."""
        before = self.gradients[name]
        if before == part:
            return
        total = f"{part}.sum"
        pending = [self.out.buffers[one].pending for one in (before, part)]
        missing = [[axis for axis in other if axis not in own] for own, other in (pending, pending[::-1])]
        if all(missing):
            before, missing[0] = self._shared_out(before, missing[0]), []
        if missing[0]:
            before, part, missing = part, before, missing[::-1]
        self.out.add_buffer(total, replace_buffer(self.out.buffers[part], {**pending[0], **pending[1]}))
        share = {"alpha": 1 / self.out.mesh.size(missing[1])} if missing[1] else {}
        kernel = Kernel(op="aten.add.Tensor", args=({"tensor": before}, {"tensor": part}), kwargs=share)
        self.out.add(Work(do=kernel, reads=(before, part), writes=(total,)))
        self.gradients[name] = total

    def _exchange(self, work: Work, exchange: Exchange) -> None:
        if exchange.kind in {BROADCAST, REDUCE}:
            (self._reduce if exchange.kind == BROADCAST else self._broadcast)(work, exchange)
            return
        (source,), (target,) = work.reads, work.writes
        if (
            exchange.kind in {ALL_GATHER, ALL_REDUCE}
            and exchange.reducer != "avg"
            and self._whole(target).issuperset(exchange.axes)
        ):
            self._local_dual(work, exchange)
            return
        duals = {ALL_GATHER: REDUCE_SCATTER, REDUCE_SCATTER: ALL_GATHER}
        sums = "sum" if exchange.kind in {ALL_GATHER, ALL_REDUCE} else ""
        dual = Exchange(
            kind=duals.get(exchange.kind, exchange.kind),
            axes=exchange.axes,
            dim=exchange.to_dim if exchange.kind == ALL_TO_ALL else exchange.dim,
            blocks=exchange.to_blocks if exchange.kind == ALL_TO_ALL else exchange.blocks,
            to_dim=exchange.dim if exchange.kind == ALL_TO_ALL else 0,
            to_blocks=exchange.blocks if exchange.kind == ALL_TO_ALL else 1,
            reducer="avg" if exchange.reducer == "avg" else sums,
            source=_inverse(exchange.source) if exchange.kind == PERMUTE else (),
            stages=exchange.stages[::-1],
        )
        incoming = self._incoming(target, self.out.mesh.names if exchange.kind == PERMUTE else exchange.axes)
        part = self._contribution(source, self._whole(target))
        self.out.add(Work(do=dual, reads=(incoming,), writes=(part,)))
        self._add_up(source, part)

    def _local_dual(self, work: Work, exchange: Exchange) -> None:
        """Write the dual of a gather or a sum whose gradient all ranks have: each takes its slice of it, or all."""
        (source,), (target,) = work.reads, work.writes
        incoming = {"tensor": self.gradients[target]}
        own = [exchange.dim, exchange.blocks, list(exchange.axes)]
        do = (
            Kernel(op="shard", args=(incoming, own))
            if exchange.kind == ALL_GATHER
            else Kernel(op="same", args=(incoming,))
        )
        part = self._contribution(source, self._whole(target))
        self.out.add(Work(do=do, reads=(self.gradients[target],), writes=(part,)))
        self._add_up(source, part)

    def _reduce(self, work: Work, exchange: Exchange) -> None:
        """Write the reduction of a piece's gradient to the rank with the piece; the result of the last reduction has
        the gradients of all ranks' pieces.
        """
        (source,), (target,) = work.reads, work.writes
        sums, left = self._reduced.pop(source, ("", self.out.mesh.size(exchange.axes)))
        part, incoming = self._part(source), self._incoming(target, self.out.mesh.names)
        reads = (incoming, sums) if sums else (incoming,)
        dual = replace_exchange(exchange, REDUCE)
        self.out.add(Work(do=dual, reads=reads, writes=(part,)))
        if left > 1:
            self._reduced[source] = part, left - 1
            return
        self.gradients.setdefault(source, part)
        self._add_up(source, part)

    def _broadcast(self, work: Work, exchange: Exchange) -> None:
        """Write the broadcast of a piece's gradient by its rank; reductions to other ranks have the same gradient."""
        (source, *sums), (target,) = work.reads, work.writes
        incoming = self._incoming(target, self.out.mesh.names)
        part = self._contribution(source)
        self.out.add(Work(do=replace_exchange(exchange, BROADCAST), reads=(incoming,), writes=(part,)))
        self._add_up(source, part)
        for name in sums:
            self.gradients[name] = incoming

    def _unshard(self, work: Work) -> None:
        (source,), (target,) = work.reads, work.writes
        assert isinstance(work.do, Kernel)  # noqa: S101 - by the caller
        incoming = self.gradients[target]
        part = self._contribution(source, self._whole(target))
        self.out.add(
            Work(
                do=Kernel(op="unshard", args=({"tensor": incoming}, *work.do.args[1:])),
                reads=(incoming,),
                writes=(part,),
            )
        )
        self._add_up(source, part)

    def _kernel(self, work: Work) -> None:
        (target,) = work.writes
        wanted = [name for name in dict.fromkeys(work.reads) if name in self._needed]
        split = {axis for name in work.reads for axis in self.out.mesh.names if axis not in self._copied(name)}
        incoming = self._incoming(target, split)
        parts = [self._contribution(name, self._whole(target)) for name in wanted]
        do = Kernel(op="backward", args=(target, list(wanted)))
        self.out.add(replace(work, do=do, reads=(incoming,), writes=tuple(parts)))
        for name, part in zip(wanted, parts, strict=True):
            self._add_up(name, part)

    def _finish(self, name: str, target: Layout) -> str:
        """Convert the gradient of the input buffer `name` to `target`, reducing pending sums; return its buffer."""
        gradient = self.gradients[name]
        about = self.out.buffers[gradient]
        here = Layout(about.dims, tuple((a, about.pending[a]) for a in self.out.mesh.names if a in about.pending))
        for number, step in enumerate(_path(about.shape, about.dtype, self.out.mesh, here, target)):
            after = f"{name}.gradient{number}"
            local = local_shape(about.shape, step.after, self.out.mesh)
            made = replace_buffer(about, dict(step.after.pending))
            self.out.add_buffer(after, msgspec.structs.replace(made, dims=step.after.dims, local=local))
            self.out.add(Work(do=primitive(step, here, gradient, self.out.mesh), reads=(gradient,), writes=(after,)))
            gradient, here = after, step.after
        return gradient


@lru_cache(maxsize=4096)  # cached, since the program is written again for every way in which its products may run
def _path(
    shape: tuple[int, ...], dtype: str, mesh: Mesh, source: Layout, target: Layout
) -> tuple[RedistributionStep, ...]:
    moves = Redistributor(shape, dtype, mesh)
    moves.allow_irregular_specs([source, target])
    return moves.path(source, target)


def _axes(buffer: Buffer) -> set[str]:
    return {item for spec in buffer.dims for item in spec if isinstance(item, str)}


def replace_buffer(buffer: Buffer, pending: dict[str, str]) -> Buffer:
    """Return the description of a gradient of `buffer`."""
    return msgspec.structs.replace(buffer, pending=pending, gradient=True)


def replace_exchange(exchange: Exchange, kind: str) -> Exchange:
    """Return the dual of a broadcast or of a reduction to one rank."""
    return Exchange(kind=kind, axes=exchange.axes, root=exchange.root, reducer="sum" if kind == REDUCE else "")


def _inverse(source: Sequence[int]) -> tuple[int, ...]:
    return tuple(source.index(rank) for rank in range(len(source)))
