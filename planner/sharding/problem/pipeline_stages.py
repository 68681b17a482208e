"""Pipeline stages: operators on different parts of the mesh, and the tensors sent between them in micro batches.

`"stages": {"axis": "pp", "of": {"u": 0, "y": 1}, "micro_batches": 4}` assigns every result to a stage, which is a
coordinate of one mesh axis; unnamed results are on the stage of the operator before them. That mesh axis shards no
tensor: each stage is a mesh of the other axes. Where a result is used on another stage, every rank sends its shard to
the rank with the same other coordinates there, in one message per micro batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from planner.sharding.layouts.collectives import SEND_RECV, Collective
from planner.sharding.layouts.layout import Layout, Mesh, local_shape
from planner.sharding.operators.operator import PRODUCT, Operator, Tensor
from topology.errors import BadInput

MAX_MICRO_BATCHES = 4096


class StageAssignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stages in a file: their mesh axis, the stages of named results, the micro batches and their order."""

    axis: str
    of: dict[str, int] = {}
    micro_batches: int = 1
    schedule: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStages:
    """The mesh axis of the stages, its `position` in the mesh and size, and the stage of every operator."""

    axis: str
    position: int
    count: int
    operator_stages: tuple[int, ...]
    micro_batches: int

    def whole_mesh(self, mesh: Mesh) -> Mesh:
        """Return the mesh with the axis of the stages, given the mesh of one stage."""
        names, shape = list(mesh.names), list(mesh.shape)
        names.insert(self.position, self.axis)
        shape.insert(self.position, self.count)
        return Mesh(names=tuple(names), shape=tuple(shape))

    def ranks(self, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """Return by stage its ranks in the whole mesh, in the order of `mesh`, that of one stage."""
        whole = self.whole_mesh(mesh)
        every = np.arange(whole.ranks).reshape(whole.shape)
        return tuple(tuple(int(r) for r in np.take(every, n, self.position).ravel()) for n in range(self.count))

    def send_collectives(self, tensor: Tensor, layout: Layout, mesh: Mesh) -> tuple[Collective, ...]:
        """Return the sends of a tensor to another stage, one per micro batch. Raises BadInput where they are uneven."""
        piece = local_shape(tensor.shape, layout, mesh)
        if self.micro_batches > 1:
            if not piece or piece[0] % self.micro_batches:
                raise BadInput(
                    f"{tensor.name} does not divide into {self.micro_batches} micro batches",
                    why=f"a rank holds {list(piece)} of it",
                    remedy="fewer micro batches",
                )
            piece = (piece[0] // self.micro_batches, *piece[1:])
        message = Collective(
            kind=SEND_RECV,
            mesh_dim=self.axis,
            axes=(self.axis,),
            group=2,
            dtype=tensor.dtype,
            local_in=piece,
            local_out=piece,
            tensor=tensor.name,
            note="micro batch" if self.micro_batches > 1 else "",
        )
        return (message,) * self.micro_batches


def parse_stage_assignment(data: Any, mesh: Mesh, *, max_micro_batches: int = MAX_MICRO_BATCHES) -> StageAssignment:
    """Parse decoded JSON. Raises BadInput for an axis that the mesh, or a stage that the axis, does not have."""
    try:
        assignment = msgspec.convert(data, StageAssignment, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput("cannot read the stages", why=str(error), remedy='{"axis": "pp", "of": {"y": 1}}') from error
    if assignment.axis not in mesh.names:
        raise BadInput(f"stages over {assignment.axis[:40]!r}", why="that is no axis of the mesh", remedy="name one")
    if not 1 <= assignment.micro_batches <= max_micro_batches:
        raise BadInput(f"{assignment.micro_batches} micro batches", remedy=f"1 to {max_micro_batches}")
    count = mesh.size(assignment.axis)
    for name, stage in assignment.of.items():
        if not 0 <= stage < count:
            raise BadInput(
                f"{name[:60]!r} on stage {stage}",
                why=f"{assignment.axis[:40]} has stages 0 to {count - 1}",
                remedy="another stage",
            )
    return assignment


def assign_stages(assignment: StageAssignment, mesh: Mesh, operators: Sequence[Operator]) -> PipelineStages:
    """Return the stages of all operators. Raises BadInput for a name that no operator makes."""
    made = {operator.result.name for operator in operators}
    if assignment.schedule or not assignment.of:
        raise BadInput(
            "stages without operators, or with a schedule",
            why="operators in the text form have the stages that are stated, and micro batches no order",
            remedy="a captured graph, or `of` alone",
        )
    for name in assignment.of:
        if name not in made:
            raise BadInput(
                f"{name[:60]!r} has a stage, and no operator makes it", remedy="name the result of an operator"
            )
    stage, stages = 0, []
    for position, operator in enumerate(operators):
        name = operator.result.name
        after = operators[position + 1].result.name if name.endswith(PRODUCT) else name
        stage = assignment.of.get(after, stage)
        stages.append(stage)
    return PipelineStages(
        axis=assignment.axis,
        position=mesh.names.index(assignment.axis),
        count=mesh.size(assignment.axis),
        operator_stages=tuple(stages),
        micro_batches=assignment.micro_batches,
    )


def mesh_without_axis(mesh: Mesh, axis: str) -> Mesh:
    """Return the mesh of one stage: all axes but `axis`."""
    remaining = [(name, size) for name, size in zip(mesh.names, mesh.shape, strict=True) if name != axis]
    return Mesh(names=tuple(name for name, _ in remaining), shape=tuple(size for _, size in remaining))


def placements_without_stage_axis(placements: Sequence[str], position: int, mesh: Mesh, *, of: str) -> list[str]:
    """Return the placements on the mesh of one stage. Raises BadInput where a tensor is sharded over the stages."""
    if len(placements) != len(mesh.names):
        raise BadInput(
            f"{of} has {len(placements)} placements on a mesh of {len(mesh.names)} axes",
            remedy="one token per mesh axis",
        )
    if placements[position] != "R":
        raise BadInput(f"{of} is cut over the stages", why="a tensor is on whole stages", remedy="R there")
    return [placement for index, placement in enumerate(placements) if index != position]
