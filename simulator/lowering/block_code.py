"""A block of the network as straight-line code: the kernels and collectives of its passes, with their costs looked up.

How fine the code is, is a choice. `kernel` keeps every launch; `layer` merges launches between two collectives into
one; `stage` folds a pass of a whole stage, collectives included, into a single launch, for programs of thousands of
GPUs. Merging adds times up, so on an otherwise idle machine it changes no end time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from simulator.costs import Cost
from simulator.layer_cost import (
    WEIGHT_GRADIENT,
    CostContext,
    ends_of,
    overlap_parts_s,
    pieces_s,
    saved_bytes,
    tensors_bytes,
)
from simulator.operators import OperatorSpec, Work, WorkKind, active_rows, backward_work, forward_work
from simulator.recomputation import run_again
from simulator.runtime_library import RecomputeSpec
from simulator.tp_overlap import MATCHED_MODES, extra_calls, launch_s, launches, partials_bytes, together_s

KernelKey = tuple[str, tuple[int, ...], str]


class Detail(StrEnum):
    KERNEL = "kernel"
    LAYER = "layer"
    STAGE = "stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStep:
    """One launch on the compute stream. `weight`: a weight gradient, which split backwards run later.

    `pieces_s` is what it takes cut into one piece for each tensor-parallel rank; zero for what is no product.
    """

    key: KernelKey
    cost: Cost
    host_s: float
    weight: bool = False
    pieces_s: float = 0.0
    merged: bool = False  # stands for many launches
    reads: str = ""  # the tensor a product reads, in the runtime's words
    result: str = ""  # and the one it gives


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStep:
    """One collective that the next kernel waits for. `mode` says how products next to it may hide it."""

    op: str
    group: str
    nbytes: int
    host_s: float
    seconds: float
    mode: str = "none"
    chunk_s: float = 0.0
    hop_s: float = 0.0
    tensor: str = ""
    adding: Cost | None = None  # of the pass that adds up partial results, where the mode has one
    ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapStep:
    """A product and the collective it feeds on (`gathers`) or feeds, run beside each other; see tp_overlap."""

    product: KernelStep
    transfer: TransferStep
    gathers: bool

    @property
    def ranks(self) -> int:
        return self.transfer.ranks

    @property
    def piece(self) -> KernelStep:
        """What is launched: one piece of the product, or all of it where one kernel does both."""
        name, shape, dtype = self.product.key
        pieces = round(launches(self.transfer.mode, self.ranks))
        return KernelStep(
            key=(f"{name}/{pieces}", shape, dtype),
            cost=replace(self.product.cost, seconds=launch_s(self.transfer.mode, **self._times)),
            host_s=self.product.host_s,
        )

    @property
    def seconds(self) -> float:
        """How long both take together on an idle machine."""
        return together_s(self.transfer.mode, **self._times)

    @property
    def _times(self) -> dict[str, float]:
        t = self.transfer
        return {
            "whole_s": t.seconds,
            "chunk_s": t.chunk_s,
            "hop_s": t.hop_s,
            "product_s": self.product.cost.seconds,
            "pieces_s": self.product.pieces_s,
            "ranks": float(self.ranks),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStep:
    """A kernel in `ranks` pieces; while one computes, the shard that the next one needs comes round the ring."""

    kernel: KernelStep
    group: str
    nbytes: int  # of one shard
    hop_s: float
    host_s: float
    ranks: int

    @property
    def piece(self) -> KernelStep:
        name, shape, dtype = self.kernel.key
        cost = replace(self.kernel.cost, seconds=self.kernel.cost.seconds / self.ranks)
        return KernelStep(key=(f"{name}/{self.ranks}", shape, dtype), cost=cost, host_s=self.kernel.host_s)

    @property
    def seconds(self) -> float:
        piece = self.kernel.cost.seconds / self.ranks
        return piece + (self.ranks - 1) * max(piece, self.hop_s)


Step = KernelStep | TransferStep | OverlapStep | RingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCode:
    """Forward and backward of one block; `saved_bytes` live from one to the other, `again_bytes` during backward."""

    name: str
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    saved_bytes: int
    again_bytes: int


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
    wrapping = context.spec.host.wrapping_s(context.table.plans[0].recompute)
    extra = context.spec.host.forward_layer_s + wrapping if again else 0.0
    _add_host(backward, f"{name} backward", host_backward_s + extra)
    kept = round(float(saved_bytes(active, mode, context)[0]))
    everything = round(float(tensors_bytes(active, context)[0]))
    return BlockCode(
        name=name,
        forward=tuple(_rings(forward)),
        backward=(*_rings(again), *_rings(backward)),
        saved_bytes=kept,
        again_bytes=everything if again else 0,
    )


def merged(steps: Iterable[Step], name: str, detail: Detail) -> list[Step]:
    """Return `steps` as coarse as `detail` asks for."""
    steps = _overlapped(list(steps), name)
    if detail is Detail.KERNEL:
        return steps
    out: list[Step] = []
    run: list[KernelStep] = []

    def close() -> None:
        if run:
            out.append(_sum(run, f"{name}.{len(out)}"))
            run.clear()

    for step in steps:
        if isinstance(step, KernelStep):
            run.append(step)
        elif detail is Detail.STAGE:
            run.append(_folded(step))
        else:
            close()
            out.append(step)
    close()
    return out


def _folded(step: TransferStep | OverlapStep | RingStep) -> KernelStep:
    """Return what moves, and what runs beside it, as one kernel of the same length on an idle machine."""
    if isinstance(step, TransferStep):
        return KernelStep(
            key=(step.op, (step.nbytes,), step.group), cost=Cost(seconds=step.seconds), host_s=step.host_s
        )
    if isinstance(step, OverlapStep):
        kernel, mode = step.product, step.transfer.mode
        host = kernel.host_s * launches(mode, step.ranks)
        host += (1 + extra_calls(mode, step.ranks)) * step.transfer.host_s
    else:
        kernel = step.kernel
        host = kernel.host_s * step.ranks + 2 * (step.ranks - 1) * step.host_s
    moved = kernel.cost.seconds * kernel.cost.hbm_bytes_per_s
    cost = replace(kernel.cost, seconds=step.seconds, hbm_bytes_per_s=moved / step.seconds if step.seconds else 0.0)
    return KernelStep(key=kernel.key, cost=cost, host_s=host)


def _overlapped(steps: list[Step], name: str) -> list[Step]:
    """Join every collective that may be hidden with the run of products it gathers for, or reduces after."""
    out: list[Step] = []
    position = 0
    while position < len(steps):
        step = steps[position]
        position += 1
        if not isinstance(step, TransferStep) or step.mode == "none" or step.op == "all_reduce":
            out.append(step)
            continue
        partners: list[KernelStep] = []
        earlier = tuple(out)
        if step.op == "all_gather":
            while position < len(steps) and _joins(steps[position], partners, step):
                partners.append(steps[position])  # type: ignore[arg-type]  # _joins lets only kernels through
                position += 1
        else:
            while out and isinstance(leader := out[-1], KernelStep) and leader.pieces_s:
                partners.insert(0, leader)
                out.pop()
        gathers = step.op == "all_gather"
        joined, apart = _matched(partners, step, _terms(earlier, step))
        if not any(p.pieces_s for p in joined):
            out += [step, *partners] if gathers else [*partners, step]
            continue
        product = _sum(joined, f"{name}.{step.op}.{len(out)}")
        together = OverlapStep(product=product, transfer=step, gathers=gathers)
        out += [together, *apart] if gathers else [*apart, together]
        if step.adding is not None:
            out.append(KernelStep(key=("add_partials", (step.nbytes,), step.group), cost=step.adding, host_s=0.0))
    return out


def _terms(steps: Sequence[Step], transfer: TransferStep) -> int:
    """Return how many products since the last collective add up to what `transfer` reduces."""
    count = 0
    for step in reversed(steps):
        if isinstance(step, OverlapStep) or (isinstance(step, TransferStep) and step.group == transfer.group):
            break
        count += isinstance(step, KernelStep) and step.result == transfer.tensor
    return count


def _matched(
    partners: Sequence[KernelStep], step: TransferStep, terms: int
) -> tuple[list[KernelStep], list[KernelStep]]:
    """Return which of `partners` run in pieces beside the transfer, and which stay whole."""
    if step.mode not in MATCHED_MODES:
        return list(partners), []
    joined = [p for p in partners if not p.weight]
    if step.op == "reduce_scatter" and terms != 1:
        return [], list(partners)
    return joined, [p for p in partners if p.weight]


def _joins(step: Step, partners: Sequence[KernelStep], gather: TransferStep) -> bool:
    """Whether a step belongs to the products behind a gather: all up to the first that is none, after one has come."""
    if not isinstance(step, KernelStep):
        return False
    if gather.mode in MATCHED_MODES and step.pieces_s and not step.weight and step.reads != gather.tensor:
        return not any(p.pieces_s and not p.weight for p in partners)
    return bool(step.pieces_s) or not any(p.pieces_s for p in partners)


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
        steps.insert(0, KernelStep(key=(name, (), "host"), cost=Cost(seconds=0.0), host_s=seconds))


def _extend(steps: list[Step], works: Sequence[Work], operator: OperatorSpec, context: CostContext) -> None:
    host = context.spec.host
    for work in works:
        if work.kind is WorkKind.MOVE and not work.launches and not np.any(work.bytes):
            continue  # nothing to do under this plan
        if work.kind is not WorkKind.COLLECTIVE:
            reads, result = ends_of(work, operator)
            steps.append(replace(_kernel(work, context), reads=reads, result=result))
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
    step = TransferStep(
        op=work.collective,
        group=work.over,
        nbytes=_whole(size),
        host_s=context.spec.host.collective_s,
        seconds=float(context.groups.time_s(work.collective, work.over, size)[0]),
        ranks=ranks,
    )
    mode = str(context.table.overlap_at(site)[0])
    if work.over != "tp" or mode == "none" or work.collective not in {"all_gather", "reduce_scatter"}:
        return step
    chunk, hop = overlap_parts_s(mode, work.collective, size, context)
    step = replace(step, mode=mode, chunk_s=float(chunk[0]), hop_s=float(hop[0]))
    moved = partials_bytes(mode, work.collective, float(size[0]), float(ranks))
    if not moved:
        return step
    memory = context.roofline.memory_bytes_per_s
    adding = Cost(seconds=moved / memory, sms=float(context.roofline.gpu.sm_count), hbm_bytes_per_s=memory)
    return replace(step, adding=adding)


def _kernel(work: Work, context: CostContext) -> KernelStep:
    host = context.spec.host
    seconds = float(np.asarray(context.roofline.seconds(work)).flat[0])
    launch = host.backward_launch_s if work.backward else host.launch_s
    if context.table["tp"][0] > 1 and not context.runtime.compile:
        launch = host.dtensor_launch_s
    moved = float(np.asarray(work.bytes).flat[0])
    overlaps = work.kind is WorkKind.MATMUL and bool(context.table.overlap_modes)
    return KernelStep(
        key=(work.name, _shape(work), context.runtime.compute_dtype),
        cost=Cost(
            seconds=seconds,
            sms=float(context.roofline.gpu.sm_count),
            hbm_bytes_per_s=min(moved / seconds, context.roofline.memory_bytes_per_s) if seconds else 0.0,
        ),
        host_s=launch * work.launches,
        weight=work.name.endswith(WEIGHT_GRADIENT),
        pieces_s=float(pieces_s(work, context).flat[0]) if overlaps else 0.0,
    )


def _sum(run: Sequence[KernelStep], name: str) -> KernelStep:
    if len(run) == 1:
        return run[0]
    seconds = sum(step.cost.seconds for step in run)
    moved = sum(step.cost.seconds * step.cost.hbm_bytes_per_s for step in run)
    return KernelStep(
        key=(name, (), run[0].key[2]),
        cost=Cost(
            seconds=seconds,
            sms=max(step.cost.sms for step in run),
            hbm_bytes_per_s=moved / seconds if seconds else 0.0,
        ),
        host_s=sum(step.host_s for step in run),
        weight=run[0].weight,
        pieces_s=sum(step.pieces_s or step.cost.seconds for step in run),
        merged=True,
    )


def _shape(work: Work) -> tuple[int, ...]:
    if work.kind is WorkKind.MOVE:
        return (_whole(work.bytes),)
    return tuple(_whole(x) for x in (work.batch, work.m, work.n, work.k))


def _whole(value: object) -> int:
    return round(float(np.asarray(value, dtype=np.float64).flat[0]))
