"""Process groups of a plan: one world mesh, seen three ways, in the order of `rank_grid`.

All meshes are unflattened from one root, because FSDP2 composes only with meshes of the same root:
    grid    pp, dp_replicate, dp_shard, cp, tp     who is who
    dense   pp, dp_replicate, fsdp, tp             parameters; fsdp = dp_shard x cp, since both see different tokens
    sparse  pp, dp_replicate, efsdp, ep            experts; ep takes its ranks from tp, cp and dp_shard, nearest first
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from simulator.plan import MESH_AXES, Plan, rank_grid
from topology.errors import BadPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    grid: DeviceMesh
    dense: DeviceMesh
    sparse: DeviceMesh | None  # None without experts on several ranks

    def coordinate(self, axis: str) -> int:
        """Return this rank's place along an axis of the grid."""
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
        if (fsdp * plan.tp) % plan.ep or plan.ep % plan.tp:
            raise BadPlan(
                f"ep {plan.ep} must divide dp_shard x cp x tp = {fsdp * plan.tp} and be a multiple of tp {plan.tp}",
                why="experts are spread over whole tensor-parallel groups",
            )
        shape = (plan.pp, plan.dp_replicate, fsdp * plan.tp // plan.ep, plan.ep)
        sparse = root._unflatten(0, shape, ("pp", "dp_replicate", "efsdp", "ep"))  # noqa: SLF001 - as above
    return Meshes(grid=grid, dense=dense, sparse=sparse)


def effective(meshes: Meshes, plan: Plan) -> dict[str, object]:
    """Return the mesh as torch reports it, and whether it is the one the plan asked for."""
    shape = dict(zip(meshes.grid.mesh_dim_names or (), meshes.grid.mesh.shape, strict=True))
    ranks = meshes.grid.mesh.tolist()
    return {"axes": shape, "ranks": ranks, "as_requested": ranks == rank_grid(plan).tolist()}


def entered() -> dict[str, int]:
    """Return how many collectives this rank has entered in each of its groups, by the ranks of the group.

    Groups of the same ranks are counted in the order of their making, which is the same on all of them.
    """
    counts: dict[str, int] = {}
    for group in list(dist.distributed_c10d._world.pg_map):  # noqa: SLF001 - the only list of all groups
        members = ",".join(map(str, dist.get_process_group_ranks(group)))
        number = sum(key.startswith(f"{members}#") for key in counts)
        counts[f"{members}#{number}"] = group._get_sequence_number_for_group()  # noqa: SLF001 - kept for just this use
    return counts


def set_timeout(meshes: Meshes, seconds: float) -> None:
    """Bound every collective of every group; groups made for a mesh would else wait for half an hour."""
    views = [mesh for mesh in (meshes.grid, meshes.dense, meshes.sparse) if mesh is not None]
    groups = [None, *(group for mesh in views for group in mesh.get_all_groups())]
    dist.barrier()  # nobody is still inside a collective that was begun with more patience
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)  # noqa: SLF001 - the only way to change it
