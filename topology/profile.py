"""What was measured on one machine: the `Profile` that estimates trust before any datasheet.

A profile is plain data with where and when it was taken. It is checked on the way in: a number that cannot be (not
finite, not positive, or faster than the hardware) is refused with its path, because one such sample would bend every
plan that follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from topology.cluster import Cluster
from topology.codec import convert, read_json
from topology.errors import BadInput
from topology.groups import GroupShape, group_rates

PROFILE_SCHEMA_VERSION = 1
FASTEST_OVER_DATASHEET = 1.1  # nominal link rates are rounded down by up to 6 % (26.56 GB/s of "25" on H100)

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")


def _least_sent(op: str, ranks: int) -> float:
    """Return the bytes a rank must send for each byte of the size column. A switch that adds makes an all-reduce one."""
    return 1.0 if op in {"broadcast", "send_recv"} else (ranks - 1) / ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """One measured collective: `nbytes` is nccl-tests' size column, `time_s` device time of one call.

    `launch` says what the time contains: `queued` and `graph` are device time, `eager` and `isolated` include the host
    (simulator.collectives.LaunchMode).
    """

    op: str
    ranks: int
    nodes: int
    nbytes: int
    time_s: float
    launch: str = "queued"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything measured on one machine. `taken_at` is ISO 8601; `versions` maps a library to its version."""

    machine: str
    gpu: str
    schema_version: int = PROFILE_SCHEMA_VERSION
    driver: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    taken_at: str = ""
    collectives: tuple[CollectiveSample, ...] = ()


def read_profile(path: str | Path, *, cluster: Cluster | None = None) -> Profile:
    """Return the profile in a JSON file, checked. Raises BadInput with the path of the first thing that is wrong."""
    profile = convert(read_json(path), Profile, where=str(path))
    check_profile(profile, where=str(path), cluster=cluster)
    return profile


def check_profile(profile: Profile, *, where: str = "profile", cluster: Cluster | None = None) -> None:
    """Raise BadInput if a sample cannot be true. With `cluster`, link rates above its datasheet are refused too."""
    if profile.schema_version != PROFILE_SCHEMA_VERSION:
        raise BadInput(
            f"{where}: $.schema_version is {profile.schema_version}",
            why=f"this release reads version {PROFILE_SCHEMA_VERSION}",
            remedy="take the profile again",
        )
    for index, sample in enumerate(profile.collectives):
        _check_sample(sample, f"{where}: $.collectives[{index}]", cluster)


def _check_sample(sample: CollectiveSample, where: str, cluster: Cluster | None) -> None:
    if sample.op not in _OPS:
        raise BadInput(f"{where}.op is {sample.op!r}", remedy=f"use one of {', '.join(_OPS)}")
    if not math.isfinite(sample.time_s) or sample.time_s <= 0:
        raise BadInput(f"{where}.time_s is {sample.time_s}", why="a time is finite and positive")
    if sample.nbytes <= 0:
        raise BadInput(f"{where}.nbytes is {sample.nbytes}", why="a message has at least one byte")
    if sample.ranks < 2 or not 1 <= sample.nodes <= sample.ranks:
        raise BadInput(
            f"{where} has {sample.ranks} ranks on {sample.nodes} nodes",
            why="a group has two or more, a node one or more",
        )
    if cluster is None:
        return
    limit = _wire_limit(cluster, sample)
    rate = sample.nbytes * _least_sent(sample.op, sample.ranks) / sample.time_s
    if rate > FASTEST_OVER_DATASHEET * limit:
        raise BadInput(
            f"{where}.time_s means {rate / 1e9:.0f} GB/s out of each GPU",
            why=f"its links carry {limit / 1e9:.0f} GB/s",
            remedy="check that bytes are the whole buffer and that the kernel had ended when it was timed",
        )


def _wire_limit(cluster: Cluster, sample: CollectiveSample) -> float:
    """Return the most one rank can send, bytes per second."""
    per_node = -(-sample.ranks // sample.nodes)
    rates = group_rates(cluster, GroupShape(ranks=sample.ranks, ranks_per_node=per_node))
    kind = cluster.slowest_kind
    inside = max(rates.intra_bytes_per_s, kind.nvlink_links * kind.nvlink_bytes_per_s, kind.pcie_bytes_per_s)
    return inside if per_node > 1 else rates.inter_bytes_per_s or math.inf
