"""Texts to clusters: what is concluded, which real faults are found, and that nothing is made up."""

import json

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from tests.topology.captures import MATRICES, NCCL, TOPO, found, matrix, text
from tests.topology.probed import links, node, probe
from topology.catalog.gpus import gpu_kind
from topology.cluster import Cluster, LinkKind, LinkState, Severity, Source, VertexKind
from topology.codec import convert, to_builtins, to_json
from topology.errors import BadCluster, BadInput
from topology.probe.from_text import fill_rates, probe_text
from topology.probe.report import explain, islands, probe_json
from topology.readers.smi_topo import nv_count


@pytest.mark.parametrize("key", MATRICES, ids=lambda key: key["file"][:2])
def test_islands_pairs_and_nics_of_every_capture(key):
    said = probe_json(probe((TOPO / key["file"]).read_text()))
    assert said["islands"] == key["nvlink_islands"]
    assert {pair: nv_count(label) for pair, label in said["pairs"].items() if nv_count(label)} == key["nvlink_pairs"]
    assert [gpu["index"] for gpu in said["gpus"]] == list(range(key["gpu_count"]))
    legend = key["nic_legend"] or {}
    assert [nic["label"] for nic in said["nics"]] == key["nic_labels"]
    assert all(nic["name"] == legend.get(nic["label"], nic["name"]) for nic in said["nics"])
    closest = {gpu[3:]: best["nics"] for gpu, best in (key["closest_nic_per_gpu"] or {}).items()}
    assert said["closest_nics"] == closest
    for gpu in key["per_gpu"] or []:
        index = int(gpu["gpu"][3:])
        assert said["gpus"][index]["cpu_affinity"] == gpu["cpu_affinity"]
        if (gpu["numa_affinity"] or "").isdigit():
            assert said["gpus"][index]["numa"] == int(gpu["numa_affinity"])
    json.dumps(said)


SWITCHED = {"09", "31", "33", "50", "51", "52", "55", "56", "58", "61", "64", "65", "67", "69", "86"}


@pytest.mark.parametrize("key", MATRICES, ids=lambda key: key["file"][:2])
def test_switched_machines_get_a_hub_and_meshes_get_cables(key):
    """A hub carries each GPU's links once; on a mesh no GPU has more cables than it has links."""
    cluster = probe((TOPO / key["file"]).read_text())
    hubs = [vertex for vertex in node(cluster).vertices if vertex.kind is VertexKind.NVSWITCH]
    assert len(hubs) == (key["file"][:2] in SWITCHED)
    spokes, cables = links(cluster, LinkKind.NVSWITCH), links(cluster, LinkKind.NVLINK)
    assert len(spokes) == (key["gpu_count"] if hubs else 0)
    assert not (hubs and cables)
    assert {(*(int(end[3:]) for end in (link.a, link.b)),): link.count for link in cables} == (
        {} if hubs else {tuple(map(int, pair.split("-"))): count for pair, count in key["nvlink_pairs"].items()}
    )


@pytest.mark.parametrize("path", [*TOPO.glob("*.txt"), *NCCL.rglob("*.xml")], ids=lambda path: path.stem)
def test_every_source_gives_a_whole_graph_and_english(path):
    if "graph" in path.stem:
        return  # a search result alone describes no machine
    cluster = probe(path.read_text())
    vertices = {gpu.vertex for gpu in node(cluster).gpus}
    vertices |= {nic.vertex for nic in node(cluster).nics} | {vertex.id for vertex in node(cluster).vertices}
    assert len(vertices) == len(node(cluster).gpus) + len(node(cluster).nics) + len(node(cluster).vertices)
    for link in node(cluster).links:
        assert {link.a, link.b} <= vertices
        assert link.a != link.b
    climbs = [link.a for link in links(cluster, LinkKind.PCIE)]
    assert len(set(climbs)) == len(climbs)  # every device has one way up
    assert {gpu.vertex for gpu in node(cluster).gpus} <= set(climbs)
    assert explain(cluster).startswith(f"probed: {len(node(cluster).gpus)} GPU")
    assert convert(to_builtins(cluster), Cluster, where="itself") == cluster


def test_pcie_tree_of_a_workstation():
    """Three switches in a tree: PIX pairs below PXB groups below one CPU each."""
    cluster = probe(matrix("83_"))
    up = {link.a: link.b for link in links(cluster, LinkKind.PCIE)}
    assert up["gpu0"] == up["gpu1"] != up["gpu2"] == up["gpu3"]
    assert up[up["gpu0"]] == up[up["gpu2"]] != up[up["gpu4"]]
    assert up[up[up["gpu0"]]] == up[up[up["gpu4"]]]  # NODE: the same CPU
    assert not links(cluster, LinkKind.SMP)


def test_sockets_are_joined_where_the_matrix_says_sys():
    cluster = probe(matrix("80_"))
    up = {link.a: link.b for link in links(cluster, LinkKind.PCIE)}
    assert {up[f"gpu{gpu}"] for gpu in range(4)} == {"cpu0"}
    assert {up[f"gpu{gpu}"] for gpu in range(4, 8)} == {"cpu1"}
    (smp,) = links(cluster, LinkKind.SMP)
    assert {smp.a, smp.b} == {"cpu0", "cpu1"}
    assert all(link.confidence < 1 for link in links(cluster, LinkKind.PCIE))  # no column named the NUMA node


def test_texts_of_one_machine_are_fused():
    cluster = probe(
        text("h200x4/nvidia_smi_topo_m.txt"),
        text("h200x4/nvidia_smi_topo_p2p.txt"),
        text("h200x4/nvidia_smi_nvlink_s_gpu0.txt"),
        text("h200x4/nccl_topo.xml"),
        text("h200x4/nccl_graph.xml"),
        "GPU 1: NVIDIA H200 (UUID: GPU-1)\nGPU 2: NVIDIA H200 (UUID: GPU-2)\nGPU 3: NVIDIA H200 (UUID: GPU-3)\n",
    )
    assert [gpu.kind for gpu in node(cluster).gpus] == ["h200-sxm"] * 4
    assert node(cluster).gpus[3].pci_bus_id == "0000:00:09.0"
    (hub,) = [vertex for vertex in node(cluster).vertices if vertex.kind is VertexKind.NVSWITCH]
    assert not hub.multicast  # its NCCL graph found no NVLS channel
    for link in links(cluster, LinkKind.NVSWITCH):
        assert link.bytes_per_s == 18 * 25e9  # payload, not the printed line rate of 26.562
        assert link.source is Source.DATASHEET
    # A virtual machine: NCCL sees NUMA node -1 and links of width 0.
    (hidden,) = found(cluster, Severity.WARNING, "hidden")
    assert "-1" in hidden.why
    assert "width 0" in hidden.why
    assert all(link.confidence <= 0.3 for link in links(cluster, LinkKind.PCIE))
    assert not found(cluster, Severity.ERROR)


def test_multicast_is_read_from_the_nccl_graph():
    cluster = probe(
        (NCCL / "gb300_nvl72_2tray_healthy_8gpu.xml").read_text(), (NCCL / "gb300_1tray_graph.xml").read_text()
    )
    assert [vertex.multicast for vertex in node(cluster).vertices if vertex.kind is VertexKind.NVSWITCH] == [True]
    assert islands(node(cluster)) == [list(range(8))]  # two trays, one NVLink domain
    assert [gpu.tray for gpu in node(cluster).gpus] == [0] * 4 + [1] * 4
    assert not found(cluster, Severity.ERROR)


def test_the_model_is_never_guessed():
    cluster = probe(matrix("50_"))
    assert {gpu.kind for gpu in node(cluster).gpus} == {"unknown"}
    (note,) = found(cluster, Severity.INFO, "unknown_model")
    assert "Hopper or Blackwell" in note.why
    assert all(link.bytes_per_s is None for link in links(cluster, LinkKind.NVSWITCH))
    assert cluster.kind("unknown").peak_flops == {}


def test_a_named_model_gives_rates():
    cluster = probe(matrix("50_"), gpu="h200-sxm")
    assert all(link.bytes_per_s == 450e9 for link in links(cluster, LinkKind.NVSWITCH))
    assert all(link.nccl_bytes_per_s == 18 * 20.6e9 for link in links(cluster, LinkKind.NVSWITCH))
    assert all(link.bytes_per_s == 63e9 for link in links(cluster, LinkKind.PCIE))
    assert not found(cluster, Severity.INFO, "unknown_model")
    with pytest.raises(BadCluster):
        probe(matrix("50_"), gpu="h2000")


def test_bridged_cards_by_the_drivers_name():
    cluster = probe(matrix("47_"), text("topo/nvlink_status/3x_a6000_one_pair.txt"))
    (cable,) = links(cluster, LinkKind.NVLINK)
    assert cable.bytes_per_s == pytest.approx(4 * 14.062e9)
    assert (cable.a, cable.b, cable.state) == ("gpu0", "gpu1", LinkState.UP)


def test_one_named_gpu_names_its_board_and_says_so():
    cluster = probe(text("h200x4/nvidia_smi_topo_m.txt"), text("h200x4/nvidia_smi_nvlink_s_gpu0.txt"))
    assert {gpu.kind for gpu in node(cluster).gpus} == {"h200-sxm"}
    assert [gpu.name for gpu in node(cluster).gpus] == ["NVIDIA H200", None, None, None]
    assert found(cluster, Severity.INFO, "assumed_model", 1, 2, 3)


def test_cards_that_could_be_bridged_and_are_not():
    assert found(probe(matrix("62_"), gpu="h200-sxm"), Severity.WARNING, "no_nvlink")
    assert not found(probe(matrix("62_")), Severity.WARNING, "no_nvlink")


def test_a_list_of_gpus_says_nothing_of_their_links():
    """`nvidia-smi -L` and `--query-gpu` show no pairs: that NVLink is missing is not known from them."""
    listed = "\n".join(f"GPU {n}: NVIDIA H200 (UUID: GPU-{n}1111111-1111-1111-1111-111111111111)" for n in (0, 1))
    (said,) = (one for one in probe(listed).findings if one.code == "no_nvlink")

    assert said.what.startswith("whether NVLink joins the GPUs was not read")


def test_a_table_that_is_not_nvidias_is_no_machine():
    """Of rocm-smi, which looks like one of peer access."""
    with pytest.raises(BadInput, match="lists the GPUs"):
        probe("       GPU0         GPU1\nGPU0   0            15\nGPU1   15           0\n")


def test_fill_rates_leaves_what_it_does_not_know():
    cluster = probe(matrix("50_"))
    assert fill_rates(cluster, (gpu_kind("h200-sxm"),)) == cluster  # no GPU is called h200-sxm
    tree = probe((NCCL / "oci_bm.gpu.h100.8.xml").read_text(), gpu="h200-sxm")
    read = {link.a: link for link in links(tree, LinkKind.PCIE) if link.a == "gpu0"}["gpu0"]
    assert read.bytes_per_s == pytest.approx(63.0e9, rel=1e-3)  # gen 5 x16 from the file itself
    uplink = next(link for link in links(tree, LinkKind.PCIE) if link.b.startswith("cpu"))
    assert uplink.source is Source.ASSUMED


def test_a_cluster_file_is_returned_as_it_is():
    cluster = probe(matrix("50_"), gpu="h200-sxm")
    assert probe(to_json(cluster)) == cluster
    both = probe(to_json(cluster), matrix("51_"))
    assert found(both, Severity.INFO, "two_answers")
    assert {gpu.kind for gpu in node(both).gpus} == {"h200-sxm"}
    newer = to_json(cluster).replace('"schema_version": 1', '"schema_version": 99')
    with pytest.raises(BadInput, match="describes"):
        probe(newer)


def test_text_that_is_nothing_is_refused_alone_and_noted_in_company():
    with pytest.raises(BadInput):
        probe("hello")
    with pytest.raises(BadInput):
        probe_text([])
    assert found(probe("hello", matrix("50_")), Severity.WARNING, "reading")
    assert found(probe("<system>", matrix("50_")), Severity.WARNING, "reading")
    assert found(probe(matrix("50_"), matrix("51_")), Severity.WARNING, "reading")


def test_cut_text_and_unknown_words_are_told():
    assert found(probe(matrix("09_")), Severity.WARNING, "reading")
    odd = probe("\tGPU0\tGPU1\nGPU0\t X \tXLINK7\nGPU1\tXLINK7\t X \n")
    assert found(odd, Severity.WARNING, "reading")
    assert node(odd).pairs == {}
    assert "XLINK7" in explain(odd)
    assert "nothing was read about: 0-1" in explain(odd)


def test_english_names_cliques_and_detours():
    said = explain(
        probe(
            "\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tNIC0\n"
            "GPU0\t X \tNV4\tNV4\tNV4\tSYS\tPIX\nGPU1\tNV4\t X \tNV4\tNV4\tSYS\tPHB\nGPU2\tNV4\tNV4\t X "
            "\tNV4\tSYS\tPHB\n"
            "GPU3\tNV4\tNV4\tNV4\t X \tSYS\tPHB\nGPU4\tSYS\tSYS\tSYS\tSYS\t X \tSYS\nNIC0\tPIX\tPHB\tPHB\tPHB\tSYS\t "
            "X \n"
        )
    )
    assert "GPUs 0-3 are fully connected by NV4" in said
    assert "only by SYS (across CPU sockets): 0-4 1-4 2-4 3-4" in said
    assert "nearest NIC of GPUs 0-4: NIC0" in said


def test_english_says_that_a_hub_is_not_a_clique():
    assert "share an NVSwitch fabric: 18 links a GPU" in explain(probe(matrix("50_")))
    assert "partly connected by NVLink" in explain(probe(matrix("03_")))


@given(
    st.lists(
        st.one_of(st.text(), st.sampled_from([matrix("03_")[:400], matrix("48_"), "GPU 0: X (UUID: a)", "{}", "<a/>"])),
        max_size=4,
    )
)
def test_no_texts_crash_the_probe(texts):
    try:
        cluster = probe(*texts)
    except BadInput:
        return
    explain(cluster)
    printed = "".join(texts)
    for label in probe_json(cluster)["pairs"].values():
        assert label in printed


@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_captures_of_different_machines_together(data):
    """Sources that contradict each other in every way still give one connected description."""
    files = [*sorted(TOPO.rglob("*.txt")), *sorted(NCCL.rglob("*.xml"))]
    contents = []
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=3)):
        content = path.read_text()
        at = data.draw(st.integers(0, len(content)))
        gone = data.draw(st.sampled_from([0, 1, 5, 40]))
        new = data.draw(st.sampled_from(["", "\t", "\n", "NV18", "GPU3", "NIC1", "X", "-1", "0", '"', "\x1b[4m"]))
        contents.append(content[:at] + new + content[at + gone :])
    try:
        cluster = probe(*contents)
    except BadInput:
        return
    explain(cluster)
    vertices = {gpu.vertex for gpu in node(cluster).gpus} | {nic.vertex for nic in node(cluster).nics}
    vertices |= {vertex.id for vertex in node(cluster).vertices}
    assert all({link.a, link.b} <= vertices for link in node(cluster).links)
    if not any("<system" in content for content in contents):
        printed = "".join(contents).replace("SOC", "SYS")
        assert all(label in printed for label in node(cluster).pairs.values())


def test_what_the_whole_machine_carries_is_said():
    """47: one bridged pair of A6000, the third card on PCIe; 50: eight GPUs with 18 links into NVSwitch."""
    pair = explain(probe(matrix("47_")))
    switched = probe_json(probe(matrix("50_")))

    assert "the slowest pair is 0-2" in pair
    assert switched["bisection"]["bytes_per_s"] == pytest.approx(4 * 18 * 25e9, rel=0.07)


def test_a_table_of_peer_access_alone_lists_its_gpus_and_asks_for_their_paths() -> None:
    cluster = probe(text("topo/p2p/h100_8gpu_p2p_r_ok.txt"))

    assert [gpu.index for gpu in node(cluster).gpus] == list(range(8))
    assert any("topo -m" in one.remedy for one in found(cluster, Severity.WARNING, "no_nvlink"))
