"""The passes of a block under every plan: forward, recomputation, and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.kernels.operators import OperatorSpec, Work, WorkKind, active_rows, backward_work, forward_work
from simulator.passes.pairing import paired
from simulator.passes.steps import WEIGHT_GRADIENT, Kernel, Ring, Rows, Step, Transfer, Wait
from simulator.runtimes.parts import RecomputeSpec
from simulator.runtimes.recomputation import run_again
from simulator.step.context import CostContext


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPasses:
    """`again` maps a recompute mode to the steps that it runs before the backward pass; modes that recompute nothing
    have no entry.
    """

    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    again: Mapping[str, tuple[Step, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An operator of a block, the plans that run it, and for each recompute mode the plans that run it again."""

    operator: OperatorSpec
    rows: Rows
    again: Mapping[str, Rows]


def running(
    operators: Sequence[OperatorSpec], context: CostContext, modes: Mapping[str, RecomputeSpec]
) -> list[Running]:
    """Return the operators that run under at least one plan of `context`, in forward order, with the `modes` that
    recompute.
    """
    twice = {
        name: run_again(operators, mode, context.runtime, context.table)
        for name, mode in modes.items()
        if mode.recomputes
    }
    found = []
    for place, operator in enumerate(operators):
        rows = active_rows(operator, context.table) > 0
        if rows.any():
            again = {name: columns[place] > 0 for name, columns in twice.items()}
            found.append(Running(operator=operator, rows=rows, again=again))
    return found


def block_passes(
    operators: Sequence[OperatorSpec], context: CostContext, modes: Mapping[str, RecomputeSpec]
) -> BlockPasses:
    """Return the passes of a block under every plan of `context`, with what each of `modes` runs again."""
    maker, runs = _Maker(context), running(operators, context, modes)
    forward: list[Step] = []
    backward: list[Step] = []
    again: dict[str, list[Step]] = {name: [] for name, mode in modes.items() if mode.recomputes}
    for run in runs:
        steps = maker.steps(forward_work(run.operator, context.sizes, context.dtype_bytes), run.operator, run.rows)
        forward += steps
        for name, rows in run.again.items():
            again[name] += [replace(step, rows=step.rows & rows) for step in steps if (step.rows & rows).any()]
    for run in reversed(runs):
        works = backward_work(run.operator, context.sizes, context.dtype_bytes)
        backward += maker.steps(works, run.operator, run.rows)
    return BlockPasses(
        forward=tuple(paired(forward, context)),
        backward=tuple(paired(backward, context)),
        again={name: tuple(paired(steps, context)) for name, steps in again.items()},
    )


# Largest share of the SMs that messages in transit hold; a kernel at the same time keeps the rest.
MOST_HELD = 0.95


class _Maker:
    """Makes steps of the work of operators."""

    def __init__(self, context: CostContext) -> None:
        self.context, self.host = context, context.spec.host
        self.modes = bool(context.table.overlap_modes)
        self.tensors = (context.table["tp"] > 1) & (not context.runtime.compile)  # kernels go through DTensor

    def steps(self, works: Sequence[Work], operator: OperatorSpec, rows: Rows) -> list[Step]:
        """Return the steps of `works` for plans in `rows`; steps that no plan has are left out."""
        found: list[Step] = []
        for work in works:
            if work.kind is WorkKind.WAIT:
                found.append(Wait(rows=rows, call_s=self.host.launch_s * work.launches))
            elif work.kind is not WorkKind.COLLECTIVE:
                found.append(self._kernel(work, operator, rows))
            else:
                found.append(self._moved(work, operator, rows))
        return [step for step in found if step.rows.any()]

    def _kernel(self, work: Work, operator: OperatorSpec, rows: Rows) -> Kernel:
        if work.kind is WorkKind.MOVE and not work.launches:
            rows = rows & (np.asarray(work.bytes) > 0)  # without bytes and launches there is no kernel
        seconds, source = self._seconds(work, operator)
        launch_s = self.host.backward_launch_s if work.backward else self.host.launch_s
        reads, gives = _ends(work, operator)
        return Kernel(
            rows=rows,
            work=work,
            alone_s=np.broadcast_to(seconds, rows.shape),
            source=np.broadcast_to(source, rows.shape),
            launch_s=self._launches(work, operator) * np.where(self.tensors, self.host.dtensor_launch_s, launch_s),
            reads=reads,
            gives=gives,
        )

    def _seconds(self, work: Work, operator: OperatorSpec) -> tuple[Floats, Floats]:
        """Return (seconds, source) of a work; for kernels that run once per expert, the total over experts."""
        roofline = self.context.roofline
        if not operator.one_by_one:
            return roofline.seconds_and_source(work)
        experts = self.context.sizes["e"]
        alone = replace(work, flops=work.flops / experts, bytes=work.bytes / experts, batch=1.0, grouped_rows=0.0)
        seconds, source = roofline.seconds_and_source(alone)
        return experts * seconds, source

    def _launches(self, work: Work, operator: OperatorSpec) -> Floats | float:
        """Return the number of launches that the host issues for a work; bare operators count as a share of one."""
        if not self.context.runtime.compile and ("cast" in operator.units or "cast" in operator.backward_units):
            return self.host.cast_launches * work.launches
        if operator.replayed or not operator.by_expert:
            return 0.0 if operator.replayed else work.launches
        ahead, back = operator.around_expert
        around = ahead if not work.backward else back if work.name.endswith(WEIGHT_GRADIENT) else 0.0
        return work.launches * (1.0 + (operator.by_expert + around) * (self.context.sizes["e"] - 1.0))

    def _moved(self, work: Work, operator: OperatorSpec, rows: Rows) -> Transfer | Ring:
        groups = self.context.groups
        ranks = groups.extent(work.over)[0]
        rows = rows & (ranks > 1)
        nbytes = np.broadcast_to(np.asarray(work.bytes, dtype=np.float64), rows.shape)
        if work.collective == "ring":
            shard, pair = nbytes / ranks, f"{work.over}_pair"
            held = groups.load("send_recv", pair, shard)[0] / self.context.roofline.gpu.sm_count
            return Ring(
                rows=rows,
                over=work.over,
                shard_bytes=shard,
                hop_s=groups.time_s("send_recv", pair, shard),
                held=np.minimum(2 * held, MOST_HELD),
                call_s=self.host.collective_s + self.host.hop_launches * self.host.launch_s,
                ranks=ranks,
                hidden_by=f"{operator.hidden_by}.backward" if work.backward else operator.hidden_by,
                backward=work.backward,
            )
        between = f"{work.over}_pair" if work.collective == "send_recv" else work.over
        return Transfer(
            rows=rows,
            op=work.collective,
            over=work.over,
            nbytes=nbytes,
            alone_s=groups.time_s(work.collective, between, nbytes),
            call_s=self.host.collective_s,
            ranks=ranks,
            tensor=operator.tensor,
            backward=work.backward,
            modes=self.context.table.overlap_at(operator.site) if self.modes and work.over == "tp" else None,
        )


def _ends(work: Work, operator: OperatorSpec) -> tuple[str, str]:
    """Return (tensor that a product reads, tensor that it gives); ("", "") for weight gradients and other kernels."""
    if work.kind is not WorkKind.MATMUL or work.name.endswith(WEIGHT_GRADIENT) or not operator.matmul:
        return "", ""
    operands, _, result = operator.matmul.partition("->")
    ends = operands.split(",")[0].strip(), result.strip()
    return (ends[1], ends[0]) if work.backward else ends
