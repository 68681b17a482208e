"""One training step of one plan as a Program: `simulator.step.walk` issued to pipeline ranks that write
instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from simulator.analytical.clocks import working_clocks
from simulator.analytical.estimates import calibrated_operators, cost_context, table_of
from simulator.analytical.layer_cost import network_blocks
from simulator.analytical.scenario import Scenario
from simulator.collectives.pushed import PUSHED
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.kernels.roofline import Packing
from simulator.lowering.block_code import Detail
from simulator.lowering.code_rank import CodeOfUnits, CodeRank
from simulator.lowering.machine_costs import MachineCosts
from simulator.lowering.writing import StepWriter
from simulator.pipeline.schedule_program import TURNS, last_backwards, pipeline_program
from simulator.pipeline.schedules.registry import schedule_of_plan
from simulator.pipeline.schedules.table import Action
from simulator.program.program import COMPUTE, CodeWriter, Groups, Instruction, Launch, Program
from simulator.runtimes.model_operators import ModelOperators, operators_for
from simulator.step.context import CostContext
from simulator.step.data_writer import DataWriter
from simulator.step.frozen import local_parameters
from simulator.step.offload import copy_bytes_per_s
from simulator.step.rank import Pass, Value
from simulator.step.traffic import DATA_OPS
from simulator.step.units import Unit, UnitMaker
from simulator.step.walk import StepWalk, message_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A step ready to run: `simulate(lowered.program, lowered.costs)`."""

    program: Program
    costs: MachineCosts


def lower_training(
    scenario: Scenario,
    plan: Plan,
    *,
    detail: Detail = Detail.LAYER,
    micro_batches: int | None = None,
    marks: bool = False,
) -> Lowered:
    """Return the program of one training step; `micro_batches` replaces the number of the step. Raises BadPlan for a
    schedule or recompute word that does not exist.

    Kernels run at the clocks of the account. With `marks` ranks record an event at the end of every pass of a unit.
    """
    lowering = _Lowering(scenario, plan, detail)
    counted = micro_batches or lowering.plan.micro_batches(scenario.workload.global_batch_size)
    return lowering.lower(counted, marks=marks)


def sent_bytes(scenario: Scenario, plan: Plan, counts: Sequence[int]) -> list[Lowered]:
    """Return `lower_training` with each of these numbers of micro batches, reduced to what ranks send: collectives,
    messages and copies, in programs that cannot run. Raises BadPlan as it does.
    """
    lowering = _Lowering(scenario, plan, Detail.KERNEL, only_sent=True)
    return [lowering.lower(count) for count in counts]


def plan_context(scenario: Scenario, plan: Plan) -> CostContext:
    """Return the cost context of a single plan: the analytical model's, with one row."""
    operators = calibrated_operators(scenario)
    return cost_context(scenario, table_of(scenario, [plan], operators), operators)


def _at_clocks(model: Model, operators: ModelOperators, context: CostContext) -> CostContext:
    """Return the context of a single plan with kernels at the clocks of its account."""
    blocks = network_blocks(operators, context, ())
    clocks = working_clocks(model, blocks, local_parameters(model, context), context)
    roofline = context.roofline
    return replace(context, roofline=replace(roofline, kernel_factor=roofline.kernel_factor * float(clocks[0])))


class _Lowering:
    def __init__(self, scenario: Scenario, plan: Plan, detail: Detail, *, only_sent: bool = False) -> None:
        self.model, self.cluster, self.runtime = scenario.model, scenario.cluster, scenario.runtime
        context, operators = plan_context(scenario, plan), operators_for(scenario.model, scenario.runtime)
        self.context = context if only_sent else _at_clocks(self.model, operators, context)
        self.plan = self.context.table.plans[0]
        self.spec, self.paired = self.context.spec, self.plan.ep_overlap != "none"
        stages = UnitMaker(self.model, context, local_parameters(self.model, context)).stages(self.plan)
        self.walk = StepWalk(self.context, stages, self.model)
        self.steps = StepWriter()
        self.only_sent, units = only_sent, SendingUnits if only_sent else CodeOfUnits
        self.units = units(operators, self.steps, self.context, context, detail)

    def lower(self, micro_batches: int, *, marks: bool = False) -> Lowered:
        schedule = schedule_of_plan(self.plan, micro_batches)
        last_turned, of_rank = last_backwards(schedule), SendingRank if self.only_sent else CodeRank
        ranks: dict[int, tuple[CodeRank, DataWriter]] = {}

        def begun(code: CodeWriter, rank: int) -> tuple[CodeRank, DataWriter]:
            if rank not in ranks:
                writer = of_rank(code, self.units, marks=marks)
                ranks[rank] = writer, self.walk.begin(writer)
            return ranks[rank]

        def body(code: CodeWriter, action: Action, rank: int) -> None:
            writer, data = begun(code, rank)
            if action.parts and self.paired:
                backward, forward = action.parts
                last = backward.micro_batch == last_turned[backward.stage]
                self.walk.pair(writer, data, backward, forward, last=last)
                return
            for leaf in action.leaves:
                last = leaf.micro_batch == last_turned[leaf.stage] and leaf.kind in TURNS
                self.walk.action(writer, data, leaf.stage, leaf.kind, leaf.micro_batch, last=last)

        per_rank, shards = self.plan.gpus // self.plan.pp, self.context.groups.extent("fsdp")[0]
        program = pipeline_program(
            schedule,
            body,
            message_bytes=round(float(message_bytes(self.context, self.model.hidden)[0])),
            groups={} if self.only_sent else self._groups(),
            ranks_of=lambda rank: range(rank * per_rank, (rank + 1) * per_rank),
            early_receives=self.spec.pipeline.p2p_overlap,
            finish=lambda code, rank: self.walk.end(*begun(code, rank), schedule.stages_of(rank)),
            writer=SendingWriter if self.only_sent else CodeWriter,
        )
        costs = MachineCosts(
            cluster=self.cluster,
            collectives=self.context.groups.collectives,
            kernels=self.steps.kernels,
            collective_host_s=self.spec.host.collective_s,
            own_host_s={op: float(np.max(self.context.collective_host_s(op, shards))) for op in PUSHED},
            placement=self.plan.placement,
            families={name: self.context.groups.shape(name) for name in FAMILIES},
            peer_copies=self.steps.peer_copies,
            own_copies=self.steps.own_copies,
            host_copy_bytes_per_s=float(copy_bytes_per_s(self.context)[0]),
            held_sms={op: sms for op in DATA_OPS if (sms := self.context.held_sms(op)) is not None},
            factor=float(self.context.groups.factor),
        )
        return Lowered(program=program, costs=costs)

    def _groups(self) -> dict[str, Groups]:
        world = self.plan.gpus
        groups: dict[str, Groups] = {"pp": strided_groups(world, self.plan.pp, world // self.plan.pp)}
        for name in FAMILIES:
            if name in EXPERT_FAMILIES and self.model.moe is None:
                continue
            size, stride = (int(x[0]) for x in self.context.groups.extent(name))
            if size > 1:
                groups[name] = strided_groups(world, size, stride)
        return groups


# Families of groups other than the pipeline; see GroupTimes.
EXPERT_FAMILIES = ("etp", "ep", "etp_ep", "expert_fsdp", "expert_dp")
FAMILIES = ("tp", "cp", "fsdp", "replicate", "dp", *EXPERT_FAMILIES)


def strided_groups(world: int, size: int, stride: int) -> Groups:
    """Return all groups of `size` ranks at distance `stride`, in order of their first rank."""
    span = size * stride
    return tuple(
        tuple(range(block + offset, block + offset + span, stride))
        for block in range(0, world, span)
        for offset in range(stride)
    )


# --- what ranks send --------------------------------------------------------------------------------------------------


class SendingWriter(CodeWriter):
    """Keeps collectives, messages and copies; kernels, events and the host's work are not written."""

    def add(self, instruction: Instruction) -> None:
        if not isinstance(instruction, Launch):
            super().add(instruction)

    def recv(self, *_: object, **__: object) -> None:
        """Its other half is the sender's."""

    def host_work(self, name: str, duration_s: float) -> None:
        """Not sent."""

    def record(self, stream: str, event: str = "") -> str:  # noqa: ARG002 - nothing waits for it
        return event

    def wait(self, stream: str, event: str) -> None:
        """Not sent."""

    def after(self, stream: str, other: str) -> None:
        """Not sent."""


class SendingUnits(CodeOfUnits):
    """What every pass of a plan's units sends, written once for each kind of unit."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sent: dict[tuple[str, Pass], list[Instruction]] = {}

    def sent(self, unit: Unit, which: Pass) -> list[Instruction]:
        """Return what a pass of a unit sends."""
        key = (self.block_of(unit).name, which)
        if key not in self._sent:
            writer = SendingWriter()
            self.steps.write(writer, self.passed(unit, which))
            self._sent[key] = writer.cut(0)
        return self._sent[key]


class SendingRank(CodeRank):
    """Issues to a `SendingWriter` what a rank sends."""

    __slots__ = ()
    units: SendingUnits

    def run(self, unit: Unit, which: Pass) -> None:
        self.code.extend(self.units.sent(unit, which))

    def copy(self, name: str, moved_bytes: Value, *, packing: Packing | None = None, stream: str = COMPUTE) -> None:
        """Within the GPU."""

    def update(self, moved_bytes: Value, elements: Value) -> None:
        """Within the GPU."""

    def orthogonalise(self, seconds: Value, elements: Value) -> None:
        """Within the GPU."""
