"""A training step from its blocks, as columns: micro batches through the slowest rank, the bubble, data-parallel traffic.

Two halves, because a search rarely needs the second: `micro_batches` is what repeats and what the schedule adds, a true
lower bound of the step; `step` adds what comes on top of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.calibration.provenance import Shares, shares
from simulator.closed_form.account import AXES, Account
from simulator.closed_form.clocks import working_clocks
from simulator.closed_form.data_parallel import FSDP_OPS, data_parallel, optimizer_s, sm_share
from simulator.closed_form.layer_cost import BlockCost
from simulator.closed_form.pace import NEVER, Pace
from simulator.collectives.group_times import GroupTimes
from simulator.columns.plan_table import Floats, PlanTable
from simulator.config.model import Model
from simulator.config.runtime import DTYPE_BYTES
from simulator.pipeline.stages import StageLayout, bubble_s
from simulator.runtimes.library import ModelOperators, RuntimeSpec
from simulator.step.context import CostContext
from simulator.step.held import Parameters
from simulator.step.host import (
    again_host_s,
    host_synchronizes,
    layer_host_s,
    pass_host_s,
    rest_host_s,
    step_host_s,
)
from simulator.step.update import NORM_AXES, NORM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """What the device waits for the host, seconds of a step.

    `late` is the host behind the device over the step, bubble and all; `first` is lateness in the first pass, which
    nothing ran ahead of, or in all passes in which the host waits for the device; `before` is the step's own host time. A
    host that `synchronizes` never runs ahead. One entry a plan.
    """

    late: Floats
    first: Floats
    before: Floats
    synchronizes: NDArray[np.bool_]

    def seconds(self, beside: Floats) -> Floats:
        """Return the wait while `beside`, seconds of other work, keeps the device busy too."""
        ahead = np.maximum(self.late - beside, self.first)
        return np.asarray(np.where(self.synchronizes, self.late, ahead) + self.before)

    @property
    def at_least_s(self) -> Floats:
        """A lower bound of the wait and what is beside it, however long that takes."""
        return self.seconds(np.zeros_like(self.late))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """What repeats with every micro batch and what the schedule adds, seconds of a step. All but `slowest` are of it.

    `slowest` is the column of the pipeline rank that decides; `forward` and `backward` are one micro batch there.
    `exposed` holds what tensor, context, expert and pipeline parallelism do not hide. Of `compute` and
    `recompute`, `measured` rests on the very operators and `fitted` on curves through others. `clocks_at_least` is the
    least that idle moments make of them (`working_clocks`). `at_least_s` is the sum: a lower bound of the step, to
    which only data-parallel traffic is added.
    """

    clocks_at_least: float
    slowest: NDArray[np.intp]
    forward: Floats
    backward: Floats
    compute: Floats
    recompute: Floats
    exposed: dict[str, Floats]
    hidden: Floats
    bubble: Floats
    host: HostTime
    measured: Floats
    fitted: Floats
    optimizer: Floats

    @property
    def at_least_s(self) -> Floats:
        computing = self.clocks_at_least * (self.compute + self.recompute)
        return sum((self.bubble, self.host.at_least_s, self.optimizer, *self.exposed.values()), computing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Parts of the step, which add up to it, and exposed communication by axis; one entry a plan."""

    breakdown_s: dict[str, Floats]
    exposed_s: dict[str, Floats]
    clocks: Floats
    shares: Shares

    @property
    def total_s(self) -> Floats:
        return sum(self.breakdown_s.values(), np.zeros_like(self.breakdown_s["compute"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSum:
    """A block quantity summed over the layers of each pipeline rank, then read on the rank that decides."""

    layout: StageLayout
    table: PlanTable
    blocks: dict[str, BlockCost]
    has_moe: bool

    def of(self, quantity: str) -> Floats:
        """Return per-rank sums of a dotted quantity such as `forward.compute_s`, shape (plans, ranks)."""
        dense, moe = self.layout.layers
        total = (
            dense * self._read("dense", quantity)
            + self.layout.first * self._read("embedding", quantity)
            + self.layout.last * self._read("head", quantity)
        )
        if self.has_moe:
            total = total + moe * self._read("moe", quantity)
        return np.asarray(total)

    def again(self, quantity: str) -> Floats:
        """Return per-rank sums of what recomputation runs again: each layer under its own mode."""
        total = np.zeros(self.layout.exists.shape)
        for mode, counts in self.layout.by_mode.items():
            for name, layers in zip(("dense", "moe"), counts, strict=True):
                if name in self.blocks and mode in self.blocks[name].recompute:
                    total = total + layers * self._read(name, f"recompute.{mode}.{quantity}")
        return total

    def passes(self, quantity: str) -> dict[str, Floats]:
        """Return a quantity of the three passes of one micro batch."""
        return {
            "forward": self.of(f"forward.{quantity}"),
            "backward": self.of(f"backward.{quantity}"),
            "recompute": self.again(quantity),
        }

    def _read(self, block: str, quantity: str) -> Floats:
        value: object = self.blocks[block]
        for name in quantity.split("."):
            value = value.get(name, 0.0) if isinstance(value, dict) else getattr(value, name)
        return np.broadcast_to(np.asarray(value, dtype=np.float64), (len(self.table),))[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeconds:
    """One micro batch on every pipeline rank: each pass takes as long as the device or the host, whichever is slower.

    `device` is by pass (forward, backward, recompute); `backward` has the recomputation in it. `late` is the host behind
    the device over both (negative: ahead), of which it is `pinned` in layers where it waits for the device.
    """

    device: dict[str, Floats]
    forward: Floats
    backward: Floats
    late: Floats
    pinned: Floats


def rank_seconds(rank_sum: RankSum, spec: RuntimeSpec) -> RankSeconds:
    """Return how long pipeline ranks take for one micro batch, shape (plans, columns)."""
    device, host = rank_sum.passes("device_s"), rank_sum.passes("host_s")
    dense, moe = rank_sum.layout.layers
    plain, sparse = (layer_host_s(spec, rank_sum.table, sparse=kind) for kind in (False, True))
    forward_s, backward_s = (dense * a[:, None] + moe * b[:, None] for a, b in zip(plain, sparse, strict=True))
    stages_s = (rank_sum.table["virtual_stages"] * pass_host_s(spec.host, rank_sum.table))[:, None]
    host["forward"] = host["forward"] + forward_s + stages_s
    host["backward"] = host["backward"] + backward_s + stages_s
    again = _wrapped_layers(spec, rank_sum.layout)
    host["recompute"] = host["recompute"] + again * again_host_s(spec.host, rank_sum.table)[:, None]
    late = {
        "forward": host["forward"] - device["forward"],
        "backward": host["backward"] + host["recompute"] - device["backward"] - device["recompute"],
    }
    pinned = np.zeros_like(late["forward"])
    if rank_sum.has_moe:
        for which, behind_s in _expert_waits(rank_sum, spec, sparse).items():
            late[which] = np.maximum(late[which], behind_s)
            pinned = pinned + np.maximum(behind_s, 0.0)
    forward, backward = device["forward"], device["backward"] + device["recompute"]
    return RankSeconds(
        device=device,
        forward=forward + np.maximum(late["forward"], 0.0),
        backward=backward + np.maximum(late["backward"], 0.0),
        late=late["forward"] + late["backward"],
        pinned=pinned,
    )


def micro_batches(
    model: Model,
    operators: ModelOperators,
    context: CostContext,
    layout: StageLayout,
    blocks: dict[str, BlockCost],
    parameters: Parameters,
) -> MicroBatches:
    """Return what micro batches and the schedule cost on the slowest pipeline rank of every plan."""
    table, spec, groups = context.table, operators.spec, context.groups
    rank_sum = RankSum(layout=layout, table=table, blocks=blocks, has_moe="moe" in blocks)
    m = table.micro_batches

    ranks = rank_seconds(rank_sum, spec)
    device, forward_s, behind_s = ranks.device, ranks.forward, ranks.backward
    slowest = np.argmax(forward_s + behind_s, axis=1)

    def here(values: Floats) -> Floats:
        return np.asarray(np.take_along_axis(values, slowest[:, None], axis=1)[:, 0])

    compute = here(rank_sum.of("forward.compute_s")) + here(rank_sum.of("backward.compute_s"))
    recompute = here(rank_sum.again("compute_s"))
    exposed = {
        axis: sum((here(x) for x in rank_sum.passes(f"communication_s.{axis}").values()), np.zeros(len(table)))
        for axis in ("tp", "cp", "ep")
    }
    hidden = sum((here(x) for x in rank_sum.passes("hidden_s").values()), np.zeros(len(table)))
    forward, backward = here(forward_s), here(behind_s)
    # A host that is slower in one pass and quicker in the other runs ahead where it can: what counts is the whole
    # step's issue time against the device's, and the first pass, which nothing ran ahead of.
    on_device = here(device["forward"] + device["backward"] + device["recompute"])
    first = forward - here(device["forward"])

    # The schedule: ranks wait for the pipe to fill and drain, and for what neighbours send.
    # The pipe fills and drains through all the other ranks, at each one's own pace. Where ranks hold several stages,
    # uneven ones stall each other in every round: there the slowest rank stands for all.
    weight_s = rank_sum.of("backward.weight_s")
    others = np.maximum(table["pp"] - 1, 1.0)

    def elsewhere(values: Floats) -> Floats:
        mean = ((values * layout.rank_count).sum(axis=1) - here(values)) / others
        return np.asarray(np.where(table["virtual_stages"] > 1, np.maximum(mean, here(values)), mean))

    bubble = bubble_s(table, elsewhere(forward_s), elsewhere(behind_s - weight_s), elsewhere(weight_s))
    late = m * here(ranks.late) + rest_host_s(spec.host, table) - bubble
    boundary = context.sizes["u"] * model.hidden * DTYPE_BYTES[context.runtime.activation_dtype]
    if spec.pipeline.scatter_p2p:
        boundary = np.where(table.sequence_parallel, boundary, boundary / table["tp"])
    hop = groups.time_s("send_recv", "pp", boundary)
    crossings = 2.0 * (table["pp"] - 1)
    # One forward, one backward leaves no slack: what a rank sends is what its neighbour waits for, early receive or not.
    breadth = np.isin(table.schedule, ["GPipe", "LoopedBFS"]) & spec.pipeline.p2p_overlap
    crossings = crossings + np.where((table["pp"] > 1) & ~breadth, 2.0 * table["virtual_stages"] * m, 0.0)
    exposed = {axis: m * seconds for axis, seconds in exposed.items()}
    exposed["pp"] = crossings * hop
    waits = host_synchronizes(spec.host, table)
    before_s = step_host_s(spec.host, context)
    calibration = context.calibration
    quickest = calibration.burst if calibration is not None else 1.0
    optimizer = optimizer_s(context, layout, parameters)
    return MicroBatches(
        clocks_at_least=quickest,
        slowest=slowest,
        forward=forward,
        backward=backward,
        compute=m * compute,
        recompute=m * recompute,
        exposed=exposed,
        hidden=m * hidden,
        bubble=bubble,
        host=HostTime(
            late=np.where(waits, m * (forward + backward - on_device), late),
            first=np.maximum(first, m * here(ranks.pinned) - bubble),
            before=before_s,
            synchronizes=waits,
        ),
        measured=m * sum((here(part) for part in rank_sum.passes("measured_s").values()), np.zeros(len(table))),
        fitted=m * sum((here(part) for part in rank_sum.passes("fitted_s").values()), np.zeros(len(table))),
        optimizer=optimizer,
    )


def accounted_step(account: Account, micro: MicroBatches, context: CostContext) -> Step:
    """Return the whole step of every plan from its account; `micro` says what its kernels rest on."""
    parts = account.parts_s
    exposed = {axis: parts[axis] for axis in AXES}
    breakdown = {
        "compute": parts["compute"],
        "recompute": parts["recompute"],
        "copies": parts["copies"],
        "contention": parts["contention"],
        "exposed_communication": sum(exposed.values(), np.zeros(len(context.table))),
        "bubble": parts["bubble"],
        "host": parts["host"],
        "optimizer": parts["optimizer"],
    }
    return Step(
        breakdown_s=breakdown,
        exposed_s=exposed,
        clocks=account.clocks,
        shares=shares(
            breakdown,
            measured_s=micro.measured,
            fitted_s=micro.fitted,
            kernels_s=micro.compute + micro.recompute,
            calibration=context.calibration,
            runtime=context.runtime,
            communication_measured=_within_measured(context.table, context.groups),
        ),
    )


def step_cost(
    operators: ModelOperators,
    context: CostContext,
    layout: StageLayout,
    parameters: Parameters,
    micro: MicroBatches,
) -> Step:
    """Return the whole step of every plan: `micro` and the traffic of data parallelism."""
    table, groups = context.table, context.groups
    data = data_parallel(operators, context, layout, parameters, micro.forward, micro.backward, micro.slowest)
    # Clipping needs the norm of all gradients: one number summed over shards, tensor-parallel ranks and stages.
    norm = sum((groups.time_s("all_reduce", axis, NORM_BYTES) for axis in NORM_AXES), np.zeros(len(table)))
    exposed = {**micro.exposed, "dp": data.exposed_s + norm}
    # Keeps a device busy that would wait for the host, or waiting for gathers that a host has issued which is late itself.
    waited = np.where(table.fully_sharded, data.exposed_s, data.fetched_s)
    beside = data.copies_s + data.contention_s + np.where(table["pp"] == 1, waited, 0.0)
    breakdown = {
        "compute": micro.compute,
        "recompute": micro.recompute,
        "copies": data.copies_s,
        "contention": data.contention_s + micro.hidden * sm_share(context, *FSDP_OPS),
        "exposed_communication": sum(exposed.values(), np.zeros(len(table))),
        "bubble": micro.bubble + data.fill_s,
        "host": micro.host.seconds(beside),
        "optimizer": micro.optimizer,
    }
    clocks = working_clocks(breakdown, context)
    # A device that works quicker waits so much longer for a host that is behind.
    saved = (1.0 - clocks) * (micro.compute + micro.recompute)
    breakdown |= {name: breakdown[name] * clocks for name in ("compute", "recompute")}
    breakdown["host"] = micro.host.seconds(beside - saved)
    return Step(
        breakdown_s=breakdown,
        exposed_s=exposed,
        clocks=clocks,
        shares=shares(
            breakdown,
            measured_s=micro.measured,
            fitted_s=micro.fitted,
            kernels_s=micro.compute + micro.recompute,
            calibration=context.calibration,
            runtime=context.runtime,
            communication_measured=_within_measured(table, groups),
        ),
    )


def _within_measured(table: PlanTable, groups: GroupTimes) -> NDArray[np.bool_]:
    """Return which plans are no larger than the groups whose collectives were measured."""
    measured = groups.collectives.measured
    most = max((sample.ranks for sample in measured.samples), default=0) if measured is not None else 0
    return np.asarray(table["gpus"] <= most)


def _expert_waits(rank_sum: RankSum, spec: RuntimeSpec, python_s: tuple[Floats, Floats]) -> dict[str, Floats]:
    """Return how far the host is behind in layers with experts where it waits for the device; shape (plans, ranks).

    Minus infinity where it only launches. A layer that runs again is one pass with its backward pass: what the host waits
    for in the one, the other launches late. `python_s` are the host's own seconds of a layer's forward and backward pass.
    """
    block, (_, layers) = rank_sum.blocks["moe"], rank_sum.layout.layers
    forward = _behind_s(block.forward.pace(host_s=python_s[0]), block.forward.device_s)
    backward_s = block.backward.device_s
    alone = _behind_s(block.backward.pace(host_s=python_s[1]), backward_s)
    found = {"forward": _of_layers(layers, forward), "backward": _of_layers(layers, alone)}
    turned = block.backward.pace(host_s=python_s[1] + again_host_s(spec.host, rank_sum.table))
    for mode, (_, wrapped) in rank_sum.layout.by_mode.items():
        if mode in block.recompute:
            share, again = spec.recompute[mode].layers, block.recompute[mode]
            seconds = _behind_s(again.pace().times(1.0 / share).then(turned), again.device_s / share + backward_s)
            found["backward"] = np.where(wrapped > 0, _of_layers(share * wrapped, seconds), found["backward"])
    return found


def _behind_s(pace: Pace, device_s: Floats) -> Floats:
    """Return what a pass takes beyond the device's own seconds where the host waits in it; else minus infinity."""
    return np.where(pace.waits_s > NEVER, np.maximum(pace.repeated_s - device_s, 0.0), NEVER)


def _of_layers(layers: NDArray[np.floating] | NDArray[np.integer], seconds: Floats) -> Floats:
    some = layers > 0
    return np.where(some, np.where(some, layers, 1.0) * seconds[:, None], NEVER)


def _wrapped_layers(spec: RuntimeSpec, layout: StageLayout) -> Floats:
    """Return how many layers of each pipeline rank recompute anything."""
    total = np.zeros(layout.exists.shape)
    for name, (dense, moe) in layout.by_mode.items():
        mode = spec.recompute[name]
        total = total + (dense + moe) * (mode.layers if mode.recomputes else 0.0)
    return total
