"""Clusters as people say them, machine types of clouds, and JSON as the argument itself."""

import json

import pytest

from topology.catalog.cluster_file import load_cluster
from topology.cluster import ASSUMED
from topology.errors import BadCluster, BadInput
from topology.rates.reach import cluster_caveats


def described(text):
    """Nodes, GPUs in a node, kind, ports of a node and Gb/s of a port."""
    found = load_cluster(text)
    group = found.groups[0]
    ports = group.node.nics
    rate = ports[0].bytes_per_s * 8 / 1e9 if ports else 0
    return group.count, len(group.node.gpus), found.gpu_kinds[0].name, len(ports), rate


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8xH100", (1, 8, "h100-sxm", 8, 400)),
        ("8 x h100", (1, 8, "h100-sxm", 8, 400)),
        ("H100:8", (1, 8, "h100-sxm", 8, 400)),
        ("2xH100:8", (2, 8, "h100-sxm", 8, 400)),
        ("16xH100", (2, 8, "h100-sxm", 8, 400)),
        ("4xH100", (1, 4, "h100-sxm", 4, 400)),
        ("2x8xA100-40GB", (2, 8, "a100-sxm-40gb", 8, 200)),
        ("2x8xA100", (2, 8, "a100-sxm-80gb", 8, 200)),
        ("4x8xL40S@100GbE", (4, 8, "l40s", 1, 100)),
        ("4x8xL40S@100Gb/s", (4, 8, "l40s", 1, 100)),
        ("4x8xL40S@2x12.5GB/s", (4, 8, "l40s", 2, 100)),
        ("2x8xH100@NDR", (2, 8, "h100-sxm", 1, 400)),
        ("2x8xH100@8x400G", (2, 8, "h100-sxm", 8, 400)),
        ("2x8x4090", (2, 8, "rtx-4090", 2, 25)),
        ("1x8xH100-NVL", (1, 8, "h100-nvl", 2, 400)),
        ("4xp5.48xlarge", (4, 8, "h100-sxm", 32, 100)),
        ("2xdgx-h200", (2, 8, "h200-sxm", 8, 400)),
        ('{"gpu": "l40s", "gpus_per_node": 4, "nodes": 2, "nic_gbit_per_gpu": 25}', (2, 4, "l40s", 4, 25)),
    ],
)
def test_what_people_say_is_the_machine_that_they_mean(text, expected):
    assert described(text) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("p4d.24xlarge", (1, 8, "a100-sxm-40gb", 4, 100)),
        ("p4de", (1, 8, "a100-sxm-80gb", 4, 100)),
        ("p5.48xlarge", (1, 8, "h100-sxm", 32, 100)),
        ("p5e.48xlarge", (1, 8, "h200-sxm", 32, 100)),
        ("p5en", (1, 8, "h200-sxm", 16, 200)),
        ("g5.12xlarge", (1, 4, "a10g", 1, 40)),
        ("2xg5.48xlarge", (2, 8, "a10g", 1, 100)),
        ("g6.24xlarge", (1, 4, "l4", 1, 50)),
        ("g6e.24xlarge", (1, 4, "l40s", 2, 100)),
        ("a2-highgpu-8g", (1, 8, "a100-sxm-40gb", 1, 100)),
        ("a3-highgpu-8g", (1, 8, "h100-sxm", 4, 200)),
        ("a3-megagpu-8g", (1, 8, "h100-sxm", 8, 200)),
        ("a3-ultragpu-8g", (1, 8, "h200-sxm", 8, 400)),
        ("Standard_ND96isr_H100_v5", (1, 8, "h100-sxm", 8, 400)),
        ("ND96amsr_A100_v4", (1, 8, "a100-sxm-80gb", 8, 200)),
        ("ND96isr_H200_v5", (1, 8, "h200-sxm", 8, 400)),
        ("BM.GPU.H100.8", (1, 8, "h100-sxm", 16, 200)),
        ("gd-8xh100ib-i128", (1, 8, "h100-sxm", 8, 400)),
    ],
)
def test_machine_types_of_clouds_have_their_published_ports(name, expected):
    assert described(name) == expected


@pytest.mark.parametrize(
    ("text", "assumed"),
    [
        ("8xH100", "H100 is h100-sxm (the others: h100-pcie, h100-nvl)"),
        ("2x8xA100-40GB", "A100-40GB is a100-sxm-40gb (the others: a100-pcie-40gb)"),
        ("16xH100", "2 nodes of 8 GPUs, as in dgx-h100"),
        ("4x8xL40S@100GbE", "one port of 100 Gb/s a node (several: @8x100G)"),
        ("4x8xL40S@100GbE", "RDMA over the Ethernet (RoCE)"),
        ("2x8xH100@10GbE", "TCP over the Ethernet, 30 us (RDMA: @10GbE-RoCE)"),
        ("2x8xH100@1G", "TCP over the Ethernet, 30 us (RDMA: @1GbE-RoCE)"),
        ("2x8x4090@100GbE", "TCP over the Ethernet, 30 us (RDMA: @100GbE-RoCE)"),
    ],
)
def test_what_was_left_open_is_listed(text, assumed):
    assert assumed in cluster_caveats(load_cluster(text))
    assert any(finding.what == ASSUMED + assumed for finding in load_cluster(text).findings)


def test_what_runs_over_ethernet_can_be_stated():
    stated = [load_cluster(f"2x8xH100@{network}") for network in ("10GbE-RoCE", "100GbE TCP", "10GbE")]
    latencies = [cluster.fabric.latency_s for cluster in stated]

    assert [cluster.fabric.rdma for cluster in stated] == [True, False, False]
    assert latencies[0] < latencies[1] == latencies[2]
    assert not any("Ethernet" in line for cluster in stated[:2] for line in cluster_caveats(cluster))


def test_a_full_name_assumes_no_variant():
    assert not any("the others" in line for line in cluster_caveats(load_cluster("8xh100-pcie")))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("12xH100", ("12 GPUs are not whole nodes of 8", "2x6xH100")),
        ("8xH1000", ("unknown GPU 'H1000'", "h100-sxm", "2x8xA100-40GB")),
        ("7xA11", ("unknown GPU 'A11'", "a10g")),
        ("2x8xA100@foo", ("the network 'foo'", "8 x a100-sxm-80gb", "@100GbE")),
        ("0xH100", ("counts 0 of H100",)),
        ("2x2xdgx-h100", ("dgx-h100 has 8 GPUs", "2xdgx-h100")),
        ("H100", ("is a GPU, not a cluster", "8xH100")),
        ("", ("empty", "8xH100")),
        ("   ", ("empty",)),
        ("nonsense", ("unknown cluster", "8xH100", "p5.48xlarge")),
        ("9999999x8xH100", ("nodes",)),
    ],
)
def test_errors_say_what_was_understood_and_what_is_known(text, parts):
    with pytest.raises(BadCluster) as caught:
        load_cluster(text)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_json_that_is_none_is_refused():
    with pytest.raises(BadInput, match="not valid JSON"):
        load_cluster('{"gpu": ')
    with pytest.raises(BadInput, match="unknown"):
        load_cluster(json.dumps({"gpu": "l40s", "node": 2}))


def test_a_cluster_that_was_counted_does_not_grow():
    with pytest.raises(BadCluster, match="8 GPUs, 16 were asked for"):
        load_cluster("8xH100", gpus=16)
    assert load_cluster("2x8xH100", gpus=8).gpu_count == 8
