"""A block of the network as straight-line code: the kernels and collectives of its passes under one plan.

There are two levels of detail: `kernel` keeps every launch; `layer` merges launches between two collectives into one
with the sum of their times, which changes no end time on an otherwise idle machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate

import numpy as np

from simulator.config.overlap_sites import ASYNC
from simulator.kernels.operators import OperatorSpec, Work, WorkKind
from simulator.lowering.steps import (
    KernelStep,
    PiecesStep,
    SiteStep,
    Step,
    TransferStep,
    piece_of,
    summed,
)
from simulator.passes.block import block_passes
from simulator.passes.steps import Kernel, Pair, Ring, Transfer, Wait
from simulator.passes.steps import Step as PassStep
from simulator.program.cost_model import Cost
from simulator.runtimes.parts import RecomputeSpec
from simulator.step.context import CostContext

# A run of kernels becomes one launch if waiting for the host makes it at most this many times as long as its kernels.
WAITS = 1.01


class Detail(StrEnum):
    KERNEL = "kernel"
    LAYER = "layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCode:
    """The forward and the backward pass of one block."""

    name: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]


def block_code(
    name: str,
    operators: Sequence[OperatorSpec],
    context: CostContext,
    mode: RecomputeSpec,
    *,
    host_s: tuple[float, float] = (0.0, 0.0),
    again_s: float = 0.0,
) -> BlockCode:
    """Return the code of one block under the single plan of `context`, with recomputation as `mode` states; `host_s`
    are the host's seconds besides launches in the forward and the backward pass, `again_s` more where it recomputes.
    """
    passes = block_passes(operators, context, {"": mode})
    again = _written(passes.again.get("", ()), context)
    return BlockCode(
        name=name,
        forward=(*_host(f"{name} forward", host_s[0]), *_written(passes.forward, context)),
        # The pass's own Python runs after recomputation.
        backward=(
            *again,
            *_host(f"{name} backward", host_s[1] + (again_s if again else 0.0)),
            *_written(passes.backward, context),
        ),
    )


def merged(steps: Iterable[Step], name: str, detail: Detail) -> list[Step]:
    """Return `steps` merged to the level of `detail`."""
    if detail is Detail.KERNEL:
        return list(steps)
    out: list[Step] = []
    run: list[KernelStep] = []

    def close() -> None:
        for part in _parts(run):
            out.append(summed(part, f"{name}.{len(out)}"))
        run.clear()

    for step in steps:
        if isinstance(step, KernelStep):
            run.append(step)
        else:
            close()
            out.append(step)
    close()
    return out


def _parts(run: Sequence[KernelStep]) -> list[Sequence[KernelStep]]:
    """Return consecutive launches in one part; in two parts if the device must wait for the host within them. The
    second part begins with the kernel whose launch plus the kernels from there on end latest.
    """
    if not run:
        return []
    issued = list(accumulate(step.host_s for step in run))
    left = list(accumulate(step.cost.seconds for step in reversed(run)))[::-1]
    behind = [host_s + device_s for host_s, device_s in zip(issued, left, strict=True)]
    latest = max(range(len(run)), key=lambda place: behind[place])
    if latest == 0 or behind[latest] <= WAITS * left[0]:
        return [run]
    return [run[:latest], run[latest:]]


def _host(name: str, seconds: float) -> tuple[Step, ...]:
    """Return Python between kernels, as a launch with host time and no device time."""
    step = KernelStep(key=(name, (), "host"), cost=Cost(seconds=0.0, launches=0.0), host_s=seconds)
    return (step,) if seconds else ()


def _written(steps: Iterable[PassStep], context: CostContext) -> list[Step]:
    """Return the steps as they run under the single plan of `context`."""
    return [_step(step, context) for step in steps]


def _step(step: PassStep, context: CostContext) -> Step:
    match step:
        case Kernel():
            return _kernel(step, context)
        case Transfer():
            return _transfer(step)
        case Ring():
            ranks = _whole(step.ranks)
            kernel = _beside_ring(step, context)
            return PiecesStep(
                piece=piece_of(kernel, ranks, kernel.cost.seconds / ranks),
                group=step.over,
                nbytes=_whole(step.shard_bytes),
                ranks=ranks,
            )
        case Pair():
            return _pair(step, context)
        case Wait():
            return step


def _beside_ring(ring: Ring, context: CostContext) -> KernelStep:
    if ring.kernel is not None:
        return _kernel(ring.kernel, context)
    return KernelStep(key=(ring.hidden_by, (), ""), cost=Cost(seconds=0.0, launches=0.0), host_s=0.0)


def _transfer(step: Transfer) -> TransferStep:
    return TransferStep(
        op=step.op,
        group=step.over,
        nbytes=_whole(step.nbytes),
        host_s=step.call_s,
        seconds=float(step.alone_s[0]),
        ranks=_whole(step.ranks),
    )


def _pair(step: Pair, context: CostContext) -> SiteStep | PiecesStep:
    assert step.transfer.modes is not None  # noqa: S101 - without a mode there is no pair
    mode, transfer = str(step.transfer.modes[0]), _transfer(step.transfer)
    kernels = [_kernel(kernel, context) for kernel in step.kernels if kernel.rows[0]]
    alone = summed(kernels, "+".join(kernel.key[0] for kernel in kernels))
    issue_s, hop_s = float(step.issue_s[0]), float(step.copy_s[0])
    if mode == ASYNC:
        name, shape, dtype = alone.key
        key = (f"{name} {mode} {transfer.op}", (*shape, transfer.nbytes), dtype)
        whole = replace(alone, key=key, host_s=alone.host_s + alone.more_host_s, more_host_s=0.0)
        piece = piece_of(whole, transfer.ranks, float(step.piece_s[0]))
        return PiecesStep(
            piece=piece,
            group=transfer.group,
            nbytes=round(transfer.nbytes / transfer.ranks),
            ranks=transfer.ranks,
            hop_s=hop_s,
            copies_host_s=issue_s / transfer.ranks - piece.host_s,
        )
    name, shape, dtype = alone.key
    key = (f"{name} {mode} {transfer.op}", (*shape, transfer.nbytes), dtype)
    first_s = min(issue_s, context.spec.host.launch_s)
    kernel = replace(alone, key=key, cost=replace(alone.cost, launches=1.0), host_s=first_s, more_host_s=0.0)
    exposed = KernelStep(
        key=(f"{name} {mode} {transfer.op}, exposed", (*shape, transfer.nbytes), dtype),
        cost=Cost(seconds=float(step.exposed_s[0]), launches=0.0),
        host_s=0.0,
    )
    return SiteStep(
        mode=mode, kernel=kernel, exposed=exposed, transfer=transfer, hop_s=hop_s, more_host_s=issue_s - first_s
    )


def _kernel(step: Kernel, context: CostContext) -> KernelStep:
    work, seconds, memory = step.work, float(step.alone_s[0]), context.roofline.memory_bytes_per_s
    moved = float(np.asarray(work.bytes).flat[0])
    return KernelStep(
        key=(work.name, _shape(work), context.runtime.compute_dtype),
        cost=Cost(
            seconds=seconds,
            sms=float(context.roofline.gpu.sm_count),
            hbm_bytes_per_s=min(moved / seconds, memory) if seconds else 0.0,
            launches=work.launches,
        ),
        host_s=float(np.asarray(step.launch_s).flat[0]),
        weight=step.weight,
    )


def _shape(work: Work) -> tuple[int, ...]:
    if work.kind is WorkKind.MOVE:
        return (_whole(work.bytes),)
    return tuple(_whole(x) for x in (work.batch, work.m, work.n, work.k))


def _whole(value: object) -> int:
    return round(float(np.asarray(value, dtype=np.float64).flat[0]))
