"""Faults that a measurement shows: wrong bytes, slow pairs, slow GPUs, slow collectives, shared links.

Pairs are compared with the median of their path class, GPUs with the median of all, and both with the datasheet. The
tolerances allow for the losses of a healthy machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from topology.cluster import Cluster
from topology.finding import ERROR, INFO, WARNING, gpu_names
from topology.health.cost import REFERENCE_BYTES, Cost, HealthItem, health_item, without_faults
from topology.profile.measurement import (
    HOST,
    Flow,
    GroupSample,
    Measurement,
    colliding_flows,
    gpu_index,
    median_or_none,
    shared_groups,
)
from topology.rates.groups import GroupShape, group_rates
from topology.rates.node_rates import NodeRates
from topology.units import MIB, in_mib

_item = partial(health_item, "measured")

PAIR_OUTLIER = 0.8  # of its class: runs of one point differ by 3 % (median) to 17 % (90th percentile)
NVLINK_SHARE = 0.75  # of the link rate: copies reach 396 of 450 GB/s, 88 % (NVIDIA/nccl#1264)
PCIE_SHARE = 0.6  # of the slot: gen 5 reaches 88 %, hosts with slow memory less
GPU_OUTLIER = 0.9  # Megatron's sniff test flags 10 % (gpu_sniff_test.py)
MEMORY_SHARE = 0.75  # of the datasheet: copies reach about 90 %
# Of the ring that the links allow, at 256 MiB: 4 x H200 without multicast reaches 51 % (all-gather of two) to 76 %
# (all-reduce of four), measured; NVIDIA calls 82 % normal for large groups (nccl-tests#212). A GPU without links: 8 %.
HEALTHY_SHARE, COLLECTIVE_SHARE = 0.65, 0.4
LARGE_BYTES = 256 * MIB  # from here on bandwidth decides, not latency
COLLAPSED_SHARE = 0.15  # of the rate alone: far below any fair share of two (Broadcom PEX890xx, 2.7 of 54 GB/s)
CONCURRENT_SLOWDOWN = (
    1.25  # two groups sharing nothing measure within 1.17 (the 90th percentile above); sharing a link, 2
)
# Under a matmul the power limit is reached by design; heat and hardware slowdowns are not.
EXPECTED_THROTTLE = frozenset({"software power cap"})
RING_STEPS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}  # times (n - 1) / n


def evaluate_measurement(
    cluster: Cluster, measured: Measurement
) -> tuple[list[HealthItem], tuple[tuple[int, ...], ...]]:
    """Return the faults, and the groups of GPUs that share an uplink to the host."""
    shared = tuple(tuple(group) for group in shared_groups(measured))
    items = [
        *_wrong_bytes(measured),
        *_slow_pairs(cluster, measured),
        *_slower_than_host(measured),
        *_slow_host_copies(cluster, measured),
        *_slow_gpus(cluster, measured),
        *_throttled_gpus(measured),
        *_slow_collectives(cluster, measured),
        *_concurrent_slowdowns(measured, shared),
    ]
    return [*items, *_missing_parts(measured)], shared


def _missing_parts(measured: Measurement) -> Iterator[HealthItem]:
    """Return parts that failed (a fault), and parts that were left out for lack of time (not a fault)."""
    late = measured.late
    failed = [what for what in measured.missing if what not in late]
    if failed:
        yield _item(
            "not_measured",
            WARNING,
            f"{len(failed)} parts of the measurement failed",
            "; ".join(failed[:6]),
            "training uses the same copies, kernels and collectives",
            "run the part by hand: python -m executor.measure.doctor_worker --pieces=flows (compute, collectives)",
        )
    if late:
        yield _item(
            "partial",
            INFO,
            f"the measurement is partial: no time was left for {len(late)} parts",
            "; ".join(late[:6]),
            "faults in these parts are not found",
            "measure again with a larger --budget",
        )


def _wrong_bytes(measured: Measurement) -> list[HealthItem]:
    wrong = sorted({(flow.src, flow.dst) for flows in measured.flows for flow in flows.flows if flow.correct is False})
    if not wrong:
        return []
    return [
        _item(
            "p2p_bad",
            ERROR,
            f"copies between GPUs arrive wrong: {', '.join(f'{a} to {b}' for a, b in wrong[:16])}",
            "the bytes at the far end are not those that were sent",
            "results that depend on these copies are silently wrong",
            "do not train here until peer access is disabled (NCCL_P2P_DISABLE=1) or fixed;"
            " check ACS and IOMMU settings",
            tuple(sorted({gpu_index(end) for pair in wrong for end in pair})),
        )
    ]


def _slow_pairs(cluster: Cluster, measured: Measurement) -> list[HealthItem]:
    """Compare pairs with their path class and with the link rate; names the GPU that all slow pairs have in common."""
    node = cluster.groups[0].node
    position = {gpu.index: at for at, gpu in enumerate(node.gpus)}
    expected = without_faults(cluster)
    rates = NodeRates(node=expected.groups[0].node, cluster=expected)
    pairs = {pair: flow for pair, flow in measured.pairs().items() if set(pair) <= set(position)}
    classes: dict[str, list[float]] = defaultdict(list)
    for (a, b), flow in pairs.items():
        classes[_path_class(node.pairs, a, b)].append(flow.bytes_per_s)
    slow: dict[tuple[int, int], tuple[float, str]] = {}
    for (a, b), flow in pairs.items():
        label = _path_class(node.pairs, a, b)
        usual = median_or_none(classes[label]) or flow.bytes_per_s
        nominal, _ = rates.nvlink(position[a], position[b])
        if flow.bytes_per_s < PAIR_OUTLIER * usual:
            slow[a, b] = (usual, f"the median of {label or 'all'} pairs is {usual / 1e9:.1f} GB/s")
        elif nominal and flow.bytes_per_s < NVLINK_SHARE * nominal:
            slow[a, b] = (nominal, f"the links carry {nominal / 1e9:.0f} GB/s, of which about 88% is normal")
    if not slow:
        return []
    worst = min(slow, key=lambda pair: pairs[pair].bytes_per_s / slow[pair][0])
    shown = ", ".join(f"{a}->{b} {pairs[a, b].bytes_per_s / 1e9:.1f} GB/s" for a, b in sorted(slow)[:12])
    culprit = _gpu_in_all(slow, pairs)
    what = (
        f"every copy that GPU {culprit} takes part in is slow"
        if culprit is not None
        else f"{len(slow)} of {len(pairs)} GPU pairs copy slower than expected, the worst is {worst[0]} to {worst[1]}"
    )
    cost = _copy_cost(pairs[worst], slow[worst][0], worst)
    return [
        _item(
            "slow_pair",
            WARNING,
            what,
            f"{shown}; {slow[worst][1]}",
            f"groups with these pairs run at their rate; {cost.text}",
            "compare link counts and errors (`nvidia-smi nvlink -s`, `-e`); plan around the pair or the GPU until then",
            (culprit,) if culprit is not None else tuple(sorted({gpu for pair in slow for gpu in pair})),
            cost,
        )
    ]


def _path_class(labels: dict[str, str], a: int, b: int) -> str:
    return labels.get(f"{min(a, b)}-{max(a, b)}", "")


def _gpu_in_all(slow: dict[tuple[int, int], tuple[float, str]], pairs: dict[tuple[int, int], Flow]) -> int | None:
    """Return the GPU that all slow pairs share, if all its pairs are slow and others are not."""
    shared = set.intersection(*(set(pair) for pair in slow))
    for gpu in sorted(shared):
        its = [pair for pair in pairs if gpu in pair]
        if len(pairs) > len(its) == len(slow) > 2:
            return gpu
    return None


def _copy_cost(flow: Flow, usual: float, gpus: Sequence[int]) -> Cost:
    return Cost(
        op="copy",
        nbytes=REFERENCE_BYTES,
        gpus=tuple(gpus),
        now_s=REFERENCE_BYTES / flow.bytes_per_s,
        expected_s=REFERENCE_BYTES / usual,
        source="measured",
    )


def _slower_than_host(measured: Measurement) -> list[HealthItem]:
    """Find direct copies that are slower than a copy through host memory."""
    down, up = measured.host("device_to_host"), measured.host("host_to_device")
    bad = [
        (a, b)
        for (a, b), flow in measured.pairs().items()
        if flow.peer and a in down and b in up and flow.bytes_per_s < 0.5 * min(down[a].bytes_per_s, up[b].bytes_per_s)
    ]
    if not bad:
        return []
    return [
        _item(
            "p2p_slow",
            WARNING,
            f"direct copies are slower than through host memory for {len(bad)} pairs",
            ", ".join(f"{a}->{b}" for a, b in bad[:16]),
            "collectives that trust peer access run slower than without it",
            "check ACS and IOMMU; compare with NCCL_P2P_DISABLE=1",
            tuple(sorted({gpu for pair in bad for gpu in pair})),
        )
    ]


def _slow_host_copies(cluster: Cluster, measured: Measurement) -> Iterator[HealthItem]:
    node = cluster.groups[0].node
    slots = {gpu.index: cluster.kind(gpu.kind).pcie_bytes_per_s for gpu in node.gpus}
    for way, words in (("host_to_device", "from the host"), ("device_to_host", "to the host")):
        flows = measured.host(way)
        usual = median_or_none(flow.bytes_per_s for flow in flows.values())
        for gpu, flow in sorted(flows.items()):
            slot = slots.get(gpu, 0.0)
            expected = max(
                usual if usual and flow.bytes_per_s < PAIR_OUTLIER * usual else 0.0,
                slot if flow.bytes_per_s < PCIE_SHARE * slot else 0.0,
            )
            if expected:
                cost = _copy_cost(flow, expected, (gpu,))
                yield _item(
                    "slow_host",
                    WARNING,
                    f"copies {words} are slow on GPU {gpu}: {flow.bytes_per_s / 1e9:.1f} GB/s",
                    f"expected about {expected / 1e9:.0f} GB/s (its slot, or the other GPUs)",
                    f"loading, offloading and checkpoints slow down; {cost.text}",
                    "check the PCIe generation under load, the slot's width, and the NUMA node of the process",
                    (gpu,),
                    cost,
                )


def _slow_gpus(cluster: Cluster, measured: Measurement) -> Iterator[HealthItem]:
    """Find GPUs whose matmuls or memory copies are slower than those of the other GPUs or the datasheet."""
    memory = {gpu.index: cluster.kind(gpu.kind).memory_bytes_per_s for gpu in cluster.groups[0].node.gpus}
    for what, unit, rates in (
        ("a sustained matmul", "TFLOP/s", {s.gpu: s.sustained_flops for s in measured.compute}),
        ("memory copies", "TB/s", {s.gpu: s.memory_bytes_per_s for s in measured.compute}),
    ):
        known = {gpu: rate for gpu, rate in rates.items() if rate is not None}
        usual = median_or_none(known.values())
        for gpu, rate in sorted(known.items()):
            limit = MEMORY_SHARE * memory.get(gpu, 0.0) if what == "memory copies" else 0.0
            if usual is None or (rate >= GPU_OUTLIER * usual and rate >= limit):
                continue
            expected = usual if rate < GPU_OUTLIER * usual else memory[gpu]
            yield _item(
                "slow_gpu",
                WARNING,
                f"GPU {gpu} is slow at {what}: {rate / 1e12:.3g} {unit}",
                f"the others, or the datasheet, have {expected / 1e12:.3g} {unit}",
                f"a synchronous step waits for it: {expected / rate:.2f}x as long where this decides (measured rates)",
                "look at clocks, temperature and power limit with `nvidia-smi -q -d CLOCK,PERFORMANCE,POWER`",
                (gpu,),
            )


def _throttled_gpus(measured: Measurement) -> Iterator[HealthItem]:
    for sample in measured.compute:
        reasons = [reason for reason in sample.throttle if reason not in EXPECTED_THROTTLE]
        if reasons:
            yield _item(
                "throttled",
                WARNING,
                f"GPU {sample.gpu} was throttled while it was measured",
                ", ".join(reasons),
                "its rates here are too low and are not valid as a profile",
                "check cooling and power, then measure again",
                (sample.gpu,),
            )


def _slow_collectives(cluster: Cluster, measured: Measurement) -> Iterator[HealthItem]:
    """Compare large collectives that ran alone with the ring that the links should give; the worst op of each group."""
    position = {gpu.index: at for at, gpu in enumerate(cluster.groups[0].node.gpus)}
    target = without_faults(cluster)
    worst: dict[tuple[int, ...], tuple[float, GroupSample]] = {}
    for group in measured.groups:
        sample = group.sample
        if (
            group.alongside
            or sample.nbytes < LARGE_BYTES
            or sample.op not in RING_STEPS
            or not set(group.gpus) <= set(position)
        ):
            continue
        ranks = len(group.gpus)
        rates = group_rates(
            target, GroupShape(ranks=ranks, ranks_per_node=ranks), tuple(position[gpu] for gpu in group.gpus)
        )
        if rates.intra_bytes_per_s <= 0:
            continue
        ideal = RING_STEPS[sample.op] * (ranks - 1) / ranks * sample.nbytes / rates.intra_bytes_per_s
        share = ideal / sample.time_s
        if share < worst.get(group.gpus, (COLLECTIVE_SHARE, group))[0]:
            worst[group.gpus] = (share, group)
    for gpus, (share, group) in worst.items():
        sample = group.sample
        cost = Cost(
            op=sample.op.replace("_", "-"),
            nbytes=sample.nbytes,
            gpus=gpus,
            now_s=sample.time_s,
            expected_s=sample.time_s * share / HEALTHY_SHARE,
            source=f"measured; healthy is about {HEALTHY_SHARE:.0%} of the links'",
        )
        yield _item(
            "slow_collective",
            WARNING,
            f"collectives on {gpu_names(gpus)} reach {share:.0%} of what the links carry",
            f"worst: {sample.op}, {in_mib(sample.nbytes)} in {sample.time_s * 1e3:.3g} ms (measured)",
            f"every step that waits for them is longer; {cost.text}",
            "run with NCCL_DEBUG=INFO and look at the channels; one GPU without links leaves all with PCIe",
            gpus,
            cost,
        )


def _concurrent_slowdowns(measured: Measurement, shared: Sequence[Sequence[int]]) -> Iterator[HealthItem]:
    """Find what slows down when it runs at the same time. Shared links are common: information, unless rates
    collapse.
    """
    for group in shared:
        each = [
            flow.bytes_per_s
            for flows in measured.flows
            if flows.pattern in {"all_host_to_device", "all_device_to_host"}
            for flow in flows.flows
            if gpu_index(flow.dst if flow.src == HOST else flow.src) in group
        ]
        rate = f"; all at once they get {min(each) / 1e9:.1f} GB/s each (measured)" if each else ""
        yield _item(
            "shared_uplink",
            INFO,
            f"{gpu_names(group)} share one uplink to the host",
            "copies to or from two of them at once get about half their rate each",
            f"offloading, data loading and PCIe collectives divide it{rate}",
            "place pipeline stages, not tensor-parallel groups, across it; `topo -m` does not show this",
            tuple(group),
        )
    collisions = colliding_flows(measured)
    if collisions:
        one, other, share_left = min(collisions, key=lambda hit: hit[2])
        shown = "; ".join(f"{a.src}->{a.dst} with {b.src}->{b.dst}: {k:.0%}" for a, b, k in collisions[:8])
        yield _item(
            "colliding_flows",
            WARNING if share_left < COLLAPSED_SHARE else INFO,
            f"{len(collisions)} pairs of copies between different GPUs slow each other",
            f"share of the rate alone that is left: {shown}",
            f"worst: {one.src}->{one.dst} during {other.src}->{other.dst} keeps {share_left:.0%} (measured)"
            + ("; far below a fair half, as behind some PCIe switches" if share_left < COLLAPSED_SHARE else ""),
            "keep such pairs in different phases of a step; see NCCL's topology file for their common switch",
            tuple(sorted({gpu_index(end) for end in (one.src, one.dst, other.src, other.dst)})),
        )
    alone = {
        (g.sample.op, g.sample.nbytes, g.sample.launch, g.gpus): g.sample.time_s
        for g in measured.groups
        if not g.alongside
    }
    ratios = [
        (g.sample.time_s / before, g)
        for g in measured.groups
        if g.alongside
        and g.sample.nbytes >= LARGE_BYTES
        and (before := alone.get((g.sample.op, g.sample.nbytes, g.sample.launch, g.gpus))) is not None
    ]
    if ratios and max(ratios, key=lambda pair: pair[0])[0] > CONCURRENT_SLOWDOWN:
        ratio, worst = max(ratios, key=lambda pair: pair[0])
        yield _item(
            "colliding_groups",
            INFO,
            "two groups that communicate at once slow each other",
            f"{worst.sample.op} of {in_mib(worst.sample.nbytes)} on {gpu_names(worst.gpus)}",
            f"{ratio:.2f}x as long as alone (measured)",
            "plan with the concurrent rate where several groups communicate at the same time",
            worst.gpus,
        )
