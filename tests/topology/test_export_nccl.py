"""NCCL topology files: parsed back, by another parser and by our own reader."""

from dataclasses import replace

import pytest
from defusedxml import ElementTree

from topology.catalog.clusters import cluster
from topology.cluster import LinkKind, LinkState, NodeGroup
from topology.errors import BadCluster
from topology.export.nccl import to_nccl_xml
from topology.rates.node_rates import ASSUMED_PCIE_BYTES_PER_S
from topology.readers.nccl_xml import parse_xml, read_topology


def test_nccl_file_of_a_switched_node():
    root = ElementTree.fromstring(to_nccl_xml(cluster("dgx-h100")))
    assert root.tag == "system"
    gpus = root.findall(".//gpu")
    assert [int(gpu.get("dev")) for gpu in gpus] == list(range(8))
    assert {gpu.get("sm") for gpu in gpus} == {"90"}
    links = [link for gpu in gpus for link in gpu.findall("nvlink")]
    assert [(link.get("count"), link.get("tclass")) for link in links] == [("18", "0x068000")] * 8
    assert {net.get("speed") for net in root.findall(".//net")} == {"400000"}
    assert len(root.findall("cpu")) == 2
    bus = [pci.get("busid") for pci in root.findall(".//pci")]
    assert len(set(bus)) == len(bus) == 8 + 8 + 8
    # Each GPU has its network port below the same switch, as nvidia-smi's PIX says of such nodes.
    for switch in root.findall("cpu/pci"):
        assert switch.get("class") == "0x060400"
        assert {child.get("class") for child in switch} == {"0x030200", "0x020700"}
    assert {pci.get("link_speed") for pci in root.findall(".//pci")} == {"32.0 GT/s PCIe"}


def test_nccl_file_of_a_mesh_names_peers_by_bus_id():
    root = ElementTree.fromstring(to_nccl_xml(cluster("dgx-1v")))
    bus = {pci.get("busid"): pci.find("gpu") for pci in root.findall(".//pci") if pci.find("gpu") is not None}
    assert len(bus) == 8
    for own, gpu in bus.items():
        assert sum(int(link.get("count")) for link in gpu.findall("nvlink")) == 6
        for link in gpu.findall("nvlink"):
            back = [int(b.get("count")) for b in bus[link.get("target")].findall("nvlink") if b.get("target") == own]
            assert back == [int(link.get("count"))]


def test_nccl_file_keeps_a_lost_gpu_with_count_zero():
    made = cluster("gb300-nvl72")
    node = made.groups[0].node
    links = tuple(
        replace(link, state=LinkState.ABSENT) if link.a == "gpu1" and link.kind is LinkKind.NVSWITCH else link
        for link in node.links
    )
    lost = replace(made, groups=(NodeGroup(node=replace(node, links=links)),))
    root = ElementTree.fromstring(to_nccl_xml(lost))
    counts = {gpu.get("dev"): gpu.find("nvlink").get("count") for gpu in root.findall(".//gpu")}
    assert counts == {"0": "18", "1": "0", "2": "18", "3": "18"}
    assert {c2c.get("bw") for c2c in root.findall(".//c2c")} == {"223560"}
    assert {cpu.get("arch") for cpu in root.findall("cpu")} == {"arm64"}
    other = ElementTree.fromstring(to_nccl_xml(lost, tray=17))
    assert [gpu.get("dev") for gpu in other.findall(".//gpu")] == ["68", "69", "70", "71"]


def test_nccl_file_escapes_names():
    made = cluster("dgx-h100")
    node = made.groups[0].node
    gpus = (replace(node.gpus[0], pci_bus_id='"><x a="&'), *node.gpus[1:])
    root = ElementTree.fromstring(to_nccl_xml(replace(made, groups=(NodeGroup(node=replace(node, gpus=gpus)),))))
    assert any(pci.get("busid") == '"><x a="&' for pci in root.findall(".//pci"))


@pytest.mark.parametrize(("node", "tray"), [(1, 0), (-1, 0), (0, 18)])
def test_nccl_file_of_a_host_that_is_not_there(node, tray):
    with pytest.raises(BadCluster):
        to_nccl_xml(cluster("gb200-nvl72"), node, tray)


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-1v", "l40s-x8", "gb200-nvl72", "mi300x-x8"])
def test_our_own_reader_understands_every_word(name):
    made = cluster(name)
    read = read_topology(parse_xml(to_nccl_xml(made)))

    assert not read.problems
    assert not read.unknown
    node = made.groups[0].node
    assert [gpu.dev for gpu in read.gpus] == [gpu.index for gpu in node.gpus if gpu.tray == 0]
    assert [net.name for net in read.nets] == [nic.label for nic in node.nics if nic.tray == 0]
    assert {net.bytes_per_s for net in read.nets} <= {nic.bytes_per_s for nic in node.nics}


def test_a_slot_nobody_described_has_the_rate_of_the_gpus_datasheet():
    """Without PCIe links in the description, and without a datasheet the slowest slot in use."""
    made = cluster("dgx-a100")
    node = made.groups[0].node
    bare = replace(node, links=tuple(link for link in node.links if link.kind is not LinkKind.PCIE))
    known = replace(made, groups=(NodeGroup(node=bare),))
    unknown = replace(known, gpu_kinds=tuple(replace(kind, pcie_bytes_per_s=0.0) for kind in known.gpu_kinds))

    def slot(described):
        (rate,) = {gpu.pci.link_speed_bytes_per_s for gpu in read_topology(parse_xml(to_nccl_xml(described))).gpus}
        return rate

    assert slot(known) == pytest.approx(made.gpu_kinds[0].pcie_bytes_per_s, rel=0.02)
    assert slot(unknown) == pytest.approx(ASSUMED_PCIE_BYTES_PER_S, rel=0.02)


def test_names_with_control_characters_stay_readable():
    made = cluster("dgx-h100")
    node = made.groups[0].node
    nics = (replace(node.nics[0], label="\x1b[31m<&\x00"), *node.nics[1:])
    text = to_nccl_xml(replace(made, groups=(NodeGroup(node=replace(node, nics=nics)),)))

    assert any(net.name == r"\x1b[31m<&\x00" for net in read_topology(parse_xml(text)).nets)
