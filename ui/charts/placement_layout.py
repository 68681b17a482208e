"""Which rank runs on which GPU, with its mesh coordinates. Pure functions of a plan."""

from __future__ import annotations

import numpy as np

from simulator.config.plan import MESH_AXES, Plan

AXIS_NAMES = {
    "pp": "pipeline stage",
    "dp_replicate": "replica",
    "dp_shard": "FSDP shard",
    "cp": "context",
    "tp": "tensor",
}
SHOWN_NODES = 32  # one page; the remaining nodes follow the same pattern


def placement_rows(plan: Plan, gpus_per_node: int) -> list[dict[str, int]]:
    """Return one row per rank on the first `SHOWN_NODES` nodes: rank, node, gpu and its coordinate along every mesh
    axis.

    The mapping is `simulator.config.plan.rank_grid`'s: C order over `MESH_AXES`; `plan.placement` moves ranks between
    GPUs.
    """
    shape = tuple(int(getattr(plan, axis)) for axis in MESH_AXES)
    place = plan.placement or range(plan.gpus)
    rows = []
    for rank, where in enumerate(place):
        node, gpu = divmod(int(where), gpus_per_node)
        if node >= SHOWN_NODES:
            continue
        at = np.unravel_index(rank, shape)
        rows.append({"rank": rank, "node": node, "gpu": gpu, **{a: int(c) for a, c in zip(MESH_AXES, at, strict=True)}})
    return rows


def axes_used(plan: Plan) -> list[str]:
    """Return the mesh axes larger than one, those that span most nodes first."""
    return [axis for axis in MESH_AXES if int(getattr(plan, axis)) > 1]
