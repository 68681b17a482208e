"""What several commands load: clusters of a given size, and profiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from topology.errors import BadInput

if TYPE_CHECKING:
    from topology.cluster import Cluster
    from topology.profile import Profile


def cluster_of(name: str, gpus: int | None = None) -> Cluster:
    """Return the named cluster, or as much of it as `gpus` needs. Raises BadCluster when it does not come that size."""
    from topology.cluster_file import load_cluster  # noqa: PLC0415 - keeps `--help` light

    return load_cluster(name, gpus=gpus)


def profile_of(path: Path | None) -> Profile | None:
    """Return a profile file's content, or None. Raises BadInput when it is malformed or of a newer schema."""
    if path is None:
        return None
    from topology import codec  # noqa: PLC0415 - keeps `--help` light
    from topology.profile import SCHEMA_VERSION, Profile  # noqa: PLC0415 - keeps `--help` light

    data = codec.read_json(path)
    version = data.get("schema_version", SCHEMA_VERSION) if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise BadInput(
            f"{path} is a profile of schema {version}",
            why=f"this version reads up to {SCHEMA_VERSION}",
            remedy="update meshwright, or measure again",
        )
    return codec.convert(data, Profile, where=str(path))
