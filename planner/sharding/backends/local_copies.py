"""Copies on a rank before and after an exchange, as in the executor (`executor/sharding/exchanges.py`).

NCCL takes and returns pieces one after the other, so a tensor divided along another dim than the first is reordered,
and a sum is made in a copy. These copies run on the stream of the exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from planner.sharding.layouts.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE, REDUCE_SCATTER
from planner.sharding.problem.problem import Machine
from planner.sharding.solver.pricing import ROOFLINE_DTYPES, roofline_on
from simulator.config.runtime import ELEMENT_BYTES
from simulator.kernels.operators import Work as KernelWork
from simulator.kernels.operators import WorkKind
from simulator.lowering.steps import KernelKey
from simulator.program.cost_model import Cost
from simulator.program.program import Collective, Instruction, Launch, Program
from simulator.sharded.program import Buffer, Exchange, RunnableProgram


def copies_of(do: Exchange, read: Buffer, written: Buffer) -> tuple[list[KernelWork], list[KernelWork]]:
    """Return the copies before and after an exchange of `read` that makes `written`."""
    before: list[KernelWork] = []
    after: list[KernelWork] = []
    order = written.order or tuple(range(len(written.local)))
    is_moved = not lies_in(read.local, read.order, order)
    if do.kind in {ALL_REDUCE, REDUCE}:
        before.append(_copy(read, ordered=True))
    elif is_moved or (
        (do.kind == REDUCE_SCATTER and not _leads(read, order, do.dim, do.blocks))
        or (do.kind == ALL_TO_ALL and not _leads(read, order, do.to_dim, do.to_blocks))
    ):
        before.append(_copy(read, ordered=False))
    if do.kind in {ALL_GATHER, ALL_TO_ALL} and not _leads(written, order, do.dim, do.blocks):
        after.append(_copy(written, ordered=False))
    if do.reducer == "avg":
        after.append(_copy(written, ordered=True))
    return before, after


def lies_in(shape: Sequence[int], order: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return whether two orders of dims are the same in memory, apart from dims of one element; an empty order is that
    of the dims.
    """
    both = ([dim for dim in one or range(len(shape)) if shape[dim] > 1] for one in (order, wanted))
    return next(both) == next(both)


def _leads(buffer: Buffer, order: Sequence[int], dim: int, blocks: int) -> bool:
    """Return whether pieces along a dim are contiguous in an order of dims."""
    outside = order[: list(order).index(dim)]
    return prod(buffer.local[other] for other in outside) * blocks == 1


def _copy(buffer: Buffer, *, ordered: bool) -> KernelWork:
    """Return the copy of a piece; if its order changes, its time depends on elements where bytes do not decide."""
    elements = float(prod(buffer.local))
    moved = 2 * elements * ELEMENT_BYTES[buffer.dtype]
    return KernelWork(kind=WorkKind.MOVE, name="copy", bytes=moved, units={} if ordered else {"strided": elements})


def with_copies(
    runnable: RunnableProgram,
    kernels: dict[KernelKey, tuple[Cost, float]],
    machine: Machine,
    inside: Mapping[str, int],
) -> Program:
    """Return the Program with the copies around exchanges as kernels, whose times are added to `kernels`; `inside` has
    the bytes of copies inside kernels, by result.
    """

    def copies(works: Sequence[KernelWork], one: Collective | Launch, when: str) -> list[Launch]:
        launches = []
        for number, each in enumerate(works):
            launch = Launch(name=f"{one.writes[0]} copied {when} {number}", stream=one.stream)
            roofline = roofline_on(machine, ROOFLINE_DTYPES.get(runnable.buffers[one.writes[0]].dtype, "tfloat32"))
            seconds = float(np.asarray(roofline.seconds(each)).item())
            cost = Cost(seconds=seconds, sms=float(machine.cluster.slowest_kind.sm_count))
            kernels[launch.name, launch.shape, launch.dtype] = (cost, 0.0)
            launches.append(launch)
        return launches

    codes = []
    program = runnable.program()
    for code in program.codes:
        written_out: list[Instruction] = []
        for one in code.instructions:
            work = runnable.work.get(one.writes[0]) if isinstance(one, Collective) else None
            if not isinstance(one, Collective) or not isinstance(work, Exchange):
                nbytes = float(inside.get(one.writes[0], 0)) if isinstance(one, Launch) and one.writes else 0.0
                moved = KernelWork(kind=WorkKind.MOVE, name="copy", bytes=nbytes)
                written_out += [*(copies([moved], one, "before") if nbytes and isinstance(one, Launch) else []), one]
                continue
            before, after = copies_of(work, runnable.buffers[one.reads[0]], runnable.buffers[one.writes[0]])
            written_out += [*copies(before, one, "before"), one, *copies(after, one, "after")]
        codes.append(replace(code, instructions=tuple(written_out)))
    return replace(program, codes=tuple(codes))
