"""A sharded graph as a program of the simulator: kernels of local shapes, collectives, and what waits for what.

All ranks run the same code (one program, many data), on a compute and a communication stream. A tensor in a layout is
an event: who needs it waits for it, and for nothing else, so that a gather runs beside a product that does not need it.
A ring or a chunked schedule cuts the operator into as many kernels, and each waits for its own piece: what is hidden
then is what the simulation finds, and not a discount.

Kernels cost what the roofline of `simulator` says of their local shapes (products and attention by arithmetic, all
others by bytes); the host is not in it, as under a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import prod

from planner.sharding.collectives import ALL_GATHER, DTYPE_BYTES, PERMUTE, SEND_RECV, Collective
from planner.sharding.layout import Layout, local_shape, local_size
from planner.sharding.mesh import Mesh
from planner.sharding.operator import Operator
from planner.sharding.problem import Problem
from planner.sharding.rule import Option
from planner.sharding.steps import Answer, Compute, Move
from simulator.collectives import collective_model
from simulator.costs import Cost
from simulator.engine import simulate
from simulator.lowering.machine_costs import MachineCosts
from simulator.lowering.steps import KernelKey
from simulator.operators import Work, WorkKind
from simulator.program import COMM, COMPUTE, CodeWriter, Program
from simulator.roofline import Roofline
from topology.cluster import Cluster
from topology.errors import Infeasible
from topology.profile import Profile

ATTENTION_KERNEL = "flash2"
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "tfloat32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Seconds of a sharded graph on a machine: all of it, its kernels, and the communication that nothing hides."""

    seconds: float
    compute_s: float

    @property
    def exposed_communication_s(self) -> float:
        return max(0.0, self.seconds - self.compute_s)


def timed(problem: Problem, found: Answer, cluster: Cluster, profile: Profile | None = None) -> Timed:
    """Return the simulated time of `found` on the first GPUs of `cluster`. Raises Infeasible if they are too few."""
    program, costs = lowered(problem, found, cluster, profile)
    compute = sum(cost.seconds for cost, _ in costs.kernels.values())
    return Timed(seconds=simulate(program, costs, spans=False).step_s, compute_s=compute)


def lowered(
    problem: Problem, found: Answer, cluster: Cluster, profile: Profile | None = None
) -> tuple[Program, MachineCosts]:
    """Return the program of `found`, ranks laid on the GPUs of `cluster` in order, and what its instructions cost."""
    mesh = problem.mesh
    if mesh.ranks > cluster.gpu_count:
        raise Infeasible(
            f"{cluster.name} has {cluster.gpu_count} GPU(s), the mesh {mesh.ranks} ranks",
            remedy="a larger --cluster, or more nodes of it with --gpus",
        )
    writer = _Writer(problem, cluster)
    for number, step in enumerate(found.program):
        if isinstance(step, Move):
            writer.move(step, pieces=writer.pieces_after(found.program, number))
        else:
            writer.compute(step)
    groups = {name: _groups(axes, mesh) for name, axes in writer.families.items()}
    program = Program(codes=(writer.code.code("all", range(mesh.ranks)),), groups=groups)
    costs = MachineCosts(
        cluster=cluster,
        collectives=collective_model(cluster, profile),
        kernels=writer.kernels,
        collective_host_s=0.0,
    )
    return program, costs


def _groups(axes: tuple[str, ...], mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that differ in `axes` alone."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, at in enumerate(product(*(range(size) for size in mesh.shape))):
        key = tuple(c for c, name in zip(at, mesh.names, strict=True) if name not in axes)
        groups.setdefault(key, []).append(rank)
    return tuple(tuple(group) for group in groups.values())


@dataclass(slots=True)
class _Writer:
    problem: Problem
    cluster: Cluster
    code: CodeWriter = field(default_factory=CodeWriter)
    kernels: dict[KernelKey, tuple[Cost, float]] = field(default_factory=dict)
    families: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ready: dict[tuple[str, Layout], str] = field(default_factory=dict)  # event, none for what is there from the start
    arriving: dict[str, list[str]] = field(default_factory=dict)  # by operator: events of pieces that come one by one
    leaving: dict[str, list[str]] = field(default_factory=dict)  # by tensor: events of pieces that are made one by one

    def pieces_after(self, program: tuple[Move | Compute, ...], number: int) -> str:
        """Return the operator that uses the pieces of this move one by one, if its schedule says so."""
        move = program[number]
        if not isinstance(move, Move) or not move.needed_by:
            return ""
        schedule = self.problem.schedule.get(move.needed_by)
        return move.needed_by if schedule is not None and schedule.kind in {"ring", "chunked"} else ""

    def move(self, move: Move, *, pieces: str) -> None:
        source = self.ready.get((move.tensor, move.source), "")
        made = self.leaving.pop(move.tensor, [])
        piecewise = len(made) == len(move.runs) > 1
        if source and move.runs and not piecewise:
            self.code.wait(COMM, source)
        event = source
        for number, one in enumerate(move.runs):
            if piecewise:
                self.code.wait(COMM, made[number])
            self._collective(one)
            event = self.code.record(COMM)
            if pieces and one.kind in {PERMUTE, ALL_GATHER}:
                self.arriving.setdefault(pieces, []).append(event)
        self.ready[move.tensor, move.target] = event

    def compute(self, step: Compute) -> None:
        operator = self.problem.operators[step.operator]
        name = operator.result.name
        pieces = self.arriving.pop(name, [])
        for operand, layout in step.option.operands:
            event = self.ready.get((operand, layout), "")
            if event and event not in pieces:
                self.code.wait(COMPUTE, event)
        for one in step.runs:  # statistics of pieces: between two passes over them
            self.code.after(COMM, COMPUTE)
            self._collective(one)
            self.code.after(COMPUTE, COMM)
        schedule = self.problem.schedule.get(name)
        if not operator.is_view:
            ring = schedule is not None and schedule.kind == "ring"
            parts = len(pieces) + int(ring) if pieces else (schedule.pieces if schedule is not None else 1)
            cost = self._cost(operator, step.option)
            for part in range(max(parts, 1)):
                waited = part - int(ring)  # a ring starts on what the rank holds itself
                if pieces and waited >= 0:
                    self.code.wait(COMPUTE, pieces[waited])
                self._launch(f"{name}.{part}" if parts > 1 else name, step.option, operator, cost / max(parts, 1))
                if parts > 1:
                    self.leaving.setdefault(name, []).append(self.code.record(COMPUTE))
        self.ready[name, step.option.result] = self.code.record(COMPUTE)

    def _collective(self, one: Collective) -> None:
        self.families.setdefault(one.mesh_dim, one.axes)
        nbytes = one.bytes_out if one.kind == ALL_GATHER else one.bytes_in
        self.code.collective("send_recv" if one.kind in {PERMUTE, SEND_RECV} else one.kind, one.mesh_dim, nbytes)

    def _launch(self, name: str, option: Option, operator: Operator, seconds: float) -> None:
        shape = local_shape(operator.result.shape, option.result, self.problem.mesh)
        self.code.launch(name, shape, operator.result.dtype)
        kind = self.cluster.slowest_kind
        self.kernels[name, shape, operator.result.dtype] = (Cost(seconds=seconds, sms=float(kind.sm_count)), 0.0)

    def _cost(self, operator: Operator, option: Option) -> float:
        dtype = _DTYPES.get(operator.result.dtype, operator.result.dtype)
        roofline = Roofline(gpu=self.cluster.slowest_kind, dtype=dtype, attention_kernel=ATTENTION_KERNEL)
        return float(roofline.seconds(work_of(operator, option, self.problem)).item())


def work_of(operator: Operator, option: Option, problem: Problem) -> Work:
    """Return what an operator does on one rank: a product, attention, or bytes read and written."""
    mesh, tensors = problem.mesh, problem.tensors
    placed = dict(option.placed)
    moved = prod(local_shape(operator.result.shape, option.result, mesh)) * DTYPE_BYTES[operator.result.dtype]
    for name, layout in option.operands:
        moved += prod(local_shape(tensors[name].shape, layout, mesh)) * DTYPE_BYTES[tensors[name].dtype]

    def size(axes: set[str]) -> int:
        return prod(local_size(operator.sizes[axis], placed.get(axis, ()), mesh) for axis in axes)

    parts = [{axis for dim in dims for axis in dim} for _, dims in operator.operands]
    result = {axis for dim in operator.dims for axis in dim}
    if operator.kind == "attention" and len(parts) == 3:
        query, key, _ = parts
        rows, keys = query - key, key - query
        width = (query & key) & operator.whole  # what each score sums over
        m, n, k, heads = size(rows), size(keys), size(width), size((query & key) - width)
        return Work(
            kind=WorkKind.ATTENTION, name="attn", flops=4.0 * m * n * k * heads, bytes=moved, batch=heads, m=m, n=n, k=k
        )
    contracted = {axis for part in parts for axis in part} & operator.reduced
    if len(parts) >= 2 and contracted and operator.kind == "sum" and any(len(t.linear) > 1 for t in operator.terms):
        m = size((parts[0] & result) - parts[1])
        n = size((parts[1] & result) - parts[0])
        batch = size(parts[0] & parts[1] & result)
        k = size(contracted)
        return Work(
            kind=WorkKind.MATMUL, name="product", flops=2.0 * m * n * k * batch, bytes=moved, batch=batch, m=m, n=n, k=k
        )
    return Work(kind=WorkKind.MOVE, name="elementwise", bytes=moved)
