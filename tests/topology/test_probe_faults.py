"""Faults that were seen on real machines, found in the texts that these printed."""

import pytest

from tests.topology.captures import NCCL, found, matrix, text
from tests.topology.probed import links, node, probe
from topology.cluster import LinkKind, LinkState, Severity
from topology.probe.report import islands


def without_gpu(capture, lost):
    """The matrix as it prints when GPU `lost` has left the fabric: its NV cells become SYS
    (vllm-project/vllm#16336).
    """
    lines = []
    for line in capture.splitlines():
        cells = line.split("\t") if "\t" in line else line.split()
        if cells and cells[0] == f"GPU{lost}":
            cells = [cell.replace("NV18", "SYS") for cell in cells]
        elif cells and cells[0].startswith("GPU") and "X" in cells:
            cells[1 + lost] = cells[1 + lost].replace("NV18", "SYS")
        lines.append("\t".join(cells) if "X" in cells else line)
    return "\n".join(lines)


def test_b200_with_one_gpu_off_the_fabric():
    cluster = probe(without_gpu(matrix("64_"), 2))
    (lost,) = found(cluster, Severity.ERROR, "lost_gpu", 2)
    assert "leave GPU 2 out" in lost.remedy
    assert islands(node(cluster)) == [[0, 1, 3, 4, 5, 6, 7]]
    spoke = next(link for link in node(cluster).links if link.a == "gpu2" and link.kind is LinkKind.NVSWITCH)
    assert (spoke.state, spoke.best_bytes_per_s) == (LinkState.ABSENT, 0.0)
    assert [gpu.healthy for gpu in node(cluster).gpus] == [True, True, False] + [True] * 5


@pytest.mark.parametrize(
    ("file", "gpu"), [("gb300_1tray_fault_gpu1_count0.xml", 1), ("gb300_nvl72_2tray_rank5_no_nvlink.xml", 5)]
)
def test_gb300_with_a_gpu_without_nvlink(file, gpu):
    cluster = probe((NCCL / file).read_text())
    assert found(cluster, Severity.ERROR, "lost_gpu", gpu)
    assert [one.index for one in node(cluster).gpus if not one.healthy] == [gpu]
    assert gpu not in islands(node(cluster))[0]


def test_half_bridged_a100s():
    """Four A100 PCIe whose owner expected two bridges and the matrix shows one (NVIDIA/k8s-device-plugin#436)."""
    cluster = probe(
        "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tNV12\tSYS\tSYS\t0-31\t0\nGPU1\tNV12\t X \tSYS\tSYS\t0-31\t0\n"
        "GPU2\tSYS\tSYS\t X \tNODE\t32-63\t1\nGPU3\tSYS\tSYS\tNODE\t X \t32-63\t1\n"
    )
    (bridges,) = found(cluster, Severity.WARNING, "half_bridged")
    assert "2, 3" in bridges.what
    assert all(gpu.healthy for gpu in node(cluster).gpus)
    assert found(probe(matrix("47_")), Severity.WARNING, "half_bridged")
    assert not found(probe(matrix("48_")), Severity.WARNING, "half_bridged")  # both pairs have theirs


def test_v100_with_inactive_links():
    cluster = probe(text("topo/nvlink_status/v100_gpu3_two_inactive.txt"))
    (inactive,) = found(cluster, Severity.WARNING, "links", 3)
    assert "4/6" in inactive.consequence


def test_virtual_machines_that_hide_switches():
    for file in ("h200_vm_numa_minus1_fragment.xml", "ibm_cloud_h100_vm_8subnet.xml"):
        assert found(probe((NCCL / file).read_text()), Severity.WARNING, "hidden")
    assert found(probe(matrix("15_")), Severity.WARNING, "hidden")  # SYS inside a NUMA node
    everything_phb = matrix("81_").replace("PIX", "PHB")
    assert found(probe(everything_phb), Severity.WARNING, "hidden")
    for file in ("oci_bm.gpu.h100.8.xml", "gb300_nvl72_2tray_healthy_8gpu.xml"):
        assert not found(probe((NCCL / file).read_text()), Severity.WARNING, "hidden")
    assert not found(probe(matrix("81_")), Severity.WARNING, "hidden")


def smi_links(gpu, active, total=18, rate="26.562 GB/s", name="NVIDIA H200"):
    lines = [f"\t Link {link}: {rate if link < active else '<inactive>'}" for link in range(total)]
    return "\n".join([f"GPU {gpu}: {name} (UUID: GPU-{gpu})", *lines, ""])


def test_matrix_and_link_list_that_disagree():
    cluster = probe(text("h200x4/nvidia_smi_topo_m.txt"), "".join(smi_links(g, 14 if g == 2 else 18) for g in range(4)))
    said = [item.numbers for item in found(cluster, Severity.WARNING, "links", 2)]
    assert {"least": 14, "most": 18} in said
    assert {"active": 14, "listed": 18} in said
    weak = next(link for link in links(cluster, LinkKind.NVSWITCH) if link.a == "gpu2")
    assert (weak.count, weak.state, weak.bytes_per_s) == (14, LinkState.DEGRADED, 14 * 25e9)
    others = [link for link in links(cluster, LinkKind.NVSWITCH) if link.a != "gpu2"]
    assert all(link.count == 18 and link.state is LinkState.UP for link in others)


def test_a_link_below_its_speed_is_degraded():
    cluster = probe(
        text("h200x4/nvidia_smi_topo_m.txt"), "".join(smi_links(g, 18, rate="13.281 GB/s") for g in range(4))
    )
    assert found(cluster, Severity.WARNING, "slow_links")
    for link in links(cluster, LinkKind.NVSWITCH):
        assert link.state is LinkState.DEGRADED
        assert link.bytes_per_s == pytest.approx(18 * 13.281e9)


def test_far_ends_decide_between_switch_and_cable():
    pair = "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"
    cables = probe(pair)
    assert links(cables, LinkKind.NVLINK)
    assert found(cables, Severity.INFO, "assumed_cables")
    hub = probe(pair, text("topo/nvlink_status/h100_gpu0_nvlink_R_remote.txt"))
    assert len(links(hub, LinkKind.NVSWITCH)) == 2
    assert not found(hub, Severity.INFO, "assumed_cables")


def test_missing_peer_access():
    cluster = probe(matrix("48_"), text("topo/p2p/4gpu_crossed_nv4_p2p_rw.txt"))
    (denied,) = found(cluster, Severity.WARNING, "p2p")
    assert "CNS" in denied.why
    assert "0-1" in denied.why
    broken = probe("\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n\n\tGPU0\tGPU1\nGPU0\tX\tNS\nGPU1\tNS\tX\n")
    assert found(broken, Severity.ERROR, "p2p")


def test_seven_of_eight_gpus():
    lines = [line.split() for line in matrix("51_").splitlines()]
    seven = "\n".join("\t".join(line[:8]) for line in lines[:8]).replace("\tGPU6\tGPU7", "\tGPU6")
    header = "\t" + "\t".join(f"GPU{gpu}" for gpu in range(7))
    cluster = probe(header + "\n" + seven.split("\n", 1)[1])
    assert found(cluster, Severity.WARNING, "missing_gpu")


def test_link_errors_and_mixed_models():
    cluster = probe(
        "GPU 0: NVIDIA H200 (UUID: GPU-0)\n\t Link 0: Replay Errors: 12\nGPU 1: NVIDIA RTX A6000 (UUID: GPU-1)\n"
    )
    assert [item.numbers for item in found(cluster, Severity.WARNING, "link_errors", 0)] == [{"errors": 12}]
    assert found(cluster, Severity.WARNING, "mixed")
    assert {gpu.kind for gpu in node(cluster).gpus} == {"h200-sxm", "rtx-a6000"}


def test_nvlinks_that_end_at_their_own_gpu_join_nobody():
    cluster = probe((NCCL / "azure_ncv4-topo.xml").read_text())
    assert found(cluster, Severity.WARNING, "self_links")
    assert islands(node(cluster)) == []


def test_mp_says_nothing_about_nvlink():
    mp = "$ nvidia-smi topo -mp\n\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n"
    cluster = probe(mp)
    assert found(cluster, Severity.INFO, "reading_without_nvlink")
    assert not found(cluster, Severity.ERROR)
