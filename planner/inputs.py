"""What several commands load: clusters of a given size, and profiles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from planner.output import warn
from topology.errors import BadCluster, UserError

if TYPE_CHECKING:
    from topology.cluster import Cluster
    from topology.profile import Profile


def cluster_of(name: str, gpus: int | None = None, *, gpu: str | None = None) -> Cluster:
    """Return the named cluster, or as much of it as `gpus` needs.

    `name` is a catalogue name, a cluster file, a capture (`nvidia-smi topo -m`, NCCL XML; `gpu` says which GPU where
    the text does not), or `local` for the machine at hand. A node in which it matters which GPUs talk is not cut to
    size: which of them to leave out is for placement to say. Raises BadCluster when it does not come that size.
    """
    from topology.cluster_file import load_cluster  # noqa: PLC0415 - as above
    from topology.orders import irregular  # noqa: PLC0415 - keeps `--help` light
    from topology.platform import take_gpus  # noqa: PLC0415 - as above

    found = _captured(name, gpu)
    captured = found is not None or Path(name).is_file()
    if found is None:
        if gpu is not None:
            warn(f"warning: --gpu {gpu} is for captured texts; {name} says itself which GPUs it has")
        found = load_cluster(name)
    if gpus is None or (gpus <= found.gpus_per_node and irregular(found)):
        return found
    return take_gpus(found, gpus) if captured else load_cluster(name, gpus=gpus)


def unsound_gpus(cluster: Cluster) -> tuple[int, ...]:
    """Return the indices of GPUs in the first node that are unhealthy or off its NVLink fabric."""
    from topology.node_rates import node_rates  # noqa: PLC0415 - keeps `--help` light

    if not cluster.gpu_count:
        return ()
    node = cluster.groups[0].node
    sound = set(node_rates(cluster).on_fabric)
    return tuple(gpu.index for position, gpu in enumerate(node.gpus) if position not in sound)


def _captured(name: str, gpu: str | None) -> Cluster | None:
    """Return the cluster that a captured text or this machine describes; None if `name` is neither."""
    if name == "local":
        from topology.probe_machine import probe_machine  # noqa: PLC0415 - only what is asked for

        found = probe_machine()
    elif not Path(name).is_file():
        return None
    else:
        from topology import codec  # noqa: PLC0415 - as above
        from topology.probe import probe_text  # noqa: PLC0415 - as above

        text = codec.read_text(name)
        if text.lstrip().startswith("{"):
            return None
        found = probe_text([(name, text)], gpu=gpu)
    if not found.gpu_count:
        raise BadCluster(
            "this machine has no GPU to plan for" if name == "local" else f"{name} shows no GPU",
            why="; ".join(finding.what for finding in found.findings),
            remedy="name a catalogue cluster, or a capture of another machine",
        )
    return found


def bytes_of(text: str) -> float:
    """Return the bytes that a size such as `32GB`, `29.8 GiB` or `80g` names. Raises UserError."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([kmgt]?)(i?)b?\s*", text, flags=re.IGNORECASE)
    if match is None:
        raise UserError(f"{text!r} is not a size", why="a number and a unit: GB is 10^9, GiB 2^30", remedy="29.8GiB")
    number, prefix, binary = match.groups()
    power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    return float(number) * (1024.0 if binary else 1000.0) ** power


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
