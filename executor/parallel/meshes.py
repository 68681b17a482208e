"""Process groups of a plan: one world mesh with three views, in the order of `rank_grid`.

All meshes are unflattened from one root, because FSDP2 composes only with meshes of the same root:
    grid    pp, dp_replicate, dp_shard, cp, tp     coordinates of ranks
    dense   pp, dp_replicate, fsdp, tp             parameters; fsdp = dp_shard x cp, which both split the tokens
    sparse  pp, dp_replicate, efsdp, ep            experts; ep takes its ranks from tp, cp and dp_shard, innermost first
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from executor.parallel.facts import MeshFacts
from simulator.config.plan import MESH_AXES, Plan, rank_grid
from topology.errors import BadPlan


class _Counting(Protocol):
    """A method of process groups that torch's stubs omit."""

    def _get_sequence_number_for_group(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    grid: DeviceMesh
    dense: DeviceMesh
    sparse: DeviceMesh | None  # None without experts on several ranks

    def coordinate(self, axis: str) -> int:
        """Return this rank's coordinate along an axis of the grid."""
        return int(self.grid.get_local_rank(axis))

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.grid.get_group(axis)


def build_meshes(plan: Plan, device_type: str) -> Meshes:
    """Return the meshes of a plan; a collective call. Raises BadPlan when the world has another size."""
    world = dist.get_world_size()
    if world != plan.gpus:
        raise BadPlan(f"the plan is for {plan.gpus} ranks, {world} were started")
    root = init_device_mesh(device_type, (world,), mesh_dim_names=("world",))
    grid = root._unflatten(0, tuple(getattr(plan, axis) for axis in MESH_AXES), MESH_AXES)  # noqa: SLF001 - FSDP2 with TP needs one root
    fsdp = plan.dp_shard * plan.cp
    dense = root._unflatten(0, (plan.pp, plan.dp_replicate, fsdp, plan.tp), ("pp", "dp_replicate", "fsdp", "tp"))  # noqa: SLF001 - as above
    sparse = None
    if plan.ep > 1:
        shape = (plan.pp, plan.dp_replicate, fsdp * plan.tp // plan.ep, plan.ep)
        sparse = root._unflatten(0, shape, ("pp", "dp_replicate", "efsdp", "ep"))  # noqa: SLF001 - as above
    return Meshes(grid=grid, dense=dense, sparse=sparse)


_CACHE: dict[tuple[int, ...], Meshes] = {}


def meshes_for(plan: Plan, device_type: str) -> Meshes:
    """Return the meshes of a plan, cached by its degrees.

    Process groups take a second each to create on GPUs and are never destroyed. DTensor also caches layouts and treats
    equal meshes as one: where ranks hold shards of unequal size, their caches could otherwise differ.
    """
    key = (*(getattr(plan, axis) for axis in MESH_AXES), plan.ep)
    if key not in _CACHE:
        _CACHE[key] = build_meshes(plan, device_type)
    return _CACHE[key]


def describe_mesh(meshes: Meshes, plan: Plan) -> MeshFacts:
    """Return the mesh as torch reports it, and whether it is the one that the plan requests."""
    shape = dict(zip(meshes.grid.mesh_dim_names or (), meshes.grid.mesh.shape, strict=True))
    ranks = meshes.grid.mesh.tolist()
    return MeshFacts(axes=shape, ranks=ranks, as_requested=ranks == rank_grid(plan).tolist())


def collectives_entered() -> dict[str, int]:
    """Return the number of collectives that this rank has entered, by group: the group's ranks and a number.

    Groups of the same ranks are numbered in their order of creation, which is the same on all ranks.
    """
    counts: dict[str, int] = {}
    for group in list(dist.distributed_c10d._world.pg_map):  # noqa: SLF001 - the only list of all groups
        members = ",".join(map(str, dist.get_process_group_ranks(group)))
        number = sum(key.startswith(f"{members}#") for key in counts)
        counts[f"{members}#{number}"] = cast("_Counting", group)._get_sequence_number_for_group()  # noqa: SLF001 - kept for just this use
    return counts


def set_timeout(meshes: Meshes, seconds: float) -> None:
    """Set the timeout of every group's collectives; the default of groups made for a mesh is half an hour."""
    views = [mesh for mesh in (meshes.grid, meshes.dense, meshes.sparse) if mesh is not None]
    groups = [None, *(group for mesh in views for group in mesh.get_all_groups())]
    dist.barrier()  # all ranks have left the collectives with the old timeout
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)  # noqa: SLF001 - the only way to change it
