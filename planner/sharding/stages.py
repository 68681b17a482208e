"""Pipelines: operators on different parts of the mesh, tensors that cross between them in micro batches.

`"stages": {"axis": "pp", "of": {"u": 0, "y": 1}, "micro_batches": 4}` gives every result a coordinate of one mesh axis;
unnamed results are where the operator before them is. That axis shards nothing: each of its coordinates is a mesh of its
own, made of the other axes, and a tensor is on those that make or use it. Where a result is used on another one, every
rank sends its piece to the rank of the same other coordinates, in as many messages as there are micro batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from planner.sharding.collectives import SEND_RECV, Collective
from planner.sharding.layout import Layout, local_shape
from planner.sharding.mesh import Mesh
from planner.sharding.operator import Operator, Tensor
from topology.errors import BadInput


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    axis: str
    of: dict[str, int]
    micro_batches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """A mesh axis at `position`, the stage of every operator, and micro batches."""

    axis: str
    position: int
    count: int
    of: tuple[int, ...]
    micro_batches: int

    def sent(self, tensor: Tensor, layout: Layout, mesh: Mesh) -> tuple[Collective, ...]:
        """Return the messages that bring a tensor to another stage. Raises BadInput where they are of uneven size."""
        piece = local_shape(tensor.shape, layout, mesh)
        if self.micro_batches > 1:
            if not piece or piece[0] % self.micro_batches:
                raise BadInput(
                    f"{tensor.name} does not divide into {self.micro_batches} micro batches",
                    why=f"a rank holds {list(piece)} of it",
                    remedy="fewer micro batches",
                )
            piece = (piece[0] // self.micro_batches, *piece[1:])
        one = Collective(
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
        return (one,) * self.micro_batches


def stage_axis(data: Any, mesh: Mesh) -> str:
    """Return the name of the mesh axis whose coordinates are stages. Raises BadInput."""
    try:
        found = msgspec.convert(data, _Text, strict=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput("cannot read the stages", why=str(error), remedy='{"axis": "pp", "of": {"y": 1}}') from error
    if found.axis not in mesh.names:
        raise BadInput(f"stages over {found.axis[:40]!r}", why="that is no axis of the mesh", remedy="name one")
    if not 1 <= found.micro_batches <= 4096:
        raise BadInput(f"{found.micro_batches} micro batches", remedy="1 to 4096")
    return found.axis


def stages_of(data: Any, mesh: Mesh, operators: Sequence[Operator]) -> Stages:
    """Return the stage of every operator. Raises BadInput for stages that the axis does not have."""
    axis = stage_axis(data, mesh)
    found = msgspec.convert(data, _Text, strict=True)
    count = mesh.size(axis)
    made = {operator.result.name for operator in operators}
    for name, stage in found.of.items():
        if name not in made or not 0 <= stage < count:
            raise BadInput(
                f"{name[:40]!r} at stage {stage}", why=f"results are made at stages 0 to {count - 1}", remedy="another"
            )
    here, stages = 0, []
    for position, operator in enumerate(operators):
        name = operator.result.name
        after = operators[position + 1].result.name if name.endswith(".product") else name
        here = found.of.get(after, here)
        stages.append(here)
    return Stages(
        axis=axis,
        position=mesh.names.index(axis),
        count=count,
        of=tuple(stages),
        micro_batches=found.micro_batches,
    )


def without_axis(mesh: Mesh, axis: str) -> Mesh:
    """Return the mesh of one stage."""
    kept = [(name, size) for name, size in zip(mesh.names, mesh.shape, strict=True) if name != axis]
    return Mesh(names=tuple(name for name, _ in kept), shape=tuple(size for _, size in kept))


def tokens_without(tokens: Sequence[str], position: int, mesh: Mesh, *, of: str) -> list[str]:
    """Return the placements on the mesh of one stage. Raises BadInput where a tensor is to be cut over stages."""
    if len(tokens) != len(mesh.names):
        raise BadInput(
            f"{of} has {len(tokens)} placements on a mesh of {len(mesh.names)} axes", remedy="one token per mesh axis"
        )
    if tokens[position] != "R":
        raise BadInput(f"{of} is cut over the stages", why="a tensor is on whole stages", remedy="R there")
    return [token for index, token in enumerate(tokens) if index != position]
