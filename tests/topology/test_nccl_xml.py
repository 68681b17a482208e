"""NCCL and RCCL files: every public file is read, written and read again without loss, and counted as in the key."""

from collections import Counter
from xml.etree.ElementTree import Element, canonicalize, tostring

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.topology.captures import DATA, NCCL, NCCL_FILES
from topology.errors import BadInput
from topology.readers.nccl_xml import (
    normal_busid,
    parse_xml,
    pcie_bytes_per_s,
    read_graphs,
    read_topology,
    unknown_parts,
    write_xml,
)


def content(root: Element) -> str:
    """A tree as one text that is the same for the same elements, attributes and words, however they are laid out."""
    return canonicalize(tostring(root, encoding="unicode"), strip_text=True)


ALL = [*sorted(NCCL.rglob("*.xml")), *sorted((DATA / "h200x4").glob("*.xml"))]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_every_file_survives_a_round_trip(path):
    root = parse_xml(path.read_text())
    assert content(parse_xml(write_xml(root))) == content(root)
    assert unknown_parts(root) == ()
    if root.tag == "system":
        assert read_topology(root).problems == ()


@pytest.mark.parametrize("key", NCCL_FILES, ids=lambda key: key["file"])
def test_every_file_matches_its_index(key):
    root = parse_xml((NCCL / key["file"]).read_text())
    elements = Counter(element.tag for element in root.iter())
    assert root.tag == key["root"]
    assert elements["pci"] == key["pci_nodes"]
    assert elements["nvlink"] == key["nvlink_elements"]
    if root.tag != "system":
        assert all(len(graph.channels) == graph.channel_count for graph in read_graphs(root))
        return
    topology = read_topology(root)
    listed = [gpu for gpu in topology.gpus if gpu.dev is not None]
    assert len(topology.cpus) == key["cpus_numa"]
    assert len(listed) == key["gpu_elements"]
    assert {str(gpu.sm) for gpu in listed} == set(key["sm"])
    assert len(topology.nets) == key["net_elements"]
    speeds = {f"{net.bytes_per_s * 8 / 1e6:.0f}" for net in topology.nets if net.bytes_per_s}
    assert speeds == {speed for speed in key["net_speeds"] if speed != "0"}
    counts = [sum(link.count for link in gpu.links if not link.xgmi) for gpu in listed]
    expected = key["nvlinks_total_per_gpu"]
    if "notes" in key:  # newer entries map the rank to its links, older ones the number of links to how many GPUs
        assert {str(gpu.rank): count for gpu, count in zip(listed, counts, strict=True)} == expected
    else:
        assert Counter(map(str, counts)) == Counter(expected)
    assert sum(len(gpu.links) for gpu in listed) == key["nvlink_elements"] + key.get("xgmi_elements", 0)


def test_files_without_gpu_elements_still_name_the_gpus():
    topology = read_topology(parse_xml((NCCL / "azure_ndv5-topo.xml").read_text()))
    assert len(topology.gpus) == 8
    assert all(gpu.dev is None and gpu.pci.device_class == "0x030200" for gpu in topology.gpus)
    assert len(topology.devices) == 8  # its InfiniBand functions


def test_c2c_and_network_rates():
    topology = read_topology(parse_xml((NCCL / "gb300_1tray_fault_gpu1_count0.xml").read_text()))
    # NCCL: bw [MB/s] x count; 223.6 GB/s is half of a Grace C2C link's 450 both ways
    assert topology.gpus[0].c2c_bytes_per_s == pytest.approx(44712e6 * 5)
    assert topology.nets[0].bytes_per_s == pytest.approx(100e9 / 8)
    assert [sum(link.count for link in gpu.links) for gpu in topology.gpus] == [18, 0, 18, 18]


def test_graph_of_a_tray_holds_the_published_channels():
    graphs = {graph.id: graph for graph in read_graphs(parse_xml((NCCL / "gb300_1tray_graph.xml").read_text()))}
    assert graphs[0].channel_count == 16
    assert graphs[1].channel_count == 16
    assert graphs[3].channel_count == 4
    assert graphs[0].channels[0] == (("gpu", 0), ("gpu", 1), ("gpu", 2), ("gpu", 3))


@pytest.mark.parametrize(
    ("gt", "lanes", "gigabytes"), [(8, 16, 15.75), (16, 16, 31.5), (32, 16, 63.0), (64, 16, 121.0)]
)
def test_pcie_rates_are_the_published_ones(gt, lanes, gigabytes):
    assert pcie_bytes_per_s(gt, lanes) == pytest.approx(gigabytes * 1e9, rel=2e-3)


def test_unknown_attributes_and_elements_are_kept_and_named():
    pci = '<pci busid="0:0"><gpu dev="0"><warp n="1"/></gpu></pci>'
    text = f'<system version="3"><cpu numaid="0" mood="good">{pci}</cpu></system>'
    root = parse_xml(text)
    assert unknown_parts(root) == ("cpu.mood", "<warp>")
    assert content(parse_xml(write_xml(root))) == content(root)


def test_addresses_are_spelt_one_way():
    assert normal_busid("00000000:1B:00.0") == normal_busid("0000:1b:00.0") == normal_busid("1b:00.0")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<system>",
        "not xml",
        "<a/><b/>",
        '<!DOCTYPE x [<!ENTITY a "aaaa">]><system v="&a;"/>',
        '<?xml version="1.0" encoding="utf-99"?><system/>',
        "<a>" * 200 + "</a>" * 200,
        "<system>" + "<cpu/>" * 100_001 + "</system>",
        "\ud800",
    ],
    ids=["empty", "open", "text", "two roots", "entity", "encoding", "deep", "long", "surrogate"],
)
def test_what_is_not_a_plain_small_file_is_refused(text):
    with pytest.raises(BadInput):
        parse_xml(text)


def test_the_wrong_root_is_refused():
    for read, root in ((read_topology, "graphs"), (read_graphs, "system")):
        with pytest.raises(BadInput):
            read(Element(root))


_NAMES = st.sampled_from(["system", "cpu", "pci", "gpu", "nvlink", "nic", "net", "c2c", "xgmi", "graph", "other"])
_VALUES = st.one_of(
    st.sampled_from(["0", "-1", "18", "0x2", "0x068000", "", "nan", "9" * 40]),
    st.text(alphabet="<>&\"' a0x\t\n\u00e9", max_size=6),
)
_ATTRIBUTES = st.dictionaries(
    st.sampled_from(
        ["count", "target", "tclass", "busid", "class", "dev", "rank", "numaid", "speed", "link_speed", "link_width"]
    ),
    _VALUES,
    max_size=5,
)


def tree(tag: str, attributes: dict[str, str], children: list[Element]) -> Element:
    element = Element(tag, attributes)
    element.extend(children)
    return element


_TREES = st.recursive(
    st.builds(Element, _NAMES, _ATTRIBUTES),
    lambda inner: st.builds(tree, _NAMES, _ATTRIBUTES, st.lists(inner, max_size=4)),
    max_leaves=12,
)


@given(_TREES)
def test_any_tree_survives_a_round_trip_and_the_typed_view(grown):
    root = tree("system", {}, [grown])
    assert content(parse_xml(write_xml(root))) == content(root)
    for gpu in read_topology(root).gpus:
        for link in gpu.links:
            assert link.count >= 0


@given(st.text())
def test_random_text_is_refused_politely(text):
    with pytest.raises(BadInput):
        parse_xml("<" + text)
