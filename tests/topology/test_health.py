"""Health: every fault seen on a real machine gets its item, its cost and exit-worthy severity; healthy ones get none."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.topology.captures import MATRICES, NCCL, TOPO
from topology.catalog.clusters import cluster as catalogue
from topology.cluster import Cluster, LinkKind, LinkState, Severity
from topology.health.cost import REFERENCE_BYTES, all_reduce_s, without_faults
from topology.health.diagnose import ADVICE, Health, HealthItem, diagnose
from topology.probe.from_machine import CommandOutput, probe_machine
from topology.probe.from_text import build, probe_text, shipped_catalogue
from topology.probe.machine import Evidence
from topology.profile.measurement import ComputeSample, Flow, FlowSet, GpuState, GroupSample, Measurement
from topology.profile.profile import CollectiveSample
from topology.readers.nvml import NvmlGpu, NvmlLink, NvmlSnapshot
from topology.readers.smi_topo import parse_topo

H200X4 = TOPO.parent / "h200x4"


def probe(*texts: str, gpu: str | None = None) -> Cluster:
    return probe_text([(f"text {at}", content) for at, content in enumerate(texts)], gpu=gpu)


def nvswitch_matrix(count: int, *, links: int = 18, lost: int | None = None, weak: tuple[int, int] = (-1, 0)) -> str:
    """Return `nvidia-smi topo -m` of a switched machine, one GPU of it off the fabric or with fewer links."""

    def cell(a: int, b: int) -> str:
        if a == b:
            return " X "
        return "SYS" if lost in {a, b} else f"NV{weak[1]}" if weak[0] in {a, b} else f"NV{links}"

    head = "\t" + "\t".join(f"GPU{i}" for i in range(count)) + "\tCPU Affinity\tNUMA Affinity"
    rows = [
        f"GPU{a}\t" + "\t".join(cell(a, b) for b in range(count)) + f"\t{32 * (a // 4)}-{32 * (a // 4) + 31}\t{a // 4}"
        for a in range(count)
    ]
    return "\n".join([head, *rows]) + "\n"


def matrix(rows: list[list[str]]) -> str:
    """Return `nvidia-smi topo -m` with the given classes."""
    head = "\t" + "\t".join(f"GPU{i}" for i in range(len(rows)))
    return "\n".join([head, *(f"GPU{i}\t" + "\t".join(row) for i, row in enumerate(rows))]) + "\n"


def with_nvml(count: int = 4, **of_gpu_1) -> Cluster:
    """Return an H200 machine whose NVML reports are normal but for what is given for GPU 1."""
    normal = {
        "name": "NVIDIA H200",
        "links": tuple(NvmlLink(index=i, active=True, remote_type="switch") for i in range(18)),
        "fabric_state": "completed",
        "fabric_status": 0,
        "fabric_clique": 0,
        "fabric_cluster": "0" * 32,
        "mig": False,
        "throttle": (),
        "processes": (),
    }
    gpus = [NvmlGpu(index=i, uuid=f"GPU-{i}", **{**normal, **(of_gpu_1 if i == 1 else {})}) for i in range(count)]
    evidence = Evidence(topo=parse_topo(nvswitch_matrix(count)), nvml=NvmlSnapshot(driver="580.1", gpus=tuple(gpus)))
    return build(evidence, gpu=None, name="test", catalogue=shipped_catalogue())


def item(health: Health, code: str) -> HealthItem:
    hits = [one for one in health.items if one.code == code]
    assert len(hits) == 1, [(one.code, one.what) for one in health.items]
    assert hits[0].why
    assert hits[0].consequence
    assert hits[0].remedy
    return hits[0]


# Healthy machines


@pytest.mark.parametrize("name", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "h200x4", "l40s-x8"])
def test_machines_of_the_catalogue_are_healthy(name: str) -> None:
    assert diagnose(catalogue(name)).healthy, [one.what for one in diagnose(catalogue(name)).items]


def test_the_captured_h200_machine_is_healthy_though_its_pcie_tree_is_hidden() -> None:
    found = probe(
        *(
            (H200X4 / name).read_text()
            for name in ("nvidia_smi_topo_m.txt", "nvidia_smi_topo_p2p.txt", "nccl_topo.xml")
        ),
        gpu="h200-sxm",
    )

    health = diagnose(found)

    assert health.healthy
    assert item(health, "hidden").severity is Severity.INFO


def test_every_capture_is_diagnosed_without_an_item_that_says_nothing() -> None:
    for key in MATRICES:
        for one in diagnose(probe((TOPO / key["file"]).read_text())).items:
            assert one.what, key["file"]
            assert one.remedy, key["file"]


def test_what_programs_need_is_in_codes_and_numbers_not_in_sentences() -> None:
    """Other words for the same findings change no verdict: code, GPUs and cost are the same."""
    for content in (nvswitch_matrix(8, lost=2), nvswitch_matrix(8, weak=(3, 9))):
        found = probe(content, gpu="b200-sxm")
        silent = tuple(replace(one, what="", why="", consequence="", remedy="") for one in found.findings)
        told, untold = (
            [(one.code, one.severity, one.gpus, one.cost) for one in diagnose(machine).items]
            for machine in (found, replace(found, findings=silent))
        )
        assert told == untold
        assert any(one.code != "note" for one in found.findings)


def test_no_gpu_is_not_a_fault() -> None:
    evidence = Evidence()
    empty = build(evidence, gpu=None, name="laptop", catalogue=shipped_catalogue())

    health = diagnose(empty)

    assert health.healthy
    assert health.gpu_count == 0


# NVLink


def test_b200_gpu_outside_the_fabric() -> None:
    """vllm-project/vllm#16336: seven GPUs are NV18 to each other, GPU 2 is SYS to all."""
    health = diagnose(probe(nvswitch_matrix(8, lost=2), gpu="b200-sxm"))

    lost = item(health, "lost_gpu")
    assert lost.severity is Severity.ERROR
    assert lost.gpus == (2,)
    assert not health.healthy
    # 18 links of 50 GB/s against one 63 GB/s slot that all of a socket's ring traffic shares: at least 900 / 63.
    assert lost.cost is not None
    assert lost.cost.expected_s == pytest.approx(2 * 7 / 8 * REFERENCE_BYTES / 900e9)
    assert lost.cost.now_s / lost.cost.expected_s >= 900 / 63 - 0.1
    assert "without GPU 2 it takes" in lost.consequence


@pytest.mark.parametrize(
    ("file", "gpu"), [("gb300_1tray_fault_gpu1_count0.xml", 1), ("gb300_nvl72_2tray_rank5_no_nvlink.xml", 5)]
)
def test_gb300_gpu_without_links_in_nccls_own_view(file: str, gpu: int) -> None:
    """684.9 GB/s fell to 51.6 on that machine, 13x; clique and state looked normal."""
    health = diagnose(probe((NCCL / file).read_text(), gpu="gb300"))

    lost = item(health, "lost_gpu")
    assert (lost.gpus, lost.severity, health.healthy) == ((gpu,), Severity.ERROR, False)
    assert lost.cost is not None
    assert 5 < lost.cost.now_s / lost.cost.expected_s < 40


def test_a_normal_clique_does_not_hide_a_gpu_with_no_links() -> None:
    none = tuple(NvmlLink(index=i, active=False) for i in range(18))

    health = diagnose(with_nvml(links=none))

    assert any("GPU 1" in one.what and one.severity is not Severity.INFO for one in health.items)
    assert not health.healthy


def test_v100_with_two_inactive_links() -> None:
    """Azure/azhpc-diagnostics#73: links 3 and 5 of GPU 3."""
    health = diagnose(probe((TOPO / "nvlink_status" / "v100_gpu3_two_inactive.txt").read_text()))

    assert item(health, "links").gpus == (3,)
    assert "2 of 6" in item(health, "links").what
    assert not health.healthy


def test_a_gpu_with_fewer_links_than_its_siblings_costs_the_whole_group() -> None:
    health = diagnose(probe(nvswitch_matrix(4, weak=(3, 12)), gpu="h200-sxm"))

    weak = item(health, "links")
    assert weak.gpus == (3,)
    assert weak.cost is not None
    assert weak.cost.now_s / weak.cost.expected_s == pytest.approx(18 / 12)


def test_all_gpus_below_the_datasheet() -> None:
    """Siblings agree, so only the datasheet can tell."""
    health = diagnose(probe(nvswitch_matrix(4, links=16), gpu="h200-sxm"))

    assert {one.gpus for one in health.items if one.code == "links"} == {(0,), (1,), (2,), (3,)}
    assert not health.healthy


def test_h800_with_eight_links_is_as_it_should_be() -> None:
    assert diagnose(probe(nvswitch_matrix(8, links=8), gpu="h800-sxm")).healthy


@pytest.mark.parametrize(("state", "status"), [("in progress", 0), ("not started", 0), ("completed", 6)])
def test_active_links_on_a_fabric_that_is_not_ready(state: str, status: int) -> None:
    """dstackai/dstack#1167, NVIDIA/gpu-operator#2511."""
    health = diagnose(with_nvml(fabric_state=state, fabric_status=status))

    assert item(health, "fabric").severity is Severity.ERROR
    assert item(health, "fabric").gpus == (1,)
    assert item(health, "fabric").cost is not None
    assert not health.healthy


def test_a_saved_cluster_without_findings_is_judged_by_its_links() -> None:
    whole = catalogue("h200x4")
    node = whole.groups[0].node
    cut = tuple(
        replace(link, count=0, bytes_per_s=0.0, state=LinkState.ABSENT)
        if link.a == "gpu2" and link.kind is LinkKind.NVSWITCH
        else link
        for link in node.links
    )
    broken = replace(whole, findings=(), groups=(replace(whole.groups[0], node=replace(node, links=cut)),))

    health = diagnose(broken)

    assert item(health, "lost_gpu").gpus == (2,)
    assert without_faults(broken).groups[0].node.links[0].count == 18
    assert all_reduce_s(without_faults(broken), range(4)) == pytest.approx(all_reduce_s(whole, range(4)))


# Bridges


def test_a_machine_with_one_bridge_of_two() -> None:
    """NVIDIA/k8s-device-plugin#436: four A100 PCIe, one bridge where two were bought."""
    rows = [
        ["X", "NV12", "SYS", "SYS"],
        ["NV12", "X", "SYS", "SYS"],
        ["SYS", "SYS", "X", "NODE"],
        ["SYS", "SYS", "NODE", "X"],
    ]

    health = diagnose(probe(matrix(rows), gpu="a100-pcie-80gb"))

    alone = item(health, "half_bridged")
    assert set(alone.gpus) == {2, 3}
    assert alone.cost is not None
    assert alone.cost.now_s / alone.cost.expected_s == pytest.approx(12 * 25 / 31.5)
    assert not health.healthy


def test_a_pair_with_one_of_three_bridges() -> None:
    """Bridges come in threes; a pair with fewer links than another pair has a loose or a missing one (nccl#340)."""
    rows = [
        ["X", "NV12", "SYS", "SYS"],
        ["NV12", "X", "SYS", "SYS"],
        ["SYS", "SYS", "X", "NV4"],
        ["SYS", "SYS", "NV4", "X"],
    ]

    health = diagnose(probe(matrix(rows), gpu="a100-pcie-80gb"))

    assert {one.gpus for one in health.items if one.code == "links" and one.severity is Severity.WARNING} == {
        (2,),
        (3,),
    }
    assert not health.healthy


# Peer access, PCIe, hidden trees


@pytest.mark.parametrize(
    ("files", "gpu", "word", "pairs"),
    [
        (("12_geforce_2080ti_pix_2.txt", "p2p/2x2080ti_p2p_p_ns.txt"), None, "NS", ["0-1"]),
        (("13_geforce_2x_5090_phb.txt", "p2p/2x5090_p2p_rw_gns.txt"), "rtx-5090", "GNS", ["0-1"]),
        (
            ("48_4gpu_nv4_crossed_pairs_phb.txt", "p2p/4gpu_crossed_nv4_p2p_rw.txt"),
            "rtx-a6000",
            "CNS",
            ["0-1", "0-2", "1-3", "2-3"],
        ),
    ],
)
def test_missing_peer_access(files: tuple[str, ...], gpu: str | None, word: str, pairs: list[str]) -> None:
    health = diagnose(probe(*((TOPO / file).read_text() for file in files), gpu=gpu))

    denied = item(health, "p2p")
    assert f"{word}:" in denied.why
    assert re.findall(r"\d-\d", denied.why) == pairs
    assert not health.healthy
    if gpu is not None:
        assert denied.cost is not None
        assert denied.cost.now_s == pytest.approx(2 * denied.cost.expected_s)


def test_a_narrow_slot() -> None:
    narrow = (
        "index, uuid, name, pci.bus_id, memory.total [MiB], pcie.link.width.current, pcie.link.width.max\n"
        "0, GPU-0, NVIDIA L40S, 00000000:01:00.0, 46068, 8, 16\n"
        "1, GPU-1, NVIDIA L40S, 00000000:02:00.0, 46068, 16, 16\n"
    )

    health = diagnose(probe(narrow))

    slot = item(health, "pcie_width")
    assert slot.gpus == (0,)
    assert slot.cost is not None
    assert slot.cost.now_s == pytest.approx(2 * slot.cost.expected_s)
    assert not health.healthy


def test_hidden_switches_matter_where_gpus_talk_over_pcie() -> None:
    health = diagnose(probe((NCCL / "h200_vm_numa_minus1_fragment.xml").read_text()))

    assert item(health, "hidden").severity is Severity.WARNING
    assert not health.healthy


# State of the GPUs


def test_mig() -> None:
    health = diagnose(with_nvml(mig=True))

    assert item(health, "mig").gpus == (1,)
    assert not health.healthy


def test_throttling() -> None:
    health = diagnose(with_nvml(throttle=("hardware thermal slowdown",)))

    assert "thermal" in item(health, "throttled").why
    assert not health.healthy


def test_busy_gpu() -> None:
    health = diagnose(with_nvml(processes=((4242, 3 * 2**30),)))

    assert item(health, "busy").gpus == (1,)
    assert "pid 4242 (3.0 GiB)" in item(health, "busy").why
    assert not health.healthy


def test_mixed_models() -> None:
    health = diagnose(with_nvml(name="NVIDIA H100 80GB HBM3"))

    assert item(health, "mixed").severity is Severity.WARNING
    assert not health.healthy


# Against what it should be


def test_seven_of_eight() -> None:
    """NVIDIA/gpu-operator#2511: 7 of 8 GPUs."""
    alone = diagnose(probe(nvswitch_matrix(7), gpu="h200-sxm"))
    against = diagnose(probe(nvswitch_matrix(7), gpu="h200-sxm"), expected=catalogue("dgx-h200"))

    assert not alone.healthy
    errors = [one for one in against.items if one.severity is Severity.ERROR]
    assert [one.code for one in errors] == ["missing_gpu"]
    assert "1.14x" in errors[0].consequence


def test_the_machine_that_was_expected() -> None:
    found = probe(nvswitch_matrix(8), gpu="h200-sxm")

    assert diagnose(found, expected=catalogue("dgx-h200")).healthy
    assert not diagnose(found, expected=catalogue("dgx-b200")).healthy


def test_a_warning_about_a_text_is_not_a_fault_of_the_machine() -> None:
    health = diagnose(probe(nvswitch_matrix(8), "what is this", gpu="h200-sxm"))

    assert [one.code for one in health.items] == ["reading"]
    assert item(health, "reading").code in ADVICE
    assert health.healthy


@pytest.mark.parametrize(
    ("failure", "healthy"), [("Field 'x' is not a valid field to query.", True), ("timeout", False)]
)
def test_a_tool_that_says_no_is_no_fault_and_one_that_hangs_is(failure: str, healthy: bool, tmp_path) -> None:
    """Partly seated bridges made `topo -m` take 112 s (NVIDIA/nccl#557)."""

    def run(command, timeout_s):
        return (
            CommandOutput(text=nvswitch_matrix(4)) if command[1:] == ("topo", "-m") else CommandOutput(failure=failure)
        )

    found = probe_machine(run=run, environment={}, nvml=lambda: NvmlSnapshot(failure="no library"), root=tmp_path)

    assert diagnose(found).healthy is healthy
    assert any(one.code == "stuck" for one in diagnose(found).items) is not healthy


# Measured


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
    beside = group("all_gather", 0.8e-3, (0, 1), alongside=1)

    found = item(diagnose(H200, measured(groups=(alone, beside))), "colliding_groups")
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
