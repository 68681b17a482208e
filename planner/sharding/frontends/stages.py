"""Pipeline stages of a captured graph: `{"axis": "pp", "of": {"layers.1": 1}, "micro_batches": 4}`.

A stage is a coordinate of one mesh axis. `of` gives the stages of operators, or of all operators of a module; operators
that are not named are on the stage of the operator before them. Without `of`, the graph is cut by time.

The graph is that of one micro batch. Every micro batch passes all stages, forward in order and backward in reverse
order, and gradients of parameters are summed over micro batches. `schedule` is `gpipe`, all forward and then all
backward (Huang et al., arXiv 1811.06965), or `1f1b`, in which a stage runs backward passes as early as possible and
holds at most one micro batch more than there are later stages (Narayanan et al., arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, prod
from typing import Any

import numpy as np

from planner.sharding.layouts.layout import Mesh
from planner.sharding.operators.graph import Graph
from planner.sharding.operators.operator import Operator, Tensor
from planner.sharding.operators.work import backward_s, operator_work
from planner.sharding.ops.aten import Statement
from planner.sharding.ops.table import statements
from planner.sharding.problem.pipeline_stages import PipelineStages, parse_stage_assignment
from planner.sharding.problem.problem import Machine
from planner.sharding.solver.pricing import TimePricing
from simulator.config.runtime import ELEMENT_BYTES
from simulator.sharded.graph import CapturedGraph, GraphNode
from topology.errors import BadInput, Infeasible

MAX_MICRO_BATCHES = 256  # a limit, since every rank's program has each micro batch
GPIPE, ONE_F_ONE_B = "gpipe", "1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stage of every result of the graph's statements, on `count` coordinates of a mesh axis, which is at
    `position`.
    """

    axis: str
    position: int
    count: int
    of: Mapping[str, int]
    micro_batches: int
    schedule: str = GPIPE

    def of_operators(self, graph: Graph, mesh: Mesh, machine: Machine | None) -> PipelineStages:
        """Return the stages of a problem's operators: as stated, else by time on `machine`; `mesh` is that of one
        stage.

        Raises BadInput if a result or a parameter cannot be on its stage.
        """
        if self.of:
            return self._pipeline(self._stated(graph.operators, graph.parameters))
        if machine is None:
            raise BadInput("stages that are not stated", why="they are cut by time", remedy="a --cluster, or `of`")
        whole = self._pipeline(()).whole_mesh(mesh)
        stages = cut_by_time(graph.operators, graph.tensors, graph.parameters, self.count, self.axis, whole, machine)
        return self._pipeline(stages)

    def _pipeline(self, stages: tuple[int, ...]) -> PipelineStages:
        return PipelineStages(
            axis=self.axis, position=self.position, count=self.count, operator_stages=stages, micro_batches=1
        )

    def _stated(self, operators: Sequence[Operator], parameters: frozenset[str]) -> tuple[int, ...]:
        found: list[int] = []
        for operator in reversed(operators):  # operators that prepare an operand are on the stage that uses it
            found.append(self.of.get(operator.result.name, found[-1] if found else self.count - 1))
        stages = tuple(reversed(found))
        made = {operator.result.name: stage for operator, stage in zip(operators, stages, strict=True)}
        for operator, stage in zip(operators, stages, strict=True):
            for name, _ in operator.operands:
                before = made.setdefault(name, stage) if name in parameters else made.get(name, stage)
                if before > stage or (name in parameters and before != stage):
                    raise BadInput(
                        f"{operator.result.name[:60]!r} on stage {stage} uses {name[:60]!r},"
                        f" which is on stage {before}",
                        why="results go to later stages only, and a parameter is on one stage",
                        remedy="other stages",
                    )
        return stages


def read_stages(graph: CapturedGraph, mesh: Mesh, data: Any) -> Stages:
    """Return the stages that a request states. Raises BadInput."""
    assignment = parse_stage_assignment(data, mesh, max_micro_batches=MAX_MICRO_BATCHES)
    schedule = assignment.schedule or GPIPE
    if schedule not in {GPIPE, ONE_F_ONE_B}:
        raise BadInput(f"no schedule {schedule[:40]!r} of micro batches", remedy=f"{GPIPE} or {ONE_F_ONE_B}")
    for name in assignment.of:
        if not any(_names(name, node) for node in graph.nodes):
            raise BadInput(
                f"{name[:60]!r} has a stage, and is nothing of the graph",
                remedy="the name of an operator, or the path of a module",
            )
    return Stages(
        axis=assignment.axis,
        position=mesh.names.index(assignment.axis),
        count=mesh.size(assignment.axis),
        of=_by_result(graph, assignment.of) if assignment.of else {},
        micro_batches=assignment.micro_batches,
        schedule=schedule,
    )


def _by_result(graph: CapturedGraph, of: Mapping[str, int]) -> dict[str, int]:
    """Return the stage of every statement's result: that of its operator, of its module, or of the statement
    before it.
    """
    shapes = {one.name: one.shape for one in graph.inputs} | {one.name: one.shape for one in graph.nodes}
    found: dict[str, int] = {}
    stage = 0
    for node in graph.nodes:
        named = sorted((name for name in of if _names(name, node)), key=len)
        stage = of[named[-1]] if named else stage
        lines: Sequence[Statement] = statements(node, shapes)
        found |= {line.result: stage for line in lines}
    return found


def _names(name: str, node: GraphNode) -> bool:
    return name in (node.name, node.module) or node.module.startswith(f"{name}.")


_LEAN = 2.0  # a cut may send at most this many times the bytes of the smallest cut
_GRADIENTS = 2  # gradients of a product: its operand's and its parameter's


def cut_by_time(
    operators: Sequence[Operator],
    tensors: Mapping[str, Tensor],
    parameters: Collection[str],
    count: int,
    axis: str,
    mesh: Mesh,
    machine: Machine,
) -> tuple[int, ...]:
    """Return the stage of every operator, for `count` stages over `axis` of `mesh`. Raises Infeasible if there are too
    few cuts.
    """
    pricing = TimePricing(machine, mesh)
    before = [0.0, *accumulate(_seconds(one, tensors, pricing) * count / mesh.ranks for one in operators)]
    sent = lean_cuts(operators, tensors, parameters)
    cuts = sorted(sent)
    if len(cuts) < count - 1:
        raise Infeasible(
            f"{len(operators)} operators are not cut into {count} stages",
            why="every parameter is on one stage",
            remedy="fewer stages, or stages that are stated",
        )
    messages = {at: 2 * float(pricing.seconds("send_recv", (axis,), np.array([sent[at]]))[0]) for at in cuts}
    ends = [*cuts, len(operators)]
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # by stages so far, and end: (slowest time, last start)
    for _ in range(count):
        found: dict[int, tuple[float, int]] = {}
        for end in ends:
            for start, (slowest, _) in best[-1].items():
                if start < end:
                    taken = max(slowest, before[end] - before[start] + messages.get(end, 0.0))
                    if taken < found.get(end, (inf, 0))[0]:
                        found[end] = (taken, start)
        best.append(found)
    end, stages = len(operators), [0] * len(operators)
    for stage in reversed(range(count)):
        start = best[stage + 1][end][1]
        stages[start:end] = [stage] * (end - start)
        end = start
    return tuple(stages)


def lean_cuts(
    operators: Sequence[Operator], tensors: Mapping[str, Tensor], parameters: Collection[str]
) -> dict[int, float]:
    """Return the possible starts of stages, with the bytes that are sent there: at most twice the fewest."""
    sent = _crossing_bytes(operators, tensors, parameters)
    least = min((nbytes for nbytes in sent.values() if nbytes), default=0.0)
    return {at: nbytes for at, nbytes in sent.items() if nbytes <= _LEAN * least}


def evenly(operators: int, count: int, cuts: Collection[int]) -> tuple[int, ...]:
    """Return stages with about as many operators each, cut at places in `cuts`."""
    places: list[int] = []
    for number in range(1, count):
        left = [at for at in sorted(cuts) if at > (places[-1] if places else 0)]
        left = left[: len(left) - (count - 1 - number)]  # leave places for later cuts
        places.append(min(left, key=lambda at: abs(at - operators * number / count)))
    return tuple(sum(one <= position for one in places) for position in range(operators))


def neighbours(stages: Sequence[int], cuts: Collection[int]) -> list[tuple[int, ...]]:
    """Return the stages of operators with one cut moved to the next or previous place in `cuts`."""
    places = sorted(cuts)
    now = [at for at in range(1, len(stages)) if stages[at] != stages[at - 1]]
    found = []
    for number, at in enumerate(now):
        before = [place for place in places if (now[number - 1] if number else 0) < place < at][-1:]
        after = [place for place in places if at < place < (now[number + 1] if number + 1 < len(now) else len(stages))][
            :1
        ]
        for place in (*before, *after):
            moved = sorted({*now, place} - {at})
            found.append(tuple(sum(one <= position for one in moved) for position in range(len(stages))))
    return found


def _seconds(operator: Operator, tensors: Mapping[str, Tensor], pricing: TimePricing) -> float:
    if operator.is_view:
        return 0.0
    work = operator_work(operator, tensors, {axis: np.array([float(n)]) for axis, n in operator.sizes.items()})
    roofline = pricing.roofline(operator.result.dtype)
    return float(np.asarray(roofline.seconds(work) + backward_s(work, _GRADIENTS, roofline)).item())


def _crossing_bytes(
    operators: Sequence[Operator], tensors: Mapping[str, Tensor], parameters: Collection[str]
) -> dict[int, float]:
    """Return, for each possible cut before an operator, the bytes of earlier results that are used from it on."""
    made = {one.result.name: at for at, one in enumerate(operators)}
    uses: dict[str, list[int]] = {}
    for at, one in enumerate(operators):
        for name, _ in one.operands:
            uses.setdefault(name, []).append(at)
    change, closed = [0.0] * (len(operators) + 1), [0] * (len(operators) + 1)
    for name, used in uses.items():
        if name in made:
            nbytes = prod(tensors[name].shape) * ELEMENT_BYTES[tensors[name].dtype]
            change[made[name] + 1] += nbytes
            change[max(used) + 1] -= nbytes
        elif name in parameters:
            closed[min(used) + 1] += 1
            closed[max(used) + 1] -= 1
    sent, shut = list(accumulate(change)), list(accumulate(closed))
    return {at: sent[at] for at in range(1, len(operators)) if not shut[at]}
