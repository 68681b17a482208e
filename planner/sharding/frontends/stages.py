"""Pipeline stages of a captured graph: `{"axis": "pp", "of": {"layers.1": 1}, "micro_batches": 4}`.

A stage is a coordinate of one mesh axis. Operators, or all that a module calls, are named with the stage that they are on; what
is not named is on the stage of the operator before it. Without `of`, the graph is cut by time (`stage_cuts.py`). The graph is that of one micro batch: every one goes through all
stages, forward in order and backward in the reverse order, and gradients of parameters are summed over them. `schedule` is
`gpipe`, all forward and then all backward (Huang et al., arXiv 1811.06965), or `1f1b`, in which a stage goes backward as soon as it
can and holds no more micro batches than stages follow it (Narayanan et al., arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.sharding.frontends.stage_cuts import cut_by_time
from planner.sharding.layouts.mesh import Mesh
from planner.sharding.operators.graph import Graph
from planner.sharding.operators.operator import Operator
from planner.sharding.ops.aten import Statement
from planner.sharding.ops.table import statements
from planner.sharding.problem.pipeline_stages import PipelineStages, parse_stage_assignment
from planner.sharding.problem.problem import Machine
from simulator.sharded.graph import CapturedGraph, GraphNode
from topology.errors import BadInput

MAX_MICRO_BATCHES = 256  # every one is written into the program of each rank
GPIPE, ONE_F_ONE_B = "gpipe", "1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stage of every result of the graph's statements, on `count` coordinates of a mesh axis, which is at `position`."""

    axis: str
    position: int
    count: int
    of: Mapping[str, int]
    micro_batches: int
    schedule: str = GPIPE

    def of_operators(self, graph: Graph, mesh: Mesh, machine: Machine | None) -> PipelineStages:
        """Return the stages of a problem's operators: those stated, else by time on `machine`; `mesh` is that of one stage.

        Raises BadInput where a result or a parameter cannot be there.
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
        for operator in reversed(operators):  # what prepares an operand is where the operand is used
            found.append(self.of.get(operator.result.name, found[-1] if found else self.count - 1))
        stages = tuple(reversed(found))
        made = {operator.result.name: stage for operator, stage in zip(operators, stages, strict=True)}
        for operator, stage in zip(operators, stages, strict=True):
            for name, _ in operator.operands:
                before = made.setdefault(name, stage) if name in parameters else made.get(name, stage)
                if before > stage or (name in parameters and before != stage):
                    raise BadInput(
                        f"{operator.result.name[:60]!r} on stage {stage} uses {name[:60]!r}, which is on stage {before}",
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
    """Return the stage of every statement's result: that of its operator, of the module that calls it, or of what is before."""
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
