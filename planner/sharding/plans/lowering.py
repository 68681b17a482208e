"""Lower a sharding plan to a `Program` of the simulator: kernels on local shapes, collectives, and their dependencies.

All ranks run the same code (SPMD) on a compute and a communication stream. A tensor in a layout is an event, and its
consumers wait for that event only, so a gather overlaps with a product that does not need it. A ring or chunked
schedule splits the operator into as many kernels, each of which waits for its own shard: how much is hidden is
simulated, not assumed.

Kernel times come from the roofline of `simulator` on local shapes (products and attention by FLOP, all others by
bytes). Host overhead is left out, as under a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from planner.sharding.layouts.collectives import ALL_GATHER, ALL_TO_ALL_V, PERMUTE, Collective
from planner.sharding.layouts.layout import Layout, local_shape, local_size
from planner.sharding.operators.operator import Operator
from planner.sharding.operators.options import ShardingOption
from planner.sharding.operators.work import operator_work
from planner.sharding.plans.plan import OperatorStep, ShardingPlan, TensorMove
from planner.sharding.problem.problem import Machine, ShardingProblem
from planner.sharding.solver.pricing import ROOFLINE_DTYPES, roofline_on
from simulator.calibration.calibration import Calibration, collectives_on
from simulator.engine.simulate import simulate
from simulator.kernels.operators import Work, WorkKind
from simulator.lowering.machine_costs import MachineCosts
from simulator.lowering.steps import KernelKey
from simulator.program.cost_model import Cost
from simulator.program.program import COMM, COMPUTE, CodeWriter, Program
from simulator.sharded.program import rank_groups
from simulator.step.traffic import DATA_OPS
from topology.cluster import Cluster
from topology.errors import Infeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTime:
    """Simulated time of a sharded graph: the whole step, its kernels, and the communication that is not hidden."""

    seconds: float
    compute_s: float

    @property
    def exposed_communication_s(self) -> float:
        return max(0.0, self.seconds - self.compute_s)


def simulate_time(
    problem: ShardingProblem, plan: ShardingPlan, cluster: Cluster, calibration: Calibration | None = None
) -> SimulatedTime:
    """Simulate `plan` on the first GPUs of `cluster`.

    Raises Infeasible if there are too few GPUs or pipeline stages.
    """
    program, costs = lower(problem, plan, cluster, calibration)
    compute = sum(cost.seconds for cost, _ in costs.kernels.values())
    return SimulatedTime(seconds=simulate(program, costs, spans=False).step_s, compute_s=compute)


def lower(
    problem: ShardingProblem, plan: ShardingPlan, cluster: Cluster, calibration: Calibration | None = None
) -> tuple[Program, MachineCosts]:
    """Return the program of `plan`, with ranks on the GPUs of `cluster` in order, and the costs of its instructions."""
    mesh = problem.mesh
    if problem.stages is not None:
        raise Infeasible(
            "pipeline stages are not simulated here",
            why="their time depends on the pipeline schedule",
            remedy="planner trace, for a plan",
        )
    machine = Machine(cluster, calibration)
    machine.require_ranks(mesh.ranks)
    writer = _ProgramWriter(problem, machine)
    for number, step in enumerate(plan.steps):
        if isinstance(step, TensorMove):
            writer.add_move(step, piecewise_consumer=writer.piecewise_consumer(plan.steps, number))
        else:
            writer.add_operator(step)
    groups = {name: rank_groups(mesh.names, mesh.shape, axes) for name, axes in writer.group_axes.items()}
    program = Program(codes=(writer.code.code("all", range(mesh.ranks)),), groups=groups)
    costs = program_costs(program, cluster, calibration, writer.kernels)
    return program, costs


def program_costs(
    program: Program,
    cluster: Cluster,
    calibration: Calibration | None,
    kernels: Mapping[KernelKey, tuple[Cost, float]],
) -> MachineCosts:
    """Return the costs of a program's instructions: collectives take the measured number of SMs from concurrent
    kernels.
    """
    held = {op: calibration.held_sms(op) for op in DATA_OPS} if calibration is not None else {}
    return MachineCosts(
        cluster=cluster,
        collectives=collectives_on(cluster, calibration),
        kernels=kernels,
        collective_host_s=0.0,
        held_sms={op: sms for op, sms in held.items() if sms is not None},
        held_by=frozenset(program.groups),
    )


@dataclass(slots=True)
class _ProgramWriter:
    problem: ShardingProblem
    machine: Machine
    code: CodeWriter = field(default_factory=CodeWriter)
    kernels: dict[KernelKey, tuple[Cost, float]] = field(default_factory=dict)
    group_axes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # The event at which a tensor is complete; none for inputs.
    tensor_events: dict[tuple[str, Layout], str] = field(default_factory=dict)
    arriving_pieces: dict[str, list[str]] = field(
        default_factory=dict
    )  # by consumer: events of shards that arrive one by one
    produced_pieces: dict[str, list[str]] = field(
        default_factory=dict
    )  # by tensor: events of chunks that are produced one by one
    _known_seconds: dict[Hashable, float] = field(default_factory=dict)

    def piecewise_consumer(self, program: tuple[TensorMove | OperatorStep, ...], number: int) -> str:
        """Return the consumer that uses the shards of this move as they arrive, or "" if its schedule does not."""
        move = program[number]
        if not isinstance(move, TensorMove) or not move.consumer:
            return ""
        schedule = self.problem.schedule.get(move.consumer)
        return move.consumer if schedule is not None and schedule.kind in {"ring", "chunked"} else ""

    def add_move(self, move: TensorMove, *, piecewise_consumer: str) -> None:
        source_event = self.tensor_events.get((move.tensor, move.source), "")
        produced = self.produced_pieces.pop(move.tensor, [])
        piecewise = len(produced) == len(move.collectives) > 1
        if source_event and move.collectives and not piecewise:
            self.code.wait(COMM, source_event)
        event = source_event
        for number, collective in enumerate(move.collectives):
            if piecewise:
                self.code.wait(COMM, produced[number])
            self._add_collective(collective)
            event = self.code.record(COMM)
            if piecewise_consumer and collective.kind in {PERMUTE, ALL_GATHER}:
                self.arriving_pieces.setdefault(piecewise_consumer, []).append(event)
        self.tensor_events[move.tensor, move.target] = event

    def add_operator(self, step: OperatorStep) -> None:
        operator = self.problem.operators[step.operator]
        name = operator.result.name
        pieces = self.arriving_pieces.pop(name, [])
        for operand, layout in step.option.operands:
            event = self.tensor_events.get((operand, layout), "")
            if event and event not in pieces:
                self.code.wait(COMPUTE, event)
        for collective in step.collectives:  # statistics, exchanged between two passes over the data
            self.code.after(COMM, COMPUTE)
            self._add_collective(collective)
            self.code.after(COMPUTE, COMM)
        schedule = self.problem.schedule.get(name)
        if not operator.is_view:
            ring = schedule is not None and schedule.kind == "ring"
            parts = len(pieces) + int(ring) if pieces else (schedule.pieces if schedule is not None else 1)
            cost = self._kernel_seconds(operator, step.option, max(parts, 1))
            for part in range(max(parts, 1)):
                waited = part - int(ring)  # a ring starts with the rank's own shard
                if pieces and waited >= 0:
                    self.code.wait(COMPUTE, pieces[waited])
                self._add_kernel(f"{name}.{part}" if parts > 1 else name, step.option, operator, cost)
                if parts > 1:
                    self.produced_pieces.setdefault(name, []).append(self.code.record(COMPUTE))
        self.tensor_events[name, step.option.result] = self.code.record(COMPUTE)

    def _add_collective(self, collective: Collective) -> None:
        self.group_axes.setdefault(collective.mesh_dim, collective.axes)
        nbytes = collective.bytes_out if collective.kind == ALL_GATHER else collective.bytes_in
        op = {PERMUTE: "send_recv", ALL_TO_ALL_V: "all_to_all"}.get(collective.kind, collective.kind)
        self.code.collective(op, collective.mesh_dim, nbytes)

    def _add_kernel(self, name: str, option: ShardingOption, operator: Operator, seconds: float) -> None:
        shape = local_shape(operator.result.shape, option.result, self.problem.mesh)
        self.code.launch(name, shape, operator.result.dtype)
        kind = self.machine.cluster.slowest_kind
        self.kernels[name, shape, operator.result.dtype] = (Cost(seconds=seconds, sms=float(kind.sm_count)), 0.0)

    def _kernel_seconds(self, operator: Operator, option: ShardingOption, parts: int) -> float:
        """Return the time of one of this number of parts of an operator, each a kernel; of a product, a number
        of rows.
        """
        dtypes = tuple(self.problem.tensors[name].dtype for name, _ in operator.operands)
        key = (operator.likeness, dtypes, option.axis_specs, parts)
        if key not in self._known_seconds:
            self._known_seconds[key] = self._part_seconds(operator, option, parts)
        return self._known_seconds[key]

    def _part_seconds(self, operator: Operator, option: ShardingOption, parts: int) -> float:
        dtype = ROOFLINE_DTYPES.get(operator.result.dtype, operator.result.dtype)
        work = work_of(operator, option, self.problem)
        roofline = roofline_on(self.machine, dtype)
        if work.kind is not WorkKind.MATMUL:
            return float(np.asarray(roofline.seconds(work)).item()) / parts
        part = replace(work, m=work.m / parts, flops=work.flops / parts, bytes=work.bytes / parts)
        return float(np.asarray(roofline.seconds(part)).item())


def work_of(
    operator: Operator, option: ShardingOption, problem: ShardingProblem, parts: Mapping[str, int] | None = None
) -> Work:
    """Return the work of an operator on one rank; or of one part, where `parts` has the number of parts by axis."""
    specs = dict(option.axis_specs)
    sizes = {
        axis: np.array([local_size(size, specs.get(axis, ()), problem.mesh) / (parts or {}).get(axis, 1)])
        for axis, size in operator.sizes.items()
    }
    return operator_work(operator, problem.tensors, sizes)
