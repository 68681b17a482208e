"""A block of the network as straight-line code: the kernels and collectives of its passes, with their costs looked up.

How fine the code is, is a choice. `kernel` keeps every launch; `layer` merges launches between two collectives into
one; `stage` folds a pass of a whole stage, collectives included, into a single launch, for programs of thousands of
GPUs, but for launches between which the host waits. Merging adds times up, so on an otherwise idle machine it changes no end time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from simulator.closed_form.pieces import WEIGHT_GRADIENT, copy_hop_s, ends_of, pieces_s
from simulator.kernels.operators import OperatorSpec, Work, WorkKind, active_rows, backward_work, forward_work
from simulator.lowering.pairing import async_pairs, site_pairs
from simulator.lowering.steps import AsyncStep, KernelStep, RingStep, SiteStep, Step, TransferStep, WaitStep, summed
from simulator.overlap.site_costs import SITE_MODES, product_of
from simulator.overlap.torch_async import ASYNC, partials_bytes
from simulator.program.cost_model import Cost
from simulator.runtimes.parts import RecomputeSpec
from simulator.runtimes.recomputation import run_again
from simulator.step.context import CostContext
from simulator.step.host import again_host_s


class Detail(StrEnum):
    KERNEL = "kernel"
    LAYER = "layer"
    STAGE = "stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCode:
    """Forward and backward of one block."""

    name: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]


def block_code(
    name: str,
    operators: Sequence[OperatorSpec],
    context: CostContext,
    mode: RecomputeSpec,
    *,
    host_forward_s: float = 0.0,
    host_backward_s: float = 0.0,
) -> BlockCode:
    """Return the code of one block under the single plan of `context`, recomputing what `mode` says."""
    active = [operator for operator in operators if active_rows(operator, context.table)[0]]
    twice = run_again(active, mode, context.runtime, context.table)
    forward: list[Step] = []
    backward: list[Step] = []
    again: list[Step] = []
    for operator, again_too in zip(active, twice, strict=True):
        works = forward_work(operator, context.sizes, context.dtype_bytes)
        _extend(forward, works, operator, context)
        if again_too[0]:
            _extend(again, works, operator, context)
    for operator in reversed(active):
        works = backward_work(operator, context.sizes, context.dtype_bytes)
        _extend(backward, works, operator, context)
    _add_host(forward, f"{name} forward", host_forward_s)
    extra = float(again_host_s(context.spec.host, context.table)[0]) if again else 0.0
    _add_host(backward, f"{name} backward", host_backward_s + extra)
    return BlockCode(
        name=name,
        forward=tuple(_overlapped(forward, context)),
        backward=(*_overlapped(again, context), *_overlapped(backward, context)),
    )


def merged(steps: Iterable[Step], name: str, detail: Detail) -> list[Step]:
    """Return `steps` as coarse as `detail` asks for."""
    steps = async_pairs(list(steps), name)
    if detail is Detail.KERNEL:
        return steps
    out: list[Step] = []
    run: list[KernelStep] = []

    def close() -> None:
        if run:
            out.append(summed(run, f"{name}.{len(out)}"))
            run.clear()

    for step in steps:
        if isinstance(step, KernelStep):
            run.append(step)
        elif detail is Detail.STAGE and not isinstance(step, WaitStep):
            run.append(_folded(step))
        else:
            close()
            out.append(step)
    close()
    return out


def _folded(step: TransferStep | AsyncStep | SiteStep | RingStep) -> KernelStep:
    """Return what moves, and what runs beside it, as one kernel of the same length on an idle machine."""
    if isinstance(step, TransferStep):
        return KernelStep(
            key=(step.op, (step.nbytes,), step.group), cost=Cost(seconds=step.seconds), host_s=step.host_s
        )
    if isinstance(step, SiteStep):
        return replace(step.kernel, host_s=step.host_s)
    if isinstance(step, AsyncStep):
        kernel, host = step.product, step.host_s
    else:
        kernel = step.kernel
        host = kernel.host_s * step.ranks + 2 * (step.ranks - 1) * step.host_s
    moved = kernel.cost.seconds * kernel.cost.hbm_bytes_per_s
    cost = replace(kernel.cost, seconds=step.seconds, hbm_bytes_per_s=moved / step.seconds if step.seconds else 0.0)
    return KernelStep(key=kernel.key, cost=cost, host_s=host)


def _overlapped(steps: list[Step], context: CostContext) -> list[Step]:
    """Return a pass with its kernels and collectives joined where they run beside each other."""
    return site_pairs(_rings(steps), context)


def _rings(steps: list[Step]) -> list[Step]:
    """Join every ring of keys and values with the attention kernel beside it, before it (forward) or after."""
    out: list[Step] = []
    waiting: RingStep | None = None
    for step in steps:
        if isinstance(step, RingStep):
            before = out[-1] if out else None
            if isinstance(before, KernelStep) and before.key[0] == step.kernel.key[0]:
                out[-1] = replace(step, kernel=before)
            else:
                waiting = step
        elif waiting is not None and isinstance(step, KernelStep) and step.key[0] == waiting.kernel.key[0]:
            out.append(replace(waiting, kernel=step))
            waiting = None
        else:
            out.append(step)
    return out


def _add_host(steps: list[Step], name: str, seconds: float) -> None:
    """Put Python between kernels in front: a launch that costs the host and nothing on the device."""
    if seconds:
        steps.insert(0, KernelStep(key=(name, (), "host"), cost=Cost(seconds=0.0, launches=0.0), host_s=seconds))


def _extend(steps: list[Step], works: Sequence[Work], operator: OperatorSpec, context: CostContext) -> None:
    host = context.spec.host
    for work in works:
        if work.kind is WorkKind.MOVE and not work.launches and not np.any(work.bytes):
            continue  # nothing to do under this plan
        if work.kind is WorkKind.WAIT:
            steps.append(WaitStep(host_s=host.launch_s * work.launches))
            continue
        if work.kind is not WorkKind.COLLECTIVE:
            steps.append(_kernel(work, operator, context))
            continue
        ranks = _whole(context.groups.extent(work.over)[0])
        if ranks <= 1:
            continue
        if work.collective == "ring":
            shard = np.asarray(work.bytes, dtype=np.float64) / ranks
            hop = float(context.groups.time_s("send_recv", f"{work.over}_pair", shard)[0])
            beside = f"{operator.hidden_by}.backward" if work.backward else operator.hidden_by
            kernel = KernelStep(key=(beside, (), ""), cost=Cost(seconds=0.0), host_s=0.0)
            steps.append(
                RingStep(
                    kernel=kernel,
                    group=work.over,
                    nbytes=_whole(shard),
                    hop_s=hop,
                    host_s=host.collective_s,
                    ranks=ranks,
                )
            )
            continue
        steps.append(replace(_transfer(work, operator.site, ranks, context), tensor=operator.tensor))


def _transfer(work: Work, site: str, ranks: int, context: CostContext) -> TransferStep:
    size = np.broadcast_to(np.asarray(work.bytes, dtype=np.float64), (1,))
    between = f"{work.over}_pair" if work.collective == "send_recv" else work.over
    step = TransferStep(
        op=work.collective,
        group=work.over,
        nbytes=_whole(size),
        host_s=context.spec.host.collective_s,
        seconds=float(context.groups.time_s(work.collective, between, size)[0]),
        ranks=ranks,
        backward=work.backward,
    )
    mode = str(context.table.overlap_at(site)[0])
    if work.over != "tp" or mode == "none" or work.collective not in {"all_gather", "reduce_scatter"}:
        return step
    step = replace(step, mode=mode, hop_s=float(copy_hop_s(size, context)[0]), whole_bytes=float(size[0]))
    moved = partials_bytes(work.collective, float(size[0]), float(ranks))
    if mode != ASYNC or not moved:
        return step
    memory = context.roofline.memory_bytes_per_s
    adding = Cost(seconds=moved / memory, sms=float(context.roofline.gpu.sm_count), hbm_bytes_per_s=memory)
    return replace(step, adding=adding)


def _kernel(work: Work, operator: OperatorSpec, context: CostContext) -> KernelStep:
    host = context.spec.host
    seconds = float(np.asarray(context.roofline.seconds(work)).flat[0])
    launch = host.backward_launch_s if work.backward else host.launch_s
    if context.table["tp"][0] > 1 and not context.runtime.compile:
        launch = host.dtensor_launch_s
    moved = float(np.asarray(work.bytes).flat[0])
    reads, result = ends_of(work, operator)
    modes = context.table.overlap_modes if work.kind is WorkKind.MATMUL else ()
    halves = bool(reads) and any(mode in SITE_MODES for mode in modes)
    ranks = context.table["tp"]
    return KernelStep(
        key=(work.name, _shape(work), context.runtime.compute_dtype),
        cost=Cost(
            seconds=seconds,
            sms=float(context.roofline.gpu.sm_count),
            hbm_bytes_per_s=min(moved / seconds, context.roofline.memory_bytes_per_s) if seconds else 0.0,
            launches=work.launches,
        ),
        host_s=launch * work.launches,
        weight=work.name.endswith(WEIGHT_GRADIENT),
        pieces_s=float(pieces_s(work, context).flat[0]) if ASYNC in modes else 0.0,
        reads=reads,
        result=result,
        product=product_of(work, np.full(1, seconds), launch * work.launches, ranks, context.roofline)
        if halves
        else None,
    )


def _shape(work: Work) -> tuple[int, ...]:
    if work.kind is WorkKind.MOVE:
        return (_whole(work.bytes),)
    return tuple(_whole(x) for x in (work.batch, work.m, work.n, work.k))


def _whole(value: object) -> int:
    return round(float(np.asarray(value, dtype=np.float64).flat[0]))
