"""Health by measurement: flows, compute and collectives that are slower than the links and the siblings say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.topology.machines import item
from topology.catalog.clusters import cluster as catalogue
from topology.cluster import Severity
from topology.health.diagnose import diagnose
from topology.profile.measurement import ComputeSample, Flow, FlowSet, GpuState, GroupSample, Measurement
from topology.profile.profile import CollectiveSample


def measured(**changes) -> Measurement:
    """Return a healthy measurement of four H200: 396 GB/s pairs, 55 GB/s to and from the host, full compute."""
    pairs = tuple(
        FlowSet(pattern="pair", nbytes=2**27, flows=(flow(f"gpu{a}", f"gpu{b}", 396e9, peer=True, correct=True),))
        for a in range(4)
        for b in range(4)
        if a != b
    )
    host = tuple(
        FlowSet(pattern=way, nbytes=2**27, flows=(flow(*ends, 55e9),))
        for gpu in range(4)
        for way, ends in (("host_to_device", ("host", f"gpu{gpu}")), ("device_to_host", (f"gpu{gpu}", "host")))
    )
    base = Measurement(
        machine="test",
        device="cuda",
        taken_at="2026-01-01T00:00:00+00:00",
        gpus=("NVIDIA H200",) * 4,
        flows=(*pairs, *host),
        compute=tuple(
            ComputeSample(
                gpu=gpu,
                size=8192,
                memory_bytes_per_s=4.2e12,
                burst_flops=800e12,
                sustained_flops=700e12,
                during=GpuState(gpu=gpu, throttle=("software power cap",)),
            )
            for gpu in range(4)
        ),
        groups=(group("all_reduce", 2 * 3 / 4 * 2**28 / 370e9),),
    )
    return replace(base, **changes)


def flow(src: str, dst: str, rate: float, **more) -> Flow:
    return Flow(src=src, dst=dst, bytes_per_s=rate, **more)


def group(op: str, time_s: float, gpus: tuple[int, ...] = (0, 1, 2, 3), alongside: int = 0) -> GroupSample:
    sample = CollectiveSample(op=op, ranks=len(gpus), nodes=1, nbytes=2**28, time_s=time_s)
    return GroupSample(sample=sample, gpus=gpus, iterations=20, alongside=alongside)


def changed(flows: tuple[FlowSet, ...], change) -> tuple[FlowSet, ...]:
    """Return flow sets with each flow of the single patterns replaced by `change(flow)`."""
    return tuple(replace(each, flows=tuple(change(one) for one in each.flows)) for each in flows)


H200 = catalogue("h200x4")


def test_a_healthy_measurement() -> None:
    health = diagnose(H200, measured())

    assert health.healthy, [one.what for one in health.items]
    assert health.measured


def test_the_outlier_pair_is_named() -> None:
    slow = changed(
        measured().flows, lambda one: replace(one, bytes_per_s=200e9) if (one.src, one.dst) == ("gpu1", "gpu2") else one
    )

    health = diagnose(H200, measured(flows=slow))

    pair = item(health, "slow_pair")
    assert pair.gpus == (1, 2)
    assert "1->2 200.0 GB/s" in pair.why
    assert pair.cost is not None
    assert pair.cost.now_s == pytest.approx(2**28 / 200e9)
    assert pair.cost.expected_s == pytest.approx(2**28 / 396e9)
    assert not health.healthy


def test_a_gpu_that_is_slow_to_all_is_named_once() -> None:
    slow = changed(
        measured().flows,
        lambda one: replace(one, bytes_per_s=100e9) if "gpu3" in {one.src, one.dst} and one.peer else one,
    )

    assert item(diagnose(H200, measured(flows=slow)), "slow_pair").gpus == (3,)


def test_all_pairs_below_the_links() -> None:
    slow = changed(measured().flows, lambda one: replace(one, bytes_per_s=200e9) if one.peer else one)

    assert "12 of 12" in item(diagnose(H200, measured(flows=slow)), "slow_pair").what


def test_wrong_bytes_are_an_error() -> None:
    wrong = changed(
        measured().flows, lambda one: replace(one, correct=False) if (one.src, one.dst) == ("gpu0", "gpu1") else one
    )

    bad = item(diagnose(H200, measured(flows=wrong)), "p2p_bad")
    assert (bad.severity, bad.gpus) == (Severity.ERROR, (0, 1))


def test_direct_copies_slower_than_the_host_path() -> None:
    slow = changed(measured().flows, lambda one: replace(one, bytes_per_s=5e9) if one.peer else one)

    assert item(diagnose(catalogue("l40s-x8"), measured(flows=slow)), "p2p_slow").severity is Severity.WARNING


def test_a_slot_below_its_generation() -> None:
    slow = changed(
        measured().flows, lambda one: replace(one, bytes_per_s=13e9) if (one.src, one.dst) == ("host", "gpu2") else one
    )

    slot = item(diagnose(H200, measured(flows=slow)), "slow_host")
    assert slot.gpus == (2,)


def test_a_gpu_that_computes_slower_than_its_siblings() -> None:
    compute = tuple(
        replace(sample, sustained_flops=600e12) if sample.gpu == 1 else sample for sample in measured().compute
    )

    slow = item(diagnose(H200, measured(compute=compute)), "slow_gpu")
    assert slow.gpus == (1,)
    assert "1.17x" in slow.consequence


def test_heat_invalidates_and_the_power_limit_does_not() -> None:
    hot = tuple(
        replace(sample, after=GpuState(gpu=sample.gpu, throttle=("hardware thermal slowdown",)))
        if sample.gpu == 2
        else sample
        for sample in measured().compute
    )

    assert item(diagnose(H200, measured(compute=hot)), "throttled").gpus == (2,)


def test_a_collective_far_below_its_links() -> None:
    """The GB300 case as a measurement: 51.6 of 684.9 GB/s."""
    slow = measured(groups=(group("all_reduce", 2 * 3 / 4 * 2**28 / 30e9),))

    found = item(diagnose(H200, slow), "slow_collective")
    assert found.cost is not None
    assert found.cost.now_s == pytest.approx(2 * 3 / 4 * 2**28 / 30e9)
    assert found.cost.expected_s == pytest.approx(2 * 3 / 4 * 2**28 / (0.65 * 450e9))


@pytest.mark.parametrize(("op", "share"), [("all_gather", 0.51), ("reduce_scatter", 0.51), ("all_to_all", 0.63)])
def test_a_healthy_pair_of_h200_is_not_flagged(op: str, share: float) -> None:
    """What 4 x H200 measured for two ranks at 256 MiB, as a share of 450 GB/s."""
    pair = measured(groups=(group(op, 1 / 2 * 2**28 / (share * 450e9), (0, 1)),))

    assert diagnose(H200, pair).healthy


def test_groups_that_slow_each_other() -> None:
    alone = group("all_gather", 0.4e-3, (0, 1))
    alongside = group("all_gather", 0.8e-3, (0, 1), alongside=1)

    found = item(diagnose(H200, measured(groups=(alone, alongside))), "colliding_groups")
    assert "2.00x" in found.consequence


def pcie_flows(rate_together: float) -> tuple[FlowSet, ...]:
    """Four GPUs, {0, 1} and {2, 3} behind one uplink each, as pairwise host copies see it."""
    sets = [each for each in measured().flows if each.pattern != "pair"]
    for a in range(4):
        for b in range(a + 1, 4):
            rate = rate_together if {a, b} in ({0, 1}, {2, 3}) else 55e9
            ends = (flow("host", f"gpu{a}", rate), flow("host", f"gpu{b}", rate))
            sets.append(FlowSet(pattern="two_host_to_device", nbytes=2**27, flows=ends))
    return tuple(sets)


def test_concurrent_flows_reveal_shared_uplinks() -> None:
    """26.9 GB/s each of 55 alone is what two flows got behind one uplink of a 3-switch box."""
    health = diagnose(H200, measured(flows=pcie_flows(26.9e9)))

    assert health.shared == ((0, 1), (2, 3))
    assert [one.gpus for one in health.items if one.code == "shared_uplink"] == [(0, 1), (2, 3)]
    assert health.healthy, "how a machine is built is not a fault"
    assert diagnose(H200, measured(flows=pcie_flows(54e9))).shared == ()


def test_a_switch_that_collapses_under_two_writers() -> None:
    """Broadcom PEX890xx: 2.7 GB/s when two GPUs write through one uplink, 54 GB/s alone."""
    both = FlowSet(
        pattern="two_disjoint", nbytes=2**27, flows=(flow("gpu0", "gpu2", 2.7e9), flow("gpu1", "gpu3", 2.7e9))
    )
    single = changed(measured().flows, lambda one: replace(one, bytes_per_s=54e9) if one.peer else one)

    found = item(diagnose(catalogue("l40s-x8"), measured(flows=(*single, both))), "colliding_flows")
    assert found.severity is Severity.WARNING
    assert found.gpus == (0, 1, 2, 3)


def test_a_partial_measurement_says_so_and_a_dry_run_says_nothing() -> None:
    partial = diagnose(H200, measured(missing=("collectives: out of time",), late=("collectives: out of time",)))
    dry = diagnose(H200, measured(device="cpu", flows=changed(measured().flows, lambda f: replace(f, bytes_per_s=1.0))))

    failed = diagnose(H200, measured(missing=("collectives: rank 3 failed first (SIGKILL): no words",)))

    assert "out of time" in item(partial, "partial").why
    assert "rank 3" in item(failed, "not_measured").why
    assert not failed.healthy
    assert partial.healthy
    assert dry.healthy
    assert not dry.measured
