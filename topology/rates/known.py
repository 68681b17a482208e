"""Whether a cluster's GPUs are known well enough to cost work on them."""

from __future__ import annotations

from topology.cluster import Cluster
from topology.errors import BadCluster


def plannable(cluster: Cluster) -> bool:
    """Return whether the rates and the memory of the cluster's GPUs are known."""
    named = {kind.name for kind in cluster.gpu_kinds}
    used = {gpu.kind for group in cluster.groups for gpu in group.node.gpus}
    if not cluster.gpu_count or not used <= named:
        return False
    kind = cluster.slowest_kind
    return bool(kind.peak_flops and kind.memory_bytes_per_s and kind.sm_count and cluster.gpu_memory_bytes)


def require_plannable(cluster: Cluster) -> None:
    """Raise BadCluster where there are no GPUs, or where their rates or memory are not known."""
    if not cluster.gpu_count:
        raise BadCluster(f"{cluster.name} shows no GPU", remedy="capture nvidia-smi topo -m, which lists them")
    if not plannable(cluster):
        raise BadCluster(
            f"the GPUs of cluster {cluster.name} are of an unknown model",
            why="without its rates and memory nothing can be predicted, and they are not guessed",
            remedy="name it with the capture, such as --gpu h100-sxm; "
            "planner probe --from CAPTURE --gpu h100-sxm --out cluster.json makes a cluster file",
        )
