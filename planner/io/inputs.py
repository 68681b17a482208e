"""Load the inputs that several commands take: clusters of a given size, profiles, sizes in bytes."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from planner.io.output import warn
from simulator.fitting.calibrations import Calibrations
from topology import codec
from topology.catalog.cluster_file import load_cluster
from topology.catalog.gpus import gpu_kind, gpu_variants
from topology.catalog.platform import take_gpus
from topology.cluster import Cluster
from topology.errors import UserError
from topology.rates.node_rates import node_rates
from topology.rates.orders import irregular


def read_cluster(name: str, gpus: int | None = None, *, gpu: str | None = None) -> Cluster:
    """Return the named cluster, cut or extended to `gpus` GPUs if given.

    `name` is a catalogue name, a cluster file, a capture (`nvidia-smi topo -m` or NCCL XML; `gpu` names the GPU where
    the text does not), or `local` for this machine. A node with irregular links is not cut, since the placement decides
    which GPUs to use. Raises BadCluster when the cluster does not come in that size, UserError where it states other
    GPUs than `gpu`.
    """
    # The reader of captures takes longer to import than a search for a known machine takes.
    written = name.lstrip().startswith(("{", "["))  # JSON as the argument itself
    captured = not written and (name == "local" or codec.is_file(name))
    found = import_module("planner.io.captures").read_capture(name, gpu) if captured else None
    if found is None:
        found = load_cluster(name)
        if gpu is not None:
            _require_gpu(gpu, found, name)
    if gpus is None or (gpus <= found.gpus_per_node and irregular(found)):
        return found
    return take_gpus(found, gpus) if captured else load_cluster(name, gpus=gpus)


def _require_gpu(gpu: str, cluster: Cluster, name: str) -> None:
    """Raise UserError if a GPU model is said that a cluster, which states its own, does not have."""
    if gpu.strip().isdigit():
        raise UserError(f"--gpu {gpu.strip()} is no GPU model", remedy=f"--gpus {gpu.strip()} for that many GPUs")
    said, has = {gpu_kind(gpu).name, *gpu_variants(gpu)}, [kind.name for kind in cluster.gpu_kinds]
    if not said & {*has}:
        raise UserError(
            f"--gpu {gpu}, but {name} has {', '.join(has)}",
            why="--gpu names the GPUs of a captured text that does not say them",
            remedy="leave --gpu out, or name another --cluster",
        )


def refuse_empty(**said: str | None) -> None:
    """Raise UserError for flags that are stated and empty."""
    for name, word in said.items():
        if word is not None and not word.strip():
            raise UserError(f"--{name} is empty", remedy=f"--{name} with a name, or without the flag for the default")


def faulty_gpus(cluster: Cluster) -> tuple[int, ...]:
    """Return the indices of GPUs in the first node that are unhealthy or off its NVLink fabric."""
    if not cluster.gpu_count:
        return ()
    node = cluster.groups[0].node
    sound = set(node_rates(cluster).on_fabric)
    return tuple(gpu.index for position, gpu in enumerate(node.gpus) if position not in sound)


def parse_bytes(text: str) -> float:
    """Parse a size such as `32GB`, `29.8 GiB`, `80g` or `1e9` into bytes. Raises UserError."""
    number = r"\d{1,12}(?:\.\d{1,6})?(?:e\+?(?:\d|1[0-5]))?"
    match = re.fullmatch(rf"({number})\s*([kmgt]?)(i?)b?", text.strip(), flags=re.IGNORECASE)
    if match is None:
        why = "a number of at most 12 digits, in bytes or with a unit: GB is 10^9, GiB 2^30"
        raise UserError(f"{text[:60]!r} is not a size", why=why, remedy="such as 512MiB, 1GB or 1e9")
    value, prefix, binary = match.groups()
    power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    return float(value) * (1024.0 if binary else 1000.0) ** power


TIMES_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_seconds(text: str, flag: str, *, range_s: tuple[float, float], units: str, why: str, example: str) -> float:
    """Return the seconds of `90s`, `1.5m` or `12h`, in one of `units`, and of a plain number if these end with `?`.

    Raises UserError, with `why`, for anything else, and for what is outside of `range_s`.
    """
    known = f"[{units.removesuffix('?')}]{'?' if units.endswith('?') else ''}"
    match = re.fullmatch(rf"([0-9]{{1,7}}(?:\.[0-9]{{1,3}})?)\s*({known})", text[:100].strip().lower())
    seconds = float(match[1]) * TIMES_S[match[2] or "s"] if match else -1.0
    if not range_s[0] <= seconds <= range_s[1]:
        raise UserError(f"{flag} is {text[:40]!r}", why=why, remedy=f"{flag} {example}")
    return seconds


def measurements(path: Path | None, *, strict: bool = False) -> Calibrations:
    """Return the calibrations of a profile file; empty ones without a path.

    With `strict`, a profile of other GPUs, of another driver or of long ago is an error. Raises BadInput when the file
    is malformed or its values are impossible.
    """
    if path is None:
        return Calibrations(None, strict=strict)
    from topology.profile.profile import read_profile  # noqa: PLC0415 - most questions have no profile

    return Calibrations(read_profile(path), strict=strict)


def warn_of_doubts(measured: Calibrations) -> None:
    """Warn on standard error where a profile may not describe the machines of the question."""
    for doubt in measured.all_doubts():
        warn(f"warning: {doubt}")
