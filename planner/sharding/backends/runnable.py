"""A plan as a program that the executor runs and the simulator times: the same instructions, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, prod

import msgspec
import numpy as np

from planner.sharding.backends.chunks import Chunks, Site, Tried, choose_chunks, find_sites
from planner.sharding.backends.duals import FLOATS, BackwardWriter
from planner.sharding.backends.forward import ForwardWriter
from planner.sharding.backends.kernel_times import Draft, buffer_bytes, kernel_seconds
from planner.sharding.backends.local_copies import with_copies
from planner.sharding.backends.memory_order import Order, choose_orders
from planner.sharding.backends.pipeline_order import turns
from planner.sharding.backends.recomputation import Recomputation
from planner.sharding.backends.ring_attention import RingSite, find_rings
from planner.sharding.backends.works import Work, Writer
from planner.sharding.frontends.captured import CapturedProblem
from planner.sharding.layouts.collectives import ALL_GATHER, PERMUTE
from planner.sharding.layouts.layout import Layout, Mesh, local_shape
from planner.sharding.plans.lowering import program_costs
from planner.sharding.plans.plan import ShardingPlan
from planner.sharding.problem.pipeline_stages import PipelineStages
from planner.sharding.problem.problem import Machine, ShardingProblem
from planner.sharding.solver.equivalence import find_equivalent
from planner.sharding.solver.pricing import PICOSECONDS, TimePricing
from simulator.calibration.calibration import Calibration
from simulator.config.runtime import ELEMENT_BYTES
from simulator.engine.simulate import Run, simulate
from simulator.lowering.steps import KernelKey
from simulator.program.cost_model import Cost
from simulator.program.program import RecordEvent, WaitEvent
from simulator.sharded.graph import INPUT, CapturedGraph
from simulator.sharded.program import Buffer, Exchange, Kernel, RunnableProgram, written
from topology.cluster import Cluster
from topology.errors import BadInput, Infeasible
from topology.units import GIB

_LINEAR = "aten.linear.default"
_PRODUCTS = frozenset((_LINEAR, "aten.matmul.default", "aten.mm.default", "aten.bmm.default"))
_LONGEST = 2_000  # most steps of a plan whose program is simulated repeatedly


class TooLargeError(Infeasible):
    """A program whose peak exceeds the limit by `excess_bytes` although everything that can be dropped is dropped."""

    def __init__(self, limit_bytes: float, excess_bytes: float) -> None:
        super().__init__(
            f"the program does not fit {limit_bytes / GIB:.3g} GiB of memory",
            why=f"with all that can be made again dropped, {(limit_bytes + excess_bytes) / GIB:.3g} GiB are needed at "
            "its peak",
            remedy="a larger limit, more ranks, or fewer tokens",
        )
        self.excess_bytes = excess_bytes


@dataclass(frozen=True, slots=True)
class Written:
    """The program, and the works of its instructions in order, from which costs are computed."""

    program: RunnableProgram
    works: tuple[Work, ...]
    chunks: Chunks = field(default_factory=dict)  # by result: in how many chunks a product runs, or in which way
    again: frozenset[str] = frozenset()  # buffers that the backward pass recomputes
    peak_bytes: int = 0  # bytes of all buffers of a rank, including inputs and gradients
    tried: Tried = field(default_factory=dict)  # by product that can overlap: the program's time in each way
    copied: Mapping[str, int] = field(default_factory=dict)  # by result of a kernel: bytes it copies for memory orders


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory to which a program's peak is reduced, by dropping values that the backward pass needs and recomputing
    them (`recomputation.py`).
    """

    limit_bytes: float
    machine: Machine
    prefetch: bool


def write_program(
    captured: CapturedProblem,
    graph: CapturedGraph,
    plan: ShardingPlan,
    *,
    gradients: Sequence[str] = (),
    backward: bool = False,
    chunks: Chunks | None = None,
    memory: MemoryPlan | None = None,
) -> Written:
    """Return the program of `plan`; with `backward`, gradients of all parameters and of the inputs named in
    `gradients`.

    `chunks` gives by result the number of chunks of a product, or the way in which it runs (`chunks.py`). A gradient
    ends in the layout of its tensor. With `memory` values that do not fit are recomputed. Raises Infeasible if the
    program cannot be run.
    """
    problem = captured.problem
    out = _writer(problem)
    sites = chunk_sites(captured, plan) if chunks else {}
    in_chunks = {name: (sites[name], count) for name, count in (chunks or {}).items()}
    split = {one.name for one in graph.inputs if one.kind == INPUT} & set(problem.inputs)
    batches = captured.micro_batches
    forward = ForwardWriter(
        problem=problem,
        plan=plan,
        statements=captured.statements,
        out=out,
        chunks=in_chunks,
        split=frozenset(split if batches > 1 else ()),
        micro_batches=batches,
    )
    forward.write(graph.outputs)
    layouts = plan.choice.layouts
    inputs, outputs = forward.inputs, tuple(forward.outputs)
    seeds: tuple[str, ...] = ()
    finished: dict[str, str] = {}
    in_forward = len(out.works)
    if backward:
        of = {called: called.partition("[")[0] if batches > 1 else called for called in inputs}
        trained = {one.name for one in graph.inputs if one.is_trained}
        asked = [n for n in inputs if of[n] in trained or of[n] in gradients]
        asked = [n for n in asked if problem.tensors[of[n]].dtype in FLOATS]
        writer = BackwardWriter(out, {inputs[name]: Layout(layouts[of[name]].dims) for name in asked})
        seeds = writer.write(outputs)
        finished = {name: writer.finished[inputs[name]] for name in asked if inputs[name] in writer.finished}
    ends = Ends(
        inputs=inputs,
        outputs=outputs,
        seeds=seeds,
        gradients=finished,
        micro_batches=batches,
        interleaved=captured.interleaved and backward,
    )
    return _assembled(problem, out, in_forward, ends, chunks or {}, memory)


def _writer(problem: ShardingProblem, buffers: dict[str, Buffer] | None = None) -> Writer:
    """Return a writer of instructions; with pipeline stages, its groups are those of the whole mesh."""
    stages = problem.stages
    world = "world" if stages is None else problem.mesh.group_name(problem.mesh.names)
    return Writer(problem.mesh, world, None if stages is None else 0, buffers={} if buffers is None else buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """A program's arguments and results: inputs and their gradients by tensor, outputs and theirs in order."""

    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    seeds: tuple[str, ...]
    gradients: Mapping[str, str]
    micro_batches: int = 1
    interleaved: bool = False


def _assembled(
    problem: ShardingProblem,
    out: Writer,
    in_forward: int,
    ends: Ends,
    chunks: Chunks,
    memory: MemoryPlan | None,
) -> Written:
    """Return the program of the works in `out`, the first `in_forward` of which are the forward pass."""
    remaker = Recomputation(
        works=out.works,
        buffers=out.buffers,
        given=frozenset((*ends.inputs.values(), *ends.seeds)),
        kept=frozenset((*ends.outputs, *ends.gradients.values())),
        backward_start=in_forward,
    )
    works, again = list(out.works), frozenset[str]()
    if memory is not None:
        draft = Draft(out.buffers, {work.writes[0]: work.do for work in out.works})
        pricing = TimePricing(memory.machine, problem.mesh)

        def seconds(work: Work) -> float:
            if isinstance(work.do, Kernel):
                return kernel_seconds(work, draft, problem, memory.machine)
            nbytes = buffer_bytes(draft, work.writes[0] if work.do.kind == ALL_GATHER else work.reads[0])
            return float(pricing.times(work.do.kind, work.do.axes, np.array([float(nbytes)]))[0]) / PICOSECONDS

        works, again = remaker.drop_until(memory.limit_bytes, seconds, prefetch=memory.prefetch)
    final = _writer(problem, out.buffers)
    final.stage = None
    start = 0
    count = 1 if problem.stages is None else problem.stages.count
    order = turns(works, in_forward, count, ends.micro_batches) if ends.interleaved else []
    for number, work in enumerate(() if ends.interleaved else works):
        if number == in_forward:
            start = len(final.code.code("forward", ()).instructions)
        final.add(work)
    for turn in order:
        turn.add_to(final)
    code = final.code.code("all", range(problem.mesh.ranks))
    waited = {one.event for one in code.instructions if isinstance(one, WaitEvent)}
    numbered = list(enumerate(code.instructions))
    kept = [(n, one) for n, one in numbered if not isinstance(one, RecordEvent) or one.event in waited]
    stages = problem.stages
    mesh = problem.mesh if stages is None else stages.whole_mesh(problem.mesh)
    where = [{} if stages is None else {"stage": final.stages[n]} for n, _ in kept]
    do = {
        work.writes[0]: work.do if stages is None else _on_all_stages(work.do, stages, problem.mesh) for work in works
    }
    program = RunnableProgram(
        mesh_names=mesh.names,
        mesh_shape=mesh.shape,
        buffers=out.buffers,
        instructions=tuple({**written(one), **at} for (_, one), at in zip(kept, where, strict=True)),
        work=do,
        stage_axis="" if stages is None else stages.axis,
        micro_batches=ends.micro_batches,
        inputs=dict(ends.inputs),
        outputs=ends.outputs,
        seeds=ends.seeds,
        backward_start=sum(n < start for n, _ in kept),
        gradients=dict(ends.gradients),
        interleaved=ends.interleaved,
    )
    of_stages = [
        [turn.work for turn in order if turn.stage == n] if order else [w for w in works if w.stage == n]
        for n in range(count)
    ]
    peak = max(remaker.lifetimes_of(some).peak()[0] for some in of_stages)
    return Written(program, tuple(works), dict(chunks), again, peak)


def _on_all_stages(do: Kernel | Exchange, stages: PipelineStages, mesh: Mesh) -> Kernel | Exchange:
    """Return an instruction of one stage as the ranks of all stages execute it."""
    if isinstance(do, Kernel) or do.kind != PERMUTE:
        return do
    whole = stages.whole_mesh(mesh)
    ranks = stages.ranks(mesh)
    source = [0] * whole.ranks
    for of_stage in ranks:
        for rank, came in zip(of_stage, do.source, strict=True):
            source[rank] = of_stage[came]
    return msgspec.structs.replace(do, source=tuple(source))


def chunk_sites(captured: CapturedProblem, plan: ShardingPlan) -> dict[str, Site | RingSite]:
    """Return by result the products and attention of a plan that can overlap with an exchange."""
    statements = captured.statements
    products = frozenset(n for n, one in statements.items() if one.op in _PRODUCTS and one.index is None)
    linears = {n: one.args[0]["tensor"] for n, one in statements.items() if n in products and one.op == _LINEAR}
    found = find_sites(captured.problem, plan, products, linears)
    return {**found, **find_rings(captured.problem, plan, statements)}


def fastest_program(
    captured: CapturedProblem,
    graph: CapturedGraph,
    plan: ShardingPlan,
    machine: Machine,
    *,
    gradients: Sequence[str] = (),
    backward: bool = False,
    chunks: Chunks | None = None,
) -> Written:
    """Return the program of `plan` with those products in chunks that shorten its simulation on `machine`.

    If `chunks` is given, it is used instead. With a memory limit, values that do not fit are recomputed in the fastest
    way. Raises Infeasible if nothing fits.
    """

    def written_with(chunks: Chunks, memory: MemoryPlan | None = None) -> Written:
        return write_program(
            captured, graph, plan, gradients=gradients, backward=backward, chunks=chunks, memory=memory
        )

    def simulated(one: Written) -> float:
        return simulate_program(one, captured.problem, machine.cluster, machine.calibration).step_s

    def simulated_with(chunks: Chunks) -> float:
        try:
            return simulated(written_with(chunks))
        except Infeasible:  # on these links
            return inf

    problem = captured.problem
    sites = chunk_sites(captured, plan) if chunks is None else {}
    chunks = dict(chunks or {})
    tried_ways: Tried = {}
    if sites and len(plan.steps) <= _LONGEST:
        equivalence = find_equivalent(problem.graph, {**problem.input_layouts, **problem.pins}, fold=True)
        groups = [[problem.operators[number].result.name for number in members] for members in equivalence.members()]
        chunks, tried_ways = choose_chunks(sites, groups, simulated_with, problem.deadline)
    if problem.memory is None:
        return replace(written_with(chunks), tried=tried_ways)
    limit = buffer_limit(problem, plan)
    tried: list[Written] = []
    for one, prefetch in product(([chunks, {}] if chunks else [chunks]), (True, False)):
        if not problem.deadline.over or all(each.peak_bytes > limit for each in tried):
            tried.append(written_with(one, MemoryPlan(limit_bytes=limit, machine=machine, prefetch=prefetch)))
    fitting = [one for one in tried if one.peak_bytes <= limit]
    if not fitting:
        raise TooLargeError(problem.memory.limit_bytes, min(one.peak_bytes for one in tried) - limit)
    return replace(min(fitting, key=simulated), tried=tried_ways)


def in_memory_order(made: Written, problem: ShardingProblem, stated: Mapping[str, Order] | None = None) -> Written:
    """Return a program with memory orders of pieces for which the fewest bytes are copied (`memory_order.py`).

    `stated` has orders by tensor. Raises BadInput for a tensor that is neither an argument nor made by an exchange.
    """
    program, stated = made.program, stated or {}
    exchanged = {program.buffers[name].tensor for name, do in program.work.items() if isinstance(do, Exchange)}
    for name in stated:
        if (name not in program.inputs and name not in exchanged) or name in problem.graph.parameters:
            raise BadInput(
                f"{name[:60]!r} is allocated",
                why="parameters lie in the order of their dims, and what a kernel makes lies as its operands do",
                remedy="the allocation of an argument, or of what is gathered or scattered",
            )
    given = {program.inputs[name]: order for name, order in stated.items() if name in program.inputs}
    buffers = {name: msgspec.structs.replace(one, order=given.get(name, ())) for name, one in program.buffers.items()}
    returned = (*program.outputs, *program.gradients.values())
    best, plain = choose_orders(made.works, buffers, problem.mesh, returned=returned, stated=stated)
    buffers = {
        name: msgspec.structs.replace(one, order=best.orders[name]) if name in best.orders else one
        for name, one in buffers.items()
    }
    copied = {name: more for name, n in best.inside.items() if (more := n - plain.inside.get(name, 0)) > 0}
    return replace(made, program=msgspec.structs.replace(program, buffers=buffers), copied=copied)


def buffer_limit(problem: ShardingProblem, plan: ShardingPlan) -> float:
    """Return the bytes available to a program's buffers: the limit minus the state of parameters except their
    gradients.
    """
    assert problem.memory is not None  # noqa: S101 - by the caller
    state = 0.0
    for name in problem.graph.parameters:
        tensor = problem.tensors[name]
        elements = prod(local_shape(tensor.shape, plan.choice.layouts[name], problem.mesh))
        state += elements * max(0.0, problem.state_bytes(name) - ELEMENT_BYTES[tensor.dtype])
    return problem.memory.limit_bytes - state


def simulate_program(
    written_program: Written,
    problem: ShardingProblem,
    cluster: Cluster,
    calibration: Calibration | None = None,
) -> Run:
    """Run the program on SimPy on the first GPUs of `cluster`; kernels by roofline. Raises Infeasible for too few
    GPUs.
    """
    machine = Machine(cluster, calibration)
    machine.require_ranks(written_program.program.ranks)
    kernels: dict[KernelKey, tuple[Cost, float]] = {}
    for work in written_program.works:
        if isinstance(work.do, Kernel):
            first = written_program.program.buffers[work.writes[0]]
            seconds = kernel_seconds(work, written_program.program, problem, machine)
            cost = Cost(seconds=seconds, sms=float(cluster.slowest_kind.sm_count))
            kernels[work.writes[0], first.local, first.dtype] = (cost, 0.0)
    program = with_copies(written_program.program, kernels, machine, written_program.copied)
    costs = program_costs(program, cluster, calibration, kernels)
    return simulate(program, costs, spans=False)
