"""The result of one bounded measurement of a machine: copy rates, compute rates of each GPU, times of collectives.

The executor appends one JSON record per line, so a run that is stopped keeps everything recorded so far;
`measurement_from_records` joins the lines. A partial result is valid: `missing` lists what was not measured, and why.

`with_measured_rates` writes rates into the links of a cluster, so that plans use them: a link gets the rate that one
flow reached over it, in addition to its nominal rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from topology.cluster import Cluster, Link, LinkKind, LinkState, Node, Source
from topology.codec import JsonObject, convert, read_json
from topology.errors import BadInput
from topology.profile.profile import RANGES, CollectiveSample, Profile
from topology.ranges import out_of_range

MEASUREMENT_SCHEMA_VERSION = 1
HOST = "host"
TRUSTED_SHARE = 0.75  # of the nominal rate; healthy copies reach 88 % (NVIDIA/nccl#1264)
CEILING = 1.1  # of the nominal rate: the slack that `topology.catalog.verify` allows


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One stream of copies. Ends are `gpu<index>` or `host`; the rate is the median of the rounds.

    `spread` is (largest - smallest) / median. `correct` is False when the bytes that arrived were not those sent, None
    where they were not compared. `peer` says whether the driver allows peer access between the two GPUs.
    """

    src: str
    dst: str
    bytes_per_s: float
    spread: float = 0.0
    correct: bool | None = None
    peer: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSet:
    """Flows that ran at the same time. `pattern` says how they were chosen (`pair`, `two_disjoint`, `ring`, ...)."""

    pattern: str
    nbytes: int
    flows: tuple[Flow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """Clocks and limits of a GPU at one moment; None where the driver does not say."""

    gpu: int
    sm_clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSample:
    """One GPU alone (`burst`, and memory) and all together for seconds (`sustained`).

    `memory_bytes_per_s` counts bytes read plus bytes written by a copy inside the GPU.
    """

    gpu: int
    dtype: str = "bfloat16"
    size: int = 0  # the matmul is size x size x size
    memory_bytes_per_s: float | None = None
    burst_flops: float | None = None
    sustained_flops: float | None = None
    before: GpuState | None = None
    during: GpuState | None = None
    after: GpuState | None = None

    @property
    def throttle(self) -> tuple[str, ...]:
        """Reasons for lower clocks seen at any of the three moments."""
        seen = [state.throttle or () for state in (self.before, self.during, self.after) if state is not None]
        return tuple(dict.fromkeys(reason for reasons in seen for reason in reasons))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSample:
    """One collective on certain GPUs: median of `iterations` calls, the slowest rank counts.

    `spread` is (90th - 10th percentile) / median. `alongside` counts other groups of the same size that ran the same
    at the same time: zero is the group alone.
    """

    sample: CollectiveSample
    gpus: tuple[int, ...]
    iterations: int
    spread: float = 0.0
    alongside: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Everything that one run measured. `complete` is False when `missing` is not empty.

    `late` are the entries of `missing` for which no time was left; the others failed.
    """

    machine: str
    device: str  # "cuda", or "cpu" for a dry run of the code without meaning for any machine
    taken_at: str  # ISO 8601, UTC
    command: str = ""
    driver: str = ""
    versions: dict[str, str] | None = None
    gpus: tuple[str, ...] = ()  # names by index
    uuids: tuple[str, ...] = ()
    seconds: float = 0.0
    flows: tuple[FlowSet, ...] = ()
    compute: tuple[ComputeSample, ...] = ()
    groups: tuple[GroupSample, ...] = ()
    missing: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    schema_version: int = MEASUREMENT_SCHEMA_VERSION

    @property
    def complete(self) -> bool:
        return not self.missing

    def pairs(self) -> dict[tuple[int, int], Flow]:
        """Return the copies between two GPUs with nothing else running, by (source, destination)."""
        return {
            (gpu_index(flow.src), gpu_index(flow.dst)): flow
            for flows in self.flows
            if flows.pattern == "pair"
            for flow in flows.flows
        }

    def host(self, pattern: str) -> dict[int, Flow]:
        """Return the flows of a single-GPU pattern (`host_to_device` or `device_to_host`), by GPU."""
        return {
            gpu_index(flow.dst if flow.src == HOST else flow.src): flow
            for flows in self.flows
            if flows.pattern == pattern
            for flow in flows.flows
        }


def gpu_index(vertex: str) -> int:
    """Return 3 for `gpu3`. Raises BadInput for any other name."""
    digits = vertex.removeprefix("gpu")
    if digits == vertex or not (digits.isascii() and digits.isdigit() and len(digits) <= 6):
        raise BadInput(f"{vertex!r} is not a GPU", remedy="flows run between gpu<index> and host")
    return int(digits)


def measurement_from_records(records: Iterable[JsonObject]) -> Measurement:
    """Join the records of a run: each has a `kind` (`header`, `flows`, `compute`, `group`, `missing`) and its fields.

    Raises BadInput for a record that is none of these, or when no header was written.
    """
    header: JsonObject | None = None
    flows: list[FlowSet] = []
    compute: dict[int, ComputeSample] = {}
    groups: list[GroupSample] = []
    missing: dict[str, bool] = {}
    for number, record in enumerate(records):
        where = f"record {number}"
        body = {key: value for key, value in record.items() if key != "kind"}
        match record.get("kind"):
            case "header":
                # A later header adds what its part of the run knows, such as the version of NCCL.
                versions = {**((header or {}).get("versions") or {}), **(body.get("versions") or {})}
                header = {**(header or {}), **body, "versions": versions}
            case "flows":
                flows.append(convert(body, FlowSet, where=where))
            case "compute":
                sample = convert(body, ComputeSample, where=where)
                compute[sample.gpu] = sample
            case "group":
                groups.append(convert(body, GroupSample, where=where))
            case "missing":
                missing[str(body.get("what", "something"))] = bool(body.get("late", False))
            case other:
                raise BadInput(f"{where} is of kind {other!r}", why="this version does not know it")
    if header is None:
        raise BadInput("the measurement wrote no header", why="it stopped before it had found a device")
    found = convert(header, Measurement, where="header")
    return check_measurement(
        replace(
            found,
            flows=tuple(flows),
            compute=tuple(compute[gpu] for gpu in sorted(compute)),
            groups=tuple(groups),
            missing=(*found.missing, *missing),
            late=tuple(what for what, late in missing.items() if late),
        )
    )


def read_measurement(path: str | Path) -> Measurement:
    """Return a measurement file, checked. Raises BadInput."""
    return check_measurement(convert(read_json(path), Measurement, where=str(path)))


def check_measurement(measured: Measurement) -> Measurement:
    """Return `measured` unchanged if all its numbers are possible. Raises BadInput otherwise."""
    if measured.schema_version != MEASUREMENT_SCHEMA_VERSION:
        raise BadInput(
            f"the measurement has schema version {measured.schema_version}",
            why=f"this release reads version {MEASUREMENT_SCHEMA_VERSION}",
            remedy="measure again",
        )
    if problem := next(out_of_range(measured, RANGES, path="$"), None):
        raise BadInput(f"the measurement cannot be: {problem}", remedy="measure again")
    for flows in measured.flows:
        for flow in flows.flows:
            if not (math.isfinite(flow.bytes_per_s) and flow.bytes_per_s > 0):
                raise BadInput(f"the flow {flow.src} to {flow.dst} has a rate of {flow.bytes_per_s}")
            for end in (flow.src, flow.dst):
                if end != HOST:
                    gpu_index(end)
    for sample in measured.compute:
        for rate in (sample.memory_bytes_per_s, sample.burst_flops, sample.sustained_flops):
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise BadInput(f"GPU {sample.gpu} has a rate of {rate}")
    for group in measured.groups:
        if not (math.isfinite(group.sample.time_s) and group.sample.time_s > 0):
            raise BadInput(f"{group.sample.op} on GPUs {group.gpus} took {group.sample.time_s} s")
    return measured


def profile_from_measurement(measured: Measurement, *, gpu: str) -> Profile:
    """Return the collectives that ran alone as a Profile for the GPU model `gpu`.

    Groups that ran concurrently with others are left out: a profile holds the time of a collective by itself.
    """
    return Profile(
        machine=measured.machine,
        gpu=gpu,
        driver=measured.driver,
        versions=measured.versions or {},
        taken_at=measured.taken_at,
        collectives=tuple(group.sample for group in measured.groups if not group.alongside),
    )


SLOWED = 0.75  # of the rate alone; above it two flows do not share a way


def shared_groups(measured: Measurement) -> list[list[int]]:
    """Return the groups of GPUs that share an uplink to the host, found by copying to or from two of them at once.

    Two flows on separate uplinks keep their rates, two on one uplink get half each; both must fall below `SLOWED` of
    their rate alone. Sharing is taken to be transitive.
    """
    edges: set[tuple[int, int]] = set()
    gpus: set[int] = set()
    for way in ("host_to_device", "device_to_host"):
        alone = measured.host(way)
        gpus |= set(alone)
        for flows in measured.flows:
            if flows.pattern != f"two_{way}" or len(flows.flows) != 2:
                continue
            ends = [gpu_index(flow.dst if flow.src == HOST else flow.src) for flow in flows.flows]
            if all(
                end in alone and flow.bytes_per_s < SLOWED * alone[end].bytes_per_s
                for end, flow in zip(ends, flows.flows, strict=True)
            ):
                edges.add((ends[0], ends[1]))
    return _connected_groups(sorted(gpus), edges)


def colliding_flows(measured: Measurement) -> list[tuple[Flow, Flow, float]]:
    """Return pairs of GPU-to-GPU flows without a common GPU that slow each other: (one, other, lowest share kept)."""
    alone = measured.pairs()
    found = []
    for flows in measured.flows:
        if flows.pattern != "two_disjoint" or len(flows.flows) != 2:
            continue
        kept = [_share_kept(flow, alone) for flow in flows.flows]
        if all(share is not None and share < SLOWED for share in kept):
            found.append((flows.flows[0], flows.flows[1], min(share for share in kept if share is not None)))
    return found


def _share_kept(flow: Flow, alone: dict[tuple[int, int], Flow]) -> float | None:
    single = alone.get((gpu_index(flow.src), gpu_index(flow.dst)))
    return flow.bytes_per_s / single.bytes_per_s if single is not None else None


def _connected_groups(members: Sequence[int], edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    group = {member: {member} for member in members}
    for a, b in edges:
        both = group[a] | group[b]
        for member in both:
            group[member] = both
    seen: list[set[int]] = []
    for member in members:
        if len(group[member]) > 1 and group[member] not in seen:
            seen.append(group[member])
    return [sorted(each) for each in seen]


def median_or_none(values: Iterable[float]) -> float | None:
    """Return the median, or None of nothing."""
    listed = list(values)
    return median(listed) if listed else None


def with_measured_rates(cluster: Cluster, measured: Measurement) -> Cluster:
    """Return `cluster` with measured rates on the links of its first node. A dry run on a CPU changes nothing.

    NVSwitch port: the median over peers of the slower direction. Cable: the slower direction of its pair. Slot: the
    slower of to and from the host. Uplink shared by a group of GPUs: what the group reached together. Rates above the
    datasheet by more than a tenth are a fault of the measurement and are left out.
    """
    if measured.device == "cpu":
        return cluster
    node = cluster.groups[0].node
    links = tuple(_measured(link, node, measured) for link in node.links)
    return replace(cluster, groups=(replace(cluster.groups[0], node=replace(node, links=links)), *cluster.groups[1:]))


def _measured(link: Link, node: Node, measured: Measurement) -> Link:
    if link.state is LinkState.ABSENT:
        return link
    rate = _rate(link, node, measured)
    if rate is None or (link.bytes_per_s and rate > CEILING * link.bytes_per_s):
        return link
    trusted = link.bytes_per_s is not None and rate >= TRUSTED_SHARE * link.bytes_per_s
    state = LinkState.UP if link.state is LinkState.UNKNOWN and trusted else link.state
    return replace(link, measured_bytes_per_s=rate, source=Source.MEASURED, state=state, confidence=1.0)


def _rate(link: Link, node: Node, measured: Measurement) -> float | None:
    index_of = {gpu.vertex: gpu.index for gpu in node.gpus}
    pairs = measured.pairs()
    gpu, other = index_of.get(link.a), index_of.get(link.b)
    if link.kind is LinkKind.NVLINK and gpu is not None and other is not None:
        return _slower(pairs.get((gpu, other)), pairs.get((other, gpu)))
    if link.kind is LinkKind.NVSWITCH and gpu is not None:
        on_hub = [index_of[spoke.a] for spoke in node.links if spoke.b == link.b and spoke.a in index_of]
        rates = [_slower(pairs.get((gpu, peer)), pairs.get((peer, gpu))) for peer in on_hub if peer != gpu]
        return median_or_none(rate for rate in rates if rate is not None)
    if link.kind is LinkKind.PCIE and gpu is not None:
        return _slower(measured.host("host_to_device").get(gpu), measured.host("device_to_host").get(gpu))
    if link.kind is LinkKind.PCIE:
        return _uplink(link, node, measured)
    return None


def _slower(one: Flow | None, other: Flow | None) -> float | None:
    known = [flow.bytes_per_s for flow in (one, other) if flow is not None]
    return min(known) if len(known) == 2 else None


def _uplink(link: Link, node: Node, measured: Measurement) -> float | None:
    """Return the total rate of the GPUs below a switch, if they are one of the measured groups that share an uplink."""
    below = sorted(_below(link.a, node))
    if below not in shared_groups(measured):
        return None
    totals = []
    for flows in measured.flows:
        if flows.pattern in {"all_host_to_device", "all_device_to_host"}:
            ends = [gpu_index(flow.dst if flow.src == "host" else flow.src) for flow in flows.flows]
            totals.append(sum(f.bytes_per_s for end, f in zip(ends, flows.flows, strict=True) if end in below))
    return min(totals) if len(totals) == 2 else None


def _below(vertex: str, node: Node) -> set[int]:
    """Return the GPUs below `vertex` in the PCIe tree; links go from the lower end to the upper."""
    index_of = {gpu.vertex: gpu.index for gpu in node.gpus}
    found: set[int] = set()
    waiting, seen = [vertex], {vertex}
    while waiting:
        at = waiting.pop()
        for link in node.links:
            if link.kind is LinkKind.PCIE and link.b == at and link.a not in seen:
                seen.add(link.a)
                waiting.append(link.a)
                if link.a in index_of:
                    found.add(index_of[link.a])
    return found
