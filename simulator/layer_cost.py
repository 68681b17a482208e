"""What one block of the network costs on one rank: seconds forward and backward, bytes kept, host time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator.group_times import GroupTimes
from simulator.operators import (
    FIXED_DTYPE_BYTES,
    OperatorSpec,
    Work,
    WorkKind,
    backward_work,
    forward_work,
    tensor_bytes,
)
from simulator.plan_table import Floats, PlanTable
from simulator.roofline import Roofline
from simulator.runtime import DTYPE_BYTES, Runtime
from simulator.runtime_library import RecomputeSpec, RuntimeSpec


@dataclass(slots=True)
class PassCost:
    """One pass over a block: kernel seconds, exposed communication by axis, host seconds. Columns."""

    compute_s: Floats
    matmul_s: Floats
    host_s: Floats
    communication_s: dict[str, Floats] = field(default_factory=dict)
    operator_s: dict[str, Floats] = field(default_factory=dict)

    @property
    def exposed_s(self) -> Floats:
        return sum(self.communication_s.values(), np.zeros_like(self.compute_s))

    @property
    def device_s(self) -> Floats:
        return self.compute_s + self.exposed_s


@dataclass(slots=True)
class BlockCost:
    """Forward, backward without recomputation, and the recomputation, of one block; bytes per micro batch."""

    forward: PassCost
    backward: PassCost
    recompute: PassCost
    saved_bytes: Floats
    everything_bytes: Floats  # what it would save without recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class CostContext:
    """Everything a block's cost depends on besides its operators."""

    table: PlanTable
    sizes: Mapping[str, Floats]
    roofline: Roofline
    groups: GroupTimes
    runtime: Runtime
    spec: RuntimeSpec

    def dtype_bytes(self, name: str) -> float:
        named = {
            "compute": self.runtime.compute_dtype,
            "param": self.runtime.param_dtype,
            "reduce": self.runtime.reduce_dtype,
        }
        if name in named:
            return float(DTYPE_BYTES[named[name]])
        return FIXED_DTYPE_BYTES[name]


def block_cost(operators: Sequence[OperatorSpec], context: CostContext, *, wrapped: bool = True) -> BlockCost:
    """Return the cost of a block. `wrapped` says whether the plan's recompute mode applies to it (layers only)."""
    table = context.table
    rows = len(table)
    modes = _modes(context) if wrapped else [(RecomputeSpec(), np.ones(rows, dtype=bool))]
    cost = BlockCost(
        forward=_empty(rows),
        backward=_empty(rows),
        recompute=_empty(rows),
        saved_bytes=np.zeros(rows),
        everything_bytes=np.zeros(rows),
    )
    for operator in operators:
        active = _active(operator, table)
        again = np.zeros(rows)
        for mode, mask in modes:
            if mode.runs_again(operator.name):
                again = np.where(mask, mode.layers, again)
        forward = forward_work(operator, context.sizes, context.dtype_bytes)
        _add(cost.forward, forward, active, operator, context)
        _add(cost.backward, backward_work(operator, context.sizes, context.dtype_bytes), active, operator, context)
        if again.any():
            _add(cost.recompute, forward, active * again, operator, context)
    cost.saved_bytes, cost.everything_bytes = _saved(operators, modes, context)
    for each in (cost.forward, cost.backward, cost.recompute):
        _overlap(each, table)
    return cost


def _empty(rows: int) -> PassCost:
    return PassCost(compute_s=np.zeros(rows), matmul_s=np.zeros(rows), host_s=np.zeros(rows))


def _modes(context: CostContext) -> list[tuple[RecomputeSpec, np.ndarray[tuple[int], np.dtype[np.bool_]]]]:
    return [(context.spec.recompute[str(m)], context.table.recompute == m) for m in np.unique(context.table.recompute)]


def _active(operator: OperatorSpec, table: PlanTable) -> Floats:
    """Return 1 where the operator runs under the plan, else 0."""
    active = np.ones(len(table))
    for condition in operator.when:
        holds = table.conditions[condition.removeprefix("!")]
        active = active * (~holds if condition.startswith("!") else holds)
    return active


def _add(total: PassCost, works: Sequence[Work], active: Floats, operator: OperatorSpec, context: CostContext) -> None:
    host = context.spec.host
    tensor_parallel = context.table["tp"] > 1
    for work in works:
        if work.kind is WorkKind.COLLECTIVE:
            seconds = active * context.groups.time_s(work.collective, work.over, work.bytes)
            if operator.hidden_by:
                seconds = np.maximum(seconds - total.operator_s[operator.hidden_by], 0.0)
            known = total.communication_s.get(work.over, np.zeros_like(active))
            total.communication_s[work.over] = known + seconds
            total.host_s = total.host_s + active * host.collective_s * (seconds > 0)
            continue
        seconds = active * context.roofline.seconds(work)
        total.compute_s = total.compute_s + seconds
        total.operator_s[operator.name] = total.operator_s.get(operator.name, np.zeros_like(active)) + seconds
        if work.kind is WorkKind.MATMUL:
            total.matmul_s = total.matmul_s + seconds
        launch = host.backward_launch_s if work.backward else host.launch_s
        launch_s = np.where(tensor_parallel & (not context.runtime.compile), host.dtensor_launch_s, launch)
        total.host_s = total.host_s + active * work.launches * launch_s


def _overlap(cost: PassCost, table: PlanTable) -> None:
    """Hide tensor-parallel communication behind the products it feeds, where the plan says so.

    Decomposed into tp chunks, all but the first chunk's transfer can run beside a product of the other chunks
    (facts of asynchronous tensor parallelism: discuss.pytorch.org/t/209487).
    """
    if "tp" not in cost.communication_s:
        return
    whole = cost.communication_s["tp"]
    exposed = np.maximum(whole / table["tp"], whole - cost.matmul_s)
    cost.communication_s["tp"] = np.where(table.tp_overlap == "none", whole, exposed)


def _saved(
    operators: Sequence[OperatorSpec],
    modes: Sequence[tuple[RecomputeSpec, np.ndarray[tuple[int], np.dtype[np.bool_]]]],
    context: CostContext,
) -> tuple[Floats, Floats]:
    """Return the bytes a block keeps per micro batch under each plan's recompute mode, and without any."""

    def size(tensors: Sequence[str]) -> Floats:
        zero = np.zeros(len(context.table))
        return sum((tensor_bytes(x, context.sizes, context.dtype_bytes) for x in tensors), zero)

    everything = np.zeros(len(context.table))
    kept_by_drops = {id(mode): np.zeros(len(context.table)) for mode, _ in modes}
    for operator in operators:
        saved = _active(operator, context.table) * size(operator.saves)
        everything = everything + saved
        for mode, _ in modes:
            if operator.name not in mode.drops:
                kept_by_drops[id(mode)] = kept_by_drops[id(mode)] + saved
    result = everything
    for mode, mask in modes:
        if mode.keeps:
            kept = size(mode.keeps)
        elif mode.drops:
            kept = kept_by_drops[id(mode)]
        else:
            continue
        result = np.where(mask, mode.layers * kept + (1 - mode.layers) * everything, result)
    return result, everything
