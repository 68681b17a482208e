"""The answer to a captured graph: its plan, its row for the report, and the output of back ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Any

from msgspec.structs import replace as replace_fields

from planner.sharding.backends.chunks import RING
from planner.sharding.backends.duals import FLOATS
from planner.sharding.backends.ring_attention import find_rings
from planner.sharding.backends.runnable import (
    TooLargeError,
    Written,
    chunk_sites,
    fastest_program,
    in_memory_order,
    simulate_program,
    write_program,
)
from planner.sharding.frontends.by_hand import placed_by_hand, rows_of_attention
from planner.sharding.frontends.captured import CapturedProblem, captured_problem
from planner.sharding.frontends.request import Request, is_request, read_request
from planner.sharding.frontends.routes import with_routes
from planner.sharding.frontends.stages import evenly, lean_cuts, neighbours
from planner.sharding.layouts.collectives import ALL_GATHER, ALL_TO_ALL
from planner.sharding.layouts.layout import Layout
from planner.sharding.plans.plan import ShardingPlan, plan_sharding
from planner.sharding.plans.report import Limits, Planned, on_machine, plan_row, planned_case, rejection
from planner.sharding.problem.problem import Machine, ShardingProblem
from planner.sharding.problem.schedule import Schedule
from simulator.calibration.calibration import Calibration
from simulator.sharded.graph import CapturedGraph
from simulator.sharded.program import Exchange
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import BadInput, Infeasible, UserError

_HIDDEN = 0.5  # share of exchanges that products hide, in additional choices that are tried
_MOST_TIGHTENED = 8  # most choices that are tried until a program fits
_MAX_CUTS = 32  # programs with other stages that are simulated
WHOLE = "whole"  # one exchange, after or before a product


@dataclass(frozen=True, slots=True)
class Answer:
    """A request with its plan and program."""

    request: Request
    captured: CapturedProblem
    plan: ShardingPlan
    written: Written

    @property
    def problem(self) -> ShardingProblem:
        return self.captured.problem


@dataclass(slots=True)
class _Tried:
    """The programs of choices so far, and a lower bound of the cost of choices within the limits; 0 if nothing is
    proved.
    """

    programs: dict[Hashable, Written | TooLargeError] = field(default_factory=dict)
    bounds: list[float] = field(default_factory=list)


def shard_case(
    data: Mapping[str, Any],
    number: int = 0,
    cluster: Cluster | None = None,
    calibration: Calibration | None = None,
    *,
    limits: Limits | None = None,
) -> tuple[JsonObject, Answer | Planned | None]:
    """Return the row of a case, text or a captured graph, and its answer; or a row with the reason why there is
    none.
    """
    answered = captured_row if is_request(data) else planned_case
    return answered(data, number, cluster, calibration, limits=limits)


def answer_request(
    data: Mapping[str, Any],
    *,
    where: str,
    cluster: Cluster | None = None,
    calibration: Calibration | None = None,
    limits: Limits | None = None,
) -> Answer:
    """Return the answer to a request: with least time on `cluster`, else with fewest bytes. Raises BadInput and
    Infeasible.
    """
    request = read_request(data, where=where)
    found: list[Answer] = []
    refused: list[Infeasible] = []
    for one in _ways_to_experts(request):
        try:
            found.append(_answered(one, cluster, calibration, limits))
        except Infeasible as error:
            refused.append(error)
    if not found:
        raise refused[-1]
    machine = found[0].problem.machine
    return _faster(found) if machine is not None else min(found, key=lambda one: one.plan.choice.cost)


def _ways_to_experts(request: Request) -> list[Request]:
    """Return the request's variants: with its graph unchanged, in which ranks compute the rows of their own experts
    among those of all tokens, and with routed experts as operators to which tokens can be sent; or only the one for
    which `routes` asks.
    """
    routed = request.graph
    if request.stages is None and request.routes != ALL_GATHER:
        routed = with_routes(request.graph, request.constraints.placements, send=request.routes == ALL_TO_ALL)
    if request.routes != ALL_TO_ALL:
        return [request] if routed is request.graph else [request, _with_graph(request, routed)]
    if routed is request.graph:
        raise BadInput(
            "the graph has no experts to which tokens can be sent by all-to-all",
            why="known are tokens that are sorted by expert, multiplied by groups and put back in order, all of them "
            "operators that compute rows by themselves, without pipeline stages and placements inside",
            remedy='experts by torch.nn.functional.grouped_mm, or leave "routes" out',
        )
    return [_with_graph(request, routed)]


def _with_graph(request: Request, graph: CapturedGraph) -> Request:
    """Return the request for another graph; its open tensors are those that exist there."""
    there = {one.name for one in graph.inputs} | {one.name for one in graph.nodes}
    left = tuple(name for name in request.constraints.choose if name in there)
    return replace_fields(request, graph=graph, constraints=replace(request.constraints, choose=left))


def _answered(
    request: Request, cluster: Cluster | None, calibration: Calibration | None, limits: Limits | None
) -> Answer:
    """Return the answer to a request with its present graph."""
    machine = None if cluster is None else Machine(cluster, calibration)
    captured = captured_problem(request.graph, request.mesh, request.constraints, request.stages, machine)
    if request.stages is not None and limits is not None and limits.memory_bytes is not None:
        raise BadInput("a limit of memory with pipeline stages", remedy="leave one of them out")
    problem = on_machine(captured.problem, cluster, calibration, limits or Limits())
    if request.backward:
        trained = [one.name for one in request.graph.inputs if one.is_trained]
        problem = replace(problem, differentiated=_differentiated(problem, {*trained, *request.gradients}))
    captured = replace(captured, problem=problem)
    if request.stages is not None and not request.stages.of and machine is not None:
        return _faster([_answer(request, one) for one in _with_best_cuts(request, captured, machine)])
    every = [problem]
    by_time = problem.policy == "min_time" and machine is not None and request.stages is None
    if by_time:
        every += placed_by_hand(problem)
    if problem.memory is not None:  # keep everything, or allow recomputation: the programs show which is faster
        limit = problem.memory
        every = [replace(one, memory=replace(limit, counts_saved=saved)) for one in every for saved in (True, False)]
    if by_time:
        every += [replace(one, hidden_share=_HIDDEN) for one in every]
    found: list[Answer] = []
    refused: list[Infeasible] = []
    tried = _Tried()
    for one in every:
        if found and problem.deadline.over:
            break
        try:
            found.append(_fitting(request, replace(captured, problem=one), tried, problem))
        except Infeasible as error:
            refused.append(error)
    if not found:
        raise refused[-1]
    best = _faster(found)
    bound = min(best.plan.choice.cost, *tried.bounds) if tried.bounds else 0.0
    plan = replace(best.plan, choice=replace(best.plan.choice, bound=bound))
    return replace(best, plan=plan)


def _fitting(request: Request, captured: CapturedProblem, tried: _Tried, given: ShardingProblem) -> Answer:
    """Return an answer whose program fits a memory limit. Raises Infeasible if none is found.

    Placements beyond those of the problem `given` are tried too; their bound is not one of all choices.

    The memory of a choice is counted at the beginning of the backward pass. At its peak a program may need more, for
    gradients of activations and moved copies. Then choices with less memory are tried, at first with little less, to
    find the fastest that fits. The bound is that for the full limit.
    """
    problem, closest = captured.problem, None
    limit = problem.memory
    none_at, too_much, step = 0.0, inf if limit is None else limit.limit_bytes, 0.0
    for doubled in range(_MOST_TIGHTENED):
        counted = max(too_much - step, (none_at + too_much) / 2)
        if limit is not None:
            problem = replace(problem, memory=replace(limit, spare_bytes=limit.limit_bytes - counted))
        try:
            planned, plan = _planned(request, replace(captured, problem=problem))
        except Infeasible:
            if closest is None:
                raise
            none_at = counted
            continue
        asked = (problem.input_layouts, problem.pins) == (given.input_layouts, given.pins)
        if doubled == 0 and not problem.hidden_share and asked:
            tried.bounds.append(plan.choice.bound)
        key = (plan.choice.options, frozenset(plan.choice.layouts.items()))
        if key not in tried.programs:
            try:
                tried.programs[key] = _written(request, planned, plan)
            except TooLargeError as error:
                tried.programs[key] = error
        written = tried.programs[key]
        if isinstance(written, Written):
            return Answer(request, planned, plan, written)
        closest = written if closest is None or written.excess_bytes < closest.excess_bytes else closest
        too_much, step = min(too_much, plan.choice.held_bytes), max(1.0, written.excess_bytes * 2.0 ** (doubled - 3))
        if problem.deadline.over:
            break
    assert closest is not None  # noqa: S101 - nothing else ends the loop
    raise closest


def _faster(found: Sequence[Answer]) -> Answer:
    """Return the answer with the fastest program on its machine; without a machine, the first."""
    machine = found[0].problem.machine
    if machine is None or len(found) == 1:
        return found[0]
    return min(
        found,
        key=lambda one: simulate_program(one.written, one.problem, machine.cluster, machine.calibration).step_s,
    )


def _with_best_cuts(request: Request, captured: CapturedProblem, machine: Machine) -> list[CapturedProblem]:
    """Return the problem with the stages whose simulated program is fastest, found by moving cuts.

    Also return it with even stages: programs are compared without chunks here, and with chunks even stages may be
    faster.
    """
    quick = replace_fields(request, chunks={})

    def seconds(one: CapturedProblem) -> float:
        written = _answer(quick, one).written
        return simulate_program(written, one.problem, machine.cluster, machine.calibration).step_s

    graph = captured.problem.graph
    cuts = lean_cuts(graph.operators, graph.tensors, graph.parameters)
    pipeline = captured.problem.stages
    assert pipeline is not None  # noqa: S101 - by the caller

    def cut_at(stages: tuple[int, ...]) -> CapturedProblem:
        return replace(captured, problem=replace(captured.problem, stages=replace(pipeline, operator_stages=stages)))

    even = evenly(len(graph.operators), pipeline.count, cuts)
    times = {stages: seconds(cut_at(stages)) for stages in sorted({pipeline.operator_stages, even})}
    best, trials = min(times, key=lambda stages: times[stages]), 0
    while trials < _MAX_CUTS and not captured.problem.deadline.over:
        for stages in neighbours(best, cuts):
            if stages not in times and trials < _MAX_CUTS:
                trials += 1
                times[stages] = seconds(cut_at(stages))
        better = min(times, key=lambda stages: times[stages])
        if better == best:
            break
        best = better
    return [cut_at(stages) for stages in dict.fromkeys((best, even))]


def _answer(request: Request, captured: CapturedProblem) -> Answer:
    """Return the plan of a problem and its program. Raises Infeasible."""
    captured, plan = _planned(request, captured)
    return Answer(request, captured, plan, _written(request, captured, plan))


def _planned(request: Request, captured: CapturedProblem) -> tuple[CapturedProblem, ShardingPlan]:
    """Return the plan of a problem, and the problem with results pinned to layouts without pending sums, and with the
    rows of attention that is asked to run around a ring pinned to ranks.
    """
    captured, plan = _with_rings(request, captured, plan_sharding(captured.problem))
    pending = {name: plan.choice.layouts[name] for name in request.graph.outputs if plan.choice.layouts[name].pending}
    pending = {name: at for name, at in pending.items() if name not in request.constraints.placements}
    if pending:  # a pending sum cannot be used outside, so it is reduced where it is computed
        finished = {name: Layout(at.dims) for name, at in pending.items()}
        captured = replace(captured, problem=replace(captured.problem, pins={**captured.problem.pins, **finished}))
        plan = plan_sharding(captured.problem)
    return captured, plan


def _with_rings(
    request: Request, captured: CapturedProblem, plan: ShardingPlan
) -> tuple[CapturedProblem, ShardingPlan]:
    """Return the problem and its cheapest plan in which the attention that is asked to run around a ring can.

    Without this, a plan that divides the sequences of a batch, or the heads, may be cheaper.
    """

    def missing(one: ShardingPlan) -> list[str]:
        rings = find_rings(captured.problem, one, captured.statements)
        return [name for name, way in _asked_ways(request).items() if way == RING and name not in rings]

    problem, apart = captured.problem, missing(plan)
    queries = (one.operands[0][0] for one in problem.operators if one.result.name in apart and one.operands)
    stay = {**problem.schedule, **dict.fromkeys(queries, Schedule(kind="stay"))}
    found: list[tuple[CapturedProblem, ShardingPlan]] = []
    for axis in problem.mesh.names:
        rows = rows_of_attention(problem, axis, dict.fromkeys(apart, plan.choice.layouts))
        if rows:
            pinned = replace(captured, problem=replace(problem, pins={**problem.pins, **rows}, schedule=stay))
            try:
                found.append((pinned, plan_sharding(pinned.problem)))
            except Infeasible:
                continue
    found = [(pinned, one) for pinned, one in found if not missing(one)]
    if not found:
        return captured, plan
    pinned, best = min(found, key=lambda one: one[1].choice.cost)
    # No plan costs less than the cheapest of all, whether or not its attention can use a ring.
    bound = min(best.choice.bound, plan.choice.bound)
    return pinned, replace(best, choice=replace(best.choice, bound=bound))


def _asked_ways(request: Request) -> dict[str, int | str]:
    """Return the ways, or numbers of chunks, that a request states, by result."""
    streams = {name: RING if one.ring else one.chunks for name, one in request.streamed.items()}
    return {**(request.chunks or {}), **streams}


def _written(request: Request, captured: CapturedProblem, plan: ShardingPlan) -> Written:
    """Return the program with pieces in the memory order in which exchanges copy least, or in the request's."""
    return in_memory_order(_with_chunks(request, captured, plan), captured.problem, request.orders)


def _with_chunks(request: Request, captured: CapturedProblem, plan: ShardingPlan) -> Written:
    """Return the program with the request's chunks, else with chunks that make it faster on the machine."""
    graph, gradients, backward = request.graph, request.gradients, request.backward
    machine = captured.problem.machine
    if machine is not None and request.chunks is None and not request.streamed:
        return fastest_program(captured, graph, plan, machine, gradients=gradients, backward=backward)
    chunks: dict[str, int | str] = {}
    asked = _asked_ways(request)
    sites = chunk_sites(captured, plan) if asked else {}
    for name, count in asked.items():
        site = sites.get(name) or sites.get(f"{name}_product")
        if site is None or not site.allows(count):
            raise BadInput(
                f"{name[:60]!r} does not run "
                + (f"as {count[:20]!r}" if isinstance(count, str) else f"in {count} chunks"),
                why="no exchange comes before or after it along an axis that it keeps, or its rows do not divide"
                if site is None
                else f"a rank has {site.rows} rows of it",
                remedy=f"leave its way out, or state one of {', '.join(sites)}"
                if sites
                else "leave its way out, or state placements between which rows of its operands or its result move",
            )
        if name in request.streamed and request.streamed[name].dim != site.result_dim:
            raise BadInput(
                f"{name[:60]!r} has a stream along dim {request.streamed[name].dim}",
                why=f"it is gathered or summed in pieces of dim {site.result_dim}",
                remedy=f"a split of dim {site.result_dim}",
            )
        chunks[site.result] = count
    if machine is not None:
        return fastest_program(captured, graph, plan, machine, gradients=gradients, backward=backward, chunks=chunks)
    return write_program(captured, graph, plan, gradients=gradients, backward=backward, chunks=chunks)


def _differentiated(problem: ShardingProblem, asked: Collection[str]) -> frozenset[str]:
    """Return the tensors with a gradient: those on a path from an input in `asked` to a result."""
    found = {name for name in problem.inputs if name in asked and problem.tensors[name].dtype in FLOATS}
    for operator in problem.operators:
        passes = operator.result.dtype in FLOATS and "detach" not in operator.functions
        if passes and any(name in found for name, _ in operator.operands):
            found.add(operator.result.name)
    return frozenset(found)


def answer_row(answer: Answer, cluster: Cluster | None = None, calibration: Calibration | None = None) -> JsonObject:
    """Return the row of the report; with `cluster` the time of the program simulated there."""
    row = plan_row(answer.request.id, answer.captured.problem, answer.plan)
    program = answer.written.program
    kinds = Counter(one.kind for one in program.work.values() if isinstance(one, Exchange))
    row["program"] = {"instructions": len(program.instructions), "exchanges": dict(kinds)}
    row["program"]["chunks"] = dict(answer.written.chunks)
    row["program"]["schedules"] = _schedules(answer.written)
    row["program"]["again"] = sorted(answer.written.again)
    row["program"]["peak_bytes"] = answer.written.peak_bytes
    row["opaque"] = list(answer.captured.opaque)
    if cluster is not None:
        run = simulate_program(answer.written, answer.captured.problem, cluster, calibration)
        row["time_s"] = {"value": run.step_s, "source": "datasheet" if calibration is None else "fitted"}
    return row


def _schedules(written: Written) -> list[JsonObject]:
    """Return, for every product that can run at the same time as its exchange, the way it runs, and the program's time
    with other ways.
    """
    found = []
    for name, seconds in written.tried.items():
        way = written.chunks.get(name, 1)
        others = sorted((taken, other) for other, taken in seconds.items() if other != way and isfinite(taken))
        row = {"product": name, "way": WHOLE if way == 1 else way, "program_s": seconds[way]}
        if others:
            taken, other = others[0]
            row |= {"instead": WHOLE if other == 1 else other, "more_s": taken - seconds[way]}
        found.append(row)
    return found


def captured_row(
    data: Mapping[str, Any],
    number: int,
    cluster: Cluster | None = None,
    calibration: Calibration | None = None,
    *,
    limits: Limits | None = None,
) -> tuple[JsonObject, Answer | None]:
    """Return the row of one captured case and its answer, or a row with the reason why there is none."""
    name = data.get("id")
    name = name[:200] if isinstance(name, str) else f"case {number}"
    try:
        answer = answer_request(data, where=name, cluster=cluster, calibration=calibration, limits=limits)
        return answer_row(answer, cluster, calibration), answer
    except (UserError, Infeasible) as error:
        return rejection(name, error), None
