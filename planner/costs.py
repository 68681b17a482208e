"""The one place where the planner asks the closed form what plans cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulator.model import Model
from simulator.plan import Plan
from simulator.runtime import Runtime
from simulator.workload import Workload
from topology.cluster import Cluster
from topology.errors import BadCluster

if TYPE_CHECKING:
    from simulator.closed_form import EstimateTable
    from topology.profile import Profile


def cost_table(
    model: Model,
    cluster: Cluster,
    workload: Workload,
    plans: Sequence[Plan],
    runtime: Runtime,
    profile: Profile | None = None,
    *,
    each_on: Sequence[Cluster] = (),
) -> EstimateTable:
    """Return step time and memory of every plan. Raises BadCluster where the GPU's rates are not known.

    `each_on` names the cluster of each plan, where they run on such as differ from `cluster` in link rates only.
    """
    from simulator.closed_form import estimate_plans  # noqa: PLC0415 - keeps `--help` light

    require_plannable(cluster)
    return estimate_plans(model, cluster, workload, plans, runtime, profile, each_on=each_on)


def require_plannable(cluster: Cluster) -> None:
    """Raise BadCluster where the rates or the memory of the cluster's GPUs are not known."""
    if not plannable(cluster):
        raise BadCluster(
            f"the GPUs of {cluster.name} are of an unknown model",
            why="without its rates and memory nothing can be predicted, and they are not guessed",
            remedy="name it: planner probe --from FILE --gpu h100-sxm --out cluster.json",
        )


def plannable(cluster: Cluster) -> bool:
    """Return whether the rates and the memory of the cluster's GPUs are known."""
    if not cluster.gpu_count:
        return False
    kind = cluster.slowest_kind
    return bool(kind.peak_flops and kind.memory_bytes_per_s and kind.sm_count and cluster.gpu_memory_bytes)
