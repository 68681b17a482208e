"""Load the inputs that several commands take: clusters of a given size, profiles, sizes in bytes."""

from __future__ import annotations

import re
from pathlib import Path

from planner.io.calibrations import UNMEASURED, Calibrations
from planner.io.output import warn
from topology import codec
from topology.catalog.cluster_file import load_cluster
from topology.catalog.platform import take_gpus
from topology.cluster import Cluster
from topology.errors import BadCluster, UserError
from topology.profile.profile import read_profile
from topology.rates.node_rates import node_rates
from topology.rates.orders import irregular


def read_cluster(name: str, gpus: int | None = None, *, gpu: str | None = None) -> Cluster:
    """Return the named cluster, cut or extended to `gpus` GPUs if given.

    `name` is a catalogue name, a cluster file, a capture (`nvidia-smi topo -m` or NCCL XML; `gpu` names the GPU where
    the text does not), or `local` for this machine. A node with irregular links is not cut, since the placement decides
    which GPUs to use. Raises BadCluster when the cluster does not come in that size.
    """
    found = _read_capture(name, gpu)
    captured = found is not None or Path(name).is_file()
    if found is None:
        if gpu is not None:
            warn(f"warning: --gpu {gpu} is for captures; {name} states its own GPUs")
        found = load_cluster(name)
    if gpus is None or (gpus <= found.gpus_per_node and irregular(found)):
        return found
    return take_gpus(found, gpus) if captured else load_cluster(name, gpus=gpus)


def faulty_gpus(cluster: Cluster) -> tuple[int, ...]:
    """Return the indices of GPUs in the first node that are unhealthy or off its NVLink fabric."""
    if not cluster.gpu_count:
        return ()
    node = cluster.groups[0].node
    sound = set(node_rates(cluster).on_fabric)
    return tuple(gpu.index for position, gpu in enumerate(node.gpus) if position not in sound)


def _read_capture(name: str, gpu: str | None) -> Cluster | None:
    """Return the cluster of a capture or of this machine; None if `name` is neither."""
    text = codec.read_text(name) if name != "local" and Path(name).is_file() else None
    if name != "local" and (text is None or text.lstrip().startswith("{")):
        return None
    # What reads machines is loaded where one is read: most questions are about machines by name.
    from topology.probe.from_machine import probe_machine  # noqa: PLC0415 - as said above
    from topology.probe.from_text import probe_text  # noqa: PLC0415 - as said above

    found = probe_machine() if name == "local" else probe_text([(name, text or "")], gpu=gpu)
    if not found.gpu_count:
        raise BadCluster(
            "this machine has no GPU to plan for" if name == "local" else f"{name} shows no GPU",
            why="; ".join(finding.what for finding in found.findings),
            remedy="name a catalogue cluster, or a capture of another machine",
        )
    return found


def parse_bytes(text: str) -> float:
    """Parse a size such as `32GB`, `29.8 GiB` or `80g` into bytes. Raises UserError."""
    match = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,6})?)\s*([kmgt]?)(i?)b?\s*", text, flags=re.IGNORECASE)
    if match is None:
        raise UserError(f"{text!r} is not a size", why="a number and a unit: GB is 10^9, GiB 2^30", remedy="29.8GiB")
    number, prefix, binary = match.groups()
    power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    return float(number) * (1024.0 if binary else 1000.0) ** power


def measurements(path: Path | None, *, strict: bool = False) -> Calibrations:
    """Return the calibrations that a profile file gives; none without a path.

    With `strict` a profile of other GPUs, of another driver or of long ago is an error. Raises BadInput when the file is
    malformed or its values are impossible.
    """
    if path is None:
        return UNMEASURED
    # The fits are loaded with a profile, which most questions do not have.
    from simulator.fitting.calibration_fit import Calibrations as OfProfile  # noqa: PLC0415 - as said above

    return OfProfile(read_profile(path), strict=strict)


def warn_of_doubts(measured: Calibrations) -> None:
    """Warn on standard error where a profile may not describe the machines of the question."""
    for doubt in measured.all_doubts():
        warn(f"warning: {doubt}")
