"""Writes the instructions of a sharded program, with the work of each and the layouts of its buffers.

A buffer is a tensor in one layout. The computation or exchange of a step is recorded as a `Work`, from which the
backward pass is derived. Kernels and exchanges are on two streams, and every instruction waits for the events of the
buffers that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from planner.sharding.layouts.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    PERMUTE,
    REDUCE,
    REDUCE_SCATTER,
    SEND_RECV,
)
from planner.sharding.layouts.layout import DimSpec, Layout, Mesh, divides_evenly, local_shape
from planner.sharding.layouts.redistribution import RedistributionStep
from planner.sharding.plans.plan import OperatorStep
from simulator.config.runtime import ELEMENT_BYTES
from simulator.program.program import COMM, COMPUTE, CodeWriter
from simulator.sharded.program import Buffer, Exchange, Kernel
from topology.errors import Infeasible

SENDS, RECEIVES = "sends", "receives"  # streams of messages between stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one instruction: a kernel or an exchange, and the buffers that it reads and writes.

    `step` is the operator's step of a kernel; `share` is its part of that operator's time, and `chunk` an axis and the
    number of parts of which it has one. It begins when the buffers in `after`, in addition to those that it reads, are
    written.
    """

    do: Kernel | Exchange
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    step: OperatorStep | None = None
    share: float = 1.0
    chunk: tuple[str, int] = ("", 1)
    after: tuple[str, ...] = ()
    stage: int = 0
    micro_batch: int = -1  # -1 for work that is done once for all micro batches


def is_message(work: Work) -> bool:
    """Return whether this is a message from one stage to another."""
    return isinstance(work.do, Exchange) and work.do.kind == SEND_RECV


@dataclass(slots=True)
class Writer:
    """Writes instructions, and records the work of each and the event at which a buffer is written.

    `mesh` is that of one stage, `world` the name of the group of all its ranks. Works that are added while `stage` is
    set belong to that stage and to `micro_batch`; `stages` has the stage of every instruction.
    """

    mesh: Mesh
    world: str = "world"
    stage: int | None = None
    micro_batch: int = -1
    stages: list[int] = field(default_factory=list)
    code: CodeWriter = field(default_factory=CodeWriter)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)
    _made: dict[str, tuple[str, str]] = field(default_factory=dict)  # buffer -> (its stream, event afterwards)
    _waited: set[tuple[str, str]] = field(default_factory=set)

    def add_buffer(self, name: str, buffer: Buffer) -> str:
        self.buffers[name] = buffer
        return name

    def add(self, work: Work) -> None:
        """Write the instruction of `work` on its stream, after what it reads."""
        if self.stage is not None:
            work = replace(work, stage=self.stage, micro_batch=self.micro_batch)
        if is_message(work):
            self.send(work)
            self.receive(work)
            return
        stream = COMM if isinstance(work.do, Exchange) else COMPUTE
        self._wait(stream, (*work.reads, *work.after))
        if isinstance(work.do, Exchange):
            read, written = self.buffers[work.reads[0]], self.buffers[work.writes[0]]
            size = prod((written if work.do.kind == ALL_GATHER else read).local) * ELEMENT_BYTES[read.dtype]
            op = {PERMUTE: "send_recv", REDUCE: BROADCAST}.get(work.do.kind, work.do.kind)  # a broadcast, backwards
            group = self.world if work.do.kind == PERMUTE else self.mesh.group_name(work.do.axes)
            self.code.collective(op, group, size, reads=work.reads, writes=work.writes)
        else:
            first = self.buffers[work.writes[0]]
            self.code.launch(work.writes[0], first.local, first.dtype, reads=work.reads, writes=work.writes)
        self._end(stream, work, work.stage)

    def _wait(self, stream: str, names: Sequence[str]) -> None:
        """Let a stream wait for buffers that other streams write."""
        for name in names:
            made = self._made.get(name)
            if made is not None and made[0] != stream and (stream, made[1]) not in self._waited:
                self._waited.add((stream, made[1]))
                self.code.wait(stream, made[1])

    def send(self, work: Work) -> None:
        """Write the sending half of a message, on the stage that sends."""
        assert isinstance(work.do, Exchange)  # noqa: S101 - by the caller
        here, there = work.do.stages
        self._wait(SENDS, work.reads)
        self.code.send(
            work.do.axes[0], there, self._message_bytes(work), tag=work.writes[0], stream=SENDS, reads=work.reads
        )
        self.stages += [here] * (self.code.length - len(self.stages))

    def receive(self, work: Work) -> None:
        """Write the receiving half of a message, on the stage that receives."""
        assert isinstance(work.do, Exchange)  # noqa: S101 - by the caller
        here, there = work.do.stages
        nbytes = self._message_bytes(work)
        self.code.recv(work.do.axes[0], here, nbytes, tag=work.writes[0], stream=RECEIVES, writes=work.writes)
        self._end(RECEIVES, work, there)

    def _message_bytes(self, work: Work) -> int:
        about = self.buffers[work.reads[0]]
        return prod(about.local) * ELEMENT_BYTES[about.dtype]

    def _end(self, stream: str, work: Work, stage: int) -> None:
        event = self.code.record(stream)
        for name in work.writes:
            self._made[name] = (stream, event)
        self.stages += [stage] * (self.code.length - len(self.stages))
        self.works.append(work)


def bound(arguments: Any, buffers: Mapping[str, str]) -> Any:
    """Return arguments with names of tensors replaced by those of buffers."""
    if isinstance(arguments, dict):
        if "tensor" in arguments:
            return {"tensor": buffers[arguments["tensor"]]}
        return {key: bound(value, buffers) for key, value in arguments.items()}
    if isinstance(arguments, tuple):
        return tuple(bound(one, buffers) for one in arguments)
    return [bound(one, buffers) for one in arguments] if isinstance(arguments, list) else arguments


def describe(tensor: str, shape: Sequence[int], dtype: str, layout: Layout, mesh: Mesh) -> Buffer:
    """Return the buffer of a tensor in a layout. Raises Infeasible if pieces inside blocks of a dim differ in size."""
    for size, spec in zip(shape, layout.dims, strict=True):
        if any(isinstance(item, int) for item in spec) and not divides_evenly(size, spec, mesh):
            raise Infeasible(
                f"{tensor}: {size} elements over {' '.join(map(str, spec))} are not equal pieces",
                why="pieces inside blocks of a dim are equal",
                remedy="another placement, or a size that divides",
            )
    return Buffer(
        tensor=tensor,
        shape=tuple(shape),
        dtype=dtype,
        dims=layout.dims,
        local=local_shape(shape, layout, mesh),
        pending=dict(layout.pending),
    )


def primitive(step: RedistributionStep, before: Layout, buffer: str, mesh: Mesh) -> Kernel | Exchange:
    """Return the kernel or exchange by which a primitive changes a rank's piece in `buffer`."""
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


def next_ranks(axis: str, mesh: Mesh) -> tuple[int, ...]:
    """Return by rank the next rank along a mesh axis, cyclically."""
    at = mesh.names.index(axis)
    stride, size = prod(mesh.shape[at + 1 :]), mesh.shape[at]
    places = ((rank, rank // stride % size) for rank in range(mesh.ranks))
    return tuple(rank + ((place + 1) % size - place) * stride for rank, place in places)


def _changed(before: Layout, after: Layout) -> list[tuple[int, tuple[DimSpec, DimSpec]]]:
    both = zip(before.dims, after.dims, strict=True)
    return [(dim, pair) for dim, pair in enumerate(both) if pair[0] != pair[1]]


def _added(less: DimSpec, more: DimSpec) -> tuple[int, tuple[str, ...]]:
    """Return the blocks before the mesh axes that `more` has innermost in addition to `less`, and those axes; none if
    it has no more.
    """
    kept = {item for item in less if isinstance(item, str)}
    axes = tuple(item for item in more if isinstance(item, str) and item not in kept)
    if not axes or more[len(more) - len(axes) :] != axes:
        return 1, ()
    return prod(item for item in more[: len(more) - len(axes)] if isinstance(item, int)), axes


def permuted_from(before: Layout, after: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Return for each rank the rank that has, before a permute, the piece that the former has afterwards. Raises
    Infeasible if none is found.

    A piece is identified by the indices of its mesh axes in every dim; pending sums stay where they are unless axes
    swap.
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
