"""Measurements as data: joined from records, refused when impossible, and written into the links they belong to."""

from dataclasses import replace

import pytest

from topology.catalog.clusters import cluster as catalogue
from topology.catalog.verify import verify_cluster
from topology.cluster import Cluster, Gpu, Link, LinkKind, LinkState, Node, NodeGroup, Source, Vertex, VertexKind
from topology.codec import to_json, write_text
from topology.errors import BadInput
from topology.profile.measurement import (
    Flow,
    FlowSet,
    GroupSample,
    Measurement,
    colliding_flows,
    gpu_index,
    measurement_from_records,
    profile_from_measurement,
    read_measurement,
    with_measured_rates,
)
from topology.profile.profile import CollectiveSample, check_profile

HEADER = {"kind": "header", "machine": "m", "device": "cuda", "taken_at": "2026-01-01T00:00:00+00:00"}


def single(src: str, dst: str, rate: float, pattern: str = "pair") -> FlowSet:
    return FlowSet(pattern=pattern, nbytes=2**27, flows=(Flow(src=src, dst=dst, bytes_per_s=rate),))


def both_ways(gpu: int, down: float, up: float) -> tuple[FlowSet, FlowSet]:
    return (single("host", f"gpu{gpu}", down, "host_to_device"), single(f"gpu{gpu}", "host", up, "device_to_host"))


def measured(*flows: FlowSet, **more) -> Measurement:
    return Measurement(machine="m", device="cuda", taken_at="2026-01-01T00:00:00+00:00", flows=flows, **more)


def links(cluster: Cluster) -> dict[tuple[str, str], Link]:
    return {(link.a, link.b): link for link in cluster.groups[0].node.links}


# Records


def test_headers_add_up() -> None:
    got = measurement_from_records([HEADER, {"kind": "header", "versions": {"nccl": "2.28.9"}, "seconds": 3.5}])

    assert (got.machine, got.versions, got.seconds) == ("m", {"nccl": "2.28.9"}, 3.5)
    assert got.complete


def test_a_run_that_was_stopped_is_partial_and_says_so() -> None:
    got = measurement_from_records(
        [HEADER, {"kind": "missing", "what": "a"}, {"kind": "missing", "what": "b"}, {"kind": "missing", "what": "a"}]
    )

    assert got.missing == ("a", "b")
    assert not got.complete


@pytest.mark.parametrize(
    "records",
    [
        [],
        [{"kind": "flows", "pattern": "pair", "nbytes": 1, "flows": []}],
        [HEADER, {"kind": "surprise"}],
        [HEADER, {"kind": "flows", "pattern": "pair", "nbytes": 1, "flows": [], "more": 1}],
        [
            HEADER,
            {"kind": "flows", "pattern": "p", "nbytes": 1, "flows": [{"src": "gpu0", "dst": "x", "bytes_per_s": 1.0}]},
        ],
        [
            HEADER,
            {
                "kind": "flows",
                "pattern": "p",
                "nbytes": 1,
                "flows": [{"src": "gpu0", "dst": "host", "bytes_per_s": 0.0}],
            },
        ],
        [HEADER, {"kind": "compute", "gpu": 0, "burst_flops": -1.0}],
    ],
)
def test_records_that_cannot_be_are_refused(records: list) -> None:
    with pytest.raises(BadInput):
        measurement_from_records(records)


def test_a_file_round_trips(tmp_path) -> None:
    wanted = measured(single("gpu0", "gpu1", 1e9), missing=("something",))
    write_text(tmp_path / "m.json", to_json(wanted))

    assert read_measurement(tmp_path / "m.json") == wanted


@pytest.mark.parametrize("name", ["gpu", "gpu-1", "cpu0", "gpu1x", "", "gpu²"])
def test_names_that_are_no_gpu(name: str) -> None:
    with pytest.raises(BadInput):
        gpu_index(name)


def test_a_profile_holds_what_ran_alone() -> None:
    sample = CollectiveSample(op="all_reduce", ranks=2, nodes=1, nbytes=2**20, time_s=1e-3)
    alone = GroupSample(sample=sample, gpus=(0, 1), iterations=20)
    alongside = GroupSample(sample=replace(sample, time_s=2e-3), gpus=(0, 1), iterations=20, alongside=1)

    profile = profile_from_measurement(measured(groups=(alone, alongside), driver="580.1"), gpu="h200-sxm")

    check_profile(profile)
    assert profile.collectives == (sample,)
    assert (profile.gpu, profile.driver) == ("h200-sxm", "580.1")


def test_flows_that_collide_keep_less_than_three_quarters_each() -> None:
    def together(rate: float) -> FlowSet:
        flows = (Flow(src="gpu0", dst="gpu2", bytes_per_s=rate), Flow(src="gpu1", dst="gpu3", bytes_per_s=rate))
        return FlowSet(pattern="two_disjoint", nbytes=1, flows=flows)

    alone = (single("gpu0", "gpu2", 54e9), single("gpu1", "gpu3", 54e9))

    assert colliding_flows(measured(*alone, together(53e9))) == []
    ((_, _, kept),) = colliding_flows(measured(*alone, together(27e9)))
    assert kept == pytest.approx(0.5)


# Into the cluster


def test_switch_ports_get_the_median_over_peers_of_the_slower_direction() -> None:
    flows = [
        single(f"gpu{a}", f"gpu{b}", 200e9 if (a, b) == (0, 1) else 390e9) for a in range(4) for b in range(4) if a != b
    ]

    got = with_measured_rates(catalogue("h200x4"), measured(*flows, *both_ways(2, 50e9, 40e9)))

    ports = {link.a: link for link in got.groups[0].node.links if link.kind is LinkKind.NVSWITCH}
    assert [ports[f"gpu{i}"].measured_bytes_per_s for i in range(4)] == [390e9] * 4
    assert all(port.source is Source.MEASURED and port.bytes_per_s == 450e9 for port in ports.values())
    slots = {link.a: link for link in got.groups[0].node.links if link.kind is LinkKind.PCIE}
    assert slots["gpu2"].measured_bytes_per_s == 40e9
    assert slots["gpu1"].measured_bytes_per_s is None
    assert verify_cluster(got) == []


def test_rates_above_the_datasheet_are_not_believed() -> None:
    flows = [single(f"gpu{a}", f"gpu{b}", 3e12) for a in range(4) for b in range(4) if a != b]

    assert with_measured_rates(catalogue("h200x4"), measured(*flows)) == catalogue("h200x4")


def test_a_dry_run_changes_nothing() -> None:
    dry = replace(measured(*both_ways(0, 5e9, 5e9)), device="cpu")

    assert with_measured_rates(catalogue("h200x4"), dry) == catalogue("h200x4")


def tree() -> Cluster:
    """Four GPUs below two switches below one CPU; GPUs 0 and 1 also have a cable."""
    kind = catalogue("l40s-x8").gpu_kinds[0]
    slots = [Link(a=f"gpu{i}", b=f"sw{i // 2}", kind=LinkKind.PCIE, bytes_per_s=31.5e9) for i in range(4)]
    uplinks = [Link(a=f"sw{i}", b="cpu0", kind=LinkKind.PCIE, bytes_per_s=31.5e9) for i in range(2)]
    cable = Link(a="gpu0", b="gpu1", kind=LinkKind.NVLINK, bytes_per_s=100e9, count=4, state=LinkState.UNKNOWN)
    vertices = (
        *(Vertex(id=f"sw{i}", kind=VertexKind.PCIE_SWITCH) for i in range(2)),
        Vertex(id="cpu0", kind=VertexKind.CPU),
    )
    node = Node(
        name="tree",
        gpus=tuple(Gpu(index=i, kind=kind.name) for i in range(4)),
        vertices=vertices,
        links=(*slots, *uplinks, cable),
    )
    return Cluster(name="tree", gpu_kinds=(kind,), groups=(NodeGroup(node=node),))


def test_a_shared_uplink_gets_what_its_group_reached_together() -> None:
    def all_at_once(pattern: str, rate: float) -> FlowSet:
        ends = [("host", f"gpu{i}") if pattern.endswith("device") else (f"gpu{i}", "host") for i in range(4)]
        return FlowSet(pattern=pattern, nbytes=1, flows=tuple(Flow(src=a, dst=b, bytes_per_s=rate) for a, b in ends))

    two = [
        FlowSet(
            pattern="two_host_to_device",
            nbytes=1,
            flows=tuple(
                Flow(src="host", dst=f"gpu{gpu}", bytes_per_s=13e9 if a // 2 == b // 2 else 26e9) for gpu in (a, b)
            ),
        )
        for a in range(4)
        for b in range(a + 1, 4)
    ]
    alone = [flows for gpu in range(4) for flows in both_ways(gpu, 26e9, 25e9)]
    every = [all_at_once("all_host_to_device", 13e9), all_at_once("all_device_to_host", 12.5e9)]

    got = links(with_measured_rates(tree(), measured(*alone, *two, *every)))

    assert got["sw0", "cpu0"].measured_bytes_per_s == pytest.approx(25e9)
    assert got["sw1", "cpu0"].measured_bytes_per_s == pytest.approx(25e9)
    assert got["gpu0", "sw0"].measured_bytes_per_s == pytest.approx(25e9)


def test_a_cable_of_unknown_state_is_trusted_once_it_carried_its_rate() -> None:
    fast = links(with_measured_rates(tree(), measured(single("gpu0", "gpu1", 90e9), single("gpu1", "gpu0", 88e9))))
    slow = links(with_measured_rates(tree(), measured(single("gpu0", "gpu1", 9e9), single("gpu1", "gpu0", 88e9))))

    assert (fast["gpu0", "gpu1"].state, fast["gpu0", "gpu1"].measured_bytes_per_s) == (LinkState.UP, 88e9)
    assert (slow["gpu0", "gpu1"].state, slow["gpu0", "gpu1"].measured_bytes_per_s) == (LinkState.UNKNOWN, 9e9)
