"""A block of the network as straight-line code: the kernels and collectives of its passes, with their costs looked up.

How fine the code is, is a choice. `kernel` keeps every launch; `layer` merges launches between two collectives into
one; `stage` folds a pass of a whole stage, collectives included, into a single launch, for programs of thousands of
GPUs. Merging adds times up, so on an otherwise idle machine it changes no end time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from simulator.costs import Cost
from simulator.layer_cost import CostContext
from simulator.operators import OperatorSpec, Work, WorkKind, backward_work, forward_work
from simulator.program import COMPUTE, CodeWriter, Launch
from simulator.runtime_library import RecomputeSpec

KernelKey = tuple[str, tuple[int, ...], str]


class Detail(StrEnum):
    KERNEL = "kernel"
    LAYER = "layer"
    STAGE = "stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelStep:
    """One launch on the compute stream. `weight`: a weight gradient, which split backwards run later."""

    key: KernelKey
    cost: Cost
    host_s: float
    weight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStep:
    """One collective the next kernel waits for; `beside` kernels before it run at the same time."""

    op: str
    group: str
    nbytes: int
    host_s: float
    beside: int = 0
    chunks: int = 1  # runs in so many pieces beside the products next to it


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapStep:
    """A product and the collective it feeds on (`gathers`) or feeds, cut into chunks that run beside each other.

    The first chunk gathered, or the last one reduced, has nothing to hide behind.
    """

    product: KernelStep
    transfer: TransferStep
    gathers: bool
    chunks: int

    @property
    def piece(self) -> KernelStep:
        """One chunk of the product."""
        name, shape, dtype = self.product.key
        cost = self.product.cost
        return KernelStep(
            key=(f"{name}/{self.chunks}", shape, dtype),
            cost=Cost(seconds=cost.seconds / self.chunks, sms=cost.sms, hbm_bytes_per_s=cost.hbm_bytes_per_s),
            host_s=self.product.host_s / self.chunks,
        )


Step = KernelStep | TransferStep | OverlapStep


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
    *,
    saved_bytes: int,
    everything_bytes: int,
    wrapped: bool,
    host_forward_s: float = 0.0,
    host_backward_s: float = 0.0,
) -> BlockCode:
    """Return the code of one block under the single plan of `context`; `wrapped` layers obey its recompute mode."""
    mode = context.spec.recompute[str(context.table.recompute[0])] if wrapped else RecomputeSpec()
    active = [operator for operator in operators if _holds(operator, context)]
    forward: list[Step] = []
    backward: list[Step] = []
    again: list[Step] = []
    for operator in active:
        works = forward_work(operator, context.sizes, context.dtype_bytes)
        _extend(forward, works, operator, context)
        if mode.layers == 1.0 and mode.runs_again(operator.name):
            _extend(again, works, operator, context)
    for operator in reversed(active):
        works = backward_work(operator, context.sizes, context.dtype_bytes)
        _extend(backward, works, operator, context)
    forward.insert(0, _host_only(f"{name} forward", host_forward_s))
    extra = context.spec.host.forward_layer_s + context.spec.host.checkpoint_s if again else 0.0
    backward.insert(0, _host_only(f"{name} backward", host_backward_s + extra))
    return BlockCode(
        name=name,
        forward=tuple(forward),
        backward=(*again, *backward),
        saved_bytes=saved_bytes,
        again_bytes=max(0, everything_bytes - saved_bytes) if again else 0,
    )


def merged(steps: Iterable[Step], name: str, detail: Detail, transfer_s: TransferSeconds) -> list[Step]:
    """Return `steps` as coarse as `detail` asks for; `transfer_s` prices a collective that is folded in."""
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
            if run and run[-1].weight is not step.weight:
                close()
            run.append(step)
        elif isinstance(step, OverlapStep):
            if detail is Detail.STAGE:
                run.append(_folded(step, transfer_s))
            else:
                close()
                out.append(step)
        elif detail is Detail.STAGE:
            exposed = transfer_s(step)
            cost = Cost(seconds=exposed)
            run.append(KernelStep(key=(step.op, (step.nbytes,), step.group), cost=cost, host_s=step.host_s))
        else:
            close()
            out.append(step)
    close()
    return out


def _overlapped(steps: list[Step], name: str) -> list[Step]:
    """Join every chunked collective with the run of kernels it gathers for, or reduces after."""
    out: list[Step] = []
    position = 0
    while position < len(steps):
        step = steps[position]
        position += 1
        if not isinstance(step, TransferStep) or step.chunks == 1:
            out.append(step)
            continue
        partners: list[KernelStep] = []
        if step.op == "all_gather":
            while position < len(steps) and isinstance(follower := steps[position], KernelStep):
                partners.append(follower)
                position += 1
        else:
            while out and isinstance(leader := out[-1], KernelStep):
                partners.insert(0, leader)
                out.pop()
        if not partners:
            out.append(step)
            continue
        product = _sum(partners, f"{name}.{step.op}.{len(out)}")
        out.append(OverlapStep(product=product, transfer=step, gathers=step.op == "all_gather", chunks=step.chunks))
    return out


def _folded(step: OverlapStep, transfer_s: TransferSeconds) -> KernelStep:
    """Return an overlapped pair as one kernel: the longer of the two, and one chunk of the other sticking out."""
    moving, computing = transfer_s(step.transfer), step.product.cost.seconds
    seconds = max(moving, computing) + min(moving, computing) / step.chunks
    return KernelStep(key=step.product.key, cost=Cost(seconds=seconds), host_s=step.product.host_s)


class TransferSeconds:
    """Seconds of a transfer step on an idle machine."""

    def __init__(self, context: CostContext) -> None:
        self._context = context
        self._known: dict[tuple[str, str, int], float] = {}

    def __call__(self, step: TransferStep) -> float:
        key = (step.op, step.group, step.nbytes)
        if key not in self._known:
            seconds = self._context.groups.time_s(step.op, step.group, np.array([float(step.nbytes)]))
            self._known[key] = float(seconds[0])
        return self._known[key]


def write(code: CodeWriter, steps: Sequence[Step]) -> None:
    """Write steps as instructions: kernels in order on the compute stream, each collective between its neighbours."""
    pending: list[tuple[str, TransferStep]] = []
    for position, step in enumerate(steps):
        beside = _runs_beside(steps, position)
        if beside is not None:
            # Issued before the kernel it hides behind, joined after it.
            stream = f"{beside.group} comm"
            code.after(stream, COMPUTE)
            code.collective(beside.op, beside.group, beside.nbytes, stream=stream)
            pending.append((stream, beside))
        if isinstance(step, KernelStep):
            code.launch(*step.key)
        elif isinstance(step, OverlapStep):
            _write_overlap(code, step)
        elif step.beside:
            stream, _ = pending.pop()
            code.after(COMPUTE, stream)
        else:
            stream = f"{step.group} comm"
            code.after(stream, COMPUTE)
            code.collective(step.op, step.group, step.nbytes, stream=stream)
            code.after(COMPUTE, stream)


def _write_overlap(code: CodeWriter, step: OverlapStep) -> None:
    stream = f"{step.transfer.group} comm"
    nbytes = round(step.transfer.nbytes / step.chunks)
    code.after(stream, COMPUTE)
    for _ in range(step.chunks):
        if step.gathers:
            code.collective(step.transfer.op, step.transfer.group, nbytes, stream=stream)
            code.after(COMPUTE, stream)
            code.launch(*step.piece.key)
        else:
            code.launch(*step.piece.key)
            code.after(stream, COMPUTE)
            code.collective(step.transfer.op, step.transfer.group, nbytes, stream=stream)
    code.after(COMPUTE, stream)


def costs_of(step: Step) -> KernelStep | None:
    """Return the kernel whose cost a step needs registered, if it launches one."""
    if isinstance(step, OverlapStep):
        return step.piece
    return step if isinstance(step, KernelStep) else None


def _runs_beside(steps: Sequence[Step], position: int) -> TransferStep | None:
    following = steps[position + 1] if position + 1 < len(steps) else None
    if isinstance(following, TransferStep) and following.beside and isinstance(steps[position], KernelStep):
        return following
    return None


def _holds(operator: OperatorSpec, context: CostContext) -> bool:
    conditions = context.table.conditions
    return all(bool(conditions[c.removeprefix("!")][0]) is not c.startswith("!") for c in operator.when)


def _extend(steps: list[Step], works: Sequence[Work], operator: OperatorSpec, context: CostContext) -> None:
    host = context.spec.host
    for work in works:
        if work.kind is WorkKind.COLLECTIVE:
            ranks, _ = context.groups.extent(work.over)
            if float(np.asarray(ranks).flat[0]) > 1:
                steps.append(
                    TransferStep(
                        op=work.collective,
                        group=work.over,
                        nbytes=_whole(work.bytes),
                        host_s=host.collective_s,
                        beside=1 if operator.hidden_by else 0,
                        chunks=_chunks(work, context),
                    )
                )
            continue
        seconds = float(np.asarray(context.roofline.seconds(work)).flat[0])
        launch = host.backward_launch_s if work.backward else host.launch_s
        if context.table["tp"][0] > 1 and not context.runtime.compile:
            launch = host.dtensor_launch_s
        moved = float(np.asarray(work.bytes).flat[0])
        cost = Cost(
            seconds=seconds,
            sms=float(context.roofline.gpu.sm_count),
            hbm_bytes_per_s=min(moved / seconds, context.roofline.memory_bytes_per_s) if seconds else 0.0,
        )
        steps.append(
            KernelStep(
                key=(work.name, _shape(work), context.runtime.compute_dtype),
                cost=cost,
                host_s=launch * work.launches,
                weight=work.name.endswith(".wgrad"),
            )
        )


def _chunks(work: Work, context: CostContext) -> int:
    """Return into how many pieces the plan cuts a collective: one per rank for overlapped tensor parallelism."""
    overlaps = work.over == "tp" and str(context.table.tp_overlap[0]) != "none"
    return int(context.table["tp"][0]) if overlaps and work.collective in {"all_gather", "reduce_scatter"} else 1


def _host_only(name: str, seconds: float) -> KernelStep:
    """A launch that costs the host and nothing on the device: Python between kernels."""
    return KernelStep(key=(name, (), "host"), cost=Cost(seconds=0.0), host_s=seconds)


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
    )


def _shape(work: Work) -> tuple[int, ...]:
    if work.kind is WorkKind.MOVE:
        return (_whole(work.bytes),)
    return tuple(_whole(x) for x in (work.batch, work.m, work.n, work.k))


def _whole(value: object) -> int:
    return round(float(np.asarray(value, dtype=np.float64).flat[0]))


def launch_key(launch: Launch) -> KernelKey:
    """Return the key under which a launch's cost was registered."""
    return (launch.name, launch.shape, launch.dtype)
