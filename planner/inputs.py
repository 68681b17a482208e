"""What several commands load: clusters of a given size, and profiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from planner.output import warn

if TYPE_CHECKING:
    from topology.cluster import Cluster
    from topology.profile import Profile


def cluster_of(name: str, gpus: int | None = None) -> Cluster:
    """Return the named cluster, or as much of it as `gpus` needs. Raises BadCluster when it does not come that size."""
    from topology.cluster_file import load_cluster  # noqa: PLC0415 - keeps `--help` light

    return load_cluster(name, gpus=gpus)


def profile_of(path: Path | None, cluster: Cluster | None = None) -> Profile | None:
    """Return a profile file's content, checked against `cluster` if given, or None without a path.

    Raises BadInput when it is malformed or cannot be true. A profile of other GPUs is used, with a warning.
    """
    if path is None:
        return None
    from topology.profile import read_profile  # noqa: PLC0415 - keeps `--help` light

    profile = read_profile(path, cluster=cluster)
    if cluster is not None:
        kind = cluster.slowest_kind
        names = {name.casefold() for name in (kind.name, kind.title, *kind.aliases)}
        if profile.gpu.casefold() not in names:
            warn(f"warning: the profile was taken on {profile.gpu}, the cluster has {kind.title}")
    return profile
