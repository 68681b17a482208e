"""Health by links: every fault seen on a real machine gets its item, its cost and exit-worthy severity; healthy ones
get none.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.topology.captures import MATRICES, NCCL, TOPO
from tests.topology.machines import H200X4, item, matrix, nvswitch_matrix, probe, with_nvml
from topology.catalog.clusters import cluster as catalogue
from topology.cluster import LinkKind, LinkState, Severity
from topology.health.cost import REFERENCE_BYTES, all_reduce_s, without_faults
from topology.health.diagnose import diagnose
from topology.probe.from_text import build
from topology.probe.machine import Evidence
from topology.readers.nvml import NvmlLink


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
        reported, untold = (
            [(one.code, one.severity, one.gpus, one.cost) for one in diagnose(machine).items]
            for machine in (found, replace(found, findings=silent))
        )
        assert reported == untold
        assert any(one.code != "note" for one in found.findings)


def test_no_gpu_is_not_a_fault() -> None:
    evidence = Evidence()
    empty = build(evidence, gpu=None, name="laptop")

    health = diagnose(empty)

    assert health.healthy
    assert health.gpu_count == 0


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
