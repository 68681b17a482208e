"""The `Profile`: what was measured on one machine, which estimates prefer to datasheets.

A profile is plain data with its provenance. It is checked when it is read: an impossible number (not finite, not
positive, or faster than the hardware) is refused with its path, because one such sample would distort every estimate.
Schema 1 holds collectives only; schema 2 adds operators, host overheads, contention and layers. Both are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from topology.cluster import Cluster
from topology.codec import convert, read_json, require_schema
from topology.errors import BadInput
from topology.profile.samples import (
    AXES,
    DIRECTIONS,
    OPERATOR_KINDS,
    OVERLAP_OPERATIONS,
    PHASES,
    REGIMES,
    ContentionSample,
    HostSample,
    LayerSample,
    OperatorSample,
    OverlapSample,
    Provenance,
    ServingSample,
)
from topology.ranges import Range, out_of_range
from topology.rates.groups import GroupShape, group_rates

PROFILE_SCHEMA_VERSION = 3
READABLE_VERSIONS = (1, 2, 3)
FASTEST_OVER_DATASHEET = 1.1  # nominal link rates are rounded down by up to 6 % (26.56 GB/s of "25" on H100)

RANGES: dict[str, Range] = {"count": (1, 10**9), "ranks": (1, 1 << 20), "nodes": (1, 1 << 20), "gpus": (0, 1 << 20)}
# A launch alone takes a microsecond, a call of the host a tenth of that.
FASTEST_S = 1e-8
# Most samples of one kind, and most of layers: all are fitted together, within seconds. A calibration measures some 700
# operators and 70 layers.
MOST_SAMPLES, MOST_LAYER_RUNS = 20_000, 512
# Layers at most this wide measure host time: nobody trains so narrow a model. Samples with several layers give the host
# time of each.
NARROW_WIDTH, NARROW_LAYERS = 512, 8

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
_LAUNCHES = ("queued", "graph", "eager", "isolated")


def _min_sent_share(op: str, ranks: int) -> float:
    """Return the least bytes a rank sends per byte of nccl-tests' size column, in-switch reduction (NVLS) included."""
    return 1.0 if op in {"broadcast", "send_recv"} else (ranks - 1) / ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """One measured collective: `nbytes` is nccl-tests' size column, `time_s` device time of one call.

    `launch` says what the time contains: `queued` and `graph` are device time, `eager` and `isolated` include the host
    (simulator.collectives.cost.LaunchMode).
    """

    op: str
    ranks: int
    nodes: int
    nbytes: int
    time_s: float
    launch: str = "queued"
    run: str = ""  # name in Profile.runs; empty: the profile's own head has the provenance
    at_s: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.op, self.ranks, self.nodes, self.nbytes, self.launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything measured on one machine. `taken_at` is ISO 8601; `versions` maps a library to its version.

    `runs` has the provenance of the samples, by the name in their `run`; `missing` what could not be measured, and why.
    `serving` are steps of engines that serve. `overlap_rates` are those of `simulator.overlap.modes`, fitted to the
    samples of `overlap`.
    """

    machine: str
    gpu: str
    schema_version: int = PROFILE_SCHEMA_VERSION
    driver: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    taken_at: str = ""
    collectives: tuple[CollectiveSample, ...] = ()
    runs: dict[str, Provenance] = field(default_factory=dict)
    operators: tuple[OperatorSample, ...] = ()
    host: tuple[HostSample, ...] = ()
    contention: tuple[ContentionSample, ...] = ()
    layers: tuple[LayerSample, ...] = ()
    overlap: tuple[OverlapSample, ...] = ()
    overlap_rates: dict[str, float] = field(default_factory=dict)
    serving: tuple[ServingSample, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def calibrated(self) -> bool:
        """Whether the profile has samples of its GPUs other than collectives."""
        return any(samples for name, samples in self.sample_lists().items() if name not in {"collectives", "host"})

    def sample_lists(self) -> dict[str, tuple[Any, ...]]:
        """Return the lists of samples by the name of their field."""
        return {name: getattr(self, name) for name in SAMPLE_LISTS.values()}

    def with_samples(self, change: Callable[[tuple[Any, ...]], Iterable[Any]]) -> Profile:
        """Return the profile with every list of samples changed."""
        lists: dict[str, Any] = {name: tuple(change(samples)) for name, samples in self.sample_lists().items()}
        return replace(self, **lists)


# The field of a profile that holds the samples of a type.
SAMPLE_LISTS: dict[type, str] = {
    CollectiveSample: "collectives",
    OperatorSample: "operators",
    HostSample: "host",
    ContentionSample: "contention",
    LayerSample: "layers",
    OverlapSample: "overlap",
    ServingSample: "serving",
}


def read_profile(path: str | Path, *, cluster: Cluster | None = None) -> Profile:
    """Return the profile in a JSON file, checked. Raises BadInput with the path of the first thing that is wrong."""
    data = read_json(path)
    require_schema(data, PROFILE_SCHEMA_VERSION, where=str(path))
    profile = convert(data, Profile, where=str(path))
    check_profile(profile, where=str(path), cluster=cluster)
    return profile


def check_profile(profile: Profile, *, where: str = "profile", cluster: Cluster | None = None) -> None:
    """Raise BadInput if a sample cannot be true. With `cluster`, link rates above its datasheet are refused too."""
    if profile.schema_version not in READABLE_VERSIONS:
        raise BadInput(
            f"{where}: $.schema_version is {profile.schema_version}",
            why=f"this release reads versions {' and '.join(map(str, READABLE_VERSIONS))}",
            remedy="take the profile again, or update meshwright",
        )
    if problem := next(out_of_range(profile, RANGES, path="$"), None):
        raise BadInput(f"{where}: {problem}", remedy="take the profile again")
    for name in SAMPLE_LISTS.values():
        most, found = MOST_LAYER_RUNS if name == "layers" else MOST_SAMPLES, len(getattr(profile, name))
        if found > most:
            raise BadInput(f"{where}: $.{name} has {found:,} samples", why=f"at most {most:,} are fitted")
    for index, sample in enumerate(profile.collectives):
        _check_sample(sample, f"{where}: $.collectives[{index}]", cluster)
    for kind, name in SAMPLE_LISTS.items():
        for index, sample in enumerate(getattr(profile, name) if kind is not CollectiveSample else ()):
            for field_name, seconds in sample.times.items():
                path = f"{where}: $.{name}[{index}].{field_name}"
                if not math.isfinite(seconds) or seconds <= 0:
                    raise BadInput(f"{path} is {seconds}", why="a time is finite and positive")
                if seconds < FASTEST_S:
                    raise BadInput(f"{path} is {seconds:g}", why=f"nothing takes less than {FASTEST_S:g} s")
    for index, operator in enumerate(profile.operators):
        _check_operator(operator, f"{where}: $.operators[{index}]", cluster)
    for index, pair in enumerate(profile.overlap):
        _check_overlap(pair, f"{where}: $.overlap[{index}]")
    for index, step in enumerate(profile.serving):
        _check_serving(step, f"{where}: $.serving[{index}]")
    for name, rate in profile.overlap_rates.items():
        if not math.isfinite(rate) or rate < 0:
            raise BadInput(f"{where}: $.overlap_rates.{name} is {rate}", why="a rate is finite and not negative")
    for index, layer in enumerate(profile.layers):
        if layer.data_s is not None and layer.data_s >= layer.step_s:
            raise BadInput(
                f"{where}: $.layers[{index}].data_s is {layer.data_s:g}",
                why=f"it is a part of the step, which took {layer.step_s:g} s",
            )
        if any(type(layer.model.get(name, 0)) is not int for name in ("layers", "hidden")):
            raise BadInput(f"{where}: $.layers[{index}].model: layers and hidden are whole numbers")
        if not 1 <= layer.layers <= (NARROW_LAYERS if layer.model.get("hidden", 0) <= NARROW_WIDTH else 2):
            raise BadInput(
                f"{where}: $.layers[{index}] has {layer.layers} layers",
                why="a runtime is calibrated on one and two layers, never on the runs that are to be predicted",
            )


def _check_serving(sample: ServingSample, where: str) -> None:
    if sample.phase not in PHASES:
        raise BadInput(f"{where}.phase is {sample.phase!r}", remedy=f"use one of {', '.join(PHASES)}")
    if sample.tp < 1 or sample.batch < 1 or (sample.phase in {"decode", "prefill"} and sample.context < 1):
        raise BadInput(
            f"{where} is of {sample.batch:g} sequences, {sample.context} tokens, tp {sample.tp}",
            why="each is at least 1",
        )


def _check_overlap(sample: OverlapSample, where: str) -> None:
    if sample.operation not in OVERLAP_OPERATIONS:
        raise BadInput(
            f"{where}.operation is {sample.operation!r}", remedy=f"use one of {', '.join(OVERLAP_OPERATIONS)}"
        )
    sizes = (sample.rows, sample.depth, *sample.columns)
    if not sample.columns or min(sizes) < 1 or sample.ranks < 2:
        raise BadInput(f"{where} is of {sizes} on {sample.ranks} ranks", why="sizes are positive, ranks two or more")
    parts = ("shard_product_s", "slice_product_s", "first_s", "slice_collective_s", "copy_s", "hop_s")
    for name in parts:
        value = getattr(sample, name)
        if not math.isfinite(value) or value < 0:
            raise BadInput(f"{where}.{name} is {value}", why="a time is finite, 0 where it was not measured")


def _check_operator(sample: OperatorSample, where: str, cluster: Cluster | None) -> None:
    for name, value, known in (
        ("kind", sample.kind, OPERATOR_KINDS),
        ("direction", sample.direction, DIRECTIONS),
        ("regime", sample.regime, REGIMES),
    ):
        if value not in known:
            raise BadInput(f"{where}.{name} is {value!r}", remedy=f"use one of {', '.join(known)}")
    if not sample.shape or any(size <= 0 for size in sample.shape.values()):
        raise BadInput(f"{where}.shape is {sample.shape}", why="axes have positive sizes")
    needed = (*AXES.get(sample.kind, ()), *AXES.get(sample.name, ()))
    if absent := [axis for axis in needed if axis not in sample.shape]:
        raise BadInput(
            f"{where}.shape is without {', '.join(absent)}", why="the operator's sizes do not follow from the others"
        )
    if sample.kind != "matmul" or cluster is None:
        return
    shape = sample.shape
    rate = 2.0 * shape.get("batch", 1) * shape["m"] * shape["n"] * shape["k"] / sample.seconds
    peak = max(cluster.slowest_kind.peak_flops.values(), default=math.inf)
    if rate > FASTEST_OVER_DATASHEET * peak:
        raise BadInput(
            f"{where}.seconds means {rate / 1e12:.0f} TFLOP/s",
            why=f"the GPU's fastest type does {peak / 1e12:.0f}",
            remedy="check that the kernel had ended when it was timed",
        )


def _check_sample(sample: CollectiveSample, where: str, cluster: Cluster | None) -> None:
    if sample.op not in _OPS:
        raise BadInput(f"{where}.op is {sample.op!r}", remedy=f"use one of {', '.join(_OPS)}")
    if sample.launch not in _LAUNCHES:
        raise BadInput(f"{where}.launch is {sample.launch!r}", remedy=f"use one of {', '.join(_LAUNCHES)}")
    if not math.isfinite(sample.time_s) or sample.time_s <= 0:
        raise BadInput(f"{where}.time_s is {sample.time_s}", why="a time is finite and positive")
    if sample.time_s < FASTEST_S:
        raise BadInput(f"{where}.time_s is {sample.time_s:g}", why=f"nothing takes less than {FASTEST_S:g} s")
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
    rate = sample.nbytes * _min_sent_share(sample.op, sample.ranks) / sample.time_s
    if rate > FASTEST_OVER_DATASHEET * limit:
        raise BadInput(
            f"{where}.time_s means {rate / 1e9:.0f} GB/s out of each GPU",
            why=f"its links carry {limit / 1e9:.0f} GB/s",
            remedy="check that bytes are the whole buffer and that the kernel had ended when it was timed",
        )


def _wire_limit(cluster: Cluster, sample: CollectiveSample) -> float:
    """Return the highest rate at which one rank can send, in bytes/s."""
    per_node = -(-sample.ranks // sample.nodes)
    rates = group_rates(cluster, GroupShape(ranks=sample.ranks, ranks_per_node=per_node))
    kind = cluster.slowest_kind
    inside = max(rates.intra_bytes_per_s, kind.nvlink_links * kind.nvlink_bytes_per_s, kind.pcie_bytes_per_s)
    return inside if per_node > 1 else rates.inter_bytes_per_s or math.inf
