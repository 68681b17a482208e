"""Which rank runs where: a plan's mesh coordinates laid over nodes and GPUs. Pure."""

from __future__ import annotations

import numpy as np

from simulator.plan import MESH_AXES, Plan

SHOWN_NODES = 32  # a page of rows; what is left follows the same pattern


def placement_rows(plan: Plan, gpus_per_node: int, *, nodes: int = SHOWN_NODES) -> list[dict[str, int]]:
    """Return one row a rank on the first `nodes` nodes: rank, node, gpu and its coordinate along every mesh axis.

    The mapping is `simulator.plan.rank_grid`'s: C order over `MESH_AXES`; `plan.placement` moves ranks between GPUs.
    """
    shape = tuple(int(getattr(plan, axis)) for axis in MESH_AXES)
    place = plan.placement or range(plan.gpus)
    rows = []
    for rank, where in enumerate(place):
        node, gpu = divmod(int(where), gpus_per_node)
        if node >= nodes:
            continue
        at = np.unravel_index(rank, shape)
        rows.append({"rank": rank, "node": node, "gpu": gpu, **{a: int(c) for a, c in zip(MESH_AXES, at, strict=True)}})
    return rows


def axes_used(plan: Plan) -> list[str]:
    """Return the mesh axes that are longer than one, the widest-reaching first."""
    return [axis for axis in MESH_AXES if int(getattr(plan, axis)) > 1]
