"""The reason for each collective of a plan, its cost, and the cost of the next best plan without it.

For each collective the whole problem is solved again without its move: with the tensor kept in its layout or, if the
user prescribed a layout, without that. The difference of the totals is what the collective saves; if the tensor were
larger by that difference over its own bytes, the other plan would win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.sharding.layouts.collectives import ALL_GATHER, ALL_TO_ALL_V, PERMUTE, Collective
from planner.sharding.layouts.layout import Layout, placements_of
from planner.sharding.plans.plan import OperatorStep, ShardingPlan, TensorMove, plan_sharding
from planner.sharding.problem.problem import ShardingProblem
from planner.sharding.problem.schedule import Schedule
from simulator.calibration.calibration import Calibration, collectives_on
from simulator.lowering.machine_costs import MachineCosts
from simulator.program.program import Collective as Instruction
from simulator.sharded.program import rank_groups
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import PlannerError

MAX_SOLVED = 48  # plans solved again for one explanation; later collectives only get a reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One collective. Bytes are ring bytes that a rank sends; seconds are None without a cluster.

    `instead` describes the next best plan, `more_bytes` its additional cost; `wins` states when it would be better.
    """

    tensor: str
    kind: str
    over: str
    why: str
    bytes_in: int
    ring_bytes: float
    seconds: float | None
    instead: str = ""
    more_bytes: float | None = None
    more_seconds: float | None = None
    wins: str = ""


@dataclass(frozen=True, slots=True)
class _Alternative:
    what: str
    plan: ShardingPlan


def explain_plan(
    problem: ShardingProblem, plan: ShardingPlan, cluster: Cluster | None = None, calibration: Calibration | None = None
) -> list[Explanation]:
    """Return an explanation of every collective of `plan`, in order; times are on `cluster` if it is given."""
    times = None if cluster is None else _Times(problem, cluster, calibration)
    found: list[Explanation] = []
    solved = 0
    for step in plan.steps:
        if not step.collectives:
            continue
        if isinstance(step, OperatorStep):
            found += [_inside(problem, step, one, times) for one in step.collectives]
            continue
        alternative = None
        if solved < MAX_SOLVED:
            solved += 1
            alternative = _alternative(problem, plan, step)
        found += [_of_move(problem, plan, step, one, alternative, times) for one in step.collectives]
    return found


@dataclass(slots=True)
class _Times:
    """Times of collectives on a cluster whose GPUs the mesh takes in order."""

    problem: ShardingProblem
    cluster: Cluster
    calibration: Calibration | None

    def of(self, collectives: Sequence[Collective]) -> float:
        costs = MachineCosts(
            cluster=self.cluster,
            collectives=collectives_on(self.cluster, self.calibration),
            kernels={},
            collective_host_s=0.0,
        )
        mesh = self.problem.mesh
        total = 0.0
        for one in collectives:
            axes = tuple(axis for axis in one.axes if axis in mesh.names) or mesh.names
            op = {PERMUTE: "send_recv", ALL_TO_ALL_V: "all_to_all"}.get(one.kind, one.kind)
            nbytes = one.bytes_out if one.kind == ALL_GATHER else one.bytes_in
            group = rank_groups(mesh.names, mesh.shape, axes)[0]
            total += costs.cost(Instruction(op=op, group=one.mesh_dim, nbytes=nbytes), group).seconds
        return total


def _tokens(problem: ShardingProblem, layout: Layout) -> str:
    return " ".join(placements_of(layout, problem.mesh))


def _inside(problem: ShardingProblem, step: OperatorStep, one: Collective, times: _Times | None) -> Explanation:
    operator = problem.operators[step.operator]
    return Explanation(
        tensor=operator.result.name,
        kind=one.kind,
        over=one.mesh_dim,
        why=f"{one.note}: {operator.result.name} is computed over an axis that {one.mesh_dim} shards,"
        " from statistics of the pieces",
        bytes_in=one.bytes_in,
        ring_bytes=float(one.ring_send_bytes),
        seconds=None if times is None else times.of([one]),
    )


def _why(problem: ShardingProblem, move: TensorMove) -> str:
    source, target = _tokens(problem, move.source), _tokens(problem, move.target)
    pending = {axis for axis, _ in move.source.pending} - {axis for axis, _ in move.target.pending}
    if move.source == move.target:
        return f"{move.tensor} goes to other ranks and keeps its layout, {source}"
    if pending:
        part = f"{move.tensor} is a partial sum on the ranks of {', '.join(sorted(pending))}"
        if move.tensor in problem.pins:
            return f"{part}, and is prescribed as {target}"
        return f"{part}, and {move.consumer or 'what follows'} needs it finished, as {target}"
    if move.consumer:
        return f"{move.consumer} needs {move.tensor} as {target}, and it lies as {source}"
    return f"{move.tensor} is made as {source}" + (
        f" and prescribed as {target}" if move.tensor in problem.pins else f" and used as {target}"
    )


def _alternative(problem: ShardingProblem, plan: ShardingPlan, move: TensorMove) -> _Alternative | None:
    """Return the best plan without this move, or None if there is none."""
    if move.source == move.target:
        return None
    tensor, source = move.tensor, _tokens(problem, move.source)
    if move.consumer:
        schedule = {**problem.schedule, tensor: Schedule(kind="stay")}
        changed = replace(problem, schedule=schedule, policy="min_ring_bytes")
        what = f"{tensor} stays as {source} and other tensors move to it"
    elif tensor in problem.pins:
        pins = {name: at for name, at in problem.pins.items() if name != tensor}
        changed = replace(problem, pins=pins, policy="min_ring_bytes")
        what = f"{tensor} lies where it is cheapest"
    else:
        changed = replace(problem, pins={**problem.pins, tensor: move.source}, policy="min_ring_bytes")
        what = f"{tensor} stays as {source}"
    try:
        other = plan_sharding(changed)
    except PlannerError:
        return None
    if other.choice.layouts == plan.choice.layouts and other.ring_send_bytes == plan.ring_send_bytes:
        return None
    if tensor in problem.pins and not move.consumer:
        what = (
            f"{tensor} lies as {_tokens(problem, other.choice.layouts[tensor])}, which {_placed_by(problem, tensor)}"
            " rules out"
        )
    return _Alternative(what, other)


def _placed_by(problem: ShardingProblem, tensor: str) -> str:
    return "the prescribed output" if tensor in problem.graph.outputs else "the prescribed layout"


def _of_move(
    problem: ShardingProblem,
    plan: ShardingPlan,
    move: TensorMove,
    one: Collective,
    alternative: _Alternative | None,
    times: _Times | None,
) -> Explanation:
    known: JsonObject = {}
    if alternative is not None:
        more = float(alternative.plan.ring_send_bytes - plan.ring_send_bytes)
        known = {"instead": alternative.what, "more_bytes": more}
        own = float(sum(c.ring_send_bytes for c in move.collectives))
        if times is not None:
            more = times.of(alternative.plan.collectives) - times.of(plan.collectives)
            own = times.of(move.collectives)
            known["more_seconds"] = more
        known["wins"] = _wins(move, more, own)
    else:
        known = {"instead": "no other plan keeps it where it lies"}
    return Explanation(
        tensor=move.tensor,
        kind=one.kind,
        over=one.mesh_dim,
        why=_why(problem, move),
        bytes_in=one.bytes_in,
        ring_bytes=float(one.ring_send_bytes),
        seconds=None if times is None else times.of([one]),
        **known,
    )


def _wins(move: TensorMove, more: float, own: float) -> str:
    """Return when the other plan would be better: how much larger the tensor would have to be.

    `more` is the other plan's additional cost and `own` the cost of the move, both in seconds or both in bytes.
    """
    if more < 0:
        return "at once, if the layout were not prescribed"
    if more == 0:
        return "it takes as much: the same exchange, later"
    if own <= 0:
        return ""
    return f"if {move.tensor} were more than {1 + more / own:.3g} times as large, all else equal"
